"""Trained drafters in real vLLM: every verification accepts what our decoder accepts, or the fault is found.

`make test-vllm` installs vLLM and runs this; it needs minutes, as every decoding starts an engine of its own.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import serving
from paceline.errors import ServerError
from paceline.eval.decode import CachedTarget, Decoded, speculative_decode
from paceline.eval.engine_vllm import Vllm, VllmCheck, VllmPass, check_servable, compare, find_vllm
from paceline.export.speculators import export_speculators
from paceline.export.zlab import export_zlab
from paceline.models.draft import DFlashDrafter
from paceline.models.target import Target
from tests import tiny, toy
from tests.unit.eval import learnt

pytestmark = pytest.mark.slow

VARIABLE = "PACELINE_VLLM_PYTHON"
LIMIT = learnt.ANSWER
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding_causal": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6, "is_causal": True},
}
HEAD_DIM = 32
"""The smallest that vLLM's attention takes on a CPU."""


@pytest.fixture(scope="module")
def engine() -> Vllm:
    """vLLM, in the interpreter that the make verb names. Without one this fails rather than skips."""
    assert VARIABLE in os.environ, f"{VARIABLE} has to name an interpreter with vLLM: `make test-vllm` makes one"
    return find_vllm(Path(os.environ[VARIABLE]))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target with heads that vLLM takes."""
    return Path(tiny.save(tiny.causal_lm("llama", head_dim=HEAD_DIM), tmp_path_factory.mktemp("serving") / "target"))


@pytest.fixture(scope="module")
def trained(target: Path) -> Callable[[str], DFlashDrafter]:
    """A drafter of a kind that has learnt much of the target's answers."""

    @functools.cache
    def train(kind: str) -> DFlashDrafter:
        drafter = learnt.new_drafter(str(target), head_dim=HEAD_DIM, **KINDS[kind])
        return learnt.train(drafter, str(target), num_steps=150)

    return train


@pytest.fixture(scope="module")
def ours(target: Path, trained: Callable[[str], DFlashDrafter]) -> Callable[[str], list[Decoded]]:
    """Our own answers with a drafter of a kind."""

    @functools.cache
    def decode(kind: str) -> list[Decoded]:
        cached = CachedTarget.load(str(target), learnt.LAYER_IDS)
        return [speculative_decode(cached, trained(kind), prompt, LIMIT, ()) for prompt in learnt.prompts()]

    return decode


@pytest.fixture(scope="module")
def decode(engine: Vllm, target: Path) -> Callable[[Path | None], VllmPass]:
    """vLLM's answers, with the drafter in a folder or without one."""
    return lambda draft: engine.decode(
        target, draft, learnt.prompts(), num_speculative_tokens=4, max_new_tokens=LIMIT, timeout_s=300
    )


@pytest.fixture(scope="module")
def plain(decode: Callable[[Path | None], VllmPass]) -> VllmPass:
    """vLLM's answers without a drafter."""
    return decode(None)


@pytest.fixture(scope="module")
def against_ours(
    decode: Callable[[Path | None], VllmPass], plain: VllmPass, ours: Callable[[str], list[Decoded]]
) -> Callable[[Path, str], VllmCheck]:
    """A folder in vLLM against the trained drafter of a kind in our decoder."""
    return lambda draft, kind: compare(ours(kind), plain, decode(draft), LIMIT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_vllm_accepts_what_our_decoder_accepts(
    layout: str,
    kind: str,
    target: Path,
    trained: Callable[[str], DFlashDrafter],
    against_ours: Callable[[Path, str], VllmCheck],
    tmp_path: Path,
) -> None:
    """Answers are the same with and without the drafter, and so is the number of accepted tokens at every step."""
    if layout == "zlab":
        folder = export_zlab(trained(kind), tmp_path / "draft", torch.float32)
    else:
        start = Target.load(str(target), layer_ids=(0,))
        folder = export_speculators(trained(kind), start, str(target), tmp_path / "draft", torch.float32)
    found = against_ours(folder, kind)
    assert found.tokens_equal and found.steps_equal, str(found.difference)
    assert found.acceptance_vllm == found.acceptance_ours > 2
    assert len({n for steps in found.steps_vllm for n in steps}) > 3


def _move_taps(config: dict[str, Any]) -> None:
    draft = config["dflash_config"]
    draft["target_layer_ids"] = [i - 1 for i in draft["target_layer_ids"]]


def _change_mask(config: dict[str, Any]) -> None:
    config["dflash_config"]["mask_token_id"] -= 1


def _change_theta(config: dict[str, Any]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 1e6


def _flip_causality(config: dict[str, Any]) -> None:
    config["is_causal"] = not config["is_causal"]


@pytest.mark.parametrize("tamper", [_move_taps, _change_mask, _change_theta, _flip_causality])
def test_a_folder_that_says_something_else_is_found_out(
    tamper: Callable[[dict[str, Any]], None],
    trained: Callable[[str], DFlashDrafter],
    against_ours: Callable[[Path, str], VllmCheck],
    tmp_path: Path,
) -> None:
    """vLLM serves it without a word and with the right tokens; the lists of accepted tokens differ."""
    folder = export_zlab(trained("full"), tmp_path / "draft", torch.float32)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    tamper(config)
    path.write_text(json.dumps(config))
    found = against_ours(folder, "full")
    assert found.tokens_equal, str(found.difference)
    assert not found.steps_equal and found.difference is not None and found.difference.what == "steps"
    print(f"{tamper.__name__}: {found.acceptance_ours:.3f} becomes {found.acceptance_vllm:.3f}; {found.difference}")


def test_a_mixture_of_layer_types_is_refused_by_vllm_itself(
    engine: Vllm, target: Path, decode: Callable[[Path | None], VllmPass], tmp_path: Path
) -> None:
    """What `check_servable` refuses on a CPU does not start there, and the message holds vLLM's own reason."""
    fields = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6, "head_dim": HEAD_DIM}
    drafter = learnt.new_drafter(str(target), **fields)
    assert engine.on_cpu
    with pytest.raises(ServerError, match="Triton"):
        decode(export_zlab(drafter, tmp_path / "draft"))
    with pytest.raises(ValueError, match="mixture"):
        check_servable(drafter, target, engine)


def test_one_script_goes_from_chats_to_vllm(engine: Vllm, target: Path, tmp_path: Path) -> None:
    """The benchmark prepares, trains, exports both layouts and serves them, equal step by step."""
    folder, chats = tmp_path / "target", tmp_path / "chats.jsonl"
    shutil.copytree(target, folder)
    for file in (toy.ASSETS / "toy_tokenizer").iterdir():
        shutil.copy(file, folder / file.name)
    shutil.copy(toy.ASSETS / "templates" / "chatml_plain.jinja", folder / "chat_template.jinja")
    chats.write_text("".join(json.dumps(row) + "\n" for row in toy.conversations()))
    files = ["--target", str(folder), "--chats", str(chats), "--prompts", str(chats), "--out", str(tmp_path / "out")]
    sizes = ["--epochs", "2", "--num-prompts", "4", "--max-new-tokens", "24", "--threads", "1"]
    result = serving.main(["--python", str(engine.python), *files, *sizes])
    assert json.loads((tmp_path / "out").read_text()) == json.loads(json.dumps(result))
    assert str(tmp_path) not in (tmp_path / "out").read_text()
    for layout in ("zlab", "speculators"):
        found = result["layouts"][layout]
        assert found["steps_equal"] and found["tokens_equal"] and found["verifications_vllm"] > 0
