"""Names of attention implementations, checked before a model is loaded for them."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

from nalora.errors import NALoRAError, unknown_name


class _Package(NamedTuple):
    module: str
    install: str


_FLASH = {
    "flash_attention_2": _Package("flash_attn", "pip install flash-attn"),
    "flash_attention_3": _Package(
        "flash_attn_interface", "build it from the hopper folder of Dao-AILab/flash-attention"
    ),
    "flash_attention_4": _Package("flash_attn.cute", "pip install flash-attn-4"),
}
# What needs no package but torch.
_BUILT_IN = ("sdpa", "eager", "flex_attention")


def refuse_unusable_attention(name: str | None, device: str) -> None:
    """Refuse an attention implementation that transformers does not have, or that this machine cannot run.

    Args:
        name: transformers' `attn_implementation`; None is transformers' own choice.
        device: that the model goes to.

    Raises:
        NALoRAError: an unknown name, or FlashAttention without a GPU or without its package.
    """
    if name is None or name in _BUILT_IN or "/" in name or "|" in name:  # a kernel of the hub, or a paged one
        return
    if name not in _FLASH:
        from transformers import AttentionInterface

        if name not in AttentionInterface().valid_keys():
            raise unknown_name(
                f"attention: {name}",
                "no attention implementation of that name in transformers",
                name,
                [*_BUILT_IN, *_FLASH],
                "leave attention out, which takes sdpa where the model has it",
            )
        return
    if device.partition(":")[0] in ("cpu", "mps"):
        raise NALoRAError(
            f"attention: {name}",
            found=f"the device {device}",
            expected="a GPU: FlashAttention has no other kernels",
            fix="set attention to sdpa, or leave it out",
        )
    package = _FLASH[name]
    # With `kernels` installed transformers takes a build of the hub's in place of the package.
    if not _installed(package.module) and not _installed("kernels"):
        raise NALoRAError(
            f"attention: {name}",
            found=f"no package {package.module}",
            expected="the package that computes this attention",
            fix=f"{package.install}, or set attention to sdpa, torch's own, which has FlashAttention-2 in it",
        )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that the module is in
        return False
