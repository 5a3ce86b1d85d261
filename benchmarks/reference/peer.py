"""The same data, batches, anchors, steps and schedule through another trainer's model and loss: speculators' DFlash.

    python -m benchmarks.recipes --variants benchmarks/reference/peer.json --equal-time speculators ...

trains both (`train_peer` is a variant's run there) and decodes with both; `compare` is what comes of it. Needs
`speculators` 0.9.0 on the path. Rows are packed and features made by this project, so that both see the same; model,
block mask, anchors (as many; drawn by its own rule), labels (the argmax of the target's head), loss and AdamW are
speculators'. Rate and warm-up follow our schedule, and a step is one row, as its trainer has no micro-batches.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from benchmarks import peers
from paceline.cli.train import resolve_config
from paceline.config import RunConfig
from paceline.models.draft import DFlashDrafter, DraftShape
from paceline.models.target import Target
from paceline.plan.resolve import ResolvedRun
from paceline.train.optim import learning_rate

WARM_STEPS = 10
"""Steps that no time is taken of: compilation."""


def peer_shape(draft: DraftShape, resolved: ResolvedRun) -> peers.PeerShape:
    """Sizes of the run's drafter and rows, as the peer's step wants them."""
    return peers.PeerShape(
        hidden_size=draft.hidden_size,
        intermediate_size=draft.intermediate_size,
        num_heads=draft.num_attention_heads,
        num_kv_heads=draft.num_key_value_heads,
        head_dim=draft.head_dim,
        vocab_size=draft.vocab_size,
        num_layers=draft.num_hidden_layers,
        num_target_layers=draft.num_target_layers,
        layer_ids=draft.target_layer_ids,
        block_size=draft.block_size,
        num_anchors=resolved.num_anchors,
        row_len=int(resolved.config.pipeline.tokens_per_batch),
        num_documents=1,
        lr=resolved.config.optim.lr,
        mask_token=draft.mask_token_id,
    )


class SpeculatorsOnTarget(peers.SpeculatorsStep):
    """Its step over a real target's embedding, head and last hidden states."""

    def adopt(self, target: Target) -> None:
        """Take the target's embedding and head, which its trainer freezes too."""
        with torch.no_grad():
            self.model.embed_tokens.weight.copy_(target.embed.weight)
            for head in (self.model.lm_head, self.model.verifier_lm_head):
                head.weight.copy_(target.head.weight)
        for module in (self.model.embed_tokens, self.model.lm_head, self.model.verifier_lm_head):
            module.requires_grad_(False)

    def train_row(self, features: Any, rate: float) -> torch.Tensor:
        """One step over one packed row; the loss."""
        tokens = features.tokens
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        self._schedulers = []
        self._last_hidden = features.last_hidden
        return self.step(
            tokens.input_ids.to(self.device),
            tokens.loss_mask.long().to(self.device),
            features.context_feature,
            [end - start for start, end in tokens.spans],
        )

    def last_hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's own, after its final norm; norming it once more scales it, and an argmax stays."""
        return self._last_hidden[None].to(self.dtype)


def to_drafter(peer: SpeculatorsOnTarget, shape: DraftShape) -> DFlashDrafter:
    """Its weights in our class: the tensors have the same names."""
    drafter = DFlashDrafter(shape)
    own = drafter.state_dict()
    theirs = {name: tensor.detach().float().cpu() for name, tensor in peer.model.state_dict().items()}
    drafter.load_state_dict({name: theirs[name] for name in own})
    return drafter


def train_peer(config: RunConfig) -> tuple[DFlashDrafter, dict[str, Any]]:
    """Train the peer as the run file says; its drafter in our class, and what it took.

    A step's time is from one to the next, the target's forward in it; nothing waits for the device in between.
    """
    resolved, _ = resolve_config(config)
    config = resolved.config
    device = torch.device(config.run.device)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    started = time.perf_counter()
    target = Target.load(
        config.target.path,
        layer_ids=resolved.draft.target_layer_ids,
        dtype=dtype,
        device=device,
        needs_last_hidden=True,
        row_length=int(config.pipeline.tokens_per_batch),
    )
    shape = peer_shape(resolved.draft, resolved)
    peers.ROPE["rope_theta"] = resolved.draft.rope["rope_theta"]
    peer = SpeculatorsOnTarget(
        shape, device, dtype, compiled=on_gpu, loss="fused" if on_gpu else "eager", seed=config.run.seed
    )
    peer.adopt(target)
    losses: list[torch.Tensor] = []
    tokens, steps = 0, resolved.total_steps
    warm = min(WARM_STEPS, steps // 3)
    began = started
    with ThreadPoolExecutor(1) as reader:  # rows are packed beside training, as ours are
        ahead = reader.submit(resolved.batches.batch, 0)
        for step in range(steps):
            batch = ahead.result()
            if step + 1 < steps:
                ahead = reader.submit(resolved.batches.batch, step + 1)
            if step == warm:
                _synchronise(device)
                began = time.perf_counter()
            rate = learning_rate(step, steps, config.optim)
            losses.append(peer.train_row(target.features(batch), rate).detach())
            tokens += batch.num_tokens
    _synchronise(device)
    ended = time.perf_counter()
    peer.check_finite()
    return to_drafter(peer, dataclasses.replace(resolved.draft, kind="dflash")), {
        "seed": config.run.seed,
        "steps": steps,
        "ms_per_step": round(1e3 * (ended - began) / (steps - warm), 2),
        "seconds": round(ended - started, 1),
        "tokens": tokens,
        "loss": round(float(torch.stack(losses[-20:]).float().mean()), 4),
        "estimated_acceptance_length": None,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
        "settings": peer.settings,
    }


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ----------------------------------------------------------------------------------------------------- the comparison

DRAWS = 4000
HOW = (
    f"95 % over {DRAWS:,} draws of seeds and, within each set, of prompts, the same ones for both; the ratio is of "
    "geometric means over the sets"
)


def compare(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ours beside the peer, from rows of `benchmarks.recipes`: the ``peer`` of ``reference.json``.

    Args:
        rows: Those with ``peer`` are the peer's. Each has ``counts``: by set, tokens committed and target forwards of
            every prompt, ``[P, 2]``.
    """
    theirs = {row["seed"]: _counts(row) for row in rows if row.get("peer")}
    name = next(row["name"] for row in rows if row.get("peer"))
    found: dict[str, Any] = {"name": name, "seeds": len(theirs), "how": HOW}
    for equal in ("steps", "time"):
        ours = {row["seed"]: _counts(row) for row in rows if not row.get("peer") and row["equal"] == equal}
        seeds = sorted(ours.keys() & theirs.keys())
        if not seeds:
            continue
        pairs = [zip(ours[seed], theirs[seed], strict=True) for seed in seeds]
        sets = [np.array(each, dtype=float) for each in zip(*pairs, strict=True)]  # [seeds, 2, prompts, 2] of each
        found[f"ours_equal_{equal}"], found[f"acceptance_length_equal_{equal}"] = _geometric_means(sets).tolist()
        generator, ratios = np.random.default_rng(0), []
        for _ in range(DRAWS):
            drawn = generator.integers(0, len(seeds), len(seeds))
            picked = [one[drawn][:, :, generator.integers(0, one.shape[2], one.shape[2])] for one in sets]
            mine, other = _geometric_means(picked)
            ratios.append(mine / other)
        found[f"ratio_equal_{equal}"] = [float(each) for each in np.quantile(ratios, (0.025, 0.975))]
    return found


def _counts(row: dict[str, Any]) -> list[list[list[int]]]:
    return [row["counts"][name] for name in sorted(row["counts"])]


def _geometric_means(sets: Sequence[np.ndarray]) -> np.ndarray:
    """Of both trainers ``[2]``: prompts pooled, then the mean of seeds, then the geometric mean of the sets."""
    pooled = np.stack([one.sum(axis=2) for one in sets])  # [sets, seeds, 2, 2]
    return np.exp(np.log((pooled[..., 0] / pooled[..., 1]).mean(axis=1)).mean(axis=0))
