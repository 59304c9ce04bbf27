"""`nalora show`: the answers of an evaluation, base model and adapter side by side."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from nalora.cli.screen import Unpadded, console, literal
from nalora.errors import NALoRAError, counted, did_you_mean

if TYPE_CHECKING:
    from nalora.evaluation.answers import Answered

    Row = Mapping[str, Answered]


def show(
    target: Annotated[
        str,
        typer.Argument(metavar="RUN|ADAPTER|MODEL|FOLDER", help="What was evaluated, or the folder of an evaluation."),
    ],
    task: Annotated[
        str | None, typer.Option(help="Of several evaluations, that of this task (default: newest).")
    ] = None,
    wrong: Annotated[
        bool, typer.Option("--wrong", help="Only wrong answers (of the adapter, if there is one).")
    ] = False,
    right: Annotated[bool, typer.Option("--right", help="Only right answers.")] = False,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only questions whose score differs between base model and adapter.")
    ] = False,
    search: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only questions with this text in question or answers.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="At most N questions.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per line.")] = False,
) -> None:
    """Page through the answers of an evaluation: question, expected answer, base model and adapter side by side.

    nalora show runs/sums --changed --search 17
    """
    from nalora.evaluation.answers import side_by_side
    from nalora.evaluation.stored import stored_evaluations

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8
    evaluations = stored_evaluations(target)
    if task is not None and not any(evaluation.task == task for evaluation in evaluations):
        names = list(dict.fromkeys(evaluation.task for evaluation in evaluations))
        fix = did_you_mean(task, names, "leave --task out for the newest")
        raise NALoRAError(f"--task {task}", found="no such evaluation", expected=f"one of {', '.join(names)}", fix=fix)
    chosen = [evaluation for evaluation in evaluations if task in (None, evaluation.task)][-1]
    rows = side_by_side(chosen.answers())
    judge = Judgement(rows, list(chosen.folders))
    judge.refuse(wrong=wrong, right=right, changed=changed)
    found = [
        (place, row)
        for place, row in enumerate(rows, 1)
        if (not wrong or judge.is_right(row) is False)
        and (not right or judge.is_right(row) is True)
        and (not changed or judge.has_changed(row))
        and (search is None or _contains(row, search))
    ]
    shown = found[:limit]
    if as_json:
        for _, row in shown:
            print(_json(row))
        return
    with paged() as screen:
        screen.print(literal(f"{chosen.task}: {judge.summary()}", "bold"))
        others = len(evaluations) - 1
        for model, folder in chosen.folders.items():
            screen.print(literal(f"{model}: {folder}", "dim"))
        if others:
            tasks = ", ".join(dict.fromkeys(evaluation.task for evaluation in evaluations))
            screen.print(literal(f"{counted(others, 'other evaluation')}: give --task ({tasks}) or a folder", "dim"))
        if len(shown) < len(rows):
            screen.print(literal(f"shown: {len(shown):,} of {counted(len(rows), 'question')}", "dim"))
        for place, row in shown:
            _print(screen, row, f"{place:,}", judge)


class Judgement:
    """Whether answers are right, by the first measure of the evaluation; scores other than 0 to 1 are not judged.

    Args:
        rows: the answers to every question by model.
        models: of the evaluation, the one that was trained last.
    """

    def __init__(self, rows: Sequence[Row], models: Sequence[str]) -> None:
        from nalora.evaluation.answers import main_measure

        self.rows, self.models, self.last = rows, models, models[-1]
        self.measure = main_measure([row[model] for row in rows for model in row])
        scores = [score for row in rows for answer in row.values() if (score := self.score(answer)) is not None]
        self.judged = bool(scores) and all(0 <= score <= 1 for score in scores)

    def refuse(self, *, wrong: bool, right: bool, changed: bool) -> None:
        """Raise NALoRAError for filters that exclude each other, or that these scores do not allow."""
        if wrong and right:
            raise NALoRAError("--wrong --right", found="both", expected="one of them", fix="leave one out")
        if (wrong or right) and not self.judged:
            found = f"{self.measure}, whose scores are not from 0 to 1" if self.measure else "answers without scores"
            raise NALoRAError(
                "--wrong" if wrong else "--right", found=found, expected="right and wrong answers", fix="leave it out"
            )
        if changed and len(self.models) < 2:
            raise NALoRAError(
                "--changed", found=f"answers of {self.last} only", expected="those of the base model as well",
                fix="evaluate again without --no-base",
            )  # fmt: skip

    def score(self, answer: Answered) -> float | None:
        """Return the score of the first measure."""
        return answer.scores.get(self.measure) if self.measure else None

    def is_right(self, row: Row, model: str | None = None) -> bool | None:
        """Return whether the answer is right; None without a score."""
        answer = row.get(model or self.last)
        score = self.score(answer) if answer else None
        return None if score is None or not self.judged else score >= 1

    def has_changed(self, row: Row) -> bool:
        """Return whether base model and adapter have different scores."""
        return len({self.score(row[model]) for model in self.models if model in row}) > 1

    def summary(self) -> str:
        """Return how many answers of each model are right, and how many changed."""
        parts = [counted(len(self.rows), "question")]
        if self.judged:
            parts += [self._share(model) for model in self.models]
        if self.judged and len(self.models) == 2:
            base, last = self.models
            up, down = (
                sum(self.is_right(row, base) is before and self.is_right(row, last) is after for row in self.rows)
                for before, after in ((False, True), (True, False))
            )
            parts.append(f"{up:,} wrong → right, {down:,} right → wrong")
        return ", ".join(parts)

    def _share(self, model: str) -> str:
        """Return how many of a model's scored answers are right: the models may have answered different questions."""
        verdicts = [verdict for row in self.rows if (verdict := self.is_right(row, model)) is not None]
        if not verdicts:
            return f"{model} without scores"
        return f"{model} {sum(verdicts):,} of {len(verdicts):,} ({sum(verdicts) / len(verdicts):.0%}) right"

    def heading(self, row: Row, model: str) -> Text:
        """Return the name of a model with the mark of its answer."""
        verdict, score = self.is_right(row, model), self.score(row[model])
        mark, style = ("", "bold") if verdict is None else (" ✓", "bold green") if verdict else (" ✗", "bold red")
        number = "" if score is None or score in (0, 1) else f" {self.measure} {score:.3g}"
        return literal(f"{model}{mark}{number}", style)


def _print(screen: Console, row: Row, place: str, judge: Judgement) -> None:
    first = next(iter(row.values()))
    screen.print()
    screen.print(Rule(literal(f"{place}  {first.source or first.id}"), align="left", style="dim"))
    asked = first.question
    screen.print(literal(asked.strip()) if asked is not None else Text("question not recorded; evaluate again", "dim"))
    for follow_up in first.follow_ups:
        screen.print(literal(f"then: {follow_up.strip()}"))
    if first.expected:
        screen.print(Text("expected ", "dim") + literal(first.expected.strip()))
    columns = Unpadded.grid(padding=(0, 3, 0, 0), expand=len(row) > 1)
    for _ in row:
        columns.add_column(ratio=1, overflow="fold")
    columns.add_row(*(judge.heading(row, model) for model in row))
    columns.add_row(*(literal("\n\n".join(output.strip() for output in row[model].outputs)) for model in row))
    screen.print(columns)


def _contains(row: Row, text: str) -> bool:
    texts = [part for a in row.values() for part in (a.question or "", a.expected or "", *a.follow_ups, *a.outputs)]
    return any(text.casefold() in part.casefold() for part in texts)


def _json(row: Row) -> str:
    from nalora.files.atomic import json_text

    first = next(iter(row.values()))
    answers = {model: {"outputs": answer.outputs, "scores": answer.scores} for model, answer in row.items()}
    follow_ups = {"follow_ups": first.follow_ups} if first.follow_ups else {}
    named = {"id": first.id, **({"source": first.source} if first.source else {})}
    return json_text({**named, "question": first.question, **follow_ups, "expected": first.expected, **answers})


@contextlib.contextmanager
def paged() -> Iterator[Console]:
    """Yield a console whose output goes through a pager ($PAGER, or less) on a terminal, and to stdout elsewhere."""
    command = shlex.split(os.environ.get("PAGER") or "less")
    if not sys.stdout.isatty() or not command or shutil.which(command[0]) is None:
        yield console()
        return
    # Quit if it fits on one screen, keep colours, leave the text on the screen.
    environment = {**os.environ, "LESS": os.environ.get("LESS", "-FRX")}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, encoding="utf-8", errors="replace")
    assert process.stdin is not None
    screen = _ToPager(file=process.stdin, force_terminal=True, width=console().width)
    try:
        with contextlib.suppress(BrokenPipeError):  # the reader has seen enough
            yield screen
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        _until_closed(process.wait)


class _ToPager(Console):
    """A console that lets its user handle a closed pager; rich ends the process with exit code 1."""

    def on_broken_pipe(self) -> None:
        """Raise the error instead of ending the process."""
        raise BrokenPipeError


def _until_closed(wait: Callable[[], int]) -> None:
    """Wait for the pager, which handles Ctrl-C itself."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            wait()
            return
