"""Where z and u come out of a model, by names that hold for its base, its adapted and its fine-tuned form alike."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nalora.activations import Activation
from nalora.control.blocks import FFNBlock, find_blocks
from nalora.distributed.wrappers import base_of
from nalora.errors import NALoRAError


@dataclass(frozen=True)
class GateSite:
    """One FFN block: which rows of which layer's output are z and u. Layers are named as in the base model."""

    name: str
    activation: Activation
    width: int
    gate: str
    gate_rows: slice
    up: str | None
    up_rows: slice
    up_offset: float

    @property
    def thresholds(self) -> tuple[float, float] | None:
        """The characteristic points that bound the responsive regime; None for an activation without regimes."""
        return self.activation.characteristic_points


def find_sites(model: nn.Module) -> tuple[GateSite, ...]:
    """Every FFN block of `model` in its order, adapted or not; sought on a copy without weights.

    Raises:
        NALoRAError: no FFN block in it.
    """
    adapted = _all_linear_layers_adapted(model)
    found = find_blocks(adapted).blocks
    if not found:
        raise NALoRAError(
            type(base_of(model)).__name__,
            found="no FFN block",
            expected="a model with an activation between linear layers",
            fix="see `nalora inspect`",
        )
    start = _prefix(adapted)
    return tuple(_site(block, start) for block in found)


def _site(block: FFNBlock, start: str) -> GateSite:
    def named(name: str) -> str:
        return name.removeprefix(start)

    up = block.up
    return GateSite(
        name=named(block.name),
        activation=block.activation,
        width=block.width,
        gate=named(block.gate.name),
        gate_rows=block.gate.rows,
        up=named(up.name) if up else None,
        up_rows=up.rows if up else slice(None),
        up_offset=block.up_offset,
    )


def _prefix(model: nn.Module) -> str:
    base = base_of(model)
    return next((f"{name}." for name, module in model.named_modules() if module is base and name), "")


def _all_linear_layers_adapted(model: nn.Module) -> nn.Module:
    """A copy on the meta device with an adapter on every linear layer: `find_blocks` looks at adapted blocks alone."""
    import peft
    from peft.tuners.lora.layer import LoraLayer
    from transformers import PreTrainedModel

    base: Any = base_of(model)
    targets: Any = "all-linear"
    if isinstance(base, PreTrainedModel):
        config = copy.deepcopy(base.config)
        # A quantised model has the same FFNs as a dense one.
        vars(config).pop("quantization_config", None)
        with torch.device("meta"):
            skeleton = type(base)(config)
    elif any(isinstance(module, LoraLayer) for module in model.modules()):
        return model
    else:
        held = [*base.parameters(), *base.buffers()]
        skeleton = copy.deepcopy(base, {id(each): _weightless(each) for each in held})
        targets = [name for name, module in skeleton.named_modules() if isinstance(module, nn.Linear)]
    settings = peft.LoraConfig(r=1, target_modules=targets)
    with warnings.catch_warnings():
        # PEFT tells of GPT-2's transposed layers; here nobody computes with them.
        warnings.simplefilter("ignore")
        wrapped: nn.Module = peft.get_peft_model(skeleton, settings, low_cpu_mem_usage=True)
    return wrapped


def _weightless(tensor: torch.Tensor) -> torch.Tensor:
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
