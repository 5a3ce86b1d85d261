"""A drafter's blocks from inside: the state behind every layer, as training computes it and as decoding does.

What `paceline check` compares, and what an export's fingerprint is made of. Shape letters: S context tokens, A blocks,
K block size, L taps, D hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.dflash.anchors import Anchors, make_anchors
from paceline.dflash.blocks import block_positions
from paceline.kernels.attention import BlockLayout
from paceline.models.draft import DFlashDrafter
from paceline.models.packed import ATTENTION
from paceline.models.target import Target
from paceline.records import TokenBatch

FINAL = "norm"
"""Name of the states behind the final norm; those behind layer i are called ``layer i``."""

States = dict[str, Tensor]
"""float32 ``[A, slots, D]`` by name, in the order in which they are computed."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of a packed row and what they are fed.

    Attributes:
        tokens: The row, without padding.
        anchors: Where the blocks start; no slot is empty.
        noise: ``[A, K, D]``; slots 1..K-1 of all blocks hold the same vector, the mask's.
        features: ``[S, L*D]``.
    """

    tokens: TokenBatch
    anchors: Anchors
    noise: Tensor
    features: Tensor

    @property
    def places(self) -> list[tuple[int, int]]:
        """For every block the start of its document and its anchor, as row positions."""
        starts = torch.tensor(self.tokens.document_starts)
        document = torch.searchsorted(starts, self.anchors.positions, right=True) - 1
        return list(zip(starts[document].tolist(), self.anchors.positions.tolist(), strict=True))


def row_of(documents: list[Tensor]) -> TokenBatch:
    """A row of these documents, all of it supervised, without padding."""
    return TokenBatch.pack(
        0, [(i, ids, torch.ones_like(ids)) for i, ids in enumerate(documents)], sum(map(len, documents))
    )


def anchors_at(positions: list[int]) -> Anchors:
    """Anchors at ascending row positions."""
    return make_anchors(torch.tensor(positions))


@contextlib.contextmanager
def recorded(drafter: DFlashDrafter) -> Iterator[States]:
    """What the drafter's layers and its final norm put out while the block runs; a later pass replaces an earlier."""
    states: States = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: object, _args: object, output: Tensor | tuple[Tensor, Tensor]) -> None:
            whole = output if isinstance(output, Tensor) else output[0].float() + output[1].float()
            states[name] = whole.detach().float().clone()

        return hook

    hooks = [layer.register_forward_hook(keep(f"layer {i}")) for i, layer in enumerate(drafter.layers)]
    hooks.append(drafter.norm.register_forward_hook(keep(FINAL)))
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def training_states(drafter: DFlashDrafter, blocks: Blocks) -> States:
    """All blocks of the row at once, with the layout and the attention that a training step uses."""
    tokens, block_size = blocks.tokens, drafter.shape.block_size
    layout = BlockLayout.of_row(blocks.anchors, tokens.document_starts, block_size, len(tokens.input_ids))
    device = blocks.features.device
    context_angles = drafter.rotary.angles(tokens.position_ids.to(device), blocks.features.dtype)
    with recorded(drafter) as states:
        context_kv = drafter.context_kv_at(blocks.features, context_angles)
        positions = block_positions(blocks.anchors, tokens.position_ids, block_size).to(device)
        drafter(blocks.noise, positions, context_kv, layout)
    return states


@torch.inference_mode()
def decode_states(drafter: DFlashDrafter, blocks: Blocks) -> States:
    """Every block alone, after the keys and values of its own context, as while decoding."""
    block_size, device = drafter.shape.block_size, blocks.features.device
    found: list[States] = []
    for noise, (start, anchor) in zip(blocks.noise, blocks.places, strict=True):
        length = anchor - start
        context = drafter.context_kv(blocks.features[start:anchor], torch.arange(length, device=device))
        positions = torch.arange(length, length + block_size, device=device)[None]
        with recorded(drafter) as states:
            drafter(noise[None], positions, context, BlockLayout.of_decode(length, block_size))
        found.append(states)
    return {name: torch.cat([states[name] for states in found]) for name in found[0]}


@torch.no_grad()
def tap_differences(target: Target, num_tokens: int = 24) -> dict[int, float]:
    """How far each tap is from Transformers' own ``hidden_states[i + 1]``, relative to the largest value there.

    One forward of a few random tokens through the part that is loaded, so that a run can afford it at its start.
    """
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(0, target.shape.vocab_size, (num_tokens,), generator=generator)
    own = target._trunk.config._attn_implementation == ATTENTION  # it takes what it is given, and builds no mask
    masks = {"attention_mask": target._dense_masks(row_of([input_ids]))} if own else {}
    target._here.slot = target._slot(num_tokens, target.dtype)  # for the hooks of its taps
    with _no_hooks_left(target._trunk):
        states = target._trunk(
            input_ids=input_ids[None].to(target.device), use_cache=False, output_hidden_states=True, **masks
        ).hidden_states
    target._here.slot = None
    return compare_taps(target, input_ids, [state[0] for state in states])


@contextlib.contextmanager
def _no_hooks_left(trunk: Any) -> Iterator[None]:
    """Take off what Transformers hangs on every layer to list its states, and leaves there: such a layer can no longer
    be compiled."""
    before = {module: dict(module._forward_hooks) for module in trunk.modules()}
    had_hooks = getattr(trunk, "_output_capturing_hooks_installed", False)
    try:
        yield
    finally:
        for module, hooks in before.items():
            for handle in module._forward_hooks.keys() - hooks.keys():
                del module._forward_hooks[handle]
        trunk._output_capturing_hooks_installed = had_hooks


def compare_taps(target: Target, input_ids: Tensor, hidden_states: list[Tensor]) -> dict[int, float]:
    """Taps of a document against the states ``[S, D]`` that Transformers lists, of which entry 0 is the embedding."""
    taps = target.document_features(input_ids).float().split(target.shape.hidden_size, dim=-1)
    differences = {}
    for i, tap in zip(target.layer_ids, taps, strict=True):
        wanted = hidden_states[i + 1].to(tap.device).float()
        differences[i] = float((tap - wanted).abs().max() / wanted.abs().max())
    return differences
