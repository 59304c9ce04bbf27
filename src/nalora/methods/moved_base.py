"""Starts that move the base: W₀ − s·B₀·A₀ is frozen, so that W₀ is what the model computes at the first step.

PiSSA and LoRA-GA start with adapters that are not zero, and take them off the base. The base of everybody else is the
stock one, so the adapter is saved relative to that: s·(B·A − B₀·A₀) is an ordinary adapter of rank 2r.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from nalora.distributed.processes import is_first_process
from nalora.distributed.shards import full_tensor
from nalora.errors import NALoRAError
from nalora.files import atomic
from nalora.methods.lora import leave_out, lora_layers
from nalora.methods.saving import write_lora
from nalora.models.peft_names import ADAPTER

# In the run's folder: a resumed run starts from these very numbers, not from another decomposition.
START_FILE = "start.safetensors"
_KEPT = "_nalora_start"
_MOVABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Factors = dict[str, Tensor]


def refuse_immovable_base(model: nn.Module, method: str) -> None:
    """A base in 4 or 8 bits cannot take a small change, and one that another module also uses would change that too.

    Raises:
        NALoRAError: a base that cannot be moved.
    """
    from peft.tuners.lora.layer import Linear

    users = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    layers = dict(lora_layers(model))
    others = [name for name, layer in layers.items() if type(layer) is not Linear]
    for name, layer in layers.items():
        base = layer.get_base_layer()
        weight = getattr(base, "weight", None)
        if type(layer) is not Linear or weight is None or weight.dtype not in _MOVABLE:
            raise NALoRAError(
                f"method {method!r}",
                found=f"{name}, a {type(base).__name__}" + (f" in {weight.dtype}" if weight is not None else ""),
                expected="linear layers in 16 or 32 bits, not quantised: the start is taken off their weights",
                fix="use a method that moves no base (lora, rslora), or "
                + ("leave quantise out" if len(others) in (0, len(layers)) else leave_out(model, others)),
            )
        if users[id(weight)] > 1:
            raise NALoRAError(
                f"method {method!r}",
                found=f"{name}, whose weight is tied to another module's",
                expected="weights of their own: the start is taken off them",
                fix=leave_out(model, [name]),
            )


def factors(model: nn.Module) -> Factors:
    """A and B of every layer as they are now, whole on the CPU."""
    return {
        f"{name}.{factor}": full_tensor(getattr(layer, factor)[ADAPTER].weight.detach()).to("cpu", copy=True)
        for name, layer in lora_layers(model)
        for factor in ("lora_A", "lora_B")
    }


@torch.no_grad()
def take_off_base(model: nn.Module) -> None:
    """W₀ ← W₀ − s·B·A for the adapters as they are now, in their float32."""
    for _, layer in lora_layers(model):
        weight = layer.get_base_layer().weight
        a, b = (getattr(layer, factor)[ADAPTER].weight for factor in ("lora_A", "lora_B"))
        product = (layer.scaling[ADAPTER] * b) @ a
        weight.copy_(weight.to(product.dtype) - (product.T if layer.fan_in_fan_out else product))


def keep(model: nn.Module, folder: Path | None) -> None:
    """Remember where the adapters started, in the run's folder too where there is one."""
    started = factors(model)
    setattr(model, _KEPT, started)
    if folder is not None and is_first_process():
        atomic.save_tensors(folder / START_FILE, started)


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
            getattr(layer, factor)[ADAPTER].weight.copy_(started[f"{name}.{factor}"])
    take_off_base(model)
    setattr(model, _KEPT, started)
    return True


def save_relative_to_stock(model: nn.Module, folder: Path) -> None:
    """Write s·(B·A − B₀·A₀) as an adapter of rank 2r: A′ = [A; A₀], B′ = [B, −B₀]."""
    started: Factors = getattr(model, _KEPT)
    now = factors(model)
    tensors: Factors = {}
    for name, _ in lora_layers(model):
        a, b = f"{name}.lora_A", f"{name}.lora_B"
        tensors[f"{a}.weight"] = torch.cat([now[a], started[a]], 0)
        tensors[f"{b}.weight"] = torch.cat([now[b], -started[b]], 1)
    ((rank, scaling),) = {(layer.r[ADAPTER], layer.scaling[ADAPTER]) for _, layer in lora_layers(model)}
    write_lora(model, folder, tensors, r=2 * rank, lora_alpha=2 * rank * scaling)
