"""Evaluate one model on one task: write, score, summarise; whatever was finished is never done again."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError, counted
from nalora.evaluation.folder import claimed_folder
from nalora.evaluation.generation import Writer
from nalora.evaluation.identity import what_was_evaluated
from nalora.evaluation.intervals import bootstrap, wilson
from nalora.evaluation.likelihood import mean_loss, target_losses
from nalora.evaluation.records import Records
from nalora.models.loading import Loaded
from nalora.models.positions import check_length, position_limit
from nalora.runs.encoding import Encoder
from nalora.runs.folder import write_json
from nalora.runs.progress import Report
from nalora.tasks import Answer, Example, Scores, Task


def evaluate(
    loaded: Loaded,
    task: Task,
    folder: Path,
    *,
    style: str = "plain",
    examples: Sequence[Example] | None = None,
    limit: int | None = None,
    writing: bool = True,
    options: Mapping[str, Any] | None = None,
    data_dir: str | None = None,
    own: bool | None = None,
    batch_tokens: int = 32_768,
    take_over: bool = False,
    report: Report = lambda what, done, total: None,
) -> dict[str, Any]:
    """The summary of a model on a task, with every output and every score kept in the folder.

    It says what was evaluated, and how many examples of how many questions. A summary of more that is there already
    stays.

    Args:
        loaded: the model, adapted or not.
        task: what to ask.
        folder: for outputs.jsonl, scores.jsonl and summary.json; what is there already is kept.
        style: ``chat`` asks inside the tokenizer's chat template.
        examples: what is asked, in place of the task's test examples.
        limit: only the first so many questions.
        writing: whether answers are written and scored; else only the loss of the right ones is read.
        options: the task's settings, which the summary repeats.
        data_dir: the folder of the task's files, whose name the summary repeats.
        own: see `what_was_evaluated`.
        batch_tokens: see `Writer`.
        take_over: whether the folder is taken over from a process on another host.
        report: hears of progress.

    Raises:
        NALoRAError: nothing is asked, something that scoring needs is not there, or the folder is somebody else's or
            in use by another process.
    """
    questions = list(task.test_examples() if examples is None else examples)
    examples = questions[:limit]
    if not examples:
        raise NALoRAError(
            f"task {task.name!r}",
            found=f"none of {counted(len(questions), 'question')} to ask",
            expected="at least one",
            fix="raise limit" if questions else "check the task's files; validation needs a run with validation_size",
        )
    _refuse_too_long(loaded, task, examples, style)
    with claimed_folder(folder, take_over=take_over):
        evaluated = what_was_evaluated(task, questions, style=style, options=options or {}, data_dir=data_dir, own=own)
        counts = {"examples": len(examples), "questions": len(questions)}
        summary: dict[str, Any] = {"task": task.name, **counts, "evaluated": evaluated, "measures": {}, "chance": {}}
        if writing:
            task.prepare_scoring()
            outputs, scores = Records(folder / "outputs.jsonl"), Records(folder / "scores.jsonl")
            speed = _write(loaded, task, examples, outputs, style, batch_tokens, report)
            _score(task, examples, outputs, scores, report)
            summary |= {
                **summarise(task, examples, [scores.rows[each.id]["scores"] for each in examples]),
                "unfinished": sum(not outputs.rows[each.id]["finished"] for each in examples),
                "tokens": sum(outputs.rows[each.id]["tokens"] for each in examples),
                **speed,
            }
        summary["target_loss"] = _target_loss(loaded, task, examples, folder, style, report)
        _keep(folder / ("summary.json" if writing else "losses.json"), summary)
        return summary


def _refuse_too_long(loaded: Loaded, task: Task, examples: Sequence[Example], style: str) -> None:
    """Refuse what the model has no positions for, before hours of writing."""
    if position_limit(loaded.model) is None:
        return
    encoder = Encoder(loaded.processor, loaded.spec.kind, style)
    rows = [encoder.row(each) if each.target else {"": encoder.prompt([encoder.question(each)])} for each in examples]
    longest = max(len(ids) for row in rows for ids in row.values())
    check_length(loaded.model, longest, f"task {task.name!r}", "use a model with more than {limit} positions")


def _keep(path: Path, summary: dict[str, Any]) -> None:
    """Write a summary, unless there is one of more questions: a quick look takes nothing away."""
    try:
        there = json.loads(path.read_text(encoding="utf-8"))["examples"]
    except (OSError, ValueError, KeyError, TypeError):
        there = 0
    if summary["examples"] >= there:
        write_json(path, summary)


def summarise(task: Task, examples: Sequence[Example], scores: Sequence[Scores]) -> dict[str, Any]:
    """Measures with their intervals, and what knowing nothing would score.

    Raises:
        NALoRAError: there are no scores.
    """

    def of_drawn(drawn: Sequence[int]) -> dict[str, float]:
        return task.summarise([examples[i] for i in drawn], [scores[i] for i in drawn])

    intervals = bootstrap(len(scores), of_drawn)
    measures: dict[str, Any] = {}
    for name, value in task.summarise(examples, scores).items():
        measures[name] = {"value": value, "bootstrap": intervals[name]}
        if all(each.get(name) in (0.0, 1.0) for each in scores):
            measures[name]["binomial"] = wilson(sum(each[name] for each in scores), len(scores))
    return {"measures": measures, "chance": task.chance(examples)}


def _write(
    loaded: Loaded,
    task: Task,
    examples: Sequence[Example],
    outputs: Records,
    style: str,
    batch_tokens: int,
    report: Report,
) -> dict[str, float]:
    """Fill in the outputs that are missing; how fast that was."""
    missing = [each for each in examples if each.id not in outputs]
    if not missing:
        return {}
    ids = {each.id for each in missing}

    def generate() -> Iterator[list[Answer]]:
        encoder = Encoder(loaded.processor, loaded.spec.kind, style)
        writer = Writer(
            loaded.model, encoder, max_new_tokens=task.max_new_tokens, stop=task.stop, batch_tokens=batch_tokens
        )
        for batch in writer.batches(examples):
            if not ids.isdisjoint(each.id for each in batch):
                # All of a batch, though some of it was kept: in half precision an answer depends on its neighbours.
                yield [answer for answer in writer.answer(batch) if answer.example.id in ids]

    began, tokens, done = time.perf_counter(), 0, 0
    for answers in task.answers(loaded, missing, generate):
        outputs.add([
            {"id": a.example.id, "outputs": a.outputs, "tokens": a.tokens, "finished": a.finished} for a in answers
        ])  # fmt: skip
        tokens += sum(answer.tokens for answer in answers)
        done += len(answers)
        report("writing", len(examples) - len(missing) + done, len(examples))
    seconds = time.perf_counter() - began
    speed = {"tokens_per_second": tokens / seconds} if tokens else {"answers_per_second": done / seconds}
    return {"seconds": round(seconds, 2), **{name: round(value, 1) for name, value in speed.items()}}


def _target_loss(
    loaded: Loaded, task: Task, examples: Sequence[Example], folder: Path, style: str, report: Report
) -> dict[str, Any] | None:
    """−log p of the right answers a token (of the right class a picture), with its interval; None without them."""
    if not all(each.target for each in examples):
        return None
    known = Records(folder / "losses.jsonl")
    missing = [each for each in examples if each.id not in known]
    for start in range(0, len(missing), 256):
        part = missing[start : start + 256]
        losses = task.losses(loaded, part, functools.partial(target_losses, loaded, style=style))
        known.add([{"id": e.id, "loss": loss, "tokens": n} for e, (loss, n) in zip(part, losses, strict=True)])
        report("reading", len(examples) - len(missing) + start + len(part), len(examples))
    # A loss that is not finite is null in the file.
    rows = [known.rows[each.id] for each in examples]
    pairs = [(math.nan if row["loss"] is None else row["loss"], row["tokens"]) for row in rows]
    intervals = bootstrap(len(pairs), lambda drawn: {"loss": mean_loss([pairs[i] for i in drawn])})
    return {"value": mean_loss(pairs), "bootstrap": intervals["loss"]}


def _score(task: Task, examples: Sequence[Example], outputs: Records, scores: Records, report: Report) -> None:
    missing = [each for each in examples if each.id not in scores]
    done = len(examples) - len(missing)
    with ThreadPoolExecutor(task.scoring_threads) as pool:
        marks = pool.map(lambda each: task.score(each, outputs.rows[each.id]["outputs"]), missing)
        for example, marked in zip(missing, marks, strict=True):
            scores.add([{"id": example.id, "scores": marked}])
            done += 1
            report("scoring", done, len(examples))
