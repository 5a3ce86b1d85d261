"""The table of cards, how GPUs are named, and this machine measured."""

from __future__ import annotations

import time

import pytest

from paceline.errors import ConfigError
from paceline.plan import cards
from paceline.plan.cards import CARDS, calibrate, parse_gpus


def test_gpus_are_a_number_and_a_card() -> None:
    """One without a number, in any case of letters."""
    assert parse_gpus("8xh200") == (8, CARDS["h200"])
    assert parse_gpus("A100-80G") == (1, CARDS["a100-80g"])
    assert parse_gpus(" 192xB200 ")[0] == 192


@pytest.mark.parametrize("text", ["", "8", "8x", "x8h200", "8xtpu", "0xh200", "-1xh200", "9999xh200", "8 h200"])
def test_what_is_no_gpu_is_answered_with_what_there_is(text: str) -> None:
    """The message has what was seen and wanted."""
    with pytest.raises(ConfigError, match="--gpus") as error:
        parse_gpus(text)
    assert "h200" in str(error.value) or "1 to 4096" in str(error.value)


def test_only_the_measured_card_is_not_marked_as_a_guess() -> None:
    """Every other card's share says that it is one; all wanted cards are there, with figures above zero."""
    assert set(CARDS) >= {"h200", "h100", "a100-80g", "a100-40g", "l40s", "rtx4090", "b200"}
    assert [name for name, card in CARDS.items() if "guess" not in card.source] == ["h200"]
    for card in CARDS.values():
        assert 0 < card.matmul_share <= 1 and 0 < card.memory_share <= 1
        assert min(card.memory_gib, card.tflop_per_s, card.memory_gb_per_s, card.link_gb_per_s, card.host_gb_per_s) > 0
    assert not CARDS["a100-80g"].has_fp8 and CARDS["l40s"].has_fp8


def test_this_machine_is_measured_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are those of a machine, and the time limit holds."""
    monkeypatch.setattr(cards, "CALIBRATION_S", 0.8)
    started = time.perf_counter()
    count, card = calibrate()
    assert time.perf_counter() - started < 10
    assert count >= 1 and card.memory_gib > 0.5
    assert 0.005 < card.tflop_per_s < 5000 and 0.5 < card.memory_gb_per_s < 20_000
    assert "measured here" in card.source
