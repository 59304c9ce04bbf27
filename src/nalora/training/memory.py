"""An estimate of the memory of a training step, from a step that is computed without values.

torch's fake tensors have shapes, types and storage sizes but no data: a forward and a backward pass over them runs the
model's own code, allocates nothing and shows how many bytes a real pass holds at its peak. It takes seconds, for a
model of any size.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nalora.distributed.wrappers import base_of
from nalora.errors import first_line
from nalora.models.attention import without_cache

# Bytes per parameter of bitsandbytes' layers: NF4 has a float32 scale for every 64 values.
_QUANTISED = {"4bit": 0.5 + 4 / 64, "8bit": 1.0, "fp8": 1.0}
# Values that an optimizer stores per trained value; AdamW's two for all others.
_STATES = {"sgd": 0, "adafactor": 0, "muon": 1, "lion": 1, "rmsprop": 1, "adagrad": 1}


# On a CPU the process also holds Python with its libraries, and freed blocks that the C library keeps: with
# MALLOC_MMAP_THRESHOLD_=65536, which gives them back, the peak of SmolLM2-135M falls from 3.2 to 2.0 GiB.
_LIBRARIES, _KEPT_BY_ALLOCATOR = 0.6 * 2**30, 0.6


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of a step.

    Attributes:
        frozen: weights that are not trained.
        trained: trained parameters.
        gradients: their gradients.
        optimizer: the optimizer's state.
        activations: what a pass holds at its peak in addition to all that; None if it could not be computed.
        why_unknown: the reason for that.
    """

    frozen: int
    trained: int
    gradients: int
    optimizer: int
    activations: int | None
    why_unknown: str = ""

    @property
    def total(self) -> int:
        """The sum of all known parts."""
        return self.frozen + self.trained + self.gradients + self.optimizer + (self.activations or 0)

    @property
    def process_on_cpu(self) -> int:
        """The resident memory of a process that trains on a CPU."""
        return round(self.total + _LIBRARIES + _KEPT_BY_ALLOCATOR * (self.activations or 0))


def estimate(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    optimizer: str,
    accumulated: int,
    autocast: torch.dtype | None,
    checkpointing: bool,
    quantise: str | None,
) -> Memory:
    """Return the memory of one step of a model that is on the meta device; afterwards the model has fake parameters.

    Args:
        model: prepared by its method.
        batch: the inputs of a pass.
        optimizer: the name of the run's optimizer.
        accumulated: the number of passes in a step; from the second on, gradients exist already.
        autocast: the type that the Trainer computes in; None for that of the weights.
        checkpointing: whether activations are recomputed in the backward pass.
        quantise: ``4bit``, ``8bit``, ``fp8`` or None.
    """
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    frozen = sum(_bytes(p) for p in parameters if not p.requires_grad) + sum(map(_bytes, model.buffers()))
    if quantise:
        frozen -= round(sum(_bytes(w) - _QUANTISED[quantise] * w.numel() for w in _quantised_weights(model)))
    gradients = sum(map(_bytes, trained))
    activations, why = None, ""
    try:
        peak = _peak_of_a_pass(model, batch, accumulated > 1, autocast, checkpointing)
        activations = max(peak - gradients, 0)
    except Exception as error:  # a model may read values, which fake tensors do not have
        why = f"a pass cannot be computed without values ({type(error).__name__}: {first_line(error)})"
    return Memory(frozen, gradients, gradients, _optimizer_state(optimizer, trained), activations, why)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _quantised_weights(model: nn.Module) -> Iterable[Tensor]:
    """Yield the weights that bitsandbytes quantises: those of the base's linear layers, except the output head."""
    head = getattr(base_of(model), "get_output_embeddings", lambda: None)()
    for module in model.modules():
        if type(module) is nn.Linear and module is not head and not module.weight.requires_grad:
            yield module.weight


def _optimizer_state(name: str, trained: list[nn.Parameter]) -> int:
    states = next((number for part, number in _STATES.items() if part in name), 2)
    return states * sum(p.numel() * (1 if "8bit" in name else p.element_size()) for p in trained)


def _peak_of_a_pass(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    with_gradients: bool,
    autocast: torch.dtype | None,
    checkpointing: bool,
) -> int:
    """Return the largest number of bytes that a forward and backward pass holds, parameters not included."""
    # Models find the beginnings of packed examples by the values of their positions.
    inputs = {name: value for name, value in batch.items() if name != "position_ids"}
    fake, live = FakeTensorMode(allow_non_fake_inputs=True), LiveBytes()
    precision = torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()
    inner: Any = base_of(model)
    with fake, precision, without_cache(model):
        model.to_empty(device="cpu")
        if hasattr(inner, "tie_weights"):
            inner.tie_weights()
        if checkpointing:
            inner.gradient_checkpointing_enable({"use_reentrant": False})
            inner.enable_input_require_grads()
        model.train()
        for parameter in model.parameters():
            if with_gradients and parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        outside = [*model.parameters(), *model.buffers()]
        with live.without(outside):
            loss = model(**{name: fake.from_tensor(value) for name, value in inputs.items()}).loss
            loss.backward()
    return live.peak + (sum(_bytes(p) for p in model.parameters() if p.requires_grad) if with_gradients else 0)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operations create, until Python frees them.

    Attributes:
        peak: the largest count so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._sizes: dict[int, int] = {}

    def without(self, tensors: Iterable[Tensor]) -> LiveBytes:
        """Return this counter, which does not count these tensors."""
        for tensor in tensors:
            self._add(tensor, counted=False)
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it returns."""
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._add(value)
        return result

    def _add(self, tensor: Tensor, counted: bool = True) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes() if counted else 0
        self._now += self._sizes[key]
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self._now -= self._sizes.pop(key)
