"""`nalora train`, `nalora evaluate` and `nalora demo`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from nalora.cli.preview import preview
from nalora.cli.screen import (
    INTERRUPTED,
    BaseModel,
    DataDir,
    Device,
    Style,
    TakeOver,
    Target,
    Trust,
    console,
    hush_libraries,
    table,
)
from nalora.errors import counted
from nalora.runs.progress import bars


def train(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN.yaml|NAME|FOLDER",
            help="The run's YAML file, the name of a recipe, or with --resume the run's folder; `nalora recipes laptop`"
            " explains every setting.",
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace those of the file; KEY= removes one."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in its folder.")] = False,
    take_over: TakeOver = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print data, parameters, memory, disk space and problems; train nothing.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="With --dry-run: also train four steps, to measure time and memory.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Train one run and save an ordinary PEFT adapter. Ctrl-C stops it, --resume continues it.

    `nalora train laptop --dry-run` shows what would be trained on, and what it would need.
    """
    hush_libraries()
    from nalora.distributed.processes import is_first_process
    from nalora.runs import packaged
    from nalora.runs.folder import RunFolder
    from nalora.runs.saved_run import started_run
    from nalora.runs.settings import read

    if packaged.is_file(RunFolder(run).settings):
        described = started_run(run, settings or [], trust=trust)
    else:
        described = read(run, settings or [])
    for notice in described.notices if is_first_process() else ():
        console().print(notice, highlight=False, markup=False)
    if dry_run or measure:
        preview(console(), described, resume=resume, measured=measure)
        return
    if not resume:
        described.refuse_unready()
    from nalora.training.run import Interrupted
    from nalora.training.run import train as train_run

    screen, folder = console(), RunFolder(described.settings.output or "runs/run")
    try:
        result = train_run(described, resume=resume, take_over=take_over, console=screen)
    except Interrupted as stopped:
        resumed = folder.resume_command()
        screen.print(f"{stopped}; continue with: {resumed}", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    if not is_first_process():
        return
    steps, seconds, loss = result["steps"], result.get("seconds") or 0.0, result.get("train_loss")
    shown = "not finite" if loss is None else f"{loss:.4f}"
    share = f" of {result['planned_steps']:,} (stop_after)" if result.get("stopped_early") else ""
    screen.print(f"{counted(steps, 'step')}{share} in {seconds:.0f} s, training loss {shown}", highlight=False)
    screen.print(f"Run folder: {folder.path}", highlight=False, markup=False, soft_wrap=True)
    screen.print(f"Evaluate: {folder.command('evaluate')}", highlight=False, markup=False, soft_wrap=True)
    if "target_tokens" in result:  # of texts
        screen.print(f"Chat: {folder.command('chat')}", highlight=False, markup=False, soft_wrap=True)


def evaluate(
    target: Target,
    model: BaseModel = None,
    task: Annotated[
        str | None, typer.Option(help="Name, data file (.jsonl, …), or FILE.py[:NAME] (default: the run's task).")
    ] = None,
    data_dir: DataDir = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A setting of the task; KEY= removes that of the run."),
    ] = None,
    style: Style = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N questions.", metavar="N")] = None,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of prompt and answer tokens per batch.")
    ] = 32_768,
    device: Device = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for outputs and scores, with a subfolder for each task (default: the run's folder; for a"
            " model or an adapter runs/evaluations)."
        ),
    ] = None,
    no_base: Annotated[bool, typer.Option("--no-base", help="Do not evaluate the base model.")] = False,
    unsafe_code: Annotated[
        bool, typer.Option("--unsafe-code", help="Run generated programs without a sandbox, only with limits.")
    ] = False,
    take_over: TakeOver = False,
    trust: Trust = False,
) -> None:
    """Evaluate a run, an adapter or a model on a task, with 95 % confidence intervals. Started again, it continues.

    nalora evaluate my-adapter --model meta-llama/Llama-3.1-8B --task gsm8k
    """
    hush_libraries()
    from nalora.evaluation.targets import Request, evaluate_target
    from nalora.runs.conversion import key_values

    options = key_values(option or [])
    if unsafe_code:
        options["unsafe_code"] = True
    request = Request(
        task, data_dir, options, style, limit, batch_tokens, with_base=not no_base, take_over=take_over, trust=trust,
        model=model,
    )  # fmt: skip
    screen = console()
    with bars(screen) as report:
        summaries = evaluate_target(
            target,
            request,
            output=output,
            device=device,
            report=report,
            notify=lambda line: screen.print(line, highlight=False),
        )
    print_summaries(screen, summaries)
    if {"base", "adapted"} <= summaries.keys():
        for sentence in compared(summaries["base"], summaries["adapted"]):
            screen.print(sentence, highlight=False, markup=False)
    for model, summary in summaries.items():
        screen.print(f"Outputs of {model}: {summary['folder']}", highlight=False, soft_wrap=True)


def print_summaries(screen: Any, summaries: dict[str, dict[str, Any]]) -> None:
    """Print a row for each model and measure, with its interval, and for each baseline without a model."""
    first = next(iter(summaries.values()))
    rows = table("model", "measure", "value", "95 % interval", "examples", title=first["task"])
    for model, summary in summaries.items():
        for name, measured in summary["measures"].items():
            low, high = measured.get("binomial") or measured["bootstrap"]
            rows.add_row(model, name, f"{measured['value']:.4f}", f"{low:.4f} … {high:.4f}", str(summary["examples"]))
        if loss := summary["target_loss"]:
            low, high = loss["bootstrap"]
            rows.add_row(model, "loss of the answers", f"{loss['value']:.4f}", f"{low:.4f} … {high:.4f}", "")
    for baseline, value in first["chance"].items():
        rows.add_row(baseline, "", f"{value:.4f}", "", str(first["examples"]))
    screen.print(rows)
    for model, summary in summaries.items():
        if (loss := summary["target_loss"]) and not math.isfinite(loss["value"]):
            screen.print(
                f"{model}: the loss is not finite: the model's numbers overflow, as after training that diverged in its"
                " last step; train again with a lower learning_rate",
                highlight=False,
            )
        if summary["unfinished"]:
            screen.print(
                f"{model}: {counted(summary['unfinished'], 'answer')} reached the limit of tokens", highlight=False
            )


def compared(base: dict[str, Any], adapted: dict[str, Any]) -> list[str]:
    """Return a sentence for each measure: whether the adapter is better than its base model on these questions."""
    from nalora.evaluation.answers import LOSS, read_scores
    from nalora.evaluation.paired import Pair, compare_answers
    from nalora.report.tables import lower_is_better

    sentences = []
    for measure in (*adapted["measures"], LOSS):
        one, other = (read_scores(Path(s["folder"]), measure, s["examples"]) for s in (adapted, base))
        for result in compare_answers({0: Pair(one, other)}, higher_is_better=not lower_is_better(measure)).values():
            sentences.append(result.sentence(measure, "adapted", "base"))
    return sentences


def demo(
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps of each method.", show_default="as in the recipe laptop")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of the adapter and of the data order.", show_default="as in the recipe laptop"),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/demo"),
) -> None:
    """Train SmolLM2-135M on a data file with LoRA and with NA-LoRA, and compare them; 7 minutes on two CPU cores."""
    hush_libraries()
    from nalora.cli.demo import run

    settings = [f"{name}={value}" for name, value in (("steps", steps), ("seed", seed)) if value is not None]
    if not run(console(), folder=output, settings=settings):
        raise typer.Exit(INTERRUPTED)
