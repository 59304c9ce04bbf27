"""The command line: what a user can ask nalora without writing Python."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from nalora import __version__
from nalora.cli import diagnosing, inspecting, listing, reporting, runs, studying
from nalora.errors import NALoRAError

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
    except (NALoRAError, typer.TyperException) as error:
        message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        if message:  # empty after the help that stands in for missing arguments
            print(f"nalora: {' '.join(message.split())}", file=sys.stderr)
        code = 2
    sys.exit(code)


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
):  # fmt: skip
    app.command()(command)
