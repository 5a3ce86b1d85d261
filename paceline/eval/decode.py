"""Decoding, one token at a time or block by block with a drafter: the last stop of a sample's journey.

    target.prefill(prompt) -> first token      its features become the drafter's context
    drafter.propose(anchor) -> drafted tokens
    target.verify([anchor, *drafted]) -> what the target itself says after each of them
    target.keep(n)                             rolls the target back to the tokens that were committed

`decode` is the loop, and knows the two sides only by these calls; `CachedTarget` and `ContextDrafter` are the real
sides. They decode greedily; `eval.sampling` draws in place of that. Shape letters: K block size, L taps, D hidden,
M key/value heads, H head size.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import transformers
from torch import Tensor, nn

from paceline.dflash.acceptance import Acceptance
from paceline.errors import ModelError
from paceline.eval.forwards import Forward, ModelForward
from paceline.eval.lean import LEAN, LeanForward, difference, obstacle
from paceline.eval.ngram import NgramDrafter
from paceline.eval.sampling import SampledTarget, Sampling
from paceline.kernels.attention import BlockLayout
from paceline.kernels.linear_cross_entropy import Head
from paceline.kernels.packed_linear import pack_head, pack_layers
from paceline.models.draft import ContextKV, DFlashDrafter
from paceline.models.loading import TargetShape, load_causal_lm, read_shape

log = logging.getLogger(__name__)


class TargetSide(Protocol):
    """What the loop asks of a target; it holds the sequence that has been committed so far."""

    def prefill(self, prompt_ids: Sequence[int]) -> int:
        """Start a sequence; the first token that follows it."""

    def verify(self, tokens: Sequence[int]) -> list[int]:
        """Append tokens; the token that the target says after each of them."""

    def keep(self, num_tokens: int) -> None:
        """Take back all but the first `num_tokens` of the tokens just verified."""

    def features(self) -> Tensor:
        """Context features ``[n, L*D]`` of the tokens that the last call appended and kept."""


class DraftSide(Protocol):
    """What the loop asks of a drafter; it holds the context that it has been given so far."""

    num_predicted: int

    def extend(self, tokens: Sequence[int], features: Callable[[], Tensor]) -> None:
        """Append tokens to the context; `features()` are theirs, ``[n, L*D]``, made only if asked for."""

    def propose(self, anchor: int) -> list[int]:
        """Up to `num_predicted` tokens, or none, to follow the token `anchor`, which stands right after the context."""


Origin = Literal["prefill", "drafted", "target"]


@dataclass(frozen=True)
class Round:
    """One target forward after the prefill.

    Attributes:
        num_context: Tokens of prompt and answer before the anchor.
        num_committed: Tokens that it added to the answer.
        seconds: Its wall time, drafting included.
    """

    num_context: int
    num_committed: int
    seconds: float


@dataclass
class Decoded:
    """One answer and how it came about.

    Attributes:
        tokens: The answer, stop token included.
        num_accepted_tokens: Drafted tokens kept in each verification; those past a stop or the limit are not counted.
        acceptance: The same rounds as counts; empty for plain decoding.
        stopped: Whether a stop token ended it; False: the length limit did.
        prefill_s, draft_s, verify_s: Wall time by part; rolling back counts as verifying.
        rounds_s: Wall time of each round after the prefill, drafting and verifying.
        num_prompt: Tokens of the prompt.
    """

    tokens: list[int]
    acceptance: Acceptance
    num_accepted_tokens: list[int] = field(default_factory=list)
    stopped: bool = False
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    rounds_s: list[float] = field(default_factory=list)
    num_prompt: int = 0

    @property
    def seconds(self) -> float:
        """Wall time of the whole answer, prefill included."""
        return self.prefill_s + self.draft_s + self.verify_s

    @property
    def decode_s(self) -> float:
        """Wall time after the prefill, which made the first token."""
        return self.draft_s + self.verify_s

    def origins(self) -> list[Origin]:
        """Where each token of the answer came from: the prefill, an accepted draft, or the target in a round.

        Without a drafter every token after the first is the target's.
        """
        origins: list[Origin] = ["prefill"]
        for num_accepted in self.num_accepted_tokens:
            origins += ["drafted"] * num_accepted
            origins.append("target")
        origins += ["target"] * (len(self.tokens) - len(origins))
        return origins[: len(self.tokens)]  # a stop token or the limit may cut the last round's own token

    def rounds(self) -> list[Round]:
        """The rounds after the prefill."""
        rounds, num_tokens = [], 1
        num_accepted = self.num_accepted_tokens or [0] * len(self.rounds_s)
        for accepted, seconds in zip(num_accepted, self.rounds_s, strict=True):
            committed = min(accepted + 1, len(self.tokens) - num_tokens)
            rounds.append(Round(self.num_prompt + num_tokens - 1, committed, seconds))
            num_tokens += committed
        return rounds

    def token_times_s(self) -> list[float]:
        """When each token of the answer was there, counted from the prefill's start; those of a round come together."""
        times, now = [self.prefill_s], self.prefill_s
        per_round = [n + 1 for n in self.num_accepted_tokens] or [1] * len(self.rounds_s)
        for seconds, num_tokens in zip(self.rounds_s, per_round, strict=True):
            now += seconds
            times += [now] * num_tokens
        return times[: len(self.tokens)]


def decode(
    target: TargetSide,
    drafter: DraftSide | None,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> Decoded:
    """Decode; the answer is the same with any drafter and with none.

    A whole block is drafted even where fewer tokens are left, as the slots of a block see each other and the drafter
    learned whole blocks; only what may still be committed is verified.

    Args:
        drafter: None decodes one token per target forward.
        max_new_tokens: At least 1.
        stop_ids: Tokens that end the answer, and belong to it.
    Raises: ValueError if `prompt_ids` is empty or `max_new_tokens` is below 1.
    """
    if not prompt_ids or max_new_tokens < 1:
        raise ValueError(
            f"decoding needs a prompt and {max_new_tokens=} of at least 1, got {len(prompt_ids)} prompt tokens"
        )
    start = time.perf_counter()
    first = target.prefill(prompt_ids)
    answer = Decoded([first], Acceptance(drafter.num_predicted if drafter else 0), stopped=first in stop_ids)
    answer.num_prompt = len(prompt_ids)
    answer.prefill_s = time.perf_counter() - start
    joined: Sequence[int] = prompt_ids  # tokens that joined the context since the last draft
    while not answer.stopped and len(answer.tokens) < max_new_tokens:
        anchor, left = answer.tokens[-1], max_new_tokens - len(answer.tokens)
        start = time.perf_counter()
        drafted = _draft(target, drafter, joined, anchor)[:left] if drafter else []
        drafted_at = time.perf_counter()
        answer.draft_s += drafted_at - start
        following = target.verify([anchor, *drafted])
        num_hits = leading_hits(drafted, following)
        committed = until_stop([*drafted[:num_hits], following[num_hits]][:left], stop_ids)
        target.keep(len(committed))
        ended_at = time.perf_counter()
        answer.verify_s += ended_at - drafted_at
        answer.rounds_s.append(ended_at - start)
        joined = [anchor, *committed[:-1]]
        answer.tokens += committed
        answer.stopped = committed[-1] in stop_ids
        if drafter:
            num_accepted = min(num_hits, len(committed))
            answer.num_accepted_tokens.append(num_accepted)
            answer.acceptance.add_round(num_accepted, len(committed))
    return answer


def _draft(target: TargetSide, drafter: DraftSide, joined: Sequence[int], anchor: int) -> list[int]:
    drafter.extend(joined, target.features)
    return drafter.propose(anchor)


def leading_hits(drafted: Sequence[int], following: Sequence[int]) -> int:
    """How many drafted tokens the target would have said as well, before the first it would not."""
    return next((i for i, token in enumerate(drafted) if token != following[i]), len(drafted))


def until_stop(tokens: list[int], stop_ids: Collection[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in stop_ids), tokens)


@torch.inference_mode()
def plain_decode(
    target: CachedTarget,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
    sampling: Sampling | None = None,
) -> Decoded:
    """Decoding with one token per target forward and a key/value cache: the baseline.

    Args:
        sampling: None decodes greedily.
    Raises: ModelError if the answer may run past the target's positions.
    """
    target.check_length(len(prompt_ids), max_new_tokens)
    return decode(_side(target, sampling), None, prompt_ids, max_new_tokens, stop_ids)


@torch.inference_mode()
def ngram_decode(
    target: CachedTarget,
    num_predicted: int,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
    sampling: Sampling | None = None,
) -> Decoded:
    """Decoding with drafts copied from prompt and answer: what a drafter that learned nothing is worth.

    Args:
        num_predicted: Tokens drafted at most in a round.
        sampling: None decodes greedily.
    Raises: ModelError if the answer may run past the target's positions.
    """
    target.check_length(len(prompt_ids), max_new_tokens)
    return decode(_side(target, sampling), NgramDrafter(num_predicted), prompt_ids, max_new_tokens, stop_ids)


@torch.inference_mode()
def speculative_decode(
    target: CachedTarget,
    drafter: DFlashDrafter,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
    block_size: int | None = None,
    dtype: torch.dtype | None = None,
    sampling: Sampling | None = None,
) -> Decoded:
    """Decoding with drafted blocks; the drafter proposes its most likely tokens, also where the target draws.

    Args:
        block_size: Slots used, at most the trained K; None: all of them.
        dtype: Compute type of the drafter; another one than its weights' runs it under autocast, where norms
            stay float32. None: the weights' own.
        sampling: None decodes greedily.
    Raises: ModelError if target and drafter do not fit together, or the answer may run past the target's positions.
    """
    target.check_length(len(prompt_ids), max_new_tokens)
    capacity = len(prompt_ids) + max_new_tokens
    side = ContextDrafter(drafter, target, capacity, block_size or drafter.shape.block_size, dtype)
    return decode(_side(target, sampling), side, prompt_ids, max_new_tokens, stop_ids)


def _side(target: CachedTarget, sampling: Sampling | None) -> TargetSide:
    return target if sampling is None else SampledTarget(target, sampling)


def check_fit(drafter: DFlashDrafter, target: TargetShape, layer_ids: Sequence[int]) -> None:
    """Refuse a drafter of another target. Raises: ModelError with both sides of every difference."""
    shape = drafter.shape
    pairs = {
        "hidden_size": (shape.hidden_size, target.hidden_size),
        "num_target_layers": (shape.num_target_layers, target.num_layers),
        "vocab_size": (shape.vocab_size, target.vocab_size),
        "target_layer_ids": (tuple(shape.target_layer_ids), tuple(layer_ids)),
    }
    different = [f"{name} {seen} against {wanted}" for name, (seen, wanted) in pairs.items() if seen != wanted]
    if different:
        raise ModelError(f"the drafter was trained for another target: {', '.join(different)}")


class ContextDrafter:
    """A drafter with the keys and values of its context, for one sequence.

    The buffers hold the whole sequence from the start, so that a step allocates and copies nothing of the context; a
    block's own keys and values are never stored.
    """

    def __init__(
        self,
        drafter: DFlashDrafter,
        target: CachedTarget,
        capacity: int,
        block_size: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Reserve room for `capacity` context tokens. Raises: ModelError if the two do not fit together."""
        check_fit(drafter, target.shape, target.layer_ids)
        shape = drafter.shape
        if not 2 - drafter.label_shift <= block_size <= shape.block_size:
            raise ModelError(f"block_size={block_size}: the drafter was trained for blocks of {shape.block_size} slots")
        self.num_predicted = block_size - 1 + drafter.label_shift
        weights_dtype = drafter.fc.weight.dtype
        self._dtype = dtype or weights_dtype
        self._drafter = drafter
        self._embed = target.embed
        self._head = drafter.own_head(target.head).to(self._dtype)
        self._device = target.device
        self._autocast = torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype != weights_dtype)
        self._noise_ids = torch.full((1, block_size), shape.mask_token_id, device=self._device)
        size = (2, shape.num_hidden_layers, capacity, shape.num_key_value_heads, shape.head_dim)
        self._keys, self._values = torch.empty(size, dtype=self._dtype, device=self._device)
        self._num_context = 0

    def extend(self, tokens: Sequence[int], features: Callable[[], Tensor]) -> None:
        """Write the context's next keys and values, from features ``[n, L*D]``, behind the others."""
        end = self._num_context + len(tokens)
        positions = torch.arange(self._num_context, end, device=self._device)
        with self._autocast:
            fused = self._drafter.context_kv(features().to(self._dtype), positions)
        for layer, (key, value) in enumerate(fused):
            self._keys[layer, self._num_context : end] = key
            self._values[layer, self._num_context : end] = value
        self._num_context = end

    def propose(self, anchor: int) -> list[int]:
        """Draft the block that starts at `anchor`, the token right after the context."""
        end, block_size = self._num_context, self._noise_ids.shape[1]
        self._noise_ids[0, 0] = anchor
        positions = torch.arange(end, end + block_size, device=self._device)[None]
        context: ContextKV = [(key[:end], value[:end]) for key, value in zip(self._keys, self._values, strict=True)]
        with self._autocast:
            noise = self._embed(self._noise_ids).to(self._dtype)
            hidden = self._drafter(noise, positions, context, BlockLayout.of_decode(end, block_size))
            return self._drafter.draft(hidden, self._head, anchor)


class CachedTarget:
    """A whole target with its key/value cache and its tapped layers, for one sequence at a time.

    Attributes:
        shape: What the configuration says.
        layer_ids: Tapped layers; empty where nothing is drafted.
        embed: The target's embedding module (it scales where the family scales).
        head: The target's output head, for the drafter.
        kernel: What computes the forward, and why, in one line.
    """

    def __init__(self, model: Any, shape: TargetShape, layer_ids: Sequence[int]) -> None:
        """Tap a loaded Transformers causal LM that has all its layers; `CachedTarget.load` is the usual way.

        Where `eval.lean` can do what the model does, and a probe shows that it does, the model is not kept: its own
        weights are freed with the caller's last reference. Elsewhere its linear layers are packed in place if possible.
        """
        self.shape = shape
        self.layer_ids = tuple(layer_ids)
        self.embed: nn.Module = model.get_decoder().embed_tokens
        model.requires_grad_(False)
        self.head = pack_head(Head(model.get_output_embeddings().weight.detach(), shape.softcap, shape.logit_scale))
        self._forward, self.kernel = self._choose_forward(model)
        self._num_appended = 0

    def _choose_forward(self, model: Any) -> tuple[Forward, str]:
        """The lean forward where it fits, the model itself elsewhere; and which of the two, and why."""
        whole = ModelForward(model, self.layer_ids)
        reason = obstacle(model, self.head)
        if reason is None:
            lean = LeanForward(model, self.head, self.layer_ids)
            reason = difference(lean, whole, self.shape.vocab_size)
            if reason is None:
                whole.untap()
                return lean, LEAN
        packed = " with packed linears" if pack_layers(model, self.head) else ""
        kernel = f"Transformers' own forward{packed}: {reason}"
        log.info("decoding with %s", kernel)
        return whole, kernel

    @classmethod
    def load(
        cls,
        path: str,
        layer_ids: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> CachedTarget:
        """Load the text part of a model folder or hub id. Raises: ModelError."""
        shape = read_shape(path, revision, trust_remote_code)
        config = transformers.AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
        model = load_causal_lm(path, config.get_text_config(), dtype, device, revision, trust_remote_code)
        return cls(model, shape, layer_ids)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.head.weight.dtype

    def check_length(self, num_prompt: int, max_new_tokens: int) -> None:
        """Raises: ModelError if prompt and answer together have more tokens than the target has positions."""
        limit = self.shape.max_position_embeddings
        if num_prompt + max_new_tokens > limit:
            raise ModelError(
                f"a prompt of {num_prompt} tokens and max_new_tokens={max_new_tokens} run past the target's {limit} "
                f"positions; at most {max(0, limit - num_prompt)} new tokens fit"
            )

    def prefill(self, prompt_ids: Sequence[int]) -> int:
        """Forget the last sequence, run the prompt, return the greedy token after it."""
        return int(self.prefill_logits(prompt_ids)[-1].argmax())

    def verify(self, tokens: Sequence[int]) -> list[int]:
        """Append tokens; the greedy token after each."""
        return self.verify_logits(tokens).argmax(-1).tolist()

    def prefill_logits(self, prompt_ids: Sequence[int]) -> Tensor:
        """Forget the last sequence, run the prompt; logits ``[1, V]`` after it."""
        self._forward.clear()
        return self._append(prompt_ids, last_only=True)[-1:]

    def verify_logits(self, tokens: Sequence[int]) -> Tensor:
        """Append tokens; logits ``[n, V]`` after each."""
        return self._append(tokens)

    def keep(self, num_tokens: int) -> None:
        """Take back all but the first `num_tokens` of the tokens just verified."""
        self._forward.keep(num_tokens)
        self._num_appended = num_tokens

    def features(self) -> Tensor:
        """Tapped states of the tokens last appended and kept, joined: ``[n, L*D]``."""
        return torch.cat([tap[: self._num_appended] for tap in self._forward.taps], dim=-1)

    @torch.inference_mode()
    def next_logits(self, token_ids: Sequence[int]) -> Tensor:
        """float32 ``[V]`` logits after a sequence, computed afresh in one forward."""
        self._forward.clear()
        return self._append(token_ids, last_only=True)[-1].float()

    def _append(self, tokens: Sequence[int], last_only: bool = False) -> Tensor:
        """Run tokens behind the sequence; logits ``[n, V]`` after each, or ``[1, V]`` after the last."""
        self._num_appended = len(tokens)
        return self._forward.append(tokens, last_only)
