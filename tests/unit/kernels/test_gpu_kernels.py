"""The kernels on a CUDA device, against the oracles of the CPU tests; skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.kernels import linear_cross_entropy
from paceline.kernels.adamw import adamw_, squared_norm
from paceline.kernels.linear_cross_entropy import CHUNK_ROWS, DPace, Head, best_of_rows, weighted_linear_cross_entropy
from paceline.kernels.linear_mixed_loss import Bias, Mix, linear_mixed_loss
from paceline.kernels.static_attention import attend_slots
from tests.unit.kernels import test_linear_mixed_loss, test_static_attention
from tests.unit.kernels.test_adamw import BETAS, EPS, NO_FACTOR, assert_follows_torch, hyper_at, state
from tests.unit.kernels.test_linear_cross_entropy import (
    VARIANTS,
    assert_are_the_best,
    assert_is_reference,
    case,
    hard_rows,
    shuffled_blocks,
)
from tests.unit.kernels.test_linear_mixed_loss import MIXES, assert_is_the_body, chunk

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [9000, 49_152, 50_257, 151_936])
@pytest.mark.parametrize("num", [1, 5, 16, 64])
def test_the_best_of_rows(vocab: int, num: int, dtype: torch.dtype) -> None:
    """They are those of `topk`, whatever the rows hold, and bits repeat."""
    for logits in hard_rows((3, 7, vocab), dtype, "cuda"):
        found = best_of_rows(logits, num)
        assert_are_the_best(logits, found, num)
        assert torch.equal(found.ids, best_of_rows(logits, num).ids)


def test_the_best_of_rows_in_a_graph() -> None:
    """A captured call, replayed on other logits, finds the best of those, and nothing waits for the device."""
    logits = torch.randn(100, 49_152, generator=torch.Generator("cuda").manual_seed(0), device="cuda").bfloat16()
    best_of_rows(logits, 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = best_of_rows(logits, 16)
    logits.copy_(logits.flip(1) * 2)
    graph.replay()
    assert_are_the_best(logits, found, 16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        best_of_rows(logits, 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_best_of_rows_on_another_device() -> None:
    """On a device that is not the thread's own."""
    logits = torch.randn(10, 49_152, generator=torch.Generator("cuda:1").manual_seed(0), device="cuda:1")
    assert_are_the_best(logits, best_of_rows(logits, 5), 5)


@pytest.mark.parametrize("num", [5, 16])
def test_candidates_beside_the_loss(large: tuple[Tensor, Head, Tensor, Tensor, Tensor], num: int) -> None:
    """They are the best of the chunk's logits, and the loss and its gradient stay what they are without them."""
    hidden, head, labels, weights, rows = large
    x = hidden.clone().requires_grad_()
    results = []
    for asked in (0, num):
        found = weighted_linear_cross_entropy(x, head, labels, weights, rows, NUM_ROWS, num_candidates=asked)
        results.append((found.loss.detach(), found.hits, *torch.autograd.grad(found.loss, x)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert found.candidates is not None
    taken = rows[:NUM_ROWS:16]
    logits, ids = (each[taken] for each in found.candidates)
    wanted = hidden[taken].float() @ head.weight.float().T
    torch.testing.assert_close(logits, wanted.gather(1, ids), rtol=1e-2, atol=2e-2)  # bfloat16 of the chunk's products
    torch.testing.assert_close(logits, wanted.topk(num).values, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("mix", [MIXES[1], MIXES[3], Mix(0.1, 0.0, 0.9)], ids=str)
@pytest.mark.parametrize(("softcap", "scale"), [VARIANTS[0], VARIANTS[3]])
@pytest.mark.parametrize("vocab", [997, 49_152, 151_936])
def test_chunks_of_the_mixed_loss(vocab: int, softcap: float | None, scale: float, mix: Mix, has_bias: bool) -> None:
    """They are what plain tensors make of them: within float32 rounding, and within that of bfloat16 gradients."""
    for dtype, rtol, atol in ((torch.float32, 1e-4, 5e-6), (torch.bfloat16, 2**-7, 5e-6)):
        arguments = chunk(20, vocab, softcap, scale, has_bias, dtype, "cuda")
        assert_is_the_body(arguments, mix, rtol, atol)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("mix", "dpace"), [*((mix, None) for mix in MIXES), (MIXES[3], DPace(3))], ids=str)
@pytest.mark.parametrize(("softcap", "scale"), [VARIANTS[0], VARIANTS[3]])
def test_the_mixed_loss(softcap: float | None, scale: float, mix: Mix, dpace: DPace | None, has_bias: bool) -> None:
    """In float32 loss, weights, overlap and all gradients are those of autograd in float64, with candidates beside."""
    args = test_linear_mixed_loss.case()
    if dpace is not None:
        args["weights"] = (args["weights"] > 0.2).float()
    loss, weight, overlap, grads = test_linear_mixed_loss.reference(args, softcap, scale, mix, dpace, has_bias)
    leaves = [each.cuda().requires_grad_() for each in (args["hidden"], *args["bias"])]
    labels, weights, states, rows = (
        args[name].cuda() for name in ("labels", "weights", "target_hidden", "target_rows")
    )
    found, ours = linear_mixed_loss(
        leaves[0], Head(args["head"].cuda(), softcap, scale), labels, weights, None, len(labels), states, rows, mix,
        bias=Bias(*leaves[1:]) if has_bias else None, dpace=dpace, num_candidates=3,
    )  # fmt: skip
    found.loss.backward()
    torch.testing.assert_close(found.loss.double().cpu(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.weight.double().cpu(), weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close((ours * (weights != 0)).double().cpu(), overlap, rtol=1e-5, atol=1e-6)
    for tensor, grad in zip(leaves, grads, strict=False):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad.double().cpu(), grad, rtol=1e-4, atol=1e-5)
    assert found.candidates is not None
    logits = Head(args["head"], softcap, scale).logits(args["hidden"]).topk(3).values.cuda()
    torch.testing.assert_close(found.candidates.logits[weights != 0], logits[weights != 0], rtol=1e-5, atol=1e-5)


def test_the_mixed_loss_holds_two_chunks(large: tuple[Tensor, Head, Tensor, Tensor, Tensor]) -> None:
    """Of a large head in bfloat16: the drafter's logits and the target's. Nothing waits for the device, and a captured
    call repeats the bits."""
    hidden, head, labels, weights, rows = large
    states, places = hidden.roll(1, 0), torch.arange(ROWS, device="cuda")
    x = hidden.clone().requires_grad_()
    g = torch.Generator("cuda").manual_seed(1)
    bias = Bias(
        *(
            (0.1 * torch.randn(num, 256, generator=g, device="cuda")).bfloat16().requires_grad_()
            for num in (ROWS, VOCAB)
        )
    )

    def call() -> tuple[Tensor, ...]:
        found, overlap = linear_mixed_loss(
            x, head, labels, weights, rows, NUM_ROWS, states, places, Mix(0.1, 0.0, 0.9), bias=bias
        )
        return found.loss.detach(), found.hits, overlap, *torch.autograd.grad(found.loss, [x, *bias])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    chunk_bytes = CHUNK_ROWS * VOCAB * 2
    tables = 12 * VOCAB * 256  # the sum of its gradient in float32, and in bfloat16 a chunk's, then the whole, twice
    assert torch.cuda.max_memory_allocated() - held < 2.2 * chunk_bytes + 4 * hidden.nbytes + tables
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(first, captured, strict=True))


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
