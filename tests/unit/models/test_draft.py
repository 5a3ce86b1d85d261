"""The drafter against an independent re-implementation written from the method's text, and its invariants."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from paceline.dflash.anchors import Anchors, batch_generator, make_anchors, sample_anchors
from paceline.dflash.blocks import BlockTargets, block_labels, block_positions, decay_weights, make_noise_blocks
from paceline.kernels.attention import BlockLayout, attend_dense, attend_per_document
from paceline.kernels.linear_cross_entropy import Head
from paceline.models.draft import DFlashDrafter, RMSNorm, Rotary
from paceline.models.draft import rotate as rotate_tensor
from paceline.models.kinds import drafter_class
from paceline.records import FeatureBatch, TokenBatch
from tests import oracles, tiny

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
SHAPES = {
    "full": tiny.draft_shape(),
    "causal": tiny.draft_shape(is_causal=True),
    "sliding": tiny.draft_shape(layer_types=("sliding_attention", "full_attention"), sliding_window=6),
    "sliding causal": tiny.draft_shape(layer_types=("sliding_attention",) * 2, sliding_window=3, is_causal=True),
    "yarn": tiny.draft_shape(rope=YARN),
    "wide block, one head": tiny.draft_shape(block_size=7, num_attention_heads=3, num_key_value_heads=1, head_dim=4),
}


def table(seed: int = 1) -> Tensor:
    """A token embedding ``[V, D]``."""
    return torch.randn(tiny.VOCAB, 32, generator=torch.Generator().manual_seed(seed))


def random_features(tokens: TokenBatch, seed: int = 2) -> Tensor:
    feature = torch.randn(len(tokens.input_ids), 64, generator=torch.Generator().manual_seed(seed))
    feature[tokens.num_tokens :] = 0.0
    return feature


def run(
    model: DFlashDrafter, tokens: TokenBatch, anchors: Anchors, feature: Tensor, attend: Any = attend_per_document
) -> Tensor:
    """Hidden states ``[A, J, D]`` of a row's blocks, by the steps of training."""
    k = model.shape.block_size
    noise_ids = make_noise_blocks(tokens.input_ids, anchors, k, model.shape.mask_token_id)
    layout = BlockLayout.of_row(anchors, tokens.document_starts, k, len(tokens.input_ids))
    kv = model.context_kv(feature, tokens.position_ids)
    positions = block_positions(anchors, tokens.position_ids, k)
    return model(table()[noise_ids].to(feature.dtype), positions, kv, layout, attend)


# ------------------------------------------------------------------ an independent drafter, one block at a time


def rms(x: list[float], weight: list[float], eps: float) -> list[float]:
    mean = sum(v * v for v in x) / len(x)
    return [v / math.sqrt(mean + eps) * w for v, w in zip(x, weight, strict=True)]


def rotate(head: list[float], position: int, frequencies: list[float], scale: float) -> list[float]:
    half = len(head) // 2
    out = [0.0] * len(head)
    for i in range(half):
        cos, sin = math.cos(position * frequencies[i]) * scale, math.sin(position * frequencies[i]) * scale
        out[i] = head[i] * cos - head[half + i] * sin
        out[half + i] = head[half + i] * cos + head[i] * sin
    return out


def rope_frequencies(rope: dict[str, Any], head_dim: int) -> tuple[list[float], float]:
    """Frequencies of the pairs and the factor of cosine and sine, from the formulas of RoPE and YaRN."""
    base = [rope["rope_theta"] ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if rope["rope_type"] == "default":
        return base, 1.0
    factor, length = rope["factor"], rope["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), head_dim - 1)
    mixed = []
    for i, frequency in enumerate(base):
        interpolated = min(max((i - low) / (high - low), 0.0), 1.0)
        mixed.append(frequency / factor * interpolated + frequency * (1 - interpolated))
    return mixed, 0.1 * math.log(factor) + 1


def independent_drafter(model: DFlashDrafter, tokens: TokenBatch, anchor: int, feature: Tensor) -> list[list[float]]:
    """Hidden states ``[K][D]`` of the block at `anchor`, in float64: sections 1.2 to 1.5 of the method, in loops."""
    shape, w = model.shape, {name: p.double() for name, p in model.state_dict().items()}
    docs = tokens.document_ids.tolist()
    start = oracles.document_start(anchor, docs)
    frequencies, scale = rope_frequencies(shape.rope, shape.head_dim)

    def linear(name: str, x: list[float]) -> list[float]:
        return (w[name + ".weight"] @ torch.tensor(x, dtype=torch.float64)).tolist()

    def norm(name: str, x: list[float]) -> list[float]:
        return rms(x, w[name + ".weight"].tolist(), shape.rms_norm_eps)

    def heads(x: list[float]) -> list[list[float]]:
        return [x[i : i + shape.head_dim] for i in range(0, len(x), shape.head_dim)]

    def normed_rotated(name: str, x: list[float], position: int) -> list[list[float]]:
        return [rotate(norm(name, head), position, frequencies, scale) for head in heads(x)]

    def convolved(name: str, side: int, rows: list[list[float]], inputs: list[list[float]]) -> list[list[float]]:
        """Rows of a block behind a DFlash2 convolution whose weights come from `inputs`; as they are without one."""
        if f"{name}.base_kernel" not in w:
            return rows
        base, width = w[f"{name}.base_kernel"][side], len(rows[0])
        num_taps, group = len(base), shape.options["conv_group_size"]
        num_groups, out = width // group, []
        for i, given in enumerate(inputs):
            delta = linear(f"{name}.kernel_projection", given)[side * num_taps * num_groups :]
            taps = range(min(num_taps, i + 1))
            out.append([
                sum((float(base[t, c]) + delta[t * num_groups + c // group]) * rows[i - t][c] for t in taps)
                for c in range(width)
            ])  # fmt: skip
        return out

    fused = [norm("hidden_norm", linear("fc", feature[j].double().tolist())) for j in range(len(docs))]
    ids = [int(tokens.input_ids[anchor])] + [shape.mask_token_id] * (shape.block_size - 1)
    x = [table()[i].double().tolist() for i in ids]
    for i in range(shape.num_hidden_layers):
        layer = f"layers.{i}."
        attn = layer + "self_attn."
        window = shape.sliding_window if shape.layer_types[i] == "sliding_attention" else None
        given = [norm(layer + "input_layernorm", row) for row in x]
        y = convolved(layer + "attention_conv", 0, given, given)
        sources = [(h, j - start) for j, h in enumerate(fused)]  # context first, then the block
        sources += [(row, anchor - start + k) for k, row in enumerate(y)]
        key = [normed_rotated(attn + "k_norm", linear(attn + "k_proj", s), max(p, 0)) for s, p in sources]
        value = [heads(linear(attn + "v_proj", s)) for s, _ in sources]
        query = [normed_rotated(attn + "q_norm", linear(attn + "q_proj", y[k]), anchor - start + k)
                 for k in range(shape.block_size)]  # fmt: skip
        mask = oracles.dense_mask([anchor], docs, shape.block_size, shape.is_causal, window)
        attended = oracles.attention(query, key, value, mask)
        mixed = [linear(attn + "o_proj", [v for head in slot for v in head]) for slot in attended]
        mixed = convolved(layer + "attention_conv", 1, mixed, given)
        x = [[a + b for a, b in zip(row, more, strict=True)] for row, more in zip(x, mixed, strict=True)]
        given = [norm(layer + "post_attention_layernorm", row) for row in x]
        out = []
        for z in convolved(layer + "mlp_conv", 0, given, given):
            gate, up = linear(layer + "mlp.gate_proj", z), linear(layer + "mlp.up_proj", z)
            swiglu = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
            out.append(linear(layer + "mlp.down_proj", swiglu))
        out = convolved(layer + "mlp_conv", 1, out, given)
        x = [[a + b for a, b in zip(row, more, strict=True)] for row, more in zip(x, out, strict=True)]
    return [norm("norm", row) for row in x]


@pytest.mark.parametrize("name", SHAPES)
def test_forward_equals_an_independent_drafter(name: str) -> None:
    """Hidden states are those of a drafter written in loops from the method's text, for both attention backends."""
    model = tiny.drafter(SHAPES[name])
    tokens = tiny.row([9, 13], 24, seed=3)
    positions = [0, 4, 10, 20]
    anchors = make_anchors(torch.tensor(positions), 5)
    feature = random_features(tokens)
    with torch.no_grad():
        got = run(model, tokens, anchors, feature)
        dense = run(model, tokens, anchors, feature, attend_dense)
    assert got.shape == (5, model.num_predicted, 32) and got.isfinite().all()
    for block, anchor in enumerate(positions):
        wanted = torch.tensor(independent_drafter(model, tokens, anchor, feature)[1:])
        torch.testing.assert_close(got[block], wanted, rtol=0, atol=2e-5)
        torch.testing.assert_close(dense[block], wanted, rtol=0, atol=2e-5)


# ------------------------------------------------------------------ tensors


def test_tensor_names_and_shapes_are_those_of_released_checkpoints() -> None:
    """Five layers have exactly 58 tensors, with the released names and shapes."""
    d, i, heads, kv, h, taps = 32, 48, 4, 2, 8, 3
    shape = tiny.draft_shape(num_hidden_layers=5, target_layer_ids=(0, 1, 3), layer_types=("full_attention",) * 5)
    wanted = {"fc.weight": (d, taps * d), "hidden_norm.weight": (d,), "norm.weight": (d,)}
    for n in range(5):
        layer = {
            "input_layernorm": (d,), "post_attention_layernorm": (d,),
            "self_attn.q_proj": (heads * h, d), "self_attn.k_proj": (kv * h, d), "self_attn.v_proj": (kv * h, d),
            "self_attn.o_proj": (d, heads * h), "self_attn.q_norm": (h,), "self_attn.k_norm": (h,),
            "mlp.gate_proj": (i, d), "mlp.up_proj": (i, d), "mlp.down_proj": (d, i),
        }  # fmt: skip
        wanted |= {f"layers.{n}.{name}.weight": size for name, size in layer.items()}
    model = DFlashDrafter(shape)
    assert {name: tuple(t.shape) for name, t in model.state_dict().items()} == wanted and len(wanted) == 58
    assert set(dict(model.named_parameters())) == set(wanted)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("rope", [tiny.draft_shape().rope, YARN], ids=["default", "yarn"])
def test_rotary_frequencies(rope: dict[str, Any]) -> None:
    """Frequencies and attention scale are RoPE's and YaRN's formulas, and stay float32 in a bfloat16 drafter."""
    shape = tiny.draft_shape(rope=rope, head_dim=16)
    frequencies, scale = rope_frequencies(rope, 16)
    rotary = Rotary(shape)
    torch.testing.assert_close(rotary.inv_freq, torch.tensor(frequencies), rtol=1e-5, atol=0)
    assert rotary.scale == pytest.approx(scale)
    model = DFlashDrafter(shape).bfloat16()
    assert torch.equal(model.rotary.inv_freq, rotary.inv_freq) and model.rotary.inv_freq.dtype == torch.float32
    # in bfloat16 frequencies a position of 400 would be off by whole radians
    unit = torch.zeros(1, 1, 16)
    unit[..., 0] = 1.0
    angle = 400 * frequencies[0]
    angles = model.rotary.angles(torch.tensor([400]), torch.bfloat16)
    turned = rotate_tensor(unit.bfloat16(), angles)[0, 0].float()
    assert turned[0].item() == pytest.approx(math.cos(angle) * scale, abs=1e-2)
    assert turned[8].item() == pytest.approx(math.sin(angle) * scale, abs=1e-2)


def test_rotary_of_a_hybrid_target() -> None:
    """A target's partial rotary factor and multimodal sections do not narrow the drafter's whole-head rotation."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    rotary = Rotary(tiny.draft_shape(rope=rope, head_dim=16))
    torch.testing.assert_close(rotary.inv_freq, torch.tensor([1e7 ** (-i / 8) for i in range(8)]), rtol=1e-5, atol=0)


def test_the_norm_computes_in_float32() -> None:
    """A bfloat16 row of large values is normed as in float32 and comes back in bfloat16."""
    norm = RMSNorm(64, 1e-6)
    x = (torch.randn(3, 64, generator=torch.Generator().manual_seed(0)) * 300).bfloat16()
    wanted = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    got = norm(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, wanted.bfloat16(), rtol=1e-2, atol=0)


def test_sliding_layers_get_the_window_and_full_layers_do_not() -> None:
    """Each layer's visibility is its own type's."""
    shape = SHAPES["sliding"]
    assert [shape.visibility(i).window for i in range(2)] == [6, None]
    assert [shape.visibility(i).causal for i in range(2)] == [False, False]
    assert SHAPES["causal"].visibility(1).causal


# ------------------------------------------------------------------ what a block may depend on


@pytest.mark.parametrize("attend", [attend_per_document, attend_dense])
def test_a_block_depends_on_nothing_at_or_past_its_anchor(attend: Any) -> None:
    """Features from the anchor on and tokens after it, replaced by noise, leave the block's output unchanged (T01)."""
    model, tokens = tiny.drafter(), tiny.row([12])
    anchors = make_anchors(torch.tensor([3, 5]))
    feature = random_features(tokens)
    with torch.no_grad():
        out = run(model, tokens, anchors, feature, attend)
        for block, anchor in enumerate([3, 5]):
            noisy, ids = feature.clone(), tokens.input_ids.clone()
            noisy[anchor:] = torch.randn(12 - anchor, 64) * 30
            ids[anchor + 1 :] = (ids[anchor + 1 :] + 77) % 250
            other = TokenBatch.pack(0, [(0, ids, tokens.loss_mask)], 12)
            torch.testing.assert_close(run(model, other, anchors, noisy, attend)[block], out[block], rtol=0, atol=1e-5)
            seen = feature.clone()
            seen[anchor - 1] += 1.0
            assert (run(model, tokens, anchors, seen, attend)[block] - out[block]).abs().max() > 1e-3


def test_a_document_is_the_same_alone_and_packed() -> None:
    """Blocks of a document in a packed row have the hidden states of the document alone in its row."""
    model = tiny.drafter(SHAPES["sliding"])
    first, second = tiny.row([11], seed=5), tiny.row([9], seed=6)
    both = TokenBatch.pack(0, [(0, first.input_ids, first.loss_mask), (1, second.input_ids, second.loss_mask)], 24)
    features = [random_features(first, 7), random_features(second, 8)]
    joined = torch.cat([*features, torch.zeros(4, 64)])
    with torch.no_grad():
        packed = run(model, both, make_anchors(torch.tensor([2, 6, 11, 15, 18]), 7), joined)
        alone = [
            run(model, first, make_anchors(torch.tensor([2, 6])), features[0]),
            run(model, second, make_anchors(torch.tensor([0, 4, 7])), features[1]),
        ]
    torch.testing.assert_close(packed[:5], torch.cat(alone), rtol=0, atol=1e-5)


def test_context_keys_do_not_pass_the_input_norm() -> None:
    """Context keys and values are made from the fused feature alone: a layer's input norm does not touch them."""
    model, tokens = tiny.drafter(), tiny.row([8])
    feature = random_features(tokens)
    with torch.no_grad():
        before = model.context_kv(feature, tokens.position_ids)
        for layer in model.layers:
            layer.input_layernorm.weight.mul_(3.0)
        after = model.context_kv(feature, tokens.position_ids)
    assert len(before) == 2
    for (key, value), (other_key, other_value) in zip(before, after, strict=True):
        assert torch.equal(key, other_key) and torch.equal(value, other_value)
        assert key.shape == value.shape == (8, 2, 8)


# ------------------------------------------------------------------ label shift, loss, drafting


class ShiftedDrafter(DFlashDrafter):
    """A kind whose slot k predicts anchor + k + 1."""

    label_shift: ClassVar[int] = 1


def test_label_shift_lets_slot_0_predict() -> None:
    """A kind with a shift of 1 returns K slots, the last K - 1 of which are those of the kind without."""
    plain = tiny.drafter()
    shifted = ShiftedDrafter(plain.shape)
    shifted.load_state_dict(plain.state_dict())
    tokens = tiny.row([12])
    anchors, feature = make_anchors(torch.tensor([3, 5])), random_features(tokens)
    with torch.no_grad():
        out, wanted = run(shifted, tokens, anchors, feature), run(plain, tokens, anchors, feature)
    assert (plain.num_predicted, shifted.num_predicted) == (3, 4)
    assert out.shape == (2, 4, 32)
    torch.testing.assert_close(out[:, 1:], wanted, rtol=0, atol=1e-5)
    first = torch.tensor([independent_drafter(plain, tokens, a, feature)[0] for a in (3, 5)])
    torch.testing.assert_close(out[:, 0], first, rtol=0, atol=2e-5)


def loss_inputs(model: DFlashDrafter, tokens: TokenBatch, anchors: Anchors) -> tuple[Tensor, Tensor]:
    labels, valid = block_labels(
        tokens.input_ids, tokens.loss_mask, tokens.document_ids, anchors, model.shape.block_size, model.label_shift
    )
    return labels, torch.where(valid, decay_weights(model.num_predicted, 7.0), 0.0)


def test_loss_sums_the_scored_slots_only() -> None:
    """The loss is the weighted sum over slots that count, whatever the others hold; their hits are False."""
    model, tokens = tiny.drafter(), tiny.row([14, 10], 30, supervised=0.7)
    anchors = sample_anchors(tokens.loss_mask, tokens.document_ids, 12, batch_generator(0, 0))
    labels, weights = loss_inputs(model, tokens, anchors)
    assert 0 < (weights > 0).sum() < weights.numel() and anchors.num_kept < 12
    hidden = torch.randn(12, 3, 32, generator=torch.Generator().manual_seed(4))
    head = Head(table(), softcap=3.0, scale=0.3)
    hidden[0, 0] = head.weight[labels[0, 0]] * 2  # a sure hit
    unscored = weights == 0
    labels = torch.where(unscored, head.logits(hidden).argmax(-1), labels)  # would be hits if they counted
    features = FeatureBatch(tokens, torch.zeros(30, 64))
    loss, _, hits, _ = model.loss(hidden, head, BlockTargets.of(labels, weights), anchors.positions, features)
    total, wanted = oracles.weighted_loss(
        hidden.flatten(0, 1).double().tolist(), head.weight.double().tolist(), labels.flatten().tolist(),
        weights.flatten().tolist(), head.softcap, head.scale,
    )  # fmt: skip
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert hits.tolist() == (torch.tensor(wanted).view(12, 3) & ~unscored).tolist() and bool(hits[0, 0])
    poisoned = torch.where(unscored[..., None], torch.tensor(float("nan")), hidden)
    again, *_ = model.loss(poisoned, head, BlockTargets.of(labels, weights), anchors.positions, features)
    assert again.item() == loss.item()


def test_t04_extra_empty_slots_change_neither_loss_nor_gradient() -> None:
    """Case T04: loss and gradients of a row with empty slots equal those of the row without, on either backend."""
    model, tokens = tiny.drafter(), tiny.row([12], supervised=1.0)
    feature, head = random_features(tokens), Head(table())
    positions = torch.tensor([3, 5, 9])
    results = {}
    for name, attend in {"groups": attend_per_document, "dense": attend_dense}.items():
        for slots in (3, 8):
            anchors = make_anchors(positions, slots)
            labels, weights = loss_inputs(model, tokens, anchors)
            model.zero_grad()
            out = run(model, tokens, anchors, feature, attend)
            loss, _, hits, _ = model.loss(
                out, head, BlockTargets.of(labels, weights), anchors.positions, FeatureBatch(tokens, feature)
            )
            loss.backward()
            results[name, slots] = (loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()})
            assert not hits[3:].any() and math.isfinite(loss.item())
    wanted_loss, wanted = results["dense", 3]
    for loss_value, grads in results.values():
        assert loss_value == pytest.approx(wanted_loss, rel=1e-6)
        for name, grad in grads.items():
            assert grad.isfinite().all() and grad.abs().max() > 0
            torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-5 * float(wanted[name].abs().max() + 1))


def test_t04_a_row_without_anchors_has_loss_0_and_finite_gradients() -> None:
    """Case T04: nothing supervised gives a loss of exactly 0, and no gradient that is not 0."""
    model, tokens = tiny.drafter(), tiny.row([12], 16, supervised=0.0)
    anchors = sample_anchors(tokens.loss_mask, tokens.document_ids, 3, batch_generator(0, 0))
    labels, weights = loss_inputs(model, tokens, anchors)
    feature = random_features(tokens)
    out = run(model, tokens, anchors, feature)
    loss, _, hits, _ = model.loss(
        out, Head(table()), BlockTargets.of(labels, weights), anchors.positions, FeatureBatch(tokens, feature)
    )
    loss.backward()
    assert loss.item() == 0.0 and weights.sum() == 0 and not hits.any() and out.isfinite().all()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_draft_is_the_argmax_of_every_slot() -> None:
    """Greedy drafting takes each slot's best token, with the head's cap and scale."""
    model = tiny.drafter()
    head = Head(table(), softcap=5.0, scale=0.5)
    hidden = head.weight[[7, 200, 31]][None] * 0.1
    assert model.propose(hidden, head, torch.tensor([3])).ids[0].tolist() == [7, 200, 31]


def test_kinds_by_name() -> None:
    """`dflash` is a kind; another word is an error that names it."""
    assert drafter_class("dflash") is DFlashDrafter
    with pytest.raises(ValueError, match="eagle"):
        drafter_class("eagle")


# ------------------------------------------------------------------ start of training


def first_loss(embedding: Tensor, head: Head, width: int = 32) -> float:
    """Mean loss of a freshly initialised drafter on a random row."""
    embed = torch.nn.Embedding.from_pretrained(embedding)
    model = DFlashDrafter(tiny.draft_shape(hidden_size=width))
    model.initialise(0, embed, head)
    tokens = tiny.row([60, 60], supervised=1.0)
    anchors = sample_anchors(tokens.loss_mask, tokens.document_ids, 40, batch_generator(0, 0))
    labels, weights = loss_inputs(model, tokens, anchors)
    feature = torch.randn(120, 2 * width, generator=torch.Generator().manual_seed(2))
    layout = BlockLayout.of_row(anchors, tokens.document_starts, 4, 120)
    with torch.no_grad():
        noise = embed(make_noise_blocks(tokens.input_ids, anchors, 4, 267))
        kv = model.context_kv(feature, tokens.position_ids)
        out = model(noise, block_positions(anchors, tokens.position_ids, 4), kv, layout)
        loss, *_ = model.loss(
            out, head, BlockTargets.of(labels, weights), anchors.positions, FeatureBatch(tokens, feature)
        )
    return loss.item() / weights.sum().item()


def rows_of_length(length: float, mean: float, width: int = 32) -> Tensor:
    """Rows ``[V, D]`` of one length that share a direction to the degree `mean`."""
    g = torch.Generator().manual_seed(9)
    rows = torch.randn(tiny.VOCAB, width, generator=g) + mean * torch.randn(1, width, generator=g)
    return rows / rows.norm(dim=1, keepdim=True) * length


@pytest.mark.parametrize(("length", "scale"), [(0.1, 1.0), (1.0, 1.0), (5.7, 1.0), (30.0, 1.0), (5.7, 4.0)])
@pytest.mark.parametrize("mean", [0.0, 2.0])
def test_training_starts_near_guessing(length: float, scale: float, mean: float) -> None:
    """The first loss is log V to within 2.5, also for heads with long rows that share a mean, or scaled logits."""
    head = Head(rows_of_length(length, mean), scale=scale)
    assert first_loss(table(), head) == pytest.approx(math.log(tiny.VOCAB), abs=2.5)


@pytest.mark.parametrize("length", [0.1, 3.2, 30.0])
def test_training_starts_near_guessing_with_a_tied_head(length: float) -> None:
    """The same where head and embedding are one matrix, whose unused rows lie near the mean of the used ones."""
    rows = rows_of_length(length, 1.0, 256)
    rows[260:] = rows.mean(0) + rows[260:] * 0.05
    assert first_loss(rows, Head(rows), 256) == pytest.approx(math.log(tiny.VOCAB), abs=2.5)


def test_initialise_is_keyed_by_its_seed() -> None:
    """The same seed gives the same weights whatever came before; another seed others; spread and norms as stated."""
    embed, head = torch.nn.Embedding.from_pretrained(table()), Head(table(3) * 0.01)
    first, again, other = (DFlashDrafter(tiny.draft_shape()) for _ in range(3))
    first.initialise(4, embed, head)
    torch.manual_seed(77)
    again.initialise(4, embed, head)
    other.initialise(5, embed, head)
    for name, p in first.named_parameters():
        assert torch.equal(p, again.get_parameter(name))
        if p.dim() > 1:
            assert not torch.equal(p, other.get_parameter(name))
            assert p.std().item() == pytest.approx(0.02, rel=0.1) and abs(p.mean().item()) < 0.003
        else:
            assert torch.equal(p, torch.ones_like(p))


def test_bfloat16_is_finite_and_close() -> None:
    """A drafter converted to bfloat16 has a finite loss and finite gradients, near those of float32."""
    model, tokens = tiny.drafter(), tiny.row([30, 20], supervised=1.0)
    anchors = sample_anchors(tokens.loss_mask, tokens.document_ids, 12, batch_generator(0, 0))
    labels, weights = loss_inputs(model, tokens, anchors)
    feature, head = random_features(tokens), Head(table() * 0.2)
    losses, grads = [], []
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype).zero_grad()
        out = run(model, tokens, anchors, feature.to(dtype))
        targets = BlockTargets.of(labels, weights)
        loss, *_ = model.loss(out, head.to(dtype), targets, anchors.positions, FeatureBatch(tokens, feature))
        loss.backward()
        losses.append(loss.item())
        grads.append(torch.cat([p.grad.flatten().float() for p in model.parameters()]))
    assert all(g.isfinite().all() for g in grads)
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert torch.nn.functional.cosine_similarity(grads[0], grads[1], dim=0) > 0.99
