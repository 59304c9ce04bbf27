"""The first process of a run: isolate, fork the test harness, enforce time and output limits, kill all, report.

Reads its settings from the last argument and writes one JSON object to standard output; the harness reads the job from
standard input, so the supervisor never holds it. With namespaces it stays outside the process namespace whose first
process is the harness: when that is killed, the kernel kills every process in it, and `waitpid` returns after the last.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from typing import Any

from . import isolation
from .harness import run_tests

_TAIL = 4096


def main() -> None:
    """Run one program with its tests."""
    try:
        settings = isolation.enter()
        isolation.die_with_parent()
    except OSError as error:
        return report(setup=str(error))
    backend, limits = settings["backend"], settings["limits"]
    verdict_in, verdict_out = os.pipe()
    output_in, output_out = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run_tests(backend, limits, settings["view"]["folder"], verdict_out, output_out)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(verdict_out, f"{type(error).__name__}: {error}"[:500].encode())
            os._exit(1)
    for descriptor in (verdict_out, output_out, 0):
        os.close(descriptor)
    verdict, output, stopped = watch(verdict_in, output_in, limits)
    isolation.stop(child, backend)
    # What is left in the pipe, without waiting for processes that still hold its other end.
    os.set_blocking(output_in, False)
    with contextlib.suppress(BlockingIOError):
        output += os.read(output_in, 65536)
    ready, _, result = verdict.partition(b"\n")
    if ready != b"ready":
        return report(setup=stopped or ready.decode(errors="replace") or "the test harness died before it started")
    try:
        fields = json.loads(result)
    except ValueError:
        fields = {"passed": False, "reason": stopped or "the test harness died"}
    timed_out = not result and stopped.startswith("timed out")
    report(**fields, timed_out=timed_out, output=output[-_TAIL:].decode(errors="replace"))


def watch(verdict_in: int, output_in: int, limits: isolation.Limits) -> tuple[bytes, bytes, str]:
    """Return what the harness wrote, the end of the output, and why it must be stopped ("" if it ended by itself)."""
    deadline = time.monotonic() + limits["wall_seconds"]
    verdict, output, written = b"", b"", 0
    pipes = [verdict_in, output_in]
    while verdict_in in pipes:
        left = deadline - time.monotonic()
        readable = select.select(pipes, [], [], max(left, 0))[0]
        for pipe in readable:
            content = os.read(pipe, 65536)
            if not content:
                pipes.remove(pipe)
            elif pipe == verdict_in:
                verdict += content
            else:
                written += len(content)
                output = (output + content)[-_TAIL:]
        if written > limits["output_bytes"]:
            return verdict, output, f"wrote more than {limits['output_bytes']:,} bytes"
        if not readable or left <= 0:  # endless output is always readable
            return verdict, output, f"timed out after {limits['wall_seconds']} s"
    return verdict, output, ""


def report(**fields: Any) -> None:
    """Write the result to the process that started this one."""
    os.write(1, json.dumps(fields).encode())
