"""Drafters that have half learnt what a tiny target says, so that they accept much and not all."""

from __future__ import annotations

import torch

from paceline.dflash.anchors import eligible_positions, make_anchors
from paceline.dflash.blocks import block_labels, block_positions, make_noise_blocks
from paceline.eval.decode import CachedTarget, plain_decode
from paceline.kernels.attention import BlockLayout
from paceline.models.draft import DFlashDrafter
from paceline.models.kinds import drafter_class
from paceline.models.loading import read_shape
from paceline.models.target import Target
from tests import tiny

LAYER_IDS = tiny.draft_shape().target_layer_ids
ANSWER = 40
"""Tokens of the answers that are learnt."""


def prompts() -> list[list[int]]:
    """Prompts of 1 to 12 tokens."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, tiny.VOCAB - 8, (n,), generator=generator).tolist() for n in (1, 4, 7, 12)]


def new_drafter(target_folder: str, kind: str = "dflash", **fields: object) -> DFlashDrafter:
    """An untrained drafter for a target; other fields of its shape as keywords.

    What a kind adds is random, and small enough for what the rest learns to show.
    """
    fields = {"num_target_layers": read_shape(target_folder).num_layers, "block_size": 5, **fields}
    torch.manual_seed(1)
    drafter = drafter_class(kind)(tiny.shape_of_kind(kind, **fields))
    for name, parameter in drafter.named_parameters():
        if not {"candidate_selector", "markov_head", "confidence_head"}.isdisjoint(name.split(".")):
            torch.nn.init.normal_(parameter, std=0.3)
    return drafter


def train(drafter: DFlashDrafter, target_folder: str, num_steps: int = 40) -> DFlashDrafter:
    """Teach a drafter the target's answers to `prompts`, each slot by itself."""
    decoder, target = CachedTarget.load(target_folder, LAYER_IDS), Target.load(target_folder, layer_ids=LAYER_IDS)
    block_size, mask_token_id = drafter.shape.block_size, drafter.shape.mask_token_id
    documents = []
    for prompt in prompts():
        ids = torch.tensor([*prompt, *plain_decode(decoder, prompt, ANSWER, ()).tokens])
        documents.append((ids, torch.arange(len(ids)) >= len(prompt), target.document_features(ids)))
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for step in range(num_steps):
        ids, mask, feature = documents[step % len(documents)]
        document, order = torch.zeros_like(ids), torch.arange(len(ids))
        anchors = make_anchors(eligible_positions(mask, document).nonzero().flatten())
        labels, valid = block_labels(ids, mask, document, anchors, block_size, drafter.label_shift)
        hidden = drafter(
            target.embed(make_noise_blocks(ids, anchors, block_size, mask_token_id)),
            block_positions(anchors, order, block_size),
            drafter.context_kv(feature, order),
            BlockLayout.of_row(anchors, (0, len(ids)), block_size, len(ids)),
        )
        loss = torch.nn.functional.cross_entropy(target.head.logits(hidden[valid]), labels[valid])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.requires_grad_(False)
