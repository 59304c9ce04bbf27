"""Write docs/performance.md and its figures from rows.csv and loss_curves.csv.

python benchmarks/page.py
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import figures
from figures import CURVES
from harness import ROWS

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
BASELINE = "PEFT LoRA"
FLOOR = "matrix products alone"
# What we set out to reach, as ratios to the baseline: (time, memory).
BOUNDS = {
    "NA-LoRA, model untouched": (1.005, 1.002),
    "NA-LoRA, fused activation": (0.985, 0.92),
    "NA-LoRA, fused LoRA layers": (0.82, 0.82),
    "NA-LoRA, everything on": (0.70, 0.72),
}
CHECKPOINTED_MEMORY = 1.0
HEAD = """# Performance

Made by `benchmarks/page.py` from [`benchmarks/rows.csv`](../benchmarks/rows.csv); do not edit. Variants run interleaved
in one process, warmed up; medians of the steps, with the 20th and 80th percentile. A bound that is not reached is
marked, and stays the bound.

`kernels="auto"` chooses how statistics are computed and leaves the model's arithmetic alone ("model untouched").
`kernels="fused"` also computes FFNs and LoRA layers as single functions ("fused LoRA layers"; "everything on" adds
Liger's norms, rotary embedding and loss). "Fused activation" computed the product φ(z) ⊙ u alone as one function; it is
no longer an option, because fusing the LoRA layers as well is faster. The paper's hooks are its appendix written
literally.

![Training step by variant, with the floor](figures/training_step.svg)
"""

Row = dict[str, str]


def main() -> None:
    with ROWS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    sections = (training_steps, memory_note, curves, kernel, decision, growth, small_model, cpu, generation)
    PAGE.write_text("\n".join([HEAD, *(line for section in sections for line in section(rows))]) + "\n")
    first = next(iter(settings(rows, "training step").values()))
    figures.training_step({name: float(row["p50"]) for name, row in first.items()}, FLOOR)
    figures.loss_curves(CURVES)


def settings(rows: list[Row], question: str) -> dict[str, dict[str, Row]]:
    """The latest row of every variant, by setting."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["question"] == question:
            found.setdefault(row["setting"], {})[row["variant"]] = row
    return found


def median(row: Row) -> float:
    return float(row["p50"])


def spread(row: Row) -> str:
    return f"{median(row):.1f} ({float(row['p20']):.1f} … {float(row['p80']):.1f})"


def measured_on(row: Row) -> str:
    versions = f"torch {row['torch']}, transformers {row['transformers']}, peft {row['peft']}"
    return f"{row['device']}, {versions}, commit {row['commit']}."


def bound(value: float, limit: float | None) -> str:
    if limit is None:
        return ""
    return f"≤ {limit} {'reached' if value <= limit else '**not reached**'}"


def runs(rows: list[Row], question: str, setting: str) -> list[dict[str, Row]]:
    """Every run of a setting, oldest first: its variants, of which the baseline is measured first."""
    found: list[dict[str, Row]] = []
    for row in rows:
        if row["question"] == question and row["setting"] == setting:
            if row["variant"] == BASELINE:
                found.append({})
            found[-1][row["variant"]] = row
    return found


def training_steps(rows: list[Row]) -> Iterator[str]:
    for setting, latest in settings(rows, "training step").items():
        every = runs(rows, "training step", setting)
        yield f"\n## Training step: {setting}\n\n`python benchmarks/training_step.py`."
        yield f"{measured_on(latest[BASELINE])}\n"
        yield "| variant | ms (p20 … p80) | time | bound | peak GiB | memory | bound |\n|---|---|---|---|---|---|---|"
        for name, row in latest.items():
            base = next(run[BASELINE] for run in reversed(every) if run.get(name) is row)
            time_limit, memory_limit = BOUNDS.get(name, (None, None))
            if memory_limit is not None and setting.endswith("True"):
                memory_limit = CHECKPOINTED_MEMORY
            time, memory = median(row) / median(base), float(row["peak_gib"]) / float(base["peak_gib"])
            peak = f"{row['peak_gib']} | {memory:.4f} | {bound(memory, memory_limit)}" if name != FLOOR else "| |"
            yield f"| {name} | {spread(row)} | {time:.4f} | {bound(time, time_limit)} | {peak} |"
        if len(every) > 1:
            yield "\nRatios are to the baseline of the same run. Of every run, oldest first, as the code grew:\n"
        for name in BOUNDS if len(every) > 1 else ():
            ratios = (median(run[name]) / median(run[BASELINE]) for run in every if name in run)
            yield f"- {name}: {', '.join(f'{ratio:.4f}' for ratio in ratios)}"


def memory_note(rows: list[Row]) -> Iterator[str]:
    yield """
With the model untouched, what is added can be counted: the kernel takes 44.5 µs in each of 32 layers (1.42 ms, 0.41 %
of the step) and the decision 0.20 ms (0.06 %), so 1.005 can be counted; measured were 1.004 to 1.008. The
fused activation moves 8 tensors of 117 MB in each layer where PyTorch moves 14: at the copy's 3.9 TB/s that is
180 µs a layer or 1.65 % of the step, and statistics included it gains 1.3 to 1.5 %; 0.985 would be nine tenths of
what the bytes allow.

Two memory bounds are out of reach, for reasons that can be counted. The fused activation keeps z and u in place of z,
φ(z) and u: one tensor of 112 MiB in each of 32 layers, 3.5 GiB of 47.9, which is 0.927; the rest belongs to PEFT's
linear layers, which that variant leaves alone. With checkpointing the peak is at the loss, where a step holds nothing
of the layers: all that lives from step to step adds to it, and the sums of 32 blocks in 18 parts are 33 MB."""


def curves(rows: list[Row]) -> Iterator[str]:
    with CURVES.open(newline="") as file:
        points = list(csv.DictReader(file))
    plain, *others = [name for name in points[0] if name != "step"]
    yield "\n## Do fused layers learn what PEFT's learn?\n\n`python benchmarks/loss_curves.py`: fifty bf16 steps"
    yield "from one start, NA-LoRA on each.\n\n![Loss curves overlaid](figures/loss_curves.svg)\n"
    for name in others:
        difference = max(abs(float(point[name]) - float(point[plain])) for point in points)
        yield f"- {name}: largest difference of the loss from {plain} {difference:.4f}, last {points[-1][name]}"
        yield f"  beside {points[-1][plain]}."


def kernel(rows: list[Row]) -> Iterator[str]:
    found = settings(rows, "statistics kernel")
    yield f"\n## The statistics kernel\n\n`python benchmarks/statistics_kernel.py`. {measured_on(_any(found))}"
    yield "Share of the bandwidth of a copy in the same run; the goal is 0.65 without a mask.\n"
    yield "| z | variant | µs (p20 … p80) | share |\n|---|---|---|---|"
    for setting, variants in found.items():
        for name, row in variants.items():
            share = (1 if name == "copy" else 0.5) * median(variants["copy"]) / median(row)
            yield f"| {setting} | {name} | {spread(row)} | {share:.3f} |"


def decision(rows: list[Row]) -> Iterator[str]:
    found = settings(rows, "decision")
    yield "\n## One decision for all blocks\n\nFrom the sums to masks, step scales and the next window, in"
    yield "microseconds; a training step does not wait for it. The goal is 1,000.\n"
    yield "| blocks | on the GPU | from Python |\n|---|---|---|"
    for setting, variants in found.items():
        yield f"| {setting} | {spread(variants['on the GPU'])} | {spread(variants['from Python'])} |"


def growth(rows: list[Row]) -> Iterator[str]:
    found = settings(rows, "growth")
    yield f"\n## Growth\n\n`python benchmarks/growth.py`. {measured_on(_any(found))} What NA-LoRA adds to a step with"
    yield "the model untouched. Eager steps of small models wait for Python, whose speed varies; graphs show what the"
    yield "GPU does.\n"
    yield "| setting | LoRA, ms | NA-LoRA | LoRA from a graph, ms | NA-LoRA from a graph |\n|---|---|---|---|---|"
    for setting, variants in found.items():
        cells = [setting]
        for suffix in ("", ", graph"):
            lora, ours = variants.get(BASELINE + suffix), variants.get("NA-LoRA, model untouched" + suffix)
            cells += [spread(lora), f"{median(ours) / median(lora):.4f}"] if lora and ours else ["", ""]
        yield f"| {' | '.join(cells)} |"


def small_model(rows: list[Row]) -> Iterator[str]:
    for setting, variants in settings(rows, "small model").items():
        base = variants[BASELINE]
        yield f"\n## A small model: {setting}\n\n`python benchmarks/small_model.py`. {measured_on(base)} Its steps are"
        yield "launches more than arithmetic; `kernels/cuda_graphs.py` replays a whole step. The goal is 4.\n"
        yield "| variant | ms (p20 … p80) | times faster |\n|---|---|---|"
        for name, row in variants.items():
            yield f"| {name} | {spread(row)} | {median(base) / median(row):.2f} |"


def cpu(rows: list[Row]) -> Iterator[str]:
    ratios = [row for row in rows if row["question"] == "cpu step" and row["unit"] in ("ratio", "share")]
    for setting in dict.fromkeys(row["setting"] for row in ratios):
        yield f"\n## A CPU: {setting}\n\n`python benchmarks/cpu_step.py`. Ratio to plain LoRA's step of the same round,"
        yield "and the share of a step spent in nalora. The goal is 1.03.\n"
        yield "| variant | measured | p20 | median | p80 |\n|---|---|---|---|---|"
        latest = {(row["variant"], row["unit"]): row for row in ratios if row["setting"] == setting}
        for (variant, unit), row in latest.items():
            if variant != BASELINE:
                cells = (f"{float(row[q]):.4f}" for q in ("p20", "p50", "p80"))
                yield f"| {variant} | {unit} | {' | '.join(cells)} |"


def generation(rows: list[Row]) -> Iterator[str]:
    for setting, variants in settings(rows, "generation").items():
        graph = variants["CUDA graph"]
        yield f"\n## Generation: {setting}\n\n`python benchmarks/generation_speed.py --data-dir FOLDER`."
        yield f"{measured_on(graph)} Greedy, at most 512 tokens an answer.\n"
        yield "| variant | tokens/s | CUDA graph is faster by |\n|---|---|---|"
        for name, row in variants.items():
            yield f"| {name} | {median(row):,.0f} | {median(graph) / median(row):.1f} |"


def _any(found: dict[str, dict[str, Row]]) -> Row:
    return next(iter(next(iter(found.values())).values()))


if __name__ == "__main__":
    main()
