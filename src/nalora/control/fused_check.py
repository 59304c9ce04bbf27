"""The difference between fused layers and PEFT's on a batch: loss, and gradients of the adapters."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from nalora.errors import NALoRAError, counted, listed, refuse_first


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
        only_in_one: parameters that have a gradient in one of the passes alone; it is compared with zeros.
        untested: the number of parameters whose gradient is 0 in both passes, as those of A are while B is 0.
        note: what makes the two differ in any case.

    A loss or a gradient that is not finite makes `gradients`, `largest` and `lowest_cosine` NaN.
    """

    reference: str
    loss: float
    reference_loss: float
    gradients: float
    largest: float
    parameter: str
    lowest_cosine: float
    only_in_one: tuple[str, ...] = ()
    untested: int = 0
    note: str = ""

    def __str__(self) -> str:
        difference = abs(self.loss - self.reference_loss)
        untested = (
            f"; {counted(self.untested, 'gradient')} 0 in both, call check again after a step" if self.untested else ""
        )
        only = f"; gradients in one of the two alone: {listed(self.only_in_one, 3)}" if self.only_in_one else ""
        return (
            f"Compared with {self.reference}: loss {self.loss:.6f} and {self.reference_loss:.6f}, a difference of"
            f" {difference:.2e}; gradients differ by {self.gradients:.2e} of their norm, at most by {self.largest:.2e}"
            f" ({self.parameter}); lowest cosine {self.lowest_cosine:.6f}{untested}{only}"
            f"{'; ' if self.note else ''}{self.note}"
        )


def loss_and_gradients(model: nn.Module, batch: Mapping[str, Any]) -> Pass:
    """Return loss and gradients of a batch; gradients, buffers and the random state stay as they are.

    Raises:
        NALoRAError: the model returns no loss for the batch, or nothing is trained.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    problems = (
        (not isinstance(batch, Mapping), f"a {type(batch).__name__}", "pass a dict, for example input_ids and labels"),
        (not torch.is_grad_enabled(), "torch.no_grad or inference_mode", "call check outside of it"),
        (not parameters, "a model without trainable parameters", "unfreeze the adapter, for example by set_adapter"),
    )
    refuse_first("check(batch)", "a training pass: arguments by name, gradients, an adapter that is trained", problems)
    before = {name: parameter.grad for name, parameter in parameters.items()}
    devices = {parameter.device for parameter in parameters.values() if parameter.is_cuda}
    try:
        with torch.random.fork_rng(devices=list(devices)), _buffers_kept(model):
            for parameter in parameters.values():
                parameter.grad = None
            loss = _loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: p.grad.float() for name, p in parameters.items() if p.grad is not None}
        if not gradients:
            raise NALoRAError(
                "check(batch)",
                found="a backward pass that left no gradients, as one with an optimizer inside does",
                expected="gradients of the trained parameters",
                fix="call check before the optimizer's hooks are registered",
            )
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]
    return Pass(loss.item(), gradients)


def _loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    output = model(**batch)
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    as_tuple = isinstance(output, tuple) and not hasattr(output, "_fields")
    raise NALoRAError(
        "check(batch)",
        found=f"a batch of {', '.join(batch) or 'nothing'} for which the model returns "
        + ("a tuple" if as_tuple else "no loss"),
        expected="the arguments of a training pass whose output has a loss",
        fix="leave return_dict=False out"
        if as_tuple
        else "add labels to the batch, for example labels=batch['input_ids']",
    )


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers in the end, such as the running statistics of a BatchNorm."""
    stores = {id(module._buffers): module._buffers for module in model.modules()}.values()
    before = [
        (store, name, buffer, buffer.clone())
        for store in stores
        for name, buffer in store.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for store, name, buffer, values in before:
                store[name] = buffer
                buffer.copy_(values)


def drops_out(model: nn.Module) -> bool:
    """Return whether a pass of the model drops elements at random."""
    return any(
        module.training and ((isinstance(module, _DropoutNd) and module.p) or getattr(module, "attention_dropout", 0))
        for module in model.modules()
    )


def compare(ours: Pass, theirs: Pass, reference: str, note: str = "") -> Agreement:
    """Return the differences between two passes over the same parameters."""
    differences: dict[str, float] = {}
    cosines = [1.0]
    squares, untested = torch.zeros(2, dtype=torch.float64), 0
    for name in sorted(ours.gradients.keys() | theirs.gradients.keys()):
        some = theirs.gradients.get(name, ours.gradients.get(name))
        assert some is not None
        expected = theirs.gradients.get(name, torch.zeros_like(some))
        gradient = ours.gradients.get(name, torch.zeros_like(some))
        distance, norm = (gradient - expected).norm().item(), expected.norm().item()
        squares += torch.tensor([distance**2, norm**2], dtype=torch.float64)
        differences[name] = distance / norm if norm else distance
        # B is zero before the first step, and so is the gradient of A.
        untested += not norm and not distance
        if norm and distance:
            cosines.append(torch.nn.functional.cosine_similarity(gradient.flatten(), expected.flatten(), 0).item())
    undefined = [name for name, difference in differences.items() if not math.isfinite(difference)]
    is_defined = not undefined and math.isfinite(ours.loss) and math.isfinite(theirs.loss)
    worst = undefined[0] if undefined else max(differences, key=differences.__getitem__, default="")
    whole = (squares[0] / squares[1]).sqrt().item() if squares[1] else squares[0].sqrt().item()
    return Agreement(
        reference=reference,
        loss=ours.loss,
        reference_loss=theirs.loss,
        gradients=whole if is_defined else math.nan,
        largest=differences.get(worst, 0.0) if is_defined else math.nan,
        parameter=worst,
        lowest_cosine=min(cosines) if is_defined else math.nan,
        only_in_one=tuple(sorted(ours.gradients.keys() ^ theirs.gradients.keys())),
        untested=untested,
        note=note,
    )
