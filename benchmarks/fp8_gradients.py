"""Gradients of LoRA on an FP8 base next to those on the base in its own precision, by layer, on a real small model.

python benchmarks/fp8_gradients.py [--model smollm2-135m] [--data-dir data/gsm8k] [--rows FILE]

The model's own weights in float32, r = 8 on all linear layers with small random B, and the first training examples of
GSM8K. On a CPU FP8 products are computed from the same rounded numbers as on a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path

import agreement
import harness
import peft
import torch

import nalora
from nalora import tasks
from nalora.models import loading

QUESTION = "gradients with an FP8 base"


def loss_and_gradients(model: torch.nn.Module, batches: list[torch.Tensor]) -> agreement.Gradients:
    total = 0.0
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss / len(batches)
        loss.backward()
        total += loss.item()
    named = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return agreement.Gradients(total, named)


def cosines(ours: agreement.Gradients, reference: agreement.Gradients) -> dict[str, list[float]]:
    """Return the cosines of all layers' gradients, A and B together, by projection."""
    parts: dict[str, list[list[torch.Tensor]]] = defaultdict(lambda: [[], []])
    for name in reference.by_parameter:
        for index, gradients in enumerate((ours, reference)):
            parts[name.partition(".lora_")[0]][index].append(gradients.by_parameter[name].flatten())
    found: dict[str, list[float]] = defaultdict(list)
    for name, (one, other) in parts.items():
        cosine = torch.nn.functional.cosine_similarity(torch.cat(one), torch.cat(other), dim=0)
        found[name.rpartition(".")[2]].append(cosine.item())
    return found


def arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data-dir", default="data/gsm8k")
    parser.add_argument("--examples", type=int, default=8)
    parser.add_argument("--rows", type=Path, default=harness.ROWS)
    return parser.parse_args()


def prepared(args: argparse.Namespace) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """Return the model with adapters whose B is not zero, and the examples, one to a batch."""
    loaded = loading.load(loading.ModelSpec(args.model, dtype="float32"))
    task = tasks.get("gsm8k", data_dir=args.data_dir)
    texts = [f"{example.question}\n{example.target}" for example in [*task.training_set()][: args.examples]]
    batches = [loaded.processor(text, return_tensors="pt").input_ids.to(loaded.device) for text in texts]
    torch.manual_seed(0)
    model = peft.get_peft_model(loaded.model, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    return model.train(), batches


def main() -> None:
    args = arguments(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    model, batches = prepared(args)
    reference = loss_and_gradients(model, batches)
    print(nalora.fuse(model, base="fp8"), flush=True)
    ours = loss_and_gradients(model, batches)
    whole = agreement.compare(ours, reference)
    print(f"loss {reference.loss:.5f} and {ours.loss:.5f}, all gradients differ by {whole.gradient_error:.4f}")
    by_projection = cosines(ours, reference)
    run = {"run": f"{time.strftime('%Y%m%d-%H%M%S')}-{harness.commit()}"}
    keys = {
        "question": QUESTION,
        "setting": f"{args.model}, GSM8K, {args.examples} examples, r=8",
        "unit": "cosine",
    } | run
    rows = [keys | {"variant": name} | harness.quantiles(values) | {"worst_cosine": round(min(values), 5)}
            for name, values in by_projection.items()]  # fmt: skip
    together = {"variant": "all layers", "worst_layer": whole.worst_layer}
    together |= {"loss_difference": f"{whole.loss_difference:.3g}", "gradient_error": f"{whole.gradient_error:.4g}"}
    together |= {"worst_cosine": round(whole.worst_cosine, 5), "samples": sum(map(len, by_projection.values()))}
    rows.append(keys | together)
    for row in rows:
        print(row["variant"], row.get("p50", ""), row["worst_cosine"])
    harness.append(rows, args.rows)


if __name__ == "__main__":
    main()
