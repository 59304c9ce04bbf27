"""The two processes inside the sandbox: the program, and the judge that asks it the tests' questions.

The tests, and what they expect, exist in the judge only. The program is asked for the value of one call after the
other and answers with plain data, so nothing it patches, prints, returns or exits with can make a wrong answer equal
a right one, and the pipe for the verdict is closed on its side before its first line runs.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import signal
import socket
import struct
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn

from . import isolation, values

# An answer longer than this is no answer to a unit test; it bounds what the judge holds.
_LONGEST_ANSWER = 16 << 20
_LONGEST_REASON = 500
_PROGRAM_FD = 3


def judge(way: str, limits: isolation.Limits, folder: str, verdict: int, output: int) -> NoReturn:
    """Start the program beside this process, run the tests on it, write the verdict and end.

    Args:
        way: how the supervisor isolated us.
        limits: the fields of `nalora.tasks.sandbox.Limits`.
        folder: where the program runs, the only place it may write to.
        verdict: the pipe to the supervisor: "ready", then a JSON object with passed and reason.
        output: the pipe for what the program prints.
    """
    # Python's handler would make the one signal that the program can send to the first process of its namespace work.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()
    os.chdir(folder)
    os.dup2(output, 1)
    os.dup2(output, 2)
    isolation.confine(way, limits)
    isolation.hide_memory()
    isolation.die_with_parent()
    ours, theirs = socket.socketpair()
    # Before the job is read: the program's memory starts as a copy of this one and must not hold the tests.
    program = os.fork()
    if program == 0:
        _become_program(theirs)
    theirs.close()
    # Fails when the supervisor died before `die_with_parent`, and so nobody would keep the time.
    os.write(verdict, b"ready\n")
    with open(0, "rb") as stdin:
        job = json.load(stdin)
    tests = job["tests"]
    try:
        channel = _Channel(ours)
        channel.ask("load", job["program"])
        names: dict[str, Any] = {"__name__": "tests"}
        exec(compile(job["prelude"], "prelude", "exec"), names)
        for entry in job["entries"]:
            names[entry] = channel.ask("name", entry)
        exec(compile(tests, "tests", "exec"), names)
        if channel.ended:  # and a bare `except:` of the tests took it
            raise _ProgramEnded
        passed, reason = True, "passed"
    except _ProgramEnded:
        passed, reason = False, _how_it_ended(program, limits)
    except BaseException as error:
        passed, reason = False, _describe(error, tests)
    os.write(verdict, json.dumps({"passed": passed, "reason": reason}).encode())
    os._exit(0)


class _ProgramEnded(BaseException):
    """No answer will come any more; no exception of the program's, which a test may expect."""


class _Channel:
    """Questions to the program, one at a time; `ended` when no answer came any more."""

    def __init__(self, connection: socket.socket) -> None:
        self.stream = connection.makefile("rwb")
        self.ended = False

    def ask(self, question: str, *operands: Any) -> Any:
        try:
            _send(self.stream, [question, [values.encode(each, _number) for each in operands]])
            answer = _receive(self.stream)
        except OSError:
            answer = None
        if answer is None:
            self.ended = True
            raise _ProgramEnded
        kind, content = answer
        if kind == "value":
            return values.decode(content, lambda number: _Remote(self, number))
        name, text = content
        known = getattr(builtins, str(name), None)
        error: Exception = RuntimeError(f"{name}: {text}")
        if isinstance(known, type) and issubclass(known, Exception):
            with contextlib.suppress(TypeError):  # some exceptions want more than a text
                error = known(str(text))
        raise error


class _Remote:
    """Something of the program's that is no plain data: it can be used, and equals nothing but itself."""

    def __init__(self, channel: _Channel, number: int) -> None:
        self.__dict__.update(_channel=channel, _number=int(number))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._channel.ask("call", self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._channel.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._channel.ask("setattr", self, name, value)

    def __bool__(self) -> bool:
        # Else Python would ask for the length, which not everything has.
        return True


def _forwarded(operation: str) -> Callable[..., Any]:
    return lambda remote, *operands: remote._channel.ask(operation, remote, *operands)


for _operation in ("iter", "next", "len", "getitem"):
    setattr(_Remote, f"__{_operation}__", _forwarded(_operation))


def _number(value: Any) -> int:
    if not isinstance(value, _Remote):
        raise TypeError(f"a test gives the program a {type(value).__name__}, which is no plain data")
    number: int = value._number
    return number


def _become_program(connection: socket.socket) -> NoReturn:
    os.dup2(connection.fileno(), _PROGRAM_FD)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    # Among these: the pipe for the verdict. The job came through 0, which is empty now.
    os.closerange(_PROGRAM_FD + 1, 4096)
    os.environ.clear()
    sys.argv[:] = ["program.py"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stream = socket.socket(fileno=_PROGRAM_FD).makefile("rwb")
    module = types.ModuleType("program")
    sys.modules["program"] = module
    objects: list[Any] = []

    def refer(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def load(source: str) -> None:
        exec(compile(source, "program.py", "exec"), module.__dict__)

    def name(text: str) -> Any:
        if text not in module.__dict__:
            raise NameError(f"name {text!r} is not defined")
        return module.__dict__[text]

    def call(function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return function(*arguments, **named)

    def getitem(value: Any, key: Any) -> Any:
        return value[key]

    known = {each.__name__: each for each in (load, name, call, getitem, getattr, setattr, iter, next, len)}
    while (question := _receive(stream)) is not None:
        try:
            operands = [values.decode(each, objects.__getitem__) for each in question[1]]
            answer = ["value", values.encode(known[question[0]](*operands), refer)]
        except BaseException as error:  # SystemExit too: a program that ends is asked the next question all the same
            answer = ["error", [type(error).__name__, _text(error)]]
        with contextlib.suppress(Exception):  # the program closed or replaced them
            sys.stdout.flush()
            sys.stderr.flush()
        _send(stream, answer)
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
    if length > _LONGEST_ANSWER:
        raise ValueError(f"an answer of {length:,} bytes, more than {_LONGEST_ANSWER:,}")
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
        used_up = f": {limits['cpu_seconds']} s of CPU time are used up" if number == signal.SIGXCPU else ""
        return f"the program was killed by {signal.Signals(number).name}{used_up}"
    return f"the program ended with exit code {os.WEXITSTATUS(status)} before its tests did"
