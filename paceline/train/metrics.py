"""``metrics.jsonl``: one line an optimizer step, flushed at once, and cut back to the checkpoint on resume."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from paceline.files import write_atomically


class MetricsLog:
    """Appends to the file of a run.

    Args:
        path: The file; made if missing.
        step: Lines of later steps are dropped: they belong to training that was lost with the process.
    """

    def __init__(self, path: Path, step: int) -> None:
        _cut_back(path, step)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  # closed by `close`

    def write(self, line: dict[str, Any]) -> None:
        """Append one step and hand it to the kernel, so that a killed process loses none."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Flush to disk and close."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines; a last line that a crash left half-written is passed over."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            break
        if not isinstance(line, dict) or "step" not in line:
            break
        lines.append(line)
    return lines


def _cut_back(path: Path, step: int) -> None:
    if path.is_file():
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
