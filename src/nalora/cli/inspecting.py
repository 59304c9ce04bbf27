"""`nalora inspect` and `nalora activations`: what NA-LoRA would do, before any training."""

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


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model folder, a config.json, a GGUF file, a PEFT adapter folder, a hub id, or smollm2-135m.",
        ),
    ],
    rank: Annotated[int | None, typer.Option(min=1, help="LoRA rank r.", show_default="8")] = None,
    target_modules: Annotated[
        list[str] | None,
        typer.Option(help="Layers to adapt; repeat, or separate by commas.", show_default="every linear layer"),
    ] = None,
    target_parameters: Annotated[
        list[str] | None,
        typer.Option(help="Parameters to adapt as well, such as experts.gate_up_proj; repeat, or separate by commas."),
    ] = None,
    regimes: Annotated[
        Regimes, typer.Option(help="Definition of the gate regimes; 'paper' does not scale steps for GELU activations.")
    ] = NALoRAConfig.regimes,
    no_mask: Annotated[bool, typer.Option("--no-mask", help="Plan without the channel mask.")] = False,
    no_scaling: Annotated[bool, typer.Option("--no-scaling", help="Plan without step scaling.")] = False,
    importance: Annotated[Importance, typer.Option(help="Score that ranks gate channels.")] = NALoRAConfig.importance,
    apply_to: Annotated[
        Space, typer.Option(help="Multiply gradients or optimizer updates by mask and scales.")
    ] = NALoRAConfig.apply_to,
    thresholds: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="LOW HIGH", help="Bounds of the responsive regime, instead of those of the activation."),
    ] = None,
) -> None:
    """Show the FFN blocks of MODEL and which controls of NA-LoRA act on them.

    Only the configuration is read: an 8B model needs no weights and little memory.
    """
    hush_libraries()
    with Console(stderr=True).status(f"reading {escape(model)}"):
        from nalora.control.inspection import inspect_model

        names, parameters = (
            [name for names in given or () for name in names.split(",") if name]
            for given in (target_modules, target_parameters)
        )
        config = NALoRAConfig(
            mask=not no_mask,
            scaling=not no_scaling,
            importance=importance,
            regimes=regimes,
            thresholds=thresholds,
            apply_to=apply_to,
        )
        names = [] if names == ["all-linear"] else names
        inspection = inspect_model(model, config, rank=rank, target_modules=names, target_parameters=parameters)
    _print_inspection(console(), inspection)


def activations(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Names of known activations, or your own as module:function or file.py:name.",
            show_default="all known ones",
        ),
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Plot φ, φ′, s, κ and χ of each into DIR, as PNG and SVG.")
    ] = None,
) -> None:
    """List activations with the bounds of their responsive regime, and plot them.

    Your own activation is an elementwise function of a tensor; derivatives and bounds are computed from its values.
    """
    from nalora.activations import KNOWN
    from nalora.control.custom_activation import find, known_equivalent

    shown = [find(name) for name in names] if names else list(KNOWN)
    rows = table("activation", "lower", "upper", "step scaling")
    for activation in shown:
        points = activation.characteristic_points
        bounds = [f"{point:+.9f}" for point in points] if points else ["–", "–"]
        scaling = "regimes=derived" if activation.degenerate_in_paper else "on"
        same = None if activation in KNOWN else known_equivalent(activation)
        title = f"{activation.name} (same values as {same.name})" if same else activation.name
        rows.add_row(escape(title), *bounds, scaling if points else "off: no finite regimes")
    console().print(rows)
    if draw is not None:
        from nalora.report import drawing
        from nalora.report.activation_figure import draw_activation, file_name

        drawing.refuse_foreign(file for each in shown for file in drawing.files_of(draw, file_name(each)))
        for activation in shown:
            for file in draw_activation(activation, draw):
                print(file)


def _print_inspection(screen: Console, inspection: Inspection) -> None:
    plan = inspection.plan
    title = f"{inspection.architecture}: {counted(len(plan.blocks), 'FFN block')}"
    columns = ("block", "projections", "activation", "width", "responsive range", "mask", "step scaling")
    rows = table(*columns, title=title)
    reasons: list[str] = []
    for name, parts, *features, mask, scaling in plan.rows():
        controls = [_footnoted(control, reasons) for control in (mask, scaling)]
        rows.add_row(*map(escape, (in_base(name), parts.replace(", ", "\n"), *features, *controls)))
    screen.print(rows)
    config = plan.config
    for line in (
        *(f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)),
        *([f"`nalora train` refuses this model: {inspection.refusal}"] if inspection.refusal else []),
        *plan.uncontrolled(),
        f"LoRA: r = {inspection.rank}, {inspection.trainable:,} trainable parameters",
        f"control of the {config.apply_to}, channels ranked by {config.importance}, {config.regimes} regimes",
        f"statistics engine: {plan.statistics}",
    ):
        screen.print(line, markup=False, highlight=False)


def _footnoted(control: str, reasons: list[str]) -> str:
    """Return `on`, or `off` with the number of its reason below the table."""
    state, _, reason = control.partition(": ")
    if reason and reason not in reasons:
        reasons.append(reason)
    return f"{state} [{reasons.index(reason) + 1}]" if reason else state
