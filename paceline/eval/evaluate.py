"""A drafter on real prompts: acceptance length, losslessness and wall-clock speed against plain decoding.

Drafts that are copied from the text so far (`eval.ngram`) run beside: a trained drafter has to beat those as well.
"""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from paceline import __version__
from paceline.data.dialects import Rejection
from paceline.data.inputs import Input, open_inputs, read_records
from paceline.data.templates import template_options
from paceline.dflash.acceptance import Acceptance
from paceline.errors import DataError
from paceline.eval.decode import (
    CachedTarget,
    Decoded,
    check_confidence,
    ngram_decode,
    plain_decode,
    speculative_decode,
)
from paceline.eval.measures import (
    INTERVAL_RULE,
    Estimate,
    acceptance_estimate,
    accepted_counts,
    context_buckets,
    first_token_s,
)
from paceline.eval.sampling import Sampling, draws_drafts
from paceline.kernels.packed_linear import PackedLinear, pack_layers
from paceline.models.draft import DFlashDrafter

ACCEPTANCE_RULE = (
    "tokens committed / target forwards, pooled over all rounds of all prompts; bonus token in, prefill out"
)

TOKEN_BY_TOKEN = "every answer has to be the plain one, token for token"

IN_DISTRIBUTION = (
    "lossless in distribution: the drafter draws its tokens, so that a drafted answer is another draw than the plain "
    "one and is not compared with it"
)

TIE_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Gap of the target's two best logits below which verifying a block and decoding one token may choose differently by
rounding alone. Logits of the two differ by up to 9e-5 in float32 (SmolLM2-135M) and 0.29 in bfloat16 (a random
gated-delta target)."""


WARM_UP_TOKENS = 8
"""Tokens of the uncounted first answers."""


MAX_LOOP_PERIOD = 24
"""Longest repeated piece that counts as a loop."""

LOOP_REPEATS = 3
"""Times that a piece stands at the end of an answer that loops."""

Way = Callable[[Sequence[int], int, Sampling | None], Decoded]
"""One way to decode a prompt: with its length limit and its draws."""


@dataclass(frozen=True)
class Difference:
    """Where an answer first leaves the plain one.

    Attributes:
        answer: Which one.
        position: Token of the answer.
        top2_gap: There, how far the target's best logit lies above its second best; where tokens are drawn, with the
            noise that draws them.
        is_tie: Whether the gap is within rounding.
    """

    answer: Literal["speculative", "ngram"]
    position: int
    top2_gap: float
    is_tie: bool


@dataclass(frozen=True)
class PromptResult:
    """One prompt, decoded every way.

    Attributes:
        ngram: With drafts copied from the text; None where this was not run.
        differences: At most one an answer; empty if all are the plain one, token for token.
    """

    plain: Decoded
    speculative: Decoded
    ngram: Decoded | None = None
    differences: tuple[Difference, ...] = ()

    @property
    def is_loop(self) -> bool:
        """Whether the answer ran into the limit while it repeated itself."""
        return not self.plain.stopped and ends_in_loop(self.plain.tokens)


@dataclass
class Evaluation:
    """Results of all prompts; lengths, rates and fractions are derived at the end.

    What an answer is like (ended, loops) is asked of the plain one; the others are equal or counted as different.

    Attributes:
        max_new_tokens: Length limit of an answer.
        block_size: Slots used.
        num_predicted: Tokens drafted at most in a round.
        has_ngram: Whether n-gram drafting was run.
        sampling: How tokens were drawn; None: greedily.
        verify_threshold: Confidence below which drafted tokens were not verified.
    """

    max_new_tokens: int
    block_size: int
    num_predicted: int
    has_ngram: bool = False
    results: list[PromptResult] = field(default_factory=list)
    sampling: Sampling | None = None
    verify_threshold: float = 0.0

    def ended(self) -> Evaluation:
        """The same over the answers that a stop token ended: others may be loops, which are easy to draft."""
        return replace(self, results=[result for result in self.results if result.plain.stopped])

    @property
    def acceptance(self) -> Acceptance:
        """Of the drafter, pooled over the prompts."""
        return self._pooled([result.speculative for result in self.results])

    @property
    def acceptance_estimate(self) -> Estimate | None:
        """How well the drafter's acceptance length is known; None with too few prompts."""
        return acceptance_estimate([result.speculative for result in self.results])

    @property
    def ngram_acceptance(self) -> Acceptance:
        """Of n-gram drafting, pooled over the prompts; a round without a draft counts as one that accepted none."""
        return self._pooled(self._ngram_answers)

    @property
    def num_not_ended(self) -> int:
        """Answers that the length limit ended."""
        return sum(not result.plain.stopped for result in self.results)

    @property
    def num_loops(self) -> int:
        """Of these, answers that repeat themselves at their end."""
        return sum(result.is_loop for result in self.results)

    @property
    def num_ties(self) -> int:
        """Answers that differ first where the target's two best tokens are equal within rounding."""
        return sum(difference.is_tie for result in self.results for difference in result.differences)

    @property
    def num_mismatches(self) -> int:
        """Answers that differ otherwise: a fault."""
        return sum(len(result.differences) for result in self.results) - self.num_ties

    @property
    def is_lossless(self) -> bool:
        """Whether every answer that is compared with the plain one is the same, token for token."""
        return not any(result.differences for result in self.results)

    @property
    def is_compared(self) -> bool:
        """Whether the drafter's answers are compared with the plain ones; not where it draws, see `compare`."""
        return not draws_drafts(self.sampling)

    @property
    def tok_per_s(self) -> float:
        """Tokens per second with the drafter, prefill included."""
        return _tok_per_s([result.speculative for result in self.results])

    @property
    def speedup(self) -> float:
        """Speculative over plain tokens per second, prefill included in both."""
        return _ratio(self.tok_per_s, _tok_per_s([result.plain for result in self.results]))

    @property
    def _ngram_answers(self) -> list[Decoded]:
        return [result.ngram for result in self.results if result.ngram is not None]

    def _pooled(self, answers: Sequence[Decoded]) -> Acceptance:
        total = Acceptance(answers[0].acceptance.num_predicted if answers else self.num_predicted)
        for answer in answers:
            total += answer.acceptance
        return total

    def as_dict(self) -> dict[str, Any]:
        """The result record.

        Rates are generated tokens over wall seconds, prefill included; those with ``decode`` leave out the prefill and
        the token that it makes. `accepted_counts` are rounds by drafted tokens accepted, from 0 on; `by_context` are
        `measures.Bucket`. Fractions of drafting and verifying are of the speculative wall time; the rest is prefill.
        `verified_frac` is the share of drafted tokens that were verified, `acceptance_rate` of verified ones that were
        accepted. `lossless` is None where nothing speaks against it and drafted answers are not compared.
        `first_mismatches` lists prompt number, which answer it is, position in it, and the target's top-2 logit gap
        there. Keys with ``ngram`` are there only if that was run; `speedup_over_ngram` is speculative over n-gram
        tokens per second.
        """
        plain, speculative = [r.plain for r in self.results], [r.speculative for r in self.results]
        seconds = sum(answer.seconds for answer in speculative)
        ngram: dict[str, float] = {}
        if self.has_ngram:
            ngram_tok_per_s = _tok_per_s(self._ngram_answers)
            ngram = {
                "ngram_tok_per_s": ngram_tok_per_s,
                "ngram_acceptance_length": self.ngram_acceptance.length,
                "ngram_speedup": _ratio(ngram_tok_per_s, _tok_per_s(plain)),
                "speedup_over_ngram": _ratio(_tok_per_s(speculative), ngram_tok_per_s),
            }
        acceptance, estimate = self.acceptance, self.acceptance_estimate
        return {
            "block_size": self.block_size,
            "prompts": len(self.results),
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.sampling.temperature if self.sampling else 0.0,
            **({"seed": self.sampling.seed} if self.sampling else {}),
            "draft_sampling": self.sampling.drafts if self.sampling else "greedy",
            "verify_threshold": self.verify_threshold,
            "acceptance_length": acceptance.length,
            "acceptance_length_error": estimate.error if estimate else None,
            "acceptance_length_interval": [estimate.low, estimate.high] if estimate else None,
            "interval_rule": INTERVAL_RULE,
            "acceptance_rule": ACCEPTANCE_RULE,
            "acceptance_per_position": acceptance.per_position,
            "accepted_counts": accepted_counts(speculative, self.num_predicted),
            "by_context": [bucket.as_dict() for bucket in context_buckets(plain, speculative)],
            "rounds": acceptance.rounds,
            "verified_per_round": acceptance.verified_per_round,
            "verified_frac": acceptance.verified_frac,
            "acceptance_rate": acceptance.acceptance_rate,
            "generated_tokens": sum(len(answer.tokens) for answer in speculative),
            "ended_by_stop": len(self.results) - self.num_not_ended,
            "loops": self.num_loops,
            "baseline_tok_per_s": _tok_per_s(plain),
            "speculative_tok_per_s": _tok_per_s(speculative),
            "speedup": self.speedup,
            **ngram,
            "baseline_first_token_s": first_token_s(plain),
            "first_token_s": first_token_s(speculative),
            "baseline_decode_tok_per_s": _decode_tok_per_s(plain),
            "speculative_decode_tok_per_s": _decode_tok_per_s(speculative),
            "draft_frac": _ratio(sum(answer.draft_s for answer in speculative), seconds),
            "verify_frac": _ratio(sum(answer.verify_s for answer in speculative), seconds),
            "lossless": self.is_lossless if self.is_compared or not self.is_lossless else None,
            "lossless_rule": TOKEN_BY_TOKEN if self.is_compared else IN_DISTRIBUTION,
            "mismatches": self.num_mismatches,
            "ties": self.num_ties,
            "first_mismatches": [
                {
                    "prompt": number,
                    "answer": difference.answer,
                    "position": difference.position,
                    "top2_gap": difference.top2_gap,
                    "tie": difference.is_tie,
                }
                for number, result in enumerate(self.results)
                for difference in result.differences
            ],
            "versions": {
                "paceline": __version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }


def packed_copy(drafter: DFlashDrafter, target: CachedTarget) -> DFlashDrafter:
    """A frozen copy of a drafter, its linear layers packed where that is possible (float32 on a CPU).

    A copy, as packed layers do not follow further training. `evaluate` makes one by itself, and takes one that is
    already packed as it is: whoever evaluates more than once makes it once.
    """
    if isinstance(drafter.fc, PackedLinear):
        return drafter
    drafter = copy.deepcopy(drafter).requires_grad_(False)
    pack_layers(drafter, target.head)
    return drafter


def evaluate(
    target: CachedTarget,
    drafter: DFlashDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    block_size: int | None = None,
    dtype: torch.dtype | None = None,
    ngram: bool = True,
    sampling: Sampling | None = None,
    verify_threshold: float = 0.0,
    on_prompt: Callable[[PromptResult, Evaluation], None] = lambda result, so_far: None,
) -> Evaluation:
    """Decode every prompt plainly, with n-gram drafts and with the drafter; see `evaluate_blocks`.

    Args:
        block_size: Slots used; None: all that were trained.
    """
    block_size = block_size or drafter.shape.block_size
    evaluations = evaluate_blocks(
        target,
        drafter,
        prompts,
        [block_size],
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        dtype=dtype,
        ngram=ngram,
        sampling=sampling,
        verify_threshold=verify_threshold,
        on_prompt=on_prompt,
    )
    return evaluations[block_size]


def evaluate_blocks(
    target: CachedTarget,
    drafter: DFlashDrafter,
    prompts: Sequence[Sequence[int]],
    block_sizes: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    dtype: torch.dtype | None = None,
    ngram: bool = True,
    sampling: Sampling | None = None,
    verify_threshold: float = 0.0,
    on_prompt: Callable[[PromptResult, Evaluation], None] = lambda result, so_far: None,
) -> dict[int, Evaluation]:
    """Decode every prompt plainly, with n-gram drafts, and with the drafter in blocks of every size.

    The ways take turns, and which comes first rotates from prompt to prompt, so that a slow moment of the machine hits
    all. The first prompt is decoded once before and not counted: first calls pay for allocation and compilation.

    Args:
        prompts: Token ids of each.
        block_sizes: Slots used, each at most the trained K.
        dtype: As in `speculative_decode`.
        ngram: Whether to run n-gram drafting, which then drafts as many tokens at most as the largest block.
        sampling: How tokens are drawn, with draws of its own for every prompt; None decodes greedily.
        verify_threshold: As in `speculative_decode`.
        on_prompt: Called after each prompt with the result of the largest block and all such results so far.
    Returns: by block size, ascending; plain and n-gram answers are the same ones in all.
    Raises: ModelError if target and drafter do not fit together, a prompt is too long, or the drafter knows no
        confidence that a threshold could be asked of.
    """
    check_confidence(drafter, verify_threshold > 0)
    for prompt in prompts:  # rather than after the others have run
        target.check_length(len(prompt), max_new_tokens)
    if dtype in (None, torch.float32):
        drafter = packed_copy(drafter, target)
    sizes = sorted(set(block_sizes))
    largest = sizes[-1]
    predicted = {size: size - 1 + drafter.label_shift for size in sizes}

    ways: dict[str | int, Way] = {
        "plain": lambda prompt, limit, draws: plain_decode(target, prompt, limit, stop_ids, draws),
        "ngram": lambda prompt, limit, draws: ngram_decode(target, predicted[largest], prompt, limit, stop_ids, draws),
    }
    if not ngram:
        del ways["ngram"]
    for size in sizes:
        ways[size] = lambda prompt, limit, draws, size=size: speculative_decode(  # type: ignore[misc]
            target, drafter, prompt, limit, stop_ids, size, dtype, draws, verify_threshold
        )
    totals = {
        size: Evaluation(
            max_new_tokens, size, predicted[size], ngram, sampling=sampling, verify_threshold=verify_threshold
        )
        for size in sizes
    }
    order = list(ways)
    target.reserve(max(map(len, prompts), default=0) + max_new_tokens, largest + drafter.label_shift)
    for prompt in prompts[:1]:
        for name in order:
            ways[name](prompt, min(WARM_UP_TOKENS, max_new_tokens), sampling)
    for number, prompt in enumerate(prompts):
        draws = sampling and sampling.of_prompt(number)
        answers = {name: ways[name](prompt, max_new_tokens, draws) for name in order}
        order = [*order[1:], order[0]]
        for size, total in totals.items():
            result = compare(target, prompt, answers["plain"], answers[size], answers.get("ngram"), draws)
            total.results.append(result)
        on_prompt(totals[largest].results[-1], totals[largest])
    return totals


def compare(
    target: CachedTarget,
    prompt_ids: Sequence[int],
    plain: Decoded,
    speculative: Decoded,
    ngram: Decoded | None = None,
    sampling: Sampling | None = None,
) -> PromptResult:
    """Compare answers with the plain one, token by token; at a difference, ask the target how sure it is there.

    A speculative answer whose drafts were drawn is another draw than the plain one, and is not compared.
    """
    differences = []
    named: list[tuple[Literal["speculative", "ngram"], Decoded | None]] = [
        ("speculative", None if draws_drafts(sampling) else speculative),
        ("ngram", ngram),
    ]
    for name, answer in named:
        position = None if answer is None else first_difference(plain.tokens, answer.tokens)
        if position is not None:
            logits = target.next_logits([*prompt_ids, *plain.tokens[:position]])
            best = (sampling.scores_at(logits, position) if sampling else logits).topk(2).values
            gap = float(best[0] - best[1])
            differences.append(Difference(name, position, gap, is_tie=gap < TIE_GAP[target.dtype]))
    return PromptResult(plain, speculative, ngram, tuple(differences))


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Whether a piece of at most `MAX_LOOP_PERIOD` tokens stands `LOOP_REPEATS` times in a row at the end."""
    for period in range(1, MAX_LOOP_PERIOD + 1):
        tail = list(tokens[-period * LOOP_REPEATS :])
        if len(tail) == period * LOOP_REPEATS and tail == tail[:period] * LOOP_REPEATS:
            return True
    return False


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """First position at which two sequences differ, or at which the shorter one ends; None if they are equal."""
    shared = min(len(one), len(other))
    return next((i for i in range(shared) if one[i] != other[i]), None if len(one) == len(other) else shared)


def sample_prompts() -> Path:
    """The prompts that come with Paceline, for targets that are evaluated without any of one's own."""
    return Path(str(package_files("paceline.data") / "samples" / "prompts.jsonl"))


def read_prompts(files: Sequence[Path], limit: int | None = None) -> list[list[dict[str, Any]]]:
    """Prompts of JSONL files as messages, in order.

    A line has ``messages`` (the turns before the last assistant turn), ``turns`` (user texts; the first counts),
    ``prompt`` or ``question``.

    Args:
        limit: Prompts read at most, over all files.
    Raises: DataError naming file, line and what is wrong; bad lines would change what is measured, so none is skipped.
    """
    prompts: list[list[dict[str, Any]]] = []
    for messages in _messages_of(files):
        if limit is not None and len(prompts) >= limit:
            break
        prompts.append(messages)
    return prompts


def encode_prompts(
    prompts: Sequence[Sequence[Mapping[str, Any]]], tokenizer: Any, thinking: bool | None = None
) -> list[list[int]]:
    """Token ids of each prompt as a server would feed them: chat template with the generation prompt.

    Args:
        thinking: Switches the template's reasoning, see `template_options`; None leaves it its own default.
    Raises: DataError if the tokenizer has no template, or the template refuses a prompt.
    """
    if not tokenizer.chat_template:
        raise DataError("the target's tokenizer has no chat template, so prompts cannot be rendered")
    options = template_options(thinking)
    encoded = []
    for number, messages in enumerate(prompts, start=1):
        try:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options)
        except Exception as error:  # a template is a foreign program: it may fail in any way
            raise DataError(f"the chat template refuses prompt {number}: {error}") from error
        encoded.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return encoded


def _messages_of(files: Sequence[Path]) -> Iterator[list[dict[str, Any]]]:
    for record in read_records(open_inputs([Input(str(file)) for file in files])):
        try:
            yield prompt_messages(record.decode())
        except Rejection as error:
            raise DataError(f"{record.file}:{record.number}: {error.reason}") from error


def prompt_messages(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The turns that a record asks the target to answer. Raises: Rejection."""
    messages = record.get("messages")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        messages = messages[: answers[-1]] if answers else messages
        if messages:
            return messages
        raise Rejection("no turn to answer", "the conversation begins with its last assistant turn, or is empty")
    turns = record.get("turns")
    texts = [turns[0] if isinstance(turns, list) and turns else None, record.get("prompt"), record.get("question")]
    for text in texts:
        if isinstance(text, str):
            return [{"role": "user", "content": text}]
    seen = ", ".join(sorted(map(str, record))) or "none"
    raise Rejection("no prompt", f"`messages`, `turns`, `prompt` or `question` was wanted; keys seen: {seen}")


def _tok_per_s(answers: Sequence[Decoded]) -> float:
    return _ratio(sum(len(answer.tokens) for answer in answers), sum(answer.seconds for answer in answers))


def _decode_tok_per_s(answers: Sequence[Decoded]) -> float:
    return _ratio(sum(len(answer.tokens) - 1 for answer in answers), sum(answer.decode_s for answer in answers))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
