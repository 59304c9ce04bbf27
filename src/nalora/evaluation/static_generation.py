"""Greedy generation with a cache of fixed size, so that on a GPU each token of a batch is one replayed CUDA graph.

`generate` launches every kernel of every token from Python: on a GPU a small model mostly waits for Python.
Here the step that generates one token is captured once and replayed, and finished rows leave the batch whenever they
are half of it. Every step reads the whole cache, so the cache is short at first and grows with the generated text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nalora.distributed.wrappers import base_of
from nalora.models.attention import grouped_attention

# Tokens generated between two checks for finished rows; each check waits for the GPU.
_CHECK_EVERY = 16
# Eager steps before a capture, so that every kernel is loaded and every workspace is allocated.
_EAGER_STEPS = 2
# New tokens that fit into the first cache: most answers are shorter.
_FIRST_ROOM = 128
# Attention kernels read masks in aligned blocks.
_ALIGNED = 64

Stops = Callable[[list[int]], bool]


@dataclass
class _Batch:
    """The state of a batch during generation: the last token and position of each row, and their cache."""

    cache: Any
    mask: Tensor
    token: Tensor
    position: Tensor
    finished: Tensor

    @property
    def length(self) -> int:
        """The number of positions of the cache."""
        return self.mask.shape[1]

    def select(self, rows: Tensor, length: int, config: Any) -> _Batch:
        """Return copies of some rows with a cache of `length` positions."""
        from transformers import StaticCache

        cache = StaticCache(config=config, max_cache_len=length)
        for new, old in zip(cache.layers, self.cache.layers, strict=True):
            keys, values = old.keys[rows], old.values[rows]
            new.lazy_initialization(keys, values)
            new.keys[:, :, : self.length].copy_(keys)
            new.values[:, :, : self.length].copy_(values)
            new.cumulative_length.copy_(old.cumulative_length)
        tensors = (self.mask, self.token, self.position, self.finished)
        mask, token, position, finished = (tensor[rows].clone() for tensor in tensors)
        return _Batch(cache, _extended(mask, length), token, position, finished)


@torch.inference_mode()
def generate_greedily(
    model: nn.Module,
    ids: Tensor,
    mask: Tensor,
    *,
    max_new_tokens: int,
    ends: Sequence[int],
    pad: int,
    stops: Stops = lambda row: False,
) -> list[list[int]]:
    """Return the tokens generated after each prompt, up to and including the end token.

    Args:
        model: in evaluation mode, a plain decoder (`models.attention`).
        ids: prompts, padded on the left.
        mask: 1 for tokens, 0 for padding.
        max_new_tokens: the maximum for each row.
        ends: tokens that end a row.
        pad: the token after an end.
        stops: whether a row may stop after these generated tokens; called every 16 tokens.
    """
    config = base_of(model).config
    with grouped_attention(model):
        generated = torch.full((len(ids), max_new_tokens), pad, device=ids.device)
        end_tokens = torch.tensor(list(ends), device=ids.device)
        prompt, longest = ids.shape[1], _aligned(ids.shape[1] + max_new_tokens)
        batch = _prefilled(model, ids, mask, _aligned(prompt + min(_FIRST_ROOM, max_new_tokens)), end_tokens)
        generated[:, 0] = batch.token[:, 0]
        active = torch.arange(len(ids), device=ids.device)
        count = 1
        steps = _Steps(model, batch, end_tokens, pad)
        while count < max_new_tokens:
            new = min(_CHECK_EVERY, max_new_tokens - count)
            generated[active, count : count + new] = steps.generate(new)
            count += new
            rows = zip(generated[active, :count].tolist(), batch.finished.tolist(), strict=True)
            unfinished = [not finished and not stops(row) for row, finished in rows]
            if not any(unfinished):
                break
            batch.finished.copy_(~torch.tensor(unfinished, device=ids.device))
            full = batch.length < longest and prompt + count + _CHECK_EVERY > batch.length
            if full or sum(unfinished) <= len(unfinished) // 2:
                chosen = torch.tensor([i for i, alive in enumerate(unfinished) if alive], device=ids.device)
                length = min(longest, 2 * batch.length) if full else batch.length
                active, batch = active[chosen], batch.select(chosen, length, config)
                steps = _Steps(model, batch, end_tokens, pad)
    rows_until_end = []
    for row in generated[:, :count].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        rows_until_end.append(row[:end])
    return rows_until_end


class _Steps:
    """Generates tokens for one batch: eagerly on a CPU, by replaying a CUDA graph on a GPU."""

    def __init__(self, model: nn.Module, batch: _Batch, ends: Tensor, pad: int) -> None:
        self.model, self.batch, self.ends, self.pad = model, batch, ends, pad
        self.out = torch.full((len(batch.token), _CHECK_EVERY), pad, device=batch.token.device)
        self.column = torch.zeros(1, dtype=torch.long, device=batch.token.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.eager = 0
        # One stream for eager and captured steps: a library's workspace for a stream must not be allocated inside a
        # graph, with whose memory it would be freed.
        self.stream = torch.cuda.Stream() if self.out.is_cuda else None  # type: ignore[no-untyped-call]

    def generate(self, count: int) -> Tensor:
        """Return the next tokens of every row; padding for finished rows."""
        if self.stream is None:
            self._generate(count)
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self._generate(count)
            torch.cuda.current_stream().wait_stream(self.stream)
        return self.out[:, :count]

    def _generate(self, count: int) -> None:
        self.column.zero_()
        for _ in range(count):
            if self.stream is not None and self.graph is None and self.eager >= _EAGER_STEPS:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=self.stream):
                    self._generate_one()
                self.graph = graph
            if self.graph is not None:
                self.graph.replay()
            else:
                self.eager += 1
                self._generate_one()

    def _generate_one(self) -> None:
        batch = self.batch
        outputs = self.model(
            input_ids=batch.token,
            attention_mask=batch.mask,
            position_ids=batch.position,
            past_key_values=batch.cache,
            use_cache=True,
        )
        best = outputs.logits[:, -1].argmax(-1).masked_fill(batch.finished, self.pad)
        batch.finished.logical_or_((best[:, None] == self.ends).any(-1))
        self.out.index_copy_(1, self.column, best[:, None])
        self.column.add_(1)
        batch.token.copy_(best[:, None])
        batch.position.add_(1)


def _prefilled(model: nn.Module, ids: Tensor, mask: Tensor, length: int, ends: Tensor) -> _Batch:
    """Return the batch with its prompts in a cache of `length` positions and the first token of each row."""
    from transformers import StaticCache

    cache = StaticCache(config=base_of(model).config, max_cache_len=length)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    outputs = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=position,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    token = outputs.logits[:, -1].argmax(-1, keepdim=True)
    finished = (token == ends).any(-1)
    return _Batch(cache, _extended(mask, length), token, position[:, -1:] + 1, finished)


def _extended(mask: Tensor, length: int) -> Tensor:
    """Return the mask of a cache: causality hides positions that are not written yet, so it need not change."""
    return torch.cat([mask, mask.new_ones(len(mask), length - mask.shape[1])], dim=1)


def _aligned(length: int) -> int:
    return math.ceil(length / _ALIGNED) * _ALIGNED
