"""Fused LoRA layers for any PEFT model, without NA-LoRA: `nalora.fuse`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import nn

from nalora.control.blocks import FFNBlock, find_blocks
from nalora.control.fuse_arguments import check_arguments
from nalora.control.fused_check import Agreement, compare, drops_out, loss_and_gradients
from nalora.control.fused_report import of_base, of_layers, reasons_if_nothing_is_fused
from nalora.control.observer import is_observed
from nalora.distributed.wrappers import unwrapped
from nalora.errors import NALoRAError, missing_package
from nalora.kernels.fused import linears_op
from nalora.kernels.fused.adapters import StepFactors
from nalora.kernels.fused.compiled_layers import compile_layers, decoder_layers, refuse_unless_compilable
from nalora.kernels.fused.graphed_layers import graph_layers, refuse_unless_graphable
from nalora.kernels.fused.linears import fuse_adapters
from nalora.kernels.fused.replaced_forward import all_or_nothing
from nalora.kernels.statistics.engines import has_triton

Base = Literal["keep", "fp8"]
_ATTRIBUTE = "nalora_layers"
_log = logging.getLogger("nalora")


def fuse(
    model: nn.Module,
    *,
    base: Base = "keep",
    keep_base: bool = False,
    cuda_graphs: bool = False,
    compile_layers: bool = False,
) -> FusedModel:
    """Compute the LoRA layers of a model by fused functions from now on: less time and memory, the same results.

    A gated FFN with its three adapters is one function on a GPU, and linear layers that share an input are one.
    Training loop, Trainer, saving and loading do not change. Calls that the fused functions do not support
    (evaluation, disabled or merged adapters, dropout, DoRA) use PEFT's own layers; `print` of the result lists layers
    to which that applies.

    Args:
        model: any model with PEFT LoRA layers.
        base: ``"fp8"`` also converts the weights of frozen linear layers to FP8 (e4m3, one scale per output), which
            changes the model's outputs slightly; output layers are left as they are. The adapter that is trained is
            meant for the model in its own precision.
        keep_base: whether FP8's original weights are kept on the host, so that `undo` can put them back.
        cuda_graphs: whether training passes through decoder layers are replayed from CUDA graphs, one for each shape
            of a batch from its second pass on: Python's launches, which dominate small batches and FP8, take no time.
        compile_layers: whether torch.compile also compiles whole decoder layers, with the fused functions inside. The
            first steps take longer, and so does the first step of every other shape.

    Raises:
        NALoRAError: a model without LoRA layers, one that is fused already or sharded, or one whose base cannot be FP8
            or whose layers cannot be replayed or compiled. The model is then as it was before.
    """
    model = unwrapped(model) if isinstance(model, nn.Module) else model
    check_arguments(model, base, keep_base=keep_base)
    return FusedModel(model, base=base, keep_base=keep_base, cuda_graphs=cuda_graphs, compile_layers=compile_layers)


def fused_layers(model: nn.Module) -> FusedModel | None:
    """Return the result of the `fuse` that is in effect for a model."""
    layers: FusedModel | None = vars(model).get(_ATTRIBUTE)
    return layers


class FusedModel:
    """The fused layers of one model; created by `fuse`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        base: Base = "keep",
        keep_base: bool = False,
        cuda_graphs: bool = False,
        compile_layers: bool = False,
    ) -> None:
        self.model, self.graphs_layers, self.compiles_layers = model, cuda_graphs, compile_layers
        if compile_layers:
            refuse_unless_compilable(model)
        if cuda_graphs:
            refuse_unless_graphable(model)
        self._blocks = _fusable_blocks(model)
        self._base = None
        if base == "fp8":
            if not has_triton():
                raise missing_package('fuse(base="fp8")', "triton", "for its kernels", instead=", or leave base out")
            from nalora.kernels.fused.fp8_base import convert  # Triton may not be installed

            self._base = convert(model, keep=keep_base)
        self._undo: list[Callable[[], None]] = []
        try:
            self.install()
        except BaseException:
            if self._base is not None and self._base.can_restore:
                self._base.restore(model)
            raise
        if self._base is not None:
            self._base.commit(model)
        setattr(model, _ATTRIBUTE, self)
        if reasons := reasons_if_nothing_is_fused(model):
            _log.warning("nalora.fuse: no LoRA layer is fused, all are left to PEFT: %s", "; ".join(reasons))

    def install(self) -> None:
        """Replace the forwards of the layers, if they are not replaced already."""
        if self._undo:
            return
        with all_or_nothing(self.model):
            self._undo = self._replace_forwards()

    def _replace_forwards(self) -> list[Callable[[], None]]:
        factors = StepFactors()
        undo: list[Callable[[], None]] = []
        for block in self._blocks if has_triton() else []:
            from nalora.control.fused_ffn import fuse_ffn  # Triton may not be installed

            if (restore := fuse_ffn(block, factors, in_graph=self.compiles_layers)) is not None:
                undo.append(restore)
        # The layers of an FFN too: on a CPU it is computed layer by layer.
        in_graph = linears_op.compute if self.compiles_layers else None
        undo += fuse_adapters(self.model, factors, in_graph=in_graph)
        if self.compiles_layers:
            undo += compile_layers(self.model)
        return undo + graph_layers(self.model, factors) if self.graphs_layers else undo

    def remove(self) -> None:
        """Restore PEFT's forwards; a base in FP8 stays."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()

    def undo(self) -> None:
        """Restore PEFT's layers, and the base in its own precision.

        Raises:
            NALoRAError: a base in FP8 whose original weights were not kept, or NA-LoRA is attached.
        """
        self._refuse_controller("undo()")
        if self._base is not None and not self._base.can_restore:
            raise NALoRAError(
                "undo()",
                found="a base in FP8 whose original weights were not kept",
                expected="fuse(model, base='fp8', keep_base=True), which keeps them on the host",
                fix="save the adapter with save_pretrained and load it onto a freshly loaded model",
            )
        try:
            self.remove()
            if self._base is not None:
                self._base.restore(self.model)
        except BaseException:
            self.remove()
            self.install()
            raise
        vars(self.model).pop(_ATTRIBUTE, None)

    def check(self, batch: Mapping[str, Any]) -> Agreement:
        """Compare loss and gradients with those of PEFT's layers on a batch of yours; print and return the differences.

        Both passes use the same random state. Gradients that the model holds are kept. Call it inside your autocast
        context, if you train in one. A base in FP8 is compared with the base in its own precision if `keep_base` was
        given, else with PEFT's layers on the same FP8 base.

        Args:
            batch: arguments of the model, labels included, on its device.

        Raises:
            NALoRAError: a batch for which the model returns no loss, nothing that is trained, or NA-LoRA is attached,
                which would count the batch.
        """
        self._refuse_controller("check(batch)")
        if fused_layers(self.model) is not self:
            found, fix = "layers that undo() put back", "call fuse(model) again"
            raise NALoRAError("check(batch)", found=found, expected="fused layers", fix=fix)
        ours = loss_and_gradients(self.model, batch)
        restored = self._base is not None and self._base.can_restore
        own_precision = (
            self._base.in_own_precision(self.model) if restored and self._base is not None else contextlib.nullcontext()
        )
        try:
            self.remove()
            with own_precision:
                theirs = loss_and_gradients(self.model, batch)
        finally:
            self.remove()
            self.install()
        reference = "PEFT's layers" if self._base is None or restored else "PEFT's layers on the same FP8 base"
        note = "dropout drops other elements in compiled layers" if self.compiles_layers else ""
        agreement = compare(ours, theirs, reference, note if drops_out(self.model) else "")
        print(agreement)
        return agreement

    def refuse_kernels(self, kernels: str) -> None:
        """Raise NALoRAError if layers are compiled, but statistics are not collected by fused functions inside them."""
        if (self.compiles_layers or self.graphs_layers) and kernels != "fused":
            option = "compile_layers" if self.compiles_layers else "cuda_graphs"
            raise NALoRAError(
                "attach(model)",
                found=f"fuse({option}=True) and kernels={kernels!r}",
                expected="kernels='fused', and Triton on the model's device",
                fix=f"leave kernels out, or call undo(), then fuse(model) without {option}",
            )

    def _refuse_controller(self, where: str) -> None:
        if any(is_observed(module) for module in self.model.modules()):
            found, fix = "NA-LoRA attached to the model", "call detach() on its controller first"
            raise NALoRAError(where, found=found, expected="no controller", fix=fix)

    def __str__(self) -> str:
        if fused_layers(self.model) is not self:
            return "Fused layers: none, since undo() was called"
        lines = of_layers(self.model, self._blocks)
        count = len(decoder_layers(self.model))
        if self.compiles_layers:
            lines.append(f"  compiled: {count} decoder layers, when they are first used")
        if self.graphs_layers:
            lines.append(f"  CUDA graphs: {count} decoder layers, from the second training pass of a shape on")
        return "\n".join(lines + (of_base(self._base) if self._base is not None else []))

    __repr__ = __str__

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model has PEFT's own forwards."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _fusable_blocks(model: nn.Module) -> list[FFNBlock]:
    """Return the FFN blocks of a model, without those of which a controller observes the gate."""
    try:
        blocks = find_blocks(model).blocks
    except NALoRAError:  # another kind of adapter
        return []
    return [block for block in blocks if not any(is_observed(p.module) for p in block.projections.values())]
