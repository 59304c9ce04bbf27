"""Checkpoints as models: two adapters of one base share its weights, and a model takes another checkpoint's place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from nalora.errors import NALoRAError
from nalora.models.peft_names import ADAPTER

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds a PEFT adapter; else it holds a model."""
    return (folder / ADAPTER_CONFIG).is_file()


def adapt(base: nn.Module, folder: Path) -> nn.Module:
    """`base` with the adapter of a folder, which is changed by it.

    Raises:
        NALoRAError: a damaged adapter, or one of another model.
    """
    import peft

    try:
        wrapped: nn.Module = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, SafetensorError) as error:
        raise _unusable(folder, error) from error
    return wrapped


def twin(model: nn.Module) -> nn.Module:
    """A second model with what is trained of its own, on the same frozen base: two adapters cost one base in memory."""
    shared = {
        id(parameter): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if ADAPTER not in name.split(".") and not parameter.requires_grad
    }
    copied = copy.deepcopy(model, shared)
    for module in copied.modules():
        # A function that stands in for a layer's forward, as fused layers' do, still computes with the original.
        stand_in = vars(module).get("forward")
        if stand_in is not None and getattr(stand_in, "__self__", None) is not module:
            del module.forward
    return copied


def take_adapter(model: nn.Module, folder: Path) -> None:
    """Put the adapter of a folder in the place of the one that `model` has.

    Raises:
        NALoRAError: a damaged adapter, or one of another shape.
    """
    import peft

    try:
        _give_same_ranks(model, folder)
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        outcome = peft.set_peft_model_state_dict(model, tensors, ADAPTER)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise _unusable(folder, error) from error
    missing = [name for name in outcome.missing_keys if ADAPTER in name.split(".")]
    if missing or outcome.unexpected_keys:
        raise _unusable(folder, ValueError(f"other layers: {(missing + list(outcome.unexpected_keys))[0]}"))


def _give_same_ranks(model: nn.Module, folder: Path) -> None:
    """Make the adapter anew where the folder's has other ranks or scalings: GoRA's checkpoints have a rank for each
    layer, and what it saves at the end has one for all."""
    import peft

    wrapped: Any = model
    try:
        saved = peft.PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _unusable(folder, error) from error
    present = wrapped.peft_config[ADAPTER]
    names = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
    if any(getattr(saved, name, None) != getattr(present, name, None) for name in names):
        wrapped.delete_adapter(ADAPTER)
        wrapped.load_adapter(str(folder), ADAPTER)
        wrapped.set_adapter(ADAPTER)
        model.eval()


def _unusable(folder: Path, error: Exception) -> NALoRAError:
    lines: list[Any] = [line for line in str(error).splitlines() if line.strip()]
    return NALoRAError(
        str(folder),
        found=f"an adapter that cannot be read ({lines[0].strip() if lines else type(error).__name__})",
        expected="a whole adapter of this run's base model",
        fix="remove that folder, or compare checkpoints of one run",
    )


class Residents:
    """Two models that states take their places in, one after the other: what stays is not loaded again.

    Args:
        model: the base; it is wrapped or given up when states are loaded, so nobody else should hold it.
        load: makes a model of a full-fine-tuning state's folder, the base again of None.
    """

    def __init__(self, model: nn.Module, load: Callable[[Path | None], nn.Module]) -> None:
        self._load = load
        self._base: nn.Module | None = model
        self._models: list[nn.Module | None] = [None, None]
        self._states: list[object] = [None, None]

    def pair(self, before: Path | None, after: Path | None) -> tuple[nn.Module, nn.Module]:
        """Two states as models; None stands for the base.

        Raises:
            NALoRAError: a state that cannot be read, or of another model.
        """
        first = self._slot(before, keep=after)
        second = self._slot(after, keep=before)
        one, other = self._models[first], self._models[second]
        assert one is not None
        assert other is not None
        return one, other

    def _slot(self, state: Path | None, keep: Path | None) -> int:
        wanted = _key(state)
        if wanted in self._states:
            return self._states.index(wanted)
        slot = 1 if self._states[0] == _key(keep) else 0
        self._states[slot] = wanted
        if is_adapter(state or keep or Path()):
            self._adapted(slot, state, keep)
        else:
            self._whole(slot, state)
        return slot

    def _adapted(self, slot: int, state: Path | None, keep: Path | None) -> None:
        """Adapters of one base: made once, their weights replaced; the base is a model whose adapters are off."""
        model = self._models[slot]
        if model is None:
            other = self._models[1 - slot]
            if other is not None:
                model = twin(other)
            else:
                assert self._base is not None
                folder = state or keep
                assert folder is not None
                model, self._base = adapt(self._base, folder), None
            self._models[slot] = model
        switches: Any = model.base_model
        if state is None:
            switches.disable_adapter_layers()
        else:
            switches.enable_adapter_layers()
            take_adapter(model, state)

    def _whole(self, slot: int, state: Path | None) -> None:
        """Whole models: the one whose place is taken is let go before the next is loaded."""
        base, self._base = self._base, None
        self._models[slot] = None
        if state is not None:
            base = None
        self._models[slot] = self._load(state) if base is None else base


def _key(state: Path | None) -> object:
    return "base" if state is None else state
