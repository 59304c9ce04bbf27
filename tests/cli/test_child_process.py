"""A child process gets every signal of its launcher, Ctrl-C once, and the launcher its exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from nalora import NALoRAError
from nalora.cli import child_process

# Reports the signals that it gets within 0.2 s after the first.
CHILD = """
import os, signal, sys, time
count = 0
def say(line):  # print() must not be interrupted by a handler that prints
    os.write(1, line.encode() + b"\\n")
def handle(number, frame):
    global count
    count += 1
    say(signal.Signals(number).name)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, handle)
say("ready")
while not count:
    time.sleep(0.01)
time.sleep(0.2)
say(f"{count} received")
sys.exit(7)
"""
LAUNCHER = f"""
import os, sys
from nalora.cli import child_process
sys.exit(child_process.run([sys.executable, "-c", {CHILD!r}], os.environ))
"""
# Starts the launcher in its own group and signals it alone, as `Popen.terminate` and `kill $!` in a script do.
PARENT = f"""
import subprocess, sys
launcher = subprocess.Popen([sys.executable, "-c", {LAUNCHER!r}])
launcher.send_signal(int(sys.stdin.readline()))
sys.exit(launcher.wait())
"""
IN_TERMINAL = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n{LAUNCHER}"


@pytest.mark.parametrize(
    ("code", "expected"), [("raise SystemExit(5)", 5), ("import os; os.abort()", 128 + 6), ("", 0)]
)
def test_exit_codes_pass_through(code, expected):
    assert child_process.run([sys.executable, "-c", code], os.environ) == expected


@pytest.fixture
def start():
    """Start a program in a session of its own, which is ended after the test."""
    started = []

    def start(code, stdin=subprocess.PIPE):
        command = [sys.executable, "-c", code]
        started.append(
            subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True, start_new_session=True)
        )
        assert started[0].stdout.readline() == "ready\n"
        return started[0]

    yield start
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started[0].pid, signal.SIGKILL)


@pytest.mark.parametrize("same_group", [False, True], ids=["another group", "same group"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_to_the_launcher_alone_reaches_the_program(start, name, same_group):
    number = getattr(signal, name)
    started = start(PARENT if same_group else LAUNCHER)
    if not same_group:
        started.send_signal(number)
    printed, _ = started.communicate(f"{int(number)}\n", timeout=20)
    assert printed == f"{name}\n1 received\n"
    assert started.returncode == 7


def test_ctrl_c_at_a_terminal_reaches_the_program_once(start):
    ours, terminal = os.openpty()
    try:
        started = start(IN_TERMINAL, terminal)
        os.write(ours, b"\x03")
        assert started.communicate(timeout=20)[0] == "SIGINT\n1 received\n"
        assert started.returncode == 7
    finally:
        os.close(ours)
        os.close(terminal)


def test_a_signal_that_ends_the_program_is_in_the_exit_code(start):
    sleep = "print('ready', flush=True); import time; time.sleep(60)"
    started = start(LAUNCHER.replace(repr(CHILD), repr(sleep)))
    started.terminate()
    assert started.wait(20) == 128 + 15


def test_the_program_starts_with_the_signals_unblocked():
    code = "import signal, sys; sys.exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert child_process.run([sys.executable, "-c", code], os.environ) == len(before)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_what_cannot_be_started_is_refused(tmp_path):
    with pytest.raises(NALoRAError, match="nowhere: found no such program"):
        child_process.run(["nowhere"], os.environ)
    script = tmp_path / "script"
    script.write_text("no interpreter line")
    script.chmod(0o755)
    with pytest.raises(NALoRAError, match="cannot be started"):
        child_process.run([str(script)], os.environ)
