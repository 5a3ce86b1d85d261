"""Targets whose positions were stretched: what is trained and exported has the target's own angles."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline.cli.main import run as command_line
from paceline.export.zlab import load_zlab
from tests import tiny
from tests.toy import Toy, train

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture
def stretched(toy: Toy, tmp_path: Path) -> Path:
    """The toy target with YaRN: documents of up to 128 tokens, of 64 that it knew before."""
    folder = tmp_path / "target"
    tiny.save(tiny.causal_lm("llama", rope_parameters=YARN, max_position_embeddings=256), folder)
    for file in toy.target.iterdir():
        if not (folder / file.name).exists():
            shutil.copy(file, folder / file.name)
    return folder


def test_yarn_goes_from_the_target_through_training_into_the_export(
    toy: Toy, stretched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter's frequencies and scale are those that Transformers gives the target, before and after."""
    run_dir, out = tmp_path / "run", tmp_path / "out"
    _, lines = train(toy.config(run_dir, f"target.path={stretched}", "run.max_steps=4", "checkpoint.every_steps=4"))
    assert len(lines) == 4 and all(torch.tensor(line["loss"]).isfinite() for line in lines)
    record: dict[str, Any] = json.loads((run_dir / "run.json").read_text())["draft"]
    assert {key: record["rope"][key] for key in YARN} == YARN and record["max_position_embeddings"] == 256
    monkeypatch.setattr(sys, "argv", ["paceline", "export", str(run_dir), "--format", "zlab", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        command_line()
    assert not ended.value.code
    config = json.loads((out / "config.json").read_text())
    assert {key: config["rope_parameters"][key] for key in YARN} == YARN
    assert config["max_position_embeddings"] == 256
    drafter = load_zlab(out)
    rotary = transformers.AutoModelForCausalLM.from_pretrained(stretched).get_decoder().rotary_emb
    assert torch.equal(drafter.rotary.inv_freq, rotary.inv_freq)
    positions = torch.tensor([[0, 1, 63, 64, 200, 255]])
    wanted = rotary(torch.zeros(1, 1), positions)
    found = drafter.rotary.angles(positions[0], torch.float32)
    assert rotary.attention_scaling > 1.0
    for mine, its in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine[:, 0], its[0, :, : mine.shape[-1]])  # it has each angle twice
