"""SIGTERM and SIGHUP end a study's workers with a checkpoint of their runs; nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import dummies
import pytest
from dummies import Instantly

from nalora.studies.conduct import conduct
from nalora.studies.signals import StoppedBySignal, StopSignals

# A study whose runs continue until they are terminated. Torch is imported once, for the workers as well.
STUDY = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
import torch
import dummies
from nalora.studies.conduct import conduct
from nalora.studies.engines import LocalEngine
from nalora.studies.job import log_of
from nalora.studies.signals import StoppedBySignal
from nalora.training.run import Interrupted

def train_until_terminated(job):
    signals = []
    signal.signal(signal.SIGTERM, lambda *_: signals.append(True))
    log_of(job).with_suffix(".pid").write_text(str(os.getpid()))
    while not signals:
        time.sleep(0.01)
    time.sleep(0.3)
    log_of(job).with_suffix(".saved").touch()
    raise Interrupted("stopped after step 3")

fork = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda method: fork
for line in sys.stdin:
    store, how = line.split()
    child = os.fork()
    if not child:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN if how == "nohup" else signal.SIG_DFL)
        print(os.getpid(), flush=True)
        try:
            conduct(dummies.study(), Path(store), LocalEngine(2, do=train_until_terminated))
        except StoppedBySignal as stop:
            os._exit(128 + stop.number)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture
def sittings(tmp_path):
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    command = [sys.executable, "-c", STUDY]
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, text=True, bufsize=1,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # fmt: skip
        yield process
        process.stdin.close()


def begin(sittings, store, how="plain"):
    """Start a study; its process, and those of its two workers once both are at a run."""
    sittings.stdin.write(f"{store} {how}\n")
    study, latest = int(sittings.stdout.readline()), time.monotonic() + 60
    while len(pids := [int(path.read_text() or 0) for path in store.glob("*.pid")]) < 2 or 0 in pids:
        assert time.monotonic() < latest
        time.sleep(0.01)
    return study, pids


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_signal_ends_the_workers_after_a_checkpoint_and_leaves_no_orphan(tmp_path, sittings):
    """To the study alone, as `kill` sends it, and to all of its processes, as a terminal or a service manager does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        for place, send in enumerate((os.kill, os.killpg)):
            store = tmp_path / f"{number}-{place}"
            study, workers = begin(sittings, store)
            send(study, number)
            assert int(sittings.stdout.readline()) == 128 + number
            assert not any(map(is_alive, workers))
            assert len(list(store.glob("*.saved"))) == 2, "each run wrote a checkpoint"
            assert not (store / "dummy.failures.jsonl").exists()
            assert len(conduct(dummies.study(), store, Instantly()).results) == 10, "the study continues"
    # Under nohup a study outlives its terminal.
    study, workers = begin(sittings, tmp_path / "nohup", "nohup")
    os.killpg(study, signal.SIGHUP)
    time.sleep(2.5)  # longer than the study waits before it looks again
    assert all(map(is_alive, [study, *workers]))
    os.kill(study, signal.SIGTERM)
    assert int(sittings.stdout.readline()) == 128 + signal.SIGTERM


class Signalling(Instantly):
    """Sends SIGTERM to its own process while jobs are handed to it."""

    def submit(self, job):
        super().submit(job)
        if len(self.submitted) == 2:
            signal.raise_signal(signal.SIGTERM)


def test_the_first_signal_starts_nothing_new_and_handlers_are_put_back(tmp_path):
    before, engine = signal.getsignal(signal.SIGTERM), Signalling()
    seen = []
    with pytest.raises(StoppedBySignal) as stopped:
        conduct(dummies.study(), tmp_path, engine, changed=lambda progress: seen.append(progress.stopping))
    assert (stopped.value.number, len(engine.submitted), seen[-1]) == (signal.SIGTERM, 2, True)
    assert signal.getsignal(signal.SIGTERM) == before
    assert len(conduct(dummies.study(), tmp_path, Instantly()).results) == 10


def test_a_second_signal_does_not_wait(request):
    # Under nohup the tests ignore SIGHUP, as a study would.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGHUP)
        assert signals.received == signal.SIGHUP
        with pytest.raises(StoppedBySignal, match="stopped by SIGTERM"):
            signal.raise_signal(signal.SIGTERM)


def test_elsewhere_than_in_the_main_thread_signals_keep_their_meaning():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def listen():
        with StopSignals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [before]
