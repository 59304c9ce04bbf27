"""The content of a run's folder; a missing or damaged file becomes a sentence for the reader, never an error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nalora.errors import NALoRAError, missing_path
from nalora.files import yaml_reader
from nalora.report.capacity import Capacity, read_capacity
from nalora.report.evaluations import Evaluation, label, read_evaluations, separated
from nalora.report.gates import Gates, read_gates
from nalora.report.reading import clean_diagnosis, clean_mismatch, read_object, rows_by_step
from nalora.runs import old_names
from nalora.runs.folder import RunFolder

# Why a run has no values of a topic although the files that hold them are there.
_NO_VALUES = {
    "loss": "it logged no loss",
    "intervals": "its diagnosis has no intervals: it needs two checkpoints",
}


@dataclass(frozen=True)
class RunData:
    """The content of a run's folder.

    `evaluations` holds summaries by task (``TASK (validation)`` for questions held out of training) and by model,
    ``base`` or ``adapted``; the same name means the same questions in all runs that are read together.
    """

    path: Path
    name: str  # of the folder, with its parents' names where two of the runs that are read together share it
    settings: dict[str, Any]  # run.yaml; empty where that cannot be read
    environment: dict[str, Any]
    result: dict[str, Any] | None  # None while the run is running, or after a kill
    metrics: list[dict[str, Any]]  # in the order of their steps
    gates: Gates | None  # None for methods that do not steer gates
    evaluations: dict[str, dict[str, dict[str, Any]]]
    diagnosis: dict[str, Any] | None
    mismatch: dict[str, Any] | None
    notices: list[str] = field(default_factory=list)  # sentences about damaged, unfinished or ignored files
    missing: dict[str, str] = field(default_factory=dict)  # by topic, the reason why there are no values
    summaries: tuple[Evaluation, ...] = ()  # from which `evaluations` is made

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.settings.get("method") or (self.result or {}).get("method") or "unknown method")

    @property
    def model(self) -> str:
        """The base model's name."""
        return str(self.settings.get("model") or (self.result or {}).get("model") or "unknown model")

    @property
    def task(self) -> str:
        """The task's name."""
        return str((self.result or {}).get("task") or self.settings.get("task") or "unknown task")

    @cached_property
    def capacity(self) -> tuple[Capacity | None, str]:
        """The norms of the adapter's update, and a remark on them or the reason why there are none."""
        return read_capacity(self)

    def series(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the steps and values of a metric, where it was logged as a finite number."""
        rows = [row for row in self.metrics if isinstance(row.get(name), int | float) and math.isfinite(row[name])]
        steps, values = [row["step"] for row in rows], [row[name] for row in rows]
        return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)

    def why_missing(self, *topics: str) -> str:
        """Return the first known reason why the run has no values of these topics."""
        if "capacity" in topics:
            return self.capacity[1]
        reasons = (self.missing[topic] for topic in topics if topic in self.missing)
        return next(reasons, _NO_VALUES.get(topics[-1], "no numbers of these were recorded"))


def read_run(path: str | Path) -> RunData:
    """Read a run's folder; raise NALoRAError if there is no such folder, or no run in it."""
    path = Path(path)
    if not path.is_dir():
        raise missing_path("folder", path, "a run's folder", "check the path; runs go to output=")
    if not _is_run(path):
        fix = "give the folder that `nalora train` named"
        raise NALoRAError(str(path), found="no run.yaml", expected="a run's folder", fix=fix)
    folder = RunFolder(path)
    notices: list[str] = []
    missing: dict[str, str] = {}
    settings = _read_settings(folder, notices)
    result = read_object(folder.result, notices)
    if result is None:
        missing["result"] = _why_no_result(folder)
        notices.append(missing["result"])
    elif (sentence := _divergence(result) or _early_stop(result)) is not None:
        notices.append(sentence)
    text = folder.metrics.read_text(encoding="utf-8", errors="replace") if folder.metrics.is_file() else ""
    metrics = rows_by_step(text.split("\n"), folder.metrics.name, notices)
    if not metrics:
        missing["metrics"] = "No step was logged, so there is no training curve."
        notices.append(missing["metrics"])
    gates = read_gates(path / "gates.jsonl", settings, notices)
    missing |= gates.controls_off() if gates else {"gates": _why_no_gates(path, settings)}
    diagnosis = read_object(path / "diagnosis.json", notices, clean_diagnosis)
    if diagnosis is None:
        missing["diagnosis"] = f"No diagnosis yet: `nalora diagnose {path}` measures how the gates moved."
    mismatch = read_object(path / "mismatch.json", notices, clean_mismatch)
    if mismatch is None:
        missing["mismatch"] = f"No target to compare with: `nalora diagnose {path} --against TARGET` measures one."
    summaries = read_evaluations(folder.evaluations, settings, notices)
    (evaluations,) = label([summaries])
    if not evaluations:
        missing["evaluations"] = f"Not evaluated yet: `nalora evaluate {path}` evaluates it on held-out questions."
    environment = read_object(path / "environment.json", notices)
    if environment is None and not (path / "environment.json").is_file():
        notices.append("environment.json is missing.")
    return RunData(
        path, path.resolve().name, settings, environment or {}, result, metrics, gates, evaluations, diagnosis,
        mismatch, notices, missing, summaries,
    )  # fmt: skip


def read_runs(paths: Iterable[str | Path]) -> list[RunData]:
    """Read runs, and the runs in folders of runs, under unique names; raise NALoRAError where there is none."""
    folders: list[Path] = []
    for path in map(Path, paths):
        inside = [] if _is_run(path) else _runs_below(path)
        folders += [folder for folder in inside or [path] if folder not in folders]
    names = _unique_names(folders)
    return with_comparable_evaluations([
        replace(read_run(folder), name=name) for folder, name in zip(folders, names, strict=True)
    ])  # fmt: skip


def with_comparable_evaluations(runs: Sequence[RunData]) -> list[RunData]:
    """Return the runs with evaluations under the same name only where the questions are the same."""
    labelled = label([run.summaries for run in runs])
    return [replace(run, evaluations=evaluations) for run, evaluations in zip(runs, labelled, strict=True)]


def differences(runs: Sequence[RunData]) -> list[str]:
    """Return sentences on what prevents a comparison of these runs."""
    sentences = []
    for topic, values in (("base models", [run.model for run in runs]), ("tasks", [run.task for run in runs])):
        groups: dict[str, list[str]] = {}
        for run, value in zip(runs, values, strict=True):
            groups.setdefault(value, []).append(run.name)
        if len(groups) > 1:
            listed = "; ".join(f"{value}: {', '.join(names)}" for value, names in groups.items())
            sentences.append(f"These runs have different {topic}, so their numbers cannot be compared ({listed}).")
    return [*sentences, *separated([run.summaries for run in runs])]


def _is_run(path: Path) -> bool:
    return (path / "run.yaml").is_file() or (path / "metrics.jsonl").is_file()


def _runs_below(path: Path) -> list[Path]:
    """Return the runs of a study at any depth; nothing inside a run is a run."""
    runs: list[Path] = []
    if path.is_dir():
        for child in sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith(".")):
            runs += [child] if _is_run(child) else _runs_below(child)
    return runs


def _unique_names(paths: Sequence[Path]) -> list[str]:
    """Return folder names, all with as many parents as make them unique."""
    parts = [path.resolve().parts[1:] for path in paths]
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _read_settings(folder: RunFolder, notices: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    problem = "is missing, so the settings are not known."
    if folder.settings.is_file():
        try:
            settings = yaml_reader.read(folder.settings, "a run's settings", "train it again")
            problem = "" if settings else "is damaged, so the settings are not known (it is empty)."
        except NALoRAError as error:
            problem = f"is damaged, so the settings are not known ({error.found})."
    if problem:
        notices.append(f"run.yaml {problem}")
    return {str(key): value for key, value in old_names.completed(settings).items()} if settings else {}


def _why_no_result(folder: RunFolder) -> str:
    if folder.result.is_file():
        return "The result of the run cannot be read from result.json."
    if folder.checkpoints.is_dir() and any(folder.checkpoints.iterdir()):
        return "The run is still running or was stopped; it can be resumed from a checkpoint."
    return "The run is still running or was stopped before any checkpoint; the numbers are those so far."


def _divergence(result: dict[str, Any]) -> str | None:
    """Return a sentence if the run diverged; in version 0.1 only the loss shows it."""
    if result.get("diverged"):
        start = f"The run diverged: loss or gradients were not finite from step {result.get('diverged_step')} on."
        return f"{start} It was stopped, and no adapter was saved; the numbers shown are those before."
    loss = result.get("train_loss")
    if "train_loss" in result and not (isinstance(loss, int | float) and math.isfinite(loss)):
        return "The training loss is not finite: the run diverged, and its adapter is not usable."
    return None


def _early_stop(result: dict[str, Any]) -> str | None:
    """Return a sentence if the run was stopped early by its setting."""
    if not result.get("stopped_early"):
        return None
    return f"The run was stopped after {result.get('steps')} of {result.get('planned_steps')} steps, by stop_after."


def _why_no_gates(path: Path, settings: dict[str, Any]) -> str:
    if (path / "gates.jsonl").is_file():
        return "gates.jsonl has no row that can be read."
    method = str(settings.get("method", "this method"))
    if method.startswith("na-"):
        return "gates.jsonl is missing: the run logged no step, or was made before nalora wrote this file."
    return f"{method} does not steer gates, so none were recorded during training."
