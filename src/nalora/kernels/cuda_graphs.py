"""A whole training step as one CUDA graph: for small models, whose steps are launches more than arithmetic.

A step of SmolLM2-135M is about 10,000 kernel launches, most of them shorter than the time Python takes to ask for
them. Captured once, the step is replayed by a single call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nalora.errors import NALoRAError

Batch = Mapping[str, Tensor]


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    loss: Tensor
    gradients: list[tuple[Tensor, Tensor]]  # (parameter, where a replay leaves its gradient)


class GraphedStep:
    """Runs a training step eagerly for the first batches of a shape, then captures it and replays it.

    Every call is one real step on its batch. The step function is the inside of an ordinary training loop::

        def step(batch):
            loss = model(**batch).loss
            loss.backward()
            controller.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        step = GraphedStep(step)
        for batch in loader:
            loss = step(batch)

    It must do the same for every batch of a shape and read nothing back from the GPU. The optimizer needs
    ``capturable=True``, and a learning rate that changes must be a tensor (``lr=torch.tensor(1e-4)``). Pad batches to
    few shapes: each one is captured for itself. Not for fp16 with a GradScaler, which decides on the host.

    A step may also end with backward, and leave the optimizer to the caller, who zeroes gradients to None before the
    next one: `gradients_of` then names the parameters whose gradients a replay leaves behind.

    Args:
        step: computes one training step of a batch and gives its loss.
        warmup: how many steps of a new shape run eagerly, so that optimizer state and compiled kernels are there.
        warm_later: how many of each shape after the first; an eager step needs its own memory beside the graphs'.
        gradients_of: the parameters, where the step leaves gradients behind.

    Raises:
        NALoRAError: there is no CUDA device, or the step cannot be captured.
    """

    def __init__(
        self,
        step: Callable[[Batch], Tensor],
        warmup: int = 3,
        warm_later: int | None = None,
        gradients_of: Iterable[Tensor] = (),
    ) -> None:
        if not torch.cuda.is_available():
            raise NALoRAError(
                "GraphedStep",
                found="no CUDA device",
                expected="a CUDA device, since CUDA graphs are what it replays",
                fix="call the step function itself",
            )
        self.step, self._parameters = step, list(gradients_of)
        self.warmup, self.warm_later = warmup, warmup if warm_later is None else warm_later
        # All of it on one stream: autograd returns to the stream on which it first saw a parameter.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()
        self._eager_steps: dict[tuple[object, ...], int] = {}
        self._captured: dict[tuple[object, ...], _Captured] = {}

    def __call__(self, batch: Batch) -> Tensor:
        """One training step on the batch; its loss, on the GPU."""
        kind = tuple((name, each.shape, each.dtype) for name, each in batch.items())
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if self._eager_steps.setdefault(kind, 0) < (self.warm_later if self._captured else self.warmup):
                self._eager_steps[kind] += 1
                loss = self.step(batch)
            else:
                if kind not in self._captured:
                    self._captured[kind] = self._capture(batch)
                captured = self._captured[kind]
                for name, each in batch.items():
                    captured.inputs[name].copy_(each, non_blocking=True)
                captured.graph.replay()
                for parameter, gradient in captured.gradients:
                    parameter.grad = gradient
                loss = captured.loss.clone()
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _capture(self, batch: Batch) -> _Captured:
        """Record the step; nothing is computed yet."""
        inputs = {name: each.to("cuda", copy=True) for name, each in batch.items()}
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream):
                loss = self.step(inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if "out of memory" in str(error):
                # What a capture that finds no memory says: not a fault of the step, and a study makes room for it.
                raise torch.OutOfMemoryError(str(error)) from error
            raise NALoRAError(
                "GraphedStep",
                found=f"a step that cannot be captured: {str(error).splitlines()[0]}",
                expected="a step that asks the GPU for nothing and an optimizer with capturable=True",
                fix="remove .item(), print and logging from the step, or call the step function itself",
            ) from error
        gradients = [(each, each.grad) for each in self._parameters if each.grad is not None]
        return _Captured(graph, inputs, loss, gradients)
