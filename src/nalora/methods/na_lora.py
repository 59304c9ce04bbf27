"""NA-LoRA: the steps of LoRA, or of a similar method, controlled by the FFN gates; and its experimental controls.

The controls are NA-LoRA with one of its parts switched off, randomised or changed. They have the same cost and state
and the same histogram of factors, without the part that the paper claims matters: a result better than LoRA's shows
little unless it is also better than theirs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from nalora.config import PAPER_ARGUMENTS, Kernels, NALoRAConfig, types_in_files
from nalora.errors import NALoRAError
from nalora.methods.lora import LoRA
from nalora.methods.method import Adapter, Method, Start
from nalora.methods.peft_registry import PREFIX
from nalora.models.peft_names import CONTROLLED


@dataclass(frozen=True)
class NALoRA(Method):
    """Another method's adapter, start and optimizer, with `nalora.attach_trainer` around its training.

    A run sets the fields of `config` directly, or by the argument names of the paper's code, together with the settings
    of the method `on`.

    Args:
        on: name of the method whose steps are controlled.
        kernels: how the control is computed, see `nalora.attach`.
        config: the settings of the control.
        host: the method `on` with its settings.
    """

    name = "na-lora"
    title = "NA-LoRA"
    reference = "the paper, Nonlinearity-Aware LoRA"
    not_under_na_lora = "its steps are controlled already"
    # Whether the run's seed shuffles the mask's channels when mask_seed is 0.
    shuffled_by_seed: ClassVar[bool] = False

    on: str = "lora"
    kernels: Kernels = "auto"
    config: NALoRAConfig = field(default=NALoRAConfig())
    host: Method = field(default=LoRA())

    @classmethod
    def options(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the types of NA-LoRA's settings and of the host method's."""
        own = {"on": str, "kernels": Kernels} | types_in_files()
        return own | _host_class(cls.name, str(settings.get("on", cls.on))).options(settings)

    @classmethod
    def build(cls, **settings: Any) -> Method:
        """Return the method, with control and host method built from their parts of the settings."""
        names = {*_flat(cls.config), *PAPER_ARGUMENTS}
        config = cls.config.changed({name: value for name, value in settings.items() if name in names})
        own = {name: settings[name] for name in ("on", "kernels") if name in settings}
        others = {name: value for name, value in settings.items() if name not in names and name not in own}
        return cls(**own, config=config, host=_host_class(cls.name, own.get("on", cls.on)).build(**others))

    def settings(self) -> dict[str, Any]:
        """Return the settings of NA-LoRA and of the host method."""
        return {"on": self.on, **_flat(self.config), "kernels": self.kernels} | self.host.settings()

    def defaults(self) -> dict[str, Any]:
        """Return the default values of NA-LoRA's settings and of the host method's."""
        cls = type(self)
        return {"on": cls.on, **_flat(cls.config), "kernels": cls.kernels} | self.host.defaults()

    def prepare(self, model: nn.Module, adapter: Adapter, start: Start) -> nn.Module:
        """Prepare the model as the host method does."""
        return self.host.prepare(model, adapter, start)

    def optimizer(self, trainer: Any) -> Optimizer | None:
        """Return the host method's optimizer."""
        return self.host.optimizer(trainer)

    def attach(self, trainer: Any) -> None:
        """Control the trainer's steps, with gate metrics in its logs and the state in its checkpoints."""
        from nalora.integrations.trainer import attach_trainer

        config = self.config
        if self.shuffled_by_seed and not config.mask_seed:
            config = dataclasses.replace(config, mask_seed=1 + int(trainer.args.seed))
        self.host.attach(trainer)
        attach_trainer(trainer, config, kernels=self.kernels)

    def trainable_parameters(self, model: nn.Module) -> int:
        """Return the host method's number of trained values."""
        return self.host.trainable_parameters(model)

    def save(self, model: nn.Module, folder: Path) -> None:
        """Save as the host method does."""
        self.host.save(model, folder)


def _flat(config: NALoRAConfig) -> dict[str, Any]:
    """Return the fields of the control as in a run's file."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in config.to_dict().items()}


def _host_class(name: str, on: str) -> type[Method]:
    """Return the host method. Raises NALoRAError if it does not exist or its steps cannot be controlled."""
    from nalora import methods

    host = methods.get(on)
    if host.not_under_na_lora:
        possible = [method for method in methods.names() if methods.get(method).not_under_na_lora is None]
        possible += [f"{PREFIX}{tuner}" for tuner in CONTROLLED]
        raise NALoRAError(
            f"method {name!r} on {on!r}",
            found=host.not_under_na_lora,
            expected=f"one of {', '.join(possible)}",
            fix="choose one of those, or leave `on` out",
        )
    return host


def _control(name: str, title: str, **overrides: object) -> type[NALoRA]:
    shuffled = overrides.get("mask_channels") == "shuffled"
    return dataclasses.make_dataclass(
        name.title().replace("-", ""),
        [("config", NALoRAConfig, NALoRAConfig().changed(overrides))],
        bases=(NALoRA,),
        frozen=True,
        namespace={"name": name, "title": title, "reference": "control", "shuffled_by_seed": shuffled},
    )


METHODS = (
    NALoRA,
    # Everything is computed and nothing multiplied: bit-identical to LoRA.
    _control("na-lora-off", "NA-LoRA, both controls off", mask=False, scaling=False),
    # The histogram of the mask without its choice of channels.
    _control("na-lora-random", "NA-LoRA, the mask's values on random channels", mask_channels="shuffled"),
    # The mask of the first observation in every step.
    _control("na-lora-frozen", "NA-LoRA, mask decided once", mask_channels="frozen"),
    # The mask shifts the gate's step between channels without shrinking it.
    _control("na-lora-mean", "NA-LoRA, the mask's mean preserved", preserve_mean=True),
    # The whole factor in the gate's gradient.
    _control("na-lora-utility", "NA-LoRA, mask by E|φ′(z)|·|u|", importance="utility"),
)
