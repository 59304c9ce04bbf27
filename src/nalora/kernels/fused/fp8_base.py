"""Convert the frozen linear layers of a model with LoRA adapters to FP8, and back if a copy was kept."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from peft.tuners.lora.layer import LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from nalora.distributed.wrappers import base_of
from nalora.errors import NALoRAError, refuse_first
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

    @property
    def fp8_linear(self) -> FP8Linear:
        layer: FP8Linear = getattr(self.parent, self.attribute)
        return layer


@dataclass
class FP8Base:
    """The layers of a model that were converted, and those that were not, with the reason.

    Attributes:
        converted: the places of the converted layers, with the original layer if it was kept on the host.
        left: the names of adapted layers that keep their weights, by reason.
        error: ‖W − W in FP8‖ / ‖W‖ over all converted weights.
        saved_bytes: the difference in device memory.
    """

    converted: list[tuple[_Place, nn.Linear | None]] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=dict)
    error: float = 0.0
    saved_bytes: int = 0

    @property
    def can_restore(self) -> bool:
        """Whether the original weights were kept."""
        return all(linear is not None for _, linear in self.converted)

    def restore(self) -> None:
        """Put the original layers back, on the device where the FP8 weights are now."""
        for place, linear in self.converted:
            assert linear is not None
            linear.weight.data = linear.weight.data.to(place.fp8_linear.codes.device)
            setattr(place.parent, place.attribute, linear)
            vars(place.parent).pop("merge", None)
        self.converted = []

    @contextlib.contextmanager
    def in_own_precision(self) -> Iterator[None]:
        """Put the original layers back inside the block."""
        converted = [(place, place.fp8_linear, linear) for place, linear in self.converted]
        self.restore()
        try:
            yield
        finally:
            for place, layer, linear in converted:
                assert linear is not None
                _replace(place, layer)
                linear.weight.data = layer.kept
            self.converted = [(place, linear) for place, _, linear in converted]


def convert(model: nn.Module, *, keep: bool = False) -> FP8Base:
    """Convert every frozen linear layer of the model that can be converted.

    Args:
        model: with LoRA adapters; trainable layers, output layers and small layers without an adapter stay as they are.
        keep: whether the original weights are copied to the host, so that `restore` can put them back.

    Raises:
        NALoRAError: a GPU without FP8, layers that are quantised already, sharded, not loaded or hooked by others,
            sizes that FP8 products do not support, weights that are not finite, or nothing to convert. The model is
            unchanged then.
    """
    base = FP8Base()
    places = _checked_places(model, base.left)
    squares = torch.zeros(2, dtype=torch.float64)
    for place in places:
        linear = place.linear
        kept = linear.weight.detach().to("cpu", copy=True) if keep else None
        layer = FP8Linear(linear, kept)
        squares += _squares(linear.weight.detach(), layer)
        base.saved_bytes += linear.weight.nbytes - layer.codes.nbytes - layer.scale_bits.nbytes
        _replace(place, layer)
        if kept is not None:
            linear.weight.data = kept
        base.converted.append((place, linear if keep else None))
    base.error = math.sqrt(squares[0] / squares[1])
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
        _refuse_unless_convertible(place, loaded=loaded)
    if not places:
        raise NALoRAError(
            _WHERE,
            found="no frozen linear layer",
            expected="a model whose linear layers are frozen below LoRA adapters",
            fix="train this model without base='fp8'",
        )
    return places


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
    if uses[id(weight)] > 1:
        return "its weight belongs to several layers"
    return ""


def _output_layer(model: nn.Module) -> nn.Module | None:
    get = getattr(base_of(model), "get_output_embeddings", None)
    output: Any = get() if get is not None else None
    return output.base_layer if isinstance(output, LoraLayer) else output


def _refuse_unless_convertible(place: _Place, *, loaded: bool) -> None:
    """Raise NALoRAError for a layer that cannot be converted, although it is a frozen linear layer."""
    linear, expected = place.linear, "a frozen torch.nn.Linear in bfloat16, float16 or float32"
    if type(linear) is not nn.Linear:
        found, fix = f"{type(linear).__name__}, which is quantised or replaced already", "load the model unquantised"
        raise NALoRAError(place.name, found=found, expected=expected, fix=f"{fix}, or leave base='fp8' out")
    weight = linear.weight
    problems = (
        (loaded and (weight.is_meta or hasattr(linear, "_hf_hook")), "a weight that is not loaded or is offloaded",
         "load the whole model onto one device"),
        (type(weight.data) is not Tensor, f"a weight of the class {type(weight.data).__name__}, sharded perhaps",
         "train on one device, or leave base='fp8' out"),
        (bool(linear._forward_hooks or linear._forward_pre_hooks), "forward hooks on the layer",
         "remove them first: the converted layer would not call them"),
        (any(size % _MULTIPLE for size in weight.shape), f"a weight of shape {tuple(weight.shape)}",
         f"leave base='fp8' out: FP8 products need multiples of {_MULTIPLE}"),
        (not weight.is_meta and not bool(torch.isfinite(weight).all()), "a weight that is not finite",
         "load an undamaged model"),
    )  # fmt: skip
    refuse_first(place.name, expected, problems)
    if loaded:
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
