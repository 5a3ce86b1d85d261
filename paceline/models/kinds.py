"""The drafter kinds that there are."""

from __future__ import annotations

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.kernels.linear_mixed_loss import Mix
from paceline.models.dflash2 import DFlash2Drafter
from paceline.models.draft import DFlashDrafter
from paceline.models.dspark import DSparkDrafter

KINDS: dict[str, type[DFlashDrafter]] = {"dflash": DFlashDrafter, "dflash2": DFlash2Drafter, "dspark": DSparkDrafter}
"""Drafter classes by `draft.kind`."""


def drafter_class(kind: str) -> type[DFlashDrafter]:
    """The class behind `draft.kind`. Raises: ConfigError naming the kinds that exist."""
    if kind not in KINDS:
        raise ConfigError(f"draft.kind={kind!r} is no drafter kind; there is {', '.join(KINDS)}")
    return KINDS[kind]


def loss_mix(config: RunConfig) -> Mix:
    """The loss's terms, those that the configuration leaves to the kind filled in."""
    loss, default = config.loss, drafter_class(config.draft.kind).default_mix
    return Mix(
        ce=default.ce if isinstance(loss.ce, str) else loss.ce,
        kl=default.kl if isinstance(loss.kl, str) else loss.kl,
        l1=default.l1 if isinstance(loss.l1, str) else loss.l1,
    )


def needs_last_hidden(config: RunConfig) -> bool:
    """Whether the target has to deliver its last hidden state, and so to run all its layers."""
    return drafter_class(config.draft.kind).needs_last_hidden or loss_mix(config).needs_target
