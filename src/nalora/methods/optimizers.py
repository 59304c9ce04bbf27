"""The optimizer that a run names, over a method's own parameter groups."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Muon, Optimizer

from nalora.errors import NALoRAError, did_you_mean

MUON = "muon"


@functools.cache
def names() -> tuple[str, ...]:
    """Every optimizer that a run may name: transformers' and this file's."""
    from transformers.training_args import OptimizerNames

    return (*(each.value for each in OptimizerNames), MUON)


def refuse_unknown(name: str) -> None:
    """Say so now, where the Trainer would when the model is loaded.

    Raises:
        NALoRAError: no optimizer of that name.
    """
    # transformers takes seconds to import: not for the two that nearly every run names.
    if name in ("adamw_torch", MUON) or name in names():
        return
    meant = "adamw_torch" if name.startswith("adam") and len(name) < len("adamw_") else name
    raise NALoRAError(
        f"optimizer {name!r}",
        found="no optimizer of that name",
        expected=f"one of transformers' (adamw_torch, sgd, adafactor, …) or {MUON}",
        fix=did_you_mean(meant, names(), "use adamw_torch"),
    )


def muon(
    parameters: Iterable[tuple[str, nn.Parameter]], learning_rate: float
) -> tuple[type[Optimizer], dict[str, Any]]:
    """torch's Muon, for which transformers has no name, as a Trainer's `optimizer_cls_and_kwargs`.

    Its orthogonal update is scaled to the size of AdamW's steps, so that learning rates mean the same for both.

    Args:
        parameters: by name; those that learn must be matrices, as all of LoRA's are.
        learning_rate: the highest.

    Raises:
        NALoRAError: something else learns too.
    """
    others = [name for name, each in parameters if each.requires_grad and each.dim() != 2]
    if others:
        raise NALoRAError(
            f"optimizer: {MUON}",
            found=f"{len(others)} parameters that are no matrices, such as {others[0]}",
            expected="matrices alone, which it can orthogonalise",
            fix="use adamw_torch, or a method that learns matrices alone, such as lora",
        )
    return Muon, {"lr": learning_rate, "adjust_lr_fn": "match_rms_adamw"}


def named_optimizer(trainer: Any, groups: list[dict[str, Any]]) -> Optimizer:
    """The optimizer that a `transformers.Trainer`'s arguments name, over these groups.

    Raises:
        NALoRAError: an optimizer that makes its own parameter groups.
    """
    given = trainer.optimizer_cls_and_kwargs
    kind, settings = given or trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or settings.keys() & {
        "params",
        "model",
        "optimizer_dict",
    }:
        raise NALoRAError(
            f"optimizer: {getattr(trainer.args.optim, 'value', trainer.args.optim)}",
            found="an optimizer that groups the parameters itself",
            expected="one that takes a learning rate for each group",
            fix="use adamw_torch",
        )
    made: Optimizer = kind(groups, **settings)
    return made
