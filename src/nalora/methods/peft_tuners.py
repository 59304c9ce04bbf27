"""Any tuner of PEFT as a method (``peft/gralora``, ``peft/loha``, …), PEFT's configuration fields as its settings."""

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
from nalora.models.peft_names import ADAPTER
from nalora.models.target_modules import first_sentence, linear_names, peft_error, resolve_targets

PREFIX = "peft/"
# A run's own settings stand for these fields, whatever a tuner calls them.
_OF_THE_RUN = {"r", "alpha", "lora_alpha", "target_modules"}
_ELSEWHERE = {
    "adalora": "method: adalora, which also calls PEFT's rank allocation at every step",
    "xlora": "a tuner that mixes trained adapters is not trained from a run's file",
    "adaption_prompt": "method: lora; prompts inside attention are not a change of linear layers",
    "poly": "method: peft/lora; Poly routes by task ids, which no run has",
    "shadow": "method: peft/lora; Shadow replaces the model's forward pass, which the Trainer calls otherwise",
    "trainable_tokens": "method: full; it trains rows of the embedding, which no run names",
}


@dataclasses.dataclass(frozen=True)
class PeftTuner(Method):
    """A model wrapped by one of PEFT's tuners, trained by the run's optimizer and saved as PEFT saves it."""

    tuner: ClassVar[str]
    config_class: ClassVar[Any]

    def prepare(self, model: nn.Module, adapter: Adapter, start: Start) -> nn.Module:
        """Let PEFT wrap the model, the same for the same seed.

        Raises:
            NALoRAError: a configuration that PEFT refuses, in PEFT's words.
        """
        import peft

        torch.manual_seed(start.seed)
        names = linear_names(model)
        try:
            config = self.config(adapter)
            resolve_targets(config, model)
            wrapped: nn.Module = peft.get_peft_model(model, config)
            self._load_again(wrapped)
        except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
            if "target modules" in str(error).lower():
                raise peft_error(f"method {self.name!r}", model, names, error) from error
            raise NALoRAError(
                f"method {self.name!r}",
                found=f"settings that PEFT refuses ({first_sentence(error)})",
                expected=f"settings of peft.{self.config_class.__name__} that fit the model and the run's rank",
                fix="change the setting that PEFT names; its documentation explains each",
            ) from error
        return wrapped

    def _load_again(self, wrapped: Any) -> None:
        """Build the configuration from what will be saved of it: PEFT writes some that it does not read again."""
        saved = wrapped.peft_config[ADAPTER].to_dict()
        fields = {field.name for field in dataclasses.fields(self.config_class) if field.init}
        self.config_class(**{name: value for name, value in saved.items() if name in fields})

    def config(self, adapter: Adapter) -> Any:
        """PEFT's configuration: the run's rank, alpha, dropout and target modules, and this method's settings.

        Raises:
            NALoRAError: dropout for a tuner that has none of that meaning.
        """
        fields = {field.name for field in dataclasses.fields(self.config_class)}
        alpha = int(adapter.alpha) if float(adapter.alpha).is_integer() else adapter.alpha
        of_the_run = {"r": adapter.rank, "alpha": alpha, "lora_alpha": alpha, "target_modules": adapter.target_modules}
        given = {name: value for name, value in of_the_run.items() if name in fields} | self.settings()
        if given.get("oft_block_size"):
            given["r"] = 0  # OFT takes the number of blocks or their size, and has a size by default
        if adapter.dropout:
            name = f"{self.tuner}_dropout"
            if name not in fields:
                raise NALoRAError(
                    f"dropout: {adapter.dropout}",
                    found=f"method {self.name!r}, which has no {name}",
                    expected="a tuner with dropout on the adapter's input",
                    fix="leave dropout out",
                )
            given[name] = adapter.dropout
        return self.config_class(**given)


@functools.cache
def tuners() -> dict[str, Any]:
    """PEFT's tuners that change layers of a model, with their configuration classes."""
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    return {
        str(kind.value).lower(): config
        for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()
        if not issubclass(config, peft.PromptLearningConfig) and str(kind.value).lower() not in _ELSEWHERE
    }


@functools.cache
def method_of(name: str) -> type[Method]:
    """The method of a tuner, by ``peft/TUNER``.

    Raises:
        NALoRAError: PEFT has no such tuner, or another method of nalora's stands for it.
    """
    tuner = name.removeprefix(PREFIX)
    if tuner not in tuners():
        known = sorted(tuners())
        raise NALoRAError(
            f"method {name!r}",
            found="no tuner of PEFT that a run can train",
            expected=f"one of {', '.join(known)}",
            fix=_ELSEWHERE.get(tuner) or did_you_mean(tuner, known, "see PEFT's documentation"),
        )
    config = tuners()[tuner]
    made: type[Method] = dataclasses.make_dataclass(
        config.__name__.removesuffix("Config"),
        _fields(config, tuner),
        bases=(PeftTuner,),
        frozen=True,
        namespace={
            "name": name,
            "title": f"PEFT's {config.__name__.removesuffix('Config')}",
            "reference": f"peft.{config.__name__}",
            "tuner": tuner,
            "config_class": config,
            "not_under_na_lora": None if tuner == "lora" else "its adapter has no lora_B whose rows are the gate's",
        },
    )
    return made


def _fields(config: Any, tuner: str) -> list[tuple[str, Any, Any]]:
    """The configuration's own fields of plain types, with their defaults."""
    import peft

    inherited = {field.name for field in dataclasses.fields(peft.PeftConfig)}
    hints = typing.get_type_hints(config)
    found: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(config):
        skipped = inherited | _OF_THE_RUN | {f"{tuner}_dropout"}
        if field.name in skipped or not field.init or not _is_plain(hints[field.name]):
            continue
        if field.default is not dataclasses.MISSING:
            default = dataclasses.field(default=field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = dataclasses.field(default_factory=field.default_factory)
        else:
            continue
        found.append((field.name, hints[field.name], default))
    return found


def _is_plain(hint: Any) -> bool:
    """Whether a YAML file can say such a value."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType, list, dict):
        return all(_is_plain(part) for part in typing.get_args(hint))
    return origin is Literal or hint in (bool, int, float, str, list, dict, type(None), Any)
