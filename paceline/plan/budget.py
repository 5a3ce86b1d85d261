"""How much a demo of so many minutes can do on a machine whose rates have been measured.

The budget is spent in conversations and epochs, decided once before the first step: a schedule driven by the clock
would give other losses every time.
"""

from __future__ import annotations

from dataclasses import dataclass

EPOCHS = 6
"""Passes over the conversations: features are made once and kept, so an epoch costs a third of what a new conversation
does. At equal time six passes over 790 conversations and eight over 646 give the same (docs/experiments.md)."""
MAX_EPOCHS = 16
MIN_CONVERSATIONS = 64
MIN_PROMPTS = 4
EVALUATION_SHARE = 0.6
"""Share of the time that decoding may take."""
SLACK = 1.3
"""A step of a whole run takes 1.2 to 1.4 times as long as those timed at its start (four runs on two cores)."""
NGRAM_LENGTH, DRAFTED_LENGTH = 1.5, 2.4
"""Acceptance lengths that the time for decoding is estimated with."""
OVERHEAD_S = 30.0
"""Loading the models, saving and measuring on the way."""


@dataclass(frozen=True)
class Rates:
    """What was measured on the machine.

    Attributes:
        target_tok_per_s: Tokens made into features a second.
        step_s: Seconds of an optimizer step.
        tokens_per_step: Document tokens of it.
        prefill_s, token_s, ngram_s, draft_s: Seconds of a prompt, of a plain decoding step, of a round with an n-gram
            draft, and of one with the drafter's.
    """

    target_tok_per_s: float
    step_s: float
    tokens_per_step: float
    prefill_s: float
    token_s: float
    ngram_s: float
    draft_s: float


@dataclass(frozen=True)
class DemoPlan:
    """What a demo does.

    Attributes:
        conversations, epochs: Trained on, and passes over them.
        heldout, unseen: Prompts decoded.
        train_s, evaluate_s: Seconds that each is expected to take.
    """

    conversations: int
    epochs: int
    heldout: int
    unseen: int
    train_s: float
    evaluate_s: float


def plan_demo(
    seconds: float,
    rates: Rates,
    *,
    available: int,
    tokens_per_conversation: float,
    answer_tokens: float,
    max_cached: int,
    heldout: int,
    unseen: int,
) -> DemoPlan:
    """Share the time out between decoding and training.

    Decoding comes first: the figures are worth what the number of prompts is. What remains is spent on conversations
    at `EPOCHS` passes over each, and on more passes where there are no more conversations.

    Args:
        seconds: For training and decoding together.
        available: Conversations there are.
        tokens_per_conversation, answer_tokens: Means, in tokens.
        max_cached: Conversations whose features fit into memory.
        heldout, unseen: Prompts of each set to decode where time allows.
    """
    decoded_s = _prompt_seconds(rates, answer_tokens)
    affordable = int(EVALUATION_SHARE * seconds / decoded_s)
    if heldout + unseen > affordable:  # the held-out set first, but never all of it at the cost of the other
        fewest = min(unseen, max(MIN_PROMPTS, affordable // 4))
        heldout = min(heldout, max(MIN_PROMPTS, affordable - fewest))
        unseen = min(unseen, max(fewest, affordable - heldout))
    evaluate_s = (heldout + unseen) * decoded_s
    train_s = max(0.0, seconds - evaluate_s - OVERHEAD_S)
    features_s = tokens_per_conversation / rates.target_tok_per_s
    pass_s = SLACK * tokens_per_conversation / rates.tokens_per_step * rates.step_s
    most = min(available, max_cached)
    conversations = min(most, max(MIN_CONVERSATIONS, int(train_s / (features_s + EPOCHS * pass_s))))
    epochs = round((train_s - conversations * features_s) / (conversations * pass_s))
    epochs = min(max(epochs, EPOCHS), MAX_EPOCHS)
    if conversations == MIN_CONVERSATIONS:
        epochs = EPOCHS
    train_s = conversations * (features_s + epochs * pass_s)
    return DemoPlan(conversations, epochs, heldout, unseen, round(train_s, 1), round(evaluate_s, 1))


def _prompt_seconds(rates: Rates, answer_tokens: float) -> float:
    """One prompt decoded plainly, with n-grams and with the drafter."""
    per_token = rates.token_s + rates.ngram_s / NGRAM_LENGTH + rates.draft_s / DRAFTED_LENGTH
    return 3 * rates.prefill_s + answer_tokens * per_token
