"""Rows that survive a kill: appended one by one, read back up to the last whole line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError
from nalora.files.atomic import json_text
from nalora.runs.folder import read_jsonl

# What each row of an evaluation's files says.
ROW_KEYS = {
    "outputs.jsonl": {"id", "outputs", "tokens", "finished"},
    "scores.jsonl": {"id", "scores"},
    "losses.jsonl": {"id", "loss", "tokens"},
    "judgements.jsonl": {"key", "answer"},
}


class Records:
    """A JSON-lines file of rows by id. What is in it is never done again.

    Raises:
        NALoRAError: a row that no evaluation wrote.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            self._cut_after_the_last_whole_line()
        self.rows: dict[str, dict[str, Any]] = {}
        wanted = ROW_KEYS.get(path.name, {"id"})
        rows = read_jsonl(path)
        good = [row for row in rows if row.keys() >= wanted and isinstance(row["id"], str)]
        if len(good) < (path.read_bytes().count(b"\n") if path.is_file() else 0):
            raise NALoRAError(
                f"{path}, line {1 + next((i for i, row in enumerate(rows) if row not in good), len(rows))}",
                found="a row of another form",
                expected=f"one with {', '.join(sorted(wanted))}",
                fix="move the file away, and the evaluation is done anew",
            )
        self.rows |= {row["id"]: row for row in good}

    def _cut_after_the_last_whole_line(self) -> None:
        """Remove a row that a kill cut short, lest the next one be written onto its end."""
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with self.path.open("r+b") as file:
                file.truncate(whole)

    def __contains__(self, key: str) -> bool:
        return key in self.rows

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Append finished rows; on disk before this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json_text(row) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())
        self.rows |= {row["id"]: row for row in rows}
