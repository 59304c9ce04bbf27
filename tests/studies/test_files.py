"""Every packaged study can start, and its opening comment has the right command, number of runs and cost."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from nalora import methods
from nalora.cli import app
from nalora.studies.schedule import Schedule
from nalora.studies.study import read

FOLDER = Path(__file__).parents[2] / "studies"
FILES = sorted(FOLDER.glob("*.yaml"))
PAPER = {"table-1", "ranks", "ablation", "target-modules", "t5-glue", "clip", "diagnostics"}
ELEVEN = {"full", "lora", "rslora", "adalora", "dora", "lora+", "pissa", "lora-ga", "lora-pro", "gora", "na-lora"}
OURS = {"gradient-or-update", "laptop"}
by_name = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
of_the_paper_and_ours = pytest.mark.parametrize(
    "file", [file for file in FILES if file.stem in PAPER | OURS], ids=lambda file: file.stem
)


def study(name):
    return read(FOLDER / f"{name}.yaml")


def opening(file) -> list[str]:
    """The comment above the study."""
    lines = file.read_text(encoding="utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return [line.removeprefix("#").strip() for line in lines[:end]]


def commands(file) -> list[str]:
    """The commands in the opening comment: on a separate line, in a loop, or between backticks."""
    found = re.findall(r"(?:^|do |`)(nalora [^`;\n]+)", "\n".join(opening(file)), flags=re.MULTILINE)
    return [each.strip() for each in found]


def jobs_of(name) -> dict[str, set[str]]:
    """The keys of every arm's runs that can be known beforehand: all rates with the screening seeds."""
    schedule = Schedule(study(name), "store")
    keys: dict[str, set[str]] = {}
    for cell in schedule.cells:
        keys.setdefault(cell.arm.name, set()).update(job.key for job in schedule.screening(cell))
    return keys


@by_name
def test_each_of_its_runs_can_start(file):
    schedule = Schedule(read(file), "store")
    assert schedule.open_jobs({}, {})


@by_name
def test_it_opens_with_commands_that_the_command_line_has(file):
    lines = commands(file)
    assert shlex.split(lines[0])[:3] == ["nalora", "study", file.stem]
    known = typer.main.get_command(app).commands
    for command in lines:
        _, name, *arguments = shlex.split(command)
        known[name].make_context(name, arguments)


@by_name
def test_it_states_its_question_its_number_of_runs_and_its_cost_on_named_hardware(file):
    text = " ".join(opening(file))
    assert "Question: " in text
    (runs,) = re.findall(r"Runs: (\d+) ", text)
    assert int(runs) == Schedule(read(file), "store").total({})
    cost = text.partition("Cost, ")[2]
    assert cost.startswith(("estimated from ", "measured on "))
    assert re.search(r"NVIDIA H200|CPU cores", cost)
    assert re.search(r"\d (GPU )?hours|an hour", cost)


@pytest.mark.parametrize("name", ["gap-sources", "gap-gemma", "rate-search"])
def test_a_study_that_drops_rates_states_the_rule_that_it_follows(name):
    screened, text = study(name), " ".join(opening(FOLDER / f"{name}.yaml"))
    assert (screened.drop_rates_worse_than, len(screened.screening_seeds)) == (0.02, 3)
    assert "by more than 0.02 with the first seed is not trained with the other two" in text


@pytest.mark.parametrize("name", ["papers-regime", "rate-range-test"])
def test_a_study_of_one_rate_has_none_to_drop(name):
    assert {len(cell.arm.learning_rates) for cell in Schedule(study(name), "store").cells} == {1}
    assert study(name).drop_rates_worse_than is None


@of_the_paper_and_ours
def test_every_arm_tries_as_many_learning_rates_as_the_others_with_three_seeds(file):
    cells = Schedule(read(file), "store").cells
    assert len({len(cell.arm.learning_rates) for cell in cells}) == 1
    assert {cell.arm.seeds for cell in cells} == {(0, 1, 2)}


def test_the_paper_is_there():
    assert {file.stem for file in FILES} >= PAPER | OURS


@pytest.mark.parametrize("name", ["table-1", "t5-glue"])
def test_a_table_of_eleven_methods_has_them_all(name):
    found = {arm.settings["method"] for arm in study(name).arms}
    assert found == ELEVEN
    assert found <= set(methods.names())


def test_table_1_is_the_papers_protocol_on_three_tasks_and_two_llamas():
    table = study("table-1")
    assert len(table.combinations()) == 6
    for cell in table.combinations():
        for arm in table.arms_in(cell):
            run = table.run(cell, arm, arm.learning_rates[0], 0)
            settings = run.settings
            assert 2e-5 in arm.learning_rates, "the paper's"
            assert (settings.rank, settings.alpha, settings.batch_size, settings.epochs) == (8, 16, 32, 1)
            assert (settings.schedule, settings.warmup, settings.max_norm) == ("cosine", 0.03, 1.0)
            assert settings.train_limit == (52_000 if settings.task == "mt-bench" else 100_000)
            assert settings.max_length == (512 if settings.task == "gsm8k" else 1024)


@pytest.mark.parametrize(
    ("name", "shared"),
    [("ablation", {"lora", "full", "rslora", "na-lora"}), ("target-modules", {"lora", "na-lora"})],
)
def test_arms_that_table_1_has_run_are_not_run_again(name, shared):
    first, second = jobs_of("table-1"), jobs_of(name)
    assert {arm for arm, keys in second.items() if keys <= set().union(*first.values())} == shared


def test_a_third_of_the_ranks_runs_are_table_1_s():
    first = set().union(*jobs_of("table-1").values())
    ranks = set().union(*jobs_of("ranks").values())
    assert len(ranks & first) == len(ranks) // 3


def test_the_mask_is_compared_in_both_spaces_under_four_optimizers():
    compared = study("gradient-or-update")
    arms = {(arm.settings["method"], arm.settings.get("apply_to")) for arm in compared.arms}
    masks = ("na-lora", "na-lora-random", "na-lora-frozen")
    assert arms == {("lora", None), ("lora-scaled", None)} | {(m, s) for m in masks for s in ("gradient", "update")}
    optimizers = [compared.run(cell, compared.arms[0], 1e-3, 0).settings.optimizer for cell in compared.combinations()]
    assert optimizers == ["adamw_torch_fused", "sgd", "adafactor", "muon"]
