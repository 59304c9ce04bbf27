"""A run whose loss or gradients are no longer finite ends as what it is: stopped, with nothing saved as a result."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest
import tiny
import torch
import transformers
import yaml
from ranks import run_as_two
from safetensors.torch import load_file

import nalora.training.run as module
from nalora.cli import main
from nalora.diagnostics.dynamics import diagnose
from nalora.diagnostics.inputs import DiagnosisOptions
from nalora.evaluation.targets import Request as Asked
from nalora.evaluation.targets import evaluate_target
from nalora.report.data import read_run
from nalora.report.html import write_report
from nalora.report.run_tables import write_tables
from nalora.runs.folder import RunFolder
from nalora.runs.saved_run import Diverged, advice
from nalora.runs.settings import RunSettings, check
from nalora.training.divergence import MOST_SKIPPED, PATIENCE, DivergenceWatch
from nalora.training.run import train

STEPS = 12


@pytest.fixture
def settings(tmp_path):
    return {
        "model": tiny.saved_llama(tmp_path / "base", layers=1), "task": "gym/chain_sum",
        "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 3}, "train_size": 48,
        "test_size": 4, "output": str(tmp_path / "run"), "steps": STEPS, "batch_size": 8, "micro_batch_size": 4,
        "log_every": 1, "device": "cpu", "max_length": 128, "save_every": 1, "snapshot_every": 2,
    }  # fmt: skip


def poison(monkeypatch, steps, what="loss"):
    """Make the loss (or, in spite of a finite loss, the gradients) of these steps infinite."""
    make = module.make_trainer

    def made(*arguments):
        trainer = make(*arguments)
        step, plain = trainer.training_step, trainer._get_grad_norm

        def training_step(*args, **kwargs):
            loss = step(*args, **kwargs)
            return loss * float("nan") if what == "loss" and trainer.state.global_step + 1 in steps else loss

        def norm(*args, **kwargs):
            found = plain(*args, **kwargs)
            return found * float("inf") if what == "norm" and trainer.state.global_step + 1 in steps else found

        trainer.training_step, trainer._get_grad_norm = training_step, norm
        return trainer

    monkeypatch.setattr(module, "make_trainer", made)


def read_json(path):
    def no_bare_word(word):
        raise AssertionError(f"{path}: {word}")

    return json.loads(path, parse_constant=no_bare_word)


def no_bare_nan(folder: Path) -> None:
    for file in [*folder.rglob("*.json"), *folder.rglob("*.jsonl")]:
        for text in file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
            read_json(text)


@pytest.mark.parametrize("method", [{}, {"method": "na-lora"}, {"method": "full"}])
def test_a_learning_rate_that_destroys_the_model(settings, method, tmp_path):
    # One good step, then a jump to numbers whose products overflow.
    settings |= method | {"learning_rate": 1e30, "warmup": 0, "max_norm": 0, "optimizer": "sgd"}
    with pytest.raises(Diverged, match="lower learning_rate") as raised:
        train(check(settings))
    folder = RunFolder(settings["output"])
    result = read_json(folder.result.read_text())
    assert result["diverged"] is True
    assert 1 <= result["diverged_step"] == raised.value.step <= 4
    assert result["steps"] < result["diverged_step"] + PATIENCE + 2
    assert result["train_loss"] is None
    assert result["message"] == str(raised.value)
    assert not folder.trained.exists()
    no_bare_nan(folder.path)
    for weights in [*folder.checkpoints.rglob("*.safetensors"), *folder.snapshots.rglob("*.safetensors")]:
        assert all(tensor.isfinite().all() for tensor in load_file(weights).values()), weights


@pytest.mark.parametrize("what", ["loss", "norm"])
def test_three_steps_in_a_row_stop_it_and_the_last_good_checkpoint_stays(settings, monkeypatch, what):
    poison(monkeypatch, range(6, 99), what)
    with pytest.raises(Diverged, match="checkpoint-5") as raised:
        train(check(settings))
    assert raised.value.step == 6
    folder = RunFolder(settings["output"])
    assert read_json(folder.result.read_text())["steps"] == 8
    assert sorted(each.name for each in folder.checkpoints.iterdir()) == ["checkpoint-4", "checkpoint-5"]
    no_bare_nan(folder.path)
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    name = "loss" if what == "loss" else "grad_norm"
    assert [row[name] is None for row in rows] == [False] * 5 + [True] * 3


def test_two_steps_in_a_row_do_not(settings, monkeypatch):
    poison(monkeypatch, {3, 4, 6, 7, 9, 10})
    result = train(check(settings | {"log_every": 2}))
    assert "diverged" not in result
    folder = RunFolder(settings["output"])
    assert (folder.adapter / "adapter_model.safetensors").is_file()
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    # A row is of the steps since the one before: what passed does not stay in later ones.
    assert [row["step"] for row in rows if row["loss"] is None] == [4, 6, 8, 10]
    no_bare_nan(folder.path)


def test_the_last_steps_are_not_saved_as_an_adapter(settings, monkeypatch):
    """Too late for three in a row, and all the same nothing that can be used."""

    class Ruin(transformers.TrainerCallback):
        def on_optimizer_step(self, args, state, control, model, **_):
            if state.global_step == STEPS - 1:
                next(p for p in model.parameters() if p.requires_grad).data[0, 0] = float("nan")

    make = module.make_trainer
    monkeypatch.setattr(module, "make_trainer", lambda *a: (t := make(*a)).add_callback(Ruin()) or t)
    with pytest.raises(Diverged) as raised:
        train(check(settings))
    assert raised.value.step == STEPS
    folder = RunFolder(settings["output"])
    assert not folder.adapter.exists()
    assert folder.latest_checkpoint().name == f"checkpoint-{STEPS - 1}"


@pytest.mark.parametrize("method", ["lora", "na-lora"])
def test_a_last_update_to_huge_weights_is_noticed_by_one_more_forward_pass(settings, monkeypatch, method):
    """Every weight is finite, every loss was: only the next pass would show it."""
    passes = []

    class Ruin(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model, **_):
            model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))

        def on_step_end(self, args, state, control, model, **_):
            if self.ruins and state.global_step == STEPS:
                for parameter in model.parameters():
                    parameter.data.fill_(1e30 if parameter.requires_grad else parameter.data.mean())

    ruin = Ruin()
    make = module.make_trainer
    monkeypatch.setattr(module, "make_trainer", lambda *a: (t := make(*a)).add_callback(ruin) or t)
    ruin.ruins = False
    train(check(settings | {"method": method, "output": settings["output"] + "-good"}))
    assert passes == [True] * 2 * STEPS + [False]
    ruin.ruins = True
    with pytest.raises(Diverged) as raised:
        train(check(settings | {"method": method}))
    assert raised.value.step == STEPS
    assert f"the last good checkpoint is {settings['output']}/checkpoints/checkpoint-{STEPS - 1}" in str(raised.value)
    assert not RunFolder(settings["output"]).adapter.exists()


def test_every_command_reports_a_diverged_run(settings, monkeypatch, tmp_path):
    poison(monkeypatch, range(6, 99))
    with pytest.raises(Diverged):
        train(check(settings))
    before = RunFolder(settings["output"]).result.read_text()
    for command in (
        lambda: train(check(settings), resume=True),
        lambda: evaluate_target(settings["output"], Asked(with_base=False)),
    ):
        with pytest.raises(Diverged, match="a run that diverged: .* from step 6 on.*lower learning_rate"):
            command()
    assert RunFolder(settings["output"]).result.read_text() == before
    diagnosis = diagnose(settings["output"], DiagnosisOptions(probe_size=4))
    assert any("the run diverged at step 6" in notice for notice in diagnosis["notices"])
    run = read_run(settings["output"])
    assert any("The run diverged" in notice and "step 6" in notice for notice in run.notices)
    page = write_report([run], tmp_path / "report.html").read_text()
    assert "The run diverged: loss or gradients were not finite from step 6 on." in page
    assert "NaN" not in page.partition('type="application/json"')[2].partition("</script>")[0]
    write_tables([run], tmp_path / "tables")


def test_the_command_line(settings, tmp_path, monkeypatch, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings | {"learning_rate": 1e30, "max_norm": 0, "optimizer": "sgd", "warmup": 0}))
    monkeypatch.setattr(sys, "argv", ["nalora", "train", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code not in (0, None)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nalora:")]
    assert "a run that diverged" in line
    assert "clip gradients with max_norm" in line


class _Trainer:
    """The attributes of a Trainer that the watch reads, with steps that a test defines."""

    class accelerator:  # noqa: N801 - as the Trainer names it
        optimizer_step_was_skipped = False

    class state:  # noqa: N801 - as the Trainer names it
        global_step = 0

    def __init__(self, device):
        self.model = torch.nn.Linear(2, 2).to(device)

    def training_step(self, model, loss, num_items_in_batch=None):
        return loss

    def compute_loss(self, model, loss, num_items_in_batch=None):
        return loss

    def compute_loss_context_manager(self):
        return contextlib.nullcontext()

    def _prepare_inputs(self, inputs):
        return inputs

    def _get_grad_norm(self, norm):
        return norm

    def _maybe_log_save_evaluate(self):
        pass

    def add_callback(self, callback):
        pass


def watched(steps, device="cpu"):
    """The step after which a watch stops these (losses of the passes, norm, skipped), and the one it names."""
    trainer, watch = _Trainer(device), DivergenceWatch()
    watch.install(trainer)
    control = type("Control", (), {"should_training_stop": False, "should_log": False})()
    for number, (losses, norm, skipped) in enumerate(steps, 1):
        for loss in losses:
            trainer.training_step(trainer.model, torch.tensor(loss, device=device))
        trainer._get_grad_norm(torch.tensor(norm, device=device))
        trainer.accelerator.optimizer_step_was_skipped = skipped
        trainer.state.global_step = number
        watch.on_step_end(None, trainer.state, control)
        if control.should_training_stop:
            return number, watch.step
    return None, watch.conclude()


NAN, GOOD, BAD = float("nan"), ([1.0, 2.0], 1.0, False), ([1.0, float("inf")], 1.0, False)
SKIPPED = ([1.0], float("inf"), True)
WITH_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=WITH_GPU)]


@pytest.mark.parametrize("device", DEVICES)
def test_skipped_steps_do_not_count(device):
    late = 0 if device == "cpu" else 1
    assert watched([GOOD] * 9, device) == (None, None)
    assert watched([GOOD, BAD, BAD, BAD, *[GOOD] * 3], device) == (4 + late, 2)
    assert watched([BAD, BAD, GOOD, BAD, BAD, GOOD], device) == (None, None)
    assert watched([([1.0], NAN, False)] * 3 + [GOOD], device) == (3 + late, 1)
    assert watched([GOOD, *[SKIPPED] * 10, GOOD], device) == (None, None)
    assert watched([BAD, SKIPPED, BAD, SKIPPED, BAD, GOOD], device) == (5 + late, 1)
    assert watched([GOOD, BAD, BAD, BAD], device) == ((4, 2) if device == "cpu" else (None, 2))


def test_a_scaler_that_skips_every_step_trains_nothing():
    assert watched([GOOD, *[SKIPPED] * MOST_SKIPPED]) == (MOST_SKIPPED + 1, 2)
    assert watched([*[SKIPPED] * (MOST_SKIPPED - 1), GOOD, *[SKIPPED] * (MOST_SKIPPED - 1)]) == (None, None)


def test_the_advice_is_what_the_run_has_not_tried():
    tried = advice(RunSettings("m", "t", learning_rate=0.1, dtype="float16"))
    assert "lower learning_rate (it was 0.1)" in tried
    assert "lower max_norm (1)" in tried
    assert "bfloat16 or float32" in tried
    untried = advice(RunSettings("m", "t", warmup=0, max_norm=0, dtype="bfloat16"))
    assert "set warmup" in untried
    assert "max_norm: 1.0" in untried
    assert "dtype: float32" in untried


def two_processes(folder: Path, given: dict) -> None:
    """As a script: the loss of the second process alone is not finite from step 4 on."""
    import os
    from unittest.mock import patch

    make = module.make_trainer

    def made(*arguments):
        trainer = make(*arguments)
        step = trainer.training_step

        def training_step(*args, **kwargs):
            loss = step(*args, **kwargs)
            return loss * float("nan") if os.environ["RANK"] == "1" and trainer.state.global_step >= 3 else loss

        trainer.training_step = training_step
        return trainer

    with patch.object(module, "make_trainer", made):
        try:
            train(check(given))
        except Diverged as error:
            (folder / f"rank-{os.environ['RANK']}").write_text(str(error.step))


def test_all_processes_stop_at_one_step(settings, tmp_path):
    done = run_as_two(__file__, tmp_path, json.dumps(settings | {"micro_batch_size": 2}))
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["4", "4"]
    result = read_json(RunFolder(settings["output"]).result.read_text())
    assert (result["diverged_step"], result["steps"]) == (4, 6)


if __name__ == "__main__":
    torch.set_num_threads(1)
    two_processes(Path(sys.argv[1]), json.loads(sys.argv[2]))
