"""`nalora diagnose`: what the gates of a run did, compared with itself over time or with another run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nalora.cli.screen import console, hush_libraries, table
from nalora.errors import counted
from nalora.runs.progress import bars

# How a measure of the file is headed, and with how many digits.
_COLUMNS = {
    "D_sel": ("D_sel", ".5f"), "flip": ("flips", ".3%"), "kappa_drift": ("κ drift", ".5f"),
    "suppressive": ("suppressive", ".3%"), "positive": ("positive", ".3%"), "severe": ("severe", ".4%"),
    "D_EH": ("D_EH", ".4f"), "D_EH_live": ("of live gates", ".4f"),
}  # fmt: skip


def diagnose(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    against: Annotated[
        str | None, typer.Option(metavar="RUN|MODEL", help="Take apart how far the run is from this target instead.")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Only snapshots at multiples of so many steps.")] = 1,
    probe_size: Annotated[int, typer.Option(min=1, help="Training examples to look at.")] = 512,
    task: Annotated[str | None, typer.Option(help="Whose training examples; the run's own task by default.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="A folder with the task's files, in place of the hub.")] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Examples whose plain inference takes the memory that this takes: 16, on a GPU 128 by default."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to run.")] = None,
    per_channel: Annotated[bool, typer.Option("--per-channel", help="Write every channel's values too.")] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run code that the run's settings name: for runs of people you trust.")
    ] = False,
) -> None:
    """Compare a run's snapshots on the same tokens: how its gates moved, by interval and by layer."""
    hush_libraries()
    from nalora.diagnostics.dynamics import Request

    request = Request(every, probe_size, task, data_dir, batch_size, device, per_channel, trust)
    screen = console()
    with bars(screen, transient=True) as report:
        found = _found(run, against, request, report)
    if against is None:
        print_diagnosis(screen, found)
        screen.print(f"the diagnosis: {run / 'diagnosis.json'}", highlight=False)
    else:
        from nalora.cli.mismatching import print_mismatch

        print_mismatch(screen, found)
        screen.print(f"the mismatch: {run / 'mismatch.json'}", highlight=False)


def _found(run: Path, against: str | None, request: Any, report: Any) -> dict[str, Any]:
    """What the file says that was written."""
    if against is None:
        from nalora.diagnostics.dynamics import diagnose as diagnose_run

        return diagnose_run(run, request, report=report)
    from nalora.diagnostics.mismatch import diagnose_against

    return diagnose_against(run, against, request, report=report)


def print_diagnosis(screen: Any, found: dict[str, Any]) -> None:
    """A row for each interval with means over blocks, then a row for each block over the whole run."""
    probe = found["probe"]
    title = f"{found['method']} on {found['model']}: {counted(probe['examples'], 'example')} of {probe['task']}, "
    rows = table("steps", *(head for head, _ in _COLUMNS.values()), title=f"{title}{counted(probe['tokens'], 'token')}")
    for interval in found["intervals"]:
        rows.add_row(f"{interval['from']} → {interval['to']}", *_means(interval))
    rows.add_section()
    rows.add_row("all intervals together", *_means(found["cumulative"]))
    if ends := found["first_to_last"]:
        rows.add_row(f"{ends['from']} → {ends['to']} directly", *_means(ends))
    screen.print(rows)
    heads = [head for head, _ in _COLUMNS.values()]
    blocks = table("block", *heads, "sup/res/pos first", "last", title="all intervals together, by block")
    first, last = found["shares"][0], found["shares"][-1]
    for index, block in enumerate(found["blocks"]):
        values = [_shown(found["cumulative"][name][index], form) for name, (_, form) in _COLUMNS.items()]
        blocks.add_row(block["name"], *values, _shares(first, index), _shares(last, index))
    screen.print(blocks)
    for notice in found["notices"]:
        screen.print(f"note: {notice}", highlight=False)
    cost = found["cost"]
    passes = (
        f"{cost['forward_passes_per_checkpoint']:g} forward passes for each of {counted(len(found['steps']), 'state')}"
    )
    screen.print(f"{passes}, {cost['seconds']:.0f} s", highlight=False)


def _means(row: dict[str, Any]) -> list[str]:
    """Means over blocks; over those that have the measure."""
    means = []
    for name, (_, form) in _COLUMNS.items():
        known = [value for value in row[name] if value is not None]
        means.append(_shown(sum(known) / len(known) if known else None, form))
    return means


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _shares(row: dict[str, Any], index: int) -> str:
    return "/".join(_shown(row[name][index], ".2f") for name in ("p_sup", "p_res", "p_pos"))
