"""The package `speculators` as judge: it loads an exported folder, and its logits are ours. Skipped without it.

Run once with `speculators` 0.9.0: `pip install --no-deps speculators==0.9.0`, then what its import asks for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.export.speculators import export_speculators, load_speculators
from paceline.kernels.attention import BlockLayout
from paceline.models.draft import DFlashDrafter
from paceline.models.target import Target
from tests import tiny

dflash = pytest.importorskip("speculators.models.dflash", exc_type=ImportError)
dflash2 = pytest.importorskip("speculators.models.dflash2", exc_type=ImportError)
dspark = pytest.importorskip("speculators.models.dspark", exc_type=ImportError)
pytestmark = pytest.mark.slow

NUM_TOKENS, ANCHORS, KEPT = 24, (5, 9, 17), torch.arange(3, 272, 7)


def their_logits(model: Any, input_ids: Tensor, feature: Tensor) -> Tensor:
    """``[A, K, Vd]``; the anchors are the supervised tokens, of which there are as many as it may pick."""
    supervised = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
    supervised[0, list(ANCHORS)] = 1
    _, logits, *_ = model._backbone_forward(
        feature[None],
        input_ids[None],
        supervised,
        torch.zeros(1, NUM_TOKENS, 32),
        torch.zeros(1, NUM_TOKENS, dtype=torch.int64),
        max_anchors=len(ANCHORS),
    )
    return logits[0].unflatten(0, (len(ANCHORS), -1))


def our_logits(drafter: DFlashDrafter, target: Target, input_ids: Tensor, feature: Tensor) -> Tensor:
    """``[A, J, Vd]``, block by block as they are decoded."""
    shape, logits = drafter.shape, []
    for anchor in ANCHORS:
        noise_ids = torch.full((1, shape.block_size), shape.mask_token_id)
        noise_ids[0, 0] = input_ids[anchor]
        hidden = drafter(
            target.embed(noise_ids),
            torch.arange(anchor, anchor + shape.block_size)[None],
            drafter.context_kv(feature[:anchor], torch.arange(anchor)),
            BlockLayout.of_decode(anchor, shape.block_size),
        )
        logits.append(drafter.own_head(target.head).logits(hidden[0]))
    return torch.stack(logits)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kept", [None, KEPT], ids=["full", "reduced"])
@pytest.mark.parametrize(
    "layers",
    [
        {},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 64, "is_causal": True},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 64},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 64},
        {"rope": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 128}},
    ],
    ids=["full attention", "causal", "sliding", "mixed", "yarn"],
)
@torch.inference_mode()
def test_the_package_drafts_what_we_draft(
    layers: dict[str, Any], kept: Tensor | None, family: str, tmp_path: Path
) -> None:
    """Every tensor finds its place and none is made up; embedding, head and logits are ours, and so are the ids."""
    target = tiny.target(family, tmp_path / "target")
    shape = tiny.draft_shape(draft_vocab_size=None if kept is None else len(kept), **layers)
    trained = tiny.drafter(shape)
    trained.set_draft_vocab(kept)
    folder = export_speculators(trained, target, str(tmp_path / "target"), tmp_path / "out", torch.float32)

    config = dflash.DFlashSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    _, loading = dflash.DFlashDraftModel.from_pretrained(folder, config=config, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    model = dflash.DFlashDraftModel.from_pretrained(folder, config=config).eval()
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(0, 260, (NUM_TOKENS,), generator=generator)
    feature = torch.randn(NUM_TOKENS, 64, generator=generator)
    theirs = their_logits(model, input_ids, feature)[:, 1:]
    drafter = load_speculators(folder)
    ours = our_logits(drafter, target, input_ids, feature)
    torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=2e-5)
    assert config.speculators_config.proposal_methods[0].speculative_tokens == drafter.num_predicted
    assert [i - 1 for i in model.target_layer_ids] == list(shape.target_layer_ids)
    if kept is None:
        assert model.d2t is None
    else:
        assert torch.equal(torch.arange(len(kept)) + model.d2t, kept)
        assert torch.equal(model.t2d.nonzero().flatten(), kept)


@torch.inference_mode()
def test_what_the_package_saves_is_read(tmp_path: Path) -> None:
    """Loaded there, saved there and loaded here, the drafter is the same; its target is asked for its layers."""
    target = tiny.target("llama", tmp_path / "target")
    trained = tiny.drafter(tiny.draft_shape(draft_vocab_size=len(KEPT)))
    trained.set_draft_vocab(KEPT)
    folder = export_speculators(trained, target, str(tmp_path / "target"), tmp_path / "out", torch.float32)
    model = dflash.DFlashDraftModel.from_pretrained(folder)
    del model.config.num_target_layers
    model.save_pretrained(tmp_path / "theirs")
    read = load_speculators(tmp_path / "theirs")
    assert read.shape == trained.shape
    assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in trained.state_dict().items())


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
@torch.inference_mode()
def test_what_the_package_saves_of_other_kinds_is_read(kind: str, tmp_path: Path) -> None:
    """As for DFlash; what it makes from scratch and saves is read, and drafts there what it drafts here."""
    target = tiny.target("llama", tmp_path / "target")
    trained = tiny.drafter(tiny.shape_of_kind(kind))
    folder = export_speculators(trained, target, str(tmp_path / "target"), tmp_path / "out", torch.float32)
    model_class = {"dflash2": dflash2.DFlash2DraftModel, "dspark": dspark.DSparkDraftModel}
    model = model_class[kind].from_pretrained(folder)
    del model.config.num_target_layers
    model.save_pretrained(tmp_path / "theirs")
    read = load_speculators(tmp_path / "theirs")
    assert read.shape == trained.shape
    assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in trained.state_dict().items())
