"""GPU hours: runs × steps × seconds of a measured step, in the heads of the studies and in the dry run."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nalora import methods, tasks
from nalora.cli import app
from nalora.runs.settings import check
from nalora.studies.cost import estimate, hours_text
from nalora.studies.schedule import Schedule
from nalora.studies.store import TEST, VALIDATION, Result
from nalora.studies.study import parse, read
from nalora.studies.suggest import ShortRuns, short_runs
from nalora.training.batches import split_batch

ROOT = Path(__file__).parents[2]
ESTIMATED = ["table-1", "ranks", "ablation", "target-modules", "t5-glue", "clip", "diagnostics", "gradient-or-update"]
LLAMA = "meta-llama/Llama-3.1-8B"


def schedule_of(**changes):
    settings = {"model": LLAMA, "task": "gsm8k", "train_limit": 1000, "max_length": 512, "batch_size": 32,
                "target_modules": "all-linear", "rank": 8}  # fmt: skip
    content = {
        "settings": {**settings, **changes.pop("settings", {})},
        "arms": {"lora": {"method": "lora"}, "full": {"method": "lora-pro", "mode": "full"}},
        "learning_rates": [1e-4, 3e-4], "seeds": [0, 1, 2],
    }  # fmt: skip
    return Schedule(parse({**content, **changes}), "store")


def test_the_measured_steps_are_the_last_rows_of_the_benchmarks():
    with (ROOT / "benchmarks" / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    last = {(row["question"], row["setting"], row["variant"]): row["p50"] for row in rows if row["unit"] == "ms"}
    steps = methods.measured_steps()
    for setting, measured in steps.items():
        for method, milliseconds in measured["ms"].items():
            graph = {"lora": "PEFT LoRA, graph", "na-lora": "NA-LoRA, model untouched, graph"}
            plain = setting.removesuffix(", graph")
            row = ("methods", setting, method) if plain == setting else ("small model", plain, graph[method])
            assert milliseconds == pytest.approx(float(last[row]), abs=0.06)
    assert len(steps) == 3


def test_runs_times_steps_times_seconds():
    """Four screening runs and two further seeds; 32 steps of 32 × 512 tokens, four times those of the measured step."""
    cost = estimate(schedule_of(), {})
    measured = methods.measured_steps()["llama-3.1-8b shapes, 4x1024"]
    expected = sum(
        4 * (32 * 4 * measured["ms"][name] / 1000 + measured["start_s"][name])
        for name in ("lora", "lora-pro, full mode")
    )
    assert cost.hours == cost.left == pytest.approx(expected / 3600)
    assert cost.gpu_hours(4) == cost.hours, "these steps fill the GPU, so sharing it saves nothing"


def test_tokens_count_for_large_models_and_launches_for_small_ones():
    assert estimate(schedule_of(settings={"max_length": 1024}), {}).hours == pytest.approx(
        2 * estimate(schedule_of(), {}).hours, rel=0.01
    )
    small = {"model": "smollm2-135m", "steps": 100}
    short, long = (estimate(schedule_of(settings={**small, "max_length": n}), {}) for n in (128, 512))
    assert short.hours == long.hours
    assert short.gpu_hours(4) == short.hours / 4
    graph = estimate(schedule_of(settings={**small, "cuda_graphs": True}), {})
    assert graph.hours < short.hours / 2
    assert graph.gpu_hours(4) == graph.hours


def test_short_runs_of_a_suggestion():
    run = check({"model": "smollm2-135m", "task": "gym/chain_sum", "steps": 200, "batch_size": 32})
    cost = estimate(ShortRuns(short_runs(run, (1e-3, 2e-3, 4e-3), 30), "store"), {})
    measured = methods.measured_steps()["smollm2-135m shapes, 32x320"]
    assert cost.hours * 3600 == pytest.approx(3 * (30 * measured["ms"]["lora"] / 1000 + measured["start_s"]["lora"]))


def test_runs_that_are_done_are_not_left():
    schedule = schedule_of(arms={"lora": {"method": "lora"}})
    (cell,) = schedule.cells
    job = schedule.screening(cell)[0]
    cost = estimate(schedule, {job.key: Result(1.0, {VALIDATION: 1.0, TEST: 1.0}, {}, 1.0)})
    assert cost.left == pytest.approx(cost.hours * 3 / 4)
    assert f"{hours_text(cost.left)} of them left" in cost.sentence()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "google/gemma-3-270m"}, "no step of google/gemma-3-270m was measured"),
        ({"task": "humaneval", "train_limit": None}, "training examples of humaneval is not known"),
    ],
)
def test_what_was_not_measured_gets_no_number(changes, message):
    text = estimate(schedule_of(settings=changes), {}).sentence()
    assert message in text
    assert not re.search(r"About \d", text)


def test_examples_of_a_data_file_are_counted_once(tmp_path, monkeypatch):
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(f'{{"question": "{n} + 1 =", "answer": {n + 1}}}\n' for n in range(100)))
    read = []
    monkeypatch.setattr(
        "nalora.tasks.get", lambda *names, get=tasks.get, **options: read.append(1) or get(*names, **options)
    )
    own = {"model": "smollm2-135m", "task": str(file), "train_limit": None, "test_share": 0.2, "batch_size": 8}
    changes = {"validation_size": 10, "arms": {"lora": {"method": "lora"}, "rslora": {"method": "rslora"}}}
    counted = estimate(schedule_of(settings={**own, "epochs": 2}, **changes), {})
    assert len(read) == 1
    examples = len(tasks.get(str(file), test_share=0.2).validation_split(10)[0])
    assert 60 < examples < 80
    assert examples % 8, "whose last batch is incomplete"
    steps = split_batch(check({**own, "epochs": 2}).settings).steps(examples, 2)
    assert steps > math.ceil(2 * examples / 8)
    assert counted.hours == estimate(schedule_of(settings={**own, "steps": steps}, **changes), {}).hours
    limited = estimate(schedule_of(settings={**own, "epochs": 2, "train_limit": 500}, **changes), {})
    assert limited.hours == counted.hours
    few = estimate(schedule_of(settings={**own, "epochs": 2, "train_limit": 8}, **changes), {})
    assert few.hours == estimate(schedule_of(settings={**own, "steps": 2}, **changes), {}).hours
    file.write_text("no rows")
    assert "examples of sums.jsonl is not known" in estimate(schedule_of(settings=own, **changes), {}).sentence()


def test_assumptions_are_named():
    arms = {"random": {"method": "na-lora-random"}, "attention": {"method": "lora", "target_modules": ["q_proj"]}}
    cost = estimate(schedule_of(settings={"model": "meta-llama/Llama-2-7b-hf", "rank": 32}, arms=arms), {})
    text = cost.sentence()
    for assumed in ("Llama-2-7b-hf costs as much as Llama 3.1 8B", "na-lora-random costs as much as na-lora",
                    "rank 32 costs", "adapters on some layers", "upper bound"):  # fmt: skip
        assert assumed in text


@pytest.mark.parametrize("name", ESTIMATED)
def test_the_head_of_a_study_has_the_estimate(name):
    file = ROOT / "studies" / f"{name}.yaml"
    head = " ".join(line.removeprefix("#").strip() for line in file.read_text().splitlines() if line.startswith("#"))
    per_gpu = int(re.search(r"--per-gpu (\d+)", head)[1])
    expected = hours_text(estimate(Schedule(read(file), "store"), {}).gpu_hours(per_gpu))
    stated = re.findall(r"([\d.,]+) GPU hours", head)
    assert len(stated) >= 2, "in short, and with its cost"
    assert {*stated} == {expected}


@pytest.mark.parametrize("name", ["ranks", "ablation", "target-modules"])
def test_the_head_of_a_study_has_what_is_left_after_table_1(name):
    def screening(schedule, cell):
        return {job.key for job in schedule.screening(cell)}

    first, second = (Schedule(read(ROOT / "studies" / f"{file}.yaml"), "store") for file in ("table-1", name))
    shared = set().union(*(screening(first, cell) for cell in first.cells))
    second.cells = [cell for cell in second.cells if not screening(second, cell) <= shared]
    left = hours_text(estimate(second, {}).hours)
    text = " ".join((ROOT / "studies" / f"{name}.yaml").read_text().replace("\n#", "").split())
    assert f"{left} after Table 1" in text
    assert f"({left} after `table-1`)" in (ROOT / "docs" / "studies.md").read_text()


@pytest.mark.parametrize("name", ["table-1", "ranks", "ablation", "target-modules", "diagnostics"])
def test_the_page_of_studies_has_the_same_hours(name):
    hours = hours_text(estimate(Schedule(read(ROOT / "studies" / f"{name}.yaml"), "store"), {}).hours)
    assert re.search(rf"\| `{name}` \| {re.escape(hours)}[ |]", (ROOT / "docs" / "studies.md").read_text())


def test_the_dry_run_prints_the_estimate(tmp_path):
    done = CliRunner().invoke(app, ["study", "diagnostics", "--store", str(tmp_path / "store"), "--dry-run"])
    assert done.exit_code == 0
    assert "About 8.1 GPU hours on one NVIDIA H200" in " ".join(done.output.split())


def test_the_file_of_steps_is_in_the_package():
    assert "methods/steps.json" in (ROOT / "pyproject.toml").read_text()
    assert json.loads((ROOT / "src" / "nalora" / "methods" / "steps.json").read_text()) == methods.measured_steps()
