"""Score answers with the scorers of reasoning-gym in a separate process that no answer can stop or influence.

A scorer may take unlimited time or memory for an answer, so limits apply to every answer. Scorers that evaluate
answers also run in the sandbox for generated programs, although their evaluation runs no code
(`sandboxed.expressions`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import pickle
import re
import select
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nalora.tasks import sandbox

# Calls that run a text, take unlimited time for one (Fraction("1e999999999") never ends), or call the scorer of another
# family. `re.compile` does none of these.
_EVALUATES = re.compile(r"\b(eval|exec|(?<!re\.)compile|parse_expr|sympify|Fraction|(?<!def )score_answer)\(")
# The scorer process enforces the time limit; this covers its start, and a machine too busy to schedule it.
_GRACE_SECONDS = 60
# A scorer with sympy and numpy has 200 MB of address space before it starts; it needs no further processes.
LIMITS = sandbox.Limits(memory_bytes=1 << 30, processes=1, disk_bytes=1 << 20, files=16)


def evaluates_answers(dataset: Any) -> bool:
    """Return whether the scorer of a family may evaluate answers, judging by the source of its modules.

    16 families of 0.1.25 match, including a few that only evaluate their questions.
    """
    from reasoning_gym.dataset import ProceduralDataset

    modules = {parent.__module__ for parent in type(dataset).__mro__ if parent not in ProceduralDataset.__mro__}
    try:
        return any(_EVALUATES.search(inspect.getsource(sys.modules[name])) for name in modules)
    except OSError:  # without the source it might
        return True


@dataclass
class IsolatedScorer:
    """The scorer of one family of reasoning-gym."""

    where: str  # named in error messages
    family: str
    options: Mapping[str, Any]  # arguments of `create_dataset` for the family
    isolated: bool = True  # score in the sandbox for generated programs; False applies limits alone
    limits: sandbox.Limits = LIMITS  # for one answer

    def scores(self, answers: Sequence[tuple[str, Mapping[str, Any]]]) -> list[float]:
        """Return the family's scores of (answer, question) pairs, from 0 to 1; 0 if its scorer fails or takes too long.

        Score answers of a model one per call, so that they share no process. Raises a NALoRAError if this machine
        cannot isolate programs, or the scorer does not start or was killed twice.
        """
        # Every answer may take its whole time and is tried twice. No answer can end the scorer process itself, so
        # a process that was killed gives no information about the answer.
        for _ in range(2):
            line = self.process.request((self.family, dict(self.options), list(answers)), waits=2 * len(answers))
            if line is not None:
                break
        if line is None or line.startswith("setup: "):
            found = (line or "it ended without output").removeprefix("setup: ")
            raise sandbox.start_error(f"{self.where}, its scorer process", found, "a scorer that starts")
        scores: list[float] = json.loads(line)
        return scores

    @property
    def process(self) -> ScorerProcess:
        """The process for this family, shared with all families that have the same limits."""
        return _process(os.getpid(), self.isolated, self.limits)


class ScorerProcess:
    """A process with the scorers of all families; starts with the first request, and again after it has ended."""

    def __init__(self, isolated: bool, limits: sandbox.Limits) -> None:
        self.isolated, self.limits = isolated, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._request_lock = threading.Lock()

    def request(self, job: Any, *, waits: int) -> str | None:
        """Return the reply, or why the process did not start; None if none came within `waits` times the time limit."""
        with self._request_lock:
            line = None
            try:
                if self._process is None or self._process.poll() is not None:
                    self.close()
                    self._process = self._start()
                    first = self._read_line(self._process, 1)
                    if first != "ready":
                        return first
                content = pickle.dumps(job)
                assert self._process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # it may have written why it ended
                    self._process.stdin.write(struct.pack("<Q", len(content)) + content)
                    self._process.stdin.flush()
                line = self._read_line(self._process, waits)
                return line
            finally:
                # Without a reply, or if interrupted: the next answer must not get the score of this one.
                if line is None:
                    self.close()

    def close(self) -> None:
        """End the process if it is running."""
        process, self._process = self._process, None
        if process is not None:
            self._finalizer()

    def _start(self) -> subprocess.Popen[bytes]:
        backend = sandbox.check() if self.isolated else "unsafe"
        # Used by the backend "unsafe" alone: in a namespace the path refers to a different folder.
        folder = tempfile.TemporaryDirectory(prefix="nalora-")
        process = subprocess.Popen(
            sandbox.command(backend, "scorer", folder.name, self.limits, ("reasoning_gym",)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # One thread: threads of a linear algebra library would not survive a fork.
            env={"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            cwd="/",
            start_new_session=True,
        )
        self._finalizer = weakref.finalize(self, _end, process, folder)
        return process

    def _read_line(self, process: subprocess.Popen[bytes], waits: int) -> str | None:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], waits * self.limits.wall_seconds + _GRACE_SECONDS)[0]:
            return None
        line = process.stdout.readline().decode(errors="replace")
        return line.strip() if line.endswith("\n") else None


@functools.cache
def _process(process_id: int, isolated: bool, limits: sandbox.Limits) -> ScorerProcess:
    return ScorerProcess(isolated, limits)


def _end(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):  # of unsent input
                stream.close()
    folder.cleanup()
