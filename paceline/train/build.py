"""A drafter with what a training step needs around it, in whatever process it trains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.models.draft import DFlashDrafter, DraftShape
from paceline.models.kinds import drafter_class, loss_mix
from paceline.models.target import Target
from paceline.plan.resolve import ResolvedRun
from paceline.train.group import Group
from paceline.train.step import TrainStep


@dataclass(frozen=True)
class Recipe:
    """What of a resolved run decides how a drafter learns; the data is not in it.

    Attributes:
        As those of `ResolvedRun`.
    """

    config: RunConfig
    draft: DraftShape
    draft_token_ids: Tensor | None
    num_anchors: int
    batches_per_step: int
    total_steps: int

    @classmethod
    def of(cls, resolved: ResolvedRun) -> Recipe:
        """The part of a resolved run."""
        return cls(**{name: getattr(resolved, name) for name in cls.__dataclass_fields__})


def new_drafter(recipe: Recipe, target: Target, weights: dict[str, Tensor] | None = None) -> DFlashDrafter:
    """A float32 drafter on the target's device: with random weights from the seed, or these."""
    drafter = drafter_class(recipe.config.draft.kind)(recipe.draft).to(target.device)
    drafter.set_draft_vocab(recipe.draft_token_ids)
    if weights is None:
        drafter.initialise(recipe.config.run.seed, target.embed, drafter.own_head(target.head))
    else:
        drafter.load_state_dict(weights)
    return drafter


def new_step(recipe: Recipe, drafter: DFlashDrafter, target: Target, group: Group | None = None) -> TrainStep:
    """The training step of a fresh drafter, alone or as one of a group."""
    config = recipe.config
    dtype = getattr(torch, config.draft.dtype)
    return TrainStep(
        drafter,
        target.embed,
        drafter.own_head(target.head).to(dtype),
        config.optim,
        num_anchors=recipe.num_anchors,
        stratify_anchors=config.anchors.stratify,
        loss=config.loss,
        mix=loss_mix(config),
        seed=config.run.seed,
        total_steps=recipe.total_steps,
        batches_per_step=recipe.batches_per_step,
        dtype=dtype,
        kernels=config.kernels,
        recompute=config.draft.recompute,
        feature_noise=config.draft.feature_noise,
        group=group,
        shards_gradients=config.topology.shard_gradients,
    )
