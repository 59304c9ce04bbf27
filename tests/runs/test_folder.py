"""An unfinished run is resumed only with settings that do not change its result."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import tiny
import yaml
from launched import difference, losses, weights
from stopped_runs import train_and_stop

from nalora import NALoRAError
from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.training.run import train


@pytest.fixture
def settings(tmp_path):
    return {
        "model": tiny.saved_llama(tmp_path / "base", layers=1), "task": "gym/chain_sum", "train_size": 21,
        "test_size": 4, "output": str(tmp_path / "run"), "steps": 6, "batch_size": 8, "micro_batch_size": 8,
        "learning_rate": 1e-3, "log_every": 1, "device": "cpu",
    }  # fmt: skip


@pytest.fixture
def begun(settings):
    folder = RunFolder(settings["output"])
    folder.open(check(settings).to_dict(), resume=False)
    return folder


def go_on(folder, settings, **changes):
    folder.open(check(settings | changes).to_dict(), resume=True)
    return yaml.safe_load(folder.settings.read_text())


@pytest.mark.parametrize(
    "change",
    [{"save_every": 50}, {"log_every": 3}, {"snapshot_every": 2}, {"report_to": "tensorboard"},
     {"device": None}, {"micro_batch_size": 4}, {"output": "elsewhere"}],
)  # fmt: skip
def test_settings_that_do_not_change_the_result_may_change(begun, settings, change):
    assert change.items() <= go_on(begun, settings, **change).items()


@pytest.mark.parametrize("change", [{"rank": 4}, {"batch_size": 16}, {"method": "rslora"}, {"test_size": 5}])
def test_settings_that_change_the_result_may_not_change(begun, settings, change):
    before = begun.settings.read_text()
    with pytest.raises(NALoRAError, match=f"started with other settings: {next(iter(change))}"):
        go_on(begun, settings, **change)
    assert begun.settings.read_text() == before


def test_the_refusal_gives_both_values(begun, settings):
    with pytest.raises(NALoRAError, match=r"rank \d+, now 4"):
        go_on(begun, settings, rank=4)


def test_commands_about_a_run_that_names_code_have_the_option_for_it(begun, settings):
    assert begun.command("evaluate", "--limit", "5") == f"nalora evaluate {begun.path} --limit 5"
    begun.settings.write_text(yaml.safe_dump(settings | {"method": "theirs.py"}))
    assert begun.command("chat") == f"nalora chat {begun.path} --trust"
    assert begun.resume_command() == f"nalora train {begun.path} --resume --trust"


@pytest.mark.parametrize("other", [{"max_norm": 0.5}, {"apply_to": "update"}])
def test_a_setting_that_did_not_exist_yet_had_its_default(begun, settings, other):
    settings |= {"method": "na-lora"}
    now = check(settings).to_dict()
    begun.settings.write_text(yaml.safe_dump({name: value for name, value in now.items() if name not in other}))
    assert go_on(begun, settings).keys() == now.keys()
    begun.settings.write_text(yaml.safe_dump({name: value for name, value in now.items() if name not in other}))
    with pytest.raises(NALoRAError, match=f"started with other settings: {next(iter(other))}"):
        go_on(begun, settings, **other)


def test_a_finished_run_keeps_its_settings(begun, settings):
    begun.finish({"steps": 6})
    assert go_on(begun, settings, save_every=50)["save_every"] == 0


@pytest.mark.parametrize("change", [{"stop_after": None}, {"stop_after": 5}, {"rank": 4}])
def test_a_finished_run_is_not_continued_with_other_settings(settings, change):
    settings["stop_after"] = 3
    folder = RunFolder(settings["output"])
    folder.open(check(settings).to_dict(), resume=False)
    with pytest.raises(NALoRAError, match="found a run started with other") as unfinished:
        go_on(folder, settings, **change)
    assert unfinished.value.fix.startswith(f"`nalora train {folder.path} --resume` continues it with those")
    folder.finish({"steps": 3, "stopped_early": True, "planned_steps": 6})
    with pytest.raises(NALoRAError, match="found a finished run started with other") as finished:
        go_on(folder, settings, **change)
    assert finished.value.fix == "leave --resume out and give another output="


def test_a_stopped_run_resumes_with_smaller_passes_and_new_intervals(settings, tmp_path, monkeypatch):
    whole = settings | {"output": str(tmp_path / "whole")}
    train(check(whole))
    train_and_stop(check(settings), monkeypatch, after=2)
    train(check(settings | {"micro_batch_size": 2, "save_every": 2, "log_every": 2}), resume=True)
    assert difference(weights(tmp_path / "whole"), weights(tmp_path / "run")) < 1e-4
    kept = {path.name for path in RunFolder(settings["output"]).checkpoints.iterdir()}
    assert kept == {"checkpoint-4", "checkpoint-6"}
    assert len(losses(tmp_path / "run")) == 2 + 2, "two steps by themselves, then every second one"


@pytest.mark.slow
def test_a_run_of_one_process_resumes_on_two_with_half_the_passes(settings, tmp_path, monkeypatch):
    whole = settings | {"output": str(tmp_path / "whole")}
    train(check(whole))
    train_and_stop(check(settings), monkeypatch, after=2)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings | {"micro_batch_size": 4}))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "nalora.cli"]
    subprocess.run([*launch, "train", str(file), "--resume"], env=environment, check=True, timeout=120)
    assert difference(weights(tmp_path / "whole"), weights(tmp_path / "run")) < 1e-4
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)
