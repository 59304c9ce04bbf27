"""The README's table of step time and memory: the latest run that compares fused layers with PEFT and Unsloth."""

from __future__ import annotations

import re

import peers_page
from peers_page import FP8_GRAPHS, GRAPHS, LIGER, PEFT, UNSLOTH, Row

FUSED, GRAPHED = "nalora.fuse", "nalora.fuse + Liger, cuDNN attention, CUDA graphs"
# The README's names; a variant that the run does not have is left out.
NAMES = {
    PEFT: "PEFT LoRA",
    LIGER: "PEFT LoRA, with Liger's kernels",
    UNSLOTH: "Unsloth's kernels, norms, rotary embedding and loss",
    FUSED: "`nalora.fuse(model)`",
    f"{FUSED} + Liger": "`nalora.fuse(model)`, with Liger's kernels",
    GRAPHED: "`nalora.fuse(model, cuda_graphs=True)`, with Liger's kernels and cuDNN's attention",
    GRAPHED.replace("Liger", "Liger, FP8 base"): 'the same with `base="fp8"`',
    GRAPHS: "NA-LoRA with `cuda_graphs=True`, Liger's kernels and cuDNN's attention",
    FP8_GRAPHS: 'NA-LoRA with `base="fp8"` as well',
}
BLOCK = re.compile(r"(<!-- begin: benchmarks/page.py -->\n).*?(  <!-- end: benchmarks/page.py -->)", re.DOTALL)


def filled(readme: str, rows: list[Row]) -> str:
    """Return the README with the table between its marks."""
    lines = "".join(f"  {line}\n" for line in table(rows))
    return BLOCK.sub(lambda marks: f"{marks[1]}{lines}{marks[2]}", readme)


def table(rows: list[Row]) -> list[str]:
    """Return the lines of the table, of the latest run with PEFT and Unsloth; ratios are to PEFT."""
    setting = next(iter(peers_page.latest(rows, peers_page.QUESTION)))
    runs: dict[str, dict[str, Row]] = {}
    for row in rows:
        if (row["question"], row["setting"]) == (peers_page.QUESTION, setting) and row["p50"]:
            runs.setdefault(row["run"], {})[row["variant"]] = row
    same = next(run for run in reversed(runs.values()) if {PEFT, UNSLOTH} <= run.keys())
    tokens = setting.split(", ")[2].replace("x1024", " × 1,024")
    device = same[PEFT]["device"].split()[-1]
    lines = [f"| Llama-3.1-8B shapes, {tokens} tokens, one {device} | step time | peak memory |", "|---|---|---|"]
    for name in NAMES:
        if name in same:
            cells = NAMES[name], _cell(same, name, "p50", "ms", 0), _cell(same, name, "peak_gib", "GiB", 1)
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(rows: dict[str, Row], name: str, quantity: str, unit: str, digits: int) -> str:
    value, reference = float(rows[name][quantity]), float(rows[PEFT][quantity])
    ratio = "" if name == PEFT else f" ({value / reference:.2f})"
    return f"{value:.{digits}f} {unit}{ratio}"
