"""Block LoRA: the weight is cut into k × k blocks, each with an adapter of rank r/k; LoRA's number of parameters.

The update has rank up to k·r in place of r. This is what GraLoRA (Jung et al. 2025) computes, written as one LoRA
adapter of rank k·r in which every row of A reads one block of the inputs and every column of B writes one block of the
outputs; all other entries are zero and stay zero. So what is saved is an ordinary LoRA adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nalora.errors import NALoRAError, require
from nalora.methods.lora import leave_out, lora_layers
from nalora.methods.lora_plus import LoRAPlus
from nalora.methods.method import Adapter, Start
from nalora.models.peft_names import ADAPTER


@dataclass(frozen=True)
class BlockLoRA(LoRAPlus):
    """LoRA on blocks, with a learning rate of its own for B.

    Args:
        blocks: k, the number of blocks along each dimension; it must divide the rank and the sizes of the layers.
        ratio: λ; B learns with λ times the run's learning rate, which is A's.
    """

    name = "block-lora"
    title = "LoRA on k × k blocks of the weight (GraLoRA as an ordinary adapter)"
    reference = "after Jung et al. 2025, arXiv 2505.20355"

    ratio: float = 1.0
    blocks: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.blocks >= 1, "blocks", self.blocks, "1 or more", "use 2 or 4")

    def config_settings(self, adapter: Adapter) -> dict[str, Any]:
        """LoRA's at rank k·r, with the same scaling α/r.

        Raises:
            NALoRAError: the rank cannot be shared between the blocks of a row.
        """
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
        """Draw A block by block as LoRA draws a layer of the block's size, and keep everything outside at zero."""
        self._refuse_layers_without_blocks(model)
        for _, layer in lora_layers(model):
            A, B = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            reads, writes = block_masks(layer.in_features, layer.out_features, adapter.rank, self.blocks)
            bound = (self.blocks / layer.in_features) ** 0.5  # Kaiming's with a = √5, for this many inputs
            A.uniform_(-bound, bound).mul_(reads.to(A.device))
            _keep_zeros(A, reads)
            _keep_zeros(B, writes)

    def attach(self, trainer: Any) -> None:
        """Refuse what replaces the parameters whose gradients are masked.

        Raises:
            NALoRAError: a trainer that shards parameters.
        """
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise NALoRAError(
                f"method {self.name!r}",
                found="FSDP or DeepSpeed, which train copies of the parameters",
                expected="the parameters themselves, whose zeros are kept",
                fix="launch with DDP or one process, or use method peft/gralora",
            )

    def trainable_parameters(self, model: nn.Module) -> int:
        """Without the zeros."""
        return sum(p.numel() // self.blocks for p in model.parameters() if p.requires_grad)

    def _refuse_layers_without_blocks(self, model: nn.Module) -> None:
        cannot = {
            name: layer
            for name, layer in lora_layers(model)
            if ADAPTER not in layer.lora_A or layer.in_features % self.blocks or layer.out_features % self.blocks
        }
        for name, layer in cannot.items():
            raise NALoRAError(
                f"blocks: {self.blocks}",
                found=f"{name}, a layer of {layer.out_features} × {layer.in_features}",
                expected="linear layers whose two sizes blocks divides",
                fix=f"choose another number of blocks, or {leave_out(model, cannot)}",
            )


def block_masks(inputs: int, outputs: int, rank: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Where A (k·r × inputs) and B (outputs × k·r) may differ from zero.

    The p-th component reads input block p div r and writes output block (p mod r) div (r/k).
    """
    component = torch.arange(blocks * rank)
    reads = (component // rank)[:, None] == torch.arange(inputs) // (inputs // blocks)
    writes = (torch.arange(outputs) // (outputs // blocks))[:, None] == (component % rank) // (rank // blocks)
    return reads, writes


def _keep_zeros(parameter: nn.Parameter, mask: Tensor) -> None:
    """Mask every gradient: what starts at zero outside the mask then stays there under any elementwise optimizer."""
    kept = mask.to(parameter.device)
    parameter.register_hook(lambda gradient: gradient * kept)  # type: ignore[no-untyped-call]


METHODS = (BlockLoRA,)
