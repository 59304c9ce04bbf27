"""The inputs of a diagnosis: batches of training examples, and saved states as models that share one base."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from nalora import tasks
from nalora.errors import missing_path
from nalora.files import expanded
from nalora.models import loading
from nalora.models.adapters import is_adapter, with_adapter
from nalora.models.loading import Loaded, ModelSpec
from nalora.runs.inputs import kind_of, prepare
from nalora.runs.saved_run import finished_run
from nalora.runs.settings import Run

Batch = dict[str, Any]


@dataclass(frozen=True)
class DiagnosisOptions:
    """How a run is diagnosed.

    Args:
        every: only snapshots whose step is a multiple of this, and the first and the last.
        probe_size: number of examples.
        task: task whose training set is used (default: the run's).
        data_dir: folder of the task's files.
        batch_size: examples per batch of plain inference with the same memory; two models with half a batch each run
            at a time. Default: 16 on a CPU, 128 on a GPU, which smaller batches do not fill.
        device: device to run on (default: the run's).
        per_channel: also write the values of every channel.
        trust: whether code that comes with a run or a model may be executed.
        model: the base model of an adapter (default: the one that it names).
        output: the folder for the result (default: the run's; of an adapter, one below runs/evaluations).
    """

    every: int = 1
    probe_size: int = 512
    task: str | None = None
    data_dir: str | None = None
    batch_size: int | None = None
    device: str | None = None
    per_channel: bool = False
    trust: bool = False
    model: str | None = None
    output: Path | None = None

    def rows(self, device: torch.device) -> int:
        """Return the number of examples per forward pass of one model, half of a batch."""
        return max(1, (self.batch_size or (128 if device.type == "cuda" else 16)) // 2)


class Probe(NamedTuple):
    """Batches on the CPU for all states, longest examples first, so that the highest memory use comes first."""

    task: str
    examples: int
    batches: list[Batch]


class ComparedModels(NamedTuple):
    """A run and its target, and the probe for both."""

    run: nn.Module
    target: nn.Module
    probe: Probe


class DiagnosisInputs:
    """The probe of a run, and its states as models; adapters of one base share its weights.

    The tokenizer is the one in the folder `saved` if there is one, else the base model's.

    Raises NALoRAError if the task does not exist or none of its examples fits.
    """

    def __init__(self, run: Run, options: DiagnosisOptions, saved: Path | None = None) -> None:
        settings = run.settings if options.device is None else replace(run.settings, device=options.device)
        self._task = tasks.get(settings.task, data_dir=settings.data_dir, **run.task_options)
        self._spec = settings.model_spec(kind_of(self._task, settings.model_spec()))
        processor = loading.load_processor(self._spec, saved) if saved else None
        loaded = loading.load(self._spec, processor=processor)
        self._processor = loaded.processor
        self.probe, base = make_probe(run, loaded, options)
        self._bases: dict[ModelSpec, nn.Module] = {self._spec: base}
        self._pair: dict[Path | None, nn.Module] = {}

    @property
    def base(self) -> nn.Module:
        """The run's base model."""
        return self.model(None)

    def model(self, folder: Path | None, **base: Any) -> nn.Module:
        """Return the adapter or model in a folder, or the base model for None.

        `base` are fields of the base's ModelSpec that differ from the run's. Raises NALoRAError if the folder cannot be
        read or has the adapter of another model.
        """
        spec = replace(self._spec, **base)
        if folder is not None and not is_adapter(folder):
            return self._load(replace(spec, name=str(folder), revision=None, quantise=None))
        if spec not in self._bases:
            self._bases[spec] = self._load(spec)
        return self._bases[spec] if folder is None else with_adapter(self._bases[spec], folder, keep_base=True)

    def pair(self, before: Path | None, after: Path | None) -> tuple[nn.Module, nn.Module]:
        """Return two states as models. Models of other states are released first, so callers must not hold them."""
        folders = (before, after)
        self._pair = {folder: model for folder, model in self._pair.items() if folder in folders}
        if not any(folder is None or is_adapter(folder) for folder in folders):
            self._bases.clear()
        for folder in folders:
            if folder not in self._pair:
                self._pair[folder] = self.model(folder)
        return self._pair[before], self._pair[after]

    def _load(self, spec: ModelSpec) -> nn.Module:
        return self._task.prepare_model(loading.load(spec, processor=self._processor)).model


def load_run_and_target(run: Run, trained: Path, target: str, options: DiagnosisOptions) -> ComparedModels:
    """Load a run or an adapter, from the folder `trained`, and its target.

    The target is a finished run, an adapter of the same base, a model's folder, or a hub id. Raises NALoRAError if it
    does not exist, is not finished or cannot be loaded.
    """
    path, base = expanded(target), {}
    if not path.exists() and (path.is_absolute() or (path.parent != Path() and path.parent.is_dir())):
        # A path in an existing folder is not a hub id, so the hub is not queried.
        raise missing_path("folder", target, "a run, an adapter or a model to compare with")
    if (path / "run.yaml").is_file():
        other = finished_run(path, trust=options.trust)
        settings = other.run.settings
        path = other.trained
        base = {"name": settings.model, "revision": settings.revision, "quantise": settings.quantise}
    inputs = DiagnosisInputs(run, options, trained)
    return ComparedModels(inputs.model(trained), inputs.model(path, **base), inputs.probe)


def make_probe(run: Run, loaded: Loaded, options: DiagnosisOptions) -> tuple[Probe, nn.Module]:
    """Return the first training examples of the run's task, or of another, encoded as in training.

    Also returns the model that the task uses: a CLIP becomes a classifier of its classes.
    """
    settings = run.settings
    own = options.task is None or tasks.resolve(options.task) == tasks.resolve(settings.task)
    task = tasks.get(
        settings.task if options.task is None else options.task,
        data_dir=options.data_dir or (settings.data_dir if own else None),
        **(run.task_options if own else {}),
    )
    material = prepare(task, loaded, replace(settings, train_limit=options.probe_size, packing=False))
    rows = [material.dataset[i] for i in range(len(material.dataset))]
    rows.sort(key=lambda row: len(row["input_ids"]) if isinstance(row, dict) else 0, reverse=True)
    size = options.rows(loaded.device)
    batches = [material.collator(rows[start : start + size]) for start in range(0, len(rows), size)]
    if not getattr(getattr(material.model, "config", None), "is_encoder_decoder", False):
        # A decoder would only compute a loss from labels; an encoder-decoder needs them as its decoder's tokens.
        batches = [{name: value for name, value in batch.items() if name != "labels"} for batch in batches]
    return Probe(task.name, len(rows), batches), material.model
