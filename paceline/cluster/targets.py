"""Targets in processes of their own: started, asked, and started again where they die.

The threads that drive them are those of `pipeline.local`, and so is all bookkeeping; this is what a thread calls for
the features of a batch. A call goes to the role's own process while that is well, else to another one.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import paceline
from paceline.cluster.arrays import Arrays, AwayBatch, pack, pack_tokens, unpack, unpack_features
from paceline.cluster.pages import GROUP
from paceline.cluster.ray_cluster import SAY_S, cpus_of, tree_of, wait_for
from paceline.cluster.target_host import Loaded, Made, TargetHost
from paceline.config import RunConfig
from paceline.errors import GroupLost, ModelError, PipelineError
from paceline.models.split import lanes
from paceline.pipeline.channel import ChannelClosed
from paceline.profiling import stages
from paceline.records import FeatureBatch, TokenBatch

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Seconds for calls to end once their process has been."""

LOOK_S = 0.5
"""Seconds between looks at whether a process is there again, or a stop has been asked for."""


class _Place:
    """One role's process: the present one, or the one that is being started."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.actor: Any = None
        self.loading: Any = None
        self.loaded: Loaded | None = None
        self.num_calls = 0
        self.num_restarts = 0
        self.lost: str | None = None
        self.suspect: int | None = None

    @property
    def is_ready(self) -> bool:
        return self.lost is None and self.loaded is not None


def _without_memory(size: tuple[str, tuple[int, ...]]) -> Tensor:
    """A tensor of this type and shape, of which there is nothing here."""
    return torch.empty(size[1], dtype=getattr(torch, size[0]), device="meta")


class RemoteTargets:
    """N target processes of a Ray cluster.

    Args:
        ray: The connected module.
        config: Resolved.
        read_batch: The row of batch n, here: rows are small, and no other host needs the data.
        device: Where features are to be.
        event: Writes a line of ``events.jsonl``.
        should_stop: True-like once a stop was asked for.
        rank_of: Whose a micro-batch is; of other ranks than 0 features do not come here.

    Attributes:
        lanes: Calls that a target has at a time: one for each of its parts, while the result of another travels.
        num_bytes, fetch_s: Features that have come, and seconds that threads waited for their bytes alone.
    """

    def __init__(
        self,
        ray: Any,
        config: RunConfig,
        read_batch: Callable[[int], TokenBatch],
        device: torch.device,
        *,
        event: Callable[..., None],
        should_stop: Callable[[], object],
        rank_of: Callable[[int], int] = lambda number: 0,
    ) -> None:
        self.lanes = lanes(config.topology.gpus_per_target)
        self._rank_of = rank_of
        self._ray = ray
        self._config = config
        self._read_batch = read_batch
        self._device = device
        self._event = event
        self._should_stop = should_stop
        self._lock = threading.Lock()
        self._is_closed = False
        self._suspects: set[int] = set()
        self._idle_s = 0.0
        self._error: float | None = None
        self.num_bytes, self.fetch_s = 0, 0.0
        self._places = [_Place(f"target-{i}") for i in range(config.topology.targets)]

    def start(self, head: str) -> Loaded:
        """Start all and wait for them; what the first one says of its target, which is that of all.

        Args:
            head: Fingerprint of embedding and head in this process.
        Raises: ModelError if one cannot have its target, or has another; PipelineError if its process ends,
            with several drafters GroupLost.
        """
        self._head = head
        for place in self._places:
            self._start(place)
        for place in self._places:
            try:
                wait_for(self._ray, place.loading, place.role, self._should_stop)
                place.loaded = self._ray.get(place.loading)
            except self._ray.exceptions.RayError as error:
                # a group that starts again may be ahead of Ray's knowledge of a host that is gone
                again = self._config.topology.drafters > 1 and not isinstance(error, self._ray.exceptions.RayTaskError)
                raise (GroupLost if again else PipelineError)(
                    f"{place.role} could not be started: {error}", role=place.role, batch=None
                ) from error
            if place.loaded.problem is not None:
                raise ModelError(f"{place.role} on {place.loaded.host}: {place.loaded.problem}")
            if problem := self._foreign(place.loaded):
                raise ModelError(f"{place.role} {problem}")
        first = self._places[0].loaded
        assert first is not None
        return first

    def close(self) -> None:
        """End the processes, and the calls of threads that wait for one: they know then that it is over."""
        with self._lock:
            self._is_closed = True
        for place in self._places:
            if place.actor is not None:
                self._ray.kill(place.actor)
        deadline = time.monotonic() + CLOSE_S
        while any(place.num_calls for place in self._places) and time.monotonic() < deadline:
            time.sleep(0.01)

    def actors(self) -> dict[str, Any]:
        """Those that have their target, by role."""
        return {place.role: place.actor for place in self._places if place.is_ready}

    def roles(self) -> dict[str, dict[str, Any]]:
        """Where each role runs, for ``run.json``."""
        return {
            place.role: {"pid": place.loaded.pid, "host": place.loaded.host, "device": place.loaded.device}
            for place in self._places
            if place.loaded is not None
        }

    def lane(self, role: str) -> Callable[[int], FeatureBatch]:
        """What makes features for the threads of a role."""
        return lambda number: self.make(number, role)

    def make(self, number: int, role: str = "target-0") -> FeatureBatch:
        """Features of a batch, made in another process; where another role's dies over it, in the next.

        Raises: PipelineError if its process dies or has lost its device, which may pass, or if none is left;
            ChannelClosed when a stop was asked for while there was none to ask; what went wrong in the target.
        """
        with stages.READ_BATCH:
            tokens = self._read_batch(number)
        rank = self._rank_of(number)
        fields = pack_tokens(tokens)
        for spared in itertools.count():
            try:
                made, arrays = self._call(role, number, "features", fields, is_for_here=rank == 0)
                break
            except PipelineError as error:
                if not error.may_pass:
                    raise
                with self._lock:  # it, or the batch beside it: next time it has a process to itself
                    self._suspects.add(number)
                # of processes that died idle the batch is not to blame; there are so many of them at most
                if error.role == role or spared >= len(self._places):
                    raise
        if rank != 0:
            last = None if made.last_hidden is None else _without_memory(made.last_hidden)
            batch: FeatureBatch = AwayBatch(
                tokens,
                _without_memory(made.context_feature),
                last,
                rank=rank,
                reference=arrays,
                held_bytes=made.num_bytes,
            )
        else:
            last = None if arrays.last_hidden is None else unpack_features(arrays.last_hidden, self._device)
            batch = FeatureBatch(tokens, unpack_features(arrays.context_feature, self._device), last)
        with self._lock:
            self._suspects.discard(number)
            self._idle_s += made.idle_s
            self.num_bytes += made.num_bytes if rank == 0 else 0
            self._error = made.error if self._error is None else self._error
        return batch

    def document_features(self, input_ids: Tensor) -> Tensor:
        """Context features ``[n, L*D]`` of a document alone, on the host, in memory of their own.

        Raises: As `make`.
        """
        for _ in range(self._config.pipeline.max_retries):
            try:
                return unpack(self._call("target-0", None, "document", pack(input_ids))[0]).clone()
            except PipelineError as error:
                if not error.may_pass:
                    raise
        return unpack(self._call("target-0", None, "document", pack(input_ids))[0]).clone()

    def transport(self) -> dict[str, float]:
        """What has come so far: GiB, seconds that threads waited for bytes alone, and GB a second of that; and, where
        features travel in fp8, how far that rounds them."""
        with self._lock:
            rate = self.num_bytes / self.fetch_s / 1e9 if self.fetch_s else 0.0
            rounding = {} if self._error is None else {"relative_error": self._error}
            return {"gib": self.num_bytes / 2**30, "fetch_s": self.fetch_s, "gb_per_s": rate, **rounding}

    def take_idle(self) -> float:
        """Seconds since the last call in which targets had nothing to do, summed over them."""
        with self._lock:
            idle_s, self._idle_s = self._idle_s, 0.0
        return idle_s

    def _call(
        self, role: str, number: int | None, method: str, *args: Any, is_for_here: bool = False
    ) -> tuple[Any, Any]:
        """What a call gives, and of two values the second one by reference, unless it is for here."""
        place, actor = self._choose(role, number)
        try:
            if method != "features":
                return self._ray.get(getattr(actor, method).remote(*args)), None
            first, second = actor.features.options(num_returns=2).remote(*args)
            with stages.REMOTE_WAIT:
                made: Made = self._ray.get(first)
            if not is_for_here:
                return made, second
            started = time.perf_counter()
            with stages.FETCH:  # of another host, or nothing but a view
                arrays: Arrays = self._ray.get(second)
            with self._lock:
                self.fetch_s += time.perf_counter() - started
            return made, arrays
        except self._ray.exceptions.RayTaskError as error:
            self._check_open()
            cause = error.cause
            if "CUDA error" not in str(cause):
                raise cause from error
            self._lose(place, actor, str(cause).splitlines()[0])  # a process is of no use after that
            raise self._died(place, number, cause) from error
        except self._ray.exceptions.RayError as error:
            self._check_open()
            self._lose(place, actor, str(error).splitlines()[0])
            raise self._died(place, number, error) from error
        finally:
            with self._lock:
                place.num_calls -= 1
                for each in self._places:
                    each.suspect = None if each.suspect == number else each.suspect

    def _check_open(self) -> None:
        """Raises: ChannelClosed once the processes are ended on purpose."""
        if self._is_closed:
            raise ChannelClosed

    def _died(self, place: _Place, number: int | None, error: BaseException) -> PipelineError:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return PipelineError(
            f"the process of {place.role} was lost: {reason}", role=place.role, batch=number, may_pass=True
        )

    def _choose(self, role: str, number: int | None) -> tuple[_Place, Any]:
        """Whom to call, counted as called: the role's own process if it is well, else the one with the fewest calls.

        Waits while there is none. A batch over which a process died gets one that does nothing else: so a batch that
        kills processes is told from those that were beside it.
        """
        started, has_said = time.monotonic(), False
        while True:
            if not has_said and time.monotonic() > started + SAY_S:
                log.warning("no target is there for %.0f s: the cluster may have no room to start one again", SAY_S)
                has_said = True
            with self._lock:
                self._check_open()
                for place in self._places:
                    self._look(place)
                ready = [place for place in self._places if place.is_ready]
                for place in sorted(ready, key=lambda place: (place.role != role, place.num_calls)):
                    if place.suspect not in (None, number):
                        continue
                    if number in self._suspects:
                        place.suspect = number
                        if place.num_calls:
                            break  # until the calls that it has are over
                    place.num_calls += 1
                    return place, place.actor
                if all(place.lost is not None for place in self._places):
                    reasons = "; ".join(f"{place.role}: {place.lost}" for place in self._places)
                    raise PipelineError(f"no target is left: {reasons}", role=role, batch=None)
            if self._should_stop():
                raise ChannelClosed
            time.sleep(LOOK_S)

    def _look(self, place: _Place) -> None:
        """Whether a process that was started has its target by now."""
        if place.lost is not None or place.loaded is not None:
            return
        if not self._ray.wait([place.loading], timeout=0)[0]:
            return
        try:
            loaded: Loaded = self._ray.get(place.loading)
        except self._ray.exceptions.RayError as error:
            self._restart(place, f"it ended while it loaded: {str(error).splitlines()[0]}")
            return
        if problem := loaded.problem or self._foreign(loaded):
            self._give_up(place, problem)
            return
        place.loaded = loaded
        log.warning("%s is back, process %d on %s", place.role, loaded.pid, loaded.host)
        self._event("target is back", role=place.role, pid=loaded.pid, host=loaded.host)

    def _lose(self, place: _Place, actor: Any, reason: str) -> None:
        """A call found the process dead; of several that do, the first counts."""
        with self._lock:
            if place.actor is actor and place.lost is None and not self._is_closed:
                self._restart(place, reason)

    def _restart(self, place: _Place, reason: str) -> None:
        self._ray.kill(place.actor)
        place.loaded = None
        if place.num_restarts >= self._config.run.max_restarts:
            self._give_up(place, f"{reason} (after run.max_restarts={self._config.run.max_restarts})")
            return
        place.num_restarts += 1
        log.warning("%s was lost and is started again: %s", place.role, reason)
        self._event("target was lost", role=place.role, reason=reason, restarts=place.num_restarts)
        self._start(place)

    def _give_up(self, place: _Place, reason: str) -> None:
        place.lost = reason
        left = sum(each.lost is None for each in self._places)
        log.warning("%s is given up, %d targets are left: %s", place.role, left, reason)
        self._event("target is given up", role=place.role, reason=reason, left=left)

    def _start(self, place: _Place) -> None:
        config = self._config
        options = {
            "num_cpus": cpus_of(config),
            "num_gpus": config.topology.gpus_per_target if config.run.device.startswith("cuda") else 0,
            "name": f"paceline-{place.role}-{id(self)}-{place.num_restarts}",
            "max_restarts": 0,  # it is started again here, where it is counted and told
            "scheduling_strategy": "SPREAD",
        }
        if config.topology.gpus_per_target > 1:
            options["max_concurrency"] = self.lanes
        remote = self._ray.remote(concurrency_groups={GROUP: 1})(TargetHost).options(**options)
        place.actor = remote.remote(tree_of(config), place.role)
        place.loading = place.actor.load.remote()

    def _foreign(self, loaded: Loaded) -> str | None:
        """What of a process does not go with the others, in words."""
        if loaded.version != paceline.__version__:
            return f"on {loaded.host} has Paceline {loaded.version}, here it is {paceline.__version__}"
        first = next((place.loaded for place in self._places if place.loaded is not None), loaded)
        if loaded.fingerprint != first.fingerprint or loaded.head != self._head:
            other = "this host" if loaded.head != self._head else first.host
            return f"on {loaded.host} has other weights behind {self._config.target.path} than {other}"
        return None
