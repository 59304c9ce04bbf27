"""What methods and ranks cost: time of a step and peak memory, from benchmarks/rows.csv."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

# The scripts of benchmarks/ import each other by name.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import harness
from first_screen import GRAPHED
from methods_page import BASELINE, Cost, latest
from page import Row, measured_on, settings
from peers_page import GRAPHS, PEFT, QUESTION, older_ranks, ranks_measured, ratio
from peers_page import latest as latest_with_peers

# Costs are those of 8B shapes: steps of the small model wait for Python, whose speed varied (docs/methods.md).
LARGE = "8b"
# With CUDA graphs, Liger's kernels and cuDNN's attention; a run without the first has the second.
FASTEST = {GRAPHED: "`nalora.fuse`", GRAPHS: "NA-LoRA on fused layers"}
# Fused layers were measured at every rank with NA-LoRA attached.
OF_RANKS = {PEFT: "PEFT LoRA", GRAPHS: "fused layers (with NA-LoRA, Liger, cuDNN attention, CUDA graphs)"}


class MethodCosts(NamedTuple):
    """Where the costs were measured, and those of every method that fits."""

    setting: str
    machine: str
    by_variant: Mapping[str, Cost]

    def ratios(self, arm: Mapping[str, Any]) -> tuple[str, str]:
        """Return time and peak memory of a step of a study's arm as multiples of LoRA's."""
        cost = self.by_variant.get(variant(arm))
        return (f"{cost.time:.2f}", f"{cost.memory:.2f}") if cost else ("not measured", "not measured")


def read_rows() -> list[Row]:
    """Return the rows of benchmarks/rows.csv."""
    return harness.read()


def method_costs(rows: list[Row]) -> MethodCosts:
    """Return the costs of methods at 8B shapes."""
    of_methods = [row for row in rows if row["question"] == "methods"]
    setting = next(name for name in settings(of_methods, "methods") if LARGE in name)
    by_variant = {name: cost for name, cost in latest(of_methods, setting).items() if cost.fits}
    return MethodCosts(setting, measured_on(by_variant[BASELINE].step), by_variant)


def variant(arm: Mapping[str, Any]) -> str:
    """Return the name that benchmarks/methods_cost.py gives to the method of an arm; the ratio λ changes no cost."""
    method = str(arm["method"])
    if "on" in arm:
        return f"{method} on {arm['on']}"
    if method == "peft/gralora":
        return f"{method}, k = {arm['gralora_k']}"
    if method == "block-lora":
        return f"{method}, k = {arm['blocks']}"
    if arm.get("mode") == "full":
        return f"{method}, full mode"
    return f"{method}, update space" if arm.get("apply_to") == "update" else method


def rank_table(rows: list[Row]) -> list[str]:
    """Return a table of step time and memory by rank, each also as a multiple of the lowest rank's."""
    lines = []
    for setting, by_rank in ranks_measured(rows).items():
        ranks = sorted(by_rank)
        lowest = by_rank[ranks[0]]
        lines += [
            f"{setting}; {measured_on(lowest[PEFT])}",
            *filter(None, [older_ranks(rows, by_rank)]),
            "",
            f"| | {' | '.join(f'r = {rank}' for rank in ranks)} |",
            "|---|" + "---|" * len(ranks),
        ]
        for name, title in OF_RANKS.items():
            for quantity, unit in (("p50", "ms"), ("peak_gib", "GiB")):
                if name in lowest:
                    cells = [_of_rank(by_rank[rank].get(name), lowest[name], quantity, unit) for rank in ranks]
                    lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def rank_ratios(rows: list[Row]) -> tuple[int, int, float, float] | None:
    """Return the lowest and the highest rank of fused layers, and time and memory of the highest over the lowest's."""
    for by_rank in ranks_measured(rows).values():
        ranks = [rank for rank in sorted(by_rank) if GRAPHS in by_rank[rank]]
        if len(ranks) > 1:
            low, high = (by_rank[rank][GRAPHS] for rank in (ranks[0], ranks[-1]))
            time, memory = (float(high[quantity]) / float(low[quantity]) for quantity in ("p50", "peak_gib"))
            return ranks[0], ranks[-1], time, memory
    return None


def fused_layers(rows: list[Row]) -> tuple[str, str, float, float] | None:
    """Return name, setting, time and memory of fused layers relative to PEFT's LoRA, in the newest run that has both.

    The setting is the first one, as in the README's table.
    """
    setting = next(iter(latest_with_peers(rows, QUESTION)), "")
    runs = [row["run"] for row in rows if row["setting"] == setting and row["variant"] == PEFT and row["p50"]]
    for run in reversed(dict.fromkeys(runs)):
        for name, title in FASTEST.items():
            row = _of_run(rows, run, setting, name)
            time, memory = (row and ratio(row, quantity, PEFT, rows) for quantity in ("p50", "peak_gib"))
            if time and memory:
                return title, setting, time, memory
    return None


def _of_run(rows: list[Row], run: str, setting: str, variant: str) -> Row | None:
    return next((r for r in rows if (r["run"], r["setting"], r["variant"]) == (run, setting, variant)), None)


def _of_rank(row: Row | None, lowest: Row, quantity: str, unit: str) -> str:
    if row is None:
        return ""
    value = float(row[quantity])
    return f"{value:.{0 if unit == 'ms' else 1}f} {unit} ({value / float(lowest[quantity]):.2f})"
