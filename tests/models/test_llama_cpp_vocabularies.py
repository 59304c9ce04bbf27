"""Published vocabularies (Llama 2 and 3, Qwen 2, Gemma), written again by nalora, make the same tokens in llama.cpp."""

from __future__ import annotations

import json

import gguf
import pytest
import transformers
from exported_models import EXPRESSIONS, TRICKY, model_for
from llama_cpp_environment import asked, interpreter, vocabularies
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from nalora.models.gguf_architectures import Architecture
from nalora.models.gguf_vocabulary import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, vocabulary_of
from nalora.models.gguf_writer import write_gguf

pytestmark = pytest.mark.slow
RUNS = [f"a{c * n}b{c * (n % 7)}c" for c in " \n\t" for n in (1, 2, 3, 5, 8, 16, 30, 31, 32, 33, 62, 63, 70)]
# llama.cpp takes Qwen's ordinary token "</s>" for the end of a text, because of its name.
KNOWN = {"qwen2": ["<s>not</s> special <|turn|>user\nhi"]}


def published(name: str) -> transformers.PreTrainedTokenizerFast:
    reader = gguf.GGUFReader(vocabularies() / f"ggml-vocab-{name}.gguf")

    def field(key):
        entry = reader.fields.get(f"tokenizer.ggml.{key}")
        return entry and entry.contents()

    tokens, types = field("tokens"), field("token_type")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [(merge[: (cut := merge.find(" ", 1))], merge[cut + 1 :]) for merge in field("merges") or ()]
    if name in EXPRESSIONS:
        made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name == "llama-bpe"))
        split = pre_tokenizers.Split(Regex(EXPRESSIONS[name]), "isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    else:
        scores = field("scores")
        by_score = sorted(
            (t for t, i in vocabulary.items() if types[i] == NORMAL), key=lambda t: -scores[vocabulary[t]]
        )
        merges = merges or [
            (token[:cut], token[cut:])
            for token in by_score
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]
        made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        replaced = normalizers.Replace(" ", "▁")
        prefixed = normalizers.Sequence([normalizers.Prepend("▁"), replaced])
        made.normalizer = prefixed if name == "llama-spm" else replaced
    special = [token for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, UNKNOWN)]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    own = [token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    made.add_tokens([AddedToken(token, normalized=False) for token in own])
    ends = {f"{end}_token": tokens[field(f"{end}_token_id")] for end in ("bos", "eos")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **ends)


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "llama-spm", "gemma-4"])
def test_published_vocabularies_make_the_same_tokens(name, tmp_path):
    tokenizer = published(name)
    model = model_for("llama", len(tokenizer), num_hidden_layers=1, hidden_size=32, head_dim=8)
    vocabulary = vocabulary_of(tokenizer, len(tokenizer))
    write_gguf(tmp_path / "m.gguf", Architecture(model.config), vocabulary, model.state_dict())
    theirs = (vocabularies() / f"ggml-vocab-{name}.gguf.inp").read_text(encoding="utf-8")
    texts = [*TRICKY, *RUNS, *theirs.split("\n__ggml_vocab_test__\n")]
    answers = asked(interpreter(), tmp_path, [{"file": str(tmp_path / "m.gguf"), "texts": texts, "ids": []}])
    found = json.loads(str(answers["0.tokens"]))
    expected = [tokenizer(text).input_ids for text in texts]
    assert [text for text, a, b in zip(texts, found, expected, strict=True) if a != b] == KNOWN.get(name, [])
