"""The state of the study equal-cost: the seeds of every arm, and the verdicts of those that are finished."""

from __future__ import annotations

from pathlib import Path

from arm_states import NOT_FINISHED, shown_share, states
from stored_answers import Answer, answer_of

from nalora.studies.questions import LOSS

NAME = "equal-cost"
LORA_PRO = "lora-pro, full mode"


def equal_cost(results: Path) -> list[str]:
    """Return a sentence about what is finished, and a row for every arm."""
    arms = states(results, NAME)
    open_arms = [f"{arm.arm} ({arm.seeds} of {arm.planned})" for arm in arms if arm.verdict == NOT_FINISHED]
    lines = [
        f"**Not finished:** {len(arms) - len(open_arms)} of {len(arms)} arms have all of their seeds. Without a "
        f"verdict: {', '.join(open_arms)}.",
        "No arm has been judged on a second task, so the study's own claim (half of the gap on two tasks) is open.",
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


def _shown(row: Answer) -> str:
    low, high = row["interval"]
    return (
        f"{row['difference']:+.4f} ({low:+.4f} … {high:+.4f}; {row['seeds']} seeds, "
        f"corrected p = {row['adjusted_p']:.2g}: {row['verdict']})"
    )
