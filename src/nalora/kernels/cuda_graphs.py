"""A whole training step as one CUDA graph, for small models, whose launches take longer than their arithmetic.

A step of SmolLM2-135M is about 10,000 kernel launches, most of them shorter than the time Python needs to launch them.
A captured step is replayed by a single call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nalora.errors import NALoRAError

Batch = Mapping[str, Tensor]
_log = logging.getLogger("nalora")


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    loss: Tensor
    gradients: list[tuple[Tensor, Tensor]]  # (parameter, the buffer of its gradient)


class GraphedStep:
    """Runs a training step eagerly for the first batches of a shape, then captures it and replays it.

    Every call is one training step on its batch. The step function is the body of an ordinary training loop::

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

    It must do the same for every batch of a shape and copy nothing from the GPU to the host. The optimizer needs
    ``capturable=True``, and a learning rate that changes must be a tensor (``lr=torch.tensor(1e-4)``). Pad batches to
    few shapes, since each shape is captured separately. Do not use it for fp16 with a GradScaler, which decides on the
    host whether to step.

    A step may also end with backward and leave the optimizer to the caller, who sets gradients to None before the next
    step. Pass the parameters as `gradients_of`, so that a replay sets their gradients.

    Args:
        step: computes one training step of a batch and returns its loss.
        warmup: eager steps of the first shape, which create optimizer state and compile kernels.
        warm_later: eager steps of every later shape; an eager step needs memory in addition to the graphs'.
        gradients_of: the parameters that get gradients, if the step leaves them for the caller.
        most_shapes: how many shapes are captured; batches of other shapes run eagerly, which is logged once.

    Raises:
        NALoRAError: there is no CUDA device, or the step cannot be captured.
    """

    def __init__(
        self,
        step: Callable[[Batch], Tensor],
        warmup: int = 3,
        warm_later: int | None = None,
        gradients_of: Iterable[Tensor] = (),
        most_shapes: int | None = None,
    ) -> None:
        if not torch.cuda.is_available():
            raise NALoRAError(
                "GraphedStep",
                found="no CUDA device",
                expected="a CUDA device, which CUDA graphs need",
                fix="call the step function itself",
            )
        self.step, self._parameters = step, list(gradients_of)
        self.warmup, self.warm_later = warmup, warmup if warm_later is None else warm_later
        self.most_shapes, self._is_logged = most_shapes, False
        # All on one stream: autograd runs backward on the stream on which it first used a parameter.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()
        self._eager_steps: dict[tuple[object, ...], int] = {}
        self._captured: dict[tuple[object, ...], _Captured] = {}

    def __call__(self, batch: Batch) -> Tensor:
        """Run one training step on the batch and return its loss, on the GPU."""
        shape = tuple((name, tensor.shape, tensor.dtype) for name, tensor in batch.items())
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if self._runs_eagerly(shape):
                loss = self.step(batch)
            else:
                if shape not in self._captured:
                    self._captured[shape] = self._capture(batch)
                captured = self._captured[shape]
                for name, tensor in batch.items():
                    captured.inputs[name].copy_(tensor, non_blocking=True)
                captured.graph.replay()
                for parameter, gradient in captured.gradients:
                    parameter.grad = gradient
                loss = captured.loss.clone()
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _runs_eagerly(self, shape: tuple[object, ...]) -> bool:
        """Return whether this step of a shape runs eagerly, and count it if so."""
        if shape in self._captured:
            return False
        if self.most_shapes is not None and len(self._captured) >= self.most_shapes:
            if not self._is_logged:
                self._is_logged = True
                _log.warning(
                    "nalora: batches of %d shapes have been captured as CUDA graphs; batches of other shapes run"
                    " eagerly. Pad batches to fewer shapes, such as by pad_to_multiple_of=64 in the collator.",
                    self.most_shapes,
                )
            return True
        eager_steps = self._eager_steps.get(shape, 0)
        if eager_steps >= (self.warm_later if self._captured else self.warmup):
            return False
        self._eager_steps[shape] = eager_steps + 1
        return True

    def _capture(self, batch: Batch) -> _Captured:
        """Record the step without computing it."""
        inputs = {name: tensor.to("cuda", copy=True) for name, tensor in batch.items()}
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream):
                loss = self.step(inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if "out of memory" in str(error):
                # A capture reports missing memory like this. The step is not at fault, and a study makes room for it.
                raise torch.OutOfMemoryError(str(error)) from error
            raise NALoRAError(
                "GraphedStep",
                found=f"a step that cannot be captured: {str(error).splitlines()[0]}",
                expected="a step that reads nothing back from the GPU and an optimizer with capturable=True",
                fix="remove .item(), print and logging from the step, or run it without CUDA graphs",
            ) from error
        gradients = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        return _Captured(graph, inputs, loss, gradients)
