"""Formats of training data: recognised by their columns, overridable, and read as conversations."""

from __future__ import annotations

import pytest

from nalora.errors import NALoRAError
from nalora.tasks.data_formats import reader_for

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def conversation(row, **options):
    return reader_for("data.jsonl", row, **options)(row)


def turns(row, **options):
    return [(message["role"], message["content"]) for message in conversation(row, **options).messages]


@pytest.mark.parametrize(
    ("row", "name", "expected"),
    [
        ({"prompt": "p", "completion": "c"}, "prompt/completion", [("user", "p"), ("assistant", "c")]),
        ({"query": "p", "response": "c"}, "prompt/completion", [("user", "p"), ("assistant", "c")]),
        (
            {"system": "s", "prompt": "p", "completion": "c"},
            "prompt/completion",
            [("system", "s"), ("user", "p"), ("assistant", "c")],
        ),
        (
            {"instruction": "i", "input": "x", "output": "o"},
            "instruction/output",
            [("user", "i\n\nx"), ("assistant", "o")],
        ),
        ({"instruction": "i", "input": "", "output": "o"}, "instruction/output", [("user", "i"), ("assistant", "o")]),
        ({"question": "q", "answer": 5}, "question/answer", [("user", "q"), ("assistant", "5")]),
        ({"Body": "b", "Question": "q", "Answer": 1.5}, "question/answer", [("user", "b\n\nq"), ("assistant", "1.5")]),
        ({"messages": CHAT}, "messages", [("user", "Hi"), ("assistant", "Hello")]),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "s"},
            "messages",
            [("system", "s"), ("user", "Hi"), ("assistant", "Hello")],
        ),
        (
            {"messages": CHAT, "tools": [{"name": "search"}]},
            "messages",
            [("system", '[{"name": "search"}]'), ("user", "Hi"), ("assistant", "Hello")],
        ),
    ],
)
def test_formats_are_recognised_by_their_columns(row, name, expected):
    assert reader_for("data.jsonl", row).format.name == name
    assert turns(row) == expected


def test_text_alone_has_no_messages():
    assert conversation({"text": "Once", "url": "x"}) == ((), "Once")


def test_tool_calls_and_parts_stay_as_text():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    result = {"role": "tool", "content": "3"}
    assert turns({"messages": [parts, call, result, CHAT[1]]}) == [
        ("user", "ab"), ("assistant", '[{"name": "add"}]'), ("tool", "3"), ("assistant", "Hello"),
    ]  # fmt: skip


def test_columns_can_be_named():
    row = {"title": "x", "abstract": "q", "summary": "a"}
    assert turns(row, columns={"prompt": "abstract", "completion": "summary"}) == [("user", "q"), ("assistant", "a")]
    named = {"question": "q", "answer": "a", "text": "t"}
    assert conversation(named, format="text").text == "t"


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"foo": "x"}, {}, "found the columns foo; expected those of one format: messages"),
        ({"question": "x", "answer": "y"}, {"format": "mesages"}, "did you mean messages"),
        ({"question": "x", "answer": "y"}, {"columns": {"question": "qestion"}}, "did you mean question"),
    ],
)
def test_what_cannot_be_read_is_refused(row, options, message):
    with pytest.raises(NALoRAError, match=message):
        reader_for("data.jsonl", row, **options)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "answer": None}, "'answer' is missing"),
        ({"question": " ", "answer": "a"}, "'question' is empty"),
        ({"question": ["q"], "answer": "a"}, "'question' is list, no text"),
        ({"question": True, "answer": "a"}, "'question' is bool, no text"),
        ({"messages": []}, "no list of messages"),
        ({"messages": ["Hi"]}, "message 0 is no object"),
        ({"messages": CHAT[:1]}, "no message of the assistant"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "the role 'narrator'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, CHAT[1]]}, "parts that are no text"),
        ({"messages": [{"role": "user"}, CHAT[1]]}, "message 0 has no text"),
    ],
)
def test_rows_that_cannot_be_read_say_why(row, message):
    good = {"messages": CHAT} if "messages" in row else {"question": "q", "answer": "a"}
    with pytest.raises(ValueError, match=message):
        reader_for("data.jsonl", good)(row)
