"""Linear layers in fp8: how far they are from what they replace, and what they say about it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.models.fp8 import LARGEST, Fp8Linear, quantize_rows, use_fp8
from tests import tiny


def test_rows_are_quantised_to_the_formats_largest() -> None:
    """Each row's largest value becomes 448, an all-zero row stays zero, and no value moves by more than a sixteenth."""
    rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 6)[:, None]
    rows[3] = 0
    quantised, scale = quantize_rows(rows)
    assert quantised.dtype == torch.float8_e4m3fn and scale.shape == (6, 1)
    assert quantised.float().abs().amax(1).tolist() == [LARGEST] * 3 + [0.0] + [LARGEST] * 2
    back = quantised.float() * scale
    assert ((back - rows).abs() <= rows.abs() / 16 + rows.abs().amax(1, keepdim=True) * 2**-16).all()


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_near_the_one_it_replaces(bias: bool) -> None:
    """Each product is off by the rounding of its own row and channel: outliers elsewhere do it no harm."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias)
    with torch.no_grad():
        linear.weight[5] *= 1e3
    x = torch.randn(2, 7, 64)
    x[0, 3] *= 1e4
    found, wanted = Fp8Linear(linear)(x), linear(x)
    assert found.shape == wanted.shape and found.dtype == x.dtype
    size = x.norm(dim=2, keepdim=True) * linear.weight.norm(dim=1)
    assert ((found - wanted).abs() / size).max() < 0.02
    assert (found - wanted).abs().max() > 0


def test_only_layers_whose_sizes_fit_are_replaced() -> None:
    """Sides that are no multiple of 16 stay; so do modules that only look like linear layers."""

    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(32, 16), nn.Sequential(nn.Linear(32, 20), Other(32, 32)), nn.Linear(16, 16))
    assert use_fp8(model) == 2
    assert [type(m).__name__ for m in model.modules()][1:] == [
        "Fp8Linear",
        "Sequential",
        "Linear",
        "Other",
        "Fp8Linear",
    ]


def test_a_target_says_what_fp8_does_to_its_taps(tmp_path: Path) -> None:
    """Every linear layer multiplies in fp8, and the note has the error that this makes."""
    folder = tmp_path / "llama"
    plain = tiny.target("llama", folder)
    target = tiny.target("llama", folder, fp8=True)
    assert target.quantization_note is not None
    assert (
        "21 linear layers multiply in fp8; on a probe taps differ from those in float32 by" in target.quantization_note
    )
    said = float(target.quantization_note.rsplit(" ", 1)[1])
    ids = torch.arange(5, 45)
    found, wanted = target.document_features(ids), plain.document_features(ids)
    error = float((found - wanted).norm() / wanted.norm())
    assert 0.5 * said < error < 2 * said and 0.005 < said < 0.2
    assert plain.quantization_note is None


def test_fp8_is_no_other_target(tmp_path: Path) -> None:
    """The fingerprint is that of the weights that were loaded, so that other weights are still told apart."""
    folder = tmp_path / "llama"
    plain, fp8 = tiny.target("llama", folder), tiny.target("llama", folder, fp8=True)
    assert fp8.fingerprint() == plain.fingerprint()
    other = tiny.causal_lm("llama")
    with torch.no_grad():
        other.get_decoder().layers[1].mlp.up_proj.weight.mul_(1.5)
    tiny.save(other, tmp_path / "other")
    assert tiny.target("llama", tmp_path / "other", fp8=True).fingerprint() != plain.fingerprint()
