"""LoRA, W₀ + s·B·A with random A and B = 0, and the variants that PEFT's configuration switches on.

rsLoRA uses s = α/√r instead of α/r, so that updates do not shrink as the rank grows. DoRA computes
W = μ ⊙ (W₀ + s·B·A)/‖W₀ + s·B·A‖ per row, with a trained magnitude μ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from nalora.distributed.wrappers import base_of
from nalora.errors import NALoRAError
from nalora.methods.method import Adapter, Method, Start
from nalora.models.peft_names import in_base
from nalora.models.target_modules import linear_names, peft_error, resolve_targets, shortest_suffixes


@dataclass(frozen=True)
class LoRA(Method):
    """PEFT's LoRA, with adapters in float32 whatever the dtype of the base."""

    name = "lora"
    title = "LoRA"
    reference = "Hu et al. 2021, arXiv 2106.09685"
    # Fields of peft.LoraConfig that are set to True.
    peft_switches: ClassVar[tuple[str, ...]] = ()

    def prepare(self, model: nn.Module, adapter: Adapter, start: Start) -> nn.Module:
        """Freeze the base and add one adapter to each target layer; the same seed gives the same adapters.

        Raises NALoRAError if there are no such layers or if the rank exceeds a layer's dimensions.
        """
        import peft

        torch.manual_seed(start.seed)
        config = self.config(adapter, start)
        resolve_targets(config, model)
        names = linear_names(model)
        try:
            wrapped: nn.Module = peft.get_peft_model(model, config)
        except ValueError as error:  # PEFT found no layer, or none that it can adapt
            raise peft_error(f"target_modules: {adapter.target_modules}", model, names, error) from error
        check_rank(wrapped)
        self.initialise(wrapped, adapter, start)
        return wrapped

    def config(self, adapter: Adapter, start: Start) -> Any:
        """Return PEFT's configuration."""
        import peft

        return peft.LoraConfig(**self.config_settings(adapter))

    def config_settings(self, adapter: Adapter) -> dict[str, Any]:
        """Return the arguments of PEFT's configuration."""
        return {
            "r": adapter.rank,
            "lora_alpha": adapter.alpha,
            "lora_dropout": adapter.dropout,
            "target_modules": adapter.target_modules,
            "target_parameters": adapter.target_parameters,
        } | dict.fromkeys(self.peft_switches, True)

    def initialise(self, model: nn.Module, adapter: Adapter, start: Start) -> None:
        """Change the initial values of the adapters; LoRA keeps PEFT's."""


@dataclass(frozen=True)
class RsLoRA(LoRA):
    """At r = 8 and α = 16, s is 5.66 instead of LoRA's 2: tune the learning rate separately."""

    name = "rslora"
    title = "rsLoRA"
    reference = "Kalajdzievski 2023, arXiv 2312.03732"
    peft_switches = ("use_rslora",)


@dataclass(frozen=True)
class DoRA(LoRA):
    """μ starts at ‖W₀‖; the norm in the denominator is not differentiated."""

    name = "dora"
    title = "DoRA"
    reference = "Liu et al. 2024, arXiv 2402.09353"
    peft_switches = ("use_dora",)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every layer with an adapter, with its name."""
    from peft.tuners.lora.layer import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def check_rank(model: nn.Module, directions: int = 1, reason: str = "") -> None:
    """Raise NALoRAError if a layer has fewer than `directions` × rank singular vectors."""
    small = {
        name: layer
        for name, layer in lora_layers(model)
        if directions * max(layer.r.values()) > min(layer.in_features, layer.out_features)
    }
    for name, layer in small.items():
        raise NALoRAError(
            f"rank: {max(layer.r.values())}",
            found=f"{name}, a layer of {layer.out_features} × {layer.in_features}",
            expected=f"a rank of at most {min(layer.in_features, layer.out_features) // directions}{reason}",
            fix=f"lower rank, or {leave_out(model, small)}",
        )


def leave_out(model: nn.Module, unsuitable: Collection[str]) -> str:
    """Return the advice to adapt only the linear layers of a PEFT model that are not `unsuitable`, by name."""
    from nalora.control.replica import feature_sizes

    others = [in_base(name) for name, layer in lora_layers(model) if name not in unsuitable and feature_sizes(layer)]
    if not others:
        return "use another method"
    return f"leave such layers out, with target_modules: [{', '.join(shortest_suffixes(others, base_of(model)))}]"


METHODS = (LoRA, RsLoRA, DoRA)
