"""One run of a study, from its settings to its results; whatever was finished of it is not done again."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError
from nalora.files import yaml_reader
from nalora.runs import contents, marker
from nalora.runs.folder import RunFolder
from nalora.studies.store import ANSWERS, TEST, VALIDATION, Store


@dataclass(frozen=True)
class Job:
    """What a worker is asked to do; plain values, so that it can be sent to any machine.

    Args:
        key: the run's name in the store.
        settings: of the run.
        parts: what is asked of it after training: validation, test, answers.
        store: the store's folder, which every worker can reach.
        label: for people.
        ask_limit: only the first so many test questions.
        ask_tokens: how much is written at a time.
    """

    key: str
    settings: dict[str, Any]
    parts: tuple[str, ...]
    store: str
    label: str
    ask_limit: int | None = None
    ask_tokens: int = 32_768

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def work(job: Job, device: str | None = None) -> None:
    """Train what is not trained, ask what was not asked.

    A run whose weights are no longer kept is trained again, and asked everything again, if something new is asked;
    what is known of it stays where it is until all of that is done.

    Raises:
        NALoRAError: the run cannot be.
    """
    store, again = Store(job.store), _Again(job)
    again.take_its_place_if_cut_short()
    known = store.result(job.key, job.ask_limit)
    if known and all(known.has(part) for part in job.parts):
        return
    if known is None or store.folder(job.key).trained.is_dir():
        _train_and_ask(job, store.folder(job.key), {*job.parts}, device)
        return
    before = {part for part in (VALIDATION, TEST, ANSWERS) if known.has(part)}
    _train_and_ask(job, again.new, {*job.parts} | before, device)
    if (repeated := Store(again.aside).result(again.new.path.name)) is not None and repeated.diverged:
        raise NALoRAError(
            str(again.new.path),
            found="a run that diverged",
            expected="the result that it had when it was trained before",
            fix=f"look at its metrics; to train it again, remove {again.aside}",
        )
    again.take_its_place()


def _train_and_ask(job: Job, folder: RunFolder, parts: set[str], device: str | None) -> None:
    """Come to all these parts of the run in that folder, from whatever is there of it."""
    from nalora.evaluation.targets import Request, evaluate_target
    from nalora.runs.settings import check
    from nalora.training.run import train

    run = check({**job.settings, "output": str(folder.path), **({"device": device} if device else {})})
    known = Store(folder.path.parent).result(folder.path.name, job.ask_limit)
    if known is None:
        # Nobody else does this job (engines.py); the lock may be one of a worker on a node that was lost.
        train(run, resume=folder.settings.is_file(), take_over=True)
        let_go_of_memory()
    missing = {part for part in parts if known is None or not known.has(part)}
    if ANSWERS in missing:
        missing.add(TEST)  # how many questions there are is told beside the answers, by the losses in the same folder
    requests = {
        VALIDATION: Request(with_base=False, split="validation", writing=False, take_over=True, own=job.settings),
        TEST: Request(with_base=False, writing=False, take_over=True, own=job.settings),
        ANSWERS: Request(
            with_base=False, limit=job.ask_limit, batch_tokens=job.ask_tokens, take_over=True, own=job.settings
        ),
    }
    for part, request in requests.items():
        if part in missing:
            evaluate_target(str(folder.path), request, device=device)


class _Again:
    """Where a run that is in the store is trained again: beside it, one folder deeper than runs are looked for.

    At the end the two change places by renaming. Whenever that is cut short, one of them is in the run's place, or
    nothing is and the new one is whole.
    """

    def __init__(self, job: Job) -> None:
        self.place = Store(job.store).folder(job.key)
        self.aside = Path(job.store) / f"{job.key}.again"
        self.new, self.old = RunFolder(self.aside / "new"), self.aside / "old"

    def take_its_place(self) -> None:
        """Put the new run where the old one is, which goes."""
        settings = yaml_reader.read(self.new.settings, "a run's settings", "start the study again")
        self.new.write_settings(settings | {"output": str(self.place.path)})
        self.place.path.rename(self.old)
        self.take_its_place_if_cut_short()

    def take_its_place_if_cut_short(self) -> None:
        """Do what is left of that, if anything is."""
        if contents.is_run(self.new.path) and not contents.exists(self.place.path):
            self.new.path.rename(self.place.path)
        if self.place.path.is_dir() and contents.is_run(self.old):
            marker.mark(self.old, "run")
            self._keep_what_is_not_the_runs()
            for entry in self.old.iterdir():
                if entry.name != marker.MARKER:  # last: what is half removed is still known as nalora's
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            shutil.rmtree(self.old)
            with contextlib.suppress(OSError):  # somebody else's files are in it
                self.aside.rmdir()

    def _keep_what_is_not_the_runs(self) -> None:
        """Move evaluations, reports and the user's own files of the old run to the new one, where it has none."""
        own = set(contents.own_entries(self.old))
        for file in sorted(entry for entry in self.old.rglob("*") if entry.is_symlink() or not entry.is_dir()):
            there = self.place.path / file.relative_to(self.old)
            if not own.intersection((file, *file.parents)) and not contents.exists(there):
                there.parent.mkdir(parents=True, exist_ok=True)
                file.rename(there)


def log_of(job: Job) -> Path:
    """Where everything that the job prints goes."""
    return Path(job.store) / f"{job.key}.log"


def let_go_of_memory() -> None:
    """What one run or part of it held is not the next one's burden; a trainer is a cycle that only a search ends."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
