"""The decode loop: the scripted runs of case E01, and real targets of every cache kind against plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
import transformers
from torch import Tensor

from paceline.dflash.acceptance import Acceptance
from paceline.dflash.anchors import make_anchors
from paceline.dflash.blocks import block_positions, make_noise_blocks
from paceline.errors import ConfigError, ModelError
from paceline.eval.decode import (
    CachedTarget,
    ContextDrafter,
    Decoded,
    decode,
    ngram_decode,
    plain_decode,
    speculative_decode,
)
from paceline.eval.forwards import ModelForward
from paceline.kernels.attention import BlockLayout
from paceline.models.draft import DFlashDrafter
from paceline.models.loading import load_text_model
from paceline.models.target import Target
from tests import tiny
from tests.unit.eval.learnt import LAYER_IDS

STOP = 2
SCRIPTS = {  # continuation, drafted rounds, max_new_tokens -> output, drafted tokens kept per round
    "stop_inside_block": ([5, 6, 2, 8, 8, 8, 8, 8], [[6, 2, 8]], 20, [5, 6, 2], [2]),
    "token_equal_to_mask_id": ([5, 7, 9, 7, 4, 2], [[7, 9, 7], [2, 8, 8]], 20, [5, 7, 9, 7, 4, 2], [3, 1]),
    "length_limit_inside_block": ([5, 6, 9, 4, 4, 4, 4], [[6, 9, 4]], 3, [5, 6, 9], [2]),
    "first_token_is_stop": ([2, 8, 8], [], 20, [2], []),
    "all_rejected": ([5, 6, 2], [[8, 8, 8], [8, 8, 8]], 20, [5, 6, 2], [0, 0]),
}


class ScriptedTarget:
    """Says the next token of a list, whatever it is shown."""

    def __init__(self, continuation: list[int]) -> None:
        self._continuation = continuation
        self._length = 0  # tokens of the continuation that the sequence holds

    def prefill(self, prompt_ids: Sequence[int]) -> int:
        return self._continuation[0]

    def verify(self, tokens: Sequence[int]) -> list[int]:
        self._base = self._length
        self._length += len(tokens)
        padded = [*self._continuation, *[0] * len(tokens)]
        return padded[self._base + 1 : self._length + 1]

    def keep(self, num_tokens: int) -> None:
        self._length = self._base + num_tokens

    def features(self) -> Tensor:
        return torch.empty(0)


class ScriptedDrafter:
    """Proposes given rounds."""

    num_predicted = 3

    def __init__(self, rounds: list[list[int]]) -> None:
        self._rounds = iter(rounds)

    def extend(self, tokens: Sequence[int], features: Callable[[], Tensor]) -> None:
        pass

    def propose(self, anchor: int) -> list[int]:
        return next(self._rounds)


class MostlyRightDrafter:
    """Knows the answer, and gets every token right with probability 3/4: rejections at every place of a block."""

    num_predicted = 4

    def __init__(self, answer: list[int]) -> None:
        self._answer = answer
        self._random = random.Random(0)
        self._length = 0
        self.features: list[Tensor] = []
        self.tokens: list[int] = []

    def extend(self, tokens: Sequence[int], features: Callable[[], Tensor]) -> None:
        self.features.append(features())
        self.tokens += tokens
        self._length = sum(len(f) for f in self.features) - len(self.features[0])

    def propose(self, anchor: int) -> list[int]:
        right = [*self._answer[self._length + 1 :], 0, 0, 0, 0][:4]
        return [token if self._random.random() < 0.75 else (token + 1) % 264 for token in right]


@pytest.mark.parametrize("name", SCRIPTS)
def test_generation_edges(name: str) -> None:
    """Stops, limits and mask ids inside a block cut the answer where plain decoding ends it (case E01)."""
    continuation, rounds, limit, output, kept = SCRIPTS[name]
    answer = decode(ScriptedTarget(continuation), ScriptedDrafter(rounds), [1, 3], limit, {STOP})
    assert answer.tokens == output
    assert answer.num_accepted_tokens == kept
    assert answer.stopped == (output[-1] == STOP)
    assert answer.acceptance.rounds == len(kept)
    assert answer.acceptance.committed == len(output) - 1
    plain = decode(ScriptedTarget(continuation), None, [1, 3], limit, {STOP})
    assert plain.tokens == output


def test_every_token_has_an_origin() -> None:
    """Accepted drafts and the target's own tokens alternate as the rounds did; a cut round has no token of its own."""
    answer = Decoded([7] * 8, Acceptance(3), [2, 0, 1])
    assert answer.origins() == ["prefill", "drafted", "drafted", "target", "target", "drafted", "target", "target"]
    answer = Decoded([7] * 6, Acceptance(3), [0, 3])  # all that were left
    assert answer.origins() == ["prefill", "target", "drafted", "drafted", "drafted", "target"]
    answer = Decoded([7] * 5, Acceptance(3), [0, 3])  # a stop token among the drafts, or the limit after them
    assert answer.origins() == ["prefill", "target", "drafted", "drafted", "drafted"]
    assert Decoded([7], Acceptance(3)).origins() == ["prefill"]
    assert Decoded([7] * 3, Acceptance(0)).origins() == ["prefill", "target", "target"]


def test_tokens_of_a_round_come_together() -> None:
    """Times are sums of the prefill and the rounds so far; plain rounds bring a token each, a cut one fewer."""
    drafted = Decoded([7] * 6, Acceptance(3), [2, 0, 2], prefill_s=1.0, rounds_s=[0.5, 0.25, 2.0])
    assert drafted.token_times_s() == [1.0, 1.5, 1.5, 1.5, 1.75, 3.75]
    plain = Decoded([7] * 3, Acceptance(0), prefill_s=1.0, rounds_s=[0.5, 0.25])
    assert plain.token_times_s() == [1.0, 1.5, 1.75]


@pytest.mark.parametrize("name", SCRIPTS)
def test_times_of_decoded_answers(name: str) -> None:
    """Every token has a time, none before the one before it, and the last is the answer's whole time."""
    continuation, rounds, limit, output, _ = SCRIPTS[name]
    for drafter in (ScriptedDrafter(rounds), None):
        answer = decode(ScriptedTarget(continuation), drafter, [1, 3], limit, {STOP})
        times = answer.token_times_s()
        assert len(times) == len(output) and times == sorted(times)
        assert times[-1] == pytest.approx(answer.seconds)


@pytest.mark.parametrize("name", SCRIPTS)
def test_origins_of_decoded_answers(name: str) -> None:
    """Tokens marked as drafted are those that a round proposed in their place, and as many as were accepted."""
    continuation, rounds, limit, output, kept = SCRIPTS[name]
    answer = decode(ScriptedTarget(continuation), ScriptedDrafter(rounds), [1, 3], limit, {STOP})
    origins = answer.origins()
    assert len(origins) == len(output)
    assert origins.count("drafted") == sum(kept)
    place = 1
    for drafted, num_kept in zip(rounds, kept, strict=True):
        assert output[place : place + num_kept] == drafted[:num_kept]
        assert origins[place : place + num_kept + 1] == [*["drafted"] * num_kept, "target"][: len(output) - place]
        place += num_kept + 1


def test_a_round_without_a_hit_commits_one_token() -> None:
    """Where every draft is rejected the acceptance length is 1 (case E01)."""
    continuation, rounds, limit, _, _ = SCRIPTS["all_rejected"]
    answer = decode(ScriptedTarget(continuation), ScriptedDrafter(rounds), [1, 3], limit, {STOP})
    assert answer.acceptance.length == 1.0


@pytest.mark.parametrize(("prompt", "limit"), [([], 4), ([1], 0)])
def test_nothing_to_decode_is_refused(prompt: list[int], limit: int) -> None:
    """An empty prompt and a limit below 1 are errors."""
    with pytest.raises(ValueError, match="at least 1"):
        decode(ScriptedTarget([5]), None, prompt, limit, {STOP})


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rejected_tokens_leave_no_trace(
    family: str,
    cached_target: Callable[[str], CachedTarget],
    target_folder: Callable[[str], str],
    prompts: list[list[int]],
) -> None:
    """After rejections of every length the target goes on as if it had never seen the rejected tokens.

    Both the answer and the features handed to the drafter equal those of one forward over the final sequence, also
    where keys are windowed (Gemma) or the past is a recurrent state (Qwen3.5).
    """
    target = cached_target(family)
    model = transformers.AutoModelForCausalLM.from_pretrained(target_folder(family))
    # with one token more no family has a best logit within 2e-4 of the next; without, gemma2 has one within 6e-6
    for prompt in [*prompts[:3], [*prompts[3], 6]]:
        plain = plain_decode(target, prompt, 40, ())
        drafter = MostlyRightDrafter(plain.tokens)
        with torch.inference_mode():
            answer = decode(target, drafter, prompt, 40, ())
            sequence = [*prompt, *answer.tokens]
            whole = model(torch.tensor([sequence]), output_hidden_states=True, use_cache=False)
        assert answer.tokens == plain.tokens
        assert 1 < answer.acceptance.length < 5
        greedy = whole.logits[0].argmax(-1).tolist()
        assert answer.tokens == greedy[len(prompt) - 1 : -1]
        seen = torch.cat(drafter.features)
        assert drafter.tokens == sequence[: len(seen)]
        wanted = torch.cat([whole.hidden_states[i + 1][0] for i in LAYER_IDS], dim=-1)
        torch.testing.assert_close(seen, wanted[: len(seen)], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_drafted_answers_equal_plain_ones(
    family: str,
    cached_target: Callable[[str], CachedTarget],
    trained_drafter: Callable[..., DFlashDrafter],
    prompts: list[list[int]],
) -> None:
    """A trained drafter changes the number of target forwards and not one token."""
    target, drafter = cached_target(family), trained_drafter(family)
    for prompt in prompts:
        plain, drafted = plain_decode(target, prompt, 40, ()), speculative_decode(target, drafter, prompt, 40, ())
        assert drafted.tokens == plain.tokens
        assert drafted.acceptance.committed == 39
        assert drafted.acceptance.rounds < 39


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stop", [False, True])
def test_copied_drafts_change_no_token(
    family: str, stop: bool, cached_target: Callable[[str], CachedTarget], prompts: list[list[int]]
) -> None:
    """Drafts from the text so far, and rounds with none, give the plain answer in fewer forwards."""
    target, accepted = cached_target(family), 0
    for prompt in [*prompts, [5, 6, 7, 8] * 4]:
        plain = plain_decode(target, prompt, 40, ())
        stop_ids = {plain.tokens[25]} if stop else set()
        copied = ngram_decode(target, 4, prompt, 40, stop_ids)
        assert copied.tokens == plain_decode(target, prompt, 40, stop_ids).tokens
        assert copied.stopped == stop
        assert copied.acceptance.committed == len(copied.tokens) - 1
        accepted += sum(copied.num_accepted_tokens)
    assert accepted > 0


def test_copied_drafts_need_no_taps(target_folder: Callable[[str], str]) -> None:
    """A target that delivers no features can be decoded with them; where nothing was drafted the round is plain."""
    target = CachedTarget.load(target_folder("llama"), ())
    lengths: list[int] = []
    verify = target.verify
    target.verify = lambda tokens: lengths.append(len(tokens)) or verify(tokens)  # type: ignore[method-assign]
    copied = ngram_decode(target, 3, [1, 2, 3, 4, 5], 20, ())
    assert copied.tokens == plain_decode(target, [1, 2, 3, 4, 5], 20, ()).tokens
    assert lengths[0] == 1
    with pytest.raises(ModelError, match="at most 507 new tokens fit"):
        ngram_decode(target, 3, [1, 2, 3, 4, 5], 508, ())


@pytest.mark.parametrize("block_size", [2, 3, 5])
def test_fewer_slots_than_trained(
    block_size: int,
    cached_target: Callable[[str], CachedTarget],
    trained_drafter: Callable[..., DFlashDrafter],
    prompts: list[list[int]],
) -> None:
    """A smaller block drafts fewer tokens at a time, and the answer stays."""
    target, drafter = cached_target("llama"), trained_drafter()
    plain = plain_decode(target, prompts[2], 30, ())
    drafted = speculative_decode(target, drafter, prompts[2], 30, (), block_size=block_size)
    assert drafted.tokens == plain.tokens
    assert len(drafted.acceptance.accepted) == block_size - 1
    assert max(drafted.num_accepted_tokens) <= block_size - 1


@pytest.mark.parametrize("block_size", [1, 6])
def test_a_block_size_that_was_not_trained_is_refused(
    block_size: int, cached_target: Callable[[str], CachedTarget], new_drafter: Callable[..., DFlashDrafter]
) -> None:
    """Blocks without a mask, and blocks longer than trained, are errors that name the trained size."""
    with pytest.raises(ModelError, match="blocks of 5 slots"):
        speculative_decode(cached_target("llama"), new_drafter(), [1], 4, (), block_size=block_size)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_size": 16}, "hidden_size 16 against 32"),
        ({"num_target_layers": 9}, "num_target_layers 9 against 5"),
        ({"target_layer_ids": (0, 2)}, r"target_layer_ids \(0, 2\) against \(1, 3\)"),
        ({"vocab_size": 41}, "vocab_size 41 against 272"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    fields: dict[str, object],
    named: str,
    cached_target: Callable[[str], CachedTarget],
    new_drafter: Callable[..., DFlashDrafter],
) -> None:
    """A drafter that was trained for another target is an error that names both values."""
    with pytest.raises(ModelError, match=named):
        speculative_decode(cached_target("llama"), new_drafter(**fields), [1], 4, ())


def test_the_last_position_can_be_used(
    cached_target: Callable[[str], CachedTarget], trained_drafter: Callable[..., DFlashDrafter]
) -> None:
    """An answer may end at the target's last position, and not run past it."""
    target, room = cached_target("llama"), 20
    prompt = [i % 264 for i in range(target.shape.max_position_embeddings - room)]
    drafted = speculative_decode(target, trained_drafter(), prompt, room, ())
    assert drafted.tokens == plain_decode(target, prompt, room, ()).tokens
    assert len(drafted.tokens) == room
    for run in (plain_decode, lambda *args: speculative_decode(args[0], trained_drafter(), *args[1:])):
        with pytest.raises(ModelError, match=f"at most {room} new tokens fit"):
            run(target, prompt, room + 1, ())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"is_causal": True},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 3, "is_causal": True},
    ],
    ids=["full", "causal", "sliding", "sliding_causal"],
)
def test_training_blocks_equal_decoded_blocks(
    fields: dict[str, object],
    target_folder: Callable[[str], str],
    cached_target: Callable[[str], CachedTarget],
    new_drafter: Callable[..., DFlashDrafter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hidden states of blocks in a packed row of documents are those of the decode path at the same anchors."""
    drafter, target = new_drafter(**fields), Target.load(target_folder("llama"), layer_ids=LAYER_IDS)
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(0, 264, (n,), generator=generator) for n in (11, 4, 19)]
    ids, starts = torch.cat(documents), (0, 11, 15, 34)
    anchors = make_anchors(torch.tensor([3, 9, 10, 13, 16, 25, 32]), 9)  # two slots are empty
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    with torch.no_grad():
        features = torch.cat([target.document_features(document) for document in documents])
        trained = drafter(
            target.embed(make_noise_blocks(ids, anchors, 5, drafter.shape.mask_token_id)),
            block_positions(anchors, positions, 5),
            drafter.context_kv(features, positions),
            BlockLayout.of_row(anchors, starts, 5, len(ids)),
        )
        hidden: list[Tensor] = []
        propose = drafter.propose
        monkeypatch.setattr(
            drafter, "propose", lambda states, *rest: hidden.append(states[0]) or propose(states, *rest)
        )
        for anchor in anchors.positions[:7].tolist():
            start = max(s for s in starts if s <= anchor)
            side = ContextDrafter(drafter, cached_target("llama"), 40, 5)
            for feature in features[start:anchor].split(3):  # as rounds deliver them
                side.extend([0] * len(feature), lambda feature=feature: feature)
            side.propose(int(ids[anchor]))
    torch.testing.assert_close(torch.stack(hidden), trained[:7], atol=1e-5, rtol=1e-5)


def test_the_compute_type_runs_under_autocast(
    cached_target: Callable[[str], CachedTarget],
    trained_drafter: Callable[..., DFlashDrafter],
    prompts: list[list[int]],
) -> None:
    """float32 weights computed in bfloat16 draft nearly as well, and the answer is the plain one."""
    target, drafter = cached_target("llama"), trained_drafter()
    plain = plain_decode(target, prompts[0], 40, ())
    wide = speculative_decode(target, drafter, prompts[0], 40, ())
    narrow = speculative_decode(target, drafter, prompts[0], 40, (), dtype=torch.bfloat16)
    assert narrow.tokens == plain.tokens
    assert abs(narrow.acceptance.length - wide.acceptance.length) < 0.5


# ------------------------------------------------------------------ a target in parts


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_target_in_parts_says_the_same_bits(family: str, target_folder: Callable[[str], str]) -> None:
    """Logits and features of a prompt, of drafted tokens, and after some of them were taken back."""
    folder = target_folder(family)
    split = CachedTarget.load(folder, LAYER_IDS, num_parts=3)
    whole = ModelForward(load_text_model(folder).requires_grad_(False), LAYER_IDS)  # kernels go by that too
    assert "in 3 parts" in split.kernel and split.device == torch.device("cpu")
    with torch.inference_mode():
        assert torch.equal(split.prefill_logits([5, 6, 7, 8]), whole.append([5, 6, 7, 8], last_only=True))
        for tokens, kept in (([9, 10, 11], 2), ([12, 13], 1), ([14], 1)):
            assert torch.equal(split.verify_logits(tokens), whole.append(tokens))
            split.keep(kept)
            whole.keep(kept)
            assert torch.equal(split.features(), torch.cat([tap[:kept] for tap in whole.taps], dim=-1))


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_drafted_answers_of_a_target_in_parts_equal_plain_ones(
    family: str, target_folder: Callable[[str], str]
) -> None:
    """Rejected tokens leave no trace, in layers that keep keys and in those that keep a state."""
    target = CachedTarget.load(target_folder(family), LAYER_IDS, num_parts=2)
    plain = plain_decode(target, [1, 2, 3], 40, set())
    drafter = MostlyRightDrafter(plain.tokens)
    answer = decode(target, drafter, [1, 2, 3], 40, set())
    assert answer.tokens == plain.tokens and 0 < answer.acceptance.rounds < 39


def test_more_parts_than_layers_or_gpus_are_refused(
    target_folder: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With how many there are."""
    with pytest.raises(ConfigError, match="5 layers of the target run"):
        CachedTarget.load(target_folder("llama"), LAYER_IDS, num_parts=6)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="and 2 GPUs are to be seen here"):
        CachedTarget.load(target_folder("llama"), LAYER_IDS, num_parts=3, device="cuda:0")
