"""The demo: one real model trained on a data file with LoRA and with NA-LoRA, compared in one table.

The file is read as anybody's own data is. Both runs have the same recipe, seed, batches and initial adapter. The demo
shows that nalora works and what it does to the gates. One seed and few steps cannot show which method is better.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from nalora.cli.screen import literal, table
from nalora.diagnostics.dynamics import diagnose
from nalora.diagnostics.inputs import DiagnosisOptions
from nalora.errors import shortened
from nalora.evaluation.answers import read_answers, side_by_side
from nalora.evaluation.targets import Request, evaluate_target
from nalora.files import atomic, outputs
from nalora.files.atomic import json_text
from nalora.report.data import read_runs
from nalora.report.html import write_report
from nalora.runs import contents, marker, packaged
from nalora.runs.folder import RunFolder, read_jsonl, write_json
from nalora.runs.settings import read
from nalora.training.run import Interrupted, train

# Few snapshots and examples for the gate figures of the report: seconds, compared with minutes of training.
SNAPSHOT_EVERY = 15
PROBE_SIZE = 6
RECIPE = packaged.RECIPES / "laptop.yaml"
DATA = packaged.RECIPES / "sums.jsonl"


class Arm(NamedTuple):
    """A variant of the recipe; its settings replace those of the recipe."""

    name: str
    title: str
    settings: tuple[str, ...]


ARMS = (
    Arm("lora", "LoRA", ("method=lora",)),
    Arm("na-lora", "NA-LoRA", ("method=na-lora", "apply_to=update")),
)
# The names that version 0.1 gave its runs.
_ARMS_OF_0_1 = ("lora", "na-lora-gradient", "na-lora-update")
# Examples at the end: answers that training made right, and answers that are still wrong.
_MADE_RIGHT, _STILL_WRONG = 3, 2
_WIDEST = 60


class ArmResult(NamedTuple):
    """The results of one arm; `before` is the summary of the base model, the same for all arms."""

    arm: Arm
    before: dict[str, Any]
    after: dict[str, Any]
    result: dict[str, Any]
    gates: dict[str, float]


def run(console: Console, *, folder: Path = Path("runs/demo"), settings: Sequence[str] = ()) -> bool:
    """Train and evaluate every arm and print the comparison; return False if Ctrl-C stopped it.

    Called again, it continues.

    Raises:
        NALoRAError: the model's wheel is not installed, or the folder holds a demo of other settings, or files that
            nalora did not write.
    """
    marker.refuse_foreign(folder, "demo", option="--output", known=_is_of_0_1)
    outputs.refuse_foreign_files([folder / "report.html"], outputs.is_page, option="--output", kind="a report")
    marker.mark(folder, "demo")
    data = folder / DATA.name
    if not data.is_file():
        atomic.write(data, DATA.read_bytes())
    given = {argument.partition("=")[0] for argument in settings}
    of_task = {name: value for name, value in read(RECIPE).task_options.items() if name not in given}
    settings = [f"task={data}", *(f"{name}={value}" for name, value in of_task.items()), *settings]
    console.print(
        f"Data: {data}, questions and answers as in any file of yours (`nalora data {data}`).", highlight=False
    )
    results: list[ArmResult] = []
    try:
        for arm in ARMS:
            before = results[0].before if results else None
            results.append(_train_and_evaluate(console, arm, folder, settings, before))
    except (Interrupted, KeyboardInterrupt):
        console.print("\nStopped; `nalora demo` continues from here.")
    if results:
        console.print(comparison(results))
        console.print(
            "One seed and few steps do not show which method is better. NA-LoRA scales updates here (apply_to=update),"
            " because Adam divides a factor on gradients out again.",
            highlight=False,
        )
        console.print(examples(results))
    finished = len(results) == len(ARMS)
    if finished:
        rows = [row._asdict() | {"arm": row.arm._asdict()} for row in results]
        write_json(folder / "result.json", json.loads(json_text(rows)))
        path = write_report(read_runs([folder / arm.name for arm in ARMS]), folder / "report.html")
        for what, line in (
            ("Report, to open in a browser", path),
            ("All answers", f"nalora show {folder / ARMS[0].name}"),
            ("Chat with the trained model", f"nalora chat {folder / ARMS[0].name}"),
        ):
            console.print(f"{what}: {line}", highlight=False, markup=False, soft_wrap=True)
    return finished


def _is_of_0_1(folder: Path) -> bool:
    """Whether version 0.1, which wrote no marker, ran its demo there."""
    return contents.is_run(folder / _ARMS_OF_0_1[0]) and all(
        entry.name in ("result.json", "report.html", *_ARMS_OF_0_1) for entry in folder.iterdir()
    )


def _train_and_evaluate(
    console: Console, arm: Arm, folder: Path, settings: Sequence[str], before: dict[str, Any] | None
) -> ArmResult:
    path = folder / arm.name
    described = read(RECIPE, [*settings, *arm.settings, f"output={path}", f"snapshot_every={SNAPSHOT_EVERY}"])
    console.print(f"\n[bold]{arm.title}[/bold]")
    result = train(described, resume=RunFolder(path).settings.is_file(), console=console)
    with console.status("evaluating"):
        summaries = evaluate_target(str(path), Request(with_base=before is None))
    if not RunFolder(path).diagnosis.is_file():
        with console.status("measuring the gates"):
            diagnose(str(path), DiagnosisOptions(probe_size=PROBE_SIZE))
    rows = read_jsonl(RunFolder(path).metrics)
    gates = {name.removeprefix("nalora/"): value for name, value in rows[-1].items() if name.startswith("nalora/")}
    return ArmResult(arm, before or summaries["base"], summaries["adapted"], result, gates)


def comparison(results: Sequence[ArmResult]) -> Table:
    """Return a table with a row for each arm: scores with intervals, the state of its gates, and the step time."""
    first = results[0].after
    rows = table("", title=f"{first['task']}, {first['examples']} held-out questions (95 % intervals)")
    for column in ("right answers", "loss of the answers", "gates closed/responsive/linear", "step scales gate/up/down",
                   "mean mask", "s/step"):  # fmt: skip
        rows.add_column(column, justify="right")
    rows.add_row("before training", _right(results[0].before), _loss(results[0].before), "", "", "", "")
    for arm, _, after, result, gates in results:
        rows.add_row(
            arm.title,
            _right(after),
            _loss(after),
            _joined(gates, "p_sup", "p_res", "p_pos"),
            _joined(gates, "scale_gate", "scale_up", "scale_down") if gates.get("scaling_acts", 1) else "off",
            _joined(gates, "mask_mean") if gates.get("mask_acts", 1) else "off",
            f"{result['seconds'] / result['steps']:.2f}",
        )
    return rows


def examples(results: Sequence[ArmResult]) -> Table:
    """Return a table of answers: some that training made right, and some that are still wrong."""
    folders = {"before training": results[0].before["folder"], **{r.arm.title: r.after["folder"] for r in results}}
    questions = side_by_side({name: read_answers(Path(folder)) for name, folder in folders.items()})
    right = {key: [all(answer.scores.values()) for answer in row.values()] for key, row in enumerate(questions)}
    made_right = [key for key, (before, *after) in right.items() if not before and all(after)][:_MADE_RIGHT]
    wrong = [key for key, (_, *after) in right.items() if not all(after)][:_STILL_WRONG]
    rows = table("question", "expected", *folders, title="Examples: answers that training made right, and wrong ones")
    for key in made_right + wrong:
        first, *_ = questions[key].values()
        answers = [literal(shortened(" ".join(a.outputs[0].split()), _WIDEST), "" if all(a.scores.values()) else "red")
                   for a in questions[key].values()]  # fmt: skip
        rows.add_row(literal(first.question or ""), literal(first.expected or ""), *answers)
    return rows


def _right(summary: dict[str, Any]) -> str:
    (measured, *_) = summary["measures"].values()
    low, high = measured["binomial"]
    return f"{100 * measured['value']:.0f} % ({100 * low:.0f} … {100 * high:.0f})"


def _loss(summary: dict[str, Any]) -> str:
    low, high = summary["target_loss"]["bootstrap"]
    return f"{summary['target_loss']['value']:.3f} ({low:.3f} … {high:.3f})"


def _joined(gates: dict[str, float], *names: str) -> str:
    return "/".join(f"{gates[name]:.2f}" for name in names) if gates else "–"
