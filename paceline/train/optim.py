"""AdamW over float32 master weights, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.config import Optim
from paceline.kernels.adamw import adamw_, squared_norm

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


class MasterAdamW:
    """AdamW on float32 masters of a drafter that computes in another type; nothing in it waits for the device.

    Where the drafter computes in float32 its parameters are the masters. Gradients of several micro-batches are summed
    in float32, whatever type they come in. An update whose gradient is not finite is left out, and so is every later
    one: the weights stay those of the last good step, however late somebody looks.

    Args:
        drafter: float32; its parameters are converted to `dtype` here.
        dtype: Compute type.
        sums_gradients: Whether a step has several micro-batches; then a float32 gradient is kept beside each master.

    Attributes:
        masters: float32 by name.
        exp_avg, exp_avg_sq: AdamW's averages, float32 by name.
        failed: float32 scalar on the device: 1 once a gradient was not finite.
    """

    def __init__(self, drafter: nn.Module, optim: Optim, dtype: torch.dtype, sums_gradients: bool) -> None:
        self.optim = optim
        self._is_copy = dtype != torch.float32
        own = {name: parameter.detach() for name, parameter in drafter.named_parameters()}
        self.masters = {name: weight.clone() for name, weight in own.items()} if self._is_copy else own
        drafter.to(dtype)
        self._parameters = dict(drafter.named_parameters())
        self.exp_avg = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        device = next(iter(self.masters.values())).device
        self.failed = torch.zeros((), device=device)
        self._hyper = torch.zeros(4, device=device)
        self._sums: dict[str, Tensor] | None = None
        if sums_gradients:
            self.sum_gradients()

    def sum_gradients(self) -> None:
        """From now on keep float32 sums of gradients, in place for good: for several micro-batches, and for graphs."""
        if self._sums is not None:
            return
        self._sums = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        for name, parameter in self._parameters.items():
            add = _adding_to(self._sums[name])
            if parameter.grad is not None:
                add(parameter)
            parameter.register_post_accumulate_grad_hook(add)

    def set_rate(self, lr: float, step: int) -> None:
        """Say the rate of the update that follows `step` finished ones; `apply` then reads device memory only."""
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
        norm = (squared_norm(list(grads.values())).sqrt() / weight).float()
        self.failed.copy_(torch.maximum(self.failed, (~norm.isfinite()).float()))
        scale = (self.optim.clip / (norm + 1e-6)).clamp(max=1.0) / weight
        self._hyper[3].copy_(torch.where(self.failed > 0, 0.0, scale))
        for name, grad in grads.items():
            adamw_(
                self.masters[name],
                self.exp_avg[name],
                self.exp_avg_sq[name],
                grad,
                self._parameters[name].detach() if self._is_copy else None,
                self._hyper,
                betas=self.optim.betas,
                eps=EPS,
                weight_decay=self.optim.weight_decay if grad.dim() > 1 else 0.0,
            )
        self.zero_grad()
        return norm

    def gradients(self) -> dict[str, Tensor]:
        """Sums over the step's micro-batches by name; parameters that took no part are left out."""
        if self._sums is not None:
            return self._sums
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    def zero_grad(self) -> None:
        """Forget what has been summed."""
        if self._sums is not None:
            torch._foreach_zero_(list(self._sums.values()))
        for parameter in self._parameters.values():
            parameter.grad = None

    def state(self, step: int) -> dict[str, Tensor]:
        """What an update needs beside the masters after `step` updates, under the names of a checkpoint."""
        count = torch.tensor(float(step))
        return {
            f"{key}.{name}": value
            for name in self.masters
            for key, value in (
                ("step", count.clone()),
                ("exp_avg", self.exp_avg[name]),
                ("exp_avg_sq", self.exp_avg_sq[name]),
            )
        }

    def load(self, weights: dict[str, Tensor], state: dict[str, Tensor] | None) -> None:
        """Take over masters and, if any, the state that belongs to them. Raises: KeyError naming what is missing."""
        for name, master in self.masters.items():
            master.copy_(weights[name])
            if self._is_copy:
                self._parameters[name].detach().copy_(master)
            if state is not None:
                self.exp_avg[name].copy_(state[f"exp_avg.{name}"])
                self.exp_avg_sq[name].copy_(state[f"exp_avg_sq.{name}"])


def _adding_to(total: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None

    return add
