"""Optional accelerations of a run: Liger's kernels, and which runs can use CUDA graphs.

The graphs themselves are in `integrations/graphed_trainer.py`, which serves any Trainer.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from nalora.errors import NALoRAError, missing_package, refuse_all
from nalora.runs.settings import RunSettings


def refuse_unless_graphs_fit(settings: RunSettings, device: str, dtype: str, accumulated: int, processes: int) -> None:
    """Raise NALoRAError for a run whose passes cannot be replayed."""
    obstacles = (
        (not device.startswith("cuda"), f"a run on {device}", "leave cuda_graphs out"),
        (dtype == "float16", "float16, whose loss scaling decides on the host", "use bfloat16"),
        (accumulated > 1, f"{accumulated} passes in a step, to be added up", "raise micro_batch_size"),
        (processes > 1, f"{processes} processes", "launch one"),
        (settings.packing, "packing, where no two batches have one shape", "leave packing out: batches: like-length"),
        (settings.gradient_checkpointing, "gradient checkpointing, which reads random states", "leave one out"),
    )  # fmt: skip
    expected = "one pass of few shapes for each step, on one GPU"
    refuse_all("cuda_graphs: true", expected, obstacles)


def refuse_unless_liger_runs(device: str) -> None:
    """Raise NALoRAError if Liger's kernels are not installed, or the device is not a GPU."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise missing_package("liger: true", "liger_kernel", "for its kernels", instead=", or leave liger out")
    if not device.startswith("cuda"):
        expected = "Liger's kernels on a GPU"
        raise NALoRAError("liger: true", found=f"a run on {device}", expected=expected, fix="leave liger out")


@contextlib.contextmanager
def liger_contained(model: nn.Module) -> Iterator[None]:
    """Undo at the end what Liger replaces in the module of the model's class.

    Without this every model that the process builds later has Liger's layers: another run's, or this one's evaluation.
    """
    module: Any = sys.modules[type(model).__module__]
    names = dict(vars(module))
    # Liger also replaces the `forward` of classes by one that computes the loss.
    forwards = {
        kind: vars(kind)["forward"] for kind in names.values() if isinstance(kind, type) and "forward" in vars(kind)
    }
    try:
        yield
    finally:
        for name, value in names.items():
            if vars(module)[name] is not value:
                setattr(module, name, value)
        for kind, forward in forwards.items():
            if vars(kind)["forward"] is not forward:
                setattr(kind, "forward", forward)  # noqa: B010 - of a class that mypy does not know


@contextlib.contextmanager
def larger_loss_chunks() -> Iterator[None]:
    """Let Liger's fused loss compute twice as many tokens at a time.

    By default it computes about as many logits as the hidden states have numbers: 128 of 4,096 tokens for Llama 3.
    Products of so few rows wait for the output layer's weight, which they read 64 times in a step.
    """
    import liger_kernel.transformers.functional as functional

    name = "liger_fused_linear_cross_entropy"
    original = getattr(functional, name)
    if "chunk_mem_const" not in inspect.signature(original).parameters:  # an older Liger
        yield
        return
    setattr(functional, name, functools.partial(original, chunk_mem_const=2))
    try:
        yield
    finally:
        setattr(functional, name, original)
