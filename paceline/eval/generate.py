"""Answers from a model on this machine, many at a time: what `paceline regenerate --target` and the demo train on.

A finished answer leaves the batch and a waiting prompt takes its place (continuous refill). All rows of the batch end
in the same column of the cache, as in a left-padded batch, so a step is one ordinary forward that appends one column
for everybody: it runs whatever `generate` runs, and the cache is never wider than the longest row in it.

Transformers' own continuous batching was measured against this (5.24, SmolLM2-135M, 24 prompts x 64 tokens, float32 on
two cores): 32 to 36 tok/s as it comes, 53 to 65 with a bounded cache, 112 to 117 here, 154 to 158 with packed weights.
Without flash attention it compares every row's query with every row's keys under one mask, which grows with the square
of the slots; it also takes no recurrent layers.

Shape letters: B rows, S columns of the prompts, W columns of the cache, V vocabulary, N heads, H head size.
"""

from __future__ import annotations

import inspect
import os
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from paceline.data.regenerate import number_of

PREFILL_TOKENS = {"cpu": 512, "cuda": 16384}
"""Padded tokens of the prompts that are run together; a longer prompt runs alone. A GPU wants large products, a CPU
does as well with small ones, and pads less."""

GPU_CACHE_FRAC = 0.5
"""Of a GPU's free memory, for the cache: a refill makes a second copy of one layer, sampling some of the logits."""

HOST_CACHE_FRAC = 0.125
"""Of a host's memory: other programs live there."""

MAX_SLOTS = {"cpu": 16, "cuda": 1024}
"""Rows decoded together unless told otherwise; more pay little there and wait longer for the first answer."""

IDLE_SHARE = 8
"""Refill once one slot in so many is free: every refill copies the cache."""

JOINABLE = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    getattr(cache_utils, "DummyLayer", DynamicLayer),  # newer than Transformers 5.17; holds nothing
)
"""Kinds of cache layers whose rows can be taken out and put together here. With another one a batch is decoded to its
end before the next begins."""


@dataclass
class Request:
    """A prompt and, when it is done, its answer.

    Attributes:
        prompt: Token ids.
        max_new_tokens: Length limit of the answer.
        key: What its random numbers hang on, beside the seed: the same key gives the same ones in any company.
        answer: Token ids, stop token included.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    key: str = ""
    answer: list[int] = field(default_factory=list)

    @property
    def longest(self) -> int:
        """Columns that it may come to need."""
        return len(self.prompt) + self.max_new_tokens


class BatchGenerator:
    """Decodes requests with a causal LM; `submit` them, then `step` until it has handed back every one.

    Attributes:
        can_refill: Whether waiting prompts take the places of finished answers.
        num_sampled: Tokens of answers so far.
    """

    def __init__(
        self,
        model: Any,
        stop_ids: Collection[int],
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        max_slots: int = 32,
        max_tokens: int | None = None,
    ) -> None:
        """Decode nothing yet.

        Args:
            model: A Transformers causal LM.
            stop_ids: Tokens that end an answer.
            temperature: 0: always the most likely token. Other settings of the model's `generation_config` (top-k,
                repetition penalty) are not applied: they belong to a server, not to the target.
            top_p: Share of the probability that is sampled from.
            max_slots: Rows decoded together.
            max_tokens: Columns times rows that the cache may come to hold; a longer request runs alone. None: any.
        """
        self._model = model
        self._stop_ids = frozenset(stop_ids)
        self._temperature, self._top_p, self._seed = temperature, top_p, seed
        self._max_slots, self._max_tokens = max_slots, max_tokens
        parameters = inspect.signature(model.forward).parameters
        # `past_key_values` became `cache` in Transformers 5.24
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._takes_positions = "position_ids" in parameters
        layers = transformers.DynamicCache(config=model.config).layers
        self.can_refill = all(type(layer) in JOINABLE for layer in layers)
        self.num_sampled = 0
        self._waiting: deque[Request] = deque()
        self._random: dict[int, np.random.Generator] = {}
        self._rows: list[Request | None] = []
        """Rows of the batch; None where one is done and not yet taken out."""
        self._cache: Any = None
        self._mask = torch.zeros(0, 0, dtype=torch.long, device=model.device)  # [B, W]; ones where a row has a token
        self._last = torch.zeros(0, dtype=torch.long, device=model.device)  # [B]

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    @property
    def is_busy(self) -> bool:
        """Whether anything is being decoded or waits for it."""
        return bool(self._waiting) or self._num_alive > 0

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run one forward, of new prompts or of one token for every row; the requests that it finished."""
        if admitted := self._take_waiting():
            self._prefill(admitted)
        elif self._num_alive:
            if self.can_refill and (len(self._rows) - self._num_alive) * IDLE_SHARE >= len(self._rows):
                self._join(None, [])
            self._decode()
        return self._take_finished()

    @property
    def _num_alive(self) -> int:
        return sum(row is not None for row in self._rows)

    def _take_waiting(self) -> list[Request]:
        """Waiting requests for which there is room, as many as one forward takes; none if a refill does not pay yet."""
        alive = self._num_alive
        if alive and (not self.can_refill or (self._max_slots - alive) * IDLE_SHARE < self._max_slots):
            return []
        taken: list[Request] = []
        longest = max((row.longest for row in self._rows if row), default=0)
        width = 0
        while self._waiting and alive + len(taken) < self._max_slots:
            request = self._waiting[0]
            longest, width = max(longest, request.longest), max(width, len(request.prompt))
            num_rows = alive + len(taken) + 1
            if num_rows > 1 and self._max_tokens is not None and num_rows * longest > self._max_tokens:
                break
            # A batch that cannot be refilled takes all its rows in one forward.
            if taken and self.can_refill and (len(taken) + 1) * width > PREFILL_TOKENS[self._model.device.type]:
                break
            taken.append(self._waiting.popleft())
        return taken

    def _prefill(self, requests: list[Request]) -> None:
        """Run prompts, and put them into the batch in the place of the rows that are done."""
        width = max(len(request.prompt) for request in requests)
        padded = [[0] * (width - len(request.prompt)) + list(request.prompt) for request in requests]
        mask = [[0] * (width - len(request.prompt)) + [1] * len(request.prompt) for request in requests]
        cache = transformers.DynamicCache(config=self._model.config)
        device = self._model.device
        new_mask = torch.tensor(mask, device=device)
        logits = self._forward(torch.tensor(padded, device=device), new_mask, cache)
        for request in requests:
            self._random[id(request)] = stream_of(self._seed, request.key)
        self._join(cache, requests, new_mask)
        self._append(logits, first_row=len(self._rows) - len(requests))

    def _decode(self) -> None:
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        self._append(self._forward(self._last[:, None], self._mask, self._cache), first_row=0)

    def _forward(self, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """float32 ``[B, V]`` logits after the last of some columns, ``[B, S]``; mask ``[B, W]`` of all so far."""
        options: dict[str, Any] = dict(self._options)
        if self._takes_positions:
            options["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        options[self._cache_name] = cache
        return self._model(input_ids=ids, attention_mask=mask, use_cache=True, **options).logits[:, -1].float()

    def _append(self, logits: Tensor, first_row: int) -> None:
        """Choose the next token of the rows from `first_row` on."""
        tokens = self._choose(logits, self._rows[first_row:])
        self._last[first_row:] = tokens
        for row, token in zip(self._rows[first_row:], tokens.tolist(), strict=True):
            if row is not None:
                row.answer.append(token)
                self.num_sampled += 1

    def _choose(self, logits: Tensor, rows: Sequence[Request | None]) -> Tensor:
        """Next token of each row, int64 ``[B]``."""
        if self._temperature == 0:
            return logits.argmax(-1)
        uniform = [0.5 if row is None else self._random[id(row)].random() for row in rows]
        drawn = torch.tensor(uniform, dtype=torch.double, device=logits.device)
        return choose(logits, drawn, self._temperature, self._top_p)

    def _take_finished(self) -> list[Request]:
        finished = []
        for i, row in enumerate(self._rows):
            if row and (row.answer[-1] in self._stop_ids or len(row.answer) >= row.max_new_tokens):
                finished.append(row)
                del self._random[id(row)]
                self._rows[i] = None
        if not self._num_alive:
            self._rows, self._cache = [], None
        return finished

    def _join(self, cache: Any, requests: list[Request], mask: Tensor | None = None) -> None:
        """Take rows that are done out of the batch, and put new ones behind the others."""
        device = self._model.device
        alive = [i for i, row in enumerate(self._rows) if row is not None]
        keep = torch.tensor(alive, dtype=torch.long, device=device)
        new_rows: list[Request | None] = [self._rows[i] for i in alive]
        self._rows = [*new_rows, *requests]
        masks = ([self._mask[keep]] if alive else []) + ([mask] if mask is not None else [])
        width = max(int(part.sum(-1).max()) for part in masks)
        self._mask = torch.cat([_aligned(part, width, 1) for part in masks])
        self._last = torch.cat([self._last[keep], self._last.new_zeros(len(requests))])
        if not alive:
            self._cache = cache
            return
        for i, layer in enumerate(self._cache.layers):
            _join_layer(layer, keep, [] if cache is None else [cache.layers[i]], width)


def stream_of(seed: int, key: str) -> np.random.Generator:
    """The random numbers of a request, one a token: they hang on the seed and its key alone."""
    return np.random.Generator(np.random.Philox(key=number_of(seed, key)))


def choose(logits: Tensor, uniform: Tensor, temperature: float, top_p: float) -> Tensor:
    """Next token of each row, int64 ``[B]``: the most likely, or a uniform number, looked up in the cumulated
    probabilities.

    Args:
        logits: float32 ``[B, V]``.
        uniform: double ``[B]``, below 1.
        temperature: 0: the most likely token.
        top_p: Share of the probability that is sampled from: the likeliest tokens that have it together.
    """
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits / temperature, -1)
    if top_p < 1:
        probabilities = probabilities.masked_fill(~nucleus(probabilities, top_p), 0)
    cumulated = probabilities.double().cumsum(-1)
    wanted = uniform[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, wanted, right=True).clamp(max=logits.shape[-1] - 1)[:, 0]


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """The likeliest tokens that have a share of the probability together, bool ``[B, V]``; as likely ones go together.

    The least of their probabilities is found bit by bit, as floats above 0 are ordered like their bits: a sort of the
    whole vocabulary takes a GPU longer than the model does.

    Args:
        probabilities: float32 ``[B, V]``, at most 1.
    """
    bits = probabilities.view(torch.int32)
    least = torch.zeros_like(bits[:, :1])
    for bit in range(29, -1, -1):  # 1.0 is 0x3F800000
        higher = least | (1 << bit)
        share = torch.where(bits >= higher, probabilities, 0.0).sum(-1, keepdim=True)
        least = torch.where(share >= top_p, higher, least)
    return bits >= least


def _join_layer(layer: Any, keep: Tensor, others: Sequence[Any], width: int) -> None:
    """In place: some rows of a cache layer, behind them all of another one if given, the last `width` columns each."""
    both = [layer, *others]
    if isinstance(layer, CacheLayerMixin) and layer.is_initialized:
        columns = width
        if isinstance(layer, DynamicSlidingWindowLayer):
            columns = min(width, layer.sliding_window - 1)  # what such a layer keeps
            layer.cumulative_length = width
        for name in ("keys", "values"):  # [B, N, W, H]
            tensors = [getattr(x, name) for x in both]
            tensors[0] = tensors[0].index_select(0, keep)
            setattr(layer, name, torch.cat([_aligned(tensor, columns, 2) for tensor in tensors]))
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name)
            for i, state in states.items():
                if state is not None:
                    states[i] = torch.cat([state.index_select(0, keep), *(getattr(x, name)[i] for x in others)])


def _aligned(x: Tensor, columns: int, dim: int) -> Tensor:
    """The last columns of a tensor, zeros before them where it has fewer."""
    missing = columns - x.shape[dim]
    if missing <= 0:
        return x.narrow(dim, -missing, columns)
    return torch.nn.functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + [missing, 0])


def cache_budget(model: Any) -> int:
    """Columns times rows of a cache for which there is memory on the model's device.

    Counts keys and values of all layers, also of those that keep less (sliding windows, recurrent states).
    """
    config = model.config.get_text_config()
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * num_heads * head_dim * model.dtype.itemsize
    if model.device.type == "cuda":
        usable = GPU_CACHE_FRAC * torch.cuda.mem_get_info(model.device)[0]
    else:
        usable = HOST_CACHE_FRAC * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(usable / token_bytes)
