"""LoRA-GA: adapters that start along the leading singular vectors of the gradient.

A = (m^¼/√γ)·V[1:r]ᵀ and B = (m^¼/√γ)·U[r+1:2r] for the mean gradient Ḡ = U·S·Vᵀ (m outputs), and W₀ − s·B·A is frozen.
The first SGD step then changes W along the best approximation of Ḡ of rank 2r.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nalora.errors import NALoRAError
from nalora.methods import moved_base
from nalora.methods.gradients import reduce_mean_gradients, refuse_not_positive
from nalora.methods.lora import LoRA, leave_out, lora_layers
from nalora.methods.method import Adapter, Start
from nalora.models.peft_names import ADAPTER

# Up to this many rows or columns the decomposition is exact.
EXACT = 1024
_ITERATIONS = 24


@dataclass(frozen=True)
class LoRAGA(LoRA):
    """LoRA at the scaling α/√r whose adapters start from the gradient, taken off the base.

    Its authors say: tune the learning rate as for full fine-tuning. The start is no small one: ‖s·B·A‖ is 0.1–0.9 of
    ‖W₀‖ over SmolLM2-135M's layers at r = 8, α = 16, and more where weights are small. A float32 base gives it back
    (logits moved by 3e-6 there), a bfloat16 base only to its rounding.

    Args:
        gamma: γ; larger starts smaller.
        gradient_batches: over how many batches of `batch_size` rows the gradient is taken.
        gradient_memory: GiB of gradients at a time.
    """

    name = "lora-ga"
    title = "LoRA-GA"
    reference = "Wang et al. 2024, arXiv 2407.05000"

    gamma: float = 16.0
    gradient_batches: int = 8
    gradient_memory: float = 4.0

    def __post_init__(self) -> None:
        refuse_not_positive(self, "gamma", "gradient_batches", "gradient_memory")

    def config_settings(self, adapter: Adapter) -> dict[str, Any]:
        """LoRA's, at the scaling α/√r."""
        return super().config_settings(adapter) | {"use_rslora": True}

    @torch.no_grad()
    def initialise(self, model: nn.Module, adapter: Adapter, start: Start) -> None:
        """Along the gradient, or where this run's folder says that it started.

        Raises:
            NALoRAError: a quantised base, a rank above half a layer's own, or a layer without a gradient.
        """
        moved_base.refuse_immovable_base(model, self.name)
        _refuse_rank_above_half(model, adapter.rank)
        if moved_base.restore(model, start.folder):
            return

        def vectors(_: str, layer: Any, gradient: Tensor) -> dict[str, Tensor]:
            left, right = leading_singular_vectors(gradient, 2 * adapter.rank, start.seed)
            return {"left": left, "right": right}

        key = {"method": self.name, "rank": adapter.rank, "seed": start.seed}
        found = reduce_mean_gradients(model, start, self.gradient_batches, vectors, key, self.gradient_memory)
        for name, layer in lora_layers(model):
            a, b = stable_factors(found[name]["left"], found[name]["right"], self.gamma)
            layer.lora_A[ADAPTER].weight.copy_(a)
            layer.lora_B[ADAPTER].weight.copy_(b)
        moved_base.take_off_base(model)
        moved_base.keep(model, start.folder)

    def save(self, model: nn.Module, folder: Path) -> None:
        """Relative to the stock base, of rank 2r."""
        moved_base.save_relative_to_stock(model, folder)


def stable_factors(left: Tensor, right: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """A (r × n) and B (m × r) from the first 2r singular vectors, as columns of U (m × 2r) and V (n × 2r)."""
    rank = left.shape[1] // 2
    size = left.shape[0] ** 0.25 / gamma**0.5
    return size * right[:, :rank].T, size * left[:, rank:]


def leading_singular_vectors(matrix: Tensor, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The first `count` left and right singular vectors, as columns.

    Exact up to 1024 rows or columns. Above, by subspace iteration on twice as many directions (4r for LoRA-GA's 2r)
    from a start drawn with `seed`: 24 rounds, orthogonalised at each. Where the k-th singular value falls as k^-½ or
    faster, LoRA-GA's first step is then within 3e-6 of the exact one's in float32; where singular values are almost
    equal no vector is more leading than another, and the step still has 99 % of the exact one's size.
    """
    if min(matrix.shape) <= max(EXACT, 2 * count):
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        return left[:, :count], right[:count].T
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(matrix.shape[1], 2 * count, generator=generator, dtype=matrix.dtype)
    span = drawn.to(matrix.device)
    for _ in range(_ITERATIONS):
        span = torch.linalg.qr(matrix.T @ torch.linalg.qr(matrix @ span).Q).Q
    left, _, right = torch.linalg.svd(matrix @ span, full_matrices=False)
    return left[:, :count], (span @ right.T)[:, :count]


def _refuse_rank_above_half(model: nn.Module, rank: int) -> None:
    largest = {name: min(layer.in_features, layer.out_features) // 2 for name, layer in lora_layers(model)}
    small = {name: layer for name, layer in lora_layers(model) if rank > largest[name]}
    if small:
        name, layer = next(iter(small.items()))
        raise NALoRAError(
            f"rank: {rank}",
            found=f"{name}, a layer of {layer.out_features} × {layer.in_features}",
            expected=f"a rank of at most {largest[name]}: LoRA-GA starts from 2r singular vectors",
            fix=f"lower rank, or {leave_out(model, small)}",
        )


METHODS = (LoRAGA,)
