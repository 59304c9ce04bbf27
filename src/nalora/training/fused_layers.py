"""Fused layers and a base in FP8 for a run: `fused_adapters: true` and `base: fp8`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
from peft.tuners.lora.layer import LoraLayer
from rich.console import Console
from torch import nn

from nalora.control.fusable import why_left_to_peft
from nalora.control.fused_model import FusedModel
from nalora.distributed import processes
from nalora.errors import counted, missing_package, refuse_all
from nalora.kernels.statistics.engines import has_triton
from nalora.runs.settings import Run


def refuse_unless_fused_layers_fit(run: Run, device: str) -> None:
    """Raise NALoRAError for a run whose layers cannot be fused, or whose base cannot be in FP8, without its model."""
    if run.settings.base != "fp8":
        several = bool(run.settings.fused_adapters) and processes.count() > 1
        problem = (several, f"{processes.count()} processes", "leave fused_adapters out")
        refuse_all("fused_adapters: true", "one", [problem])
        return
    problems = (
        (run.method.trains_the_model, f"method: {run.method.name}, which trains the base", "leave base out"),
        (processes.count() > 1, f"{processes.count()} processes", "launch one, or leave base out"),
        (
            run.settings.dtype == "float16",
            "dtype: float16, whose range is smaller than FP8 scales need",
            "use bfloat16",
        ),
    )
    refuse_all("base: fp8", "a frozen base below LoRA adapters, in one process", problems)
    if not has_triton():
        raise missing_package("base: fp8", "triton", "for its kernels", instead=", or leave base out")
    from nalora.kernels.fused.fp8_refusals import refuse_unless_supported

    refuse_unless_supported(torch.device(device))


@contextlib.contextmanager
def fused_layers(model: nn.Module, run: Run, console: Console) -> Iterator[None]:
    """Fuse the layers of a prepared model as its run says, and print which; PEFT's forwards come back in the end.

    Without the setting `fused_adapters` they are fused where that is faster: in a single process on a GPU. Enter it
    before anything hooks the layers or holds their weights.

    Raises:
        NALoRAError: a base whose layers cannot be in FP8.
    """
    settings = run.settings
    if not _why_fused(run, str(next(model.parameters()).device)):
        yield
        return
    fusable, left = _layers(model)
    if not fusable and not settings.base:
        if left or settings.fused_adapters:
            console.print(_nothing_is_fused(run, left), highlight=False, markup=False)
        yield
        return
    layers = FusedModel(model, base=settings.base or "keep")
    lines = str(layers).splitlines()
    if not fusable:
        lines = [_nothing_is_fused(run, left), *(line for line in lines if line.lstrip().startswith("base"))]
    console.print("\n".join(lines), highlight=False, markup=False)
    try:
        yield
    finally:
        layers.remove()


def expected_layers(model: nn.Module, run: Run, device: str) -> list[tuple[str, str]]:
    """Return what a run on this device would fuse, as (what, why) for each line; empty for a run that fuses nothing.

    Args:
        model: prepared by the run's method; it may be on the meta device.
        run: whose layers they are, after `refuse_unless_fused_layers_fit`.
        device: on which the run would train.

    Raises:
        NALoRAError: a base whose layers cannot be in FP8.
    """
    lines: list[tuple[str, str]] = []
    why = _why_fused(run, device) or ("kernels: fused" if _is_fused_by_control(run) else "")
    fusable, left = _layers(model)
    if run.settings.quantise == "8bit":  # without weights the layers are not quantised yet
        fusable, left = 0, Counter({"weights in 8 bits": fusable + left.total()})
    if why and fusable:
        lines.append((f"{fusable} of {counted(fusable + left.total(), 'LoRA layer')} would be fused", why))
        lines += [(f"left to PEFT: {counted(number, 'layer')}", reason) for reason, number in left.items()]
    elif why and (left or run.settings.fused_adapters):
        lines.append((_nothing_is_fused(run, left), why))
    if run.settings.base:
        from nalora.kernels.fused.fp8_base import convertible_layers  # Triton may not be installed

        count, kept = convertible_layers(model)
        lines.append((f"base in FP8: {counted(count, 'linear layer')}", f"base: {run.settings.base}"))
        lines += [(f"base not in FP8: {counted(len(names), 'layer')}", reason) for reason, names in kept.items()]
    return lines


def _layers(model: nn.Module) -> tuple[int, Counter[str]]:
    """Return the number of LoRA layers that can be fused, and that of the others by reason."""
    reasons = Counter(why_left_to_peft(module) for module in model.modules() if isinstance(module, LoraLayer))
    return reasons.pop("", 0), reasons


def _nothing_is_fused(run: Run, left: Counter[str]) -> str:
    """Return the sentence for a model without a layer that can be fused."""
    if not left:
        return f"Nothing is fused: method: {run.method.name} has no LoRA layers of PEFT"
    reasons = [reason if len(left) == 1 else f"{number} layers: {reason}" for reason, number in left.items()]
    return f"Nothing is fused: PEFT computes all {counted(left.total(), 'LoRA layer')} ({'; '.join(reasons)})"


def _why_fused(run: Run, device: str) -> str:
    """Return the reason for which layers are fused before NA-LoRA is attached; empty if they are not to be fused."""
    settings = run.settings
    if settings.base:
        return f"base: {settings.base}"
    if settings.fused_adapters is not None:
        return "fused_adapters: true" if settings.fused_adapters else ""
    gains = processes.count() == 1 and device.startswith("cuda") and has_triton()
    return "by default on a GPU" if gains and not _is_fused_by_control(run) else ""


def _is_fused_by_control(run: Run) -> bool:
    """Return whether attaching NA-LoRA fuses the layers."""
    return getattr(run.method, "kernels", None) == "fused"
