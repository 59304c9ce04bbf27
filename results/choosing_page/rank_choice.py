"""Which rank to start with: the state of the study gap-sources, and what a rank costs."""

from __future__ import annotations

from pathlib import Path

from tables.arm_states import LORA, State, shown_share, states
from tables.stored_answers import study

from choosing_page.method_choice import STUDY
from choosing_page.step_costs import Row, rank_ratios

NAME = "gap-sources"


def ranks(every: list[State], rank: int) -> dict[int, State]:
    """Return the arms of gap-sources that differ in nothing but the rank; LoRA's own arm has the usual rank."""
    found = {int(state.arm.removeprefix("r = ")): state for state in every if state.arm.startswith("r = ")}
    lora = next((state for state in every if state.arm == LORA), None)
    if not found:
        return {}
    return dict(sorted((found | ({rank: lora} if lora else {})).items()))


def best_rank(by_rank: dict[int, State]) -> tuple[int, State] | None:
    """Return the rank that is significantly better than the usual one by the most; None if there is none."""
    better = {rank: state for rank, state in by_rank.items() if state.verdict == "better" and state.row}
    rank = min(better, key=lambda rank: better[rank].row["difference"], default=None)
    return None if rank is None else (rank, better[rank])


def advice(by_rank: dict[int, State], rank: int) -> tuple[str, str]:
    """Return what to start with and why."""
    if not by_rank:
        return str(rank), (
            f"all comparisons of methods have r = {rank}; whether a higher rank has a lower loss has not been measured "
            f"(`{NAME}` has not run)"
        )
    best = best_rank(by_rank)
    unfinished = [other for other, state in by_rank.items() if state.verdict == "not finished"]
    open_ranks = f"; not finished: r = {', '.join(map(str, unfinished))}" if unfinished else ""
    if best is None:
        return str(rank), f"no other rank is significantly better in `{NAME}`{open_ranks}"
    other, state = best
    why = f"r = {other} is better in `{NAME}`: {state.difference}, {shown_share(state.share)} of the gap to full "
    why += f"fine-tuning, {state.seeds} seeds, best rate {state.rate:.3g}{open_ranks}"
    return f"{rank}, then {other}", why


def cost(rows: list[Row]) -> str:
    """Return what the highest measured rank costs; empty if ranks were not measured."""
    measured = rank_ratios(rows)
    if measured is None:
        return ""
    low, high, time, memory = measured
    where = "with fused layers at 8B shapes"
    return f"{where} r = {high} takes {time:.2f} of the time and {memory:.2f} of the memory of r = {low}"


def section(results: Path, rank: int) -> list[str]:
    """Return the losses by rank, or the sentence that they have not been measured."""
    by_rank = ranks(states(results, NAME), rank)
    if not by_rank:
        link = f"[`{NAME}`](../src/nalora/runs/recipes/studies/{NAME}.yaml)"
        number = len([arm for arm in study(NAME).arms if arm.name.startswith("r = ")])
        return [
            f"**Not measured yet.** All methods above have r = {rank}. {link}",
            f"compares it with {number} other ranks and has not run. The head of `{STUDY}.yaml` says that a rank of",
            "128 closes the gap to full fine-tuning; the runs behind that sentence are not stored, so this is not a",
            "result of this page.",
        ]
    lines = [
        f"[`{NAME}`](../results/{NAME}/answer.md), compared with r = {rank}; corrected over all arms of that study:",
        "",
        "| rank | verdict | test loss minus LoRA's, 95 % interval | share of the gap | seeds | best rate |",
        "|---|---|---|---|---|---|",
    ]
    for number, state in by_rank.items():
        rate = f"{state.rate:.3g}" if state.rate else ""
        seeds = f"{state.seeds} of {state.planned}"
        cells = [state.verdict, state.difference, shown_share(state.share), seeds, rate]
        lines.append(f"| {number} | {' | '.join(cells)} |")
    return lines
