"""Mistakes in the options and arguments of a command, which Typer detects, as the one exception type of nalora."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

import typer

from nalora.errors import NALoRAError, did_you_mean, shortened, unknown_name
from nalora.runs.conversion import described_type

# The base of Typer's errors about the command line: click's ClickException before Typer 0.26, a copy of it in 0.26 and
# typer.TyperException since 0.27. The classes below it are compared by name, for the same reason.
UsageError: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__base__ is Exception)

# A name by which `nalora.tasks` recognises data; no file is opened.
_ANY_DATA = "a.jsonl"
_BOOLEANS = ("true", "false", "yes", "no", "on", "off")  # of YAML, in small letters
_QUOTED = re.compile(r"'([^']*)'")


def message_of(error: Any, app: typer.Typer) -> str:
    """Return the message for the user; it is empty if the help was printed in place of missing arguments."""
    message = str(error.format_message())
    if not message or type(error).__name__ == "NoArgsIsHelpError":
        return message
    return str(_refusal(error, *_command(error, app), message))


def _command(error: Any, app: typer.Typer) -> tuple[str, Any]:
    """Return the command's name, as in `nalora train`, and the command itself."""
    if (context := getattr(error, "ctx", None)) is not None:
        return context.command_path, context.command
    # The parser names no context if an option lacks its value.
    group: Any = typer.main.get_command(app)
    name = next((word for word in sys.argv[1:] if word in group.commands), None)
    return (f"nalora {name}", group.commands[name]) if name else ("nalora", group)


def _refusal(error: Any, where: str, command: Any, message: str) -> NALoRAError:
    see = f"see `{where} --help`"
    kind, parameter = type(error).__name__, getattr(error, "param", None)
    if kind == "NoSuchOption":
        return _no_such_option(where, command, error.option_name, see)
    if kind == "MissingParameter" and parameter is not None:
        return _missing(where, command, parameter)
    if kind == "BadOptionUsage":
        option = next((option for option in command.params if error.option_name in _names(option)), None)
        if option is not None:
            return _wrong_usage(where, command, option, error.option_name)
    if kind == "BadParameter" and parameter is not None:
        return _wrong_value(where, command, parameter, message)
    if message.startswith("No such command") and (quoted := _QUOTED.search(message)):
        return unknown_name(where, f"the unknown command {shortened(quoted[1])}", quoted[1], command.commands, see)
    if message.startswith("Got unexpected extra argument"):
        return _too_many(where, command, message.rpartition(" (")[2].removesuffix(")"))
    return NALoRAError(where, found=message.rstrip("."), expected="options and arguments of the command", fix=see)


def _no_such_option(where: str, command: Any, option: str, see: str) -> NALoRAError:
    """Return the error for an unknown option; one that is a setting with dashes is answered with ``name=value``."""
    names = [*(name for known in command.params for name in _names(known)), "--help"]
    found = f"the unknown option {shortened(option)}"
    setting = option.removeprefix("--").replace("-", "_")
    types_of_settings = _settings(where.removeprefix("nalora "))
    if setting not in types_of_settings:
        return unknown_name(where, found, option, names, see)
    _, value = _typed([option]) or (option, "")
    if bool in (kind := types_of_settings[setting], *typing.get_args(kind)) and value.lower() not in _BOOLEANS:
        value = "true"  # typed as a flag
    word = f"{setting}={'VALUE' if not value or value.startswith('-') else value}"
    fix = f"write {shlex.quote(word)}, without dashes, as it is a setting"
    return NALoRAError(where, found=found, expected=f"one of {', '.join(names)}", fix=fix)


def _settings(command: str) -> Mapping[str, Any]:
    """Return what a command takes as KEY=VALUE, with its type; nothing for most commands."""
    if command in ("train", "suggest"):
        from nalora.runs.settings import types_of_all

        return types_of_all()
    if command == "data":
        from nalora import tasks

        return tasks.option_types(_ANY_DATA)
    if command == "launch":
        from nalora.config import Kernels, types_in_files

        return {"kernels": Kernels, **types_in_files()}
    return {}


def _missing(where: str, command: Any, parameter: Any) -> NALoRAError:
    name = _shown(parameter)
    if _names(parameter):
        return NALoRAError(where, found=f"no {name}", expected=_expected(command, parameter), fix=f"add {name} VALUE")
    expected = (parameter.help or "an argument").rstrip(".")
    if expected[:2].istitle():  # no abbreviation, such as URL
        expected = expected[0].lower() + expected[1:]
    return NALoRAError(where, found=f"no {name}", expected=expected, fix=f"add {name} after `{where}`")


def _wrong_usage(where: str, command: Any, option: Any, name: str) -> NALoRAError:
    """Return the error for an option without its value, or with a value that it does not take."""
    if option.is_flag:
        return NALoRAError(where, found=f"a value for {name}", expected="the option alone", fix=f"write {name}")
    count = "no value" if option.nargs == 1 else "too few values"
    fix = f"write {name} {' '.join(['VALUE'] * option.nargs)}"
    return NALoRAError(where, found=f"{count} after {name}", expected=_expected(command, option), fix=fix)


def _wrong_value(where: str, command: Any, option: Any, message: str) -> NALoRAError:
    expected = _expected(command, option)
    name, value = _typed(_names(option), option.nargs) or (_shown(option), "")
    choices = typing.get_args(_hint(command, option)[0])
    fix = did_you_mean(value, map(str, choices), f"give such a value; `{where} --help` describes {name}")
    return NALoRAError(where, found=f"{name} {shortened(value)}" if value else message, expected=expected, fix=fix)


def _too_many(where: str, command: Any, extra: str) -> NALoRAError:
    names = [_shown(parameter) for parameter in command.params if not _names(parameter)]
    expected = f"only {' and '.join(names)}" if names else "no arguments"
    fix = f"remove {shortened(extra)}, put a text with spaces in quotes, or see `{where} --help`"
    return NALoRAError(where, found=f"more arguments: {shortened(extra)}", expected=expected, fix=fix)


def _names(parameter: Any) -> list[str]:
    return [*parameter.opts, *parameter.secondary_opts] if parameter.param_type_name == "option" else []


def _shown(parameter: Any) -> str:
    """Return what the help calls a parameter."""
    if parameter.param_type_name == "option":
        return str(max(parameter.opts, key=len))
    return str(parameter.metavar or parameter.name.upper())


def _typed(names: Collection[str], count: int = 1) -> tuple[str, str] | None:
    """Return the option and its last value as the user typed them: Typer's messages omit the value since 0.29."""
    words = sys.argv[1:]
    for place in range(len(words) - 1, -1, -1):
        name, equals, value = words[place].partition("=")
        if name in names:
            return name, value if equals else " ".join(words[place + 1 : place + 1 + count])
    return None


def _expected(command: Any, parameter: Any) -> str:
    """Return the values that a parameter takes, in words, from the signature of the command."""
    hint, option = _hint(command, parameter)
    if typing.get_origin(hint) is tuple:
        return f"{len(typing.get_args(hint))} numbers"
    if typing.get_origin(hint) is list:  # an option that can be repeated
        (hint,) = typing.get_args(hint)
    low, high = (getattr(option, name, None) for name in ("min", "max"))
    described = described_type(hint)
    if low is not None and high is not None:
        return f"{described} from {low:g} to {high:g}"
    return described if low is None else f"{described} of at least {low:g}"


def _hint(command: Any, parameter: Any) -> tuple[Any, Any]:
    """Return the type of a parameter and its typer.Option; Typer wraps the function of a command."""
    hints = typing.get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    hint, *extras = typing.get_args(hints[parameter.name])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return hint, extras[0] if extras else None
