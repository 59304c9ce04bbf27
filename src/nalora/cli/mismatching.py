"""What `nalora diagnose RUN --against TARGET` prints: a row for each FFN block, and what it comes to in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from nalora.cli.screen import table
from nalora.diagnostics.decomposition import TERMS
from nalora.diagnostics.mismatch_measures import STATISTICS, in_words
from nalora.errors import counted

_NOTHING = "–"


def print_mismatch(screen: Console, result: Mapping[str, Any]) -> None:
    """A row for each block: the terms' shares, the difference and its bound, and who pointed at the mismatch."""
    known = {"mask": result["mask"]} if result["mask"] else {}
    known |= {title: result["statistics"][name] for name, title in STATISTICS.items()}
    title = f"{result['run']} against {result['target']}: {counted(result['probe']['tokens'], 'token')}"
    rows = table("block", "residual", "selection", "view", "‖ΔU‖", "of its bound", title=title)
    for name in known:
        rows.add_column(f"ρ {name}")
    rows.add_column("30 % hold (best)")
    for column in rows.columns[1:]:
        column.justify = "right"
    first = next(iter(known.values()))
    for index, block in enumerate(result["blocks"]):
        rows.add_row(
            block["name"],
            *(_percent(result["share"][term][index]) for term in TERMS),
            _number(result["bound"]["actual"][index], ".3g"),
            _percent(result["bound"]["tightness"][index]),
            *(_number(of["rank_correlation"][index], "+.2f") for of in known.values()),
            f"{_percent(first['energy_held'][index])} ({_percent(result['most_held'][index])})",
        )
    screen.print(rows)
    screen.print(
        "Shares are of the three terms' energies; ρ is the rank correlation with each channel's selection mismatch;"
        f" what the top 30 % by {next(iter(known))} hold of it stands beside what the best 30 % would.",
        highlight=False,
        style="dim",
    )
    if not all(block["gated"] for block in result["blocks"]):
        screen.print("Blocks whose gate multiplies nothing have no view mismatch.", highlight=False, style="dim")
    screen.print(in_words(result), highlight=False)


def _percent(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.0%}" if value >= 0.095 or value == 0 else f"{value:.1%}"


def _number(value: float | None, form: str) -> str:
    return _NOTHING if value is None else format(value, form)
