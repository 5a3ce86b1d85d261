"""The same data, batches, anchors, steps and schedule through another trainer's model and loss: speculators' DFlash.

    python -m benchmarks.reference.peer --target MODEL --data DIR --out DIR --steps 1000 [--seed 0] [--device cuda]

Needs `speculators` 0.9.0 on the path. Rows are packed and features made by this project, so that both see the same;
model, block mask, anchors (as many; drawn by its own rule), labels (the argmax of the target's head), loss and AdamW
are speculators'. Rate and warm-up follow our schedule, and a step is one row, as its trainer has no micro-batches.
`--out` becomes a folder of ours in the z-lab layout, which `benchmarks.reference.measure --run DIR` decodes as it does
ours, with ``peer.json``: loss and seconds of the steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers
from benchmarks.reference.train import run_of
from paceline.cli.train import resolve_config
from paceline.config import config_of
from paceline.export.zlab import export_zlab
from paceline.models.draft import DFlashDrafter, DraftShape
from paceline.models.target import Target
from paceline.plan.resolve import ResolvedRun
from paceline.train.optim import learning_rate


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


def main() -> None:
    """Train, and write the drafter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--num-layers", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--tokens-per-step", type=int, default=24_576)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    options.kind, options.run, options.hours = "dflash", options.out, None
    options.tokens_per_batch = options.tokens_per_step
    tree = run_of(options)
    tree["run"]["max_steps"] = options.steps
    resolved, _ = resolve_config(config_of(tree))
    config = resolved.config
    dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    target = Target.load(
        options.target,
        layer_ids=resolved.draft.target_layer_ids,
        dtype=dtype,
        device=options.device,
        needs_last_hidden=True,
        row_length=int(config.pipeline.tokens_per_batch),
    )
    on_gpu = options.device.startswith("cuda")
    shape = peer_shape(resolved.draft, resolved)
    peers.ROPE["rope_theta"] = resolved.draft.rope["rope_theta"]
    peer = SpeculatorsOnTarget(
        shape, options.device, dtype, compiled=on_gpu, loss="fused" if on_gpu else "eager", seed=options.seed
    )
    peer.adopt(target)
    losses, seconds = [], []
    for step in range(resolved.total_steps):
        features = target.features(resolved.batches.batch(step))
        started = time.perf_counter()
        losses.append(float(peer.train_row(features, learning_rate(step, resolved.total_steps, config.optim))))
        seconds.append(time.perf_counter() - started)
        if step % 50 == 0:
            print(step, round(losses[-1], 4), flush=True)
    drafter = to_drafter(peer, dataclasses.replace(resolved.draft, kind="dflash"))
    export_zlab(drafter, options.out)
    record = {
        "peer": "speculators",
        "settings": peer.settings,
        "steps": len(losses),
        "loss": losses,
        "seconds": seconds,
    }
    (options.out / "peer.json").write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
