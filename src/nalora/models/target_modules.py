"""Which layers an adapter is added to, where PEFT would not find them, would adapt others, or would raise.

For some mixture-of-experts models (Qwen3-MoE, DeepSeek-V3, GLM-4-MoE, …) PEFT 0.21 turns every target that ends in
`gate_proj`, `up_proj`, `down_proj` or `gate` into the parameters of all experts, because that is where those weights
were in older checkpoints. Dense layers and shared experts of the same names are then left without an adapter, and a
regular expression for one layer adapts the experts of the others. A linear layer can still be adapted as a parameter:
`target_parameters=["layers.0.mlp.gate_proj.weight"]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from nalora.errors import NALoRAError, did_you_mean, first_line
from nalora.models import versions

# The expert parameter that holds gate and up, so that one cannot be adapted without the other.
_GATE_AND_UP = "gate_up_proj"
# Names of the layers of one expert, each with the parameter that holds all experts: what a target may mean.
_LAYERS_OF_EXPERTS = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), _GATE_AND_UP),
    **dict.fromkeys(("down_proj", "w2"), "down_proj"),
}


def linear_names(model: nn.Module) -> list[str]:
    """Return the last part of the names of all linear layers, without repetitions: what target_modules may name."""
    return list(dict.fromkeys(_leaf(name) for name, module in model.named_modules() if _is_linear(module)))


def _is_linear(module: nn.Module) -> bool:
    # GPT-2's Conv1D is a linear layer with a transposed weight.
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def peft_error(where: str, model: nn.Module, names: list[str], error: Exception) -> NALoRAError:
    """Return an error that explains why PEFT rejected a LoRA config, and which targets it would accept.

    Args:
        where: the model or the setting that the problem is about.
        model: the model that was to be wrapped.
        names: its `linear_names` before PEFT began to wrap it.
        error: PEFT's exception.
    """
    expected = f"target modules among {', '.join(names)}"
    fix = "name some of those, or leave target_modules out to adapt every linear layer"
    if "incompatible with Mamba" in str(error):
        # Mamba's fused kernels read the weights of these layers and never call the layers.
        incompatible = set(re.findall(r"'(\w+)'", str(error)))
        fix = f"name layers that it can adapt: {_without(names, incompatible)}"
    elif "ParamWrapper does not work with lora_dropout" in str(error):
        expected = "no dropout in a model with experts, which are adapted as parameters and not as layers"
        fix = "set dropout to 0 (lora_dropout in peft.LoraConfig)"
    elif "ParamWrapper does not work with use_dora" in str(error):
        expected = "layers, and no experts: PEFT has no DoRA for parameters"
        fix = f"use another method, or name layers outside the experts: {_without(names, set(rewritten_names(model)))}"
    return NALoRAError(
        where, found=f"a LoRA config that PEFT refuses ({first_sentence(error)})", expected=expected, fix=fix
    )


def _without(names: list[str], excluded: set[str]) -> str:
    """Join the names except the excluded ones and the head, which is adapted only if it is named."""
    return ", ".join(name for name in names if name not in {*excluded, "lm_head"})


def first_sentence(error: Exception) -> str:
    """Return the first sentence of an error's message without its full stop, or the error's type."""
    return re.split(r"\.\s", first_line(error))[0].rstrip(".:") or type(error).__name__


def rewritten_names(model: nn.Module) -> Mapping[str, str]:
    """Return the layer names that PEFT rewrites in this model, each with its parameter; empty for most models."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    try:
        from peft.utils import transformers_weight_conversion as conversion

        family = conversion._MODEL_TO_CONVERSION_PATTERN.get(model_type)
        names: Mapping[str, str] = conversion._MOE_TARGET_MODULE_MAPPING.get(family, {})
    except (ImportError, AttributeError):  # another version of PEFT, which may not rewrite names
        return {}
    return names


def resolve_targets(config: Any, model: nn.Module) -> None:
    """Change a PEFT config so that the layers it names are adapted, and no others, where PEFT would do otherwise.

    Raises:
        NALoRAError: no layer or parameter has one of the names, or one half of a fused expert parameter is named.
    """
    targets = getattr(config, "target_modules", None)
    if targets and config.peft_type == "LORA":
        _require_experts(model, targets)
    _check_parameters(model, getattr(config, "target_parameters", None) or ())
    if targets == "all-linear" and hasattr(config, "exclude_modules"):
        # Some routers subclass nn.Linear but return a tuple (Phi-MoE, Llama 4): with an adapter they would raise.
        routers = [name for name, module in model.named_modules() if _returns_tuple(module)]
        config.exclude_modules = [*(config.exclude_modules or ()), *routers] or config.exclude_modules
    elif targets and not isinstance(targets, str):
        _check_names(model, sorted(targets))
    mapping = rewritten_names(model)
    if not mapping or config.peft_type != "LORA" or not targets:
        return
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    parameters = set(config.target_parameters or ())
    if targets == "all-linear":
        # PEFT adapts attention, routers and experts; the dense layers of the same names are missing.
        parameters |= {f"{name}.weight" for name in linears if _leaf(name) in mapping}
        config.target_parameters = shortest_suffixes(parameters, model)
        return
    is_target = _matcher(targets)
    modules = [name for name, _ in model.named_modules() if is_target(name)]
    experts, halves = _targeted_experts(model, mapping, is_target)
    weights = {name for name, parameter in model.named_parameters() if parameter.ndim == 2}
    dense = {f"{name}.weight" for name in modules if _leaf(name) in mapping and f"{name}.weight" in weights}
    if not experts and not modules:
        return  # PEFT's own error explains that no layer has such a name
    if halves:
        raise _half_of_parameter(targets, halves, mapping, shortest_suffixes(dense, model))
    config.target_parameters = shortest_suffixes(parameters | dense | experts, model)
    if isinstance(targets, str):
        others = shortest_suffixes((name for name in modules if name in linears and _leaf(name) not in mapping), model)
    else:
        others = [target for target in targets if _leaf(target) not in mapping]
    config.target_modules = set(others)
    if any(_leaf(name) == _GATE_AND_UP for name in experts):
        # As PEFT does: the rank that gate and up would have had each, at the same scaling.
        pattern = rf".*\.{_GATE_AND_UP}"
        config.rank_pattern = {pattern: 2 * config.r, **(config.rank_pattern or {})}
        config.alpha_pattern = {pattern: 2 * config.lora_alpha, **(config.alpha_pattern or {})}


def _require_experts(model: nn.Module, targets: Any) -> None:
    """Refuse targets that a newer PEFT would take for experts: this one would leave the experts without an adapter."""
    is_target = _matcher(_LAYERS_OF_EXPERTS if targets == "all-linear" else targets)
    if any(_targeted_experts(model, _LAYERS_OF_EXPERTS, is_target)):
        others = _without(linear_names(model), set(_LAYERS_OF_EXPERTS))
        versions.require(
            "peft",
            versions.EXPERTS_BY_NAME,
            where=f"target_modules: {targets if isinstance(targets, str) else sorted(targets)}",
            what="adapt experts by the names of their layers",
            otherwise=f"name layers outside the experts: {others}",
        )


def matching_modules(model: nn.Module, targets: str | list[str], setting: str) -> list[str]:
    """Return the names of the modules that the targets mean, by PEFT's rule; ``all-linear`` leaves the head out.

    Raises NALoRAError, about this setting, if a name or regular expression matches no module.
    """
    if targets == "all-linear":
        head = getattr(model, "get_output_embeddings", lambda: None)()
        modules = [(name, module) for name, module in model.named_modules() if module is not head]
        return [name for name, module in modules if _is_linear(module)]
    if not isinstance(targets, str):
        _check_names(model, targets, setting)
    is_target = _matcher(targets)
    matching = [name for name, _ in model.named_modules() if name and is_target(name)]
    if not matching:
        raise NALoRAError(
            f"{setting}: {targets}",
            found="no module of that name",
            expected=f"all-linear, or names such as {', '.join(linear_names(model))}",
            fix=f"see `print(model)` for all names, or leave {setting} out",
        )
    return matching


def _check_names(model: nn.Module, targets: list[str], setting: str = "target_modules") -> None:
    """Check that every target matches a layer: PEFT silently ignores one that does not if another one does."""
    layers = [f".{name}" for name, _ in model.named_modules()]
    for target in targets:
        if not any(name.endswith(f".{target}") for name in layers):
            names = linear_names(model)
            alone = len(targets) == 1
            otherwise = f"leave {setting} out" if alone else f"leave {target} out"
            if alone and setting == "target_modules":
                otherwise += " to adapt every linear layer"
            raise NALoRAError(
                f"{setting}: {targets}",
                found=f"no layer called {target}",
                expected=f"target modules among {', '.join(names)}",
                fix=did_you_mean(target, names, otherwise),
            )


def _check_parameters(model: nn.Module, targets: Iterable[str]) -> None:
    """Check that every target is a parameter of two or three dimensions: PEFT warns of others and trains on."""
    names = [name for name, parameter in model.named_parameters() if parameter.ndim in (2, 3)]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            experts = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
            known = shortest_suffixes(experts or names, model)
            raise NALoRAError(
                f"target_parameters: {target}",
                found="no parameter of that name with two or three dimensions",
                expected=f"the end of a parameter's name, such as {', '.join(known[:4])}",
                fix=did_you_mean(target, known, "leave it out"),
            )


@torch.no_grad()
def _returns_tuple(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear) or not type(module).__module__.startswith("transformers.models."):
        return False
    try:
        return isinstance(module(module.weight.new_zeros(1, module.in_features)), tuple)
    except Exception:  # it needs other inputs: PEFT's own error is clear enough
        return False


def shortest_suffixes(names: Iterable[str], model: nn.Module) -> list[str]:
    """Shorten names to the part after the layer's number, wherever all modules and parameters with it are named."""
    names = set(names)
    known = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_modules()]
    short: set[str] = set()
    for name in names:
        suffix = re.split(r"(?:^|\.)\d+\.", name)[-1]
        matching = {other for other in known if other == suffix or other.endswith(f".{suffix}")}
        short.add(suffix if matching and matching <= names else name)
    return sorted(short)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _matcher(targets: Any) -> Callable[[str], bool]:
    """Return PEFT's rule: a regular expression matches the whole name, an entry of a list its ending."""
    if isinstance(targets, str):
        return lambda name: re.fullmatch(targets, name) is not None
    return lambda name: any(name == target or name.endswith(f".{target}") for target in targets)


def _targeted_experts(
    model: nn.Module, mapping: Mapping[str, str], is_target: Callable[[str], bool]
) -> tuple[set[str], set[str]]:
    """Return the expert parameters that the targets match, and the old names of which only one half is matched."""
    experts: set[str] = set()
    halves: set[str] = set()
    for name in (name for name, parameter in model.named_parameters() if parameter.ndim == 3):
        container, _, leaf = name.rpartition(".")
        old_names = [old for old, new in mapping.items() if new == leaf]
        # The name of the layer today, and the name of one expert's layer in older checkpoints.
        matched = [old for old in old_names if is_target(f"{container}.{old}") or is_target(f"{container}.0.{old}")]
        if is_target(name) or (matched and len(matched) == len(old_names)):
            experts.add(name)
        else:
            halves |= set(matched)
    return experts, halves


def _half_of_parameter(targets: Any, halves: set[str], mapping: Mapping[str, str], dense: list[str]) -> NALoRAError:
    whole = {mapping[half] for half in halves}
    missing = ", ".join(sorted(name for name, new in mapping.items() if new in whole and name not in halves))
    layers = ", ".join(name.removesuffix(".weight") for name in dense)
    return NALoRAError(
        f"target_modules: {targets if isinstance(targets, str) else sorted(targets)}",
        found=f"{', '.join(sorted(halves))} without {missing}, which are one parameter in this model's experts",
        expected="both, or names that do not match the experts",
        fix=f"add {missing}" + (f", or name the layers outside the experts: {layers}" if layers else ""),
    )
