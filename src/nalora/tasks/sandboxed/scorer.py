"""The scorers of reasoning-gym in a process of their own: each answer is scored by a fork that dies with it.

No answer is run as code (see `expressions`), so the only hand that writes a mark is the scorer's. The fork is for time
and memory: `E+999999999999` is an answer that a scorer never finishes, and `1e999999999` one that takes all memory.
A fork costs 7 ms on two cores where a fresh interpreter with reasoning-gym would cost two seconds, and whatever
a scorer changes, in memory or in the temporary folder, is gone before the next job.

Each job is a family, its options, and answers with their questions; it is answered by one line: the marks, or "setup:"
and what keeps the family from being scored.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import pickle
import re
import select
import shutil
import signal
import struct
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

from . import expressions, isolation

Answer = tuple[str, Any]

_NOT_FINITE = re.compile(r"(?<![a-z])(nan|inf|infinity)[ij]?(?![a-z])", re.IGNORECASE)


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
    """Load all families, then score one answer after another."""
    try:
        from reasoning_gym.factory import create_dataset
    except Exception as error:
        return _say(f"setup: {type(error).__name__}: {error}")
    expressions.replace_evaluation()
    _say("ready")
    scorers: dict[bytes, Any] = {}
    with open(0, "rb", closefd=False) as jobs:
        while True:
            try:
                family, options, answers = _next(jobs)
            except EOFError:
                return
            key = pickle.dumps((family, options))
            if key not in scorers:
                try:
                    scorers[key] = _scorer(create_dataset(family, **options))
                except Exception as error:
                    _say(f"setup: {type(error).__name__}: {error}")
                    continue
            _say(json.dumps(_marks(scorers[key], answers, way, limits, folder)))


def _marks(
    score_answer: Any, answers: Sequence[Answer], way: str, limits: isolation.Limits, folder: str
) -> list[float]:
    """One mark for each answer: 0 for one that a fork of its own did not finish.

    Several answers share a fork, until one of them ends it or its time: that one is tried again as the first of the
    next fork, where it has all of the limits.
    """
    marks: list[float] = []
    while len(marks) < len(answers):
        marks_in, marks_out = os.pipe()
        child = os.fork()
        if child == 0:
            _score(score_answer, answers[len(marks) :], way, limits, folder, marks_out)
        os.close(marks_out)
        new = _read_marks(marks_in, limits["wall_seconds"])[: len(answers) - len(marks)]
        os.close(marks_in)
        isolation.stop(child, way)
        _empty(folder)
        marks += new or [0.0]
    return marks


def _scorer(dataset: Any) -> Any:
    # sympy loads much of itself with the first answer: 80 ms that every fork would pay again.
    with contextlib.suppress(Exception):
        own = dataset[0]
        dataset.score_answer(own["answer"], own)
    # What is there now stays shared with the forks, which need not copy it to count references.
    gc.collect()
    gc.freeze()
    return dataset.score_answer


def _score(
    score_answer: Any, answers: Sequence[Answer], way: str, limits: isolation.Limits, folder: str, marks_out: int
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
        for answer, entry in answers:
            try:
                mark = 0.0 if is_no_number(answer, entry["answer"]) else float(score_answer(answer, entry))
            except Exception:  # what a scorer cannot read is wrong: prime_factorization raises ValueError at words
                mark = 0.0
            os.write(marks_out, f"{mark!r}\n".encode())
    except BaseException:  # also exit(): without a mark it is wrong
        pass
    finally:
        os._exit(0)


def is_no_number(answer: str, expected: Any) -> bool:
    """Whether "nan" or "inf" is answered where numbers are expected: no comparison with them says anything.

    complex_arithmetic of 0.1.25 gives min(1, exp(-nan)) = 1 for "nan".
    """
    numbers = isinstance(expected, str) and any(each.isdigit() for each in expected)
    return numbers and bool(_NOT_FINITE.search(answer)) and not _NOT_FINITE.search(expected)


def _read_marks(marks_in: int, seconds: float) -> list[float]:
    """What the fork wrote before it ended, or the time for one mark did."""
    text = b""
    while select.select([marks_in], [], [], seconds)[0]:
        content = os.read(marks_in, 1 << 16)
        if not content:
            break
        text += content
    return [_checked(line) for line in text.split(b"\n")[:-1]]


def _checked(line: bytes) -> float:
    try:
        mark = float(line)
    except ValueError:
        return 0.0
    return mark if math.isfinite(mark) and 0 <= mark <= 1 else 0.0


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
