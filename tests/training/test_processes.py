"""Every method in two processes is the method in one: DDP and FSDP2, resumed on another number, one of them killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import peft
import pytest
import tiny
import torch
import transformers
import yaml
from launched import (
    CASES,
    OTHERS,
    QUICK,
    RESUMED,
    SHARDED,
    SLOW,
    SLOW_SHARDED,
    difference,
    finish,
    logged,
    losses,
    settings,
    start,
    train_loss,
    weights,
)
from tasks.test_clip import saved_clip

from nalora.runs import checkpoints
from nalora.runs.folder import RunFolder, read_jsonl
from nalora.runs.settings import check
from nalora.training.run import train

# Roundings of float64 through the worst of them, LoRA-GA's and LoRA-Pro's decompositions; PiSSA's is float32.
TOLERANCE = {"pissa": 1e-6}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "base"
    # The invariance is of the loss; dropout draws other numbers for every pass.
    tiny.saved_t5(f"{folder}-t5", dropout_rate=0.0, feed_forward_proj="gated-gelu")
    tiny.saved_bart(f"{folder}-bart")
    saved_clip(f"{folder}-clip")
    return tiny.saved_llama(folder, layers=1)


@pytest.fixture(scope="module")
def runs(base, tmp_path_factory):
    """Cases in one process, in two, and in two with their parameters sharded."""
    folder = tmp_path_factory.mktemp("runs")
    everything = [*(name for name in CASES if name not in SLOW), *QUICK]
    sharded = [name for name in SHARDED if name not in SLOW_SHARDED]
    finish(
        start(folder / "two", base, processes=2, what=json.dumps({"train": everything, "sharded": sharded})),
        start(folder / "one", base, processes=1, what=json.dumps({"train": everything})),
    )
    return folder


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in SLOW), *QUICK])
def test_two_processes_are_one(runs, name):
    two_are_one(runs, name)


@pytest.fixture(scope="module")
def other_runs(base, tmp_path_factory):
    """Those that are left of every method on every kind of model."""
    folder = tmp_path_factory.mktemp("others")
    names = [*(name for name in OTHERS if name not in QUICK), *SLOW]
    sharded = [name for name in SHARDED if name in SLOW_SHARDED]
    whole = [*names, *(name for name in sharded if name not in SLOW)]
    finish(
        start(folder / "two", base, processes=2, what=json.dumps({"train": names, "sharded": sharded})),
        start(folder / "one", base, processes=1, what=json.dumps({"train": whole})),
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(name for name in OTHERS if name not in QUICK), *SLOW])
def test_two_processes_are_one_for_every_kind_of_model(other_runs, name):
    two_are_one(other_runs, name)


def two_are_one(runs, name) -> None:
    case = (CASES | OTHERS)[name]
    one, two = runs / "one" / name, runs / "two" / name
    assert difference(weights(one), weights(two)) < TOLERANCE.get(name.partition(" ")[2] or name, 1e-9)
    assert losses(two) == pytest.approx(losses(one), rel=1e-6)  # in float32
    assert logged(two, "grad_norm") == pytest.approx(logged(one, "grad_norm"), rel=1e-6)
    assert train_loss(two) == pytest.approx(train_loss(one), rel=1e-6)
    first, second = (torch.load(runs / "two" / f"{name}.{rank}.pt", weights_only=False) for rank in (0, 1))
    assert alike(first, second)
    assert (first["controller"] is not None) == case["method"].startswith("na-lora")


def alike(one, other) -> bool:
    """Bit for bit, masks and averages included."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


@pytest.mark.parametrize("name", [name for name in SHARDED if name not in SLOW_SHARDED])
def test_dealt_out_parameters_are_whole_ones(runs, base, name):
    sharded_is_whole(runs, base, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHARDED if name in SLOW_SHARDED])
def test_dealt_out_parameters_are_whole_ones_for_the_other_methods(other_runs, base, name):
    sharded_is_whole(other_runs, base, name)


def sharded_is_whole(runs, base, name) -> None:
    folder = runs / "two" / "sharded" / name
    assert difference(weights(runs / "one" / name), weights(folder)) < TOLERANCE.get(name, 1e-9)
    last = RunFolder(folder).snapshot(10)
    if CASES[name]["method"] == "full":
        stock = transformers.AutoModelForCausalLM.from_pretrained(RunFolder(folder).model)
        assert isinstance(stock, transformers.LlamaForCausalLM)
        assert (last / "model.safetensors").is_file()
    else:
        stock = transformers.AutoModelForCausalLM.from_pretrained(base)
        peft.PeftModel.from_pretrained(stock, RunFolder(folder).adapter)
        snapshot = peft.PeftModel.from_pretrained(stock, last)
        assert snapshot.peft_config["default"].r == peft.PeftConfig.from_pretrained(RunFolder(folder).adapter).r


def unfinished(source: Path, target: Path) -> None:
    """A copy as a kill during the last checkpoint leaves it: it resumes from step 8."""
    shutil.copytree(source, target)
    folder = RunFolder(target)
    folder.result.unlink()
    (folder.checkpoints / "checkpoint-10" / "complete").unlink()
    options = yaml.safe_load(folder.settings.read_text())
    folder.settings.write_text(yaml.safe_dump(options | {"output": str(target)}))


def test_a_run_resumes_with_another_number_of_processes(runs, base, tmp_path):
    """And with the same number where parameters are dealt out: those checkpoints are FSDP's own."""
    dealt = [name for name in RESUMED if name in SHARDED]
    for name in RESUMED:
        unfinished(runs / "two" / name, tmp_path / "one" / name)
        unfinished(runs / "one" / name, tmp_path / "two" / name)
    for name in dealt:
        unfinished(runs / "two" / "sharded" / name, tmp_path / "two" / "sharded" / name)
    both = json.dumps({"resume": RESUMED, "resume sharded": dealt})
    finish(
        start(tmp_path / "two", base, processes=2, what=both),
        start(tmp_path / "one", base, processes=1, what=json.dumps({"resume": RESUMED})),
    )
    resumed = [(name, number) for name in RESUMED for number in ("one", "two")]
    for name, place in [*resumed, *((name, "two/sharded") for name in dealt)]:
        found = tmp_path / place / name
        assert difference(weights(runs / "one" / name), weights(found)) < TOLERANCE.get(name, 1e-9)
        assert len(losses(found)) == 10


@pytest.fixture
def job(base, tmp_path):
    """A run of two processes that has just logged its sixth step, and its settings."""
    given = settings(base) | {"steps": 40, "save_every": 4, "method": "na-lora", "output": str(tmp_path / "run")}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(given))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = subprocess.Popen(
        [*launch, "-m", "nalora.cli", "train", str(file)], env=environment, stderr=subprocess.PIPE, text=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while not any(row["step"] >= 6 for row in read_jsonl(RunFolder(given["output"]).metrics)):
            assert process.poll() is None, process.communicate()[1][-3000:]
            time.sleep(0.02)
        yield process, given
    finally:
        process.kill()


def goes_on_in_one_process(given) -> None:
    """The result is that of an uninterrupted run."""
    train(check(given), resume=True)
    train(check(given | {"output": given["output"] + "-whole"}))
    whole, resumed = weights(Path(given["output"] + "-whole")), weights(Path(given["output"]))
    assert max((tensor - resumed[name]).abs().max().item() for name, tensor in whole.items()) < 1e-6
    assert [row["step"] for row in read_jsonl(RunFolder(given["output"]).metrics)] == list(range(1, 41))


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_process_ends_the_job_and_one_process_resumes_it(job, lost):
    process, given = job
    os.kill(process_of(process.pid, lost), signal.SIGKILL)
    began = time.monotonic()
    _, message = process.communicate(timeout=60)
    assert process.returncode != 0
    assert time.monotonic() - began < 30
    (line,) = [line for line in message.splitlines() if line.startswith("nalora:")]
    assert f"process {1 - lost} of 2: found that another process of the job was lost after step" in line
    assert "--resume" in line
    folder = RunFolder(given["output"])
    assert not folder.result.exists()
    assert folder.latest_checkpoint() is not None
    goes_on_in_one_process(given)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_of_them_at_one_step(job):
    process, given = job
    os.kill(process_of(process.pid, 1), signal.SIGTERM)
    process.communicate(timeout=60)
    folder = RunFolder(given["output"])
    stopped = read_jsonl(folder.metrics)[-1]["step"]
    assert 6 <= stopped < 40
    checkpoint = folder.latest_checkpoint()
    assert checkpoint.name == f"checkpoint-{stopped}"
    assert all((checkpoint / f"rng_state_{rank}.pth").is_file() for rank in (0, 1))
    goes_on_in_one_process(given)


def process_of(launcher: int, rank: int) -> int:
    """The launcher's child with that rank."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            environment = (status.parent / "environ").read_bytes() if parent == launcher else b""
        except OSError:  # it ended meanwhile
            continue
        if f"RANK={rank}".encode() in environment.split(b"\0"):
            return int(status.parent.name)
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.slow
def test_the_first_process_decides_when_to_save_by_the_clock(base, tmp_path):
    """Clocks of processes differ; none waits for a checkpoint that the others do not write."""
    given = settings(base) | {"steps": 150, "save_minutes": 1e-6, "output": str(tmp_path / "run")}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(given))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "nalora.cli"]
    subprocess.run([*launch, "train", str(file)], env=environment, check=True, timeout=180)
    folder = RunFolder(given["output"])
    kept = checkpoints.marked_complete(folder.checkpoints)
    assert 1 <= len(kept) <= 2
    assert all(checkpoints.damage(each) is None and len(list(each.glob("rng_state_*.pth"))) == 2 for each in kept)
    assert not (folder.path / ".nalora-lock.json").exists()
