"""`paceline check --engine speculators` with the real package. Skipped without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.eval.engine_speculators import check_with_speculators
from paceline.export.speculators import export_speculators, load_speculators
from paceline.models.target import Target
from tests import tiny

pytest.importorskip("speculators.models.dflash", exc_type=ImportError)
pytestmark = pytest.mark.slow

SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 64}


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
@pytest.mark.parametrize("fields", [{}, SLIDING, SLIDING | {"is_causal": True}], ids=["full", "sliding", "causal"])
def test_the_package_computes_what_we_decode(fields: dict[str, Any], kind: str, tmp_path: Path) -> None:
    """Every tensor is loaded, every layer's states are those of our decode path, and the tokens that we draft are the
    best there, with the same confidence."""
    target = Target.load(tiny.save(tiny.causal_lm("qwen3"), tmp_path / "target"), layer_ids=(1, 3))
    drafter = tiny.drafter(tiny.shape_of_kind(kind, **fields))
    folder = export_speculators(drafter, target, str(tmp_path / "target"), tmp_path / "out", torch.float32)
    seen = check_with_speculators(folder, load_speculators(folder), target)
    assert not any(seen.loading.values())
    heads = {"dflash": [], "dflash2": ["drafts"], "dspark": ["confidence", "drafts"]}[kind]
    assert [row.name for row in seen.layers] == [*heads, "layer 0", "layer 1"]
    assert all(row.is_equal for row in seen.layers)


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_another_selector_or_bias_is_told(kind: str, tmp_path: Path) -> None:
    """States alone would not show it: tokens drafted with other weights behind the layers are not the best there."""
    target = Target.load(tiny.save(tiny.causal_lm("qwen3"), tmp_path / "target"), layer_ids=(1, 3))
    drafter = tiny.drafter(tiny.shape_of_kind(kind)).requires_grad_(False)
    folder = export_speculators(drafter, target, str(tmp_path / "target"), tmp_path / "out", torch.float32)
    book = "candidate_selector.successor_codebook" if kind == "dflash2" else "markov_head.markov_w2.weight"
    drafter.get_parameter(book).mul_(-1.0)
    seen = check_with_speculators(folder, drafter, target)
    assert {row.name for row in seen.layers if not row.is_equal} == {"drafts"}


def test_a_short_window_is_not_compared(tmp_path: Path) -> None:
    """The package's window counts from the anchor, so that its states are no judge where it cuts the context."""
    target = Target.load(tiny.save(tiny.causal_lm("qwen3"), tmp_path / "target"), layer_ids=(1, 3))
    drafter = tiny.drafter(tiny.draft_shape(**(SLIDING | {"sliding_window": 6})))
    folder = export_speculators(drafter, target, str(tmp_path / "target"), tmp_path / "out", torch.float32)
    seen = check_with_speculators(folder, load_speculators(folder), target)
    assert not any(seen.loading.values())
    assert seen.layers == []
