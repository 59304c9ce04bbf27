"""Write the tables of docs/findings.md from what the studies came to.

python results/findings.py [--check]

A table stands between `<!-- STUDY -->` and `<!-- /STUDY -->`; results/store/STUDY.json, which
`nalora study studies/STUDY.yaml --store results/store` writes, is what it says. `controls` is the table of all arms
that were compared with controls of their own; `repeats` and `robustness` are what noise.py says.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from noise import repeats, robustness

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "findings.md"
LOSS, ACCURACY = "test loss", "accuracy"
_PLACE = re.compile(r"(<!-- (?P<study>[\w-]+) -->\n).*?(<!-- /(?P=study) -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 where the page is not up to date")
    check = parser.parse_args().check
    before = PAGE.read_text(encoding="utf-8")
    after = filled(before)
    if not check:
        PAGE.write_text(after, encoding="utf-8")
    elif before != after:
        sys.exit(f"{PAGE} does not say what the studies came to: run python results/findings.py")


def filled(page: str, store: Path = HERE / "store") -> str:
    """The page with the table of every study that it has a place for."""

    def table(match: re.Match[str]) -> str:
        others = {"controls": controls, "repeats": repeats, "robustness": robustness}
        name = match["study"]
        lines = others[name](store) if name in others else rows(_answer(store / f"{name}.json"))
        return match[1] + "\n".join(lines) + "\n" + match[3]

    return _PLACE.sub(table, page)


def rows(part: dict[str, Any]) -> list[str]:
    """One combination of settings as a Markdown table: every arm beside the first."""
    places = {name: place for place, name in enumerate(part["measures"])}
    beside = {each["method"]: each for each in part["comparisons"].get(LOSS, [])}
    lines = [
        "| | rate | test loss | difference, 95 % interval | verdict | accuracy % |",
        "|---|---|---:|---|---|---:|",
    ]
    for arm, values in part["values"].items():
        loss, accuracy = (values[places[name]] if name in places else {} for name in (LOSS, ACCURACY))
        verdict = beside[arm]["verdict"] if arm in beside else ""
        cells = (arm, f"{part['learning_rates'][arm]:g}", _over_seeds(loss, 4), _difference(beside.get(arm)), verdict,
                 _over_seeds(accuracy, 1))  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def controls(store: Path) -> list[str]:
    """Every arm beside the controls that its study names, in test loss."""
    lines = ["| | beside | difference, 95 % interval | verdict |", "|---|---|---|---|"]
    for file in sorted(store.glob("*.json")):
        for part in json.loads(file.read_text(encoding="utf-8")):
            for each in part["controls"].get(LOSS, []):
                cells = (f"{file.stem}: {each['method']}", each["baseline"], _difference(each), each["verdict"])
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def _answer(file: Path) -> dict[str, Any]:
    (part,) = json.loads(file.read_text(encoding="utf-8"))
    return dict(part)


def _over_seeds(by_seed: dict[str, float], digits: int) -> str:
    """Mean ± standard deviation (number of seeds)."""
    values = list(by_seed.values())
    if len(values) < 2:
        return f"{values[0]:.{digits}f} (1)" if values else ""
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f} ({len(values)})"


def _difference(comparison: dict[str, Any] | None) -> str:
    if comparison is None:
        return ""
    difference = f"{comparison['difference']:+.4f}"
    if comparison["interval"] is None:
        return difference
    low, high = comparison["interval"]
    return f"{difference} ({low:+.4f} … {high:+.4f})"


if __name__ == "__main__":
    main()
