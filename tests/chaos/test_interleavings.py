"""The channel and the coordinator in every order in which their threads can take turns, with a fault in every state."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.pipeline.channel import OrderedChannel
from tests.chaos.interleavings import ENDS, FAILS, LEAVES, STOPS, Found, Setting, explore

SHORT = [
    Setting(targets=1, batches=3, queue_depth=1),
    Setting(targets=1, batches=4, queue_depth=3, min_ready=2, max_batches=1),
    Setting(targets=2, batches=2, queue_depth=2, min_ready=2, faults=(FAILS, ENDS, LEAVES)),
    Setting(targets=2, batches=2, queue_depth=3, max_batches=1, faults=(FAILS, STOPS)),
]
LONG = [
    Setting(targets=2, batches=3, queue_depth=2, min_ready=2, faults=(FAILS, ENDS, LEAVES)),
    Setting(targets=2, batches=3, queue_depth=3, max_batches=1, faults=(FAILS, STOPS)),
    Setting(targets=1, batches=4, queue_depth=2, min_ready=2),
    Setting(targets=2, batches=3, queue_depth=1),
    Setting(targets=2, batches=4, queue_depth=2),
    Setting(targets=2, batches=4, queue_depth=2, min_ready=2),
    Setting(targets=2, batches=4, queue_depth=3, min_ready=2, max_batches=2),
    Setting(targets=2, batches=4, queue_depth=4, max_batches=1),
    Setting(targets=3, batches=3, queue_depth=2, faults=(FAILS, LEAVES)),
]


def check(setting: Setting, at_least: int) -> Found:
    found = explore(setting)
    print(f"{setting}: {found.states} states, {found.executions} executions")
    assert not found.problems
    assert found.states >= at_least
    return found


@pytest.mark.parametrize("setting", SHORT)
def test_no_order_of_turns_loses_a_batch_or_hangs(setting: Setting) -> None:
    """Whoever goes on when, and whatever fails when: every thread ends, batches come in order, failures arrive."""
    check(setting, at_least=100)


@pytest.mark.slow
@pytest.mark.parametrize("setting", LONG)
def test_no_order_of_turns_of_larger_pipelines_does_either(setting: Setting) -> None:
    """The same with more batches and threads, and every fault."""
    check(setting, at_least=400)


def test_two_explorations_find_the_same() -> None:
    """The search is deterministic: the same states, by the same executions."""
    setting = Setting(targets=1, batches=2, queue_depth=1)
    assert explore(setting) == explore(setting)


@pytest.mark.parametrize(
    ("method", "problem"),
    [("close", "deadlock"), ("fail", "deadlock"), ("put", "deadlock"), ("get", "delivered")],
)
def test_a_channel_with_a_mistake_is_found_out(monkeypatch: pytest.MonkeyPatch, method: str, problem: str) -> None:
    """A wake-up that is forgotten on close, fail or put is a deadlock; a batch that stays is delivered twice."""
    real = getattr(OrderedChannel, method)

    def without_waking(self: Any, *args: Any) -> Any:
        waking, self._changed.notify_all = self._changed.notify_all, lambda: None
        try:
            return real(self, *args)
        finally:
            self._changed.notify_all = waking

    def without_taking(self: Any, *args: Any) -> Any:
        batch = real(self, *args)
        if batch is not None and batch.tokens.number == 1:
            self._next -= 1
            self._batches[1] = batch
        return batch

    monkeypatch.setattr(OrderedChannel, method, without_taking if method == "get" else without_waking)
    found = explore(Setting(targets=1, batches=3, queue_depth=1, faults=(FAILS, LEAVES)))
    assert any(problem in text for text in found.problems), found.problems
