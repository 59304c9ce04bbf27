"""The GPU hours of a study, estimated from measured steps: runs × steps × seconds.

At the shapes of an 8B model a step is arithmetic, so its time grows with the tokens: every example counts as long as
`max_length`, which is an upper bound. A step of a small model waits for kernel launches, so it takes the same time at
any length. Models whose steps were not measured are estimated by another model, and the estimate says so. Loading,
validation and generation of answers are not included.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nalora import methods, tasks
from nalora.errors import NALoRAError
from nalora.runs.settings import check
from nalora.studies.schedule import Results, Schedule
from nalora.tasks.data_files import HUB

_LARGE, _SMALL = "llama-3.1-8b shapes, 4x1024", "smollm2-135m shapes, 32x320"
_SMALL_GRAPH = f"{_SMALL}, graph"


class _Model(NamedTuple):
    """The setting that was measured for a model; `instead` names the measured model if it is another one."""

    setting: str
    instead: str = ""


_MODELS = {
    "meta-llama/Llama-3.1-8B": _Model(_LARGE),
    "meta-llama/Llama-2-7b-hf": _Model(_LARGE, "Llama 3.1 8B"),
    "smollm2-135m": _Model(_SMALL),
    "google-t5/t5-base": _Model(_SMALL, "SmolLM2-135M"),
    "openai/clip-vit-base-patch16": _Model(_SMALL, "SmolLM2-135M"),
}
_TOKENS = {_LARGE: 4 * 1024}  # of the measured step, where the time of a step grows with them
# Sizes of published training splits, for runs that set neither `steps` nor `train_limit`.
TRAINING_EXAMPLES = {
    "mnli": 392_702, "sst2": 67_349, "cola": 8_551, "qnli": 104_743, "mrpc": 3_668, "gsm8k": 7_473,
    "cars": 8_144, "dtd": 3_760, "eurosat": 21_600, "gtsrb": 26_640, "resisc45": 18_900, "sun397": 19_850,
    "svhn": 73_257,
}  # fmt: skip
_MEASURED_RANK = 8
_IMAGE_TASKS = {"cars", "dtd", "eurosat", "gtsrb", "resisc45", "sun397", "svhn"}
# Decoding and resizing an image of 500 × 400 on one core, which a step waits for.
_SECONDS_OF_AN_IMAGE = 0.0058


@dataclass
class Cost:
    """The estimated hours of a study's runs, one after the other on one GPU.

    Attributes:
        hours: of all runs.
        left: of the runs that are not in the store.
        device: on which steps were measured.
        shares: whether runs that share a GPU take less of it, because their steps wait for kernel launches.
        assumptions: what was not measured.
        unknown: why there is no estimate; empty if there is one.
    """

    hours: float = 0.0
    left: float = 0.0
    device: str = ""
    shares: bool = True
    assumptions: dict[str, None] = field(default_factory=dict)
    unknown: str = ""

    def gpu_hours(self, per_gpu: int = 1) -> float:
        """Return the hours of GPUs that `per_gpu` runs share without slowing each other down."""
        return self.hours / self._sharing(per_gpu)

    def _sharing(self, per_gpu: int) -> int:
        return per_gpu if self.shares else 1

    def sentence(self, per_gpu: int = 1) -> str:
        """Return the estimate in a sentence or two."""
        if self.unknown:
            return f"GPU hours: not estimated, because {self.unknown}."
        sharing = self._sharing(per_gpu)
        shared = f" if {sharing} runs share one GPU without slowing each other down" if sharing > 1 else ""
        left = f", {hours_text(self.left / sharing)} of them left" if self.left < self.hours else ""
        text = f"About {hours_text(self.gpu_hours(per_gpu))} GPU hours on one {self.device}{shared}{left},"
        assumed = f" Assumed: {'; '.join(self.assumptions)}." if self.assumptions else ""
        return f"{text} estimated from measured steps, without loading, validation and generation.{assumed}"


def estimate(schedule: Schedule, results: Results) -> Cost:
    """Return the cost of a study, from the settings of its runs and the measured steps."""
    cost, sizes = Cost(), dict[str, int]()
    counted: set[str] = set()
    for cell in schedule.cells:
        rates, arm = cell.arm.learning_rates, cell.arm
        seconds = _seconds_of_run(schedule.job(cell, rates[0], arm.seeds[0]).settings, cost, sizes)
        if cost.unknown:
            return cost
        # Of a cell without a chosen rate, the runs with further seeds are known by number only.
        jobs = {job.key for job in schedule.needed(cell, results)} - counted
        counted |= jobs
        further = 0
        if schedule.chosen_rate(cell, results) is None:
            further = len({*arm.seeds} - {*schedule.study.screening_seeds})
        cost.hours += (len(jobs) + further) * seconds / 3600
        cost.left += (sum(key not in results for key in jobs) + further) * seconds / 3600
    return cost


def _seconds_of_run(settings: Mapping[str, Any], cost: Cost, sizes: dict[str, int]) -> float:
    """Return the seconds of one training; note in `cost` what is assumed, or why they are not known.

    `sizes` keeps the numbers of training examples in data files, which may take long to read.
    """
    model, task = str(settings["model"]), tasks.name_of(settings["task"])
    if model not in _MODELS:
        cost.unknown = f"no step of {model} was measured"
        return 0.0
    setting, instead = _MODELS[model]
    if instead:
        cost.assumptions[f"{model} costs as much as {instead}"] = None
    if setting == _SMALL and settings.get("cuda_graphs"):
        setting = _SMALL_GRAPH
    batch = int(settings["batch_size"])
    steps = settings.get("stop_after") or settings.get("steps") or _steps(settings, task, batch, sizes)
    if not steps:
        cost.unknown = f"the number of training examples of {task} is not known"
        return 0.0
    measured = methods.measured_steps()[setting]
    cost.device = measured["device"]
    variant = _variant(settings, measured["ms"], cost)
    seconds = measured["ms"][variant] / 1000
    cost.shares &= setting == _SMALL
    if settings["rank"] != _MEASURED_RANK and variant != "full":
        cost.assumptions[f"rank {settings['rank']} costs as much as rank {_MEASURED_RANK}"] = None
    if settings["target_modules"] != "all-linear" and variant != "full":
        cost.assumptions["adapters on some layers cost as much as on all"] = None
    if setting in _TOKENS:
        seconds *= batch * int(settings["max_length"]) / _TOKENS[setting]
        cost.assumptions["every example is as long as max_length, an upper bound"] = None
    if task in _IMAGE_TASKS:
        seconds += batch * _SECONDS_OF_AN_IMAGE
    return float(steps * seconds + measured["start_s"].get(variant, 0.0))


def _steps(settings: Mapping[str, Any], task: str, batch: int, sizes: dict[str, int]) -> int:
    """Return the steps of a run that sets their number by its examples; 0 if those are not known."""
    examples = settings.get("train_limit") or 0
    if not examples and task in TRAINING_EXAMPLES:
        examples = TRAINING_EXAMPLES[task] - settings["validation_size"]
    else:
        with contextlib.suppress(NALoRAError):  # which the run reports
            in_files = examples_in_files(settings, sizes)
            examples = min(examples or in_files, in_files or examples)
    # As `Split.steps`: the last batch of an epoch may be incomplete.
    return math.ceil(math.ceil(examples / batch) * float(settings["epochs"]))


def examples_in_files(settings: Mapping[str, Any], sizes: dict[str, int]) -> int:
    """Return the number of training examples in data files of the user, before long ones are left out.

    `sizes` keeps the numbers, since files may take long to read; those on the hub, which a run downloads, count as 0.

    Raises:
        NALoRAError: files that cannot be read, or too few examples for the held-out ones.
    """
    if not tasks.is_own_data(settings["task"]) or settings["task"].startswith(HUB):
        return 0
    names = {"task", "data_dir", "validation_size", *tasks.option_types(settings["task"])}
    key = repr({name: settings[name] for name in sorted(names & settings.keys())})
    if key not in sizes:
        run = check(settings)
        task = tasks.get(run.settings.task, data_dir=run.settings.data_dir, **run.task_options)
        sizes[key] = len(task.validation_split(run.settings.validation_size)[0])
    return sizes[key]


def _variant(settings: Mapping[str, Any], measured: Mapping[str, float], cost: Cost) -> str:
    """Return the measured method that a run costs as much as."""
    method = str(settings["method"])
    if method == "lora-pro" and settings.get("mode") == "full" and "lora-pro, full mode" in measured:
        return "lora-pro, full mode"
    if method in measured:
        return method
    like = "na-lora" if method.startswith("na-lora") else "lora"
    cost.assumptions[f"{method} costs as much as {like}"] = None
    return like


def hours_text(hours: float) -> str:
    """Return hours with two significant digits, and whole ones from ten."""
    return f"{hours:,.0f}" if hours >= 9.95 else f"{hours:.2g}"
