"""Fixtures for every test: one compute thread, and a toy target with data that is built once."""

from __future__ import annotations

import pytest
import torch

from tests.toy import Toy, build_toy


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Bit-for-bit promises hold at one compute thread, and two cores run tests faster so."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A tiny random target, its tokenizer, and a prepared data set."""
    return build_toy(tmp_path_factory.mktemp("toy"))
