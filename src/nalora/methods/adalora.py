"""AdaLoRA: ΔW = (α/r)·B·(E ⊙ A), where the least important singular values E are pruned down to a rank budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nalora.distributed.shards import full_tensor
from nalora.errors import NALoRAError, counted
from nalora.methods.lora import LoRA, lora_layers
from nalora.methods.method import Adapter, Start, check_settings
from nalora.methods.saving import write_lora
from nalora.models.peft_names import ADAPTER


@dataclass(frozen=True)
class AdaLoRA(LoRA):
    """PEFT's AdaLoRA, with ranks allocated at every step, its state in checkpoints, and saved as plain LoRA.

    Args:
        target_rank: r̄, the mean rank over layers at the end (default: the run's rank).
        initial_rank: rank of every layer at the start (default: 1.5 × target_rank).
        warmup_share: share of the steps before the first pruning (t_i).
        final_share: share of the steps after the last pruning (t_f).
        every: steps between prunings (Δ_T).
        beta1: decay of the moving average of the sensitivity abs(w·g).
        beta2: decay of the moving average of the sensitivity's distance from its average.
        orthogonality: weight γ in the loss of ‖AAᵀ − I‖ + ‖BᵀB − I‖, averaged over all A and B.
    """

    name = "adalora"
    title = "AdaLoRA"
    reference = "Zhang et al. 2023, arXiv 2303.10512"
    not_under_na_lora = (
        "its ranks are allocated by the products of weights and gradients that the control would change, "
        "and its singular values E are no factor that the control knows"
    )

    target_rank: int | None = None
    initial_rank: int | None = None
    warmup_share: float = 0.1
    final_share: float = 0.3
    every: int = 1
    beta1: float = 0.85
    beta2: float = 0.85
    orthogonality: float = 0.5

    def __post_init__(self) -> None:
        check_settings(
            self,
            ("target_rank", self.target_rank is None or self.target_rank >= 1, "1 or more"),
            ("initial_rank", self.initial_rank is None or self.initial_rank >= 2, "2 or more"),
            ("warmup_share", 0 <= self.warmup_share < 1, "a share in [0, 1)"),
            ("final_share", 0 <= self.final_share < 1, "a share in [0, 1)"),
            ("every", self.every >= 1, "1 or more"),
            ("beta1", 0 < self.beta1 < 1, "a number in (0, 1)"),
            ("beta2", 0 < self.beta2 < 1, "a number in (0, 1)"),
            ("orthogonality", self.orthogonality >= 0, "0 or more"),
        )

    def ranks(self, adapter: Adapter) -> tuple[int, int]:
        """Return the target and the initial rank. Raises NALoRAError if nothing would be pruned."""
        target = self.target_rank or adapter.rank
        initial = self.initial_rank or math.ceil(1.5 * target)
        if initial <= target:
            raise NALoRAError(
                f"method 'adalora', initial_rank {initial}",
                found=f"target_rank {target}, so that nothing would be pruned",
                expected="an initial rank above the target",
                fix="raise initial_rank, or use lora",
            )
        return target, initial

    def schedule(self, steps: int) -> dict[str, int]:
        """Return t_i, t_f and the number of steps by PEFT's names. Raises NALoRAError if no step is left to prune."""
        warmup, final = round(self.warmup_share * steps), round(self.final_share * steps)
        # The last pruning, at step `steps - final`, uses what was measured in the steps before it.
        if steps - final < max(warmup + 1, 2):
            raise NALoRAError(
                f"method 'adalora', {counted(steps, 'step')}",
                found=f"{warmup} of them before the first pruning and {final} after the last",
                expected="two steps or more before the last pruning, and one between the shares",
                fix="raise steps, or lower warmup_share or final_share",
            )
        return {"tinit": warmup, "tfinal": final, "total_step": steps}

    def config(self, adapter: Adapter, start: Start) -> Any:
        """Return PEFT's configuration."""
        import peft

        target, initial = self.ranks(adapter)
        settings = self.config_settings(adapter)
        del settings["r"]  # PEFT's AdaLoRA does not read it
        settings |= self.schedule(start.steps)
        settings |= {"target_r": target, "init_r": initial, "deltaT": self.every}
        # RankAllocation adds the orthogonality penalty.
        return peft.AdaLoraConfig(**settings, beta1=self.beta1, beta2=self.beta2, orth_reg_weight=0.0)

    def initialise(self, model: nn.Module, adapter: Adapter, start: Start) -> None:
        """Freeze the divisor of ΔW, which PEFT makes trainable when it casts adapters of a 16-bit base."""
        for _, layer in lora_layers(model):
            layer.ranknum[ADAPTER].requires_grad_(False)

    def attach(self, trainer: Any) -> None:
        """Allocate ranks after every optimizer step."""
        from nalora.integrations.adalora import RankAllocation

        RankAllocation(trainer, self.schedule, self.orthogonality).install()

    @torch.no_grad()
    def save(self, model: nn.Module, folder: Path) -> None:
        """Write plain LoRA with A′ = E ⊙ A and zeros for pruned directions, which every PEFT reader can load."""
        tensors: dict[str, Tensor] = {}
        for name, layer in lora_layers(model):
            a, e, b = (full_tensor(getattr(layer, factor)[ADAPTER]) for factor in ("lora_A", "lora_E", "lora_B"))
            # PEFT divides by r + 1e-5.
            tensors[f"{name}.lora_A.weight"] = e * a * (layer.r[ADAPTER] / (layer.r[ADAPTER] + 1e-5))
            tensors[f"{name}.lora_B.weight"] = b
        wrapped: Any = model
        config = wrapped.peft_config[ADAPTER]
        write_lora(model, folder, tensors, r=config.init_r, lora_alpha=config.lora_alpha)


METHODS = (AdaLoRA,)
