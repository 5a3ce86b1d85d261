"""FlashAttention-4: on a GPU with the package against dense attention; without them, what surrounds its kernels.

The second half puts a dense stand-in in the package's place: it asks the mask and reads the tables as the kernels do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from paceline.dflash.anchors import batch_generator, sample_anchors
from paceline.dflash.mask import dense_mask
from paceline.kernels import flash4
from paceline.kernels.attention import BlockLayout, Visibility, attend_dense
from paceline.kernels.flash4 import (
    TILE,
    DocumentStarts,
    FlashMask,
    attend_documents_flash4,
    attend_flash4,
    why_not_flash4,
)
from tests import oracles, tiny
from tests.unit.dflash.strategies import Blocks, blocks

BF16 = torch.bfloat16
CUDA = torch.device("cuda")
MISSING = why_not_flash4(128, CUDA, BF16, blocks=True) if torch.cuda.is_available() else "no CUDA device"
needs_flash4 = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
SEES = [Visibility(), Visibility(True), Visibility(False, 50), Visibility(False, 7), Visibility(True, 3)]
Inputs = list[Tensor]


def ragged_layout(num_blocks: int, block_size: int, context_len: int, seed: int = 0) -> BlockLayout:
    """Uneven documents with holes, one too short for a block, padding at the end; a fifth of the slots empty."""
    lengths = [context_len // 3, 2, context_len // 4, context_len // 5]
    row = tiny.row(lengths, context_len, seed=seed, supervised=0.8)
    wanted = num_blocks * 4 // 5
    anchors = sample_anchors(row.loss_mask, row.document_ids, wanted, batch_generator(seed, 0))
    assert anchors.num_kept == wanted
    pad = (0, num_blocks - wanted)
    anchors = type(anchors)(F.pad(anchors.positions, pad), F.pad(anchors.keep, pad))
    return BlockLayout.of_row(anchors, row.document_starts, block_size, context_len)


def flash_mask(layout: BlockLayout, see: Visibility, device: torch.device) -> FlashMask:
    """Tables made from the dense mask, tile by tile."""
    anchors, s, k = layout.anchors, layout.context_len, layout.block_size
    dense = dense_mask(anchors.positions, anchors.keep, layout.starts, s, k, see.causal, see.window)
    rows = len(dense)
    tiles = F.pad(torch.cat([dense[:, s:], dense[:, :s]], 1), (0, -(s + rows) % TILE))
    tiles = tiles.view(rows // TILE, TILE, -1, TILE).transpose(1, 2)  # [T / TILE, keys / TILE, TILE, TILE]
    every = tiles.all(-1).all(-1)
    tables = [
        table
        for picked in (tiles.any(-1).any(-1) & ~every, every)
        for table in (picked.sum(1), picked.int().sort(dim=1, descending=True, stable=True).indices)
    ]
    mask = BlockMask.from_kv_blocks(
        *(table[None, None].to(device, torch.int32) for table in tables), BLOCK_SIZE=TILE, seq_lengths=(rows, s + rows)
    )
    slots = torch.arange(k)
    high = anchors.positions[:, None].expand(-1, k)
    low = layout.starts[:, None].expand(-1, k)
    if see.window is not None:
        low = torch.maximum(low, high + slots - see.window + 1)
    low = torch.where(anchors.keep[:, None], low, high)
    return FlashMask.of(mask, *((rows + edge).flatten().to(device, torch.int32) for edge in (low, high)))


def inputs(layout: BlockLayout, heads: int, kv: int, size: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    g = torch.Generator().manual_seed(1)
    a, k, s = len(layout.anchors.positions), layout.block_size, layout.context_len
    shapes = [(a, k, heads, size), (s, kv, size), (s, kv, size), (a, k, kv, size), (a, k, kv, size)]
    return [torch.randn(shape, generator=g).to(device, dtype) for shape in shapes]


def with_gradients(attend: Callable[..., Tensor], tensors: Inputs, grad: Tensor) -> Inputs:
    """The output, and the gradient of every input."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.gpu
@pytest.mark.slow  # each new combination compiles for some 10 s
@needs_flash4
@pytest.mark.parametrize(
    ("heads", "kv", "size", "block_size", "see"),
    [
        (8, 2, 128, 16, Visibility()),
        (8, 2, 128, 16, Visibility(False, 50)),
        (8, 2, 128, 16, Visibility(True, 3)),
        (9, 3, 64, 16, Visibility()),
        (4, 4, 64, 8, Visibility(False, 7)),
    ],
    ids=str,
)
def test_blocks_equal_dense_attention_on_a_gpu(
    heads: int, kv: int, size: int, block_size: int, see: Visibility
) -> None:
    """Outputs and all gradients in bfloat16 are within 5e-3 (relative norm) of dense attention in float32."""
    layout = ragged_layout(768 // block_size, block_size, 1400)
    tensors = inputs(layout, heads, kv, size, CUDA, BF16)
    mask, grad = flash_mask(layout, see, CUDA), torch.randn_like(tensors[0])
    got = with_gradients(lambda *x: attend_flash4(*x, mask, see), tensors, grad)
    wanted = with_gradients(lambda *x: attend_dense(*x, layout, see), [x.float() for x in tensors], grad)
    errors = [relative_error(*pair) for pair in zip(got, wanted, strict=True)]
    assert max(errors) <= 5e-3, errors
    keep = layout.anchors.keep
    assert relative_error(got[0][~keep], wanted[0][~keep]) <= 5e-3  # empty slots: their own block, and no NaN


@pytest.mark.gpu
@needs_flash4
@pytest.mark.parametrize(
    ("heads", "kv", "size", "window", "softcap"),
    [(8, 2, 128, None, None), (8, 2, 128, 100, None), (8, 2, 128, None, 20.0), (9, 3, 64, None, None)],
)
def test_documents_equal_separate_attention_on_a_gpu(
    heads: int, kv: int, size: int, window: int | None, softcap: float | None
) -> None:
    """Each packed document's output in bfloat16 is within 5e-3 of its own in float32; empty ones may end the row."""
    edges = [0, 300, 301, 850, 1000]
    starts = DocumentStarts()
    starts.cu_seqlens = torch.tensor([*edges, 1000, 1000], dtype=torch.int32, device=CUDA)
    q, k, v = (torch.randn(1, 1000, n, size, device=CUDA).bfloat16().transpose(1, 2) for n in (heads, kv, kv))
    got = attend_documents_flash4(q, k, v, starts.handle, 0.3, window, softcap)
    wanted = separate_attention(q.float(), k.float(), v.float(), edges, 0.3, window, softcap)
    assert relative_error(got, wanted) <= 5e-3


@pytest.mark.gpu
@pytest.mark.slow
@needs_flash4
def test_a_compiled_layer_on_a_gpu_equals_the_eager_one() -> None:
    """Inductor compiles what stands around the operators into one graph, and other tables compile nothing."""
    run_compiled(CUDA, BF16, "inductor", 1e-2)


def separate_attention(
    query: Tensor, key: Tensor, value: Tensor, edges: list[int], scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Document by document, ``[1, N, S, H]`` to ``[1, S, N, H]``."""
    outputs = []
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        q, k, v = (x[0, :, start:end] for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        position = torch.arange(end - start, device=query.device)
        distance = position[:, None] - position
        visible = (distance >= 0) & (distance < (window or end))
        outputs.append(scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v)
    return torch.cat(outputs, 1).transpose(0, 1)[None]


def run_compiled(device: torch.device, dtype: torch.dtype, backend: str, tolerance: float) -> None:
    """A layer with norms before the attention, on two rows, compiled and eager."""
    see = Visibility(window=7)

    def layer(mask: FlashMask, q: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor) -> Tensor:
        q, ck, bk = (F.rms_norm(x, x.shape[-1:]) * 2 for x in (q, ck, bk))
        return attend_flash4(q, ck, cv, bk, bv, mask, see).flatten(2) * 0.5

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for seed in (0, 1):
        layout = ragged_layout(16, 8, 300, seed)
        mask, tensors = flash_mask(layout, see, device), inputs(layout, 4, 4, 64, device, dtype)
        grad = torch.randn(tensors[0].flatten(2).shape, device=device)
        got = with_gradients(functools.partial(compiled, mask), tensors, grad)
        wanted = with_gradients(functools.partial(layer, mask), tensors, grad)
        assert max(relative_error(*pair) for pair in zip(got, wanted, strict=True)) <= tolerance
    assert counter.frame_count == 1


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dense attention in the place of the package."""
    library = SimpleNamespace(
        forward=dense_forward, backward=dense_backward, tables=lambda *x: x, lane=lambda x: x, softcap=lambda cap: cap
    )
    monkeypatch.setattr(flash4, "_library", lambda: library)
    flash4._softcap.cache_clear()
    yield
    flash4._softcap.cache_clear()


def seen(
    mask_mod: Callable[..., Tensor], tables: Inputs, aux: Inputs, rows: int, keys: int, transposed: bool
) -> Tensor:
    """Bool ``[rows, keys]``: all of the full tiles, what the mask says of the partial ones, nothing of the others."""
    asked = mask_mod(None, None, [torch.arange(rows)[:, None]], [torch.arange(keys)[None, :]], None, aux)
    visible = torch.zeros(rows, keys, dtype=torch.bool)
    for (numbers, indices), is_full in ((tables[:2], False), (tables[2:], True)):
        for i, number in enumerate(numbers[0, 0].tolist()):
            for j in indices[0, 0, i, :number].tolist():
                m, n = (j, i) if transposed else (i, j)
                tile = (slice(m * TILE, (m + 1) * TILE), slice(n * TILE, (n + 1) * TILE))
                assert not visible[tile].any()
                visible[tile] = True if is_full else asked[tile]
    return visible


def dense_weights(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    """``[M, N / M, rows, keys]`` from ``[1, rows, N, H]`` and ``[1, keys, M, H]``."""
    grouped = q[0].unflatten(1, (k.shape[2], -1))
    scores = torch.einsum("rmgh,kmh->mgrk", grouped, k[0]) * scale
    return scores.masked_fill(~visible, float("-inf")).softmax(-1)


def dense_forward(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, out: Tensor, **options: Any) -> None:
    """Stand-in for the package's forward."""
    if "mask_mod" in options:
        tables, aux = options["block_sparse_tensors"], options["aux_tensors"]
        visible = seen(options["mask_mod"], tables, aux, q.shape[1], k.shape[1], transposed=False)
        weights = dense_weights(q, k, visible, softmax_scale)
        out.copy_(torch.einsum("mgrk,kmh->rmgh", weights, v[0]).flatten(1, 2)[None])
        options["lse"].fill_(1.0)
        return
    assert options["causal"] and torch.equal(options["cu_seqlens_q"], options["cu_seqlens_k"])
    left, edges = options["window_size_left"], options["cu_seqlens_q"].tolist()
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    window = None if left is None else left + 1
    out.copy_(separate_attention(query, key, value, edges, softmax_scale, window, options["score_mod"])[0])


def dense_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, lse: Tensor, *, softmax_scale: float, mask_mod: Any,
    block_sparse_tensors: Inputs, aux_tensors: Inputs, dq: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Stand-in for the package's backward, which reads the tables of the other direction."""
    visible = seen(mask_mod, block_sparse_tensors, aux_tensors, q.shape[1], k.shape[1], transposed=True)
    assert bool((lse == 1.0).all())
    weights = dense_weights(q, k, visible, softmax_scale)
    queries, outs, grads = (x[0].unflatten(1, (k.shape[2], -1)) for x in (q, out, grad))  # [rows, M, N / M, H]
    of_weights = torch.einsum("rmgh,kmh->mgrk", grads, v[0])
    of_scores = weights * (of_weights - (grads * outs).sum(-1).permute(1, 2, 0)[..., None]) * softmax_scale
    dq.copy_(torch.einsum("mgrk,kmh->rmgh", of_scores, k[0]).flatten(1, 2)[None])
    dk.copy_(torch.einsum("mgrk,rmgh->kmh", of_scores, queries)[None])
    dv.copy_(torch.einsum("mgrk,rmgh->kmh", weights, grads)[None])


@pytest.mark.parametrize("see", SEES, ids=str)
def test_blocks_surround_the_kernels_rightly(see: Visibility, stand_in: None) -> None:
    """With dense kernels, outputs and gradients are those of dense attention: key order, mask, tables, gradients."""
    layout = ragged_layout(32, 8, 300)
    tensors = inputs(layout, 4, 2, 8, torch.device("cpu"), torch.float32)
    mask, grad = flash_mask(layout, see, torch.device("cpu")), torch.randn_like(tensors[0])
    got = with_gradients(lambda *x: attend_flash4(*x, mask, see), tensors, grad)
    wanted = with_gradients(lambda *x: attend_dense(*x, layout, see), tensors, grad)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@settings(max_examples=100, deadline=None)
@given(b=blocks())
def test_the_mask_equals_the_oracle(b: Blocks) -> None:
    """Row intervals and the rule for the own block give the dense mask, for any window, hole and empty slot."""
    k, rows = b.block_size, len(b.anchor_list) * b.block_size
    s = len(b.tokens.input_ids)
    slots = torch.arange(k)
    high = torch.where(b.anchors.keep, b.anchors.positions, b.starts)[:, None].expand(-1, k)
    low = b.starts[:, None].expand(-1, k)
    if b.window is not None:
        low = torch.maximum(low, high + slots - b.window + 1)
    edges = [(rows + edge).flatten() for edge in (low, high)]
    rule = flash4._visible(k, b.causal, b.window or 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash4, "_library", lambda: SimpleNamespace(lane=lambda x: x))
        got = rule(None, None, [torch.arange(rows)[:, None]], [torch.arange(rows + s)[None, :]], None, edges)
    wanted = torch.tensor(
        oracles.dense_mask(b.anchor_list, b.tokens.document_ids.tolist(), k, b.causal, b.window), dtype=torch.bool
    )
    assert torch.equal(got, torch.cat([wanted[:, s:], wanted[:, :s]], 1))


def test_a_layer_compiles_once(stand_in: None) -> None:
    """A layer around the operators is one graph, with its gradients, and other tables compile nothing."""
    run_compiled(torch.device("cpu"), torch.float32, "aot_eager", 1e-5)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 2.0)])
def test_documents_surround_the_kernel_rightly(window: int | None, softcap: float | None, stand_in: None) -> None:
    """The row's documents are read when the kernel runs: another number of them compiles nothing."""
    starts = DocumentStarts()
    counter = CompileCounterWithBackend("aot_eager")
    attend = torch.compile(
        lambda q, k, v: attend_documents_flash4(q * 2, k, v, starts.handle, 0.3, window, softcap),
        backend=counter,
        fullgraph=True,
    )
    q, k, v = (torch.randn(1, 40, n, 8).transpose(1, 2) for n in (4, 2, 2))
    for edges in ([0, 40], [0, 7, 8, 30, 40]):
        starts.cu_seqlens = torch.tensor(edges, dtype=torch.int32)
        wanted = separate_attention(q * 2, k, v, edges, 0.3, window, softcap)
        torch.testing.assert_close(attend(q, k, v), wanted)
    assert counter.frame_count == 1


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says which of device, head size and package stands in the way; None means that nothing does."""
    assert why_not_flash4(128, torch.device("cpu"), BF16, blocks=True) == "FlashAttention-4 has no kernels for cpu"
    installed: set[str] = {"cutlass", "quack", "tvm_ffi"}
    monkeypatch.setattr(flash4.importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert "not float32" in str(why_not_flash4(128, CUDA, torch.float32, blocks=True))
    assert "10.0" in str(why_not_flash4(128, CUDA, BF16, blocks=True))
    assert "steps of 8, not 256" in str(why_not_flash4(256, CUDA, BF16, blocks=False))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "steps of 8, not 256" in str(why_not_flash4(256, CUDA, BF16, blocks=True))
    assert "steps of 8, not 12" in str(why_not_flash4(12, CUDA, BF16, blocks=True))
    assert str(why_not_flash4(256, CUDA, BF16, blocks=False)).startswith("flash_attn.cute is missing: pip install")
    installed.add("flash_attn.cute")
    assert why_not_flash4(256, CUDA, BF16, blocks=False) is None and why_not_flash4(64, CUDA, BF16, blocks=True) is None
