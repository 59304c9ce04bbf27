"""The run's optimizer for parameter groups: a method's own, or those with a factor on the learning rate."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
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


def refuse_own_groups(method: str, own: Optimizer | None) -> None:
    """Raise NALoRAError if the method has its own optimizer, whose parameter groups have their learning rates."""
    if own is not None:
        raise NALoRAError(
            "learning_rate_factors",
            found=f"method {method!r}, which sets the learning rates of its parameters itself",
            expected="a method that leaves the optimizer to the run, such as lora or peft/lora",
            fix="leave learning_rate_factors out, or use another method",
        )


def optimizer_with_factors(trainer: Any, factors: Mapping[str, float]) -> Optimizer:
    """Return the optimizer of a `transformers.Trainer` with factors on the learning rates of some parameters.

    Args:
        trainer: its arguments name the optimizer, the learning rate and the weight decay.
        factors: by a part of the parameters' names between dots, such as ``gate_proj`` or, for modules that PEFT trains
            whole, ``modules_to_save``. A parameter with several such parts gets the factor of the first in this order.

    Raises NALoRAError if no trained parameter has such a name.
    """
    trained = [(name, parameter) for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    parts = {name: next((part for part in factors if f".{part}." in f".{name}."), None) for name, _ in trained}
    for part in factors:
        if part not in parts.values():
            raise NALoRAError(
                f"learning_rate_factors: {part}",
                found="no trained parameter with this part in its name",
                expected=f"a part of a name such as {trained[0][0]}",
                fix="correct the name, or leave it out",
            )
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    groups: dict[tuple[str | None, bool], list[nn.Parameter]] = {}
    for name, parameter in trained:
        groups.setdefault((parts[name], name in decayed), []).append(parameter)
    rate, decay = trainer.args.learning_rate, trainer.args.weight_decay
    # Parameters without a factor come first: the first group's learning rate is the one that is logged.
    order = sorted(groups, key=lambda group: group[0] is not None)
    return named_optimizer(
        trainer,
        [
            {
                "params": groups[part, has_decay],
                "lr": rate * (1 if part is None else factors[part]),
                "weight_decay": decay if has_decay else 0.0,
            }
            for part, has_decay in order
        ],
    )
