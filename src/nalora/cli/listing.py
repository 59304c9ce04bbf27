"""`nalora methods`, `nalora tasks` and `nalora models`: what there is to choose from."""

from __future__ import annotations

from nalora.cli.screen import console, table


def methods() -> None:
    """List the training methods."""
    from nalora import methods

    rows = table("method", "what it is", "reference")
    for name in methods.names():
        method = methods.get(name)
        rows.add_row(name, method.title, method.reference)
    console().print(rows)


def tasks() -> None:
    """List the tasks, what they ask and what they measure."""
    from nalora import tasks

    rows = table("task", "what is learnt and asked", "measures")
    for name, title, measures in tasks.described():
        rows.add_row(name, title, measures)
    console().print(rows)


def models() -> None:
    """List the models that need no hub; any hub id, folder or GGUF file works too."""
    from nalora.models.loading import NAMED

    rows = table("model", "what it is", "how to get it")
    for name, (title, how) in NAMED.items():
        rows.add_row(name, title, how)
    rows.add_row("OWNER/NAME", "any transformers model on the hub", "loaded when asked for; `hf auth login` if gated")
    rows.add_row("FOLDER", "a model saved by transformers", "–")
    rows.add_row("FILE.gguf", "a GGUF file, dequantised", "pip install gguf")
    console().print(rows)
