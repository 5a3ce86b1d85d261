"""What a live run may be asked for: a save now, and other values of the few settings that leave its result alone.

The control socket's threads ask; the drafter's thread looks between steps. Neither waits for the other, except that who
asked for a save waits until it is on the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.config import FREE_LIVE, RunConfig, parse_config
from paceline.control.socket import ControlError
from paceline.errors import ConfigError


class Steering:
    """Requests to a run, and the settings that hold now.

    Args:
        config: Resolved configuration at the start.

    Attributes:
        config: The configuration as it stands; another object after each change.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._changed = threading.Condition()
        self._wanted = False
        self._num_begun = self._num_done = self._begun_step = 0
        self._answer: tuple[int, Path] | str = ""
        self._listeners: list[Callable[[RunConfig], None]] = []

    def on_change(self, listener: Callable[[RunConfig], None]) -> None:
        """Have `listener` called with the new configuration, on the asking thread."""
        self._listeners.append(listener)

    def set(self, key: str, value: Any) -> tuple[Any, Any]:
        """Change a setting; its old and new value. Raises: ControlError if it may not change live, or to that."""
        if key not in FREE_LIVE:
            raise ControlError(f"{key} cannot change while a run goes on; what can: {', '.join(FREE_LIVE)}")
        section, name = key.split(".")
        with self._changed:
            tree = self.config.model_dump(mode="json")
            old, tree[section][name] = tree[section][name], value
            try:
                self.config = parse_config(tree)
            except ConfigError as error:
                raise ControlError(str(error)) from error
            for listener in self._listeners:
                listener(self.config)
            return old, self.config.model_dump(mode="json")[section][name]

    def wants_save(self) -> bool:
        """Whether somebody waits for a save that has not been begun; asked by the drafter's thread after each step."""
        return self._wanted

    def begin_save(self, step: int) -> None:
        """A save of this step is being made; requests until now are its."""
        with self._changed:
            self._wanted, self._begun_step = False, step
            self._num_begun += 1

    def saved(self, step: int, place: Path) -> None:
        """A checkpoint is complete on the disk; from any thread."""
        self._tell(step, (step, place))

    def save_failed(self, step: int, reason: str) -> None:
        """It could not be written; from any thread."""
        self._tell(step, reason)

    def ask_to_save(self, timeout_s: float) -> tuple[int, Path]:
        """Ask for a save after the present step, and wait until it is on the disk; its step and folder.

        Raises: ControlError if it fails, or does not come in time: it may still come then.
        """
        with self._changed:
            self._wanted = True
            own = self._num_begun + 1  # the one that is begun from now on
            if not self._changed.wait_for(lambda: self._num_done >= own, timeout_s):
                raise ControlError(f"no checkpoint within {timeout_s:g} s; it is still to come: `paceline status` says")
            if isinstance(self._answer, str):
                raise ControlError(self._answer)
            return self._answer

    def _tell(self, step: int, answer: tuple[int, Path] | str) -> None:
        with self._changed:
            if step >= self._begun_step:  # an older one is no answer to whoever asked since
                self._num_done, self._answer = self._num_begun, answer
            self._changed.notify_all()
