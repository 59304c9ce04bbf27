"""NA-LoRA in a training program that does not know nalora: `nalora launch -- COMMAND`.

The command runs with `startup/` first in PYTHONPATH, so that every Python process of it, ranks included, calls
`install` when it starts. The class `Trainer` of transformers is changed when it is imported: before the first trainer
of a process that trains LoRA layers starts, `attach_trainer` is called with it. Nothing heavy is imported here before
that: most Python processes of a command never train.
"""

from __future__ import annotations

import contextlib
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

# The settings, and the file to which processes append what happened, as JSON.
VARIABLE = "NALORA_LAUNCH"
STARTUP = Path(__file__).resolve().parent / "startup"

STARTED = "started"
NOT_INSTALLED = "not installed"  # written by startup/sitecustomize.py, which cannot import this module then
IMPORTED = "imported"
WITHOUT_LORA = "without LoRA"
REFUSED = "refused"
ATTACHED = "attached"
UNREADABLE = "unreadable"

_TRAINER_MODULE = "transformers.trainer"
_attached: list[Any] = []  # the controller of this process
_launch: dict[str, Any] = {}  # the value of VARIABLE at the start: a program may remove it from its environment


def environment(settings: Mapping[str, Any], report: Path, current: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with which a command attaches NA-LoRA; everything in the current one stays."""
    paths = [str(STARTUP), *filter(None, [current.get("PYTHONPATH")])]
    launch = json.dumps({"settings": dict(settings), "report": str(report)})
    return {**current, "PYTHONPATH": os.pathsep.join(paths), VARIABLE: launch}


def events(report: Path) -> dict[str, list[str]]:
    """Return what the processes of a command reported: the details of every kind of event, without repetitions.

    What cannot be read is an event too: a process may be killed while it writes, and a program can delete the file.
    """
    try:
        lines = report.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return {UNREADABLE: [f"the file cannot be read ({error.strerror})"]}
    details: dict[str, list[str]] = {}
    for line in lines:
        try:
            event = json.loads(line)
            kind, detail = str(event["event"]), str(event["detail"])
        except (ValueError, TypeError, KeyError):
            kind, detail = UNREADABLE, "a line cannot be read"
        if detail not in details.setdefault(kind, []):
            details[kind].append(detail)
    return details


def install() -> None:
    """Change the class Trainer of transformers, now or when it is imported."""
    _launch.update(json.loads(os.environ[VARIABLE]))
    _record(STARTED)
    if _TRAINER_MODULE in sys.modules:
        _change(sys.modules[_TRAINER_MODULE])
    else:
        sys.meta_path.insert(0, _TrainerFinder())


class _TrainerFinder(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, with a loader that changes it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _TRAINER_MODULE:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                _change_when_executed(spec.loader)
                return spec
        return None


def _change_when_executed(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _change(module)

    loader.exec_module = exec_module


def _change(module: Any) -> None:
    original = module.Trainer.train

    @functools.wraps(original)
    def train(self: Any, *arguments: Any, **options: Any) -> Any:
        _prepare(self)
        return original(self, *arguments, **options)

    module.Trainer.train = train
    _record(IMPORTED)


def _prepare(trainer: Any) -> None:
    """Attach NA-LoRA to a trainer that is about to train, unless it is not the first one with LoRA layers."""
    name, controller = type(trainer).__name__, getattr(trainer, "nalora_controller", None)
    if controller is not None:
        _record(ATTACHED, name)
        if controller not in _attached:
            _print(
                trainer, f"the program attaches NA-LoRA to {name} itself; the settings of `nalora launch` are not used"
            )
    elif not _trains_lora(trainer.model):
        _record(WITHOUT_LORA, f"{name} trained {type(trainer.model).__name__}")
    elif _attached:
        _print(trainer, f"a second {name} trains without NA-LoRA; `nalora launch` attaches to the first Trainer only")
    else:
        _attach(trainer)


def _trains_lora(model: Any) -> bool:
    try:
        from peft.tuners.lora import LoraLayer
    except ImportError:
        return False
    layers = (module for module in model.modules() if isinstance(module, LoraLayer))
    return any(parameter.requires_grad for layer in layers for parameter in layer.parameters())


def _attach(trainer: Any) -> None:
    from nalora.errors import NALoRAError
    from nalora.integrations.trainer import attach_with_plan

    try:
        controller = attach_with_plan(trainer, _launch["settings"])
    except NALoRAError as error:
        _record(REFUSED, str(error))
        # Training must not go on as plain LoRA. Programs that catch every Exception do not catch this.
        raise SystemExit(f"nalora: {error}") from error
    _attached.append(controller)
    _record(ATTACHED, type(trainer).__name__)


def _print(trainer: Any, message: str) -> None:
    if trainer.is_world_process_zero():
        print(f"nalora: {message}", flush=True)


def _record(event: str, detail: str = "") -> None:
    # Not on another machine that the command starts processes on: it does not have the launcher's file.
    with contextlib.suppress(OSError), open(_launch["report"], "a", encoding="utf-8") as report:
        report.write(json.dumps({"event": event, "detail": detail}) + "\n")
