"""Whether the runs of a study were asked the same: only numbers of the same questions share a column.

A study's runs have the same settings for their task, so they differ in this only if its files, or the code that makes
its questions, were changed between them. Results of 0.1 do not say what they are of. Having the same settings, they are
taken for the one set that the other runs name, and a note says so; where the others name several sets, they are kept
apart from all of them.

Runs with different seeds may have different questions by design: reasoning-gym draws them by the run's seed. Arms are
compared seed by seed, so only runs with the same seed must have the same questions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LOSS = "test loss"


def asked_in(summary: Mapping[str, Any]) -> str:
    """A digest of what a summary is of; empty where it does not say."""
    evaluated = summary.get("evaluated")
    if not isinstance(evaluated, dict):
        return ""
    parts = [evaluated.get(name) for name in ("questions", "options", "style", "max_new_tokens")]
    return hashlib.sha256(json.dumps([*parts, summary.get("examples")], default=str).encode()).hexdigest()


def is_other_than_trained(summary: Mapping[str, Any]) -> bool:
    """Whether a summary says that it is of other data, options or prompts than the run was trained with."""
    evaluated = summary.get("evaluated")
    return isinstance(evaluated, dict) and evaluated.get("own") is False


def suffixes(asked: Mapping[str, str], seeds: Mapping[str, int]) -> dict[str, str]:
    """What is added to the names of each run's measures: nothing where runs of one seed are of the same questions.

    Args:
        asked: what each run's numbers are of, by its key.
        seeds: of each run, by its key.
    """
    if not _differ((seeds[key], questions) for key, questions in asked.items()):
        return dict.fromkeys(asked, "")
    return {key: f" (questions {each[:6]})" if each else " (questions not recorded)" for key, each in asked.items()}


def _differ(runs: Iterable[tuple[int, str]]) -> bool:
    """Whether runs with the same seed name different questions."""
    by_seed: dict[int, set[str]] = {}
    for seed, questions in runs:
        by_seed.setdefault(seed, set()).update({questions} - {""})
    return any(len(questions) > 1 for questions in by_seed.values())


def is_loss(measure: str) -> bool:
    """Whether a measure is the test loss, of whichever questions."""
    return measure == LOSS or measure.startswith(f"{LOSS} (")


def notes(asked: Sequence[tuple[int, str]], screened: Iterable[tuple[int, str]]) -> list[str]:
    """What a reader must know.

    Args:
        asked: the seed of each run in the table, and what it is of.
        screened: the same of the validation losses by which learning rates were chosen.
    """
    recorded = {bool(questions) for _, questions in asked}
    sentences = []
    if _differ(asked):
        sentences.append("Runs were evaluated on different questions; numbers of each set are in columns of their own.")
    elif len(recorded) > 1:
        sentences.append(
            "Some results do not record their questions; as the settings agree, the questions are taken to be the same."
        )
    if _differ(screened):
        sentences.append(
            "Learning rates were chosen by validation losses on different questions, which cannot be compared."
        )
    return sentences
