"""Run the scorers of reasoning-gym in a separate process, which scores answers in a short-lived fork.

No answer is run as code (see `expressions`), so only the scorer can write a score. The fork limits time and memory:
`E+999999999999` is an answer that a scorer never finishes, and `1e999999999` one that takes all memory. A fork takes
7 ms on two cores, where a new interpreter with reasoning-gym would take two seconds, and whatever a scorer changes in
memory or in the temporary folder is gone before the next job.

A job is a family, its options, and answers with their questions. The reply is one line: the scores, or "setup:" and
why the family cannot be scored.
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
import struct
import sys
from collections.abc import Sequence
from typing import Any

from . import expressions, isolation

Answer = tuple[str, Any]

_NOT_FINITE = re.compile(r"(?<![a-z])(nan|inf|infinity)[ij]?(?![a-z])", re.IGNORECASE)


def main() -> None:
    """Isolate this process, load all families, then score jobs until standard input ends."""
    try:
        settings = isolation.enter()
        if settings["backend"] in ("root", "user"):
            # The next child is the first process of the new namespace, which can kill every other process in it.
            child = os.fork()
            if child:
                os.close(0)
                os.close(1)
                os.waitpid(child, 0)
                return
            isolation.die_with_parent()
        sys.path += settings["packages"]
        from reasoning_gym.factory import create_dataset
    except Exception as error:
        return _write_line(f"setup: {type(error).__name__}: {error}")
    expressions.replace_evaluation()
    _write_line("ready")
    scorers: dict[bytes, Any] = {}
    with open(0, "rb", closefd=False) as jobs:
        while len(header := jobs.read(8)) == 8:
            # Jobs come from the evaluation, which is trusted.
            family, options, answers = pickle.loads(jobs.read(struct.unpack("<Q", header)[0]))
            key = pickle.dumps((family, options))
            try:
                if key not in scorers:
                    scorers[key] = _scorer(create_dataset(family, **options))
            except Exception as error:
                _write_line(f"setup: {type(error).__name__}: {error}")
                continue
            _write_line(json.dumps(_scores(scorers[key], answers, settings)))


def _scorer(dataset: Any) -> Any:
    # sympy loads much of itself with the first answer: 80 ms that every fork would pay again.
    with contextlib.suppress(Exception):
        entry = dataset[0]
        dataset.score_answer(entry["answer"], entry)
    # Forks share the objects that exist now, without copying them to count references.
    gc.collect()
    gc.freeze()
    return dataset.score_answer


def _scores(score_answer: Any, answers: Sequence[Answer], settings: isolation.Settings) -> list[float]:
    """Return one score per answer, 0 for an answer that its own fork did not finish.

    Answers share a fork until one of them ends it or exceeds the time limit. That answer is repeated as the first of
    the next fork, where all of the limits apply to it alone.
    """
    scores: list[float] = []
    folder = settings["view"]["folder"]
    while len(scores) < len(answers):
        scores_in, scores_out = os.pipe()
        child = os.fork()
        if child == 0:
            _score_in_fork(score_answer, answers[len(scores) :], settings, scores_out)
        os.close(scores_out)
        new = _read_scores(scores_in, settings["limits"]["wall_seconds"])[: len(answers) - len(scores)]
        os.close(scores_in)
        isolation.stop(child, settings["backend"])
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
        scores += new or [0.0]
    return scores


def _score_in_fork(score_answer: Any, answers: Sequence[Answer], settings: isolation.Settings, scores_out: int) -> None:
    """Write the scores from a process without access to the jobs and other scores, and exit."""
    try:
        os.setsid()
        os.chdir(settings["view"]["folder"])
        null = os.open("/dev/null", os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        isolation.confine(settings["backend"], settings["limits"])
        isolation.hide_memory()
        for answer, entry in answers:
            try:
                score = 0.0 if is_not_finite(answer, entry["answer"]) else float(score_answer(answer, entry))
            except Exception:  # an answer that the scorer cannot read: prime_factorization raises ValueError for words
                score = 0.0
            os.write(scores_out, f"{score!r}\n".encode())
    except BaseException:  # also exit(): an answer without a score is wrong
        pass
    finally:
        os._exit(0)


def is_not_finite(answer: str, expected: Any) -> bool:
    """Return whether the answer is "nan" or "inf" where numbers are expected, with which no comparison is meaningful.

    complex_arithmetic of 0.1.25 gives min(1, exp(-nan)) = 1 for "nan".
    """
    numbers = isinstance(expected, str) and any(character.isdigit() for character in expected)
    return numbers and bool(_NOT_FINITE.search(answer)) and not _NOT_FINITE.search(expected)


def _read_scores(scores_in: int, seconds: float) -> list[float]:
    """Return the scores that the fork wrote before it ended or took more than the time for one score."""
    text = b""
    while select.select([scores_in], [], [], seconds)[0]:
        content = os.read(scores_in, 1 << 16)
        if not content:
            break
        text += content
    return [_checked(line) for line in text.split(b"\n")[:-1]]


def _checked(line: bytes) -> float:
    try:
        score = float(line)
    except ValueError:
        return 0.0
    return score if math.isfinite(score) and 0 <= score <= 1 else 0.0


def _write_line(line: str) -> None:
    os.write(1, line.replace("\n", " ").encode() + b"\n")
