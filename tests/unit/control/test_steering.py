"""Requests to a live run: a save that somebody waits for, and the settings that may change."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.config import FREE_LIVE, RunConfig, flatten, is_free_to_change, load_config, valid_keys
from paceline.control.socket import ControlError
from paceline.control.steering import Steering


def config(*overrides: str) -> RunConfig:
    return load_config(None, ["target.path=t", "data.path=d", *overrides])


class Asker:
    """Somebody in a thread who waits for a save."""

    def __init__(self, steering: Steering, timeout_s: float = 60.0) -> None:
        self.answer: Any = None
        self._thread = threading.Thread(target=self._ask, args=(steering, timeout_s))
        self._thread.start()

    def _ask(self, steering: Steering, timeout_s: float) -> None:
        try:
            self.answer = steering.ask_to_save(timeout_s)
        except ControlError as error:
            self.answer = str(error)

    def result(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.answer


def wait_for_askers(steering: Steering, number: int = 1) -> None:
    """Until so many wait for an answer."""
    deadline = time.monotonic() + 60
    while len(steering._changed._waiters) < number and time.monotonic() < deadline:  # type: ignore[attr-defined]
        time.sleep(0.001)
    assert steering.wants_save()


@pytest.mark.parametrize("key", FREE_LIVE)
def test_every_key_that_is_free_can_be_set(key: str) -> None:
    """It holds from then on in the configuration, whose listeners hear it; both values are told."""
    steering = Steering(config())
    heard: list[RunConfig] = []
    steering.on_change(heard.append)
    before = dict(flatten(steering.config))[key]
    assert steering.set(key, 7) == (before, 7)
    assert dict(flatten(steering.config))[key] == 7 and heard == [steering.config]
    assert steering.set(key, 7) == (7, 7)


def test_every_other_key_is_refused() -> None:
    """The message names what can change; a key that may change live may change on resuming as well."""
    steering = Steering(config())
    for key in [*valid_keys(), "nonsense", "run", "", "run.stall_s.x"]:
        if key not in FREE_LIVE:
            with pytest.raises(ControlError, match="cannot change while a run goes on; what can: run.max_hours"):
                steering.set(key, 1)
    assert steering.config == config()
    assert all(is_free_to_change(key) for key in FREE_LIVE)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("checkpoint.every_steps", 0),
        ("checkpoint.every_steps", "often"),
        ("checkpoint.keep_last", None),
        ("run.stall_s", -1),
        ("run.stall_s", float("nan")),
        ("profiling.interval", {"a": 1}),
        ("run.max_hours", []),
    ],
)
def test_a_value_that_cannot_be_changes_nothing(key: str, value: Any) -> None:
    """The message is the configuration's own; nobody hears of it."""
    steering = Steering(config())
    heard: list[RunConfig] = []
    steering.on_change(heard.append)
    with pytest.raises(ControlError, match=key):
        steering.set(key, value)
    assert steering.config == config() and heard == []


def test_a_save_is_waited_for_until_it_is_on_the_disk() -> None:
    """Its step and place are the answer, also to several who asked before it was begun."""
    steering = Steering(config())
    assert not steering.wants_save()
    askers = [Asker(steering), Asker(steering)]
    wait_for_askers(steering, 2)
    steering.begin_save(5)
    assert not steering.wants_save()
    steering.saved(5, Path("step-5"))
    assert [asker.result() for asker in askers] == 2 * [(5, Path("step-5"))]


def test_a_save_that_was_begun_before_is_not_the_answer() -> None:
    """Who asks while an older one is being written gets one that was begun afterwards."""
    steering = Steering(config())
    steering.begin_save(5)
    asker = Asker(steering)
    wait_for_askers(steering)
    steering.saved(5, Path("step-5"))
    assert steering.wants_save()
    steering.begin_save(6)
    steering.saved(5, Path("step-5"))
    asker._thread.join(0.1)
    assert asker.answer is None
    steering.saved(6, Path("step-6"))
    assert asker.result() == (6, Path("step-6"))


def test_a_save_that_fails_is_an_error() -> None:
    """The reason is told to who asked; the next one may do."""
    steering = Steering(config())
    asker = Asker(steering)
    wait_for_askers(steering)
    steering.begin_save(5)
    steering.save_failed(5, "step-5 cannot be written: No space left on device")
    assert asker.result() == "step-5 cannot be written: No space left on device"
    asker = Asker(steering)
    wait_for_askers(steering)
    steering.begin_save(6)
    steering.saved(6, Path("step-6"))
    assert asker.result() == (6, Path("step-6"))


def test_a_save_that_does_not_come_in_time_is_still_to_come() -> None:
    """The request stands."""
    steering = Steering(config())
    assert "no checkpoint within 0.01 s" in Asker(steering, 0.01).result()
    assert steering.wants_save()
