"""One optimizer step: anchors, noise blocks, draft, loss, gradients, update.

Gradients are those of the weighted sum over every micro-batch of the step (and every rank), divided once by the sum of
the weights: a mean of means would favour micro-batches with little to predict.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from paceline.config import Optim
from paceline.dflash.acceptance import leading_hits
from paceline.dflash.anchors import batch_generator, sample_anchors
from paceline.dflash.blocks import block_positions, make_noise_blocks, tokens_left
from paceline.kernels.attention import BlockLayout
from paceline.kernels.linear_cross_entropy import Head
from paceline.models.draft import DFlashDrafter
from paceline.records import FeatureBatch, StepSums
from paceline.train.optim import build_optimizer, learning_rate


class TrainStep:
    """The drafter with what a step needs around it.

    Args:
        drafter: float32 master weights, on the device of training.
        embed: The target's embedding.
        head: The drafter's part of the target's output head, in the compute type.
        num_anchors: A, anchor slots of a micro-batch.
        stratify_anchors: `anchors.stratify`.
        gamma: Decay length of the loss weights, in positions.
        seed: The run's seed; with the batch number it keys the anchors.
        total_steps: Steps that the learning-rate schedule spans.
        dtype: Compute type.
    """

    def __init__(
        self,
        drafter: DFlashDrafter,
        embed: nn.Module,
        head: Head,
        optim: Optim,
        *,
        num_anchors: int,
        stratify_anchors: bool = False,
        gamma: float,
        seed: int,
        total_steps: int,
        dtype: torch.dtype,
    ) -> None:
        self.drafter = drafter
        self.embed = embed
        self.head = head
        self.optim = optim
        self.num_anchors = num_anchors
        self.stratify_anchors = stratify_anchors
        self.gamma = gamma
        self.seed = seed
        self.total_steps = total_steps
        self.dtype = dtype
        self.optimizer = build_optimizer(drafter, optim)

    def accumulate(self, features: FeatureBatch) -> StepSums:
        """Forward and backward of one micro-batch; gradients of its weighted sum are added up, not yet divided.

        Reading the loss and the hits waits for the device once a micro-batch.
        """
        tokens, shape, device = features.tokens, self.drafter.shape, features.context_feature.device
        generator = batch_generator(self.seed, tokens.number)
        anchors = sample_anchors(
            tokens.loss_mask, tokens.document_ids, self.num_anchors, generator, stratify=self.stratify_anchors
        )
        labels, weights = self.drafter.labels_and_weights(tokens, anchors, self.gamma)  # [A, J]
        left = tokens_left(tokens.loss_mask, tokens.document_ids, anchors, self.drafter.num_predicted + 1)  # [A]
        sums = StepSums(weight=float(weights.sum()), blocks=anchors.num_kept, tokens=tokens.num_tokens, batches=1)
        if sums.weight == 0:  # nothing to learn here
            return sums

        noise_ids = make_noise_blocks(tokens.input_ids, anchors, shape.block_size, shape.mask_token_id)  # [A, K]
        positions = block_positions(anchors, tokens.position_ids, shape.block_size)  # [A, K]
        layout = BlockLayout.of_row(anchors, tokens.document_starts, shape.block_size, len(tokens.input_ids))
        noise = self.embed(noise_ids.to(device)).to(self.dtype)  # [A, K, D]
        with torch.autocast(device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            feature = features.context_feature.to(self.dtype)
            context_kv = self.drafter.context_kv(feature, tokens.position_ids.to(device))
            hidden = self.drafter(noise, positions.to(device), context_kv, layout)  # [A, J, D]
            loss, hits = self.drafter.loss(hidden, self.head, labels, weights, anchors, features)
        loss.backward()
        sums.loss = float(loss.detach())
        sums.committed = int(torch.minimum(leading_hits(hits).cpu() + 1, left).sum())
        return sums

    def update(self, step: int, weight: float) -> tuple[float, float]:
        """Divide the gradients by the step's weight, clip, and update; `step` counts the updates before this one.

        Returns: the learning rate, and the gradient norm before clipping.
        Raises: FloatingPointError if the gradients are not finite; the weights are untouched then.
        """
        lr = learning_rate(step, self.total_steps, self.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        parameters = list(self.drafter.parameters())
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= weight
        grad_norm = float(nn.utils.clip_grad_norm_(parameters, self.optim.clip))
        if not math.isfinite(grad_norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(f"the gradient norm is {grad_norm}; lower optim.lr in a new run.dir")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return lr, grad_norm
