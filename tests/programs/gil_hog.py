"""A thread ``hog`` holds the GIL for a share of the time, ``victim`` wants little of it often: `gil_hog.py DUTY`."""

from __future__ import annotations

import sys
import threading
import time

from life import goes_on, say_ready, stay

duty = float(sys.argv[1])
PERIOD_S = 0.02


def hold() -> None:
    """Run pure Python for `duty` of every 20 ms."""
    while goes_on():
        end = time.perf_counter() + duty * PERIOD_S
        while time.perf_counter() < end:
            sum(range(2000))
        if duty < 1.0:
            time.sleep((1.0 - duty) * PERIOD_S)


def want() -> None:
    """Short pieces of Python between short sleeps."""
    while goes_on():
        sum(range(200))
        time.sleep(0.0005)


threading.Thread(target=hold, name="hog", daemon=True).start()
threading.Thread(target=want, name="victim", daemon=True).start()
say_ready()
stay()
