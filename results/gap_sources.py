"""Draw test loss against trainable parameters for every form of the study gap-sources, and write the table under it.

python results/gap_sources.py

Nothing is trained. As long as runs are missing, the page and the picture show the arms that are known and say so.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tables.stored_answers import FULL
from tables.study_pages import options, percent, test_losses, unfinished, write_page

from nalora.evaluation.significance import Comparison, compare_methods
from nalora.files.atomic import read_json
from nalora.report.drawing import MARKERS, below, colour, panels, save, style, title
from nalora.studies.answer import answer
from nalora.studies.conduct import Progress, so_far
from nalora.studies.questions import LOSS
from nalora.studies.store import Store
from nalora.studies.study import read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME, LORA = "gap-sources", "lora"
RANKS, NEXT_TO_LORA, ALONE, FROZEN = (
    "LoRA, ranks",
    "one part whole, LoRA elsewhere",
    "LoRA on one part",
    "whole, rest frozen",
)


class Point(NamedTuple):
    """An arm: its trainable parameters, the mean test loss over its finished seeds, and how many it will have."""

    arm: str
    parameters: int
    loss: float
    seeds: int
    planned: int


def main(arguments: Sequence[str] | None = None) -> None:
    given = options(__doc__ or "", NAME).parse_args(arguments)
    for path in write(so_far(read(given.study), given.store), given.output):
        print(path)


def write(progress: Progress, folder: Path) -> list[Path]:
    """Write the page and, as soon as one arm has a run at its chosen rate, the picture."""
    found, state = points(progress), unfinished(progress)
    if state:
        print(state)
    page = write_page(folder / "gap.md", page_lines(progress, found, state))
    return [page, *(draw(found, state, folder) if found else [])]


def points(progress: Progress) -> list[Point]:
    """Return the arms that have a finished run at their chosen learning rate."""
    schedule, store = progress.schedule, Store(progress.schedule.store)
    found = []
    for cell in schedule.cells:
        losses, rate = test_losses(progress, cell), schedule.chosen_rate(cell, progress.results)
        if losses and rate is not None:
            result = read_json(store.folder(schedule.job(cell, rate, next(iter(losses))).key).result) or {}
            mean = statistics.fmean(losses.values())
            planned = len(cell.arm.seeds)
            found.append(Point(cell.arm.name, int(result["trainable_parameters"]), mean, len(losses), planned))
    return found


def form(arm: str) -> str:
    """Return the kind of an arm, from its name."""
    if arm == LORA or arm.startswith("r = "):
        return RANKS
    if arm == FULL or arm.endswith("alone whole") or arm.startswith("all "):
        return FROZEN
    return ALONE if arm.endswith(" alone") else NEXT_TO_LORA


def premise(progress: Progress) -> str:
    """Return the sentence on the premise that gates are LoRA's bottleneck, by the rule in the study's file.

    Gates are compared with every control, corrected over the controls of one form. A better control contradicts the
    premise, whatever the other form shows.
    """
    losses = {cell.arm.name: test_losses(progress, cell) for cell in progress.schedule.cells}
    planned = {cell.arm.name: len(cell.arm.seeds) for cell in progress.schedule.cells}
    families: dict[str, list[Comparison]] = {}
    for gate, controls in progress.schedule.study.controls.items():
        short = [name for name in (gate, *controls) if len(losses[name]) < planned[name]]
        if short:
            return (
                f"Whether gates are the bottleneck is open: {len(short)} of the {1 + len(controls)} arms for {gate!r} "
                f"lack runs ({', '.join(f'{arm}: {len(losses[arm])} of {planned[arm]} seeds' for arm in short)})."
            )
        pairs = [(gate, control) for control in controls]
        families[gate] = compare_methods(losses, pairs, higher_is_better=False, planned=len(pairs))
    return verdict_on_premise(families)


def verdict_on_premise(families: Mapping[str, Sequence[Comparison]]) -> str:
    """Return the sentence from the comparisons of each form of training gates with its controls."""
    shown = "; ".join(
        f"{gate} − {one.baseline} {one.difference:+.4f} (p = {one.adjusted_p:.2g})"
        for gate, family in families.items()
        for one in family
        if one.adjusted_p is not None
    )
    better = [one for family in families.values() for one in family if one.verdict == "worse"]
    if better:
        names = ", ".join(f"{one.baseline} (compared with {one.method})" for one in better)
        return f"The premise that gates are the bottleneck is contradicted: {names} has a lower test loss. {shown}."
    for gate, family in families.items():
        if family and all(one.verdict == "better" for one in family):
            return f"The premise that gates are the bottleneck holds: {gate} is better than every control. {shown}."
    return f"The data do not decide whether gates are the bottleneck. {shown}."


def page_lines(progress: Progress, found: Sequence[Point], state: str) -> list[str]:
    """Return the page: its state, the premise, and a row for every arm."""
    by_arm = {point.arm: point for point in found}
    (part,) = answer(progress.schedule, progress.results, progress.failed).parts
    rows = {one.method: one for one in part.comparisons.get(LOSS, ())}
    gap = by_arm[LORA].loss - by_arm[FULL].loss if {LORA, FULL} <= by_arm.keys() else None
    lines = ["# Where the gap between LoRA and full fine-tuning is", "", *([f"**{state}**", ""] if state else [])]
    lines += [premise(progress), ""]
    if gap is not None:
        lines += [f"The gap is {gap:.4f} (test loss of LoRA minus that of full fine-tuning).", ""]
    lines += ["| arm | trainable parameters | seeds | test loss | share of the gap closed | verdict |"]
    lines += ["|---|---|---|---|---|---|"]
    for cell in progress.schedule.cells:
        arm = cell.arm.name
        if (point := by_arm.get(arm)) is None:
            lines.append(f"| {arm} | | 0 of {len(cell.arm.seeds)} | | | no finished run |")
            continue
        share = percent((by_arm[LORA].loss - point.loss) / gap) if gap and arm not in (LORA, FULL) else ""
        verdict = rows[arm].verdict if arm in rows else "baseline" if arm == LORA else "not finished"
        seeds = f"{point.seeds} of {point.planned}"
        lines.append(f"| {arm} | {point.parameters:,} | {seeds} | {point.loss:.4f} | {share} | {verdict} |")
    return lines


def draw(found: Sequence[Point], state: str, folder: Path) -> list[Path]:
    """Draw every arm as a point with its name; the ranks of LoRA are joined by a line."""
    with style():
        figure, (axis,) = panels(1, 1, 9.0, 6.0)
        for number, kind in enumerate((RANKS, NEXT_TO_LORA, ALONE, FROZEN)):
            _points(axis, number, kind, sorted(one for one in found if form(one.arm) == kind))
        axis.set_xscale("log")
        axis.set_xlabel("trainable parameters")
        axis.set_ylabel("test loss")
        title(figure, "Test loss by number of trainable parameters")
        notes = ["Mean over seeds at each arm's best learning rate.", *([state] if state else [])]
        below(figure, axis, notes)
        folder.mkdir(parents=True, exist_ok=True)
        return save(figure, folder, "gap")


def _points(axis: Axes, number: int, kind: str, chosen: Sequence[Point]) -> None:
    if not chosen:
        return
    ordered = sorted(chosen, key=lambda point: point.parameters)
    x, y = [point.parameters for point in ordered], [point.loss for point in ordered]
    line = "-" if kind == RANKS else "none"
    axis.plot(x, y, linestyle=line, marker=MARKERS[number], color=colour(number), label=kind)
    for point in ordered:
        place = (point.parameters, point.loss)
        axis.annotate(point.arm, place, xytext=(4, 3), textcoords="offset points", fontsize=7, color=colour(number))


if __name__ == "__main__":
    main()
