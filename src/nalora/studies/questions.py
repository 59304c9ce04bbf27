"""Which test questions a result is about: results on different questions get different columns.

Runs of one study share the settings of their task, so their questions differ only if the task's files or code changed
between the runs. Results of 0.1 do not record their questions; because the settings agree, they are taken to be those
that the other runs record, and a note says so. If the other runs record several sets, they get a column for themselves.

The questions may depend on the seed (reasoning-gym draws them with the run's seed). Arms are compared seed by seed, so
only runs with the same seed must have the same questions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LOSS = "test loss"


def questions_digest(summary: Mapping[str, Any]) -> str:
    """Return a digest of the questions that a summary is about; empty if it does not record them."""
    evaluated = summary.get("evaluated")
    if not isinstance(evaluated, dict):
        return ""
    parts = [evaluated.get(name) for name in ("questions", "options", "style", "max_new_tokens")]
    return hashlib.sha256(json.dumps([*parts, summary.get("examples")], default=str).encode()).hexdigest()


def is_on_other_data(summary: Mapping[str, Any]) -> bool:
    """Whether a summary records other data, options or prompts than those of the run's own settings."""
    evaluated = summary.get("evaluated")
    return isinstance(evaluated, dict) and evaluated.get("own") is False


def column_suffixes(digests: Mapping[str, str], seeds: Mapping[str, int]) -> dict[str, str]:
    """Return what is appended to the column names of each run: nothing if runs of one seed share their questions.

    Args:
        digests: of each run's questions, by the run's key.
        seeds: of each run, by its key.
    """
    if not _differ((seeds[key], digest) for key, digest in digests.items()):
        return dict.fromkeys(digests, "")
    return {key: f" (questions {digest[:6] or 'not recorded'})" for key, digest in digests.items()}


def _differ(runs: Iterable[tuple[int, str]]) -> bool:
    """Whether runs with the same seed record different questions."""
    by_seed: dict[int, set[str]] = {}
    for seed, digest in runs:
        by_seed.setdefault(seed, set()).update({digest} - {""})
    return any(len(digests) > 1 for digests in by_seed.values())


def is_loss(measure: str) -> bool:
    """Whether a measure is the test loss, on any set of questions."""
    return measure == LOSS or measure.startswith(f"{LOSS} (")


def notes(tested: Sequence[tuple[int, str]], screened: Iterable[tuple[int, str]]) -> list[str]:
    """Return notes on questions that differ: seed and digest of runs in the table, and of screening runs."""
    sentences = []
    if _differ(tested):
        sentences.append("Runs were evaluated on different questions; each set of questions has its own columns.")
    elif len({bool(digest) for _, digest in tested}) > 1:
        sentences.append(
            "Some results do not record their questions; as the settings agree, the questions are taken to be the same."
        )
    if _differ(screened):
        sentences.append(
            "Learning rates were chosen by validation losses on different questions, which cannot be compared."
        )
    return sentences
