"""Initial A and B of methods that do not start at B·A = 0: kept for resumed runs, and subtracted from the base.

PiSSA and LoRA-GA freeze W₀ − s·B₀·A₀, so that the model computes with W₀ at the first step. Other users have the stock
base, so the adapter is saved relative to it: s·(B·A − B₀·A₀) is an ordinary adapter of rank 2r.
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

# In the run's folder: a resumed run starts from these numbers and does not decompose the weights again.
START_FILE = "start.safetensors"
_ATTRIBUTE = "_nalora_start"
_MOVABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Factors = dict[str, Tensor]


def check_movable_base(model: nn.Module, method: str) -> None:
    """Raise NALoRAError if a base weight is quantised, which cannot hold small changes, or tied to another module's."""
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
                expected="linear layers in 16 or 32 bits, not quantised: B₀·A₀ is subtracted from their weights",
                fix="use a method that does not change the base (lora, rslora), or "
                + ("leave quantise out" if len(others) in (0, len(layers)) else leave_out(model, others)),
            )
        if users[id(weight)] > 1:
            raise NALoRAError(
                f"method {method!r}",
                found=f"{name}, whose weight is tied to another module's",
                expected="weights that no other module uses: B₀·A₀ is subtracted from them",
                fix=leave_out(model, [name]),
            )


def parameters(model: nn.Module) -> Factors:
    """Return the A and B of every layer by name."""
    return {
        f"{name}.{factor}": getattr(layer, factor)[ADAPTER].weight
        for name, layer in lora_layers(model)
        for factor in ("lora_A", "lora_B")
    }


def load(file: Path | None) -> Factors | None:
    """Return the initial factors in a run's folder, or None where there are none."""
    return load_file(file) if file is not None and file.is_file() else None


def save(factors: Factors, file: Path | None) -> None:
    """Let the first process write the initial factors, unless there is no folder or it has them already."""
    if file is not None and is_first_process() and not file.is_file():
        atomic.save_tensors(file, factors)


@torch.no_grad()
def assign(model: nn.Module, factors: Factors, where: str) -> None:
    """Copy initial factors into the adapters. Raises NALoRAError if they are those of another model."""
    current = parameters(model)
    if {name: tensor.shape for name, tensor in factors.items()} != {n: tensor.shape for n, tensor in current.items()}:
        raise NALoRAError(where, found="the start of another model or adapter", expected="this run's", fix="remove it")
    for name, parameter in current.items():
        parameter.copy_(factors[name])


def keep(model: nn.Module, folder: Path | None) -> None:
    """Remember the current factors as the initial ones, also in the run's folder if there is one."""
    started = _copies(model)
    setattr(model, _ATTRIBUTE, started)
    save(started, folder and folder / START_FILE)


def restore(model: nn.Module, folder: Path | None) -> bool:
    """Restore adapters and base to the state at `keep`, and return False if nothing was kept.

    Raises NALoRAError if the folder has the start of another model.
    """
    started = load(folder and folder / START_FILE)
    if started is None:
        return False
    assign(model, started, f"{folder}/{START_FILE}")
    subtract_from_base(model)
    setattr(model, _ATTRIBUTE, started)
    return True


@torch.no_grad()
def subtract_from_base(model: nn.Module) -> None:
    """Set W₀ to W₀ − s·B·A for the current adapters, computed in their dtype, float32."""
    for _, layer in lora_layers(model):
        weight = layer.get_base_layer().weight
        a, b = (getattr(layer, factor)[ADAPTER].weight for factor in ("lora_A", "lora_B"))
        product = (layer.scaling[ADAPTER] * b) @ a
        weight.copy_(weight.to(product.dtype) - (product.T if layer.fan_in_fan_out else product))


def save_relative_to_stock(model: nn.Module, folder: Path) -> None:
    """Write s·(B·A − B₀·A₀) as an adapter of rank 2r: A′ = [A; A₀], B′ = [B, −B₀]."""
    started: Factors = getattr(model, _ATTRIBUTE)
    tensors: Factors = {}
    for name, now in _copies(model).items():
        if name.endswith("lora_A"):
            tensors[f"{name}.weight"] = torch.cat([now, started[name]], 0)
        else:
            tensors[f"{name}.weight"] = torch.cat([now, -started[name]], 1)
    ((rank, scaling),) = {(layer.r[ADAPTER], layer.scaling[ADAPTER]) for _, layer in lora_layers(model)}
    write_lora(model, folder, tensors, r=2 * rank, lora_alpha=2 * rank * scaling)


def _copies(model: nn.Module) -> Factors:
    return {name: full_tensor(factor.detach()).to("cpu", copy=True) for name, factor in parameters(model).items()}
