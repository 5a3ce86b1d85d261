"""Where a run's features come from: a target in this process or in others of a Ray cluster, a server, or a cache."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.control.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.cluster.drafters import RemoteRanks
    from paceline.models.target import Target
    from paceline.pipeline.local import FeatureStream
    from paceline.plan.resolve import ResolvedRun
    from paceline.profiling.live import Others
    from paceline.records import FeatureBatch


@dataclass(frozen=True)
class Targets:
    """What a run has of its target, and the drafter's other ranks.

    Attributes:
        target: In this process: the part that makes features, or embedding and head alone.
        fingerprint, packed, packing_note, quantization_note: Of the part that makes features.
        make_features: Features of batch n.
        document_features: Context features of a document alone; None where there is `row_features`.
        row_features: Context features of the document of a data set row, where they are kept.
        open_stream: `pipeline.local.open_stream`, with targets in other processes if there are.
        roles: Processes elsewhere by role.
        ranks: Drafter ranks above 0; None: there is one drafter.
        host: This process's, for the ranks to meet at.
        others: The profile pages of all processes elsewhere.
        actors: Those of targets elsewhere that run at the moment, by role.
        places: Where they run now; `roles` is from the start.
        transport: What has come from them, as `RemoteTargets.transport` has it; None: nothing travels.
        server: The server that runs the target, as `ServedTarget.check` found it; None: there is none.
        served: What it has delivered so far, as `ServedTarget.counts` has it.
    """

    target: Target
    fingerprint: str
    packed: bool
    packing_note: str
    quantization_note: str | None
    make_features: Callable[[int], FeatureBatch]
    document_features: Callable[[Tensor], Tensor] | None
    open_stream: Callable[..., contextlib.AbstractContextManager[FeatureStream]]
    roles: dict[str, dict[str, Any]]
    ranks: RemoteRanks | None = None
    host: str = "127.0.0.1"
    others: Others | None = None
    actors: Callable[[], dict[str, Any]] = dict
    places: Callable[[], dict[str, dict[str, Any]]] = dict
    transport: Callable[[], dict[str, float]] | None = None
    row_features: Callable[[int], Tensor] | None = None
    server: dict[str, Any] | None = None
    served: Callable[[], dict[str, Any]] | None = None


def open_targets(
    resolved: ResolvedRun, run: RunFolder, should_stop: Callable[[], object], stack: contextlib.ExitStack
) -> Targets:
    """Load the target, and start what runs elsewhere, as `topology` says; it ends with the stack.

    Raises: ConfigError, ModelError, PipelineError.
    """
    topology = resolved.config.topology
    if resolved.config.target.server is not None:
        return _served_target(resolved, run, should_stop, stack)
    if topology.executor == "local":
        return _local_target(resolved)
    from paceline.cluster.pages import RemotePages
    from paceline.cluster.ray_cluster import Needs, cpus_of, own_host, ray_cluster
    from paceline.plan.memory import count_parameters

    is_split = topology.layout == "split"
    on_gpu = resolved.config.run.device.startswith("cuda")
    others = topology.drafters - 1
    needs = Needs(
        processes=others + (topology.targets if is_split else 0),
        cpus=cpus_of(resolved.config),
        gpus=(topology.gpus_per_target if is_split else 1) if on_gpu else 0,
        store_bytes=(_under_way(resolved) if is_split else 0) + (4 * count_parameters(resolved.draft) if others else 0),
        drafters=others,
    )
    ray = stack.enter_context(ray_cluster(topology.address, needs, resolved.config.run.device))
    ranks = _start_ranks(ray, resolved, stack) if others else None
    made = _remote_targets(ray, resolved, run, should_stop, stack) if is_split else _own_target(resolved)
    if ranks is not None:
        ranks.wait(made.fingerprint, made.target.head_fingerprint(), should_stop)
    roles = made.roles | (ranks.roles() if ranks is not None else {})

    def actors() -> dict[str, Any]:
        return made.actors() | (ranks.by_role() if ranks is not None else {})

    def places() -> dict[str, dict[str, Any]]:
        return made.places() | (ranks.roles() if ranks is not None else {})

    pages = RemotePages(ray, actors, places)
    return replace(made, ranks=ranks, roles=roles, host=own_host(topology.address), others=pages)


def _local_target(resolved: ResolvedRun) -> Targets:
    if resolved.config.target.cache is not None:
        return _cached_target(resolved)
    from paceline.models.split import lanes
    from paceline.models.target import FeatureCache
    from paceline.pipeline.lanes import Lanes
    from paceline.pipeline.local import open_stream
    from paceline.profiling import stages
    from paceline.train.target import check_taps, load_target

    target = load_target(resolved.config)
    check_taps(target)
    num_parts = resolved.config.topology.gpus_per_target
    gib = resolved.config.pipeline.feature_cache_gib
    cache = FeatureCache(int(gib * 2**30)) if target.device.type == "cpu" else None

    def make_features(number: int) -> FeatureBatch:
        with stages.READ_BATCH:
            tokens = resolved.batches.batch(number)
        return target.features(tokens, cache)

    open_lanes = functools.partial(open_stream, elsewhere=Lanes(make_features, lanes(num_parts)))
    return Targets(
        target,
        target.fingerprint(),
        target.packed,
        target.packing_note,
        target.quantization_note,
        make_features,
        target.document_features,
        open_lanes if num_parts > 1 else open_stream,
        {},
    )


def _served_target(
    resolved: ResolvedRun, run: RunFolder, should_stop: Callable[[], object], stack: contextlib.ExitStack
) -> Targets:
    from paceline.errors import PipelineError
    from paceline.pipeline.channel import ChannelClosed
    from paceline.pipeline.local import open_stream
    from paceline.train.served import ServedTarget, note_of
    from paceline.train.target import load_head

    target = load_head(resolved.config)
    served = ServedTarget(
        resolved.config,
        target,
        resolved.batches.batch,
        source_of=resolved.dataset.source,
        event=run.event,
        should_stop=should_stop,
    )
    stack.callback(served.close)
    try:
        served.connect()
        record = served.check(resolved.dataset, resolved.longest_row)
    except ChannelClosed as error:
        raise PipelineError("a stop was asked for at the start", role="target-0", batch=None) from error
    return Targets(
        target,
        served.fingerprint(),
        False,
        note_of(record),
        None,
        served.features,
        served.document_features,
        open_stream,
        {},
        server=record,
        served=served.counts,
    )


def _cached_target(resolved: ResolvedRun) -> Targets:
    from paceline.pipeline.local import open_stream
    from paceline.profiling import stages
    from paceline.train.feature_cache import open_cached
    from paceline.train.target import load_head

    config = resolved.config
    target = load_head(config)
    cached = open_cached(config, target)
    made = cached.manifest

    def make_features(number: int) -> FeatureBatch:
        with stages.READ_BATCH:
            return cached.features(resolved.batches.batch(number))

    return Targets(
        target,
        made.target_fingerprint,
        made.packed if config.target.packing == "auto" else config.target.packing == "packed",
        f"features are read from {config.target.cache}, which has them in {made.dtype}; no target runs",
        made.quantization,
        make_features,
        None,
        open_stream,
        {},
        row_features=cached.row_features,
    )


def _own_target(resolved: ResolvedRun) -> Targets:
    """Colocated: each rank makes the features of its own micro-batches, and here those of the others are only named."""
    import torch

    from paceline.cluster.arrays import AwayBatch
    from paceline.cluster.drafters import rank_of

    own = _local_target(resolved)
    topology = resolved.config.topology
    width = len(resolved.draft.target_layer_ids) * resolved.draft.hidden_size

    def make_features(number: int) -> FeatureBatch:
        rank = rank_of(number, resolved.batches_per_step, topology.drafters)
        if rank == 0:
            return own.make_features(number)
        tokens = resolved.batches.batch(number)
        return AwayBatch(tokens, torch.empty(len(tokens.input_ids), width, device="meta"), rank=rank)

    return replace(own, make_features=make_features)


def _start_ranks(ray: Any, resolved: ResolvedRun, stack: contextlib.ExitStack) -> RemoteRanks:
    from paceline.cluster.drafters import RemoteRanks
    from paceline.train.build import Recipe

    ranks = RemoteRanks(ray, Recipe.of(resolved))
    stack.callback(ranks.close)
    ranks.start()
    return ranks


def _under_way(resolved: ResolvedRun) -> int:
    """Bytes of features in Ray's store at a time: waiting, being made, and in training."""
    from paceline.models.split import lanes
    from paceline.plan.memory import batch_bytes

    config, one = resolved.config, batch_bytes(resolved)
    waiting = min(int(config.pipeline.queue_depth) * one, int(config.pipeline.queue_gib * 2**30))
    in_step = resolved.batches_per_step if config.topology.drafters > 1 else 1
    return waiting + one * (in_step + lanes(config.topology.gpus_per_target) * config.topology.targets)


def _remote_targets(
    ray: Any, resolved: ResolvedRun, run: RunFolder, should_stop: Callable[[], object], stack: contextlib.ExitStack
) -> Targets:
    from paceline.cluster.drafters import rank_of
    from paceline.cluster.targets import RemoteTargets
    from paceline.pipeline.local import open_stream
    from paceline.train.target import load_head

    config = resolved.config
    target = load_head(config)
    remote = RemoteTargets(
        ray,
        config,
        resolved.batches.batch,
        target.device,
        event=run.event,
        should_stop=should_stop,
        rank_of=lambda number: rank_of(number, resolved.batches_per_step, config.topology.drafters),
    )
    stack.callback(remote.close)
    loaded = remote.start(target.head_fingerprint())
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
        actors=remote.actors,
        places=remote.roles,
        transport=remote.transport,
    )
