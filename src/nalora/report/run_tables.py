"""The tables of runs, scores, gate movement and cost: a row per setting, over its seeds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nalora.files import atomic, outputs
from nalora.report.charts import MEASURES, PAPER_MEASURES, known_mean, measure_table
from nalora.report.comparisons import base_summary
from nalora.report.data import RunData, with_comparable_evaluations
from nalora.report.naming import row_labels, seed_of
from nalora.report.sentences import measures_of, score, tasks_of
from nalora.report.tables import Column, Record, Table, columns_of, escape_markdown, latex, markdown, tabulate
from nalora.tasks.text_measures import title_of

_FILES = ("tables.md", "tables.tex")
_NOT_IN_LABELS = re.compile(r"[^\w]+")


def write_tables(runs: Sequence[RunData], folder: Path) -> list[Path]:
    """Write tables.md and tables.tex; raise NALoRAError if one of them is a file that nalora did not write."""
    return write_into(run_tables(runs), folder)


def write_into(tables: Mapping[str, Table], folder: Path) -> list[Path]:
    """Write tables by title as tables.md and tables.tex; raise NALoRAError if one of them is a file of others."""
    refuse_foreign_tables(folder)
    files = [folder / name for name in _FILES]
    folder.mkdir(parents=True, exist_ok=True)
    write_files(tables, *files)
    return files


def write_files(tables: Mapping[str, Table], markdown_file: Path, latex_file: Path) -> None:
    """Write tables by title as Markdown and as LaTeX."""
    in_markdown = [f"## {escape_markdown(name)}\n\n{markdown(table)}" for name, table in tables.items()]
    in_latex = [latex(table, f"tab:{_NOT_IN_LABELS.sub('-', name.lower())}") for name, table in tables.items()]
    atomic.write(markdown_file, "\n".join([f"<!-- {outputs.TEXT} -->\n", *in_markdown]))
    atomic.write(latex_file, "\n".join([f"% {outputs.TEXT}\n", *in_latex]))


def refuse_foreign_tables(folder: Path) -> None:
    """Raise NALoRAError if the folder is a symbolic link, or the tables would overwrite files of others."""
    outputs.refuse_linked_folder(folder, option="--tables")
    files = [folder / name for name in _FILES]
    outputs.refuse_foreign_files(files, outputs.is_text, option="--tables", kind="a table")


def run_tables(runs: Sequence[RunData]) -> dict[str, Table]:
    """Return the tables that these runs have numbers for, by title; the first is always included."""
    runs = with_comparable_evaluations(runs)
    labels = row_labels(runs)
    tables = {"Results": _results(runs, labels)}
    for name, table in (("Movement of the gates", _movement(runs, labels)), ("Cost", _cost(runs, labels))):
        if table.columns:
            tables[name] = table
    return tables


def _results(runs: Sequence[RunData], labels: Sequence[str]) -> Table:
    """Return every measure of every evaluated task; without any, the loss on the training data."""
    columns: list[Column] = []
    records: list[Record] = []
    bases: dict[str, dict[str, float]] = {}
    for task in tasks_of(runs):
        for measure in measures_of(runs, task):
            name = f"{task}: {title_of(measure)}"
            scores = [score(run.evaluations.get(task, {}).get("adapted"), measure) for run in runs]
            records += [
                Record(label, seed_of(run), {name: adapted.value})
                for run, label, adapted in zip(runs, labels, scores, strict=True)
                if adapted
            ]
            base_scores = [score(base_summary(runs, run, task), measure) for run in runs]
            for run, base in zip(runs, base_scores, strict=True):
                if base:
                    bases.setdefault(f"base: {run.model}", {})[name] = base.value
            if any(scores):
                is_share = any(known.is_share for known in [*scores, *base_scores] if known)
                columns.append(Column(name, f"{name}, %" if is_share else name, scale=100 if is_share else 1))
    if columns:
        records = [*(Record(label, 0, measures) for label, measures in bases.items()), *records]
        return tabulate(records, columns, unranked=list(bases), title="Held-out results.")
    for run, label in zip(runs, labels, strict=True):
        result = run.result or {}
        # Null in the file where it was not finite.
        loss = math.nan if result.get("diverged") else _number(result.get("train_loss"))
        if loss is not None:
            records.append(Record(label, seed_of(run), {"training loss": loss}))
    title = (
        "No run was evaluated on held-out questions; this is the loss on the training data, which does not rank"
        " methods."
    )
    return tabulate(records, [Column("training loss", ranked=False)], title=title)


def _movement(runs: Sequence[RunData], labels: Sequence[str]) -> Table:
    """Return the cumulative movement between adjacent checkpoints: the sum over intervals of the mean over layers."""
    records = []
    for run, label in zip(runs, labels, strict=True):
        means = {MEASURES[name][0]: known_mean(measure_table(run, name), 1) for name in PAPER_MEASURES}
        sums = {name: float(mean.sum()) for name, mean in means.items() if mean.size and not np.isnan(mean).any()}
        if run.diagnosis is not None:
            records.append(Record(label, seed_of(run), sums))
    title = "Cumulative movement between adjacent checkpoints, mean over layers; more is neither better nor worse."
    return tabulate(records, columns_of(records, ranked=False), title=title)


def _cost(runs: Sequence[RunData], labels: Sequence[str]) -> Table:
    records = []
    for run, label in zip(runs, labels, strict=True):
        result = run.result or {}
        seconds, steps = _number(result.get("seconds")), _number(result.get("steps"))
        parameters = _number(result.get("trainable_parameters"))
        costs = {
            "s/step": seconds / steps if seconds is not None and steps else None,
            "peak memory, GiB": _number(result.get("peak_memory_gib")),
            "trainable parameters, millions": None if parameters is None else parameters / 1e6,
        }
        records.append(Record(label, seed_of(run), {name: value for name, value in costs.items() if value is not None}))
    hardware = sorted({str(run.environment["device"]) for run in runs if run.environment.get("device")})
    title = f"Cost on {', '.join(hardware)}." if hardware else "Cost."
    return tabulate(records, columns_of(records, ranked=False), title=title)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
