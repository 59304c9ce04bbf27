"""NA-LoRA in a training program that does not know it: `nalora launch -- COMMAND`.

The command runs with an environment that loads `startup/sitecustomize.py` in every Python process. It waits until
`transformers.trainer` is imported and wraps `Trainer.train`: the first Trainer of a process that trains a PEFT LoRA model
gets `attach_trainer` before it starts, so that the controller's state is part of its checkpoints.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

SETTINGS = "NALORA_LAUNCH_SETTINGS"
# A file to which every process that attached appends a line; the launcher reports it.
REPORT = "NALORA_LAUNCH_REPORT"
_STARTUP = Path(__file__).parent / "startup"
_TRAINER = "transformers.trainer"


def environment(settings: Mapping[str, Any], report: Path) -> dict[str, str]:
    """Return the environment variables with which a command attaches NA-LoRA."""
    source = Path(__file__).parents[2]
    folders = [str(_STARTUP), str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(folders), SETTINGS: json.dumps(dict(settings)), REPORT: str(report)}


def install() -> None:
    """Wrap `Trainer.train` when `transformers.trainer` is imported."""
    if SETTINGS in os.environ and _TRAINER not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module with the finders behind it, and lets its loader wrap the Trainer."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _TRAINER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                wrap(module.Trainer)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def wrap(trainer_class: Any) -> None:
    """Attach NA-LoRA to the first trainer of the class that trains a PEFT LoRA model."""
    original = trainer_class.train

    @functools.wraps(original)
    def train(self: Any, *arguments: Any, **named: Any) -> Any:
        if not _done:
            _attach(self)
        return original(self, *arguments, **named)

    trainer_class.train = train


_done: list[bool] = []


def _attach(trainer: Any) -> None:
    from peft import PeftModel, PeftType

    from nalora.config import NALoRAConfig
    from nalora.integrations.trainer import attach_trainer

    model = trainer.accelerator.unwrap_model(trainer.model)
    if not isinstance(model, PeftModel) or model.peft_type != PeftType.LORA:
        return
    if getattr(trainer, "nalora_controller", None) is not None:
        return
    settings = json.loads(os.environ[SETTINGS])
    kernels = settings.pop("kernels", "auto")
    controller = attach_trainer(trainer, NALoRAConfig(**settings), kernels=kernels)
    _done.append(True)
    if trainer.is_world_process_zero():
        print(f"nalora: attached to {type(trainer).__name__}\n{controller.plan}", flush=True)
    with open(os.environ[REPORT], "a", encoding="utf-8") as report:
        report.write(f"{os.getpid()} {type(trainer).__name__}\n")
