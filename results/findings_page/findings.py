"""The tables of docs/findings.md, from the answers of the studies and their runs.

The text between `<!-- NAME -->` and `<!-- /NAME -->` is replaced by the lines of that name in `filled`: `arms`, every
arm compared with LoRA, study by study, `controls`, arms compared with their controls, `page`, the comparisons that
remain significant when all of these are one family, and what the other scripts of this folder write.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tables.generated import fill
from tables.noise import repeats, trainings
from tables.run_tables import Run, read_tables
from tables.stored_answers import BASES, answer_of, answers, named

from findings_page.early_losses import early_losses
from findings_page.equal_cost import NAME, equal_cost, lora_pro, untuned
from findings_page.grids import grids
from findings_page.later_seeds import later_seeds
from findings_page.pooled import both_ways
from findings_page.power import power
from findings_page.trainable import trainable
from findings_page.transient import transient
from findings_page.unfinished import percent, unfinished
from nalora.evaluation.significance import ALPHA, holm
from nalora.studies.questions import LOSS

HERE = Path(__file__).parents[1]
PAGE = HERE.parent / "docs" / "findings.md"
ACCURACY = "accuracy"


def write(store: Path) -> Path:
    """Update the page from the answers in results/ and the runs of a store, and return its path."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), store), encoding="utf-8")
    return PAGE


def filled(page: str, store: Path, results: Path = HERE) -> str:
    """Return the page with every generated part filled in."""
    trained, runs = trainings(results), read_tables(results)
    lines = {
        "arms": arms(results, unfinished("gsm8k", runs, store)),
        "pooled": both_ways(results, trained, store),
        "controls": controls(results),
        "page": whole_page(results),
        "later": later_seeds(answers(results)),
        "power": power(results, trained, store),
        "grids": grids(results),
        "early_losses": early_losses(store),
        "transient": transient(),
        "trainable": trainable(results),
        "equal_cost": equal_cost(results),
        "untuned": untuned(results),
        "lora_pro": lora_pro(results),
        "repeats": repeats(trained),
        "commits": commits(runs),
    }
    return fill(page, lines)


def arms(results: Path, without_end: Mapping[str, list[float]]) -> list[str]:
    """Compare every arm of every study with LoRA by test loss; list its accuracy and unfinished answers on GSM8K."""
    parts = answers(results)
    names = {title: {named(arm): arm for arm in part["values"]} for title, part in parts.items()}
    lines = [
        f"| | {' | '.join(parts)} | accuracy on GSM8K, % | unfinished, % |",
        "|---|" + "---|" * len(parts) + "---|---|",
    ]
    for arm in dict.fromkeys(arm for known in names.values() for arm in known):
        cells = [_cell(part, names[title][arm]) if arm in names[title] else "" for title, part in parts.items()]
        first = next(iter(parts))
        accuracy = _accuracy(parts[first], names[first][arm]) if arm in names[first] else ""
        lines.append(f"| {arm} | {' | '.join(cells)} | {accuracy} | {percent(without_end.get(arm))} |")
    return lines


def _cell(part: dict[str, Any], arm: str) -> str:
    """The loss of the first arm, or the difference of another arm from it."""
    comparison = next((row for row in part["comparisons"][LOSS] if row["method"] == arm), None)
    if comparison is None:
        return _over_seeds(part["values"][arm][part["measures"].index(LOSS)], 4)
    text = _difference(comparison)
    if arm in part["missing"] and comparison["interval"] is not None:
        text += f", {_so_far(comparison['seeds'])}"
    return f"**{text}, {comparison['verdict']}**" if comparison["verdict"] in ("better", "worse") else text


def _accuracy(part: dict[str, Any], arm: str) -> str:
    loss, accuracy = (part["values"][arm][part["measures"].index(name)] for name in (LOSS, ACCURACY))
    seeds = f", {_so_far(len(accuracy))}" if 1 < len(accuracy) < len(loss) else ""
    return _over_seeds(accuracy, 1) + seeds


def controls(results: Path) -> list[str]:
    """Compare every arm with the controls that its study names, by test loss."""
    lines = ["| arm | control | difference, 95 % interval | verdict |", "|---|---|---|---|"]
    for file in sorted(results.glob("*/answer.json")):
        for part in json.loads(file.read_text(encoding="utf-8")):
            for row in part["controls"].get(LOSS, []):
                cells = (f"{file.parent.name}: {row['method']}", row["baseline"], _difference(row), row["verdict"])
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def whole_page(results: Path) -> list[str]:
    """List the comparisons by test loss that remain significant when all of the page are one family."""
    comparisons = one_family(results)
    significant = [f"{title}: {claim} (p = {p:.2g})" for (title, claim), p in comparisons.items() if p <= ALPHA]
    return [
        f"- **With Holm's correction over all {len(comparisons)} comparisons of this page** (those of `{BASES}` are a",
        "  family of their own), these remain significant:",
        f"  {'; '.join(significant) or 'none'}.",
    ]


def one_family(results: Path) -> dict[tuple[str, str], float]:
    """Return the p-values of all comparisons of the page, corrected as one family, by study and claim."""
    return holm(
        {
            (title, f"{row['method']} against {row['baseline']}"): row["p"]
            for title, part in {**answers(results), NAME: answer_of(results, NAME)}.items()
            for family in (part["comparisons"], part["controls"])
            for row in family.get(LOSS, [])
            if row["p"] is not None
        }
    )


def commits(runs: Mapping[str, Run]) -> list[str]:
    """Return a sentence with the number of runs whose environment has nalora's commit."""
    recorded = sum(bool(run.environment.get("commit")) for run in runs.values())
    return [
        f"- **Commit.** `environment.json` has nalora's commit in {recorded} of the {len(runs)} runs; the others were",
        "  trained before it was recorded.",
    ]


def _over_seeds(by_seed: dict[str, float], digits: int) -> str:
    """Mean ± standard deviation."""
    values = list(by_seed.values())
    if len(values) < 2:
        return f"{values[0]:.{digits}f}, one seed" if values else ""
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def _so_far(seeds: int) -> str:
    return "one seed so far" if seeds == 1 else f"{seeds} seeds so far"


def _difference(comparison: dict[str, Any]) -> str:
    if comparison["interval"] is None:  # one seed decides nothing
        return _so_far(comparison["seeds"])
    low, high = comparison["interval"]
    return f"{comparison['difference']:+.4f} ({low:+.4f} … {high:+.4f})"
