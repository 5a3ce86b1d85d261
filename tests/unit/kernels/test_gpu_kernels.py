"""The kernels on a CUDA device, against the oracles of the CPU tests; skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.kernels import linear_cross_entropy
from paceline.kernels.adamw import adamw_, squared_norm
from paceline.kernels.linear_cross_entropy import CHUNK_ROWS, DPace, Head, weighted_linear_cross_entropy
from paceline.kernels.static_attention import attend_slots
from tests.unit.kernels import test_static_attention
from tests.unit.kernels.test_adamw import BETAS, EPS, NO_FACTOR, assert_follows_torch, hyper_at, state
from tests.unit.kernels.test_linear_cross_entropy import VARIANTS, assert_is_reference, case, shuffled_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS, VOCAB, WIDTH, J = 4096, 151_936, 4096, 16
"""A few chunks of Qwen3-8B's head, and rows in a block."""

NUM_ROWS = 3008
"""Rows that count: more than a chunk, less than two, whole blocks."""


@pytest.fixture(autouse=True)
def _float32_is_float32() -> Iterator[None]:
    """Matmuls of float32 are not rounded to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(scope="module")
def large() -> tuple[Tensor, Head, Tensor, Tensor, Tensor]:
    """hidden, head, labels (some of them hits), weights and a permutation of whole blocks, in bfloat16."""
    g = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=g, device="cuda").bfloat16()
    weight = (0.04 * torch.randn(VOCAB, WIDTH, generator=g, device="cuda")).bfloat16()
    labels = torch.randint(0, VOCAB, (ROWS,), generator=g, device="cuda")
    labels[::3] = (hidden[::3].float() @ weight.float().T).argmax(1)
    weights = torch.rand(ROWS, generator=g, device="cuda")
    return hidden, Head(weight), labels, weights, shuffled_blocks(ROWS // J, J).cuda()


@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize("dpace", [None, DPace(J)])
def test_a_large_head_in_bfloat16(
    large: tuple[Tensor, Head, Tensor, Tensor, Tensor], softcap: float | None, dpace: DPace | None
) -> None:
    """Sums are within 1e-3 of float32 by autograd, the gradient within 1e-2 of its norm, and no other row has one."""
    hidden, head, labels, weights, rows = large
    head = Head(head.weight, softcap)
    weights = weights if dpace is None else (weights > 0.2).float()
    x = hidden.clone().requires_grad_()
    loss, weight, hits, _ = weighted_linear_cross_entropy(x, head, labels, weights, rows, NUM_ROWS, dpace)
    loss.backward()
    taken, rest = rows[:NUM_ROWS], rows[NUM_ROWS:]
    wide = hidden[taken].float().requires_grad_()
    logits = wide @ head.weight.float().T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    nll = F.cross_entropy(logits, labels[taken], reduction="none")
    used = weights[taken] if dpace is None else dpace.weights(nll.detach(), weights[taken] != 0)
    wanted = (used * nll).sum()
    wanted.backward()
    assert x.grad is not None and wide.grad is not None and x.grad.isfinite().all()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-3)
    assert weight.item() == pytest.approx(used.sum().item(), rel=1e-3)
    assert (x.grad[taken].float() - wide.grad).norm() / wide.grad.norm() < 1e-2
    assert not x.grad[rest].any() and not hits[rest].any()
    wanted_hits = logits.gather(1, labels[taken, None])[:, 0] >= logits.amax(1)
    assert 0.2 < wanted_hits.float().mean() < 0.5
    assert (hits[taken] == wanted_hits).float().mean() > 0.99  # ties of bfloat16 are hits, and rare for other labels


@pytest.mark.parametrize(("softcap", "scale"), VARIANTS)
@pytest.mark.parametrize("vocab", [13, 997, 9000])
@pytest.mark.parametrize("dpace", [None, DPace(4, 0.3)])
@pytest.mark.parametrize(("num_rows", "permuted"), [(None, False), (0, True), (144, True), (144, False)])
def test_float32(
    monkeypatch: pytest.MonkeyPatch,
    softcap: float | None,
    scale: float,
    vocab: int,
    dpace: DPace | None,
    num_rows: int | None,
    permuted: bool,
) -> None:
    """In float32 everything is the oracle's, for vocabularies that fill a tile or do not."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ROWS", 66)
    hidden, weight, labels, weights = (x.cuda() for x in case(rows=200, vocab=vocab))
    weights = weights if dpace is None else (weights > 0.25).float()
    rows = shuffled_blocks(50, 4).cuda() if permuted else None
    hidden *= 0.2  # or the soft cap makes so many logits equal in float32 that labels hit by that alone
    head = Head(weight, softcap, scale)
    assert_is_reference(hidden, head, labels, weights, rows, num_rows, dpace, tolerance=2e-5)


@pytest.mark.parametrize("dpace", [None, DPace(4)])
def test_rows_that_fill_up_a_chunk_leave_no_trace(dpace: DPace | None) -> None:
    """NaN in a row past `num_rows`, its weight or an impossible label changes nothing, though the row is worked on."""
    hidden, weight, labels, weights = (x.cuda() for x in case(rows=20))
    weights = weights if dpace is None else (weights > 0.25).float()
    rows = shuffled_blocks(5, 4).cuda()
    hidden[rows[12:]], weights[rows[12:]], labels[rows[12:]] = torch.nan, torch.nan, -100
    assert_is_reference(hidden, Head(weight), labels, weights, rows, 12, dpace, tolerance=2e-5)


@pytest.mark.parametrize("dpace", [None, DPace(J)])
def test_steady_state_is_free_of_waits_and_allocations(
    monkeypatch: pytest.MonkeyPatch, large: tuple[Tensor, Head, Tensor, Tensor, Tensor], dpace: DPace | None
) -> None:
    """The second call asks the device for no memory and waits for nothing; one chunk is all it holds; bits repeat."""
    hidden, head, labels, weights, rows = large
    weights = weights if dpace is None else (weights > 0.2).float()
    x = hidden.clone().requires_grad_()

    def call() -> tuple[Tensor, ...]:
        loss, weight, hits, _ = weighted_linear_cross_entropy(x, head, labels, weights, rows, NUM_ROWS, dpace)
        return loss.detach(), weight, hits, *torch.autograd.grad(loss, x)

    first = call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held, allocs = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["num_device_alloc"] == allocs
    chunk = CHUNK_ROWS * (VOCAB + 2 * WIDTH) * 2
    assert torch.cuda.max_memory_allocated() - held < chunk + hidden.nbytes + (8 << 20)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or matmuls refuse to be deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert all(torch.equal(one, other) for one, other in zip(first, call(), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dpace", [None, DPace(4)])
def test_the_loss_in_a_graph(dpace: DPace | None) -> None:
    """A captured call, replayed on other inputs, gives the bits of a call."""
    hidden, weight, labels, weights = (x.cuda() for x in case(rows=2400, vocab=997))
    weights = (weights > 0.25).float()
    rows, head = shuffled_blocks(600, 4).cuda(), Head(weight)
    x = hidden.clone().requires_grad_()

    def call() -> tuple[Tensor, ...]:
        loss, weight_sum, hits, _ = weighted_linear_cross_entropy(x, head, labels, weights, rows, 2160, dpace)
        return loss.detach(), weight_sum, hits, *torch.autograd.grad(loss, x)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    other = case(rows=2400, vocab=997, seed=1)
    with torch.no_grad():
        x.copy_(other[0])
    labels.copy_(other[2])
    weights.copy_((other[3] > 0.5).float())
    rows.copy_(shuffled_blocks(600, 4, seed=1))
    graph.replay()
    assert all(torch.equal(one, wanted) for one, wanted in zip(captured, call(), strict=True))


@pytest.mark.parametrize("shape", [(1,), (37,), (1024,), (300, 1000)])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_updates_follow_torch(shape: tuple[int, ...], grad_dtype: torch.dtype, weight_decay: float) -> None:
    """Weights and moments are those of `torch.optim.AdamW` on the device, the copy is the master rounded."""
    assert_follows_torch(shape, grad_dtype, weight_decay, "cuda", num_steps=8)


@pytest.mark.parametrize("factor", NO_FACTOR)
def test_a_factor_of_nothing_changes_nothing(factor: float) -> None:
    """With a factor of 0 or none that is finite everything stays, whatever the gradient holds."""
    tensors = state((3000,), device="cuda")
    before = [tensor.clone() for tensor in tensors]
    master, exp_avg, exp_avg_sq, copy = tensors
    hyper, grad = hyper_at(3, 1e-2, factor).cuda(), torch.full((3000,), torch.nan, device="cuda")
    adamw_(master, exp_avg, exp_avg_sq, grad, copy, hyper, betas=BETAS, eps=EPS, weight_decay=0.1)
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))


def test_an_update_in_a_graph() -> None:
    """Norm, factor and update are captured together and read the rate of the day; nothing waits for the device."""
    master, exp_avg, exp_avg_sq, copy = state((300, 70), device="cuda")
    theirs = [tensor.clone() for tensor in (master, exp_avg, exp_avg_sq, copy)]
    grad, hyper = torch.ones(300, 70, device="cuda").bfloat16(), hyper_at(3, 1e-2).cuda()

    def step(tensors: list[Tensor]) -> None:
        hyper[3].copy_(1.0 / squared_norm([grad, grad[:7]]).sqrt())
        ours, m, v, rounded = tensors
        adamw_(ours, m, v, grad, rounded, hyper, betas=BETAS, eps=EPS, weight_decay=0.1)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step([tensor.clone() for tensor in theirs])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step([master, exp_avg, exp_avg_sq, copy])
    for count in (4, 5):
        grad.copy_(torch.randn(300, 70, generator=torch.Generator().manual_seed(count)))
        hyper.copy_(hyper_at(count, 1e-2 / count))
        graph.replay()
        step(theirs)
    pairs = zip((master, exp_avg, exp_avg_sq, copy), theirs, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(theirs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_squared_norm() -> None:
    """It is the sum of all squares within float32 rounding, repeats its bits, and shows a NaN."""
    g = torch.Generator("cuda").manual_seed(0)
    shapes = [(4096, 12_288), (4096,), (128,), (3, 5, 7)]
    for dtype in (torch.bfloat16, torch.float32):
        grads = [torch.randn(shape, generator=g, device="cuda").to(dtype) for shape in shapes]
        wanted = sum(grad.double().square().sum().item() for grad in grads)
        found = squared_norm(grads)
        assert found.dtype == torch.float64 and found.is_cuda
        assert found.item() == pytest.approx(wanted, rel=1e-5)
        assert torch.equal(found, squared_norm(grads))
        grads[1][5] = torch.nan
        assert squared_norm(grads).isnan()


@pytest.mark.parametrize("dtype", test_static_attention.TOLERANCE)
@pytest.mark.parametrize(
    ("shared", "head_dim"), [(2, 8), (1, 16), (3, 64), (20, 64), (1, 80), (4, 96), (8, 128), (5, 256)]
)
def test_slots_see_their_own_lengths(dtype: torch.dtype, shared: int, head_dim: int) -> None:
    """Of every type and size of heads, whatever stands behind: NaN is not read."""
    capacity = test_static_attention.CAPACITY
    lengths = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129, capacity - 1, capacity, capacity + 9]
    query, key, value, sizes = test_static_attention.case(3, shared, head_dim, dtype, lengths, "cuda")
    for slot, length in enumerate(lengths):
        key[slot, length:], value[slot, length:] = torch.nan, torch.nan
    test_static_attention.assert_is_reference(query, key, value, sizes)


@pytest.mark.parametrize("dtype", test_static_attention.TOLERANCE)
def test_slots_in_a_graph(dtype: torch.dtype) -> None:
    """Recorded once, it follows lengths, queries and rooms; bits repeat, and nothing waits for the device."""
    first, second = (
        test_static_attention.case(3, 3, 64, dtype, lengths, "cuda", seed)
        for seed, lengths in enumerate(([1] * 40, list(range(1, 200, 5))))
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend_slots(*first, 0.2)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend_slots(*first, 0.2)
    for mine, other in zip(first, second, strict=True):
        mine.copy_(other)
    graph.replay()
    test_static_attention.assert_is_reference(*first)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = attend_slots(*second, 0.2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, again)
