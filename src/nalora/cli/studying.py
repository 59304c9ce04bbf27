"""`nalora study`: many runs of one question, conducted to their end, and what they say."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from nalora.cli.screen import INTERRUPTED, console, hush_libraries, table
from nalora.errors import counted, missing_path, unusable

# What a study exits with that lacks runs, because they failed.
MISSING = 1


def study(
    file: Annotated[
        Path, typer.Argument(metavar="STUDY.yaml|NAME", help="What is compared; for names see `nalora recipes`.")
    ],
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Processes of this machine, or a Ray cluster.")
    ] = "local",
    workers: Annotated[int | None, typer.Option(min=1, help="local: runs at a time.")] = None,
    per_gpu: Annotated[int, typer.Option(min=1, help="Runs that share one GPU.")] = 1,
    address: Annotated[
        str | None,
        typer.Option(help="ray: a running cluster, host:port or auto; by default $RAY_ADDRESS, or one started here."),
    ] = None,
    cpus: Annotated[float, typer.Option(min=0.1, help="ray: CPUs of one run.")] = 1.0,
    gpus: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="ray: GPU of one run; by default as --per-gpu says, if the cluster has any."),
    ] = None,
    memory: Annotated[float | None, typer.Option(min=0.1, help="ray: GiB of one run; not counted by default.")] = None,
    retries: Annotated[int, typer.Option(min=0, help="ray: starts of a run again after its worker was lost.")] = 3,
    store: Annotated[Path, typer.Option(help="The folder of all runs; a cluster's nodes must share it.")] = Path(
        "runs/store"
    ),
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try runs again that failed before.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would start now, and run nothing.")] = False,
    known: Annotated[bool, typer.Option("--so-far", help="Say what the store knows already, and run nothing.")] = False,
) -> None:
    """Conduct a study; started again it goes on, and no finished run is repeated. Ctrl-C stops it.

    Exits with 1 if runs are missing because they failed, after all others are done and the answer is written.
    """
    hush_libraries()
    from nalora.studies import answer
    from nalora.studies.conduct import conduct, so_far
    from nalora.studies.signals import StoppedBySignal
    from nalora.studies.store import Store
    from nalora.studies.study import read

    described = read(file)
    screen = console()
    before = so_far(described, store)
    jobs = before.schedule.open_jobs(before.results, {} if retry_failed else before.failed)
    if dry_run:
        Store(store).refuse_foreign()
        for job in jobs:
            screen.print(Text(f"{job.key}  {job.label}"))
        told = (
            f"{counted(before.total, 'run')} in all, {len(jobs):,} of them can start now,"
            f" {counted(len(described.arms), 'arm')}"
        )
        screen.print(told, highlight=False)
        return
    if any(len(arm.seeds) > 1 for arm in described.arms):
        from nalora.evaluation.significance import scipy_stats

        scipy_stats()  # what the answer needs is checked now, not after hours of runs
    if known and not store.is_dir():
        raise missing_path("folder", store, "a store of runs", "give --store, or run the study")
    if not known:
        _refuse_unready(described, jobs)
    if not known and engine != "ray":  # a cluster's nodes may have what this machine has not
        _refuse_missing_data(jobs)
    _make_ready(store)
    answer.refuse_foreign_files(described.name, store)
    if known:
        _print_answer(screen, before, store)
        return
    from rich.live import Live

    ray = {"address": address, "cpus": cpus, "gpus": gpus, "memory": memory, "retries": retries}
    try:
        with Live(console=screen, refresh_per_second=2, transient=True) as live:
            progress = conduct(
                described,
                store,
                _engine(engine, workers, per_gpu, ray),
                retry_failed=retry_failed,
                changed=lambda now: live.update(states(now)),
            )
    except KeyboardInterrupt as stop:
        screen.print("stopped; start it again to go on", highlight=False)
        # As shells have it, 128 and the signal's number: 143 after SIGTERM, 129 after SIGHUP.
        raise typer.Exit(128 + stop.number if isinstance(stop, StoppedBySignal) else INTERRUPTED) from None
    _print_answer(screen, progress, store)
    if progress.missing:
        raise typer.Exit(MISSING)


def _refuse_missing_data(jobs: Iterable[Any]) -> None:
    """Before the first run, since every one of them would fail."""
    wanted = dict.fromkeys(job.settings["data_dir"] for job in jobs if job.settings.get("data_dir"))
    for folder in (path for path in wanted if not Path(path).exists()):
        raise missing_path(
            "folder",
            f"data_dir: {folder}",
            "the data that the study's runs learn from",
            "put it there, as the head of the study says, or give another data_dir",
        )


def _refuse_unready(described: Any, jobs: Iterable[Any]) -> None:
    """What the last hour of a study would need, before its first: a judge that is named."""
    if described.generate == "none":
        return
    from nalora.runs.settings import check

    by_task = {repr((job.settings["task"], job.settings.get("judge_model"))): job for job in jobs}
    for job in by_task.values():
        check(job.settings).refuse_unready()


def _make_ready(store: Path) -> None:
    """A folder that the runs and the answer can be written to, found out before hours of work."""
    from nalora.studies.store import Store

    try:
        Store(store).claim()
        with tempfile.TemporaryFile(dir=store):
            pass
    except OSError as error:
        raise unusable(
            store, "written to", error, "a store of runs", "give another with --store, or the right to write there"
        ) from error


def _print_answer(screen: Any, progress: Any, store: Path) -> None:
    """The answer, on the screen and in the store."""
    from nalora.studies import answer

    results = answer.answer(progress.schedule, progress.results, progress.failed)
    page = answer.write(results, store)
    # As a Text, since names of arms and files may look like rich's markup.
    screen.print(Text(results.markdown()))
    for job in progress.missing:
        error, log = progress.failed[job.key], store / f"{job.key}.log"
        screen.print(Text(f"missing: {job.label} ({job.key}): {error} (see {log})"))
    if progress.missing:
        screen.print(Text("Fix what made them fail, then start the study again with --retry-failed."))
    screen.print(Text(f"the answer: {page}"))


def _engine(name: str, workers: int | None, per_gpu: int, ray: dict[str, Any]) -> Any:
    if name == "ray":
        from nalora.studies.ray_engine import RayEngine

        return RayEngine(per_gpu=per_gpu, **ray)
    from nalora.studies.engines import LocalEngine

    return LocalEngine(workers, per_gpu)


def states(progress: Any) -> Any:
    """The live table: every arm's runs by state, and how long it may still take."""
    schedule = progress.schedule
    left = progress.seconds_left
    ahead = f", about {left / 60:.0f} min left" if left is not None else ""
    if progress.stopping:
        ahead = "; stopping, a second Ctrl-C does not wait"
    rows = table("arm", "done", "running", "failed", "learning rate",
                 title=f"{progress.done:,} of {counted(progress.total, 'run')}{ahead}")  # fmt: skip
    running = set(progress.running)
    for cell in schedule.cells:
        rate = schedule.chosen_rate(cell, progress.results)
        jobs = {job.key for job in schedule.screening(cell, progress.results)}
        jobs |= {job.key for job in schedule.final(cell, rate)} if rate is not None else set()
        counts = (len(jobs & each) for each in (set(progress.results), running, set(progress.failed)))
        rows.add_row(Text(cell.name), *(str(count) for count in counts), f"{rate:g}" if rate else "screening")
    return rows
