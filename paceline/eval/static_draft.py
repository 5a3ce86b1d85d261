"""A drafter's side of decoding on a GPU: the context's keys and values in reserved room, a round as one CUDA graph.

A round writes the context that the last one has added and drafts the next block. The block's own keys and values stand
where those of the next context tokens will: the next round writes over them. On a CPU the same code runs as it is: the
reference of the tests. Shape letters: K block size, J predicted tokens, L taps, D hidden, C positions of the room,
N query heads, M key/value heads, H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.dflash.confidence import cut_below
from paceline.dflash.mask import block_visible, context_visible
from paceline.kernels.attention import Visibility
from paceline.kernels.compiled import run_compiled_any_size
from paceline.kernels.graphs import RECORDING_CALLS, GraphRunner
from paceline.kernels.linear_cross_entropy import Head
from paceline.kernels.static_attention import BUCKET, attend_static, bucket_of
from paceline.models.draft import Call, DFlashDrafter, call


class StaticDrafter:
    """A drafter with the room of one sequence; it serves any number of them, one after another.

    Attributes:
        num_predicted: J.
    """

    def __init__(self, drafter: DFlashDrafter, embed: nn.Module, head: Head, block_size: int) -> None:
        """Take a frozen drafter, in its own type, with its part of the target's head in that type."""
        self.num_predicted = block_size - 1 + drafter.label_shift
        self._drafter = drafter
        self._embed = embed
        self._head = head
        self._block_size = block_size
        self._device, self._dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
        is_on_gpu = self._device.type == "cuda"
        self._run: Call = _run if is_on_gpu else call
        self._round = GraphRunner(self._launch, "a drafter's round", "on" if is_on_gpu else "off")
        self._capacity = self._num_context = self._num_new = 0
        self._threshold = 0.0
        with torch.inference_mode(False):
            self._ids = torch.full((1, block_size), drafter.shape.mask_token_id, device=self._device)
            self._start, self._base = (torch.zeros((), dtype=torch.int64, device=self._device) for _ in range(2))
            self._offsets = torch.arange(block_size, device=self._device)
            size = (block_size, drafter.fc.in_features)
            self._features = torch.zeros(size, dtype=self._dtype, device=self._device)

    @torch.inference_mode()
    def begin(self, num_positions: int, verify_threshold: float = 0.0) -> None:
        """Start a sequence of at most so many positions; graphs are recorded here where room has to be made.

        Args:
            verify_threshold: Above 0 the host waits in every round for how many tokens are to be verified.
        """
        capacity = bucket_of(num_positions + self._block_size)
        if capacity > self._capacity:
            self._make_room(capacity)
        self._num_context = self._num_new = 0
        self._threshold = verify_threshold

    def extend(self, tokens: Sequence[int], features: Callable[[], Tensor]) -> None:
        """Take the context's next features ``[n, L*D]``; few of them are written with the next block."""
        num_tokens = len(tokens)
        if self._num_new or num_tokens > self._block_size:
            self._write_new()
            self._write(features().to(self._dtype), self._num_context)
        else:
            self._features[:num_tokens].copy_(features())
            self._num_new = num_tokens
        self._num_context += num_tokens

    def propose(self, anchor: int) -> Tensor:
        """Draft the block that starts at `anchor`, right after the context; those to be verified.

        Returns: int64 ``[J]``, or fewer with a threshold; until the next call.
        """
        end = self._num_context
        self._ids[0, :1].fill_(anchor)
        self._start.fill_(end)
        self._base.fill_(end - self._num_new)
        self._num_new = 0
        bucket = bucket_of(end + self._block_size)
        self._round(bucket)
        if not self._threshold:
            return self._drafted
        return self._drafted[: int(cut_below(self._confidence[None], self._threshold)[0])]

    def _write_new(self) -> None:
        if self._num_new:
            self._write(self._features[: self._num_new], self._num_context - self._num_new)
            self._num_new = 0

    def _write(self, features: Tensor, start: int) -> None:
        positions = torch.arange(start, start + len(features), device=self._device)
        self._write_at(features, positions, call)

    def _write_at(self, features: Tensor, positions: Tensor, run: Callable[..., Any]) -> None:
        angles = self._drafter.rotary.angles(positions, self._dtype)
        for layer, (key, value) in enumerate(run(self._drafter.context_kv_at, features, angles)):
            self._keys[layer].index_copy_(0, positions, key)
            self._values[layer].index_copy_(0, positions, value)

    def _launch(self, bucket: int) -> None:
        """A round that reads `bucket` positions; it fills up the new context with rows that the block overwrites."""
        self._write_at(self._features, self._base + self._offsets, self._run)
        positions = self._start + self._offsets
        room = [(keys[:bucket], values[:bucket]) for keys, values in zip(self._keys, self._values, strict=True)]
        noise = self._embed(self._ids).to(self._dtype)
        layout = _RoomLayout(self._start, positions, bucket)
        hidden = self._drafter(noise, positions[None], room, layout, _attend, self._run)
        proposal = self._drafter.propose(hidden, self._head, self._ids[:, 0])
        self._drafted.copy_(proposal.ids[0])
        if proposal.confidence is not None:
            self._confidence.copy_(proposal.confidence[0])

    def _make_room(self, capacity: int) -> None:
        shape = self._drafter.shape
        size = (2, shape.num_hidden_layers, capacity, shape.num_key_value_heads, shape.head_dim)
        with torch.inference_mode(False):  # room made in that mode could not be written outside it
            self._keys, self._values = torch.zeros(size, dtype=self._dtype, device=self._device)
            self._drafted = torch.zeros(self.num_predicted, dtype=torch.int64, device=self._device)
            self._confidence = torch.ones(self.num_predicted, device=self._device)
        self._capacity = capacity
        if self._device.type != "cuda":
            return
        self._round = GraphRunner(self._launch, "a drafter's round", "on")
        bucket = BUCKET
        while bucket <= capacity:
            for _ in range(RECORDING_CALLS):
                self._round(bucket)
            bucket *= 2


def _run(function: Callable[..., Any], *args: Any) -> Any:
    """Parts of the drafter compiled, as in training; attention is not, whose shapes change with the sequence."""
    return function(*args) if function is _attend else run_compiled_any_size(function, *args)


class _RoomLayout:
    """What the slots of a block see of the room: the context before the anchor, and their block behind it."""

    def __init__(self, start: Tensor, positions: Tensor, bucket: int) -> None:
        self._start, self.positions = start, positions
        self._keys = torch.arange(bucket, device=start.device)
        self._masks: dict[Visibility, Tensor] = {}

    def for_layer(self, visibility: Visibility) -> tuple[Tensor, Tensor]:
        """The block's positions ``[K]``, and the layer's mask, bool ``[K, C]``."""
        if visibility not in self._masks:
            slots = (self.positions - self._start)[:, None]
            keys = self._keys[None]
            first = torch.zeros_like(self._start)
            context = context_visible(keys, first, self._start, slots, visibility.window)
            own = block_visible(slots, keys - self._start, visibility.causal, visibility.window)
            own &= (keys >= self._start) & (keys < self._start + len(self.positions))
            self._masks[visibility] = context | own
        return self.positions, self._masks[visibility]


def _attend(
    query: Tensor,
    room_key: Tensor,
    room_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    seen: tuple[Tensor, Tensor],
    visibility: Visibility,
) -> Tensor:
    """Attention of one block, ``[1, K, N, H]``, whose keys and values are written into the room first."""
    del visibility
    positions, visible = seen
    room_key.index_copy_(0, positions, block_key[0])
    room_value.index_copy_(0, positions, block_value[0])
    return attend_static(query[0], room_key, room_value, visible, query.shape[-1] ** -0.5)[None]
