"""Decoding of many prompts at a time, with drafted blocks and without: what a drafter is worth where requests compete.

Every row of the batch goes on at its own pace. All rows end in the same column of the cache; a round appends the same
number of columns to each, and afterwards every row's kept columns are moved to the end again, so that the columns of a
sequence stay next to each other and a layer with a sliding window sees what it should. A finished row makes room for
the next prompt. The drafter runs once for all rows: their contexts, one after the other, are a packed row of documents
as in training, with one block each.

Rows may verify fewer tokens than were drafted, where the drafter says how sure it is: those before the first that it is
not sure enough of, or as many as bring the most tokens a second over all rows (`RoundCost`). They append as many
columns as the others all the same, so that time is saved only where all have fewer.

A recurrent layer has no columns to move: its mixer runs on one row after the other, without the padding, and every row
has states of its own, which go back as those of a single sequence do.
Shape letters: B rows, K columns of a round, W columns of the cache, L taps, D hidden, V vocabulary.
"""

from __future__ import annotations

import bisect
import inspect
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from paceline.dflash.acceptance import Acceptance
from paceline.dflash.anchors import make_anchors
from paceline.dflash.confidence import cut_below, share_lengths
from paceline.dflash.speculative import Chance
from paceline.errors import ModelError
from paceline.eval.decode import CachedTarget, Decoded, check_confidence, check_fit, leading_hits, until_stop
from paceline.eval.evaluate import Difference, compare
from paceline.eval.forwards import MixerStates, find_mixers, rollback_cache
from paceline.eval.sampling import Draws, Sampling, draws_drafts
from paceline.kernels.attention import BlockLayout
from paceline.kernels.linear_cross_entropy import Head
from paceline.kernels.packed_linear import pack_head, pack_layers
from paceline.models.draft import ContextKV, DFlashDrafter, Proposal
from paceline.models.loading import TargetShape, load_causal_lm, load_configs, shape_of


class BatchTarget:
    """A whole target with a key/value cache for several sequences and its tapped layers.

    Attributes:
        shape, layer_ids, embed, head: As in `CachedTarget`.
    """

    def __init__(self, model: Any, shape: TargetShape, layer_ids: Sequence[int]) -> None:
        """Tap a loaded Transformers causal LM. Raises: ModelError if rows of its past cannot go back on their own."""
        self.shape = shape
        self.layer_ids = tuple(layer_ids)
        self.embed: nn.Module = model.get_decoder().embed_tokens
        model.requires_grad_(False)
        self.head = pack_head(Head(model.get_output_embeddings().weight.detach(), shape.softcap, shape.logit_scale))
        pack_layers(model, self.head)
        self._model = model
        # `past_key_values` became `cache` in Transformers 5.24
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._taps: list[Tensor] = [torch.empty(0)] * len(layer_ids)
        trunk = model.get_decoder()
        for place, i in enumerate(layer_ids):
            trunk.layers[i].register_forward_hook(self._capture(place))
        self._cache = rollback_cache(trunk)
        self._mixers = _RowMixers(trunk, self._cache)
        self._lengths: list[int] = []
        self._num_columns = 0

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
    ) -> BatchTarget:
        """Load the text part of a model folder or hub id, with a LoRA adapter merged if named. Raises: ModelError."""
        config, generation = load_configs(path, revision, trust_remote_code)
        model = load_causal_lm(path, config, dtype, device, revision, trust_remote_code, adapter=adapter)
        return cls(model, shape_of(config, generation), layer_ids)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.head.weight.device

    def admit(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Tensor]]:
        """Run prompts, as rows behind the others: logits ``[n, V]`` after them, and features ``[S, L*D]`` of each."""
        lengths, width = [len(prompt) for prompt in prompts], max(map(len, prompts))
        padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        cache = rollback_cache(self._model.get_decoder())
        self._mixers.admit(lengths)
        logits = self._forward(padded, lengths, width, cache, logits_to_keep=1)[:, -1]
        features = [self._features(row, width - length, width) for row, length in enumerate(lengths)]
        joins, self._lengths = bool(self._lengths), [*self._lengths, *lengths]
        if not joins:
            self._cache = cache
            return logits, features
        columns = max(self._lengths)
        for mine, new in zip(_filled(self._cache), _filled(cache), strict=True):
            mine.keys = torch.cat([_end_aligned(layer.keys, columns) for layer in (mine, new)])
            mine.values = torch.cat([_end_aligned(layer.values, columns) for layer in (mine, new)])
        return logits, features

    def append(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Run as many tokens behind every row; logits ``[B, K, V]``. `keep` says afterwards how many of them stay."""
        self._num_columns = len(tokens[0])
        lengths = [length + self._num_columns for length in self._lengths]
        self._mixers.append(self._num_columns)
        return self._forward(tokens, lengths, max(lengths), self._cache)

    def keep(self, counts: Sequence[int]) -> list[Tensor]:
        """Take back all but the first of the tokens last appended, a number for each row; features of those that stay.

        Returns: ``[count, L*D]`` of each row.
        """
        features = [self._features(row, 0, count) for row, count in enumerate(counts)]
        before, self._lengths = max(self._lengths), [n + c for n, c in zip(self._lengths, counts, strict=True)]
        columns = max(self._lengths)
        self._mixers.keep(counts)
        if set(counts) != {self._num_columns}:
            ends = torch.tensor([before + count for count in counts], device=self.device)  # of each row's columns
            source = (torch.arange(columns, device=self.device) - columns + ends[:, None]).clamp(min=0)  # [B, W]
            for layer in _filled(self._cache):
                layer.keys, layer.values = _gathered(layer.keys, source), _gathered(layer.values, source)
        return features

    def drop(self, rows: Collection[int]) -> None:
        """Take rows out of the batch."""
        kept = [row for row in range(len(self._lengths)) if row not in rows]
        self._lengths = [self._lengths[row] for row in kept]
        self._mixers.drop(rows)
        if not kept:
            self._cache = rollback_cache(self._model.get_decoder())
            return
        index, columns = torch.tensor(kept, device=self.device), max(self._lengths)
        for layer in _filled(self._cache):
            layer.keys = _end_aligned(layer.keys.index_select(0, index), columns)
            layer.values = _end_aligned(layer.values.index_select(0, index), columns)

    def _forward(
        self, tokens: Sequence[Sequence[int]], lengths: Sequence[int], width: int, cache: Any, **options: Any
    ) -> Tensor:
        """Logits of the last columns; `lengths` and `width` count them in."""
        device = self.device
        ends = torch.tensor(lengths, device=device)[:, None]
        mask = (torch.arange(width, device=device) >= width - ends).long()  # [B, W]
        positions = torch.arange(-len(tokens[0]), 0, device=device) + ends
        last = self.shape.max_position_embeddings - 1  # columns that only fill up a round may lie past it
        options |= {self._cache_name: cache, "position_ids": positions.clamp(0, last), "attention_mask": mask}
        ids = torch.tensor([list(row) for row in tokens], device=device)
        return self._model(input_ids=ids, use_cache=True, **options).logits

    def _features(self, row: int, start: int, end: int) -> Tensor:
        return torch.cat([tap[row, start:end] for tap in self._taps], dim=-1) if self._taps else torch.empty(0)

    def _capture(self, place: int) -> Any:
        taps = self._taps

        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            taps[place] = output[0] if isinstance(output, tuple) else output

        return hook


class _RowMixers:
    """Mixers of a batch's recurrent layers, each run on one row after the other; nothing for a target without any.

    A mixer sees exactly the tokens of a row, as it does when the row is decoded alone: no padding enters its
    convolution or its state.
    """

    def __init__(self, trunk: Any, cache: Any) -> None:
        """Take the mixers over. Raises: ModelError if a recurrent layer has none that is known."""
        self._trunk = trunk
        mixers = find_mixers(trunk, cache)
        self._forwards = {i: mixer.forward for i, mixer in mixers.items()}
        self._rows: list[MixerStates] = []
        self._running: list[MixerStates] = []
        self._lengths: list[int] = []
        for i, mixer in mixers.items():
            mixer.forward = self._per_row(i)

    def admit(self, lengths: Sequence[int]) -> None:
        """The next forward is over new rows, whose last columns, as many as `lengths` says, are tokens."""
        if self._forwards:
            self._running = [MixerStates(rollback_cache(self._trunk), self._forwards) for _ in lengths]
            self._lengths = list(lengths)
            self._rows += self._running

    def append(self, num_columns: int) -> None:
        """The next forward is over so many tokens of every row."""
        self._running, self._lengths = self._rows, [num_columns] * len(self._rows)
        if num_columns > 1:  # a single token is never taken back
            for states in self._rows:
                states.copy()

    def keep(self, counts: Sequence[int]) -> None:
        """Take back all but the first tokens of every row's last forward."""
        for states, length, count in zip(self._rows, self._lengths, counts if self._rows else (), strict=True):
            if count < length:
                states.rewind(count)

    def drop(self, rows: Collection[int]) -> None:
        """Take rows out."""
        self._rows = [states for row, states in enumerate(self._rows) if row not in rows]

    def _per_row(self, layer: int) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
            """States ``[B, K, D]``; the batch's own cache and mask are left aside."""
            mixed = torch.zeros_like(hidden_states)
            for row, (states, length) in enumerate(zip(self._running, self._lengths, strict=True)):
                states.inputs[layer] = hidden_states[row : row + 1, -length:]
                mixed[row, -length:] = self._forwards[layer](states.inputs[layer], states.cache)[0]
            return mixed

        return forward


def _filled(cache: Any) -> list[Any]:
    """Layers that hold keys and values; recurrent ones hold none, nor do layers that share another's."""
    return [layer for layer in cache.layers if isinstance(layer, DynamicLayer) and layer.get_seq_length()]


def _end_aligned(x: Tensor, columns: int) -> Tensor:
    """The last columns of ``[B, N, W, H]``, zeros before them where there are fewer."""
    missing = columns - x.shape[2]
    return x[:, :, -missing:] if missing <= 0 else nn.functional.pad(x, (0, 0, missing, 0))


def _gathered(x: Tensor, source: Tensor) -> Tensor:
    """Columns `source` ``[B, W']`` of ``[B, N, W, H]``."""
    index = source[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, index)


class BatchDrafter:
    """A drafter with the keys and values of several contexts.

    Attributes:
        num_predicted: J.
    """

    def __init__(self, drafter: DFlashDrafter, target: BatchTarget, block_size: int) -> None:
        """Raises: ModelError if the two do not fit together."""
        check_fit(drafter, target.shape, target.layer_ids)
        shape = drafter.shape
        if not 2 - drafter.label_shift <= block_size <= shape.block_size:
            raise ModelError(f"block_size={block_size}: the drafter was trained for blocks of {shape.block_size} slots")
        self.num_predicted = block_size - 1 + drafter.label_shift
        self._drafter, self._block_size = drafter, block_size
        self._dtype, self._device = drafter.fc.weight.dtype, target.device
        self._embed, self._head = target.embed, drafter.own_head(target.head).to(self._dtype)
        self._rows: list[ContextKV] = []

    def admit(self, num_rows: int) -> None:
        """Add rows without a context."""
        shape = self._drafter.shape
        size = (0, shape.num_key_value_heads, shape.head_dim)
        empty = torch.empty(size, dtype=self._dtype, device=self._device)
        self._rows += [[(empty, empty)] * shape.num_hidden_layers for _ in range(num_rows)]

    def drop(self, rows: Collection[int]) -> None:
        """Take rows out."""
        self._rows = [context for row, context in enumerate(self._rows) if row not in rows]

    def extend(self, features: Sequence[Tensor]) -> None:
        """Append to every row's context, from features ``[n, L*D]`` of each."""
        starts = [len(context[0][0]) for context in self._rows]
        counts = [len(feature) for feature in features]
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        fused = self._drafter.context_kv(torch.cat(list(features)).to(self._dtype), positions.to(self._device))
        parts = [(key.split(counts), value.split(counts)) for key, value in fused]
        for row, context in enumerate(self._rows):
            self._rows[row] = [
                (torch.cat([key, keys[row]]), torch.cat([value, values[row]]))
                for (key, value), (keys, values) in zip(context, parts, strict=True)
            ]

    def propose(self, anchors: Sequence[int], samplings: Sequence[Sampling] = ()) -> Proposal:
        """Draft a block behind every row's context and anchor, greedily or drawn with a sampling for each row."""
        lengths = torch.tensor([len(context[0][0]) for context in self._rows])
        edges = torch.nn.functional.pad((lengths + 1).cumsum(0), (1, 0))  # a column for each anchor, that nobody sees
        layout = BlockLayout.of_row(
            make_anchors(edges[1:] - 1), tuple(edges.tolist()), self._block_size, int(edges[-1])
        )
        packed: ContextKV = []
        for layer in range(self._drafter.shape.num_hidden_layers):
            keys, values = ([_with_column(context[layer][i]) for context in self._rows] for i in (0, 1))
            packed.append((torch.cat(keys), torch.cat(values)))
        noise_ids = torch.full((len(anchors), self._block_size), self._drafter.shape.mask_token_id)
        noise_ids[:, 0] = torch.tensor(anchors)
        noise = self._embed(noise_ids.to(self._device)).to(self._dtype)
        positions = (lengths[:, None] + torch.arange(self._block_size)).to(self._device)
        hidden = self._drafter(noise, positions, packed, layout)
        chance = None
        if samplings:
            pairs = zip(samplings, lengths.tolist(), strict=True)
            chances = [sampling.chance(length, self.num_predicted, self._device) for sampling, length in pairs]
            chance = Chance(chances[0].temperature, torch.cat([one.uniforms for one in chances]))
        return self._drafter.propose(hidden, self._head, noise_ids[:, 0].to(self._device), chance)


def _with_column(x: Tensor) -> Tensor:
    return torch.cat([x, torch.zeros_like(x[:1])])


@dataclass
class _Row:
    """A prompt under way.

    Attributes:
        features: Of the tokens that joined the context since the last draft.
        sampling, draws: Its own; None: greedily.
    """

    number: int
    answer: Decoded
    features: Tensor
    sampling: Sampling | None
    draws: Draws | None


@dataclass(frozen=True)
class RoundCost:
    """What a round takes, by the tokens in the target's forward, anchors included.

    It was measured with all rows verifying alike: where lengths differ, columns that only fill up come on top.

    Attributes:
        num_tokens: Ascending.
        seconds: Drafting and verifying; never falling, so that a lucky moment does not make a longer forward look
            cheaper.
    """

    num_tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, measured: Mapping[int, float]) -> RoundCost:
        """From seconds by tokens."""
        sizes = sorted(measured)
        return cls(tuple(sizes), tuple(itertools.accumulate((measured[n] for n in sizes), max)))

    def rounds_per_s(self, num_tokens: int) -> float:
        """Rounds a second with so many tokens, interpolated; outside what was measured as at its ends."""
        n = min(max(num_tokens, self.num_tokens[0]), self.num_tokens[-1])
        place = max(1, bisect.bisect_left(self.num_tokens, n))
        if place == len(self.num_tokens):  # there is only one
            return 1 / self.seconds[0]
        (low, high), (short, long) = self.num_tokens[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return 1 / (short + (long - short) * (n - low) / (high - low))


@torch.inference_mode()
def measure_rounds(target: BatchTarget, drafter: BatchDrafter, prompts: Sequence[Sequence[int]]) -> RoundCost:
    """Time a few widths of a round with these prompts as rows, and a single token of one row; all rows are dropped."""
    num_rows, num_predicted = len(prompts), drafter.num_predicted
    _, features = target.admit(prompts)
    drafter.admit(num_rows)
    drafter.extend(features)
    draft_s = _median_s(lambda: drafter.propose([0] * num_rows).ids.tolist())

    def verify_s(num_rows: int, width: int) -> float:
        def verify() -> None:
            target.append([[0] * width] * num_rows).argmax(-1).tolist()
            target.keep([1] * num_rows)

        return draft_s + _median_s(verify)

    widths = {1, 2, (num_predicted + 3) // 2, num_predicted + 1}
    measured = {num_rows * width: verify_s(num_rows, width) for width in widths}
    if num_rows > 1:
        target.drop(range(1, num_rows))
        measured[1] = verify_s(1, 1)
    target.drop([0])
    drafter.drop(range(num_rows))
    return RoundCost.of(measured)


def _median_s(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])  # the first call pays for what has not been run before


@dataclass
class BatchRun:
    """Answers in the order of their prompts, without times of their own, and how long all took together."""

    answers: list[Decoded]
    seconds: float

    @property
    def tok_per_s(self) -> float:
        """Tokens of all answers over wall seconds, prompts included."""
        return sum(len(answer.tokens) for answer in self.answers) / self.seconds if self.seconds else 0.0


@torch.inference_mode()
def decode_batch(
    target: BatchTarget,
    drafter: BatchDrafter | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Collection[int],
    batch_size: int,
    sampling: Sampling | None = None,
    verify_threshold: float = 0.0,
    cost: RoundCost | None = None,
) -> BatchRun:
    """Decode prompts, up to `batch_size` at a time; every answer is the one that it has when decoded alone.

    Args:
        drafter: None decodes one token per row and round.
        sampling: As in `evaluate`: every prompt has draws of its own.
        verify_threshold: As in `decode.speculative_decode`.
        cost: Has all rows together verify as many tokens as bring the most a second, whatever the threshold.
    """
    started = time.perf_counter()
    num_predicted = drafter.num_predicted if drafter else 0
    answers = [Decoded([], Acceptance(num_predicted), num_prompt=len(prompt)) for prompt in prompts]
    waiting, rows = deque(range(len(prompts))), list[_Row]()
    while waiting or rows:
        admitted = [waiting.popleft() for _ in range(min(len(waiting), batch_size - len(rows)))]
        if admitted:
            logits, features = target.admit([prompts[number] for number in admitted])
            if drafter:
                drafter.admit(len(admitted))
            for number, row_logits, feature in zip(admitted, logits, features, strict=True):
                own = sampling and sampling.of_prompt(number)
                row = _Row(number, answers[number], feature, own, Draws(own) if own else None)
                row.answer.tokens += _chosen(row, row_logits[None])
                row.answer.stopped = row.answer.tokens[0] in stop_ids
                rows.append(row)
        else:
            _round(target, drafter, rows, max_new_tokens, stop_ids, verify_threshold, cost)
        done = [i for i, r in enumerate(rows) if r.answer.stopped or len(r.answer.tokens) >= max_new_tokens]
        if done:
            target.drop(done)
            if drafter:
                drafter.drop(done)
            rows = [row for i, row in enumerate(rows) if i not in done]
    return BatchRun(answers, time.perf_counter() - started)


def _round(
    target: BatchTarget,
    drafter: BatchDrafter | None,
    rows: Sequence[_Row],
    max_new_tokens: int,
    stop_ids: Collection[int],
    verify_threshold: float,
    cost: RoundCost | None,
) -> None:
    """One forward of the target for all rows; see `decode`, which does the same for one."""
    anchors = [row.answer.tokens[-1] for row in rows]
    left = [max_new_tokens - len(row.answer.tokens) for row in rows]
    drafts: list[list[int]] = [[] for _ in rows]
    proposal: Proposal | None = None
    if drafter:
        drafter.extend([row.features for row in rows])
        proposal = drafter.propose(anchors, [row.sampling for row in rows if draws_drafts(row.sampling)])
        lengths = _verified(proposal, left, verify_threshold, cost)
        drafts = [drafted[:n] for drafted, n in zip(proposal.ids.tolist(), lengths, strict=True)]
    width = 1 + max(map(len, drafts))
    blocks = [[anchor, *drafted] for anchor, drafted in zip(anchors, drafts, strict=True)]
    logits = target.append([[*block, *[0] * (width - len(block))] for block in blocks])
    counts = []
    for place, (row, block, drafted, n) in enumerate(zip(rows, blocks, drafts, left, strict=True)):
        row_logits = logits[place, : len(block)]
        if proposal is not None and draws_drafts(row.sampling):
            following = row.sampling.judged(row_logits, proposal, len(row.answer.tokens), place)
        else:
            following = _chosen(row, row_logits)
        num_hits = leading_hits(drafted, following)
        committed = until_stop([*drafted[:num_hits], following[num_hits]][:n], stop_ids)
        counts.append(len(committed))
        row.answer.tokens += committed
        row.answer.stopped = committed[-1] in stop_ids
        if row.draws:
            row.draws.forget(len(row.answer.tokens))
        if drafter:
            num_accepted = min(num_hits, len(committed))
            row.answer.num_accepted_tokens.append(num_accepted)
            row.answer.acceptance.add_round(num_accepted, len(committed), len(drafted))
    for row, feature in zip(rows, target.keep(counts), strict=True):
        row.features = feature


def _verified(
    proposal: Proposal, left: Sequence[int], verify_threshold: float, cost: RoundCost | None
) -> Sequence[int]:
    """Drafted tokens that each row has verified, at most as many as are left."""
    confidence = proposal.confidence
    if confidence is None or not (cost or verify_threshold):
        return left
    if cost is not None:
        rows = [row[:n] for row, n in zip(confidence.tolist(), left, strict=True)]
        return share_lengths(rows, cost.rounds_per_s)
    return [min(n, cut) for n, cut in zip(left, cut_below(confidence, verify_threshold).tolist(), strict=True)]


def _chosen(row: _Row, logits: Tensor) -> list[int]:
    """The target's token after each of some tokens, from logits ``[n, V]``."""
    if row.draws:
        logits = row.draws.scores(logits, len(row.answer.tokens))
    return logits.argmax(-1).tolist()


@dataclass(frozen=True)
class Concurrency:
    """Plain and drafted decoding with so many prompts at a time; rates count prompts' time and all rows' tokens.

    Attributes:
        verified_per_round, acceptance_rate: Drafted tokens verified in a row's round, and the share of them accepted.
        mismatches, ties: Answers, of both ways, that differ from the one decoded alone; ties are rounding. Drafted
            answers whose drafts were drawn are not compared.
    """

    batch_size: int
    baseline_tok_per_s: float
    tok_per_s: float
    acceptance_length: float
    verified_per_round: float
    acceptance_rate: float
    mismatches: int
    ties: int

    def as_dict(self) -> dict[str, float]:
        """Plain values, and the speedup."""
        return vars(self) | {"speedup": self.tok_per_s / self.baseline_tok_per_s if self.baseline_tok_per_s else 0.0}


def batch_sizes(largest: int) -> list[int]:
    """Powers of two, and the largest."""
    return sorted({1 << i for i in range(largest.bit_length()) if 1 << i <= largest} | {largest})


def measure_concurrency(
    target: BatchTarget,
    drafter: DFlashDrafter,
    alone: CachedTarget,
    prompts: Sequence[Sequence[int]],
    wanted: Sequence[Decoded],
    *,
    block_size: int,
    max_new_tokens: int,
    stop_ids: Collection[int],
    sizes: Sequence[int],
    sampling: Sampling | None = None,
    verify_threshold: float = 0.0,
    verify: Literal["all", "auto"] = "all",
    on_size: Callable[[Concurrency], None] = lambda found: None,
) -> list[Concurrency]:
    """Decode all prompts at every number of rows, plainly and with drafts, and compare with the answers decoded alone.

    Plain decoding takes the same code without a drafter. The two take turns at going first; the very first batch is
    run once before and not counted.

    Args:
        alone: Asked how sure it is where answers differ.
        wanted: Answers decoded alone.
        verify_threshold: As in `decode.speculative_decode`.
        verify: ``auto``: rows share what is verified by its cost, measured before at every number of rows.
        on_size: Called after each number of rows.
    Raises: ModelError if the drafter is asked how sure it is, and does not say.
    """
    check_confidence(drafter, verify_threshold > 0 or verify == "auto")
    found = []
    side = BatchDrafter(drafter, target, block_size)
    ways = [None, side]
    for way in ways:
        decode_batch(target, way, prompts[: sizes[-1]], min(8, max_new_tokens), stop_ids, sizes[-1], sampling)
    for turn, size in enumerate(sizes):
        cost = measure_rounds(target, side, prompts[:size]) if verify == "auto" else None
        runs: dict[bool, BatchRun] = {}
        for way in ways if turn % 2 == 0 else reversed(ways):
            rest = prompts, max_new_tokens, stop_ids, size, sampling, verify_threshold, cost
            runs[way is None] = decode_batch(target, way, *rest)
        plain, drafted = runs[True], runs[False]
        total = Acceptance(side.num_predicted)
        differences: list[Difference] = []
        for number, prompt in enumerate(prompts):
            draws = sampling and replace(sampling.of_prompt(number), drafts="greedy")
            total += drafted.answers[number].acceptance
            compared = [plain.answers[number], *([] if draws_drafts(sampling) else [drafted.answers[number]])]
            for answer in compared:
                differences += compare(alone, prompt, wanted[number], answer, sampling=draws).differences
        ties = sum(difference.is_tie for difference in differences)
        rates = plain.tok_per_s, drafted.tok_per_s
        shares = total.length, total.verified_per_round, total.acceptance_rate
        found.append(Concurrency(size, *rates, *shares, len(differences) - ties, ties))
        on_size(found[-1])
    return found
