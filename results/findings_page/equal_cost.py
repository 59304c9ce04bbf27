"""The state of the study equal-cost: the seeds of every arm, and the verdicts of those that are finished."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from tables.arm_states import LORA, NOT_FINISHED, State, shown_share, states
from tables.stored_answers import BASES, FULL, Answer, answer_of, on_plain_base, study, values

from nalora.studies.questions import LOSS

NAME, JUDGED = "equal-cost", "equal-cost-judged"
HALF = 0.5
LORA_PRO = "lora-pro, full mode"


def equal_cost(results: Path) -> list[str]:
    """Return a sentence about what is finished, and a row for every arm."""
    arms = states(results, NAME)
    lines = [
        completeness(arms),
        claim(arms, states(results, JUDGED)),
        "",
        "| arm | seeds | learning rate | test loss | difference from LoRA | share of the gap | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in arms:
        verdict = f"**{arm.verdict}**" if arm.decided else arm.verdict.replace("not distinguishable", "–")
        rate, mean = (f"{arm.rate:.3g}" if arm.rate else ""), (f"{arm.mean:.4f}" if arm.mean else "")
        cells = [f"{arm.seeds} of {arm.planned}", rate, mean, arm.difference, shown_share(arm.share), verdict]
        lines.append(f"| {arm.arm} | {' | '.join(cells)} |")
    return lines


def completeness(arms: Sequence[State]) -> str:
    """Return which arms have no verdict yet."""
    left = [f"{arm.arm} ({arm.seeds} of {arm.planned})" for arm in arms if arm.verdict == NOT_FINISHED]
    if not left:
        return f"All {len(arms)} arms have all of their seeds."
    finished = f"{len(arms) - len(left)} of {len(arms)} arms have all of their seeds"
    return f"**Not finished:** {finished}. Without a verdict: {', '.join(left)}."


def claim(arms: Sequence[State], judged: Sequence[State]) -> str:
    """Return for which variants the claim of equal-cost-judged holds: half of the gap or more on both tasks."""
    here = {arm.arm: arm.share for arm in arms}
    known = {
        arm.arm: (here.get(arm.arm), arm.share)
        for arm in judged
        if arm.arm not in (LORA, FULL) and arm.share is not None
    }
    if not known:
        return (
            "No arm has been judged on a second task, so the study's own claim (half of the gap on two tasks) is open."
        )
    cells = [
        f"{arm} ({shown_share(one) or 'not finished'} here, {shown_share(other)} there: "
        f"{'the claim holds' if one is not None and min(one, other) >= HALF else 'it does not hold'})"
        for arm, (one, other) in known.items()
    ]
    return f"Judged on a second task (half of the gap on both is claimed): {'; '.join(cells)}."


def untuned(results: Path) -> list[str]:
    """Return how NA-LoRA compares with LoRA in the study of bases, on the base in its own precision."""
    if not (results / BASES / "answer.json").is_file():
        return []
    part, (rate,) = answer_of(results, BASES), study(BASES).learning_rates
    rows = [row for row in part["comparisons"][LOSS] if row["method"] in on_plain_base(BASES)]
    return [
        f"Learning rate {rate:g} for both; corrected over the {len(part['comparisons'][LOSS])} arms of the study.",
        "",
        "| arm | test loss | difference from LoRA, 95 % interval | seeds | corrected p | verdict |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['method']} | {_mean(part, row['method']):.4f} (LoRA: {_mean(part, row['baseline']):.4f}) | "
            f"{_interval(row)} | {row['seeds']} | {row['adjusted_p']:.2g} | **{row['verdict']}** |"
            for row in rows
        ),
    ]


def lora_pro(results: Path) -> list[str]:
    """Return a sentence with both modes of LoRA-Pro, each compared with LoRA in its own study."""
    efficient = _row(answer_of(results, "gsm8k"), "lora-pro")
    full = _row(answer_of(results, NAME), LORA_PRO)
    return [
        f"- **LoRA-Pro** was published with its full mode. Above is its efficient mode, {_shown(efficient)};",
        f"  in `equal-cost` its full mode is {_shown(full)}.",
    ]


def _row(part: Answer, arm: str) -> Answer:
    return next(dict(row) for row in part["comparisons"][LOSS] if row["method"] == arm)


def _mean(part: Answer, arm: str) -> float:
    return statistics.fmean(values(part)[arm].values())


def _interval(row: Answer) -> str:
    low, high = row["interval"]
    return f"{row['difference']:+.4f} ({low:+.4f} … {high:+.4f})"


def _shown(row: Answer) -> str:
    return f"{_interval(row)[:-1]}; {row['seeds']} seeds, corrected p = {row['adjusted_p']:.2g}: {row['verdict']})"
