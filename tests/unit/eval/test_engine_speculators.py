"""Comparing with the package `speculators`, played here by a program that knows what it would say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.errors import ConfigError, ServerError
from paceline.eval import engine_speculators
from paceline.eval.engine_speculators import check_with_speculators, has_speculators
from paceline.models.target import Target
from tests import tiny

PROGRAM = """
import json, sys, torch
from safetensors.torch import load_file, save_file
blocks = load_file(sys.argv[2])
assert sorted(blocks) == ["anchors", "features", "input_ids"]
found = {"missing_keys": ["fc.weight"], "unexpected_keys": [], "mismatched_keys": []}
states = {f"layer {i}": torch.zeros(len(blocks["anchors"]), 4, 32) for i in range(2)}
save_file(states, sys.argv[3], metadata={"version": "0", "loading": json.dumps(found)})
"""


def test_other_states_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States of zeros differ by the whole, in every layer; what the loader said is passed on."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.setattr(engine_speculators, "PROGRAM", tmp_path / "program.py")
    target: Target = tiny.target("llama", tmp_path / "target", layer_ids=(1, 3))
    seen = check_with_speculators(tmp_path, tiny.drafter(), target)
    assert [(row.name, row.difference, row.is_equal) for row in seen.layers] == [
        ("layer 0", 1.0, False),
        ("layer 1", 1.0, False),
    ]
    assert seen.loading["missing_keys"] == ["fc.weight"]
    (tmp_path / "program.py").write_text("raise SystemExit('out of luck')", encoding="utf-8")
    with pytest.raises(ServerError, match="out of luck"):
        check_with_speculators(tmp_path, tiny.drafter(), target)


def test_drafts_are_compared_where_a_kind_has_more_than_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program gets the tokens that we draft, and what lies between them and its best is a difference."""
    told = """blocks = load_file(sys.argv[2])
assert blocks["drafts"].shape == (3, 4) and blocks["drafts"].max() < 272
states = {"drafts": torch.zeros(3, 4), "confidence": torch.zeros(3, 4)}
states["drafts"][1, 2] = 0.5
found = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
save_file(states, sys.argv[3], metadata={"version": "0", "loading": json.dumps(found)})
"""
    imports = "import json, sys, torch\nfrom safetensors.torch import load_file, save_file\n"
    (tmp_path / "program.py").write_text(imports + told, encoding="utf-8")
    monkeypatch.setattr(engine_speculators, "PROGRAM", tmp_path / "program.py")
    target: Target = tiny.target("llama", tmp_path / "target", layer_ids=(1, 3))
    seen = check_with_speculators(tmp_path, tiny.drafter(tiny.shape_of_kind("dspark")), target)
    confidence, drafts = seen.layers
    assert (drafts.name, drafts.difference, drafts.is_equal) == ("drafts", 0.5, False)
    assert confidence.name == "confidence" and 0.1 < confidence.difference <= 1.0


def test_an_interpreter_that_is_none_is_told(tmp_path: Path) -> None:
    """A path that cannot be run is the user's error."""
    with pytest.raises(ConfigError, match="no Python interpreter"):
        has_speculators(tmp_path / "python")
    assert has_speculators(Path(sys.executable)) in (True, False)
