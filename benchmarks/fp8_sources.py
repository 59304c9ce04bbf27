"""Where gradients on an FP8 base differ: by rounding weights, inputs or output gradients, on a real small model.

python benchmarks/fp8_sources.py [--model smollm2-135m] [--data-dir data/gsm8k] [--examples 8] [--rows FILE]

Products are computed in float32 from rounded numbers, by PEFT's layers on the model of fp8_gradients.py. "all three" is
what `nalora.fuse(model, base="fp8")` rounds. A base in NF4 with blocks of 64, as bitsandbytes has it, and the whole
model in bf16 are there for comparison: adapters are trained on both without a second thought.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import agreement
import harness
import torch
from fp8_gradients import arguments, loss_and_gradients, prepared
from torch import Tensor, nn

from nalora.kernels.fused.fp8 import quantise_rows

QUESTION = "sources of the difference with an FP8 base"
BLOCK = 64  # divides all widths of SmolLM2-135M

Round = Callable[[Tensor], Tensor]


class Rounding(NamedTuple):
    """What is rounded in the products of frozen layers; None if nothing is."""

    weights: Round | None = None
    inputs: Round | None = None
    gradients: Round | None = None
    except_in: str = ""


def by_row(x: Tensor) -> Tensor:
    """Return x rounded to e4m3 with one scale per row, as `nalora.fuse` does."""
    rows = x.reshape(-1, x.shape[-1])
    return quantise_rows(rows).dequantised(x.dtype).view(x.shape)


def by_block(x: Tensor) -> Tensor:
    """Return x rounded to e4m3 with one scale per row and block of columns."""
    return by_row(x.reshape(-1, BLOCK)).view(x.shape)


def nf4(weight: Tensor) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    return dequantize_4bit(*quantize_4bit(weight.contiguous(), blocksize=BLOCK, quant_type="nf4")).to(weight.dtype)


VARIANTS = {
    "all three": Rounding(by_row, by_row, by_row),
    "weights alone": Rounding(weights=by_row),
    "inputs alone": Rounding(inputs=by_row),
    "output gradients alone": Rounding(gradients=by_row),
    "inputs and output gradients": Rounding(inputs=by_row, gradients=by_row),
    f"all three, blocks of {BLOCK}": Rounding(by_block, by_block, by_block),
    "all three, without down_proj": Rounding(by_row, by_row, by_row, except_in="down_proj"),
    "weights in NF4": Rounding(weights=nf4),
}


class _Product(torch.autograd.Function):
    """x Wᵀ of rounded numbers; of the output's gradient, the weight's scales are part before it is rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounding: Rounding) -> Tensor:
        rounded = weight if rounding.weights is None else rounding.weights(weight)
        ctx.weight, ctx.rounding = rounded, rounding
        return (x if rounding.inputs is None else rounding.inputs(x)) @ rounded.T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        if ctx.rounding.gradients is not None:
            scales = quantise_rows(ctx.weight).scales.T
            dy = ctx.rounding.gradients(dy * scales) / scales
        return dy @ ctx.weight, None, None


@contextlib.contextmanager
def rounded(model: nn.Module, rounding: Rounding) -> Iterator[None]:
    """Round in all frozen layers below an adapter."""
    layers = {name: module for name, module in model.named_modules() if name.endswith(".base_layer")}
    chosen = [layer for name, layer in layers.items() if not rounding.except_in or rounding.except_in not in name]
    for layer in chosen:
        layer.forward = lambda x, weight=layer.weight: _Product.apply(x, weight, rounding)
    try:
        yield
    finally:
        for layer in chosen:
            del layer.forward


def main() -> None:
    args = arguments(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    model, batches = prepared(args)
    reference = loss_and_gradients(model, batches)
    found = {}
    for name, rounding in VARIANTS.items():
        with rounded(model, rounding):
            found[name] = agreement.compare(loss_and_gradients(model, batches), reference)
        print(name, found[name], flush=True)
    with torch.autocast(batches[0].device.type, torch.bfloat16):
        found["the whole model in bf16"] = agreement.compare(loss_and_gradients(model, batches), reference)
    keys = {
        "question": QUESTION,
        "setting": f"{args.model}, GSM8K, {args.examples} examples, r=8",
        "run": f"{time.strftime('%Y%m%d-%H%M%S')}-{harness.commit()}",
    }
    rows = [
        keys | {"variant": name, "unit": "relative", "worst_layer": result.worst_layer}
        | {column: f"{getattr(result, column):.4g}" for column in ("loss_difference", "gradient_error", "worst_cosine")}
        for name, result in found.items()
    ]  # fmt: skip
    harness.append(rows, args.rows)
    for row in rows:
        print(row["variant"], row["loss_difference"], row["gradient_error"], row["worst_cosine"])


if __name__ == "__main__":
    main()
