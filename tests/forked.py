"""Processes that start quickly because a server process has imported the libraries, and waiting for what they write."""

from __future__ import annotations

import multiprocessing
import time

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["nalora.training.run", "nalora.evaluation.targets", "transformers", "peft"])


def until_there(path) -> None:
    latest = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < latest
        time.sleep(0.05)
