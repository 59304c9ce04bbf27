"""The command line."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from nalora import __version__
from nalora.cli import (
    chatting,
    data,
    diagnosing,
    exporting,
    failures,
    generating,
    inspecting,
    launching,
    listing,
    reporting,
    runs,
    showing,
    studying,
    suggesting,
)
from nalora.cli.screen import printable

# The base of Typer's errors about the command line: click's ClickException before Typer 0.26, a copy of it in 0.26 and
# typer.TyperException since 0.27.
UsageError: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__base__ is Exception)

# The exit code that shells report for SIGPIPE: the reader of the output has ended.
_BROKEN_PIPE = 128 + 13

app = typer.Typer(
    name="nalora",
    help="Train LoRA adapters on your own data; evaluate, compare, talk to and export them.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; a mistake of the user is one line on stderr and exit code 2, never a traceback."""
    try:
        code = app(prog_name="nalora", standalone_mode=False)
    except UsageError as error:
        code = _refuse(error.format_message())
    except BrokenPipeError:  # as in `nalora recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = _BROKEN_PIPE
    except Exception as error:
        message = failures.message_of(error)
        if message is None:
            raise
        code = _refuse(message)
    sys.exit(code)


def _refuse(message: str) -> int:
    """Print an error message; it is empty if the help was printed in place of missing arguments."""
    if message:
        name = "" if message.startswith("nalora ") else "nalora: "
        # Names from files may contain control characters of terminals.
        print(f"{name}{printable(' '.join(message.split()))}", file=sys.stderr)
    return 2


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"nalora {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for command in (
    runs.demo, data.data, suggesting.suggest, runs.train, runs.evaluate, showing.show, chatting.chat,
    generating.generate, exporting.export, diagnosing.diagnose, reporting.report, studying.study, inspecting.inspect,
    listing.methods, listing.tasks, listing.models, inspecting.activations, listing.recipes,
):  # fmt: skip
    app.command()(command)
app.command(context_settings=launching.CONTEXT)(launching.launch)
