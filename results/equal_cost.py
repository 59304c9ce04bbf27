"""The state of the study equal-cost: the seeds of every arm, and the verdicts of those that are finished."""

from __future__ import annotations

import statistics
from pathlib import Path

from stored_answers import FULL, Answer, answer_of, study, values

from nalora.studies.questions import LOSS

NAME, LORA = "equal-cost", "lora"
LORA_PRO = "lora-pro, full mode"


def equal_cost(results: Path) -> list[str]:
    """Return a sentence about what is finished, and a row for every arm."""
    part, planned = answer_of(results, NAME), {arm.name: len(arm.seeds) for arm in study(NAME).arms}
    by_arm, rows = values(part), {row["method"]: row for row in part["comparisons"][LOSS]}
    gap = -rows[FULL]["difference"]
    open_arms = [f"{arm} ({len(by_arm.get(arm, {}))} of {planned[arm]})" for arm in part["missing"]]
    lines = [
        f"**Not finished:** {len(planned) - len(open_arms)} of {len(planned)} arms have all of their seeds. Without a "
        f"verdict: {', '.join(open_arms)}.",
        "No arm has been judged on a second task, so the study's own claim (half of the gap on two tasks) is open.",
        "",
        "| arm | seeds | learning rate | test loss | difference from LoRA | share of the gap | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, total in planned.items():
        losses = by_arm.get(arm, {})
        mean = f"{statistics.fmean(losses.values()):.4f}" if losses else ""
        row = rows.get(arm)
        cells = [f"{len(losses)} of {total}", f"{part['learning_rates'][arm]:.3g}", mean]
        if row:
            low, high = row["interval"]
            verdict = f"**{row['verdict']}**" if row["verdict"] in ("better", "worse") else "–"
            share = f"{-row['difference'] / gap:.0%}".replace("%", " %")
            cells += [f"{row['difference']:+.4f} ({low:+.4f} … {high:+.4f})", share, verdict]
        else:
            cells += ["", "", "baseline" if arm == LORA else "not finished"]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
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
