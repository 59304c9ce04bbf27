"""SIGTERM and SIGHUP to a study: recorded when they arrive, handled where nothing is half done."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

# Windows has no SIGHUP.
_NUMBERS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class StoppedBySignal(KeyboardInterrupt):
    """The study was stopped by the signal with this number; it continues when it is started again."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class StopSignals:
    """Record the first SIGTERM or SIGHUP in `received`; the second one raises `StoppedBySignal` at once.

    The first one must not raise where it arrives: a worker that is being started at that moment would be in no list and
    would keep running. A signal that the process ignores, as SIGHUP under nohup, stays ignored. Python calls handlers
    in the main thread only; in other threads the signals are left alone.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _NUMBERS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None if the handler was not installed by Python: it cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise StoppedBySignal(number)
        self.received = number
