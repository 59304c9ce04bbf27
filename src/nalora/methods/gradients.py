"""The mean gradient of each target layer's full weight over the first batches, reduced at once to what a start needs.

A gradient is dYᵀ·X, read by hooks on the base layer: X where it goes in, dY where its output's gradient comes back. No
weight is made trainable, so a base in 4 bits has gradients like any other. All gradients of a 7B model are 26 GB in
float32: layers go in groups, each summed over all batches, reduced and freed before the next.
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
from nalora.errors import NALoRAError, require
from nalora.methods import gradient_cache
from nalora.methods.gradient_cache import Reduced
from nalora.methods.lora import leave_out, lora_layers
from nalora.methods.method import Batch, Start
from nalora.models.attention import without_cache

# (a layer's name, the PEFT layer, its mean gradient in float32: outputs × inputs) to the tensors worth keeping.
Reduce = Callable[[str, Any, Tensor], dict[str, Tensor]]

# With 8 batches, as LoRA-GA takes, of one pass each: 64 passes in all.
MOST_GROUPS = 8


def reduce_mean_gradients(
    model: nn.Module,
    start: Start,
    batches: int,
    reduce: Reduce,
    key: Mapping[str, Any],
    memory: float = 4.0,
) -> Reduced:
    """Reduce the mean gradient of every layer that has an adapter; the adapters themselves do not act.

    The mean is over all label tokens of all processes' batches, so it does not depend on how rows are split into passes
    and over processes. The model is left as it was found. What came out is kept in `start.cache` and found there by
    content.

    Args:
        model: wrapped by PEFT.
        start: gives the batches, the cache and the ear for progress.
        batches: how many batches, each of as many rows as an optimizer step has.
        reduce: what to keep of a gradient; its result is on the CPU and the same on every process.
        key: whatever `reduce` depends on beside the layer and its gradient.
        memory: GiB of gradients at a time. There are two groups or more where there are two layers, and never more
            than 8, each a pass over all batches: where 8 do not suffice, groups are larger than this.

    Raises:
        NALoRAError: a layer that is no linear one, or gets no gradient, or one that is not finite; batches without
            labels, or without any token to learn.
    """
    layers = dict(lora_layers(model))
    _refuse_all_but_linear(model, layers)
    _refuse_other_weights(layers)
    device = next(iter(layers.values())).get_base_layer().weight.device
    file = None
    if start.cache is not None:
        file = start.cache / gradient_cache.file_name(
            model, start.batches(batches), device, {**key, "batches": batches}
        )
        kept = gradient_cache.read(file, set(layers), device)
        if kept is not None:
            start.report("gradients kept from before", 1, 1)
            return kept
    groups = grouped({name: _accumulator_bytes(layer) for name, layer in layers.items()}, int(memory * 2**30))
    reduced: Reduced = {}
    passes = batches * start.passes
    with _untouched(model, layers):
        for done, group in enumerate(groups):

            def passed(number: int, before: int = done * passes) -> None:
                start.report("gradients", before + number, len(groups) * passes)

            gradients = _mean_gradients(model, {name: layers[name] for name in group}, start.batches(batches), passed)
            for name in group:
                reduced[name] = _same_everywhere(reduce(name, layers[name], gradients.pop(name)))
    if file is not None and is_first_process():
        gradient_cache.write(file, reduced)
    return reduced


def grouped(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Layers in order, in groups of at most `limit` bytes: at least 2 groups of two layers or more, at most 8."""
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
    """Of these layers, over all tokens of all processes."""
    sums = {name: _accumulator(layer) for name, layer in layers.items()}
    tokens = torch.zeros((), dtype=torch.long, device=next(iter(sums.values())).device)
    # Added to each output, so that the graph starts at the lowest of these layers, whatever the architecture, and
    # nothing below is gone back through. A number on the CPU can be added to a tensor on any device.
    anchor = torch.zeros((), requires_grad=True)

    def tap(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            entered = inputs[0].detach()

            def add(gradient: Tensor) -> None:
                rows, columns = (each.flatten(0, -2).to(sums[name].dtype) for each in (gradient, entered))
                sums[name].addmm_(rows.T, columns)

            left = output + anchor
            left.register_hook(add)  # type: ignore[no-untyped-call]
            return left

        return hook

    hooks = [layer.get_base_layer().register_forward_hook(tap(name)) for name, layer in layers.items()]
    try:
        for number, batch in enumerate(batches, 1):
            learned = label_tokens(model, batch)
            if learned:
                tokens += learned
                loss = model(**batch).loss * learned
                if loss.requires_grad:
                    torch.autograd.grad(loss, anchor)
            passed(number)
    finally:
        for each in hooks:
            each.remove()
    if not sum_over_processes(tokens):
        raise NALoRAError(
            "training data",
            found="first batches without any token to learn",
            expected="batches that a gradient can be taken of",
            fix="raise gradient_batches or check the data",
        )
    for name, total in sums.items():
        _refuse_useless(name, sum_over_processes(total).div_(tokens))
    return sums


def label_tokens(model: nn.Module, batch: Batch) -> int:
    """How many labels the mean loss of a batch is over: a decoder's first label is nobody's to predict.

    Raises:
        NALoRAError: the batch has no labels.
    """
    if "labels" not in batch:
        raise NALoRAError(
            "training data",
            found=f"a batch of {', '.join(batch)}",
            expected="labels: the gradient is the loss's",
            fix="let the collator make them",
        )
    labels = batch["labels"]
    if labels.dim() > 1 and not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        labels = labels[..., 1:]
    return int((labels != IGNORED_LABEL).sum())


def refuse_not_positive(method: Any, *settings: str) -> None:
    """Settings of a method that must be above zero.

    Raises:
        NALoRAError: one is not.
    """
    for setting in settings:
        value = getattr(method, setting)
        require(value > 0, setting, value, "a positive number", "raise it")


@contextlib.contextmanager
def _untouched(model: nn.Module, layers: Mapping[str, Any]) -> Iterator[None]:
    """Dropout, adapters and caches off, all weights frozen; all of it, and the random state, put back at the end."""
    modes = [(module, module.training) for module in model.modules()]
    learning = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    acting = [layer for layer in layers.values() if not layer.disable_adapters]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), torch.enable_grad(), without_cache(model):
        try:
            for module, _ in modes:
                # A linear layer does the same in both modes; but bitsandbytes' repacks its weights for good on a CPU
                # when it first computes in evaluation mode.
                module.training = isinstance(module, nn.Linear)
            for layer in acting:
                layer.enable_adapters(False)
            for parameter, _ in learning:
                parameter.requires_grad_(False)
            yield
        finally:
            for layer in acting:
                layer.enable_adapters(True)
            for parameter, learns in learning:
                parameter.requires_grad_(learns)
            for module, training in modes:
                module.training = training


def _refuse_all_but_linear(model: nn.Module, layers: Mapping[str, Any]) -> None:
    from nalora.control.replica import feature_sizes

    others = [name for name, layer in layers.items() if feature_sizes(layer) is None]
    if others:
        raise NALoRAError(
            others[0],
            found=f"an adapter on {type(layers[others[0]].get_base_layer()).__name__}",
            expected="linear layers: the start is made from the gradient of their weights",
            fix=leave_out(model, others),
        )


def _refuse_other_weights(layers: Mapping[str, Any]) -> None:
    """FSDP can leave every process but the first without the weights until training starts."""
    if processes.count() == 1:
        return
    name, layer = next(iter(layers.items()))
    own = layer.get_base_layer().weight.detach().double().norm()
    mean = sum_over_processes(own / processes.count())
    if processes.any_process(not (own - mean).abs() <= 1e-9 * mean, own.device):
        raise NALoRAError(
            name,
            found="other weights than on another process",
            expected="the model's weights on every process: each takes the gradient of its share of the rows",
            fix="set fsdp_cpu_ram_efficient_loading: false in the launch configuration",
        )


def _refuse_useless(name: str, gradient: Tensor) -> None:
    largest = torch.linalg.vector_norm(gradient, float("inf")).item()
    if not 0 < largest < float("inf"):
        raise NALoRAError(
            name,
            found="no gradient: it is zero everywhere" if largest == 0 else "a gradient that is not finite",
            expected="a gradient of the loss to start from",
            fix="leave the layer out of target_modules"
            if largest == 0
            else "use dtype bfloat16 or float32, and check that the model's loss on this data is a number",
        )


def _accumulator(layer: Any) -> Tensor:
    weight = layer.get_base_layer().weight
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return torch.zeros(layer.out_features, layer.in_features, dtype=dtype, device=weight.device)


def _accumulator_bytes(layer: Any) -> int:
    return int(layer.out_features * layer.in_features * 4)


def _same_everywhere(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first process's, on the CPU: a decomposition of the same matrix need not come out the same twice."""
    return {
        part: sum_over_processes(each.contiguous() if is_first_process() else torch.zeros_like(each).contiguous()).cpu()
        for part, each in tensors.items()
    }
