"""The tables of docs/findings.md, from the answers of the studies.

The text between `<!-- NAME -->` and `<!-- /NAME -->` is written anew: `arms`, every arm compared with LoRA, study by
study, `controls`, arms compared with their controls, `page`, the comparisons that remain significant when all of these
are one family, and `later`, the seeds that were added later, all from results/STUDY/answer.json; `repeats` and
`robustness`, which noise.py writes from the runs.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from later_seeds import later_seeds
from noise import repeats, robustness, trainings

from nalora.evaluation.significance import ALPHA, holm
from nalora.studies.alike import LOSS

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "findings.md"
ACCURACY = "accuracy"
# The columns of the page's table, and what its rows are called where a study calls them otherwise.
STUDIES = (
    ("gsm8k", "GSM8K"),
    ("caesar", "Caesar cipher"),
    ("judgement", "word sorting"),
    ("long", "Caesar cipher, 3,000 steps"),
)
ELSEWHERE = {
    "na-lora": "na-lora, update",
    "mean preserved": "na-lora, update, mean preserved",
    "utility": "na-lora, update, utility",
    "random channels": "control, random channels",
}
_PLACE = re.compile(r"(<!-- (?P<name>\w+) -->\n).*?(<!-- /(?P=name) -->)", re.DOTALL)


def write(store: Path) -> Path:
    """Bring the page up to date with the answers in results/ and the runs of a store; its path."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), store), encoding="utf-8")
    return PAGE


def filled(page: str, store: Path, results: Path = HERE) -> str:
    """The page with everything that it has a place for."""
    trained = trainings(results)
    lines = {
        "arms": arms(results),
        "controls": controls(results),
        "page": whole_page(results),
        "later": later_seeds(answers(results)),
        "repeats": repeats(trained),
        "robustness": robustness(trained, store),
    }
    return _PLACE.sub(lambda match: match[1] + "\n".join(lines[match["name"]]) + "\n" + match[3], page)


def arms(results: Path) -> list[str]:
    """Every arm of every study beside LoRA in test loss, and its accuracy on GSM8K."""
    parts = answers(results)
    names = {told: {named(arm): arm for arm in part["values"]} for told, part in parts.items()}
    lines = [f"| | {' | '.join(parts)} | accuracy on GSM8K, % |", "|---|" + "---|" * len(parts) + "---|"]
    for arm in dict.fromkeys(arm for known in names.values() for arm in known):
        cells = [_beside(part, names[told][arm]) if arm in names[told] else "" for told, part in parts.items()]
        first = next(iter(parts))
        accuracy = _accuracy(parts[first], names[first][arm]) if arm in names[first] else ""
        lines.append(f"| {arm} | {' | '.join(cells)} | {accuracy} |")
    return lines


def _beside(part: dict[str, Any], arm: str) -> str:
    """The first arm's own loss, and how far from it another is."""
    found = next((each for each in part["comparisons"][LOSS] if each["method"] == arm), None)
    if found is None:
        return _over_seeds(part["values"][arm][part["measures"].index(LOSS)], 4)
    told = _difference(found)
    if arm in part["missing"] and found["interval"] is not None:
        told += f", {_so_far(found['seeds'])}"
    return f"**{told}, {found['verdict']}**" if found["verdict"] in ("better", "worse") else told


def _accuracy(part: dict[str, Any], arm: str) -> str:
    loss, accuracy = (part["values"][arm][part["measures"].index(name)] for name in (LOSS, ACCURACY))
    seeds = f", {_so_far(len(accuracy))}" if 1 < len(accuracy) < len(loss) else ""
    return _over_seeds(accuracy, 1) + seeds


def controls(results: Path) -> list[str]:
    """Every arm beside the controls that its study names, in test loss."""
    lines = ["| | beside | difference, 95 % interval | verdict |", "|---|---|---|---|"]
    for file in sorted(results.glob("*/answer.json")):
        for part in json.loads(file.read_text(encoding="utf-8")):
            for each in part["controls"].get(LOSS, []):
                cells = (f"{file.parent.name}: {each['method']}", each["baseline"], _difference(each), each["verdict"])
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def whole_page(results: Path) -> list[str]:
    """What can be told apart when every comparison in test loss that the page shows counts as one of many."""
    p_values = {
        f"{told}: {each['method']} beside {each['baseline']}": each["p"]
        for told, part in answers(results).items()
        for family in (part["comparisons"], part["controls"])
        for each in family.get(LOSS, [])
        if each["p"] is not None
    }
    left = [f"{claim} (p = {p:.2g})" for claim, p in holm(p_values).items() if p <= ALPHA]
    return [
        f"- **Corrected over the whole page**, all {len(p_values)} comparisons in test loss in both tables, leaves:",
        f"  {'; '.join(left) or 'nothing'}.",
    ]


def answers(results: Path) -> dict[str, dict[str, Any]]:
    """The answers of the page's studies, as far as they have been run, by the name that the page gives them."""
    found = {}
    for name, told in STUDIES:
        if (file := results / name / "answer.json").is_file():
            (found[told],) = json.loads(file.read_text(encoding="utf-8"))
    return found


def named(arm: str) -> str:
    """What an arm is called in table and picture."""
    return ELSEWHERE.get(arm, arm)


def _over_seeds(by_seed: dict[str, float], digits: int) -> str:
    """Mean ± standard deviation."""
    values = list(by_seed.values())
    if len(values) < 2:
        return f"{values[0]:.{digits}f}, one seed" if values else ""
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def _so_far(seeds: int) -> str:
    return "one seed so far" if seeds == 1 else f"{seeds} seeds so far"


def _difference(comparison: dict[str, Any]) -> str:
    if comparison["interval"] is None:  # one seed, whose partner may be the one that went astray
        return _so_far(comparison["seeds"])
    low, high = comparison["interval"]
    return f"{comparison['difference']:+.4f} ({low:+.4f} … {high:+.4f})"
