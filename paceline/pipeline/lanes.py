"""A target that has several batches under way at a time: what the threads of its lanes call, and when it was idle."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from paceline.pipeline.local import MakeFeatures
from paceline.profiling import stages
from paceline.records import FeatureBatch


class Idle:
    """Counts how long there was no call, of calls that may overlap; before the first one does not count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_calls = 0
        self._free_since: float | None = None

    @contextlib.contextmanager
    def call(self) -> Iterator[float]:
        """Around a call: the seconds of idleness that it ends, 0 beside another one."""
        with self._lock:
            self._num_calls += 1
            since, self._free_since = self._free_since, None
        try:
            yield 0.0 if since is None else time.perf_counter() - since
        finally:
            with self._lock:
                self._num_calls -= 1
                if not self._num_calls:
                    self._free_since = time.perf_counter()


class Lanes:
    """Targets for `pipeline.local.open_stream`, in this process: each lane is a thread that makes a batch.

    Attributes:
        lanes: Threads of the target.
    """

    def __init__(self, make_features: MakeFeatures, lanes: int) -> None:
        self.lanes = lanes
        self._make_features = make_features
        self._idle = Idle()
        self._lock = threading.Lock()
        self._idle_s = 0.0

    def lane(self, role: str) -> MakeFeatures:
        """What makes features for the threads of this role."""

        def make(number: int) -> FeatureBatch:
            with stages.as_role(role), self._idle.call() as idle_s:
                with self._lock:
                    self._idle_s += idle_s
                return self._make_features(number)

        return make

    def take_idle(self) -> float:
        """Seconds since the last call in which the target had nothing to do."""
        with self._lock:
            idle_s, self._idle_s = self._idle_s, 0.0
        return idle_s
