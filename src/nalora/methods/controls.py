"""The controls that evidence needs: NA-LoRA with one of its parts off, at random, or in another form.

An arm that beats LoRA shows little unless it also beats these: they have the same cost, the same state and the same
histogram of factors, without the part that the paper says matters.
"""

from __future__ import annotations

import dataclasses

from nalora.config import NALoRAConfig
from nalora.methods.na_lora import NALoRA

# Name, title and what differs from NA-LoRA's defaults.
_CONTROLS = (
    # Observed and decided, nothing multiplied: must be LoRA to the last bit.
    ("na-lora-off", "NA-LoRA, both controls off", {"mask": False, "scaling": False}),
    # The learned mask's histogram without its choice of channels.
    ("na-lora-random", "NA-LoRA, the mask's values on random channels", {"mask_channels": "shuffled"}),
    # The first observation's mask, for good.
    ("na-lora-frozen", "NA-LoRA, mask decided once", {"mask_channels": "frozen"}),
    # The mask moves the gate's step between channels and does not shrink it.
    ("na-lora-mean", "NA-LoRA, the mask's mean preserved", {"preserve_mean": True}),
    # The whole factor in the gate's gradient.
    ("na-lora-utility", "NA-LoRA, mask by E|φ′(z)|·|u|", {"importance": "utility"}),
)


def _control(name: str, title: str, overrides: dict[str, object]) -> type[NALoRA]:
    shuffled = overrides.get("mask_channels") == "shuffled"
    return dataclasses.make_dataclass(
        name.title().replace("-", ""),
        [("config", NALoRAConfig, NALoRAConfig().changed(overrides))],
        bases=(NALoRA,),
        frozen=True,
        namespace={"name": name, "title": title, "reference": "control", "shuffled_by_seed": shuffled},
    )


METHODS = tuple(_control(*row) for row in _CONTROLS)
