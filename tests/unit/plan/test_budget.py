"""The demo's budget: what so many minutes buy on a machine of given rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan import budget
from paceline.plan.budget import DemoPlan, Rates, plan_demo

QUIET = Rates(
    target_tok_per_s=700.0,
    step_s=0.1,
    tokens_per_step=490.0,
    prefill_s=0.13,
    token_s=0.033,
    ngram_s=0.033,
    draft_s=0.04,
)


def plan(seconds: float, rates: Rates = QUIET, **changes: Any) -> DemoPlan:
    options: dict[str, Any] = {
        "available": 2392, "tokens_per_conversation": 114.0, "answer_tokens": 36.0, "max_cached": 4000,
        "heldout": 40, "unseen": 16,
    }  # fmt: skip
    return plan_demo(seconds, rates, **(options | changes))


def test_seven_minutes_on_two_quiet_cores() -> None:
    """All forty held-out prompts, most of the unseen ones, several hundred conversations, within the time."""
    made = plan(400)
    assert (made.heldout, made.unseen) == (40, 16)
    assert 400 < made.conversations < 1200 and made.epochs == budget.EPOCHS
    assert made.train_s + made.evaluate_s <= 400 - budget.OVERHEAD_S + 1


def test_a_slow_machine_decodes_fewer_prompts_before_it_trains_on_nothing() -> None:
    """Decoding takes at most its share; the held-out set goes first, and never alone."""
    slow = Rates(100.0, 0.5, 490.0, 0.9, 0.2, 0.2, 0.25)
    made = plan(400, slow)
    assert budget.MIN_PROMPTS <= made.unseen < made.heldout < 40
    assert made.evaluate_s <= budget.EVALUATION_SHARE * 400 + 1
    assert made.conversations >= budget.MIN_CONVERSATIONS


def test_more_time_than_conversations_goes_into_epochs() -> None:
    """With all conversations used the passes grow, up to a limit past which the drafter only learns them by heart."""
    assert plan(900).epochs == budget.EPOCHS
    assert plan(3600, available=600).epochs == budget.MAX_EPOCHS
    some = plan(400, available=300)
    assert some.conversations == 300 and budget.EPOCHS < some.epochs <= budget.MAX_EPOCHS


def test_only_what_fits_into_memory_is_trained_on() -> None:
    """Features are kept over epochs, so memory bounds the conversations."""
    assert plan(1700, max_cached=500).conversations == 500


def test_own_prompts_may_have_no_unseen_set() -> None:
    """Then every prompt that time allows is a held-out one."""
    made = plan(120, unseen=0)
    assert made.unseen == 0 and made.heldout >= budget.MIN_PROMPTS


@given(
    st.floats(30, 1800),
    st.floats(20, 20000),
    st.floats(0.001, 20),
    st.floats(0.001, 3),
    st.integers(0, 64),
    st.integers(1, 64),
    st.integers(1, 3000),
)
def test_any_machine_gets_a_plan(
    seconds: float, rate: float, step_s: float, token_s: float, unseen: int, heldout: int, available: int
) -> None:
    """Whatever the rates, there is something to train on and to decode, and never more than there is."""
    rates = replace(QUIET, target_tok_per_s=rate, step_s=step_s, token_s=token_s, ngram_s=token_s, draft_s=token_s)
    made = plan(seconds, rates, heldout=heldout, unseen=unseen, available=available)
    assert 1 <= made.conversations <= available
    assert min(budget.MIN_PROMPTS, heldout) <= made.heldout <= heldout
    assert min(budget.MIN_PROMPTS, unseen) <= made.unseen <= unseen
    assert budget.EPOCHS <= made.epochs <= budget.MAX_EPOCHS


@pytest.mark.parametrize("seconds", [100, 200, 400, 800, 1600])
def test_more_minutes_never_buy_less(seconds: float) -> None:
    """Neither prompts nor conversations shrink when the time grows."""
    less, more = plan(seconds), plan(1.3 * seconds)
    assert more.heldout >= less.heldout and more.unseen >= less.unseen
    assert more.conversations * more.epochs >= less.conversations * less.epochs or less.heldout < 40
