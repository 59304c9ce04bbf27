"""Which tokens of a forward pass are real: the padding mask that belongs to a block's own tower.

The innermost module around a block that takes an `attention_mask` is the best witness: a decoder layer is handed
its own tower's mask, again in every recomputation, in whatever form the attention kernel wants. Where it is handed
none, the tower that owns the layer is asked, but never a module beyond it: the mask of a text tower says nothing
about a vision tower, and an encoder's nothing about its decoder.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nalora.control.hooks import inert_hook
from nalora.errors import NALoRAError

# The label of a token that the loss does not count: the default of torch's cross_entropy.
IGNORED_LABEL = -100


class _Argument:
    """Remembers one argument of a module's current call. A copy of the module carries no live witness."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name
        self.position = list(inspect.signature(module.forward).parameters).index(name)
        self.value: Any = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.value = args[self.position] if len(args) > self.position else kwargs.get(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return inert_hook, ()


class TokenMask:
    """Answers for one gate layer which tokens of the current pass count."""

    def __init__(
        self,
        gate: str,
        witnesses: list[_Argument],
        decoder: tuple[_Argument, _Argument] | None,
        picture_labels: _Argument | None = None,
    ) -> None:
        self.gate = gate
        self.witnesses = witnesses
        self.decoder = decoder
        self.picture_labels = picture_labels

    def of(self, shape: torch.Size) -> Tensor | None:
        """The boolean mask of z's tokens, given its leading shape, or None where all of them are real.

        Raises:
            NALoRAError: a mask is there but does not match z's leading shape.
        """
        mask = None
        for witness in self.witnesses:
            mask = _as_token_mask(witness.value)
            if mask is not None:
                mask = self._matching(mask, shape)
                break
        if self.decoder is not None:
            decoder_mask, labels = self.decoder[0].value, self.decoder[1].value
            if decoder_mask is None and labels is not None and labels.shape == shape:
                learned = labels != IGNORED_LABEL
                mask = learned if mask is None else mask & learned
        if self.picture_labels is not None:
            labels = self.picture_labels.value
            # A pass with no picture to learn from, where a process has to keep step with others that have some.
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
            fix="pass the attention_mask of this tower, or none where nothing is padded",
        )


def _as_token_mask(mask: Any) -> Tensor | None:
    """A [batch, token] boolean mask from any form attention kernels take, None where there is nothing to read."""
    if isinstance(mask, Mapping):
        mask = next((each for each in mask.values() if isinstance(each, Tensor)), None)
    if not isinstance(mask, Tensor):
        return None
    if mask.ndim == 4 and mask.shape[-2] in (1, mask.shape[-1]):
        # A token is real where it may look at itself; a mask that is the same for all queries has one row.
        own: Tensor = mask[:, 0, 0] if mask.shape[-2] == 1 else mask[:, 0].diagonal(dim1=-2, dim2=-1)
        if own.is_floating_point():
            return own > torch.finfo(own.dtype).min / 2
        return own.bool() ^ _hides(mask[:, 0].bool(), own.bool())
    return mask.bool() if mask.ndim == 2 else None


def _hides(mask: Tensor, own: Tensor) -> Tensor:
    """Whether True means that a key is hidden, as in MPT, where everybody else means that it is seen.

    If the first token sees all later ones, these are real and see themselves; in a causal mask of hidden keys the
    first token has True for all later ones, and a real token False for itself.
    """
    return mask[:, 0, 1:].all() & ~own[:, 1:].all()


def register_mask_hooks(model: nn.Module, gates: list[str]) -> tuple[dict[str, TokenMask], list[RemovableHandle]]:
    """Listen for the masks around the named gate layers; the answers by name and the hooks to remove."""
    modules = dict(model.named_modules())
    arguments: dict[tuple[str, str], _Argument] = {}
    handles: list[RemovableHandle] = []

    def argument(owner: str, name: str) -> _Argument:
        if (owner, name) not in arguments:
            arguments[owner, name] = hook = _Argument(modules[owner], name)
            handles.append(modules[owner].register_forward_pre_hook(hook, with_kwargs=True))
        return arguments[owner, name]

    masks = {}
    for gate in gates:
        path = ["", *_prefixes(gate)]
        witnesses: list[_Argument] = []
        for owner in reversed(path):
            if _takes(modules[owner], "attention_mask"):
                witnesses.append(argument(owner, "attention_mask"))
            if _is_tower(modules[owner]):
                break
        decoder = pictures = None
        for owner in path:
            if _takes(modules[owner], "pixel_values", "labels"):
                pictures = argument(owner, "labels")
            if _takes(modules[owner], "decoder_input_ids", "decoder_attention_mask", "labels"):
                stack = modules[owner].get_decoder()
                if any(modules[prefix] is stack for prefix in path):
                    decoder = (argument(owner, "decoder_attention_mask"), argument(owner, "labels"))
        masks[gate] = TokenMask(gate, witnesses, decoder, pictures)
    return masks, handles


def _prefixes(name: str) -> list[str]:
    parts = name.split(".") if name else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _takes(module: nn.Module, *names: str) -> bool:
    parameters = inspect.signature(module.forward).parameters
    return all(name in parameters for name in names)


def _is_tower(module: nn.Module) -> bool:
    """Whether the module is a model of its own: transformers gives each one a main input."""
    return isinstance(getattr(type(module), "main_input_name", None), str)
