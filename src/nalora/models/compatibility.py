"""Checks before a model is loaded: its device, its attention implementation, and whether it can generate text."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from nalora.errors import NALoRAError, unknown_name

# The module that each FlashAttention needs, and how to install it.
_FLASH = {
    "flash_attention_2": ("flash_attn", "pip install flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "build it from the hopper folder of Dao-AILab/flash-attention"),
    "flash_attention_4": ("flash_attn.cute", "pip install flash-attn-4"),
}
# Implementations that need torch alone.
_BUILT_IN = ("sdpa", "eager", "flex_attention")


def best_device() -> str:
    """Return ``cuda`` or ``mps`` where available, else ``cpu``."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def resolve_device(name: str | None) -> str:
    """Return the named device, or the best one for None.

    Raises:
        NALoRAError: this machine has no such device.
    """
    if name is None:
        return best_device()
    try:
        device = torch.device(name)
    except RuntimeError:  # torch does not know the name
        found = "no device of that name"
    else:
        available = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
        if device.type not in available or (device.index or 0) < available[device.type]:
            return name
        count = available[device.type]
        found = f"{count or 'no'} {device.type} device{'s' if count > 1 else ''} here"
    raise NALoRAError(
        f"device {name!r}",
        found=found,
        expected="cpu, cuda, cuda:1, mps, …: one that this machine and this build of torch have",
        fix=f"leave device out to use {best_device()} on this machine",
    )


def default_dtype(device: str) -> str:
    """Return bfloat16 for a GPU that computes in it, else float32."""
    return "bfloat16" if device.startswith("cuda") and torch.cuda.is_bf16_supported() else "float32"


def check_attention(name: str | None, device: str) -> None:
    """Check that transformers has this `attn_implementation` and that the device can run it; None is always fine.

    Raises:
        NALoRAError: an unknown name, or FlashAttention without a GPU or without its package.
    """
    where = f"attention: {name}"
    if name is None or name in _BUILT_IN or is_kernel(name) or "|" in name:  # the last is a paged one
        return
    if name not in _FLASH:
        from transformers import AttentionInterface

        if name not in AttentionInterface().valid_keys():
            found = "no attention implementation of that name in transformers"
            otherwise = "leave attention out to use sdpa where the model has it"
            raise unknown_name(where, found, name, [*_BUILT_IN, *_FLASH], otherwise)
        return
    if device.partition(":")[0] in ("cpu", "mps"):
        raise NALoRAError(
            where,
            found=f"the device {device}",
            expected="a GPU: FlashAttention has no other kernels",
            fix="set attention to sdpa, or leave it out",
        )
    module, install = _FLASH[name]
    # If `kernels` is installed, transformers downloads a build from the hub instead of importing the package.
    if not _is_installed(module) and not _is_installed("kernels"):
        raise NALoRAError(
            where,
            found=f"no package {module}",
            expected="the package that computes this attention",
            fix=f"{install}, or set attention to sdpa, torch's own, which has FlashAttention-2 in it",
        )


def is_kernel(attention: Any) -> bool:
    """Return whether an attention implementation is a kernel from the hub (OWNER/NAME): code that would run."""
    return isinstance(attention, str) and "/" in attention


def refuse_kernel(name: str, config: Any) -> None:
    """Raise NALoRAError if a model's own configuration, or that of one of its parts, names a kernel from the hub."""
    attention = getattr(config, "_attn_implementation", None)
    if is_kernel(attention):
        raise NALoRAError(
            f"model {name!r}",
            found=f"attn_implementation: {attention} in its configuration, a kernel from the hub whose code would run",
            expected="an implementation of transformers or torch",
            fix="read that code, and if you trust it add --trust (trust_remote_code: true in a run file), or remove it",
        )
    for part in getattr(config, "sub_configs", ()):
        refuse_kernel(name, getattr(config, part, None))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def is_encoder_only(config: Any) -> bool:
    """Return whether the model reads text in both directions and generates none, as BERT does.

    transformers loads several of these as decoders nevertheless: BERT with a language-modelling head then sees the
    tokens that it has to predict.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    decodes = any(getattr(config, name, False) for name in ("is_encoder_decoder", "is_decoder", "causal"))
    return getattr(config, "model_type", None) in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not decodes


def check_generates_text(name: str, kind: str, config: Any) -> None:
    """Check that a model can be used for a text task that needs `kind`; image models (``clip``) are not checked.

    Raises:
        NALoRAError: an encoder without a decoder, or an encoder-decoder where the task needs a decoder.
    """
    found = getattr(config, "model_type", "unknown")
    if kind != "clip" and is_encoder_only(config):
        raise NALoRAError(
            f"model {name!r}",
            found=f"{found}, an encoder without a decoder",
            expected="a model that generates text: a decoder such as Llama, or an encoder-decoder such as T5",
            fix="give another model",
        )
    if kind == "causal" and getattr(config, "is_encoder_decoder", False):
        raise NALoRAError(
            f"model {name!r}",
            found=f"{found}, an encoder-decoder",
            expected="a decoder, which this task needs",
            fix="give a decoder, or choose a task that encoder-decoders can do (gym/FAMILY or one of GLUE)",
        )
