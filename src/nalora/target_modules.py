"""The layers that an adapter is asked for, where PEFT finds none of them or cannot adapt them."""

from __future__ import annotations

import re

from torch import nn

from nalora.errors import NALoRAError


def linear_names(model: nn.Module) -> list[str]:
    """How the linear layers of a model are called, each name once: what target_modules may name."""
    linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return list(dict.fromkeys(name.rpartition(".")[2] for name in linears))


def refused(where: str, names: list[str], error: Exception) -> NALoRAError:
    """PEFT's refusal of a LoRA config, with the names that it would take.

    Args:
        where: the model, or the setting, that the problem is about.
        names: of the model's linear layers, before PEFT began to wrap it.
        error: what PEFT said.
    """
    return NALoRAError(
        where,
        found=f"a LoRA config that PEFT refuses ({first_sentence(error)})",
        expected=f"target modules among {', '.join(names)}",
        fix="name some of those, or leave target_modules out to adapt every linear layer",
    )


def first_sentence(error: Exception) -> str:
    """What an error says first, without its full stop."""
    return re.split(r"\.\s|\n", str(error).strip())[0].rstrip(".:") or type(error).__name__
