"""The chat templates of Llama 3, Qwen 2.5 and 3 and Gemma as published: what is trained on, token by token.

The templates are the copies in the package trl, byte for byte those of the models. Expected rows are written here by
hand from the formats that the models document. Quick tests use a tokenizer of bytes with the models' special tokens,
slow ones the published tokenizers.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from published_tokenizers import SPECIAL, real, small

from nalora.control.tokens import IGNORED_LABEL
from nalora.errors import NALoRAError
from nalora.runs.encoding import Encoder
from nalora.tasks import Example

TEMPLATES = {
    "llama3": "llama", "qwen2_5": "qwen", "qwen3": "qwen", "qwen3_instruct_2507": "qwen", "gemma": "gemma",
    "gemma3": "gemma",
}  # fmt: skip
CHATS = {
    "one question": ["user:What is 6 and 6?", "assistant:It is 12."],
    "two questions": ["user:Hi", "assistant:Hello\n\nthere!", "user:What is 6 and 6?", "assistant:12"],
    "with a system message": ["system:Be short.", "user:What is 6 and 6?", "assistant:12"],
}
# The published ids of "Hello, world!".
KNOWN = {"llama": [9906, 11, 1917, 0], "qwen": [9707, 11, 1879, 0], "gemma": [9259, 236764, 1902, 236888]}
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


def messages(chat):
    return tuple(dict(zip(("role", "content"), turn.split(":", 1), strict=True)) for turn in chat)


def example(chat):
    turns = messages(chat)
    return Example("a", "", turns[-1]["content"], messages=turns)


@functools.cache
def template(name):
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def expected(name, chat):
    """The row's text in parts: (text, whether it is trained on)."""
    turns = [turn.split(":", 1) for turn in chat]
    if name == "llama3":
        parts = [("<|begin_of_text|>", False)]
        for role, text in turns:
            parts += [(f"<|start_header_id|>{role}<|end_header_id|>\n\n", False)]
            parts += [(f"{text}<|eot_id|>", role == "assistant")]
        return parts
    if name.startswith("gemma"):
        parts = [("<bos>", False)]
        if turns[0][0] == "system":  # Gemma 3 writes it before the first question
            turns = [["user", f"{turns[0][1]}\n\n{turns[1][1]}"], *turns[2:]]
        for role, text in turns:
            parts += [(f"<start_of_turn>{'model' if role == 'assistant' else role}\n", False)]
            parts += [(f"{text}<end_of_turn>\n", role == "assistant")]
        return parts
    if name == "qwen2_5" and turns[0][0] != "system":
        turns = [["system", QWEN_SYSTEM], *turns]
    parts = []
    for number, (role, text) in enumerate(turns):
        # Only the last answer has a thought, here an empty one.
        thought = "<think>\n\n</think>\n\n" if name == "qwen3" and number == len(turns) - 1 else ""
        parts += [(f"<|im_start|>{role}\n", False), (f"{thought}{text}<|im_end|>\n", role == "assistant")]
    return parts


def check_rows(tokenizer, name, chat):
    tokenizer.chat_template = template(name)
    encoder = Encoder(tokenizer, style="chat")
    row = encoder.row(example(chat))
    tokens = [
        (token, trained)
        for text, trained in expected(name, chat)
        for token in tokenizer(text, add_special_tokens=False).input_ids
    ]
    assert row["input_ids"] == [token for token, _ in tokens]
    assert row["labels"] == [token if trained else IGNORED_LABEL for token, trained in tokens]
    # Every answer has a trained end of turn, and generation stops at it and starts where the last answer starts.
    special = SPECIAL[TEMPLATES[name]]
    end = tokenizer.convert_tokens_to_ids(special[-1])
    assert row["labels"].count(end) == sum(turn.startswith("assistant") for turn in chat)
    assert end in encoder.end_tokens
    prompt = encoder.prompt(messages(chat)[:-1])
    assert prompt == row["input_ids"][: len(prompt)]
    assert row["input_ids"].count(tokenizer.bos_token_id) == (special[0] is not None)


CASES = [(n, c) for n in TEMPLATES for c in CHATS if (n, c) != ("gemma", "with a system message")]


@pytest.mark.parametrize(("name", "chat"), CASES)
def test_rows_of_published_templates(name, chat):
    check_rows(small(TEMPLATES[name]), name, CHATS[chat])


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2"])
def test_a_template_with_today_s_date_trains_on_answers_alone(name):
    tokenizer = small("llama")
    tokenizer.chat_template = template(name)
    chat = CHATS["two questions"]
    row = Encoder(tokenizer, style="chat").row(example(chat))
    applied = tokenizer.apply_chat_template([*messages(chat)], return_dict=True)["input_ids"]
    assert row["input_ids"] == [*applied]
    trained = [label for label in row["labels"] if label != IGNORED_LABEL]
    assert tokenizer.decode(trained) == "Hello\n\nthere!<|eot_id|>12<|eot_id|>"


@pytest.mark.slow
@pytest.mark.parametrize("model", SPECIAL)
def test_rows_of_published_templates_with_published_tokenizers(model, tmp_path):
    tokenizer = real(model, tmp_path)
    assert tokenizer("Hello, world!", add_special_tokens=False).input_ids == KNOWN[model]
    text = "Hello, world! 1234567 été\n\n\tif x:"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    for name, chat in CASES:
        if TEMPLATES[name] == model:
            check_rows(tokenizer, name, CHATS[chat])


@pytest.mark.parametrize(
    ("name", "chat", "found", "fix"),
    [
        ("gemma", CHATS["with a system message"], "a system message, which the model's chat template", "move its text"),
        ("gemma", ["user:a", "user:b", "assistant:c"], "fails on the turns user, user, assistant", "join messages"),
        ("gemma3", ["assistant:a", "user:b", "assistant:c"], "fails on the turns", "join messages"),
        (
            "qwen3",
            ["user:a", "assistant:<think>\nb\n</think>\n\nc", "user:d", "assistant:e"],
            "changes the text of turn 2",
            "remove thoughts from all answers but the last",
        ),
    ],
)
def test_conversations_that_a_template_does_not_take_are_refused(name, chat, found, fix):
    tokenizer = small(TEMPLATES[name])
    tokenizer.chat_template = template(name)
    with pytest.raises(NALoRAError) as refused:
        Encoder(tokenizer, style="chat").row(example(chat))
    assert found in refused.value.found
    assert refused.value.fix.startswith(fix)
    assert "\n" not in str(refused.value)


def test_a_thought_in_the_last_answer_is_trained_on():
    tokenizer = small("qwen")
    tokenizer.chat_template = template("qwen3")
    row = Encoder(tokenizer, style="chat").row(example(["user:a", "assistant:<think>\nb\n</think>\n\nc"]))
    trained = [label for label in row["labels"] if label != IGNORED_LABEL]
    assert tokenizer.decode(trained) == "<think>\nb\n</think>\n\nc<|im_end|>\n"
