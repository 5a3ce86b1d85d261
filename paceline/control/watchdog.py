"""A run in which nothing moves: it says so, with all stacks, and ends after as long again, so that none hangs for ever.

A long native call that keeps the interpreter to itself keeps the watchdog out as well; `paceline top` sees it from
outside.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.profiling import stages

log = logging.getLogger(__name__)

EXIT_STALLED = 75
"""EX_TEMPFAIL: a scheduler may start the run again."""

LOOKS = 30
"""Times that it looks within the time after which it speaks."""
MAX_TICK_S = 10.0
PATIENCE_S = 5.0
"""Seconds that it waits for what it has to say to be written: a disk that hangs must not keep it from ending."""


def end_process(text: str) -> None:
    """End at once, without saving: checkpoints are complete or not seen."""
    del text
    os._exit(EXIT_STALLED)


@contextlib.contextmanager
def watching(
    stall_s: Callable[[], float],
    movement: Callable[[], object],
    on_stall: Callable[[str], None],
    dump: Path,
    end: Callable[[str], None] = end_process,
    on_move: Callable[[str], None] = lambda text: None,
) -> Iterator[None]:
    """While entered, a thread watches over the run; where none can be had, one warning.

    Args:
        stall_s: Seconds without movement after which it is told, and ended after twice as many; 0: never. Asked anew
            each time.
        movement: Equal only if nothing has moved since the last time; must not wait for anybody.
        on_stall, on_move: Told that nothing moves, and that something does again.
        dump: Folder for the stacks.
        end: Ends the run; if it returns, nothing is watched any more.
    """
    watchdog = Watchdog(stall_s, movement, on_stall, dump, end, on_move)
    stop = threading.Event()

    def run() -> None:
        with stages.named_thread("watchdog"):
            wait_s = watchdog.look(time.monotonic())
            while wait_s is not None and not stop.wait(wait_s):
                wait_s = watchdog.look(time.monotonic())

    thread = threading.Thread(target=run, name="watchdog", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no thread is to be had
        log.warning("nobody sees whether the run stands still: %s", error)
        yield
        return
    try:
        yield
    finally:
        stop.set()
        thread.join(PATIENCE_S)


class Watchdog:
    """What `watching` does, one look after another; arguments as there."""

    def __init__(
        self,
        stall_s: Callable[[], float],
        movement: Callable[[], object],
        on_stall: Callable[[str], None],
        dump: Path,
        end: Callable[[str], None],
        on_move: Callable[[str], None],
    ) -> None:
        self._stall_s, self._movement = stall_s, movement
        self._on_stall, self._on_move, self._end = on_stall, on_move, end
        self._dump = dump
        self._seen: object = None
        self._still_s = self._looked_at = 0.0
        self._tick_s = 0.0
        self._has_told = False

    def look(self, now: float) -> float | None:
        """Compare with the look before; seconds until the next one, None after the end.

        Args:
            now: Monotonic clock.
        """
        limit_s, seen = self._stall_s(), self._look_around()
        if seen != self._seen or limit_s <= 0:
            if self._has_told:
                how = f"something moves again, after {self._still_s:.0f} s"
                self._tell(self._on_move, how if limit_s > 0 else "the watchdog is switched off")
            self._still_s, self._has_told = 0.0, False
        else:  # a late look proves nothing: the process may have been stopped all the while
            self._still_s += min(now - self._looked_at, 2 * self._tick_s)
        self._seen, self._looked_at = seen, now
        self._tick_s = min(MAX_TICK_S, limit_s / LOOKS) if limit_s > 0 else MAX_TICK_S
        if limit_s > 0 and self._still_s >= 2 * limit_s:
            self._end(f"nothing has moved for {self._still_s:.0f} s (run.stall_s={limit_s:g}); the run ends itself")
            return None
        if limit_s > 0 and self._still_s >= limit_s and not self._has_told:
            self._has_told = True
            self._report(f"nothing has moved for {self._still_s:.0f} s (run.stall_s={limit_s:g})")
        return self._tick_s

    def _look_around(self) -> object:
        try:
            return self._movement()
        except Exception:  # what cannot be seen is no evidence
            return object()

    def _report(self, text: str) -> None:
        found = ["the stacks could not be written in time"]
        patiently(lambda: found.append(write_stacks(self._dump)))
        self._tell(self._on_stall, f"{text}; {found[-1]}")

    def _tell(self, function: Callable[[str], None], text: str) -> None:
        patiently(lambda: function(text))


def patiently(function: Callable[[], None]) -> None:
    """Do it in a thread of its own, and wait `PATIENCE_S` at most; what it raises is a warning."""

    def run() -> None:
        try:
            function()
        except Exception as error:
            log.warning("what the watchdog found cannot be told: %s: %s", type(error).__name__, error)

    thread = threading.Thread(target=run, name="watchdog", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread is to be had
        run()
        return
    thread.join(PATIENCE_S)


def write_stacks(folder: Path) -> str:
    """Write the Python stacks of all threads to a file in `folder`; what came of it, in words."""
    place = folder / f"stall-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(place, "w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError as error:
        return f"the stacks cannot be written to {place}: {error.strerror or error}"
    return f"where each thread stands is in {place}"
