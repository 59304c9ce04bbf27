"""Scoring answers with the scorers of reasoning-gym in another process, which no answer can stop or talk to.

A scorer may take forever or all memory over an answer, so each has limits. Those that evaluate answers are also kept in
the sandbox for generated programs, though what evaluates them runs no code (`sandboxed.expressions`).
"""

from __future__ import annotations

import contextlib
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

from nalora.errors import NALoRAError
from nalora.tasks import sandbox

# What runs a text or takes its time from it (a Fraction of "1e999999999" is never done), or leaves it to the scorer of
# another family. `re.compile` does neither.
_EVALUATES = re.compile(r"\b(eval|exec|(?<!re\.)compile|parse_expr|sympify|Fraction|(?<!def )score_answer)\(")
# The scorer keeps the time itself; this is for its start, and for a machine so busy that it does not get to.
_GRACE_SECONDS = 60
# A scorer with sympy and numpy has 200 MB of address space before it begins; it needs no processes of its own.
LIMITS = sandbox.Limits(memory_bytes=1 << 30, processes=1, disk_bytes=1 << 20, files=16)


def evaluates_answers(dataset: Any) -> bool:
    """Whether the scorer of a family may evaluate answers, as far as the source of its modules shows.

    16 families of 0.1.25 are found, among them a few that only evaluate their questions.
    """
    from reasoning_gym.dataset import ProceduralDataset

    families = [each for each in type(dataset).__mro__ if each not in ProceduralDataset.__mro__]
    modules = {each.__module__ for each in families}
    try:
        return any(_EVALUATES.search(inspect.getsource(sys.modules[name])) for name in modules)
    except OSError:  # without its source nothing is known of it
        return True


@dataclass
class IsolatedScorer:
    """One family's scorer.

    Args:
        where: what an error names.
        family: of reasoning-gym.
        options: what `create_dataset` takes for it.
        isolated: in the sandbox for generated programs; else with limits alone.
        limits: what one answer may use.
    """

    where: str
    family: str
    options: Mapping[str, Any]
    isolated: bool = True
    limits: sandbox.Limits = LIMITS

    def marks(self, answers: Sequence[tuple[str, Mapping[str, Any]]]) -> list[float]:
        """The family's scores of answers to questions, from 0 to 1; 0 for what its scorer refuses or cannot finish.

        An answer of a model is best given alone: then it shares no process with another.

        Raises:
            NALoRAError: this machine cannot isolate programs, or the scorer does not start or was killed twice.
        """
        # Each may take its whole time, and is tried twice. No answer can end the process itself: where it was killed,
        # that says nothing of the answer.
        for _ in range(2):
            line = self.process.ask((self.family, dict(self.options), list(answers)), waits=2 * len(answers))
            if line is not None:
                break
        if line is None or line.startswith(_SETUP):
            raise _refusal(self.where, line)
        marks: list[float] = json.loads(line)
        return marks

    @property
    def process(self) -> ScorerProcess:
        """The process that serves this family, together with all others that have the same limits."""
        key = (os.getpid(), self.isolated, self.limits)
        with _starting:
            if key not in _processes:
                _processes[key] = ScorerProcess(self.where, isolated=self.isolated, limits=self.limits)
            return _processes[key]


class ScorerProcess:
    """A process with all scorers; started with the first answer, and again after it was ended.

    Args:
        where: what an error names.
        isolated: in the sandbox for generated programs; else with limits alone.
        limits: what one answer may use.
    """

    def __init__(self, where: str, *, isolated: bool, limits: sandbox.Limits) -> None:
        self.where, self.isolated, self.limits = where, isolated, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = threading.Lock()

    def ask(self, job: Any, *, waits: int) -> str | None:
        """The line that answers a job; None where none came in so many times the limit.

        Raises:
            NALoRAError: this machine cannot isolate programs, or the process does not start.
        """
        with self._one_at_a_time:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._start()
            line = None
            try:
                self._send(job)
                line = self._line(waits)
            finally:
                # Stopped while it waited, or no line came: the next answer gets a new process, not this one's mark.
                if line is None:
                    self.close()
            return line

    def close(self) -> None:
        """End the process, if one runs."""
        process, self._process = self._process, None
        if process is not None:
            self._end_with_us()

    def _start(self) -> None:
        way = sandbox.check() if self.isolated else "unsafe"
        # Made for every way, used by "unsafe" alone: in a namespace the folder of this name is another one.
        folder = tempfile.TemporaryDirectory(prefix="nalora-")
        command = sandbox.command(way, "scorer", folder.name, self.limits, ("reasoning_gym",))
        # One thread: those of a linear algebra library would not live through a fork.
        environment = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
        self._end_with_us = weakref.finalize(self, _end, self._process, folder)
        line = self._line(1)
        if line != "ready":
            self.close()
            raise _refusal(self.where, line)

    def _send(self, job: Any) -> None:
        if self._process is not None and self._process.stdin is not None:
            content = pickle.dumps(job)
            with contextlib.suppress(BrokenPipeError):  # it may have said why
                self._process.stdin.write(struct.pack("<Q", len(content)) + content)
                self._process.stdin.flush()

    def _line(self, waits: int) -> str | None:
        output = self._process.stdout if self._process is not None else None
        if output is None or not select.select([output], [], [], waits * self.limits.wall_seconds + _GRACE_SECONDS)[0]:
            return None
        line = output.readline().decode(errors="replace")
        return line.strip() if line.endswith("\n") else None


_SETUP = "setup: "
_processes: dict[tuple[int, bool, sandbox.Limits], ScorerProcess] = {}
_starting = threading.Lock()


def _refusal(where: str, line: str | None) -> NALoRAError:
    found = (line or "it ended without a word").removeprefix(_SETUP)
    return sandbox.refusal(f"{where}, its scorer in another process", found, "a scorer that starts")


def _end(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):  # of what was still to be sent
                stream.close()
    folder.cleanup()
