"""`nalora train`, `nalora evaluate` and `nalora demo`: runs and what came of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nalora.cli.screen import INTERRUPTED, console, hush_libraries, table
from nalora.errors import counted
from nalora.runs.progress import bars


def train(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN.yaml|NAME",
            help="The run's YAML file, or a recipe's name; `nalora recipes laptop` explains every setting.",
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Settings in place of the file's; KEY= alone removes one, as if the file did not have it.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in its folder.")] = False,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Take over from a process on another host that no longer runs."),
    ] = False,
) -> None:
    """Train one run; an ordinary PEFT adapter comes out. Ctrl-C leaves a run that --resume goes on with."""
    hush_libraries()
    from nalora.runs.settings import read

    described = read(run, settings or [])
    if not resume:
        described.refuse_unready()
    from nalora.distributed.processes import is_first_process
    from nalora.training.run import Interrupted
    from nalora.training.run import train as train_run

    screen = console()
    try:
        result = train_run(described, resume=resume, take_over=take_over, console=screen)
    except Interrupted as stopped:
        screen.print(str(stopped), highlight=False)
        raise typer.Exit(INTERRUPTED) from None
    if not is_first_process():
        return
    steps, seconds, loss = result["steps"], result.get("seconds") or 0.0, result.get("train_loss")
    shown = "not finite" if loss is None else f"{loss:.4f}"
    screen.print(f"{counted(steps, 'step')} in {seconds:.0f} s, training loss {shown}", highlight=False)
    screen.print(f"the run: {described.settings.output}", highlight=False)


def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run's folder, or a model.")],
    task: Annotated[str | None, typer.Option(help="By name, or FILE.py[:NAME]; a run's own task by default.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="A folder with the task's files, in place of the hub.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A setting of the task; KEY= alone removes the run's own."),
    ] = None,
    style: Annotated[
        Literal["plain", "chat"] | None, typer.Option(help="Prompts as the task writes them, or as chat turns.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first questions.")] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Prompt and answer tokens written at a time.")] = 32_768,
    device: Annotated[str | None, typer.Option(help="Where to run.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="The folder for outputs and scores, below it one for each task; the run's folder by default, or of a"
            " model runs/evaluations."
        ),
    ] = None,
    no_base: Annotated[bool, typer.Option("--no-base", help="Do not ask the base model too.")] = False,
    unsafe_code: Annotated[
        bool, typer.Option("--unsafe-code", help="Run generated programs without a sandbox, with limits alone.")
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take over from a process on another host that no longer runs.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run code that the run's settings name: for runs of people you trust.")
    ] = False,
) -> None:
    """Ask a task's questions and score the answers, with intervals; started again, it goes on where it stopped."""
    hush_libraries()
    from nalora.evaluation.targets import Request, evaluate_target
    from nalora.runs.settings import key_values

    options = key_values(option or [])
    if unsafe_code:
        options["unsafe_code"] = True
    request = Request(
        task, data_dir, options, style, limit, batch_tokens, with_base=not no_base, take_over=take_over, trust=trust
    )
    screen = console()
    with bars(screen) as report:
        summaries = evaluate_target(target, request, output=output, device=device, report=report)
    print_summaries(screen, summaries)
    for who, summary in summaries.items():
        screen.print(f"{who}, every answer: {summary['folder']}", highlight=False, soft_wrap=True)


def print_summaries(screen: Any, summaries: dict[str, dict[str, Any]]) -> None:
    """A row for each model and measure, with its interval, and what knowing nothing scores."""
    first = next(iter(summaries.values()))
    rows = table("asked", "measure", "value", "95 % interval", "examples", title=first["task"])
    for who, summary in summaries.items():
        for name, measured in summary["measures"].items():
            low, high = measured.get("binomial") or measured["bootstrap"]
            rows.add_row(who, name, f"{measured['value']:.4f}", f"{low:.4f} … {high:.4f}", str(summary["examples"]))
        if loss := summary["target_loss"]:
            low, high = loss["bootstrap"]
            rows.add_row(who, "loss of the targets", f"{loss['value']:.4f}", f"{low:.4f} … {high:.4f}", "")
    for who, value in first["chance"].items():
        rows.add_row(who, "", f"{value:.4f}", "", str(first["examples"]))
    screen.print(rows)
    for who, summary in summaries.items():
        if (loss := summary["target_loss"]) and not math.isfinite(loss["value"]):
            screen.print(
                f"{who}: the loss is not finite: the model's numbers overflow, as after training that diverged in its"
                " last step; train again with a lower learning_rate",
                highlight=False,
            )
        if summary["unfinished"]:
            screen.print(f"{who}: {counted(summary['unfinished'], 'answer')} ran out of tokens", highlight=False)


def demo(
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps for each method; the recipe's.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the adapter and of the data's order.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/demo"),
) -> None:
    """Train a real 135M model three ways, LoRA and NA-LoRA in both spaces, and ask it; seven minutes on two cores."""
    hush_libraries()
    from nalora.cli.demo import run

    given = {"steps": steps, "seed": seed}
    settings = [f"{name}={value}" for name, value in given.items() if value is not None]
    if not run(console(), folder=output, settings=settings):
        raise typer.Exit(INTERRUPTED)
