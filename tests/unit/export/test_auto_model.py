"""The file of code in an exported folder: one call loads the drafter, and it computes what ours does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from paceline.export.auto_model import DFlashDraftModel
from paceline.export.folder import CODE_FILE
from paceline.export.zlab import export_zlab, load_zlab
from paceline.kernels.attention import BlockLayout
from paceline.models.draft import DFlashDrafter, DraftShape
from tests import tiny

NUM_CONTEXT = 11
SLIDING = ("sliding_attention",) * 2
KINDS = {
    "full": {},
    "causal": {"is_causal": True},
    "mixed": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
    "mixed causal": {
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 6,
        "is_causal": "sliding",
    },
    "narrow": {"layer_types": SLIDING, "sliding_window": 3},
    "sliding causal": {"layer_types": SLIDING, "sliding_window": 3, "is_causal": True},
    "yarn": {
        "rope": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
    },
}
PROGRAM = """
import sys, torch, transformers
drafter = transformers.AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True, dtype=torch.float32)
assert "paceline" not in sys.modules, "it has to stand alone"
inputs = torch.load(sys.argv[2], weights_only=True)
with torch.no_grad():
    torch.save(drafter(*inputs), sys.argv[3])
"""


def inputs_of(shape: DraftShape) -> tuple[torch.Tensor, torch.Tensor]:
    """A block's input and the features before it."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1, shape.block_size, shape.hidden_size, generator=generator)
    noise[:, 2:] = noise[:, 1:2]  # all masks are one row
    width = len(shape.target_layer_ids) * shape.hidden_size
    return noise, torch.randn(1, NUM_CONTEXT, width, generator=generator)


def ours(drafter: DFlashDrafter) -> torch.Tensor:
    """Hidden states of slots 1..K-1."""
    noise, feature = inputs_of(drafter.shape)
    size = drafter.shape.block_size
    positions = torch.arange(NUM_CONTEXT, NUM_CONTEXT + size)[None]
    context = drafter.context_kv(feature[0], torch.arange(NUM_CONTEXT))
    with torch.no_grad():
        return drafter(noise, positions, context, BlockLayout.of_decode(NUM_CONTEXT, size))


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_the_drafter_does(kind: str, tmp_path: Path) -> None:
    """Loaded from the folder the file's class gives our hidden states, whatever the mask and the rotation."""
    drafter = tiny.drafter(replace(tiny.draft_shape(), **KINDS[kind]))
    folder = export_zlab(drafter, tmp_path / "out", torch.float32, auto_map=True)
    with torch.no_grad():
        hidden = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32)(*inputs_of(drafter.shape))
    torch.testing.assert_close(hidden[:, 1:], ours(drafter), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_transformers_loads_the_folder_with_one_call(tmp_path: Path) -> None:
    """Another process without this package gets the drafter from `AutoModel`, offline, and the same hidden states."""
    drafter = tiny.drafter(replace(tiny.draft_shape(), **KINDS["mixed"]))
    folder = export_zlab(drafter, tmp_path / "out", torch.float32, auto_map=True)
    torch.save(inputs_of(drafter.shape), tmp_path / "inputs.pt")
    files = [str(folder), str(tmp_path / "inputs.pt"), str(tmp_path / "hidden.pt")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, *files]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    hidden = torch.load(tmp_path / "hidden.pt", weights_only=True)
    torch.testing.assert_close(hidden[:, 1:], ours(drafter), rtol=1e-4, atol=1e-5)


def test_features_are_those_of_the_targets_own_hidden_states() -> None:
    """Taps are outputs of layers counted from 0: entry i + 1 of what Transformers returns (case P02)."""
    stack = tuple(torch.full((1, 1, 1), float(value)) for value in (0, 1, 3, 6, 10, 1500))
    model = DFlashDraftModel.__new__(DFlashDraftModel)
    torch.nn.Module.__init__(model)
    for taps, wanted in {(0, 2): [1.0, 6.0], (1, 3): [3.0, 10.0]}.items():
        model.target_layer_ids = list(taps)
        assert model.context_feature(stack).flatten().tolist() == wanted


def test_other_readers_see_no_difference(tmp_path: Path) -> None:
    """Unasked nothing is written; asked for, one key and one file are added, and no code is run unasked."""
    drafter = tiny.drafter()
    plain = export_zlab(drafter, tmp_path / "plain")
    coded = export_zlab(drafter, tmp_path / "coded", auto_map=True)
    assert {file.name for file in plain.iterdir()} | {CODE_FILE} == {file.name for file in coded.iterdir()}
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (plain, coded))
    assert second.pop("auto_map") == {"AutoModel": "dflash.DFlashDraftModel"}
    assert first == second
    assert (plain / "model.safetensors").read_bytes() == (coded / "model.safetensors").read_bytes()
    assert load_zlab(coded).shape == load_zlab(plain).shape
    assert type(transformers.AutoConfig.from_pretrained(coded)) is transformers.Qwen3Config
    export_zlab(drafter, coded)
    assert not (coded / CODE_FILE).exists()  # an earlier export is replaced whole
