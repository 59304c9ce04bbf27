"""Rows of outputs: question, expected answer, output and scores, also of evaluations that were stopped or are old."""

from __future__ import annotations

import json
import math

from nalora.evaluation.answers import LOSS, Answered, asked, read_answers, read_scores
from nalora.tasks import Example


def write_rows(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_question_is_shown_without_its_template_and_a_conversation_whole():
    example = Example("a", "Q: 1 + 1?\nA: ", "2", question="1 + 1?")
    assert asked(example) == {"id": "a", "question": "1 + 1?", "expected": "2"}
    turns = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"},
             {"role": "user", "content": "and?"}, {"role": "assistant", "content": "yes"})  # fmt: skip
    talk = Example(
        "b", "User: hi\n\nAssistant: hello\n\nUser: and?\n\nAssistant: ", "yes", question="and?", messages=turns
    )
    assert asked(talk)["question"].startswith("User: hi")
    two = Example("c", "### first", "", follow_ups=("### second",), question="first", further_questions=("second",))
    assert asked(two)["follow_ups"] == ["second"]


def test_rows_without_questions_and_scores_of_their_own_are_read(tmp_path):
    write_rows(tmp_path / "outputs.jsonl", [{"id": "1", "outputs": ["x"], "tokens": 1, "finished": True}])
    assert read_answers(tmp_path) == [Answered("1", None, None, ("x",), {})]
    write_rows(tmp_path / "scores.jsonl", [{"id": "1", "scores": {"accuracy": 1.0}}])
    assert read_answers(tmp_path) == [Answered("1", None, None, ("x",), {"accuracy": 1.0})]


def test_damaged_rows_are_left_out(tmp_path):
    rows = [{"id": "1", "outputs": "x"}, {"id": "2", "outputs": ["y"], "question": 5, "scores": []}, {"outputs": None}]
    write_rows(tmp_path / "outputs.jsonl", rows)
    write_rows(tmp_path / "losses.jsonl", [{"id": "1", "loss": "high", "tokens": 1}, {"id": "2", "tokens": 0}])
    assert read_answers(tmp_path) == [Answered("2", None, None, ("y",), {})]
    assert read_scores(tmp_path, LOSS) == {}
    assert read_answers(tmp_path / "nothing") == []


def test_scores_of_the_first_questions(tmp_path):
    write_rows(tmp_path / "scores.jsonl", [{"id": str(n), "scores": {"f1": n / 4}} for n in range(4)])
    assert read_scores(tmp_path, "f1", 2) == {"0": (0.0, 1.0), "1": (0.25, 1.0)}
    assert read_scores(tmp_path, "mcc") == {}
    write_rows(
        tmp_path / "losses.jsonl", [{"id": "0", "loss": 6.0, "tokens": 3}, {"id": "1", "loss": None, "tokens": 2}]
    )
    losses = read_scores(tmp_path, LOSS)
    assert losses["0"] == (6.0, 3.0)
    assert math.isnan(losses["1"][0])
