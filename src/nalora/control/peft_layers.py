"""The adapters of PEFT that NA-LoRA controls: LoRA's matrices, and GraLoRA's stacks of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from peft.tuners.lora.layer import LoraLayer
from torch import nn

from nalora.errors import NALoRAError
from nalora.models.peft_names import CONTROLLED

try:
    from peft.tuners.gralora.layer import GraloraLayer
except ImportError:  # PEFT has GraLoRA since 0.19
    GraloraLayer = None

# The classes of layers with such an adapter.
LAYERS: tuple[Any, ...] = (LoraLayer,) if GraloraLayer is None else (LoraLayer, GraloraLayer)
# PEFT's LoRA variants with plain factors A and B; DoRA only adds a magnitude.
_ALLOWED_VARIANTS = ("Dora",)
_CONTROLLED = "LoRA, rsLoRA, DoRA, PiSSA or GraLoRA, whose B has parameters for each channel"


class Adapter(NamedTuple):
    """Two factors of an adapter of a layer, with PEFT's name for it.

    LoRA has A [r, in] and B [out, r]. GraLoRA divides the weight into k × k blocks (`blocks`; 0 for LoRA) and stacks
    its factors: A [k, in/k, r] and B [k, r, out/k]. Channel c is column c mod out/k of B's block c div out/k, and the
    j-th of k equal groups of A's columns is read by B's block j alone.
    """

    name: str
    a: nn.Parameter
    b: nn.Parameter
    blocks: int = 0

    @property
    def channels(self) -> int:
        """The number of the layer's output channels."""
        return self.b.shape[0] * self.b.shape[2] if self.blocks else self.b.shape[0]


def all_adapters(layer: nn.Module) -> Iterator[Adapter]:
    """Yield the adapters of a layer, active or not. GraLoRA with hybrid_r has two: its blocks and a LoRA."""
    if isinstance(layer, LoraLayer):
        for name in layer.lora_A:
            yield Adapter(name, layer.lora_A[name].weight, layer.lora_B[name].weight)
    elif isinstance(layer, LAYERS):
        for name in layer.gralora_A:
            yield Adapter(name, layer.gralora_A[name], layer.gralora_B[name], layer.gralora_k[name])
            if layer.hybrid_r[name]:
                yield Adapter(name, layer.gralora_A_general[name].weight, layer.gralora_B_general[name].weight)


def active_adapters(layer: nn.Module) -> Iterator[Adapter]:
    """Yield the active adapters of a layer with the parameters that its modules hold now."""
    if isinstance(layer, LAYERS):
        adapters = list(all_adapters(layer))
        for name in layer.active_adapters:
            yield from (adapter for adapter in adapters if adapter.name == name)


def check_variant(name: str, layer: nn.Module) -> None:
    """Raise NALoRAError for an adapter without plain factors A and B."""
    kind = _tuner(layer)
    if isinstance(layer, LoraLayer) and kind != "lora":
        raise _unsupported(name, f"an adapter of PEFT's {kind!r} method ({type(layer).__name__})")
    for adapter, variant in getattr(layer, "lora_variant", {}).items():
        if not type(variant).__name__.startswith(_ALLOWED_VARIANTS):
            raise _unsupported(name, f"the LoRA variant {type(variant).__name__} in adapter {adapter!r}")


def _tuner(module: nn.Module) -> str:
    """Return PEFT's name of the tuner that a module belongs to, empty for other modules."""
    package, *names = type(module).__module__.split(".")
    return names[1] if package == "peft" and names[0] == "tuners" and len(names) > 2 else ""


def _unsupported(name: str, found: str) -> NALoRAError:
    return NALoRAError(
        name,
        found=found,
        expected=_CONTROLLED,
        fix="build the adapter with peft.LoraConfig and without that variant",
    )


def no_adapters(model: nn.Module) -> NALoRAError:
    """Return the error for a model without a layer that can be controlled."""
    if tuners := sorted({_tuner(module) for module in model.modules()} - {"", *CONTROLLED}):
        return NALoRAError(
            type(model).__name__,
            found=f"adapters of PEFT's {' and '.join(tuners)}, which has no parameters for single channels of the gate",
            expected=_CONTROLLED,
            fix='wrap the model with peft.LoraConfig(target_modules="all-linear"), or train it without NA-LoRA',
        )
    linear = sum(isinstance(m, nn.Linear) for m in model.modules())
    return NALoRAError(
        type(model).__name__,
        found=f"no LoRA layers ({type(model).__name__} with {linear} linear layers)",
        expected="a model wrapped by peft with a LoraConfig that targets FFN projections",
        fix='model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))',
    )
