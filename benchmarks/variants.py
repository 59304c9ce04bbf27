"""The variants of a training step: PEFT, its peers and nalora, each a context around the steps of one model."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import patches
import peers
import torch
from harness import Variant
from training import Training

import nalora
from nalora.control.fused_model import fused_layers
from nalora.training.accelerations import larger_loss_chunks

BASELINE = "PEFT LoRA"


class Described(NamedTuple):
    """A variant and what is known of it before it runs.

    Args:
        enter: enters the variant and yields its step.
        needs: names of the packages and functions without which it cannot run.
        compiled: whether it compiles layers. Such variants are measured one by one, since each would discard the
            compiled code of the other.
        fp8: whether the frozen weights are FP8.
        same_gradients: whether gradients must agree with PEFT's; False where a method changes them in the backward.
        graphed: whether layers are replayed from CUDA graphs, from the second pass on.
    """

    enter: Variant
    needs: tuple[str, ...] = ()
    compiled: bool = False
    fp8: bool = False
    same_gradients: bool = True
    graphed: bool = False


def of_plain_base(training: Training, kernels: peers.Kernels) -> dict[str, Described]:
    """Return the variants of a base in bf16 or four bits by name, the baseline first."""
    model = training.model

    def liger(variant=None, ffn: bool = False) -> Variant:
        return training.within(lambda: patches.liger(model, ffn=ffn), variant)

    def larger(variant) -> Variant:
        return liger(training.within(larger_loss_chunks, variant))

    def compiled(variant) -> Variant:
        of_loss = training.within(lambda: liger_loss(model), training.within(larger_loss_chunks, variant))
        return with_cudnn(training, of_loss)

    def lora_kernels(name: str, variant=None) -> Variant:
        return training.within(lambda: peers.lora_kernels(model, getattr(kernels, name)), variant)

    def unsloth(**options: bool) -> Variant:
        return training.within(lambda: peers.unsloth(model, kernels.unsloth, **options))

    def torch_loss(variant=None) -> Variant:
        return training.within(lambda: patches.torch_loss(model), variant)

    fused, statistics = training.ours(kernels="fused"), training.ours()
    return {
        BASELINE: Described(training.plain),
        "PEFT LoRA + Liger": Described(liger(ffn=True), ("liger",)),
        "PEFT LoRA, compiled layers": Described(
            training.within(lambda: patches.compiled_layers(model)), compiled=True
        ),
        "PEFT LoRA + Liger's loss, compiled layers": Described(
            training.within(lambda: liger_loss(model), training.within(lambda: patches.compiled_layers(model))),
            ("liger",), compiled=True,
        ),
        "Unsloth": Described(unsloth(), ("unsloth",)),
        "Unsloth, compiled layers": Described(unsloth(compiled=True), ("unsloth",), compiled=True),
        "Unsloth's LoRA kernels": Described(lora_kernels("unsloth"), ("unsloth",)),
        "Axolotl's LoRA kernels": Described(lora_kernels("axolotl"), ("axolotl",)),
        "Axolotl's LoRA kernels + Liger": Described(liger(lora_kernels("axolotl")), ("axolotl", "liger")),
        "paper's hooks": Described(training.paper, same_gradients=False),
        "NA-LoRA, model untouched": Described(statistics),
        "NA-LoRA, fused LoRA layers": Described(fused),
        "NA-LoRA, everything on": Described(liger(fused), ("liger",)),
        "NA-LoRA, fused LoRA layers, PyTorch's loss": Described(torch_loss(fused), ("linear_cross_entropy",)),
        "nalora.fuse": Described(fuse(training)),
        "nalora.fuse + Liger": Described(liger(fuse(training)), ("liger",)),
        "Unsloth, cuDNN attention": Described(with_cudnn(training, unsloth()), ("unsloth",)),
        "NA-LoRA, everything on, cuDNN attention": Described(with_cudnn(training, larger(fused)), ("liger",)),
        "nalora.fuse + Liger, cuDNN attention, CUDA graphs": Described(
            with_cudnn(training, larger(fuse(training, cuda_graphs=True))), ("cuda_graphs", "liger"), graphed=True
        ),
        "NA-LoRA, everything on, cuDNN attention, CUDA graphs": Described(
            with_cudnn(training, larger(fuse(training, statistics, cuda_graphs=True))),
            ("cuda_graphs", "liger"), graphed=True,
        ),
        "nalora.fuse, compiled layers": Described(fuse(training, compile_layers=True), compiled=True),
        "nalora.fuse + Liger's loss, compiled layers": Described(
            training.within(lambda: liger_loss(model), fuse(training, compile_layers=True)), ("liger",), compiled=True,
        ),
        "NA-LoRA + Liger's loss, compiled layers": Described(
            training.within(lambda: liger_loss(model), fuse(training, statistics, compile_layers=True)),
            ("liger",), compiled=True,
        ),
        "NA-LoRA + Liger's loss, compiled layers, cuDNN attention": Described(
            compiled(fuse(training, statistics, compile_layers=True)), ("liger",), compiled=True,
        ),
        "NA-LoRA + Liger's loss, compiled layers, cuDNN attention, CUDA graphs": Described(
            compiled(fuse(training, statistics, compile_layers=True, cuda_graphs=True)),
            ("cuda_graphs", "liger"), compiled=True, graphed=True,
        ),
    }  # fmt: skip


def of_fp8_base(training: Training) -> dict[str, Described]:
    """Return the variants of a model whose frozen weights `nalora.fuse(model, base="fp8")` converted."""
    model = training.model

    def liger(variant) -> Variant:
        return training.within(lambda: patches.liger(model, ffn=False), variant)

    statistics = training.ours(kernels="fused")
    compiled = training.within(lambda: fp8_with(model, "compiles_layers"))

    def graphed(variant) -> Described:
        graphs = training.within(lambda: fp8_with(model, "graphs_layers"), variant)
        within = with_cudnn(training, liger(training.within(larger_loss_chunks, graphs)))
        return Described(within, ("cuda_graphs", "liger"), fp8=True, graphed=True)

    both = training.within(lambda: fp8_with(model, "compiles_layers", "graphs_layers"), statistics)

    return {
        "nalora.fuse, FP8 base": Described(training.plain, fp8=True),
        "nalora.fuse + Liger, FP8 base": Described(liger(training.plain), ("liger",), fp8=True),
        "NA-LoRA, fused LoRA layers, FP8 base": Described(statistics, fp8=True),
        "NA-LoRA, everything on, FP8 base": Described(liger(statistics), ("liger",), fp8=True),
        "nalora.fuse + Liger, FP8 base, cuDNN attention, CUDA graphs": graphed(training.plain),
        "NA-LoRA, everything on, FP8 base, cuDNN attention, CUDA graphs": graphed(statistics),
        "nalora.fuse, compiled layers, FP8 base": Described(compiled, compiled=True, fp8=True),
        "nalora.fuse + Liger's loss, compiled layers, FP8 base": Described(
            training.within(lambda: liger_loss(model), compiled), ("liger",), compiled=True, fp8=True
        ),
        "NA-LoRA + Liger's loss, compiled layers, FP8 base": Described(
            training.within(
                lambda: liger_loss(model), training.within(lambda: fp8_with(model, "compiles_layers"), statistics)
            ),
            ("liger",), compiled=True, fp8=True,
        ),
        "NA-LoRA + Liger's loss, compiled layers, FP8 base, cuDNN attention, CUDA graphs": Described(
            with_cudnn(training, training.within(lambda: liger_loss(model), training.within(larger_loss_chunks, both))),
            ("cuda_graphs", "liger"), compiled=True, fp8=True, graphed=True,
        ),
    }  # fmt: skip


def with_cudnn(training: Training, variant: Variant) -> Variant:
    """Return a variant whose attention is cuDNN's."""
    return training.within(patches.cudnn_attention, variant)


@contextlib.contextmanager
def liger_loss(model: Any) -> Iterator[None]:
    """Use Liger's fused loss alone."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    with patches.contained(model) as causal:
        apply_liger_kernel_to_llama(model=causal, rope=False, rms_norm=False, swiglu=False)
        yield


@contextlib.contextmanager
def fp8_with(model: Any, *options: str) -> Iterator[None]:
    """Fuse a model with an FP8 base, whose originals are not kept, anew with some options."""
    layers = fused_layers(model)

    def install(chosen: bool) -> None:
        layers.remove()
        for option in options:
            setattr(layers, option, chosen)
        layers.install()

    with discarding(compiled="compiles_layers" in options, graphed="graphs_layers" in options):
        install(True)
        try:
            yield
        finally:
            install(False)


@contextlib.contextmanager
def discarding(*, compiled: bool, graphed: bool) -> Iterator[None]:
    """Compile from scratch, and keep neither compiled code nor the memory of CUDA graphs for the next variant."""
    if compiled:
        torch._dynamo.reset()
    try:
        yield
    finally:
        if compiled:
            torch._dynamo.reset()
        if graphed:
            gc.collect()
            torch.cuda.empty_cache()


def fuse(
    training: Training, variant: Variant | None = None, *, compile_layers: bool = False, cuda_graphs: bool = False
) -> Variant:
    """Return a variant (default: plain) with fused layers."""

    @contextlib.contextmanager
    def fused() -> Iterator[Callable[[], None]]:
        with discarding(compiled=compile_layers, graphed=cuda_graphs):
            layers = nalora.fuse(training.model, compile_layers=compile_layers, cuda_graphs=cuda_graphs)
            try:
                with (variant or training.plain)() as step:
                    yield step
            finally:
                layers.undo()

    return fused
