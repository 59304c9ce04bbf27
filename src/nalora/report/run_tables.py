"""The tables of runs: what they scored, how their gates moved, what they cost; a row per setting, over its seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nalora.files import atomic, outputs
from nalora.report.data import RunData, with_comparable_evaluations
from nalora.report.naming import row_labels, seed_of
from nalora.report.paper_figures import MEASURES, known_mean, measure_table
from nalora.report.sentences import base_summary, measures_of, score
from nalora.report.tables import Column, Record, Table, latex, markdown, tabulate


def write_tables(runs: Sequence[RunData], folder: Path) -> list[Path]:
    """Write tables.md and tables.tex.

    Raises:
        NALoRAError: one of them is a file that nalora did not write.
    """
    files = table_files(folder)
    refuse_foreign_tables(folder)
    tables = run_tables(runs)
    in_latex = [latex(table, f"tab:{name.lower().replace(' ', '-')}") for name, table in tables.items()]
    in_markdown = [f"## {name}\n\n{markdown(table)}" for name, table in tables.items()]
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write(files[0], "\n".join([f"<!-- {outputs.TEXT} -->\n", *in_markdown]))
    atomic.write(files[1], "\n".join([f"% {outputs.TEXT}\n", *in_latex]))
    return files


def refuse_foreign_tables(folder: Path) -> None:
    """Refuse a folder that is a symbolic link, or in which the tables would replace somebody else's files.

    Raises:
        NALoRAError: it is, or they would.
    """
    outputs.refuse_linked_folder(folder, option="--tables")
    outputs.refuse_foreign_files(table_files(folder), outputs.is_text, option="--tables", kind="a table")


def table_files(folder: Path) -> list[Path]:
    """The files that `write_tables` writes."""
    return [folder / "tables.md", folder / "tables.tex"]


def run_tables(runs: Sequence[RunData]) -> dict[str, Table]:
    """The tables that these runs have numbers for, by title; the first is always there."""
    runs = with_comparable_evaluations(runs)
    labels = row_labels(runs)
    tables = {"Results": _results(runs, labels)}
    for name, table in (("Movement of the gates", _movement(runs, labels)), ("Cost", _cost(runs, labels))):
        if table.columns:
            tables[name] = table
    return tables


def _results(runs: Sequence[RunData], labels: Sequence[str]) -> Table:
    """Every measure of every task that was asked; without any, the loss on the training data."""
    columns: list[Column] = []
    records: list[Record] = []
    bases: dict[str, dict[str, float]] = {}
    tasks = list(dict.fromkeys(task for run in runs for task in run.evaluations))
    for task in tasks:
        for measure in measures_of(runs, task):
            name = f"{task}: {measure}"
            found = False
            for run, label in zip(runs, labels, strict=True):
                adapted = score(label, run.evaluations.get(task, {}).get("adapted"), measure)
                if adapted is not None:
                    found = True
                    records.append(Record(label, seed_of(run), {name: adapted.value}))
                base = score("base", base_summary(runs, run, task), measure)
                if base is not None:
                    bases.setdefault(f"base: {run.model}", {})[name] = base.value
            if found:
                share = any(_is_share(run, task, measure) for run in runs)
                columns.append(Column(name, f"{name}, %" if share else name, scale=100 if share else 1))
    if not columns:
        for run, label in zip(runs, labels, strict=True):
            result = run.result or {}
            # Null in the file where it was not finite.
            loss = math.nan if result.get("diverged") else _number(result.get("train_loss"))
            if loss is not None:
                records.append(Record(label, seed_of(run), {"training loss": loss}))
        title = (
            "No run was asked held-out questions; this is the loss on the training data, which does not rank methods."
        )
        return tabulate(records, [Column("training loss", ranked=False)], title=title)
    records = [*(Record(label, 0, measures) for label, measures in bases.items()), *records]
    return tabulate(records, columns, unranked=list(bases), title="Held-out results.")


def _movement(runs: Sequence[RunData], labels: Sequence[str]) -> Table:
    """Cumulative movement between adjacent checkpoints: the sum over intervals of the mean over layers."""
    records = []
    for run, label in zip(runs, labels, strict=True):
        if run.diagnosis is not None:
            sums = {}
            for measure, (name, _) in MEASURES.items():
                means = known_mean(measure_table(run, measure), 1)
                if means.size and not np.isnan(means).any():
                    sums[name] = float(means.sum())
            records.append(Record(label, seed_of(run), sums))
    names = dict.fromkeys(name for record in records for name in record.measures)
    columns = [Column(name, ranked=False) for name in names]
    title = "Cumulative movement between adjacent checkpoints, mean over layers; more is neither better nor worse."
    return tabulate(records, columns, title=title)


def _cost(runs: Sequence[RunData], labels: Sequence[str]) -> Table:
    records = []
    for run, label in zip(runs, labels, strict=True):
        result = run.result or {}
        seconds, steps = _number(result.get("seconds")), _number(result.get("steps"))
        trained, memory = _number(result.get("trainable_parameters")), _number(result.get("peak_memory_gib"))
        known = {
            "s/step": seconds / steps if seconds is not None and steps else None,
            "peak memory, GiB": memory,
            "trained parameters, millions": None if trained is None else trained / 1e6,
        }
        records.append(Record(label, seed_of(run), {name: value for name, value in known.items() if value is not None}))
    names = dict.fromkeys(name for record in records for name in record.measures)
    hardware = sorted({str(run.environment["device"]) for run in runs if run.environment.get("device")})
    title = f"Cost on {', '.join(hardware)}." if hardware else "Cost."
    return tabulate(records, [Column(name, ranked=False) for name in names], title=title)


def _is_share(run: RunData, task: str, measure: str) -> bool:
    """A measure with a binomial interval counts right answers."""
    for summary in run.evaluations.get(task, {}).values():
        found: Any = (summary.get("measures") or {}).get(measure)
        if isinstance(found, dict) and found.get("binomial"):
            return True
    return False


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
