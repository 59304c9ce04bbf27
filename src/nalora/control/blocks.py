"""Find the FFN blocks of a model from its computation rather than from names.

Every module that owns an adapted linear layer is run as a *replica* in which all linear layers are replaced by
stand-ins with chosen outputs. The inputs of the other stand-ins then show the wiring: which rows of which layer reach
which channel, which factor passes through an activation (the gate), which is linear (the up projection), and which
layer reads the product (the down projection). Fused, interleaved, renamed and unknown FFNs are all found in the same
way, on the meta device too, and no weight is changed. Experts, whose weights are 3-D parameters, are found on one
expert of a small copy (`nalora.control.experts`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from nalora import activations
from nalora.activations import Activation
from nalora.control.experts import (
    DOWN,
    NOT_OBSERVED,
    Experts,
    OneExpert,
    adapted_experts,
    bare_experts,
    gate_parameter,
    refusal,
    widened,
    width_of,
)
from nalora.control.peft_layers import LAYERS, all_adapters, check_variant, no_adapters
from nalora.control.plain_ffn import what_else
from nalora.control.replica import OUTPUT, Replica, feature_sizes
from nalora.distributed.wrappers import base_of
from nalora.models.peft_names import in_base
from nalora.models.target_modules import rewritten_names, shortest_suffixes


@dataclass(frozen=True)
class Projection:
    """A projection of an FFN block: all output rows of a linear layer, or a slice of them."""

    name: str
    module: nn.Module
    rows: slice

    @property
    def adapted(self) -> bool:
        """Whether the layer has an adapter that can be controlled."""
        return isinstance(self.module, LAYERS)


@dataclass(frozen=True)
class FFNBlock:
    """One FFN: y = W_d(φ(W_g x) ⊙ (W_u x + up_offset)), eq. ffn_block; up is None without a product.

    `host` is the module that computes exactly this, from its input to its output; None if every module computes more,
    and `extra` then names what a module computes besides, if that is all. With `experts` it is one such FFN for each.
    """

    name: str
    gate: Projection
    up: Projection | None
    down: Projection
    activation: Activation
    width: int
    up_offset: float = 0.0
    host: nn.Module | None = None
    extra: str = ""
    experts: Experts | None = None

    @property
    def place(self) -> str:
        """The name of the module that computes the gate."""
        return self.experts.name if self.experts else self.gate.name

    @property
    def fused(self) -> bool:
        """Whether gate and up are rows of one layer and so share one A."""
        return self.up is not None and self.up.module is self.gate.module

    @property
    def statistics_kind(self) -> tuple[torch.device, torch.dtype]:
        """The device and dtype of this block's statistics: those of its adapters, at least float32."""
        b = next(adapter.b for p in self.projections.values() for adapter in all_adapters(p.module))
        return b.device, torch.promote_types(b.dtype, torch.float32)

    @property
    def projections(self) -> dict[str, Projection]:
        """The block's projections by their role."""
        roles = {"gate": self.gate, "up": self.up, "down": self.down}
        return {role: projection for role, projection in roles.items() if projection is not None}


@dataclass(frozen=True)
class Discovery:
    """The result of `find_blocks`.

    Attributes:
        blocks: the FFN blocks with an adapter.
        refused: adapters that cannot be controlled, with the reason.
        others: adapters outside FFN blocks.
        bare: the linear layers of FFNs without any adapter, shortened to the names that all layers share.
        rewrites: whether PEFT takes such names for expert parameters (`models.target_modules`).
        experts: parameters of experts that have no adapter and could be controlled with one, shortened likewise.
        other_experts: the class and the name of a parameter of experts that could not.
    """

    blocks: tuple[FFNBlock, ...]
    refused: dict[str, str]
    others: tuple[str, ...]
    bare: tuple[str, ...] = ()
    rewrites: bool = False
    experts: tuple[str, ...] = ()
    other_experts: str = ""


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: replicas are thousands of tiny operations, on an 8B model 1.0 s on one thread, 9.4 s on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def find_blocks(model: nn.Module) -> Discovery:
    """Find every FFN block of `model` that has an adapted projection.

    Raises:
        NALoRAError: the model has no LoRA layers, or an adapter of a kind without plain A and B.
    """
    names = {module: name for name, module in model.named_modules()}
    adapters = [module for module in names if isinstance(module, LAYERS)]
    if not adapters:
        raise no_adapters(model)
    for layer in adapters:
        check_variant(names[layer], layer)

    refused: dict[str, str] = {}
    of_experts: list[FFNBlock] = []
    for module, of_module in adapted_experts(names, refused).items():
        if block := _block_of_experts(module, of_module, names):
            of_experts.append(block)
        else:
            refused |= {names[layer]: refusal(layer, NOT_OBSERVED) for layer in of_module.values()}
    within_adapters = {part for layer in adapters for part in layer.modules() if part is not layer}
    linears = {
        module: sizes
        for module in names
        if module not in within_adapters and (sizes := feature_sizes(module)) is not None
    }
    claimed = {projection.module for block in of_experts for projection in block.projections.values()}
    found = [block for host in _hosts(names, linears) for block in _blocks_in(host, names, linears, claimed, refused)]
    blocks = [block for block in found if any(projection.adapted for projection in block.projections.values())]
    blocks += of_experts
    bare = {in_base(p.name) for block in found if block not in blocks for p in block.projections.values()}
    order = {module: position for position, module in enumerate(names)}
    blocks.sort(key=lambda block: order[block.gate.module])
    counts = Counter(block.name for block in blocks)
    blocks = [dataclasses.replace(b, name=b.gate.name) if counts[b.name] > 1 else b for b in blocks]
    others = tuple(names[a] for a in adapters if a not in claimed and names[a] not in refused)
    base = base_of(model)
    short = tuple(shortest_suffixes(bare, base))
    return Discovery(tuple(blocks), refused, others, short, bool(rewritten_names(base)), *bare_experts(base))


def _hosts(names: dict[nn.Module, str], linears: dict[nn.Module, tuple[int, int]]) -> list[nn.Module]:
    """Return the modules whose forward calls a linear layer: its parent that is no container. Innermost first."""
    by_name = {name: module for module, name in names.items()}
    hosts = {
        next(
            by_name[parent]
            for parent in _ancestors(names[linear])
            if not isinstance(by_name[parent], nn.ModuleList | nn.ModuleDict)
        )
        for linear in linears
        if names[linear]
    }
    return sorted(hosts, key=lambda host: (-names[host].count("."), names[host]))


def _ancestors(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _blocks_in(
    host: nn.Module,
    names: dict[nn.Module, str],
    linears: dict[nn.Module, tuple[int, int]],
    claimed: set[nn.Module],
    refused: dict[str, str],
) -> Iterator[FFNBlock]:
    inside = {module: linears[module] for module in host.modules() if module in linears}
    replica = Replica.of(host, inside)
    if replica is None:
        return
    for consumer in [*inside, OUTPUT]:
        wiring = replica.wiring(consumer)
        if wiring is None or any(part.source in claimed for part in wiring.parts):
            continue
        gates = [part for part in wiring.parts if replica.is_nonlinear(consumer, part)]
        if len(gates) == 2:
            for part in gates:
                refused[names[part.source]] = "both factors of its product pass through an activation"
        if len(gates) != 1:
            continue
        gate, up = gates[0], next((part for part in wiring.parts if part not in gates), None)
        phi = replica.activation(consumer, gate, up)
        down = consumer if consumer is not OUTPUT else _reader_nearby(host, names, linears, gate.source, wiring.width)
        if down is None:
            continue
        claimed |= {part.source for part in wiring.parts} | {down}
        block = FFNBlock(
            name=names[host] or type(host).__name__,
            gate=Projection(names[gate.source], gate.source, gate.rows),
            up=Projection(names[up.source], up.source, up.rows) if up else None,
            down=Projection(names[down], down, slice(None)),
            activation=activations.identify(phi),
            width=wiring.width,
            up_offset=replica.up_offset(consumer, gate, up) if up else 0.0,
        )
        if up is not None and replica.is_plain_ffn(gate.source, up.source, down):
            extra = what_else(host, replica, consumer, gate, up, block.activation.phi, block.up_offset)
            block = dataclasses.replace(block, host=None if extra else host, extra=extra)
        yield block


def _reader_nearby(
    host: nn.Module,
    names: dict[nn.Module, str],
    linears: dict[nn.Module, tuple[int, int]],
    gate: nn.Module,
    width: int,
) -> nn.Module | None:
    """Return the layer that reads a host's output if the FFN is split over modules (BERT): width in, model size out."""
    by_name = {name: module for module, name in names.items()}
    model_size = linears[gate][0]
    for ancestor in list(_ancestors(names[host]))[:2]:
        inside = set(host.modules())
        readers = [
            module
            for module in by_name[ancestor].modules()
            if linears.get(module) == (width, model_size) and module not in inside
        ]
        if readers:
            return readers[0] if len(readers) == 1 else None
    return None


def _block_of_experts(
    module: nn.Module, adapters: dict[str, ParamWrapper], names: dict[nn.Module, str]
) -> FFNBlock | None:
    """Return the block that all experts of a module are, found on one of them; None if their gates are not seen."""
    one = OneExpert(module)
    found = list(_blocks_in(one, {one: "", one.gate: "gate", one.down: "down"}, one.sizes, set(), {}))
    if len(found) != 1:
        return None
    block, outermost = found[0], next(iter(adapters.values()))
    experts = Experts(names[module], module, outermost.num_experts, one.experts, block.gate.rows)
    if experts.order() is None:
        return None
    name, gate, width = names[outermost], gate_parameter(module), width_of(module)

    def projection(parameter: str, rows: slice) -> Projection:
        return Projection(f"{name}.{parameter}", adapters.get(parameter, module), widened(rows, width))

    return dataclasses.replace(
        block,
        name=name,
        gate=projection(gate, block.gate.rows),
        up=projection(gate, block.up.rows) if block.up else None,
        down=projection(DOWN, slice(None)),
        width=width,
        host=None,
        experts=experts,
    )
