"""The loggers of transformers that a run reports to: known by name, and installed before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from nalora.errors import NALoRAError, did_you_mean, shortened

# How pip calls what transformers calls otherwise.
_PACKAGES = {"azure_ml": "azureml-mlflow", "comet_ml": "comet-ml", "flyte": "flytekit"}
_ALL, _NONE = "all", "none"


def names_of(report_to: str | Sequence[str]) -> list[str]:
    """The loggers by name; none for ``none``."""
    names = [report_to] if isinstance(report_to, str) else list(report_to)
    # Anything else was refused as a value of the wrong type.
    return [name for name in names if isinstance(name, str) and name != _NONE]


def refuse_unknown(report_to: str | Sequence[str]) -> None:
    """Refuse a name that transformers does not have.

    Raises:
        NALoRAError: no logger of that name.
    """
    names = names_of(report_to)
    if not names or names == [_ALL]:  # before transformers is imported, which takes seconds
        return
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise NALoRAError(
                f"report_to: {shortened(name)}",
                found="no logger of that name",
                expected=f"none, all, or one or more of {', '.join(INTEGRATION_TO_CALLBACK)}",
                fix=did_you_mean(name, INTEGRATION_TO_CALLBACK, "leave report_to out"),
            )


def refuse_missing(report_to: str | Sequence[str]) -> None:
    """Refuse a logger that is not installed; the Trainer would do so once the model is loaded.

    Not part of checking settings: a run that was logged on one machine is evaluated on any other.

    Raises:
        NALoRAError: a logger's package is not here.
    """
    names = names_of(report_to)
    if not names or names == [_ALL]:
        return
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    for name in names:
        if name not in get_available_reporting_integrations() and not _can_be_made(name):
            raise NALoRAError(
                f"report_to: {name}",
                found=f"that {name} is not installed",
                expected="the package of every logger",
                fix=f"pip install {_PACKAGES.get(name, name)}, or leave report_to out",
            )


def _can_be_made(name: str) -> bool:
    """Of the few loggers that transformers does not list: their callbacks refuse to be made without their package."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    try:
        INTEGRATION_TO_CALLBACK[name]()
    except Exception:  # each has a way of its own
        return False
    return True
