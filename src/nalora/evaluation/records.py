"""Rows that survive a kill: appended one by one, read back up to the last whole line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nalora.training.folder import read_jsonl
from nalora.whole_files import json_text


class Records:
    """A JSON-lines file of rows by id. What is in it is never done again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            self._cut_after_the_last_whole_line()
        self.rows: dict[str, dict[str, Any]] = {row["id"]: row for row in read_jsonl(path)}

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
