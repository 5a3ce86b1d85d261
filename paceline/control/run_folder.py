"""The run folder: configuration, metrics, events and the lock that keeps a second trainer out."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.config import RunConfig, dump_config, load_config
from paceline.errors import CheckpointError, ConfigError
from paceline.files import locked, write_atomically


class RunFolder:
    """Paths and small files of one run.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

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
        write_atomically(self.config_file, dump_config(config))

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write a small JSON file of the run, whole or not at all."""
        write_atomically(self.path / name, json.dumps(content, indent=1) + "\n")

    def event(self, kind: str, **content: Any) -> None:
        """Append a line to ``events.jsonl``."""
        line = {"time": time.time(), "event": kind, **content}
        with open(self.path / "events.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run. Raises: CheckpointError if another process trains here."""
        self.path.mkdir(parents=True, exist_ok=True)

        def busy(holder: str) -> CheckpointError:
            return CheckpointError(
                f"{self.path} is being trained by process {holder}: stop it, or choose another run.dir"
            )

        with locked(self.path / "run.lock", busy):
            yield
