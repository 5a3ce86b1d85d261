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

import itertools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from paceline.dflash.acceptance import Acceptance
from paceline.dflash.confidence import cut_below
from paceline.errors import ModelError
from paceline.eval.forwards import Forward, ModelForward, Tokens
from paceline.eval.lean import LEAN, LeanForward, obstacle
from paceline.eval.ngram import NgramDrafter
from paceline.eval.sampling import JudgingTarget, SampledTarget, Sampling, draws_drafts
from paceline.eval.static import STATIC, StaticForward
from paceline.eval.static import obstacle as static_obstacle
from paceline.eval.static_draft import StaticDrafter
from paceline.eval.structure import difference
from paceline.kernels.attention import BlockLayout
from paceline.kernels.linear_cross_entropy import Head
from paceline.kernels.packed_linear import pack_head, pack_layers
from paceline.models.draft import ContextKV, DFlashDrafter, Proposal
from paceline.models.loading import TargetShape, load_causal_lm, load_configs, shape_of
from paceline.models.split import bring_along, part_devices

log = logging.getLogger(__name__)


class TargetSide(Protocol):
    """What the loop asks of a target; it holds the sequence that has been committed so far."""

    def prefill(self, prompt_ids: Sequence[int]) -> int:
        """Start a sequence; the first token that follows it."""

    def verify(self, tokens: Tokens) -> Tokens:
        """Append tokens; the token that the target says after each of them, up to the first that differs at least."""

    def keep(self, num_tokens: int) -> None:
        """Take back all but the first `num_tokens` of the tokens just verified."""

    def features(self) -> Tensor:
        """Context features ``[n, L*D]`` of the tokens that the last call appended and kept."""


class DraftSide(Protocol):
    """What the loop asks of a drafter; it holds the context that it has been given so far."""

    num_predicted: int

    def extend(self, tokens: Sequence[int], features: Callable[[], Tensor]) -> None:
        """Append tokens to the context; `features()` are theirs, ``[n, L*D]``, made only if asked for."""

    def propose(self, anchor: int) -> Tokens:
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
    watch: Stopwatch | None = None,
) -> Decoded:
    """Decode; the answer is the same with any drafter and with none.

    A whole block is drafted even where fewer tokens are left, as the slots of a block see each other and the drafter
    learned whole blocks; only what may still be committed is verified.

    Args:
        drafter: None decodes one token per target forward.
        max_new_tokens: At least 1.
        stop_ids: Tokens that end the answer, and belong to it.
        watch: Tells drafting from verifying; None: by the host's clock.
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
    watch = watch or Stopwatch()
    while not answer.stopped and len(answer.tokens) < max_new_tokens:
        anchor, left = answer.tokens[-1], max_new_tokens - len(answer.tokens)
        watch.start()
        proposed = _draft(target, drafter, joined, anchor)[:left] if drafter else []
        watch.drafted()
        drafted, following = on_host(proposed, target.verify(after(anchor, proposed)))
        num_hits = leading_hits(drafted, following)
        committed = until_stop([*drafted[:num_hits], following[num_hits]][:left], stop_ids)
        target.keep(len(committed))
        draft_s, round_s = watch.ended()
        answer.draft_s += draft_s
        answer.verify_s += round_s - draft_s
        answer.rounds_s.append(round_s)
        joined = [anchor, *committed[:-1]]
        answer.tokens += committed
        answer.stopped = committed[-1] in stop_ids
        if drafter:
            num_accepted = min(num_hits, len(committed))
            answer.num_accepted_tokens.append(num_accepted)
            answer.acceptance.add_round(num_accepted, len(committed), len(drafted))
    return answer


def _draft(target: TargetSide, drafter: DraftSide, joined: Sequence[int], anchor: int) -> Tokens:
    drafter.extend(joined, target.features)
    return drafter.propose(anchor)


def after(anchor: int, drafted: Tokens) -> Tokens:
    """The anchor and what was drafted behind it, where that stands."""
    if isinstance(drafted, Tensor):
        return torch.cat([drafted.new_full((1,), anchor), drafted])  # a copy from the host would wait for the device
    return [anchor, *drafted]


def on_host(*tokens: Tokens) -> list[list[int]]:
    """Token ids as lists; all that stand on a device come in one copy, the round's only wait for it."""
    on_device = [each for each in tokens if isinstance(each, Tensor)]
    values = iter(torch.cat(on_device).tolist() if on_device else [])
    return [list(itertools.islice(values, len(each))) if isinstance(each, Tensor) else list(each) for each in tokens]


class Stopwatch:
    """Times a round and the drafting in it, by the host's clock."""

    def start(self) -> None:
        """A round begins."""
        self._started = self._drafted = time.perf_counter()

    def drafted(self) -> None:
        """Drafting has been done, or launched."""
        self._drafted = time.perf_counter()

    def ended(self) -> tuple[float, float]:
        """Seconds of the drafting, and of the round."""
        return self._drafted - self._started, time.perf_counter() - self._started


class DeviceStopwatch(Stopwatch):
    """The same where a GPU runs behind the host: the drafting's share is the device's."""

    def __init__(self) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def start(self) -> None:
        super().start()
        self._events[0].record()

    def drafted(self) -> None:
        self._events[1].record()

    def ended(self) -> tuple[float, float]:
        round_s = time.perf_counter() - self._started
        return min(round_s, self._events[0].elapsed_time(self._events[1]) / 1e3), round_s


def leading_hits(drafted: Sequence[int], following: Sequence[int]) -> int:
    """How many drafted tokens the target says as well, before the first it does not; one of its own stands behind."""
    pairs = zip(drafted, following[:-1], strict=False)
    return next((i for i, (token, said) in enumerate(pairs) if token != said), min(len(drafted), len(following) - 1))


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
    target.reserve(len(prompt_ids) + max_new_tokens, 1)
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
    target.reserve(len(prompt_ids) + max_new_tokens, num_predicted + 1)
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
    verify_threshold: float = 0.0,
) -> Decoded:
    """Decoding with drafted blocks; the drafter proposes its most likely tokens, unless `sampling` has it draw.

    Args:
        block_size: Slots used, at most the trained K; None: all of them.
        dtype: Compute type of the drafter; another one than its weights' runs it under autocast, where norms
            stay float32. None: the weights' own.
        sampling: None decodes greedily.
        verify_threshold: Drafted tokens are left out from the first on of which the drafter is less sure.
    Raises: ModelError if target and drafter do not fit together, the answer may run past the target's positions, or
        there is a threshold and the drafter does not say how sure it is.
    """
    target.check_length(len(prompt_ids), max_new_tokens)
    check_confidence(drafter, verify_threshold > 0)
    capacity = len(prompt_ids) + max_new_tokens
    block_size = block_size or drafter.shape.block_size
    target.reserve(capacity, block_size + drafter.label_shift)
    watch = DeviceStopwatch() if target.device.type == "cuda" else None
    rest = prompt_ids, max_new_tokens, stop_ids, watch
    if target.device.type == "cuda" and dtype in (None, drafter.fc.weight.dtype) and not draws_drafts(sampling):
        room = target.static_side(drafter, block_size)
        room.begin(capacity, verify_threshold)
        return decode(_side(target, sampling), room, *rest)
    side = ContextDrafter(drafter, target, capacity, block_size, dtype, verify_threshold, sampling)
    if draws_drafts(sampling):
        return decode(JudgingTarget(target, sampling, side), side, *rest)
    return decode(_side(target, sampling), side, *rest)


def _side(target: CachedTarget, sampling: Sampling | None) -> TargetSide:
    return target if sampling is None else SampledTarget(target, sampling)


def check_confidence(drafter: DFlashDrafter, is_needed: bool) -> None:
    """Raises: ModelError if it is needed and the drafter does not say how sure it is of its tokens."""
    if is_needed and not drafter.has_confidence:
        raise ModelError(
            "to leave drafted tokens unverified (a verify threshold above 0, or verify auto) takes a drafter with a "
            f"confidence head; this one, of kind {drafter.shape.kind}, has none: verify all, or train one with "
            "draft.kind=dspark"
        )


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


def check_block(drafter: DFlashDrafter, target: CachedTarget, block_size: int) -> None:
    """Raises: ModelError if a drafter does not fit to a target, or was not trained for blocks of this size."""
    check_fit(drafter, target.shape, target.layer_ids)
    trained = drafter.shape.block_size
    if not 2 - drafter.label_shift <= block_size <= trained:
        raise ModelError(f"block_size={block_size}: the drafter was trained for blocks of {trained} slots")


class ContextDrafter:
    """A drafter with the keys and values of its context, for one sequence.

    The buffers hold the whole sequence from the start, so that a step allocates and copies nothing of the context; a
    block's own keys and values are never stored.

    Attributes:
        proposal: Of the last block, whole.
    """

    proposal: Proposal

    def __init__(
        self,
        drafter: DFlashDrafter,
        target: CachedTarget,
        capacity: int,
        block_size: int,
        dtype: torch.dtype | None = None,
        verify_threshold: float = 0.0,
        sampling: Sampling | None = None,
    ) -> None:
        """Reserve room for `capacity` context tokens; see `speculative_decode` for what else it may do.

        Raises: ModelError if the two do not fit together.
        """
        check_block(drafter, target, block_size)
        self._threshold = verify_threshold
        self._sampling = sampling if draws_drafts(sampling) else None
        shape = drafter.shape
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
        """Draft the block that starts at `anchor`, the token right after the context; those to be verified."""
        end, block_size = self._num_context, self._noise_ids.shape[1]
        self._noise_ids[0, 0] = anchor
        positions = torch.arange(end, end + block_size, device=self._device)[None]
        context: ContextKV = [(key[:end], value[:end]) for key, value in zip(self._keys, self._values, strict=True)]
        with self._autocast:
            noise = self._embed(self._noise_ids).to(self._dtype)
            hidden = self._drafter(noise, positions, context, BlockLayout.of_decode(end, block_size))
            chance = self._sampling.chance(end, self.num_predicted, self._device) if self._sampling else None
            self.proposal = self._drafter.propose(hidden, self._head, self._noise_ids[:, 0], chance)
        ids, confidence = self.proposal.ids, self.proposal.confidence
        if self._threshold and confidence is not None:
            ids = ids[:, : int(cut_below(confidence, self._threshold)[0])]
        return ids[0].tolist()


class CachedTarget:
    """A whole target with its key/value cache and its tapped layers, for one sequence at a time.

    Attributes:
        shape: What the configuration says.
        layer_ids: Tapped layers; empty where nothing is drafted.
        embed: The target's embedding module (it scales where the family scales).
        head: The target's output head, for the drafter.
        kernel: What computes the forward, and why, in one line.
    """

    def __init__(
        self, model: Any, shape: TargetShape, layer_ids: Sequence[int], devices: Sequence[torch.device] = ()
    ) -> None:
        """Tap a loaded Transformers causal LM that has all its layers; `CachedTarget.load` is the usual way.

        Where `eval.lean` can do what the model does, and a probe shows that it does, the model is not kept: its own
        weights are freed with the caller's last reference. Elsewhere its linear layers are packed in place if possible.

        Args:
            devices: Of the parts that the layers were loaded in; up to one: they are together.
        """
        self.shape = shape
        self.layer_ids = tuple(layer_ids)
        self.embed: nn.Module = model.get_decoder().embed_tokens
        model.requires_grad_(False)
        self.head = pack_head(Head(model.get_output_embeddings().weight.detach(), shape.softcap, shape.logit_scale))
        if len(devices) > 1:
            bring_along(model, model.part_starts, devices)
            self._forward: Forward = ModelForward(model, self.layer_ids)
            self.kernel = f"Transformers' own forward, its layers in {len(devices)} parts"
        else:
            self._forward, self.kernel = self._choose_forward(model)
        self._num_appended = 0
        self._static_sides: dict[tuple[int, int], StaticDrafter] = {}

    def _choose_forward(self, model: Any) -> tuple[Forward, str]:
        """The lean forward where it fits, the model itself elsewhere; and which of the two, and why."""
        whole = ModelForward(model, self.layer_ids)
        is_on_gpu = self.device.type == "cuda"
        reason = static_obstacle(model, self.head) if is_on_gpu else obstacle(model, self.head)
        if reason is None:
            own = (StaticForward if is_on_gpu else LeanForward)(model, self.head, self.layer_ids)
            name = "static" if is_on_gpu else "lean"
            reason = difference(own, whole, self.shape.vocab_size, self.dtype, name)
            if reason is None:
                whole.untap()
                return own, STATIC if is_on_gpu else LEAN
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
        adapter: str | None = None,
        num_parts: int = 1,
    ) -> CachedTarget:
        """Load the text part of a model folder or hub id, with a LoRA adapter merged if named.

        Args:
            num_parts: Parts that the layers are split into: on `device` and the GPUs that follow it.
        Raises: ModelError; ConfigError for more parts than there are GPUs or layers.
        """
        config, generation = load_configs(path, revision, trust_remote_code)
        devices, where = part_devices(device, num_parts), (revision, trust_remote_code)
        model = load_causal_lm(path, config, dtype, device, *where, adapter=adapter, devices=devices, keeps_norm=True)
        return cls(model, shape_of(config, generation), layer_ids, devices)

    @property
    def device(self) -> torch.device:
        """Where the model lives; of several parts the first one."""
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

    def reserve(self, num_positions: int, num_tokens: int) -> None:
        """Get ready for sequences of so many positions and calls of up to so many tokens; forgets the sequence."""
        self._forward.reserve(num_positions, num_tokens)

    def static_side(self, drafter: DFlashDrafter, block_size: int) -> StaticDrafter:
        """The drafter's side for a GPU, the same one for every sequence. Raises: ModelError if they do not fit."""
        check_block(drafter, self, block_size)
        key = id(drafter), block_size  # the side keeps its drafter, so that its id stays its own
        if key not in self._static_sides:
            head = drafter.own_head(self.head).to(drafter.fc.weight.dtype)
            self._static_sides[key] = StaticDrafter(drafter, self.embed, head, block_size)
        return self._static_sides[key]

    def prefill(self, prompt_ids: Sequence[int]) -> int:
        """Forget the last sequence, run the prompt, return the greedy token after it."""
        return int(self.prefill_logits(prompt_ids)[-1].argmax())

    def verify(self, tokens: Tokens) -> Tokens:
        """Append tokens; the greedy token after each, on a GPU as a tensor."""
        best = self.verify_logits(tokens).argmax(-1)
        return best if best.device.type == "cuda" else best.tolist()

    def prefill_logits(self, prompt_ids: Sequence[int]) -> Tensor:
        """Forget the last sequence, run the prompt; logits ``[1, V]`` after it."""
        self._forward.clear()
        return self._append(prompt_ids, last_only=True)[-1:]

    def verify_logits(self, tokens: Tokens) -> Tensor:
        """Append tokens; logits ``[n, V]`` after each."""
        return self._append(tokens)

    def keep(self, num_tokens: int) -> None:
        """Take back all but the first `num_tokens` of the tokens just verified."""
        self._forward.keep(num_tokens)
        self._num_appended = num_tokens

    def features(self) -> Tensor:
        """Tapped states of the tokens last appended and kept, joined: ``[n, L*D]``."""
        return torch.cat([tap[: self._num_appended].to(self.device) for tap in self._forward.taps], dim=-1)

    @torch.inference_mode()
    def next_logits(self, token_ids: Sequence[int]) -> Tensor:
        """float32 ``[V]`` logits after a sequence, computed afresh in one forward."""
        self._forward.clear()
        return self._append(token_ids, last_only=True)[-1].float()

    def _append(self, tokens: Tokens, last_only: bool = False) -> Tensor:
        """Run tokens behind the sequence; logits ``[n, V]`` after each, or ``[1, V]`` after the last."""
        self._num_appended = len(tokens)
        return self._forward.append(tokens, last_only)
