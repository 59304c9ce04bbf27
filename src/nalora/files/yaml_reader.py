"""The only YAML reader of nalora: files of runs and studies, and values of the command line.

YAML can do more than settings need. A few hundred bytes of nested anchors expand to gigabytes, 5,000 brackets overflow
the parser's stack, and if a key is given twice, all but its last value are dropped silently. Each of these is refused
here with a one-sentence error, before any value is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError, shortened, unusable

# The longest YAML file of this project has 6 kB, far below each of these limits.
MOST_BYTES = 1 << 20
MOST_LEVELS = 32
MOST_VALUES = 100_000
# The tag of <<, whose settings are meant to be overwritten.
_MERGE = "tag:yaml.org,2002:merge"
_BOOL, _TEXT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:str"
# PyYAML raises these for values of the right form: dates that no calendar has, `!!int ""`, `!!bool maybe`.
_WRONG_VALUES = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)


def read(path: Path, expected: str, fix: str) -> dict[str, Any]:
    """Return the settings of a YAML file; an empty file has none.

    Raises:
        NALoRAError: no such file, or one that is not UTF-8, not YAML, too large, or gives a key twice; `expected` is
            what the file should be, such as "a run's YAML file", and `fix` how to get one.
    """
    settings = value(_text(path, expected, fix), str(path))
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        found = "a list" if isinstance(settings, list) else f"the single value {shortened(settings)}"
        raise NALoRAError(str(path), found=found, expected=f"{expected} of `key: value` lines", fix=fix)
    return settings


def _text(path: Path, expected: str, fix: str) -> str:
    try:
        if path.is_file():
            with path.open("rb") as file:
                content = file.read(MOST_BYTES + 1)
            if len(content) <= MOST_BYTES:
                return content.decode("utf-8-sig")
            found = f"more than {MOST_BYTES >> 20} MiB"
        else:
            found = "a folder" if path.is_dir() else "no such file"
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        found = f"byte {error.object[error.start]:#04x} in line {line}, which is not UTF-8"
        expected, fix = "text in UTF-8", "save the file as UTF-8"
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL byte, in Python 3.10 … 3.12
        raise unusable(path, "read", error, expected, fix) from error
    raise NALoRAError(str(path), found=found, expected=expected, fix=fix)


def value(text: str, where: str) -> Any:
    """Return the value of a YAML text after checking its limits; `where` names its file or argument in errors.

    Raises:
        NALoRAError: no YAML, nested too deeply, too large once its aliases are expanded, or with a key given twice.
    """
    import yaml

    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):  # parsing does not recurse; composing nodes does
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            _refuse_deep(depth, where)
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        repeated: list[str] = []
        _measure(node, where, {}, repeated)
        if repeated:
            raise NALoRAError(where, found="; ".join(repeated), expected="each key once", fix="keep one of them")
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        found, fix = f"no YAML ({_problem(error)})", "write one `key: value` per line"
        cause: Exception = error
    except _WRONG_VALUES as error:
        found = f"a value that YAML cannot read ({type(error).__name__}: {shortened(str(error))})"
        fix, cause = "put the value in quotes", error
    raise NALoRAError(where, found=found, expected="YAML", fix=fix) from cause


def _refuse_deep(levels: int, where: str) -> None:
    if levels > MOST_LEVELS:
        raise NALoRAError(
            where,
            found=f"lists or settings nested in more than {MOST_LEVELS} levels",
            expected="settings nested in a few levels",
            fix="reduce the nesting",
        )


def _measure(node: Any, where: str, sizes: dict[int, tuple[int, int] | None], repeated: list[str]) -> tuple[int, int]:
    """Return how many values a node expands to, and in how many levels; add keys that it repeats to `repeated`.

    An alias stands for all values of its anchor. An anchor precedes its aliases, so every node is measured once, and
    `sizes` has its size by then; None marks nodes that are being measured.
    """
    if id(node) in sizes:
        size = sizes[id(node)]
        if size is None:
            found, fix = "a value that contains itself", "remove the alias (*name)"
            raise NALoRAError(where, found=found, expected="settings", fix=fix)
        return size
    sizes[id(node)] = None
    children = node.value
    if isinstance(node.value, str):
        children = []
        if any(char == "\0" or "\ud800" <= char <= "\udfff" for char in node.value):
            # No file name, setting or text that is written as UTF-8 can contain these.
            raise NALoRAError(
                where,
                found=f"a NUL or half a surrogate pair in line {node.start_mark.line + 1}",
                expected="text",
                fix="remove the escape (\\0, \\ud800 … \\udfff)",
            )
    elif node.id == "mapping":
        for key, _ in node.value:
            if key.tag == _BOOL:  # YAML 1.1 reads the setting `on:` as true
                key.tag = _TEXT
        repeated += _repeated_keys(node)
        children = [child for pair in node.value for child in pair]
    measured = [_measure(child, where, sizes, repeated) for child in children]
    values = 1 + sum(count for count, _ in measured)
    levels = 1 + max((depth for _, depth in measured), default=-1)
    if values > MOST_VALUES:
        raise NALoRAError(
            where,
            found=f"aliases that expand to more than {MOST_VALUES:,} values",
            expected="settings",
            fix="write the values themselves in place of the aliases (*name)",
        )
    _refuse_deep(levels, where)
    sizes[id(node)] = values, levels
    return values, levels


def _repeated_keys(node: Any) -> list[str]:
    lines: dict[tuple[str, str], int] = {}
    repeated = []
    for key, _ in node.value:
        if key.id != "scalar" or key.tag == _MERGE:
            continue
        name, line = (key.tag, key.value), key.start_mark.line + 1
        if name in lines:
            repeated.append(f"{shortened(key.value)}: given twice, in lines {lines[name]} and {line}")
        lines[name] = line
    return repeated


def _problem(error: Any) -> str:
    """Return the problem and its position from PyYAML's message of several lines."""
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return f"{shortened(' '.join(str(problem).split()), 200)}{place}"
