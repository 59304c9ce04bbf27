"""A command as a child process, with signals and exit code as if the shell had started it."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence

from nalora.errors import NALoRAError, reason

# The signals with which people and schedulers stop or ask a training; Windows does not have all of them.
_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
# The si_code of a signal that the kernel sent, not a process; the module signal does not have it.
_SI_KERNEL = 0x80


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command until it ends and return its exit code; 128 + N if signal N ended it.

    Raises:
        NALoRAError: the command cannot be started.
    """
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        raise NALoRAError(
            f"nalora launch -- {command[0]}",
            found="no such program",
            expected="a command that can be run",
            fix="check its name and the active environment",
        )
    passed_on = {getattr(signal, name) for name in _PASSED_ON if hasattr(signal, name)}
    can_wait = hasattr(signal, "sigwaitinfo")  # not on macOS and Windows
    # Blocked before the start: a signal between start and wait would end this process and leave the command running.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {*passed_on, signal.SIGCHLD}) if can_wait else set()
    try:
        child = subprocess.Popen(
            command,
            env=dict(environment),
            preexec_fn=(lambda: signal.pthread_sigmask(signal.SIG_SETMASK, previous)) if can_wait else None,
        )
    except OSError as error:
        raise NALoRAError(
            f"nalora launch -- {command[0]}",
            found=f"that it cannot be started ({reason(error)})",
            expected="a command that can be run",
            fix="check the file and its permissions",
        ) from error
    else:
        return _exit_code(_wait(child, passed_on) if can_wait else _wait_for_terminal(child))
    finally:
        if can_wait:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _wait(child: subprocess.Popen[bytes], passed_on: set[signal.Signals]) -> int:
    """Wait for the child and pass signals on, except those that the terminal has sent to it too.

    At Ctrl-C the kernel signals the whole foreground group, which the child belongs to. A second copy would stop
    programs that save a checkpoint at the first. A signal of a process, which may be in the same group, does not show
    whether it was sent to the group or to the launcher alone: a second one does less harm than none.
    """
    while (code := child.poll()) is None:
        received = signal.sigwaitinfo({*passed_on, signal.SIGCHLD})
        typed = received.si_signo == signal.SIGINT and received.si_code == _SI_KERNEL
        if received.si_signo != signal.SIGCHLD and not typed:
            child.send_signal(received.si_signo)
    return code


def _wait_for_terminal(child: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:  # the terminal has sent it to the child too
            continue


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code
