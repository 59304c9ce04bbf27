"""Block LoRA: the weight is split into k × k blocks, each with an adapter of rank r/k; as many parameters as LoRA.

The update has rank up to k·r instead of r. It computes the same function as GraLoRA (Jung et al. 2025), written as one
LoRA adapter of rank k·r: each row of A reads one block of the inputs, each column of B writes one block of the outputs,
and all other entries are zero and stay zero. The saved adapter is therefore an ordinary LoRA adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nalora.errors import NALoRAError
from nalora.methods.lora import leave_out, lora_layers
from nalora.methods.lora_plus import LoRAPlus
from nalora.methods.method import Adapter, Start, check_settings
from nalora.models.peft_names import ADAPTER


@dataclass(frozen=True)
class BlockLoRA(LoRAPlus):
    """LoRA on blocks of the weight, with a separate learning rate for B.

    Args:
        blocks: k, the number of blocks along each dimension; must divide the rank and the layers' dimensions.
        ratio: λ; the learning rate of B is λ times the run's learning rate, which is that of A.
    """

    name = "block-lora"
    title = "LoRA on k × k blocks of the weight (GraLoRA as an ordinary adapter)"
    reference = "after Jung et al. 2025, arXiv 2505.20355"

    ratio: float = 1.0
    blocks: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, ("blocks", self.blocks >= 1, "1 or more, such as 2 or 4"))

    def config_settings(self, adapter: Adapter) -> dict[str, Any]:
        """Return LoRA's settings at rank k·r and scaling α/r. Raises NALoRAError if k does not divide the rank."""
        if adapter.rank % self.blocks:
            raise NALoRAError(
                f"blocks: {self.blocks}",
                found=f"rank {adapter.rank}",
                expected="a rank that blocks divides",
                fix=f"set rank to a multiple of {self.blocks}",
            )
        wide = {"r": adapter.rank * self.blocks, "lora_alpha": adapter.alpha * self.blocks}
        return super().config_settings(adapter) | wide

    @torch.no_grad()
    def initialise(self, model: nn.Module, adapter: Adapter, start: Start) -> None:
        """Draw each block of A as LoRA draws a layer of that size, and keep all other entries at zero.

        Raises NALoRAError if k does not divide the dimensions of a layer.
        """
        layers = dict(lora_layers(model))
        unsuitable = [
            name
            for name, layer in layers.items()
            if ADAPTER not in layer.lora_A or layer.in_features % self.blocks or layer.out_features % self.blocks
        ]
        for name in unsuitable:
            raise NALoRAError(
                f"blocks: {self.blocks}",
                found=f"{name}, a layer of {layers[name].out_features} × {layers[name].in_features}",
                expected="linear layers whose two sizes blocks divides",
                fix=f"choose another number of blocks, or {leave_out(model, unsuitable)}",
            )
        for layer in layers.values():
            A, B = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            reads, writes = block_masks(layer.in_features, layer.out_features, adapter.rank, self.blocks)
            bound = (self.blocks / layer.in_features) ** 0.5  # Kaiming's with a = √5 for a block's number of inputs
            A.uniform_(-bound, bound).mul_(reads.to(A.device))
            for parameter, mask in ((A, reads), (B, writes)):
                _mask_gradients(parameter, mask.to(parameter.device))

    def attach(self, trainer: Any) -> None:
        """Raise NALoRAError for FSDP and DeepSpeed, which replace the parameters whose gradients are masked."""
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise NALoRAError(
                f"method {self.name!r}",
                found="FSDP or DeepSpeed, which train copies of the parameters",
                expected="the parameters themselves, whose zeros are kept",
                fix="launch with DDP or one process, or use method peft/gralora",
            )

    def trainable_parameters(self, model: nn.Module) -> int:
        """Return the number of trained values, without the zeros."""
        return sum(p.numel() // self.blocks for p in model.parameters() if p.requires_grad)


def block_masks(inputs: int, outputs: int, rank: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Return where A (k·r × inputs) and B (outputs × k·r) may be nonzero.

    Component p reads input block p div r and writes output block (p mod r) div (r/k).
    """
    component = torch.arange(blocks * rank)
    reads = (component // rank)[:, None] == torch.arange(inputs) // (inputs // blocks)
    writes = (torch.arange(outputs) // (outputs // blocks))[:, None] == (component % rank) // (rank // blocks)
    return reads, writes


def _mask_gradients(parameter: nn.Parameter, mask: Tensor) -> None:
    """Multiply every gradient by the mask: under elementwise optimizers, zeros outside of it then stay zero."""
    parameter.register_hook(lambda gradient: gradient * mask)  # type: ignore[no-untyped-call]


METHODS = (BlockLoRA,)
