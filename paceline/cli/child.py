"""A `paceline` command for another process: of low priority, and over when that process is.

    python .../paceline/cli/child.py eval --target ...

Whoever starts it holds the other end of its standard input, which closes however that process ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

NICENESS = 10
"""A tenth of what a busy process gets: with less it would never come to an end beside one."""


def end_with_stdin() -> None:
    """End this process when whoever holds the other end of its standard input is gone."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="stdin", daemon=True).start()


def main() -> None:
    """Run as the module says."""
    end_with_stdin()
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # where memory runs out, the kernel ends this process and not the other
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    from paceline.cli.main import main as run

    run()


if __name__ == "__main__":
    # the folder of this file, whose modules are not meant to be found by their bare names
    sys.path.pop(0)
    if (root := str(Path(__file__).resolve().parents[2])) not in sys.path:
        sys.path.insert(0, root)
    main()
