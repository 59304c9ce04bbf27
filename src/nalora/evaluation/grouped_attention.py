"""Attention of one new token to a cache whose heads are shared: keys and values are read where they lie.

Where there is a mask, transformers copies keys and values for every head that shares them, at every token: for three
heads to one, seven times the memory traffic that the attention itself needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_NAME = "nalora_grouped_sdpa"


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What transformers' `sdpa` computes.

    Args:
        module: the attention layer.
        query: batch × heads × tokens × size.
        key: batch × groups × positions × size, a group for as many heads that stand beside each other.
        value: likewise.
        attention_mask: which positions are seen, None for all.
        options: as transformers gives them.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, heads, tokens, size = query.shape
    groups = key.shape[1]
    if tokens > 1 or heads == groups or attention_mask is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output
    # A group's heads see the same positions, so they can be asked as that many tokens of one head.
    asked = query.reshape(batch, groups, heads // groups, size)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        asked, key, value, attn_mask=attention_mask, scale=options.get("scaling")
    )
    return mixed.reshape(batch, 1, heads, value.shape[-1]), None


@contextlib.contextmanager
def grouped(model: Any) -> Iterator[None]:
    """Let a model of transformers attend this way, where it would have used `sdpa`.

    Args:
        model: without PEFT's wrapper.
    """
    before = model.config._attn_implementation
    if before != "sdpa":
        yield
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
