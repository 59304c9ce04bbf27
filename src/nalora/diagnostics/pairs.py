"""A run and its target as two models in memory; adapters of one base share its weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from nalora import tasks
from nalora.diagnostics.dynamics import Request
from nalora.diagnostics.probe import Probe, make_probe
from nalora.diagnostics.twins import adapt, is_adapter
from nalora.errors import missing_path
from nalora.models import loading
from nalora.models.loading import ModelSpec
from nalora.runs.inputs import kind_of
from nalora.runs.saved_run import FinishedRun, finished_run
from nalora.tasks import Task


@dataclass(frozen=True)
class Pair:
    """Two models, and the batches that both are shown."""

    run: nn.Module
    target: nn.Module
    probe: Probe


def open_pair(run: FinishedRun, target: str, request: Request) -> Pair:
    """Load a run and its target: a finished run, an adapter of the run's base, a model's folder, or a hub id.

    Raises:
        NALoRAError: no such target, an unfinished one, or one that cannot be loaded.
    """
    settings = run.run.settings if request.device is None else replace(run.run.settings, device=request.device)
    task = tasks.get(settings.task, data_dir=settings.data_dir, **run.run.task_options)
    spec = settings.model_spec(kind_of(task, settings))
    target_spec, trained = _where(target, spec, request)
    loaded = loading.load(spec)
    probe, base = make_probe(
        run.run,
        loaded,
        size=request.probe_size,
        # Two models pass at a time, in the memory that one takes for the whole batch.
        batch_size=request.rows(loaded.device),
        task=request.task,
        data_dir=request.data_dir,
    )
    shelf = _Shelf(task, loaded.processor, {spec: base})
    return Pair(shelf.trained(spec, run.trained), shelf.trained(target_spec, trained), probe)


def _where(target: str, spec: ModelSpec, request: Request) -> tuple[ModelSpec, Path]:
    """The base that a target would be an adapter of, and where the target itself is."""
    path = Path(target).expanduser()
    if not path.exists() and (path.is_absolute() or (path.parent != Path() and path.parent.is_dir())):
        # A path with a folder that is there is no hub id, and should not cost a question to the hub.
        raise missing_path("folder", target, "a run, an adapter or a model to compare with")
    if not (path / "run.yaml").is_file():
        return spec, path
    other = finished_run(path, trust=request.trust)
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
        return self.task.prepare_model(loading.load(spec, processor=self.processor)).model


def _sharing_weights(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})
