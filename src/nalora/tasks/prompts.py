"""Prompts to answer, from a data file of any format, with or without expected answers, or from lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nalora.errors import NALoRAError, listed
from nalora.files import expanded
from nalora.tasks.data_files import SUFFIXES, Rows, open_rows, opened_and_checked
from nalora.tasks.data_formats import FORMATS, Conversation, Reader
from nalora.tasks.example_rows import plain_prompt
from nalora.tasks.task import Example
from nalora.tasks.text_files import Lines, Report, Row

# The roles of expected answers, which prompts do not need.
_ANSWERS = ("completion", "output", "answer")
_TEXT = "text"


class TextLines(Lines):
    """A prompt in every line."""

    expected = "lines of text"

    def _read(self, file: Iterator[bytes]) -> Row:
        return {_TEXT: next(file).decode().rstrip("\r\n")}


class PromptRows(Sequence[Example]):
    """The rows of a file as examples; the target is the expected answer, empty if the row has none.

    Args:
        source: a data file, a folder, ``hub:owner/name``, or a ``.txt`` file with a prompt in every line.
        split: of a folder or a data set of the hub.
        columns: role → column, where the file has other names (``{prompt: body}``).
        system: a system message for rows that have none.
        wrap: makes a plain prompt of a question, in place of the format's own way.
        report: of the progress.

    Raises:
        NALoRAError: no such file, no column with prompts, or rows that cannot be read, with file and line.
    """

    def __init__(
        self,
        source: str,
        split: str = "test",
        columns: Mapping[str, str] | None = None,
        system: str = "",
        wrap: Callable[[str], str] | None = None,
        report: Report = lambda *progress: None,
    ) -> None:
        path = expanded(source)
        is_text = path.suffix.lower() == ".txt" and path.is_file()
        self.system, self.wrap = system, wrap

        def opened() -> Rows:
            return TextLines(path, report) if is_text else open_rows(source, split, report)

        def check(rows: Rows) -> None:
            self.rows, self.reader = rows, _reader(source, rows[0], columns or {})
            if problems := listed(self._problems()):
                fix = "correct or remove them, or name other columns with --columns"
                raise NALoRAError(source, found=problems, expected="rows with a prompt", fix=fix)

        opened_and_checked(opened, check)

    def _problems(self) -> Iterator[str]:
        for place in range(len(self.rows)):
            try:
                self._conversation(place)
            except ValueError as error:
                yield f"{self.rows.where(place)}: {error}"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        messages = self._conversation(index).messages
        if self.system and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": self.system}, *messages)
        before, target = messages[:-1], messages[-1]["content"]
        question = next((m["content"] for m in reversed(before) if m["role"] == "user"), "")
        if self.wrap and sum(message["role"] != "system" for message in before) == 1:
            prompt = self.wrap(question)
        else:
            prompt = plain_prompt(self.reader.format.name, before, question)
        return Example(str(index), prompt, target, question=question, messages=messages)

    def _conversation(self, place: int) -> Conversation:
        row = self.rows[place]
        column = self.reader.columns.get("messages")
        messages = row.get(column) if column else None
        last = messages[-1] if isinstance(messages, list) and messages else None
        if column and isinstance(last, Mapping) and last.get("role", last.get("from")) in ("user", "human", "tool"):
            row = {**row, column: [*(messages or ()), {"role": "assistant", "content": ""}]}
        return self.reader(row)


def _reader(source: str, row: Row, columns: Mapping[str, str]) -> Reader:
    for format in FORMATS:
        roles = {f"{role}?" if role in _ANSWERS else role: names for role, names in format.roles.items()}
        lenient = replace(format, roles=roles, read=_prompt_of_text if format.name == _TEXT else format.read)
        known = all(role in format.roles or f"{role}?" in format.roles for role in columns)
        if known and (by_role := lenient.columns(set(row), columns)) is not None:
            return Reader(lenient, by_role)
    raise NALoRAError(
        source,
        found=f"the columns {', '.join(map(str, row)) or 'none'}",
        expected="one with prompts: messages, prompt, instruction, question or text",
        fix=f"name it, as in --columns prompt=your_column; files of lines end in .txt, others in {', '.join(SUFFIXES)}",
    )


def _prompt_of_text(values: dict[str, Any]) -> Conversation:
    return Conversation(({"role": "user", "content": values[_TEXT]}, {"role": "assistant", "content": ""}))
