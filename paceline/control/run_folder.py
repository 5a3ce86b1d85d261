"""The run folder: configuration, metrics, events and the lock that keeps a second trainer out."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.config import RunConfig, dump_config, load_config, parse_config
from paceline.control.lines import LineLog
from paceline.errors import CheckpointError, ConfigError, printable
from paceline.files import explain, is_running, locked, sync, without_credentials, write_atomically


class RunFolder:
    """Paths and small files of one run. What is written has no passwords of URLs in it.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._events = LineLog(self.path / "events.jsonl")

    @property
    def config_file(self) -> Path:
        """The resolved configuration; its presence makes the folder a run."""
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        """One JSON line an optimizer step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints and of the pointers `latest` and `best`."""
        return self.path / "checkpoints"

    @property
    def exists(self) -> bool:
        """Whether a run has been started here."""
        return self.config_file.is_file()

    def read_config(self) -> RunConfig:
        """The resolved configuration. Raises: CheckpointError if this is no run folder."""
        if not self.exists:
            raise CheckpointError(f"{self.path} is no run folder: it has no config.yaml")
        try:
            return load_config(self.config_file)
        except ConfigError as error:
            raise CheckpointError(f"{self.config_file} is damaged: {error}") from error

    def write_config(self, config: RunConfig) -> None:
        """Record the resolved configuration."""
        tree = without_credentials(config.model_dump(mode="json"))
        write_atomically(self.config_file, dump_config(parse_config(tree)))

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write a small JSON file of the run, whole or not at all."""
        write_atomically(self.path / name, json.dumps(without_credentials(content), indent=1) + "\n")

    def event(self, kind: str, **content: Any) -> None:
        """Append a line to ``events.jsonl``, from any thread; while the disk takes none it waits in memory."""
        self._events.write({"time": time.time(), "event": kind, **without_credentials(content)})

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run; a lock that a dead process left does not count.

        Raises: CheckpointError if another process trains here, or the folder cannot be locked.
        """

        def busy(holder: str) -> CheckpointError:
            return CheckpointError(
                f"{self.path} is being trained by process {holder}{self._host_of(holder)}: "
                "stop it, or choose another run.dir"
            )

        with contextlib.ExitStack() as stack:
            try:
                if not self.path.is_dir():
                    stack.callback(self._remove_if_unused)
                    self.path.mkdir(parents=True, exist_ok=True)
                    sync(self.path.absolute().parent)
                stack.enter_context(locked(self.path / "run.lock", busy))
            except OSError as error:
                raise CheckpointError(f"run.dir {self.path} cannot be locked: {explain(error)}") from error
            stack.callback(self._events.close)
            yield

    def _remove_if_unused(self) -> None:
        """A folder of this process's in which no run came about."""
        with contextlib.suppress(OSError):
            if [path.name for path in self.path.iterdir()] == ["run.lock"]:
                (self.path / "run.lock").unlink()
                self.path.rmdir()

    def has_saved(self) -> bool:
        """Whether ``events.jsonl`` tells of a checkpoint."""
        with contextlib.suppress(OSError), open(self.path / "events.jsonl", "rb") as file:
            return any(b'"event": "checkpoint"' in line for line in file)
        return False

    def _host_of(self, pid: str) -> str:
        """``" on HOST"``, if the process has said so; for a message."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            record = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
            if str(record["pid"]) == pid:
                return f" on {printable(str(record['host']))}"
        return f" on {platform.node()}" if pid.isdecimal() and is_running(int(pid)) else ""
