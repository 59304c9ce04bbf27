"""Tokenizers of transformers as llama.cpp reads them: tokens, their types, merges or scores, and special tokens.

llama.cpp has two kinds that the converted architectures use. `gpt2` merges bytes within the pieces of a regular
expression, which the file names ("qwen2"); expressions are recognised by their text in tokenizer.json, so that a
vocabulary of one's own works as the published one does. `llama` is SentencePiece's: two neighbours are merged if their
text is a token, the one of the highest score first.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, field
from typing import Any

from nalora.errors import NALoRAError, shortened
from nalora.models.gguf_tokenizer import added_ends

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# llama.cpp's name by regular expression and by whether a piece that is a token is left whole (`ignore_merges`).
_EXPRESSIONS = {
    (rf"{_WORDS}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}", True): "llama-bpe",
    (rf"{_WORDS}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}", False): "smaug-bpe",
    (rf"{_WORDS}\p{{L}}+|\p{{N}}|{_REST}", False): "qwen2",
    (rf"{_WORDS}[\p{{L}}\p{{M}}]+|\p{{N}}|{_MARKS}", False): "qwen35",
}
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPACE = "▁"
_RUN = re.compile(rf"{_SPACE}+|\n+|\t+")


@dataclass
class Vocabulary:
    """What a GGUF file holds of a tokenizer.

    Args:
        model: llama.cpp's kind, ``gpt2`` or ``llama``.
        pre: its name of the pre-tokenizer.
        tokens: the text of each token by its id.
        types: the type of each token by its id.
        merges: pairs of tokens in the order of merging, for ``gpt2``.
        scores: by id, for ``llama``: a higher one is merged first.
        space_prefix: whether a space is put before every text.
        special: ids of special tokens by llama.cpp's names.
        adds: whether ``bos`` and ``eos`` are added to every text.
        notices: in what the tokens of rare texts differ.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    space_prefix: bool = False
    special: dict[str, int] = field(default_factory=dict)
    adds: dict[str, bool] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


def vocabulary_of(tokenizer: Any, rows: int, ends: list[int] | None = None) -> Vocabulary:
    """Return the vocabulary of a tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers.
        rows: the number of rows of the model's embedding, which the file must have tokens for.
        ends: tokens at which generation stops, of `generation_config.json`.

    Raises:
        NALoRAError: a tokenizer of another kind, or one with a pre-tokenizer that llama.cpp has no name for.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = json.loads(backend.to_str()) if backend is not None else {"model": {"type": "slow"}}
    model = described["model"]
    _check(model["type"] == "BPE", f"a tokenizer of the type {model['type']}", "one that merges pairs (BPE)")
    affixed = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    _check(not affixed, f"subwords marked by {affixed!r}", "tokens without marks")
    made = _sentencepiece(described) if model["byte_fallback"] else _byte_level(described)
    _fill_tokens(made, described, rows)
    # Some tokenizers give padding the token that ends a text, so padding is named last.
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unk_token_id", "pad": "pad_token_id"}
    ids = {name: getattr(tokenizer, attribute) for name, attribute in names.items()}
    made.special = {name: token for name, token in ids.items() if token is not None}
    if len(others := [end for end in ends or () if end != made.special.get("eos")]) == 1:
        made.special["eot"] = others[0]
    made.adds = added_ends(tokenizer)
    return made


def _byte_level(described: dict[str, Any]) -> Vocabulary:
    normalizer = described["normalizer"]
    kind = normalizer and normalizer["type"]
    _check(kind in (None, "NFC"), f"the normalizer {kind}", "none, or NFC")
    pre = _pre_tokenizer(described)
    _check(
        pre is not None,
        f"a pre-tokenizer that it has no name for: {shortened(described['pre_tokenizer'], 300)}",
        "that of GPT-2, SmolLM, Llama 3, Qwen 2 or Qwen 3.5",
    )
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in described["model"]["merges"]]
    notices = ["in llama.cpp texts are not normalised to NFC, as they are by the tokenizer"] if kind else []
    return Vocabulary("gpt2", str(pre), [], [], merges=merges, notices=notices)


def _pre_tokenizer(described: dict[str, Any]) -> str | None:
    outer = described["pre_tokenizer"] or {"type": None}
    steps = outer["pretokenizers"] if outer["type"] == "Sequence" else [outer]
    ignore_merges = bool(described["model"].get("ignore_merges"))
    *before, last = steps
    if last["type"] != "ByteLevel" or last["add_prefix_space"] or len(before) > 1:
        return None
    if last["use_regex"]:
        digits = [step["type"] == "Digits" and step["individual_digits"] for step in before]
        return None if ignore_merges or not all(digits) else "smollm" if digits else "gpt-2"
    (split,) = before or [{"type": None}]
    if split["type"] != "Split" or split["behavior"] != "Isolated" or split["invert"]:
        return None
    return _EXPRESSIONS.get((split["pattern"].get("Regex"), ignore_merges))


def _sentencepiece(described: dict[str, Any]) -> Vocabulary:
    """Return a vocabulary with the scores of which SentencePiece's order of merging follows.

    A file has no merges for this kind: any two neighbours that form a token are merged. The result is the same only if
    the merges of tokenizer.json are all the pairs that form a token, sorted by that token.
    """
    model = described["model"]
    prefix, notices = _space_prefix(described)
    vocabulary = model["vocab"]
    # Added tokens are found in a text before anything is merged, so their own place in the order does not matter.
    added = {token["content"] for token in described["added_tokens"]}
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    made = [token for token in map("".join, pairs) if token not in added]
    ranks: dict[str, int] = {}
    for token in made:
        ranks.setdefault(token, len(ranks))
    # Gemma's runs of spaces, tabs and line ends have equal scores and are sorted by length, pair by pair. A run grows
    # from its left end in either program.
    single = [token for token in made if not _RUN.fullmatch(token)]
    in_order = all(ranks[one] <= ranks[other] for one, other in itertools.pairwise(single))
    possible = sum(
        token[:cut] in vocabulary and token[cut:] in vocabulary
        for token in vocabulary.keys() - added
        for cut in range(1, len(token))
    )
    _check(
        in_order and possible == len(made),
        f"{len(made):,} merges of which SentencePiece's scores do not follow ({possible:,} pairs form a token)",
        "the merges of a SentencePiece model, as those of Llama 2 and Gemma",
    )
    scores = [-float(ranks.get(token, len(vocabulary))) for token in _by_id(vocabulary)]
    return Vocabulary("llama", "default", [], [], scores=scores, space_prefix=prefix, notices=notices)


def _space_prefix(described: dict[str, Any]) -> tuple[bool, list[str]]:
    """Return whether a space is put before texts, and where llama.cpp puts one that the tokenizer does not."""
    normalizer, pre = described["normalizer"], described["pre_tokenizer"]
    steps = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    unused = pre is None or (pre["type"] == "Split" and pre["pattern"] == {"String": " "})
    if unused and steps == [replaces]:
        return False, []
    if unused and steps == [{"type": "Prepend", "prepend": _SPACE}, replaces]:
        return True, []
    if normalizer is None and pre and pre["type"] == "Metaspace" and pre["replacement"] == _SPACE and not pre["split"]:
        scheme = pre["prepend_scheme"]
        where = {"always": "before texts that begin with one", "first": "also after special tokens"}
        return scheme != "never", [f"in llama.cpp a space is put {where[scheme]}"] if scheme in where else []
    found = shortened({"normalizer": normalizer, "pre_tokenizer": pre}, 300)
    _check(False, f"a pre-tokenizer that it has no name for: {found}", "that of Llama 2 or Gemma")
    raise AssertionError


def _by_id(vocabulary: dict[str, int]) -> list[str]:
    """Return the tokens in the order of their ids; gaps are empty."""
    tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
    for token, index in vocabulary.items():
        tokens[index] = token
    return tokens


def _fill_tokens(made: Vocabulary, described: dict[str, Any], rows: int) -> None:
    added = {token["id"]: token for token in described["added_tokens"]}
    plain = described["model"]["vocab"]
    tokens = _by_id(plain | {token["content"]: index for index, token in added.items()})
    _check(len(tokens) <= rows, f"{len(tokens):,} tokens and {rows:,} rows of the embedding", "a row for each token")
    for token in added.values():
        odd = [flag for flag in ("lstrip", "rstrip", "single_word") if token[flag]]
        _check(not odd, f"the token {token['content']!r} with {', '.join(odd)}", "special tokens that match as written")
    made.types = [NORMAL] * len(tokens)
    for index, text in enumerate(tokens):
        if index in added:
            made.types[index] = CONTROL if added[index]["special"] else USER_DEFINED
            if text == described["model"]["unk_token"]:
                made.types[index] = UNKNOWN
        elif made.model == "llama" and _BYTE_TOKEN.fullmatch(text):
            made.types[index] = BYTE
        elif not text:
            made.types[index] = UNUSED
    # Embeddings are often padded to a multiple of 64 or 128 rows.
    made.tokens = [text or f"[PAD{index}]" for index, text in enumerate(tokens)]
    made.tokens += [f"[PAD{index}]" for index in range(len(tokens), rows)]
    made.types += [UNUSED] * (rows - len(tokens))
    if made.scores:
        made.scores += [-float(rows)] * (rows - len(made.scores))


def _check(holds: bool, found: str, expected: str) -> None:
    if not holds:
        fix = "export --to merged, and convert that folder with llama.cpp's own script if it knows the tokenizer"
        raise NALoRAError("the tokenizer in GGUF", found=found, expected=expected, fix=fix)
