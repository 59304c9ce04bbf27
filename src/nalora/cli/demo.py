"""The demo: one real model trained three ways for a few minutes, LoRA and NA-LoRA in both spaces, side by side.

Same recipe, same seed, same batches, same initial adapter. It shows that nalora runs and what it does to the gates.
One seed and a few dozen steps cannot show which method is better.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from nalora.diagnostics.dynamics import Request as Look
from nalora.diagnostics.dynamics import diagnose
from nalora.evaluation.targets import Request, evaluate_target
from nalora.files import outputs
from nalora.files.atomic import json_text
from nalora.report.data import read_runs
from nalora.report.html import write_report
from nalora.runs import contents, marker, packaged
from nalora.runs.folder import RunFolder, read_jsonl, write_json
from nalora.runs.settings import read
from nalora.training.run import Interrupted, train

# What the report shows of the gates: a few states, a few examples; seconds beside minutes of training.
SNAPSHOT_EVERY = 15
PROBE_SIZE = 6
RECIPE = packaged.RECIPES / "laptop.yaml"


class Arm(NamedTuple):
    """A way to train the adapter, as settings beside the recipe's."""

    name: str
    title: str
    settings: tuple[str, ...]


ARMS = (
    Arm("lora", "LoRA", ("method=lora",)),
    Arm("na-lora-gradient", "NA-LoRA, gradient space", ("method=na-lora", "apply_to=gradient")),
    Arm("na-lora-update", "NA-LoRA, update space", ("method=na-lora", "apply_to=update")),
)


class Outcome(NamedTuple):
    """What one arm came to; `before` is the base model's summary, the same for all."""

    arm: Arm
    before: dict[str, Any]
    after: dict[str, Any]
    result: dict[str, Any]
    gates: dict[str, float]


def run(
    console: Console, *, folder: Path = Path("runs/demo"), recipe: Path = RECIPE, settings: Sequence[str] = ()
) -> bool:
    """Train and ask every arm, print the comparison; False where Ctrl-C ended it. Started again, it goes on.

    Raises:
        NALoRAError: the model's wheel is not installed, or the folder holds a demo of other settings, or files that
            nalora did not write.
    """
    marker.refuse_foreign(folder, "demo", option="--output", known=_is_of_0_1)
    outputs.refuse_foreign_files([folder / "report.html"], outputs.is_page, option="--output", kind="a report")
    marker.mark(folder, "demo")
    outcomes: list[Outcome] = []
    try:
        for arm in ARMS:
            before = outcomes[0].before if outcomes else None
            outcomes.append(_train_and_ask(console, arm, folder, recipe, settings, before))
    except (Interrupted, KeyboardInterrupt):
        console.print("\nStopped; `nalora demo` goes on from here.")
    if outcomes:
        console.print(comparison(outcomes))
        console.print(
            "This shows that NA-LoRA runs, not that one method is better: one seed, few steps. In gradient space"
            " Adam divides most of the control out of its update; in update space all of it acts.\n"
            f"Runs, outputs and scores: {folder}",
            highlight=False,
        )
    finished = len(outcomes) == len(ARMS)
    if finished:
        write_json(folder / "result.json", [_record(each) for each in outcomes])
        path = write_report(read_runs([folder / arm.name for arm in ARMS]), folder / "report.html")
        console.print(f"The report, to open in a browser: {path}", highlight=False)
    return finished


def _is_of_0_1(folder: Path) -> bool:
    """Whether version 0.1, which wrote no marker, ran its demo there."""
    return contents.is_run(folder / ARMS[0].name) and all(
        entry.name in ("result.json", "report.html", *(arm.name for arm in ARMS)) for entry in folder.iterdir()
    )


def _train_and_ask(
    console: Console, arm: Arm, folder: Path, recipe: Path, settings: Sequence[str], before: dict[str, Any] | None
) -> Outcome:
    place = folder / arm.name
    described = read(recipe, [*settings, *arm.settings, f"output={place}", f"snapshot_every={SNAPSHOT_EVERY}"])
    console.print(f"\n[bold]{arm.title}[/bold]")
    result = train(described, resume=RunFolder(place).settings.is_file(), console=console)
    with console.status("asking"):
        summaries = evaluate_target(str(place), Request(with_base=before is None))
    if not RunFolder(place).diagnosis.is_file():
        with console.status("looking at the gates"):
            diagnose(str(place), Look(probe_size=PROBE_SIZE))
    rows = read_jsonl(RunFolder(place).metrics)
    gates = {name.removeprefix("nalora/"): value for name, value in rows[-1].items() if name.startswith("nalora/")}
    return Outcome(arm, before or summaries["base"], summaries["adapted"], result, gates)


def comparison(outcomes: Sequence[Outcome]) -> Table:
    """A row for each arm: what it scored before and after, how surely, and what its gates did."""
    first = outcomes[0].after
    title = f"{first['task']}, {first['examples']} held-out questions (95 % intervals)"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for column in ("accuracy", "loss of the answers", "sup/res/pos", "scales g/u/d", "mask", "s/step"):
        table.add_column(column, justify="right")
    table.add_row("before", _accuracy(outcomes[0].before), _loss(outcomes[0].before), "", "", "", "")
    for each in outcomes:
        seconds = each.result["seconds"] / each.result["steps"]
        table.add_row(
            each.arm.title,
            _accuracy(each.after),
            _loss(each.after),
            _joined(each.gates, "p_sup", "p_res", "p_pos"),
            _joined(each.gates, "scale_gate", "scale_up", "scale_down") if each.gates.get("scaling_acts", 1) else "off",
            _joined(each.gates, "mask_mean") if each.gates.get("mask_acts", 1) else "off",
            f"{seconds:.2f}",
        )
    return table


def _accuracy(summary: dict[str, Any]) -> str:
    measured = summary["measures"]["accuracy"]
    low, high = measured["binomial"]
    return f"{100 * measured['value']:.0f} % ({100 * low:.0f} … {100 * high:.0f})"


def _loss(summary: dict[str, Any]) -> str:
    low, high = summary["target_loss"]["bootstrap"]
    return f"{summary['target_loss']['value']:.3f} ({low:.3f} … {high:.3f})"


def _joined(gates: dict[str, float], *names: str) -> str:
    return "/".join(f"{gates[name]:.2f}" for name in names) if gates else "–"


def _record(outcome: Outcome) -> dict[str, Any]:
    return json.loads(json_text(outcome._asdict() | {"arm": outcome.arm._asdict()}))  # type: ignore[no-any-return]
