"""`nalora methods`, `nalora tasks`, `nalora models` and `nalora recipes`: what there is to choose from."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from typing import Annotated

import typer
from rich.markup import escape

from nalora.cli.screen import console, hush_libraries, table
from nalora.errors import NALoRAError, did_you_mean, shortened
from nalora.runs import packaged

# An argument in a docstring, with the indented lines that continue it.
_ARGUMENT = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


def methods(
    name: Annotated[
        str | None, typer.Argument(help="List the settings of this method: `nalora methods peft/gralora`.")
    ] = None,
) -> None:
    """List the training methods with their cost relative to LoRA and the tuners of PEFT, or the settings of one."""
    from nalora import methods
    from nalora.methods.peft_registry import PREFIX, described

    if name is not None:
        _print_settings(name)
        return
    rows = table("method", "description", "reference", "step", "memory", "start, s")
    for name in methods.names():
        method = methods.get(name)
        cost = methods.costs().get(name)
        cells = (f"{cost['step']:.2f} ×", f"{cost['memory']:.2f} ×", f"{cost['start_s']:.0f}") if cost else ("", "", "")
        rows.add_row(name, method.title, method.reference, *cells)
    console().print(rows)
    tuners = table("tuner of PEFT", "what is trained", "configuration")
    for tuner, (description, configuration) in described().items():
        tuners.add_row(f"{PREFIX}{tuner}", description, configuration)
    console().print(tuners)
    console().print(
        "Step time and peak memory are relative to LoRA, measured on an H200 at Llama-3.1-8B shapes: docs/methods.md.\n"
        "`nalora methods NAME` lists the settings of a method; a tuner's are the fields of its configuration in PEFT.\n"
        "You can write your own method as a Python file: docs/extending.md.",
        highlight=False,
    )


def _print_settings(name: str) -> None:
    """Print a line for each setting that a method has in addition to those of every run."""
    hush_libraries()  # PEFT imports bitsandbytes, which warns about kernels that the list does not need
    from nalora import methods
    from nalora.runs.conversion import described_type

    method = methods.get(name)
    # PEFT's fields have a help text, and the classes here an entry in their docstring.
    texts = dict(_ARGUMENT.findall(inspect.getdoc(method) or ""))
    texts |= {field.name: text for field in dataclasses.fields(method) if (text := field.metadata.get("help"))}
    defaults = method.build().defaults()
    rows = table("setting", "type", "default", "description")
    for setting, kind in method.options({}).items():
        default = defaults.get(setting)
        shown = "" if default is None or default is dataclasses.MISSING else str(default)
        rows.add_row(*map(escape, (setting, described_type(kind), shown, " ".join(texts.get(setting, "").split()))))
    console().print(f"{escape(name)}: {escape(method.title)}, {escape(method.reference)}", highlight=False)
    console().print(rows if rows.row_count else "It has no settings but those of every run.")


def tasks() -> None:
    """List the tasks with their measures, and the families of reasoning-gym whose scores are unreliable."""
    from nalora import tasks
    from nalora.tasks import gym

    rows = table("task", "description", "measures")
    for name, title, measures in tasks.described():
        rows.add_row(name, title, measures)
    console().print(rows)
    console().print(
        "A data file of yours is a task (task=questions.jsonl), and so is a Python file (docs/extending.md).",
        highlight=False,
    )
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
