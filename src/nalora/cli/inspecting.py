"""`nalora inspect` and `nalora activations`: what nalora sees before any training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from nalora.cli.screen import console, hush_libraries, table
from nalora.config import Importance, NALoRAConfig, Regimes, Space
from nalora.errors import counted
from nalora.models.peft_names import in_base

if TYPE_CHECKING:
    from nalora.control.inspection import Inspection
    from nalora.control.plan import Plan


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="A transformers folder, a config.json, a GGUF file, a PEFT adapter folder, a hub id, or smollm2-135m."
        ),
    ],
    rank: Annotated[int | None, typer.Option(min=1, help="LoRA rank r.", show_default="8")] = None,
    target_modules: Annotated[
        list[str] | None,
        typer.Option(help="Layers to adapt: repeat, or separate by commas.", show_default="every linear layer"),
    ] = None,
    regimes: Annotated[
        Regimes, typer.Option(help="Whose regimes: 'paper' leaves the GELU family unscaled.")
    ] = NALoRAConfig.regimes,
    no_mask: Annotated[bool, typer.Option("--no-mask", help="Plan without the channel mask.")] = False,
    no_scaling: Annotated[bool, typer.Option("--no-scaling", help="Plan without the step scales.")] = False,
    importance: Annotated[Importance, typer.Option(help="What gate channels are ranked by.")] = NALoRAConfig.importance,
    apply_to: Annotated[Space, typer.Option(help="What the control multiplies.")] = NALoRAConfig.apply_to,
    thresholds: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="LOW HIGH", help="Bounds of the responsive regime, in place of the activation's own."),
    ] = None,
) -> None:
    """Show the plan for MODEL before any training: its FFN blocks, and which controls act on them.

    Only the config is read, so an 8B model needs no weights and little memory.
    """
    hush_libraries()
    with Console(stderr=True).status(f"reading {escape(model)}"):
        from nalora.control.inspection import inspect_model

        names = [name for each in target_modules or () for name in each.split(",") if name]
        config = NALoRAConfig(
            mask=not no_mask,
            scaling=not no_scaling,
            importance=importance,
            regimes=regimes,
            thresholds=thresholds,
            apply_to=apply_to,
        )
        seen = inspect_model(model, config, rank=rank, target_modules=[] if names == ["all-linear"] else names)
    _print_inspection(console(), seen)


def activations(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Known activations, or your own as module:function or file.py:name.",
            show_default="all that are known",
        ),
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw φ, φ′, s, κ and χ of each into DIR, as PNG and SVG.")
    ] = None,
) -> None:
    """List activations with the points that bound their responsive regime, and draw them.

    Your own is an elementwise function of a tensor; its derivatives and points are found from its values.
    """
    from nalora.activations import KNOWN
    from nalora.control.custom_activation import find, known_equivalent

    shown = [find(name) for name in names] if names else list(KNOWN)
    rows = table("activation", "lower", "upper", "step scaling")
    for each in shown:
        points = each.characteristic_points
        bounds = [f"{point:+.9f}" for point in points] if points else ["–", "–"]
        scaling = "regimes=derived" if each.degenerate_in_paper else "on"
        same = None if each in KNOWN else known_equivalent(each)
        title = f"{each.name} (the values of {same.name})" if same else each.name
        rows.add_row(escape(title), *bounds, scaling if points else "off: no finite regimes")
    console().print(rows)
    if draw is not None:
        from nalora.report import drawing
        from nalora.report.activation_figure import draw_activation, file_name

        drawing.refuse_foreign(file for each in shown for file in drawing.files_of(draw, file_name(each)))
        for each in shown:
            for file in draw_activation(each, draw):
                print(file)


def _print_inspection(screen: Console, seen: Inspection) -> None:
    plan = seen.plan
    title = f"{seen.architecture}: {counted(len(plan.blocks), 'FFN block')}"
    columns = ("block", "projections", "activation", "width", "responsive range", "mask", "step scaling")
    rows = table(*columns, title=title)
    reasons: list[str] = []
    for name, parts, *features, mask, scaling in plan.rows():
        controls = [_footnoted(control, reasons) for control in (mask, scaling)]
        rows.add_row(*map(escape, (in_base(name), parts.replace(", ", "\n"), *features, *controls)))
    screen.print(rows)
    for number, reason in enumerate(reasons, 1):
        screen.print(f"[{number}] {reason}", markup=False, highlight=False)
    if seen.refusal:
        screen.print(f"`nalora train` refuses this model: {seen.refusal}", markup=False, highlight=False)
    for line in _facts(plan, seen):
        screen.print(line, markup=False, highlight=False)


def _footnoted(control: str, reasons: list[str]) -> str:
    """`on`, or `off` with the number of its reason below the table."""
    state, _, reason = control.partition(": ")
    if reason and reason not in reasons:
        reasons.append(reason)
    return f"{state} [{reasons.index(reason) + 1}]" if reason else state


def _facts(plan: Plan, seen: Inspection) -> list[str]:
    config = plan.config
    return [
        *plan.uncontrolled(),
        f"LoRA: r = {seen.rank}, {seen.trainable:,} trainable parameters",
        f"control of the {config.apply_to}, channels ranked by {config.importance}, {config.regimes} regimes",
        f"statistics engine: {plan.statistics}",
    ]
