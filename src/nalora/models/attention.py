"""Temporary changes to a model's attention: fewer operations with the same result, or no key-value cache.

`grouped_attention` is for generation: for one new token and heads that share keys and values, transformers repeats keys
and values for every head if there is a mask. With three heads for each key that is seven times the memory traffic that
attention itself needs.

`unmasked_attention` is for training: tokens of a causal model never attend to padding on their right, so a batch padded
on the right needs no mask. Inside a CUDA graph transformers cannot inspect a mask to detect this; with a mask attention
repeats shared keys and uses a slower kernel.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nalora.distributed.wrappers import base_of


def is_plain_decoder(model: nn.Module) -> bool:
    """Return whether every layer attends to all earlier positions and can cache them: a decoder without windows."""
    inner = base_of(model)
    config = getattr(inner, "config", None)
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    parameters = {*inspect.signature(inner.forward).parameters}
    static = bool(getattr(inner, "_can_compile_fullgraph", False))
    full = layer_types == {"full_attention"} and getattr(config, "sliding_window", None) is None
    return static and full and {"past_key_values", "logits_to_keep"} <= parameters


def grouped_attention(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let a plain decoder that uses `sdpa` read shared keys and values without repeating them."""
    from transformers.masking_utils import sdpa_mask

    return _attention(model, "nalora_grouped_sdpa", grouped_sdpa, sdpa_mask)


def attends_without_mask(model: nn.Module) -> bool:
    """Return whether `unmasked_attention` changes this model: a plain decoder that uses `sdpa`."""
    implementation = getattr(getattr(base_of(model), "config", None), "_attn_implementation", None)
    return implementation == "sdpa" and is_plain_decoder(model)


def unmasked_attention(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let a plain decoder that uses `sdpa` attend without a mask, for batches padded on the right."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return _attention(model, "nalora_unmasked_sdpa", sdpa_attention_forward, lambda *_, **__: None)


@contextlib.contextmanager
def _attention(
    model: nn.Module, name: str, attention: Callable[..., Any], mask: Callable[..., Tensor | None]
) -> Iterator[None]:
    """Register an attention function and its mask function with transformers, and use them inside the context."""
    if not attends_without_mask(model):
        yield
        return
    inner: Any = base_of(model)
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    inner.set_attn_implementation(name)
    try:
        yield
    finally:
        inner.set_attn_implementation("sdpa")


def grouped_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute transformers' `sdpa` attention.

    Args:
        module: the attention layer.
        query: batch × heads × tokens × size.
        key: batch × groups × positions × size; consecutive heads share a group.
        value: of the same shape as `key`.
        attention_mask: which positions are attended to; None for all.
        options: transformers' other arguments.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, heads, tokens, size = query.shape
    groups = key.shape[1]
    if tokens > 1 or heads == groups or attention_mask is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output
    # All heads of a group attend to the same positions, so they are computed as several tokens of one head.
    mixed = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, groups, heads // groups, size),
        key,
        value,
        attn_mask=attention_mask,
        scale=options.get("scaling"),
    )
    return mixed.reshape(batch, 1, heads, value.shape[-1]), None


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Turn the key-value cache of generation off: with it transformers does not keep packed examples separate."""
    config: Any = getattr(model, "config", None)
    use_cache = getattr(config, "use_cache", None)
    if use_cache:
        config.use_cache = False
    try:
        yield
    finally:
        if use_cache:
            config.use_cache = use_cache
