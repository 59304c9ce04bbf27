"""The layers that an adapter is asked for, where PEFT does not find them or cannot adapt them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from nalora.errors import NALoRAError, did_you_mean, first_line
from nalora.models.moe_targets import rewritten_names


def linear_names(model: nn.Module) -> list[str]:
    """How the linear layers of a model are called, each name once: what target_modules may name."""
    # GPT-2's are Conv1D, which are linear layers with their weights the other way around.
    linears = (
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    )
    return list(dict.fromkeys(name.rpartition(".")[2] for name in linears))


def leave_out_routers(config: Any, model: nn.Module) -> None:
    """Let "all-linear" pass over routers that are linear layers by class but answer with a tuple (Phi-MoE, Llama 4).

    PEFT would adapt them, and the first forward pass would fail.
    """
    if config.target_modules != "all-linear":
        return
    routers = [name for name, module in model.named_modules() if _answers_with_a_tuple(module)]
    if routers:
        config.exclude_modules = [*(config.exclude_modules or ()), *routers]


@torch.no_grad()
def _answers_with_a_tuple(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear) or not type(module).__module__.startswith("transformers.models."):
        return False
    try:
        return isinstance(module(module.weight.new_zeros(1, module.in_features)), tuple)
    except Exception:  # it wants other inputs: PEFT's own refusal will do
        return False


def refuse_names_of_nothing(model: nn.Module, targets: str | Sequence[str]) -> None:
    """Refuse a list of which PEFT would adapt a part and pass over the rest without a word.

    Raises:
        NALoRAError: a name that no layer of the model has or ends in.
    """
    if isinstance(targets, str):  # a pattern, or all-linear
        return
    layers = [f".{name}" for name, _ in model.named_modules()]
    for target in targets:
        if not any(name.endswith(f".{target}") for name in layers):
            names = linear_names(model)
            alone = len(targets) == 1
            otherwise = "leave target_modules out to adapt every linear layer" if alone else f"leave {target} out"
            raise NALoRAError(
                f"target_modules: {list(targets)}",
                found=f"no layer called {target}",
                expected=f"target modules among {', '.join(names)}",
                fix=did_you_mean(target, names, otherwise),
            )


def refused(where: str, model: nn.Module, names: list[str], error: Exception) -> NALoRAError:
    """PEFT's refusal of a LoRA config, with what it would take.

    Args:
        where: the model, or the setting, that the problem is about.
        model: that was to be wrapped.
        names: of the model's linear layers, before PEFT began to wrap it.
        error: PEFT's.
    """
    expected = f"target modules among {', '.join(names)}"
    fix = "name some of those, or leave target_modules out to adapt every linear layer"
    if "incompatible with Mamba" in str(error):
        # Their fused kernels read the weights of these layers and never call them.
        incompatible = set(re.findall(r"'(\w+)'", str(error)))
        fix = f"name layers that it can adapt: {_without(names, incompatible)}"
    elif "ParamWrapper does not work with lora_dropout" in str(error):
        expected = "no dropout in a model with experts, which are adapted as parameters and not as layers"
        fix = "set dropout to 0 (lora_dropout in peft.LoraConfig)"
    elif "ParamWrapper does not work with use_dora" in str(error):
        expected = "layers, and no experts: PEFT has no DoRA for parameters"
        fix = f"use another method, or name layers outside the experts: {_without(names, set(rewritten_names(model)))}"
    return NALoRAError(
        where, found=f"a LoRA config that PEFT refuses ({first_sentence(error)})", expected=expected, fix=fix
    )


def _without(names: list[str], but: set[str]) -> str:
    """A list of layers without some, and without the head, which no adapter is on unless it is named."""
    return ", ".join(name for name in names if name not in {*but, "lm_head"})


def first_sentence(error: Exception) -> str:
    """What an error says first, without its full stop; of a heading that ends in a colon, the line below it, too."""
    return re.split(r"\.\s", first_line(error))[0].rstrip(".:") or type(error).__name__
