"""A scorer that evaluates what a model wrote, kept in the sandbox: each answer is scored by a fork that dies with it.

The first job names a family of reasoning-gym; each later one is an answer and its question, and is answered by one line
with the mark. A fork costs 7 ms on two cores where a fresh interpreter with the family would cost a second. Whatever an
answer changes, in memory or in the temporary folder, is gone before the next one comes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import pickle
import select
import shutil
import signal
import struct
import sys
import time
from typing import Any, BinaryIO

from . import isolation

_LONGEST_MARK = 64


def main() -> None:
    """Isolate, then serve until the input ends."""
    # Not to be interrupted from inside its namespace, see the supervisor.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    settings = json.loads(sys.argv[-1])
    way, limits, view, packages = (settings[name] for name in ("way", "limits", "view", "packages"))
    try:
        isolation.enter(way, limits, view)
        isolation.hide_memory()
    except OSError as error:
        return _say(f"setup: {error}")
    if way in ("root", "user"):
        # The next child is the first process of the new namespace: everything in it can be killed from there.
        child = os.fork()
        if child:
            os.close(0)
            os.close(1)
            os.waitpid(child, 0)
            return
        isolation.die_with_parent()
    sys.path += packages
    serve(way, limits, view["folder"])


def serve(way: str, limits: isolation.Limits, folder: str) -> None:
    """Load the family, then score one answer after another."""
    with open(0, "rb", closefd=False) as jobs:
        try:
            from reasoning_gym.factory import create_dataset

            family, options = _next(jobs)
            dataset = create_dataset(family, **options)
            score_answer, own = dataset.score_answer, dataset[0]
        except Exception as error:
            return _say(f"setup: {type(error).__name__}: {error}")
        # sympy loads much of itself with the first answer: 80 ms that every fork would pay again.
        with contextlib.suppress(Exception):
            score_answer(own["answer"], own)
        # What is there now stays shared with the forks, which need not copy it to count references.
        gc.collect()
        gc.freeze()
        _say("ready")
        while True:
            try:
                answer, entry = _next(jobs)
            except EOFError:
                return
            mark_in, mark_out = os.pipe()
            child = os.fork()
            if child == 0:
                _score(score_answer, answer, entry, way, limits, folder, mark_out)
            os.close(mark_out)
            mark = _read_mark(mark_in, limits["wall_seconds"])
            os.close(mark_in)
            _stop(child, way)
            _empty(folder)
            _say(repr(mark))


def _score(
    score_answer: Any, answer: str, entry: Any, way: str, limits: isolation.Limits, folder: str, mark_out: int
) -> None:
    """In the fork: no way back to the jobs or the marks of others, and no end but this one."""
    try:
        os.setsid()
        os.chdir(folder)
        nothing = os.open("/dev/null", os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        isolation.confine(way, limits)
        isolation.hide_memory()
        os.write(mark_out, repr(float(score_answer(answer, entry))).encode())
    except BaseException:  # also exit(): without a mark it is wrong
        pass
    finally:
        os._exit(0)


def _read_mark(mark_in: int, seconds: float) -> float:
    """What the fork wrote before it ended or its time did; 0 where that is no mark."""
    deadline = time.monotonic() + seconds
    text = b""
    while len(text) <= _LONGEST_MARK and select.select([mark_in], [], [], max(deadline - time.monotonic(), 0))[0]:
        content = os.read(mark_in, _LONGEST_MARK)
        if not content:
            break
        text += content
    try:
        mark = float(text)
    except ValueError:
        return 0.0
    return mark if math.isfinite(mark) and 0 <= mark <= 1 else 0.0


def _stop(child: int, way: str) -> None:
    """Kill the fork and everything that it started; wait until all of it is gone."""
    if way == "unsafe":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)
    # For the first process of a namespace -1 means everyone else in it; for any other it would mean all of the user's.
    if way != "unsafe" and os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _empty(folder: str) -> None:
    for each in os.scandir(folder):
        if each.is_dir(follow_symlinks=False):
            shutil.rmtree(each.path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(each.path)


def _next(jobs: BinaryIO) -> Any:
    """The next job; it comes from the evaluation, which is trusted."""
    header = jobs.read(8)
    if len(header) < 8:
        raise EOFError
    return pickle.loads(jobs.read(struct.unpack("<Q", header)[0]))


def _say(line: str) -> None:
    os.write(1, line.replace("\n", " ").encode() + b"\n")
