"""The command line: what a user can ask nalora without writing Python."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from nalora import __version__
from nalora.cli import diagnosing, failures, inspecting, listing, reporting, runs, studying

# What shells report of a command whose reader went away.
_BROKEN_PIPE = 128 + 13

app = typer.Typer(
    name="nalora",
    help="Nonlinearity-Aware LoRA: train ordinary LoRA adapters with an eye on the FFN gates.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2, never a traceback."""
    try:
        code = app(prog_name="nalora", standalone_mode=False)
    except typer.TyperException as error:
        code = _refuse(error.format_message())
    except BrokenPipeError:  # `nalora recipes | head` has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = _BROKEN_PIPE
    except Exception as error:
        message = failures.one_sentence(error)
        if message is None:
            raise
        code = _refuse(message)
    sys.exit(code)


def _refuse(message: str) -> int:
    """Print what is wrong; an empty message is that of the help, which is printed in place of missing arguments."""
    if message:
        # Names out of files may hold what a terminal would obey.
        line = "".join(char if char.isprintable() else "�" for char in " ".join(message.split()))
        print(f"nalora: {line}", file=sys.stderr)
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
    runs.demo, runs.train, runs.evaluate, diagnosing.diagnose, reporting.report, studying.study,
    inspecting.inspect, listing.methods, listing.tasks, listing.models, inspecting.activations,
    listing.recipes,
):  # fmt: skip
    app.command()(command)
