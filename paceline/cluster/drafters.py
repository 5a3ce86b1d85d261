"""M drafter ranks as one training step: rank 0 in this process, the others in processes of a Ray cluster.

Micro-batch n of a step belongs to one rank, by its number alone. What is not rank 0's is sent on as it comes, features
by reference, so that they go from their target to their rank; at the end of a step the ranks update together.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paceline
from paceline.cluster.arrays import AwayBatch, pack, pack_tokens
from paceline.cluster.drafter_host import DrafterHost, RankReady
from paceline.cluster.pages import GROUP
from paceline.cluster.ray_cluster import cpus_of, tree_of, wait_for
from paceline.errors import GroupLost, ModelError, PacelineError, PipelineError
from paceline.models.draft import DFlashDrafter
from paceline.profiling import stages
from paceline.records import FeatureBatch, StepSums
from paceline.train.build import Recipe
from paceline.train.group import Group, listen
from paceline.train.step import PendingResult, TrainStep

log = logging.getLogger(__name__)

TIMEOUT_S = 300.0
"""Seconds that a rank waits for the others, to come and in each collective."""

LOOK_S = 0.5
"""Seconds between looks at whether the other ranks are well."""


def rank_of(number: int, batches_per_step: int, size: int) -> int:
    """Whose micro-batch this is. Rank 0 has the last one in turn: the others are under way by then."""
    return (number % batches_per_step + 1) % size


class RemoteRanks:
    """Ranks 1 to M - 1.

    Args:
        ray: The connected module.
        recipe: Of the run.
    """

    def __init__(self, ray: Any, recipe: Recipe) -> None:
        self._ray = ray
        self._recipe = recipe
        self.size = recipe.config.topology.drafters
        self.shards_gradients = recipe.config.topology.shard_gradients
        self.actors: list[Any] = []
        self.ready: list[RankReady] = []

    def start(self) -> None:
        """Start all processes; `wait` says when they have what they need."""
        config, recipe = self._recipe.config, self._recipe
        token_ids = recipe.draft_token_ids
        fields = {
            "draft": dataclasses.asdict(recipe.draft),
            "draft_token_ids": None if token_ids is None else pack(token_ids),
            "num_anchors": recipe.num_anchors,
            "batches_per_step": recipe.batches_per_step,
            "total_steps": recipe.total_steps,
        }
        options = {
            "num_cpus": cpus_of(config),
            "num_gpus": int(config.run.device.startswith("cuda")),
            "max_restarts": 0,
            "scheduling_strategy": "SPREAD",
        }
        tree = tree_of(config)
        kind = self._ray.remote(concurrency_groups={GROUP: 1})(DrafterHost).options(**options)
        self.actors = [kind.remote(tree, fields, rank) for rank in range(1, self.size)]
        self._loading = [actor.load.remote() for actor in self.actors]

    def wait(self, fingerprint: str | None, head: str, should_stop: Callable[[], object] = lambda: False) -> None:
        """Raises: ModelError if one has not what it needs; GroupLost if its process ends."""
        for rank, loading in enumerate(self._loading, start=1):
            wait_for(self._ray, loading, f"drafter-{rank}", should_stop)
            ready: RankReady = self.get(rank, loading)
            if ready.problem is not None:
                raise ModelError(f"drafter-{rank} on {ready.host}: {ready.problem}")
            if ready.version != paceline.__version__:
                raise ModelError(
                    f"drafter-{rank} on {ready.host} has Paceline {ready.version}, here it is {paceline.__version__}"
                )
            if ready.fingerprint not in (None, fingerprint) or ready.head != head:
                raise ModelError(f"drafter-{rank} on {ready.host} has other weights behind the target's path")
            self.ready.append(ready)

    def join(self, host: str, drafter: DFlashDrafter, place: Path | None) -> Group:
        """Have all ranks meet, with this drafter or what a checkpoint holds; rank 0's side of the group.

        Raises: GroupLost.
        """
        store = listen(host, TIMEOUT_S)
        weights = None  # a checkpoint has its own
        if place is None:
            weights = self._ray.put({name: pack(weight.cpu()) for name, weight in drafter.state_dict().items()})
        path = None if place is None else str(place.resolve())
        meeting = (host, store.port)
        self._joining = [actor.join.remote(meeting, self.size, TIMEOUT_S, weights, path) for actor in self.actors]
        self._store = store  # it is where they meet, as long as the group lasts
        try:
            return Group.open(0, self.size, store, drafter.fc.weight.device, TIMEOUT_S)
        except PipelineError as error:
            for rank, joining in enumerate(self._joining, start=1):
                if self._ray.wait([joining], timeout=0)[0]:
                    self.get(rank, joining)  # knows more
            raise GroupLost(str(error), role=error.role, batch=None) from error

    def joined(self) -> None:
        """Wait for what the ranks load after they have met. Raises: GroupLost, or what went wrong there."""
        for rank, joining in enumerate(self._joining, start=1):
            self.get(rank, joining)

    def get(self, rank: int, call: Any) -> Any:
        """What a rank's call gives. Raises: GroupLost if its process is gone; what went wrong there."""
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            raise self.told(rank, error) from error

    def lost(self, rank: int, error: BaseException) -> GroupLost:
        """The error for a rank whose process is gone."""
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return GroupLost(f"the process of drafter-{rank} was lost: {reason}", role=f"drafter-{rank}", batch=None)

    def told(self, rank: int, error: BaseException) -> PacelineError:
        """The error for a call that failed: the group is lost with a rank's process, and where a rank waited in vain
        for another; what went wrong in one would do so again."""
        cause = getattr(error, "cause", None)
        if cause is None:
            return self.lost(rank, error)
        if isinstance(cause, self._ray.exceptions.RayError) or "CUDA error" in str(cause):
            return self.lost(rank, cause)  # features went with their host, or the process has lost its device
        if isinstance(cause, PacelineError):
            return cause
        failed = PipelineError(
            f"drafter-{rank} failed: {type(cause).__name__}: {cause}", role=f"drafter-{rank}", batch=None
        )
        failed.__cause__ = cause
        return failed

    def outcome(self, call: Any) -> tuple[bool, BaseException | None]:
        """Whether a call is over, and what it failed with."""
        if not self._ray.wait([call], timeout=0)[0]:
            return False, None
        try:
            self._ray.get(call)
        except Exception as error:  # whatever it is, the group is at an end
            return True, error
        return True, None

    def by_role(self) -> dict[str, Any]:
        """The actors by role."""
        return {f"drafter-{rank}": actor for rank, actor in enumerate(self.actors, start=1)}

    def roles(self) -> dict[str, dict[str, Any]]:
        """Where each rank runs, for ``run.json``."""
        return {
            f"drafter-{rank}": {"pid": ready.pid, "host": ready.host, "device": ready.device}
            for rank, ready in enumerate(self.ready, start=1)
        }

    def close(self) -> None:
        """End the processes."""
        for actor in self.actors:
            self._ray.kill(actor)


class GroupStep:
    """The training step of all ranks, as the loop and the saver know it from `TrainStep`.

    Attributes:
        step: Rank 0's own.
    """

    def __init__(self, step: TrainStep, ranks: RemoteRanks) -> None:
        self.step = step
        self._ranks = ranks
        self._sums: list[tuple[int, Any]] = []
        self._turns = [0] * ranks.size  # micro-batches of each rank since the last update
        self._calls: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._problem: PacelineError | None = None
        self._watcher = threading.Thread(target=self._watch, name="group-watch", daemon=True)
        self._watcher.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def accumulate(self, batch: FeatureBatch) -> StepSums:
        """Take a micro-batch, here or at its rank; of another rank's the sums come with `gather`."""
        if not isinstance(batch, AwayBatch):
            self._turns[0] += 1
            self._even_out()  # where ranks wait for each other, nobody else's part of the turn is to be missing
            return self.step.accumulate(batch)
        self._turns[batch.rank] += 1
        actor = self._ranks.actors[batch.rank - 1]
        self._sums.append((batch.rank, actor.accumulate.remote(pack_tokens(batch.tokens), batch.reference)))
        return StepSums(batches=1)

    def gather(self) -> StepSums:
        """Sums of what other ranks have accumulated since the last call, without its number of batches.

        Raises: GroupLost, or what went wrong there.
        """
        total = StepSums()
        self._even_out()
        calls, self._sums = self._sums, []
        for rank, call in calls:
            try:
                with stages.REMOTE_WAIT:
                    sums: StepSums = self._ranks.get(rank, call)
            except PacelineError as error:
                self._break_off(error)  # what is to be saved now would wait for it
                raise
            total += dataclasses.replace(sums, batches=0)
        return total

    def _even_out(self) -> None:
        """With `shard_gradients` each micro-batch ends with a collective: ranks that have none in a turn join in."""
        if not self._ranks.shards_gradients:
            return
        most = max(self._turns)
        for rank, actor in enumerate(self._ranks.actors, start=1):
            for _ in range(most - self._turns[rank]):
                self._sums.append((rank, actor.join_turn.remote()))
        own, self._turns = self._turns[0], [most] * self._ranks.size
        for _ in range(most - own):
            self.step.accumulate(None)

    def update(self, step: int) -> PendingResult:
        """Update on all ranks. Raises: GroupLost."""
        self._turns = [0] * self._ranks.size
        self._everywhere("update", step)
        try:
            return self.step.update(step)
        except PipelineError as error:
            raise self._told(error) from error

    def drop(self) -> None:
        """Forget what was gathered for the next update, on all ranks."""
        self._sums.clear()
        self._turns = [0] * self._ranks.size
        for rank, actor in enumerate(self._ranks.actors, start=1):
            self._ranks.get(rank, actor.drop.remote())
        self.step.drop()

    def not_finite(self, batch: FeatureBatch) -> str | None:
        """As `TrainStep.not_finite`, of the rank whose batch it is."""
        if not isinstance(batch, AwayBatch):
            return self.step.not_finite(batch)
        actor = self._ranks.actors[batch.rank - 1]
        found: str | None = self._ranks.get(
            batch.rank, actor.not_finite.remote(pack_tokens(batch.tokens), batch.reference)
        )
        return found

    def gather_buffers(self) -> None:
        """Have the other ranks give what rank 0 writes; for `Saver`."""
        self._everywhere("copy_buffers")

    def close(self) -> None:
        """End the group's watch."""
        self._calls.put(None)
        self._watcher.join()
        self.step.group.close()

    def _everywhere(self, method: str, *args: Any) -> None:
        for rank, actor in enumerate(self._ranks.actors, start=1):
            self._calls.put((rank, getattr(actor, method).remote(*args)))

    def _told(self, error: PipelineError) -> PacelineError:
        """The watcher knows which rank is gone; a collective only that one is."""
        if self._problem is None and self._watcher.is_alive():
            self._watcher.join(2 * LOOK_S)
        return self._problem or GroupLost(str(error), role=error.role, batch=None)

    def _watch(self) -> None:
        """Break the group off as soon as a rank's part of a collective has failed: the others would wait for it."""
        pending: list[tuple[int, Any]] = []
        while True:
            try:
                call = self._calls.get(timeout=LOOK_S)
            except queue.Empty:
                pass
            else:
                if call is None:
                    return
                pending.append(call)
            under_way = []
            for rank, each in pending:
                is_done, error = self._ranks.outcome(each)
                if error is not None:
                    self._break_off(self._ranks.told(rank, error))
                    return
                if not is_done:
                    under_way.append((rank, each))
            pending = under_way

    def _break_off(self, problem: PacelineError) -> None:
        self._problem = problem
        self.step.group.abort(str(problem))
