"""Trivial answers score nothing in any family, or the family is listed as one that cannot be trusted."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from nalora import tasks
from nalora.errors import NALoRAError
from nalora.tasks import gym

pytest.importorskip("reasoning_gym")
TABLE = json.loads(gym.TRUST_FILE.read_text(encoding="utf-8"))
SCRIPT = Path(__file__).parents[2] / "benchmarks/gym_trust.py"
# Cannot be generated: one combines other families, one generates other questions each time.
LEFT_OUT = {"composite", "codeio"}


def measured_again(*families: str) -> dict:
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [sys.executable, str(SCRIPT), *families]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout[ended.stdout.index("{") :])["families"]


def test_every_family_was_measured():
    assert set(TABLE["families"]) | LEFT_OUT == set(gym.families())


def test_the_table_can_be_measured_again():
    """A few families; the slow test takes all."""
    known = sorted(set(TABLE["families"]) - {"intermediate_integration"})
    chosen = ["coin_flip", "complex_arithmetic", *random.Random(7).sample(known, 4)]
    again = measured_again(*chosen)
    assert {family: TABLE["families"][family] for family in again} == again
    assert set(again) == set(chosen)


@pytest.mark.slow
def test_the_whole_table_can_be_measured_again():
    """By the faults: a busy machine may not finish an answer in its time, which changes a share."""
    again = measured_again(*sorted(TABLE["families"]))
    faults = {family: found for family, row in again.items() if (found := gym.fault(row)) is not None}
    assert {family: found.measure for family, found in faults.items()} == {
        family: found.measure for family, found in gym.untrusted().items()
    }


def test_families_that_accept_anything_are_listed():
    listed = gym.untrusted()
    assert {"coin_flip", "game_of_life_halting", "puzzle24"} <= set(listed)
    assert listed["coin_flip"].reason == "its scorer gives the full score to '0' for 96% of its questions"
    assert listed["game_of_life"].measure == "score"
    assert not set(listed) & {
        "caesar_cipher",
        "word_sorting",
        "chain_sum",
        "complex_arithmetic",
        "n_queens",
        "countdown",
    }


def row(answer="0", accuracy=0.0, score=0.0, by_chance=0.0):
    return {"answer": answer, "accuracy": accuracy, "score": score, "by_chance": by_chance}


@pytest.mark.parametrize(
    ("own", "by_accuracy", "by_score", "measure"),
    [
        (1.0, row(), row(), None),
        (None, row(), row(), None),
        (0.96, row(), row(), "accuracy"),
        (1.0, row(accuracy=0.5, by_chance=0.5), row(), None),
        (1.0, row(accuracy=0.5, by_chance=0.3), row(), "accuracy"),
        (1.0, row(accuracy=0.1), row(score=0.3), None),
        (1.0, row(accuracy=0.1), row(score=0.31), "score"),
    ],
)
def test_a_family_is_judged_by_what_is_above_chance(own, by_accuracy, by_score, measure):
    found = gym.fault({"own": own, "by_accuracy": by_accuracy, "by_score": by_score})
    assert (found.measure if found else None) == measure


def test_evaluation_is_refused_and_training_gives_a_notice():
    task = tasks.get("gym/coin_flip", train_size=3, test_size=3)
    with pytest.raises(
        NALoRAError, match="gym/coin_flip: found its scorer gives the full score to '0' for 96% .*another family"
    ):
        task.prepare_scoring()
    assert "its evaluation is refused" in task.notice()
    with pytest.warns(UserWarning, match="gym/game_of_life: .*compare accuracies"):
        tasks.get("gym/game_of_life", train_size=3, test_size=3).prepare_scoring()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trusted = tasks.get("gym/chain_sum", train_size=3, test_size=3)
        assert trusted.notice() == ""
        trusted.prepare_scoring()
