"""AdamW of M drafters that update together: each holds all copies, and a part of masters, averages and gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.config import Optim
from paceline.kernels.adamw import squared_norm
from paceline.train.group import Group
from paceline.train.optim import ALIGNMENT, BUFFERS, MasterAdamW

PIECE_ELEMENTS = 2**26
"""Elements after which a piece ends at the next tensor: 256 MiB of float32, large enough for full bandwidth. What is
gathered for a moment is one piece."""


@dataclass(frozen=True)
class _Piece:
    """Tensors that go through a collective together.

    Attributes:
        start, end: Its elements in a whole flat buffer; each rank holds one part of equal length.
        names: The parameters in it, in their order.
        decays: Whether they are matrices, which decay.
    """

    start: int
    end: int
    names: tuple[str, ...]
    decays: bool

    @property
    def whole(self) -> slice:
        return slice(self.start, self.end)

    def part(self, size: int) -> slice:
        """Its elements in the buffer of a rank."""
        return slice(self.start // size, self.end // size)


class ShardedAdamW(MasterAdamW):
    """`MasterAdamW` of a group: the same updates but for the order in which float32 sums are added up.

    Whole flat buffers are cut into pieces of whole tensors, and each piece into M parts of equal length. An update adds
    the gradients of all ranks up (each rank gets its parts), takes the norm over all parts, updates the own parts and
    gathers the copies. Ranks without micro-batches take part with zeros. All ranks see the same norm and `failed`, to
    the bit. What is recorded into a CUDA graph may hold micro-batches, but no update: its collectives stay outside.

    Bytes a parameter on each rank, with copies of c bytes (2 for bfloat16, 4 for float32):

        copies                     c           whole: the drafter computes with them
        masters and averages       12 / M
        gradients of all ranks     4 / M
        gradients of this rank     4           of all its micro-batches until the update
          with shards_gradients    c           of one micro-batch during its backward pass, and one piece

    With `shards_gradients` each micro-batch ends with collectives (`reduce`): ranks wait for one another, and more is
    sent where a rank has several micro-batches. Without it these are a rank's own affair.

    Args:
        drafter: float32, the same on every rank; its parameters become views of the copies, in `dtype`.
        dtype: Compute type.
        group: Of more than one rank.

    Attributes:
        masters, exp_avg, exp_avg_sq: What this rank holds of each tensor, flat and perhaps empty, by name.
        num_elements: Length of a whole flat buffer.
    """

    def __init__(
        self, drafter: nn.Module, optim: Optim, dtype: torch.dtype, group: Group, shards_gradients: bool = False
    ) -> None:
        self._begin(drafter, optim, group)
        device = self.failed.device
        self._lay_out(group.size)
        self._flat_copy = torch.zeros(self.num_elements, dtype=dtype, device=device)
        self._copies = self._views(self._flat_copy)
        self._flat = {key: torch.zeros(self.num_elements // group.size, device=device) for key in BUFFERS}
        self.masters, self.exp_avg, self.exp_avg_sq = (self._own(self._flat[key]) for key in BUFFERS)
        for name, parameter in self._parameters.items():
            self._take_whole(self.masters[name], {name: parameter.detach()}, name)
            self._copies[name].copy_(parameter.detach())
            parameter.data = self._copies[name]
        self._sums = torch.zeros_like(self._flat["master"])
        if not shards_gradients:
            self.sum_gradients()

    def _lay_out(self, size: int) -> None:
        """Matrices and then vectors, cut into pieces."""
        self._places = {}
        pieces: list[_Piece] = []
        end = 0
        for decays in (True, False):
            names = [name for name, parameter in self._parameters.items() if (parameter.dim() > 1) == decays]
            start, inside = end, list[str]()
            for name in names:
                self._places[name] = end
                inside.append(name)
                end += _rounded(self._parameters[name].numel(), ALIGNMENT)
                if end - start >= PIECE_ELEMENTS or name == names[-1]:
                    end = start + _rounded(end - start, size * ALIGNMENT)
                    pieces.append(_Piece(start, end, tuple(inside), decays))
                    start, inside = end, []
        self._pieces, self.num_elements = pieces, end

    def _own(self, flat: Tensor) -> dict[str, Tensor]:
        """What a rank's buffer has of each tensor."""
        views = {}
        for piece in self._pieces:
            first = piece.start + self.group.rank * (piece.end - piece.start) // self.group.size
            part = flat[piece.part(self.group.size)]
            for name in piece.names:
                begin = self._places[name] - first
                end = begin + self._parameters[name].numel()
                views[name] = part[max(begin, 0) : max(end, 0)]
        return {name: views[name] for name in self._parameters}

    def _take_whole(self, own: Tensor, tensors: Mapping[str, Tensor], name: str, prefix: str = "") -> None:
        """Copy what this rank holds of a parameter's tensor. Raises: KeyError, ValueError as `load`."""
        whole, shape = tensors[prefix + name], self._parameters[name].shape
        if whole.shape != shape:
            raise ValueError(f"{prefix}{name} has shape {list(whole.shape)}, {list(shape)} is wanted")
        piece = next(piece for piece in self._pieces if name in piece.names)
        first = piece.start + self.group.rank * (piece.end - piece.start) // self.group.size
        begin = max(first - self._places[name], 0)
        own.copy_(whole.reshape(-1)[begin:][: own.numel()])

    def reduce(self) -> None:
        """With `shards_gradients`: add the gradients of a micro-batch to the sums of all ranks, and forget them.

        Every rank calls it equally often between two updates, also without a micro-batch.
        """
        assert self._flat_sums is None
        for piece in self._pieces:
            whole = torch.zeros(piece.end - piece.start, device=self.failed.device)
            for name in piece.names:
                parameter = self._parameters[name]
                if parameter.grad is not None:
                    whole[self._places[name] - piece.start :][: parameter.numel()].copy_(parameter.grad.reshape(-1))
                    parameter.grad = None
            self._sums[piece.part(self.group.size)] += self.group.reduce_scatter_(whole)

    def apply(self, weight: Tensor) -> Tensor:
        """As `MasterAdamW.apply`; every rank calls it, with the weight of the whole step."""
        size = self.group.size
        if self._flat_sums is not None:
            for piece in self._pieces:
                self._sums[piece.part(size)] = self.group.reduce_scatter_(self._flat_sums[piece.whole])
        norm = self._clip(self.group.sum(squared_norm([self._sums])), weight)
        assert self._flat_copy is not None
        for piece in self._pieces:
            master, exp_avg, exp_avg_sq = (flat[piece.part(size)] for flat in self._flat.values())
            copies = self._flat_copy[piece.whole]
            grad = self._sums[piece.part(size)]
            self._update(master, exp_avg, exp_avg_sq, grad, self.group.part_of(copies), piece.decays)
            self.group.all_gather_(copies)
        self.zero_grad()
        return norm

    def zero_grad(self) -> None:
        """Forget what has been summed. Every rank does so between the same updates."""
        self._sums.zero_()
        super().zero_grad()

    def copy_buffers(self, copies: Mapping[str, Tensor] | None) -> None:
        """Gather the whole `BUFFERS` on rank 0; every rank calls it between the same updates.

        Args:
            copies: Rank 0's, of `num_elements`; None on the others, and on rank 0 to let them through.
        """
        for (key, flat), piece in itertools.product(self._flat.items(), self._pieces):
            length = piece.end - piece.start
            whole = torch.empty(length, device=flat.device) if self.group.rank == 0 else None
            self.group.gather(flat[piece.part(self.group.size)], whole)
            if copies is not None and whole is not None:
                copies[key][piece.whole].copy_(whole, non_blocking=True)

    def state(self, step: int, buffers: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """As `MasterAdamW.state`, out of gathered buffers."""
        assert buffers is not None, "no rank holds the whole state"
        return super().state(step, buffers)

    def load(self, weights: dict[str, Tensor], state: dict[str, Tensor] | None) -> None:
        """As `MasterAdamW.load`: each rank takes its part of whole tensors, whatever M wrote them."""
        assert self._copies is not None
        for name, master in self.masters.items():
            self._take_whole(master, weights, name)
            if state is not None:
                self._take_whole(self.exp_avg[name], state, name, "exp_avg.")
                self._take_whole(self.exp_avg_sq[name], state, name, "exp_avg_sq.")
            self._copies[name].copy_(weights[name])


def _rounded(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
