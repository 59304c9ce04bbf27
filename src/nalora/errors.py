"""The one exception type of nalora."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_SUGGESTION = "did you mean "


class NALoRAError(RuntimeError):
    """Something nalora refuses to do, said so that it can be mended.

    Args:
        where: the module, parameter or file the problem is about.
        found: what is there.
        expected: what should be there.
        fix: the one change that helps.
    """

    def __init__(self, where: str, *, found: str, expected: str, fix: str) -> None:
        self.where, self.found, self.expected, self.fix = where, found, expected, fix
        super().__init__(f"{where}: found {found}; expected {expected}. Fix: {fix}")

    @property
    def summary(self) -> str:
        """The same as one of several problems. A suggestion makes the list of all that is possible superfluous."""
        expected = "" if self.fix.startswith(_SUGGESTION) else f", expected {self.expected}"
        return f"{self.where}: {self.found}{expected} ({self.fix})"


class SettingsError(NALoRAError):
    """Settings that cannot be used: every problem at once, each with its own fix, and nothing else.

    Args:
        where: the file or the study.
        problems: a sentence for each, which starts with the setting's name.
    """

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = f"{len(problems)} problems: " if len(problems) > 1 else ""
        super().__init__(where, found=count + "; ".join(problems), expected="none", fix="correct them")
        self.args = (f"{where}: {self.found}",)

    @property
    def summary(self) -> str:
        """The problems alone, for a list of problems."""
        return f"{self.where}: {'; '.join(self.problems)}"


@contextlib.contextmanager
def collecting(problems: list[str]) -> Iterator[None]:
    """Take what is refused inside as one of several problems, which are told together."""
    try:
        yield
    except NALoRAError as error:
        problems.append(error.summary)


def did_you_mean(given: str, known: Iterable[str], otherwise: str, *, most: int = 1, cutoff: float = 0.6) -> str:
    """The fix for a name that is not known: the nearest that are, or what else helps."""
    close = difflib.get_close_matches(given, list(known), most, cutoff)
    return f"{_SUGGESTION}{' or '.join(close)}?" if close else otherwise


def first_line(error: BaseException) -> str:
    """The first line of an error's message; where that is a heading that ends in a colon, with the line below it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    end = next((number for number, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    return " ".join(lines[:end])


def shortened(found: object, most: int = 80) -> str:
    """A text as it is, anything else as Python writes it; cut where a sentence could no longer be read."""
    text = found if isinstance(found, str) else repr(found)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is 1; thousands are separated by commas.

    Args:
        number: how many.
        noun: in the singular, with a regular plural.
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


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
    """Return the error for a path that cannot be read or written; `action` is the participle, such as "read"."""
    return NALoRAError(str(path), found=f"that it cannot be {action} ({reason(error)})", expected=expected, fix=fix)


def wrong_kind(path: Path, kind: str, expected: str, fix: str) -> NALoRAError:
    """Return the error for a path that is a symbolic link, or anything else but a "file" or "folder" (`kind`)."""
    return NALoRAError(
        str(path), found="a symbolic link" if path.is_symlink() else f"no {kind}", expected=expected, fix=fix
    )


def reason(error: Exception) -> str:
    """Return the operating system's description of an error, or else its message."""
    return getattr(error, "strerror", None) or str(error)
