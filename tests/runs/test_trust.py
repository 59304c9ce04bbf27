"""A folder that somebody else made runs none of its code unless that is allowed."""

from __future__ import annotations

import json
import shutil

import pytest
import tiny
import yaml

from nalora import tasks
from nalora.control.inspection import inspect_model
from nalora.diagnostics.dynamics import diagnose
from nalora.diagnostics.inputs import DiagnosisOptions
from nalora.diagnostics.mismatch import diagnose_against
from nalora.errors import NALoRAError
from nalora.evaluation.targets import Request, evaluate_target
from nalora.report.data import read_runs
from nalora.runs.folder import RunFolder
from nalora.runs.saved_run import read_run
from nalora.runs.settings import check
from nalora.runs.trust import consequences
from nalora.studies.job import Job, work
from nalora.studies.store import TEST
from nalora.training.run import train

CODE = """
from pathlib import Path
from nalora.methods.lora import LoRA
Path({mark!r}).touch()

class Own(LoRA):
    name, title = "own", "LoRA"

METHODS = (Own,)

from nalora.tasks.gym import Gym

class Chain(Gym):
    name = "chain"

    def __init__(self, train_size=8, test_size=2, max_new_tokens=2):
        super().__init__("gym/chain_sum", train_size, test_size, max_new_tokens=max_new_tokens)

TASKS = (Chain,)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    base = tiny.saved_llama(folder / "base", layers=1)
    settings = {
        "model": base, "task": "gym/chain_sum", "train_size": 8, "test_size": 2, "max_new_tokens": 2, "steps": 2,
        "batch_size": 2, "device": "cpu", "snapshot_every": 1, "output": str(folder / "run"),
    }  # fmt: skip
    train(check(settings))
    return folder / "run"


@pytest.fixture
def hostile(finished, tmp_path):
    """The run as somebody would send it: its method is a Python file, which leaves a mark when it runs."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "own.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
    change(tmp_path / "run", method=str(tmp_path / "own.py"))
    return tmp_path / "run"


def change(run, **settings):
    folder = RunFolder(run)
    folder.write_settings(yaml.safe_load(folder.settings.read_text()) | settings)


COMMANDS = {
    "evaluate": lambda run, trust: evaluate_target(str(run), Request(trust=trust, with_base=False)),
    "diagnose": lambda run, trust: diagnose(run, DiagnosisOptions(probe_size=2, trust=trust)),
    "against": lambda run, trust: diagnose_against(run, str(run), DiagnosisOptions(probe_size=2, trust=trust)),
}


@pytest.mark.parametrize("setting", ["method", "task"])
@pytest.mark.parametrize("name", COMMANDS)
def test_code_of_the_folder_s_own_runs_only_with_trust(hostile, tmp_path, name, setting):
    if setting == "task":
        change(hostile, method="lora", task=f"{tmp_path / 'own.py'}:chain")
    before = sorted(hostile.rglob("*"))
    with pytest.raises(NALoRAError, match=rf"would run the Python file .*own\.py \({setting}\).*add --trust"):
        COMMANDS[name](hostile, False)
    assert not (tmp_path / "mark").exists()
    assert sorted(hostile.rglob("*")) == before
    COMMANDS[name](hostile, True)
    assert (tmp_path / "mark").exists()


def test_a_target_s_method_needs_trust_as_the_run_s(finished, hostile, tmp_path):
    with pytest.raises(NALoRAError, match="add --trust"):
        diagnose_against(finished, str(hostile), DiagnosisOptions(probe_size=2))
    assert not (tmp_path / "mark").exists()


def test_reports_and_inspections_run_nothing(hostile, tmp_path):
    evaluate_target(str(hostile), Request(with_base=False, trust=True))
    (tmp_path / "mark").unlink()
    change(hostile, trust_remote_code=True, task=str(tmp_path / "own.py"))
    (summary,) = hostile.glob("evaluations/**/summary.json")
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"task": str(tmp_path / "own.py")}))
    # The file was run once by the evaluation, and would not run again unless it has changed.
    (tmp_path / "own.py").write_text((tmp_path / "own.py").read_text() + "\n# another file\n")
    read_runs([hostile])
    inspect_model(str(hostile / "adapter"))
    with pytest.raises(NALoRAError, match="name the folder inside it"):
        inspect_model(str(hostile))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "na-lora", "on": "x.py"}, "run the Python file x.py (on)"),
        ({"task": "x.py:own"}, "run the Python file x.py (task)"),
        ({"trust_remote_code": True}, "run the Python code that comes with the model"),
        ({"attention": "owner/kernel"}, "run the attention kernel owner/kernel, code from the hub (attention)"),
        ({"task": "humaneval", "unsafe_code": True}, "run programs that the model writes without a sandbox"),
        ({"task": "mt-bench", "judge_url": "http://evil"}, "send OPENAI_API_KEY to http://evil"),
        ({"task": "mt-bench", "judgements": "/etc/passwd"}, "write to the file /etc/passwd"),
    ],
)
def test_other_consequences_of_settings_are_named(finished, tmp_path, settings, message):
    given = yaml.safe_load((finished / "run.yaml").read_text()) | settings
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(given))
    with pytest.raises(NALoRAError) as error:
        read_run(RunFolder(tmp_path))
    assert message in str(error.value)


def test_an_ordinary_run_needs_no_trust(finished):
    assert consequences(yaml.safe_load((finished / "run.yaml").read_text()), finished) == {}
    judged = {"judgements": str(finished / "evaluations" / "judgements.jsonl"), "judge_url": None}
    assert consequences(judged, finished) == {}


def test_every_option_of_a_task_that_could_do_harm_is_known():
    """A new one has to be thought about: options that are not plain numbers, names of parts, or prompts."""
    harmless = {
        "train_set", "prompt", "limit", "cut_answer", "calculator", "train_size", "test_size", "seed", "settings",
        "max_new_tokens", "judge_model", "judge_tokens", "judge_timeout", "test", "test_share", "format", "columns",
        "measure", "pattern", "system",
    }  # fmt: skip
    for task in (*tasks.names()[:-2], "gym/chain_sum", "data.jsonl"):
        for option in set(tasks.option_types(task)) - harmless:
            assert consequences({option: "something"}), option


def test_resuming_compares_no_code(hostile, tmp_path):
    (hostile / "result.json").unlink()
    settings = yaml.safe_load((hostile / "run.yaml").read_text()) | {"method": "lora", "output": str(hostile)}
    with pytest.raises(NALoRAError, match="started with other settings: method"):
        train(check(settings), resume=True)
    assert not (tmp_path / "mark").exists()


def test_a_study_evaluates_its_own_code_and_no_other(hostile, tmp_path):
    own = {key: value for key, value in yaml.safe_load((hostile / "run.yaml").read_text()).items() if key != "output"}
    job = Job("run", own, (TEST,), str(tmp_path), "")
    work(job)
    (tmp_path / "mark").unlink()
    (tmp_path / "other.py").write_text(CODE.format(mark=str(tmp_path / "other mark")))
    change(hostile, method=str(tmp_path / "other.py"))
    shutil.rmtree(hostile / "evaluations")
    with pytest.raises(NALoRAError, match=r"would run the Python file .*other\.py"):
        work(job)
    assert not (tmp_path / "other mark").exists()
