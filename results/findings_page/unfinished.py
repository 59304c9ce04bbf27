"""Answers that reached the limit of new tokens without an end, which are scored as they are."""

from __future__ import annotations

import statistics
from pathlib import Path

from tables.run_tables import Run
from tables.stored_answers import compared_runs, study


def unfinished(name: str, runs: dict[str, Run], store: Path) -> dict[str, list[float]]:
    """Return the share of unfinished answers of each compared run, by arm."""
    task = study(name).settings["task"]
    shares: dict[str, list[float]] = {}
    for arm, keys in compared_runs(name, store).items():
        for key in keys.values():
            for place, files in runs[key].evaluations.items():
                summary = files.get("summary", {})
                if place.rpartition("/")[0] == task and "unfinished" in summary:
                    shares.setdefault(arm, []).append(summary["unfinished"] / summary["examples"])
    return shares


def percent(shares: list[float] | None) -> str:
    """Return the mean in percent; empty without answers."""
    return f"{100 * statistics.fmean(shares):.0f}" if shares else ""
