"""Every error that a user can cause or meet, in one tree.

    PacelineError            anything the command line prints without a traceback
    ├── ConfigError          a setting that is unknown, contradictory or changed where it must not change
    ├── DataError            an input file, a row or a data set that cannot be used
    ├── ModelError           a target or drafter folder that cannot be loaded or does not fit
    ├── CheckpointError      a run folder or checkpoint that is missing, damaged or of another run
    ├── ServerError          a server that answers prompts is gone, or answers what cannot be used
    └── PipelineError        a role failed while a run was going; carries role and batch number

A message says what was seen, what was wanted and what to change.
"""

from __future__ import annotations

from typing import Any


class PacelineError(Exception):
    """Base of all errors that end a command with a message and a non-zero exit."""


class ConfigError(PacelineError, ValueError):
    """A setting is unknown, contradictory, or changed where it must not change."""


class DataError(PacelineError, ValueError):
    """An input file, a row or a data set cannot be used."""


class ModelError(PacelineError, ValueError):
    """A target or a drafter cannot be loaded, or the two do not fit together."""


class CheckpointError(PacelineError):
    """A run folder or a checkpoint is missing, damaged, or belongs to another run."""


class ServerError(PacelineError):
    """A server that answers prompts cannot be reached, refuses to work, or answers what cannot be used."""


class PipelineError(PacelineError):
    """A role of a running pipeline failed.

    Attributes:
        role: Name of the role, for example ``target-1``.
        batch: Number of the batch it was working on, or None between batches.
        may_pass: Whether making the batch again may help.
    """

    def __init__(self, message: str, *, role: str, batch: int | None, may_pass: bool = False) -> None:
        super().__init__(message)
        self.role = role
        self.batch = batch
        self.may_pass = may_pass

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes raise it too."""
        return _again, (type(self), str(self), self.role, self.batch, self.may_pass)


def _again(kind: type[PipelineError], message: str, role: str, batch: int | None, may_pass: bool) -> PipelineError:
    return kind(message, role=role, batch=batch, may_pass=may_pass)


class GroupLost(PipelineError):
    """A drafter of several is gone, and with it the group: the run goes on from its last checkpoint with a new one."""


def printable(text: str) -> str:
    """Text for a terminal: file names and servers' words cannot steer it; line ends stay."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
