"""Attention that does less for the same result, where transformers cannot know that less is enough.

`grouped` writes: for one new token and heads that share keys and values, transformers copies these for every head where
there is a mask; for three heads to one, seven times the memory traffic that the attention itself needs.

`unmasked` trains: a causal model's tokens never see the pads behind them, so a batch that is padded on the right needs
no mask. Inside a CUDA graph transformers cannot look at one to see that, and with a mask attention copies shared keys
and takes a slower kernel.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nalora.distributed.wrappers import base_of

_GROUPED, _UNMASKED = "nalora_grouped_sdpa", "nalora_unmasked_sdpa"


def is_plain_decoder(model: nn.Module) -> bool:
    """Whether every layer attends to all positions before a token and can cache them: a decoder without windows."""
    inner = base_of(model)
    config = getattr(inner, "config", None)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    takes = inspect.signature(inner.forward).parameters
    static = bool(getattr(inner, "_can_compile_fullgraph", False))
    sliding = getattr(config, "sliding_window", None) is not None
    return static and kinds == {"full_attention"} and not sliding and {"past_key_values", "logits_to_keep"} <= {*takes}


def grouped(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let a plain decoder read shared keys where they lie, where it would have used `sdpa`."""
    from transformers.masking_utils import sdpa_mask

    return _attending(model, _GROUPED, attend, sdpa_mask)


def unmasked(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let a plain decoder attend without a mask, where it would have used `sdpa`: for batches padded on the right."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return _attending(model, _UNMASKED, sdpa_attention_forward, lambda *_, **__: None)


@contextlib.contextmanager
def _attending(
    model: nn.Module, name: str, attention: Callable[..., Any], mask: Callable[..., Tensor | None]
) -> Iterator[None]:
    """An attention and the mask it is given, for the moment, by a name that transformers then knows."""
    inner: Any = base_of(model)
    before = getattr(getattr(inner, "config", None), "_attn_implementation", None)
    if before != "sdpa" or not is_plain_decoder(model):
        yield
        return
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    inner.set_attn_implementation(name)
    try:
        yield
    finally:
        inner.set_attn_implementation(before)


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
