"""Block attention: both backends against plain loops, each other, and the degenerate rows of cases T01, T04 and T05."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn import functional as F

from paceline.dflash.anchors import Anchors, batch_generator, make_anchors, sample_anchors
from paceline.kernels import attention
from paceline.kernels.attention import BlockLayout, Visibility, attend_dense, attend_per_document
from paceline.records import TokenBatch
from tests import oracles, tiny
from tests.unit.dflash.strategies import Blocks, blocks

BACKENDS = [attend_per_document, attend_dense]
Attend = Callable[..., Tensor]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(
    num_blocks: int, block_size: int, context_len: int, *, heads: int = 4, kv: int = 2, size: int = 4, seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Inputs:  # fmt: skip
    """query, context key, context value, block key, block value."""
    g = torch.Generator().manual_seed(seed)
    shapes = [
        (num_blocks, block_size, heads, size), (context_len, kv, size), (context_len, kv, size),
        (num_blocks, block_size, kv, size), (num_blocks, block_size, kv, size),
    ]  # fmt: skip
    q, ck, cv, bk, bv = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    return q, ck, cv, bk, bv


def layout_of(tokens: TokenBatch, anchors: Anchors, block_size: int) -> BlockLayout:
    return BlockLayout.of_row(anchors, tokens.document_starts, block_size, len(tokens.input_ids))


@settings(max_examples=150, deadline=None)
@given(blocks())
def test_layout_equals_the_oracle(b: Blocks) -> None:
    """Each kept anchor has its document's first position, and the groups name every document with blocks once."""
    layout = layout_of(b.tokens, b.anchors, b.block_size)
    docs, kept = b.tokens.document_ids.tolist(), [a for a in b.anchor_list if a is not None]
    assert layout.starts[: len(kept)].tolist() == [oracles.document_start(a, docs) for a in kept]
    groups = []
    for start, end in b.tokens.spans:
        inside = [i for i, a in enumerate(kept) if start <= a < end]
        if inside:
            groups.append((start, kept[inside[-1]], inside[0], inside[-1] + 1))
    assert list(layout.groups) == groups
    assert (layout.block_size, layout.context_len) == (b.block_size, len(docs))


@pytest.mark.parametrize("attend", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(b=blocks())
def test_attention_equals_plain_loops(attend: Attend, b: Blocks) -> None:
    """Every real slot's output is the softmax average, in float64, over exactly the keys that it may see."""
    q, ck, cv, bk, bv = inputs(len(b.anchor_list), b.block_size, len(b.tokens.input_ids), heads=2, kv=1, size=2)
    got = attend(q, ck, cv, bk, bv, layout_of(b.tokens, b.anchors, b.block_size), Visibility(b.causal, b.window))
    mask = oracles.dense_mask(b.anchor_list, b.tokens.document_ids.tolist(), b.block_size, b.causal, b.window)
    key = torch.cat([ck, bk.flatten(0, 1)]).double().tolist()
    value = torch.cat([cv, bv.flatten(0, 1)]).double().tolist()
    wanted = torch.tensor(oracles.attention(q.flatten(0, 1).double().tolist(), key, value, mask))
    wanted = wanted.view(q.shape).float()
    keep = b.anchors.keep
    assert got.shape == q.shape and bool(got.isfinite().all())
    torch.testing.assert_close(got[keep], wanted[keep], rtol=0, atol=1e-5)


def test_query_heads_read_their_own_key_head() -> None:
    """With grouped heads, query head n reads key/value head n // (N / M), whatever the number of groups."""
    anchors = make_anchors(torch.tensor([2, 5, 9]), 4)
    tokens = tiny.row([7, 5], 14)
    layout = layout_of(tokens, anchors, 3)
    q, ck, cv, bk, bv = inputs(4, 3, 14, heads=6, kv=3, size=4)
    repeated = [t.repeat_interleave(2, dim=-2) for t in (ck, cv, bk, bv)]
    for attend in BACKENDS:
        got = attend(q, ck, cv, bk, bv, layout, Visibility())
        torch.testing.assert_close(got, attend(q, *repeated, layout, Visibility()), rtol=0, atol=1e-5)
        single = [attend(q[..., n : n + 1, :], *(t[..., n : n + 1, :] for t in repeated), layout, Visibility())
                  for n in range(6)]  # fmt: skip
        torch.testing.assert_close(got, torch.cat(single, dim=-2), rtol=0, atol=1e-5)


def gradients(attend: Attend, tensors: Inputs, layout: BlockLayout, see: Visibility) -> tuple[Tensor, list[Tensor]]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = attend(*leaves, layout, see)
    kept = out[layout.anchors.keep]
    (kept * torch.linspace(-1, 1, kept.numel()).view_as(kept)).sum().backward()
    return out.detach(), [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]


@pytest.mark.parametrize("see", [Visibility(), Visibility(True), Visibility(False, 6), Visibility(True, 3)], ids=str)
def test_backends_agree_in_value_and_gradient(see: Visibility) -> None:
    """Case T04: outputs of real blocks (1e-5, cosine >= 0.9999) and all gradients (1e-4) are the dense reference's."""
    tokens = tiny.row([30, 5, 40, 2, 17], 100, supervised=0.8)
    anchors = sample_anchors(tokens.loss_mask, tokens.document_ids, 64, batch_generator(0, 0))
    assert 20 < anchors.num_kept < 64
    layout = layout_of(tokens, anchors, 5)
    tensors = inputs(64, 5, 100, size=8)
    out, grads = gradients(attend_per_document, tensors, layout, see)
    wanted, wanted_grads = gradients(attend_dense, tensors, layout, see)
    keep = anchors.keep
    torch.testing.assert_close(out[keep], wanted[keep], rtol=0, atol=1e-5)
    assert F.cosine_similarity(out[keep].flatten(), wanted[keep].flatten(), dim=0) >= 0.9999
    for got, want in zip(grads, wanted_grads, strict=True):
        assert want.abs().max() > 0
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("see", [Visibility(), Visibility(True, 3)], ids=str)
def test_long_documents_are_attended_in_groups_and_made_again_for_their_gradients(
    see: Visibility, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document whose scores are too many is cut into groups of blocks; values and gradients stay the same."""
    tokens = tiny.row([30, 5, 40, 2, 17], 100, supervised=0.8)
    anchors = sample_anchors(tokens.loss_mask, tokens.document_ids, 64, batch_generator(0, 0))
    tensors = inputs(64, 5, 100, size=8)
    whole = layout_of(tokens, anchors, 5)
    out, grads = gradients(attend_per_document, tensors, whole, see)
    monkeypatch.setattr(attention, "MAX_GROUP_SCORES", 700)
    for kept_scores, kept_masks, calls in ((1 << 31, 1 << 30, 1), (0, 0, 2)):
        monkeypatch.setattr(attention, "MAX_KEPT_SCORES", kept_scores)
        monkeypatch.setattr(attention, "MAX_KEPT_MASKS", kept_masks)
        seen: list[int] = []
        original = attention._attend_group
        with monkeypatch.context() as patch:
            patch.setattr(attention, "_attend_group", lambda *a, f=original, s=seen: (s.append(len(a[0])), f(*a))[1])
            layout = layout_of(tokens, anchors, 5)
            got, got_grads = gradients(attend_per_document, tensors, layout, see)
        assert len(layout.groups) > len(whole.groups) and len(seen) == calls * len(layout.groups)
        assert all(n * 5 * (end - start + 5) <= 700 or n == 1 for start, end, n in
                   ((start, end, last - first) for start, end, first, last in layout.groups))  # fmt: skip
        assert bool(layout.masks) == (kept_masks > 0)
        torch.testing.assert_close(got, out, rtol=0, atol=1e-5)
        for one, other in zip(got_grads, grads, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("attend", BACKENDS)
def test_t01_noise_past_the_anchor_changes_nothing(attend: Attend) -> None:
    """Case T01: context at or past a block's anchor, and other blocks, do not change its output; before it they do."""
    tokens = tiny.row([12])
    layout = layout_of(tokens, make_anchors(torch.tensor([3, 5])), 4)
    q, ck, cv, bk, bv = inputs(2, 4, 12)
    out = attend(q, ck, cv, bk, bv, layout, Visibility())
    for block, anchor in enumerate([3, 5]):
        noisy_key, noisy_value = ck.clone(), cv.clone()
        noisy_key[anchor:], noisy_value[anchor:] = 50.0, -70.0
        other_key, other_value = bk.clone(), bv.clone()
        other_key[1 - block], other_value[1 - block] = 30.0, 90.0
        noisy = attend(q, noisy_key, noisy_value, other_key, other_value, layout, Visibility())
        torch.testing.assert_close(noisy[block], out[block], rtol=0, atol=1e-6)
        seen = cv.clone()
        seen[anchor - 1] += 1.0
        assert (attend(q, ck, seen, bk, bv, layout, Visibility())[block] - out[block]).abs().min() > 1e-4


@pytest.mark.parametrize("attend", BACKENDS)
def test_t04_empty_slots_are_finite_and_give_no_gradient(attend: Attend) -> None:
    """Case T04: a row with extra empty slots has the outputs and gradients of the row without; all is finite."""
    tokens = tiny.row([20, 11], 40)
    q, ck, cv, bk, bv = inputs(6, 4, 40)
    positions = torch.tensor([3, 9, 25])
    few = layout_of(tokens, make_anchors(positions), 4)
    many = layout_of(tokens, make_anchors(positions, 6), 4)
    out, grads = gradients(attend, (q[:3], ck, cv, bk[:3], bv[:3]), few, Visibility())
    padded, padded_grads = gradients(attend, (q, ck, cv, bk, bv), many, Visibility())
    assert padded.isfinite().all() and all(g.isfinite().all() for g in padded_grads)
    torch.testing.assert_close(padded[:3], out, rtol=0, atol=1e-6)
    for place, (got, want) in enumerate(zip(padded_grads, grads, strict=True)):
        is_context = place in (1, 2)
        torch.testing.assert_close(got if is_context else got[:3], want, rtol=0, atol=1e-6)
        assert is_context or not got[3:].any()


@pytest.mark.parametrize("attend", BACKENDS)
def test_t04_a_row_without_anchors_is_finite(attend: Attend) -> None:
    """Case T04: with no anchor at all the output is finite, in the full number of slots."""
    tokens = tiny.row([12], 16, supervised=0.0)
    anchors = sample_anchors(tokens.loss_mask, tokens.document_ids, 3, batch_generator(0, 0))
    out = attend(*inputs(3, 4, 16), layout_of(tokens, anchors, 4), Visibility(False, 2))
    assert out.shape == (3, 4, 4, 4) and out.isfinite().all()
    assert attend is attend_dense or not out.any()


@pytest.mark.parametrize(("context_len", "num_anchors"), [(96, 3), (100, 1), (129, 8), (257, 17), (2048, 128)])
def test_t05_shapes_equal_the_dense_reference(context_len: int, num_anchors: int) -> None:
    """Case T05: lengths that divide by nothing give the output of the dense mask, within 1e-4."""
    lengths = [context_len // 2, context_len // 3]
    tokens = tiny.row(lengths, context_len, supervised=1.0)
    anchors = sample_anchors(tokens.loss_mask, tokens.document_ids, num_anchors, batch_generator(0, 0))
    assert anchors.num_kept == num_anchors
    layout, tensors = layout_of(tokens, anchors, 16), inputs(num_anchors, 16, context_len, heads=2, kv=1)
    got = attend_per_document(*tensors, layout, Visibility())
    torch.testing.assert_close(got, attend_dense(*tensors, layout, Visibility()), rtol=0, atol=1e-4)


def test_decoding_sees_what_training_saw() -> None:
    """The block drafted after n tokens has the output of a training block anchored at n, windows included."""
    tokens = tiny.row([6, 20], 30)
    anchors = make_anchors(torch.tensor([2, 9, 17]), 4)
    q, ck, cv, bk, bv = inputs(4, 5, 30)
    for see in [Visibility(), Visibility(True), Visibility(False, 4), Visibility(True, 7)]:
        out = attend_per_document(q, ck, cv, bk, bv, layout_of(tokens, anchors, 5), see)
        for block, start, anchor in [(0, 0, 2), (1, 6, 9), (2, 6, 17)]:
            one = slice(block, block + 1)
            for attend in BACKENDS:
                decoded = attend(
                    q[one], ck[start:anchor], cv[start:anchor], bk[one], bv[one],
                    BlockLayout.of_decode(anchor - start, 5), see,
                )  # fmt: skip
                torch.testing.assert_close(decoded, out[one], rtol=0, atol=1e-5)


@pytest.mark.parametrize("attend", BACKENDS)
def test_decoding_without_context(attend: Attend) -> None:
    """A block drafted after no token attends to itself."""
    q, ck, cv, bk, bv = inputs(1, 4, 0, heads=2, kv=2)
    out = attend(q, ck, cv, bk, bv, BlockLayout.of_decode(0, 4), Visibility())
    scores = torch.einsum("qnh,knh->nqk", q[0], bk[0]) / 2
    wanted = torch.einsum("nqk,knh->qnh", scores.softmax(-1), bv[0])
    torch.testing.assert_close(out[0], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("attend", BACKENDS)
def test_bfloat16_stays_close_to_float32(attend: Attend) -> None:
    """bfloat16 inputs give a bfloat16 output within its rounding of the float32 one."""
    tokens = tiny.row([30, 20], 60, supervised=1.0)
    anchors = sample_anchors(tokens.loss_mask, tokens.document_ids, 12, batch_generator(0, 0))
    layout, tensors = layout_of(tokens, anchors, 4), inputs(12, 4, 60, dtype=torch.bfloat16)
    out = attend(*tensors, layout, Visibility())
    wide = attend(*(t.float() for t in tensors), layout, Visibility())
    assert out.dtype == torch.bfloat16
    assert (out.float() - wide).norm() / wide.norm() < 1e-2
