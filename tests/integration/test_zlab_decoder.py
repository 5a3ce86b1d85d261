"""The public DFlash decoder (PyPI `dflash`) as judge: it loads an exported folder and drafts what we draft."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

from paceline.eval.decode import CachedTarget, speculative_decode
from paceline.export.zlab import export_zlab, load_zlab
from paceline.models.target import Target
from tests import tiny
from tests.unit.eval import learnt

pytestmark = pytest.mark.slow

REQUIREMENT = "dflash==0.1.0"


@pytest.fixture(scope="module")
def zlab(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Its model file, from a fresh install without dependencies: it needs torch and Transformers alone."""
    place = tmp_path_factory.mktemp("dflash")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{' '.join(command)}: {result.stderr}"
    sys.path.insert(0, str(place))
    try:
        module = importlib.import_module("dflash.model")
    finally:
        sys.path.remove(str(place))
    module._cuda_time = time.perf_counter  # its clock waits for a GPU; nothing else is replaced
    return module


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("llama", {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}),
        ("llama", {"layer_types": ("sliding_attention",) * 2, "sliding_window": 4, "is_causal": True}),
        ("gemma2", {}),  # scales its embedding and caps its logits, which the folder has to say
        ("llama", {"kind": "dflash2"}),
        ("llama", {"kind": "dflash2", "layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}),
        ("gemma2", {"kind": "dflash2"}),
    ],
    ids=["full", "sliding", "sliding_causal", "gemma2", "dflash2", "dflash2_sliding", "dflash2_gemma2"],
)
def test_the_public_decoder_accepts_the_same_drafts(
    family: str, fields: dict[str, object], zlab: ModuleType, tmp_path: Path
) -> None:
    """Answers and tokens per round of the public decoder on the exported folder are those of our loop.

    Rounds that start less than a block before the limit are left out: there the public decoder drafts a shorter block,
    whose slots see fewer others.
    """
    torch.set_num_threads(1)
    folder, limit = tiny.save(tiny.causal_lm(family), tmp_path / "target"), 60
    trained = learnt.train(learnt.new_drafter(folder, **fields), folder)
    start = Target.load(folder, layer_ids=(0,))
    exported = export_zlab(trained, tmp_path / "draft", torch.float32, target=start)

    public_class = zlab.DFlash2DraftModel if trained.shape.kind == "dflash2" else zlab.DFlashDraftModel
    public_drafter = public_class.from_pretrained(exported, dtype=torch.float32).eval()
    public_target = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    target, drafter = CachedTarget.load(folder, learnt.LAYER_IDS), load_zlab(exported)
    lengths = []
    for prompt in learnt.prompts():
        ours = speculative_decode(target, drafter, prompt, limit, ())
        theirs = zlab.dflash_generate(
            public_drafter, public_target, torch.tensor([prompt]), limit, stop_token_ids=None, return_stats=True
        )
        assert theirs.output_ids[0, len(prompt) :].tolist() == ours.tokens
        committed, rounds = 1, []
        for num_accepted in ours.num_accepted_tokens:
            if committed + drafter.shape.block_size > limit:
                break
            rounds.append(num_accepted + 1)
            committed += num_accepted + 1
        assert theirs.acceptance_lengths[: len(rounds)] == rounds
        lengths += rounds
    assert len(set(lengths)) > 2
    # a selector that has not learnt, as here, turns some right tokens into wrong ones
    assert sum(lengths) / len(lengths) > (1.2 if trained.shape.kind == "dflash2" else 1.3)
