"""NA-LoRA: the steps of LoRA, or of a method like it, controlled by what the FFN gates do."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from nalora.config import PAPER_ARGUMENTS, PROJECTIONS, Kernels, NALoRAConfig
from nalora.errors import NALoRAError
from nalora.methods.lora import LoRA
from nalora.methods.method import Adapter, Method, Start


@dataclass(frozen=True)
class NALoRA(Method):
    """Another method's adapter, start and optimizer, with `nalora.attach_trainer` around its training.

    A run gives the fields of `config` as settings of their own, or by the names of the paper's code, together with the
    settings of the method `on`.

    Args:
        on: the method whose steps are controlled.
        kernels: how the control is computed, see `nalora.attach`.
        config: the control.
        host: the method `on`, with its settings.
    """

    name = "na-lora"
    title = "NA-LoRA"
    reference = "the paper, Nonlinearity-Aware LoRA"
    not_under_na_lora = "its steps are controlled already"
    # Whether the run's seed draws the channels of a shuffled mask, where mask_seed does not.
    shuffled_by_seed: ClassVar[bool] = False

    on: str = "lora"
    kernels: Kernels = "auto"
    config: NALoRAConfig = field(default=NALoRAConfig())
    host: Method = field(default=LoRA())

    @classmethod
    def options(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """NA-LoRA's own settings and those of the method below."""
        fields = typing.get_type_hints(NALoRAConfig)
        in_files = dict.fromkeys(PROJECTIONS, dict[str, float]) | {"thresholds": list[float] | None}
        own = {"on": str, "kernels": Kernels} | fields | in_files | dict.fromkeys(PAPER_ARGUMENTS, float)
        return own | _host_class(cls.name, str(given.get("on", cls.on))).options(given)

    @classmethod
    def build(cls, **settings: Any) -> Method:
        """With the control and the method below, each built from its share of the settings."""
        names = {*_flat(cls.config), *PAPER_ARGUMENTS}
        config = cls.config.changed({name: value for name, value in settings.items() if name in names})
        own = {name: settings[name] for name in ("on", "kernels") if name in settings}
        others = {name: value for name, value in settings.items() if name not in names and name not in own}
        return cls(**own, config=config, host=_host_class(cls.name, own.get("on", cls.on)).build(**others))

    def settings(self) -> dict[str, Any]:
        """The settings of NA-LoRA and of the method below."""
        return {"on": self.on, **_flat(self.config), "kernels": self.kernels} | self.host.settings()

    def defaults(self) -> dict[str, Any]:
        """Those of both."""
        cls = type(self)
        return {"on": cls.on, **_flat(cls.config), "kernels": cls.kernels} | self.host.defaults()

    def prepare(self, model: nn.Module, adapter: Adapter, start: Start) -> nn.Module:
        """As the method below does."""
        return self.host.prepare(model, adapter, start)

    def optimizer(self, trainer: Any) -> Optimizer | None:
        """The optimizer of the method below."""
        return self.host.optimizer(trainer)

    def attach(self, trainer: Any) -> None:
        """Control the trainer's steps; gate metrics are in its logs, the state in its checkpoints."""
        from nalora.integrations.trainer import attach_trainer

        config = self.config
        if self.shuffled_by_seed and not config.mask_seed:
            config = dataclasses.replace(config, mask_seed=1 + int(trainer.args.seed))
        self.host.attach(trainer)
        attach_trainer(trainer, config, kernels=self.kernels)

    def trainable_parameters(self, model: nn.Module) -> int:
        """As the method below."""
        return self.host.trainable_parameters(model)

    def save(self, model: nn.Module, folder: Path) -> None:
        """As the method below does."""
        self.host.save(model, folder)


def _flat(config: NALoRAConfig) -> dict[str, Any]:
    """The fields of the control as a run's file has them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in config.to_dict().items()}


def _host_class(name: str, on: str) -> type[Method]:
    """The method below.

    Raises:
        NALoRAError: no such method, or one whose steps cannot be controlled.
    """
    from nalora import methods

    host = methods.get(on)
    if host.not_under_na_lora:
        able = [method for method in methods.names() if methods.get(method).not_under_na_lora is None]
        raise NALoRAError(
            f"method {name!r} on {on!r}",
            found=host.not_under_na_lora,
            expected=f"one of {', '.join(able)}",
            fix="choose one of those, or leave `on` out",
        )
    return host


METHODS = (NALoRA,)
