"""LoRA-GA: adapters start along the leading singular vectors of the gradient.

For the mean gradient Ḡ = U·S·Vᵀ (m outputs), A = (m^¼/√γ)·V[1:r]ᵀ and B = (m^¼/√γ)·U[r+1:2r]; W₀ − s·B·A is frozen.
The first SGD step then changes W along the best approximation of Ḡ of rank 2r.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nalora.methods import initial_factors
from nalora.methods.gradients import reduce_mean_gradients
from nalora.methods.lora import LoRA, check_rank, lora_layers
from nalora.methods.method import Adapter, Start, check_positive
from nalora.models.peft_names import ADAPTER

# The decomposition is exact up to this number of rows or columns.
EXACT = 1024
_ITERATIONS = 24


@dataclass(frozen=True)
class LoRAGA(LoRA):
    """LoRA at the scaling α/√r whose adapters start from the gradient and are subtracted from the base.

    The authors recommend to tune the learning rate as for full fine-tuning. The initial adapter is not small: ‖s·B·A‖
    is 0.1–0.9 of ‖W₀‖ over SmolLM2-135M's layers at r = 8, α = 16, and more where weights are small. In float32 the
    subtraction is reversible (logits moved by 3e-6 there), in bfloat16 only up to rounding.

    Args:
        gamma: γ; larger values give a smaller start.
        gradient_batches: number of batches, of `batch_size` rows each, for the mean gradient.
        gradient_memory: GiB of gradients held at a time.
    """

    name = "lora-ga"
    title = "LoRA-GA"
    reference = "Wang et al. 2024, arXiv 2407.05000"
    peft_switches = ("use_rslora",)

    gamma: float = 16.0
    gradient_batches: int = 8
    gradient_memory: float = 4.0

    def __post_init__(self) -> None:
        check_positive(self, "gamma", "gradient_batches", "gradient_memory")

    @torch.no_grad()
    def initialise(self, model: nn.Module, adapter: Adapter, start: Start) -> None:
        """Set the adapters from the gradient, or restore the start of a resumed run.

        Raises NALoRAError for a quantised base, a rank above half of a layer's dimensions, or a missing gradient.
        """
        initial_factors.check_movable_base(model, self.name)
        check_rank(model, 2, ": LoRA-GA starts from 2r singular vectors")
        if initial_factors.restore(model, start.folder):
            return

        def vectors(_: str, layer: Any, gradient: Tensor) -> dict[str, Tensor]:
            left, right = leading_singular_vectors(gradient, 2 * adapter.rank, start.seed)
            return {"left": left, "right": right}

        key = {"method": self.name, "rank": adapter.rank, "seed": start.seed}
        reduced = reduce_mean_gradients(model, start, self.gradient_batches, vectors, key, self.gradient_memory)
        for name, layer in lora_layers(model):
            a, b = stable_factors(reduced[name]["left"], reduced[name]["right"], self.gamma)
            layer.lora_A[ADAPTER].weight.copy_(a)
            layer.lora_B[ADAPTER].weight.copy_(b)
        initial_factors.subtract_from_base(model)
        initial_factors.keep(model, start.folder)

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write an adapter of rank 2r for the stock base."""
        initial_factors.save_relative_to_stock(model, folder)


def stable_factors(left: Tensor, right: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Return A (r × n) and B (m × r) from the first 2r singular vectors, the columns of U (m × 2r) and V (n × 2r)."""
    rank = left.shape[1] // 2
    size = left.shape[0] ** 0.25 / gamma**0.5
    return size * right[:, :rank].T, size * left[:, rank:]


def leading_singular_vectors(matrix: Tensor, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the first `count` left and right singular vectors, as columns.

    Exact up to 1024 rows or columns. Above, by subspace iteration on twice as many directions (4r for LoRA-GA's 2r)
    from a random start with `seed`: 24 iterations, orthogonalised at each. Where the k-th singular value falls as k^-½
    or faster, LoRA-GA's first step is then within 3e-6 of the exact one's in float32; for almost equal singular values
    the vectors are not unique, and the step still has 99 % of the exact one's size.
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


METHODS = (LoRAGA,)
