"""Any tuner of PEFT as a method (``peft/gralora``, ``peft/loha``, …), with PEFT's configuration fields as settings."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from nalora.errors import NALoRAError, did_you_mean
from nalora.methods.method import Adapter, Method, Start
from nalora.methods.peft_registry import PREFIX, UNSUPPORTED, registered
from nalora.models import versions
from nalora.models.peft_names import ADAPTER, CONTROLLED
from nalora.models.target_modules import first_sentence, linear_names, peft_error, resolve_targets

# Fields that the run's own settings determine for every tuner.
_OF_THE_RUN = {"r", "alpha", "lora_alpha", "target_modules", "target_parameters"}


@dataclasses.dataclass(frozen=True)
class PeftTuner(Method):
    """A model wrapped by one of PEFT's tuners, trained by the run's optimizer and saved by PEFT."""

    tuner: ClassVar[str]
    config_class: ClassVar[Any]

    def prepare(self, model: nn.Module, adapter: Adapter, start: Start) -> nn.Module:
        """Return the model wrapped by PEFT; the same seed gives the same adapter.

        Raises NALoRAError for a configuration that PEFT rejects, with PEFT's message.
        """
        import peft

        torch.manual_seed(start.seed)
        names = linear_names(model)
        try:
            config = self.config(adapter)
            resolve_targets(config, model)
            wrapped: Any = peft.get_peft_model(model, config)
            # PEFT accepts some configurations that it cannot load again.
            saved = wrapped.peft_config[ADAPTER].to_dict()
            fields = {field.name for field in dataclasses.fields(self.config_class) if field.init}
            self.config_class(**{name: value for name, value in saved.items() if name in fields})
        except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
            if "target modules" in str(error).lower():
                raise peft_error(f"method {self.name!r}", model, names, error) from error
            raise NALoRAError(
                f"method {self.name!r}",
                found=f"settings that PEFT refuses ({first_sentence(error)})",
                expected=f"settings of peft.{self.config_class.__name__} that fit the model and the run's rank",
                fix="change the setting that PEFT names; its documentation explains each",
            ) from error
        for parameter in wrapped.parameters():
            # PEFT keeps a module of modules_to_save in the base's dtype: in bfloat16 most steps would be rounded away.
            if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()
        return typing.cast(nn.Module, wrapped)

    def config(self, adapter: Adapter) -> Any:
        """Return PEFT's configuration: the run's rank, alpha, dropout and target modules, and this method's settings.

        Raises NALoRAError for dropout if the tuner does not have it.
        """
        fields = {field.name for field in dataclasses.fields(self.config_class)}
        alpha = int(adapter.alpha) if float(adapter.alpha).is_integer() else adapter.alpha
        of_the_run = {"r": adapter.rank, "alpha": alpha, "lora_alpha": alpha, "target_modules": adapter.target_modules}
        settings = {name: value for name, value in of_the_run.items() if name in fields} | self.settings()
        if settings.get("oft_block_size"):
            settings["r"] = 0  # OFT takes the number of blocks or their size, and has a default for r
        if adapter.target_parameters and "target_parameters" in fields:
            settings["target_parameters"] = adapter.target_parameters
        elif adapter.target_parameters:
            raise NALoRAError(
                f"target_parameters: {adapter.target_parameters}",
                found=f"method {self.name!r}, whose tuner adapts layers alone",
                expected="LoRA, the only tuner of PEFT that adapts parameters",
                fix="use method: lora, or leave target_parameters out",
            )
        if adapter.dropout:
            name = f"{self.tuner}_dropout"
            if name not in fields:
                raise NALoRAError(
                    f"dropout: {adapter.dropout}",
                    found=f"method {self.name!r}, which has no {name}",
                    expected="a tuner with dropout on the adapter's input",
                    fix="leave dropout out",
                )
            settings[name] = adapter.dropout
        return self.config_class(**settings)


@functools.cache
def tuners() -> dict[str, Any]:
    """Return the configuration classes of PEFT's tuners that change layers of a model."""
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    classes = {str(kind.value).lower(): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    return {
        name: config
        for name, config in classes.items()
        if not issubclass(config, peft.PromptLearningConfig) and name not in UNSUPPORTED
    }


@functools.cache
def method_of(name: str) -> type[Method]:
    """Return the method ``peft/TUNER``. Raises NALoRAError if PEFT has no such tuner or it is not supported."""
    tuner = name.removeprefix(PREFIX)
    if tuner not in tuners():
        if tuner in versions.TUNERS:
            versions.require("peft", versions.TUNERS[tuner], where=f"method {name!r}", what="have this tuner")
        known = sorted(tuners())
        raise NALoRAError(
            f"method {name!r}",
            found="a tuner of PEFT that no run can train"
            if tuner in registered()
            else "no tuner of the installed PEFT",
            expected=f"one of {', '.join(known)}",
            fix=UNSUPPORTED.get(tuner) or did_you_mean(tuner, known, "see `nalora methods`"),
        )
    config = tuners()[tuner]
    title = config.__name__.removesuffix("Config")
    method: type[Method] = dataclasses.make_dataclass(
        title,
        _fields(config, tuner),
        bases=(PeftTuner,),
        frozen=True,
        namespace={
            "name": name,
            "title": f"PEFT's {title}",
            "reference": f"peft.{config.__name__}",
            "tuner": tuner,
            "config_class": config,
            "not_under_na_lora": None
            if tuner in CONTROLLED
            else f"PEFT's {tuner} has no parameters for one channel each",
        },
    )
    return method


def _fields(config: Any, tuner: str) -> list[tuple[str, Any, Any]]:
    """Return name, type and default of the configuration's own fields that have a plain type and a default."""
    import peft

    skipped = {field.name for field in dataclasses.fields(peft.PeftConfig)} | _OF_THE_RUN | {f"{tuner}_dropout"}
    hints = typing.get_type_hints(config)
    fields: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(config):
        if field.name in skipped or not field.init or not _is_plain(hints[field.name]):
            continue
        if field.default is not dataclasses.MISSING:
            default = dataclasses.field(default=field.default, metadata=field.metadata)
            fields.append((field.name, hints[field.name], default))
        elif field.default_factory is not dataclasses.MISSING:
            default = dataclasses.field(default_factory=field.default_factory, metadata=field.metadata)
            fields.append((field.name, hints[field.name], default))
    return fields


def _is_plain(hint: Any) -> bool:
    """Return whether a YAML file can hold a value of this type."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType, list, dict):
        return all(_is_plain(part) for part in typing.get_args(hint))
    return origin is Literal or hint in (bool, int, float, str, list, dict, type(None), Any)
