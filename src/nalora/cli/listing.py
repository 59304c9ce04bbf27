"""`nalora methods`, `nalora tasks`, `nalora models` and `nalora recipes`: what there is to choose from."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from nalora.cli.screen import console, hush_libraries, table
from nalora.errors import NALoRAError, did_you_mean, shortened
from nalora.runs import packaged


def methods() -> None:
    """List the training methods with their cost relative to LoRA."""
    hush_libraries()  # PEFT imports bitsandbytes, which warns about kernels that the list does not need
    from nalora import methods
    from nalora.methods.peft_tuners import PREFIX, tuners

    rows = table("method", "description", "reference", "step", "memory", "start, s")
    for name in methods.names():
        method = methods.get(name)
        cost = methods.costs().get(name)
        cells = (f"{cost['step']:.2f} ×", f"{cost['memory']:.2f} ×", f"{cost['start_s']:.0f}") if cost else ("", "", "")
        rows.add_row(name, method.title, method.reference, *cells)
    console().print(rows)
    console().print(
        "Step time and peak memory are relative to LoRA, measured on an H200 at Llama-3.1-8B shapes: docs/methods.md.\n"
        f"{PREFIX}TUNER trains with one of PEFT's tuners; the fields of its configuration are settings: "
        f"{', '.join(sorted(tuners()))}.\n"
        "You can write your own method as a Python file: docs/extending.md.",
        highlight=False,
    )


def tasks() -> None:
    """List the tasks with their measures, and the families of reasoning-gym whose scores are unreliable."""
    from nalora import tasks
    from nalora.tasks import gym

    rows = table("task", "description", "measures")
    for name, title, measures in tasks.described():
        rows.add_row(name, title, measures)
    console().print(rows)
    console().print("You can write your own task as a Python file: docs/extending.md.", highlight=False)
    rows = table("unreliable", "reason", "measures")
    for family, fault in gym.untrusted().items():
        rows.add_row(f"gym/{family}", fault.reason, "all" if fault.measure == "accuracy" else fault.measure)
    console().print(rows)


def models() -> None:
    """List the models that need no hub; hub ids, folders and GGUF files work too."""
    from nalora.models.loading import NAMED

    rows = table("model", "description", "how to get it")
    for name, (title, how) in NAMED.items():
        rows.add_row(name, title, how)
    rows.add_row("OWNER/NAME", "any transformers model on the hub", "downloaded on use; `hf auth login` if gated")
    rows.add_row("FOLDER", "a model saved by transformers", "–")
    rows.add_row("FILE.gguf", "a GGUF file, dequantised", "pip install gguf")
    console().print(rows)


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="Print this file, to copy it: `nalora recipes laptop > my.yaml`.")
    ] = None,
) -> None:
    """List the recipes and studies that come with nalora, or print one of them.

    `nalora train NAME` starts a recipe and `nalora study NAME` a study, from any folder.
    """
    if name is not None:
        _print_file(name)
        return
    screen = console()
    for command, files in (("train", packaged.recipes()), ("study", packaged.studies())):
        rows = table("command", "description", "cost")
        for title, file in files.items():
            rows.add_row(f"nalora {command} {title}", *packaged.summary(file))
        screen.print(rows)
    screen.print(
        "To change one, copy it: `nalora recipes laptop > my.yaml`, `nalora recipes studies/laptop > my-study.yaml`.",
        highlight=False,
    )


def _print_file(name: str) -> None:
    """Print the recipe of that name or, if there is none, the study; ``studies/NAME`` is always a study."""
    studies = packaged.studies()
    files = {**studies, **packaged.recipes(), **{f"studies/{study}": file for study, file in studies.items()}}
    if name not in files:
        raise NALoRAError(
            shortened(name),
            found="no recipe or study of that name",
            expected="one that comes with nalora",
            fix=did_you_mean(name, files, "see `nalora recipes`"),
        )
    sys.stdout.write(files[name].read_text(encoding="utf-8"))
