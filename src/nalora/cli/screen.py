"""What the commands share of the screen."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

# What a command exits with that Ctrl-C stopped, as shells have it.
INTERRUPTED = 130


def hush_libraries() -> None:
    """Keep the notices of libraries out of what a command prints; its errors still come through."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)

    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def console() -> Console:
    """Rich on stdout; in a pipe as wide as the tables want, so that no line is folded at 80 columns."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def table(*columns: str, **options: Any) -> Table:
    """A table in the house style."""
    return Table(*columns, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False, **options)
