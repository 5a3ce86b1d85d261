"""Tiny targets and drafters, each made once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch

from paceline.eval.decode import CachedTarget
from paceline.models.draft import DFlashDrafter
from tests import tiny
from tests.unit.eval import learnt


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Folder of the tiny target of a family."""

    @functools.cache
    def folder(family: str) -> str:
        return tiny.save(tiny.causal_lm(family), tmp_path_factory.mktemp(family))

    return folder


@pytest.fixture(scope="session")
def cached_target(target_folder: Callable[[str], str]) -> Callable[[str], CachedTarget]:
    """The tiny target of a family, ready to decode."""
    return functools.cache(lambda family: CachedTarget.load(target_folder(family), learnt.LAYER_IDS))


@pytest.fixture(scope="session")
def new_drafter(target_folder: Callable[[str], str]) -> Callable[..., DFlashDrafter]:
    """A random drafter for the tiny target of a family; other fields of its shape as keywords."""
    return lambda family="llama", **fields: learnt.new_drafter(target_folder(family), **fields)


@pytest.fixture(scope="session")
def trained_drafter(
    target_folder: Callable[[str], str], new_drafter: Callable[..., DFlashDrafter]
) -> Callable[..., DFlashDrafter]:
    """A drafter that has half learnt the answers of the tiny target of a family."""

    @functools.cache
    def train(family: str = "llama", **fields: object) -> DFlashDrafter:
        return learnt.train(new_drafter(family, **fields), target_folder(family))

    return train


@pytest.fixture
def prompts() -> list[list[int]]:
    """Prompts of 1 to 12 tokens."""
    return learnt.prompts()
