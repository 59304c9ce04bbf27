"""Checks of setting values: their types, limits, and the loggers they name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nalora.errors import collecting, missing_package, shortened, unknown_name
from nalora.methods import optimizers

# Limits that the type does not express: (settings, condition, expected).
_LIMITS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("learning_rate alpha epochs", lambda n: n > 0, "a positive number"),
    ("rank batch_size micro_batch_size max_length log_every", lambda n: n >= 1, "1 or more"),
    ("steps stop_after train_limit", lambda n: n >= 1, "1 or more"),
    ("weight_decay max_norm save_every save_minutes", lambda n: n >= 0, "0 or more"),
    ("snapshot_every seed validation_size", lambda n: n >= 0, "0 or more"),
    ("dropout", lambda n: 0 <= n < 1, "a number in [0, 1)"),
    ("warmup", lambda n: 0 <= n <= 1, "a share between 0 and 1"),
)
# Layer names only: PEFT also accepts a regular expression, which may contain a comma.
_NAMES_WITH_COMMAS = re.compile(r"[\w.-]+(\s*,\s*[\w.-]+)+")
# Packages whose name on PyPI differs from the logger's name in transformers.
_LOGGER_PACKAGES = {"azure_ml": "azureml-mlflow", "comet_ml": "comet-ml", "flyte": "flytekit"}


def limit_problems(values: Mapping[str, Any]) -> list[str]:
    """Return a sentence for every value, or pair of values, with which no run can start.

    Values of the wrong type are skipped: `converted` reports them.
    """
    problems = [
        f"{name}: {shortened(repr(values[name]))}, expected {expected}"
        for names, holds, expected in _LIMITS
        for name in names.split()
        if isinstance(values.get(name), int | float) and not holds(values[name])
    ]
    if isinstance(optimizer := values.get("optimizer"), str):
        with collecting(problems):
            optimizers.refuse_unknown(optimizer)
    if isinstance(report_to := values.get("report_to"), str | list):
        with collecting(problems):
            refuse_unknown_loggers(report_to)
    modules = values.get("target_modules")
    if modules == [] and not values.get("target_parameters"):
        problems.append("target_modules: an empty list, expected names of layers (or all-linear)")
    if isinstance(modules, str) and _NAMES_WITH_COMMAS.fullmatch(modules):
        names = ", ".join(name.strip() for name in modules.split(","))
        problems.append(
            f"target_modules: {shortened(repr(modules))}, expected a list of names: [{names}]"
            f" (on the command line 'target_modules=[{names.replace(' ', '')}]')"
        )
    factors, steps = values.get("learning_rate_factors"), values.get("gate_movement_steps")
    if isinstance(factors, dict) and not _all_positive(factors.values()):
        problems.append(f"learning_rate_factors: {shortened(repr(factors))}, expected positive numbers")
    if isinstance(steps, list | tuple) and not _all_positive(steps):
        problems.append(f"gate_movement_steps: {shortened(repr(steps))}, expected steps of 1 or more")
    problems += _stop_problems(values)
    batch, micro = values.get("batch_size", 32), values.get("micro_batch_size")
    if isinstance(batch, int) and isinstance(micro, int) and micro >= 1 and batch % micro:
        problems.append(f"batch_size: {batch} is not a multiple of micro_batch_size, {micro}")
    if values.get("fused_adapters") is True and values.get("kernels") == "fused":
        problems.append("fused_adapters: true with kernels: fused, which also fuses them; remove one of the two")
    if values.get("base") == "fp8" and values.get("quantise"):
        problems.append(f"base: fp8 with quantise: {values['quantise']}; remove one of the two")
    if values.get("base") == "fp8" and values.get("fused_adapters") is False:
        problems.append("fused_adapters: false with base: fp8, whose products are fused layers; remove one of the two")
    if values.get("evaluate_quantised") is False and not values.get("quantise"):
        problems.append("evaluate_quantised: false without quantise, so that no base is quantised; remove it")
    return problems


def _stop_problems(values: Mapping[str, Any]) -> list[str]:
    """Return a sentence for every setting that contradicts stopping early."""
    stop, steps, recorded = (values.get(name) for name in ("stop_after", "steps", "gate_movement_steps"))
    if not isinstance(stop, int):
        return []
    problems = []
    if isinstance(steps, int) and stop >= steps:
        problems.append(f"stop_after: {stop} with steps: {steps}, expected fewer than steps; lower it, or remove it")
    if values.get("schedule") == "range_test":
        problems.append("stop_after with schedule: range_test, which reaches learning_rate in its last step; set steps")
    late = [step for step in recorded if isinstance(step, int) and step > stop] if isinstance(recorded, list) else []
    if late:
        problems.append(f"gate_movement_steps: {late} with stop_after: {stop}, which ends the run before; remove them")
    return problems


def _all_positive(numbers: Iterable[Any]) -> bool:
    return all(isinstance(number, int | float) and number > 0 for number in numbers)


def _loggers(report_to: str | Sequence[str]) -> list[str]:
    """Return the loggers that transformers does not choose itself: none for ``none`` and ``all``."""
    names = [report_to] if isinstance(report_to, str) else report_to
    loggers = [name for name in names if isinstance(name, str) and name != "none"]
    return [] if loggers == ["all"] else loggers


def refuse_unknown_loggers(report_to: str | Sequence[str]) -> None:
    """Raise NALoRAError for a logger that transformers does not have."""
    if not (loggers := _loggers(report_to)):
        return  # without importing transformers, which takes seconds
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in (name for name in loggers if name not in INTEGRATION_TO_CALLBACK):
        known, where = ["none", "all", *INTEGRATION_TO_CALLBACK], f"report_to: {shortened(name)}"
        raise unknown_name(where, "no logger of that name", name, known, "leave report_to out")


def refuse_missing_loggers(report_to: str | Sequence[str]) -> None:
    """Raise NALoRAError for a logger that is not installed, before the model is loaded.

    Not part of checking settings: a run that was logged on one machine can be evaluated on another.
    """
    if not (loggers := _loggers(report_to)):
        return
    from transformers.integrations import integration_utils

    available = integration_utils.get_available_reporting_integrations()
    for name in (name for name in loggers if name not in available):
        try:  # transformers does not list every logger; the callbacks of the others raise without their package
            integration_utils.INTEGRATION_TO_CALLBACK[name]()
        except Exception as error:
            package = _LOGGER_PACKAGES.get(name, name)
            instead = ", or leave report_to out"
            raise missing_package(f"report_to: {name}", package, "to log with", instead=instead) from error
