"""A run and its target as two models in memory; adapters of one base share its weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from nalora import tasks
from nalora.diagnostics.twins import adapt, is_adapter
from nalora.errors import NALoRAError
from nalora.evaluation.targets import as_asked
from nalora.models import loading
from nalora.models.loading import ModelSpec
from nalora.tasks import Task
from nalora.training.folder import RunFolder
from nalora.training.run import Material, kind_of, prepare
from nalora.training.settings import Run, check


@dataclass(frozen=True)
class FinishedRun:
    """What a finished run was told, and where what it trained is."""

    folder: RunFolder
    run: Run
    trained: Path


def finished_run(path: str | Path) -> FinishedRun:
    """The run of a folder.

    Raises:
        NALoRAError: no run is there, or one that has not come to its end.
    """
    folder = RunFolder(path)
    if not folder.settings.is_file():
        raise NALoRAError(
            str(path), found="no run", expected="the folder of a run", fix="give the output of `nalora train`"
        )
    trained = folder.model if folder.model.is_dir() else folder.adapter
    if not folder.result.is_file() or not trained.is_dir():
        raise NALoRAError(
            str(path), found="an unfinished run", expected="a finished one", fix="nalora train … --resume"
        )
    settings = yaml.safe_load(folder.settings.read_text(encoding="utf-8"))
    return FinishedRun(folder, check(settings, str(folder.settings)), trained)


@dataclass(frozen=True)
class Pair:
    """Two models for the same inputs, and the run's own training set to take them from."""

    run: nn.Module
    target: nn.Module
    material: Material


def open_pair(run: FinishedRun, target: str, device: str | None = None) -> Pair:
    """Load a run and its target: a finished run, an adapter of the run's base, a model's folder, or a hub id.

    Raises:
        NALoRAError: no such target, an unfinished one, or one that cannot be loaded.
    """
    settings = run.run.settings if device is None else replace(run.run.settings, device=device)
    task = tasks.get(settings.task, data_dir=settings.data_dir, **run.run.task_options)
    spec = settings.model_spec(kind_of(task, settings))
    target_spec, trained = _where(target, spec)
    loaded = loading.load(spec)
    material = prepare(task, loaded, settings)
    shelf = _Shelf(task, loaded.processor, {spec: material.model})
    return Pair(shelf.trained(spec, run.trained), shelf.trained(target_spec, trained), material)


def _where(target: str, spec: ModelSpec) -> tuple[ModelSpec, Path]:
    """The base that a target would be an adapter of, and where the target itself is."""
    path = Path(target).expanduser()
    if not (path / "run.yaml").is_file():
        return spec, path
    other = finished_run(path)
    told = other.run.settings
    return replace(spec, name=told.model, revision=told.revision, quantise=told.quantise), other.trained


class _Shelf:
    """Holds each base once; every adapter is put on a copy of its modules that has the same weights."""

    def __init__(self, task: Task, processor: Any, bases: dict[ModelSpec, nn.Module]) -> None:
        self.task, self.processor, self.bases = task, processor, bases

    def trained(self, spec: ModelSpec, place: Path) -> nn.Module:
        """What is there: an adapter of `spec`, or a model by itself."""
        if not is_adapter(place):
            return self._load(replace(spec, name=str(place), revision=None, quantise=None))
        if spec not in self.bases:
            self.bases[spec] = self._load(spec)
        return adapt(_sharing_weights(self.bases[spec]), place)

    def _load(self, spec: ModelSpec) -> nn.Module:
        return as_asked(loading.load(spec, processor=self.processor), self.task).model


def _sharing_weights(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})
