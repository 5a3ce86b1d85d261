"""``metrics.jsonl``: one line an optimizer step, flushed at once, and cut back to the checkpoint on resume."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from paceline.control.lines import LineLog
from paceline.errors import CheckpointError
from paceline.files import explain, sync, write_atomically

log = logging.getLogger(__name__)

ROOM = 128
"""Blanks at the end of a line that something is to be added to."""


class MetricsLog:
    """Appends to the file of a run. A disk that takes no lines holds up nothing: they wait, as `LineLog` says.

    Args:
        path: The file; made if missing.
        step: Lines of later steps are dropped: they belong to training that was lost with the process.
    Raises: CheckpointError if it cannot be read or cut back.
    """

    def __init__(self, path: Path, step: int) -> None:
        try:
            missing = set(range(1, step + 1)) - _cut_back(path, step)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be cut back to step {step}, after which the run goes on: {explain(error)}"
            ) from error
        if missing:
            log.warning(
                "%s has no lines of steps %s: they were not on the disk when the process or the machine went down; "
                "the training itself lacks nothing",
                path,
                _ranges(missing),
            )
        self._path = path
        self._log = LineLog(path, stays_open=True)

    def write(self, line: dict[str, Any], *, has_room: bool = False) -> None:
        """Append one step and hand it to the kernel, so that a killed process loses none.

        Args:
            has_room: Leave blanks at its end, for `add`.
        """
        self._log.write(line, ROOM if has_room else 0)

    def add(self, step: int, found: dict[str, Any]) -> bool:
        """Add to the line of a step in place, whatever was appended since; whether it is there now.

        The file stays as long as it is, so that nothing that writes or reads it is in the way. Where the line is not in
        the file (the disk takes none), has no room or cannot be written, `join` may do it later.
        """
        try:
            return _add_in_place(self._path, step, found)
        except OSError as error:
            log.warning("%s: the line of step %d cannot be added to: %s", self._path, step, explain(error))
            return False

    def sync(self) -> None:
        """Force the lines to the disk, so that a checkpoint is never ahead of them; from any thread.

        It takes as long as the disk does, and `write` does not wait for it: call it where the checkpoint is written.
        """
        self._log.sync()

    def close(self) -> None:
        """Force the lines to the disk and close."""
        self._log.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines; one that a crash left half-written is passed over."""
    return [line for _, line in _lines(path)]


def lines_until(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines of the steps up to `step`, in order, each step once: the later line where training went back."""
    newest = {line["step"]: line for line in read_metrics(path) if line["step"] <= step}
    return [newest[number] for number in sorted(newest)]


def amend(path: Path, step: int, found: dict[str, Any]) -> dict[str, Any] | None:
    """Add to the line of a run's present step, whole or not at all; the line, or None where it is lost.

    Lines of later steps go, as with `MetricsLog`. Raises: CheckpointError if the file cannot be written.
    """
    lines = lines_until(path, step)
    if not lines or lines[-1]["step"] != step:
        return None
    lines[-1] |= found
    try:
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written to: {explain(error)}") from error
    return lines[-1]


def join(path: Path, found: Mapping[int, dict[str, Any]], awaited: Collection[int] = ()) -> None:
    """Add to the lines of steps, and leave room in those that are added to later; while nobody has the file open.

    What is right as it is stays untouched. Raises: OSError; the file is as it was then.
    """
    texts, has_changed = [], False
    for text, line in _lines(path):
        step = line["step"]
        new = line | found.get(step, {})
        lacks_room = step in awaited and not text.endswith(b" " * ROOM + b"\n")
        if new != line or lacks_room:
            text = json.dumps(new).encode() + b" " * (ROOM if step in awaited else 0) + b"\n"
            has_changed = True
        texts.append(text)
    if has_changed:
        write_atomically(path, b"".join(texts).decode())


def _add_in_place(path: Path, step: int, found: dict[str, Any]) -> bool:
    """Raises: OSError. One write within a line: whoever looks sees it with or without."""
    data = b"\n" + path.read_bytes()
    start = max(data.rfind(b'\n{"step": %d%s' % (step, after)) for after in (b",", b"}")) + 1
    end = data.find(b"\n", start)
    if start == 0 or end < 0:
        return False
    new = json.dumps(json.loads(data[start:end]) | found).encode()
    if len(new) > end - start:
        return False
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        return os.pwrite(descriptor, new.ljust(end - start), start - 1) == end - start
    finally:
        os.close(descriptor)


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each complete line as it stands in the file, and what it says."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for text in file:
            try:
                line = json.loads(text.decode())
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict) and type(line.get("step")) is int:
                yield text.rstrip(b"\r\n") + b"\n", line


def _cut_back(path: Path, step: int) -> set[int]:
    """Leave one line of each step up to `step` in the file; which steps those are. Raises: OSError."""
    newest = {line["step"]: text for text, line in _lines(path) if line["step"] <= step}
    if path.is_file():
        kept = b"".join(newest[number] for number in sorted(newest))
        found = path.read_bytes()
        if found.startswith(kept):  # nearly always; it works on a full disk as well, and at any instant
            if len(found) > len(kept):
                os.truncate(path, len(kept))
                sync(path)
        else:
            write_atomically(path, kept.decode())
    return set(newest)


def _ranges(steps: Iterable[int]) -> str:
    """``1-3, 7``: at most five, and how many more."""
    runs = [list(run) for _, run in groupby(enumerate(sorted(steps)), lambda pair: pair[1] - pair[0])]
    texts = [str(run[0][1]) if len(run) == 1 else f"{run[0][1]}-{run[-1][1]}" for run in runs]
    return ", ".join(texts[:5]) + (f" and {len(texts) - 5} more ranges" if len(texts) > 5 else "")
