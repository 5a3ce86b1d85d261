"""The drafter training steps of two public trainers, through their own wheels, timed as our own step is.

    python -m benchmarks.peers --shape qwen3-8b --device cuda --out FILE     # needs their wheels on the path
    python -m benchmarks.peers --shape tiny --device cpu --out FILE          # do the adapters run?

`SpecForgeStep` drives specforge 0.2.0 (sgl-project/SpecForge), `SpeculatorsStep` speculators 0.9.0
(vllm-project/speculators). Model, anchors, mask, loss, clipping, optimizer and scheduler are theirs; this file builds
their objects from a shape, gives them random weights, feeds them and times them. What a wheel imports but a step does
not need is replaced while it is imported (`STUBS`).

Equal in both and in our own step: target and draft shapes, taps (the outputs of the same layers), draft layers with
full attention, block size and number of anchors in all, full vocabulary, every row supervised, labels (the data's own
tokens), exponential loss weights (`GAMMA`), bf16 compute with fp32 masters and fp32 AdamW moments, clipping at 1.0, one
micro-batch a step, and random weights, tokens and features.

Not equal, and why:

- SpecForge trains padded rows: B = number of documents, A/B anchors a row. Equal lengths cost it no padding; ragged
  rows are padded to the longest of the batch. A block may end past its row (those slots weigh nothing). The host waits
  for the device several times a step (anchor count, denominator, loss, accuracy and norm are read), as in its trainer.
  The model is not wrapped: on one GPU its FSDP or DDP would only add to the step. Its target runs in servers that hand
  features over through host memory; none of that is charged, and `hf_target_step` stands in for the servers.
- speculators trains one packed row and keeps fp32 parameters under bf16 autocast (embedding and heads too). It has no
  labels but the argmax of the target's head over the target's last hidden state; it is given, for each position, the
  head's row of the next token as that state, so that the argmax is the data's token. That projection (its
  `verifier_lm_head` over the whole row) is part of its step and stays. It may place a block across a document's end.
  AdamW replaces its default, Muon, which is slower. It logs nothing, since its phase timer synchronises when it does.
- `hf_target_step` is what a user of either has at hand: transformers' Qwen3Model, eager, SDPA, all layers, all hidden
  states collected, the taps concatenated. Neither peer runs a target in its own process.
- Data loaders, host copies and stores of the peers are left out; features lie on the device.

Best published settings: SpecForge's step is timed with and without its Liger option and with its objective in chunks
and whole, and the fastest is used; speculators compiles its forward itself and uses its fused Triton loss (its eager
one only where the fused one does not run, which the notes then say).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import importlib
import importlib.machinery
import importlib.util
import itertools
import json
import logging
import platform
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.timing import measure

STUBS = ("datasets", "openai", "openai.types", "openai.types.chat", "openai.types.completion")
"""Imported by speculators' data code, which a step never reaches; replaced only where they are not installed."""

GAMMA = 7.0
"""Decay of the loss weights for blocks of 16, as published with DFlash."""

MAX_GRAD_NORM = 1.0
TOTAL_STEPS = 10_000
ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}
RAGGED_DRAWS = 4
SPECFORGE_DEFAULTS: dict[str, Any] = {"liger": False, "chunk_blocks": 128}


@dataclass(frozen=True)
class PeerShape:
    """Sizes of one step. `num_anchors` and `row_len` count the whole step, `layer_ids` are 0-based decoder layers."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_layers: int
    num_target_layers: int
    layer_ids: tuple[int, ...]
    block_size: int
    num_anchors: int
    row_len: int
    num_documents: int
    lr: float
    mask_token: int | None = None

    @property
    def mask_token_id(self) -> int:
        """By default the vocabulary's last id, which no data here uses."""
        return self.vocab_size - 1 if self.mask_token is None else self.mask_token

    @property
    def document_len(self) -> int:
        """Tokens of a document when all are equally long."""
        return self.row_len // self.num_documents

    def qwen3(self, num_layers: int, **more: Any) -> transformers.Qwen3Config:
        """The configuration of `num_layers` Qwen3 layers of this shape."""
        return transformers.Qwen3Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=40_960,
            rope_parameters=dict(ROPE),
            layer_types=["full_attention"] * num_layers,
            use_sliding_window=False,
            tie_word_embeddings=False,
            **more,
        )


SHAPES = {
    "qwen3-8b": PeerShape(
        hidden_size=4096,
        intermediate_size=12_288,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151_936,
        num_layers=5,
        num_target_layers=36,
        layer_ids=(1, 9, 17, 25, 33),
        block_size=16,
        num_anchors=2048,
        row_len=12_288,
        num_documents=4,
        lr=6e-4,
    ),
    "tiny": PeerShape(
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=256,
        num_layers=2,
        num_target_layers=8,
        layer_ids=(1, 2, 3, 4, 5),
        block_size=8,
        num_anchors=16,
        row_len=128,
        num_documents=2,
        lr=6e-4,
    ),
}


class SpecForgeStep:
    """One optimizer step of SpecForge's DFlash trainer: its `TrainerCore`, strategy, model and `BF16Optimizer`.

    Args:
        shape: Sizes.
        device: Where everything is made.
        dtype: Of the drafter, embedding and head (its optimizer keeps fp32 masters).
        compiled: Its FlexAttention backend, which transformers compiles; else its dense SDPA mask, for CPUs. It has no
            other use for torch.compile.
        liger: Its option `model.use_liger_kernel` (fused RMSNorm and SwiGLU), which needs liger-kernel and a GPU; None:
            where they are there.
        chunk_blocks: Its `training.objective_chunk_blocks`: blocks of a row per checkpointed chunk of the loss (default
            128), 0 for the logits of all rows at once, without recomputing.
    """

    name = "specforge"

    def __init__(
        self,
        shape: PeerShape,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        compiled: bool,
        liger: bool | None = None,
        chunk_blocks: int = 128,
        seed: int = 0,
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of optional kernels that are not there
            auto = importlib.import_module("specforge.modeling.auto")
            importlib.import_module("specforge.modeling.draft")  # registers the architectures
            family = importlib.import_module("specforge.algorithms.common.dflash_family_model")
            data = importlib.import_module("specforge.algorithms.common.dflash_family_data")
            kernels = importlib.import_module("specforge.modeling.draft.dflash_kernels")
            target_utils = importlib.import_module("specforge.modeling.target.target_utils")
            contracts = importlib.import_module("specforge.runtime.contracts")
            backends = importlib.import_module("specforge.training.backend")
            controller = importlib.import_module("specforge.training.controller")
            strategies = importlib.import_module("specforge.training.strategies.base")
            optimizer = importlib.import_module("specforge.optimizer")
        self.shape, self.device, self.dtype = shape, torch.device(device), dtype
        if liger is None:
            liger = self.device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None
        attention = "flex_attention" if compiled else "sdpa"
        self.settings = {"attention": attention, "liger": liger, "chunk_blocks": chunk_blocks, "wrapper": "none"}
        self.notes = [
            "rows padded to the batch's longest, with num_anchors / num_documents anchors a row",
            "labels: the data's tokens",
        ]
        config = shape.qwen3(
            shape.num_layers,
            architectures=["DFlashDraftModel"],
            block_size=shape.block_size,
            num_target_layers=shape.num_target_layers,
            dflash_config={"target_layer_ids": list(shape.layer_ids), "mask_token_id": shape.mask_token_id},
        )
        config._attn_implementation = attention
        torch.manual_seed(seed)
        with self.device:
            draft = auto.AutoDraftModel.from_config(
                config, torch_dtype=dtype, dflash_kernels=kernels.load_liger_dflash_kernels() if liger else None
            )
            frozen = target_utils.TargetEmbeddingsAndHead(shape.qwen3(shape.num_target_layers))
        frozen = frozen.to(device=self.device, dtype=dtype).eval().requires_grad_(False)
        _fill(frozen)
        self.model = family.OnlineDFlashModel(
            draft_model=draft,
            target_lm_head=frozen.lm_head,
            target_embed_tokens=frozen.embed_tokens,
            mask_token_id=shape.mask_token_id,
            block_size=shape.block_size,
            attention_backend=attention,
            num_anchors=shape.num_anchors // shape.num_documents,
            loss_decay_gamma=GAMMA,
            objective_chunk_blocks=chunk_blocks,
        ).to(device=self.device, dtype=dtype)
        backend = backends.FSDPTrainingBackend(
            backends.ParallelConfig(),
            optimizer_factory=lambda module: optimizer.BF16Optimizer(
                module, lr=shape.lr, max_grad_norm=MAX_GRAD_NORM, total_steps=TOTAL_STEPS, warmup_ratio=0.04
            ),
        )
        module = backend.prepare_model(self.model, wrap=False, optimizer_target=draft)
        module.train()
        self._core = controller.TrainerCore(strategies.DFlashTrainStrategy(module), backend)
        self._collate = data.build_collator()
        self._batch, self._context = contracts.TrainBatch, strategies.StepContext
        self._steps = 0

    def step(self, input_ids: Tensor, loss_mask: Tensor, features: Tensor, lengths: Sequence[int]) -> Tensor:
        """One whole step. Waits for the device, since the trainer reads loss, accuracy and norm.

        Args:
            input_ids: int64 `[B, L]`, padded rows; or `[S]` or `[1, S]`, documents packed end to end, which its own
                collator pads (equal documents are only viewed as rows).
            loss_mask: As `input_ids`; 0 on padding.
            features: `[B, L, taps * H]` or `[S, taps * H]` or `[1, S, taps * H]`.
            lengths: Of the B documents.
        Returns: the loss, a float32 scalar on the CPU.
        """
        rows = self.rows(input_ids, loss_mask, features, lengths)
        batch = self._batch(sample_ids=[str(i) for i in range(len(lengths))], strategy="dflash", tensors=rows)
        context = self._context(global_step=self._steps, total_steps=TOTAL_STEPS)
        result = self._core.train_step(batch, context)
        self._steps += 1
        return torch.tensor(result.loss)

    def rows(self, input_ids: Tensor, loss_mask: Tensor, features: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
        """The batch as its trainer takes it, `[B, L]`."""
        count, longest, size = len(lengths), max(lengths), input_ids.numel()
        flat = {
            "input_ids": input_ids.reshape(size),
            "loss_mask": loss_mask.reshape(size).long(),
            "hidden_states": features.reshape(size, -1),
        }
        if input_ids.shape == (count, longest) or size == count * min(lengths):
            return {name: tensor.reshape(count, longest, *tensor.shape[1:]) for name, tensor in flat.items()}
        documents = zip(*(tensor[: sum(lengths)].split(list(lengths)) for tensor in flat.values()), strict=True)
        return self._collate([{n: t[None] for n, t in zip(flat, each, strict=True)} for each in documents])

    def check_finite(self) -> None:
        """Raises: FloatingPointError when a weight is not finite."""
        _check_finite(self.name, self.model.draft_model)


class SpeculatorsStep:
    """One optimizer step of speculators' DFlash trainer: its model, which compiles itself, its loss and optimizer.

    Args:
        shape: Sizes.
        device: Where everything is made.
        dtype: Of the autocast region; parameters are float32, as its trainer has them.
        compiled: As it runs itself on a GPU: FlexAttention, forward and mask compiled. Else its eager attention, for
            CPUs.
        loss: Its `--loss-implementation`: "fused" (Triton, its default) or "eager".
    """

    name = "speculators"

    def __init__(
        self,
        shape: PeerShape,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        compiled: bool,
        loss: str = "fused",
        seed: int = 0,
    ) -> None:
        with _importable():
            dflash = importlib.import_module("speculators.models.dflash")
            configs = importlib.import_module("speculators.config")
            greedy = importlib.import_module("speculators.proposals.greedy")
            optimizers = importlib.import_module("speculators.train.optimizers")
            if loss == "fused":
                fused = importlib.import_module("speculators.losses.fused")
                # torch 2.11's dynamo refuses two autotuners that hold one list of tiles: a list each, the same tiles
                fused.loss_backward_kernel.configs = list(fused.loss_forward_kernel.configs)
        self.shape, self.device, self.dtype = shape, torch.device(device), dtype
        self._last_layout: tuple[Any, Tensor, Tensor] | None = None
        attention = "simple_flex_attention" if compiled else "eager"
        self.settings = {"attention": attention, "loss": loss, "optimizer": "adamw", "log": "never"}
        self.notes = [
            "one packed row; labels: the argmax of its target head, which equals the data's tokens by construction",
            "fp32 parameters under autocast, as its trainer has them",
        ]
        if loss == "fused":
            self.notes.append(
                "its backward kernel got its list of tiles as a copy, which torch 2.11 needs to compile it"
            )
        layers = shape.qwen3(shape.num_layers)
        layers._attn_implementation = attention
        config = dflash.DFlashSpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=shape.vocab_size,
            block_size=shape.block_size,
            aux_hidden_state_layer_ids=[i + 1 for i in shape.layer_ids],  # it counts from the embedding's output
            mask_token_id=shape.mask_token_id,
            speculators_config=configs.SpeculatorsConfig(
                algorithm="dflash",
                proposal_methods=[greedy.GreedyTokenProposalConfig(speculative_tokens=shape.block_size - 1)],
                default_proposal_method="greedy",
                verifier=configs.VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
            ),
        )
        torch.manual_seed(seed)
        with self.device:
            self.model = dflash.DFlashDraftModel(config=config)
        _fill(self.model.embed_tokens, self.model.lm_head)
        self.model.verifier_lm_head.load_state_dict(self.model.lm_head.state_dict())
        self.model.train()
        forward = type(self.model).forward  # on a GPU compiled as soon as its module is imported
        plain = getattr(forward, "_torchdynamo_orig_callable", forward)
        self._forward = self.model if compiled else functools.partial(plain, self.model)
        self._call, _ = self.model.get_trainer_kwargs(
            loss_fn="ce",
            loss_implementation=loss,
            dflash_decay_gamma=GAMMA,
            max_anchors=shape.num_anchors,
            per_position_loss_weight="fixed-exp-decay",
        )
        self._optimizers = optimizers.build_optimizers(
            self.model, types.SimpleNamespace(optimizer="adamw", lr=shape.lr, weight_decay=0.01)
        )
        self._schedulers = [
            transformers.get_linear_schedule_with_warmup(
                each, num_warmup_steps=TOTAL_STEPS // 100, num_training_steps=TOTAL_STEPS
            )
            for each in self._optimizers
        ]

    def step(self, input_ids: Tensor, loss_mask: Tensor, features: Tensor, lengths: Sequence[int]) -> Tensor:
        """One whole step, in the order of its trainer's loop.

        Args:
            input_ids: int64 `[S]` or `[1, S]`, documents packed end to end; what `lengths` leaves over is padding.
            loss_mask: As `input_ids`.
            features: `[S, taps * H]` or `[1, S, taps * H]`.
            lengths: Of the documents.
        Returns: the loss, a float32 scalar on the device.
        """
        ids = input_ids.reshape(1, -1)
        last_hidden = self.last_hidden(ids)
        documents, positions = self._layout(tuple(lengths), ids.shape[1])
        with torch.autocast(self.device.type, dtype=self.dtype):
            _, loss, self.metrics = self._forward(
                hidden_states=features.reshape(1, ids.shape[1], -1),
                input_ids=ids,
                loss_mask=loss_mask.reshape(1, -1),
                verifier_last_hidden_states=last_hidden,
                document_ids=documents,
                position_ids=positions,
                **self._call,
            )
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        for count in (0.0, 1.0):  # its trainer adds two counts to the metrics, each a copy to the device
            torch.tensor(count, dtype=torch.float32, device=loss.device)
        for optimizer in self._optimizers:
            optimizer.step()
        for scheduler in self._schedulers:
            scheduler.step()
        return loss.detach()

    @torch.no_grad()
    def last_hidden(self, ids: Tensor) -> Tensor:
        """States `[1, S, H]` whose argmax under the head is the next token."""
        states: Tensor = self.model.verifier_lm_head.weight[ids.roll(-1, dims=1)].to(self.dtype)
        return states

    def _layout(self, lengths: tuple[int, ...], row_len: int) -> tuple[Tensor, Tensor]:
        """Document and position of each token, int64 `[1, S]`, as its collator makes them: -1 and 0 on padding."""
        if self._last_layout is None or self._last_layout[0] != (lengths, row_len):
            documents = torch.full((1, row_len), -1)
            positions = torch.zeros((1, row_len), dtype=torch.long)
            start = 0
            for document, length in enumerate(lengths):
                documents[0, start : start + length] = document
                positions[0, start : start + length] = torch.arange(length)
                start += length
            self._last_layout = (lengths, row_len), documents.to(self.device), positions.to(self.device)
        return self._last_layout[1:]

    def check_finite(self) -> None:
        """Raises: FloatingPointError when a weight is not finite."""
        _check_finite(self.name, self.model)


def hf_target_step(
    shape: PeerShape, device: torch.device | str, dtype: torch.dtype, seed: int = 1
) -> Callable[[Tensor], Tensor]:
    """The target that a user of either peer can run in the trainer's process.

    transformers' Qwen3Model with random weights, all `num_target_layers` layers, eager, SDPA, no gradient. Rows padded
    on the right need no mask, since attention is causal, and get none: that keeps the fast kernels.

    Returns: a callable from int64 ids `[B, L]` to features `[B, L, taps * H]` in `dtype`.
    """
    config = shape.qwen3(shape.num_target_layers)
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # made in its type: 8 B parameters need not exist in float32
    try:
        with torch.device(device):
            model = transformers.Qwen3Model(config)
    finally:
        torch.set_default_dtype(default)
    model = model.eval().requires_grad_(False)

    @torch.no_grad()
    def features(input_ids: Tensor) -> Tensor:
        states = model(input_ids=input_ids, use_cache=False, output_hidden_states=True).hidden_states
        return torch.cat([states[i + 1] for i in shape.layer_ids], dim=-1)  # 0 is the embedding's output

    return features


@dataclass(frozen=True)
class Rows:
    """One batch: ids and mask `[B, L]`, lengths, and features `[B, L, taps * H]` unless a target makes them."""

    input_ids: Tensor
    loss_mask: Tensor
    lengths: tuple[int, ...]
    features: Tensor | None = None

    def packed(self) -> Rows:
        """The same as one row of documents end to end; equal lengths only."""
        size = self.input_ids.numel()
        features = None if self.features is None else self.features.reshape(1, size, -1)
        return Rows(self.input_ids.reshape(1, size), self.loss_mask.reshape(1, size), self.lengths, features)


def make_rows(
    shape: PeerShape,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    seed: int,
    ragged: bool = False,
    features: bool = True,
) -> Rows:
    """A batch of random tokens, all supervised, with N(0, 1) features; ragged: lengths uniform in (L/2, L)."""
    generator = torch.Generator().manual_seed(seed)
    count, longest = shape.num_documents, shape.document_len
    lengths = torch.full((count,), longest)
    if ragged:
        lengths = torch.randint(longest // 2 + 1, longest, (count,), generator=generator)
        longest = int(lengths.max())
    mask = (torch.arange(longest) < lengths[:, None]).long()
    ids = torch.randint(0, shape.mask_token_id, (count, longest), generator=generator) * mask
    feature = None
    if features:
        on_device = torch.Generator(device).manual_seed(seed)
        width = len(shape.layer_ids) * shape.hidden_size
        feature = torch.randn(count, longest, width, device=device, dtype=dtype, generator=on_device)
        feature *= mask[..., None].to(device)
    return Rows(ids.to(device), mask.to(device), tuple(lengths.tolist()), feature)


class Feed:
    """A step without arguments over a fixed ring of batches, counting the useful tokens of each call."""

    def __init__(self, peer: Any, batches: Sequence[Rows], target: Callable[[Tensor], Tensor] | None = None) -> None:
        self.peer, self.target = peer, target
        self.tokens: list[int] = []
        self._ring: Iterator[Rows] = itertools.cycle(batches)

    def __call__(self) -> Tensor:
        """The next batch's step: the target's forward first, where there is one."""
        rows = next(self._ring)
        features = self.target(rows.input_ids) if self.target is not None else rows.features
        batch = dataclasses.replace(rows, features=features)
        if self.peer.name == "speculators":
            batch = batch.packed()
        self.tokens.append(sum(rows.lengths))
        return self.peer.step(batch.input_ids, batch.loss_mask, batch.features, batch.lengths)


def time_peer(
    peer: Any,
    batches: Sequence[Rows],
    target: Callable[[Tensor], Tensor] | None = None,
    *,
    seconds: float = 6.0,
    warmup: float = 3.0,
    compile_calls: int = 2,
) -> dict[str, Any]:
    """`timing.measure` of a peer over a ring of batches, with useful tokens per second and a check of its weights."""
    feed = Feed(peer, batches, target)
    result = measure(feed, seconds, warmup, device=peer.device, compile_calls=compile_calls)
    peer.check_finite()
    counted = feed.tokens[-result["steps"] :]
    tok_per_s = 1000 * sum(counted) / sum(result["ms"])
    return {"tok_per_s": tok_per_s, "tokens_per_step": sum(counted) / len(counted), **result}


def time_specforge(
    shape: PeerShape, device: torch.device, dtype: torch.dtype, *, compiled: bool, seconds: float, warmup: float
) -> dict[str, Any]:
    """SpecForge: the choice of its options, then the fastest alone, with the target, and on ragged rows."""
    timing = {"seconds": seconds, "warmup": warmup}
    equal = [make_rows(shape, device, dtype, seed=seed) for seed in range(2)]
    liger = compiled and importlib.util.find_spec("liger_kernel") is not None
    options = [{}, {"liger": True}] if liger else [{}]
    if compiled:
        options.append({"liger": liger, "chunk_blocks": 0})
    tried: list[dict[str, Any]] = []
    for option in options:
        settings, peer = {**SPECFORGE_DEFAULTS, **option}, None
        try:
            peer = SpecForgeStep(shape, device, dtype, compiled=compiled, **settings)
            tried.append({"settings": settings, **time_peer(peer, equal, **timing)})
        except Exception as error:  # an option that does not run here leaves the choice to the others
            if not option:
                raise
            tried.append({"settings": settings, "error": f"{type(error).__name__}: {str(error).splitlines()[:1]}"})
        del peer
        release()
    best = min((each for each in tried if "median_ms" in each), key=lambda each: each["median_ms"])
    peer = SpecForgeStep(shape, device, dtype, compiled=compiled, **best["settings"])
    target = hf_target_step(shape, device, dtype)
    result = {"settings": peer.settings, "notes": peer.notes, "options": tried, "drafter": best}
    result["with_target"] = time_peer(peer, equal, target, **timing)
    del equal
    release()
    ragged = [make_rows(shape, device, dtype, seed=seed, ragged=True) for seed in range(RAGGED_DRAWS)]
    timing["compile_calls"] = RAGGED_DRAWS
    result["ragged"] = {"lengths": [rows.lengths for rows in ragged], **time_peer(peer, ragged, **timing)}
    result["ragged_with_target"] = time_peer(peer, ragged, target, **timing)
    return result


def time_speculators(
    shape: PeerShape, device: torch.device, dtype: torch.dtype, *, compiled: bool, seconds: float, warmup: float
) -> dict[str, Any]:
    """speculators: alone and with the target; with its eager loss where the fused one does not run."""
    timing = {"seconds": seconds, "warmup": warmup}
    equal = [make_rows(shape, device, dtype, seed=seed) for seed in range(2)]
    notes: list[str] = []
    peer, drafter = None, None
    for loss in ("fused", "eager") if compiled else ("eager",):
        try:
            peer = SpeculatorsStep(shape, device, dtype, compiled=compiled, loss=loss)
            drafter = time_peer(peer, equal, **timing)
            break
        except FloatingPointError:
            raise
        except Exception as error:  # its fused loss needs a Triton that dynamo can trace; the eager one is the plan
            if loss == "eager":
                raise
            notes.append(f"its fused loss did not run: {type(error).__name__}: {str(error).splitlines()[:1]}")
        peer = None
        release()
    assert peer is not None and drafter is not None
    target = hf_target_step(shape, device, dtype)
    return {
        "settings": peer.settings,
        "notes": peer.notes + notes,
        "drafter": drafter,
        "with_target": time_peer(peer, equal, target, **timing),
    }


def time_target(
    shape: PeerShape, device: torch.device, dtype: torch.dtype, *, seconds: float, warmup: float
) -> dict[str, Any]:
    """The eager target alone, on equal rows."""
    target = hf_target_step(shape, device, dtype)
    rows = make_rows(shape, device, dtype, seed=0, features=False)
    result = measure(lambda: target(rows.input_ids)[0, -1, 0], seconds, warmup, device=device)
    del result["loss"]  # a feature, there to be checked
    return {"tok_per_s": shape.row_len / result["mean_ms"] * 1000, **result}


def release() -> None:
    """Give back what dropped objects held on the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """Stand-ins for missing modules of `STUBS` while a peer is imported; gone afterwards."""
    added = []
    for name in STUBS:
        root = name.partition(".")[0]
        if name in sys.modules or (root not in added and importlib.util.find_spec(root) is not None):
            continue
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__getattr__ = _placeholder  # type: ignore[method-assign]
        sys.modules[name] = module
        added.append(name)
    _STUBBED.update(added)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


def _placeholder(name: str) -> type:
    if name.startswith("__"):  # what inspects modules may ask any of them for its __file__
        raise AttributeError(name)
    return type(name, (), {})


_STUBBED: set[str] = set()
"""Members of `STUBS` that had to be used in this process."""


def stubbed() -> list[str]:
    """What had to be replaced so far, for the result file."""
    return sorted(_STUBBED)


@torch.no_grad()
def _fill(*modules: nn.Module) -> None:
    """Frozen tables as a fresh transformers model has them: N(0, 0.02)."""
    for module in modules:
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.02)


@torch.no_grad()
def _check_finite(name: str, model: nn.Module) -> None:
    for key, parameter in model.named_parameters():
        if parameter.requires_grad and not torch.isfinite(parameter).all():
            raise FloatingPointError(f"{name}: {key} is not finite: timings on such numbers would mean nothing")


def versions() -> dict[str, str]:
    """Of everything that decides a figure; "missing" where not installed."""
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "specforge", "speculators", "liger-kernel"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run, print, and write the result file."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--seconds", type=float, default=6.0, help="counted seconds of each case")
    parser.add_argument("--warmup", type=float, default=3.0, help="uncounted seconds of each case, after compiling")
    parser.add_argument(
        "--peers", nargs="*", choices=["specforge", "speculators"], default=["specforge", "speculators"]
    )
    parser.add_argument("--no-target", action="store_true", help="do not time the target alone")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    shape, device, dtype = SHAPES[options.shape], torch.device(options.device), getattr(torch, options.dtype)
    on_gpu = device.type == "cuda"
    timing = {"seconds": options.seconds, "warmup": options.warmup}
    result: dict[str, Any] = {
        "command": re.sub(r" --out \S+", "", " ".join(["python -m benchmarks.peers", *arguments])),
        "machine": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "shape": dataclasses.asdict(shape),
        "dtype": options.dtype,
        **timing,
        "versions": versions(),
    }
    for name, run in (("specforge", time_specforge), ("speculators", time_speculators)):
        if name in options.peers:
            result[name] = run(shape, device, dtype, compiled=on_gpu, **timing)
            torch.compiler.reset()
            release()
            if on_gpu:
                result[name]["left_gib"] = torch.cuda.memory_allocated(device) / 2**30
            result["stubs"] = stubbed()
            _write(options.out, result)  # what one peer cost is not lost if the next one fails
    if not options.no_target:
        result["target"] = time_target(shape, device, dtype, **timing)
    _write(options.out, result)
    for name in ("specforge", "speculators"):
        for case, it in result.get(name, {}).items():
            if isinstance(it, dict) and "median_ms" in it:
                speed = f"{it['median_ms']:.1f} ms, {it['tok_per_s']:.0f} tok/s, {it.get('peak_gib', 0.0):.1f} GiB"
                print(f"{name} {case}: {speed}, loss {it['loss'][0]:.3f} to {it['loss'][1]:.3f}")
    return result


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
