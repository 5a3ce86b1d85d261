"""What every program here shares: it says when it is at work, and ends by itself or with its parent."""

from __future__ import annotations

import os
import threading
import time

LONGEST_S = 120.0
_PARENT = os.getppid()
_END = time.monotonic() + LONGEST_S


def goes_on() -> bool:
    """Whether the parent is there and time is left."""
    return os.getppid() == _PARENT and time.monotonic() < _END


def say_ready() -> None:
    """Tell the parent that the threads are at work."""
    print("ready", flush=True)


def end_with_parent() -> None:
    """Watch from a thread of its own, for threads that block for ever. It ends the process hard."""
    threading.Thread(target=_watch, name="life", daemon=True).start()


def _watch() -> None:
    while goes_on():
        time.sleep(0.5)
    os._exit(0)


def stay() -> None:
    """Keep the main thread asleep until the end, then leave without waiting for anyone."""
    while goes_on():
        time.sleep(0.2)
    os._exit(0)
