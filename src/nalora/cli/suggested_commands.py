"""The commands that `nalora suggest` prints: to train with a rate, and to try further rates."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Commands:
    """The commands to type next, with the arguments of `nalora suggest`.

    Args:
        run: the run's file, or the name of a recipe.
        settings: as they were typed.
        run_folder: where the whole run would be written.
        output: of `nalora suggest`, as all others below.
        steps: number of first steps.
        workers: number of runs at a time.
        per_gpu: number of runs that share one GPU.
    """

    run: Path
    settings: Sequence[str]
    run_folder: str
    output: Path | None
    steps: int
    workers: int | None
    per_gpu: int

    def train(self, rate: float, *, another: bool = False) -> str:
        """Return the command that trains the run with this rate.

        It names a new folder if that of the run is used, or for `another` run next to the one that is suggested.
        """
        from nalora.studies.suggest import as_typed

        settings = [*self.settings, f"learning_rate={as_typed(rate)}"]
        folders = itertools.chain([] if another else [self.run_folder], _further(f"{self.run_folder}-lr{rate:g}"))
        folder = next(folder for folder in folders if _is_free(folder))
        if folder != self.run_folder:
            settings = [*(word for word in settings if not word.startswith("output=")), f"output={folder}"]
        return shlex.join(["nalora", "train", str(self.run), *settings])

    def suggest(self, rates: Sequence[float]) -> str:
        """Return this command with other rates."""
        from nalora.studies.suggest import as_typed

        options = ["--rates", ",".join(map(as_typed, rates)), "--steps", str(self.steps)]
        options += ["--output", str(self.output)] if self.output else []
        options += ["--workers", str(self.workers)] if self.workers else []
        options += ["--per-gpu", str(self.per_gpu)] if self.per_gpu > 1 else []
        return shlex.join(["nalora", "suggest", str(self.run), *self.settings, *options])


def _further(name: str) -> Iterator[str]:
    """Yield the name, and the name with numbers from 2."""
    yield name
    yield from (f"{name}-{number}" for number in itertools.count(2))


def _is_free(folder: str) -> bool:
    """Whether a run can be written there: no such path, or an empty folder."""
    return not os.path.lexists(folder) or (Path(folder).is_dir() and not any(Path(folder).iterdir()))
