"""`nalora suggest`: which learning rate to start with, from the first steps of a run at several rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from nalora.cli.screen import INTERRUPTED, console, hush_libraries, table
from nalora.cli.studying import MISSING, FinishedRuns
from nalora.cli.suggested_commands import Commands
from nalora.errors import NALoRAError, counted

if TYPE_CHECKING:
    from nalora.runs.settings import Run
    from nalora.studies.conduct import Progress
    from nalora.studies.study import Study
    from nalora.studies.suggest import Short, Suggestion


def suggest(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN.yaml|NAME", help="The run's YAML file, or the name of a recipe, as for train."),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace those of the file; KEY= removes one."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the short runs and the result.", show_default="OUTPUT-suggest")
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="RATE,RATE,…",
            help="Learning rates to try.",
            show_default="2.5e-4 to 1.6e-2, an octave apart; a tenth of that for method full",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Number of first steps of each short run.")] = 30,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of runs at a time (default: 1, or --per-gpu on each GPU).")
    ] = None,
    per_gpu: Annotated[int, typer.Option(min=1, help="Number of runs that share one GPU.")] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be trained, and problems; train nothing.")
    ] = False,
) -> None:
    """Suggest a learning rate: train the first steps of a run at several rates and compare their losses.

    nalora suggest my-data task=questions.jsonl

    Started again after Ctrl-C or a kill, it continues and repeats no finished short run.
    """
    hush_libraries()
    from nalora.report import drawing
    from nalora.runs.conversion import key_values
    from nalora.runs.settings import read
    from nalora.studies import suggest as suggesting
    from nalora.training.batches import passes_over

    typed = settings or []
    if "learning_rate" in key_values(typed):
        raise NALoRAError(
            "learning_rate on the command line",
            found="a rate for the run",
            expected="none, since several rates are tried",
            fix="leave it out, or give --rates",
        )
    described, screen = read(run, typed), console()
    grid = suggesting.default_rates(described) if rates is None else suggesting.rates_of(rates)
    assert described.settings.output is not None  # which `read` has set
    run_folder = str(Path(described.settings.output))  # without a slash at the end, since names are appended
    folder = output or Path(f"{run_folder}-suggest")
    study = suggesting.short_runs(described, grid, steps)
    suggesting.refuse_foreign(folder)
    drawing.refuse_foreign(drawing.files_of(folder, suggesting.NAME))
    for notice in described.notices:
        screen.print(Text(notice))
    whole, rows, problems = _examined(screen, described, folder)
    if whole:
        suggesting.refuse_longer(steps, whole)
        _print_plan(screen, described, study, folder, steps, whole, with_cost=dry_run)
    for problem in problems:
        screen.print(Text(f"Problem: {problem}"), soft_wrap=True)
    if problems:
        raise typer.Exit(2)
    if dry_run:
        screen.print("Nothing was trained, and nothing was written.", highlight=False)
        return
    progress = _conducted(screen, study, folder, steps, workers, per_gpu)
    for job in progress.missing:
        log = suggesting.store_of(folder) / f"{job.key}.log"
        screen.print(Text(f"Missing: {job.label}: {progress.failed[job.key]} (see {log})"), soft_wrap=True)
    if progress.missing:
        screen.print("No suggestion: fix the cause and start the same command again.", highlight=False)
        raise typer.Exit(MISSING)
    commands = Commands(run, typed, run_folder, output, steps, workers, per_gpu)
    passes = passes_over(described.settings, rows, steps)
    _conclude(screen, suggesting.logged(progress.schedule, steps), folder, whole, passes, commands)


def _examined(screen: Console, described: Run, folder: Path) -> tuple[int, int, list[str]]:
    """Return the steps and rows of the whole run, 0 if a problem hides them, and what would stop the short runs."""
    from nalora.studies.suggest import store_of
    from nalora.training.dry_run import examine

    # A folder that does not exist: that of the whole run may hold a run that was trained before.
    elsewhere = dataclasses.replace(described.settings, output=str(store_of(folder) / "run"), snapshot_every=0)
    with screen.status("reading data and model"):
        found = examine(dataclasses.replace(described, settings=elsewhere))
    return found.steps, len(found.inputs.dataset) if found.inputs else 0, found.problems


def _print_plan(
    screen: Console, described: Run, study: Study, folder: Path, steps: int, whole: int, *, with_cost: bool
) -> None:
    from nalora.studies.conduct import so_far
    from nalora.studies.cost import estimate
    from nalora.studies.suggest import ShortRuns, store_of

    settings, rates = described.settings, study.arms[0].learning_rates
    progress = so_far(study, store_of(folder).absolute(), ShortRuns)
    finished = f"; {progress.done} of them finished before" if progress.done else ""
    share = 100 * len(rates) * steps / whole
    lines = [
        f"{described.method.title} of {settings.model} on {settings.task}: a run of {counted(whole, 'step')}",
        f"{counted(len(rates), 'short run')} of {counted(steps, 'step')}: "
        f"{len(rates) * steps:,} steps, {share:.0f} % of one full run{finished}",
        f"Learning rates: {', '.join(f'{rate:g}' for rate in rates)}",
        f"Folder: {folder}",
    ]
    if with_cost:
        lines.append(estimate(progress.schedule, progress.results).sentence())
    for line in lines:
        screen.print(Text(line), soft_wrap=True)


def _conducted(screen: Console, study: Study, folder: Path, steps: int, workers: int | None, per_gpu: int) -> Progress:
    """Train the short runs that are not finished, with a live table on a terminal."""
    from rich.live import Live

    from nalora.studies.conduct import conduct
    from nalora.studies.engines import LocalEngine
    from nalora.studies.signals import StoppedBySignal
    from nalora.studies.suggest import ShortRuns, claim, logged, store_of, train_shortly

    claim(folder)
    engine = LocalEngine(workers, per_gpu, do=train_shortly)
    try:
        with Live(console=screen, refresh_per_second=2, transient=True) as live:
            lines = FinishedRuns(screen)

            def shown(progress: Progress) -> None:
                if screen.is_terminal:
                    live.update(_table(logged(progress.schedule, steps), steps))
                else:
                    lines(progress)

            # Runs that failed are tried again: their cause may be gone.
            return conduct(study, store_of(folder), engine, retry_failed=True, changed=shown, schedule_of=ShortRuns)
    except KeyboardInterrupt as stop:
        screen.print("Stopped; start the same command again to continue.", highlight=False)
        raise typer.Exit(128 + stop.number if isinstance(stop, StoppedBySignal) else INTERRUPTED) from None


def _table(shorts: Sequence[Short], steps: int, pick: float | None = None) -> Any:
    """Return a row for every rate: what it has reached, or what it resulted in."""
    from nalora.studies.suggest import compared

    rows = table("learning rate", compared(steps), "median gradient norm", "run", "")
    for short in shorts:
        norm = "–" if short.grad_norm is None else f"{short.grad_norm:.3g}"
        if short.diverged is not None:
            state = f"diverged at step {short.diverged}"
        else:
            state = "finished" if short.loss is not None else f"step {short.step} of {steps}"
        loss = "–" if short.loss is None else f"{short.loss:.4f}"
        rows.add_row(f"{short.rate:g}", loss, norm, state, "← suggested" if short.rate == pick else "")
    return rows


def _conclude(
    screen: Console, shorts: Sequence[Short], folder: Path, whole: int, passes: float, commands: Commands
) -> None:
    """Print and write the table, the suggestion with its evidence, the figure, and the commands to type next."""
    from nalora.studies import rate_evidence
    from nalora.studies.suggest import suggest as pick_of
    from nalora.studies.suggest import write

    evidence, steps = rate_evidence.known(), commands.steps
    suggestion = pick_of(shorts, evidence, steps)
    screen.print(_table(shorts, steps, suggestion.rate))
    lines, typed = _sentences(suggestion, commands, [short.rate for short in shorts], passes)
    for line in lines:
        screen.print(Text(line), soft_wrap=True)
    file = write(
        folder,
        shorts,
        suggestion,
        steps=steps,
        steps_of_the_whole_run=whole,
        passes_over_the_data=round(passes, 3),
        commands=typed,
        evidence=rate_evidence.to_json(evidence),
    )
    screen.print(Text(f"Numbers: {file}"), soft_wrap=True)
    screen.print(Text(_figure(shorts, suggestion, folder, steps)), soft_wrap=True)


def _sentences(
    suggestion: Suggestion, commands: Commands, rates: Sequence[float], passes: float
) -> tuple[list[str], dict[str, str]]:
    """Return what to print about a suggestion, and the commands in it by their purpose."""
    from nalora.studies import rate_evidence
    from nalora.studies.suggest import extended

    if suggestion.rate is None:
        return [f"No suggestion: {suggestion.reason}."], {}
    evidence = rate_evidence.known()
    typed = {"train": commands.train(suggestion.rate)}
    lines = [f"Start with {suggestion.rate:g}:", f"  {typed['train']}"]
    if suggestion.equal:
        listed = " and ".join(f"{rate:g}" for rate in suggestion.equal)
        lines.append(f"These steps do not distinguish it from {listed}: the losses differ by less than their noise.")
    if suggestion.end:
        side = "lower" if suggestion.end == "lowest" else "higher"
        typed["extend"] = commands.suggest(extended(rates, suggestion.end))
        lines += [
            f"This is the {suggestion.end} rate that was tried, and a {side} one may be better. To try two more "
            "(finished short runs are not repeated):",
            f"  {typed['extend']}",
        ]
    if suggestion.next is not None:
        typed["try next"] = commands.train(suggestion.next, another=True)
        lines.append(f"If you can afford another run, try {suggestion.next:g} as well (evidence below).")
    rule = evidence.rule
    lines += ["", f"How far to trust this rule, the lowest training loss after {rule.steps} steps:"]
    lines += [f"- {sentence}" for sentence in evidence.sentences()]
    if suggestion.next is not None:
        lines.append(f"- In the same grids {evidence.on_the_next_rate()}.")
    if passes > 1:
        lines.append(
            f"- {commands.steps} steps of this run pass {passes:.1f} times over its data, so the losses are also "
            "those of rows that were trained on before; in the stored grids no row had been."
        )
    if commands.steps != rule.steps:
        lines.append(f"- All of this is about {rule.steps} steps; nothing is known about {commands.steps} steps.")
    return [*lines, ""], typed


def _figure(shorts: Sequence[Short], suggestion: Suggestion, folder: Path, steps: int) -> str:
    """Draw the figure; return a line with its path, or the reason why there is none."""
    from nalora.report.data import read_run
    from nalora.report.rate_figure import draw_rates
    from nalora.studies.suggest import NAME, compared

    runs = {short.rate: read_run(short.folder) for short in shorts}
    losses = {short.rate: short.loss for short in shorts if short.loss is not None}
    try:
        files = draw_rates(runs, losses, suggestion.rate, compared(steps), folder / NAME)
    except NALoRAError as error:  # without matplotlib, which training does not need
        return f"No figure: {error}"
    return f"Figure: {', '.join(map(str, files))}"
