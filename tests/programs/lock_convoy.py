"""Four threads ``convoy-i`` that share one lock and keep it for 5 ms each: `lock_convoy.py [sleep|work]`."""

from __future__ import annotations

import sys
import threading
import time

from life import goes_on, say_ready, stay

HELD_S = 0.005
works = len(sys.argv) > 1 and sys.argv[1] == "work"
lock = threading.Lock()


def hold() -> None:
    """Keep the lock, asleep or at work."""
    if not works:
        time.sleep(HELD_S)
        return
    end = time.perf_counter() + HELD_S
    while time.perf_counter() < end:
        sum(range(2000))


def convoy() -> None:
    """Take the lock again and again."""
    while goes_on():
        with lock:
            hold()
        time.sleep(0.0002)  # a lock is not fair: who lets go would have it again at once


for i in range(4):
    threading.Thread(target=convoy, name=f"convoy-{i}", daemon=True).start()
say_ready()
stay()
