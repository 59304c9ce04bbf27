"""The one exception type of nalora."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


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
