"""The one exception type of nalora, and the errors that several modules raise."""

from __future__ import annotations

import contextlib
import difflib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_SUGGESTION = "did you mean "


class NALoRAError(RuntimeError):
    """An input or a setup that nalora refuses, with the change that fixes it.

    Args:
        where: the module, parameter, setting or file with the problem.
        found: the value or state that was found there.
        expected: the value or state that is required.
        fix: the change to make.
    """

    def __init__(self, where: str, *, found: str, expected: str, fix: str) -> None:
        self.where, self.found, self.expected, self.fix = where, found, expected, fix
        super().__init__(f"{where}: found {found}; expected {expected}. Fix: {fix}")

    @property
    def summary(self) -> str:
        """The error as one item of a list; a suggested name replaces the list of all valid names."""
        expected = "" if self.fix.startswith(_SUGGESTION) else f", expected {self.expected}"
        return f"{self.where}: {self.found}{expected} ({self.fix})"


class SettingsError(NALoRAError):
    """All problems of a settings file in one message.

    Args:
        where: the file or the study.
        problems: one sentence for each problem, starting with the name of the setting.
    """

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = f"{len(problems)} problems: " if len(problems) > 1 else ""
        super().__init__(where, found=count + "; ".join(problems), expected="none", fix="correct them")
        self.args = (f"{where}: {self.found}",)

    @property
    def summary(self) -> str:
        """The problems without the fix."""
        return f"{self.where}: {'; '.join(self.problems)}"


@contextlib.contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Append the summary of a NALoRAError raised in the block to `problems` in place of raising it."""
    try:
        yield
    except NALoRAError as error:
        problems.append(error.summary)


def did_you_mean(name: str, known: Iterable[str], otherwise: str, *, most: int = 1, cutoff: float = 0.6) -> str:
    """Return a fix that suggests the known names nearest to `name`, or `otherwise` where none is similar."""
    close = difflib.get_close_matches(name, list(known), most, cutoff)
    return f"{_SUGGESTION}{' or '.join(close)}?" if close else otherwise


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; a heading that ends in a colon includes the line after it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    end = next((number for number, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    return " ".join(lines[:end])


def shortened(value: object, most: int = 80) -> str:
    """Return a text, or the repr of any other value, cut to `most` characters."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def counted(number: int, noun: str) -> str:
    """Return a number with separated thousands and its noun, which gets a regular plural unless the number is 1."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(problems: Iterable[str], most: int = 5) -> str:
    """Return the first problems and, if there are more, their total number; an empty text without problems."""
    remaining = iter(problems)
    first = list(itertools.islice(remaining, most))
    total = len(first) + sum(1 for _ in remaining)
    return "; ".join(first) + (f"; … {total:,} in total" if total > most else "")


def reason(error: Exception) -> str:
    """Return the operating system's description of an error, or else its message."""
    return getattr(error, "strerror", None) or str(error)


def unknown_name(where: str, found: str, name: str, known: Iterable[str], otherwise: str) -> NALoRAError:
    """Return the error for a name that is not in `known`; the fix is the nearest known name, or else `otherwise`."""
    known = list(known)
    expected = f"one of {', '.join(known)}"
    return NALoRAError(where, found=found, expected=expected, fix=did_you_mean(name, known, otherwise))


def wrong_value(where: str, value: object, expected: str, fix: str = "correct it") -> NALoRAError:
    """Return the error for a value of the wrong type or out of range."""
    return NALoRAError(where, found=repr(value), expected=expected, fix=fix)


def require(holds: bool, where: str, value: object, expected: str, fix: str = "correct it") -> None:
    """Raise the error for a wrong value unless the condition holds."""
    if not holds:
        raise wrong_value(where, value, expected, fix)


def missing_path(kind: str, where: str | Path, expected: str, fix: str = "check the path") -> NALoRAError:
    """Return the error for a path that does not exist; `kind` is "file" or "folder"."""
    return NALoRAError(str(where), found=f"no such {kind}", expected=expected, fix=fix)


def missing_package(where: str, package: str, purpose: str, install: str = "", instead: str = "") -> NALoRAError:
    """Return the error for a Python package that is not installed.

    Args:
        where: the setting or command that needs the package.
        package: the package's name.
        purpose: what it is needed for, such as "to read the hub".
        install: the argument of pip install; by default the package's name.
        instead: an alternative to installing the package, appended to the fix.
    """
    fix = f"pip install {install or package.replace('_', '-')}{instead}"
    return NALoRAError(where, found=f"no package {package}", expected=f"the package {package}, {purpose}", fix=fix)


def unusable(path: str | Path, action: str, error: Exception, expected: str, fix: str) -> NALoRAError:
    """Return the error for a path that cannot be used; `action` is a participle, such as "read" or "written"."""
    return NALoRAError(str(path), found=f"that it cannot be {action} ({reason(error)})", expected=expected, fix=fix)


def wrong_kind(path: Path, kind: str, expected: str, fix: str) -> NALoRAError:
    """Return the error for a path that is a symbolic link or not of its kind, "file" or "folder"."""
    found = "a symbolic link" if path.is_symlink() else f"no {kind}"
    return NALoRAError(str(path), found=found, expected=expected, fix=fix)


def refuse_all(where: str, expected: str, problems: Iterable[tuple[bool, str, str]]) -> None:
    """Raise one error for all problems that apply; a problem is (whether it applies, found, fix)."""
    present = [(found, fix) for applies, found, fix in problems if applies]
    if len(present) == 1:
        ((found, fix),) = present
        raise NALoRAError(where, found=found, expected=expected, fix=fix)
    if present:
        found = f"{len(present)} problems: {'; '.join(f'{found} ({fix})' for found, fix in present)}"
        raise NALoRAError(where, found=found, expected=expected, fix="correct each of them as its brackets say")


def refuse_first(where: str, expected: str, problems: Iterable[tuple[bool, str, str]]) -> None:
    """Raise the error of the first problem that applies; a problem is (whether it applies, found, fix)."""
    for applies, found, fix in problems:
        if applies:
            raise NALoRAError(where, found=found, expected=expected, fix=fix)
