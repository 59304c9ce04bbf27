"""The optimizer that a run names, over a method's own parameter groups."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from nalora.errors import NALoRAError


def named_optimizer(trainer: Any, groups: list[dict[str, Any]]) -> Optimizer:
    """The optimizer that a `transformers.Trainer`'s arguments name, over these groups.

    Raises:
        NALoRAError: an optimizer that makes its own parameter groups.
    """
    kind, settings = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
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
