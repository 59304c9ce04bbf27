"""SIGTERM and SIGHUP to a study: noted when they arrive, answered where nothing is half done."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

# Windows has no SIGHUP.
_NUMBERS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class StoppedBySignal(KeyboardInterrupt):
    """The study was stopped by a signal and goes on at its next start.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class StopSignals:
    """Notes the first SIGTERM or SIGHUP, in `received`; a second one raises at once.

    The first one must not raise where it arrives: a worker that is being started at that moment would be in no list and
    would not be ended. A signal that the process ignores, as SIGHUP under nohup, stays ignored. Only the main thread
    can listen; elsewhere the signals keep their meaning.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _NUMBERS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None where the handler was not installed by Python; it cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise StoppedBySignal(number)
        self.received = number
