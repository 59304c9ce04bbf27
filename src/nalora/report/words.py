"""The parts of the page that are words and tables, written by Python so that they need no script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from nalora.errors import counted
from nalora.report.cleaning import is_partial
from nalora.report.data import RunData, differences
from nalora.report.naming import brief
from nalora.report.sentences import base_summary, findings, measures_of, score


def summary(runs: Sequence[RunData]) -> str:
    """One line under the title: how many runs, of what."""
    models, tasks = (list(dict.fromkeys(v)) for v in ([r.model for r in runs], [r.task for r in runs]))
    methods = list(dict.fromkeys(run.method for run in runs))
    count = counted(len(runs), "run")
    return escape(f"{count} · {', '.join(methods)} · {', '.join(models)} · {', '.join(tasks)}")


def said(runs: Sequence[RunData]) -> str:
    """What can and what cannot be said."""
    return items(findings(runs))


def answers(runs: Sequence[RunData]) -> str:
    """Held-out measures of the base and of every run, a table for each task."""
    tables = []
    for task in dict.fromkeys(task for run in runs for task in run.evaluations):
        measures = measures_of(runs, task)
        rows: list[list[str]] = []
        for run in runs:
            base = base_summary(runs, run, task)
            row = [f"base: {run.model}", *_cells(base, measures)] if base is not None else None
            if row is not None and row not in rows:
                rows.append(row)
        for run in runs:
            adapted = run.evaluations.get(task, {}).get("adapted")
            if adapted is not None:
                rows.append([run.name, *_cells(adapted, measures)])
        tables.append(
            table(["asked", *measures, "questions"], rows, caption=f"{task}: value and 95 % interval", numbers=True)
        )
    return "".join(tables)


def not_asked(runs: Sequence[RunData]) -> str:
    """Which runs were asked nothing, and how to ask them."""
    return notes(f"{run.name}: {run.missing['evaluations']}" for run in runs if "evaluations" in run.missing)


def _cells(found: dict[str, Any], measures: Sequence[str]) -> list[str]:
    cells = []
    for name in measures:
        measured = score("", found, name)
        if measured is None:
            cells.append("–")
        elif measured.interval is None:
            cells.append(f"{measured.value:.4g}")
        else:
            cells.append(f"{measured.value:.4g} ({measured.interval[0]:.4g} … {measured.interval[1]:.4g})")
    asked = _count(found.get("examples"))
    return [*cells, f"the first {asked} of {_count(found['questions'])}" if is_partial(found) else asked]


def costs(runs: Sequence[RunData]) -> str:
    """Time, memory and speed of every run."""
    columns = ["run", "steps", "total time", "time per step", "target tokens/s", "peak memory", "trained parameters",
               "on"]  # fmt: skip
    return table(columns, [[run.name, *_cost(run)] for run in runs], numbers=True)


def _cost(run: RunData) -> list[str]:
    result = run.result or {}
    steps, seconds = result.get("steps"), result.get("seconds")
    if not run.result and run.metrics:
        steps, seconds = run.metrics[-1].get("step"), run.metrics[-1].get("seconds")
    timed = isinstance(steps, int) and isinstance(seconds, int | float) and steps > 0 and seconds > 0
    per_step = f"{seconds / steps:.3g} s" if timed else "–"  # type: ignore[operator]
    memory = result.get("peak_memory_gib")
    hardware = str(run.environment.get("device", "–"))
    threads = run.environment.get("cpu_threads")
    if not run.environment.get("devices") and threads:
        hardware += f" CPU, {threads} thread{'' if threads == 1 else 's'}"
    return [
        _count(steps) + ("" if run.result else " so far"),
        duration(seconds),
        per_step,
        _target_tokens_per_second(run, steps, seconds) if timed else "–",
        f"{memory:.3g} GiB" if isinstance(memory, int | float) else "not measured",
        _count(result.get("trainable_parameters")),
        hardware,
    ]


def _target_tokens_per_second(run: RunData, steps: Any, seconds: Any) -> str:
    """Tokens that the loss was of; those of prompts and of padding are not counted."""
    result = run.result or {}
    tokens, rows, batch = result.get("target_tokens"), result.get("rows"), run.settings.get("batch_size")
    if not all(isinstance(each, int) and each > 0 for each in (tokens, rows, batch)):
        return "–"
    return f"{tokens / rows * batch * steps / seconds:.3g}"  # type: ignore[operator]


def duration(seconds: Any) -> str:
    """Seconds as a person says them."""
    if not isinstance(seconds, int | float):
        return "–"
    if seconds < 120:
        return f"{seconds:.3g} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def repeat(runs: Sequence[RunData]) -> str:
    """For every run its command, its versions and its settings; first, what the runs differ in."""
    parts = []
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    differ = [key for key in keys if len({repr(run.settings.get(key)) for run in runs}) > 1 and key != "output"]
    if len(runs) > 1 and differ:
        rows = [[key, *(_value(run.settings.get(key)) for run in runs)] for key in differ]
        parts.append(table(["setting", *(run.name for run in runs)], rows, caption="What the runs differ in"))
    for number, run in enumerate(runs):
        command = shlex.join(["nalora", "train", f"{run.path}/run.yaml", f"output={run.path}-again"])
        made = run.environment.get("command")
        versions = run.environment.get("versions")
        facts = {
            "made by": made, "started": run.environment.get("started"), "hardware": run.environment.get("device"),
            "Python": run.environment.get("python"), **(versions if isinstance(versions, dict) else {}),
        }  # fmt: skip
        known = [[name, str(value)] for name, value in facts.items() if value]
        settings = [[key, _value(value)] for key, value in run.settings.items()]
        unknown = notes(["The settings of this run are not known."]) if not settings else ""
        parts.append(
            f"<h3>{escape(run.name)}</h3>"
            f'<div class="command"><code id="command-{number}">{escape(command)}</code>'
            f'<button type="button" class="copy" data-copy="command-{number}">Copy the command</button></div>'
            f"{unknown}<details><summary>Settings ({len(settings)})</summary>{table(['setting', 'value'], settings)}"
            f"</details><details><summary>Versions and hardware</summary>{table(['what', 'which'], known)}</details>"
        )
    return "".join(parts)


def notices(runs: Sequence[RunData]) -> str:
    """Everything a reader must know before trusting a number."""
    sentences = differences(runs)
    for run in runs:
        sentences += [f"{run.name}: {notice}" for notice in run.notices]
    return items(sentences) if sentences else "<p>Nothing is missing or damaged.</p>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", *, numbers: bool = False) -> str:
    """A table whose first column names its rows; it scrolls by itself where the screen is narrow."""
    rows = [list(row) for row in rows]
    short = brief([*columns, *(first for first, *_ in rows)])
    head = "".join(f'<th scope="col">{_named(column, short)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{_named(first, short)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    kind = ' class="numbers"' if numbers else ""
    label = escape(caption or "table: " + ", ".join(columns[:3]), quote=True)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table{kind}>{title}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _named(name: str, short: Mapping[str, str]) -> str:
    """A name, shortened where it is long; the whole of it shows when it is pointed at."""
    if short[name] == name:
        return escape(name)
    return f'<span title="{escape(name, quote=True)}">{escape(short[name])}</span>'


def items(sentences: Iterable[str]) -> str:
    """Sentences as a list."""
    return "<ul>" + "".join(f"<li>{_with_code(sentence)}</li>" for sentence in sentences) + "</ul>"


def notes(sentences: Iterable[str]) -> str:
    """Sentences that stand where a thing is missing."""
    return "".join(f'<p class="note">{_with_code(sentence)}</p>' for sentence in sentences)


def _with_code(sentence: str) -> str:
    """Escaped, with `commands` set as such."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(sentence))


def _value(value: Any) -> str:
    if value is None:
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "–"
