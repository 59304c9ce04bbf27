"""GoRA: each layer's rank by how much its gradient says, and a start that takes the gradient's step.

Importance I = mean|W ⊙ Ḡ| of the mean gradient Ḡ; the parameters that rank r would cost, Σ(m+n)·r, are shared by it.
A is drawn, and B = −(γ√n/α)·ḠAᵀ(AAᵀ + 1e-8·1)⁻¹ makes s·B·A the part of −γ·√(n/r)·Ḡ that A's rows can hold: in the
mean over draws of A, ‖s·B·A‖² = γ²·‖Ḡ‖². The base stays as it is, so it may be quantised.

The public code can weight the shares by √(m+n), off by default; here they are not weighted.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from nalora.distributed.processes import is_first_process
from nalora.errors import NALoRAError
from nalora.files import atomic
from nalora.methods.gradients import reduce_mean_gradients, refuse_not_positive
from nalora.methods.lora import LoRA, lora_layers
from nalora.methods.method import Adapter, Start
from nalora.models.peft_names import ADAPTER, in_base
from nalora.models.target_modules import resolve_targets

# In the run's folder: a resumed run has these ranks and numbers, wherever the cache of gradients went.
START_FILE = "gora.safetensors"
_RIDGE = 1e-8

_log = logging.getLogger("nalora")


@dataclass(frozen=True)
class GoRA(LoRA):
    """LoRA at the scaling α/√rᵢ with a rank for each layer, started from the gradient, trained as LoRA+ is.

    Args:
        gamma: γ; how large a step the start is, in units of the gradient.
        gradient_batches: over how many batches of `batch_size` rows the gradient is taken (its authors take 64 for T5).
        min_rank: no layer gets less.
        max_rank: nor more.
        ratio: LoRA+'s: the learning rate of B over that of A.
        gradient_memory: GiB of gradients at a time.
    """

    name = "gora"
    title = "GoRA"
    reference = "He et al. 2025, arXiv 2502.12171"

    gamma: float = 5e-2
    gradient_batches: int = 32
    min_rank: int = 4
    max_rank: int = 32
    ratio: float = 16.0
    gradient_memory: float = 4.0

    def __post_init__(self) -> None:
        refuse_not_positive(self, "gamma", "gradient_batches", "min_rank", "ratio", "gradient_memory")
        if self.min_rank > self.max_rank:
            raise NALoRAError(
                f"min_rank: {self.min_rank}",
                found=f"max_rank: {self.max_rank}",
                expected="a rank that is no lower",
                fix="lower min_rank or raise max_rank",
            )

    def prepare(self, model: nn.Module, adapter: Adapter, start: Start) -> nn.Module:
        """Adapters of the rank and at the place that the gradient says, or that this run's folder says.

        Raises:
            NALoRAError: a layer without a gradient; a folder with another model's start.
        """
        import peft

        factors = _kept(start.folder)
        if factors is None:
            # Which layers the adapters are on is PEFT's to say: these adapters are gone before they have acted.
            asked: Any = super().prepare(model, adapter, start)
            factors = self.first_factors(asked, adapter, start)
            model = asked.unload()
        pattern = rank_pattern({name: a.shape[0] for name, (a, _) in factors.items()})
        config = peft.LoraConfig(**self.config_settings(adapter), rank_pattern=pattern)
        resolve_targets(config, model)
        wrapped: nn.Module = peft.get_peft_model(model, config)
        _put(wrapped, factors)
        _keep(factors, start.folder)
        _report(wrapped, adapter)
        return wrapped

    def config_settings(self, adapter: Adapter) -> dict[str, Any]:
        """LoRA's, at the scaling α/√r."""
        return super().config_settings(adapter) | {"use_rslora": True}

    def first_factors(self, model: nn.Module, adapter: Adapter, start: Start) -> dict[str, tuple[Tensor, Tensor]]:
        """A and B of each layer, in its rank.

        The gradients are gone through once: ranks are known only when all of them were seen, so Ḡ is kept against
        the most rows that A may have, and a layer of rank r uses the first r.
        """
        layers = dict(lora_layers(model))
        most = {name: min(self.max_rank, each.in_features, each.out_features) for name, each in layers.items()}

        def reduce(name: str, layer: Any, gradient: Tensor) -> dict[str, Tensor]:
            rows = drawn_rows(name, most[name], layer.in_features, start.seed).to(gradient)
            return {"importance": (_weight(layer).to(gradient) * gradient).abs().mean(), "onto": gradient @ rows.T}

        key = {"method": self.name, "max_rank": self.max_rank, "seed": start.seed}
        found = reduce_mean_gradients(model, start, self.gradient_batches, reduce, key, self.gradient_memory)
        ranks = shared_ranks(
            {name: float(found[name]["importance"]) for name in layers},
            {name: each.in_features + each.out_features for name, each in layers.items()},
            adapter.rank,
        )
        factors = {}
        for name, layer in layers.items():
            rank = min(max(ranks[name], self.min_rank), most[name])
            a = drawn_rows(name, most[name], layer.in_features, start.seed)[:rank].contiguous()
            factors[name] = (a, compressed_step(found[name]["onto"][:, :rank], a, self.gamma, adapter.alpha))
        return factors

    def optimizer(self, trainer: Any) -> Optimizer | None:
        """LoRA+'s."""
        from nalora.methods.lora_plus import lora_plus_optimizer

        return lora_plus_optimizer(trainer, self.ratio)


def shared_ranks(importance: Mapping[str, float], sizes: Mapping[str, int], reference_rank: int) -> dict[str, int]:
    """⌊round(budget·aᵢ)/(mᵢ+nᵢ)⌋ with the shares a = I/ΣI and the budget Σ(m+n)·r; `sizes` are m+n."""
    budget = reference_rank * sum(sizes.values())
    total = math.fsum(importance.values())
    return {name: round(budget * each / total) // sizes[name] for name, each in importance.items()}


def drawn_rows(name: str, rows: int, columns: int, seed: int) -> Tensor:
    """A: Kaiming-uniform as LoRA's, the same for a layer's name and a seed."""
    of_name = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(of_name, "little"))
    drawn = torch.empty(rows, columns)
    nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
    return drawn


def compressed_step(onto: Tensor, a: Tensor, gamma: float, alpha: float) -> Tensor:
    """B = −(γ√n/α)·ḠAᵀ(AAᵀ + 1e-8·1)⁻¹, from ḠAᵀ (m × r) and A (r × n); solved in float64, for r is small."""
    rows = a.double()
    ridged = rows @ rows.T + _RIDGE * torch.eye(a.shape[0], dtype=torch.float64)
    solved: Tensor = torch.linalg.solve(ridged, onto.double(), left=False)
    return (-(gamma * math.sqrt(a.shape[1]) / alpha) * solved).to(onto.dtype)


def rank_pattern(ranks: Mapping[str, int]) -> dict[str, int]:
    """PEFT's: each key a regular expression that this layer's whole name matches, and no other's ending.

    A layer that is adapted as a parameter goes by the name of its weight.
    """
    return {rf"^{re.escape(in_base(name))}(\.weight)?": rank for name, rank in ranks.items()}


def _weight(layer: Any) -> Tensor:
    """Outputs × inputs, as numbers even where the base is quantised."""
    from peft.utils.integrations import dequantize_module_weight

    weight: Tensor = dequantize_module_weight(layer.get_base_layer()).detach()
    return weight.T if layer.fan_in_fan_out else weight


@torch.no_grad()
def _put(model: nn.Module, factors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    layers = dict(lora_layers(model))
    given = {name: (a.shape, b.shape) for name, (a, b) in factors.items()}
    wanted = {name: tuple(_factor(each, f).shape for f in ("lora_A", "lora_B")) for name, each in layers.items()}
    if given != wanted:
        raise NALoRAError(
            START_FILE, found="the start of another model or adapter", expected="this run's", fix="remove it"
        )
    for name, layer in layers.items():
        for factor, value in zip(("lora_A", "lora_B"), factors[name], strict=True):
            _factor(layer, factor).copy_(value)


def _factor(layer: Any, factor: str) -> Tensor:
    weight: Tensor = getattr(layer, factor)[ADAPTER].weight
    return weight


def _kept(folder: Path | None) -> dict[str, tuple[Tensor, Tensor]] | None:
    if folder is None or not (folder / START_FILE).is_file():
        return None
    tensors = load_file(folder / START_FILE)
    names = [name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")]
    return {name: (tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"]) for name in names}


def _keep(factors: Mapping[str, tuple[Tensor, Tensor]], folder: Path | None) -> None:
    if folder is not None and is_first_process() and not (folder / START_FILE).is_file():
        tensors = {f"{n}.lora_{f}": t for n, ab in factors.items() for f, t in zip("AB", ab, strict=True)}
        atomic.save_tensors(folder / START_FILE, tensors)


def _report(model: nn.Module, adapter: Adapter) -> None:
    layers = [layer for _, layer in lora_layers(model)]
    ranks = [layer.r[ADAPTER] for layer in layers]
    spent = sum(rank * (each.in_features + each.out_features) for rank, each in zip(ranks, layers, strict=True))
    budget = adapter.rank * sum(each.in_features + each.out_features for each in layers)
    _log.info(
        "nalora: GoRA has ranks %d to %d, %d parameters: %.3f of the %d of rank %d",
        min(ranks), max(ranks), spent, spent / budget, budget, adapter.rank,
    )  # fmt: skip


METHODS = (GoRA,)
