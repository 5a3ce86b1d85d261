"""A thread ``starved`` that shares one core with a spinning process, so that it waits for the CPU half of the time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from life import goes_on, say_ready, stay

SPIN = "import os\np = os.getppid()\nwhile os.getppid() == p: sum(range(10000))"

core = min(os.sched_getaffinity(0))


def work() -> None:
    """Spin on the shared core only; other threads may go elsewhere."""
    os.sched_setaffinity(0, {core})
    while goes_on():
        sum(range(10000))


rival = subprocess.Popen([sys.executable, "-c", SPIN], preexec_fn=lambda: os.sched_setaffinity(0, {core}))
threading.Thread(target=work, name="starved", daemon=True).start()
say_ready()
stay()
