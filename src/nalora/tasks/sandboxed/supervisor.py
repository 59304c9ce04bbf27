"""The sandbox from inside: isolate, fork the judge, keep the time and the output, kill everything, report.

Reads the job from standard input, its settings from the last argument; writes one JSON object to standard output.
It never holds the job itself, and stays outside the process namespace whose first process is the judge: when that is
killed the kernel kills every process in it, and `waitpid` returns when the last one is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import Any

from . import isolation
from .judge import judge

_TAIL = 4096


def main() -> None:
    """One run."""
    # Under bubblewrap this is the first process of the namespace, which no signal from inside reaches unless it has
    # a handler, and Python gives SIGINT one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    settings = json.loads(sys.argv[-1])
    way, limits, view = settings["way"], settings["limits"], settings["view"]
    try:
        isolation.enter(way, limits, view)
        isolation.die_with_parent()
        isolation.hide_memory()
    except OSError as error:
        return report(setup=str(error))
    verdict_in, verdict_out = os.pipe()
    output_in, output_out = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            judge(way, limits, view["folder"], verdict_out, output_out)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(verdict_out, f"{type(error).__name__}: {error}"[:500].encode())
            os._exit(1)
    os.close(verdict_out)
    os.close(output_out)
    os.close(0)
    verdict, output, why = watch(verdict_in, output_in, limits)
    isolation.stop(child, way)
    output += drain(output_in)
    ready, _, rest = verdict.partition(b"\n")
    if ready != b"ready":
        return report(setup=why or ready.decode(errors="replace") or "the judge died before it began")
    try:
        decided = json.loads(rest)
    except ValueError:
        decided = {"passed": False, "reason": why or "the judge died"}
    report(
        **decided,
        timed_out=not rest and why.startswith("timed out"),
        output=output[-_TAIL:].decode(errors="replace"),
    )


def watch(verdict_in: int, output_in: int, limits: dict[str, int]) -> tuple[bytes, bytes, str]:
    """(what the judge wrote, the tail of the output, why it has to be stopped: empty when it ended by itself)."""
    deadline = time.monotonic() + limits["wall_seconds"]
    verdict, output, written = b"", b"", 0
    waiting = [verdict_in, output_in]
    while verdict_in in waiting:
        left = deadline - time.monotonic()
        readable = select.select(waiting, [], [], max(left, 0))[0]
        if not readable:
            return verdict, output, f"timed out after {limits['wall_seconds']} s"
        for each in readable:
            content = os.read(each, 65536)
            if not content:
                waiting.remove(each)
            elif each == verdict_in:
                verdict += content
            else:
                written += len(content)
                output = (output + content)[-_TAIL:]
        if written > limits["output_bytes"]:
            return verdict, output, f"wrote more than {limits['output_bytes']:,} bytes"
        if left <= 0:  # output without an end is always readable
            return verdict, output, f"timed out after {limits['wall_seconds']} s"
    return verdict, output, ""


def drain(output_in: int) -> bytes:
    """What is left in the pipe, without waiting for those who might still hold its other end."""
    os.set_blocking(output_in, False)
    try:
        return os.read(output_in, 65536)
    except BlockingIOError:
        return b""


def report(**fields: Any) -> None:
    """The result, to whoever started this process."""
    os.write(1, json.dumps(fields).encode())
