"""Packing plans kept beside a large data set: a run that starts again need not plan again.

    DATASET/plans/KEY-EPOCH.plan    int32 words: 8 of SHA-256 over the rest, number of batches B, starts [B + 1], rows

A plan is a pure function of its key, so nothing is lost with a file: one that is missing or damaged is made again, and
where none can be written the run goes on without. There is no header: the digest covers every byte.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import numpy as np

from paceline.files import staged_file

PLAN_VERSION = 1
"""Counts the changes of what `packing.plan_epoch` returns; plans of another version are not read."""

MAX_PLANS = 64
"""Plans kept in a folder, the newest; at 4.3 bytes a row, 2.7 GB for ten million rows. A run of more epochs than that
plans some of them at each start."""

_DIGEST_WORDS = 8

_writing = threading.Lock()
"""Temporary files are named after the process, so its threads write one after the other."""


class PlanCache:
    """Plans of one choice of rows, one S and one seed, by epoch; safe to share between threads and processes."""

    def __init__(self, folder: Path, lengths: np.ndarray, capacity: int, seed: int) -> None:
        """Name the plans; touches no file.

        Args:
            folder: Where they lie; made when the first one is written.
            lengths: int64 ``[rows]``: all that a plan depends on besides the two numbers.
            capacity: S.
            seed: Run seed.
        """
        self._folder = folder
        key = hashlib.sha256(np.ascontiguousarray(lengths, np.int64).data)
        key.update(f"{PLAN_VERSION} {capacity} {seed}".encode())
        self._key = key.hexdigest()[:32]

    def load(self, epoch: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Rows int32 and starts int32 of an epoch's plan, memory-mapped; None: there is none that is whole."""
        try:
            words = np.memmap(self._path(epoch), dtype=np.int32, mode="r").view(np.ndarray)
        except (OSError, ValueError):  # missing, empty, or cut in the middle of a word
            return None
        digest, plan = words[:_DIGEST_WORDS], words[_DIGEST_WORDS:]
        if digest.tobytes() != self._digest(epoch, plan):
            return None
        first_row = int(plan[0]) + 2
        return plan[first_row:], plan[1:first_row]

    def store(self, epoch: int, rows: np.ndarray, starts: np.ndarray) -> None:
        """Keep a plan, and remove the oldest where there are too many; does nothing where the folder takes no files."""
        plan = np.concatenate([[len(starts) - 1], starts, rows], dtype=np.int32, casting="same_kind")
        digest = np.frombuffer(self._digest(epoch, plan), dtype=np.int32)
        try:
            self._folder.mkdir(exist_ok=True)
            with _writing, staged_file(self._path(epoch)) as partial:
                np.concatenate([digest, plan]).tofile(partial)
            found = sorted(self._folder.glob("*.plan*"), key=lambda path: path.stat().st_mtime_ns)
            for path in found[:-MAX_PLANS]:
                path.unlink(missing_ok=True)
        except OSError:  # read-only, full, or another process removed the same file: planning again costs seconds
            pass

    def _path(self, epoch: int) -> Path:
        return self._folder / f"{self._key}-{epoch}.plan"

    def _digest(self, epoch: int, plan: np.ndarray) -> bytes:
        digest = hashlib.sha256(f"{self._key} {epoch} ".encode())
        digest.update(plan.data)
        return digest.digest()
