"""What a server makes of an adapter folder, by vLLM's rules: one r, one α, a pair of factors for each module.

Nothing of PEFT or nalora is imported: the two JSON and safetensors files are all there is.
"""

from __future__ import annotations

import json
import math

import torch
from safetensors.torch import load_file
from torch import nn

PREFIX = "base_model.model."


class RefusedError(Exception):
    """The server does not load this adapter."""


@torch.no_grad()
def serve(model: nn.Module, folder) -> nn.Module:
    """The stock model with s·B·A added to its weights; as in vLLM, patterns are not read and s is the same for all."""
    config = json.loads((folder / "adapter_config.json").read_text())
    if config.get("use_dora"):
        raise RefusedError("DoRA")
    if config.get("modules_to_save"):
        raise RefusedError("modules_to_save")
    if config.get("bias", "none") != "none":
        raise RefusedError("bias")
    scaling = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    tensors = load_file(folder / "adapter_model.safetensors")
    while tensors:
        name = next(iter(tensors))
        module, _, factor = name.removeprefix(PREFIX).rpartition(".lora_")
        if factor not in ("A.weight", "B.weight"):
            raise RefusedError(f"unsupported LoRA weight {name}")
        a, b = (tensors.pop(f"{PREFIX}{module}.lora_{each}.weight") for each in "AB")
        _add(model, module, scaling, a, b, config["r"])
    return model


def _add(model: nn.Module, module: str, scaling: float, a: torch.Tensor, b: torch.Tensor, rank: int) -> None:
    if module.endswith("experts.base_layer"):  # both parameters of the experts: this is the one inside
        weight = model.get_submodule(module.removesuffix(".base_layer")).gate_up_proj
    elif module.endswith(".experts"):
        weight = model.get_submodule(module).down_proj
    else:
        layer = model.get_submodule(module)
        assert a.shape[0] == b.shape[1] == rank, f"{module} has rank {a.shape[0]}, and the server made room for {rank}"
        delta = scaling * b @ a
        layer.weight += delta.T if type(layer).__name__ == "Conv1D" else delta
        return
    experts = weight.shape[0]
    assert a.shape[0] == b.shape[1] == experts * rank, f"{module}: {a.shape[0]} rows for {experts} experts"
    by_expert = b.reshape(b.shape[0], rank, experts).permute(2, 0, 1)
    weight += scaling * by_expert @ a.reshape(experts, rank, -1)
