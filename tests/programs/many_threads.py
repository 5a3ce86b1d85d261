"""Many threads ``many-i`` that sleep or wait, and one that works: `many_threads.py [COUNT]`, 300 by default."""

from __future__ import annotations

import sys
import threading
import time

from life import goes_on, say_ready, stay

count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
never = threading.Event()


def work() -> None:
    """5 ms of CPU time between sleeps of 5 ms: half a core, and the same share on a slow machine as on a fast one."""
    while goes_on():
        end = time.thread_time() + 0.005
        while time.thread_time() < end:
            sum(range(2000))
        time.sleep(0.005)


threading.stack_size(256 * 1024)
for i in range(count - 1):
    threading.Thread(target=never.wait, name=f"many-{i}", daemon=True).start()
threading.Thread(target=work, name="working", daemon=True).start()
say_ready()
stay()
