"""The difference between fused layers and PEFT's on a batch: loss, and gradients of the adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nalora.errors import NALoRAError


class Pass(NamedTuple):
    """The loss of one forward pass, and the gradients of its trainable parameters by name."""

    loss: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Agreement:
    """How far two passes are apart.

    Attributes:
        reference: what the fused layers are compared with.
        loss: of the fused layers.
        reference_loss: of the reference.
        gradients: ‖g − g′‖ / ‖g′‖ over all parameters together.
        largest: the largest such ratio of a single parameter.
        parameter: the name of that parameter.
        lowest_cosine: the lowest cosine between two gradients of one parameter.
    """

    reference: str
    loss: float
    reference_loss: float
    gradients: float
    largest: float
    parameter: str
    lowest_cosine: float

    def __str__(self) -> str:
        difference = abs(self.loss - self.reference_loss)
        return (
            f"Compared with {self.reference}: loss {self.loss:.6f} and {self.reference_loss:.6f}, a difference of"
            f" {difference:.2e}; gradients differ by {self.gradients:.2e} of their norm, at most by {self.largest:.2e}"
            f" ({self.parameter}); lowest cosine {self.lowest_cosine:.6f}"
        )


def loss_and_gradients(model: nn.Module, batch: Mapping[str, Any]) -> Pass:
    """Return loss and gradients of a batch; the model's gradients and the random state stay as they are.

    Raises:
        NALoRAError: the model returns no loss for the batch.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.grad for name, parameter in parameters.items()}
    devices = {parameter.device for parameter in parameters.values() if parameter.is_cuda}
    try:
        with torch.random.fork_rng(devices=list(devices)):
            for parameter in parameters.values():
                parameter.grad = None
            loss = getattr(model(**batch), "loss", None)
            if loss is None:
                raise NALoRAError(
                    "check(batch)",
                    found=f"a batch of {', '.join(batch) or 'nothing'} for which the model returns no loss",
                    expected="the arguments of a training pass",
                    fix="add labels to the batch, for example labels=batch['input_ids']",
                )
            loss.backward()
        gradients = {name: p.grad.float() for name, p in parameters.items() if p.grad is not None}
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]
    return Pass(loss.item(), gradients)


def compare(ours: Pass, theirs: Pass, reference: str) -> Agreement:
    """Return the differences between two passes over the same parameters."""
    differences: dict[str, float] = {}
    cosines = [1.0]
    squares = torch.zeros(2, dtype=torch.float64)
    for name, expected in theirs.gradients.items():
        gradient = ours.gradients.get(name, torch.zeros_like(expected))
        distance, norm = (gradient - expected).norm().item(), expected.norm().item()
        squares += torch.tensor([distance**2, norm**2], dtype=torch.float64)
        differences[name] = distance / norm if norm else distance
        # B is zero before the first step, and so is the gradient of A.
        if norm and distance:
            cosines.append(torch.nn.functional.cosine_similarity(gradient.flatten(), expected.flatten(), 0).item())
    worst = max(differences, key=differences.__getitem__, default="")
    whole = (squares[0] / squares[1]).sqrt().item() if squares[1] else 0.0
    return Agreement(
        reference=reference,
        loss=ours.loss,
        reference_loss=theirs.loss,
        gradients=whole,
        largest=differences.get(worst, 0.0),
        parameter=worst,
        lowest_cosine=min(cosines),
    )
