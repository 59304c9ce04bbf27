"""The complete examples of docs/extending.md: a method whose adapter loads in stock PEFT, and a task."""

from __future__ import annotations

import re
from pathlib import Path

import peft
import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file

import nalora
from nalora import tasks
from nalora.diagnostics.dynamics import diagnose
from nalora.diagnostics.inputs import DiagnosisOptions
from nalora.evaluation.targets import Request, evaluate_target
from nalora.runs.folder import RunFolder
from nalora.runs.saved_run import read_run
from nalora.runs.settings import check
from nalora.studies.job import Job, work
from nalora.studies.store import ANSWERS, TEST, VALIDATION, Store, key
from nalora.training.run import train

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def settings(tmp_path):
    method, task = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "lora_fa.py").write_text(method, encoding="utf-8")
    (tmp_path / "reverse.py").write_text(task, encoding="utf-8")
    return {
        "model": tiny.saved_llama(tmp_path / "base"), "task": "gym/chain_sum", "train_size": 24, "test_size": 4,
        "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}, "rank": 4,
        "steps": 4, "batch_size": 4, "learning_rate": 1e-2, "device": "cpu", "output": str(tmp_path / "run"),
        "method": str(tmp_path / "lora_fa.py"), "orthogonal": True,
    }  # fmt: skip


def test_the_example_trains_b_alone(settings, tmp_path):
    result = train(check(settings))
    assert result["method"] == "lora-fa"
    adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    for name, tensor in adapter.items():
        if "lora_A" in name:
            torch.testing.assert_close(tensor @ tensor.T, torch.eye(4), rtol=0, atol=1e-5)
        else:
            assert tensor.abs().sum() > 0
    base = transformers.AutoModelForCausalLM.from_pretrained(settings["model"])
    peft.PeftModel.from_pretrained(base, tmp_path / "run" / "adapter")


def test_na_lora_controls_the_example(settings, tmp_path):
    """In the first step, after which everything differs: only what it controls."""
    settings = {**settings, "steps": 1, "warmup": 0.0, "schedule": "constant"}
    on_it = {"method": "na-lora", "on": settings["method"], "apply_to": "update", "start": "first"}
    train(check({**settings, **on_it, "output": str(tmp_path / "controlled")}))
    train(check(settings))
    plain, controlled = (
        load_file(tmp_path / n / "adapter" / "adapter_model.safetensors") for n in ("run", "controlled")
    )
    changed = {name for name in plain if not torch.equal(plain[name], controlled[name])}
    assert changed
    assert all("lora_B" in name and ".mlp." in name for name in changed)


def test_its_settings_are_checked_with_all_others(settings):
    with pytest.raises(nalora.NALoRAError, match=r"orthogonl.*did you mean orthogonal"):
        check({**{k: v for k, v in settings.items() if k != "orthogonal"}, "orthogonl": True})


@pytest.mark.parametrize(("text", "message"), [(None, "no such file"), ("x = 1", "no METHODS in the file")])
def test_a_file_that_is_no_method(tmp_path, text, message):
    file = tmp_path / "method.py"
    if text:
        file.write_text(text)
    with pytest.raises(nalora.NALoRAError, match=message):
        check({"model": "m", "task": "gym/chain_sum", "method": str(file)})


@pytest.fixture
def own_task(settings, tmp_path):
    """The run of the page's task, in the folder of its file."""
    kept = ("model", "steps", "batch_size", "device", "rank")
    own = {"task": "reverse.py", "letters": 3, "train_size": 16, "test_size": 3, "snapshot_every": 4}
    return {**{name: settings[name] for name in kept}, **own, "validation_size": 4, "output": "runs/reverse"}


def test_the_task_trains_and_is_evaluated_from_any_folder(own_task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = train(check(own_task))
    assert (result["task"], result["examples"]) == ("reverse", 12)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = str(tmp_path / "runs" / "reverse")
    with pytest.raises(nalora.NALoRAError, match=r"would run the Python file .*reverse\.py \(task\).*--trust"):
        evaluate_target(run, Request(with_base=False))
    summary = evaluate_target(run, Request(with_base=False, trust=True))["adapted"]
    assert (summary["task"], summary["examples"], set(summary["measures"])) == (
        "reverse", 3, {"accuracy"},
    )  # fmt: skip
    assert summary["evaluated"]["own"]
    assert Path(summary["folder"]).parent == tmp_path / "runs" / "reverse" / "evaluations" / "reverse"
    assert diagnose(run, DiagnosisOptions(probe_size=2, trust=True))["probe"]["task"] == "reverse"
    with pytest.raises(nalora.NALoRAError, match=r"leters: no such option of .*did you mean letters"):
        evaluate_target(run, Request(trust=True, options={"leters": 3}))


def test_a_model_is_evaluated_on_the_task(own_task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = evaluate_target(own_task["model"], Request(task="reverse.py:reverse", options={"test_size": 2}))["model"]
    assert (summary["task"], summary["examples"]) == ("reverse", 2)
    assert "/reverse-" in summary["folder"]


def test_a_study_trains_and_evaluates_the_task(own_task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {name: value for name, value in own_task.items() if name != "output"}
    work(Job("run", settings, (VALIDATION, TEST, ANSWERS), str(tmp_path / "store"), ""))
    result = Store(tmp_path / "store").result("run")
    assert result.losses.keys() == {VALIDATION, TEST}
    assert result.measures.keys() == {"accuracy"}


def test_a_run_of_the_task_has_one_key_wherever_its_file_is(own_task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = {**own_task, "task": str(tmp_path / "reverse.py")}
    assert key(check(own_task)) == key(check(named)) != key(check({**own_task, "letters": 4}))


SEVERAL = """
from __future__ import annotations
from dataclasses import dataclass
from nalora.methods.lora import LoRA
from nalora.tasks import Task

@dataclass(frozen=True)
class One(LoRA):
    name, title = "one", "LoRA"

@dataclass(frozen=True)
class Other(LoRA):
    name, title = "other", "LoRA"
    depth: int = 1

class First(Task):
    name, title = "first", "nothing"

class Second(Task):
    name, title = "second", "nothing"

    def __init__(self, size: int = 1) -> None:
        self.size = size

METHODS = (One, Other)
TASKS = (First, Second)
"""


def test_several_of_one_file_are_chosen_by_name(tmp_path):
    file = tmp_path / "several.py"
    file.write_text(SEVERAL)
    run = check({"model": "m", "task": f"{file}:second", "method": f"{file}:other", "size": 3, "depth": 2})
    assert (run.method.name, run.task_options) == ("other", {"size": 3})
    assert [tasks.name_of(f"{file}{name}") for name in ("", ":first", ":second")] == ["first", "first", "second"]
    assert tasks.get(f"{file}:second", size=4).size == 4
    with pytest.raises(nalora.NALoRAError, match=r"no task 'secnd' in the file.*did you mean second"):
        tasks.get(f"{file}:secnd")
    with pytest.raises(nalora.NALoRAError, match=r"no option 'sise'.*did you mean size"):
        tasks.get(f"{file}:second", sise=4)
    with pytest.raises(nalora.NALoRAError, match=r"no method 'more' in the file; expected one of one, other"):
        nalora.methods.get(f"{file}:more")


def test_a_name_is_no_path_even_where_a_folder_has_it(own_task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(check({**own_task, "output": "runs/reverse"}))
    for name in ("lora", "gsm8k"):
        (tmp_path / name).mkdir()
    folder = RunFolder(tmp_path / "runs" / "reverse")
    text = folder.settings.read_text().replace("task: reverse.py", "task: gsm8k")
    folder.settings.write_text(
        "".join(
            f"{line}\n"
            for line in text.splitlines()
            if not line.startswith("letters") and "_size: 16" not in line and "test_size" not in line
        )
    )
    monkeypatch.chdir("/")
    run = read_run(folder)
    assert (run.settings.task, run.method.name) == ("gsm8k", "lora")


@pytest.mark.parametrize(("text", "message"), [(None, "no such file"), ("x = 1", "no TASKS in the file")])
def test_a_file_that_is_no_task(tmp_path, text, message):
    file = tmp_path / "task.py"
    if text:
        file.write_text(text)
    with pytest.raises(nalora.NALoRAError, match=message):
        check({"model": "m", "task": str(file)})
