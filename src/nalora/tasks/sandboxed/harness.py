"""Run one program against its tests inside the sandbox, in three processes: supervisor, test harness and program.

The supervisor isolates, enforces the limits on time and output, kills everything and writes one JSON object to standard
output. With namespaces it stays outside the process namespace whose first process is the harness: when that is killed,
the kernel kills every process in it, and `waitpid` returns after the last one.

Only the harness holds the tests and the values they expect. The program receives one call after the other and returns
plain data, so nothing it patches, prints, returns or exits with can make a wrong value equal the right one, and the
pipe for the verdict is closed in its process before its first line runs.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import json
import operator
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
import types
from typing import Any, NoReturn

from . import isolation, values

# No unit test needs a longer reply; this bounds the memory of the harness.
_LONGEST_REPLY = 16 << 20
_LONGEST_REASON = 500
_PROGRAM_FD = 3
_TAIL = 4096


def main() -> None:
    """Run one program with its tests."""
    try:
        settings = isolation.enter()
        isolation.die_with_parent()
    except OSError as error:
        return _report(setup=str(error))
    backend, limits = settings["backend"], settings["limits"]
    verdict_in, verdict_out = os.pipe()
    output_in, output_out = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _run_tests(backend, limits, settings["view"]["folder"], verdict_out, output_out)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(verdict_out, f"{type(error).__name__}: {error}"[:500].encode())
            os._exit(1)
    for descriptor in (verdict_out, output_out, 0):
        os.close(descriptor)
    verdict, output, stopped = _watch(verdict_in, output_in, limits)
    isolation.stop(child, backend)
    # What is left in the pipe, without waiting for processes that still hold its other end.
    os.set_blocking(output_in, False)
    with contextlib.suppress(BlockingIOError):
        output += os.read(output_in, 65536)
    ready, _, result = verdict.partition(b"\n")
    if ready != b"ready":
        return _report(setup=stopped or ready.decode(errors="replace") or "the test harness died before it started")
    try:
        fields = json.loads(result)
    except ValueError:
        fields = {"passed": False, "reason": stopped or "the test harness died"}
    timed_out = not result and stopped.startswith("timed out")
    _report(**fields, timed_out=timed_out, output=output[-_TAIL:].decode(errors="replace"))


def _watch(verdict_in: int, output_in: int, limits: isolation.Limits) -> tuple[bytes, bytes, str]:
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


def _report(**fields: Any) -> None:
    os.write(1, json.dumps(fields).encode())


def _run_tests(backend: str, limits: isolation.Limits, folder: str, verdict: int, output: int) -> NoReturn:
    """Start the program in a child process, run the tests on it, write the verdict and exit.

    The program's working directory is the writable `folder`, and it prints to the pipe `output`. The pipe `verdict`
    gets "ready", then a JSON object with passed and reason.
    """
    os.setsid()
    os.chdir(folder)
    os.dup2(output, 1)
    os.dup2(output, 2)
    isolation.confine(backend, limits)
    isolation.hide_memory()
    isolation.die_with_parent()
    ours, theirs = socket.socketpair()
    # Before the job is read: the program's memory starts as a copy of this process's and must not hold the tests.
    program = os.fork()
    if program == 0:
        _become_program(theirs)
    theirs.close()
    # Fails if the supervisor died before `die_with_parent`, so that nobody would enforce the time limit.
    os.write(verdict, b"ready\n")
    with open(0, "rb") as stdin:
        job = json.load(stdin)
    tests = job["tests"]
    try:
        channel = _Channel(ours)
        channel.request("load", job["program"])
        names: dict[str, Any] = {"__name__": "tests"}
        exec(compile(job["prelude"], "prelude", "exec"), names)
        for entry in job["entries"]:
            names[entry] = channel.request("name", entry)
        exec(compile(tests, "tests", "exec"), names)
        if channel.ended:  # and a bare `except:` of the tests caught the exception
            raise _ProgramEnded
        passed, reason = True, "passed"
    except _ProgramEnded:
        passed, reason = False, _how_it_ended(program, limits)
    except BaseException as error:
        passed, reason = False, _describe(error, tests)
    os.write(verdict, json.dumps({"passed": passed, "reason": reason}).encode())
    os._exit(0)


class _ProgramEnded(BaseException):
    """The program sends no more replies; not an Exception, which a test may expect from the program."""


class _Channel:
    """Requests to the program, one at a time; `ended` is True once a reply is missing."""

    def __init__(self, connection: socket.socket) -> None:
        self.stream = connection.makefile("rwb")
        self.ended = False

    def request(self, operation: str, *operands: Any) -> Any:
        try:
            _send(self.stream, [operation, [values.encode(operand, _reference) for operand in operands]])
            reply = _receive(self.stream)
        except OSError:
            reply = None
        if reply is None:
            self.ended = True
            raise _ProgramEnded
        kind, content = reply
        if kind == "value":
            return values.decode(content, lambda number: _Remote(self, number))
        name, text = content
        exception = getattr(builtins, str(name), None)
        error: Exception = RuntimeError(f"{name}: {text}")
        if isinstance(exception, type) and issubclass(exception, Exception):
            with contextlib.suppress(TypeError):  # some exceptions need more than a text
                error = exception(str(text))
        raise error


class _Remote:
    """An object of the program that is not plain data: usable, and equal to nothing but itself."""

    def __init__(self, channel: _Channel, number: int) -> None:
        self.__dict__.update(_channel=channel, _number=int(number))

    def _use(self, operation: str, *operands: Any) -> Any:
        return self._channel.request(operation, self, *operands)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._use("call", arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._use("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._use("setattr", name, value)

    def __bool__(self) -> bool:
        return True  # Python would otherwise call len(), which not every object has

    __iter__ = functools.partialmethod(_use, "iter")
    __next__ = functools.partialmethod(_use, "next")
    __len__ = functools.partialmethod(_use, "len")
    __getitem__ = functools.partialmethod(_use, "getitem")


def _reference(value: Any) -> int:
    if not isinstance(value, _Remote):
        raise TypeError(f"a test passes a {type(value).__name__} to the program, which is not plain data")
    number: int = value._number
    return number


def _become_program(connection: socket.socket) -> NoReturn:
    os.dup2(connection.fileno(), _PROGRAM_FD)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    # Also closes the pipe for the verdict. The job is read from descriptor 0, which is /dev/null here.
    os.closerange(_PROGRAM_FD + 1, 4096)
    os.environ.clear()
    sys.argv[:] = ["program.py"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stream = socket.socket(fileno=_PROGRAM_FD).makefile("rwb")
    module = sys.modules["program"] = types.ModuleType("program")
    objects: list[Any] = []

    def refer(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def name(text: str) -> Any:
        if text not in module.__dict__:
            raise NameError(f"name {text!r} is not defined")
        return module.__dict__[text]

    operations = {
        "load": lambda source: exec(compile(source, "program.py", "exec"), module.__dict__),
        "call": lambda function, arguments, named: function(*arguments, **named),
        **{function.__name__: function for function in (name, operator.getitem, getattr, setattr, iter, next, len)},
    }
    while (request := _receive(stream)) is not None:
        try:
            operands = [values.decode(operand, objects.__getitem__) for operand in request[1]]
            reply = ["value", values.encode(operations[request[0]](*operands), refer)]
        except BaseException as error:  # SystemExit too: a program that exits still gets the next request
            reply = ["error", [type(error).__name__, _text(error)]]
        with contextlib.suppress(Exception):  # the program closed or replaced them
            sys.stdout.flush()
            sys.stderr.flush()
        _send(stream, reply)
    os._exit(0)


def _send(stream: Any, message: Any) -> None:
    content = json.dumps(message).encode()
    stream.write(struct.pack("!I", len(content)) + content)
    stream.flush()


def _receive(stream: Any) -> Any:
    head = stream.read(4)
    if len(head) < 4:
        return None
    length = struct.unpack("!I", head)[0]
    if length > _LONGEST_REPLY:
        raise ValueError(f"a reply of {length:,} bytes, more than {_LONGEST_REPLY:,}")
    content = stream.read(length)
    return json.loads(content) if len(content) == length else None


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_LONGEST_REASON]
    except BaseException:
        return "an exception that cannot be printed"


def _describe(error: BaseException, tests: str) -> str:
    reason = f"{type(error).__name__}: {_text(error)}".removesuffix(": ")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "tests"]
    if lines and lines[-1]:
        reason += f" at `{tests.splitlines()[lines[-1] - 1].strip()[:_LONGEST_REASON]}`"
    return reason


def _how_it_ended(program: int, limits: isolation.Limits) -> str:
    status = os.waitpid(program, 0)[1]
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        cause = f": it used {limits['cpu_seconds']} s of CPU time" if number == signal.SIGXCPU else ""
        return f"the program was killed by {signal.Signals(number).name}{cause}"
    return f"the program exited with code {os.WEXITSTATUS(status)} before its tests ended"
