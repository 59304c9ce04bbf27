"""Convert the frozen linear layers of a model with LoRA adapters to FP8, and back if a copy was kept."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from peft.tuners.lora.layer import LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from nalora.distributed.wrappers import base_of
from nalora.errors import NALoRAError, first_line, refuse_first
from nalora.kernels.fused.fp8_linear import FP8Linear

_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
_MULTIPLE = 16  # of inputs and outputs, which FP8 products need
# A layer without an adapter is converted from this size on. Smaller ones, such as the router of a mixture of experts,
# save no memory, and a rounded router sends tokens to other experts.
_SMALLEST = 512
_WHERE = 'fuse(model, base="fp8")'


class _Place(NamedTuple):
    """A linear layer to convert: its name, the module that holds it, and the attribute there."""

    name: str
    parent: nn.Module
    attribute: str

    @property
    def linear(self) -> nn.Linear:
        linear: nn.Linear = getattr(self.parent, self.attribute)
        return linear


class _Converted(NamedTuple):
    """A layer in FP8, its place, and the layer that was there; None if its weight was not kept."""

    place: _Place
    layer: FP8Linear
    linear: nn.Linear | None


@dataclass
class FP8Base:
    """The layers of a model that were converted, and those that were not, with the reason.

    Attributes:
        converted: the converted layers.
        left: the names of adapted layers that keep their weights, by reason.
        error: ‖W − W in FP8‖ / ‖W‖ over all converted weights.
        saved_bytes: the difference in device memory.
    """

    converted: list[_Converted] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=dict)
    error: float = 0.0
    saved_bytes: int = 0

    @property
    def can_restore(self) -> bool:
        """Whether the original weights were kept."""
        return all(each.linear is not None for each in self.converted)

    def commit(self, model: nn.Module) -> None:
        """Free the weights that are not kept, once nothing can fail any more."""
        self.converted = [each._replace(linear=each.linear if each.layer.kept is not None else None)
                          for each in self.converted]  # fmt: skip
        base = base_of(model)
        if not self.can_restore and hasattr(base, "save_pretrained"):
            vars(base)["save_pretrained"] = _refuse_to_save

    def restore(self, model: nn.Module) -> None:
        """Put the original layers back where the FP8 layers are now, on their device and in the model's dtype."""
        self._exchange(model, free=True)
        for place, _, _ in self.converted:
            vars(place.parent).pop("merge", None)
        self.converted = []

    @contextlib.contextmanager
    def in_own_precision(self, model: nn.Module) -> Iterator[None]:
        """Put the original layers back inside the block."""
        self._exchange(model, free=False)
        try:
            yield
        finally:
            self._back_to_fp8(model)

    def _exchange(self, model: nn.Module, *, free: bool) -> None:
        """Put the original layers back; if that fails, for want of memory perhaps, all layers are in FP8 as before."""
        try:
            for _, layer, linear in self.converted:
                assert linear is not None
                device = layer.codes.device
                if layer.kept is not None:
                    linear.weight.data = layer.kept.to(device)
                linear.bias = layer.bias
                if free:
                    layer.codes.data = layer.codes.data.cpu()
            _put(model, self.converted, {layer: linear for _, layer, linear in self.converted if linear is not None})
        except BaseException:
            self._back_to_fp8(model)
            raise

    def _back_to_fp8(self, model: nn.Module) -> None:
        for _, layer, linear in self.converted:
            if linear is not None and layer.kept is not None:
                linear.weight.data = layer.kept
            layer.codes.data = layer.codes.data.to(layer.scale_bits.device)
        _put(model, self.converted, {linear: layer for _, layer, linear in self.converted if linear is not None})


def _put(model: nn.Module, converted: list[_Converted], others: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules wherever they are: `unload` moves the base layer to the place of the LoRA layer."""
    for parent in {*model.modules(), *(each.place.parent for each in converted)}:
        for name, child in parent._modules.items():
            if child is not None and child in others:
                parent._modules[name] = others[child]


def convert(model: nn.Module, *, keep: bool = False) -> FP8Base:
    """Convert every frozen linear layer of the model that can be converted.

    Args:
        model: with LoRA adapters; trainable layers, output layers and small layers without an adapter stay as they are.
        keep: whether the original weights are copied to the host, so that `restore` can put them back. Without it they
            stay where they are until `commit`, if there is memory for both.

    Raises:
        NALoRAError: a GPU without FP8, layers that are quantised already, sharded, not loaded or hooked by others,
            sizes that FP8 products do not support, weights that are not finite, or nothing to convert. The model is
            unchanged then.
    """
    base = FP8Base()
    places = list(_places(model, base.left))
    for place in places:
        _refuse_unless_convertible(place)
    if not places:
        raise NALoRAError(
            _WHERE,
            found="no frozen linear layer",
            expected="a model whose linear layers are frozen below LoRA adapters",
            fix="train this model without base='fp8'",
        )
    hold = keep or _has_memory_for(places)
    squares = torch.zeros(2, dtype=torch.float64)
    try:
        # The largest first: if the memory is too small for one of them, nothing is lost yet.
        for place in sorted(places, key=lambda place: -place.linear.weight.numel()):
            linear = place.linear
            kept = linear.weight.detach().to("cpu", copy=True) if keep else None
            layer = FP8Linear(linear, kept)
            squares += _squares(linear.weight.detach(), layer)
            base.saved_bytes += linear.weight.nbytes - layer.codes.nbytes - layer.scale_bits.nbytes
            base.converted.append(_Converted(place, layer, linear if hold else None))
            _replace(place, layer)
            if kept is not None:
                linear.weight.data = kept
    except BaseException as error:
        if base.can_restore:
            base.restore(model)
            raise
        raise NALoRAError(
            _WHERE,
            found=f"a conversion that stopped after {len(base.converted)} layers ({first_line(error)})",
            expected="memory for the weights in both precisions, to go back",
            fix="load the model again, and give keep_base=True to be able to go back",
        ) from error
    base.error = math.sqrt(squares[0] / squares[1]) if squares[1] else 0.0
    return base


def _has_memory_for(places: Sequence[_Place]) -> bool:
    """Return whether all weights fit into memory in both precisions."""
    needed = Counter[torch.device]()
    for place in places:
        needed[place.linear.weight.device] += place.linear.weight.numel()
    return all(device.type != "cuda" or size < _free_memory(device) for device, size in needed.items())


def _free_memory(device: torch.device) -> int:
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free: int = torch.cuda.mem_get_info(device)[0]
    return (free + cached) * 9 // 10


def _replace(place: _Place, layer: FP8Linear) -> None:
    setattr(place.parent, place.attribute, layer)
    if isinstance(place.parent, LoraLayer):
        place.parent.merge = functools.partial(_refuse_to_merge, place.name)


def _squares(weight: Tensor, layer: FP8Linear) -> Tensor:
    """Return ‖W − W in FP8‖² and ‖W‖² on the host."""
    exact = weight.to(torch.float32)
    difference = exact - layer.quantised.dequantised(torch.float32)
    return torch.stack([difference.square().sum(), exact.square().sum()]).double().cpu()


def _places(model: nn.Module, left: dict[str, list[str]]) -> Iterator[_Place]:
    """Yield the layers to convert; add adapted layers that stay as they are to `left`."""
    names = {module: name for name, module in model.named_modules()}
    uses = Counter(id(parameter) for module in names for parameter in module.parameters(recurse=False))
    output = _output_layer(model)
    skipped: set[nn.Module] = set()
    for module, name in names.items():
        if isinstance(module, AuxiliaryTrainingWrapper):
            skipped |= set(module.modules())
        if isinstance(module, LoraLayer):
            skipped |= set(module.modules())
            reason = _why_left(module.base_layer, output, uses)
            if reason:
                left.setdefault(reason, []).append(name)
            else:
                yield _Place(f"{name}.base_layer", module, "base_layer")
        elif module not in skipped and type(module) is nn.Linear and min(module.weight.shape) >= _SMALLEST:
            parent, _, attribute = name.rpartition(".")
            if not _why_left(module, output, uses):
                yield _Place(name, model.get_submodule(parent), attribute)


def _why_left(layer: nn.Module, output: nn.Module | None, uses: Counter[int]) -> str:
    """Return why a layer keeps its weight; empty if it is to be converted or refused."""
    if layer is output:
        return "output layers keep their precision"
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not hasattr(layer, "in_features"):
        return f"{type(layer).__name__} is no linear layer"
    if any(parameter.requires_grad for parameter in layer.parameters()):
        return "its weight is trained"
    if min(weight.shape) < _MULTIPLE:
        return f"one of its dimensions is below {_MULTIPLE}, which FP8 products need"
    if uses[id(weight)] > 1:
        return "its weight belongs to several layers"
    return ""


def _output_layer(model: nn.Module) -> nn.Module | None:
    get = getattr(base_of(model), "get_output_embeddings", None)
    output: Any = get() if get is not None else None
    return output.base_layer if isinstance(output, LoraLayer) else output


def _refuse_unless_convertible(place: _Place) -> None:
    """Raise NALoRAError for a layer that cannot be converted, although it is a frozen linear layer."""
    linear, expected = place.linear, "a frozen torch.nn.Linear in bfloat16 or float32"
    if type(linear) is not nn.Linear:
        found, fix = f"{type(linear).__name__}, which is quantised or replaced already", "load the model unquantised"
        raise NALoRAError(place.name, found=found, expected=expected, fix=f"{fix}, or leave base='fp8' out")
    weight = linear.weight
    problems = (
        (weight.is_meta or hasattr(linear, "_hf_hook"), "a weight that is not loaded or is offloaded",
         "load the whole model onto one device"),
        (type(weight.data) is not Tensor, f"a weight of the class {type(weight.data).__name__}, sharded perhaps",
         "train on one device, or leave base='fp8' out"),
        (bool(linear._forward_hooks or linear._forward_pre_hooks), "forward hooks on the layer",
         "remove them first: the converted layer would not call them"),
        (weight.dtype not in (torch.bfloat16, torch.float32), f"a weight in {str(weight.dtype).removeprefix('torch.')}",
         "load the model in bfloat16, or leave base='fp8' out"),
        (getattr(place.parent, "merged", False), "an adapter that is merged into the weight",
         "call unmerge_adapter() first"),
        (not weight.is_meta and not bool(torch.isfinite(weight).all()), "a weight that is not finite",
         "load an undamaged model"),
    )  # fmt: skip
    refuse_first(place.name, expected, problems)
    if any(size % _MULTIPLE for size in weight.shape):
        raise NALoRAError(
            place.name,
            found=f"a weight of shape {tuple(weight.shape)}",
            expected=f"dimensions that are multiples of {_MULTIPLE}, which FP8 products need",
            fix="leave base='fp8' out, or leave the layer out of target_modules",
        )
    refuse_unless_supported(weight.device)


def refuse_unless_supported(device: torch.device) -> None:
    """Raise NALoRAError for a device without FP8 products of e4m3."""
    expected = "a CPU, or an NVIDIA GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell)"
    fix = "leave base='fp8' out; quantise: 4bit in a run file also saves memory"
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability >= _CAPABILITY:
            return
        found = f"{torch.cuda.get_device_name(device)}, of compute capability {capability[0]}.{capability[1]}"
    elif device.type == "cpu":
        return
    else:
        found = f"a model on {device}" + (" with ROCm, whose FP8 is another format" if torch.version.hip else "")
    raise NALoRAError(_WHERE, found=found, expected=expected, fix=fix)


def _refuse_to_merge(name: str, *_: Any, **__: Any) -> NoReturn:
    raise NALoRAError(
        name,
        found="a weight in FP8, into which an adapter cannot be merged",
        expected="the weight in its own precision",
        fix="save the adapter with save_pretrained and merge it into a freshly loaded model",
    )


def _refuse_to_save(*_: Any, **__: Any) -> NoReturn:
    raise NALoRAError(
        "save_pretrained of the base model",
        found="a base in FP8 whose original weights were not kept",
        expected="fuse(model, base='fp8', keep_base=True), which keeps them on the host",
        fix="save the adapter with save_pretrained of the PEFT model; the base is the one that was loaded",
    )
