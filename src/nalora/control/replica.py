"""Replicas: a module run with stand-ins for its linear layers, to see what it does with their outputs."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Final

import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_TOKENS: Final = 4
_SIGN_CODES: Final = 4
# Norm weights and the like are copied to float32 for the replica; anything larger is used as it is.
_SMALL: Final = 1 << 20


class _Output(nn.Module):
    """The module's own output in the role of a consumer."""


OUTPUT: Final = _Output()


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of a linear layer that reach the channels of a consumer one to one, in order."""

    source: nn.Module
    rows: slice


@dataclass(frozen=True)
class Wiring:
    """What a consumer's `width` channels are made of: one part, or the product of two."""

    parts: tuple[Part, ...]
    width: int


def feature_sizes(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear layer of any make: torch, PEFT, quantised, or Conv1D with its transposed weight."""
    if isinstance(module, ParamWrapper):
        # PEFT reaches a linear layer of some models only as a parameter, its weight; experts' parameters are 3-D.
        base = module.base_layer
        whole = isinstance(base, nn.Linear) and module.parameter_name == "weight"
        return (module.in_features, module.out_features) if whole else None
    if isinstance(module, LoraLayer) and feature_sizes(module.get_base_layer()) is None:
        return None
    inner, outer = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if isinstance(inner, int) and isinstance(outer, int):
        return inner, outer
    weight, outer = getattr(module, "weight", None), getattr(module, "nf", None)
    if isinstance(outer, int) and isinstance(weight, Tensor) and weight.ndim == 2:
        return weight.shape[0], outer
    return None


class _StandIn(nn.Module):
    """Takes a linear layer's place: remembers what it was given and answers with `answer`."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.in_features, self.out_features = sizes
        self.weight = torch.empty(sizes[1], sizes[0], device="meta")
        self.bias = None
        self.given: Tensor | None = None
        self.answer: Tensor | None = None

    def forward(self, x: Tensor, *_: object, **__: object) -> Tensor:
        self.given = x
        assert self.answer is not None
        return self.answer.reshape(*x.shape[:-1], self.out_features)


class Replica:
    """A module whose linear layers are stand-ins; see `nalora.control.blocks` for what it is asked."""

    def __init__(
        self, module: nn.Module, linears: dict[nn.Module, tuple[int, int]], input_size: int, residual: bool = False
    ) -> None:
        self.residual = residual
        self.device = _device_of(module)
        self.stand_ins = {linear: _StandIn(sizes) for linear, sizes in linears.items()}
        self.module = _copy_without_linears(module, self.stand_ins, self.device)
        self.input_size = input_size

    @classmethod
    def of(cls, module: nn.Module, linears: dict[nn.Module, tuple[int, int]]) -> Replica | None:
        """A replica that runs, or None where the module wants more than hidden states and a residual."""
        for input_size in dict.fromkeys(sizes[0] for sizes in linears.values()):
            for residual in (False, True):
                replica = cls(module, linears, input_size, residual)
                try:
                    replica.run({})
                except Exception:
                    continue
                return replica
        return None

    def run(self, answers: dict[nn.Module, Tensor], tokens: int = _TOKENS) -> dict[nn.Module, Tensor]:
        """Run with the given answers (random ones for the rest); what each consumer was given."""
        generator = torch.Generator().manual_seed(0)
        for linear, stand_in in self.stand_ins.items():
            stand_in.given = None
            default = _both_signs(tokens, stand_in.out_features, generator).to(self.device)
            stand_in.answer = answers.get(linear, default)
        x = torch.randn(1, tokens, self.input_size, generator=generator).to(self.device)
        self.last_input = x.clone()
        others: dict[str, Tensor | None] = dict.fromkeys(_other_arguments(self.module))
        if self.residual and len(others) == 1:
            # The FFNs of Bloom and MPT add the residual themselves: forward(hidden_states, residual).
            others = dict.fromkeys(others, torch.randn(x.shape, generator=generator).to(x))
        output = self.module(x, **others)
        given = {linear: s.given for linear, s in self.stand_ins.items() if s.given is not None}
        if isinstance(output, tuple) and output:
            output = output[0]
        return given | ({OUTPUT: output} if isinstance(output, Tensor) else {})

    def wiring(self, consumer: nn.Module) -> Wiring | None:
        """The parts that reach the consumer's channels one to one, or None where it is anything else."""
        given = self.run({}).get(consumer)
        if given is None or given.ndim < 2:
            return None
        width = given.shape[-1]
        generator = torch.Generator().manual_seed(2)
        index = torch.arange(1, width + 1, dtype=torch.float32) / width
        signs = torch.randint(0, 2, (_SIGN_CODES, width), generator=generator) * 2.0 - 1.0
        gradients = []
        for code in (torch.ones(width), index, *signs):
            of_answers = self._gradients(consumer, code)
            if of_answers is None:
                return None
            gradients.append(of_answers)
        parts: list[Part] = []
        for source in gradients[0]:
            reached = _channels_of_rows([of_answers[source] for of_answers in gradients], width)
            if reached is None:
                continue
            rows = _ordered_slices(reached, width)
            if rows is None:
                return None
            parts += [Part(source, each) for each in rows]
        return Wiring(tuple(parts), width) if 1 <= len(parts) <= 2 else None

    def _gradients(self, consumer: nn.Module, code: Tensor) -> dict[nn.Module, Tensor | None] | None:
        """∂(Σ code · the consumer's input) by every answer, in a pass of its own: Liger's backward overwrites z."""
        with torch.enable_grad():
            generator = torch.Generator().manual_seed(1)
            answers = {
                linear: _both_signs(_TOKENS, s.out_features, generator).to(self.device).requires_grad_()
                for linear, s in self.stand_ins.items()
                if linear is not consumer
            }
            given = self.run(answers)[consumer]
            if not given.requires_grad:
                return None
            code = code.to(given).expand_as(given)
            found = torch.autograd.grad(given, list(answers.values()), code, allow_unused=True)
        return dict(zip(answers, found, strict=True))

    def bends(self, consumer: nn.Module, part: Part) -> bool:
        """Whether the consumer answers to this part other than affinely, that is, through an activation."""
        start = _both_signs(_TOKENS, self.stand_ins[part.source].out_features, torch.Generator().manual_seed(3))
        start = start[:, part.rows].to(self.device)
        # From one side of zero to the other: a hard gate is straight on either side and bent between them.
        low, middle, high = (self._with_rows(consumer, {part: start * by}) for by in (1.0, 0.25, -0.5))
        return not torch.allclose(middle, (low + high) / 2, rtol=1e-3, atol=1e-3)

    def _with_rows(self, consumer: nn.Module, rows: dict[Part, Tensor]) -> Tensor:
        """The consumer's input with the rows of some parts given; gradients flow through them."""
        tokens = next(iter(rows.values())).shape[0]
        answers: dict[nn.Module, Tensor] = {}
        for part, values in rows.items():
            size = self.stand_ins[part.source].out_features
            if values.shape[-1] == size:
                answers[part.source] = values
                continue
            if part.source not in answers:
                fill = _both_signs(tokens, size, torch.Generator().manual_seed(4))
                answers[part.source] = fill.to(values)
            at = torch.arange(size, device=values.device)[part.rows].expand_as(values)
            answers[part.source] = answers[part.source].scatter(-1, at, values)
        given = self.run(answers, tokens)[consumer]
        return given.reshape(tokens, -1)

    def _rows_of(self, part: Part) -> int:
        return len(range(*part.rows.indices(self.stand_ins[part.source].out_features)))

    def activation(self, consumer: nn.Module, gate: Part, up: Part | None) -> Callable[[Tensor], Tensor]:
        """φ as an elementwise function of any tensor: it goes in at the gate's rows, with the up projection at 1."""
        width = self._rows_of(gate)

        def phi(z: Tensor) -> Tensor:
            values = z.to(self.device, torch.float32 if z.dtype != torch.float64 else torch.float64).reshape(-1)
            padded = torch.nn.functional.pad(values, (0, -values.numel() % width)).reshape(-1, width)
            if up is None:
                h = self._with_rows(consumer, {gate: padded})
            else:
                one, zero = torch.ones_like(padded), torch.zeros_like(padded)
                h = self._with_rows(consumer, {gate: padded, up: one})
                h = h - self._with_rows(consumer, {gate: padded, up: zero})
            return h.reshape(-1)[: values.numel()].reshape(z.shape).to(z)

        return phi

    def is_nothing_but(self, gate: nn.Module, up: nn.Module | None, down: nn.Module) -> bool:
        """Whether the module hands its input to gate and up unchanged and gives back down's answer unchanged."""
        if down not in self.stand_ins:
            return False
        given = self.run({})
        down_answer = self.stand_ins[down].answer
        readers = [gate] if up is None else [gate, up]
        untouched = all(torch.equal(given[reader], self.last_input) for reader in readers)
        return untouched and down_answer is not None and torch.equal(given[OUTPUT][0], down_answer)

    def up_offset(self, consumer: nn.Module, gate: Part, up: Part) -> float:
        """b in φ(z) ⊙ (u + b); gpt-oss has b = 1, everyone else 0."""
        phi = self.activation(consumer, gate, up)
        z = torch.full((1, self._rows_of(gate)), 1.5, device=self.device)
        with_zero = self._with_rows(consumer, {gate: z, up: torch.zeros_like(z)})
        return round((with_zero / phi(z)).median().item(), 4)


def _both_signs(tokens: int, size: int, generator: torch.Generator) -> Tensor:
    """Random values in ±[0.5, 2.5], every other token positive, so that a ReLU passes each row somewhere."""
    magnitude = torch.rand(tokens, size, generator=generator) * 2 + 0.5
    return magnitude * torch.tensor([1.0, -1.0]).repeat((tokens + 1) // 2)[:tokens, None]


def _channels_of_rows(gradients: list[Tensor | None], width: int) -> Tensor | None:
    """The channel that every row reaches; −1 for rows that reach none or several; None: no row reaches any."""
    plain = gradients[0]
    if plain is None or not plain.any():
        return None
    strongest = plain.abs().argmax(0, keepdim=True)
    base, by_index, *by_sign = (grad.gather(0, strongest)[0] for grad in gradients if grad is not None)
    channel = (by_index / base * width).round() - 1
    # A row that reaches one channel c gives ±its own gradient for every sign code.
    alone = torch.stack([(s.abs() - base.abs()).abs() <= 1e-3 * base.abs() for s in by_sign]).all(0)
    return torch.where(alone & (base != 0), channel, -1.0).long().cpu()


def _ordered_slices(reached: Tensor, width: int) -> list[slice] | None:
    """The slices of rows that reach channels 0 … width−1 in order: all rows, two halves, or every other row."""
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
    """The required arguments of forward after the first."""
    parameters = list(inspect.signature(module.forward).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]


def _copy_without_linears(module: nn.Module, stand_ins: dict[nn.Module, _StandIn], device: torch.device) -> nn.Module:
    """A shallow copy of the module tree in evaluation mode, without hooks, with stand-ins for linear layers."""
    if module in stand_ins:
        return stand_ins[module]
    copy: nn.Module = object.__new__(type(module))  # FSDP2 gives its classes a __new__ of their own
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
        name: child if child is None else _copy_without_linears(child, stand_ins, device)
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
