"""A module's name with PEFT around its model, and in the model itself: PEFT wraps twice, and names both."""

from __future__ import annotations

_WRAPPERS = "base_model.model."


def in_base(name: str) -> str:
    """The name in the base model; one that already is that stays as it is."""
    return name.removeprefix(_WRAPPERS)


def in_wrapper(name: str) -> str:
    """The name in PEFT's model, given the base model's."""
    return f"{_WRAPPERS}{name}"
