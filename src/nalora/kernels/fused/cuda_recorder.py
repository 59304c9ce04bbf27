"""Capture functions as CUDA graphs that share one memory pool and are replayed in the order of their capture."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nalora.errors import NALoRAError


class CudaRecorder:
    """Captures functions as CUDA graphs in one memory pool."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()

    def recording(self) -> _Recording:
        """Return the context of all captures of a shape."""
        return _Recording(self.stream)

    def record(self, function: Callable[[], Sequence[Tensor | None]]) -> Callable[[], None]:
        """Capture the kernels of a function; return what replays them."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool)
        try:
            function()
        finally:
            graph.capture_end()
        return graph.replay


class _Recording:
    """Runs captures on a stream of their own."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream, self.context = stream, torch.cuda.stream(stream)

    def __enter__(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)
        torch.cuda.synchronize()
        if isinstance(error[1], RuntimeError) and not isinstance(error[1], torch.OutOfMemoryError):
            raise NALoRAError(
                "fuse(cuda_graphs=True)",
                found=f"a layer that cannot be captured: {str(error[1]).splitlines()[0]}",
                expected="layers that read nothing back from the GPU",
                fix="call fuse(model) without cuda_graphs",
            ) from error[1]
