"""The forward and the backward graph of one decoder layer, and the memory that both read and write."""

from __future__ import annotations

import contextlib
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from nalora.kernels.fused.layer_calls import Call
from nalora.kernels.fused.replaced_forward import Replacement
from nalora.kernels.statistics import Sums

# The sums that a pass adds to, None if it does not count, and the mask of its tokens.
PassState = tuple[Sums | None, Tensor | None]


class Recorder(Protocol):
    """Captures functions, in an order in which they are replayed again."""

    def recording(self) -> AbstractContextManager[None]:
        """Return the context of all captures of a shape."""

    def record(self, function: Callable[[], Sequence[Tensor | None]]) -> Callable[[], None]:
        """Capture a function; return what computes its results again, into the tensors of the first call."""


class Watched(Replacement):
    """A part of a layer that decides on the host, before each pass, which tensors its kernels read and add to.

    Attributes:
        fixed: what to use in place of a decision, while a layer is captured.
        seen: the state of the last pass that decided by itself.
    """

    fixed: PassState | None = None
    seen: PassState = (None, None)

    @abstractmethod
    def is_observed(self) -> bool:
        """Return whether there is anything to decide."""

    @abstractmethod
    def decide(self, x: Tensor) -> PassState:
        """Decide for a pass with this input."""

    @abstractmethod
    def addresses(self) -> tuple[int, ...]:
        """Return where the tensors are that a graph adds to."""


@contextlib.contextmanager
def fixed(parts: Sequence[Watched], states: Sequence[PassState]) -> Iterator[None]:
    """Let watched parts use states that were determined before."""
    for part, state in zip(parts, states, strict=True):
        part.fixed = state
    try:
        yield
    finally:
        for part in parts:
            part.fixed = None


class Place(NamedTuple):
    """A parameter, and the module that has it under a name."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


def places_of(layer: nn.Module) -> list[Place]:
    """Return the places of all parameters inside a layer."""
    return [
        Place(module, name, parameter)
        for module in layer.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


@contextlib.contextmanager
def _replaced(places: Sequence[Place], leaves: dict[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Let modules compute with other parameters."""
    for place in places:
        place.module._parameters[place.name] = leaves[place.parameter]
    try:
        yield
    finally:
        for place in places:
            place.module._parameters[place.name] = place.parameter


class Buffer:
    """A static copy of an argument, which several layers share."""

    def __init__(self, source: Tensor) -> None:
        self.tensor = source.detach().clone(memory_format=torch.contiguous_format)
        self.source, self.version, self.number = weakref.ref(source), source._version, 0

    def fill(self, source: Tensor, number: int) -> bool:
        """Copy the source of a pass, unless another layer did so; return whether all layers of the pass have the same.

        A backward pass reads what the last layer of the forward pass wrote.
        """
        is_there = self.source() is source and self.version == source._version
        if not is_there and self.number == number:
            return False
        if not is_there:
            self.tensor.copy_(source)
            self.source, self.version = weakref.ref(source), source._version
        self.number = number
        return True


class LayerGraphs:
    """One layer's graphs for one kind of call.

    Attributes:
        output: of the last replay.
        watched_kinds: which of the sums and masks were there when it was captured.
    """

    output: Tensor
    is_last = False

    def __init__(
        self, index: int, call: Call, kind: tuple[Any, ...], parameters: Sequence[Place], watched: list[Watched]
    ) -> None:
        self.index, self.call, self.kind, self.watched = index, call, kind, watched
        self.places = [place for place in parameters if place.parameter.requires_grad]
        self.trained = [*dict.fromkeys(place.parameter for place in self.places)]
        self.masks = [None if part.seen[1] is None else Buffer(part.seen[1]) for part in watched]
        self.watched_kinds = [kind_of(part.seen) for part in watched]

    def allocate(self, before: Tensor | None, shared: dict[int, Buffer], *, requires_grad: bool) -> None:
        """Prepare the inputs: the output of the layer before, which is then not copied, and buffers for the others."""
        hidden, *others = self.call.tensors()
        follows = before is not None and before.shape == hidden.shape and before.dtype == hidden.dtype
        if before is not None and follows:
            self.hidden = before.detach()
        else:
            self.hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=self.trained[0].device)
        self.hidden.requires_grad_(requires_grad)
        self.others = [shared.setdefault(id(tensor), Buffer(tensor)) for tensor in others]
        self.call = self.call.with_tensors([self.hidden, *(buffer.tensor for buffer in self.others)])

    def capture_forward(self, recorder: Recorder, compute: Callable[[Call], Tensor]) -> None:
        """Capture the forward pass, which also adds to the statistics."""

        # Autograd synchronises a captured backward pass with the stream on which it first used a parameter, which ends
        # the capture. Other leaves with the same memory were never used before.
        self._leaves = {parameter: nn.Parameter(parameter.detach()) for parameter in self.trained}

        def forward() -> list[Tensor]:
            with torch.enable_grad(), _replaced(self.places, self._leaves):
                self._differentiable = compute(self.call)
            return [self._differentiable]

        masks = (None if mask is None else mask.tensor for mask in self.masks)
        with fixed(self.watched, [(part.seen[0], mask) for part, mask in zip(self.watched, masks, strict=True)]):
            self.replay_forward = recorder.record(forward)
        self.output = self._differentiable.detach()

    def capture_backward(
        self, recorder: Recorder, gradient: Tensor | None, buffers: dict[nn.Parameter, Tensor]
    ) -> Tensor | None:
        """Capture the backward pass for the output's gradient, which the next layer computes; return the input's.

        Gradients of parameters are written into buffers, which all shapes of batches share: they outlive the pass, and
        the graphs' own memory is written by the next one.
        """
        follows = gradient is not None and gradient.shape == self.output.shape and gradient.dtype == self.output.dtype
        self.gradient = gradient if gradient is not None and follows else torch.empty_like(self.output)
        wanted = [*([self.hidden] if self.hidden.requires_grad else []), *self._leaves.values()]
        buffers.update((each, torch.empty_like(each)) for each in self.trained if each not in buffers)
        self.gradients = [buffers[each] for each in self.trained]
        self.dx: Tensor | None = None

        def backward() -> list[Tensor | None]:
            # As a training loop does it: passes backward are outside of autocast.
            with torch.autocast(self.output.device.type, enabled=False):
                computed = torch.autograd.grad(self._differentiable, wanted, self.gradient, allow_unused=True)
            dx, gradients = (computed[0], computed[1:]) if self.hidden.requires_grad else (None, computed)
            self.unused = [gradient is None for gradient in gradients]
            pairs = [(buffer, g) for buffer, g in zip(self.gradients, gradients, strict=True) if g is not None]
            with torch.no_grad():
                torch._foreach_copy_([buffer for buffer, _ in pairs], [gradient for _, gradient in pairs])
            self.dx = dx if self.dx is None else self.dx
            return [dx]

        self._replay_backward = recorder.record(backward)
        return self.dx

    def fill(self, tensors: Sequence[Tensor], states: Sequence[PassState], number: int) -> bool:
        """Copy the arguments of a pass, where they are not in place; return False if the graphs cannot serve them."""
        hidden, *others = tensors
        # All, although one may be refused: the others are equal to what is there, or nobody has read them yet.
        if not all([buffer.fill(tensor, number) for buffer, tensor in zip(self.others, others, strict=True)]):
            return False
        if hidden.data_ptr() != self.hidden.data_ptr() or hidden.stride() != self.hidden.stride():
            self.hidden.detach().copy_(hidden)
        for buffer, (_, mask) in zip(self.masks, states, strict=True):
            if buffer is not None and mask is not None:
                buffer.fill(mask, number)
        return True

    def replay_backward(self, gradient: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        """Compute the gradients of the input and of the trained parameters."""
        if gradient.data_ptr() != self.gradient.data_ptr() or gradient.stride() != self.gradient.stride():
            self.gradient.copy_(gradient)
        for parameter, computed in zip(self.trained, self.gradients, strict=True):
            # Gradients that are accumulated over several passes may be the memory that is written now.
            if parameter.grad is not None and parameter.grad.data_ptr() == computed.data_ptr():
                parameter.grad = parameter.grad.clone()
        self._replay_backward()
        dx = self.dx
        if dx is not None:
            # Of the first layer somebody may keep it; what the layer before it reads is read at once.
            dx = dx.clone() if self.index == 0 else dx.detach()
        computed_gradients = zip(self.gradients, self.unused, strict=True)
        return dx, [None if unused else gradient.detach() for gradient, unused in computed_gradients]


def kind_of(state: PassState) -> tuple[bool, tuple[int, ...] | None]:
    """Return what a graph depends on: whether the pass counts, and the form of its mask."""
    sums, mask = state
    return sums is not None, None if mask is None else tuple(mask.shape)
