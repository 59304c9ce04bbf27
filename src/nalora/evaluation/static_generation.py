"""Greedy writing with a cache of fixed size, so that on a GPU each token of a whole batch is one replayed CUDA graph.

`generate` asks Python for every kernel of every token: on a GPU a small model waits for Python nearly all the time.
Here the step that writes one token is captured once and replayed, and rows that have ended leave the batch whenever
half of it has. Every step reads the whole cache, so that it is short at first and grows with what is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nalora.distributed.wrappers import base_of
from nalora.models.attention import grouped_attention

# Tokens written between two looks at which rows have ended; each look waits for the GPU.
_BETWEEN_LOOKS = 16
# Eager steps before a capture, so that every kernel is loaded and every workspace is there.
_EAGER_STEPS = 2
# Tokens for which there is room at first: most answers are shorter.
_FIRST_ROOM = 128
# Attention kernels read masks in aligned stretches.
_ALIGNED = 64

Stops = Callable[[list[int]], bool]


class _Rows:
    """A batch on its way: what was written, where each row stands, and its cache."""

    def __init__(self, cache: Any, mask: Tensor, token: Tensor, position: Tensor, finished: Tensor) -> None:
        self.cache, self.mask, self.token, self.position, self.finished = cache, mask, token, position, finished

    @property
    def length(self) -> int:
        """How many positions the cache has."""
        return self.mask.shape[1]

    def kept(self, rows: Tensor, length: int, config: Any) -> _Rows:
        """Some of the rows, in tensors of their own, with a cache of so many positions."""
        from transformers import StaticCache

        cache = StaticCache(config=config, max_cache_len=length)
        for new, old in zip(cache.layers, self.cache.layers, strict=True):
            keys, values = old.keys[rows], old.values[rows]
            new.lazy_initialization(keys, values)
            new.keys[:, :, : self.length].copy_(keys)
            new.values[:, :, : self.length].copy_(values)
            new.cumulative_length.copy_(old.cumulative_length)
        mask, token, position, finished = (
            each[rows].clone() for each in (self.mask, self.token, self.position, self.finished)
        )
        return _Rows(cache, _with_ones(mask, length), token, position, finished)


@torch.inference_mode()
def write_greedily(
    model: nn.Module,
    ids: Tensor,
    mask: Tensor,
    *,
    max_new_tokens: int,
    ends: Sequence[int],
    pad: int,
    stops: Stops = lambda row: False,
) -> list[list[int]]:
    """What the model writes after each prompt, up to and including the token that ended it.

    Args:
        model: in evaluation mode, a plain decoder (`models.attention`).
        ids: prompts, padded on the left.
        mask: which tokens are real.
        max_new_tokens: at most so many.
        ends: tokens that end a row.
        pad: what follows an end.
        stops: whether a row may stop for what it wrote so far; asked now and then.
    """
    inner = base_of(model)
    with grouped_attention(model):
        written = torch.full((len(ids), max_new_tokens), pad, device=ids.device)
        end_tokens = torch.tensor(list(ends), device=ids.device)
        prompt, longest = ids.shape[1], _aligned(ids.shape[1] + max_new_tokens)
        rows = _prefilled(model, ids, mask, _aligned(prompt + min(_FIRST_ROOM, max_new_tokens)), end_tokens)
        written[:, 0] = rows.token[:, 0]
        alive = torch.arange(len(ids), device=ids.device)
        count = 1
        step = _Step(model, rows, end_tokens, pad)
        while count < max_new_tokens:
            wanted = min(_BETWEEN_LOOKS, max_new_tokens - count)
            written[alive, count : count + wanted] = step.write(wanted)
            count += wanted
            going = _going_on(written[alive, :count].tolist(), rows.finished.tolist(), stops)
            if not any(going):
                break
            rows.finished.copy_(~torch.tensor(going, device=ids.device))
            full = rows.length < longest and prompt + count + _BETWEEN_LOOKS > rows.length
            if full or sum(going) <= len(going) // 2:
                chosen = torch.tensor([i for i, each in enumerate(going) if each], device=ids.device)
                length = min(longest, 2 * rows.length) if full else rows.length
                alive, rows = alive[chosen], rows.kept(chosen, length, inner.config)
                step = _Step(model, rows, end_tokens, pad)
    ends_of = set(ends)
    return [_until_end(row, ends_of) for row in written[:, :count].tolist()]


class _Step:
    """Writes tokens for one batch: eagerly on a CPU, by replaying a graph on a GPU."""

    def __init__(self, model: nn.Module, rows: _Rows, ends: Tensor, pad: int) -> None:
        self.model, self.rows, self.ends, self.pad = model, rows, ends, pad
        self.out = torch.full((len(rows.token), _BETWEEN_LOOKS), pad, device=rows.token.device)
        self.at = torch.zeros(1, dtype=torch.long, device=rows.token.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.eager = 0
        # One stream for eager and captured steps: what libraries keep for a stream must not be born inside a graph,
        # with whose memory it would go.
        self.stream = torch.cuda.Stream() if self.out.is_cuda else None  # type: ignore[no-untyped-call]

    def write(self, count: int) -> Tensor:
        """The next tokens of every row; pads for those that have ended."""
        if self.stream is None:
            self._write(count)
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self._write(count)
            torch.cuda.current_stream().wait_stream(self.stream)
        return self.out[:, :count]

    def _write(self, count: int) -> None:
        self.at.zero_()
        for _ in range(count):
            if self.stream is not None and self.graph is None and self.eager >= _EAGER_STEPS:
                self.graph = self._captured()
            if self.graph is not None:
                self.graph.replay()
            else:
                self.eager += 1
                self._write_one()

    def _write_one(self) -> None:
        rows = self.rows
        outputs = self.model(
            input_ids=rows.token,
            attention_mask=rows.mask,
            position_ids=rows.position,
            past_key_values=rows.cache,
            use_cache=True,
        )
        best = outputs.logits[:, -1].argmax(-1).masked_fill(rows.finished, self.pad)
        rows.finished.logical_or_((best[:, None] == self.ends).any(-1))
        self.out.index_copy_(1, self.at, best[:, None])
        self.at.add_(1)
        rows.token.copy_(best[:, None])
        rows.position.add_(1)

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self._write_one()
        return graph


def _prefilled(model: nn.Module, ids: Tensor, mask: Tensor, length: int, ends: Tensor) -> _Rows:
    """The batch after its prompts were read into a cache of so many positions and its first token was chosen."""
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
    return _Rows(cache, _with_ones(mask, length), token, position[:, -1:] + 1, finished)


def _with_ones(mask: Tensor, length: int) -> Tensor:
    """The mask of a cache: positions that are not written yet are hidden by causality, so it need not change."""
    return torch.cat([mask, mask.new_ones(len(mask), length - mask.shape[1])], dim=1)


def _aligned(length: int) -> int:
    return math.ceil(length / _ALIGNED) * _ALIGNED


def _going_on(written: list[list[int]], finished: list[bool], stops: Stops) -> list[bool]:
    return [not ended and not stops(row) for row, ended in zip(written, finished, strict=True)]


def _until_end(row: list[int], ends: set[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
    return row[:end]
