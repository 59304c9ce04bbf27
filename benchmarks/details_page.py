"""Sections of docs/performance.md about launches, gradients with an FP8 base, and small models in a Trainer."""

from __future__ import annotations

from collections.abc import Iterator

from peers_page import LAUNCHES, Row, latest, reached

FP8_GRADIENTS, IN_TRAINER = "gradients with an FP8 base", "small model in Trainer"
TRAINER_GOAL = 3
FP8_SOURCES = "sources of the difference with an FP8 base"


def launches(rows: list[Row]) -> Iterator[str]:
    """Yield how long Python launches a step, by variant and part."""
    by_setting = latest(rows, LAUNCHES)
    if by_setting:
        where = next(iter(by_setting)).partition(": ")[0]
        yield f"\n## Time to launch a step: {where}\n\n`python benchmarks/launch_time.py`. The batch is so small that"
        yield "the GPU waits for Python; a step with a large batch takes at least this long. Milliseconds.\n"
        parts = list(next(iter(by_setting.values())))
        yield f"| variant | {' | '.join(parts)} |\n|---|{'---|' * len(parts)}"
    for setting, groups in by_setting.items():
        cells = " | ".join(f"{float(groups[part]['p50']):.1f}" for part in parts)
        yield f"| {setting.partition(': ')[2]} | {cells} |"


def fp8_gradients(rows: list[Row]) -> Iterator[str]:
    """Yield the cosines of gradients on an FP8 base with those on the base in its own precision, by projection."""
    for setting, variants in latest(rows, FP8_GRADIENTS).items():
        whole = variants["all layers"]
        difference, error = float(whole["loss_difference"]), float(whole["gradient_error"])
        yield f"\n## Gradients with an FP8 base: {setting}\n\n`python benchmarks/fp8_gradients.py`, {whole['device']},"
        yield f"commit {whole['commit']}. Cosines of each layer's gradients with those on the base in its own"
        yield f"precision. The loss differs by {difference:.1%}, all gradients together by {error:.0%} of their norm;"
        yield f"the lowest cosine is that of {whole['worst_layer']}.\n"
        yield "| projection | median of the layers | p20 … p80 | lowest |\n|---|---|---|---|"
        for name, row in variants.items():
            if row["p50"]:
                middle = f"{float(row['p50']):.3f} | {float(row['p20']):.3f} … {float(row['p80']):.3f}"
                yield f"| {name} | {middle} | {float(row['worst_cosine']):.3f} |"


def fp8_sources(rows: list[Row]) -> Iterator[str]:
    """Yield how far gradients and losses are from exact ones if only a part of the products is rounded."""
    for setting, variants in latest(rows, FP8_SOURCES).items():
        first = next(iter(variants.values()))
        yield f"\n## Where the difference with an FP8 base comes from: {setting}\n\n`python benchmarks/fp8_sources.py`,"
        yield f"{first['device']}, commit {first['commit']}. Differences from the model in float32, of the loss and of"
        yield "all gradients together, and the lowest cosine of a layer. The weights were dequantised from 4 bits, and"
        yield "NF4 rounds them to 4 bits again.\n"
        yield "| what is rounded | loss | gradients | lowest cosine |\n|---|---|---|---|"
        for name, row in variants.items():
            cells = f"{float(row['loss_difference']):.2%} | {float(row['gradient_error']):.1%}".replace("%", " %")
            yield f"| {name} | {cells} | {float(row['worst_cosine']):.3f} |"


def in_trainer(rows: list[Row]) -> Iterator[str]:
    """Yield the steps of a small model in `transformers.Trainer`."""
    for setting, variants in latest(rows, IN_TRAINER).items():
        eager = float(next(iter(variants.values()))["p50"])
        yield f"\n## A small model in Trainer: {setting}\n\n`python benchmarks/trainer_graphs.py`. A step is everything"
        yield "between the starts of two steps of `Trainer.train()`. The goal with graphs is a speed-up of"
        yield f"{TRAINER_GOAL}.\n\n| variant | ms (p20 … p80) | speed-up | goal |\n|---|---|---|---|"
        for name, row in variants.items():
            spread = f"{float(row['p50']):.1f} ({float(row['p20']):.1f} … {float(row['p80']):.1f})"
            speed_up = eager / float(row["p50"])
            goal = f"≥ {TRAINER_GOAL} {reached(speed_up >= TRAINER_GOAL)}" if "graphs" in name else ""
            yield f"| {name} | {spread} | {speed_up:.2f} | {goal} |"
