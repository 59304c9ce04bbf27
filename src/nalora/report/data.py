"""Everything a report shows of a run, read from its folder; what is missing or damaged is said, never fatal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nalora.errors import NALoRAError, missing_path
from nalora.files import yaml_reader
from nalora.report.cleaning import clean_diagnosis, clean_mismatch
from nalora.report.evaluations import Evaluation, label, read_evaluations, separated
from nalora.report.gates import Gates, read_gates
from nalora.runs import old_names
from nalora.runs.folder import RunFolder

Cleaner = Callable[[dict[str, Any]], dict[str, Any] | None]


@dataclass(frozen=True)
class RunData:
    """A run as its folder tells it.

    Attributes:
        path: the folder.
        name: the folder's name, with its parents' where two of the runs read together share it.
        settings: run.yaml; empty where that cannot be read.
        environment: versions, hardware, the command.
        result: what the run came to; None while it is going, or after a kill.
        metrics: the rows of metrics.jsonl in the order of their steps.
        gates: gates.jsonl; None for methods that do not steer gates.
        evaluations: summaries by task (of what was held out of training: ``TASK (validation)``) and by who was asked,
            ``base`` or ``adapted``. Where a task was evaluated in several ways, among all runs that are read together,
            each has a name of its own: the same name means the same questions.
        diagnosis: diagnosis.json, written by `nalora diagnose`.
        mismatch: mismatch.json, written by `nalora diagnose --against`.
        notices: what a reader must know: what is damaged, unfinished or left out.
        missing: why a topic (result, metrics, evaluations, gates, mask, scaling, diagnosis, mismatch) has nothing to
            show; a hint where that is no fault.
        summaries: all evaluations, of which `evaluations` is made.
    """

    path: Path
    name: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any] | None
    metrics: list[dict[str, Any]]
    gates: Gates | None
    evaluations: dict[str, dict[str, dict[str, Any]]]
    diagnosis: dict[str, Any] | None
    mismatch: dict[str, Any] | None
    notices: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    summaries: tuple[Evaluation, ...] = ()

    @property
    def method(self) -> str:
        """The method's name, or what can be said in its place."""
        return str(self.settings.get("method") or (self.result or {}).get("method") or "unknown method")

    @property
    def model(self) -> str:
        """The base model's name."""
        return str(self.settings.get("model") or (self.result or {}).get("model") or "unknown model")

    @property
    def task(self) -> str:
        """The task's name."""
        return str((self.result or {}).get("task") or self.settings.get("task") or "unknown task")

    def series(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Steps and values of a metric, where it was logged as a finite number."""
        rows = [row for row in self.metrics if isinstance(row.get(name), int | float) and math.isfinite(row[name])]
        steps, values = [row["step"] for row in rows], [row[name] for row in rows]
        return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)


def read_run(path: str | Path) -> RunData:
    """Read a run's folder.

    Raises:
        NALoRAError: there is no such folder, or no run in it.
    """
    path = Path(path)
    if not path.is_dir():
        raise missing_path("folder", path, "a run's folder", "check the path; runs go to output=")
    if not _is_run(path):
        raise NALoRAError(
            str(path), found="no run.yaml", expected="a run's folder", fix="give the folder that `nalora train` named"
        )
    folder = RunFolder(path)
    notices: list[str] = []
    missing: dict[str, str] = {}
    settings = _read_settings(folder, notices)
    result = _read_object(folder.result, notices)
    if result is None:
        missing["result"] = _why_no_result(folder)
        notices.append(missing["result"])
    elif (sentence := _not_finite(result)) is not None:
        notices.append(sentence)
    metrics = _read_metrics(folder.metrics, notices)
    if not metrics:
        missing["metrics"] = "No step was logged, so there is no training curve."
        notices.append(missing["metrics"])
    gates = read_gates(path / "gates.jsonl", settings, notices)
    if gates is None:
        missing["gates"] = _why_no_gates(path, settings)
    else:
        missing |= {topic: why for topic, why in _controls_off(gates).items() if why}
    diagnosis = _read_clean(path / "diagnosis.json", clean_diagnosis, notices)
    if diagnosis is None:
        missing["diagnosis"] = f"No diagnosis yet: `nalora diagnose {path}` measures how the gates moved."
    mismatch = _read_clean(path / "mismatch.json", clean_mismatch, notices)
    if mismatch is None:
        missing["mismatch"] = f"No target to compare with: `nalora diagnose {path} --against TARGET` makes one."
    summaries = read_evaluations(folder.evaluations, settings, _read_summaries(folder.evaluations, notices))
    (evaluations,) = label([summaries])
    if not evaluations:
        missing["evaluations"] = f"Not asked yet: `nalora evaluate {path}` asks held-out questions."
    environment = _read_object(path / "environment.json", notices, wanted=True) or {}
    return RunData(
        path, path.resolve().name, settings, environment, result, metrics, gates, evaluations, diagnosis, mismatch,
        notices, missing, summaries,
    )  # fmt: skip


def read_runs(paths: Iterable[str | Path]) -> list[RunData]:
    """Runs in the order given, under names that tell them apart; a folder of runs stands for the runs in it.

    Raises:
        NALoRAError: a folder is not there, or neither it nor those below it hold a run.
    """
    folders: list[Path] = []
    for path in map(Path, paths):
        inside = [] if _is_run(path) else _runs_below(path)
        folders += [each for each in inside or [path] if each not in folders]
    runs = [read_run(folder) for folder in folders]
    named = [replace(run, name=name) for run, name in zip(runs, _names([run.path for run in runs]), strict=True)]
    return with_comparable_evaluations(named)


def with_comparable_evaluations(runs: Sequence[RunData]) -> list[RunData]:
    """The same runs, with evaluations under the same name only where they are of the same questions."""
    labelled = label([run.summaries for run in runs])
    return [replace(run, evaluations=each) for run, each in zip(runs, labelled, strict=True)]


def differences(runs: Sequence[RunData]) -> list[str]:
    """What keeps these runs from being compared with one another, in plain sentences."""
    sentences = []
    for what, values in (("base models", [run.model for run in runs]), ("tasks", [run.task for run in runs])):
        groups: dict[str, list[str]] = {}
        for run, value in zip(runs, values, strict=True):
            groups.setdefault(value, []).append(run.name)
        if len(groups) > 1:
            listed = "; ".join(f"{value}: {', '.join(names)}" for value, names in groups.items())
            sentences.append(f"These runs have different {what}, so their numbers cannot be compared ({listed}).")
    return [*sentences, *separated([run.summaries for run in runs])]


def layer_labels(blocks: Sequence[str]) -> list[str]:
    """Short names of blocks: the number in `model.layers.3.mlp`, with what else tells them apart."""
    parts = [name.split(".") for name in blocks]
    if len({len(each) for each in parts}) != 1:
        return [str(number) for number in range(len(blocks))]
    places = [i for i, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
    if not places:
        numbers = [[part for part in each if part.isdigit()] for each in parts]
        return [" ".join(each) or str(i) for i, each in enumerate(numbers)]
    for count in range(1, len(places) + 1):
        labels = [" ".join(each[i] for i in places[:count]) for each in parts]
        if len(set(labels)) == len(blocks):
            return labels
    return [str(number) for number in range(len(blocks))]


def _is_run(path: Path) -> bool:
    return (path / "run.yaml").is_file() or (path / "metrics.jsonl").is_file()


def _runs_below(path: Path) -> list[Path]:
    """The runs of a study, however deep its folders; nothing inside a run is a run."""
    found: list[Path] = []
    if path.is_dir():
        for each in sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith(".")):
            found += [each] if _is_run(each) else _runs_below(each)
    return found


def _names(paths: Sequence[Path]) -> list[str]:
    """Folder names, all lengthened by parents until no two are the same."""
    parts = [path.resolve().parts[1:] for path in paths]
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _read_settings(folder: RunFolder, notices: list[str]) -> dict[str, Any]:
    if not folder.settings.is_file():
        notices.append("run.yaml is not there, so the settings are not known.")
        return {}
    try:
        settings = yaml_reader.read(folder.settings, "a run's settings", "train it again")
    except NALoRAError as error:
        notices.append(f"run.yaml is damaged, so the settings are not known ({error.found}).")
        return {}
    if not settings:
        notices.append("run.yaml is damaged, so the settings are not known (it is empty).")
    return {str(key): value for key, value in old_names.completed(settings).items()}


def _read_object(path: Path, notices: list[str], *, wanted: bool = False) -> dict[str, Any] | None:
    """A JSON object; None, with a notice where that is a fault, if there is none."""
    if not path.is_file():
        if wanted:
            notices.append(f"{path.name} is not there.")
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        notices.append(f"{path.name} is damaged and was left out.")
        return None
    return value


def _read_clean(path: Path, clean: Cleaner, notices: list[str]) -> dict[str, Any] | None:
    value = _read_object(path, notices)
    cleaned = clean(value) if value is not None else None
    if value is not None and cleaned is None:
        notices.append(f"{path.name} lacks what a report needs and was left out.")
    return cleaned


def _read_metrics(path: Path, notices: list[str]) -> list[dict[str, Any]]:
    """The rows by step. A step that is there twice was done twice; the later row is the one that counted."""
    rows: dict[int, dict[str, Any]] = {}
    damaged = 0
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                rows[int(row["step"])] = row
            except (ValueError, KeyError, TypeError):
                damaged += 1
    if damaged:
        lines = "line was" if damaged == 1 else "lines were"
        notices.append(f"metrics.jsonl: {damaged} damaged {lines} skipped.")
    return [rows[step] for step in sorted(rows)]


def _why_no_result(folder: RunFolder) -> str:
    if folder.result.is_file():
        return "What the run came to cannot be read from its result.json."
    has = folder.checkpoints.is_dir() and any(folder.checkpoints.iterdir())
    if has:
        return "The run is still going, or was stopped; it can be resumed from a checkpoint."
    return "The run is still going, or was stopped before any checkpoint; numbers are those so far."


def _not_finite(result: dict[str, Any]) -> str | None:
    """That a run diverged. Version 0.1 wrote no word about it but a loss that is not a number."""
    if result.get("diverged"):
        step = result.get("diverged_step")
        return (
            f"The run diverged: loss or gradients were not finite from step {step} on. It was stopped, and no adapter"
            " was saved; the numbers shown are those before."
        )
    loss = result.get("train_loss")
    if "train_loss" in result and not (isinstance(loss, int | float) and math.isfinite(loss)):
        return "The training loss is not finite: the run diverged, and what it saved is not usable."
    return None


def _why_no_gates(path: Path, settings: dict[str, Any]) -> str:
    if (path / "gates.jsonl").is_file():
        return "gates.jsonl holds no row that can be read."
    method = str(settings.get("method", "this method"))
    if method.startswith("na-"):
        return "gates.jsonl is not there: the run logged no step, or was made before nalora wrote it."
    return f"{method} does not steer gates, so none were recorded while it trained."


def _controls_off(gates: Gates) -> dict[str, str]:
    return {"mask": gates.why_no_mask(), "scaling": gates.why_no_scaling()}


def _read_summaries(folder: Path, notices: list[str]) -> Iterable[tuple[Path, dict[str, Any]]]:
    for file in sorted(folder.rglob("summary.json")) if folder.is_dir() else ():
        summary = _read_object(file, notices)
        if summary is not None:
            yield file, summary
