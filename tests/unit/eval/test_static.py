"""The forward and the drafter's side for GPUs, as they run on a CPU: against the model and the growing context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.eval.decode import CachedTarget, ContextDrafter, after, on_host
from paceline.eval.static import StaticForward, obstacle
from paceline.eval.static_draft import StaticDrafter
from paceline.eval.structure import difference
from paceline.kernels.static_attention import BUCKET, attend_static, bucket_of
from tests import tiny
from tests.unit.eval.learnt import LAYER_IDS
from tests.unit.eval.test_lean import OTHERS, PLAIN, close, tapped, tokens, whole


def static(model: Any) -> CachedTarget:
    target = tapped(model)
    target._forward = StaticForward(model, target.head, LAYER_IDS)
    return target


@pytest.mark.parametrize("name", PLAIN)
def test_any_cut_into_calls_gives_the_models_logits(name: str) -> None:
    """A prompt, blocks and single tokens, whatever their lengths, say what one forward of the model says."""
    family, changes = PLAIN[name]
    model = tiny.causal_lm(family, **changes)
    ids = tokens(61)
    logits, features = whole(model, ids)
    target = static(model)
    for cuts in ([61], [1] * 20, [30, 1, 1, 6, 1, 2, 3, 4, 5, 8], [3, 2, 7, 16, 1]):
        target._forward.clear()
        start = 0
        for length in cuts:
            close(target._append(ids[start : start + length]), logits[start : start + length])
            close(target.features(), features[start : start + length])
            start += length
    assert (
        difference(target._forward, tapped(tiny.causal_lm(family, **changes))._forward, tiny.VOCAB, torch.float32)
        is None
    )
    close(target.next_logits(ids[:17]), logits[16])


@pytest.mark.parametrize("num_kept", range(1, 7))
def test_a_roll_back_of_any_length_leaves_no_trace(num_kept: int) -> None:
    """However many of a block's tokens stay, the sequence goes on as if the others had never been there."""
    model = tiny.causal_lm("qwen3")
    target, prompt, block, others = static(model), tokens(9), tokens(6, seed=4), tokens(70, seed=5)
    for num_more in (1, 3, 7, 70):
        target.prefill(prompt)
        target.verify(block)
        target.keep(num_kept)
        sequence = [*prompt, *block[:num_kept], *others[:num_more]]
        logits, features = whole(model, sequence)
        close(target.features(), features[9 : 9 + num_kept])
        close(target._append(others[:num_more]), logits[-num_more:])
        close(target.features(), features[-num_more:])


def test_what_stands_behind_the_sequence_is_never_read() -> None:
    """Neither taken-back tokens nor rows that only fill up a call reach a later one."""
    model = tiny.causal_lm("llama")
    target, ids = static(model), tokens(40)
    target.prefill(ids[:20])
    forward = target._forward
    assert isinstance(forward, StaticForward)
    for start, length, kept in ((20, 6, 2), (22, 1, 1), (23, 5, 5), (28, 2, 1), (29, 11, 11)):
        forward._keys[:, start:], forward._values[:, start:] = 1e4, -1e4
        close(target._append(ids[start : start + length]), whole(model, ids)[0][start : start + length])
        target.keep(kept)


def test_room_grows_with_the_sequence() -> None:
    """Past the reserved positions more room is made, in the prompt or while decoding, and nothing is lost."""
    model = tiny.causal_lm("llama", max_position_embeddings=8192)
    target, ids = static(model), tokens(2 * BUCKET + 20)
    logits, _ = whole(model, ids)
    target.prefill(ids[: BUCKET - 3])
    for start in range(BUCKET - 3, BUCKET + 9, 3):
        close(target._append(ids[start : start + 3]), logits[start : start + 3])
    target.prefill(ids[: 2 * BUCKET - 1])
    close(target._append(ids[2 * BUCKET - 1 : 2 * BUCKET + 5]), logits[2 * BUCKET - 1 : 2 * BUCKET + 5])
    with torch.inference_mode():
        target.reserve(5 * BUCKET, 8)
        assert target.prefill(ids) == int(logits[-1].argmax())
    assert target.prefill(ids[:30]) == int(logits[29].argmax())


@pytest.mark.parametrize("name", OTHERS)
def test_other_structures_are_refused(name: str) -> None:
    """What this forward does not do is named, so that the model decodes itself."""
    family, changes, reason = OTHERS[name]
    model = tiny.causal_lm(family, **changes)
    assert reason in str(obstacle(model, tapped(model).head))


DRAFTERS = {
    "full": {},
    "causal": {"is_causal": True},
    "windows": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4},
    "causal windows": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 3, "is_causal": True},
}


@pytest.mark.parametrize("name", DRAFTERS)
@torch.inference_mode()
def test_a_round_drafts_what_the_growing_context_drafts(name: str) -> None:
    """Over a whole answer, in whatever steps the context grows, both sides draft the same block."""
    model = tiny.causal_lm("llama")
    target = static(model)
    drafter = tiny.drafter(tiny.draft_shape(block_size=6, **DRAFTERS[name])).requires_grad_(False)
    ids = tokens(60)
    features = whole(model, ids)[1]
    grown = ContextDrafter(drafter, target, 80, 6)
    room = StaticDrafter(drafter, target.embed, drafter.own_head(target.head), 6)
    for _ in range(2):  # a second sequence finds the first one's rows in the room
        room.begin(80)
        start = 0
        for length in (30, 1, 6, 3, 1, 5):
            for side in (grown, room):
                side.extend(ids[start : start + length], lambda: features[start : start + length])  # noqa: B023
            start += length
            assert room.propose(ids[start]).tolist() == grown.propose(ids[start])
        grown = ContextDrafter(drafter, target, 80, 6)


def test_attention_over_room_is_attention_over_what_is_visible() -> None:
    """Each row attends to the keys that its mask names, with heads that share keys."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 6, 8, generator=generator)
    key, value = torch.randn(2, 20, 2, 8, generator=generator)
    visible = torch.rand(3, 20, generator=generator) < 0.5
    visible[:, 0] = True
    seen = attend_static(query, key, value, visible, 0.3)
    for row in range(3):
        keys, values = key[visible[row]].repeat_interleave(3, 1), value[visible[row]].repeat_interleave(3, 1)
        weights = (torch.einsum("nh,cnh->nc", query[row], keys) * 0.3).softmax(-1)
        close(seen[row], torch.einsum("nc,cnh->nh", weights, values))


def test_buckets_hold_the_sequence() -> None:
    """The positions read are the fewest of a doubling series that hold all."""
    assert [bucket_of(n) for n in (1, BUCKET, BUCKET + 1, 5 * BUCKET)] == [BUCKET, BUCKET, 2 * BUCKET, 8 * BUCKET]


def test_tokens_on_a_device_come_to_the_host_once() -> None:
    """Lists stay what they are; tensors come back as lists, in their order."""
    assert on_host([1, 2], [3]) == [[1, 2], [3]]
    assert on_host(torch.tensor([4, 5]), [6], torch.tensor([7])) == [[4, 5], [6], [7]]
    assert after(3, [1]) == [3, 1]
    assert isinstance(joined := after(3, torch.tensor([1, 2])), Tensor) and joined.tolist() == [3, 1, 2]
