"""The plugin for Axolotl: `plugins: [nalora]` and a block `nalora:` of settings in its YAML file.

Axolotl loads and registers every plugin that an installed package offers as an entry point, for every training. So this
one does nothing unless the file asks for it. Axolotl is imported here and nowhere else.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin, PluginManager
from axolotl.utils.logging import get_logger
from pydantic import BaseModel, ConfigDict, create_model, model_validator

from nalora.config import Kernels, NALoRAConfig, types_in_files
from nalora.errors import NALoRAError, unknown_name
from nalora.integrations.trainer import attach_with_plan

NAME = "nalora"
# On by default in Axolotl. They compute an FFN without calling its layers, so that no gate can be observed.
_HIDING = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")


class _CheckedSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields:
                raise ValueError(
                    str(unknown_name(f"{NAME}.{name}", "no such setting", name, cls.model_fields, "leave it out"))
                )
        return data

    @model_validator(mode="after")
    def _refuse_out_of_range(self) -> _CheckedSettings:
        settings = self.model_dump(exclude_none=True)
        settings.pop("kernels", None)
        try:
            NALoRAConfig().changed(settings)
        except NALoRAError as error:  # pydantic reports a ValueError together with the file's other problems
            raise ValueError(str(error)) from error
        return self


_TYPES: dict[str, Any] = {"kernels": Kernels} | types_in_files()
NALoRASettings = create_model(  # type: ignore[call-overload]
    "NALoRASettings", __base__=_CheckedSettings, **{name: (hint | None, None) for name, hint in _TYPES.items()}
)


class NALoRAArgs(BaseModel):
    """What the plugin adds to Axolotl's own settings."""

    nalora: NALoRASettings | None = None  # type: ignore[valid-type]


class NALoRAPlugin(BasePlugin):  # type: ignore[misc]
    """Trains Axolotl's LoRA and QLoRA adapters with NA-LoRA."""

    def __init__(self) -> None:
        super().__init__()
        # Axolotl resolves only names of classes in `plugins:`. A name that is registered already is not resolved.
        PluginManager().plugins.setdefault(NAME, BasePlugin())

    def get_input_args(self) -> str:
        """Return the class with the plugin's settings."""
        return f"{__name__}.{NALoRAArgs.__name__}"

    def register(self, cfg: Any) -> None:
        """Switch Axolotl's LoRA kernels off, before it validates its settings."""
        if not _is_wanted(cfg):
            return
        if any(cfg.get(kernel) is not False for kernel in _HIDING):
            get_logger(__name__).warning(
                "nalora: %s are set to false: NA-LoRA cannot observe gates behind them; `nalora: {kernels: fused}` uses"
                " nalora's own fused layers",
                ", ".join(_HIDING),
            )
        cfg.update(dict.fromkeys(_HIDING, False))

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Attach NA-LoRA and print its plan."""
        if _is_wanted(cfg):
            settings = cfg.get(NAME) or {}
            attach_with_plan(trainer, {name: value for name, value in settings.items() if value is not None})


def _is_wanted(cfg: Any) -> bool:
    names = (NAME, f"{__name__}.{NALoRAPlugin.__name__}", f"{__name__}:{NALoRAPlugin.__name__}")
    return cfg.get(NAME) is not None or any(name in names for name in cfg.get("plugins") or ())
