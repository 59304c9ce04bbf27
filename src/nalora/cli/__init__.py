"""The command line."""

from __future__ import annotations

import os
import sys
from typing import Annotated

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
    usage_errors,
)
from nalora.cli.screen import printable

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
    except usage_errors.UsageError as error:
        code = _refuse(usage_errors.message_of(error, app))
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
    """Print an error message, unless it is empty."""
    if message:
        name = "" if message.startswith(("nalora ", "nalora:")) else "nalora: "
        # Names from files may contain control characters of terminals.
        print(f"{name}{printable(' '.join(message.split()))}", file=sys.stderr)
    return 2


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"nalora {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    # Read when torch is imported, here and in child processes. By default waiting threads spin: on two cores that other
    # work shares, a training step takes 20 s instead of 3 s. The environment of another program is not changed.
    if context.invoked_subcommand != "launch":
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


for command in (
    runs.demo, data.data, suggesting.suggest, runs.train, runs.evaluate, showing.show, chatting.chat,
    generating.generate, exporting.export, diagnosing.diagnose, reporting.report, studying.study, inspecting.inspect,
    listing.methods, listing.tasks, listing.models, inspecting.activations, listing.recipes,
):  # fmt: skip
    app.command()(command)
app.command(context_settings=launching.CONTEXT)(launching.launch)
