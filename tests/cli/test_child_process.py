"""A child process gets the signals of its launcher once, and the launcher its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from nalora import NALoRAError
from nalora.cli import child_process

# Reports the signals that it gets within 0.2 s after the first.
CHILD = """
import signal, sys, time
count = 0
def handle(number, frame):
    global count
    count += 1
    print(signal.Signals(number).name, flush=True)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, handle)
print("ready", flush=True)
while not count:
    time.sleep(0.01)
time.sleep(0.2)
print(f"{count} received", flush=True)
sys.exit(7)
"""
LAUNCHER = f"""
import os, sys
from nalora.cli import child_process
sys.exit(child_process.run([sys.executable, "-c", {CHILD!r}], os.environ))
"""
# Starts the launcher in its own group and signals the whole group, as a terminal or `timeout` does.
GROUP = f"""
import os, signal, subprocess, sys
launcher = subprocess.Popen([sys.executable, "-c", {LAUNCHER!r}])
number = int(sys.stdin.readline())
signal.signal(number, signal.SIG_IGN)
os.killpg(0, number)
sys.exit(launcher.wait())
"""


@pytest.mark.parametrize(
    ("code", "expected"), [("raise SystemExit(5)", 5), ("import os; os.abort()", 128 + 6), ("", 0)]
)
def test_exit_codes_pass_through(code, expected):
    assert child_process.run([sys.executable, "-c", code], os.environ) == expected


@pytest.mark.parametrize("whole_group", [False, True], ids=["to the launcher", "to the group"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_reaches_the_program_once(name, whole_group):
    """A terminal signals the whole group; `kill` and schedulers signal the launcher alone."""
    number = getattr(signal, name)
    started = subprocess.Popen(
        [sys.executable, "-c", GROUP if whole_group else LAUNCHER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert started.stdout.readline() == "ready\n"
        if not whole_group:
            started.send_signal(number)
        printed, _ = started.communicate(f"{int(number)}\n", timeout=20)
        assert printed == f"{name}\n1 received\n"
        assert started.returncode == 7
    finally:
        os.killpg(started.pid, signal.SIGKILL) if started.poll() is None else None


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
