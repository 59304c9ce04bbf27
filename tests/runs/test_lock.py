"""One process at a time in a folder: real processes that hold, lose and take over its lock."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import tiny
from forked import PROCESSES, until_there

from nalora import NALoRAError
from nalora.runs import lock as module
from nalora.runs import marker
from nalora.runs.contents import LOCK
from nalora.runs.folder import RunFolder
from nalora.runs.lock import FolderLock


@pytest.fixture
def folder(tmp_path):
    marker.mark(tmp_path / "run", "run")
    return tmp_path / "run"


def hold(folder, pipe) -> None:
    with FolderLock(folder):
        pipe.send("held")
        pipe.recv()


@pytest.fixture
def holder(folder):
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=hold, args=(folder, theirs))
    process.start()
    assert ours.recv() == "held"
    yield process, ours
    process.kill()
    process.join()


def owner(folder, **changes) -> dict:
    """Rewrite who holds the lock."""
    content = json.loads((folder / LOCK).read_text()) | changes
    (folder / LOCK).write_text(json.dumps(content))
    return content


def refused(folder, **options) -> str:
    before = (folder / LOCK).read_bytes()
    with pytest.raises(NALoRAError) as error, FolderLock(folder, **options):
        pass
    assert (folder / LOCK).read_bytes() == before
    return str(error.value)


def test_it_is_refused_while_its_owner_lives_and_free_afterwards(folder, holder):
    process, pipe = holder
    for take_over in (False, True):
        message = refused(folder, take_over=take_over)
        assert f"process {process.pid} on this host ({socket.gethostname()})" in message
        assert re.search(r"last heartbeat \d+ s ago \(\d{4}-\d\d-\d\d ", message)
    pipe.send("end")
    process.join()
    assert not (folder / LOCK).exists()
    with FolderLock(folder):
        assert (folder / LOCK).is_file()
    assert not (folder / LOCK).exists()


@pytest.mark.parametrize("reaped", [True, False], ids=["", "zombie"])
def test_a_killed_owner_s_lock_is_taken_over_at_once(folder, holder, reaped):
    process, _ = holder
    os.kill(process.pid, signal.SIGKILL)
    if reaped:
        process.join()
    else:
        time.sleep(0.3)
    assert (folder / LOCK).is_file()
    began = time.monotonic()
    with FolderLock(folder) as lock:
        assert lock.is_held()
    assert time.monotonic() - began < 0.3


def test_a_process_that_got_the_number_of_the_dead_owner_is_not_the_owner(folder, holder):
    owner(folder, pid=os.getpid(), started="12345")
    with FolderLock(folder) as lock:
        assert lock.is_held()


def test_another_host_s_lock_is_taken_over_only_on_request(folder, holder):
    content = owner(folder, host="node7", boot="another", pid_namespace="other")
    message = refused(folder)
    assert f"process {content['pid']} on host node7, last heartbeat" in message
    assert "--take-over" in message
    with FolderLock(folder, take_over=True) as lock:
        assert lock.is_held()


def test_an_unreadable_lock_is_taken_over_only_on_request(folder):
    (folder / LOCK).write_text("{")
    assert "cannot be read" in refused(folder)
    with FolderLock(folder, take_over=True):
        pass


def test_a_restarted_host_s_lock_is_taken_over(folder, holder, monkeypatch):
    owner(folder, boot="the boot before", pid_namespace="other")
    assert "--take-over" in refused(folder)  # its last heartbeat is later than the start of this host
    os.utime(folder / LOCK, (1e9, 1e9))
    monkeypatch.setattr(module, "_booted", lambda: 1e9 + 60)
    with FolderLock(folder):
        pass


def test_another_container_on_this_machine_is_seen_by_the_kernel_s_lock(folder, holder):
    process, _ = holder
    content = owner(folder, host="container", pid_namespace="pid:[1]")
    assert content["boot"], "Linux says which boot it is"
    assert "host container" in refused(folder)
    process.kill()
    process.join()
    with FolderLock(folder):
        pass


def test_its_heartbeat_is_seen_and_a_lost_lock_is_noticed(folder, monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.02)
    with FolderLock(folder) as lock:
        os.utime(folder / LOCK, (0, 0))
        until(lambda: time.time() - (folder / LOCK).stat().st_mtime < 10)
        lock.refuse_if_lost()
        content = owner(folder, host="node7", pid=77, token="another")
        until(lambda: lock.lost_to is not None)
        with pytest.raises(NALoRAError, match="process 77 on host node7 took the folder over"):
            lock.refuse_if_lost()
    assert json.loads((folder / LOCK).read_text()) == content, "the new owner's stays"


def until(holds) -> None:
    latest = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < latest
        time.sleep(0.01)


@pytest.mark.parametrize("flock", [True, False], ids=["", "without flock"])
def test_of_many_that_take_over_a_dead_owner_s_lock_one_gets_it(folder, holder, monkeypatch, flock):
    process, _ = holder
    process.kill()
    process.join()
    if not flock:
        monkeypatch.setattr(module, "fcntl", None)
    got, refusals, gate = [], [], threading.Barrier(6)

    def contend():
        lock = FolderLock(folder)
        gate.wait()
        try:
            lock.take()
            got.append(lock)
        except NALoRAError as error:
            refusals.append(str(error))

    threads = [threading.Thread(target=contend) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refusals)) == (1, 5)
    got[0].release()
    assert [entry.name for entry in folder.iterdir()] == [marker.MARKER]


def test_the_package_works_without_fcntl(folder):
    code = (
        "import sys; sys.modules['fcntl'] = None\n"
        "import nalora, nalora.cli, nalora.studies.engines\n"
        "from nalora.runs.lock import FolderLock, fcntl\n"
        "from pathlib import Path\n"
        "assert fcntl is None\n"
        f"with FolderLock(Path({str(folder)!r})): pass\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=environment, timeout=120)


def train_slowly(settings, started) -> None:
    """A run whose steps take a moment; the file appears with its first step."""
    import transformers

    from nalora.runs.settings import check
    from nalora.training import run as running

    class Slow(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            started.touch()
            time.sleep(0.2)

    make = running.make_trainer
    running.make_trainer = lambda *a: (t := make(*a)).add_callback(Slow()) or t
    try:
        running.train(check(settings), resume=RunFolder(settings["output"]).settings.is_file())
    except running.Interrupted:
        sys.exit(130)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
def test_a_second_train_is_refused_while_the_first_runs_and_resumes_after_it(tmp_path, how):
    from nalora.runs.settings import check
    from nalora.training.run import train

    settings = {
        "model": tiny.saved_llama(tmp_path / "base", layers=1), "task": "gym/chain_sum", "train_size": 21,
        "test_size": 4, "output": str(tmp_path / "run"), "steps": 60, "batch_size": 4, "device": "cpu",
        "save_minutes": 0, "log_every": 1,
    }  # fmt: skip
    process = PROCESSES.Process(target=train_slowly, args=(settings, tmp_path / "started"))
    process.start()
    until_there(tmp_path / "started")
    for resume in (True, False):
        with pytest.raises(NALoRAError, match=f"process {process.pid} on this host"):
            train(check(settings), resume=resume)
    os.kill(process.pid, how)
    process.join(60)
    assert process.exitcode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    folder = RunFolder(settings["output"])
    assert (folder.path / LOCK).exists() == (how == signal.SIGKILL)
    train(check(settings), resume=True)
    assert folder.result.is_file()
    steps = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]
    assert steps == list(range(1, 61)), "no row of the other process is in between"
    assert not (folder.path / LOCK).exists()
