"""Threads that wait for queues: ``getter-i`` at an empty one, ``putter`` at a full one, ``simple`` at a C queue."""

from __future__ import annotations

import queue
import threading

from life import end_with_parent, say_ready

empty: queue.Queue[int] = queue.Queue()
full: queue.Queue[int] = queue.Queue(maxsize=1)
simple: queue.SimpleQueue[int] = queue.SimpleQueue()
full.put(0)
end_with_parent()
for i in range(3):
    threading.Thread(target=empty.get, name=f"getter-{i}", daemon=True).start()
threading.Thread(target=full.put, args=(1,), name="putter", daemon=True).start()
threading.Thread(target=full.put, args=(1, True, 300.0), name="putter-timed", daemon=True).start()
threading.Thread(target=simple.get, name="simple", daemon=True).start()
say_ready()
empty.get()
