"""Evaluate one model on one task: generate, score and summarise; finished parts are not computed again."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nalora.errors import NALoRAError, counted
from nalora.evaluation.answers import asked, completed
from nalora.evaluation.folder import Records, claimed_folder
from nalora.evaluation.generation import AnswerGenerator, mean_loss, target_losses
from nalora.evaluation.identity import Questions
from nalora.evaluation.intervals import bootstrap, wilson
from nalora.models.loading import Loaded
from nalora.models.positions import check_length, position_limit
from nalora.runs.encoding import Encoder, refuse_unusable_turns
from nalora.runs.folder import write_json
from nalora.runs.progress import Report
from nalora.tasks import Answer, Example, Scores, Task


@dataclass(frozen=True)
class Request:
    """The options of an evaluation; for a run, task, data_dir and style are by default the run's.

    Args:
        task: its name.
        data_dir: the folder of the task's files.
        options: settings of the task.
        style: of the prompts, ``plain`` or ``chat``.
        limit: evaluate only this number of questions, from the first on.
        batch_tokens: the maximum of a batch during generation.
        with_base: whether to evaluate a run's base model too.
        split: ``validation`` uses the examples that the run held out of its training set, in place of the test set.
        generate: whether to generate and score answers; otherwise only the loss of the targets is computed.
        take_over: whether to take the folder over from a process on another host that no longer runs.
        trust: whether code that comes with a run or a model may run.
        own: the user's own settings of a run, as a study has them; code that they name may run without trust.
        model: the base model of a run or an adapter, in place of the one that it names.
    """

    task: str | None = None
    data_dir: str | None = None
    options: dict[str, Any] | None = None
    style: str | None = None
    limit: int | None = None
    batch_tokens: int = 32_768
    with_base: bool = True
    split: Literal["test", "validation"] = "test"
    generate: bool = True
    take_over: bool = False
    trust: bool = False
    own: Mapping[str, Any] | None = None
    model: str | None = None


def evaluate(
    loaded: Loaded, questions: Questions, folder: Path, request: Request, report: Report = lambda *progress: None
) -> dict[str, Any]:
    """Return the summary of a model on a task, and write it with every question, output and score into the folder.

    Rows in the folder are reused, and a summary in it that covers more examples is not replaced.

    Raises:
        NALoRAError: no questions, a missing requirement of the scoring, or a folder that nalora did not make or that
            another process is using.
    """
    task, examples = questions.task, list(questions.examples)[: request.limit]
    total = len(questions.examples)
    if not examples:
        raise NALoRAError(
            f"task {task.name!r}",
            found=f"none of {counted(total, 'question')} to evaluate",
            expected="at least one",
            fix="raise limit" if total else "check the task's files; validation needs a run with validation_size",
        )
    conversations: Iterable[Any] = getattr(questions.examples, "one_of_each", tuple)()
    refuse_unusable_turns(conversations, Encoder(loaded.processor, loaded.spec.kind, questions.style))
    _refuse_too_long(loaded, questions, examples)
    with claimed_folder(folder, take_over=request.take_over):
        counts = {"examples": len(examples), "questions": total}
        summary: dict[str, Any] = {
            "task": task.name, **counts, "evaluated": questions.described(), "measures": {}, "chance": {}
        }  # fmt: skip
        if request.generate:
            task.prepare_scoring()
            outputs, scores = Records(folder / "outputs.jsonl"), Records(folder / "scores.jsonl")
            speed = _generate(loaded, questions, examples, outputs, request.batch_tokens, report)
            _score(task, examples, outputs, scores, report)
            _complete(examples, outputs, scores)
            summary |= {
                **summarise(task, examples, [scores.rows[example.id]["scores"] for example in examples]),
                "unfinished": sum(not outputs.rows[example.id]["finished"] for example in examples),
                "tokens": sum(outputs.rows[example.id]["tokens"] for example in examples),
                **speed,
            }
        summary["target_loss"] = _target_loss(loaded, task, examples, folder, questions.style, report)
        _keep(folder / ("summary.json" if request.generate else "losses.json"), summary)
        return summary


def _refuse_too_long(loaded: Loaded, questions: Questions, examples: Sequence[Example]) -> None:
    """Refuse texts that exceed the model's positions before generation starts, which can take hours."""
    if position_limit(loaded.model) is None:
        return
    encoder = Encoder(loaded.processor, loaded.spec.kind, questions.style)
    rows = [encoder.row(e) if e.target else {"": encoder.prompt(encoder.opening(e))} for e in examples]
    longest = max(len(ids) for row in rows for ids in row.values())
    check_length(loaded.model, longest, f"task {questions.task.name!r}", "use a model with more than {limit} positions")


def _keep(path: Path, summary: dict[str, Any]) -> None:
    try:
        existing = json.loads(path.read_text(encoding="utf-8"))["examples"]
    except (OSError, ValueError, KeyError, TypeError):
        existing = 0
    if summary["examples"] >= existing:
        write_json(path, summary)


def summarise(task: Task, examples: Sequence[Example], scores: Sequence[Scores]) -> dict[str, Any]:
    """Return the measures with their intervals, and the scores of trivial answers."""

    def of_sample(sample: Sequence[int]) -> dict[str, float]:
        return task.summarise([examples[i] for i in sample], [scores[i] for i in sample])

    intervals = bootstrap(len(scores), of_sample)
    measures: dict[str, Any] = {}
    for name, value in task.summarise(examples, scores).items():
        measures[name] = {"value": value, "bootstrap": intervals[name]}
        if all(score.get(name) in (0.0, 1.0) for score in scores):
            measures[name]["binomial"] = wilson(sum(score[name] for score in scores), len(scores))
    return {"measures": measures, "chance": task.chance(examples)}


def _generate(
    loaded: Loaded,
    questions: Questions,
    examples: Sequence[Example],
    outputs: Records,
    batch_tokens: int,
    report: Report,
) -> dict[str, float]:
    """Add the outputs that are missing; return the speed."""
    missing = [example for example in examples if example.id not in outputs]
    if not missing:
        return {}
    task, ids = questions.task, {example.id for example in missing}

    def generate() -> Iterator[list[Answer]]:
        encoder = Encoder(loaded.processor, loaded.spec.kind, questions.style)
        generator = AnswerGenerator(
            loaded.model, encoder, max_new_tokens=task.max_new_tokens, stop=task.stop, batch_tokens=batch_tokens
        )
        for batch in generator.batches(examples):
            if not ids.isdisjoint(example.id for example in batch):
                # Complete batches, even if a part is known: in half precision an answer depends on the other rows.
                yield [answer for answer in generator.answer(batch) if answer.example.id in ids]

    began, tokens, done = time.perf_counter(), 0, 0
    for answers in task.answers(loaded, missing, generate):
        outputs.add([
            {**asked(a.example), "outputs": a.outputs, "tokens": a.tokens, "finished": a.finished} for a in answers
        ])  # fmt: skip
        tokens += sum(answer.tokens for answer in answers)
        done += len(answers)
        report("generating", len(examples) - len(missing) + done, len(examples))
    seconds = time.perf_counter() - began
    speed = {"tokens_per_second": tokens / seconds} if tokens else {"answers_per_second": done / seconds}
    return {"seconds": round(seconds, 2), **{name: round(value, 1) for name, value in speed.items()}}


def _score(task: Task, examples: Sequence[Example], outputs: Records, scores: Records, report: Report) -> None:
    missing = [example for example in examples if example.id not in scores]
    with ThreadPoolExecutor(task.scoring_threads) as pool:
        results = pool.map(lambda example: task.score(example, outputs.rows[example.id]["outputs"]), missing)
        for done, (example, result) in enumerate(zip(missing, results, strict=True), len(examples) - len(missing) + 1):
            scores.add([{"id": example.id, "scores": result}])
            report("scoring", done, len(examples))


def _complete(examples: Sequence[Example], outputs: Records, scores: Records) -> None:
    """Write question, expected answer, output and scores of each question into one row, in the order of the task.

    Done once all are scored: until then the two files are appended to, and a kill loses nothing.
    """
    rows = {e.id: completed(e, outputs.rows[e.id], scores.rows[e.id]["scores"]) for e in examples}
    rows |= {key: row for key, row in outputs.rows.items() if key not in rows}  # of an earlier, larger evaluation
    if list(rows.values()) != list(outputs.rows.values()):
        outputs.replace(rows)


def _target_loss(
    loaded: Loaded, task: Task, examples: Sequence[Example], folder: Path, style: str, report: Report
) -> dict[str, Any] | None:
    """Return the mean −log p of target tokens (target classes of images) with its interval; None without targets."""
    if not all(example.target for example in examples):
        return None
    known = Records(folder / "losses.jsonl")
    missing = [example for example in examples if example.id not in known]
    for start in range(0, len(missing), 256):
        part = missing[start : start + 256]
        losses = task.losses(loaded, part, functools.partial(target_losses, loaded, style=style))
        known.add([{"id": e.id, "loss": loss, "tokens": n} for e, (loss, n) in zip(part, losses, strict=True)])
        report("computing losses", len(examples) - len(missing) + start + len(part), len(examples))
    # A loss that is not finite is null in the file.
    rows = [known.rows[example.id] for example in examples]
    pairs = [(math.nan if row["loss"] is None else row["loss"], row["tokens"]) for row in rows]
    intervals = bootstrap(len(pairs), lambda sample: {"loss": mean_loss([pairs[i] for i in sample])})
    return {"value": mean_loss(pairs), "bootstrap": intervals["loss"]}
