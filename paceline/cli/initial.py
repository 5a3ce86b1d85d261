"""`draft.init`: the drafter that a run starts from, read at its first start and from its own checkpoints afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import RunConfig
from paceline.control.run_folder import RunFolder
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.models.draft import DFlashDrafter
    from paceline.plan.resolve import Initial


def initial_of(config: RunConfig) -> Initial | None:
    """What fixes the shape of a run with `draft.init`; None without. A run that has a checkpoint goes by that.

    Raises: ConfigError, ModelError or CheckpointError if what is wanted cannot be read.
    """
    from paceline.plan.resolve import Initial
    from paceline.train.checkpoint import load_drafter, newest

    if config.draft.init is None:
        return None
    place = newest(RunFolder(config.run.dir).checkpoints)
    drafter = _read(config.draft.init) if place is None else load_drafter(place)
    return Initial(str(place or config.draft.init), drafter.shape, drafter.draft_token_ids())


def load_initial(config: RunConfig) -> DFlashDrafter | None:
    """The drafter whose weights a run starts from; None: random ones, or those of the run's own checkpoint."""
    if config.draft.init is None or any(RunFolder(config.run.dir).checkpoints.glob("step-*")):
        return None
    return _read(config.draft.init)


def _read(place: str) -> DFlashDrafter:
    from paceline.cli.evaluate import load_any_drafter

    if not Path(place).is_dir():
        raise ConfigError(
            f"draft.init={place} is no folder: a drafter in the z-lab or speculators layout, a run or a checkpoint was "
            "wanted"
        )
    return load_any_drafter(Path(place))
