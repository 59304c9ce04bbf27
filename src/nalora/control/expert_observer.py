"""Observation of experts: every row of z is added to the statistics of the expert that the router sent it to."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nalora.control.blocks import FFNBlock
from nalora.control.experts import Experts, Order, Rows
from nalora.control.gate_taps import Tap, tap
from nalora.control.tokens import TokenMask
from nalora.control.window import GateWindow
from nalora.distributed.shards import is_sharded
from nalora.errors import NALoRAError
from nalora.kernels.inert_hook import inert_hook
from nalora.kernels.statistics import Accumulate
from nalora.kernels.statistics.by_expert import accumulate_by_expert

_OBSERVABLE = (
    "model.set_experts_implementation('grouped_mm'), 'batched_mm' or 'eager', and no other kernels for experts"
)


@dataclass(eq=False)
class ExpertsObserver:
    """Observes the gates of the experts of one layer; the attributes are those of `GateObserver`."""

    block: FFNBlock
    thresholds: tuple[float, float]
    window: GateWindow
    token_mask: TokenMask
    with_up: bool
    accumulate: Accumulate

    def __post_init__(self) -> None:
        assert self.block.experts is not None
        self.experts: Experts = self.block.experts
        self._hidden, self._index = list(inspect.signature(self.experts.module.forward).parameters)[:2]
        # Of the current pass: its rows, which of them count, and the number of those that were observed.
        self._rows: Rows | None = None
        self._mask: Tensor | None = None
        self._observed = 0

    def register(self) -> list[Tap]:
        """Hook the module of the experts; the handles remove the hooks."""
        module = self.experts.module
        begin, end = _Hook(self, "begin"), _Hook(self, "end")
        return [
            module.register_forward_pre_hook(begin, with_kwargs=True),
            module.register_forward_hook(end),
            *tap(module, self.see),
        ]

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the router's choice of a pass that counts."""
        self._rows, self._mask, self._observed = None, None, 0
        if not (module.training and torch.is_grad_enabled() and self.window.is_adapted()):
            return
        hidden: Tensor = args[0] if args else kwargs[self._hidden]
        index: Tensor = args[1] if len(args) > 1 else kwargs[self._index]
        if getattr(module, "_is_expert_parallel", False) or is_sharded(index) or is_sharded(hidden):
            raise NALoRAError(
                self.block.name,
                found="experts that are distributed over processes (expert parallelism)",
                expected="all experts on every process",
                fix="train with DDP or FSDP2 (fully_shard) alone",
            )
        order = self._order()
        if not self.window.admits(hidden.device):
            return
        self._rows = order(index.detach())
        mask = self.token_mask.of(hidden.shape[:-1])
        self._mask = None if mask is None else mask.reshape(-1)[self._rows.tokens]

    def see(self, output: Tensor, whole: bool) -> None:
        """Add the next rows of z; `whole` if the tensor has the rows of the up projection too."""
        if self._rows is None:
            return
        z, u = self._gate_and_up(output, whole)
        rows = slice(self._observed, self._observed + z.shape[0])
        self._observed = rows.stop
        if self._rows.sort is not None:
            z, u = z[self._rows.sort], None if u is None else u[self._rows.sort]
        mask = None if self._mask is None else self._mask[rows]
        experts = self._rows.experts[rows]
        if experts.numel() != z.shape[0]:
            raise self._not_observed(f"{self._observed} rows of gates for {self._rows.experts.numel()}")
        sums, activation = self.window.sums, self.block.activation
        accumulate_by_expert(self.accumulate, sums, experts, z, activation, self.thresholds, u, mask)

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Check that the whole pass was observed."""
        rows, self._rows, self._mask = self._rows, None, None
        if rows is not None and self._observed != rows.experts.numel():
            raise self._not_observed(f"{self._observed} of {rows.experts.numel()} rows of its gates observed")

    def _gate_and_up(self, output: Tensor, whole: bool) -> tuple[Tensor, Tensor | None]:
        up = self.block.up if self.with_up else None
        z = output.detach()[:, self.block.gate.rows] if whole else output.detach()
        if up is None:
            return z, None
        # The eager implementation passes z alone to the activation, as a view of the outputs of gate and up.
        both = output if whole else output._base
        if both is None or both.shape != (z.shape[0], 2 * z.shape[1]):
            raise self._not_observed("no output of the up projection, which importance='utility' needs")
        u = both.detach()[:, up.rows]
        return z, u + self.block.up_offset if self.block.up_offset else u

    def _order(self) -> Order:
        """Return the order of rows under the current implementation, which a user may change at any time."""
        if (order := self.experts.order()) is None:
            raise self._not_observed("gates that are not observed")
        return order

    def _not_observed(self, found: str) -> NALoRAError:
        return NALoRAError(
            self.block.name,
            found=f"{found}, with experts_implementation={self.experts.implementation!r}",
            expected="experts that pass all outputs of their gates to _apply_gate or to their activation",
            fix=_OBSERVABLE,
        )


class _Hook:
    """A forward hook on the module of experts; a deep copy or a pickle of the model gets an inert one."""

    def __init__(self, observer: ExpertsObserver, method: str) -> None:
        self.call = getattr(observer, method)

    def __call__(self, *args: Any) -> None:
        self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return inert_hook, ()
