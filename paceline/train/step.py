"""One optimizer step: anchors, noise blocks, draft, loss, gradients, update.

Gradients are those of the weighted sum over every micro-batch of the step (and every rank), divided once by the sum of
the weights: a mean of means would favour micro-batches with little to predict.

On a GPU nothing here waits for the device: what has to be known is drawn on the host, what has been computed is read
one step later, shapes never change, and a small drafter is replayed from a CUDA graph.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.config import Kernels, Loss, Optim
from paceline.dflash.acceptance import estimated_rounds, leading_hits
from paceline.dflash.anchors import batch_generator
from paceline.kernels.attention import BlockLayout, attend_per_document
from paceline.kernels.compiled import run_compiled
from paceline.kernels.flash4 import FlashMasks, attend_flash4, why_not_flash4
from paceline.kernels.flash4 import load as load_flash4
from paceline.kernels.flex import BlockMasks, attend_flex, why_not_flex
from paceline.kernels.graphs import GraphRunner
from paceline.kernels.linear_cross_entropy import DPace, Head, chunk_rows
from paceline.kernels.linear_mixed_loss import Mix
from paceline.models.draft import Attend, Call, DFlashDrafter, Layout, LossTerms, call
from paceline.profiling import stages
from paceline.records import FeatureBatch, StepResult, StepSums
from paceline.train.group import Group
from paceline.train.inputs import BlockInputs, Staging, draw_blocks
from paceline.train.optim import MasterAdamW, learning_rate
from paceline.train.sharded import ShardedAdamW


@dataclass(frozen=True)
class PendingResult:
    """The result of an update that may still be under way.

    Attributes:
        lr: Rate of the update.
        values: float64 ``[6 + parts]`` on the host: sums of loss, weight, rounds of a decode loop, the slots' own
            weights, and parts of the loss; gradient norm, failed or not.
        arrived: Recorded behind the copy to the host; None on the CPU.
        is_timed: Whether that event tells the time.
        group: The drafters that have made the update.
    """

    lr: float
    values: Tensor
    arrived: torch.cuda.Event | None
    is_timed: bool = False
    group: Group = dataclasses.field(default_factory=Group)
    part_names: tuple[str, ...] = ()

    def read(self) -> StepResult:
        """Wait until the update is done, and give its result. Raises: PipelineError if the group is broken off."""
        with stages.GRAD_NORM_ITEM:
            if self.arrived is not None:
                had_arrived = self.arrived.query()
                self.arrived.synchronize()
                if self.is_timed and not had_arrived:
                    stages.synchronised(self.arrived)
        self.group.check()
        loss, weight, rounds, own_weight, *parts, grad_norm, failed = self.values.tolist()
        return StepResult(
            loss=loss / weight if weight else 0.0,
            rounds=rounds,
            lr=self.lr,
            grad_norm=grad_norm,
            is_finite=not failed,
            parts={n: part / own_weight for n, part in zip(self.part_names, parts, strict=True)} if own_weight else {},
        )


class TrainStep:
    """The drafter with what a step needs around it.

    Args:
        drafter: float32, on the device of training; converted to the compute type, its masters are the optimizer's.
        embed: The target's embedding.
        head: The drafter's part of the target's output head, in the compute type.
        num_anchors: A, anchor slots of a micro-batch.
        stratify_anchors: `anchors.stratify`.
        loss: Its `gamma` is a number.
        mix: Terms of the loss, from `models.kinds.loss_mix`; None: those of the kind.
        seed: The run's seed; with the batch number it keys the anchors.
        total_steps: Steps that the learning-rate schedule spans.
        batches_per_step: G, micro-batches of a step.
        dtype: Compute type.
        kernels: What a GPU runs with; None: the defaults.
        recompute: `draft.recompute`.
        feature_noise: `draft.feature_noise`.
        group: The drafters that make a step together, each with some of its micro-batches; None: this one alone.
        shards_gradients: Whether ranks of a group hold no whole gradient sums; see `ShardedAdamW`.

    Attributes:
        depth: Updates that may be under way before the result of one is read.
        attention_note: Which attention is used, and why, in one line.
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
        loss: Loss,
        mix: Mix | None = None,
        seed: int,
        total_steps: int,
        batches_per_step: int = 1,
        dtype: torch.dtype,
        kernels: Kernels | None = None,
        recompute: bool = False,
        feature_noise: float = 0.0,
        group: Group | None = None,
        shards_gradients: bool = False,
    ) -> None:
        self.group = group or Group()
        self.drafter = drafter
        self.embed = embed
        self.head = head
        self.optim = optim
        self.num_anchors = num_anchors
        self.stratify_anchors = stratify_anchors
        self.gamma = float(loss.gamma)
        dpace = DPace(drafter.num_predicted) if loss.kind == "dpace" else None
        self.terms = LossTerms(mix or drafter.default_mix, dpace, loss.selector, loss.confidence)
        self.seed = seed
        self.total_steps = total_steps
        self.dtype = dtype
        self.device = drafter.fc.weight.device
        self._is_on_gpu = self.device.type == "cuda"
        self.depth = 1 if self._is_on_gpu else 0
        kernels = kernels or Kernels()
        self._attention, self.attention_note = _choose_attention(kernels, drafter, num_anchors, dtype)
        self._is_static = self._attention != "per_document"
        self._sharded: ShardedAdamW | None = None  # where each micro-batch ends with collectives
        self.optimizer: MasterAdamW
        if self.group.size == 1:
            self.optimizer = MasterAdamW(
                drafter, optim, dtype, sums_gradients=dtype != torch.float32 and batches_per_step > 1
            )
        else:
            self.optimizer = sharded = ShardedAdamW(drafter, optim, dtype, self.group, shards_gradients)
            self._sharded = sharded if shards_gradients else None
        graphs = kernels.cuda_graphs if self._is_static and self._sharded is None else "off"
        self._run: Call = run_compiled if self._is_static and kernels.compile else call
        self._recompute = recompute
        self._feature_noise = feature_noise
        self._run_batch = GraphRunner(
            self._launch_batch,
            "drafter",
            graphs,
            prepare=self.optimizer.sum_gradients,
            recover=self.optimizer.drop_unsummed,
        )
        self._replay_update = GraphRunner(self._launch_update, "optimizer", "on")
        self._part_names = drafter.part_names(self.terms)
        num_sums = 4 + len(self._part_names)  # loss, weight, rounds, the slots' own weights, and parts
        self._sums = torch.zeros(num_sums, dtype=torch.float64, device=self.device)
        self._result = torch.zeros(num_sums + 2, dtype=torch.float64, device=self.device)
        self._staging: Staging | None = None
        self._masks: BlockMasks | None = None
        self._features: FeatureBatch | None = None

    def accumulate(self, features: FeatureBatch | None) -> StepSums:
        """Forward and backward of one micro-batch; gradients of its weighted sum are added up, not yet divided.

        With `shards_gradients` it ends with collectives, so that the ranks take turns together: a rank for which there
        is no micro-batch in a turn gives None.

        Returns: what the host knows of it; `num_rows` 0 means that there was nothing to learn.
        """
        sums = StepSums() if features is None else self._accumulate(features)
        if self._sharded is not None:
            with stages.BACKWARD:
                self._sharded.reduce()
        return sums

    def gather(self) -> StepSums:
        """Sums of micro-batches that others have accumulated since the last call: there are none."""
        return StepSums()

    def gather_buffers(self) -> None:
        """Have other ranks give what this one writes: there are none."""

    def _accumulate(self, features: FeatureBatch) -> StepSums:
        tokens, block_size = features.tokens, self.drafter.shape.block_size
        with stages.DRAW_BLOCKS:
            anchors, inputs, num_rows = draw_blocks(
                tokens,
                self.drafter,
                num_anchors=self.num_anchors,
                stratify=self.stratify_anchors,
                gamma=self.gamma,
                dpace=self.terms.dpace is not None,
                seed=self.seed,
            )
        sums = StepSums(num_rows=num_rows, blocks=anchors.num_kept, tokens=tokens.num_tokens, batches=1)
        if num_rows == 0:  # nothing to learn here
            return sums
        if self._feature_noise:
            features = with_noise(features, self._feature_noise, self.seed, len(self.drafter.shape.target_layer_ids))
        if self._is_on_gpu or self._is_static:
            with stages.H2D_SYNC:
                inputs = self._stage(inputs)
        if self._is_static:
            with stages.PACK_HIDDEN:
                self._keep(features)
            self._run_batch(-(-num_rows // chunk_rows(self.terms.dpace)))
            if not self._run_batch.needs_fixed_inputs:
                self._features = None  # else a batch would stay while the next one is made
        else:
            with stages.CREATE_BLOCK_MASK:
                layout = BlockLayout.of_row(anchors, tokens.document_starts, block_size, len(tokens.input_ids))
            self._forward_backward(inputs, num_rows, features, layout, attend_per_document)
        return sums

    def update(self, step: int) -> PendingResult:
        """Divide the gradients by the step's weight, clip, and update; `step` counts the updates before this one.

        A loss or gradient that is not finite updates nothing, neither now nor later until `drop`; the result says so.
        In a group all ranks update, also those without micro-batches, and have the same result.
        """
        lr = learning_rate(step, self.total_steps, self.optim)
        with stages.OPTIMIZER:
            self.optimizer.set_rate(lr, step)
            if self._run_batch.is_replaying and self.group.size == 1:  # gradients then stay in place
                self._replay_update()
            else:
                self._launch_update(0)
        if not self._is_on_gpu:
            return PendingResult(lr, self._result.clone(), None, group=self.group, part_names=self._part_names)
        values = torch.empty(len(self._result), dtype=torch.float64, pin_memory=True)
        values.copy_(self._result, non_blocking=True)
        is_timed = stages.times_device()
        arrived = torch.cuda.Event(enable_timing=is_timed)
        arrived.record()
        return PendingResult(lr, values, arrived, is_timed, self.group, self._part_names)

    @property
    def graphs_note(self) -> str:
        """Whether steps are replayed from CUDA graphs, and why, in one line."""
        return self._run_batch.note

    def last_loss(self) -> Tensor:
        """Loss of the last update, float64 scalar on the device."""
        return self._result[0] / self._result[1]

    def drop(self) -> None:
        """Forget the micro-batches since the last update, and a gradient that was not finite; on all ranks of a group
        or on none."""
        self._sums.zero_()
        self.optimizer.zero_grad()
        self.optimizer.failed.zero_()

    def not_finite(self, features: FeatureBatch) -> str | None:
        """What of a micro-batch is not finite: ``features``, ``loss`` or ``gradient``; None if all is. Waits for the
        device, and drops what has been gathered for the next update. In a group it asks no other rank."""
        hidden = [features.context_feature] + ([] if features.last_hidden is None else [features.last_hidden])
        if not all(bool(each.isfinite().all()) for each in hidden):
            return "features"
        self.drop()
        has_rows = self._accumulate(features).num_rows > 0
        loss = bool(self._sums.isfinite().all())
        gradient = all(bool(grad.isfinite().all()) for grad in self.optimizer.gradients().values())
        self.drop()
        if not has_rows or (loss and gradient):
            return None
        return "gradient" if loss else "loss"

    def _stage(self, inputs: BlockInputs) -> BlockInputs:
        if self._staging is None:
            self._staging = Staging(inputs, self.device)
        self._staging.write(inputs)
        return self._staging.inputs

    def _keep(self, features: FeatureBatch) -> None:
        """Make the features those that the launches read: in place, once a graph may read them."""
        if not self._run_batch.needs_fixed_inputs:
            self._features = features
            return
        if self._features is None:
            self._features = dataclasses.replace(
                features,
                context_feature=_copy_of(features.context_feature),
                last_hidden=None if features.last_hidden is None else _copy_of(features.last_hidden),
            )
            return
        self._features = dataclasses.replace(self._features, tokens=features.tokens)
        self._features.context_feature.copy_(features.context_feature)
        if self._features.last_hidden is not None and features.last_hidden is not None:
            self._features.last_hidden.copy_(features.last_hidden)

    def _launch_batch(self, num_chunks: int) -> None:
        """Everything of a micro-batch that runs on the device, from the staged arrays and the kept features."""
        assert self._staging is not None and self._features is not None
        inputs, shape = self._staging.inputs, self.drafter.shape
        flash4 = self._attention == "flash4"
        if self._masks is None:
            self._masks = (FlashMasks if flash4 else BlockMasks)(
                self.num_anchors,
                shape.block_size,
                len(inputs.context_positions),
                [shape.visibility(i) for i in range(shape.num_hidden_layers)],
                self.device,
            )
        with stages.CREATE_BLOCK_MASK:
            self._masks.update(inputs.anchors, inputs.starts)
        num_rows = min(num_chunks * chunk_rows(self.terms.dpace), inputs.labels.numel())
        attend = attend_flash4 if flash4 else attend_flex
        self._forward_backward(inputs, num_rows, self._features, self._masks, attend)

    def _forward_backward(
        self, inputs: BlockInputs, num_rows: int, features: FeatureBatch, layout: Layout, attend: Attend
    ) -> None:
        drafter = self.drafter
        with stages.FORWARD:
            noise = self.embed(inputs.noise_ids).to(self.dtype)  # [A, K, D]
            feature = features.context_feature.to(self.dtype)  # [S, L*D]
            context_angles = drafter.rotary.angles(inputs.context_positions, self.dtype)
            with stages.LAYERS:
                context_kv = self._run(drafter.context_kv_at, feature, context_angles)
                hidden = drafter(  # [A, J, D]
                    noise, inputs.positions, context_kv, layout, attend, self._run, self._recompute
                )
            with stages.CHUNKED_LOSS:
                loss, weight, hits, parts = drafter.loss(
                    hidden, self.head, inputs.targets(num_rows), inputs.anchors, features, self.terms
                )
        with stages.BACKWARD:
            loss.backward()
        rounds = estimated_rounds(torch.minimum(leading_hits(hits) + 1, inputs.left), inputs.starts)
        found = [loss.detach(), weight, rounds, inputs.weights.sum(), *(part.detach() for part in parts)]
        self._sums += torch.stack([each.double() for each in found])

    def _launch_update(self, _variant: int) -> None:
        sums = self.group.sum(self._sums)
        norm = self.optimizer.apply(sums[1] + 0.0 * sums[0])  # a loss that is not finite updates nothing
        self._result.copy_(torch.cat([sums, norm.double()[None], self.optimizer.failed.double()[None]]))
        self._sums.zero_()


def with_noise(features: FeatureBatch, size: float, seed: int, num_taps: int) -> FeatureBatch:
    """Features with normal noise, keyed by seed and batch: the same again after a restart, on the same kind of device.

    Args:
        size: Standard deviation, as a share of each tap's root mean square at its token.
        num_taps: L of the context feature ``[S, L*D]``.
    """
    feature = features.context_feature
    generator = torch.Generator(feature.device).manual_seed(
        int(batch_generator(seed, features.tokens.number).integers(2**62))
    )
    taps = feature.unflatten(-1, (num_taps, -1))
    scale = size * taps.float().square().mean(-1, keepdim=True).sqrt()
    noise = torch.randn(taps.shape, generator=generator, device=feature.device, dtype=feature.dtype)
    return dataclasses.replace(features, context_feature=(taps + noise * scale.to(feature.dtype)).flatten(-2))


def _copy_of(tensor: Tensor) -> Tensor:
    """A copy with the same strides, which compiled code is made for."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _choose_attention(
    kernels: Kernels, drafter: DFlashDrafter, num_anchors: int, dtype: torch.dtype
) -> tuple[str, str]:
    """``flash4``, ``flex`` or ``per_document``, and why, in one line."""
    shape, device, notes = drafter.shape, drafter.fc.weight.device, []
    if kernels.attention == "per_document":
        return "per_document", "blocks attend per document, as kernels.attention says"
    why_not = why_not_flex(num_anchors, shape.block_size, shape.head_dim, device)
    if why_not is None and kernels.attention == "flash4":
        why_not_flash = why_not_flash4(shape.head_dim, device, dtype, blocks=True)
        if why_not_flash is None:
            return "flash4", f"blocks attend by FlashAttention-4 {load_flash4()}"
        notes.append(why_not_flash)
    if why_not is None:
        return "flex", "; ".join(["blocks attend by FlexAttention under masks made from intervals", *notes])
    return "per_document", f"blocks attend per document: {why_not}"
