"""Studies whose runs take no time: their results are drawn from their settings."""

from __future__ import annotations

import hashlib
import json
import random
import time

from nalora.studies.job import Job
from nalora.studies.store import ANSWERS, TEST, VALIDATION, Store
from nalora.studies.study import understand

BEST = {"lora": 1e-3, "na-lora": 3e-4}


def study(**changes):
    return understand({
        "name": "dummy",
        "settings": {"model": "smollm2-135m", "task": "gym/chain_sum", "steps": 1},
        "arms": {"lora": {"method": "lora"}, "na-lora": {"method": "na-lora"}},
        "learning_rates": [1e-4, 3e-4, 1e-3],
        "seeds": [0, 1, 2],
        **changes,
    })  # fmt: skip


def loss_of(settings, split):
    """Lowest at the method's best learning rate, with a little noise of the seed."""
    name = json.dumps([settings[key] for key in ("method", "learning_rate", "seed", "rank")])
    noise = random.Random(hashlib.sha256(f"{split} {name}".encode()).digest()).gauss(0, 0.01)
    best = BEST.get(settings["method"], 3e-4)
    return 1.0 + abs(settings["learning_rate"] / best - 1) + noise


def pretend(job: Job, seconds: float = 0.0) -> None:
    """What `work` does, without a model: the same files in the same places, whatever was finished kept."""
    folder = Store(job.store).folder(job.key)
    folder.path.mkdir(parents=True, exist_ok=True)
    time.sleep(seconds)
    if job.settings["method"] == "full":
        raise RuntimeError("out of memory")
    if not folder.result.is_file():
        write(folder.result, {"train_loss": 1.0, "seconds": 1.0, "examples": 8})
        with (folder.path / "trained").open("a") as file:
            file.write("once\n")
    for part in job.parts:
        place = folder.evaluations / ("task-validation" if part == VALIDATION else "task") / "adapted-0"
        place.mkdir(parents=True, exist_ok=True)
        loss = loss_of(job.settings, VALIDATION if part == VALIDATION else TEST)
        summary = {"target_loss": {"value": loss}, "measures": {"accuracy": {"value": 1 / loss}}}
        write(place / ("summary.json" if part == ANSWERS else "losses.json"), summary)


def pretend_slowly(job: Job) -> None:
    pretend(job, 0.05)


def write(path, value):
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    partial.replace(path)
