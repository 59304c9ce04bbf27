"""`nalora diagnose`: how the gates of a run changed during training, or differ from those of another run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column

from nalora.cli.screen import BaseModel, DataDir, Device, Trust, console, hush_libraries, number, print_table, table
from nalora.errors import counted
from nalora.runs.progress import bars

# The title and the number format of each measure in diagnosis.json.
_COLUMNS = {
    "D_sel": ("movement", ".5f"), "flip": ("changed regime", ".3%"), "kappa_drift": ("κ drift", ".5f"),
    "suppressive": ("closed or opened", ".3%"), "positive": ("became linear or not", ".3%"),
    "severe": ("closed ↔ linear", ".4%"), "D_EH": ("homogeneity", ".4f"), "D_EH_live": ("of live gates", ".4f"),
}  # fmt: skip
_MEANING = (
    "Means over tokens and channels. movement (D_sel): change of φ(z)/z. A gate is closed (suppressive) below the lower"
    " threshold of its activation, linear (positive) above the upper one, and responsive between them; percentages are"
    " shares of gates that crossed a threshold. κ = z·φ′/φ; homogeneity (D_EH): squared change of 1 + κ, weighted by"
    " the mask, and for live gates by their output too."
)


def diagnose(
    run: Annotated[
        Path, typer.Argument(metavar="RUN|ADAPTER", help="The folder of a run, or of an adapter or its checkpoints.")
    ],
    model: BaseModel = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="RUN|MODEL", help="Compare the run with this run or model instead, term by term."),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Use only snapshots at multiples of this number of steps.")] = 1,
    probe_size: Annotated[int, typer.Option(min=1, help="Number of training examples to measure on.")] = 512,
    task: Annotated[
        str | None, typer.Option(help="Task of these examples (default: the run's; an adapter needs one).")
    ] = None,
    data_dir: DataDir = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Examples per batch, shared by the two models compared (default: 16; 128 on a GPU)."),
    ] = None,
    device: Device = None,
    per_channel: Annotated[
        bool, typer.Option("--per-channel", help="Also write the values of every channel to the file.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the result (default: the run's; of an adapter runs/evaluations).")
    ] = None,
    trust: Trust = False,
) -> None:
    """Measure how the gates of a run changed between its snapshots, for each interval and each layer.

    nalora diagnose my-adapter --model Qwen/Qwen3-0.6B --task gsm8k
    """
    hush_libraries()
    from nalora.diagnostics import dynamics
    from nalora.diagnostics.inputs import DiagnosisOptions
    from nalora.runs.targets import results_of

    options = DiagnosisOptions(every, probe_size, task, data_dir, batch_size, device, per_channel, trust, model, output)
    place = output or (run if (run / "run.yaml").is_file() else results_of(str(run)))
    screen = console()
    with bars(screen, transient=True) as report:
        if against is None:
            result = dynamics.diagnose(run, options, report=report)
        else:
            from nalora.diagnostics.mismatch import diagnose_against

            result = diagnose_against(run, against, options, report=report)
    if against is None:
        print_diagnosis(screen, result)
        screen.print(f"Diagnosis: {place / 'diagnosis.json'}", highlight=False, soft_wrap=True)
    else:
        print_mismatch(screen, result)
        screen.print(f"Mismatch: {place / 'mismatch.json'}", highlight=False, soft_wrap=True)


def print_diagnosis(screen: Console, result: Mapping[str, Any]) -> None:
    """Print a row for each interval with means over blocks, then a row for each block over the whole run."""
    probe, cost, cumulative = result["probe"], result["cost"], result["cumulative"]
    title = (
        f"{result['method']} on {result['model']}: {counted(probe['examples'], 'example')} of {probe['task']}, "
        f"{counted(probe['tokens'], 'token')}"
    )
    titles = [title for title, _ in _COLUMNS.values()]
    rows = table(Column("steps", no_wrap=True), *titles, title=title)
    for interval in result["intervals"]:
        rows.add_row(f"{interval['from']} → {interval['to']}", *_means(interval))
    rows.add_section()
    rows.add_row("all intervals together", *_means(cumulative))
    if ends := result["first_to_last"]:
        rows.add_row(f"{ends['from']} → {ends['to']} directly", *_means(ends))
    print_table(screen, rows)
    blocks = table(
        Column("block", no_wrap=True),
        *titles,
        "closed/responsive/linear at first",
        "at last",
        title="all intervals together, by block",
    )
    for index, block in enumerate(result["blocks"]):
        values = [number(cumulative[name][index], form) for name, (_, form) in _COLUMNS.items()]
        shares = (
            "/".join(number(state[name][index], ".2f") for name in ("p_sup", "p_res", "p_pos"))
            for state in (result["shares"][0], result["shares"][-1])
        )
        blocks.add_row(block["name"], *values, *shares)
    print_table(screen, blocks)
    screen.print(_MEANING, highlight=False, style="dim")
    for notice in result["notices"]:
        screen.print(f"Note: {notice}", highlight=False)
    passes, states = cost["forward_passes_per_checkpoint"], counted(len(result["steps"]), "state")
    screen.print(f"{passes:g} forward passes for each of {states}, {cost['seconds']:.0f} s", highlight=False)


def _means(row: Mapping[str, Any]) -> list[str]:
    """Return the mean of each measure over the blocks that have it."""
    means = []
    for name, (_, form) in _COLUMNS.items():
        known = [value for value in row[name] if value is not None]
        means.append(number(sum(known) / len(known) if known else None, form))
    return means


def print_mismatch(screen: Console, result: Mapping[str, Any]) -> None:
    """Print a row for each block: the shares of the terms, the difference and its bound, and rank correlations."""
    from nalora.diagnostics.decomposition import TERMS
    from nalora.diagnostics.mismatch_measures import STATISTICS, in_words

    scores = {"mask": result["mask"]} if result["mask"] else {}
    scores |= {title: result["statistics"][name] for name, title in STATISTICS.items()}
    title = f"{result['run']} against {result['target']}: {counted(result['probe']['tokens'], 'token')}"
    rows = table(
        Column("block", no_wrap=True), "residual", "selection", "view", "norm ‖ΔU‖", "share of its bound", title=title
    )
    for name in (*(f"ρ {name}" for name in scores), "top 30 % (best 30 %)"):
        rows.add_column(name, overflow="fold")
    for column in rows.columns[1:]:
        column.justify = "right"
    best, first = next(iter(scores.items()))
    for index, block in enumerate(result["blocks"]):
        rows.add_row(
            block["name"],
            *(_percent(result["share"][term][index]) for term in TERMS),
            number(result["bound"]["actual"][index], ".3g"),
            _percent(result["bound"]["tightness"][index]),
            *(number(score["rank_correlation"][index], "+.2f") for score in scores.values()),
            f"{_percent(first['energy_held'][index])} ({_percent(result['most_held'][index])})",
        )
    print_table(screen, rows)
    screen.print(
        "residual, selection and view are shares of the energy of the three terms: the gates' inputs differ, they open"
        " differently on the same input, the values that they pass differ. ρ is the rank correlation with the selection"
        f" mismatch of each channel. The last column is its share in the 30 % of channels with the highest {best},"
        " and in brackets the largest share that any 30 % have.",
        highlight=False,
        style="dim",
    )
    if not all(block["gated"] for block in result["blocks"]):
        screen.print("Blocks without an up projection have no view mismatch.", highlight=False, style="dim")
    screen.print(in_words(result), highlight=False)


def _percent(value: float | None) -> str:
    return number(value, ".0%" if value is None or value >= 0.095 or value == 0 else ".1%")
