"""Names that PEFT gives: to its adapter, and to a module of the model that it wraps twice."""

from __future__ import annotations

# PEFT's own name for a first adapter, which every method here trains.
ADAPTER = "default"
_WRAPPERS = "base_model.model."


def in_base(name: str) -> str:
    """The name in the base model; one that already is that stays as it is."""
    return name.removeprefix(_WRAPPERS)


def in_wrapper(name: str) -> str:
    """The name in PEFT's model, given the base model's."""
    return f"{_WRAPPERS}{name}"
