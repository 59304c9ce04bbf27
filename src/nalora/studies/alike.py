"""Whether the runs of a study were asked the same: only numbers of the same questions share a column.

A study's runs have the same settings for their task, so they differ in this only if its files, or the code that makes
its questions, were changed between them. Results of 0.1 do not say what they are of. Having the same settings, they are
taken for the one set that the other runs name, and a note says so; where the others name several sets, they are kept
apart from all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
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


def suffixes(asked: Mapping[str, str]) -> dict[str, str]:
    """What is added to the names of each run's measures: nothing where all runs are of the same questions.

    Args:
        asked: what each run's numbers are of, by its key.
    """
    if len(set(asked.values()) - {""}) < 2:
        return dict.fromkeys(asked, "")
    return {key: f" (questions {each[:6]})" if each else " (questions not recorded)" for key, each in asked.items()}


def is_loss(measure: str) -> bool:
    """Whether a measure is the test loss, of whichever questions."""
    return measure == LOSS or measure.startswith(f"{LOSS} (")


def notes(asked: Iterable[str], screened: Iterable[str]) -> list[str]:
    """What a reader must know.

    Args:
        asked: what the runs in the table are of.
        screened: what the validation losses are of by which learning rates were chosen.
    """
    found, by = set(asked), set(screened) - {""}
    told = []
    if len(found - {""}) > 1:
        told.append("Runs were evaluated on different questions; numbers of each set are in columns of their own.")
    elif len(found) > 1:
        told.append(
            "Some results do not record their questions; as the settings agree, they are taken to be of the same ones."
        )
    if len(by) > 1:
        told.append("Learning rates were chosen by validation losses on different questions, which cannot be compared.")
    return told
