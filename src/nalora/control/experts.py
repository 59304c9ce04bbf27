"""Experts of a mixture: FFNs whose weights are slices of 3-D parameters, in the classes of transformers' interface.

These classes (Mixtral's, Qwen3-MoE's, gpt-oss's and some sixty others) have no module for a gate. What they have in
common is the method `_apply_gate`, which the grouped and the batched implementation call with the outputs of gate and
up, and in most classes an activation module, which the eager one calls with z itself. Both are places where z can be
seen as it is computed. Which rows of z belong to which token and expert depends on the implementation: a small copy of
the experts is run once to find out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from nalora.control.gate_taps import tap
from nalora.control.replica import copy_without_linears, feature_sizes
from nalora.models.target_modules import shortest_suffixes

# The sizes of the small copy: model, width of one expert, tokens and experts per token.
_MODEL, _WIDTH, _TOKENS, _TOP = 8, 8, 5, 2
# Parameter names of the interface: the gate's, with and without an up projection, and the down projection's.
_GATES, DOWN = {True: "gate_up_proj", False: "up_proj"}, "down_proj"


@dataclass(frozen=True)
class Experts:
    """The experts of one layer.

    Attributes:
        name: the name of their module inside PEFT's wrappers.
        module: the module.
        number: how many they are.
        small: the small copy, made in advance because PEFT changes the class of the module while it computes.
        small_rows: the gate's rows in an expert of the small copy.
    """

    name: str
    module: nn.Module
    number: int
    small: nn.Module
    small_rows: slice
    _orders: dict[str, Order | None] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def implementation(self) -> str:
        """The implementation of transformers that computes them now."""
        return str(getattr(getattr(self.module, "config", None), "_experts_implementation", None) or "eager")

    def order(self) -> Order | None:
        """Return the order of z's rows under the current implementation; None if it does not show z."""
        implementation = self.implementation
        if implementation not in self._orders:
            self._orders[implementation] = _find_order(self)
        return self._orders[implementation]


class Rows(NamedTuple):
    """The rows of z in the order in which an implementation computes them, one for each token and expert of it."""

    experts: Tensor
    tokens: Tensor
    # What brings the rows into the order of experts; None if they are in it.
    sort: Tensor | None = None


Order = Callable[[Tensor], Rows]


def _by_token(index: Tensor) -> Rows:
    """Batched products: all experts of a token, token by token."""
    experts = index.reshape(-1)
    tokens = torch.arange(experts.numel(), device=index.device) // index.shape[-1]
    ordered, sort = experts.sort(stable=True)
    return Rows(ordered, tokens[sort], sort)


def _by_expert(index: Tensor) -> Rows:
    """Grouped products: sorted as transformers sorts, by a call with the same input and so the same result."""
    experts, order = torch.sort(index.reshape(-1))
    return Rows(experts, order // index.shape[-1])


def _expert_after_expert(index: Tensor) -> Rows:
    """Eager: one expert after the other, in each of them the tokens by the rank of the expert, then by position."""
    experts, order = index.T.reshape(-1).sort(stable=True)
    return Rows(experts, order % index.shape[0])


_ORDERS: tuple[Order, ...] = (_by_token, _by_expert, _expert_after_expert)


def gate_parameter(module: nn.Module) -> str:
    """Return the name of the parameter with the gate's weights."""
    return _GATES[bool(getattr(module, "has_gate", True))]


def adapted_experts(names: dict[nn.Module, str], refused: dict[str, str]) -> dict[nn.Module, dict[str, ParamWrapper]]:
    """Return the modules of experts with adapters, by the parameters they adapt, outermost first.

    Adapters of other parameters, and those that cannot be controlled, are added to `refused` with the reason.
    """
    result: dict[nn.Module, dict[str, ParamWrapper]] = {}
    for module, name in names.items():
        if isinstance(module, ParamWrapper) and feature_sizes(module) is None:
            if module.get_param().ndim == 3:
                result.setdefault(module.get_base_layer(), {})[module.parameter_name] = module
            else:
                parameter = f"{type(module.get_base_layer()).__name__}.{module.parameter_name}"
                refused[name] = f"bare parameter {parameter}: a router or the like, not an FFN projection"
    for module, adapters in list(result.items()):
        if reason := _why_not_controlled(module, adapters):
            refused |= {names[layer]: refusal(layer, reason) for layer in adapters.values()}
            del result[module]
    return result


def refusal(layer: ParamWrapper, reason: str) -> str:
    """Return why the adapter of an expert parameter is not controlled."""
    return f"3-D expert parameter {type(layer.get_base_layer()).__name__}.{layer.parameter_name}: {reason}"


_PLAIN = "train it with plain LoRA"
NOT_OBSERVED = (
    "its gates are not seen in this implementation of the experts; call"
    " model.set_experts_implementation('grouped_mm'), 'batched_mm' or 'eager' first, or " + _PLAIN
)


def _why_not_controlled(module: nn.Module, adapters: dict[str, ParamWrapper]) -> str:
    """Return why NA-LoRA cannot control the adapters of these experts, with what to do; empty if it can."""
    if not _uses_interface(module):
        return f"the class does not use transformers' experts interface, so its gates cannot be observed; {_PLAIN}"
    gate = gate_parameter(module)
    if others := sorted({*adapters} - {gate, DOWN}):
        return f"{', '.join(others)} is neither the gate's nor the down projection's weight; {_PLAIN}"
    if gate in adapters and getattr(adapters[gate], "_did_swap_in_out_features", False) == module.is_transposed:
        return f"PEFT puts the gate's channels on A, and the mask acts on rows of B; use peft ≥ 0.21, or {_PLAIN}"
    return ""


def _uses_interface(module: nn.Module) -> bool:
    wanted = ("_apply_gate", "is_transposed", "num_experts", gate_parameter(module), DOWN)
    return all(hasattr(module, name) for name in wanted)


def bare_experts(model: nn.Module) -> tuple[tuple[str, ...], str]:
    """Return the expert parameters without an adapter: names of all that could be controlled, and one that could not.

    Names are shortened to what all layers share; the other parameter is given by its class and name.
    """
    unknown, names = "", set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and "expert" in type(module).__name__.lower() and not prefix.endswith(".base_layer"):
                if _uses_interface(module) and name in (gate_parameter(module), DOWN):
                    names.add(f"{prefix}.{name}")
                else:
                    unknown = f"{type(module).__name__}.{name}"
    return tuple(shortest_suffixes(names, model)), unknown


def width_of(module: nn.Module) -> int:
    """Return the number of gate channels of one expert."""
    return int(getattr(module, DOWN).shape[1 if module.is_transposed else 2])


class OneExpert(nn.Module):
    """One expert of a small copy as an FFN of linear layers, for a replica."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = _small_copy(experts)
        rows = 2 * _WIDTH if gate_parameter(experts) == _GATES[True] else _WIDTH
        self.gate = nn.Linear(_MODEL, rows, device="meta")
        self.down = nn.Linear(_WIDTH, _MODEL, device="meta")
        self.sizes: dict[nn.Module, tuple[int, int]] = {self.gate: (_MODEL, rows), self.down: (_WIDTH, _MODEL)}

    def forward(self, x: Tensor) -> Tensor:
        """Compute the expert."""
        apply_gate: Any = self.experts._apply_gate if self.gate.out_features > _WIDTH else self.experts.act_fn
        result: Tensor = self.down(apply_gate(self.gate(x)))
        return result


def widened(rows: slice, width: int) -> slice:
    """Return rows of the small copy as rows of an expert of this width."""
    return rows if rows.stop is None else slice(rows.start // _WIDTH * width, rows.stop // _WIDTH * width)


def _small_copy(module: nn.Module) -> nn.Module:
    """Return a copy of the experts with few weights, on the CPU."""
    copy = copy_without_linears(module, {}, torch.device("cpu"))
    vars(copy).pop("_apply_gate", None)  # of another controller
    generator = torch.Generator().manual_seed(0)
    number: int = module.num_experts  # type: ignore[assignment]
    gate = gate_parameter(module)
    sizes = {gate: (_MODEL, 2 * _WIDTH if gate == _GATES[True] else _WIDTH), DOWN: (_WIDTH, _MODEL)}
    for name, (inner, outer) in sizes.items():
        shape = (inner, outer) if module.is_transposed else (outer, inner)
        copy._parameters[name] = nn.Parameter(torch.randn(number, *shape, generator=generator))
        if f"{name}_bias" in copy._parameters:
            copy._parameters[f"{name}_bias"] = nn.Parameter(torch.randn(number, outer, generator=generator))
    return copy


@torch.no_grad()
def _find_order(experts: Experts) -> Order | None:
    copy, seen = experts.small, list[Tensor]()
    taps = tap(copy, lambda output, whole: seen.append(output[..., experts.small_rows] if whole else output))
    generator = torch.Generator().manual_seed(1)
    index = torch.rand(_TOKENS, experts.number, generator=generator).topk(min(_TOP, experts.number)).indices
    # Large enough to reach the bounds of a clamped gate, whose activation does not see z itself.
    x = 8 * torch.randn(_TOKENS, _MODEL, generator=generator)
    try:
        copy(x, index, torch.full(index.shape, 1 / index.shape[1]))
    except Exception:  # an implementation for other devices, or experts that need more than small weights
        return None
    finally:
        for handle in taps:
            handle.remove()
    z = torch.cat(seen) if seen else x[:0]
    name = gate_parameter(copy)
    weight: Tensor = getattr(copy, name) if copy.is_transposed else getattr(copy, name).mT
    bias = getattr(copy, f"{name}_bias", None)
    for order in _ORDERS:
        rows = order(index)
        place = slice(None) if rows.sort is None else rows.sort
        expected = torch.einsum("ti,tio->to", x[rows.tokens], weight[rows.experts])
        expected = (expected if bias is None else expected + bias[rows.experts])[:, experts.small_rows]
        if z.shape == expected.shape and torch.allclose(z[place], expected, rtol=1e-4, atol=1e-3):
            return order
    return None
