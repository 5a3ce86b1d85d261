"""The Triton kernels, interpreted on CPU tensors, against the same oracles as what runs on a CPU.

Triton decides once, when it is imported, whether it interprets; so that no other test meets interpreted kernels, these
run in a process of their own, which the first test starts.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from paceline.kernels import adamw, linear_cross_entropy, linear_mixed_loss, static_attention
from paceline.kernels.linear_cross_entropy import DPace, Head, best_of_rows, weighted_linear_cross_entropy
from paceline.kernels.linear_mixed_loss import Mix
from tests.unit.kernels import test_adamw, test_linear_cross_entropy, test_linear_mixed_loss, test_static_attention
from tests.unit.kernels.test_adamw import BETAS, EPS, NO_FACTOR, hyper_at, state
from tests.unit.kernels.test_linear_cross_entropy import assert_is_reference, case, shuffled_blocks
from tests.unit.kernels.test_linear_mixed_loss import MIXES

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
VARIANTS = [(None, 1.0), (1.5, 2.5)]
"""(softcap, scale)"""


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or not HAS_TRITON, reason="needs Triton, and is not for the process that it starts")
def test_all_of_this_file_interpreted() -> None:
    """The tests below pass in a process where Triton interprets."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    ran = subprocess.run(
        command, cwd=root, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-4000:] + ran.stderr[-2000:]


interpreted = pytest.mark.skipif(not (INTERPRETED and HAS_TRITON), reason="run by the first test of this file")


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are given to the kernels, in chunks of 9 rows and tiles of 8 or 16 logits, 64 elements or 16 keys."""
    from paceline.kernels import (
        adamw_triton,
        linear_cross_entropy_triton,
        linear_mixed_loss_triton,
        static_attention_triton,
    )

    monkeypatch.setattr(linear_cross_entropy, "_has_kernels", lambda device: True)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ROWS", 9)
    monkeypatch.setattr(linear_cross_entropy_triton, "BLOCK", 16)
    monkeypatch.setattr(linear_mixed_loss, "_has_kernels", lambda device: True)
    monkeypatch.setattr(linear_mixed_loss_triton, "BLOCK", 8)
    monkeypatch.setattr(adamw, "_has_kernels", lambda device: True)
    monkeypatch.setattr(adamw_triton, "BLOCK", 64)
    monkeypatch.setattr(static_attention, "_has_kernels", lambda device: True)
    monkeypatch.setattr(static_attention_triton, "TILE_BYTES", 1)


@interpreted
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    ("vocab", "softcap", "scale"), [(13, None, 1.0), (32, 1.5, 2.5), (37, None, 1.0), (37, 1.5, 2.5)]
)
@pytest.mark.parametrize(("num_rows", "permuted"), [(None, False), (0, True), (8, True), (12, True), (12, False)])
@pytest.mark.parametrize("dpace", [None, DPace(4, 0.3)])
def test_rows(
    vocab: int, softcap: float | None, scale: float, num_rows: int | None, permuted: bool, dpace: DPace | None
) -> None:
    """Loss, weights, hits and gradient are the oracle's, for vocabularies that fill a tile or do not."""
    hidden, weight, labels, weights = case(rows=20, vocab=vocab)
    weights = weights if dpace is None else (weights > 0.25).float()
    rows = shuffled_blocks(5, 4) if permuted else None
    assert_is_reference(hidden, Head(weight, softcap, scale), labels, weights, rows, num_rows, dpace)


@interpreted
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dpace", [None, DPace(4)])
def test_rows_that_fill_up_a_chunk_leave_no_trace(dpace: DPace | None) -> None:
    """NaN in a row past `num_rows`, its weight or an impossible label changes nothing, though the row is worked on."""
    hidden, weight, labels, weights = case(rows=20)
    rows, head = shuffled_blocks(5, 4), Head(weight)
    weights = weights if dpace is None else (weights > 0.25).float()
    for i in rows[12:]:
        hidden[i], weights[i], labels[i] = torch.nan, torch.nan, -100
    assert_is_reference(hidden, head, labels, weights, rows, 12, dpace)


@interpreted
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dpace", [None, DPace(4)])
@pytest.mark.parametrize(("softcap", "scale"), VARIANTS)
def test_rows_in_bfloat16(softcap: float | None, scale: float, dpace: DPace | None) -> None:
    """bfloat16 logits, overwritten by a bfloat16 gradient, stay within 1 % of float64.

    The interpreter cuts bits off where a GPU rounds.
    """
    hidden, weight, labels, weights = case(rows=24, vocab=50, width=32)
    weights = weights if dpace is None else (weights > 0.2).float()
    hidden, head = hidden.bfloat16(), Head((weight / 6).bfloat16(), softcap, scale)
    x = hidden.clone().requires_grad_()
    loss = weighted_linear_cross_entropy(x, head, labels, weights, dpace=dpace)[0]
    loss.backward()
    wanted, _, _, gradient = test_linear_cross_entropy.reference(hidden, head, labels, weights, dpace)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-2)
    assert x.grad is not None and (x.grad.double() - gradient).norm() / gradient.norm() < 2e-2


@interpreted
@pytest.mark.usefixtures("_kernels")
def test_rows_with_large_or_equal_logits() -> None:
    """Logits of several hundred do not overflow, and labels that share the best logit are hits."""
    weight, labels = torch.eye(4) * 500, torch.tensor([1, 0])
    x = torch.eye(4)[:2].clone().requires_grad_()
    loss, _, hits, _ = weighted_linear_cross_entropy(x, Head(weight), labels, torch.ones(2))
    loss.backward()
    assert loss.item() == pytest.approx(1000.0) and hits.tolist() == [False, False]
    assert x.grad is not None and x.grad.isfinite().all()
    weight = torch.tensor([[1.0], [2.0], [2.0], [0.0]])
    hits = weighted_linear_cross_entropy(torch.ones(4, 1), Head(weight, 30.0), torch.arange(4), torch.ones(4))[2]
    assert hits.tolist() == [False, True, True, False]


@interpreted
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "num"), [((3, 384), 1), ((2, 1, 1027), 5), ((2, 1024), 7), ((1, 2176), 16)])
def test_the_best_of_rows(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], num: int, dtype: torch.dtype
) -> None:
    """They are those of `topk`, in blocks that fill the row or do not."""
    from paceline.kernels import best_of_rows_triton

    monkeypatch.setattr(best_of_rows_triton, "BLOCK", 128)
    for logits in test_linear_cross_entropy.hard_rows(shape, dtype):
        test_linear_cross_entropy.assert_are_the_best(logits, best_of_rows(logits, num), num)
    assert [len(each) for each in best_of_rows(torch.zeros(0, 1024, dtype=dtype), 7)] == [0, 0]


@interpreted
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize(("softcap", "scale"), VARIANTS)
def test_the_mixed_loss(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None, scale: float, mix: Mix, has_bias: bool
) -> None:
    """Chunks are what plain tensors make of them, in both types, and the whole is autograd's."""
    for vocab in (13, 32):
        arguments = test_linear_mixed_loss.chunk(6, vocab, softcap, scale, has_bias, torch.float32)
        test_linear_mixed_loss.assert_is_the_body(arguments, mix, rtol=2e-5, atol=5e-6)
    arguments = test_linear_mixed_loss.chunk(6, 40, softcap, scale, has_bias, torch.bfloat16)
    test_linear_mixed_loss.assert_is_the_body(arguments, mix, rtol=2**-7, atol=5e-6)
    test_linear_mixed_loss.test_it_is_what_autograd_makes_of_the_formula(softcap, scale, mix, has_bias, monkeypatch)


@interpreted
@pytest.mark.usefixtures("_kernels")
def test_rows_of_the_mixed_loss_that_do_not_count_leave_no_trace() -> None:
    """Rows past the last, and rows of weight 0 whatever they hold."""
    test_linear_mixed_loss.test_rows_that_do_not_count_leave_no_trace()
    test_linear_mixed_loss.test_l1_is_twice_the_total_variation()
    test_linear_mixed_loss.test_the_least_divergence_is_the_target()


@interpreted
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("shape", [(1,), (37,), (64,), (5, 30)])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_updates_follow_torch(shape: tuple[int, ...], grad_dtype: torch.dtype, weight_decay: float) -> None:
    """Weights and moments are those of `torch.optim.AdamW`."""
    master, exp_avg, exp_avg_sq, copy = state(shape)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(grad_dtype)
    theirs = [tensor.clone() for tensor in (master, exp_avg, exp_avg_sq)]
    arguments = (hyper_at(3, 1e-2, 0.3), BETAS, EPS, weight_decay)
    adamw._update_(*theirs, grad, None, *arguments)  # itself compared with torch on the CPU
    adamw_ = adamw.adamw_
    adamw_(master, exp_avg, exp_avg_sq, grad, copy, arguments[0], betas=BETAS, eps=EPS, weight_decay=weight_decay)
    for ours, wanted in zip((master, exp_avg, exp_avg_sq), theirs, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=5e-7, atol=5e-9)
    torch.testing.assert_close(copy.float(), master, rtol=2**-7, atol=0.0)


@interpreted
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("factor", NO_FACTOR)
def test_updates_by_a_factor_of_nothing(factor: float) -> None:
    """With a factor of 0 or none that is finite everything stays, whatever the gradient holds."""
    test_adamw.test_a_factor_of_nothing_changes_nothing(factor)


@interpreted
@pytest.mark.usefixtures("_kernels")
def test_updates_without_a_copy_or_elements() -> None:
    """The copy may be left out, and so may the elements."""
    master, exp_avg, exp_avg_sq, _ = state((70,), None)
    before = master.clone()
    adamw.adamw_(
        master, exp_avg, exp_avg_sq, torch.ones(70), None, hyper_at(3, 1e-2), betas=BETAS, eps=EPS, weight_decay=0.1
    )
    assert not (master == before).any()
    test_adamw.test_no_elements()


@interpreted
@pytest.mark.usefixtures("_kernels")
def test_squared_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of tensors of any size and both types add up, and one that is not finite shows."""
    from paceline.kernels import adamw_triton

    monkeypatch.setattr(adamw_triton, "SPAN", 3)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(n, generator=generator).to(kind) for n, kind in
             ((1, torch.float32), (1000, torch.bfloat16), (0, torch.float32), (192, torch.float32))]  # fmt: skip
    wanted = sum(float(grad.double().square().sum()) for grad in grads)
    assert float(adamw.squared_norm(grads)) == pytest.approx(wanted, rel=1e-6)
    grads[1][999] = float("inf")
    assert not adamw.squared_norm(grads).isfinite()


@interpreted
@pytest.mark.usefixtures("_kernels")
def test_a_buffer_has_the_norm_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, where tensors begin at whole spans: a run may go over from one to the other."""
    from paceline.kernels import adamw_triton

    monkeypatch.setattr(adamw_triton, "SPAN", 3)
    generator = torch.Generator().manual_seed(0)
    flat = torch.zeros(5 * 3 * 64)
    tensors = []
    for start, size in ((0, 2 * 192 - 7), (2 * 192, 192), (3 * 192, 1), (4 * 192, 100)):
        part = torch.randn(size, generator=generator).bfloat16()
        flat[start : start + size] = part
        tensors.append(part)
    assert torch.equal(adamw.squared_norm(tensors), adamw.squared_norm([flat]))


loops = pytest.mark.skipif(
    HAS_TRITON and tuple(map(int, version("triton").split(".")[:2])) < (3, 7),
    reason="this Triton's interpreter ends no loop at a number that was loaded, as NumPy 2.4 refuses to",
)


@interpreted
@loops
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter multiplies the bits of bfloat16
@pytest.mark.parametrize(
    ("num_kv", "shared", "head_dim"), [(1, 1, 8), (3, 3, 64), (2, 8, 80), (1, 20, 16), (2, 4, 256)]
)
def test_slots_see_their_own_lengths(num_kv: int, shared: int, head_dim: int, dtype: torch.dtype) -> None:
    """At and beside the edges of tiles, and none of what stands behind, be it NaN."""
    lengths = [1, 15, 16, 17, 33, test_static_attention.CAPACITY, test_static_attention.CAPACITY + 9]
    query, key, value, sizes = test_static_attention.case(num_kv, shared, head_dim, dtype, lengths)
    for slot, length in enumerate(lengths):
        key[slot, length:], value[slot, length:] = torch.nan, torch.nan
    test_static_attention.assert_is_reference(query, key, value, sizes)


@interpreted
@loops
@pytest.mark.usefixtures("_kernels")
def test_slots_with_large_scores() -> None:
    """Scores of several thousand do not overflow, whichever tile the largest is in."""
    query, key, value, lengths = test_static_attention.case(2, 3, 16, torch.float32, [40, 40, 40])
    for slot, place in enumerate((0, 20, 39)):
        key[slot, place] = query[slot, ::3] * 100
    test_static_attention.assert_is_reference(query, key, value, lengths, 5.0)
