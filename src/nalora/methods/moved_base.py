"""Starts that move the base: W₀ − s·B₀·A₀ is frozen, so that W₀ is what the model computes at the first step.

PiSSA and LoRA-GA start with adapters that are not zero, and take them off the base. The base of everybody else is the
stock one, so the adapter is saved relative to that: s·(B·A − B₀·A₀) is an ordinary adapter of rank 2r.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nalora.errors import NALoRAError
from nalora.methods.lora import lora_layers
from nalora.processes import is_first_process

# In the run's folder: a resumed run starts from these very numbers, not from another decomposition.
START_FILE = "start.safetensors"
_KEPT = "_nalora_start"
_ADAPTER = "default"

Factors = dict[str, Tensor]


def refuse_quantised_base(model: nn.Module, method: str) -> None:
    """A base in 4 or 8 bits cannot take a small change.

    Raises:
        NALoRAError: a base that is quantised.
    """
    for name, layer in lora_layers(model):
        if not layer.get_base_layer().weight.is_floating_point():
            raise NALoRAError(
                f"method {method!r}",
                found=f"{name}, whose weights are quantised",
                expected="a base in 16 or 32 bits: the start is taken off its weights",
                fix="leave quantise out, or use a method that leaves the base as it is",
            )


def factors(model: nn.Module) -> Factors:
    """A and B of every layer as they are now, on the CPU."""
    return {
        f"{name}.{factor}": getattr(layer, factor)[_ADAPTER].weight.detach().to("cpu", copy=True)
        for name, layer in lora_layers(model)
        for factor in ("lora_A", "lora_B")
    }


@torch.no_grad()
def take_off_base(model: nn.Module) -> None:
    """W₀ ← W₀ − s·B·A in float32, for the adapters as they are now."""
    for _, layer in lora_layers(model):
        weight = layer.get_base_layer().weight
        a, b = (getattr(layer, factor)[_ADAPTER].weight.float() for factor in ("lora_A", "lora_B"))
        product = (layer.scaling[_ADAPTER] * b) @ a
        weight.copy_(weight.float() - (product.T if layer.fan_in_fan_out else product))


def keep(model: nn.Module, folder: Path | None) -> None:
    """Remember where the adapters started, in the run's folder too where there is one."""
    started = factors(model)
    setattr(model, _KEPT, started)
    if folder is not None and is_first_process():
        partial = folder / f".{START_FILE}"
        save_file({name: each.contiguous() for name, each in started.items()}, partial)
        partial.replace(folder / START_FILE)


@torch.no_grad()
def restore(model: nn.Module, folder: Path | None) -> bool:
    """Put adapters and base where `keep` found them; False where nothing was kept.

    Raises:
        NALoRAError: the start of another model was kept.
    """
    if folder is None or not (folder / START_FILE).is_file():
        return False
    started = load_file(folder / START_FILE)
    now = factors(model)
    if {n: t.shape for n, t in started.items()} != {n: t.shape for n, t in now.items()}:
        raise NALoRAError(
            str(folder / START_FILE),
            found="the start of another model or adapter",
            expected="this run's",
            fix="remove it",
        )
    for name, layer in lora_layers(model):
        for factor in ("lora_A", "lora_B"):
            getattr(layer, factor)[_ADAPTER].weight.copy_(started[f"{name}.{factor}"])
    take_off_base(model)
    setattr(model, _KEPT, started)
    return True


def save_relative_to_stock(model: nn.Module, folder: Path) -> None:
    """Write s·(B·A − B₀·A₀) as an adapter of rank 2r: A′ = [A; A₀], B′ = [B, −B₀]."""
    from peft.utils import get_peft_model_state_dict

    wrapped: Any = model
    started: Factors = getattr(model, _KEPT)
    tensors = {name: each.detach().cpu() for name, each in get_peft_model_state_dict(wrapped).items()}
    for name, _ in lora_layers(model):
        for factor, dim in (("lora_A", 0), ("lora_B", 1)):
            at_start = started[f"{name}.{factor}"]
            key = f"{name}.{factor}.weight"
            tensors[key] = torch.cat([tensors[key], at_start if dim == 0 else -at_start], dim).contiguous()
    config = wrapped.peft_config[_ADAPTER]
    scaling = {layer.scaling[_ADAPTER] for _, layer in lora_layers(model)}
    if len(scaling) != 1:
        raise AssertionError("starts that move the base have one LoRA scaling")
    doubled = dataclasses.replace(
        config, r=2 * config.r, lora_alpha=2 * config.r * scaling.pop(), use_rslora=False, init_lora_weights=True,
        inference_mode=True,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    doubled.save_pretrained(folder)
