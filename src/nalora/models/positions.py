"""How long a text a model can read: tables of positions end, rotary positions and biases by distance do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from nalora.distributed.wrappers import base_of
from nalora.errors import NALoRAError

_NAMES = ("position", "wpe", "pos_emb", "pos_enc")
# OPT and BART keep two rows of their table for pads.
_MOST_RESERVED = 2
# Their biases by distance come from a table of this length.
_BIASES_END = frozenset({"mpt"})


def position_limit(model: nn.Module) -> int | None:
    """The longest text that a model with a table of positions can read; None for a model without one.

    A token beyond the table's end raises an IndexError on a CPU and breaks the process on a GPU.
    """
    positions = trained_positions(model)
    base: Any = base_of(model)
    if positions is None or getattr(base.config, "model_type", None) in _BIASES_END:
        return positions
    for module in base.modules():
        for name, table, reserved in _tables(module):
            if any(part in name for part in _NAMES) and positions <= len(table) <= positions + _MOST_RESERVED:
                return positions - reserved
    return None


def trained_positions(model: nn.Module) -> int | None:
    """How many positions the model was built for, whatever happens beyond them; None where it does not say."""
    config: Any = getattr(base_of(model), "config", None)
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def refuse_longer(model: nn.Module, longest: int, where: str, fix: str) -> None:
    """Refuse texts that end beyond the model's table of positions.

    Args:
        model: adapted or not.
        longest: tokens of the longest text.
        where: the setting or task that the text is from.
        fix: what helps; ``{limit}`` stands for the number of positions.

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
    """(name, table, rows of it that no position uses) of what may be a table of positions right inside a module."""
    for name, child in module.named_children():
        if isinstance(child, nn.Embedding):
            # RoBERTa counts positions from behind its padding id; other tables say how long they are themselves.
            counted_in = name == "position_embeddings" and child.padding_idx is not None
            yield name, child.weight, (child.padding_idx or 0) + 1 if counted_in else 0
    # Fixed tables of sines are buffers, or in old models plain tensors.
    for name, value in (*module.named_buffers(recurse=False), *vars(module).items()):
        if isinstance(value, Tensor) and value.dim() >= 2 and value.is_floating_point():
            yield name, value, 0
