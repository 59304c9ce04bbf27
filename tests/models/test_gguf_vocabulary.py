"""Tokenizers are recognised by what they do, and refused by name where llama.cpp has no counterpart."""

from __future__ import annotations

import json

import pytest
import tiny
import transformers
from exported_models import SPECIAL, byte_level, sentencepiece
from tokenizers import Tokenizer

import nalora
from nalora.models.gguf_vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, vocabulary_of


def changed(tokenizer, change):
    """The tokenizer with another tokenizer.json."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    change(described)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(described)))


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_a_pre_tokenizer_is_known_by_its_expression(pre):
    made = vocabulary_of(byte_level(pre), 448)
    assert (made.model, made.pre, made.scores) == ("gpt2", pre, [])
    assert made.tokens[:4] == list(SPECIAL[:4])
    assert made.types[:4] == [CONTROL] * 4
    assert made.types[4] == NORMAL
    assert made.types[400:] == [CONTROL] + [UNUSED] * 47


def test_ignored_merges_are_part_of_a_pre_tokenizer():
    assert vocabulary_of(byte_level("llama-bpe", ignore_merges=False), 448).pre == "smaug-bpe"
    with pytest.raises(nalora.NALoRAError, match="has no name for"):
        vocabulary_of(byte_level("qwen2", ignore_merges=True), 448)


def test_what_llama_cpp_has_no_name_for_is_refused():
    with pytest.raises(nalora.NALoRAError, match=r"has no name for.*\[a-z\]\+"):
        vocabulary_of(byte_level("[a-z]+|."), 448)
    with pytest.raises(nalora.NALoRAError, match="the type WordLevel"):
        vocabulary_of(tiny.tokenizer(), 448)
    stripping = changed(byte_level("gpt-2"), lambda each: each["added_tokens"][1].update(lstrip=True))
    with pytest.raises(nalora.NALoRAError, match="'<s>' with lstrip"):
        vocabulary_of(stripping, 448)
    with pytest.raises(nalora.NALoRAError, match="401 tokens and 300 rows"):
        vocabulary_of(byte_level("gpt-2"), 300)


@pytest.mark.parametrize(("form", "prefix", "notices"), [
    ("gemma", False, 0), ("llama", True, 0), ("never", False, 0), ("always", True, 1), ("first", True, 1),
])  # fmt: skip
def test_sentencepiece_is_known_in_every_form(form, prefix, notices):
    tokenizer = sentencepiece(form)
    made = vocabulary_of(tokenizer, 640)
    assert (made.model, made.merges, made.space_prefix, len(made.notices)) == ("llama", [], prefix, notices)
    assert len(made.tokens) == len(made.types) == len(made.scores) == 640
    assert [made.types[index] for index in (0, 1, 4, 259)] == [UNKNOWN, CONTROL, BYTE, BYTE]
    assert made.adds == {"bos": True, "eos": False}


def test_a_piece_that_is_merged_first_has_the_higher_score():
    tokenizer = sentencepiece()
    made = vocabulary_of(tokenizer, 640)
    pairs = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    pieces = [piece for piece in map("".join, pairs) if piece not in SPECIAL]
    scores = [made.scores[made.tokens.index(piece)] for piece in pieces]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) > 20


@pytest.mark.parametrize("change", ["left out", "out of order"])
def test_merges_that_no_scores_give_are_refused(change):
    """llama.cpp merges any two neighbours that form a token, so a merge that is missing or out of order would show."""

    def change_merges(described):
        merges = described["model"]["merges"]
        pieces = ["".join(pair) for pair in merges]
        twice = next(i for i, piece in enumerate(pieces) if pieces.count(piece) > 1 and piece not in SPECIAL)
        pair = merges.pop(twice)
        if change == "out of order":
            merges.append(pair)

    with pytest.raises(nalora.NALoRAError, match="SentencePiece's scores do not follow"):
        vocabulary_of(changed(sentencepiece(), change_merges), 640)


def test_added_tokens_are_found_in_any_text_if_they_are_no_special_ones():
    tokenizer = byte_level("qwen2", nfc=True)
    tokenizer.add_tokens(["<tool>"])
    made = vocabulary_of(tokenizer, 448, ends=[2, 4, 4])
    assert made.types[made.tokens.index("<tool>")] == USER_DEFINED
    assert "NFC" in made.notices[0]
    assert "eot" not in made.special
    assert vocabulary_of(tokenizer, 448, ends=[2, 4]).special["eot"] == 4
