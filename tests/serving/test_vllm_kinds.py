"""DFlash2 and DSpark folders in vLLM's own classes: what they load and compute is ours. Part of `make test-vllm`.

No server can be started with them on a CPU: what runs here, and what is replaced, is said in `kinds_program`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from paceline.eval import engine_vllm
from paceline.export.check import read_drafter
from paceline.export.folder import num_drafted
from paceline.export.speculators import export_speculators
from paceline.export.zlab import export_zlab
from paceline.kernels.attention import BlockLayout
from paceline.kernels.linear_cross_entropy import Head
from paceline.models.draft import DFlashDrafter
from paceline.models.engine_limits import VLLM_METHODS
from paceline.models.target import Target
from tests import tiny
from tests.serving.test_vllm import HEAD_DIM, VARIABLE

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("kinds_program.py")
NUM_TOKENS, ANCHORS = 24, (5, 9, 14)
SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 8}
DRAFTERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dflash2": ("dflash2", {}, {}),
    "dflash2 three taps": ("dflash2", {"conv_kernel_size": 3, "conv_group_size": 4}, {"block_size": 7}),
    "dflash2 sliding": ("dflash2", {}, SLIDING),
    "dspark": ("dspark", {}, {}),
    "dspark sliding": ("dspark", {}, SLIDING),
    "dspark causal": ("dspark", {}, SLIDING | {"is_causal": True}),
    "dspark hidden": ("dspark", {"confidence_head_with_markov": False}, {"block_size": 7}),
    "dspark unsure": ("dspark", {"enable_confidence_head": False}, {}),
}
REFUSED = {"dspark gated": "gated", "dspark rnn": "rnn"}


def ours(drafter: DFlashDrafter, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What our classes make of the same blocks."""
    hidden, size = [], drafter.shape.block_size
    for anchor in ANCHORS:
        ids = torch.full((1, size), drafter.shape.mask_token_id)
        ids[0, 0] = inputs["ids"][anchor]
        context = drafter.context_kv(inputs["features"][:anchor], torch.arange(anchor))
        positions = torch.arange(anchor, anchor + size)[None]
        hidden.append(drafter(inputs["embedding"][ids], positions, context, BlockLayout.of_decode(anchor, size)))
    proposal = drafter.propose(torch.cat(hidden), Head(inputs["head"]), inputs["ids"][list(ANCHORS)])
    found = {"hidden": torch.cat(hidden), "ids": proposal.ids}
    return found | ({} if proposal.confidence is None else {"confidence": proposal.confidence})


@torch.inference_mode()
def test_vllm_s_classes_draft_what_ours_draft(tmp_path: Path) -> None:
    """Of either layout every tensor finds its place, and states, drafted tokens and confidences are ours; tensors of a
    head that vLLM does not have are refused."""
    assert VARIABLE in os.environ, f"{VARIABLE} has to name an interpreter with vLLM: `make test-vllm` makes one"
    python = Path(os.environ[VARIABLE])
    path = tiny.save(tiny.causal_lm("llama", head_dim=HEAD_DIM), tmp_path / "target")
    target, generator = Target.load(path, layer_ids=(0,)), torch.Generator().manual_seed(0)
    inputs = {
        "ids": torch.randint(0, 260, (NUM_TOKENS,), generator=generator),
        "features": torch.randn(NUM_TOKENS, 64, generator=generator),
        "anchors": torch.tensor(ANCHORS),
        "embedding": torch.randn(tiny.VOCAB, 32, generator=generator),
        "head": torch.randn(tiny.VOCAB, 32, generator=generator),
    }
    save_file(inputs, tmp_path / "inputs.safetensors")
    folders, wanted = {}, {}
    for name, (kind, options, fields) in DRAFTERS.items():
        drafter = tiny.drafter(tiny.shape_of_kind(kind, options, head_dim=HEAD_DIM, **fields))
        places = {
            f"{name}, zlab": export_zlab(drafter, tmp_path / f"{name} zlab", torch.float32, target=target),
            f"{name}, speculators": export_speculators(
                drafter, target, path, tmp_path / f"{name} speculators", torch.float32
            ),
        }
        for place, folder in places.items():
            folders[place] = {
                "path": str(folder),
                "method": VLLM_METHODS[kind],
                "block_size": drafter.shape.block_size,
            }
            wanted[place] = ours(read_drafter(folder), inputs)
            assert wanted[place]["ids"].shape[1] == num_drafted(kind, drafter.shape.block_size)
    for name, head in REFUSED.items():
        drafter = tiny.drafter(tiny.shape_of_kind("dspark", {"markov_head_type": head}, head_dim=HEAD_DIM))
        folder = export_zlab(drafter, tmp_path / name, torch.float32)
        folders[name] = {"path": str(folder), "method": "dspark", "block_size": drafter.shape.block_size}
    job = {
        "target": path,
        "inputs": str(tmp_path / "inputs.safetensors"),
        "folders": folders,
        "out": str(tmp_path / "out.safetensors"),
    }
    (tmp_path / "job.json").write_text(json.dumps(job), encoding="utf-8")
    environment = engine_vllm._environment(python) | {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    command = [str(python), str(PROGRAM), str(tmp_path / "job.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = load_file(job["out"])
    for place, tensors in wanted.items():
        assert {key for key in theirs if key.startswith(f"{place}.")} == {f"{place}.{key}" for key in tensors}
        assert torch.equal(theirs[f"{place}.ids"], tensors["ids"]), place
        for key in tensors.keys() - {"ids"}:
            torch.testing.assert_close(theirs[f"{place}.{key}"], tensors[key], atol=2e-5, rtol=2e-5)
    with safe_open(job["out"], framework="pt") as file:
        said = file.metadata()
    assert said.keys() == REFUSED.keys()
    assert all("no module or parameter named 'markov_head." in reason for reason in said.values())
