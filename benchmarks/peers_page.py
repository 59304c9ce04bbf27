"""The sections of docs/performance.md about nalora and its peers; a section exists only if its rows do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

Row = dict[str, str]
QUESTION, PROFILE, TILES = "step beside peers", "profile of a step", "tiles by rank"
LAUNCHES = "launches of a step"
PEFT, LIGER, UNSLOTH = "PEFT LoRA", "PEFT LoRA + Liger", "Unsloth"
OURS, FP8 = "NA-LoRA, everything on", "NA-LoRA, everything on, FP8 base"
COMPILED = "NA-LoRA + Liger's loss, compiled layers, cuDNN attention"
GRAPHS, FP8_GRAPHS = (f"{name}, cuDNN attention, CUDA graphs" for name in (OURS, FP8))
COMPILED_GRAPHS = f"{COMPILED}, CUDA graphs"


class Goal(NamedTuple):
    """An upper bound of a variant's time ("p50") or memory ("peak_gib") relative to another variant's of its run."""

    variant: str
    quantity: str
    reference: str
    limit: float


WORDS = {"p50": "time", "peak_gib": "memory"}
# By the kind of setting.
GOALS = {
    "short": [
        *(Goal(*goal) for name in (COMPILED, GRAPHS, COMPILED_GRAPHS) for goal in
          ((name, "p50", PEFT, 0.63), (name, "p50", UNSLOTH, 0.93), (name, "peak_gib", UNSLOTH, 1.0))),
        *(Goal(*goal) for name in (FP8_GRAPHS, FP8) for goal in
          ((name, "p50", PEFT, 0.52), (name, "p50", UNSLOTH, 0.78), (name, "peak_gib", PEFT, 0.50))),
    ],
    "long": [
        Goal(OURS, "p50", LIGER, 0.90), Goal(OURS, "peak_gib", LIGER, 1.0),
        Goal(FP8, "p50", LIGER, 0.80), Goal(FP8, "peak_gib", LIGER, 1.0),
    ],
    "four-bit": [
        Goal(name, quantity, UNSLOTH, 1.0) for name in (OURS, GRAPHS) for quantity in ("p50", "peak_gib")
    ],
}  # fmt: skip
RANK_GOAL = 1.12
FP8_PRODUCTS = """
With an FP8 base "LoRA products" contain the FP8 products of the frozen weights: a product belongs to an adapter if one
of its operands has a dimension of at most three ranks, and the scales of an FP8 product have the size [tokens, 1]."""
# The commit of the ranks, the last measured one whose fused layers kept the outputs of norms.
KEPT_NORM_OUTPUTS = "ddb15cbb"
INTRODUCTION = """
# Training step next to other projects

One model, one optimizer and one batch serve all variants of a run; each variant restores what it replaced. Before a
variant is timed, its loss and gradients are compared with PEFT's on two layers of the same shapes: "gradients" is the
relative difference of all adapter gradients together, "cosine" that of the worst layer. Unsloth and Axolotl are their
own kernels on this model, with PyTorch's gradient checkpointing where it is used. Ratios are within one run. The memory
of CUDA graphs is counted whole, with what no tensor holds between two replays."""


def kind(setting: str) -> str | None:
    """Return which goals apply to a setting."""
    if "NF4" in setting:
        return "four-bit"
    if re.search(r"1x16384|2x8192", setting):
        return "long"
    return "short" if "4x1024, r=8," in setting and "checkpointing" not in setting else None


def latest(rows: list[Row], question: str) -> dict[str, dict[str, Row]]:
    """Return the latest row of every variant by setting; one with a time precedes one that only has a note."""
    chosen: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["question"] == question:
            known = chosen.setdefault(row["setting"], {})
            if row["p50"] or not known.get(row["variant"], {}).get("p50"):
                known[row["variant"]] = row
    return chosen


def ratio(row: Row, quantity: str, reference: str, rows: list[Row]) -> float | None:
    """Return a quantity relative to that of another variant in the same run; None if one was not measured."""
    same = (other for other in rows if other["run"] == row["run"] and other["variant"] == reference)
    base = next((other for other in same if other["setting"] == row["setting"] and other["p50"]), None)
    if base is None or not row["p50"] or not row[quantity] or not float(base[quantity] or 0):
        return None
    return float(row[quantity]) / float(base[quantity])


def cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def verdict(value: float, limit: float) -> str:
    return f"{value:.3f}, goal ≤ {limit}: {reached(value <= limit)}"


def reached(is_reached: bool) -> str:
    return "reached" if is_reached else "**not reached**"


def place(setting: str) -> tuple[bool, bool, int, int]:
    """Return where a setting is on the page: ranks ascending, then 4-bit bases, then long sequences."""
    rank, length = (re.search(pattern, setting) for pattern in (r"r=(\d+)", r"\dx(\d+)"))
    return kind(setting) == "long", "NF4" in setting, *(int(match[1]) if match else 0 for match in (length, rank))


def beside_peers(rows: list[Row]) -> Iterator[str]:
    """Yield a table for every setting."""
    by_setting = latest(rows, QUESTION)
    if by_setting:
        yield INTRODUCTION
    for setting, variants in sorted(by_setting.items(), key=lambda item: place(item[0])):
        first = next(iter(variants.values()))
        newest = max((row for row in variants.values() if row["p50"]), key=rows.index, default=first)
        yield f"\n## {setting}\n\n`python benchmarks/training_step.py`. {newest['device']}, torch {newest['torch']}, "
        yield f"transformers {newest['transformers']}, peft {newest['peft']}, commit {newest['commit']}."
        earlier = {row["commit"]: None for row in variants.values() if row["p50"] and row["run"] != newest["run"]}
        yield f"Variants with a * are from earlier runs (commit {', '.join(earlier)}).\n" if earlier else ""
        yield "| variant | ms (p20 … p80) | / PEFT | / Unsloth | peak GiB | / PEFT | / Unsloth | gradients | cosine |"
        yield "|---|---|---|---|---|---|---|---|---|"
        for name, row in variants.items():
            if not row["p50"]:
                yield f"| {name} | {row['note']} | | | | | | {row['gradient_error']} | {row['worst_cosine']} |"
                continue
            times, memory = (
                [cell(ratio(row, quantity, reference, rows)) for reference in (PEFT, UNSLOTH)] for quantity in WORDS
            )
            spread = f"{float(row['p50']):.1f} ({float(row['p20']):.1f} … {float(row['p80']):.1f})"
            marked = name if row["run"] == newest["run"] else f"{name} *"
            cells = [marked, spread, *times, row["peak_gib"], *memory, row["gradient_error"], row["worst_cosine"]]
            yield f"| {' | '.join(cells)} |"
        yield from goals(setting, variants, rows)


def goals(setting: str, variants: dict[str, Row], rows: list[Row]) -> Iterator[str]:
    """Yield a line for each goal of the setting whose variants were measured in one run."""
    lines = []
    for goal in GOALS.get(kind(setting) or "", ()):
        if goal.variant in variants:
            value = ratio(variants[goal.variant], goal.quantity, goal.reference, rows)
            if value is not None:
                what = f"{goal.variant}: {WORDS[goal.quantity]} relative to {goal.reference}"
                lines.append(f"- {what} {verdict(value, goal.limit)}")
    if lines:
        yield "\n" + "\n".join(lines)


def ranks_measured(rows: list[Row]) -> dict[str, dict[int, dict[str, Row]]]:
    """Return the timed variants by rank, for settings that differ in nothing but the rank.

    They are those of one commit, the latest of those that measured the most ranks: ranks are compared with each other.
    """
    families: dict[str, dict[str, dict[int, dict[str, Row]]]] = {}
    for commit in dict.fromkeys(row["commit"] for row in rows):
        for setting, variants in latest([row for row in rows if row["commit"] == commit], QUESTION).items():
            timed = {name: row for name, row in variants.items() if row["p50"]}
            if timed and (match := re.search(r"r=(\d+), ", setting)):
                rest = setting.replace(match[0], "")
                families.setdefault(rest, {}).setdefault(commit, {})[int(match[1])] = timed
    most = {rest: max(reversed(commits.values()), key=len) for rest, commits in families.items()}
    return {rest: ranks for rest, ranks in most.items() if len(ranks) > 1}


def by_rank(rows: list[Row]) -> Iterator[str]:
    """Yield step and memory by rank, for settings that differ in nothing but the rank."""
    for rest, ranks in ranks_measured(rows).items():
        ordered = sorted(ranks)
        shared = [name for name in ranks[ordered[0]] if sum(name in ranks[rank] for rank in ordered) > 1]
        yield f"\n## Step and memory by rank: {rest}\n\nMilliseconds per step, and peak GiB.\n"
        if older := older_ranks(rows, ranks):
            yield f"{older}\n"
        yield f"| variant | {' | '.join(f'r = {rank}' for rank in ordered)} |\n|---|{'---|' * len(ordered)}"
        for name in shared:
            found = [ranks[rank].get(name) for rank in ordered]
            cells = (f"{float(row['p50']):.1f} ms, {row['peak_gib']} GiB" if row else "" for row in found)
            yield f"| {name} | {' | '.join(cells)} |"
        if 8 in ranks and 128 in ranks and GRAPHS in ranks[8] and GRAPHS in ranks[128]:
            value = float(ranks[128][GRAPHS]["p50"]) / float(ranks[8][GRAPHS]["p50"])
            yield f"\n- {GRAPHS}: time at r = 128 relative to r = 8 {verdict(value, RANK_GOAL)}"


def older_ranks(rows: list[Row], by_rank: dict[int, dict[str, Row]]) -> str:
    """Return a sentence about the age of the ranks if fused layers kept more then than in the newest run; else ""."""
    lowest = by_rank[min(by_rank)].get(GRAPHS)
    if lowest is None or lowest["commit"] != KEPT_NORM_OUTPUTS:
        return ""
    newest = latest(rows, QUESTION)[lowest["setting"]][GRAPHS]
    if newest["commit"] == KEPT_NORM_OUTPUTS:
        return ""
    return (
        f"The ranks were measured (commit {lowest['commit']}) before outputs of norms were computed again in the\n"
        f"backward pass. Since then fused layers with CUDA graphs take {float(newest['p50']):.0f} ms and "
        f"{float(newest['peak_gib']):.1f} GiB at r = {min(by_rank)} (commit {newest['commit']})."
    )


def profiles(rows: list[Row]) -> Iterator[str]:
    """Yield where the time of profiled steps goes, a column for every profiled variant."""
    columns: dict[str, dict[str, dict[str, Row]]] = {}
    for setting, groups in latest(rows, PROFILE).items():
        where, _, variant = setting.partition(": ")
        run = groups["step"]["run"]
        columns.setdefault(where, {})[variant] = {name: row for name, row in groups.items() if row["run"] == run}
    for where, variants in columns.items():
        yield f"\n## Where the time of a step goes: {where}\n\n`python benchmarks/profile_step.py`. Milliseconds per"
        yield 'step; "launches and gaps" is the time in which no kernel ran.\n'
        yield f"| part | {' | '.join(variants)} |\n|---|{'---|' * len(variants)}"
        parts = dict.fromkeys(part for groups in variants.values() for part in groups if part != "step")
        for part in [*parts, "step"]:
            cells = (f"{float(groups[part]['p50']):.1f}" if part in groups else "" for groups in variants.values())
            yield f"| {part} | {' | '.join(cells)} |"
        if any("FP8" in name for name in variants):
            yield FP8_PRODUCTS


def tiles(rows: list[Row]) -> Iterator[str]:
    """Yield the fastest tiles of the fused gated kernels by rank."""
    by_setting = latest(rows, TILES)
    if by_setting:
        yield "\n## Tiles of the fused gated kernels by rank\n\n`python benchmarks/rank_tiles.py`.\n"
        yield "| kernel | tile in use | µs | fastest tile | µs |\n|---|---|---|---|---|"
    for setting, variants in by_setting.items():
        cells = (f"{variants[v]['note']} | {1000 * float(variants[v]['p50']):.1f}" for v in ("now", "fastest"))
        yield f"| {setting} | {' | '.join(cells)} |"
