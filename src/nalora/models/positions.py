"""The longest text a model can read: position tables have an end, rotary positions and distance biases do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from nalora.distributed.wrappers import base_of
from nalora.errors import NALoRAError

_NAMES = ("position", "wpe", "pos_emb", "pos_enc")
# OPT and BART reserve two rows of their table for padding.
_MOST_RESERVED = 2
# Model types whose distance biases come from a table of limited length.
_LIMITED_BIASES = frozenset({"mpt"})


def position_limit(model: nn.Module) -> int | None:
    """Return the number of tokens that a model with a position table can read; None for a model without one.

    A token beyond the end of the table raises an IndexError on a CPU and aborts the process on a GPU.
    """
    positions = trained_positions(model)
    base: Any = base_of(model)
    if positions is None or getattr(base.config, "model_type", None) in _LIMITED_BIASES:
        return positions
    for module in base.modules():
        for name, table, reserved in _tables(module):
            if any(part in name for part in _NAMES) and positions <= len(table) <= positions + _MOST_RESERVED:
                return positions - reserved
    return None


def trained_positions(model: nn.Module) -> int | None:
    """Return the number of positions in the model's config, whether or not it is a limit; None if it has none."""
    config: Any = getattr(base_of(model), "config", None)
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def check_length(model: nn.Module, longest: int, where: str, fix: str) -> None:
    """Check that a text of `longest` tokens fits into the model's position table.

    Args:
        model: with or without an adapter.
        longest: tokens of the longest text.
        where: the setting or task that the text is from.
        fix: the advice, in which ``{limit}`` stands for the number of positions.

    Raises:
        NALoRAError: the text is too long.
    """
    limit = position_limit(model)
    if limit is not None and longest > limit:
        raise NALoRAError(
            where,
            found=f"a text of {longest:,} tokens",
            expected=f"at most {limit:,}, for which the model has positions",
            fix=fix.format(limit=limit),
        )


def _tables(module: nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    """Yield (name, table, rows that no position uses) of the embeddings and tensors directly inside a module."""
    for name, child in module.named_children():
        if isinstance(child, nn.Embedding):
            # RoBERTa's positions start after its padding id; other tables have exactly one row per position.
            reserved = name == "position_embeddings" and child.padding_idx is not None
            yield name, child.weight, (child.padding_idx or 0) + 1 if reserved else 0
    # Fixed tables of sines are buffers, or plain tensors in old models.
    for name, value in (*module.named_buffers(recurse=False), *vars(module).items()):
        if isinstance(value, Tensor) and value.dim() >= 2 and value.is_floating_point():
            yield name, value, 0
