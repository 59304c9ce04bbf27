"""Inspection: the plan for a model from its config alone, without weights."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import nn

from nalora.config import NALoRAConfig
from nalora.control.blocks import find_blocks
from nalora.control.plan import Plan, make_plan
from nalora.errors import NALoRAError, did_you_mean
from nalora.files import expanded
from nalora.models import hub
from nalora.models.compatibility import check_generates_text, refuse_kernel
from nalora.models.gguf_cache import gguf_config
from nalora.models.loading import NAMED, gguf_file
from nalora.models.peft_names import CONTROLLED
from nalora.models.target_modules import first_sentence, linear_names, peft_error, resolve_targets

_ADAPTER_FILE = "adapter_config.json"
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# The deepest models have a few hundred layers.
_COUNTS, _MOST_LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_experts"), 4096
_CHECK = "check the spelling and, for a hub id, the network"


@dataclass(frozen=True)
class Inspection:
    """The plan of NA-LoRA for a model and the adapter's size; `refusal` is the reason why no run can train it."""

    architecture: str
    rank: int
    trainable: int
    plan: Plan
    refusal: str | None = None


def inspect_model(
    model: str,
    config: NALoRAConfig | None = None,
    *,
    rank: int | None = None,
    target_modules: Sequence[str] = (),
    target_parameters: Sequence[str] = (),
) -> Inspection:
    """Build `model` on the meta device, wrap it with LoRA, and plan.

    Args:
        model: a transformers folder, a config.json, a GGUF file, a PEFT adapter folder, a hub id, or ``smollm2-135m``.
        config: the settings of NA-LoRA; the paper's by default.
        rank: r of the adapter; 8 by default, and not allowed for an adapter folder.
        target_modules: the layers to adapt, by the end of their name; every linear layer by default.
        target_parameters: parameters to adapt as well, such as those of experts, by the end of their name.

    Raises:
        NALoRAError: no such model, one that cannot be built or wrapped, or nothing to control in it.
    """
    lora = _saved_adapter(model)
    if lora is None:
        base = model
        targets = list(target_modules) if target_modules else "all-linear"
        parameters = list(target_parameters) or None
        lora = peft.LoraConfig(r=8 if rank is None else rank, target_modules=targets, target_parameters=parameters)
    elif rank is not None or target_modules or target_parameters:
        raise NALoRAError(
            model,
            found="a rank or target modules together with a saved adapter",
            expected="the rank and target modules of the adapter itself",
            fix="leave both out, or inspect the adapter's base model",
        )
    else:
        base = lora.base_model_name_or_path
    skeleton = _build(base)
    if base == model:
        resolve_targets(lora, skeleton)
    wrapped = _wrap(skeleton, lora, model)
    found = find_blocks(wrapped)
    return Inspection(
        architecture=type(skeleton).__name__,
        rank=lora.r,
        trainable=sum(parameter.numel() for parameter in wrapped.parameters() if parameter.requires_grad),
        plan=make_plan(found, config or NALoRAConfig()),
        refusal=_why_not_trained(base, skeleton),
    )


def _why_not_trained(model: str, skeleton: nn.Module) -> str | None:
    """Return the reason why `nalora train` refuses a model for every task; None if some task can use it."""
    try:
        # Among tasks with texts, those of encoder-decoders refuse the fewest models.
        check_generates_text(model, "seq2seq", skeleton.config)
    except NALoRAError as error:
        return f"found {error.found}; expected {error.expected}"
    return None


def _saved_adapter(model: str) -> Any:
    """Return the LoraConfig of an adapter folder or its adapter_config.json; None if `model` is neither."""
    path = Path(model)
    file = path if path.name == _ADAPTER_FILE else path / _ADAPTER_FILE
    if not file.is_file():
        return None
    try:
        lora = peft.PeftConfig.from_pretrained(str(file.parent))
    except Exception as error:
        found, expected = first_sentence(error), "the config of a PEFT adapter"
        raise NALoRAError(str(file), found=found, expected=expected, fix="save the adapter again") from error
    if str(lora.peft_type.value).lower() not in CONTROLLED:
        raise NALoRAError(
            str(file),
            found=f"a {type(lora).__name__}",
            expected="the adapter of a tuner that NA-LoRA controls: LoraConfig or GraloraConfig",
            fix="inspect such an adapter, or the base model",
        )
    if not lora.base_model_name_or_path:
        raise NALoRAError(
            str(file),
            found="no base_model_name_or_path",
            expected="the path or hub id of the base model",
            fix="fill it in, or inspect the base model",
        )
    # The initialisation of A and B does not change the plan, and PiSSA and LoftQ need the weights.
    lora.inference_mode = False
    if isinstance(lora, peft.LoraConfig):
        lora.init_lora_weights = True
    return lora


def _build(model: str) -> nn.Module:
    """Return the architecture on the meta device: all modules, no memory."""
    config = _read_config(model)
    refuse_kernel(model, config)
    # A quantised checkpoint has the same FFNs as a dense one.
    vars(config).pop("quantization_config", None)
    _check_size(config, model)
    names = getattr(config, "architectures", None)
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    named = getattr(transformers, name, None) if name else None
    autos = (transformers.AutoModelForCausalLM.from_config, transformers.AutoModel.from_config)
    failure: Exception | None = None
    with torch.device("meta"):
        for make in (named,) if named else autos:
            try:
                skeleton: nn.Module = make(config)
                return skeleton
            except Exception as error:
                failure = failure or error
    assert failure is not None
    raise NALoRAError(
        model,
        found=f"a {type(config).__name__} that cannot be built ({first_sentence(failure)})",
        expected="the config of a model in transformers",
        fix="check the config, or update transformers",
    ) from failure


def _check_size(config: Any, model: str) -> None:
    """Refuse a mistyped number of layers: each takes a millisecond without weights, so building could take days."""
    for name in _COUNTS:
        count = getattr(config, name, None)
        if isinstance(count, int) and count > _MOST_LAYERS:
            raise _no_model(model, f"{name} of {count:,} in its config", f"correct {name} in the config")


def _read_config(model: str) -> Any:
    if (gguf := gguf_file(model)) is not None:
        return gguf_config(gguf)  # from the file's header, so no weights are dequantised
    path = expanded(model)
    on_hub = not path.exists() and _HUB_ID.fullmatch(model) and not model.endswith(".json")
    if not path.exists() and not on_hub:
        raise _no_model(model, "no such file or folder")
    if path.is_dir() and not (path / "config.json").is_file():
        inside = [file.parent for name in (_ADAPTER_FILE, "config.json") for file in sorted(path.glob(f"*/{name}"))]
        fix = f"name the folder inside it: {inside[0]}" if inside else _CHECK
        raise _no_model(model, f"a folder with neither config.json nor {_ADAPTER_FILE}", fix)
    try:
        if not on_hub and "model_type" not in json.loads((path / "config.json" if path.is_dir() else path).read_text()):
            raise _no_model(model, "a JSON file without model_type")
        source = model if on_hub else str(path)
        with hub.offline_if_unreachable(source):
            return transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _no_model(model, f"no readable JSON ({error})") from error
    except NALoRAError:
        raise
    except Exception as error:  # every config class raises other exceptions
        raise _no_model(model, first_sentence(error)) from error


def _no_model(model: str, found: str, fix: str = _CHECK) -> NALoRAError:
    return NALoRAError(
        model,
        found=found,
        expected="the folder of a transformers model, its config.json, a GGUF file, a PEFT adapter folder, or a hub id",
        fix=did_you_mean(model, NAMED, fix) if fix == _CHECK else fix,
    )


def _wrap(skeleton: nn.Module, lora: Any, model: str) -> nn.Module:
    names = linear_names(skeleton)
    try:
        wrapped: nn.Module = peft.get_peft_model(skeleton, lora, low_cpu_mem_usage=True)
    except Exception as error:
        raise peft_error(model, skeleton, names, error) from error
    return wrapped
