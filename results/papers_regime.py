"""Write the table of the study papers-regime: what a fixed low learning rate claims, and what tuned rates leave of it.

python results/papers_regime.py

Nothing is trained. Tuned differences are those of studies/equal-cost.yaml, or of studies/gsm8k.yaml for arms that are
only there. What is not finished is reported with its number of runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tables.stored_answers import STUDIES
from tables.study_pages import options, unfinished, write_page

from nalora.evaluation.significance import ALPHA, Comparison
from nalora.studies.answer import answer
from nalora.studies.conduct import Progress, so_far
from nalora.studies.questions import LOSS
from nalora.studies.study import read

NAME, TUNED = "papers-regime", ("equal-cost", "gsm8k")
HOLDS, TURNS, VANISHES, UNKNOWN, NO_CLAIM = "holds", "turns around", "vanishes", "not known yet", "no claim"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__ or "", NAME)
    default = [STUDIES / f"{name}.yaml" for name in TUNED]
    parser.add_argument("--tuned", type=Path, nargs="+", default=default, help="studies with tuned rates, in order")
    given = parser.parse_args(arguments)
    tuned = [so_far(read(file), given.store) for file in given.tuned]
    print(write(so_far(read(given.study), given.store), tuned, given.output))


def write(fixed: Progress, tuned: Sequence[Progress], folder: Path) -> Path:
    """Write the page."""
    states = [state for progress in (fixed, *tuned) if (state := unfinished(progress))]
    for state in states:
        print(state)
    return write_page(folder / "claims.md", page_lines(fixed, tuned, states))


def tuned_comparisons(tuned: Sequence[Progress]) -> dict[str, Comparison]:
    """Return the comparison of every finished arm with LoRA at tuned rates; the first study that has the arm counts."""
    found: dict[str, Comparison] = {}
    named: set[str] = set()
    for progress in tuned:
        for part in answer(progress.schedule, progress.results, progress.failed).parts:
            rows = {one.method: one for one in part.comparisons.get(LOSS, ())}
            found |= {arm: one for arm, one in rows.items() if arm not in named}
        named |= {arm.name for arm in progress.schedule.study.arms}
    return found


def outcome(claimed: Comparison, tuned: Comparison | None) -> str:
    """Return what happens to a claim when the rate of every method is tuned."""
    if claimed.p is None or claimed.p >= ALPHA:
        return NO_CLAIM
    if tuned is None or tuned.adjusted_p is None:
        return UNKNOWN
    if tuned.verdict not in ("better", "worse"):
        return VANISHES
    return HOLDS if (tuned.difference > 0) == (claimed.difference > 0) else TURNS


def page_lines(fixed: Progress, tuned: Sequence[Progress], states: Sequence[str]) -> list[str]:
    """Return the page: its state, a sentence for every rate, and a row for every rate and method."""
    parts = answer(fixed.schedule, fixed.results, fixed.failed).parts
    known, study = tuned_comparisons(tuned), fixed.schedule.study
    others = [arm.name for arm in study.arms if arm.name != study.baseline]
    sentences, rows = [], []
    for part in parts:
        rate = ", ".join(str(value) for value in part.settings.values())
        compared = {one.method: one for one in part.comparisons.get(LOSS, ())}
        results = {arm: outcome(one, known.get(arm)) for arm, one in compared.items()}
        sentences.append(f"- {rate}: {_summary(results, len(others))}")
        rows += [_row(rate, arm, compared.get(arm), known.get(arm), results) for arm in others]
    return [
        "# What one fixed low learning rate claims, and what tuning leaves of it",
        "",
        *(line for state in states for line in (f"**{state}**", "")),
        *sentences,
        "",
        "Differences in test loss from LoRA; negative is better. A claim has p < 0.05 without correction.",
        "",
        "| rate | method | at this fixed rate | every method at its tuned rate |",
        "|---|---|---|---|",
        *rows,
    ]


def _summary(results: Mapping[str, str], planned: int) -> str:
    claims = [result for result in results.values() if result != NO_CLAIM]
    counts = ", ".join(
        f"{claims.count(kind)} {kind}" for kind in (HOLDS, TURNS, VANISHES, UNKNOWN) if claims.count(kind)
    )
    seen = f"{len(results)} of {planned} methods compared"
    return f"{seen}, {len(claims)} claimed to differ from LoRA{f' ({counts})' if counts else ''}."


def _row(rate: str, arm: str, fixed: Comparison | None, tuned: Comparison | None, results: Mapping[str, str]) -> str:
    if fixed is None or fixed.p is None:
        return f"| {rate} | {arm} | not finished | {_shown(tuned)} |"
    claim = ("better" if fixed.difference < 0 else "worse") if fixed.p < ALPHA else NO_CLAIM
    first = f"**{claim}** {_numbers(fixed)}, p = {fixed.p:.2g}, corrected {fixed.adjusted_p:.2g}"
    result = results[arm]
    second = _shown(tuned) if result in (NO_CLAIM, UNKNOWN) else f"**{result}** {_shown(tuned)}"
    return f"| {rate} | {arm} | {first} | {second} |"


def _shown(one: Comparison | None) -> str:
    if one is None or one.adjusted_p is None:
        return "not finished"
    return f"{_numbers(one)}, corrected p = {one.adjusted_p:.2g}"


def _numbers(one: Comparison) -> str:
    if one.interval is None:
        return f"{one.difference:+.4f}"
    low, high = one.interval
    return f"{one.difference:+.4f} ({low:+.4f} … {high:+.4f})"


if __name__ == "__main__":
    main()
