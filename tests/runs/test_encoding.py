"""Rows of tokens: only targets are trained on, dropped examples are counted, packing changes no example."""

from __future__ import annotations

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nalora
from nalora.control.tokens import IGNORED_LABEL
from nalora.runs.encoding import Collator, Encoder, encode, join
from nalora.runs.token_rows import DerivedRows, StoredRows, packed_rows
from nalora.tasks import Example

TOKENIZER = tiny.tokenizer()
TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(TEXT, TEXT)
def test_labels_are_the_target_and_its_end(prompt, target):
    row = Encoder(TOKENIZER).row(Example("a", prompt, target))
    trained = [(i, label) for i, label in enumerate(row["labels"]) if label != IGNORED_LABEL]
    assert [label for _, label in trained] == [*TOKENIZER(target).input_ids, TOKENIZER.eos_token_id]
    assert all(row["input_ids"][i] == label for i, label in trained)
    assert row["input_ids"][: trained[0][0]] == TOKENIZER(prompt).input_ids


def turns(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def closing_tokenizer():
    """One that closes every text, as T5's does."""
    from tokenizers.processors import TemplateProcessing

    closing = tiny.tokenizer()
    closing._tokenizer.post_processor = TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", closing.eos_token_id)]
    )
    return closing


def test_a_tokenizer_that_closes_every_text_does_not_close_a_prompt():
    closing = closing_tokenizer()
    assert closing("ab").input_ids[-1] == closing.eos_token_id
    row = Encoder(closing).row(Example("a", "ab", "c"))
    assert row["input_ids"].count(closing.eos_token_id) == 1
    assert Encoder(closing, "seq2seq").row(Example("a", "ab", "c"))["input_ids"][-1] == closing.eos_token_id


def test_chat_style_uses_the_template():
    chat = tiny.tokenizer()
    chat.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    encoder = Encoder(chat, style="chat")
    assert chat.decode(encoder.prompt(turns("hi"))) == "[user]hi[assistant]"
    assert chat.decode(encoder.prompt(turns("hi", "yes", "more"))) == "[user]hi[assistant]yes[user]more[assistant]"
    with pytest.raises(nalora.NALoRAError, match="without a chat template"):
        Encoder(TOKENIZER, style="chat")


def test_what_does_not_fit_is_counted():
    examples = [Example(str(n), "p" * n, "target") for n in (2, 10, 30)]
    dropped = encode(examples, Encoder(TOKENIZER), 12)
    assert (len(dropped.rows), dropped.dropped, dropped.truncated) == (1, 2, 0)
    cut = encode(examples, Encoder(TOKENIZER), 12, overlong="truncate")
    # Of the last one nothing but prompt would be left.
    assert (len(cut.rows), cut.dropped, cut.truncated) == (2, 1, 1)
    assert max(len(row["input_ids"]) for row in cut.rows) == 12
    assert cut.target_tokens == 7 + 2
    with pytest.raises(nalora.NALoRAError, match="raise max_length"):
        encode(examples, Encoder(TOKENIZER), 3)


def test_the_reported_examples_are_those_trained_on():
    examples = [Example(str(n), "p" * n, "target") for n in (2, 10, 3, 30)]
    rows = encode(examples, Encoder(TOKENIZER), 12)
    assert (rows.examples, rows.dropped) == (2, 2)
    packed = encode(examples, Encoder(TOKENIZER), 28, packing=True, limit=3)
    assert (packed.examples, len(packed.rows), packed.dropped) == (3, 2, 0)


def test_a_limit_is_of_examples_that_fit():
    examples = [Example(str(n), "p" * n, "target") for n in (20, 2, 30, 3, 4)]
    rows = encode(examples, Encoder(TOKENIZER), 12, limit=2)
    assert [len(row["input_ids"]) for row in rows.rows] == [2 + 7, 3 + 7]
    assert (rows.examples, rows.dropped) == (2, 2)
    assert len(encode(examples, Encoder(TOKENIZER), 12, limit=5).rows) == 3


def test_a_cut_input_of_an_encoder_keeps_its_closing_token():
    closing = closing_tokenizer()
    end = closing.eos_token_id
    examples = [
        Example("long input", "p" * 9, "t"),
        Example("long target", "p", "target!"),
        Example("both fit", "p", "t"),
    ]
    long_input, long_target, short = encode(examples, Encoder(closing, "seq2seq"), 6, overlong="truncate").rows
    p, *target = closing("ptarget!", add_special_tokens=False).input_ids
    assert long_input == {"input_ids": [p] * 5 + [end], "labels": [target[0], end]}
    # A truncated target has no EOS to train on.
    assert long_target == {"input_ids": [p, end], "labels": target[:6]}
    assert short["input_ids"] == [p, end]
    # A tokenizer that closes nothing has nothing to keep.
    (row,) = encode(examples[:1], Encoder(TOKENIZER, "seq2seq"), 6, overlong="truncate").rows
    assert row["input_ids"] == [p] * 6


def test_padding_is_masked_and_not_trained_on():
    rows = [{"input_ids": [5, 6, 7], "labels": [IGNORED_LABEL, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    batch = Collator(0)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORED_LABEL, 6, 7], [8, IGNORED_LABEL, IGNORED_LABEL]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_examples_give_the_loss_of_separate_rows(attention):
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        attn_implementation=attention, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double()
    encoder = Encoder(TOKENIZER)
    rows = [encoder.row(Example(str(n), "question"[:n], "answer"[:n])) for n in (3, 5, 4, 6)]
    packed = packed_rows(rows, [len(row["input_ids"]) for row in rows], 28, join)
    assert [len(row["input_ids"]) for row in packed] == [7 + 11 + 9, 13]

    def loss(batches):
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits[:, :-1]
            total += torch.nn.functional.cross_entropy(
                logits.reshape(-1, logits.shape[-1]), batch["labels"][:, 1:].reshape(-1), reduction="sum"
            )
        return total

    alone = loss([Collator(0)([row]) for row in rows])
    together = loss([Collator(0)(list(packed))])
    torch.testing.assert_close(together, alone)


ROWS = st.lists(
    st.fixed_dictionaries(
        {name: st.lists(st.integers(IGNORED_LABEL, 2**31 - 1), max_size=5) for name in ("input_ids", "labels")}
    ),
    min_size=1,
    max_size=8,
)


@given(ROWS, st.data())
def test_stored_rows_are_returned_unchanged(rows, data):
    stored = StoredRows(rows)
    assert list(stored) == rows
    assert stored.tokens == sum(len(ids) for row in rows for ids in row.values())
    index = data.draw(st.integers(-len(rows), len(rows) - 1))
    assert stored[index] == rows[index]
    assert stored[index:] == rows[index:]
    with pytest.raises(IndexError):
        stored[len(rows)]


def test_large_data_sets_are_tokenised_when_needed(monkeypatch):
    examples = [Example(str(n), "p" * n, "target") for n in (2, 30, 5, 3, 9, 4)]
    options = [{}, {"overlong": "truncate"}, {"packing": True}, {"limit": 2}]
    before = [encode(examples, Encoder(TOKENIZER), 14, **more) for more in options]
    monkeypatch.setattr("nalora.runs.encoding.MOST_STORED", 20)
    for stored, more in zip(before, options, strict=True):
        derived = encode(examples, Encoder(TOKENIZER), 14, **more)
        assert isinstance(derived.rows, DerivedRows)
        assert list(derived.rows) == list(stored.rows)
        assert derived.target_tokens == stored.target_tokens
