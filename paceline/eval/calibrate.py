"""What this machine does best, measured in seconds: compute threads, the cost of a verification, the block to decode.

A block of k tokens is worth drafting only where verifying it costs hardly more than one token. That ratio depends on
the processor, the thread count and what else runs, so it is measured rather than known: on two cores of an EPYC six
tokens cost 1.0 times one, sixteen 1.5 times.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from paceline.eval.decode import CachedTarget, ContextDrafter
from paceline.models.draft import DFlashDrafter

MAX_VERIFIED = 16
"""Tokens of the largest verification that is timed."""
USUAL_SHARES = (0.5, 0.83, 0.86, 0.83, 0.88, 0.47, 0.43)
"""Accepted share by slot of a drafter that the demo has trained (held-out prompts, blocks of 8)."""
MIN_TRAINED_BLOCK, NEARLY = 4, 0.97
SWEEP_STEP = 4 / 3
NUM_CONTEXT = 128
"""Tokens in front of it."""
WORTH_A_THREAD = 0.9
"""More threads are used only where they bring the time down to this share: a core that another process uses costs more
than it gives, as threads wait for each other after every product."""


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_candidates(cores: int) -> list[int]:
    """Thread counts worth timing: powers of two, and all cores."""
    powers = (1 << i for i in range(cores.bit_length()))
    return sorted({n for n in powers if n <= cores} | {cores})


def time_threads(work: Callable[[], object], candidates: Sequence[int], repeats: int = 4) -> dict[int, float]:
    """Mean milliseconds of `work` with each thread count, in turns, so that a busy moment hits all alike.

    The mean and not the best: threads on a busy core are sometimes fast and often very slow. The thread count is as
    before afterwards.
    """
    before = torch.get_num_threads()
    times: dict[int, list[float]] = {n: [] for n in candidates}
    try:
        for repeat in range(repeats + 1):
            for n in candidates:
                torch.set_num_threads(n)
                elapsed = _milliseconds(work)
                if repeat:  # the first turn starts threads and fills caches
                    times[n].append(elapsed)
    finally:
        torch.set_num_threads(before)
    return {n: statistics.fmean(values) for n, values in times.items()}


def choose_threads(milliseconds: Mapping[int, float]) -> int:
    """The fewest threads that no larger number beats clearly (`WORTH_A_THREAD`)."""
    chosen, *others = sorted(milliseconds)
    for n in others:
        if milliseconds[n] < WORTH_A_THREAD * milliseconds[chosen]:
            chosen = n
    return chosen


def decoding_work(target: CachedTarget) -> Callable[[], object]:
    """A prompt and a few verifications: what `time_threads` times for decoding."""
    prompt = _random_tokens(target, 96)

    @torch.inference_mode()
    def work() -> None:
        target.prefill(prompt)
        for _ in range(3):
            target.verify(prompt[:6])
            target.keep(1)

    return work


@torch.inference_mode()
def time_verification(target: CachedTarget, repeats: int = 3) -> dict[int, float]:
    """Median milliseconds of a target forward over 1 to `MAX_VERIFIED` tokens behind `NUM_CONTEXT` others."""
    tokens = _random_tokens(target, NUM_CONTEXT)
    target.prefill(tokens)

    def work(k: int) -> Callable[[], None]:
        def verify() -> None:
            target.verify(tokens[:k])
            target.keep(1)

        return verify

    return _medians({k: work(k) for k in range(1, MAX_VERIFIED + 1)}, repeats)


@torch.inference_mode()
def time_prefill(target: CachedTarget, num_tokens: int = 96, repeats: int = 2) -> float:
    """Median milliseconds of a prompt."""
    tokens = _random_tokens(target, num_tokens)
    return _medians({0: lambda: target.prefill(tokens)}, repeats)[0]


@torch.inference_mode()
def time_drafting(target: CachedTarget, drafter: DFlashDrafter, block_size: int, repeats: int = 5) -> float:
    """Median milliseconds to add three context tokens and draft a block."""
    tokens = _random_tokens(target, NUM_CONTEXT)
    target.prefill(tokens)
    features = target.features()
    side = ContextDrafter(drafter, target, len(tokens) + 3 * (repeats + 1), block_size)
    side.extend(tokens, lambda: features)

    def work() -> None:
        side.extend(tokens[:3], lambda: features[:3])
        side.propose(tokens[0])

    return _medians({0: work}, repeats)[0]


def choose_trained_block(verify_ms: Mapping[int, float], draft_ms: float) -> int:
    """Slots to train with, before anything is known of the drafter: the fewest that are nearly best (`NEARLY`).

    A drafter trained with more slots than are used is the worse for it: cut from 8 to 6 it accepts 7 % less, while one
    trained with 6 accepts as much as the whole 8, for three quarters of the training.
    """
    expected = expected_speedups(USUAL_SHARES, verify_ms, draft_ms)
    return fewest_nearly_best({k: gain for k, gain in expected.items() if k >= MIN_TRAINED_BLOCK})


def fewest_nearly_best(speeds: Mapping[int, float]) -> int:
    """The smallest block whose speed comes to `NEARLY` the best: more slots cost more as soon as requests compete."""
    best = max(speeds.values())
    return next(k for k in sorted(speeds) if speeds[k] >= NEARLY * best)


def swept_blocks(trained: int, smallest: int = 2) -> list[int]:
    """Block sizes worth measuring: every one while they are small, then in steps of a third, and all the slots."""
    sizes, size = [], smallest
    while size < trained:
        sizes.append(size)
        size = max(size + 1, round(size * SWEEP_STEP))
    return [*sizes, trained]


def expected_lengths(per_position: Sequence[float]) -> dict[int, float]:
    """Acceptance length by slots used, 2 to K, if each slot is accepted as often as in the whole block.

    Args:
        per_position: ``[K - 1]``; share of accepted tokens in each slot, given that all before it were.
    """
    lengths, reached, length = {}, 1.0, 1.0
    for slot, share in enumerate(per_position, start=1):
        reached *= share
        length += reached
        lengths[slot + 1] = length
    return lengths


def expected_speedups(
    per_position: Sequence[float], verify_ms: Mapping[int, float], draft_ms: float
) -> dict[int, float]:
    """Speed of decoding against one token at a time, by slots used; prompts left out.

    speedup(k) = acceptance_length(k) * verify_ms(1) / (verify_ms(k) + draft_ms)
    """
    lengths = expected_lengths(per_position)
    return {k: length * verify_ms[1] / (verify_ms[k] + draft_ms) for k, length in lengths.items() if k in verify_ms}


def _random_tokens(target: CachedTarget, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, target.shape.vocab_size, (count,), generator=generator).tolist()


def _medians(works: Mapping[int, Callable[[], object]], repeats: int) -> dict[int, float]:
    """Median milliseconds of each, in turns; the first turn does not count."""
    times: dict[int, list[float]] = {key: [] for key in works}
    for repeat in range(repeats + 1):
        for key, work in works.items():
            elapsed = _milliseconds(work)
            if repeat:
                times[key].append(elapsed)
    return {key: statistics.median(values) for key, values in times.items()}


def _milliseconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)
