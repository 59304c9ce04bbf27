"""The arms of a study that compares forms of LoRA: seeds, difference from LoRA, share of the gap, verdict."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import NamedTuple

from nalora.studies.questions import LOSS
from tables.stored_answers import FULL, Answer, answer_of, study, values
from tables.study_pages import percent

LORA = "lora"
BASELINE, NOT_FINISHED = "baseline", "not finished"


class State(NamedTuple):
    """An arm as far as its runs are finished.

    Attributes:
        rate: the chosen learning rate; None before it is chosen.
        mean: test loss over the finished seeds; None without one.
        row: the comparison with LoRA as the study's answer has it; None for LoRA and before the arm is finished.
        share: of the gap between LoRA and full fine-tuning; None without a row or a gap.
    """

    arm: str
    seeds: int
    planned: int
    rate: float | None
    mean: float | None
    row: Answer | None
    share: float | None

    @property
    def verdict(self) -> str:
        """The study's verdict, or why there is none."""
        if self.row is None:
            return BASELINE if self.arm == LORA and self.seeds == self.planned else NOT_FINISHED
        return str(self.row["verdict"])

    @property
    def decided(self) -> bool:
        """Whether the arm is significantly better or worse than LoRA."""
        return self.verdict in ("better", "worse")

    @property
    def difference(self) -> str:
        """The difference from LoRA with its interval; empty without one."""
        if self.row is None or self.row["interval"] is None:
            return ""
        low, high = self.row["interval"]
        return f"{self.row['difference']:+.4f} ({low:+.4f} … {high:+.4f})"


def states(results: Path, name: str) -> list[State]:
    """Return the state of every arm of a study, in the order of its file; empty if it has no answer yet."""
    if not (results / name / "answer.json").is_file():
        return []
    return states_of(answer_of(results, name), {arm.name: len(arm.seeds) for arm in study(name).arms})


def states_of(part: Answer, planned: dict[str, int]) -> list[State]:
    """Return the states from an answer and the planned number of seeds of every arm."""
    by_arm = values(part) if LOSS in part["measures"] else {}
    rows = {row["method"]: row for row in part["comparisons"].get(LOSS, []) if row["method"] not in part["missing"]}
    gap = -rows[FULL]["difference"] if FULL in rows else None
    found = []
    for arm, total in planned.items():
        losses, row = by_arm.get(arm, {}), rows.get(arm)
        mean = statistics.fmean(losses.values()) if losses else None
        share = -row["difference"] / gap if row and gap else None
        found.append(State(arm, len(losses), total, part["learning_rates"].get(arm), mean, row, share))
    return found


def shown_share(share: float | None) -> str:
    """Return a share of the gap as the pages write it; empty if it is not known."""
    return "" if share is None else percent(share)
