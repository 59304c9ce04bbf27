"""The layers that an adapter is asked for, where PEFT does not find them or cannot adapt them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from nalora.errors import NALoRAError, did_you_mean


def linear_names(model: nn.Module) -> list[str]:
    """How the linear layers of a model are called, each name once: what target_modules may name."""
    linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return list(dict.fromkeys(name.rpartition(".")[2] for name in linears))


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
            raise NALoRAError(
                f"target_modules: {list(targets)}",
                found=f"no layer called {target}",
                expected=f"target modules among {', '.join(names)}",
                fix=did_you_mean(target, names, f"leave {target} out"),
            )


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
