"""Run folders as training, evaluation and diagnosis write them, of any size."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import yaml
from safetensors.numpy import save_file

from nalora import activations

EVALUATED = {"questions": "0123456789abcdef", "options": {}, "style": "plain", "max_new_tokens": 8, "data": None}
LOWER, UPPER = activations.get("silu").characteristic_points
MEASURES = ("D_sel", "flip", "kappa_drift", "suppressive", "positive", "severe", "D_EH", "D_EH_live")


def block_names(layers: int) -> list[str]:
    return [f"base_model.model.model.layers.{i}.mlp" for i in range(layers)]


def digits(values) -> list[float]:
    """Five significant digits, as gates.jsonl has them."""
    return [float(f"{v:.5g}") for v in np.asarray(values).tolist()]


def write_run(
    folder: Path,
    *,
    name: str = "run",
    method: str = "na-lora",
    steps: int = 20,
    layers: int = 4,
    width: int = 24,
    seed: int = 0,
    gates: bool = True,
    diagnosis: bool = True,
    channels: bool = False,
    mismatch: bool = False,
    adapter: bool = True,
    evaluated: bool = True,
    header: dict | None = None,
    **settings,
) -> Path:
    """Write a finished run; omitted parts are absent, as if their command had not been run."""
    draw = np.random.default_rng(seed)
    run = folder / name
    run.mkdir(parents=True)
    values = {"model": "smollm2-135m", "task": "gym/chain_sum", "method": method, "output": str(run), "seed": seed,
              "rank": 4, "alpha": 8.0, "batch_size": 9, "steps": steps} | settings  # fmt: skip
    (run / "run.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    write(run / "environment.json", {
        "command": f"nalora train {name}.yaml", "started": "2026-01-02T03:04:05+0000", "python": "3.11.2",
        "versions": {"nalora": "0.1.0", "torch": "2.11.0"}, "device": "x86_64", "devices": 0, "cpu_threads": 2,
    })  # fmt: skip
    losses = 2.6 * np.exp(-np.arange(steps) / (steps / 3)) + 0.4 + 0.1 * draw.random(steps)
    rows = [{"step": i + 1, "loss": float(losses[i]), "grad_norm": 1.0, "learning_rate": 1e-3, "seconds": 2.5 * (i + 1)}
            for i in range(steps)]  # fmt: skip
    write_rows(run / "metrics.jsonl", rows)
    write(run / "result.json", {
        "method": method, "model": values["model"], "task": values["task"], "steps": steps, "train_loss": 0.9,
        "trainable_parameters": 123456, "seconds": 2.5 * steps, "peak_memory_gib": None, "examples": 266, "rows": 266,
        "dropped_too_long": 0, "cut_too_long": 0, "target_tokens": 788,
    })  # fmt: skip
    if gates:
        write_gates(run / "gates.jsonl", steps, layers, draw, header or {})
    if diagnosis:
        write_diagnosis(run, layers, width, draw, channels)
    if mismatch:
        write_mismatch(run, layers, draw)
    if adapter:
        write_adapter(run / "adapter", layers, width, draw)
    if evaluated:
        for who, right in (("base", 4), ("adapted", 31 + 3 * seed)):
            write_evaluation(run / "evaluations" / "gym" / "chain_sum" / f"{who}-0123456789", right)
    return run


def write_evaluation(folder: Path, right: int, of: int = 100) -> None:
    """Write an evaluation with `right` right answers; a model with more of them has all of one with fewer."""
    write(folder / "summary.json", summary(right, of))
    is_right = [37 * i % of < right for i in range(of)]
    outputs = [
        {"id": f"q{i}", "question": f"What is {i} + {2 * i}?", "expected": str(3 * i),
         "outputs": [str(3 * i if is_right[i] else 3 * i + 1)], "scores": {"accuracy": float(is_right[i])},
         "tokens": 3, "finished": True}
        for i in range(of)
    ]  # fmt: skip
    write_rows(folder / "outputs.jsonl", outputs)
    write_rows(folder / "scores.jsonl", [{"id": row["id"], "scores": row["scores"]} for row in outputs])
    losses = [{"id": f"q{i}", "loss": 3 * (2.5 - 2 * is_right[i]), "tokens": 3} for i in range(of)]
    write_rows(folder / "losses.jsonl", losses)


def summary(right: int, of: int = 100) -> dict:
    share = right / of
    interval = [max(0, share - 0.08), share + 0.1]
    measured = {"value": share, "bootstrap": interval, "binomial": interval}
    loss = {"value": 2.5 - 2 * share, "bootstrap": [2.4 - 2 * share, 2.6 - 2 * share]}
    return {"task": "gym/chain_sum", "examples": of, "questions": of, "evaluated": EVALUATED,
            "measures": {"accuracy": measured}, "target_loss": loss, "chance": {"always 0": 0.01}, "unfinished": 0,
            "tokens": 300}  # fmt: skip


def write_gates(path: Path, steps: int, layers: int, draw, more: dict) -> None:
    """Write the file of version 0.1, unless `more` adds the fields of later versions to the first line."""
    header = {"blocks": block_names(layers), "activations": ["silu"] * layers, "thresholds": [[LOWER, UPPER]] * layers}
    header |= more
    depth, start = np.linspace(0, 1, layers), draw.random(layers) * 0.04
    lines = [json.dumps(header)]
    for step in range(1, steps + 1):
        t = step / steps
        sup = 0.1 + 0.35 * depth + 0.1 * t * (1 - depth) + start + 0.005 * draw.random(layers)
        pos = 0.03 + 0.12 * depth * t + 0.005 * draw.random(layers)
        row = {
            "p_sup": sup, "p_res": 1 - sup - pos, "p_pos": pos, "a": 1 - 2 * pos,
            "scale_gate": 1 + 0.4 * pos * t, "scale_up": 1 + 0.3 * pos * t, "scale_down": 1 + 0.2 * pos,
            "mask_mean": 0.9 - 0.5 * t * depth, "kept_share": 1 - 0.6 * t * depth,
            "stability": 0.07 * np.exp(-5 * t) + 0 * depth,
            "skipped_updates": np.zeros(layers),
        }  # fmt: skip
        lines.append(json.dumps({"step": step} | {key: digits(value) for key, value in row.items()}))
    path.write_text("\n".join(lines) + "\n")


def diagnosed_blocks(layers: int, width: int) -> list[dict]:
    return [
        {"name": n, "activation": "silu", "width": width, "lower": LOWER, "upper": UPPER} for n in block_names(layers)
    ]


def write_diagnosis(run: Path, layers: int, width: int, draw, channels: bool) -> None:
    at = [0, 5, 10, 20]
    intervals = []
    for a, b in pairwise(at):
        supp, pos = draw.random(layers) * 0.05, draw.random(layers) * 0.04
        severe = np.minimum(supp, pos) * 0.1
        values = {"D_sel": draw.random(layers) * 0.02, "flip": supp + pos - severe, "kappa_drift": draw.random(layers),
                  "suppressive": supp, "positive": pos, "severe": severe, "D_EH": draw.random(layers) * 9,
                  "D_EH_live": draw.random(layers)}  # fmt: skip
        intervals.append({"from": a, "to": b} | {key: digits(value) for key, value in values.items()})
    total = {key: digits(sum(np.array(each[key]) for each in intervals)) for key in MEASURES}
    edges = np.linspace(-8, 8, 65)
    middle = (edges[1:] + edges[:-1]) / 2
    counts = [
        [(1e5 * np.exp(-((middle + 0.3 * k - 0.05 * i) ** 2))).astype(int).tolist() for i in range(layers)]
        for k in (1, 2)
    ]
    if channels:
        names = block_names(layers)
        values = {f"{n}/{m}": draw.random((3, width)).astype(np.float32) for n in names for m in MEASURES}
        save_file(values, run / "diagnosis_channels.safetensors")
    write(run / "diagnosis.json", {
        "version": 1, "run": str(run), "method": "na-lora", "model": "smollm2-135m",
        "probe": {"task": "gym/chain_sum", "examples": 64, "tokens": 4321, "seed": 0},
        "blocks": diagnosed_blocks(layers, width), "steps": at, "intervals": intervals,
        "first_to_last": {"from": 0, "to": 20} | total, "cumulative": total,
        "shares": [], "histogram": {"edges": edges.tolist(), "steps": [0, 20], "counts": counts},
        "channels": "diagnosis_channels.safetensors" if channels else None,
        "cost": {"seconds": 12.3, "forward_passes_per_checkpoint": 2.0, "peak_memory_ratio": 1.1},
    })  # fmt: skip


def write_mismatch(run: Path, layers: int, draw) -> None:
    terms = ("residual_through_view", "selection_mismatch", "view_mismatch")
    energy = {term: draw.random(layers) for term in terms}
    whole = sum(energy.values())
    actual = draw.random(layers) + 1
    write(run / "mismatch.json", {
        "version": 1, "run": str(run), "target": "runs/full", "probe": {"examples": 64},
        "blocks": diagnosed_blocks(layers, 24),
        "energy": {term: digits(value) for term, value in energy.items()} | {"total": digits(whole)},
        "share": {term: digits(value / whole) for term, value in energy.items()},
        "bound": {"actual": digits(actual), "bound": digits(3 * actual), "tightness": [0.33333] * layers},
        "mask": {"rank_correlation": digits(draw.random(layers)), "top_share": 0.3, "chance": 0.3,
                 "top_overlap": digits(draw.random(layers))},
        "top_channels": [[[c, 0.25 / (c + 1)] for c in range(10)] for _ in range(layers)],
    })  # fmt: skip


def write_adapter(folder: Path, layers: int, width: int, draw, hidden: int = 12, rank: int = 4) -> None:
    folder.mkdir()
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.v_proj": (hidden, hidden),
              "mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden),
              "mlp.down_proj": (hidden, width)}  # fmt: skip
    tensors = {}
    for i in range(layers):
        for kind, (rows, columns) in shapes.items():
            place = f"base_model.model.model.layers.{i}.{kind}"
            tensors[f"{place}.lora_A.weight"] = draw.standard_normal((rank, columns)).astype(np.float32)
            tensors[f"{place}.lora_B.weight"] = 0.01 * (i + 1) * draw.standard_normal((rows, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    write(
        folder / "adapter_config.json",
        {"r": rank, "lora_alpha": 2 * rank, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}},
    )


def write(path: Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
