"""The lower limit of a training step: only the products of frozen weights and attention, forward and backward for x."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from llamas import Shape

NAME = "matrix products alone"


def matrix_products(shape: Shape, tokens: int, length: int, device: str = "cuda") -> Callable[[], None]:
    heads = shape.hidden // shape.heads
    sizes = [
        (shape.hidden, shape.hidden), (shape.key_value_heads * heads, shape.hidden),
        (shape.key_value_heads * heads, shape.hidden), (shape.hidden, shape.hidden),
        (shape.ffn, shape.hidden), (shape.ffn, shape.hidden), (shape.hidden, shape.ffn),
    ]  # fmt: skip
    options = {"device": device, "dtype": torch.bfloat16}
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
