"""Studies whose runs take no time, with results computed from their settings, and engines for them."""

from __future__ import annotations

import hashlib
import json
import random
import time
from unittest import mock

from nalora.studies.engines import attempt
from nalora.studies.job import Job
from nalora.studies.outcome import Outcome
from nalora.studies.store import ANSWERS, TEST, VALIDATION, Store
from nalora.studies.study import parse

BEST = {"lora": 1e-3, "na-lora": 3e-4}
STEPS = 4


def study(**changes):
    return parse({
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


def pretend_in_steps(job: Job) -> None:
    """A run that takes a moment and, killed anywhere, continues after its last step; every finished step is a line."""
    folder = Store(job.store).folder(job.key)
    folder.path.mkdir(parents=True, exist_ok=True)
    steps = folder.path / "steps"
    for step in range(len(steps.read_text().split()) if steps.is_file() else 0, STEPS):
        time.sleep(0.02)
        with steps.open("a") as file:
            file.write(f"{step}\n")
    pretend(job)


def write(path, value):
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    partial.replace(path)


class Instantly:
    """An engine that does a job at once when it is submitted."""

    def __init__(self, do=pretend):
        self.do, self.ended, self.submitted = do, [], []

    def has_room(self):
        return len(self.ended) < 4

    def submit(self, job):
        self.submitted.append(job.key)
        self.ended.append(Outcome(job.key, self.done(job)))

    def done(self, job):
        self.do(job)

    def wait(self, seconds):
        ended, self.ended = self.ended, []
        return ended

    def close(self):
        pass


class Attempting(Instantly):
    """An engine whose runs may fail; errors are reported as by every worker."""

    def done(self, job):
        with mock.patch("nalora.studies.engines.release_memory"):  # a third of a second, and nothing is held
            return attempt(job, self.do)
