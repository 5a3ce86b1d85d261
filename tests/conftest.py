"""Fixtures for every test: one compute thread, signals that are heard, and a toy target with data, built once."""

from __future__ import annotations

import signal

import pytest
import torch

from tests.toy import Toy, build_toy


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Bit-for-bit promises hold at one compute thread, and two cores run tests faster so."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _heard_signals() -> None:
    """Under nohup, or behind a script's `&`, they are ignored, in the programs that tests start as well."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A tiny random target, its tokenizer, and a prepared data set."""
    return build_toy(tmp_path_factory.mktemp("toy"))
