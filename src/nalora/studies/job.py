"""One run of a study, from its settings to its results; whatever is finished already is not repeated."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError
from nalora.files import yaml_reader
from nalora.runs import contents, marker
from nalora.runs.folder import RunFolder
from nalora.studies.store import ANSWERS, TEST, VALIDATION, Store


@dataclass(frozen=True)
class Job:
    """A run to train and the parts of it to evaluate; plain values, so that it can be sent to any machine.

    Args:
        key: the run's name in the store.
        settings: of the run.
        parts: to evaluate after training: validation, test, answers.
        store: the path of the store, the same on every machine.
        label: for messages.
        test_limit: generate answers to the first `test_limit` test questions only.
        max_batch_tokens: prompt and answer tokens per batch of generation.
    """

    key: str
    settings: dict[str, Any]
    parts: tuple[str, ...]
    store: str
    label: str
    test_limit: int | None = None
    max_batch_tokens: int = 32_768


def work(job: Job, device: str | None = None) -> None:
    """Train the run if it is not trained, and evaluate the parts that have not been evaluated.

    If a new part needs weights that were deleted, the run is trained and evaluated again in another folder. Its old
    results stay in place until that is complete.

    Raises:
        NALoRAError: the run cannot be trained or evaluated.
    """
    store, replacement = Store(job.store), _Replacement(job)
    replacement.complete()
    known = store.result(job.key, job.test_limit)
    if known and known.has_all(job.parts):
        return
    if known is None or store.folder(job.key).trained.is_dir():
        _train_and_evaluate(job, store.folder(job.key), {*job.parts}, device)
        return
    before = {part for part in (VALIDATION, TEST, ANSWERS) if known.has(part)}
    _train_and_evaluate(job, replacement.new, {*job.parts} | before, device)
    repeated = Store(replacement.folder).result(replacement.new.path.name)
    if repeated is not None and repeated.diverged:
        raise NALoRAError(
            str(replacement.new.path),
            found="a run that diverged",
            expected="the result that it had when it was trained before",
            fix=f"look at its metrics; to train it again, remove {replacement.folder}",
        )
    replacement.swap()


def _train_and_evaluate(job: Job, folder: RunFolder, parts: set[str], device: str | None) -> None:
    from nalora.evaluation.targets import Request, evaluate_parts
    from nalora.runs.settings import check
    from nalora.training.run import train

    run = check({**job.settings, "output": str(folder.path), **({"device": device} if device else {})})
    known = Store(folder.path.parent).result(folder.path.name, job.test_limit)
    if known is None:
        # Engines let one process at a time work on a job; the folder's lock may be that of a worker on a lost node.
        with _timed("training, with loading and tokenising"):
            train(run, resume=folder.settings.is_file(), take_over=True)
            release_memory()
    missing = {part for part in parts if known is None or not known.has(part)}
    if ANSWERS in missing:
        missing.add(TEST)  # the losses record how many questions there are, with which the answers are compared
    requests = {
        VALIDATION: Request(with_base=False, split="validation", generate=False, take_over=True, own=job.settings),
        TEST: Request(with_base=False, generate=False, take_over=True, own=job.settings),
        ANSWERS: Request(
            with_base=False, limit=job.test_limit, batch_tokens=job.max_batch_tokens, take_over=True, own=job.settings
        ),
    }
    if missing:
        with _timed(f"evaluation of {', '.join(part for part in requests if part in missing)}"):
            evaluate_parts(str(folder.path), [requests[part] for part in requests if part in missing], device=device)


@contextlib.contextmanager
def _timed(what: str) -> Iterator[None]:
    """Print the seconds of a part of the run, into its log."""
    began = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - began:.1f} s", flush=True)


class _Replacement:
    """A run that is trained again, in a folder next to the old one, one level deeper than stored runs are.

    At the end the new folder takes the place of the old one by renaming. If that is interrupted, either one of the two
    is in place, or none is and the new one is complete.
    """

    def __init__(self, job: Job) -> None:
        self.place = Store(job.store).folder(job.key)
        self.folder = Path(job.store) / f"{job.key}.again"
        self.new, self.old = RunFolder(self.folder / "new"), self.folder / "old"

    def swap(self) -> None:
        """Put the new run in place of the old one, which is removed."""
        settings = yaml_reader.read(self.new.settings, "a run's settings", "start the study again")
        self.new.write_settings(settings | {"output": str(self.place.path)})
        self.place.path.rename(self.old)
        self.complete()

    def complete(self) -> None:
        """Complete a swap that was begun; do nothing if there is none."""
        if contents.is_run(self.new.path) and not os.path.lexists(self.place.path):
            self.new.path.rename(self.place.path)
        if self.place.path.is_dir() and contents.is_run(self.old):
            marker.mark(self.old, "run")
            self._keep_other_files()
            for entry in self.old.iterdir():
                if entry.name != marker.MARKER:  # removed last: a half-removed folder is still marked as nalora's
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            shutil.rmtree(self.old)
            with contextlib.suppress(OSError):  # it contains files of the user
                self.folder.rmdir()

    def _keep_other_files(self) -> None:
        """Move evaluations, reports and files of the user from the old run to the new one, if it lacks them."""
        own = set(contents.own_entries(self.old))
        for file in sorted(entry for entry in self.old.rglob("*") if entry.is_symlink() or not entry.is_dir()):
            target = self.place.path / file.relative_to(self.old)
            if not own.intersection((file, *file.parents)) and not os.path.lexists(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                file.rename(target)


def log_of(job: Job) -> Path:
    """Return the file for everything that the job prints."""
    return Path(job.store) / f"{job.key}.log"


def release_memory() -> None:
    """Free the memory of the last run; a trainer is a reference cycle, which only the garbage collector frees."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
