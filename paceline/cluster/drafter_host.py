"""What runs in the process of a drafter rank above 0: the same training step, and in the colocated layout a target.

Rank 0 is the driver itself, which says what is done and when; nothing here knows of steps, batches in order or
checkpoints.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.cluster.arrays import Arrays, Packed, unpack, unpack_features, unpack_tokens
from paceline.cluster.pages import Watched
from paceline.cluster.target_host import write_log_to
from paceline.config import parse_config
from paceline.errors import PacelineError
from paceline.models.draft import DraftShape
from paceline.pipeline.local import RETRY_S, may_pass
from paceline.profiling import stages
from paceline.records import FeatureBatch, StepSums, TokenBatch
from paceline.train import checkpoint
from paceline.train.build import Recipe, new_drafter, new_step
from paceline.train.feature_cache import open_cached
from paceline.train.group import Group
from paceline.train.target import check_taps, load_head, load_target

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankReady:
    """What a rank says once it has its part of the target.

    Attributes:
        fingerprint: Of its layers; None unless it is colocated.
        head: Of embedding and head.
    """

    pid: int
    host: str
    version: str
    problem: str | None = None
    device: str = ""
    fingerprint: str | None = None
    head: str = ""


class DrafterHost(Watched):
    """A drafter rank in a process of its own.

    Args:
        tree: The resolved configuration, plain.
        fields: The rest of the `Recipe`, with arrays in the place of tensors.
    """

    def __init__(self, tree: dict[str, Any], fields: dict[str, Any], rank: int) -> None:
        config = parse_config(tree)
        if config.run.device.startswith("cuda"):  # Ray shows a process the GPUs that are its own
            config = config.model_copy(update={"run": config.run.model_copy(update={"device": "cuda:0"})})
        token_ids = fields["draft_token_ids"]
        self._recipe = Recipe(
            config,
            DraftShape(**fields["draft"]),
            None if token_ids is None else unpack(token_ids).clone(),
            fields["num_anchors"],
            fields["batches_per_step"],
            fields["total_steps"],
        )
        self._rank = rank
        self._make: Callable[[TokenBatch], FeatureBatch]
        self._role = f"drafter-{rank}"
        self._folder = Path(config.run.dir)
        if self._folder.is_dir():
            write_log_to(self._folder / "logs" / f"{self._role}.log")
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")

    def load(self) -> RankReady:
        """Load head or target; problems that another try would have again are told, not raised."""
        here: dict[str, Any] = {"pid": os.getpid(), "host": platform.node(), "version": paceline.__version__}
        config = self._recipe.config
        is_colocated = config.topology.layout == "colocated"
        fingerprint = None
        try:
            if is_colocated and config.target.cache is None:
                self._target = load_target(config)
                check_taps(self._target)
                self._make, fingerprint = self._target.features, self._target.fingerprint()
            else:
                self._target = load_head(config)
            if config.target.cache is not None:
                cached = open_cached(config, self._target)
                self._make, fingerprint = cached.features, cached.manifest.target_fingerprint
        except PacelineError as error:
            return RankReady(**here, problem=f"{type(error).__name__}: {error}")
        self.open_page(self._folder, self._role, config.run.device.startswith("cuda"))
        head = self._target.head_fingerprint()
        return RankReady(**here, device=str(self._target.device), fingerprint=fingerprint, head=head)

    def join(
        self,
        meeting: tuple[str, int],
        size: int,
        timeout_s: float,
        weights: dict[str, Packed] | None,
        place: str | None,
    ) -> None:
        """Meet the other ranks, with the drafter that all of them start from.

        Args:
            weights: The fresh drafter's; None with a checkpoint.
            place: Checkpoint to go on from, which this host has to see; None: a fresh start.
        Raises: PipelineError, CheckpointError.
        """
        device = self._target.device
        own = None if weights is None else {name: unpack(weight).to(device) for name, weight in weights.items()}
        drafter = new_drafter(self._recipe, self._target, own)
        self._group = Group.open(self._rank, size, meeting, device, timeout_s)
        self._step = new_step(self._recipe, drafter, self._target, self._group)
        if place is not None:
            path = Path(place)
            state = checkpoint.load_state(path)
            checkpoint.load_training(path, drafter, self._step.optimizer, is_started=state.step > 0)

    def accumulate(self, fields: dict[str, Any], arrays: Arrays | None) -> StepSums:
        """One micro-batch: of these features, or in the colocated layout of those that are made here."""
        with stages.named_thread(self._role), stages.as_role(self._role):
            return self._step.accumulate(self._features(fields, arrays))

    def join_turn(self) -> StepSums:
        """Take part in a turn without a micro-batch."""
        return self._step.accumulate(None)

    def not_finite(self, fields: dict[str, Any], arrays: Arrays | None) -> str | None:
        """As `TrainStep.not_finite`."""
        return self._step.not_finite(self._features(fields, arrays))

    def update(self, step: int) -> None:
        """Take part in an update; its result is rank 0's to read."""
        with stages.as_role(self._role):
            self._step.update(step)

    def drop(self) -> None:
        """As `TrainStep.drop`."""
        self._step.drop()

    def copy_buffers(self) -> None:
        """Take part in gathering what rank 0 writes."""
        self._step.optimizer.copy_buffers(None)

    def _made_here(self, tokens: TokenBatch) -> FeatureBatch:
        """Features of this process's own target, or read from a cache; made again where that may help."""
        for retry in range(self._recipe.config.pipeline.max_retries):
            try:
                return self._make(tokens)
            except Exception as error:  # whatever it is, it ends the run when it comes again
                if not may_pass(error):
                    raise
                log.warning("batch %d is made again: %s: %s", tokens.number, type(error).__name__, error)
                time.sleep(RETRY_S * 2**retry)
        return self._make(tokens)

    def _features(self, fields: dict[str, Any], arrays: Arrays | None) -> FeatureBatch:
        tokens = unpack_tokens(fields)
        stages.next_batch(tokens.number)
        if arrays is None:
            with stages.GET_WAIT, stages.as_role(f"target-{self._rank}"):
                return self._made_here(tokens)
        device = self._target.device
        last = None if arrays.last_hidden is None else unpack_features(arrays.last_hidden, device)
        return FeatureBatch(tokens, unpack_features(arrays.context_feature, device), last)
