"""Replace PEFT's LoRA linear layers by fused ones during a training run; layers with the same input are one call.

A fused layer is used only while it computes the same as PEFT's: one plain LoRA adapter without dropout, not merged, not
disabled, with gradients enabled, and under torch.compile only with an operator for its graph. In every other call the
module's own forward runs.

Which layers share an input is read from the source of their parent's forward, once before training: a checkpointed
segment must save the same tensors when it is recomputed, and a resumed run must round as the first one did.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nalora.kernels.fused.adapters import Adapters, StepFactors, frozen_weight, is_usable, only_adapter, state_of
from nalora.kernels.fused.foreign import code_inside, replaced_forward
from nalora.kernels.fused.frozen import FrozenWeight
from nalora.kernels.fused.lora_linear import FrozenLinear, LoRALinears, compute_dtype
from nalora.kernels.fused.norm_outputs import recompute_norm_outputs
from nalora.kernels.fused.replaced_forward import Replacement, replace_forward, replaced_by

# Computes layers that share an input inside a compiled graph.
InGraph = Callable[[Tensor, Sequence[nn.Module]], list[Tensor]]


def fuse_adapters(
    model: nn.Module,
    factors: StepFactors | None = None,
    exclude: frozenset[nn.Module] = frozenset(),
    in_graph: InGraph | None = None,
) -> list[Callable[[], None]]:
    """Fuse every LoRA linear layer of a model except the excluded ones; return functions that undo it.

    Args:
        model: with PEFT's adapters.
        factors: where the adapters are cast, if other adapters are cast together with them.
        exclude: layers that keep their own forward.
        in_graph: computes layers under torch.compile, where they keep their own forward without it.
    """
    from peft.tuners.lora.layer import LoraLayer

    factors = factors or StepFactors()
    undo: list[Callable[[], None]] = []
    for parent in model.modules():
        children = parent.named_children()
        layers = {name: layer for name, layer in children if isinstance(layer, LoraLayer) and layer not in exclude}
        undo += fuse_linears(parent, layers, factors, in_graph)
    if in_graph is None:  # torch.compile decides by itself what is computed again
        undo += recompute_norm_outputs(model, {layer.in_features for group in factors.groups for layer in group})
    return undo + factors.attach(model)


def fuse_linears(
    parent: nn.Module, layers: dict[str, nn.Module], factors: StepFactors, in_graph: InGraph | None = None
) -> list[Callable[[], None]]:
    """Fuse some children of a module, those with the same input together; return functions that undo it."""
    own = {name: layer for name, layer in layers.items() if not (replaced_forward(layer) or code_inside(layer))}
    weights = {name: weight for name, layer in own.items() if (weight := frozen_weight(layer)) is not None}
    groups = children_sharing_input(parent) if weights else []
    # A group may be of layers without an adapter.
    shared = [known for names in groups if (known := [name for name in names if name in weights])]
    in_groups = {name for names in shared for name in names}
    undo = []
    for names in (*shared, *([name] for name in weights if name not in in_groups)):
        group = LinearGroup({layers[name]: weights[name] for name in names}, factors, in_graph)
        undo += [replace_forward(layers[name], _FusedLinear(group, index)) for index, name in enumerate(names)]
    return undo


class _FusedLinear(Replacement):
    """Computes one layer of a group, where the group can."""

    def __init__(self, group: LinearGroup, index: int) -> None:
        self.group, self.index = group, index

    def compute(self, layer: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the output."""
        output = None
        if is_plain_call(args, kwargs):
            in_graph = torch.compiler.is_compiling()
            output = self.group.trace(self.index, x) if in_graph else self.group.compute(layer, x)
        return self.original(layer, x, *args, **kwargs) if output is None else output


def is_plain_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a module is called with its input alone and with gradients enabled."""
    return not args and not kwargs and torch.is_grad_enabled()


class LinearGroup:
    """Layers with the same input: the first call with a tensor computes all of them, later calls return the results.

    A layer that is called with another tensor nevertheless is computed again: more work, never a wrong result.
    """

    def __init__(
        self, weights: dict[nn.Module, FrozenWeight], factors: StepFactors, in_graph: InGraph | None = None
    ) -> None:
        self.weights, self.factors = weights, factors
        self.bases: dict[nn.Module, nn.Module] = {layer: layer.base_layer for layer in weights}
        factors.groups.append(tuple(weights))
        self.input: weakref.ref[Tensor] | None = None
        self.state: tuple[Any, ...] = ()
        self.pending: dict[nn.Module, tuple[Tensor, tuple[Any, ...]]] = {}
        if len(weights) > 1:
            factors.on_pass.append(self.forget)
        self.layers, self.in_graph = tuple(weights), in_graph
        self.traced_input: Tensor | None = None
        self.traced: dict[int, Tensor] = {}

    def forget(self) -> None:
        """Drop results that no layer asked for in a pass: they would keep its whole graph alive."""
        self.pending = {}

    def compute(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        """Return the layer's output for x; None unless exactly one plain adapter is active in the layer."""
        own = self.adapter(layer)
        if own is None or not x.numel() or x.is_inference():
            return None
        dtype = compute_dtype(x)
        state = (x._version, x.requires_grad, dtype)
        if layer in self.pending and self.input is not None and self.input() is x and self.state == state:
            output, adapter = self.pending.pop(layer)
            if adapter == _state_of(own):
                return output
        members = [(member, self.adapter(member)) for member in self.weights]
        plain = {member: adapter for member, adapter in members if adapter is not None}
        layers, adapters = tuple(plain), Adapters(*zip(*plain.values(), strict=True))
        self.input, self.state = weakref.ref(x), state
        frozen = tuple(
            FrozenLinear(self.weights[member], self.bases[member].bias, scaling)
            for member, scaling in zip(layers, adapters.scalings, strict=True)
        )
        factors = self.factors.get(layers, adapters, dtype)
        parameters = (factor for pair in zip(adapters.a, adapters.b, strict=True) for factor in pair)
        outputs = LoRALinears.apply(x, frozen, factors, *parameters)
        if len(layers) == 1:
            return outputs[0]
        states = map(_state_of, plain.values())
        self.pending = dict(zip(layers, zip(outputs, states, strict=True), strict=True))
        return self.pending.pop(layer)[0]

    def adapter(self, layer: nn.Module) -> tuple[Tensor, Tensor, float] | None:
        """Return the only adapter of a layer whose base is still the same frozen layer, else None."""
        base = self.bases[layer]
        return only_adapter(layer) if layer._modules["base_layer"] is base and is_usable(base) else None

    def trace(self, index: int, x: Tensor) -> Tensor | None:
        """Return the output of the layer at an index while a graph is traced; None if PEFT's forward computes it.

        After the last layer nothing of the traced tensors is kept: they belong to the graph.
        """
        if self.in_graph is None:
            return None
        if self.traced_input is not x or index not in self.traced:
            plain = [i for i, layer in enumerate(self.layers) if only_adapter(layer) and is_usable(layer.base_layer)]
            if index not in plain:
                return None
            outputs = self.in_graph(x, [self.layers[i] for i in plain])
            self.traced_input, self.traced = x, dict(zip(plain, outputs, strict=True))
        output = self.traced.pop(index)
        if not self.traced:
            self.traced_input = None
        return output


def _state_of(adapter: tuple[Tensor, Tensor, float]) -> tuple[Any, ...]:
    a, b, scaling = adapter
    return (*state_of((a,), (b,)), scaling)


def children_sharing_input(parent: nn.Module) -> list[list[str]]:
    """Return groups of children that the parent's forward calls with the same variable alone, in the order of calls.

    An assignment to the variable between two calls separates them; a forward without source has no groups.
    """
    replacement = replaced_by(parent)
    forward = parent.forward if replacement is None else replacement.before or type(parent).forward
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return []
    calls = _Calls()
    calls.visit(tree)
    return [names for names in (*calls.finished, *calls.open.values()) if len(names) > 1]


class _Calls(ast.NodeVisitor):
    """Collects calls `self.child(variable)` by variable from top to bottom, until the variable is assigned again."""

    def __init__(self) -> None:
        self.open: dict[str, list[str]] = defaultdict(list)
        self.finished: list[list[str]] = []

    def visit_Assign(self, node: ast.Assign) -> None:
        """Visit the value before the targets, which is the order of execution."""
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_Name(self, node: ast.Name) -> None:
        """Finish the group of a variable that is assigned."""
        if isinstance(node.ctx, ast.Store):
            self.finished.append(self.open.pop(node.id, []))

    def visit_Call(self, node: ast.Call) -> None:
        """Add a child to its variable's group, after the calls inside its arguments."""
        self.generic_visit(node)
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr=child), args=[ast.Name(id=variable)], keywords=[]
            ) if child not in self.open[variable]:
                self.open[variable].append(child)
