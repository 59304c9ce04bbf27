"""What a run's settings must be beyond their types."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from nalora.errors import collecting, shortened
from nalora.methods import optimizers
from nalora.runs import loggers

# No regular expression, which PEFT takes, too: names of layers alone.
_NAMES_WITH_COMMAS = re.compile(r"[\w.-]+(\s*,\s*[\w.-]+)+")
# Limits that a type does not say: (settings, holds, what is expected).
_LIMITS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("learning_rate alpha epochs", lambda n: n > 0, "a positive number"),
    ("rank batch_size micro_batch_size max_length log_every steps train_limit", lambda n: n >= 1, "1 or more"),
    ("weight_decay max_norm save_every save_minutes snapshot_every", lambda n: n >= 0, "0 or more"),
    ("seed validation_size", lambda n: n >= 0, "0 or more"),
    ("dropout", lambda n: 0 <= n < 1, "a number in [0, 1)"),
    ("warmup", lambda n: 0 <= n <= 1, "a share between 0 and 1"),
)


def problems_of_values(values: Mapping[str, Any]) -> list[str]:
    """A sentence for every value, or pair of values, with which no run can start.

    Args:
        values: those that were given; one that is not of its setting's type was found out before.
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
            loggers.refuse_unknown(report_to)
    if values.get("target_modules") == []:
        problems.append("target_modules: an empty list, expected names of layers (or all-linear)")
    modules = values.get("target_modules")
    if isinstance(modules, str) and _NAMES_WITH_COMMAS.fullmatch(modules):
        names = ", ".join(name.strip() for name in modules.split(","))
        problems.append(
            f"target_modules: {shortened(repr(modules))}, expected a list of names: [{names}]"
            f" (on the command line 'target_modules=[{names.replace(' ', '')}]')"
        )
    batch, micro = values.get("batch_size", 32), values.get("micro_batch_size")
    if isinstance(batch, int) and isinstance(micro, int) and micro >= 1 and batch % micro:
        problems.append(f"batch_size: {batch} is no multiple of micro_batch_size, {micro}")
    if values.get("fused_adapters") is True and values.get("kernels") == "fused":
        problems.append("fused_adapters: true beside kernels: fused, which fuses them too; leave one out")
    return problems
