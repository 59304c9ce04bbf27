"""Replicas: a module run with stand-ins for its linear layers, to find out what it computes from their outputs."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Final

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nalora.control.peft_layers import LAYERS

_TOKENS: Final = 4
_SIGN_CODES: Final = 4
# Small tensors, such as norm weights, are copied to float32 for the replica; larger ones are used as they are.
_SMALL: Final = 1 << 20


class _Output(nn.Module):
    """The module's own output as a consumer."""


OUTPUT: Final = _Output()


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of a linear layer that reach the channels of a consumer one to one, in order."""

    source: nn.Module
    rows: slice


@dataclass(frozen=True)
class Wiring:
    """The inputs of a consumer's `width` channels: one part, or the product of two."""

    parts: tuple[Part, ...]
    width: int


def feature_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return (in, out) of a linear layer of torch or PEFT, quantised, or Conv1D with its transposed weight."""
    if isinstance(module, ParamWrapper):
        # PEFT adapts linear layers of some models only by their weight parameter; experts' parameters are 3-D.
        base = module.base_layer
        is_weight = isinstance(base, nn.Linear) and module.parameter_name == "weight"
        return (module.in_features, module.out_features) if is_weight else None
    if isinstance(module, LAYERS) and feature_sizes(module.get_base_layer()) is None:
        return None
    inner, outer = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if isinstance(inner, int) and isinstance(outer, int):
        return inner, outer
    weight, outer = getattr(module, "weight", None), getattr(module, "nf", None)
    if isinstance(outer, int) and isinstance(weight, Tensor) and weight.ndim == 2:
        return weight.shape[0], outer
    return None


class _StandIn(nn.Module):
    """Replaces a linear layer: stores its input and returns `output`."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.in_features, self.out_features = sizes
        self.weight = torch.empty(sizes[1], sizes[0], device="meta")
        self.bias = None
        self.input: Tensor | None = None
        self.output: Tensor | None = None

    def forward(self, x: Tensor, *_: object, **__: object) -> Tensor:
        self.input = x
        assert self.output is not None
        # A copy, which the module may change in place.
        return self.output.reshape(*x.shape[:-1], self.out_features).clone()


class Replica:
    """A module whose linear layers are stand-ins; see `nalora.control.blocks`."""

    def __init__(
        self, module: nn.Module, linears: dict[nn.Module, tuple[int, int]], input_size: int, residual: bool = False
    ) -> None:
        self.residual = residual
        self.device = _device_of(module)
        self.stand_ins = {linear: _StandIn(sizes) for linear, sizes in linears.items()}
        self.module = copy_without_linears(module, self.stand_ins, self.device)
        self.input_size = input_size

    @classmethod
    def of(cls, module: nn.Module, linears: dict[nn.Module, tuple[int, int]]) -> Replica | None:
        """Return a replica that runs, or None if the module needs more than hidden states and a residual."""
        for input_size in dict.fromkeys(sizes[0] for sizes in linears.values()):
            for residual in (False, True):
                replica = cls(module, linears, input_size, residual)
                try:
                    replica.run({})
                except Exception:
                    continue
                return replica
        return None

    def run(self, outputs: dict[nn.Module, Tensor], tokens: int = _TOKENS) -> dict[nn.Module, Tensor]:
        """Run with these outputs of linear layers (random ones for the others); return the input of each consumer."""
        generator = torch.Generator().manual_seed(0)
        for linear, stand_in in self.stand_ins.items():
            stand_in.input = None
            default = _both_signs(tokens, stand_in.out_features, generator).to(self.device)
            stand_in.output = outputs.get(linear, default)
        x = torch.randn(1, tokens, self.input_size, generator=generator).to(self.device)
        self.last_input = x.clone()
        others: dict[str, Tensor | None] = dict.fromkeys(_other_arguments(self.module))
        if self.residual and len(others) == 1:
            # The FFNs of Bloom and MPT add the residual themselves: forward(hidden_states, residual).
            others = dict.fromkeys(others, torch.randn(x.shape, generator=generator).to(x))
        output = self.module(x, **others)
        inputs = {linear: s.input for linear, s in self.stand_ins.items() if s.input is not None}
        if isinstance(output, tuple) and output:
            output = output[0]
        return inputs | ({OUTPUT: output} if isinstance(output, Tensor) else {})

    def wiring(self, consumer: nn.Module) -> Wiring | None:
        """Return the parts that reach the consumer's channels one to one, None if its inputs are anything else."""
        received = self.run({}).get(consumer)
        if received is None or received.ndim < 2:
            return None
        width = received.shape[-1]
        generator = torch.Generator().manual_seed(2)
        index = torch.arange(1, width + 1, dtype=torch.float32) / width
        signs = torch.randint(0, 2, (_SIGN_CODES, width), generator=generator) * 2.0 - 1.0
        gradients = []
        for code in (torch.ones(width), index, *signs):
            of_outputs = self._gradients(consumer, code)
            if of_outputs is None:
                return None
            gradients.append(of_outputs)
        parts: list[Part] = []
        for source in gradients[0]:
            reached = _channels_of_rows([of_outputs[source] for of_outputs in gradients], width)
            if reached is None:
                continue
            rows = _ordered_slices(reached, width)
            if rows is None:
                return None
            parts += [Part(source, part_rows) for part_rows in rows]
        return Wiring(tuple(parts), width) if 1 <= len(parts) <= 2 else None

    def _gradients(self, consumer: nn.Module, code: Tensor) -> dict[nn.Module, Tensor | None] | None:
        """Return ∂(Σ code · the consumer's input) by every output, in its own pass: Liger's backward overwrites z."""
        with torch.enable_grad():
            generator = torch.Generator().manual_seed(1)
            outputs = {
                linear: _both_signs(_TOKENS, s.out_features, generator).to(self.device).requires_grad_()
                for linear, s in self.stand_ins.items()
                if linear is not consumer
            }
            received = self.run(outputs)[consumer]
            if not received.requires_grad:
                return None
            code = code.to(received).expand_as(received)
            gradients = torch.autograd.grad(received, list(outputs.values()), code, allow_unused=True)
        return dict(zip(outputs, gradients, strict=True))

    def is_nonlinear(self, consumer: nn.Module, part: Part) -> bool:
        """Return whether the consumer's input is not affine in this part, as after an activation."""
        start = _both_signs(_TOKENS, self.stand_ins[part.source].out_features, torch.Generator().manual_seed(3))
        start = start[:, part.rows].to(self.device)
        # Points on both sides of zero, since a hard gate is linear on either side.
        low, middle, high = (self.with_rows(consumer, {part: start * by}) for by in (1.0, 0.25, -0.5))
        return not torch.allclose(middle, (low + high) / 2, rtol=1e-3, atol=1e-3)

    def with_rows(self, consumer: nn.Module, rows: dict[Part, Tensor]) -> Tensor:
        """Return the consumer's input for these rows of some parts; gradients flow through them."""
        tokens = next(iter(rows.values())).shape[0]
        outputs: dict[nn.Module, Tensor] = {}
        for part, values in rows.items():
            size = self.stand_ins[part.source].out_features
            if values.shape[-1] == size:
                outputs[part.source] = values
                continue
            if part.source not in outputs:
                fill = _both_signs(tokens, size, torch.Generator().manual_seed(4))
                outputs[part.source] = fill.to(values)
            at = torch.arange(size, device=values.device)[part.rows].expand_as(values)
            outputs[part.source] = outputs[part.source].scatter(-1, at, values)
        return self.run(outputs, tokens)[consumer].reshape(tokens, -1)

    def rows_of(self, part: Part) -> int:
        """Return the number of a part's rows."""
        return len(range(*part.rows.indices(self.stand_ins[part.source].out_features)))

    def activation(self, consumer: nn.Module, gate: Part, up: Part | None) -> Callable[[Tensor], Tensor]:
        """Return φ as an elementwise function: its argument replaces the gate's rows, with the up projection at 1."""
        width = self.rows_of(gate)

        def phi(z: Tensor) -> Tensor:
            values = z.to(self.device, torch.float32 if z.dtype != torch.float64 else torch.float64).reshape(-1)
            padded = torch.nn.functional.pad(values, (0, -values.numel() % width)).reshape(-1, width)
            if up is None:
                h = self.with_rows(consumer, {gate: padded})
            else:
                one, zero = torch.ones_like(padded), torch.zeros_like(padded)
                h = self.with_rows(consumer, {gate: padded, up: one})
                h = h - self.with_rows(consumer, {gate: padded, up: zero})
            return h.reshape(-1)[: values.numel()].reshape(z.shape).to(z)

        return phi

    def is_plain_ffn(self, gate: nn.Module, up: nn.Module | None, down: nn.Module) -> bool:
        """Return whether the module passes its input to gate and up unchanged and returns down's output unchanged."""
        if down not in self.stand_ins:
            return False
        inputs = self.run({})
        output = self.stand_ins[down].output
        readers = [gate] if up is None else [gate, up]
        unchanged = all(torch.equal(inputs[reader], self.last_input) for reader in readers)
        return unchanged and output is not None and torch.equal(inputs[OUTPUT][0], output)

    def up_offset(self, consumer: nn.Module, gate: Part, up: Part) -> float:
        """Return b in φ(z) ⊙ (u + b); 1 in gpt-oss and 0 in all other models."""
        phi = self.activation(consumer, gate, up)
        z = torch.full((1, self.rows_of(gate)), 1.5, device=self.device)
        with_zero = self.with_rows(consumer, {gate: z, up: torch.zeros_like(z)})
        return round((with_zero / phi(z)).median().item(), 4)


def _both_signs(tokens: int, size: int, generator: torch.Generator) -> Tensor:
    """Return random values in ±[0.5, 2.5], every other token positive, so that each row passes a ReLU somewhere."""
    magnitude = torch.rand(tokens, size, generator=generator) * 2 + 0.5
    return magnitude * torch.tensor([1.0, -1.0]).repeat((tokens + 1) // 2)[:tokens, None]


def _channels_of_rows(gradients: list[Tensor | None], width: int) -> Tensor | None:
    """Return the channel that every row reaches, −1 for rows that reach none or several; None if no row reaches any."""
    plain = gradients[0]
    if plain is None or not plain.any():
        return None
    strongest = plain.abs().argmax(0, keepdim=True)
    base, by_index, *by_sign = (grad.gather(0, strongest)[0] for grad in gradients if grad is not None)
    channel = (by_index / base * width).round() - 1
    # A row that reaches one channel has ± its own gradient for every sign code.
    alone = torch.stack([(s.abs() - base.abs()).abs() <= 1e-3 * base.abs() for s in by_sign]).all(0)
    return torch.where(alone & (base != 0), channel, -1.0).long().cpu()


def _ordered_slices(reached: Tensor, width: int) -> list[slice] | None:
    """Return the slices of rows that reach channels 0 … width−1 in order: all rows, two halves, or every other row."""
    arange = torch.arange(width)
    if reached.numel() == width and torch.equal(reached, arange):
        return [slice(None)]
    if reached.numel() == 2 * width:
        for halves in ((slice(0, width), slice(width, 2 * width)), (slice(0, None, 2), slice(1, None, 2))):
            if all(torch.equal(reached[rows], arange) for rows in halves):
                return list(halves)
    return None


def _device_of(module: nn.Module) -> torch.device:
    devices = {tensor.device for tensor in module.parameters()} - {torch.device("meta")}
    return next(iter(devices), torch.device("cpu"))


def _other_arguments(module: nn.Module) -> list[str]:
    """Return the required arguments of forward after the first."""
    parameters = list(inspect.signature(module.forward).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]


def copy_without_linears(module: nn.Module, stand_ins: dict[nn.Module, _StandIn], device: torch.device) -> nn.Module:
    """Return a shallow copy of the module tree in evaluation mode, without hooks, with stand-ins for linear layers."""
    if module in stand_ins:
        return stand_ins[module]
    copy: nn.Module = object.__new__(type(module))  # FSDP2 replaces __new__ of its classes
    copy.__dict__ = dict(module.__dict__)
    for key, value in module.__dict__.items():
        if key.endswith("_hooks") and isinstance(value, dict):
            copy.__dict__[key] = OrderedDict()
        elif isinstance(value, MethodType) and value.__self__ is module:
            copy.__dict__[key] = MethodType(value.__func__, copy)
    copy.__dict__["_compiled_call_impl"] = None
    copy.__dict__["training"] = False
    for store in ("_parameters", "_buffers"):
        copy.__dict__[store] = {k: _usable(t, device) for k, t in module.__dict__[store].items()}
    copy.__dict__["_modules"] = {
        name: child if child is None else copy_without_linears(child, stand_ins, device)
        for name, child in module.__dict__["_modules"].items()
    }
    return copy


def _usable(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    if tensor is None or tensor.numel() > _SMALL or not tensor.is_floating_point():
        return tensor
    if tensor.is_meta:
        return torch.ones(tensor.shape, device=device)
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            tensor = tensor.full_tensor()
    return tensor.detach().to(device, torch.float32)
