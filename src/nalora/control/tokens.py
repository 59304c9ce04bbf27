"""The tokens of a forward pass that are not padding, from the attention mask of the tower that contains a block.

The innermost module around a block with an argument `attention_mask` is the best source: a decoder layer gets the mask
of its own tower, also in every recomputation, in the form that the attention kernel needs. If it gets none, the modules
around it up to the tower are the next sources, but none outside the tower: the mask of a text tower does not apply to a
vision tower, nor an encoder's to its decoder.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nalora.control.gate_taps import Tap
from nalora.errors import NALoRAError
from nalora.kernels.inert_hook import inert_hook

# Where transformers stores the checkpoint function of a module.
_CHECKPOINT = "_gradient_checkpointing_func"
# The label of a token without a loss: the default of torch's cross_entropy.
IGNORED_LABEL = -100


class _Argument:
    """A hook that stores one argument of a module's current call; a copy of the module gets an inert hook.

    Attributes:
        value: the argument.
        around: the same argument of the modules around this one.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name
        self.position = list(inspect.signature(module.forward).parameters).index(name)
        self.value: Any = None
        self.around: Sequence[_Argument] = ()
        self._module = module

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.value = args[self.position] if len(args) > self.position else kwargs.get(self.name)
        checkpoint = module.__dict__.get(_CHECKPOINT)
        if isinstance(checkpoint, functools.partial) and checkpoint.keywords.get("use_reentrant"):
            setattr(module, _CHECKPOINT, _WithArguments(checkpoint, (self, *self.around)))

    def remove(self) -> None:
        """Let the module checkpoint as before."""
        if isinstance(checkpoint := self._module.__dict__.get(_CHECKPOINT), _WithArguments):
            setattr(self._module, _CHECKPOINT, checkpoint.checkpoint)

    def __reduce__(self) -> tuple[Any, ...]:
        return inert_hook, ()


class _WithArguments:
    """A module's checkpoint function whose recomputations find the arguments of their own pass.

    Since version 5.23 transformers checkpoints a layer's `forward`, so that a recomputation calls none of its hooks. It
    counts with reentrant checkpointing, and another pass may have been computed in the meantime.
    """

    def __init__(self, checkpoint: Callable[..., Any], arguments: Sequence[_Argument]) -> None:
        self.checkpoint, self.arguments = checkpoint, arguments

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        values = [argument.value for argument in self.arguments]

        def with_arguments(*inputs: Any, **named: Any) -> Any:
            for argument, value in zip(self.arguments, values, strict=True):
                argument.value = value
            return function(*inputs, **named)

        return self.checkpoint(with_arguments, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (self.checkpoint,)


@dataclass(frozen=True, eq=False)
class TokenMask:
    """The mask of one gate layer's tokens in the current pass.

    Attributes:
        gate: the layer's name.
        attention_masks: the arguments that may hold the mask, the best source first.
        decoder: the mask and the labels of an encoder-decoder's decoder, for a gate in the decoder.
        image_labels: the labels of an image model.
    """

    gate: str
    attention_masks: list[_Argument]
    decoder: tuple[_Argument, _Argument] | None
    image_labels: _Argument | None = None

    def of(self, shape: torch.Size) -> Tensor | None:
        """Return the boolean mask of z's tokens for its leading shape, None if no token is padding.

        Raises:
            NALoRAError: the shape of the mask does not match.
        """
        masks = (_as_token_mask(argument.value) for argument in self.attention_masks)
        mask = next((found for found in masks if found is not None), None)
        if mask is not None:
            mask = self._matching(mask, shape)
        if self.decoder is not None:
            decoder_mask, labels = self.decoder[0].value, self.decoder[1].value
            if decoder_mask is None and labels is not None and labels.shape == shape:
                trained = labels != IGNORED_LABEL
                mask = trained if mask is None else mask & trained
        if self.image_labels is not None:
            labels = self.image_labels.value
            # A pass without images to train on, in a process that must take as many passes as others.
            if isinstance(labels, Tensor) and labels.ndim == 1 and not labels.numel():
                mask = torch.zeros(shape, dtype=torch.bool, device=labels.device)
        return mask

    def _matching(self, mask: Tensor, shape: torch.Size) -> Tensor:
        if mask.shape == shape:
            return mask
        if len(shape) == 1 and mask.numel() == shape[0]:
            return mask.reshape(-1)
        raise NALoRAError(
            self.gate,
            found=f"a token mask of shape {tuple(mask.shape)} for gate outputs with tokens {tuple(shape)}",
            expected=f"a mask of shape {tuple(shape)}, one entry per token",
            fix="pass the attention_mask of this tower, or none without padding",
        )


def _as_token_mask(mask: Any) -> Tensor | None:
    """Return a [batch, token] boolean mask from any form that attention kernels accept, None without one."""
    if isinstance(mask, Mapping):
        mask = next((value for value in mask.values() if isinstance(value, Tensor)), None)
    if not isinstance(mask, Tensor):
        return None
    if mask.ndim == 4 and mask.shape[-2] in (1, mask.shape[-1]):
        # A token is not padding if it may attend to itself; a mask that is the same for all queries has one row.
        own: Tensor = mask[:, 0, 0] if mask.shape[-2] == 1 else mask[:, 0].diagonal(dim1=-2, dim2=-1)
        if own.is_floating_point():
            return own > torch.finfo(own.dtype).min / 2
        return own.bool() ^ _hides(mask[:, 0].bool(), own.bool())
    return mask.bool() if mask.ndim == 2 else None


def _hides(mask: Tensor, own: Tensor) -> Tensor:
    """Return whether True means that a key is masked, as in MPT; in all other models it means attention.

    If the first token attends to all later ones, these are not padding and attend to themselves; in a causal mask of
    masked keys the first token has True for all later ones, and a token that is not padding False for itself.
    """
    return mask[:, 0, 1:].all() & ~own[:, 1:].all()


def register_mask_hooks(model: nn.Module, gates: list[str]) -> tuple[dict[str, TokenMask], list[Tap]]:
    """Hook the modules around the named gate layers; return their masks by name and the handles of the hooks."""
    modules = dict(model.named_modules())
    arguments: dict[tuple[str, str], _Argument] = {}
    handles: list[Tap] = []

    def argument(owner: str, name: str) -> _Argument:
        if (owner, name) not in arguments:
            arguments[owner, name] = hook = _Argument(modules[owner], name)
            handles.extend((modules[owner].register_forward_pre_hook(hook, with_kwargs=True), hook))
        return arguments[owner, name]

    masks = {}
    for gate in gates:
        parts = gate.split(".") if gate else []
        path = ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]
        attention_masks: list[_Argument] = []
        for owner in reversed(path):
            if _takes(modules[owner], "attention_mask"):
                attention_masks.append(argument(owner, "attention_mask"))
            if _is_tower(modules[owner]):
                break
        for index, inner in enumerate(attention_masks):
            inner.around = attention_masks[index + 1 :]
        decoder = image_labels = None
        for owner in path:
            if _takes(modules[owner], "pixel_values", "labels"):
                image_labels = argument(owner, "labels")
            if _takes(modules[owner], "decoder_input_ids", "decoder_attention_mask", "labels"):
                stack = modules[owner].get_decoder()
                if any(modules[prefix] is stack for prefix in path):
                    decoder = (argument(owner, "decoder_attention_mask"), argument(owner, "labels"))
        masks[gate] = TokenMask(gate, attention_masks, decoder, image_labels)
    return masks, handles


def _takes(module: nn.Module, *names: str) -> bool:
    parameters = inspect.signature(module.forward).parameters
    return all(name in parameters for name in names)


def _is_tower(module: nn.Module) -> bool:
    """Return whether the module is a complete model: transformers declares a main input for each."""
    return isinstance(getattr(type(module), "main_input_name", None), str)
