"""A study on a real Ray cluster of two nodes: workers, a node and the study itself are killed, and nothing is lost."""

from __future__ import annotations

import collections
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import dummies
import pytest
import tiny
import yaml
from typer.testing import CliRunner

import nalora
from nalora.cli import app
from nalora.runs.folder import read_jsonl
from nalora.studies.conduct import conduct
from nalora.studies.engines import LocalEngine
from nalora.studies.job import Job, work
from nalora.studies.ray_engine import RayEngine
from nalora.studies.store import Store
from nalora.studies.study import parse

pytest.importorskip("ray")
STEPS, SAVE_EVERY, LOST_AT = 60, 10, 15


@pytest.fixture(scope="module")
def environment():
    """That of the cluster and of the studies: its own folder of sockets and logs, one thread, these very sources."""
    folder = tempfile.mkdtemp(prefix="ray-")  # short: a socket's path has at most 107 characters
    paths = dict.fromkeys(str(Path(each).absolute()) for each in [str(Path(__file__).parent), *sys.path] if each)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # what other tests take is not these runs' fault
        patch.setenv("RAY_health_check_period_ms", "1000")  # a lost node is noticed in seconds
        patch.delenv("RAY_ADDRESS", raising=False)
        yield
    shutil.rmtree(folder, ignore_errors=True)


NODE = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def cluster(environment):
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        started.add_node(**NODE)
        yield started
    finally:
        started.shutdown()


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """A study of three real runs."""
    return {
        "name": "small",
        "settings": {
            "model": tiny.saved_llama(tmp_path_factory.mktemp("model") / "base"),
            "task": "gym/chain_sum", "train_size": 80, "test_size": 6, "batch_size": 4, "rank": 4, "max_new_tokens": 4,
            "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            "steps": STEPS, "save_every": SAVE_EVERY, "log_every": 1, "device": "cpu",
        },
        "arms": {"na-lora": {"method": "na-lora", "apply_to": "update"}},
        "learning_rates": [1e-2], "validation_size": 8, "seeds": [0, 1, 2],
    }  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(described, environment, tmp_path_factory):
    """The results of every run of the study on the local engine."""
    store = tmp_path_factory.mktemp("local")
    return outcomes(store, conduct(parse(described), store, LocalEngine(2)))


def outcomes(store: Path, progress):
    assert progress.failed == {}
    return {key: outcome(store, key) for key in progress.results}


def outcome(store: Path, key: str):
    """All results of a run: its adapter bit for bit, its losses step by step, its answers."""
    folder = Store(store).folder(key)
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    result = Store(store).result(key)
    answers = [path.read_text() for path in sorted(folder.evaluations.rglob("outputs.jsonl"))]
    assert answers
    return (
        (folder.adapter / "adapter_model.safetensors").read_bytes(),
        [(row["step"], row["loss"], row["grad_norm"]) for row in rows],
        (result.losses, result.measures),
        answers,
    )


def marked(job: Job) -> None:
    """A run that records where it ran."""
    import ray

    dummies.pretend(job, 0.3)
    (Path(job.store) / f"{job.key}.mark").write_text(
        json.dumps([ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES"), os.getcwd()])
    )


def marks(store: Path):
    return zip(*(json.loads(path.read_text()) for path in store.glob("*.mark")), strict=True)


def dying_with_one_seed(job: Job) -> None:
    if job.settings["seed"] == 2:
        with (Path(job.store) / "starts").open("a") as file:
            file.write("start\n")
        os.kill(os.getpid(), signal.SIGKILL)
    marked(job)


def test_runs_are_distributed_and_failures_are_reported_as_by_the_local_engine(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = dummies.study(arms={"lora": {"method": "lora"}, "full": {"method": "full"}})
    progress = conduct(study, Path("store"), RayEngine(cluster.address, retries=1, do=dying_with_one_seed))
    assert len(progress.results) == 4
    lost = "its worker was lost (WorkerCrashedError), retried 1 time"
    assert collections.Counter(progress.failed.values()) == {"RuntimeError: out of memory": 3, lost: 1}
    for key, error in progress.failed.items():
        log = (tmp_path / "store" / f"{key}.log").read_text()
        assert ("the worker was lost" if error == lost else "Traceback") in log
    assert (tmp_path / "store" / "starts").read_text() == "start\n" * 2
    nodes, gpus, folders = marks(tmp_path / "store")
    assert len(set(nodes)) == 2
    assert not any(gpus)
    assert set(folders) == {str(tmp_path)}, "relative paths mean the same there"


def losing_workers_once(job: Job) -> None:
    """A run whose process, after the same step, is terminated, killed, or neither."""
    from nalora.training.callbacks import RunRecord

    how = {0: signal.SIGTERM, 1: signal.SIGKILL}.get(job.settings["seed"])
    done = Path(job.store) / f"{job.key}.steps"

    def on_step_end(self, args, state, control, **others):
        first = not done.is_file() or str(LOST_AT) not in done.read_text().split()
        with done.open("a") as file:
            file.write(f"{state.global_step} ")
        if first and how and state.global_step == LOST_AT:
            os.kill(os.getpid(), how)

    with mock.patch.object(RunRecord, "on_step_end", on_step_end):
        work(job)


def test_runs_of_lost_workers_resume_and_both_engines_give_the_same_numbers(cluster, described, unbroken, tmp_path):
    progress = conduct(parse(described), tmp_path, RayEngine(cluster.address, do=losing_workers_once))
    assert outcomes(tmp_path, progress) == unbroken
    (cell,) = progress.schedule.cells
    for seed, resumed_after in enumerate((LOST_AT, SAVE_EVERY, None)):
        key = progress.schedule.job(cell, 1e-2, seed).key
        steps = [int(each) for each in (tmp_path / f"{key}.steps").read_text().split()]
        again = [] if resumed_after is None else [*range(1, LOST_AT + 1)]
        assert steps == [*again, *range((resumed_after or 0) + 1, STEPS + 1)]
        assert ("the worker was lost" in (tmp_path / f"{key}.log").read_text()) == bool(again)


def full_or_stopped(job: Job) -> None:
    """With the best rate of one arm the disk is full, with that of the other the process is terminated."""
    from nalora.training.run import Interrupted

    method = job.settings["method"]
    if job.settings["learning_rate"] == dummies.BEST[method]:
        if method == "lora":
            raise Interrupted("stopped after step 3")
        raise OSError(errno.ENOSPC, "No space left on device")
    dummies.pretend(job)


@pytest.mark.slow
def test_neither_a_full_disk_nor_a_terminated_process_is_a_failed_run(cluster, tmp_path):
    with pytest.raises(nalora.NALoRAError, match="the disk is full"):
        conduct(dummies.study(), tmp_path, RayEngine(cluster.address, retries=1, do=full_or_stopped))
    study = dummies.study(arms={"lora": {"method": "lora"}})
    with pytest.raises(nalora.NALoRAError, match="whose process was terminated"):
        conduct(study, tmp_path, RayEngine(cluster.address, retries=1, do=full_or_stopped))
    assert not (tmp_path / "dummy.failures.jsonl").exists()
    assert any("(terminated); the run is started again, 1 of 1" in log.read_text() for log in tmp_path.glob("*.log"))
    progress = conduct(dummies.study(), tmp_path, RayEngine(cluster.address, do=dummies.pretend))
    assert len(progress.results) == progress.total == 10


def wanting_a_whole_gpu(job: Job) -> None:
    import ray
    import torch

    share = ray.get_runtime_context().get_assigned_resources()["GPU"]
    dummies.pretend(job, 0.5)
    if share < 1 or job.settings["learning_rate"] == 1e-4:
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.slow
def test_runs_that_shared_a_gpu_are_all_tried_again_and_one_that_had_it_alone_is_not(cluster, tmp_path):
    node = cluster.add_node(**NODE | {"num_cpus": 4, "num_gpus": 1})
    try:
        engine = RayEngine(cluster.address, per_gpu=2, do=wanting_a_whole_gpu)
        progress = conduct(dummies.study(seeds=[0]), tmp_path, engine)
    finally:
        cluster.remove_node(node)
    assert set(progress.failed.values()) == {"OutOfMemoryError: CUDA out of memory"}
    assert (len(progress.failed), len(progress.results)) == (2, 4)


@pytest.mark.slow
def test_a_killed_study_continues(cluster, described, unbroken, tmp_path):
    """kill -9 to `nalora study` when a run is done and another is past a checkpoint; then it is started again."""
    file, store = tmp_path / "small.yaml", tmp_path / "store"
    file.write_text(yaml.safe_dump(described))
    command = [sys.executable, "-m", "nalora.cli", "study", str(file), "--store", "store", "--engine", "ray"]
    command += ["--address", cluster.address]

    def rows(key: str) -> list[dict]:
        return read_jsonl(store / key / "metrics.jsonl")

    def results() -> dict[str, int]:
        return {path.parent.name: path.stat().st_mtime_ns for path in store.glob("*/result.json")}

    def half_done() -> list[str]:
        keys = {path.parents[2].name for path in store.glob("*/checkpoints/checkpoint-*/complete")}
        return sorted(keys - results().keys())

    with (tmp_path / "output").open("w") as output:
        driver = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 300
            # Not one that is almost at its end: it might get there while it is being stopped.
            while not (results() and any(len(rows(key)) < STEPS - 20 for key in half_done())):
                assert driver.poll() is None, (tmp_path / "output").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            driver.kill()
            driver.wait()
    time.sleep(1)
    finished, broken = results(), {key: rows(key) for key in half_done()}
    assert broken
    time.sleep(1)
    assert {key: rows(key) for key in broken} == broken, "Ray has stopped the workers"
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert results().keys() == unbroken.keys()
    assert finished.items() <= results().items(), "what was done was not done again"
    for key, before in broken.items():
        # Each row records the second at which it was written: these steps were not done again.
        assert rows(key)[:SAVE_EVERY] == before[:SAVE_EVERY]
    assert {name: outcome(store, name) for name in unbroken} == unbroken


@pytest.mark.slow
def test_a_node_that_dies_is_survived_and_the_clusters_gpus_are_seen(cluster, tmp_path):
    large = NODE | {"num_cpus": 4, "num_gpus": 1}
    nodes, most = [cluster.add_node(**large)], []

    def lose_it(progress):
        if len(nodes) == 1:
            most.append(len(progress.running))
            if len(progress.results) >= 2:
                cluster.remove_node(nodes[0], allow_graceful=False)
                nodes.append(cluster.add_node(**large))

    try:
        engine = RayEngine(cluster.address, per_gpu=2, do=marked)
        progress = conduct(dummies.study(seeds=[0]), tmp_path, engine, changed=lose_it)
    finally:
        cluster.remove_node(nodes[-1])
    assert progress.failed == {}
    assert len(progress.results) == progress.total == 6
    assert max(most) == 2, "two share the one GPU"
    assert any("NodeDiedError" in log.read_text() for log in tmp_path.glob("*.log"))
    found, gpus, _ = marks(tmp_path)
    assert len(set(found)) == 2
    assert set(gpus) == {"0"}


def test_errors_are_one_sentence(cluster, tmp_path, monkeypatch):
    def refused(*words: str) -> str:
        with pytest.raises(nalora.NALoRAError) as caught:
            RayEngine(**dict(zip(words[::2], words[1::2], strict=True)))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    began = time.monotonic()
    assert "127.0.0.1:1: found no connection" in refused("address", "127.0.0.1:1")
    assert "expected a running Ray cluster" in refused("address", "somewhere")
    assert time.monotonic() - began < 20
    assert "a node with 99 CPUs" in refused("address", cluster.address, "cpus", 99)
    assert "GiB" in refused("address", cluster.address, "memory", 10**6)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'nalora[ray]'" in refused()


def test_the_command_line_names_the_options_and_ray_is_not_imported_unless_needed():
    text = CliRunner().invoke(app, ["study", "--help"], env={"COLUMNS": "200"}).output
    for option in ("--engine", "--address", "--cpus", "--gpus", "--memory", "--retries", "--per-gpu"):
        assert option in text
    modules = "nalora.cli.studying, nalora.studies.conduct, nalora.studies.ray_engine"
    code = f"import sys, {modules}; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_without_an_address_a_cluster_lives_as_long_as_the_study(environment, tmp_path):
    before = heads()
    engine = RayEngine(do=dummies.pretend)
    assert len(heads() - before) == 1
    assert len(conduct(dummies.study(), tmp_path, engine).results) == 10
    assert heads() == before


def heads() -> set[str]:
    """The processes that are a cluster's head here."""
    return {path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if is_head(path)}


def is_head(path: Path) -> bool:
    try:
        return path.read_text().partition("\0")[0].endswith("gcs_server")
    except OSError:  # it has ended
        return False
