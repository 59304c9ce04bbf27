"""Which method to start with, from the studies at LoRA's number of parameters, and the table of all of them.

The rule: start with LoRA, unless a variant is significantly better both in equal-cost and in equal-cost-judged, which
is another task. Until then the variant to try is the one of equal-cost that is significantly better by the most.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tables.arm_states import BASELINE, LORA, NOT_FINISHED, State, shown_share, states
from tables.stored_answers import FULL, study

from choosing_page.step_costs import MethodCosts, variant
from nalora.errors import counted

STUDY, JUDGED = "equal-cost", "equal-cost-judged"
# In the table's order.
_ORDER = (BASELINE, "better", NOT_FINISHED, "not distinguishable", "too few seeds", "worse")


class Choice(NamedTuple):
    """What to start with: the arm's name, its state in equal-cost, and whether a second task confirms it."""

    arm: str
    state: State | None
    confirmed: bool

    @property
    def settings(self) -> dict[str, Any]:
        """The arm's settings in a run file."""
        return dict(next(arm.settings for arm in study(STUDY).arms if arm.name == self.arm))


def choose(first: list[State], second: list[State]) -> tuple[Choice, Choice | None]:
    """Return the method to start with, and the variant to try if none is confirmed, by the rule above."""
    better = sorted(_better(first), key=_gain)
    confirmed = [state for state in better if state.arm in {other.arm for other in _better(second)}]
    if confirmed:
        return Choice(confirmed[0].arm, confirmed[0], True), None
    lora = Choice(LORA, next((state for state in first if state.arm == LORA), None), False)
    return lora, Choice(better[0].arm, better[0], False) if better else None


def chosen(results: Path) -> tuple[Choice, Choice | None]:
    """Return the choice from the stored answers; controls are not recommended."""
    controls = {name for names in study(STUDY).controls.values() for name in names}
    first = [state for state in states(results, STUDY) if state.arm not in controls]
    return choose(first, states(results, JUDGED))


def _better(every: list[State]) -> list[State]:
    return [state for state in every if state.verdict == "better" and state.arm != FULL]


def _gain(state: State) -> float:
    return float(state.row["difference"]) if state.row else 0.0


def run_file(settings: Mapping[str, Any]) -> str:
    """Return an arm's settings as a run file has them."""
    return ", ".join(f"{name}: {value}" for name, value in settings.items())


def as_typed(settings: Mapping[str, Any]) -> str:
    """Return an arm's settings as they are typed after `nalora train RUN.yaml`."""
    return " ".join(f"{name}={value}" for name, value in settings.items())


def table(every: list[State], settings: Mapping[str, Mapping[str, Any]], costs: MethodCosts) -> list[str]:
    """Return a row for every arm except NA-LoRA's, grouped by verdict, the lowest difference first."""
    shown = [state for state in every if not settings[state.arm]["method"].startswith("na-lora")]
    lora = next((state.rate for state in shown if state.arm == LORA), None)
    lines = [
        "| method | verdict | test loss minus LoRA's, 95 % interval | share of the gap | seeds | best rate | × LoRA's "
        "| step × LoRA's | memory × LoRA's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for state in sorted(shown, key=lambda state: (_ORDER.index(state.verdict), _gain(state) or state.mean or 0)):
        verdict = f"**{state.verdict}**" if state.decided else state.verdict
        relative = f"{state.rate / lora:.2f}" if state.rate and lora else ""
        rate = f"{state.rate:.3g}" if state.rate else ""
        seeds = f"{state.seeds} of {state.planned}"
        cells = [verdict, state.difference, shown_share(state.share), seeds, rate, relative]
        name = f"{state.arm} (`{run_file(settings[state.arm])}`)"
        lines.append(f"| {name} | {' | '.join([*cells, *costs.ratios(settings[state.arm])])} |")
    return lines


def summary(every: list[State], settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the arms of the table by verdict, in a line each; undecided ones by the sign of the difference."""
    shown = [state for state in every if not settings[state.arm]["method"].startswith("na-lora") and state.arm != FULL]
    groups = {
        "Better than LoRA": [state for state in shown if state.verdict == "better"],
        "Not finished": [state for state in shown if state.verdict == NOT_FINISHED],
        "Lower mean loss, not significant": [state for state in shown if not state.decided and _gain(state) < 0],
        "Higher mean loss, not significant": [state for state in shown if not state.decided and _gain(state) > 0],
        "Worse than LoRA": [state for state in shown if state.verdict == "worse"],
    }
    return [
        f"- **{title}:** {'; '.join(state.arm for state in sorted(group, key=_gain)) or 'none'}."
        for title, group in groups.items()
    ]


def elsewhere(results: Path) -> list[str]:
    """Return a sentence about the methods that only the study gsm8k has."""
    known = {variant(arm.settings) for arm in study(STUDY).arms}
    names = {
        arm.name
        for arm in study("gsm8k").arms
        if variant(arm.settings) not in known and not arm.settings["method"].startswith(("na-lora", "lora-scaled"))
    }
    shown = [
        f"{state.arm} {state.difference or 'without a difference'}, {state.verdict}, {counted(state.seeds, 'seed')}"
        for state in states(results, "gsm8k")
        if state.arm in names
    ]
    return [f"Only in the study `gsm8k`, with rates a factor of three apart: {'; '.join(shown)}."]
