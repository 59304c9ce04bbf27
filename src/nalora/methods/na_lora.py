"""NA-LoRA: the steps of LoRA, or of a method like it, controlled by what the FFN gates do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from nalora.config import NALoRAConfig
from nalora.errors import NALoRAError
from nalora.methods.lora import LoRA
from nalora.methods.method import Adapter, Method, Start

# What this method adds to the controller's own settings.
_OWN = ("on", "kernels", "host")


@dataclass(frozen=True)
class NALoRA(Method):
    """Another method's adapter, start and optimizer, with `nalora.attach_trainer` around its training.

    The fields are `NALoRAConfig`'s, and `on`: the method whose steps are controlled. That one's settings are given
    beside these.
    """

    name = "na-lora"
    title = "NA-LoRA"
    reference = "the paper, Nonlinearity-Aware LoRA"
    not_under_na_lora = "its steps are controlled already"

    on: str = "lora"
    keep_ratio: float = 0.30
    sharpness: float = 20.0
    mask_ema: float = 0.90
    positive_penalty: float = 1.0
    scale_ema: float = 0.95
    mask: bool = True
    scaling: bool = True
    importance: Literal["derivative", "utility"] = "derivative"
    mask_channels: Literal["learned", "shuffled", "frozen"] = "learned"
    mask_seed: int = 0
    preserve_mean: bool = False
    regimes: Literal["paper", "derived"] = "paper"
    apply_to: Literal["gradient", "update"] = "gradient"
    start: Literal["ones", "first"] = "ones"
    kernels: Literal["auto", "off", "fused", "fused-activation"] = "auto"
    host: Method = field(default=LoRA())

    @classmethod
    def options(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """NA-LoRA's own settings and those of the method below."""
        own = {name: kind for name, kind in super().options(given).items() if name != "host"}
        return own | _host_class(cls.name, str(given.get("on", "lora"))).options(given)

    @classmethod
    def build(cls, **settings: Any) -> Method:
        """With the method below built from its share of the settings."""
        fields = {each.name for each in dataclasses.fields(cls)}
        own = {name: value for name, value in settings.items() if name in fields}
        rest = {name: value for name, value in settings.items() if name not in fields}
        return cls(**own, host=_host_class(cls.name, own.get("on", "lora")).build(**rest))

    def settings(self) -> dict[str, Any]:
        """Both methods' settings."""
        own = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "host"}
        return own | self.host.settings()

    def prepare(self, model: nn.Module, adapter: Adapter, start: Start) -> nn.Module:
        """As the method below does."""
        return self.host.prepare(model, adapter, start)

    def optimizer(self, trainer: Any) -> Optimizer | None:
        """The optimizer of the method below."""
        return self.host.optimizer(trainer)

    def attach(self, trainer: Any) -> None:
        """Control the trainer's steps; gate metrics stand in its logs, the state in its checkpoints."""
        from nalora.integrations.trainer import attach_trainer

        self.host.attach(trainer)
        attach_trainer(trainer, self.nalora_config(), kernels=self.kernels)

    def trainable_parameters(self, model: nn.Module) -> int:
        """As the method below."""
        return self.host.trainable_parameters(model)

    def save(self, model: nn.Module, folder: Path) -> None:
        """As the method below does."""
        self.host.save(model, folder)

    def nalora_config(self) -> NALoRAConfig:
        """The settings that are the controller's."""
        fields = (each.name for each in dataclasses.fields(self) if each.name not in _OWN)
        return NALoRAConfig(**{name: getattr(self, name) for name in fields})

    def __post_init__(self) -> None:
        self.nalora_config()


def _host_class(name: str, on: str) -> type[Method]:
    """The method below.

    Raises:
        NALoRAError: no such method, or one whose steps cannot be controlled.
    """
    from nalora import methods

    host = methods.get(on)
    if host.not_under_na_lora:
        able = [each for each in methods.names() if methods.get(each).not_under_na_lora is None]
        raise NALoRAError(
            f"method {name!r} on {on!r}",
            found=host.not_under_na_lora,
            expected=f"one of {', '.join(able)}",
            fix="choose one of those, or leave `on` out",
        )
    return host


METHODS = (NALoRA,)
