"""One run of a study, from its settings to its results; whatever was finished of it is not done again."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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

    A run whose weights are no longer kept is trained again, and asked everything again, if something new is asked.

    Raises:
        NALoRAError: the run cannot be.
    """
    from nalora.evaluation.targets import Request, evaluate_target
    from nalora.training.run import train
    from nalora.training.settings import check

    folder = Store(job.store).folder(job.key)
    run = check({**job.settings, "output": str(folder.path), **({"device": device} if device else {})})
    known = Store(job.store).result(job.key)
    if known and all(known.has(part) for part in job.parts):
        return
    if known and not folder.trained.is_dir():
        shutil.rmtree(folder.path)
        known = None
    if known is None:
        train(run, resume=folder.settings.is_file())
        let_go_of_memory()
    requests = {
        VALIDATION: Request(with_base=False, split="validation", writing=False),
        TEST: Request(with_base=False, writing=False),
        ANSWERS: Request(with_base=False, limit=job.ask_limit, batch_tokens=job.ask_tokens),
    }
    for part in job.parts:
        if known is None or not known.has(part):
            evaluate_target(str(folder.path), requests[part], device=device)


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
