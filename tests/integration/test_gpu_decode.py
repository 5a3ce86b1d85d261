"""Decoding on a CUDA device: graphs over reserved room say what the model says; skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.eval.decode import CachedTarget, ContextDrafter, decode, ngram_decode, plain_decode, speculative_decode
from paceline.eval.sampling import Sampling
from paceline.eval.static import STATIC, StaticForward
from paceline.kernels.static_attention import BUCKET
from paceline.models.draft import DFlashDrafter
from tests import tiny
from tests.unit.eval import learnt
from tests.unit.eval.test_lean import tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, DFlashDrafter]:
    """A target's folder, and a drafter that has half learnt it on the CPU."""
    model = tiny.causal_lm(request.param, max_position_embeddings=4096)
    folder = tiny.save(model, tmp_path_factory.mktemp(request.param))
    return folder, learnt.train(learnt.new_drafter(folder), folder)


def on_gpu(folder: str, dtype: torch.dtype = torch.float32) -> CachedTarget:
    target = CachedTarget.load(folder, learnt.LAYER_IDS, dtype=dtype, device="cuda")
    assert target.kernel == STATIC
    return target


def test_answers_are_those_of_the_cpu(pair: tuple[str, DFlashDrafter]) -> None:
    """In float32 plain, n-gram and drafted answers are the CPU's, and so is what each verification accepts."""
    folder, drafter = pair
    there, here = on_gpu(folder), CachedTarget.load(folder, learnt.LAYER_IDS)
    mine = learnt.train(learnt.new_drafter(folder), folder, 0)
    mine.load_state_dict(drafter.state_dict())
    mine = mine.cuda().requires_grad_(False)
    accepted = 0
    for prompt in learnt.prompts() * 2:  # the second time everything is replayed
        wanted = speculative_decode(here, drafter, prompt, 60, ())
        plain = plain_decode(there, prompt, 60, ())
        drafted = speculative_decode(there, mine, prompt, 60, ())
        assert plain.tokens == drafted.tokens == wanted.tokens == ngram_decode(there, 4, prompt, 60, ()).tokens
        assert drafted.num_accepted_tokens == wanted.num_accepted_tokens
        assert drafted.draft_s > 0 and drafted.verify_s > 0
        accepted += sum(drafted.num_accepted_tokens)
    assert accepted > 20


def test_graphs_are_recorded_and_their_answers_those_without(pair: tuple[str, DFlashDrafter]) -> None:
    """A round replays both sides' graphs; a grown context without graphs drafts the same."""
    folder, drafter = pair
    target, drafter = on_gpu(folder), drafter.cuda()
    with torch.inference_mode():
        side = ContextDrafter(drafter, target, 80, 5)
        grown = decode(target, side, learnt.prompts()[1], 60, ())
    drafted = speculative_decode(target, drafter, learnt.prompts()[1], 60, ())
    assert drafted.num_accepted_tokens == grown.num_accepted_tokens and drafted.tokens == grown.tokens
    forward = target._forward
    assert isinstance(forward, StaticForward)
    assert all(runner.is_replaying for runner in forward._replayed.values()) and forward._replayed
    assert target.static_side(drafter, 5)._round.is_replaying
    drafter.cpu()


def test_room_that_grows_changes_nothing(pair: tuple[str, DFlashDrafter]) -> None:
    """A sequence past the first reserved positions says what one that had the room from the start says."""
    folder, _ = pair
    prompt = tokens(BUCKET - 10)
    reserved, grown = on_gpu(folder), on_gpu(folder)
    reserved.reserve(4 * BUCKET, 8)
    with torch.inference_mode():
        answers = [decode(target, None, prompt, 60, ()).tokens for target in (reserved, grown)]
    assert answers[0] == answers[1]


def test_drawn_answers_are_the_same_with_and_without_drafts(pair: tuple[str, DFlashDrafter]) -> None:
    """At a temperature the same draws give the same tokens."""
    folder, drafter = pair
    target, drafter = on_gpu(folder), drafter.cuda()
    for number, prompt in enumerate(learnt.prompts()):
        draws = Sampling(0.8, seed=3).of_prompt(number)
        plain = plain_decode(target, prompt, 50, (), draws)
        assert speculative_decode(target, drafter, prompt, 50, (), sampling=draws).tokens == plain.tokens
    drafter.cpu()


def test_a_block_cut_short_drafts_from_its_first_slots(pair: tuple[str, DFlashDrafter]) -> None:
    """Block sizes below the trained one have sides of their own, and lose nothing."""
    folder, drafter = pair
    target, drafter = on_gpu(folder), drafter.cuda()
    plain = plain_decode(target, learnt.prompts()[2], 50, ())
    for block_size in (2, 3, 5):
        answer = speculative_decode(target, drafter, learnt.prompts()[2], 50, (), block_size)
        assert answer.tokens == plain.tokens and max(answer.num_accepted_tokens) < block_size
    drafter.cpu()


def test_taps_are_the_targets_own_states(tmp_path: Path) -> None:
    """The comparison at the start of a run passes on the device, packed and per document."""
    from paceline.train.target import check_taps

    for family in ("llama", "qwen3", "gemma3", "qwen3_5"):
        check_taps(tiny.target(family, tmp_path / family, device="cuda"))
