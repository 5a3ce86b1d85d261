"""Where a run's features come from: a target in this process, or targets in processes of a Ray cluster."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.control.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.models.target import Target
    from paceline.pipeline.local import FeatureStream
    from paceline.plan.resolve import ResolvedRun
    from paceline.records import FeatureBatch


@dataclass(frozen=True)
class Targets:
    """What a run has of its target.

    Attributes:
        target: In this process: the part that makes features, or embedding and head alone.
        fingerprint, packed, notes: Of the part that makes features; notes are what there is to say of it.
        make_features: Features of batch n.
        document_features: Context features of a document alone.
        open_stream: `pipeline.local.open_stream`, with targets in other processes if there are.
        roles: Processes elsewhere by role.
    """

    target: Target
    fingerprint: str
    packed: bool
    packing_note: str
    quantization_note: str | None
    make_features: Callable[[int], FeatureBatch]
    document_features: Callable[[Tensor], Tensor]
    open_stream: Callable[..., contextlib.AbstractContextManager[FeatureStream]]
    roles: dict[str, dict[str, Any]]


def open_targets(
    resolved: ResolvedRun, run: RunFolder, should_stop: Callable[[], object], stack: contextlib.ExitStack
) -> Targets:
    """Load the target as `topology.executor` says; what is started ends with the stack.

    Raises: ConfigError, ModelError, PipelineError.
    """
    if resolved.config.topology.executor == "ray":
        return _ray_targets(resolved, run, should_stop, stack)
    return _local_target(resolved)


def _local_target(resolved: ResolvedRun) -> Targets:
    from paceline.models.target import FeatureCache
    from paceline.pipeline.local import open_stream
    from paceline.profiling import stages
    from paceline.train.target import check_taps, load_target

    target = load_target(resolved.config)
    check_taps(target)
    gib = resolved.config.pipeline.feature_cache_gib
    cache = FeatureCache(int(gib * 2**30)) if target.device.type == "cpu" else None

    def make_features(number: int) -> FeatureBatch:
        with stages.READ_BATCH:
            tokens = resolved.batches.batch(number)
        return target.features(tokens, cache)

    return Targets(
        target,
        target.fingerprint(),
        target.packed,
        target.packing_note,
        target.quantization_note,
        make_features,
        target.document_features,
        open_stream,
        {},
    )


def _ray_targets(
    resolved: ResolvedRun, run: RunFolder, should_stop: Callable[[], object], stack: contextlib.ExitStack
) -> Targets:
    from paceline.cluster.ray_cluster import Needs, ray_cluster
    from paceline.cluster.targets import RemoteTargets
    from paceline.pipeline.local import open_stream
    from paceline.plan.memory import batch_bytes
    from paceline.train.target import load_head

    config, topology = resolved.config, resolved.config.topology
    one = batch_bytes(resolved)
    waiting = min(int(topology_depth(resolved)) * one, int(config.pipeline.queue_gib * 2**30)) + one
    on_gpu = config.run.device.startswith("cuda")
    needs = Needs(
        processes=topology.targets,
        cpus=int(topology.threads),
        gpus=topology.gpus_per_target if on_gpu else 0,
        store_bytes=waiting + RemoteTargets.lanes * topology.targets * one,
    )
    ray = stack.enter_context(ray_cluster(topology.address, needs, config.run.device))
    target = load_head(config)  # while the processes start would be better, but a cluster that is too small comes first
    remote = RemoteTargets(ray, config, resolved.batches.batch, target.device, event=run.event, should_stop=should_stop)
    stack.callback(remote.close)
    loaded = remote.start()
    return Targets(
        target,
        loaded.fingerprint,
        loaded.packed,
        loaded.packing_note,
        loaded.quantization_note,
        remote.make,
        remote.document_features,
        functools.partial(open_stream, elsewhere=remote),
        remote.roles(),
    )


def topology_depth(resolved: ResolvedRun) -> int:
    """Batches that may wait in the queue."""
    return int(resolved.config.pipeline.queue_depth)
