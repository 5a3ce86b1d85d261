"""Stopping a run: the first signal asks, the second ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

STDERR = 2
"""File descriptor: a handler must not run into the buffer that it interrupted."""


class StopRequest:
    """While entered, SIGINT and SIGTERM ask for a stop; a second one ends the process at once.

    Handlers are installed explicitly: a process started in the background inherits SIGINT as ignored, where Python's
    own interrupt exception does not exist. Ending at once is safe, as a checkpoint is not seen before it is complete.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.reason: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        """Whether a stop has been asked for."""
        return self.reason is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.reason is not None:
            _say(f"\n{name} again: ending now, without saving\n")
            os._exit(128 + number)
        self.reason = name
        _say(f"\n{name}: saving the last complete step; once more ends at once\n")


class Interrupts:
    """While entered, SIGINT and SIGTERM raise KeyboardInterrupt, for work that is undone; a second one ends at once.

    Attributes:
        number: The signal that came, or None.
    """

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in StopRequest.SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        if self.number is None:  # else the process is about to end, and a second signal may still come
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.number is not None:
            os._exit(128 + number)
        self.number = signal.Signals(number)
        raise KeyboardInterrupt


def _say(text: str) -> None:
    """Write to stderr, if anybody still reads it: Ctrl-C kills `| tee` as well, and terminals close."""
    with contextlib.suppress(OSError):
        os.write(STDERR, text.encode())
