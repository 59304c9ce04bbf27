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
from nalora.errors import NALoRAError, first_line
from nalora.kernels.fused.fp8_linear import FP8Linear
from nalora.kernels.fused.fp8_refusals import MULTIPLE, WHERE, refuse_unless_convertible

# A layer without an adapter is converted from this size on. Smaller ones, such as the router of a mixture of experts,
# save no memory, and a rounded router sends tokens to other experts.
_SMALLEST = 512


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
    places = _checked_places(model, base.left)
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
            WHERE,
            found=f"a conversion that stopped after {len(base.converted)} layers ({first_line(error)})",
            expected="memory for the weights in both precisions, to go back",
            fix="load the model again, and give keep_base=True to be able to go back",
        ) from error
    base.error = math.sqrt(squares[0] / squares[1]) if squares[1] else 0.0
    return base


def convertible_layers(model: nn.Module) -> tuple[int, dict[str, list[str]]]:
    """Return how many layers `convert` would convert, and the adapted layers that it would leave, by reason.

    Only shapes and types are read: the model may be on the meta device.

    Raises:
        NALoRAError: what `convert` refuses, except for what only weights and their device show.
    """
    left: dict[str, list[str]] = {}
    return len(_checked_places(model, left, loaded=False)), left


def _checked_places(model: nn.Module, left: dict[str, list[str]], *, loaded: bool = True) -> list[_Place]:
    places = list(_places(model, left))
    for place in places:
        refuse_unless_convertible(place, loaded=loaded)
    if not places:
        raise NALoRAError(
            WHERE,
            found="no frozen linear layer",
            expected="a model whose linear layers are frozen below LoRA adapters",
            fix="train this model without base='fp8'",
        )
    return places


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
    if min(weight.shape) < MULTIPLE:
        return f"one of its dimensions is below {MULTIPLE}, which FP8 products need"
    if uses[id(weight)] > 1:
        return "its weight belongs to several layers"
    return ""


def _output_layer(model: nn.Module) -> nn.Module | None:
    get = getattr(base_of(model), "get_output_embeddings", None)
    output: Any = get() if get is not None else None
    return output.base_layer if isinstance(output, LoraLayer) else output


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
