"""The content of a run's data files, recorded when it starts: a run is resumed only on the same data.

Resumed on edited data, a run would skip to a row of another order, and no setting would show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nalora import tasks

# The SHA-256 of each file by setting (task, test, score) and file name, in environment.json.
Record = dict[str, dict[str, str]]


def record_of(settings: Mapping[str, Any]) -> Record:
    """Return the record of the data files that the settings name; empty for tasks that come with nalora."""
    return tasks.contents(str(settings.get("task")), settings)


def equal_in_content(before: Record, now: Record) -> set[str]:
    """Return the settings whose files have the same content as before, wherever they are now."""
    return {name for name in before if name in now and not _differences(before[name], now[name])}


def changes(before: Record, now: Record) -> list[str]:
    """Return which files differ, as clauses such as ``sums.jsonl was edited``; none for a run without a record."""
    return [clause for name in before for clause in _differences(before[name], now.get(name, {}))]


def _differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    if len(before) == len(now) == 1 and [*before.values()] == [*now.values()] != [""]:  # renamed
        return []
    if any(now.values()) and before.keys().isdisjoint(now):  # the command names other data
        return [f"{', '.join(sorted(before))}, and not on {', '.join(sorted(now))}"]
    clauses = []
    for name in sorted({*before, *now}):
        if name not in now:
            clauses.append(f"{name} is missing")
        elif name not in before and now[name]:  # a file that is not there has no digest
            clauses.append(f"{name} is new")
        elif name in before and before[name] != now[name]:
            clauses.append(f"{name} was edited")
    return clauses
