"""The texts and tables of the page, written by Python so that they need no script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from nalora.errors import counted
from nalora.evaluation.paired import PairedComparison
from nalora.report.comparisons import base_summary, compared_with_base
from nalora.report.data import RunData, differences
from nalora.report.naming import brief
from nalora.report.reading import is_partial
from nalora.report.sentences import measures_of, score, tasks_of
from nalora.runs.settings import chosen
from nalora.tasks.text_measures import title_of


def summary(runs: Sequence[RunData]) -> str:
    """Return the line under the title: the number of runs, methods, models and tasks."""
    columns = ([run.method for run in runs], [run.model for run in runs], [run.task for run in runs])
    return escape(" · ".join([counted(len(runs), "run"), *(", ".join(dict.fromkeys(values)) for values in columns)]))


def scores(runs: Sequence[RunData]) -> str:
    """Return a table of held-out measures of the base models and the runs for each task."""
    tables = []
    for task in tasks_of(runs):
        measures = measures_of(runs, task)
        bases = [(f"base: {run.model}", base_summary(runs, run, task)) for run in runs]
        adapted = [(run.name, run.evaluations.get(task, {}).get("adapted")) for run in runs]
        compared = compared_with_base(runs, task, measures[0]) if measures else {}
        base_rows = [(name, *_cells(summary, measures)) for name, summary in bases if summary is not None]
        rows = [
            [name, *_cells(summary, measures), *([_verdict(compared.get(i))] if compared else [])]
            for i, (name, summary) in enumerate(adapted)
            if summary is not None
        ]
        rows = [*([*row, *([""] if compared else [])] for row in dict.fromkeys(base_rows)), *rows]
        titles = list(map(title_of, measures))
        columns = ["model", *titles, "questions", *([f"{titles[0]}, compared with base"] if compared else [])]
        tests = sorted({one.test for one in compared.values()})
        caption = f"{task}: value and 95 % interval" + (
            f"; questions compared by {' and '.join(tests)}" if tests else ""
        )
        tables.append(table(columns, rows, caption, numbers=True))
    return "".join(tables)


def _verdict(compared: PairedComparison | None) -> str:
    if compared is None:
        return "not compared"
    verdict = {"not distinguishable": "no significant difference"}.get(compared.verdict, compared.verdict)
    if not (compared.higher or compared.lower) or compared.verdict == "too few questions":
        return compared.evidence() if compared.verdict != "too few questions" else verdict
    return f"{verdict}: {compared.higher:,} higher, {compared.lower:,} lower, p {compared.short_p()}"


def _cells(evaluated: dict[str, Any], measures: Sequence[str]) -> list[str]:
    cells = []
    for name in measures:
        measured = score(evaluated, name)
        interval = measured.interval if measured else None
        ends = f" ({interval.low:.4g} … {interval.high:.4g})" if interval else ""
        cells.append(f"{measured.value:.4g}{ends}" if measured else "–")
    count = _count(evaluated.get("examples"))
    return [*cells, f"the first {count} of {_count(evaluated['questions'])}" if is_partial(evaluated) else count]


def costs(runs: Sequence[RunData]) -> str:
    """Return a table of time, memory and speed of every run."""
    columns = ["run", "steps", "total time", "time per step", "target tokens/s", "peak memory", "trainable parameters",
               "hardware"]  # fmt: skip
    return table(columns, [[run.name, *_cost(run)] for run in runs], numbers=True)


def _cost(run: RunData) -> list[str]:
    result = run.result or {}
    source = run.metrics[-1] if not run.result and run.metrics else result
    steps = source.get("step" if source is not result else "steps")
    seconds = source.get("seconds")
    timed = isinstance(steps, int) and isinstance(seconds, int | float) and steps > 0 and seconds > 0
    steps_per_second = steps / seconds if timed else None  # type: ignore[operator]
    # The tokens of the loss in a step, without those of prompts and padding.
    tokens, rows, batch = result.get("target_tokens"), result.get("rows"), run.settings.get("batch_size")
    known = all(isinstance(number, int) and number > 0 for number in (tokens, rows, batch))
    target_tokens = tokens / rows * batch if known else None  # type: ignore[operator]
    memory = result.get("peak_memory_gib")
    hardware = str(run.environment.get("device", "–"))
    threads = run.environment.get("cpu_threads")
    if not run.environment.get("devices") and threads:
        hardware += f" CPU, {threads} thread{'' if threads == 1 else 's'}"
    return [
        _count(steps) + ("" if run.result else " so far"),
        duration(seconds),
        f"{1 / steps_per_second:.3g} s" if steps_per_second else "–",
        f"{target_tokens * steps_per_second:.3g}" if target_tokens and steps_per_second else "–",
        f"{memory:.3g} GiB" if isinstance(memory, int | float) else "not measured",
        _count(result.get("trainable_parameters")),
        hardware,
    ]


def duration(seconds: Any) -> str:
    """Return a duration in seconds, minutes or hours."""
    if not isinstance(seconds, int | float):
        return "–"
    if seconds < 120:
        return f"{seconds:.3g} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def reproduce(runs: Sequence[RunData]) -> str:
    """Return the settings in which the runs differ, then the command, versions and settings of every run."""
    parts = []
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    differ = [key for key in keys if len({repr(run.settings.get(key)) for run in runs}) > 1 and key != "output"]
    if len(runs) > 1 and differ:
        rows = [[key, *(_value(run.settings.get(key)) for run in runs)] for key in differ]
        parts.append(table(["setting", *(run.name for run in runs)], rows, caption="Settings in which the runs differ"))
    for number, run in enumerate(runs):
        command = shlex.join(["nalora", "train", f"{run.path}/run.yaml", f"output={run.path}-again"])
        environment = run.environment
        versions = environment.get("versions")
        facts = {
            "command": environment.get("command"), "started": environment.get("started"),
            "hardware": environment.get("device"), "Python": environment.get("python"),
            **(versions if isinstance(versions, dict) else {}),
        }  # fmt: skip
        known = [[name, str(value)] for name, value in facts.items() if value]
        own = chosen(run.settings)
        settings, others = (
            [[key, _value(value)] for key, value in run.settings.items() if (key in own) == is_own]
            for is_own in (True, False)
        )
        unknown = notes(["The settings of this run are not known."]) if not run.settings else ""
        parts.append(
            f"<h3>{escape(run.name)}</h3>"
            f'<div class="command"><code id="command-{number}">{escape(command)}</code>'
            f'<button type="button" class="copy" data-copy="command-{number}">Copy the command</button></div>'
            f"{unknown or table(['setting', 'value'], settings)}"
            f"<details><summary>Settings with their default ({len(others)})</summary>"
            f"{table(['setting', 'value'], others)}</details>"
            f"<details><summary>Versions and hardware</summary>{table(['name', 'value'], known)}</details>"
        )
    return "".join(parts)


def notices(runs: Sequence[RunData]) -> str:
    """Return what limits the use of the numbers: damaged files, unfinished runs, runs that cannot be compared."""
    sentences = differences(runs) + [f"{run.name}: {notice}" for run in runs for notice in run.notices]
    return items(sentences) if sentences else "<p>Nothing is missing or damaged.</p>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", *, numbers: bool = False) -> str:
    """Return a table whose first column names its rows; it scrolls where the screen is narrow."""
    rows = [list(row) for row in rows]
    short = brief([*columns, *(first for first, *_ in rows)])
    head = "".join(f'<th scope="col">{_named(column, short)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{_named(first, short)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    kind = ' class="numbers"' if numbers else ""
    label = escape(caption or "table: " + ", ".join(columns[:3]), quote=True)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table{kind}>{title}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _named(name: str, short: Mapping[str, str]) -> str:
    """Return a name, shortened where it is long, with the full name as its tooltip."""
    if short[name] == name:
        return escape(name)
    return f'<span title="{escape(name, quote=True)}">{escape(short[name])}</span>'


def items(sentences: Iterable[str]) -> str:
    """Return sentences as a list."""
    return "<ul>" + "".join(f"<li>{_with_code(sentence)}</li>" for sentence in sentences) + "</ul>"


def notes(sentences: Iterable[str]) -> str:
    """Return sentences that replace a missing part."""
    return "".join(f'<p class="note">{_with_code(sentence)}</p>' for sentence in sentences)


def _with_code(sentence: str) -> str:
    """Return the sentence escaped, with `commands` in the font of code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(sentence))


def _value(value: Any) -> str:
    if value is None:
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "–"
