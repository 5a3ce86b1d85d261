"""Errors that are raised in one process and told in another."""

from __future__ import annotations

import pickle

import pytest

from paceline import errors
from paceline.errors import GroupLost, PacelineError, PipelineError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PacelineError)]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_survive_the_way_between_processes(kind: type) -> None:
    """Message, kind and what belongs to it."""
    if issubclass(kind, PipelineError):
        error: PacelineError = kind("lost", role="target-1", batch=7, may_pass=True)
    else:
        error = kind("lost")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == "lost" and vars(again) == vars(error)


def test_a_lost_group_is_a_failure_of_the_pipeline() -> None:
    """Whoever catches those catches it too."""
    assert issubclass(GroupLost, PipelineError)
