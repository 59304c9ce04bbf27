"""`nalora train` and `nalora evaluate` as a user types them, on a small model and an offline task."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import tiny
import transformers
import yaml
from rich.console import Console

import nalora.training.run as training
from nalora.cli.runs import print_summaries
from nalora.models import loading
from nalora.runs.folder import RunFolder
from nalora.runs.settings import read
from nalora.training.claim import claimed


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "run.yaml"
    model = tiny.saved_llama(tmp_path / "base")
    file.write_text(
        f"model: {model}\ntask: gym/chain_sum\ntrain_size: 20\ntest_size: 8\nsteps: 2\nbatch_size: 4\nlog_every: 1\n"
        f"device: cpu\noutput: {tmp_path / 'run'}\n"
    )
    return file


def test_train_then_evaluate(run, recipe, tmp_path):
    code, out, _ = run("train", recipe, "method=na-lora", "apply_to=update")
    assert code == 0, out
    assert "20 examples in 20 rows" in out
    assert "2 steps" in out
    (next_command,) = re.findall(r"^Evaluate: nalora (.+)$", out, re.MULTILINE)
    assert re.findall(r"^Chat: nalora chat (.+)$", out, re.MULTILINE) == [str(tmp_path / "run")]
    code, out, _ = run(*shlex.split(next_command))
    assert code == 0, out
    for part in ("base", "adapted", "accuracy", "loss of the answers", "95 % interval", "reached the limit of tokens"):
        assert part in out
    assert "accuracy: adapted and base have the same score on every question." in out
    assert re.search(r"loss of the answers: adapted − base [-+]\S+, 95 % interval .*not tested: fewer than", out)
    (folder,) = re.findall(r"Outputs of adapted: (.+)", out)
    assert (Path(folder) / "outputs.jsonl").is_file()
    code, again, _ = run("evaluate", tmp_path / "run")
    assert [line for line in again.splitlines() if "accuracy" in line] == [
        line for line in out.splitlines() if "accuracy" in line
    ]


def test_after_training_on_images_there_is_no_chat(run, recipe, tmp_path, monkeypatch):
    assert run("train", recipe)[0] == 0
    result = {"steps": 2, "seconds": 1.0, "train_loss": 1.0, "examples": 20}
    monkeypatch.setattr(training, "train", lambda *_, **__: result)
    code, out, _ = run("train", recipe)
    assert code == 0
    assert out.splitlines()[-1] == f"Evaluate: nalora evaluate {tmp_path / 'run'}"


def numbers(printed):
    """The words of the lines with a measure."""
    return [line.split() for line in printed.splitlines() if "accuracy" in line or "loss of the answers" in line]


def test_an_adapter_from_anywhere_is_evaluated_like_its_run(run, recipe, tmp_path, monkeypatch):
    assert run("train", recipe, "learning_rate=0.05")[0] == 0
    _, of_run, _ = run("evaluate", tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "adapter", tmp_path / "taken" / "adapter")
    before = sorted((tmp_path / "taken").rglob("*"))
    place = tmp_path / "elsewhere"
    place.mkdir()
    monkeypatch.chdir(place)
    task = ["--task", "gym/chain_sum", "--option", "test_size=8"]
    for target in (["../taken/adapter"], ["../taken/adapter", "--model", tmp_path / "base"]):
        code, out, err = run("evaluate", *target, *task)
        assert code == 0, err
        assert numbers(out) == numbers(of_run)
        (base,), (adapted,) = (
            [row for row in numbers(out) if row[:2] == [name, "loss"]] for name in ("base", "adapted")
        )
        assert base[4:] != adapted[4:]
    assert sorted((tmp_path / "taken").rglob("*")) == before, "nothing is written into somebody's folder"
    folders = re.findall(r"Outputs of \w+: (.+)", out)
    assert all(Path(folder).parts[:2] == ("runs", "evaluations") for folder in folders)
    _, out, _ = run("evaluate", "../taken/adapter", *task, "--output", "chosen", "--no-base")
    (folder,) = re.findall(r"Outputs of adapted: (.+)", out)
    assert Path(folder).parts[:2] == ("chosen", "gym")
    code, _, err = run("evaluate", "../taken/adapter")
    assert (code, "an adapter without a task" in err) == (2, True)


def test_a_finished_run_is_not_trained_again(run, recipe):
    assert run("train", recipe)[0] == 0
    code, _, err = run("train", recipe)
    assert code == 2
    assert "a finished run" in err
    assert "already finished" in run("train", recipe, "--resume")[1]


def test_mistakes_are_named_before_anything_is_loaded(run, recipe):
    code, _, err = run("train", recipe, "rnk=4", "learning_rate=fast", "model=nobody/nothing")
    assert code == 2
    assert "2 problems" in err
    assert "rnk: no such setting (did you mean rank?)" in err
    code, _, err = run("evaluate", recipe.parent / "base", "--task", "gsm9k")
    assert code == 2
    assert "did you mean gsm8k?" in err


@pytest.mark.parametrize(("command", "parts"), [
    ("methods", ("lora", "na-lora", "full")),
    ("tasks", ("gsm8k", "gym/FAMILY", "mt-bench", "cars", "gym/coin_flip")),
    ("models", ("smollm2-135m", "FILE.gguf")),
])  # fmt: skip
def test_what_there_is_to_choose_from(run, command, parts):
    code, out, _ = run(command)
    assert code == 0
    assert all(part in out for part in parts)


def test_a_mistyped_run_is_no_model_without_a_task(run, recipe, tmp_path):
    """A path is first reported to hold no run; a run with a similar name is suggested."""
    (tmp_path / "laptop").mkdir()
    (tmp_path / "laptop" / "run.yaml").touch()
    code, _, err = run("evaluate", tmp_path / "laptp")
    assert code == 2
    assert "laptp: found no run there" in err
    assert "did you mean laptop?" in err
    (tmp_path / "other").mkdir()
    assert "found no run in that folder" in run("evaluate", tmp_path / "other")[2]
    for model in (tmp_path / "base", "smollm2-135m"):
        assert "a model without a task" in run("evaluate", model)[2]


def test_inspecting_a_run_leads_to_its_adapter(run, recipe, tmp_path):
    assert run("train", recipe)[0] == 0
    code, _, err = run("inspect", tmp_path / "run")
    assert code == 2
    assert f"Fix: name the folder inside it: {tmp_path / 'run' / 'adapter'}" in err
    assert run("inspect", tmp_path / "run" / "adapter")[0] == 0


def test_the_corrected_command_starts_after_one_that_failed(run, recipe, tmp_path):
    code, _, err = run("train", recipe, "target_modules=[gate]")
    assert code == 2
    assert "target_modules: ['gate']" in err
    assert "gate_proj" in err
    assert not (tmp_path / "run").exists()
    assert run("train", recipe, "target_modules=[gate_proj]")[0] == 0


def test_a_device_that_is_not_here_is_named_before_anything_is_loaded(run, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("loaded a model"))
    code, _, err = run("train", recipe, "device=cuda:99")
    assert code == 2
    assert "device 'cuda:99'" in err
    assert not (tmp_path / "run").exists()


def test_a_key_of_the_file_can_be_removed(run, recipe, tmp_path):
    """As if it was not there: a setting has its default again, one that must be given is missing."""
    code, _, err = run("train", recipe, "model=")
    assert (code, "model: missing" in err) == (2, True)
    recipe.write_text(recipe.read_text() + "rank: 3\nalpha: 5\n")
    assert run("train", recipe, "rank=", "alpha=7", "steps=1")[0] == 0
    settings = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert (settings["rank"], settings["alpha"]) == (8, 7)


def test_evaluating_a_model_writes_into_the_output(run, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, output = tmp_path / "base", tmp_path / "scores"
    options = ("--task", "gym/chain_sum", "--option", "test_size=2", "--device", "cpu")
    code, out, err = run("evaluate", model, *options, "--output", output)
    assert code == 0, err
    (summary,) = output.rglob("summary.json")
    assert summary.parent.parent == output / "gym" / "chain_sum"
    assert str(summary.parent) in out
    assert {path.name for path in tmp_path.iterdir()} == {"base", "run.yaml", "scores"}, "and nowhere else"
    (tmp_path / "taken").write_text("mine")
    code, _, err = run("evaluate", model, *options, "--output", tmp_path / "taken")
    assert (code, "a file" in err) == (2, True)


def test_one_step_is_printed_in_the_singular(run, recipe):
    code, out, _ = run("train", recipe, "steps=1", "train_limit=1")
    assert code == 0
    assert "1 example in 1 row, " in out
    assert "1 step in " in out


def test_a_folder_in_use_is_refused_with_its_process(run, recipe, tmp_path):
    folder = RunFolder(tmp_path / "run")
    with claimed(folder, read(recipe), resume=False, device="cpu"):
        code, _, err = run("train", recipe)
        assert code == 2
        assert f"process {os.getpid()} on this host" in err
        assert "--resume" not in err
        assert folder.settings.is_file()


def test_the_judge_of_mt_bench_is_required_before_training(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run("train", "llama-2-7b-chat")
    assert code == 2
    assert "add judge_model=NAME" in err
    assert list(tmp_path.iterdir()) == []


def test_someone_else_s_run_needs_trust(run, recipe, tmp_path):
    assert run("train", recipe)[0] == 0
    folder = tmp_path / "run"
    settings = yaml.safe_load((folder / "run.yaml").read_text())
    (tmp_path / "own.py").write_text(
        "from pathlib import Path\nfrom nalora.methods.lora import LoRA\nPath(__file__).with_suffix('.ran').touch()\n"
        "METHODS = (LoRA,)\n"
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(settings | {"method": str(tmp_path / "own.py")}))
    for command in ("evaluate", "diagnose"):
        code, _, err = run(command, folder)
        assert (code, "own.py" in err, "--trust" in err) == (2, True, True)
    (tmp_path / "study.yaml").write_text(
        f"settings: {{model: m, task: gsm8k}}\narms: {{own: {{method: {tmp_path / 'own.py'}}}}}\n"
    )
    code, _, err = run("report", tmp_path / "study.yaml")
    assert (code, "own.py" in err, "--trust" in err) == (2, True, True)
    assert not (tmp_path / "own.ran").exists()
    assert run("evaluate", folder, "--no-base", "--trust")[0] == 0
    assert (tmp_path / "own.ran").exists()


def test_a_loss_that_is_not_finite_is_reported():
    """Weights that the last step ruined are finite numbers; what the model computes with them is not."""
    screen = Console(file=io.StringIO(), width=200)
    interval = [math.nan, math.nan]
    ruined = {"task": "t", "measures": {}, "chance": {}, "examples": 1, "unfinished": 0}
    for value in (math.nan, math.inf):
        print_summaries(screen, {"adapted": ruined | {"target_loss": {"value": value, "bootstrap": interval}}})
    print_summaries(screen, {"adapted": ruined | {"target_loss": {"value": 1.0, "bootstrap": [0.9, 1.1]}}})
    assert screen.file.getvalue().count("adapted: the loss is not finite") == 2


def test_a_stopped_run_is_continued_by_the_command_that_is_printed(run, recipe, tmp_path, monkeypatch):
    class CtrlC(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            os.kill(os.getpid(), signal.SIGINT)

    make = training.make_trainer
    folder = tmp_path / "my run"
    with monkeypatch.context() as patched:
        patched.setattr(training, "make_trainer", lambda *a: (t := make(*a)).add_callback(CtrlC()) or t)
        code, out, _ = run("train", recipe, f"output={folder}", "learning_rate=0.01")
    assert code == 130
    (command,) = re.findall(r"stopped after step 1; continue with: nalora (.+)", out)
    again = ["train", recipe, f"output={folder}"]
    export = ["export", folder, "--to", "merged", "--output", tmp_path / "out"]
    for refused in (["evaluate", folder], export, again, [*again, "--resume"]):
        code, _, err = run(*refused)
        assert code == 2
        assert f"nalora {command}" in err, refused
    monkeypatch.chdir(tmp_path)
    folder.rename("moved")
    code, out, err = run(*shlex.split(command.replace(str(folder), "moved")))
    assert code == 0, out + err
    assert "Run folder: moved" in out
    assert not folder.exists()
    (tmp_path / "moved" / "run.yaml").write_text("method: theirs.py\nmodel: x\ntask: gsm8k\n")
    assert "add --trust" in run("train", "moved", "--resume")[2]


@pytest.mark.parametrize(
    "command",
    [
        ("train", "run.yaml", "model=smollm2-135"), ("train", "run.yaml", "model=smollm2-135", "--dry-run"),
        ("suggest", "run.yaml", "steps=50", "model=smollm2-135"), ("data", "sums.jsonl", "--model", "smollm2-135"),
        ("chat", "smollm2-135"), ("export", "smollm2-135", "--to", "merged", "--output", "exported"),
        ("inspect", "smollm2-135"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_mistyped_model_is_answered_with_the_nearest_name(run, recipe, monkeypatch, command):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(recipe.parent)
    Path("sums.jsonl").write_text("".join(f'{{"question": "{n} + 1 =", "answer": {n + 1}}}\n' for n in range(40)))
    code, out, err = run(*command)
    assert code == 2
    assert "did you mean smollm2-135m?" in out + err


@pytest.mark.parametrize("command", ["train", "suggest"])
def test_data_in_place_of_a_run_is_answered_with_the_command_that_trains_on_it(run, recipe, monkeypatch, command):
    monkeypatch.chdir(recipe.parent)
    Path("my sums.jsonl").write_text("".join(f'{{"question": "{n} + 1 =", "answer": {n + 1}}}\n' for n in range(40)))
    code, _, err = run(command, "my sums.jsonl")
    assert code == 2
    assert "nalora: my sums.jsonl: found data; expected a run's YAML file, or the name of a recipe. Fix: run `" in err
    assert "in place of train" in err
    words = shlex.split(err.split("`")[1])
    assert words == ["nalora", "train", "my-data", "task=my sums.jsonl"]
    small = ("model=base", "steps=1", "batch_size=2", "device=cpu", "output=trained")
    code, out, err = run(*words[1:], *small)
    assert code == 0, out + err
    missing = run(command, "none.csv")[2]
    assert "found no such file" in missing
    assert "Fix: check the path; for data run `nalora train my-data task=none.csv`" in missing
    assert "task=hub:owner/name`" in run(command, "hub:owner/name")[2]


def test_a_run_may_be_described_in_json(run, recipe, monkeypatch):
    monkeypatch.chdir(recipe.parent)
    Path("run.json").write_text(json.dumps(yaml.safe_load(recipe.read_text())))
    assert "Nothing was trained" in run("train", "run.json", "--dry-run")[1]
