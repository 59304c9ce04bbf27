"""Scoring answers with a scorer of reasoning-gym that evaluates them as Python, without letting them do anything.

`[__import__('os').system('…')]` is an answer that such a scorer runs, `exit()` one that ends its process, and
`9**9**9**9` one that it never finishes. So it runs in the sandbox for generated programs, and these are wrong. What an
answer shares a process with is its own scoring: one written to that end could still claim its own mark, and no other.
"""

from __future__ import annotations

import contextlib
import inspect
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
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
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

    16 families of 0.1.25 are found, among them a few that only evaluate their questions: too many cost 7 ms an answer.
    """
    from reasoning_gym.dataset import ProceduralDataset

    families = [each for each in type(dataset).__mro__ if each not in ProceduralDataset.__mro__]
    modules = {each.__module__ for each in families}
    try:
        return any(_EVALUATES.search(inspect.getsource(sys.modules[name])) for name in modules)
    except OSError:  # without its source nothing is known of it
        return True


class IsolatedScorer:
    """One family's scorer in a process of its own; started with the first answer, and again after one that ended it.

    Args:
        where: what an error names.
        family: of reasoning-gym.
        options: what `create_dataset` takes for it.
        unsafe: without isolation: limits alone.
        limits: what one answer may use.
    """

    def __init__(
        self,
        where: str,
        family: str,
        options: Mapping[str, Any],
        *,
        unsafe: bool = False,
        limits: sandbox.Limits = LIMITS,
    ) -> None:
        self.where, self.family, self.options = where, family, dict(options)
        self.unsafe, self.limits = unsafe, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = threading.Lock()

    def mark(self, answer: str, entry: Mapping[str, Any]) -> float:
        """The family's score, from 0 to 1; 0 for an answer that raises, ends, hangs or takes more than its limits.

        Raises:
            NALoRAError: this machine cannot isolate programs, or the scorer does not start.
        """
        with self._one_at_a_time:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._start()
            line = None
            try:
                line = self._ask((answer, entry))
            finally:
                # Stopped while it waited, or no mark came: the next answer gets a new process, not this one's mark.
                if line is None:
                    self.close()
            return 0.0 if line is None else float(line)

    def close(self) -> None:
        """End the process, if one runs."""
        process, self._process = self._process, None
        if process is not None:
            self._end_with_us()

    def _start(self) -> None:
        if not self.unsafe:
            sandbox.check()
        # Made for every way, used by "unsafe" alone: in a namespace the folder of this name is another one.
        folder = tempfile.TemporaryDirectory(prefix="nalora-")
        command = sandbox.command(
            "scorer", folder.name, limits=self.limits, unsafe=self.unsafe, packages=("reasoning_gym",)
        )
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
        line = self._ask((self.family, self.options))
        if line != "ready":
            self.close()
            raise NALoRAError(
                f"{self.where}, its scorer in the sandbox",
                found=(line or "it ended without a word").removeprefix("setup: "),
                expected="a scorer that starts: it evaluates what the model writes",
                fix="call nalora.tasks.sandbox.check(), which says what this machine lacks",
            )

    def _ask(self, job: Any) -> str | None:
        """The line that answers a job; None where none came."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return None
        jobs, output = process.stdin, process.stdout
        content = pickle.dumps(job)
        with contextlib.suppress(BrokenPipeError):  # it may have said why
            jobs.write(struct.pack("<Q", len(content)) + content)
            jobs.flush()
        if not select.select([output], [], [], self.limits.wall_seconds + _GRACE_SECONDS)[0]:
            return None
        line = output.readline().decode(errors="replace")
        return line.strip() if line.endswith("\n") else None


def _end(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):  # of what was still to be sent
                stream.close()
    folder.cleanup()
