"""Where a model computes z and u, by layer names that are the same in its base, adapted and fine-tuned form."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nalora.activations import Activation
from nalora.control.blocks import find_blocks
from nalora.distributed.wrappers import base_of
from nalora.errors import NALoRAError
from nalora.models.target_modules import resolve_targets


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
    """Return the FFN blocks of a model in order, without experts, found on a copy without weights.

    Raises:
        NALoRAError: the model has none.
    """
    adapted = _with_all_layers_adapted(model)
    base = base_of(adapted)
    prefix = next((f"{name}." for name, module in adapted.named_modules() if module is base and name), "")
    sites = tuple(
        GateSite(
            name=block.name.removeprefix(prefix),
            activation=block.activation,
            width=block.width,
            gate=block.gate.name.removeprefix(prefix),
            gate_rows=block.gate.rows,
            up=block.up.name.removeprefix(prefix) if block.up else None,
            up_rows=block.up.rows if block.up else slice(None),
            up_offset=block.up_offset,
        )
        for block in find_blocks(adapted).blocks
        if block.experts is None
    )
    if not sites:
        raise NALoRAError(
            type(base_of(model)).__name__,
            found="no FFN block outside of experts",
            expected="a model with an activation between linear layers: the gates of experts are not diagnosed",
            fix="see `nalora inspect`",
        )
    return sites


def _with_all_layers_adapted(model: nn.Module) -> nn.Module:
    """Return a copy on the meta device with an adapter on every linear layer: `find_blocks` needs adapted blocks."""
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
        tensors = [*base.parameters(), *base.buffers()]
        skeleton = copy.deepcopy(base, {id(tensor): _without_data(tensor) for tensor in tensors})
        targets = [name for name, module in skeleton.named_modules() if isinstance(module, nn.Linear)]
    settings = peft.LoraConfig(r=1, target_modules=targets)
    resolve_targets(settings, skeleton)
    with warnings.catch_warnings():
        # PEFT warns about GPT-2's transposed layers, which are not computed here.
        warnings.simplefilter("ignore")
        wrapped: nn.Module = peft.get_peft_model(skeleton, settings, low_cpu_mem_usage=True)
    return wrapped


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
