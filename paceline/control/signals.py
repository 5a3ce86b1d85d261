"""Stopping a run: the first signal asks, the second ends."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from paceline.profiling import stages

log = logging.getLogger(__name__)

STDERR = 2
"""File descriptor: a handler must not run into the buffer that it interrupted."""

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of who wrote to a socket."""


class StopRequest:
    """While entered, signals ask for a stop: SIGINT, SIGTERM, SIGHUP and one more if wanted.

    A second SIGINT or SIGTERM ends the process at once, with 128 + its number; that is safe, as a checkpoint is not
    seen before it is complete. SIGHUP and `extra` ask as often as they like: a terminal that closes sends the one
    twice, and schedulers announce with the other what they do with SIGTERM later. A SIGHUP that was ignored stays so.

    A thread hears them, also while the main thread is in a long call: Python's own handlers would wait for its end.
    They are there all the same, explicitly, as a process started in the background inherits SIGINT as ignored. A
    forked child has none of this; it ignores SIGINT, which a terminal sends to it as well. Off the main thread, where
    Python allows no handlers, `request` alone stops.

    Args:
        extra: Name of a further signal.
        doing: What is done when one has come, for a person.

    Attributes:
        reason: Why to stop, by who asked first: a signal's name, or what `request` was given.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, extra: str | None = None, doing: str = "saving the last complete step") -> None:
        self._doing = doing
        self.reason: str | None = None
        self._extra = signal.Signals[extra] if extra else None
        self._has_heard = self._has_insisted = False
        self._previous: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()
        self._ear: _Ear | None = None

    def __bool__(self) -> bool:
        """Whether a stop has been asked for."""
        return self.reason is not None

    def request(self, reason: str) -> None:
        """Ask for a stop, from any thread; who asked first gives the reason."""
        if self.reason is None:
            self.reason = reason

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._pid = os.getpid()
            self._ear = _Ear(self._heard)
            _entered.append(self)
            for number in self._wanted():
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._ear is None or os.getpid() != self._pid:
            return
        try:
            self._give_back()
        finally:
            _entered.remove(self)
            self._ear.close()

    def _wanted(self) -> list[signal.Signals]:
        wanted = [*self.SIGNALS]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            wanted.append(signal.SIGHUP)
        if self._extra is not None and self._extra not in wanted:
            wanted.append(self._extra)
        return wanted

    def _give_back(self) -> None:
        for number, handler in reversed(self._previous.items()):  # SIGINT last: it may raise from then on
            if number == self._extra and handler in (None, signal.SIG_DFL):
                handler = signal.SIG_IGN  # it may come once more, and by default it ends the process
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid or self._ear is None:
            return
        if self._ear.hears():
            self.request(signal.Signals(number).name)  # the rest is the thread's, which may not have run yet
        else:
            self._heard(number)

    def _heard(self, number: int) -> None:
        if number not in self._previous:  # somebody else's, which has a handler too
            return
        name, insists = signal.Signals(number).name, number in self.SIGNALS
        if insists and self._has_insisted:
            _say(f"\n{name} again: ending now, without saving\n")
            os._exit(128 + number)
        if not self._has_heard and self.reason in (None, name):
            _say(f"\n{name}: {self._doing}; {'once more' if insists else 'SIGTERM twice'} ends at once\n")
        elif insists:
            _say(f"\n{name}: stopping already ({self.reason}); once more ends at once\n")
        self._has_heard = True
        self._has_insisted |= insists
        self.request(name)

    def _forget(self) -> None:
        """In a forked child."""
        assert self._ear is not None
        self._give_back()
        self._ear.forget()
        signal.signal(signal.SIGINT, signal.SIG_IGN)


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


class _Ear:
    """A thread that is told every signal by the number that the interpreter writes as it arrives.

    It is written to a socket, which says who wrote: a child that was forked a moment ago still has the same one.
    """

    def __init__(self, heard: Callable[[int], None]) -> None:
        self._heard, self._pid = heard, os.getpid()
        self._before = -1
        self._reader, self._writer = socket.socketpair()
        self._reader.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._writer.setblocking(False)
        self._is_listening = True
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread is to be had
            self._is_listening = False
            log.warning("signals are heard between two calls only: %s", error)
        self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def hears(self) -> bool:
        """Whether the thread gets the signals; asked by handlers. Others may have taken its place, as asyncio does."""
        if not self._is_listening:
            return False
        now = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if now not in (self._writer.fileno(), -1):
            signal.set_wakeup_fd(now)
        return now == self._writer.fileno()

    def close(self) -> None:
        """What was there before is there again; every signal until now has been heard."""
        self._give_back()
        with contextlib.suppress(OSError):
            self._writer.shutdown(socket.SHUT_WR)
        if self._thread.ident is not None:
            self._thread.join(5.0)
        self._writer.close()
        self._reader.close()

    def forget(self) -> None:
        """In a forked child: let go, without a word to the parent's thread."""
        self._give_back()
        self._writer.close()
        self._reader.close()

    def _give_back(self) -> None:
        with contextlib.suppress(ValueError):  # it may be closed by now
            now = signal.set_wakeup_fd(self._before)
            if now not in (self._writer.fileno(), -1):  # somebody who came later keeps it
                signal.set_wakeup_fd(now)

    def _listen(self) -> None:
        with stages.named_thread("signals"):
            try:
                while True:
                    numbers, ancillary, _, _ = self._reader.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
                    if not numbers:
                        return
                    if _sender(ancillary) == self._pid:
                        self._pass_on(numbers)
            except OSError as error:
                log.warning("signals are heard between two calls only: %s", error.strerror or error)
            finally:
                self._is_listening = False

    def _pass_on(self, numbers: bytes) -> None:
        if self._before >= 0:
            with contextlib.suppress(OSError):
                os.write(self._before, numbers)
        for number in numbers:
            self._heard(number)


def _sender(ancillary: list[tuple[int, int, bytes]]) -> int:
    """Process that wrote; 0 where that is not said."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) >= _CREDENTIALS.size:
            return int(_CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0])
    return 0


def _say(text: str) -> None:
    """Write to stderr, if anybody still reads it: Ctrl-C kills `| tee` as well, terminals close, and pagers wait."""
    with contextlib.suppress(OSError):
        poll = select.poll()
        poll.register(STDERR, select.POLLOUT)
        if any(event & select.POLLOUT for _, event in poll.poll(0)):
            os.write(STDERR, text.encode())


_entered: list[StopRequest] = []


def _forget_all() -> None:
    while _entered:
        _entered.pop()._forget()


os.register_at_fork(after_in_child=_forget_all)
