"""The mean gradient of each target layer's full weight over the first batches, reduced to what a method starts from.

A gradient is dYᵀ·X, read by hooks on the base layer: its input X and the gradient dY of its output. No weight is made
trainable, so this also works for a base in 4 bits. All gradients of a 7B model take 26 GB in float32: layers are
processed in groups, each summed over all batches, reduced and freed before the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nalora.control.tokens import IGNORED_LABEL
from nalora.distributed import processes
from nalora.distributed.processes import is_first_process, sum_over_processes
from nalora.errors import NALoRAError
from nalora.methods import gradient_cache
from nalora.methods.gradient_cache import Reduced
from nalora.methods.lora import leave_out, lora_layers
from nalora.methods.method import Batch, Start
from nalora.models.attention import without_cache

# (a layer's name, the PEFT layer, its mean gradient in float32: outputs × inputs) → the tensors to keep.
Reduce = Callable[[str, Any, Tensor], dict[str, Tensor]]

# 64 passes for LoRA-GA's 8 batches of one pass each.
MOST_GROUPS = 8


def reduce_mean_gradients(
    model: nn.Module,
    start: Start,
    batches: int,
    reduce: Reduce,
    key: Mapping[str, Any],
    memory: float = 4.0,
) -> Reduced:
    """Reduce the mean gradient of every layer that has an adapter; the adapters are switched off meanwhile.

    The mean is over all label tokens of all processes' batches, so it does not depend on how rows are split into passes
    and processes. The model is unchanged afterwards. Results are cached in `start.cache` by a hash of their inputs.

    Args:
        model: wrapped by PEFT.
        start: provides the batches, the cache and the progress callback.
        batches: number of batches, each with as many rows as an optimizer step.
        reduce: returns what to keep of a gradient; the result is on the CPU and the same on every process.
        key: everything that `reduce` depends on besides the layer and its gradient.
        memory: GiB of gradients at a time. There are at least two groups of layers if there are two layers, and at
            most 8, each with its own passes over all batches; if 8 are too few, groups are larger than `memory`.

    Raises NALoRAError if a layer is not linear, if a gradient is missing or not finite, or if batches have no labels or
    no label tokens.
    """
    layers = dict(lora_layers(model))
    _check_linear(model, layers)
    _check_same_weights(layers)
    device = next(iter(layers.values())).get_base_layer().weight.device
    file = None
    if start.cache is not None:
        settings = {**key, "batches": batches}
        file = start.cache / gradient_cache.file_name(model, start.batches(batches), device, settings)
        if (cached := gradient_cache.read(file, set(layers), device)) is not None:
            start.report("cached gradients", 1, 1)
            return cached
    sizes = {name: int(layer.out_features * layer.in_features * 4) for name, layer in layers.items()}
    groups = grouped(sizes, int(memory * 2**30))
    reduced: Reduced = {}
    passes = batches * start.passes
    with _gradients_only(model, layers):
        for done, group in enumerate(groups):

            def passed(number: int, before: int = done * passes) -> None:
                start.report("gradients", before + number, len(groups) * passes)

            gradients = _mean_gradients(model, {name: layers[name] for name in group}, start.batches(batches), passed)
            for name in group:
                reduced[name] = _of_first_process(reduce(name, layers[name], gradients.pop(name)))
    if file is not None and is_first_process():
        gradient_cache.write(file, reduced)
    return reduced


def grouped(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Return the layers in order, in groups of at most `limit` bytes: at least 2 groups if possible, at most 8."""
    capacity = float(min(limit, sum(sizes.values()) // 2))
    while True:
        groups: list[list[str]] = []
        filled = 0
        for name, size in sizes.items():
            if not groups or filled + size > capacity:
                groups.append([])
                filled = 0
            groups[-1].append(name)
            filled += size
        if len(groups) <= MOST_GROUPS:
            return groups
        capacity = max(capacity, sum(sizes.values()) / MOST_GROUPS) * 1.05


def _mean_gradients(
    model: nn.Module, layers: Mapping[str, Any], batches: Iterable[Batch], passed: Callable[[int], None]
) -> dict[str, Tensor]:
    """Return the mean gradients of these layers over all tokens of all processes."""
    sums = {name: _zeros_like_weight(layer) for name, layer in layers.items()}
    tokens = torch.zeros((), dtype=torch.long, device=next(iter(sums.values())).device)
    # Added to each output, so that the autograd graph starts at the lowest of these layers and backward stops there.
    # A scalar on the CPU can be added to a tensor on any device.
    anchor = torch.zeros((), requires_grad=True)

    def add_gradients_to(total: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            layer_input = inputs[0].detach()

            def add(gradient: Tensor) -> None:
                rows, columns = (tensor.flatten(0, -2).to(total.dtype) for tensor in (gradient, layer_input))
                total.addmm_(rows.T, columns)

            anchored = output + anchor
            anchored.register_hook(add)  # type: ignore[no-untyped-call]
            return anchored

        return hook

    hooks = [
        layer.get_base_layer().register_forward_hook(add_gradients_to(sums[name])) for name, layer in layers.items()
    ]
    try:
        for number, batch in enumerate(batches, 1):
            if labels := label_tokens(model, batch):
                tokens += labels
                loss = model(**batch).loss * labels
                if loss.requires_grad:
                    torch.autograd.grad(loss, anchor)
            passed(number)
    finally:
        for handle in hooks:
            handle.remove()
    if not sum_over_processes(tokens):
        raise NALoRAError(
            "training data",
            found="first batches without any label token",
            expected="batches with a loss, from which a gradient can be computed",
            fix="raise gradient_batches or check the data",
        )
    for name, total in sums.items():
        _check_gradient(name, sum_over_processes(total).div_(tokens))
    return sums


def label_tokens(model: nn.Module, batch: Batch) -> int:
    """Return the number of labels in the mean loss of a batch; a decoder does not predict its first label.

    Raises NALoRAError if the batch has no labels.
    """
    if "labels" not in batch:
        raise NALoRAError(
            "training data",
            found=f"a batch of {', '.join(batch)}",
            expected="labels, which the loss and its gradient need",
            fix="use a collator that adds labels",
        )
    labels = batch["labels"]
    if labels.dim() > 1 and not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        labels = labels[..., 1:]
    return int((labels != IGNORED_LABEL).sum())


@contextlib.contextmanager
def _gradients_only(model: nn.Module, layers: Mapping[str, Any]) -> Iterator[None]:
    """Switch off dropout, adapters and caches and freeze all weights; restore them and the random state afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    enabled = [layer for layer in layers.values() if not layer.disable_adapters]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), torch.enable_grad(), without_cache(model):
        try:
            for module, _ in modes:
                # A linear layer is the same in both modes, but on a CPU bitsandbytes' layers repack their weights
                # permanently when they first run in evaluation mode.
                module.training = isinstance(module, nn.Linear)
            for layer in enabled:
                layer.enable_adapters(False)
            for parameter, _ in trainable:
                parameter.requires_grad_(False)
            yield
        finally:
            for layer in enabled:
                layer.enable_adapters(True)
            for parameter, requires_grad in trainable:
                parameter.requires_grad_(requires_grad)
            for module, training in modes:
                module.training = training


def _check_linear(model: nn.Module, layers: Mapping[str, Any]) -> None:
    from nalora.control.replica import feature_sizes

    others = [name for name, layer in layers.items() if feature_sizes(layer) is None]
    if others:
        raise NALoRAError(
            others[0],
            found=f"an adapter on {type(layers[others[0]].get_base_layer()).__name__}",
            expected="linear layers: the start is computed from the gradient of their weights",
            fix=leave_out(model, others),
        )


def _check_same_weights(layers: Mapping[str, Any]) -> None:
    """Raise NALoRAError if processes have different weights: FSDP can load them on the first process only."""
    if processes.count() == 1:
        return
    name, layer = next(iter(layers.items()))
    own = layer.get_base_layer().weight.detach().double().norm()
    mean = sum_over_processes(own / processes.count())
    if processes.any_process(not (own - mean).abs() <= 1e-9 * mean, own.device):
        raise NALoRAError(
            name,
            found="other weights than on another process",
            expected="the model's weights on every process: each computes the gradient of its share of the rows",
            fix="set fsdp_cpu_ram_efficient_loading: false in the launch configuration",
        )


def _check_gradient(name: str, gradient: Tensor) -> None:
    largest = torch.linalg.vector_norm(gradient, float("inf")).item()
    if 0 < largest < float("inf"):
        return
    found, fix = "no gradient: it is zero everywhere", "leave the layer out of target_modules"
    if largest != 0:
        found = "a gradient that is not finite"
        fix = "use dtype bfloat16 or float32, and check that the model's loss on this data is a number"
    raise NALoRAError(name, found=found, expected="a gradient of the loss to start from", fix=fix)


def _zeros_like_weight(layer: Any) -> Tensor:
    weight = layer.get_base_layer().weight
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return torch.zeros(layer.out_features, layer.in_features, dtype=dtype, device=weight.device)


def _of_first_process(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the first process's tensors, on the CPU: decompositions of the same matrix can differ."""
    return {
        part: sum_over_processes(
            tensor.contiguous() if is_first_process() else torch.zeros_like(tensor).contiguous()
        ).cpu()
        for part, tensor in tensors.items()
    }
