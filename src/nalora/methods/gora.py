"""GoRA: the rank of each layer follows the importance of its gradient, and the start is a step along the gradient.

Importance I = mean|W ⊙ Ḡ| of the mean gradient Ḡ; the parameter budget of rank r, Σ(m+n)·r, is divided in proportion.
A is random, and B = −(γ√n/α)·ḠAᵀ(AAᵀ + 1e-8·1)⁻¹ makes s·B·A the part of −γ·√(n/r)·Ḡ in the span of A's rows: in the
mean over random A, ‖s·B·A‖² = γ²·‖Ḡ‖². The base does not change, so it can be quantised.

The public code can weight the shares by √(m+n), off by default; here they are not weighted.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nalora.errors import NALoRAError
from nalora.methods import initial_factors
from nalora.methods.gradients import reduce_mean_gradients
from nalora.methods.initial_factors import Factors
from nalora.methods.lora import LoRA, lora_layers
from nalora.methods.lora_plus import LoRAPlus
from nalora.methods.method import Adapter, Start, check_positive
from nalora.models.peft_names import ADAPTER, in_base
from nalora.models.target_modules import resolve_targets

# In the run's folder: a resumed run uses these ranks and values, even without the cache of gradients.
START_FILE = "gora.safetensors"
_RIDGE = 1e-8

_log = logging.getLogger("nalora")


@dataclass(frozen=True)
class GoRA(LoRA):
    """LoRA at the scaling α/√rᵢ with a rank per layer, started from the gradient and trained with LoRA+.

    Args:
        gamma: γ; size of the initial step, in units of the gradient.
        gradient_batches: number of batches, of `batch_size` rows each, for the mean gradient (the authors use 64 for
            T5).
        min_rank: lowest rank of a layer.
        max_rank: highest rank of a layer.
        ratio: learning rate of B divided by that of A, as in LoRA+.
        gradient_memory: GiB of gradients held at a time.
    """

    name = "gora"
    title = "GoRA"
    reference = "He et al. 2025, arXiv 2502.12171"
    peft_switches = ("use_rslora",)

    gamma: float = 5e-2
    gradient_batches: int = 32
    min_rank: int = 4
    max_rank: int = 32
    ratio: float = 16.0
    gradient_memory: float = 4.0

    def __post_init__(self) -> None:
        check_positive(self, "gamma", "gradient_batches", "min_rank", "ratio", "gradient_memory")
        if self.min_rank > self.max_rank:
            raise NALoRAError(
                f"min_rank: {self.min_rank}",
                found=f"max_rank: {self.max_rank}",
                expected="a rank that is no lower",
                fix="lower min_rank or raise max_rank",
            )

    def prepare(self, model: nn.Module, adapter: Adapter, start: Start) -> nn.Module:
        """Add adapters with ranks and values from the gradient, or from this run's folder.

        Raises NALoRAError if a layer has no gradient or if the folder has the start of another model.
        """
        import peft

        file = start.folder and start.folder / START_FILE
        factors = initial_factors.load(file)
        if factors is None:
            # These adapters show which layers PEFT adapts and are removed before they are used.
            adapted: Any = super().prepare(model, adapter, start)
            factors = self.first_factors(adapted, adapter, start)
            model = adapted.unload()
        ranks = {name.removesuffix(".lora_A"): len(a) for name, a in factors.items() if name.endswith(".lora_A")}
        config = peft.LoraConfig(**self.config_settings(adapter), rank_pattern=rank_pattern(ranks))
        resolve_targets(config, model)
        wrapped: nn.Module = peft.get_peft_model(model, config)
        initial_factors.assign(wrapped, factors, START_FILE)
        initial_factors.save(factors, file)
        _log_ranks(wrapped, adapter)
        return wrapped

    def first_factors(self, model: nn.Module, adapter: Adapter, start: Start) -> Factors:
        """Return the initial A and B of each layer in its rank.

        The gradients are computed once, and ranks are known only after all of them. So each Ḡ is multiplied by as many
        rows as A can have, and a layer of rank r uses the first r.
        """
        layers = dict(lora_layers(model))
        limit = {name: min(self.max_rank, layer.in_features, layer.out_features) for name, layer in layers.items()}

        def reduce(name: str, layer: Any, gradient: Tensor) -> dict[str, Tensor]:
            rows = drawn_rows(name, limit[name], layer.in_features, start.seed).to(gradient)
            return {"importance": (_weight(layer).to(gradient) * gradient).abs().mean(), "onto": gradient @ rows.T}

        key = {"method": self.name, "max_rank": self.max_rank, "seed": start.seed}
        reduced = reduce_mean_gradients(model, start, self.gradient_batches, reduce, key, self.gradient_memory)
        ranks = shared_ranks(
            {name: float(reduced[name]["importance"]) for name in layers},
            {name: layer.in_features + layer.out_features for name, layer in layers.items()},
            adapter.rank,
        )
        factors: Factors = {}
        for name, layer in layers.items():
            rank = min(max(ranks[name], self.min_rank), limit[name])
            a = drawn_rows(name, limit[name], layer.in_features, start.seed)[:rank].contiguous()
            factors[f"{name}.lora_A"] = a
            factors[f"{name}.lora_B"] = compressed_step(reduced[name]["onto"][:, :rank], a, self.gamma, adapter.alpha)
        return factors

    def optimizer(self, trainer: Any) -> Optimizer | None:
        """Return LoRA+'s optimizer."""
        return LoRAPlus(ratio=self.ratio).optimizer(trainer)


def shared_ranks(importance: Mapping[str, float], sizes: Mapping[str, int], reference_rank: int) -> dict[str, int]:
    """Return ⌊round(budget·aᵢ)/(mᵢ+nᵢ)⌋ with the shares a = I/ΣI and the budget Σ(m+n)·r; `sizes` are m+n."""
    budget = reference_rank * sum(sizes.values())
    total = math.fsum(importance.values())
    return {name: round(budget * value / total) // sizes[name] for name, value in importance.items()}


def drawn_rows(name: str, rows: int, columns: int, seed: int) -> Tensor:
    """Return a Kaiming-uniform A as in LoRA, the same for the same layer name and seed."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    drawn = torch.empty(rows, columns)
    nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
    return drawn


def compressed_step(onto: Tensor, a: Tensor, gamma: float, alpha: float) -> Tensor:
    """Return B = −(γ√n/α)·ḠAᵀ(AAᵀ + 1e-8·1)⁻¹ from ḠAᵀ (m × r) and A (r × n), solved in float64."""
    rows = a.double()
    ridged = rows @ rows.T + _RIDGE * torch.eye(a.shape[0], dtype=torch.float64)
    solved: Tensor = torch.linalg.solve(ridged, onto.double(), left=False)
    return (-(gamma * math.sqrt(a.shape[1]) / alpha) * solved).to(onto.dtype)


def rank_pattern(ranks: Mapping[str, int]) -> dict[str, int]:
    """Return PEFT's rank_pattern, with a regular expression for the whole name of each layer.

    A layer that is adapted as a parameter has the name of its weight.
    """
    return {rf"^{re.escape(in_base(name))}(\.weight)?": rank for name, rank in ranks.items()}


def _weight(layer: Any) -> Tensor:
    """Return the dequantised weight, outputs × inputs."""
    from peft.utils.integrations import dequantize_module_weight

    weight: Tensor = dequantize_module_weight(layer.get_base_layer()).detach()
    return weight.T if layer.fan_in_fan_out else weight


def _log_ranks(model: nn.Module, adapter: Adapter) -> None:
    layers = [(layer.r[ADAPTER], layer.in_features + layer.out_features) for _, layer in lora_layers(model)]
    ranks = [rank for rank, _ in layers]
    used, budget = sum(rank * size for rank, size in layers), adapter.rank * sum(size for _, size in layers)
    share = f"{used} parameters: {used / budget:.3f} of the {budget} of rank {adapter.rank}"
    _log.info("nalora: GoRA has ranks %d to %d, %s", min(ranks), max(ranks), share)


METHODS = (GoRA,)
