"""Calls a pretended driver from named threads: `fake_cuda.py LIBRARY LAUNCH_SHARE [THREAD,...]`.

Thread ``mixed`` spends LAUNCH_SHARE of its time in launches and the rest in waits for the stream, ``waiting`` all of it
in waits, ``freeing`` in frees, ``copying`` in copies, ``queueing`` in launches into a full queue. Twice a second it
prints what share of its wall time the mixed thread was in launches so far: ``share 0.8012``.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time

from life import goes_on, say_ready

driver = ctypes.CDLL(sys.argv[1])
launch_share = float(sys.argv[2])
spent = {"launch": 0.0, "sync": 0.0}


def launch() -> None:
    """A burst of launches, 2 ms at best."""
    for _ in range(100):
        driver.cuLaunchKernel()


def wait() -> None:
    """Wait for the stream."""
    driver.cuStreamSynchronize()


def mix() -> None:
    """Do whichever is behind its share."""
    while goes_on():
        name, call = ("launch", launch) if spent["launch"] <= launch_share * sum(spent.values()) else ("sync", wait)
        started = time.perf_counter()
        call()
        spent[name] += time.perf_counter() - started


def repeat(name: str) -> None:
    """One call for ever."""
    call = getattr(driver, name)
    while goes_on():
        call()


threads = [threading.Thread(target=mix, name="mixed", daemon=True)]
for thread_name, function in [
    ("waiting", "cuStreamSynchronize"),
    ("freeing", "cuMemFree_v2"),
    ("queueing", "cuLaunchKernelEx"),
    ("copying", "cuMemcpyDtoH_v2"),
]:
    threads.append(threading.Thread(target=repeat, args=(function,), name=thread_name, daemon=True))
if len(sys.argv) > 3:  # only these
    threads = [thread for thread in threads if thread.name in sys.argv[3].split(",")]
for thread in threads:
    thread.start()
say_ready()
while goes_on():
    time.sleep(0.5)
    print(f"share {spent['launch'] / max(1e-9, sum(spent.values())):.4f}", flush=True)
os._exit(0)
