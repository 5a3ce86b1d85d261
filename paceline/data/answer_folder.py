"""The folder that `paceline regenerate` writes, and goes on with after whatever ended it.

    OUT/answers.jsonl      {"source", "finish", "left_out", "num_answers", "num_tokens", "messages", "tools", "rows"}
    OUT/rejected.jsonl     {"source", "file", "line", "reason", "text"}
    OUT/regenerate.json    settings, inputs with licence and revision, counts

Lines stand in the order in which conversations were done; each is written in one piece.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.dataset import REJECTED_FILE
from paceline.data.dialects import Rejection
from paceline.data.inputs import ANSWERS_FILE, REGENERATE_FILE
from paceline.data.reading import Record
from paceline.errors import ConfigError, DataError
from paceline.files import locked, write_atomically

if TYPE_CHECKING:
    from paceline.data.regenerate import Regenerated

FORMAT = 1
LOCK_FILE = "regenerate.lock"

MAY_CHANGE = frozenset({"server", "device", "versions", "counts", "finished", "tokenizer", "adapter"})
"""What regenerate.json holds and may be another when a run is gone on with: the rest decides what answers are. Of an
adapter that is its fingerprint."""


@dataclass
class Counts:
    """What became of the rows; regenerate.json holds it.

    Attributes:
        num_kept: Rows of which answers are kept.
        num_answers: Kept answers.
        num_tokens: Tokens of these, as sampled.
        num_with_ids: Kept rows that hold the sampled token ids.
        num_cut: Kept rows that end in a cut answer.
        left_out: Later turns that kept rows are missing, by kind of reason.
        rejected: Rows of which nothing is kept, by kind of reason.
    """

    num_kept: int = 0
    num_answers: int = 0
    num_tokens: int = 0
    num_with_ids: int = 0
    num_cut: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)

    @property
    def num_done(self) -> int:
        """Rows that need not be done again."""
        return self.num_kept + self.rejected.total()

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `dataclasses.asdict` cannot copy a Counter."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    def add(self, line: Mapping[str, Any]) -> None:
        """Count a line of answers.jsonl or rejected.jsonl."""
        if "reason" in line:
            self.rejected[_kind(line["reason"])] += 1
            return
        self.num_kept += 1
        self.num_answers += line["num_answers"]
        self.num_tokens += line["num_tokens"]
        self.num_with_ids += "rows" in line
        self.num_cut += line["finish"] == "length"
        if "left_out" in line:
            self.left_out[_kind(line["left_out"])] += 1


def _kind(reason: str) -> str:
    return reason.partition(": ")[0]


class AnswerFolder:
    """The output folder; made by `open_answers`.

    Attributes:
        path: Of it.
        counts: Of all runs in it.
        done: Names of the rows that need not be done again.
        num_resumed: Rows that an earlier run had done.
    """

    def __init__(self, path: Path, description: dict[str, Any]) -> None:
        self.path = path
        self.counts = Counts()
        self.done: set[str] = set()
        self._description = description
        for name in (ANSWERS_FILE, REJECTED_FILE):
            self._read(path / name)
        self.num_resumed = len(self.done)
        self._answers = _append_to(path / ANSWERS_FILE)
        self._rejected = _append_to(path / REJECTED_FILE)
        self.describe()

    def keep(self, name: str, conversation: Regenerated, tools: list[Any] | None) -> None:
        """Write a conversation down."""
        line: dict[str, Any] = {"source": name, "finish": conversation.finish}
        if conversation.left_out is not None:
            line["left_out"] = conversation.left_out
        line |= {"num_answers": conversation.num_answers, "num_tokens": conversation.num_tokens}
        line["messages"] = conversation.messages
        if tools:
            line["tools"] = tools
        if conversation.rows is not None:
            line["rows"] = conversation.rows
        self._write(self._answers, line)

    def reject(self, name: str, record: Record, rejection: Rejection) -> None:
        """Write down why a row has no answer."""
        line = {"source": name, "file": record.file, "line": record.number, "reason": rejection.reason}
        self._write(self._rejected, {**line, "text": record.text})

    def describe(self, **more: Any) -> None:
        """Write regenerate.json, with more than stood there so far."""
        self._description |= more
        content = self._description | {"counts": self.counts.as_dict()}
        write_atomically(self.path / REGENERATE_FILE, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Force what was written to the disk."""
        for file in (self._answers, self._rejected):
            os.fsync(file)
            os.close(file)

    def _write(self, file: int, line: dict[str, Any]) -> None:
        # Text that JSON can hold and UTF-8 cannot, a lone surrogate, is written as an escape.
        data = (json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n").encode(
            "utf-8", errors="backslashreplace"
        )
        if (written := os.write(file, data)) != len(data):  # the disk is full: the next start cuts the torn line off
            raise OSError(f"{self.path} could not be written: {written} of {len(data)} bytes of a line")
        self.counts.add(line)
        self.done.add(line["source"])

    def _read(self, path: Path) -> None:
        """Count the lines of an earlier run; a last one that a killed process left torn is cut off."""
        if not path.exists():
            return
        with path.open("rb+") as file:
            end = 0
            for number, raw in enumerate(file, start=1):
                if not raw.endswith(b"\n"):
                    break
                end += len(raw)
                try:
                    line = json.loads(raw)
                    self.counts.add(line)
                    self.done.add(line["source"])
                except (ValueError, KeyError, TypeError) as error:
                    raise DataError(
                        f"{path} is damaged at line {number}: remove that line and start again, or choose another --out"
                    ) from error
            file.truncate(end)


def _append_to(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


@contextmanager
def open_answers(out: Path, description: dict[str, Any]) -> Iterator[AnswerFolder]:
    """The output folder, new or to be gone on with, locked against a second process.

    Args:
        description: For regenerate.json; once there are lines, all of it but `MAY_CHANGE` has to be as it was.
    Raises: DataError if the folder holds something else; ConfigError if settings differ or the folder is in use.
    """
    if out.exists() and not out.is_dir():
        raise DataError(f"output {out} exists and is no folder: choose another --out")
    found = {path.name for path in out.iterdir()} if out.exists() else set()
    if (foreign := {name for name in found if not name.startswith(".")} - {LOCK_FILE}) and REGENERATE_FILE not in found:
        raise DataError(f"output {out} holds {sorted(foreign)[0]} but no {REGENERATE_FILE}: choose another --out")

    def busy(holder: str) -> ConfigError:
        return ConfigError(f"{out} is being written by process {holder}: wait for it, or choose another --out")

    out.mkdir(parents=True, exist_ok=True)
    with locked(out / LOCK_FILE, busy):
        description = {"format": FORMAT, **description, "finished": False}
        if any((out / name).exists() and (out / name).stat().st_size for name in (ANSWERS_FILE, REJECTED_FILE)):
            _check_unchanged(out, description)
        folder = AnswerFolder(out, description)
        try:
            yield folder
        finally:
            folder.close()


def _check_unchanged(out: Path, description: Mapping[str, Any]) -> None:
    """Raises: DataError if regenerate.json is damaged; ConfigError naming what differs from it."""
    path = out / REGENERATE_FILE
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        before = _flat({key: value for key, value in earlier.items() if key not in MAY_CHANGE})
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error}): choose another --out") from error
    kept = {key: value for key, value in description.items() if key not in MAY_CHANGE}
    now = _flat(json.loads(json.dumps(kept)))
    different = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if different:
        seen = "; ".join(f"{key} was {before.get(key)}, is now {now.get(key)}" for key in different[:3])
        of_inputs = any(key.startswith("inputs.") for key in different)
        what = "other inputs, or these have changed since" if of_inputs else "other settings"
        raise ConfigError(f"{out} was begun with {what} ({seen}): use those, or choose another --out")


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested objects as one, with dotted keys."""
    if not isinstance(value, (dict, list)) or not value:
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {key: x for part, item in items for key, x in _flat(item, f"{name}.{part}" if name else str(part)).items()}
