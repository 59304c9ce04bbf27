"""The answers of an evaluation, as its files hold them: question, expected answer, outputs and scores of every row.

While an evaluation runs, outputs and scores are appended to two files, so that a kill loses no finished row. When all
are scored, `outputs.jsonl` is written again with everything in one row. Rows of version 0.1, and those of an
evaluation that was stopped, have no scores there and are completed from `scores.jsonl`.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nalora.runs.folder import read_jsonl
from nalora.tasks import Example, Scores

# The name of the mean −log p of the expected answers among the measures.
LOSS = "loss of the answers"
# The score of one question and its weight: a measure is Σ score / Σ weight over questions.
Weighted = tuple[float, float]


@dataclass(frozen=True)
class Answered:
    """A question with a model's answer; question and expected are None where version 0.1 did not record them."""

    id: str
    question: str | None
    expected: str | None
    outputs: tuple[str, ...]
    scores: Mapping[str, float] = field(default_factory=dict)
    follow_ups: tuple[str, ...] = ()
    source: str | None = None


def asked(example: Example) -> dict[str, Any]:
    """Return what a row of outputs.jsonl records of a question: its text without the template, and its answer."""
    # In a conversation, the last question cannot be read without the turns before it.
    whole = len(example.messages) > 2 or not example.question
    follow_ups = list(example.further_questions or example.follow_ups)
    return {
        "id": example.id,
        **({"source": example.source} if example.source else {}),
        "question": example.prompt if whole else example.question,
        **({"follow_ups": follow_ups} if follow_ups else {}),
        "expected": example.target,
    }


def completed(example: Example, output: Mapping[str, Any], scores: Scores) -> dict[str, Any]:
    """Return the complete row of a question in outputs.jsonl."""
    return {
        **asked(example), "outputs": output["outputs"], "scores": scores, "tokens": output["tokens"],
        "finished": output["finished"],
    }  # fmt: skip


def read_answers(folder: Path) -> list[Answered]:
    """Return the answers in an evaluation's folder, in file order; rows that cannot be used are left out."""
    scores = {str(row.get("id")): row.get("scores") for row in read_jsonl(folder / "scores.jsonl")}
    answers = {}
    for row in read_jsonl(folder / "outputs.jsonl"):
        outputs = row.get("outputs")
        if isinstance(outputs, list):
            key = str(row.get("id"))
            answers[key] = Answered(
                key, _text(row.get("question")), _text(row.get("expected")), tuple(map(str, outputs)),
                _numbers(row.get("scores") or scores.get(key)), tuple(map(str, _list(row.get("follow_ups")))),
                _text(row.get("source")),
            )  # fmt: skip
    return list(answers.values())


def read_scores(folder: Path, measure: str, most: int | None = None) -> dict[str, Weighted]:
    """Return the score and the weight of the first `most` questions of an evaluation, by their id.

    Empty where no scores are stored, or where the measure is not a mean over questions.
    """
    if measure == LOSS:
        rows = {str(row.get("id")): (row.get("loss"), row.get("tokens")) for row in read_jsonl(folder / "losses.jsonl")}
        # A loss that is not finite is null in the file.
        weighted = {
            key: (math.nan if loss is None else float(loss), float(tokens))
            for key, (loss, tokens) in rows.items()
            if (loss is None or _is_number(loss)) and isinstance(tokens, int) and _is_number(tokens) and tokens > 0
        }
    else:
        scores = {str(row.get("id")): _numbers(row.get("scores")) for row in read_jsonl(folder / "scores.jsonl")}
        weighted = {key: (row[measure], 1.0) for key, row in scores.items() if measure in row}
    return dict(itertools.islice(weighted.items(), most))


def side_by_side(answers: Mapping[str, Sequence[Answered]]) -> list[dict[str, Answered]]:
    """Return the answers to every question by model, in the order of the first model's questions."""
    by_model = {model: {answer.id: answer for answer in rows} for model, rows in answers.items()}
    ids = dict.fromkeys(key for rows in by_model.values() for key in rows)
    return [{model: rows[key] for model, rows in by_model.items() if key in rows} for key in ids]


def main_measure(answers: Sequence[Answered]) -> str | None:
    """Return the first measure of the answers: by it, an answer is right or wrong."""
    return next((name for answer in answers for name in answer.scores), None)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _numbers(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        return {}
    return {str(name): float(number) for name, number in value.items() if _is_number(number)}


def _is_number(value: Any) -> bool:
    """Return whether a value of a file is a number that a float can hold: JSON has integers of any size."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)
