"""Prompts from files of every format, with and without answers, and where they are wrong."""

from __future__ import annotations

import json

import pytest

import nalora
from nalora.tasks.example_rows import ExampleRows, checked_rows
from nalora.tasks.prompts import PromptRows

USER = {"role": "user", "content": "q"}
ROWS = {
    "messages": ({"messages": [USER, {"role": "assistant", "content": "a"}]}, "messages", "User: q\n\nAssistant: "),
    "prompt": ({"prompt": "q", "completion": "a"}, "prompt", "q"),
    "instruction": ({"instruction": "q", "output": "a"}, "instruction", None),
    "question": ({"question": "q", "answer": "a"}, "question", "Q: q\nA: "),
}


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ROWS)
def test_a_prompt_is_what_training_makes_of_the_same_row(tmp_path, name):
    row, column, prompt = ROWS[name]
    file = written(tmp_path / "rows.jsonl", row)
    (trained,) = ExampleRows(checked_rows(file, "train", None, None, lambda *_: None), "train")
    (asked,) = PromptRows(file)
    assert (asked.prompt, asked.question, asked.messages, asked.target) == (
        trained.prompt, "q", trained.messages, "a"
    )  # fmt: skip
    assert prompt in (None, asked.prompt)
    alone = {column: row[column][:1] if column == "messages" else row[column]}
    (without,) = PromptRows(written(tmp_path / "alone.jsonl", alone))
    assert (without.prompt, without.target, without.messages[:-1]) == (asked.prompt, "", asked.messages[:-1])


def test_lines_of_text_and_a_column_of_texts_are_prompts(tmp_path):
    (tmp_path / "lines.txt").write_text("\ufeffone\r\n\n  two \n", encoding="utf-8")
    lines = PromptRows(str(tmp_path / "lines.txt"), system="s")
    assert [example.prompt for example in lines] == ["s\n\none", "s\n\n  two "]
    assert lines[0].messages[:2] == ({"role": "system", "content": "s"}, {"role": "user", "content": "one"})
    assert [example.id for example in lines[:2]] == ["0", "1"]
    (texts,) = PromptRows(written(tmp_path / "texts.jsonl", {"text": "Once upon"}))
    assert (texts.prompt, texts.question) == ("Once upon", "Once upon")
    (tmp_path / "latin.txt").write_bytes(b"a\n\xe9\n")
    with pytest.raises(nalora.NALoRAError, match="line 2: the byte 0xe9"):
        PromptRows(str(tmp_path / "latin.txt"))


def test_a_wrapping_is_for_single_questions(tmp_path):
    turns = [USER, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
    file = written(tmp_path / "rows.jsonl", {"messages": [USER]}, {"messages": turns})
    first, second = PromptRows(file, wrap=lambda question: f"<{question}>")
    assert first.prompt == "<q>"
    assert second.prompt == "User: q\n\nAssistant: a\n\nUser: r\n\nAssistant: "
    assert second.question == "r"


def test_other_columns_and_what_cannot_be_read(tmp_path):
    file = written(tmp_path / "rows.jsonl", {"body": "q"}, {"body": ""}, {"body": 3})
    with pytest.raises(nalora.NALoRAError, match=r"the columns body; .*--columns prompt=your_column"):
        PromptRows(file)
    with pytest.raises(nalora.NALoRAError, match=r"rows.jsonl:2: 'body' is empty"):
        PromptRows(file, columns={"prompt": "body"})
    (one,) = PromptRows(written(tmp_path / "one.jsonl", {"body": "q"}), columns={"prompt": "body"})
    assert one.prompt == "q"
