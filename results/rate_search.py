"""Fit the rules of the study rate-search on its first cases, freeze them in a file, and judge them on the others.

python results/rate_search.py fit       # writes rules.json, once; to be committed before the next command
python results/rate_search.py judge     # writes verdict.md with the table of every rule and case

Nothing is trained. `fit` reads no run of a case that it may not see. As long as runs are missing, either command says
how many and writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tables.stored_answers import STUDIES
from tables.study_pages import options, write_page

from nalora.errors import NALoRAError, counted
from nalora.studies.conduct import Progress, so_far
from nalora.studies.rate_cases import cases_of
from nalora.studies.rate_rules import GATES, Case
from nalora.studies.rate_verdicts import Frozen, Verdict, freeze, judge, thaw
from nalora.studies.schedule import Cell
from nalora.studies.study import read

NAME, RANGE_TESTS = "rate-search", "rate-range-test"
# The combinations that rules are fitted on, by the beginning of their name; all others are for the judgement.
FITTED_ON = ("GSM8K, ", "cipher, ")
FIT, JUDGE, DIGEST = "fit", "judge", "Digest of rules.json: "


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__ or "", NAME)
    parser.add_argument("command", choices=(FIT, JUDGE))
    ranges = STUDIES / f"{RANGE_TESTS}.yaml"
    parser.add_argument("--range-tests", type=Path, default=ranges, help=f"default: studies/{RANGE_TESTS}.yaml")
    given = parser.parse_args(arguments)
    rules, page = given.output / "rules.json", given.output / "verdict.md"
    frozen = thaw(rules) if given.command == JUDGE else None
    if frozen is not None:
        refuse_other_rules(page, frozen)
    progress, tests = (so_far(read(file), given.store) for file in (given.study, given.range_tests))
    cells = cells_for(progress, given.command)
    cases = cases_of(progress.schedule, progress.results, tests.schedule, cells=cells)
    if state := unfinished(progress, cells, cases):
        print(state)
        return 1
    if frozen is None:
        frozen = freeze(cases, rules)
        print(f"{rules}: {counted(len(frozen.rules), 'rule')} fitted on {counted(len(cases), 'case')}; commit it now")
    else:
        print(write_page(page, page_lines(judge(frozen, cases), frozen)))
    return 0


def cells_for(progress: Progress, command: str) -> list[Cell]:
    """Return the arms and combinations that a command may look at."""
    return [
        cell
        for cell in progress.schedule.cells
        if any(str(value).startswith(FITTED_ON) for _, value in cell.settings) is (command == FIT)
    ]


def unfinished(progress: Progress, cells: Sequence[Cell], cases: Sequence[Case]) -> str:
    """Return a sentence with the cases, runs and range tests that are missing; empty if nothing is."""
    schedule, results = progress.schedule, progress.results
    keys = {job.key for cell in cells for job in schedule.screening(cell, results)}
    tested = sum(bool(case.range_test) for case in cases)
    if cells and len(cases) == len(cells) == tested:
        return ""
    return (
        f"Not finished: {len(cases)} of {counted(len(cells), 'case')} have all of their learning rates "
        f"({len(keys & results.keys()):,} of {counted(len(keys), 'run')}), {tested} of these have a range test."
    )


def refuse_other_rules(page: Path, frozen: Frozen) -> None:
    """Raise NALoRAError if a verdict of other rules exists: the cases have been seen, and can judge no second set."""
    if page.is_file() and DIGEST + frozen.digest not in page.read_text(encoding="utf-8"):
        raise NALoRAError(
            str(page),
            found="a verdict on other rules than those of rules.json",
            expected="rules that are judged once and not changed afterwards",
            fix="restore the rules that were judged",
        )


def page_lines(verdict: Verdict, frozen: Frozen) -> list[str]:
    """Return the page: the verdict, a row for every rule, and a row for every case with the regret of every rule."""
    families = sorted(verdict.judged, key=verdict.mean_regret)
    cases = [pick.case for pick in verdict.judged[families[0]]]
    limit = verdict.criterion
    rivals = [family for family in families if family != GATES]
    verb = "succeeds" if verdict.succeeds(GATES) else "has failed"
    lines = [
        "# A learning rate from the gates",
        "",
        f"The gates' rule **{verb}**: within {limit.regret:g} of the best rate's loss in {verdict.within(GATES)} of "
        f"{counted(len(cases), 'case')} ({limit.share_of_cases:.0%} needed), mean regret "
        f"{verdict.mean_regret(GATES):.4f}. The best of the other rules is {rivals[0]!r} with "
        f"{verdict.mean_regret(rivals[0]):.4f}, within it in {verdict.within(rivals[0])}.".replace("%", " %"),
        "",
        f"Rules were fitted on {counted(len(frozen.fitted_on), 'case')}, none of which is below.",
        f"{DIGEST}{frozen.digest}",
        "",
        "| rule | measure | steps × rates | number | cases within | mean regret | largest cost |",
        "|---|---|---|---|---|---|---|",
    ]
    for family in families:
        rule, picks = frozen.rules[family], verdict.judged[family]
        plan = f"{rule.steps}, every {'rate' if rule.stride == 1 else 'second rate'}" if rule.steps else "–"
        cost = f"{max(pick.cost for pick in picks):.1%}".replace("%", " %")
        numbers = f"{rule.number:.3g} | {verdict.within(family)} | {verdict.mean_regret(family):.4f} | {cost}"
        lines.append(f"| {family} | {rule.measure} | {plan} | {numbers} |")
    lines += ["", f"| case | best rate | {' | '.join(families)} |", "|---" * (len(families) + 2) + "|"]
    for index, case in enumerate(cases):
        picks = [verdict.judged[family][index] for family in families]
        cells = " | ".join(f"{pick.rate:.3g} ({pick.regret:+.4f})" for pick in picks)
        lines.append(f"| {case} | {picks[0].best_rate:.3g} | {cells} |")
    return [*lines, "", "A cell has the chosen rate and its regret: its final loss minus the lowest of the grid."]


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except NALoRAError as error:
        raise SystemExit(str(error)) from None
