"""Adapters on exactly the layers that were named, in mixture-of-experts models where PEFT rewrites names.

For some model types (Qwen3-MoE, DeepSeek-V3, GLM-4-MoE, …) PEFT 0.21 turns every target that ends in `gate_proj`,
`up_proj`, `down_proj` or `gate` into the parameters of all experts, because that is where those weights were in older
checkpoints. Dense layers and shared experts of the same names are then left without an adapter, and a regular
expression for one layer adapts the experts of the others. A linear layer is still reached as a parameter:
`target_parameters=["layers.0.mlp.gate_proj.weight"]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from nalora.errors import NALoRAError

# Which names become halves of one parameter, so that one cannot be adapted without the other.
_FUSED = "gate_up_proj"


def rewritten_names(model: nn.Module) -> Mapping[str, str]:
    """The layer names that PEFT rewrites in this model, each with the parameter it becomes; empty for most models."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    try:
        from peft.utils import transformers_weight_conversion as conversion

        family = conversion._MODEL_TO_CONVERSION_PATTERN.get(kind)
        names: Mapping[str, str] = conversion._MOE_TARGET_MODULE_MAPPING.get(family, {})
    except (ImportError, AttributeError):  # another PEFT, which may not rewrite
        return {}
    return names


def name_exactly(config: Any, model: nn.Module) -> None:
    """Change a LoRA config so that PEFT adapts the layers it names and no others.

    Args:
        config: a `peft.LoraConfig`; left as it is for models in which PEFT rewrites nothing.
        model: not yet wrapped.

    Raises:
        NALoRAError: one half of a fused expert parameter was named.
    """
    mapping = rewritten_names(model)
    if not mapping or config.peft_type != "LORA" or not config.target_modules:
        return
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    parameters = set(config.target_parameters or ())
    if config.target_modules == "all-linear":
        # PEFT reaches attention, routers and experts; the dense layers of the same names are missing.
        parameters |= {f"{name}.weight" for name in linears if _leaf(name) in mapping}
        config.target_parameters = shortened(parameters, model)
        return
    is_named = _matcher(config.target_modules)
    modules = [name for name, _ in model.named_modules() if is_named(name)]
    experts, halves = _named_experts(model, mapping, is_named)
    weights = {name for name, parameter in model.named_parameters() if parameter.ndim == 2}
    dense = {f"{name}.weight" for name in modules if _leaf(name) in mapping and f"{name}.weight" in weights}
    if not experts and not modules:
        return  # PEFT's own error says that nothing has such a name
    if halves:
        raise _half_of_a_parameter(config.target_modules, halves, mapping, shortened(dense, model))
    config.target_parameters = shortened(parameters | dense | experts, model)
    config.target_modules = set(_other_targets(config.target_modules, modules, mapping, model))
    if any(_leaf(name) == _FUSED for name in experts):
        # As PEFT does: the rank that gate and up would have had each, at the same scaling.
        config.rank_pattern = {rf".*\.{_FUSED}": 2 * config.r, **(config.rank_pattern or {})}
        config.alpha_pattern = {rf".*\.{_FUSED}": 2 * config.lora_alpha, **(config.alpha_pattern or {})}


def shortened(names: Iterable[str], model: nn.Module) -> list[str]:
    """Names of parameters or modules by their ending after the layer's number, where all with that ending are meant."""
    names = set(names)
    known = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_modules()]
    short: set[str] = set()
    for name in names:
        ending = re.split(r"(?:^|\.)\d+\.", name)[-1]
        alike = {each for each in known if each == ending or each.endswith(f".{ending}")}
        short.add(ending if alike and alike <= names else name)
    return sorted(short)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _matcher(targets: Any) -> Callable[[str], bool]:
    """PEFT's rule: a regular expression matches the whole name, an entry of a list its ending."""
    if isinstance(targets, str):
        return lambda name: re.fullmatch(targets, name) is not None
    return lambda name: any(name == target or name.endswith(f".{target}") for target in targets)


def _named_experts(
    model: nn.Module, mapping: Mapping[str, str], is_named: Callable[[str], bool]
) -> tuple[set[str], set[str]]:
    """The expert parameters that the targets mean, and the old names of which only a part was named."""
    stacked = {name for name, parameter in model.named_parameters() if parameter.ndim == 3}
    experts: set[str] = set()
    halves: set[str] = set()
    for name in stacked:
        container, _, leaf = name.rpartition(".")
        old = [each for each, new in mapping.items() if new == leaf]
        # What the layer is called now, and what one expert's was called in older checkpoints.
        named = [each for each in old if is_named(f"{container}.{each}") or is_named(f"{container}.0.{each}")]
        if is_named(name) or (named and len(named) == len(old)):
            experts.add(name)
        elif named:
            halves |= set(named)
    return experts, halves


def _other_targets(targets: Any, modules: list[str], mapping: Mapping[str, str], model: nn.Module) -> list[str]:
    """The targets that PEFT leaves as they are: entries of a list, or the layers that an expression matches."""
    if not isinstance(targets, str):
        return [target for target in targets if _leaf(target) not in mapping]
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return shortened((name for name in modules if name in linear and _leaf(name) not in mapping), model)


def _half_of_a_parameter(targets: Any, halves: set[str], mapping: Mapping[str, str], dense: list[str]) -> NALoRAError:
    whole = {mapping[half] for half in halves}
    missing = ", ".join(sorted(name for name, new in mapping.items() if new in whole and name not in halves))
    layers = ", ".join(name.removesuffix(".weight") for name in dense)
    return NALoRAError(
        f"target_modules: {targets if isinstance(targets, str) else sorted(targets)}",
        found=f"{', '.join(sorted(halves))} without {missing}, which are one parameter in this model's experts",
        expected="both, or names that do not match the experts",
        fix=f"add {missing}" + (f", or name the layers outside the experts: {layers}" if layers else ""),
    )
