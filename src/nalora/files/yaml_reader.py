"""The one reader of YAML: files of runs and studies, and the values of the command line.

YAML can do more than settings need. A few hundred bytes of nested anchors expand to gigabytes, 5,000 brackets overflow
the parser's stack, and of a key that is given twice all but the last value are dropped without a word. Each of these is
refused in one sentence here, before a single value is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError, shortened, unusable

# The longest file of this project has 6 kB. Nothing that a person writes comes near any of these.
MOST_BYTES = 1 << 20
MOST_LEVELS = 32
MOST_VALUES = 100_000
# Of <<, whose settings are there to be overwritten.
_MERGE = "tag:yaml.org,2002:merge"
# What PyYAML raises from a text of the right form: dates that no calendar has, `!!int ""`, `!!bool maybe`.
_WRONG_VALUES = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)


def read(path: Path, expected: str, fix: str) -> dict[str, Any]:
    """The `key: value` lines of a file; an empty file has none.

    Args:
        path: the file.
        expected: what the file should be, such as "a run's YAML file".
        fix: how to get one.

    Raises:
        NALoRAError: no such file, or one that is not UTF-8, no YAML, too large, or gives a key twice.
    """
    text = read_text(path, expected, fix)
    found = value(text, str(path))
    if found is None:
        return {}
    if not isinstance(found, dict):
        named = "a list" if isinstance(found, list) else f"the single value {shortened(found)}"
        raise NALoRAError(str(path), found=named, expected=f"{expected} of `key: value` lines", fix=fix)
    return found


def read_text(path: Path, expected: str, fix: str) -> str:
    """The text of a file of bounded size.

    Raises:
        NALoRAError: no such file, or one that cannot be read, is too large or is not UTF-8.
    """
    try:
        if not path.is_file():
            found = "a folder" if path.is_dir() else "no such file"
            raise NALoRAError(str(path), found=found, expected=expected, fix=fix)
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise NALoRAError(str(path), found=f"more than {MOST_BYTES >> 20} MiB", expected=expected, fix=fix)
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        byte = f"byte {error.object[error.start]:#04x} in line {line}"
        raise NALoRAError(
            str(path), found=f"{byte}, which is not UTF-8", expected="text in UTF-8", fix="save the file as UTF-8"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL byte, in Python 3.10 … 3.12
        raise unusable(path, "read", error, expected, fix) from error


def value(text: str, where: str) -> Any:
    """What a YAML text says, with its bounds checked first.

    Args:
        text: YAML.
        where: the file or the argument it is from, for the error.

    Raises:
        NALoRAError: no YAML, nested too deeply, too large once its aliases are expanded, or with a key given twice.
    """
    import yaml

    try:
        _refuse_deep(text, where)
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        walk = _Walk(where)
        walk.measure(node)
        if walk.repeated:
            raise NALoRAError(where, found="; ".join(walk.repeated), expected="every key once", fix="keep one of them")
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        found = f"no YAML ({_first_words(error)})"
        raise NALoRAError(where, found=found, expected="YAML", fix="write one `key: value` a line") from error
    except _WRONG_VALUES as error:
        found = f"a value that YAML cannot read ({type(error).__name__}: {shortened(str(error))})"
        raise NALoRAError(where, found=found, expected="YAML", fix="write it between quotes, as a text") from error


def _refuse_deep(text: str, where: str) -> None:
    """By the parser's events, of which there is a stack; what builds values from them recurses."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_LEVELS:
            raise _too_deep(where)


def _too_deep(where: str) -> NALoRAError:
    return NALoRAError(
        where,
        found=f"lists or settings nested in more than {MOST_LEVELS} levels",
        expected="settings, one level below another at most a few times",
        fix="take the inner levels out",
    )


class _Walk:
    """Measures every node once, however many aliases it has, in the order of the text.

    An alias stands for all that its anchor holds. An anchor comes before its aliases, so its size is known by then.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.repeated: list[str] = []
        self._known: dict[int, tuple[int, int]] = {}
        self._open: set[int] = set()

    def measure(self, node: Any) -> tuple[int, int]:
        """How many values the node expands to, in how many levels."""
        if id(node) in self._known:
            return self._known[id(node)]
        if id(node) in self._open:
            raise NALoRAError(
                self.where, found="a value that contains itself", expected="settings", fix="take out the alias (*name)"
            )
        self._open.add(id(node))
        below = node.value if not isinstance(node.value, str) else []
        if not below and any(char == "\0" or "\ud800" <= char <= "\udfff" for char in node.value):
            # No file name, setting or text that is written as UTF-8 can hold these.
            line = node.start_mark.line + 1
            raise NALoRAError(
                self.where,
                found=f"a NUL or half a surrogate pair in line {line}",
                expected="characters of a text",
                fix="remove the escape (\\0, \\ud800 … \\udfff)",
            )
        if node.id == "mapping":
            self._note_repeated(node)
            below = [each for pair in node.value for each in pair]
        sizes = [self.measure(each) for each in below]
        size = 1 + sum(count for count, _ in sizes)
        levels = 1 + max((deep for _, deep in sizes), default=-1)
        if size > MOST_VALUES:
            raise NALoRAError(
                self.where,
                found=f"aliases that expand to more than {MOST_VALUES:,} values",
                expected="settings",
                fix="write the values themselves in place of the aliases (*name)",
            )
        if levels > MOST_LEVELS:
            raise _too_deep(self.where)
        self._open.discard(id(node))
        self._known[id(node)] = size, levels
        return size, levels

    def _note_repeated(self, node: Any) -> None:
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if key.id != "scalar" or key.tag == _MERGE:
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                self.repeated.append(f"{shortened(key.value)}: given twice, in lines {lines[name]} and {line}")
            lines[name] = line


def _first_words(error: Any) -> str:
    """The problem and its place, of PyYAML's several lines."""
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return f"{shortened(' '.join(str(problem).split()), 200)}{place}"
