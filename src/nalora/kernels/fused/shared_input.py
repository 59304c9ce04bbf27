"""LoRA layers that their parent hands the same input, computed together.

Which layers those are is read from the parent's forward, before training and for good: a checkpointed segment must
save the same tensors when it is recomputed, and a resumed run must round as the first one did.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import weakref
from collections import defaultdict

from torch import Tensor, nn

from nalora.kernels.fused.factors import StepFactors, adapters_of
from nalora.kernels.fused.lora_linear import FrozenLinear, LoRALinears, compute_dtype
from nalora.kernels.fused.peft_layers import Weight, only_adapter


def children_of_one_input(parent: nn.Module) -> list[list[str]]:
    """Names of children that the parent's forward calls with nothing but the same variable, in the order of calls.

    A variable that is assigned anew between two calls ends the company; a forward without source has none.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(parent.forward)))
    except (OSError, TypeError, SyntaxError):
        return []
    calls = _Calls()
    calls.visit(tree)
    return [names for names in (*calls.finished, *calls.open.values()) if len(names) > 1]


class _Calls(ast.NodeVisitor):
    """Follows a forward from top to bottom: calls `self.child(variable)` by variable, until that is assigned anew."""

    def __init__(self) -> None:
        self.open: dict[str, list[str]] = defaultdict(list)
        self.finished: list[list[str]] = []

    def visit_Assign(self, node: ast.Assign) -> None:
        """An assignment takes effect after what it assigns was computed."""
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_Name(self, node: ast.Name) -> None:
        """A variable with a new value starts a new company."""
        if isinstance(node.ctx, ast.Store):
            self.finished.append(self.open.pop(node.id, []))

    def visit_Call(self, node: ast.Call) -> None:
        """A child called with one variable joins its company, after the calls inside its arguments."""
        self.generic_visit(node)
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr=child), args=[ast.Name(id=variable)], keywords=[]
            ) if child not in self.open[variable]:
                self.open[variable].append(child)


class LinearGroup:
    """The first layer that is called with a tensor computes all; the others' results wait for them.

    A layer that is called with another tensor after all is computed by itself: more work, never a wrong number.
    """

    def __init__(self, weights: dict[nn.Module, Weight], factors: StepFactors) -> None:
        self.weights, self.factors = weights, factors
        factors.groups.append(tuple(weights))
        self.input: weakref.ref[Tensor] | None = None
        self.version = 0
        self.waiting: dict[nn.Module, Tensor] = {}

    def compute(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        """The layer's output for x, None where more or other than one plain adapter acts on it."""
        if layer in self.waiting and self.input is not None and self.input() is x and self.version == x._version:
            return self.waiting.pop(layer)
        members = tuple(each for each in self.weights if only_adapter(each) is not None)
        if layer not in members:
            return None
        self.input, self.version = weakref.ref(x), x._version
        self.waiting = dict(zip(members, self._together(members, x), strict=True))
        return self.waiting.pop(layer)

    def _together(self, layers: tuple[nn.Module, ...], x: Tensor) -> tuple[Tensor, ...]:
        adapters = adapters_of(layers)
        assert adapters is not None
        frozen = tuple(
            FrozenLinear(self.weights[layer], layer.base_layer.bias, scaling)
            for layer, scaling in zip(layers, adapters.scalings, strict=True)
        )
        made = self.factors.of(layers, adapters, compute_dtype(x))
        factors = (factor for pair in zip(adapters.a, adapters.b, strict=True) for factor in pair)
        outputs: tuple[Tensor, ...] = LoRALinears.apply(x, frozen, made, *factors)
        return outputs
