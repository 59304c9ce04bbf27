"""Write docs/performance.md from rows.csv.

python benchmarks/page.py
"""

from __future__ import annotations

import csv
from pathlib import Path

from harness import ROWS

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
BASELINE = "PEFT LoRA"
# What we set out to reach, as ratios to the baseline: (time, memory); None: not set.
BOUNDS = {
    "NA-LoRA, model untouched": (1.005, 1.002),
    "NA-LoRA, fused activation": (0.985, 0.92),
    "NA-LoRA, fused LoRA layers": (0.82, 0.82),
    "NA-LoRA, everything on": (0.70, 0.72),
}
HEAD = """# Performance

Made by `benchmarks/page.py` from [`benchmarks/rows.csv`](../benchmarks/rows.csv); do not edit. Variants run interleaved
in one process, warmed up; medians of the steps, with the 20th and 80th percentile. A bound that is not reached is
marked, and stays the bound.

`kernels="auto"` chooses how statistics are computed and leaves the model's arithmetic alone ("model untouched").
`kernels="fused"` also computes FFNs and LoRA layers as single functions ("fused LoRA layers"; "everything on" adds
Liger's norms, rotary embedding and loss). The paper's hooks are its appendix written literally.
"""


def main() -> None:
    with ROWS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["question"] == "training step"]
    parts = [HEAD]
    for setting in dict.fromkeys(row["setting"] for row in rows):
        latest = {row["variant"]: row for row in rows if row["setting"] == setting}
        base = latest[BASELINE]
        versions = f"torch {base['torch']}, transformers {base['transformers']}, peft {base['peft']}"
        parts.append(f"\n## Training step: {setting}\n\n{base['device']}, {versions}, commit {base['commit']}.\n")
        parts.append(
            "| variant | ms (p20 … p80) | time | bound | peak GiB | memory | bound |\n|---|---|---|---|---|---|---|"
        )
        checkpointing = setting.endswith("True")
        for variant, row in latest.items():
            time = float(row["p50"]) / float(base["p50"])
            memory = float(row["peak_gib"]) / float(base["peak_gib"])
            time_bound, memory_bound = BOUNDS.get(variant, (None, None))
            if checkpointing and memory_bound is not None:
                memory_bound = 1.0
            parts.append(
                f"| {variant} | {float(row['p50']):.1f} ({float(row['p20']):.1f} … {float(row['p80']):.1f}) |"
                f" {time:.4f} | {_bound(time, time_bound)} | {float(row['peak_gib']):.2f} | {memory:.4f} |"
                f" {_bound(memory, memory_bound)} |"
            )
    PAGE.write_text("\n".join(parts) + "\n")


def _bound(value: float, bound: float | None) -> str:
    if bound is None:
        return ""
    return f"≤ {bound} {'reached' if value <= bound else '**not reached**'}"


if __name__ == "__main__":
    main()
