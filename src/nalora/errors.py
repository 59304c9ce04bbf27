"""The one exception type of nalora."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


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
    def in_short(self) -> str:
        """The same as one of several problems, whose list ends with a fix of its own."""
        return f"{self.where}: {self.found}, expected {self.expected} ({self.fix})"


@contextlib.contextmanager
def noted(problems: list[str]) -> Iterator[None]:
    """Take what is refused inside as one of several problems, which are told together."""
    try:
        yield
    except NALoRAError as error:
        problems.append(error.in_short)


def did_you_mean(given: str, known: Iterable[str], otherwise: str, *, most: int = 1, cutoff: float = 0.6) -> str:
    """The fix for a name that is not known: the nearest that are, or what else helps."""
    close = difflib.get_close_matches(given, list(known), most, cutoff)
    return f"did you mean {' or '.join(close)}?" if close else otherwise
