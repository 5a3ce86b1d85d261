"""Answers of a plain model on a GPU, many at a time: slots at fixed addresses, every token replayed from a CUDA graph.

`generate.BatchGenerator` runs whatever Transformers runs, and waits for its launches: a small model's token is some
thousand kernels, each shorter than the time it takes to launch. Here every slot has reserved room and goes on at its
own position, tokens are chosen on the device, and the host reads `TURNS` of each row at once. A waiting prompt takes a
free slot and writes over what was there: nothing is copied. On a CPU the same code runs as it is: the reference of the
tests.

It is used only where it does what the model does, see `eval.structure`. Shape letters: B slots, P prompts, S columns of
the prompts, T `TURNS`, D hidden, N query heads, M key/value heads, H head size, C positions of a slot, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.eval.generate import IDLE_SHARE, PREFILL_TOKENS, Request, choose, stream_of
from paceline.eval.static import StaticTrunk
from paceline.eval.structure import TOLERANCE
from paceline.kernels.graphs import GraphRunner
from paceline.kernels.linear_cross_entropy import Head
from paceline.kernels.static_attention import attend_slots, bucket_of

TURNS = 8
"""Tokens of a row that are decoded before the host looks: those after the end of an answer are thrown away."""


PROBE_LENGTHS = (200, 10)
"""Tokens of the two sequences of the probe: a kernel takes the first in several steps."""


class StaticBatchGenerator(StaticTrunk):
    """`BatchGenerator` for a model that has no `static.obstacle`: `submit` requests, then `step` until none is left.

    Attributes:
        can_refill: True.
        num_sampled: Tokens of answers so far.
    """

    can_refill = True

    def __init__(
        self,
        model: Any,
        head: Head,
        stop_ids: Collection[int],
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        max_slots: int = 32,
        max_tokens: int | None = None,
    ) -> None:
        """Decode nothing yet. See `BatchGenerator`; here the positions of all slots count against `max_tokens`."""
        super().__init__(model, head)
        self._stop_array = np.array(sorted(stop_ids), dtype=np.int64)
        self._temperature, self._top_p, self._seed = temperature, top_p, seed
        self._max_slots, self._max_tokens = max_slots, max_tokens
        self.num_sampled = 0
        self._waiting: deque[Request] = deque()
        self._slots: list[Request | None] = []
        self._random: dict[int, np.random.Generator] = {}
        self._capacity = 0

    @torch.inference_mode()
    def difference(self, model: Any) -> str | None:
        """Where its logits are not the model's, in one line, before the first request; None if they are.

        The probe is two random prompts, and then a token behind each.
        """
        random = np.random.default_rng(0)
        probes = [random.integers(0, len(self._embedding), length).tolist() for length in PROBE_LENGTHS]
        self._waiting.extend(Request(probe[:-1], 1) for probe in probes)
        self._make_room()
        self._waiting.clear()
        probes = probes[: len(self._slots)]
        slots = torch.arange(len(probes), device=self._device)
        lengths = torch.tensor([len(probe) - 1 for probe in probes], device=self._device)
        padded = torch.zeros(len(probes), max(PROBE_LENGTHS) - 1, dtype=torch.int64)
        for row, probe in zip(padded, probes, strict=True):
            row[: len(probe) - 1] = torch.tensor(probe[:-1])
        found = [self._run_prompts(padded.to(self._device), slots, lengths)]
        self._last[slots] = torch.tensor([probe[-1] for probe in probes], device=self._device)
        self._positions[slots] = lengths
        found.append(self._run_tokens()[slots])
        self._slots, self._capacity = [], 0
        for i, probe in enumerate(probes):
            wanted = model(input_ids=torch.tensor([probe], device=self._device)).logits[0, -2:].float()
            for name, own, its in zip(("a prompt", "a token"), found, wanted, strict=True):
                error = float((own[i] - its).abs().amax() / its.abs().amax())
                if not error <= TOLERANCE[self._dtype]:  # NaN is a difference as well
                    return f"in a probe the logits after {name} differed by {error:.1e} of their size"
        return None

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    @property
    def is_busy(self) -> bool:
        """Whether anything is being decoded or waits for it."""
        return bool(self._waiting) or any(self._slots)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run new prompts, or `TURNS` tokens of every row; the requests that this finished."""
        if admitted := self._take_waiting():
            return self._prefill(admitted)
        return self._decode() if any(self._slots) else []

    def _take_waiting(self) -> list[tuple[int, Request]]:
        """Waiting requests and the slots for them, as many as one forward takes; none if a refill does not pay yet."""
        free = [slot for slot, row in enumerate(self._slots) if row is None]
        is_empty = len(free) == len(self._slots)
        if not self._waiting or (not is_empty and len(free) * IDLE_SHARE < len(self._slots)):
            return []
        if self._room_for(self._waiting[0]) > self._capacity:
            if not is_empty:
                return []  # the room is made anew once those under way are done
            self._make_room()
            free = list(range(len(self._slots)))
        taken: list[tuple[int, Request]] = []
        width = 0
        for slot in free:
            if not self._waiting or self._room_for(self._waiting[0]) > self._capacity:
                break
            width = max(width, len(self._waiting[0].prompt))
            if taken and (len(taken) + 1) * width > PREFILL_TOKENS[self._device.type]:
                break
            taken.append((slot, self._waiting.popleft()))
        return taken

    @staticmethod
    def _room_for(request: Request) -> int:
        return bucket_of(request.longest + TURNS)

    def _make_room(self) -> None:
        """Slots for the requests that wait; a request above `max_tokens` gets the only one."""
        upcoming = [self._room_for(request) for request in list(self._waiting)[: self._max_slots]]
        capacity = max(upcoming)
        if self._max_tokens is not None and capacity > self._max_tokens:
            capacity = upcoming[0]  # not all of them for the sake of the longest
        num_slots = self._max_slots
        if self._max_tokens is not None:
            num_slots = max(1, min(num_slots, self._max_tokens // capacity))
        self._capacity, self._slots = capacity, [None] * num_slots
        self._keys = self._values = torch.empty(0)  # the old room is freed before the new one is made
        self._runner = GraphRunner(self._launch, "a token of every answer", "on" if self._is_on_gpu else "off")
        with torch.inference_mode(False):  # room made in that mode could not be written outside it
            size = (2, len(self._layers), num_slots, capacity, self._num_kv_heads, self._head_dim)
            self._keys, self._values = torch.zeros(size, dtype=self._dtype, device=self._device)
            self._cos, self._sin = self._angles(capacity)
            self._rows = torch.arange(num_slots, device=self._device)
            self._last = torch.zeros(num_slots, dtype=torch.int64, device=self._device)
            self._positions = torch.zeros(num_slots, dtype=torch.int64, device=self._device)
            self._is_taken = torch.zeros(num_slots, dtype=torch.bool, device=self._device)
            self._turn = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._chosen = torch.zeros(TURNS, num_slots, dtype=torch.int64, device=self._device)
            self._uniform = torch.full((TURNS, num_slots), 0.5, dtype=torch.double, device=self._device)

    def _prefill(self, admitted: Sequence[tuple[int, Request]]) -> list[Request]:
        """Run prompts into their slots, and choose the first token of each."""
        for slot, request in admitted:
            self._slots[slot] = request
            self._random[slot] = stream_of(self._seed, request.key)
        slots = torch.tensor([slot for slot, _ in admitted], device=self._device)
        lengths = torch.tensor([len(request.prompt) for _, request in admitted], device=self._device)
        width = max(len(request.prompt) for _, request in admitted)
        padded = [[*request.prompt, *[0] * (width - len(request.prompt))] for _, request in admitted]
        logits = self._run_prompts(torch.tensor(padded, device=self._device), slots, lengths)
        tokens = self._choose(logits, self._uniforms(1, [slot for slot, _ in admitted])[0])
        self._last[slots] = tokens
        self._positions[slots] = lengths
        return self._take(tokens[None].cpu().numpy(), [slot for slot, _ in admitted])

    def _decode(self) -> list[Request]:
        """`TURNS` tokens of every row."""
        alive = [slot for slot, row in enumerate(self._slots) if row]
        self._turn.zero_()
        self._is_taken.copy_(torch.tensor([row is not None for row in self._slots]))
        if self._temperature:
            self._uniform.copy_(self._uniforms(TURNS, range(len(self._slots))))
        for _ in range(TURNS):
            self._runner()
        return self._take(self._chosen.cpu().numpy()[:, alive], alive)

    def _uniforms(self, count: int, slots: Sequence[int]) -> Tensor:
        """The next uniform numbers of some slots, double ``[count, slots]`` on the device."""
        if not self._temperature:
            return torch.full((count, len(slots)), 0.5, dtype=torch.double, device=self._device)
        streams = (self._random.get(slot) for slot in slots)
        drawn = [np.full(count, 0.5) if stream is None else stream.random(count) for stream in streams]
        return torch.from_numpy(np.stack(drawn, axis=1)).to(self._device)

    def _choose(self, logits: Tensor, uniform: Tensor) -> Tensor:
        return choose(logits, uniform, self._temperature, self._top_p)

    def _take(self, tokens: np.ndarray, slots: Sequence[int]) -> list[Request]:
        """Hand tokens ``[T, slots]`` out to the answers; those that end with them, whose slots are free now."""
        is_stop = np.isin(tokens, self._stop_array)
        ends = np.where(is_stop.any(0), is_stop.argmax(0), len(tokens)) + 1  # past the last token: no stop among them
        finished = []
        for slot, column, end in zip(slots, tokens.T.tolist(), ends.tolist(), strict=True):
            request = self._slots[slot]
            assert request is not None
            left = request.max_new_tokens - len(request.answer)
            taken = column[: min(end, left)]
            request.answer += taken
            self.num_sampled += len(taken)
            if len(taken) in (end, left):
                finished.append(request)
                self._slots[slot] = None
                del self._random[slot]
        return finished

    def _run_prompts(self, ids: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
        """Logits ``[P, V]`` after prompts ``[P, S]``; padding behind a prompt is seen by none of its tokens."""
        num_prompts, width = ids.shape
        x = F.embedding(ids.flatten(), self._embedding)
        angles = self._cos[:width].repeat(num_prompts, 1, 1), self._sin[:width].repeat(num_prompts, 1, 1)
        for i, layer in enumerate(self._layers):
            query, key, value = (y.unflatten(0, (num_prompts, width)) for y in self._call(layer.project, x, angles))
            self._keys[i, slots, :width], self._values[i, slots, :width] = key, value
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            attended = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self._scale, enable_gqa=True
            )
            x = self._call(layer.complete, x, attended.transpose(1, 2).flatten(0, 1))
        ends = torch.arange(num_prompts, device=self._device) * width + lengths - 1
        return self._logits(x[ends])

    def _launch(self, _: int) -> None:
        """One more token of every slot, from fixed places to fixed places."""
        tokens = self._choose(self._run_tokens(), self._uniform.index_select(0, self._turn)[0])
        self._chosen.index_copy_(0, self._turn, tokens[None])
        self._last.copy_(tokens)
        self._positions.add_(1).mul_(self._is_taken)  # a free slot starts over: it reads little
        self._turn.add_(1)

    def _run_tokens(self) -> Tensor:
        """Logits ``[B, V]`` after the last token of every slot."""
        positions = self._positions
        lengths = positions + 1
        x = F.embedding(self._last, self._embedding)
        angles = self._cos[positions], self._sin[positions]
        for i, layer in enumerate(self._layers):
            query, key, value = self._call(layer.project, x, angles)
            self._keys[i].index_put_((self._rows, positions), key)
            self._values[i].index_put_((self._rows, positions), value)
            attended = attend_slots(query, self._keys[i], self._values[i], lengths, self._scale)
            x = self._call(layer.complete, x, attended)
        return self._logits(x)
