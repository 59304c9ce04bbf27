"""The formats of training data that people have, recognised by their columns, and their rows as conversations.

Every format becomes a list of messages; `text` alone stays one text. Only assistant messages are trained on by default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nalora.errors import NALoRAError, did_you_mean
from nalora.files.atomic import json_text

Message = dict[str, str]
Row = Mapping[str, Any]
_ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user", "tool": "tool", "function": "tool", "observation": "tool",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant",
    "function_call": "assistant",
}  # fmt: skip


class Conversation(NamedTuple):
    """What one row contains: messages that end with the assistant's, or one text."""

    messages: tuple[Message, ...]
    text: str = ""


@dataclass(frozen=True)
class Format:
    """A format: the roles of its columns, the names by which it is recognised, and how a row is read.

    Args:
        name: as in ``format: NAME`` and in the output of `nalora data`.
        roles: role of a column → the column names that are recognised, the most common first. Roles that end with "?"
            may be missing.
        read: (row's values by role) → the conversation.
    """

    name: str
    roles: Mapping[str, tuple[str, ...]]
    read: Callable[[dict[str, Any]], Conversation]

    def columns(self, names: set[str], chosen: Mapping[str, str]) -> dict[str, str] | None:
        """Return the column of every role, or None where a column that is needed is missing.

        Rows may lack optional columns, the first row too: an optional role gets its most common name.
        """
        by_role: dict[str, str] = {}
        for role, known in self.roles.items():
            needed = not role.endswith("?")
            role = role.rstrip("?")
            free = (name for name in known if name in names and name not in chosen.values())
            column = chosen.get(role) or next(free, None)
            if column is None and needed:
                return None
            if column is not None or not {*chosen.values(), *by_role.values()} & {known[0]}:
                by_role[role] = column or known[0]
        return by_role


def _texts(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def _turns(system: str, user: str, assistant: str) -> Conversation:
    roles = (("system", system), ("user", user), ("assistant", assistant))
    return Conversation(tuple({"role": role, "content": text} for role, text in roles if text or role != "system"))


def _chat(values: dict[str, Any]) -> Conversation:
    messages = values["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is no list of messages")
    read = tuple(_message(message, number) for number, message in enumerate(messages))
    if system := values.get("system"):
        read = ({"role": "system", "content": str(system)}, *read)
    if tools := values.get("tools"):
        text = tools if isinstance(tools, str) else json_text(tools)
        first = read[0] if read[0]["role"] == "system" else {"role": "system", "content": ""}
        read = ({"role": "system", "content": _texts(first["content"], text)}, *read[read[0]["role"] == "system" :])
    while read and read[-1]["role"] != "assistant":  # nothing after the last answer is trained on
        read = read[:-1]
    if not read:
        raise ValueError("no message of the assistant to train on")
    return Conversation(read)


def _message(message: Any, number: int) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"message {number} is no object")
    role = message.get("role", message.get("from"))
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"message {number} has the role {role!r}, expected one of system, user, assistant, tool")
    content = message.get("content", message.get("value"))
    if isinstance(content, list):  # OpenAI's parts; only text can be trained on here
        parts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(f"message {number} has parts that are no text")
        content = "".join(parts)
    if (calls := message.get("tool_calls")) and isinstance(content, str | None):
        content = _texts(content or "", json_text(calls))
    if not isinstance(content, str):
        raise ValueError(f"message {number} has no text as its content")
    return {"role": _ROLES[role], "content": content}


FORMATS = (
    Format(
        "messages",
        {"messages": ("messages", "conversations", "conversation", "dialog"), "system?": ("system",),
         "tools?": ("tools",)},
        _chat,
    ),
    Format(
        "prompt/completion",
        {"prompt": ("prompt", "query", "problem"), "completion": ("completion", "response", "chosen", "solution"),
         "system?": ("system", "system_prompt")},
        lambda values: _turns(values.get("system", ""), values["prompt"], values["completion"]),
    ),
    Format(
        "instruction/output",
        {"instruction": ("instruction",), "input?": ("input", "context"), "output": ("output", "response"),
         "system?": ("system",)},
        lambda values: _turns(
            values.get("system", ""), _texts(values["instruction"], values.get("input", "")), values["output"]
        ),
    ),
    Format(
        "question/answer",
        {"question": ("question", "Question", "input"), "answer": ("answer", "Answer", "output", "label", "target"),
         "context?": ("context", "passage", "body", "Body")},
        lambda values: _turns("", _texts(values.get("context", ""), values["question"]), values["answer"]),
    ),
    Format("text", {"text": ("text", "content")}, lambda values: Conversation((), values["text"])),
)  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """Reads the rows of a data file as conversations.

    Args:
        format: one of `FORMATS`.
        columns: the column of every role that the format has.
    """

    format: Format
    columns: Mapping[str, str]

    def __call__(self, row: Row) -> Conversation:
        """Return the row's conversation.

        Raises:
            ValueError: a column is missing, is empty or has another type; the message names it.
        """
        values: dict[str, Any] = {}
        for role, column in self.columns.items():
            value = row.get(column)
            if role not in ("messages", "tools"):
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    value = str(value)
                optional = f"{role}?" in self.format.roles
                if value is None and optional:
                    value = ""
                if not isinstance(value, str):
                    raise ValueError(f"{column!r} is {'missing' if value is None else type(value).__name__}, no text")
                if not value.strip() and not optional:
                    raise ValueError(f"{column!r} is empty")
            values[role] = value
        return self.format.read(values)


def reader_for(where: str, row: Row, format: str | None = None, columns: Mapping[str, str] | None = None) -> Reader:
    """Return the reader for rows like this one.

    Args:
        where: the file, for errors.
        row: its first row.
        format: a format's name; recognised by the columns where it is left out.
        columns: role → column, where the file has other names (``{question: body, answer: result}``).

    Raises:
        NALoRAError: an unknown format, or columns that no format has.
    """
    chosen, names = dict(columns or {}), set(row)
    known = {candidate.name: candidate for candidate in FORMATS}
    if format is not None and format not in known:
        raise NALoRAError(
            f"format: {format}", found="no such format", expected=f"one of {', '.join(known)}",
            fix=did_you_mean(format, known, "choose one of them"),
        )  # fmt: skip
    for role, column in chosen.items():
        if column not in names:
            raise NALoRAError(
                f"columns: {role}", found=f"no column {column!r} in {where}", expected=f"one of {', '.join(names)}",
                fix=did_you_mean(column, names, "name one of them"),
            )  # fmt: skip
    candidates = [known[format]] if format else [candidate for candidate in FORMATS if _takes(candidate, chosen)]
    for candidate in candidates:
        by_role = candidate.columns(names, chosen)
        if by_role is not None:
            return Reader(candidate, by_role)
    formats = "; ".join(
        f"{format.name} ({', '.join(role for role in format.roles if role[-1] != '?')})" for format in FORMATS
    )
    raise NALoRAError(
        where,
        found=f"the columns {', '.join(map(str, row)) or 'none'}",
        expected=f"those of one format: {formats}",
        fix='name them with columns, as in "columns={prompt: your_column, completion: another}"',
    )


def _takes(format: Format, chosen: Mapping[str, str]) -> bool:
    return all(role in format.roles or f"{role}?" in format.roles for role in chosen)
