"""AdamW over float32 master weights, Muon for matrices if that is asked for, and the learning-rate schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from paceline.config import Optim
from paceline.kernels.adamw import SPAN_ELEMENTS, adamw_, squared_norm
from paceline.kernels.muon import muon_
from paceline.train.group import Group

EPS = 1e-8
"""Added to AdamW's denominator: PyTorch's own default."""


def learning_rate(step: int, total_steps: int, optim: Optim) -> float:
    """Rate of the update that follows `step` finished ones: a linear rise, then half a cosine to its floor.

    The first update already moves (it has ``lr / warmup steps``), and the last one has the floor plus one cosine step.
    """
    warmup = math.ceil(optim.warmup_ratio * total_steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * cosine)


BUFFERS = ("master", "exp_avg", "exp_avg_sq")
"""What updates change, float32: each is one flat buffer."""

ALIGNMENT = 64
"""Elements that a tensor's place in a flat buffer is a multiple of on the CPU; on CUDA it is `SPAN_ELEMENTS`."""


class MasterAdamW:
    """AdamW on float32 masters of a drafter that computes in another type; nothing in it waits for the device.

    Where the drafter computes in float32 its parameters are the masters. Gradients of several micro-batches are summed
    in float32, whatever type they come in. An update whose gradient is not finite is left out, and so is every later
    one: the weights stay those of the last good step, however late somebody looks.

    Masters, averages, copies and sums lie in one buffer each, matrices first and then vectors, which do not decay: sums
    are turned into an update by a few launches, where single gradients take two each. On CUDA tensors are laid out so
    that both ways give the same norm, to the bit, and so the same update: a run may go over from one to the other.

    With `optim.kind` muon the matrices of the layers, and the one that joins taps, are updated by Muon, whose momentum
    lies in `exp_avg`; tables over the vocabulary and all vectors are AdamW's in any case.

    Args:
        drafter: float32; its parameters become views of the copies, in `dtype`.
        dtype: Compute type.
        sums_gradients: Whether a step has several micro-batches; then a float32 gradient is kept beside each master.

    Attributes:
        masters: float32 by name.
        exp_avg, exp_avg_sq: AdamW's averages, float32 by name.
        failed: float32 scalar on the device: 1 once a gradient was not finite.
        group: The drafters that update together; here it is one, `sharded.ShardedAdamW` is for more.
        num_elements: Length of a flat buffer.
    """

    def __init__(self, drafter: nn.Module, optim: Optim, dtype: torch.dtype, sums_gradients: bool) -> None:
        self._begin(drafter, optim, Group())
        device = self.failed.device
        alignment = SPAN_ELEMENTS if device.type == "cuda" else ALIGNMENT
        places, end = {}, 0
        for name, parameter in sorted(self._parameters.items(), key=lambda item: item[1].dim() <= 1):
            places[name] = end
            end += math.ceil(parameter.numel() / alignment) * alignment
        self._places, self.num_elements = places, end
        vectors = [places[name] for name, parameter in self._parameters.items() if parameter.dim() <= 1]
        self._edges = (0, min(vectors, default=end), end)
        self._flat = {"master": torch.zeros(end, device=device)}
        self.masters = self._views(self._flat["master"])
        is_copy = dtype != torch.float32
        self._flat_copy = torch.zeros(end, dtype=dtype, device=device) if is_copy else None
        self._copies = self._views(self._flat_copy) if self._flat_copy is not None else None
        for name, parameter in self._parameters.items():
            self.masters[name].copy_(parameter.detach())
            parameter.data = (self.masters if self._copies is None else self._copies)[name]
        if self._flat_copy is not None:
            self._flat_copy.copy_(self._flat["master"])
        self._flat |= {key: torch.zeros(end, device=device) for key in ("exp_avg", "exp_avg_sq")}
        self.exp_avg, self.exp_avg_sq = (self._views(self._flat[key]) for key in ("exp_avg", "exp_avg_sq"))
        if sums_gradients:
            self.sum_gradients()

    def _begin(self, drafter: nn.Module, optim: Optim, group: Group) -> None:
        """What does not depend on how the buffers lie."""
        self.optim, self.group = optim, group
        self._parameters = dict(drafter.named_parameters())
        device = next(iter(self._parameters.values())).device
        self.failed = torch.zeros((), device=device)
        self._hyper = torch.zeros(4, device=device)
        self._being_copied: torch.cuda.Event | None = None
        self._flat_sums: Tensor | None = None

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        return {
            name: flat[self._places[name] :][: parameter.numel()].view(parameter.shape)
            for name, parameter in self._parameters.items()
        }

    def sum_gradients(self) -> None:
        """From now on keep float32 sums of gradients, in place for good: for several micro-batches, and for graphs."""
        if self._flat_sums is not None:
            return
        self._flat_sums = torch.zeros(self.num_elements, device=self.failed.device)
        for name, total in self._views(self._flat_sums).items():
            parameter, add = self._parameters[name], _adding_to(total)
            if parameter.grad is not None:
                add(parameter)
            parameter.register_post_accumulate_grad_hook(add)

    def set_rate(self, lr: float, step: int) -> None:
        """Say the rate of the update that follows `step` finished ones; `apply` then reads device memory only.

        A copy of the state that is still under way comes first: the update waits for it on the device.
        """
        self.wait_for_copy()
        beta1, beta2 = self.optim.betas
        hyper = torch.tensor([lr, 1.0 - beta1 ** (step + 1), 1.0 - beta2 ** (step + 1)], dtype=torch.float32)
        if self._hyper.is_cuda:
            hyper = hyper.pin_memory()
        self._hyper[:3].copy_(hyper, non_blocking=True)

    def apply(self, weight: Tensor) -> Tensor:
        """Divide the gradients by the step's weight, clip their norm, update the masters, and round them to copies.

        Args:
            weight: float scalar on the device, above 0.
        Returns: float32 scalar on the device, the norm of the gradient before clipping.
        """
        grads = self.gradients()
        in_order = [grads[name] for name in self._places if name in grads]  # as the buffer of the sums has them
        norm = self._clip(squared_norm(in_order if self._flat_sums is None else [self._flat_sums]), weight)
        if self._flat_sums is None or self.optim.kind == "muon":
            for name, grad in grads.items():
                copy = None if self._copies is None else self._copies[name]
                if self.optim.kind == "muon" and is_hidden_matrix(name, grad):
                    muon_(self.masters[name], self.exp_avg[name], grad, copy, self._hyper, self.optim.weight_decay)
                    continue
                self._update(self.masters[name], self.exp_avg[name], self.exp_avg_sq[name], grad, copy, grad.dim() > 1)
        else:
            for segment, (start, end) in enumerate(itertools.pairwise(self._edges)):
                copy = None if self._flat_copy is None else self._flat_copy[start:end]
                master, exp_avg, exp_avg_sq = (flat[start:end] for flat in self._flat.values())
                self._update(master, exp_avg, exp_avg_sq, self._flat_sums[start:end], copy, segment == 0)
        self.zero_grad()
        return norm

    def _clip(self, squares: Tensor, weight: Tensor) -> Tensor:
        """The norm before clipping; what the gradient is multiplied by goes to where the update reads it."""
        norm = (squares.sqrt() / weight).float()
        self.failed.copy_(torch.maximum(self.failed, (~norm.isfinite()).float()))
        scale = (self.optim.clip / (norm + 1e-6)).clamp(max=1.0) / weight
        self._hyper[3].copy_(torch.where(self.failed > 0, 0.0, scale))
        return norm

    def _update(
        self, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, copy: Tensor | None, decays: bool
    ) -> None:
        weight_decay = self.optim.weight_decay if decays else 0.0
        adamw_(
            master, exp_avg, exp_avg_sq, grad, copy, self._hyper,
            betas=self.optim.betas, eps=EPS, weight_decay=weight_decay,
        )  # fmt: skip

    def gradients(self) -> dict[str, Tensor]:
        """Sums over the step's micro-batches by name; parameters that took no part are left out if nothing is kept."""
        if self._flat_sums is not None:
            return self._views(self._flat_sums)
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def zero_grad(self) -> None:
        """Forget what has been summed."""
        if self._flat_sums is not None:
            self._flat_sums.zero_()
        self.drop_unsummed()

    def drop_unsummed(self) -> None:
        """Forget gradients that are not in the sums: of a backward pass that was broken off."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def copy_buffers(self, copies: Mapping[str, Tensor] | None) -> None:
        """Copy the `BUFFERS` to tensors of `num_elements` under the same names; the host does not wait.

        Args:
            copies: None where there are none, which is so in a group only.
        """
        assert copies is not None
        for key, flat in self._flat.items():
            copies[key].copy_(flat, non_blocking=True)

    def named(self, buffer: Tensor) -> dict[str, Tensor]:
        """Views by name of a copy of one of the buffers."""
        views = self._views(buffer)
        return {name: views[name] for name in self.masters}

    def update_after(self, copied: torch.cuda.Event) -> None:
        """Have the next update wait, on the device, until the buffers have been copied."""
        self._being_copied = copied

    def wait_for_copy(self) -> None:
        """Let the current stream wait for what `update_after` was told; the host goes on.

        Outside of what is recorded into a graph: the copy is not there at a replay.
        """
        if self._being_copied is not None:
            torch.cuda.current_stream(self._hyper.device).wait_event(self._being_copied)
            self._being_copied = None

    def state(self, step: int, buffers: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """What an update needs beside the masters after `step` updates, under the names of a checkpoint.

        Args:
            buffers: Copies to take it from; None: as it is now.
        """
        exp_avg, exp_avg_sq = self.exp_avg, self.exp_avg_sq
        if buffers is not None:
            exp_avg, exp_avg_sq = self.named(buffers["exp_avg"]), self.named(buffers["exp_avg_sq"])
        count = torch.tensor(float(step))
        return {
            f"{key}.{name}": value
            for name in self.masters
            for key, value in (("step", count.clone()), ("exp_avg", exp_avg[name]), ("exp_avg_sq", exp_avg_sq[name]))
        }

    def load(self, weights: dict[str, Tensor], state: dict[str, Tensor] | None) -> None:
        """Take over masters and, if any, the state that belongs to them.

        Raises: KeyError naming what is missing; ValueError naming what has another shape.
        """
        for name, master in self.masters.items():
            _take_over(master, weights, name)
            if state is not None:
                _take_over(self.exp_avg[name], state, f"exp_avg.{name}")
                _take_over(self.exp_avg_sq[name], state, f"exp_avg_sq.{name}")
        if self._flat_copy is not None:
            self._flat_copy.copy_(self._flat["master"])


def is_hidden_matrix(name: str, tensor: Tensor) -> bool:
    """Whether a parameter maps hidden states to hidden states: what Muon is for."""
    return tensor.dim() == 2 and name.startswith(("layers.", "fc."))


def _take_over(own: Tensor, tensors: Mapping[str, Tensor], name: str) -> None:
    if tensors[name].shape != own.shape:
        raise ValueError(f"{name} has shape {list(tensors[name].shape)}, {list(own.shape)} is wanted")
    own.copy_(tensors[name])


def _adding_to(total: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None

    return add
