"""`nalora methods`, `nalora tasks`, `nalora models` and `nalora recipes`: what there is to choose from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from nalora.cli.screen import console, hush_libraries, table
from nalora.errors import NALoRAError, did_you_mean, shortened
from nalora.runs import packaged

_STUDY = "studies/"


def methods() -> None:
    """List the training methods, with what each costs beside LoRA."""
    hush_libraries()  # PEFT imports bitsandbytes, which warns of kernels that no list needs
    from nalora import methods
    from nalora.methods.peft_tuners import PREFIX, tuners

    rows = table("method", "what it is", "reference", "step", "memory", "start, s")
    for name in methods.names():
        method = methods.get(name)
        cost = methods.costs().get(name)
        cells = (f"{cost['step']:.2f} ×", f"{cost['memory']:.2f} ×", f"{cost['start_s']:.0f}") if cost else ("", "", "")
        rows.add_row(name, method.title, method.reference, *cells)
    console().print(rows)
    console().print(
        "Step and peak memory in units of LoRA's, measured on an H200 at Llama-3.1-8B shapes: docs/methods.md.\n"
        f"{PREFIX}TUNER trains with a tuner of PEFT's, with its configuration fields as settings: "
        f"{', '.join(sorted(tuners()))}.\n"
        "A Python file with METHODS is a method too: docs/extending.md.",
        highlight=False,
    )


def tasks() -> None:
    """List the tasks with their measures, and the families of reasoning-gym whose scores cannot be trusted."""
    from nalora import tasks
    from nalora.tasks import gym_trust

    rows = table("task", "what it is", "measures")
    for name, title, measures in tasks.described():
        rows.add_row(name, title, measures)
    console().print(rows)
    console().print("A Python file with TASKS is a task too: docs/extending.md.", highlight=False)
    rows = table("not to be trusted", "why", "measures")
    for family, fault in gym_trust.untrusted().items():
        rows.add_row(f"gym/{family}", fault.reason, "all" if fault.measure == "accuracy" else fault.measure)
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


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="Print this file, to be copied: `nalora recipes laptop > my.yaml`.")
    ] = None,
) -> None:
    """List the recipes and studies that come with nalora, or print one of them.

    `nalora train NAME` starts a recipe and `nalora study NAME` a study, from any folder.
    """
    if name is not None:
        sys.stdout.write(_file(name).read_text(encoding="utf-8"))
        return
    screen = console()
    for command, files in (("train", packaged.recipes()), ("study", packaged.studies())):
        rows = table("command", "what it is", "cost")
        for each, file in files.items():
            rows.add_row(f"nalora {command} {each}", *packaged.summary(file))
        screen.print(rows)
    screen.print(
        "To change one, copy it: `nalora recipes laptop > my.yaml`, `nalora recipes studies/laptop > my-study.yaml`.",
        highlight=False,
    )


def _file(name: str) -> Path:
    """A recipe of that name or, where there is none, a study; ``studies/NAME`` is a study."""
    known = {f"{_STUDY}{each}": file for each, file in packaged.studies().items()}
    known = {**packaged.studies(), **packaged.recipes(), **known}
    if name not in known:
        raise NALoRAError(
            shortened(name),
            found="no recipe or study of that name",
            expected="one that comes with nalora",
            fix=did_you_mean(name, known, "see `nalora recipes`"),
        )
    return known[name]
