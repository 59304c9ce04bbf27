"""LoRA: W₀ + (α/r)·B·A with A drawn and B = 0."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nalora.distributed.wrappers import base_of
from nalora.errors import NALoRAError
from nalora.methods.method import Adapter, Method, Start
from nalora.models.peft_names import in_base
from nalora.models.target_modules import linear_names, peft_error, resolve_targets, shortest_suffixes


@dataclass(frozen=True)
class LoRA(Method):
    """PEFT's LoRA, its adapters in float32 whatever the base is held in; other methods change where it starts."""

    name = "lora"
    title = "LoRA"
    reference = "Hu et al. 2021, arXiv 2106.09685"

    def prepare(self, model: nn.Module, adapter: Adapter, start: Start) -> nn.Module:
        """Freeze the base and add one adapter to each target layer, the same for the same seed.

        Raises:
            NALoRAError: no such layers, or a rank above theirs.
        """
        import peft

        torch.manual_seed(start.seed)
        config = self.config(adapter, start)
        resolve_targets(config, model)
        names = linear_names(model)
        try:
            wrapped: nn.Module = peft.get_peft_model(model, config)
        except ValueError as error:  # how PEFT says that it found no layer, or none that it can adapt
            raise peft_error(f"target_modules: {adapter.target_modules}", model, names, error) from error
        refuse_rank_above_dimension(wrapped)
        self.initialise(wrapped, adapter, start)
        return wrapped

    def config(self, adapter: Adapter, start: Start) -> Any:
        """PEFT's configuration."""
        import peft

        return peft.LoraConfig(**self.config_settings(adapter))

    def config_settings(self, adapter: Adapter) -> dict[str, Any]:
        """What PEFT's configuration is made from."""
        return {
            "r": adapter.rank,
            "lora_alpha": adapter.alpha,
            "lora_dropout": adapter.dropout,
            "target_modules": adapter.target_modules,
        }

    def initialise(self, model: nn.Module, adapter: Adapter, start: Start) -> None:
        """Where the adapters start, if not as PEFT left them."""


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every layer with an adapter, by name."""
    from peft.tuners.lora.layer import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def refuse_rank_above_dimension(model: nn.Module) -> None:
    """A rank above a layer's own is never meant, and no decomposition of its weight has so many directions."""
    small = {
        name: layer
        for name, layer in lora_layers(model)
        if max(layer.r.values()) > min(layer.in_features, layer.out_features)
    }
    if small:
        name, layer = next(iter(small.items()))
        raise NALoRAError(
            f"rank: {max(layer.r.values())}",
            found=f"{name}, a layer of {layer.out_features} × {layer.in_features}",
            expected=f"a rank of at most {min(layer.in_features, layer.out_features)}",
            fix=f"lower rank, or {leave_out(model, small)}",
        )


def leave_out(model: nn.Module, refused: Collection[str]) -> str:
    """The advice to adapt the other linear layers alone, with the names that do so.

    Args:
        model: wrapped by PEFT.
        refused: the layers to leave out, by their names in it.
    """
    from nalora.control.replica import feature_sizes

    others = [in_base(name) for name, layer in lora_layers(model) if name not in refused and feature_sizes(layer)]
    if not others:
        return "use another method"
    return f"leave such layers out, with target_modules: [{', '.join(shortest_suffixes(others, base_of(model)))}]"


METHODS = (LoRA,)
