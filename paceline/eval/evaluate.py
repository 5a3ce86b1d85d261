"""A drafter on real prompts: acceptance length, losslessness and wall-clock speed against plain decoding."""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from paceline import __version__
from paceline.data.readers import Rejection, decode_record, read_lines
from paceline.dflash.acceptance import Acceptance
from paceline.errors import DataError
from paceline.eval.decode import CachedTarget, Decoded, plain_decode, speculative_decode
from paceline.kernels.packed_linear import pack_layers
from paceline.models.draft import DFlashDrafter

ACCEPTANCE_RULE = (
    "tokens committed / target forwards, pooled over all rounds of all prompts; bonus token in, prefill out"
)

TIE_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Gap of the target's two best logits below which verifying a block and decoding one token may choose differently by
rounding alone. Logits of the two differ by up to 9e-5 in float32 (SmolLM2-135M) and 0.29 in bfloat16 (a random
gated-delta target)."""


WARM_UP_TOKENS = 8
"""Tokens of the uncounted first answers."""


@dataclass(frozen=True)
class PromptResult:
    """One prompt, decoded both ways.

    Attributes:
        mismatch: First position at which the answers differ; None if they are equal.
        gap: There, how far the target's best logit lies above its second best.
        is_tie: Whether the gap is within rounding.
    """

    plain: Decoded
    speculative: Decoded
    mismatch: int | None = None
    gap: float | None = None
    is_tie: bool = False


@dataclass
class Evaluation:
    """Results of all prompts; lengths, rates and fractions are derived at the end.

    Attributes:
        max_new_tokens: Length limit of an answer.
        block_size: Slots used.
        acceptance: Pooled over the prompts.
    """

    max_new_tokens: int
    block_size: int
    acceptance: Acceptance
    results: list[PromptResult] = field(default_factory=list)

    def add(self, result: PromptResult) -> None:
        """Count one more prompt."""
        self.results.append(result)
        self.acceptance += result.speculative.acceptance

    @property
    def num_ties(self) -> int:
        """Answers that differ first where the target's two best tokens are equal within rounding."""
        return sum(result.is_tie for result in self.results)

    @property
    def num_mismatches(self) -> int:
        """Answers that differ otherwise: a fault."""
        return sum(result.mismatch is not None for result in self.results) - self.num_ties

    @property
    def is_lossless(self) -> bool:
        """Whether every answer is the plain one, token for token."""
        return all(result.mismatch is None for result in self.results)

    @property
    def speedup(self) -> float:
        """Speculative over plain tokens per second, prefill included in both."""
        return _ratio(_tok_per_s([r.speculative for r in self.results]), _tok_per_s([r.plain for r in self.results]))

    def as_dict(self) -> dict[str, Any]:
        """The result record.

        Rates are generated tokens over wall seconds, prefill included; those with ``decode`` leave out the prefill and
        the token that it makes. Fractions are of the speculative wall time; the rest is prefill. `first_mismatches`
        lists prompt number, position in the answer, and the target's top-2 logit gap there.
        """
        plain, speculative = [r.plain for r in self.results], [r.speculative for r in self.results]
        seconds = sum(answer.seconds for answer in speculative)
        return {
            "block_size": self.block_size,
            "prompts": len(self.results),
            "max_new_tokens": self.max_new_tokens,
            "acceptance_length": self.acceptance.length,
            "acceptance_rule": ACCEPTANCE_RULE,
            "acceptance_per_position": self.acceptance.per_position,
            "rounds": self.acceptance.rounds,
            "generated_tokens": sum(len(answer.tokens) for answer in speculative),
            "ended_by_stop": sum(answer.stopped for answer in speculative),
            "baseline_tok_per_s": _tok_per_s(plain),
            "speculative_tok_per_s": _tok_per_s(speculative),
            "speedup": self.speedup,
            "baseline_decode_tok_per_s": _decode_tok_per_s(plain),
            "speculative_decode_tok_per_s": _decode_tok_per_s(speculative),
            "draft_frac": _ratio(sum(answer.draft_s for answer in speculative), seconds),
            "verify_frac": _ratio(sum(answer.verify_s for answer in speculative), seconds),
            "lossless": self.is_lossless,
            "mismatches": self.num_mismatches,
            "ties": self.num_ties,
            "first_mismatches": [
                {"prompt": number, "position": result.mismatch, "top2_gap": result.gap, "tie": result.is_tie}
                for number, result in enumerate(self.results)
                if result.mismatch is not None
            ],
            "versions": {
                "paceline": __version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }


def evaluate(
    target: CachedTarget,
    drafter: DFlashDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    block_size: int | None = None,
    dtype: torch.dtype | None = None,
    on_prompt: Callable[[PromptResult, Evaluation], None] = lambda result, so_far: None,
) -> Evaluation:
    """Decode every prompt plainly and with the drafter, in turn, so that a slow moment of the machine hits both.

    The first prompt is decoded once before and not counted: first calls pay for allocation and compilation.

    Args:
        prompts: Token ids of each.
        block_size, dtype: As in `speculative_decode`.
        on_prompt: Called after each prompt with its result and all results so far.
    Raises: ModelError if target and drafter do not fit together, or a prompt is too long.
    """

    def plain(prompt: Sequence[int], limit: int = max_new_tokens) -> Decoded:
        return plain_decode(target, prompt, limit, stop_ids)

    def speculative(prompt: Sequence[int], limit: int = max_new_tokens) -> Decoded:
        return speculative_decode(target, drafter, prompt, limit, stop_ids, block_size, dtype)

    for prompt in prompts:  # rather than after the others have run
        target.check_length(len(prompt), max_new_tokens)
    if dtype in (None, torch.float32):  # a copy, as packed layers do not follow further training
        drafter = copy.deepcopy(drafter).requires_grad_(False)
        pack_layers(drafter, target.head)
    block_size = block_size or drafter.shape.block_size
    total = Evaluation(max_new_tokens, block_size, Acceptance(block_size - 1 + drafter.label_shift))
    for prompt in prompts[:1]:
        plain(prompt, min(WARM_UP_TOKENS, max_new_tokens))
        speculative(prompt, min(WARM_UP_TOKENS, max_new_tokens))
    for number, prompt in enumerate(prompts):
        if number % 2:
            drafted, baseline = speculative(prompt), plain(prompt)
        else:
            baseline, drafted = plain(prompt), speculative(prompt)
        result = compare(target, prompt, baseline, drafted)
        total.add(result)
        on_prompt(result, total)
    return total


def compare(target: CachedTarget, prompt_ids: Sequence[int], plain: Decoded, speculative: Decoded) -> PromptResult:
    """Compare two answers token by token; at a difference, ask the target how sure it is there."""
    mismatch = first_difference(plain.tokens, speculative.tokens)
    if mismatch is None:
        return PromptResult(plain, speculative)
    best = target.next_logits([*prompt_ids, *plain.tokens[:mismatch]]).topk(2).values
    gap = float(best[0] - best[1])
    return PromptResult(plain, speculative, mismatch, gap, is_tie=gap < TIE_GAP[target.dtype])


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """First position at which two sequences differ, or at which the shorter one ends; None if they are equal."""
    shared = min(len(one), len(other))
    return next((i for i in range(shared) if one[i] != other[i]), None if len(one) == len(other) else shared)


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
        thinking: `enable_thinking` for the template; None leaves it its own default.
    Raises: DataError if the tokenizer has no template, or the template refuses a prompt.
    """
    if not tokenizer.chat_template:
        raise DataError("the target's tokenizer has no chat template, so prompts cannot be rendered")
    options = {} if thinking is None else {"enable_thinking": thinking}
    encoded = []
    for number, messages in enumerate(prompts, start=1):
        try:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options)
        except Exception as error:  # a template is a foreign program: it may fail in any way
            raise DataError(f"the chat template refuses prompt {number}: {error}") from error
        encoded.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return encoded


def _messages_of(files: Sequence[Path]) -> Iterator[list[dict[str, Any]]]:
    for file in files:
        for line in read_lines(file):
            try:
                yield prompt_messages(decode_record(line.raw))
            except Rejection as error:
                raise DataError(f"{line.file}:{line.number}: {error.reason}") from error


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
