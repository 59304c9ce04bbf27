"""`nalora study`: conduct a study to its end and print its answer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from nalora.cli.screen import INTERRUPTED, console, hush_libraries, table
from nalora.errors import counted, missing_path, unusable

# The exit code of a study that lacks runs because they failed.
MISSING = 1


def study(
    file: Annotated[
        Path,
        typer.Argument(metavar="STUDY.yaml|NAME", help="The study's YAML file, or a name listed by `nalora recipes`."),
    ],
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Use processes of this machine, or a Ray cluster.")
    ] = "local",
    workers: Annotated[
        int | None, typer.Option(min=1, help="local: number of runs at a time (default: 1, or --per-gpu on each GPU).")
    ] = None,
    per_gpu: Annotated[int, typer.Option(min=1, help="Number of runs that share one GPU.")] = 1,
    address: Annotated[
        str | None,
        typer.Option(help="ray: a running cluster, host:port or auto (default: $RAY_ADDRESS, or start one here)."),
    ] = None,
    cpus: Annotated[float, typer.Option(min=0.1, help="ray: CPUs of one run.")] = 1.0,
    gpus: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="ray: GPUs of one run (default: 1 / --per-gpu if the cluster has GPUs)."),
    ] = None,
    memory: Annotated[
        float | None, typer.Option(min=0.1, help="ray: GiB of memory of one run (default: not limited).")
    ] = None,
    retries: Annotated[int, typer.Option(min=0, help="ray: restarts of a run whose worker was lost.")] = 3,
    store: Annotated[Path, typer.Option(help="Folder of all runs; all nodes of a cluster must share it.")] = Path(
        "runs/store"
    ),
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try runs again that failed before.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs that can start now and estimate GPU hours; start none.")
    ] = False,
    known: Annotated[
        bool, typer.Option("--so-far", help="Print the answer from the runs finished so far; start none.")
    ] = False,
) -> None:
    """Run a study and print its answer. Ctrl-C stops it; started again, it continues and repeats no finished run.

    Exits with 1 if runs are missing because they failed, after all others are done and the answer is written.
    """
    hush_libraries()
    from nalora.studies import answer, combined
    from nalora.studies.conduct import conduct, so_far
    from nalora.studies.cost import estimate, examples_in_files
    from nalora.studies.signals import StoppedBySignal
    from nalora.studies.store import Store
    from nalora.studies.study import read

    described = read(file)
    screen = console()
    before = so_far(described, store)
    jobs = before.schedule.open_jobs(before.results, {} if retry_failed else before.failed)
    if engine == "local" and not known:
        sizes: dict[str, int] = {}
        for job in jobs:
            examples_in_files(job.settings, sizes)  # raises for files that have too few examples or cannot be read
    if dry_run:
        Store(store).refuse_foreign()
        for job in jobs:
            screen.print(Text(f"{job.key}  {job.label}"))
        total, arms = counted(before.total, "run"), counted(len(described.arms), "arm")
        screen.print(f"{total} in all, {len(jobs):,} of them can start now, {arms}", highlight=False)
        screen.print(Text(estimate(before.schedule, before.results).sentence(per_gpu)))
        return
    if any(len(arm.seeds) > 1 for arm in described.arms):
        from nalora.evaluation.significance import scipy_stats

        scipy_stats()  # the answer needs scipy, which is checked now and not after hours of runs
    if known and not store.is_dir():
        raise missing_path("folder", store, "a store of runs", "give --store, or run the study")
    if not known:
        if described.generate != "none":
            _refuse_unready(jobs)
        if engine == "local":  # the nodes of a cluster may have data that this machine has not
            _refuse_missing_data(jobs)
            _refuse_missing_weights(jobs)
    _make_writable(store)
    answer.refuse_foreign_files(described.name, store)
    combined.refuse_foreign_files(described.name, store)
    if known:
        _print_answer(screen, before, store)
        return
    from rich.live import Live

    runner: Any
    if engine == "ray":
        from nalora.studies.ray_engine import RayEngine

        runner = RayEngine(address, cpus=cpus, gpus=gpus, per_gpu=per_gpu, memory=memory, retries=retries)
    else:
        from nalora.studies.engines import LocalEngine

        runner = LocalEngine(workers, per_gpu)
    try:
        with Live(console=screen, refresh_per_second=2, transient=True) as live:
            shown = (lambda now: live.update(states(now))) if screen.is_terminal else FinishedRuns(screen)
            progress = conduct(described, store, runner, retry_failed=retry_failed, changed=shown)
    except KeyboardInterrupt as stop:
        screen.print("Stopped; start the study again to continue.", highlight=False)
        # As in shells, 128 plus the signal's number: 143 after SIGTERM, 129 after SIGHUP.
        raise typer.Exit(128 + stop.number if isinstance(stop, StoppedBySignal) else INTERRUPTED) from None
    _print_answer(screen, progress, store)
    if progress.missing:
        raise typer.Exit(MISSING)


def _refuse_missing_data(jobs: Iterable[Any]) -> None:
    """Check that the folders of data exist before the first run: without them every run would fail."""
    folders = dict.fromkeys(job.settings["data_dir"] for job in jobs if job.settings.get("data_dir"))
    for folder in (path for path in folders if not Path(path).exists()):
        raise missing_path(
            "folder",
            f"data_dir: {folder}",
            "the data of the study's task",
            "put it there, as the head of the study says, or give another data_dir",
        )


def _refuse_missing_weights(jobs: Iterable[Any]) -> None:
    """Check that GGUF files exist before the first run; hub ids and folders are checked by each run."""
    names = dict.fromkeys(str(job.settings["model"]) for job in jobs)
    for name in (name for name in names if name.endswith(".gguf") and not Path(name).expanduser().is_file()):
        raise missing_path("file", f"model: {name}", "the model of the study", "make it as the head of the study says")


def _refuse_unready(jobs: Iterable[Any]) -> None:
    """Check what evaluation needs, such as a judge, before the first run is trained."""
    from nalora.runs.settings import check

    by_task = {repr((job.settings["task"], job.settings.get("judge_model"))): job for job in jobs}
    for job in by_task.values():
        check(job.settings).refuse_unready()


def _make_writable(store: Path) -> None:
    """Create the store and check that files can be written there, before hours of work."""
    from nalora.studies.store import Store

    try:
        Store(store).claim()
        with tempfile.TemporaryFile(dir=store):
            pass
    except OSError as error:
        raise unusable(
            store, "written to", error, "a store of runs", "give another --store, or the permission to write there"
        ) from error


def _print_answer(screen: Any, progress: Any, store: Path) -> None:
    """Print the answer and write it into the store, with the combined tables of a study of several combinations."""
    from nalora.studies import answer, combined

    results = answer.answer(progress.schedule, progress.results, progress.failed)
    page = answer.write(results, store)
    tables = combined.write(combined.Answered(progress.schedule.study, results), store)
    # As a Text, since names of arms and files may look like rich's markup.
    screen.print(Text(results.markdown()))
    if tables is not None:
        screen.print(Text(tables[0].read_text(encoding="utf-8")))
    for job in progress.missing:
        error, log = progress.failed[job.key], store / f"{job.key}.log"
        screen.print(Text(f"Missing: {job.label} ({job.key}): {error} (see {log})"))
    if progress.missing:
        screen.print(Text("Fix the cause, then start the study again with --retry-failed."))
    screen.print(Text(f"Answer: {page}"))
    if tables is not None:
        screen.print(Text(f"Combined tables: {tables[0]}, {tables[1]}"))


class FinishedRuns:
    """Prints a line for each run that has ended; in a file or a pipe, in place of the live table."""

    def __init__(self, screen: Any) -> None:
        self.screen = screen
        self.labels: dict[str, str] = {}
        self.ended: set[str] = set()

    def __call__(self, progress: Any) -> None:
        """Print the runs that have ended since the last call."""
        self.labels |= {key: job.label for key, job in progress.running.items()}
        # A run that is chosen is evaluated on the test set after the others have ended: it is not printed again.
        ended = ({*progress.results, *progress.failed} & {*self.labels}) - {*progress.running} - self.ended
        for key in sorted(ended, key=self.labels.__getitem__):
            self.ended.add(key)
            state = f"failed: {progress.failed[key]}" if key in progress.failed else "done"
            count = f"{progress.done:,} of {counted(progress.total, 'run')} done{_time_left(progress)}"
            self.screen.print(Text(f"{self.labels[key]} ({key}): {state}; {count}"))


def _time_left(progress: Any) -> str:
    left = progress.seconds_left
    return f", about {left / 60:.0f} min left" if left is not None else ""


def states(progress: Any) -> Any:
    """Return the live table: the number of runs of every arm by state, and an estimate of the time left."""
    schedule = progress.schedule
    ahead = _time_left(progress)
    if progress.stopping:
        ahead = "; stopping, press Ctrl-C again to stop without waiting"
    rows = table("arm", "done", "running", "failed", "learning rate",
                 title=f"{progress.done:,} of {counted(progress.total, 'run')}{ahead}")  # fmt: skip
    for cell in schedule.cells:
        rate = schedule.chosen_rate(cell, progress.results)
        keys = {job.key for job in schedule.needed(cell, progress.results)}
        counts = (len(keys & {*state}) for state in (progress.results, progress.running, progress.failed))
        rows.add_row(Text(cell.name), *map(str, counts), f"{rate:g}" if rate else "screening")
    return rows
