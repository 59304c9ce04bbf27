"""AdaLoRA: ΔW = (α/r)·B·(E ⊙ A), whose singular values E are pruned where they matter least, down to a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nalora.distributed.shards import full_tensor
from nalora.errors import NALoRAError, counted, require
from nalora.methods.lora import LoRA, lora_layers
from nalora.methods.method import Adapter, Start
from nalora.methods.saving import write_lora
from nalora.models.peft_names import ADAPTER


@dataclass(frozen=True)
class AdaLoRA(LoRA):
    """PEFT's AdaLoRA, with the ranks allocated at every step, kept in checkpoints, and saved as plain LoRA.

    Args:
        target_rank: r̄, the mean rank over layers at the end; the run's rank by default.
        initial_rank: of every layer at the start; 1.5 × target_rank by default.
        warmup_share: of the steps, before anything is pruned (t_i).
        final_share: of the steps, after the last pruning (t_f).
        every: steps between prunings (Δ_T).
        beta1: of the average of a weight's sensitivity, abs(w·g).
        beta2: of the average of that sensitivity's distance from its average.
        orthogonality: the weight of ‖AAᵀ − I‖ + ‖BᵀB − I‖ in the loss (γ), averaged over all A and B.
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
        for name, holds, expected in (
            ("target_rank", self.target_rank is None or self.target_rank >= 1, "1 or more"),
            ("initial_rank", self.initial_rank is None or self.initial_rank >= 2, "2 or more"),
            ("warmup_share", 0 <= self.warmup_share < 1, "a share in [0, 1)"),
            ("final_share", 0 <= self.final_share < 1, "a share in [0, 1)"),
            ("every", self.every >= 1, "1 or more"),
            ("beta1", 0 < self.beta1 < 1, "a number in (0, 1)"),
            ("beta2", 0 < self.beta2 < 1, "a number in (0, 1)"),
            ("orthogonality", self.orthogonality >= 0, "0 or more"),
        ):
            require(holds, f"method 'adalora', {name}", getattr(self, name), expected)

    def ranks(self, adapter: Adapter) -> tuple[int, int]:
        """The target and the initial rank.

        Raises:
            NALoRAError: nothing would be pruned.
        """
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
        """t_i, t_f and the number of steps, as PEFT's configuration names them.

        Raises:
            NALoRAError: no step is left to prune at.
        """
        warmup, final = round(self.warmup_share * steps), round(self.final_share * steps)
        # The last pruning, at step `steps - final`, goes by what the steps before it have measured.
        if steps - final < max(warmup + 1, 2):
            raise NALoRAError(
                f"method 'adalora', {counted(steps, 'step')}",
                found=f"{warmup} of them before the first pruning and {final} after the last",
                expected="two steps or more before the last pruning, and one between the shares",
                fix="raise steps, or lower warmup_share or final_share",
            )
        return {"tinit": warmup, "tfinal": final, "total_step": steps}

    def config(self, adapter: Adapter, start: Start) -> Any:
        """PEFT's configuration."""
        import peft

        target, initial = self.ranks(adapter)
        # PEFT's AdaLoRA does not read r.
        settings = {name: value for name, value in self.config_settings(adapter).items() if name != "r"}
        return peft.AdaLoraConfig(
            **settings, **self.schedule(start.steps), target_r=target, init_r=initial, deltaT=self.every,
            beta1=self.beta1, beta2=self.beta2, orth_reg_weight=0.0,  # added in `attach`
        )  # fmt: skip

    def initialise(self, model: nn.Module, adapter: Adapter, start: Start) -> None:
        """Freeze the number that ΔW is divided by: PEFT lets it learn where it casts adapters of a 16-bit base."""
        for _, layer in lora_layers(model):
            layer.ranknum[ADAPTER].requires_grad_(False)

    def attach(self, trainer: Any) -> None:
        """Allocate ranks after every optimizer step."""
        from nalora.integrations.adalora import RankAllocation

        RankAllocation(trainer, self.schedule, self.orthogonality).install()

    @torch.no_grad()
    def save(self, model: nn.Module, folder: Path) -> None:
        """Plain LoRA with A′ = E ⊙ A, pruned directions as zeros: no orthogonality in its loss, loaded everywhere."""
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
