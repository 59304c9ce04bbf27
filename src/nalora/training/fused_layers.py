"""Fused layers and a base in FP8 for a run: `fused_adapters: true` and `base: fp8`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from peft.tuners.lora.layer import LoraLayer
from rich.console import Console
from torch import nn

from nalora.control.fusable import why_left_to_peft
from nalora.control.fused_model import FusedModel
from nalora.distributed import processes
from nalora.errors import NALoRAError, missing_package, refuse_first
from nalora.kernels.statistics.engines import has_triton
from nalora.runs.settings import Run


def refuse_unless_fp8_fits(run: Run, device: str) -> None:
    """Raise NALoRAError for a run whose base cannot be in FP8, before its model is loaded."""
    problems = (
        (run.method.trains_the_model, f"method: {run.method.name}, which trains the base", "leave base out"),
        (processes.count() > 1, f"{processes.count()} processes", "launch one, or leave base out"),
        (
            run.settings.dtype == "float16",
            "dtype: float16, whose range is smaller than FP8 scales need",
            "use bfloat16",
        ),
    )
    refuse_first("base: fp8", "a frozen base below LoRA adapters, in one process", problems)
    if not has_triton():
        raise missing_package("base: fp8", "triton", "for its kernels", instead=", or leave base out")
    from nalora.kernels.fused.fp8_base import refuse_unless_supported

    refuse_unless_supported(torch.device(device))


@contextlib.contextmanager
def fused_layers(model: nn.Module, run: Run, console: Console) -> Iterator[None]:
    """Fuse the layers of a prepared model as its run says, and print which; PEFT's forwards come back in the end.

    Without the setting `fused_adapters` they are fused where that is faster: in a single process on a GPU. Enter it
    before anything hooks the layers or holds their weights.

    Raises:
        NALoRAError: several processes, or a base that cannot be in FP8.
    """
    settings = run.settings
    if not (settings.base or settings.fused_adapters or (settings.fused_adapters is None and _gains(model, run))):
        yield
        return
    if (count := processes.count()) > 1:
        fix = "leave fused_adapters out"
        raise NALoRAError("fused_adapters: true", found=f"{count} processes", expected="one", fix=fix)
    layers = FusedModel(model, base=settings.base or "keep")
    console.print(str(layers), highlight=False, markup=False)
    try:
        yield
    finally:
        layers.remove()


def _gains(model: nn.Module, run: Run) -> bool:
    """Return whether a run without the setting is fused: with kernels: fused, attaching NA-LoRA does it."""
    if processes.count() > 1 or getattr(run.method, "kernels", None) == "fused":
        return False
    on_gpu = next(model.parameters()).is_cuda and has_triton()
    return on_gpu and any(isinstance(module, LoraLayer) and not why_left_to_peft(module) for module in model.modules())
