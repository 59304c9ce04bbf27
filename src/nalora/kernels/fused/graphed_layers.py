"""Replay decoder layers from CUDA graphs: one launch for a layer's forward pass, and one for its backward pass.

A training step of a Llama with 32 layers is about 4,000 kernels, and the time that Python needs to launch them does not
depend on the batch: 150 ms on the machine of docs/performance.md. Everything outside the layers stays as it is: loss,
optimizer, clipping, gradient accumulation and hooks on parameters.

The first training pass of a shape runs eagerly and records how each layer is called. The second one captures all
layers, forward in order and backward in reverse, in one memory pool, so that memory is reused exactly as in an eager
step. For that reason a pass is replayed only while no earlier one waits for its backward pass; it runs eagerly
otherwise, as does everything else that a recording cannot serve: evaluation, key-value caches, recomputations, and
arguments of another kind.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nalora.errors import NALoRAError, refuse_first
from nalora.kernels.fused.adapters import StepFactors
from nalora.kernels.fused.compiled_layers import decoder_layers, without_cache
from nalora.kernels.fused.cuda_recorder import CudaRecorder
from nalora.kernels.fused.foreign import hooks_of
from nalora.kernels.fused.layer_calls import Call
from nalora.kernels.fused.layer_recording import (
    Buffer,
    LayerGraphs,
    PassState,
    Recorder,
    fixed,
    kind_of,
)
from nalora.kernels.fused.layer_state import LayerState
from nalora.kernels.fused.replaced_forward import Replacement, replace_forward

# Each captured shape takes a second or two to capture, and memory for its inputs.
MOST_SHAPES = 16
_log = logging.getLogger("nalora")


class _Token:
    """A replayed pass, held by the autograd graph: how many of its layers have not had their backward pass."""

    def __init__(self) -> None:
        self.waiting: set[int] = set()


class _Record:
    """An eager pass: how each layer was called. The arguments are kept, since their identity says which are shared."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.requires_grad: list[bool] = []
        self.kinds: list[tuple[Any, ...]] = []
        self.had_backward = False
        self.problem = ""

    def note_backward(self, _: Tensor) -> None:
        """A hook on the gradient of the last layer's output: kernels of the backward pass are compiled now."""
        self.had_backward = True


class GraphedLayers:
    """The graphs of a model's decoder layers, and the pass that runs now.

    Args:
        layers: by name, in the order in which the model calls them.
        factors: casts the adapters; inside a graph each layer casts its own.
        make_recorder: creates what captures and replays.
    """

    def __init__(
        self, layers: dict[str, nn.Module], factors: StepFactors, make_recorder: Callable[[], Recorder]
    ) -> None:
        self.names, self.layers = [*layers], [*layers.values()]
        self.factors, self.make_recorder = factors, make_recorder
        self.contents = LayerState(self.layers)
        self.replacements = [_GraphedLayer(self, index) for index in range(len(self.layers))]
        self._forget()

    def install(self) -> list[Callable[[], None]]:
        """Replace the forwards of the layers; return functions that undo it and free the graphs."""
        pairs = zip(self.layers, self.replacements, strict=True)
        return [self._forget, *(replace_forward(layer, replacement) for layer, replacement in pairs)]

    def _forget(self) -> None:
        self.graphs: dict[tuple[Any, ...], list[LayerGraphs]] = {}
        self.records: dict[tuple[Any, ...], _Record] = {}
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.state: tuple[Any, ...] = ()
        self.recorder: Recorder | None = None
        self.replayed: list[LayerGraphs] | None = None
        self.recorded: _Record | None = None
        self.next = self.number = 0
        self.last_token: weakref.ref[_Token] | None = None
        self.is_logged = False

    def compute(self, index: int, call: Call) -> Any:
        """Return a layer's output for a training pass."""
        kind = call.kind()
        if kind is not None:
            kind = (kind, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
        if index == 0:
            self._begin(kind)
        if index != self.next or kind is None:
            self.replayed = self.recorded = None
        if self.replayed is not None:
            return self._replay(index, call, kind)
        if self.recorded is not None:
            return self._record(index, call, kind)
        return self.eager(index, call)

    def eager(self, index: int, call: Call) -> Any:
        """Compute a layer without a graph, or while it is captured.

        Autocast's cache is off: tensors in it would belong to a graph. A compiled layer depends on whether it is on.
        """
        cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return self.replacements[index].original(self.layers[index], *call.args, **call.kwargs)
        finally:
            torch.set_autocast_cache_enabled(cache)

    def _begin(self, kind: tuple[Any, ...] | None) -> None:
        """Decide whether the pass that begins is replayed, recorded, or neither."""
        self.replayed, self.recorded, self.next = None, None, 0
        waiting = self.last_token() if self.last_token is not None else None
        if kind is None or (waiting is not None and waiting.waiting):
            return
        if self.contents.has_hooks_of_others():
            self.log_once("hooks were added inside decoder layers, which a replay would not call; layers run eagerly")
            return
        if self.contents.current() != self.state:
            self._forget()
            self.contents.collect()
            self.state = self.contents.current()
        record = self.records.get(kind)
        if kind not in self.graphs and record is not None and record.had_backward and not record.problem:
            self._capture(kind, record)
        if kind in self.graphs:
            self.replayed, self.last_token = self.graphs[kind], None
            self.number += 1
        elif len(self.graphs) >= MOST_SHAPES:
            self.log_once(f"{MOST_SHAPES} shapes of batches were captured, and others run eagerly; pad to fewer")
        elif record is None or not record.problem:
            self.recorded = self.records[kind] = _Record()

    def _record(self, index: int, call: Call, kind: tuple[Any, ...] | None) -> Any:
        record = self.recorded
        assert record is not None
        assert kind is not None
        tensors, output = call.tensors(), self.eager(index, call)
        if not isinstance(output, Tensor) or not output.requires_grad:
            record.problem = f"it returns {type(output).__name__} in place of a tensor that requires a gradient"
        elif any(tensor.requires_grad for tensor in tensors[1:]):
            record.problem = "it has a second input that requires a gradient"
        elif tensors and tensors[0].shape != output.shape:
            record.problem = "its output has another shape than its input"
        if record.problem:
            self.log_once(f"{self.names[index]} cannot be replayed: {record.problem}; layers run eagerly")
            self.recorded = None
            record.calls.clear()
            return output
        # Of the hidden states the shape is enough: they would keep the pass's autograd graph.
        shape = torch.empty(tensors[0].shape, dtype=tensors[0].dtype, device="meta")
        record.calls.append(call.with_tensors([shape, *tensors[1:]]))
        record.requires_grad.append(tensors[0].requires_grad)
        record.kinds.append(kind)
        self.next += 1
        if self.next == len(self.layers):
            output.register_hook(record.note_backward)
        return output

    def _capture(self, kind: tuple[Any, ...], record: _Record) -> None:
        """Capture all layers as they were called in a recorded pass; nothing is computed."""
        if len(record.calls) != len(self.layers):
            record.problem = "not every layer is called"
            return
        self.recorder = self.recorder or self.make_recorder()
        self.factors.begin_or_end(False)
        shared: dict[int, Buffer] = {}
        graphs: list[LayerGraphs] = []
        with self.recorder.recording():
            for index, call in enumerate(record.calls):
                before = graphs[-1].output if graphs else None
                places, watched = self.contents.places[index], self.contents.watched[index]
                layer = LayerGraphs(index, call, record.kinds[index], places, watched)
                layer.allocate(before, shared, requires_grad=record.requires_grad[index])
                layer.capture_forward(self.recorder, lambda fixed, index=index: self.eager(index, fixed))
                graphs.append(layer)
            gradient, graphs[-1].is_last = None, True
            for layer in reversed(graphs):
                gradient = layer.capture_backward(self.recorder, gradient, self.gradients)
        record.calls.clear()
        self.graphs[kind] = graphs

    def _replay(self, index: int, call: Call, kind: tuple[Any, ...] | None) -> Any:
        assert self.replayed is not None
        layer = self.replayed[index]
        self.next += 1
        states = [part.decide(call.tensors()[0]) for part in layer.watched]
        if kind != layer.kind or [kind_of(state) for state in states] != layer.watched_kinds:
            return self._leave(index, call, states)
        if not layer.fill(call.tensors(), states, self.number):
            return self._leave(index, call, states)
        # Held by the autograd graph alone: a pass whose result is discarded waits for nothing.
        token = (self.last_token() if self.last_token is not None else None) or _Token()
        self.last_token = weakref.ref(token)
        return _Replay.apply(call.tensors()[0], layer, token, *layer.trained)

    def _leave(self, index: int, call: Call, states: list[PassState]) -> Any:
        """Compute a layer and the rest of this pass eagerly; its parts have decided for the pass already."""
        self.replayed = None
        with fixed(self.contents.watched[index], states):
            return self.eager(index, call)

    def log_once(self, reason: str) -> None:
        """Log why layers run eagerly, the first time."""
        if not self.is_logged:
            self.is_logged = True
            _log.warning("nalora: fuse(cuda_graphs=True): %s", reason)


class _GraphedLayer(Replacement):
    """Computes one decoder layer: training passes from its graphs."""

    def __init__(self, graphs: GraphedLayers, index: int) -> None:
        self.graphs, self.index = graphs, index

    def compute(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the output."""
        cached = kwargs.get("past_key_values") is not None or kwargs.get("use_cache")
        checkpointed = getattr(layer, "gradient_checkpointing", False)
        in_backward = torch._C._current_graph_task_id() != -1
        if not layer.training or not torch.is_grad_enabled() or cached or checkpointed or in_backward:
            if checkpointed and layer.training:
                self.graphs.log_once("layers with gradient checkpointing are not replayed; leave one of the two out")
            return self.original(layer, *args, **kwargs)
        return self.graphs.compute(self.index, Call(args, kwargs))


class _Replay(torch.autograd.Function):
    """A layer's replayed passes as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: LayerGraphs, token: _Token, *trained: Tensor) -> Tensor:
        layer.replay_forward()
        token.waiting.add(layer.index)
        ctx.layer, ctx.token = layer, token
        # Somebody may keep the output of the last layer.
        return layer.output.clone() if layer.is_last else layer.output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer, token = ctx.layer, ctx.token
        if layer.index not in token.waiting:
            raise NALoRAError(
                "backward",
                found="a second backward pass through layers that are replayed from CUDA graphs",
                expected="one backward pass for each forward pass",
                fix="leave retain_graph out, or call fuse(model) without cuda_graphs",
            )
        dx, gradients = layer.replay_backward(gradient)
        token.waiting.discard(layer.index)
        return dx, None, None, *gradients


def refuse_unless_graphable(model: nn.Module) -> None:
    """Raise NALoRAError for a model whose layers cannot be replayed, before anything is changed."""
    layers, device = decoder_layers(model), next(model.parameters()).device
    hook = next(
        (
            f"{found} on {name}.{inner}"
            for name, layer in layers.items()
            for inner, module in layer.named_modules()
            if module is not layer and (found := hooks_of(module))
        ),
        "",
    )
    problems = (
        (device.type != "cuda", f"a model on {device.type}", "leave cuda_graphs out"),
        (not layers, "no list of layers that all have LoRA adapters", "leave cuda_graphs out"),
        (
            any(getattr(layer, "gradient_checkpointing", False) for layer in layers.values()),
            "gradient checkpointing, whose recomputation is not replayed",
            "leave one of the two out: a model that needs checkpointing is large enough without graphs",
        ),
        (
            bool(hook),
            f"{hook}, which a replay would not call",
            "remove it, or leave cuda_graphs out",
        ),
    )
    refuse_first("fuse(cuda_graphs=True)", "decoder layers on one CUDA device, without hooks inside", problems)


def graph_layers(
    model: nn.Module, factors: StepFactors, make_recorder: Callable[[], Recorder] = CudaRecorder
) -> list[Callable[[], None]]:
    """Replay the decoder layers of a model from CUDA graphs; return functions that undo it."""
    return [*without_cache(model), *GraphedLayers(decoder_layers(model), factors, make_recorder).install()]
