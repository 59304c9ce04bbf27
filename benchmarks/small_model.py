"""Speed-up of a small model, whose launches take longer than its arithmetic, with CUDA graphs and fused layers.

python benchmarks/small_model.py [--batch 32] [--length 320] [--rounds 3] [--steps 8]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import harness
import patches
import torch
from llamas import SHAPES, build
from training import Training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--rows", type=Path, default=harness.ROWS)
    args = parser.parse_args()

    def training(compiled_loss: bool = False) -> Training:
        torch.manual_seed(1)
        model = build(SHAPES["smollm2-135m"])
        if compiled_loss:
            # Avoids the float32 copy of the logits, as Liger's fused loss does, which cannot be captured.
            base = model.get_base_model()
            base.loss_function = torch.compile(base.loss_function)
        return Training(model, args.batch, args.length, lr=1e-4)

    eager, fused, graph = training(), training(), training()
    liger, loss = training(), training(compiled_loss=True)
    setups = {"eager": eager, "fused": fused, "graph": graph, "liger": liger, "compiled loss": loss}
    variants = {
        "PEFT LoRA": eager.plain,
        "NA-LoRA, model untouched": eager.ours(),
        "NA-LoRA, fused LoRA layers": fused.ours(kernels="fused"),
        "PEFT LoRA, graph": graph.graphed(graph.plain),
        "NA-LoRA, model untouched, graph": graph.graphed(graph.ours()),
        "NA-LoRA, fused LoRA layers, graph": graph.graphed(graph.ours(kernels="fused")),
    }
    norms = "NA-LoRA, fused LoRA layers, Liger's norms and rotary embedding"

    def with_liger(setup: Training):
        # Without Liger's fused loss: it copies a number to the host, which a CUDA graph cannot capture.
        fused = setup.within(lambda: patches.liger(setup.model, loss=False, ffn=False), setup.ours(kernels="fused"))
        return setup.graphed(fused)

    variants[f"{norms}, graph"] = with_liger(liger)
    variants[f"{norms}, compiled loss, graph"] = with_liger(loss)
    if not args.no_compile:
        setups["compiled"] = compiled = training()
        variants["NA-LoRA, model untouched, compiled, graph"] = compiled.graphed(compiled.ours(), compiled=True)
    results = harness.interleave(variants, args.rounds, args.steps, args.warmup)
    setting = f"smollm2-135m shapes, {args.batch}x{args.length}"
    base = results["PEFT LoRA"]["p50"]
    for name, result in results.items():
        print(f"{name:44s} {result['p50']:8.2f} ms  {base / result['p50']:6.2f} x faster  {result['peak_gib']:.2f} GiB")
    harness.append([{"question": "small model", "setting": setting, "variant": name, "unit": "ms", **result}
                    for name, result in results.items()], args.rows)  # fmt: skip
    print({name: [round(loss.item(), 3) for loss in each.losses[:12:3]] for name, each in setups.items()})


if __name__ == "__main__":
    main()
