"""The loss of an optimizer step: the mean over all its label tokens, however they are split over passes and processes.

A pass contributes (its tokens / the step's tokens) × its own mean. Most decoders do that themselves: handed
`num_items_in_batch`, they divide the sum of their tokens' losses by it. T5, BART and their kin accept the argument, as
they accept any, and return the mean of their pass all the same; summed over passes that is too large by their number.
"""

from __future__ import annotations

import ast
import inspect
import textwrap

import torch
from torch import Tensor, nn

from nalora.control.tokens import IGNORED_LABEL


def divides_by_items(model: nn.Module) -> bool:
    """Whether the model's own loss is its sum over `num_items_in_batch`, as its forward pass is written.

    A model that cannot be read counts as one that does not: weighting its mean is right for every model.
    """
    if (says := getattr(model, "accepts_loss_kwargs", None)) is not None:
        return bool(says)
    try:
        source = inspect.getsource(inspect.unwrap(model.forward))
        tree = ast.parse(textwrap.dedent(source))
    except (OSError, TypeError, SyntaxError):
        return False
    return any(isinstance(node, ast.Call) and _passes_items_on(node) for node in ast.walk(tree))


def _passes_items_on(call: ast.Call) -> bool:
    """`self.loss_function(…, **kwargs)`, or any call that is given `num_items_in_batch` by name."""
    if any(keyword.arg == "num_items_in_batch" for keyword in call.keywords):
        return True
    is_loss = isinstance(call.func, ast.Attribute) and call.func.attr == "loss_function"
    return is_loss and any(keyword.arg is None for keyword in call.keywords)


def share_of_step(mean: Tensor, labels: Tensor, items: Tensor | int) -> Tensor:
    """What a pass whose mean loss is `mean` contributes to the mean over the `items` labels of its step.

    A pass without any label contributes 0, where its own mean is 0/0. Nothing here waits for the device.
    """
    own = (labels != IGNORED_LABEL).sum()
    return torch.where(own > 0, mean, 0) * (own.to(mean.dtype) / items)
