"""Names that PEFT gives to its tuners, to its adapter and to the modules of a model that it wraps."""

from __future__ import annotations

# PEFT's default name of an adapter, which every method here trains.
ADAPTER = "default"
# The tuners that NA-LoRA controls: each channel of a layer has parameters of its own in B.
CONTROLLED = ("lora", "gralora")
_WRAPPERS = "base_model.model."


def in_base(name: str) -> str:
    """Return a module's name in the base model, given its name there or in PEFT's model."""
    return name.removeprefix(_WRAPPERS)


def in_wrapper(name: str) -> str:
    """Return a module's name in PEFT's model, given its name in the base model."""
    return f"{_WRAPPERS}{name}"
