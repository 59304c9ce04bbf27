"""The run's optimizer for a method's own parameter groups."""

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
    """Return the names of all optimizers: those of transformers, and muon."""
    from transformers.training_args import OptimizerNames

    return (*(name.value for name in OptimizerNames), MUON)


def refuse_unknown(name: str) -> None:
    """Raise NALoRAError for an unknown optimizer, before the Trainer would after loading the model."""
    # transformers takes seconds to import, which the two most common names do not need.
    if name in ("adamw_torch", MUON) or name in names():
        return
    similar = "adamw_torch" if name.startswith("adam") and len(name) < len("adamw_") else name
    raise NALoRAError(
        f"optimizer {name!r}",
        found="no optimizer of that name",
        expected=f"one of transformers' (adamw_torch, sgd, adafactor, …) or {MUON}",
        fix=did_you_mean(similar, names(), "use adamw_torch"),
    )


def muon(
    parameters: Iterable[tuple[str, nn.Parameter]], learning_rate: float
) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return torch's Muon, which transformers has no name for, as a Trainer's `optimizer_cls_and_kwargs`.

    Its orthogonal update is scaled to the size of AdamW's steps, so that both use the same learning rates. Raises
    NALoRAError if a trainable parameter is not a matrix; LoRA's all are.
    """
    others = [name for name, parameter in parameters if parameter.requires_grad and parameter.dim() != 2]
    if others:
        raise NALoRAError(
            f"optimizer: {MUON}",
            found=f"{len(others)} parameters that are no matrices, such as {others[0]}",
            expected="only matrices, which it can orthogonalise",
            fix="use adamw_torch, or a method that trains only matrices, such as lora",
        )
    return Muon, {"lr": learning_rate, "adjust_lr_fn": "match_rms_adamw"}


def named_optimizer(trainer: Any, groups: list[dict[str, Any]]) -> Optimizer:
    """Return the optimizer that a `transformers.Trainer`'s arguments name, with these parameter groups.

    Raises NALoRAError for an optimizer that makes its own parameter groups.
    """
    kind, settings = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(
        trainer.args, trainer.model
    )
    own_groups = settings.keys() & {"params", "model", "optimizer_dict"}
    if own_groups or not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise NALoRAError(
            f"optimizer: {getattr(trainer.args.optim, 'value', trainer.args.optim)}",
            found="an optimizer that groups the parameters itself",
            expected="one that takes a learning rate for each group",
            fix="use adamw_torch",
        )
    optimizer: Optimizer = kind(groups, **settings)
    return optimizer
