"""Time and memory of a training step of LoRA and NA-LoRA at the shapes of Llama-3.1-8B.

python benchmarks/training_step.py [--batch 4] [--length 1024] [--checkpointing] [--rounds 3] [--steps 8]
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import harness
import torch
from llamas import SHAPES, Shape, build
from training import Training


def matrix_products(shape: Shape, tokens: int, length: int) -> Callable[[], None]:
    """Return the lower limit: only the products of frozen weights and attention, forward and backward for x."""
    heads = shape.hidden // shape.heads
    sizes = [
        (shape.hidden, shape.hidden), (shape.key_value_heads * heads, shape.hidden),
        (shape.key_value_heads * heads, shape.hidden), (shape.hidden, shape.hidden),
        (shape.ffn, shape.hidden), (shape.ffn, shape.hidden), (shape.hidden, shape.ffn),
    ]  # fmt: skip
    options = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [torch.randn(size, **options) * 0.02 for size in sizes]
    head = torch.randn(shape.vocabulary, shape.hidden, **options) * 0.02
    inputs = {size: torch.randn(tokens, size, **options) for size in {n for pair in sizes for n in pair}}
    logits = torch.randn(tokens, shape.vocabulary, **options)
    query = torch.randn(tokens // length, shape.heads, length, heads, **options, requires_grad=True)

    def run() -> None:
        for _ in range(shape.layers):
            for w in weights:
                inputs[w.shape[1]] @ w.T
                inputs[w.shape[0]] @ w
            attended = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
            torch.autograd.grad(attended, query, attended.detach())
        inputs[shape.hidden] @ head.T
        logits @ head

    return run


@contextlib.contextmanager
def floor(run: Callable[[], None]) -> Iterator[Callable[[], None]]:
    yield run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="the variants to measure (default: all)")
    parser.add_argument("--rows", type=Path, default=harness.ROWS)
    args = parser.parse_args()

    shape = SHAPES["llama-3.1-8b"]._replace(layers=args.layers)
    plain = Training(build(shape, checkpointing=args.checkpointing), args.batch, args.length)
    variants = {
        "PEFT LoRA": plain.plain,
        "paper's hooks": plain.paper,
        "NA-LoRA, model untouched": plain.ours(),
        "NA-LoRA, fused LoRA layers": plain.ours(kernels="fused"),
    }
    resident = torch.cuda.memory_allocated() / 2**30
    liger = Training(build(shape, checkpointing=args.checkpointing, liger=True), args.batch, args.length)
    with_liger = {"PEFT LoRA + Liger": liger.plain, "NA-LoRA, everything on": liger.ours(kernels="fused")}
    other = torch.cuda.memory_allocated() / 2**30 - resident
    measured = {
        name: variant for name, variant in (variants | with_liger).items() if not args.only or name in args.only
    }
    results = harness.interleave(measured, args.rounds, args.steps, args.warmup)
    if not args.checkpointing:
        products = matrix_products(shape, args.batch * args.length, args.length)
        results |= harness.interleave({"matrix products alone": lambda: floor(products)}, 1, 20, 3)

    setting = f"llama-8b shapes, {args.layers} layers, {args.batch}x{args.length}, checkpointing={args.checkpointing}"
    rows = []
    base = results["PEFT LoRA"]
    for name, result in results.items():
        not_its_own = {**dict.fromkeys(variants, other), **dict.fromkeys(with_liger, resident)}.get(name)
        result["peak_gib"] = 0.0 if not_its_own is None else round(result["peak_gib"] - not_its_own, 3)
        rows.append({"question": "training step", "setting": setting, "variant": name, "unit": "ms", **result})
    for name, result in results.items():
        time, memory = result["p50"] / base["p50"], result["peak_gib"] / base["peak_gib"]
        print(f"{name:32s} {result['p50']:8.2f} ms  {time:6.4f}   {result['peak_gib']:7.2f} GiB  {memory:6.4f}  "
              f"[{result['p20']:.2f} … {result['p80']:.2f}]")  # fmt: skip
    harness.append(rows, args.rows)


if __name__ == "__main__":
    main()
