"""Which frozen linear layers, and which devices, cannot have weights in FP8: each is refused by name."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from nalora.errors import NALoRAError, refuse_first

WHERE = 'fuse(model, base="fp8")'
MULTIPLE = 16  # of inputs and outputs, which FP8 products need
_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


class LinearPlace(Protocol):
    """A linear layer to convert: its name, and the module that holds it."""

    @property
    def name(self) -> str:
        """The layer's name."""

    @property
    def parent(self) -> nn.Module:
        """The module that holds it."""

    @property
    def linear(self) -> nn.Linear:
        """The layer."""


def refuse_unless_convertible(place: LinearPlace, *, loaded: bool) -> None:
    """Raise NALoRAError for a layer that cannot be converted, although it is a frozen linear layer."""
    linear, expected = place.linear, "a frozen torch.nn.Linear in bfloat16 or float32"
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
        (weight.dtype not in (torch.bfloat16, torch.float32), f"a weight in {str(weight.dtype).removeprefix('torch.')}",
         "load the model in bfloat16, or leave base='fp8' out"),
        (getattr(place.parent, "merged", False), "an adapter that is merged into the weight",
         "call unmerge_adapter() first"),
        (not weight.is_meta and not bool(torch.isfinite(weight).all()), "a weight that is not finite",
         "load an undamaged model"),
    )  # fmt: skip
    refuse_first(place.name, expected, problems)
    if any(size % MULTIPLE for size in weight.shape):
        raise NALoRAError(
            place.name,
            found=f"a weight of shape {tuple(weight.shape)}",
            expected=f"dimensions that are multiples of {MULTIPLE}, which FP8 products need",
            fix="leave base='fp8' out, or leave the layer out of target_modules",
        )
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
    raise NALoRAError(WHERE, found=found, expected=expected, fix=fix)
