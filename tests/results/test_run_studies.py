"""Studies run for the minutes that there are, and what they finished is in the tables."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
from pathlib import Path

import pytest
import tiny


@pytest.fixture
def run_studies():
    return importlib.import_module("run_studies")


def test_phases_are_those_of_the_logs(run_studies, tmp_path):
    logs = {"a": "training, with loading and tokenising: 4.0 s\nevaluation of validation, test: 3.0 s\n",
            "b": "Loading …\ntraining, with loading and tokenising: 6.0 s\n"}  # fmt: skip
    for name, text in logs.items():
        (tmp_path / f"{name}.log").write_text(text)
    assert run_studies.phases(tmp_path, 0.0) == [
        "training: 5.0 s (median of 2 runs)", "evaluation: 3.0 s (median of 1 runs)"
    ]  # fmt: skip
    assert run_studies.phases(tmp_path, 1e12) == []


@pytest.mark.parametrize("seconds", [200, 12])
def test_a_study_is_finished_or_stopped_in_time(run_studies, seconds, tmp_path):
    """What a stopped study has not finished is left for the next call, and no process goes on with it."""
    settings = {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 40, "test_size": 6,
        "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, "rank": 4, "device": "cpu",
        "steps": 2 if seconds > 100 else 100_000, "batch_size": 4,
    }  # fmt: skip
    study = {"name": "small", "settings": settings, "arms": {"lora": {"method": "lora"}}, "learning_rates": [0.01],
             "seeds": [0], "generate": "none", "validation_size": 8}  # fmt: skip
    (tmp_path / "small.yaml").write_text(json.dumps(study))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job, and inherited
    try:
        outcome = run_studies.run(str(tmp_path / "small.yaml"), tmp_path / "store", 1, seconds)
    finally:
        signal.signal(signal.SIGINT, before)
    finished = list((tmp_path / "store").glob("*/result.json"))
    assert (outcome, len(finished)) == (("finished", 1) if seconds > 100 else ("out of time", 0))
    working = [
        command.parent.name for command in Path("/proc").glob("[0-9]*/cmdline")
        if any(str(tmp_path) in link for link in open_files(command.parent))
    ]  # fmt: skip
    assert working == []


def open_files(process):
    with contextlib.suppress(OSError):
        return [os.readlink(file) for file in (process / "fd").iterdir()]
    return []
