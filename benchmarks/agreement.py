"""Compare a variant's loss and adapter gradients with PEFT's on the same weights and batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from training import Training


class Tolerance(NamedTuple):
    """Bounds of the relative differences of loss and gradients, and of the worst layer's cosine."""

    loss: float
    gradients: float
    cosine: float


# A Llama of 32 layers of width 512 on a CPU: gradients in bf16 differ from those in float32 by 0.018 (worst cosine
# 0.9992), with weights, inputs and output gradients in FP8 by 0.18 (0.942); losses by 3e-5 and 3e-4. Two bf16 variants
# round differently, each as far from float32. The bounds of gradients are three (bf16) and two (FP8) times as wide;
# those of the loss, 17 times or more, only find another function. Larger models may differ by more: unmeasured.
TOLERANCES = {
    "float32": Tolerance(1e-5, 1e-4, 0.9999),
    "bf16": Tolerance(0.001, 0.08, 0.99),
    "four-bit": Tolerance(0.001, 0.08, 0.99),
    "fp8": Tolerance(0.005, 0.4, 0.85),
}


class Gradients(NamedTuple):
    """A loss and the gradients of all adapters by parameter name, on the host."""

    loss: float
    by_parameter: dict[str, torch.Tensor]


class Agreement(NamedTuple):
    """Differences from the reference: relative ones of the loss and of all gradients together, and the worst layer."""

    loss_difference: float
    gradient_error: float
    worst_cosine: float
    worst_layer: str

    def beyond(self, tolerance: Tolerance, same_gradients: bool = True) -> str | None:
        """Return what exceeds the tolerance, None if nothing does. A NaN exceeds every tolerance."""
        measured = [("loss differs by", self.loss_difference, tolerance.loss)]
        if same_gradients:
            measured += [
                ("gradients differ by", self.gradient_error, tolerance.gradients),
                (f"1 - cosine of {self.worst_layer} is", 1 - self.worst_cosine, 1 - tolerance.cosine),
            ]
        found = [f"{what} {value:.2g} > {limit:.2g}" for what, value, limit in measured if not abs(value) <= limit]
        return "; ".join(found) or None


def gradients(training: Training) -> Gradients:
    """Run one forward and backward pass of the variant that is entered; no step is taken."""
    training.optimizer.zero_grad(set_to_none=True)
    loss = training.loss_of(training.batch)
    loss.backward()
    named = training.model.named_parameters()
    # Copied to the host: the reference would otherwise count in every variant's peak, 1.3 GB at rank 128.
    by_parameter = {name: p.grad.float().cpu() for name, p in named if p.requires_grad and p.grad is not None}
    training.optimizer.zero_grad(set_to_none=True)
    return Gradients(loss.item(), by_parameter)


def compare(ours: Gradients, reference: Gradients) -> Agreement:
    """Compare all gradients together, and those of A and B of each LoRA layer."""
    if ours.by_parameter.keys() != reference.by_parameter.keys():
        return Agreement(math.nan, math.nan, math.nan, "some adapters have no gradient")
    difference = norm = 0.0
    layers: dict[str, list[float]] = {}
    for name, exact in reference.by_parameter.items():
        gradient = ours.by_parameter[name]
        difference += (gradient - exact).double().square().sum().item()
        norm += exact.double().square().sum().item()
        products = [
            (a.double() * b.double()).sum().item() for a, b in ((gradient, exact), (gradient, gradient), (exact, exact))
        ]
        layer = layers.setdefault(name.partition(".lora_")[0].removeprefix("base_model.model."), [0.0, 0.0, 0.0])
        layer[:] = [total + product for total, product in zip(layer, products, strict=True)]
    cosines = {name: dot / math.sqrt(a * b) if a * b > 0 else math.nan for name, (dot, a, b) in layers.items()}
    worst = min(cosines, key=lambda name: -math.inf if math.isnan(cosines[name]) else cosines[name])
    loss_difference = abs(ours.loss - reference.loss) / abs(reference.loss)
    return Agreement(loss_difference, math.sqrt(difference / norm), cosines[worst], worst)


def check(
    training: Training, enter: Callable, reference: Gradients | None, passes: int = 1
) -> tuple[Gradients, Agreement]:
    """Enter a variant, and compare the gradients of its last pass with the reference; with themselves without one."""
    with enter():
        for _ in range(passes):
            ours = gradients(training)
    return ours, compare(ours, reference or ours)
