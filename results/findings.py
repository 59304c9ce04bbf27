"""The tables of docs/findings.md, from what the studies came to.

What stands between `<!-- NAME -->` and `<!-- /NAME -->` is written anew: `arms`, every arm beside LoRA, study by study,
`controls`, arms beside what they must beat, `page`, what is left when all of these are one family, and `later`, what
seeds say that were added later, from the results/store/STUDY.json that `nalora study` writes; `repeats` and
`robustness`, which are what noise.py says.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from later_seeds import later_seeds
from noise import repeats, robustness

from nalora.studies.alike import LOSS
from nalora.studies.comparison import ALPHA, holm

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


def write() -> Path:
    """Bring the page up to date; its path."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return PAGE


def filled(page: str, store: Path = HERE / "store") -> str:
    """The page with everything that it has a place for."""
    written = {
        "arms": arms,
        "controls": controls,
        "page": whole_page,
        "later": lambda store: later_seeds(answers(store)),
        "repeats": repeats,
        "robustness": robustness,
    }
    return _PLACE.sub(lambda match: match[1] + "\n".join(written[match["name"]](store)) + "\n" + match[3], page)


def arms(store: Path) -> list[str]:
    """Every arm of every study beside LoRA in test loss, and its accuracy on GSM8K."""
    parts = answers(store)
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


def controls(store: Path) -> list[str]:
    """Every arm beside the controls that its study names, in test loss."""
    lines = ["| | beside | difference, 95 % interval | verdict |", "|---|---|---|---|"]
    for file in sorted(store.glob("[!.]*.json")):
        for part in json.loads(file.read_text(encoding="utf-8")):
            for each in part["controls"].get(LOSS, []):
                cells = (f"{file.stem}: {each['method']}", each["baseline"], _difference(each), each["verdict"])
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def whole_page(store: Path) -> list[str]:
    """What can be told apart when every comparison in test loss that the page shows counts as one of many."""
    p_values = {
        f"{told}: {each['method']} beside {each['baseline']}": each["p"]
        for told, part in answers(store).items()
        for family in (part["comparisons"], part["controls"])
        for each in family.get(LOSS, [])
        if each["p"] is not None
    }
    left = [f"{claim} (p = {p:.2g})" for claim, p in holm(p_values).items() if p <= ALPHA]
    return [
        f"- **Corrected over the whole page**, all {len(p_values)} comparisons in test loss in both tables, leaves:",
        f"  {'; '.join(left) or 'nothing'}.",
    ]


def answers(store: Path) -> dict[str, dict[str, Any]]:
    """What the page's studies came to, as far as they have been run, by what they are called there."""
    found = {}
    for name, told in STUDIES:
        if (file := store / f"{name}.json").is_file():
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
