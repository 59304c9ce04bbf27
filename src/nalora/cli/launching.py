"""`nalora launch`: NA-LoRA in another program's training."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from nalora.cli import child_process
from nalora.config import Kernels, NALoRAConfig, types_in_files
from nalora.errors import NALoRAError, SettingsError, did_you_mean, shortened
from nalora.files import yaml_reader
from nalora.integrations import launched
from nalora.runs.conversion import Removed, checked, key_values

# The exit code if the command itself succeeded.
NOT_ATTACHED = 3
# The last argument: a command's own options are not options of `nalora launch`.
CONTEXT = {"allow_interspersed_args": False}
_PREFIX = "NALORA_"
# Variables of this prefix that are no settings.
_OTHER_VARIABLES = ("NALORA_CACHE", "NALORA_COMMIT", launched.VARIABLE)


def launch(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]... -- COMMAND...", help="Settings, and the command that trains.", show_default=False
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML file with settings of NALoRAConfig, and kernels.")
    ] = None,
) -> None:
    """Run a training program and attach NA-LoRA to the first Trainer in it that trains a PEFT LoRA model.

    nalora launch apply_to=update -- llamafactory-cli train lora.yaml

    nalora launch --config nalora.yaml -- torchrun --nproc-per-node 2 train.py

    Settings are the fields of NALoRAConfig, and kernels. They are given as KEY=VALUE, in variables such as
    NALORA_APPLY_TO, or in a file, in this order of precedence. The exit code is the command's, or 3 if it succeeded but
    nothing was attached.
    """
    settings_words, command = split(words or [])
    settings = chosen_settings(config, os.environ, settings_words)
    if launched.VARIABLE in os.environ:
        raise NALoRAError(
            "nalora launch",
            found="a command of another `nalora launch`",
            expected="one `nalora launch`",
            fix="remove one of the two",
        )
    with tempfile.TemporaryDirectory(prefix="nalora-launch-", ignore_cleanup_errors=True) as folder:
        report = Path(folder) / "events.jsonl"
        report.touch()
        code = child_process.run(command, launched.environment(settings, report, os.environ))
        events = launched.events(report)
    if launched.ATTACHED in events:
        raise typer.Exit(code)
    unreadable = events.get(launched.UNREADABLE)
    if unreadable and launched.REFUSED not in events:
        print(
            f"nalora: it is not known whether NA-LoRA was attached: in its report {'; '.join(unreadable)}",
            file=sys.stderr,
        )
        raise typer.Exit(code)
    if launched.REFUSED not in events:  # a refusal was printed where it happened
        why = (
            f"the command ended with exit code {code} before a Trainer trained LoRA layers" if code else _reason(events)
        )
        print(f"nalora: nothing was attached: {why}", file=sys.stderr)
    raise typer.Exit(code or NOT_ATTACHED)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the KEY=VALUE words and the command behind them, which `--` may precede.

    Raises:
        NALoRAError: no command, or an option of `nalora launch` behind a setting.
    """
    settings = list(takewhile(lambda word: "=" in word and not word.startswith("-"), words))
    command = list(words[len(settings) :])
    if command[:1] == ["--"]:
        del command[0]
    elif command and command[0].startswith("-"):
        raise NALoRAError(
            f"nalora launch {shortened(command[0])}",
            found="an option after a setting",
            expected="options, settings and then the command",
            fix=f"nalora launch {command[0]} … {settings[0] if settings else ''} -- COMMAND",
        )
    if not command:
        raise NALoRAError(
            "nalora launch", found="no command", expected="a training command after --",
            fix="nalora launch apply_to=update -- python train.py",
        )  # fmt: skip
    return settings, command


def chosen_settings(file: Path | None, variables: Mapping[str, str], words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a file, of NALORA_* variables and of KEY=VALUE words, of which later ones replace earlier.

    Raises:
        NALoRAError: unknown names and wrong values, all in one message.
    """
    types = {"kernels": Kernels} | types_in_files()
    in_file = yaml_reader.read(file, "a YAML file with settings", "check the path") if file else {}
    errors: list[NALoRAError] = []
    settings: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for where, name, value in (
        *((f"{file}: {shortened(key)}", key, value) for key, value in in_file.items()),
        *_variable_settings(variables),
        *((shortened(key), key, value) for key, value in key_values(words).items()),
    ):
        if name not in types:
            fix = did_you_mean(str(name), types, f"choose one of {', '.join(types)}")
            expected = "a field of NALoRAConfig, or kernels"
            errors.append(NALoRAError(where, found="no such setting", expected=expected, fix=fix))
        elif value is Removed:
            settings.pop(name, None)
        else:
            origins[name], settings[name] = where, checked(where, value, types[name], errors)
    if not errors:
        try:
            NALoRAConfig().changed({name: value for name, value in settings.items() if name != "kernels"})
        except NALoRAError as error:
            errors.append(_with_origin(error, origins))
    if len(errors) > 1:
        raise SettingsError("nalora launch", [error.summary for error in errors])
    if errors:
        raise errors[0]
    return settings


def _with_origin(error: NALoRAError, origins: Mapping[str, str]) -> NALoRAError:
    """Return the error of a value out of range with the word, variable or line of the file that it was given in."""
    name, dot, part = error.where.removeprefix("NALoRAConfig.").partition(".")
    where = f"{origins[name]}{dot}{part}" if name in origins else error.where
    return NALoRAError(where, found=error.found, expected=error.expected, fix=error.fix)


def _variable_settings(variables: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    for variable, text in variables.items():
        if variable.startswith(_PREFIX) and variable not in _OTHER_VARIABLES and text:
            yield variable, variable.removeprefix(_PREFIX).lower(), yaml_reader.value(text, variable)


def _reason(events: Mapping[str, Sequence[str]]) -> str:
    """Return why nothing was attached: the furthest that the processes of the command got."""
    if trained := events.get(launched.WITHOUT_LORA):
        return f"{'; '.join(trained)} without LoRA layers of PEFT that can be trained"
    if launched.IMPORTED in events:
        return "the command imported transformers.Trainer but ended before any Trainer trained"
    if launched.STARTED in events:
        return "the command imported no transformers.Trainer; for a training loop of your own use nalora.attach"
    if missing := events.get(launched.NOT_INSTALLED):
        return f"nalora cannot be imported in the environment of the command ({'; '.join(missing)}); install it there"
    return "the command started no Python that reads PYTHONPATH (python -I and -E do not)"
