"""A pipeline without threads or clocks: producers, the ordered queue and one consumer, on simulated time.

It follows `paceline.pipeline.channel.OrderedChannel` and the coordinator: whichever producer is free first gets the
next number; batch n enters once batch ``n - depth`` has been taken; batch n is taken once the consumer asks for it and
``min_ready`` batches from n on are there. All of them are maxima over earlier moments, so that one pass over the
numbers, with a heap of the producers' free moments, gives every moment exactly.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.profiling.verdict import Window


@dataclass(frozen=True)
class Pipeline:
    """What is simulated.

    Attributes:
        ratio: Time of the producers for a batch, all of them together, over the consumer's: above 1 they are slower.
        cv: Standard deviation of both service times over their mean.
        depth: Places in the queue.
        targets: Producers.
        micro: Batches of a step.
        min_ready: Batches that must be ready before one is taken.
        is_exponential: Exponential service times instead of lognormal ones; `cv` is 1 then.
        pause_every, pause_s: The consumer stands still after every so many steps, for so long.
        is_pause_counted: Whether the windows' seconds hold that time.
        first_s: Extra time of every producer's first batch and of the consumer's: compiling.
        targets_work, drafter_works: False makes that side infinitely fast.
    """

    ratio: float = 1.0
    cv: float = 0.3
    depth: int = 4
    targets: int = 1
    micro: int = 1
    min_ready: int = 1
    is_exponential: bool = False
    pause_every: int = 0
    pause_s: float = 0.0
    is_pause_counted: bool = True
    first_s: float = 0.0
    targets_work: bool = True
    drafter_works: bool = True


@dataclass(frozen=True)
class Truth:
    """What a long simulation knows.

    Attributes:
        get_wait_frac, put_wait_frac: Long-run shares.
        batches_per_s: Long-run throughput.
        fast_targets, fast_drafter: Throughput with that side infinitely fast, over `batches_per_s`.
    """

    get_wait_frac: float
    put_wait_frac: float
    batches_per_s: float
    fast_targets: float
    fast_drafter: float


def simulate(pipeline: Pipeline, steps: int, seed: int) -> list[Window]:
    """One window a step, from the first on; the consumer's batches take 1 second on average."""
    chance = random.Random(seed)
    depth, micro, min_ready = pipeline.depth, pipeline.micro, pipeline.min_ready
    make = _service(chance, pipeline.ratio * pipeline.targets if pipeline.targets_work else 0.0, pipeline)
    use = _service(chance, 1.0 if pipeline.drafter_works else 0.0, pipeline)
    free = [0.0] * pipeline.targets
    put: list[float] = []
    booked: list[tuple[float, float]] = []
    edges: list[tuple[float, float, float, float, int]] = []

    def enter(open_since: float) -> None:
        """The next number goes to the first free producer; its place in the queue opens at that moment."""
        finished = free[0] + make() + (pipeline.first_s if len(put) < pipeline.targets else 0.0)
        if open_since > finished:
            booked.append((open_since, open_since - finished))
            finished = open_since
        put.append(finished)
        heapq.heapreplace(free, finished)

    for _ in range(depth):
        enter(0.0)
    now = since = get_wait = ready_wait = 0.0
    for number in range(steps * micro):
        ready = put[number] if min_ready == 1 else max(put[number : number + min_ready])
        if ready > now:
            get_wait += ready - now
            if pipeline.targets > 1 or min_ready > 1:  # else nothing is there before the next one
                entries = sorted(put[number:])
                if len(entries) >= micro:
                    ready_wait += max(0.0, ready - max(now, entries[micro - 1]))
            now = ready
        enter(now)
        now += use() + (pipeline.first_s if number == 0 else 0.0)
        if (number + 1) % micro == 0:
            queue = len([moment for moment in put[number + 1 :] if moment <= now])
            edges.append((now, now - since, get_wait, ready_wait, queue))
            since, get_wait, ready_wait = now, 0.0, 0.0
            if pipeline.pause_every and len(edges) % pipeline.pause_every == 0:
                now += pipeline.pause_s
                since = since if pipeline.is_pause_counted else now
    return _windows(edges, sorted(booked), micro)


def _windows(
    edges: list[tuple[float, float, float, float, int]], booked: list[tuple[float, float]], micro: int
) -> list[Window]:
    """A wait of a producer is booked in the window in which it ends, as the channel does."""
    windows, i = [], 0
    for edge, seconds, get_wait, ready_wait, queue in edges:
        put_wait = 0.0
        while i < len(booked) and booked[i][0] < edge:  # one that ends with the next batch taken is the next one's
            put_wait += booked[i][1]
            i += 1
        windows.append(Window(seconds, micro, get_wait, put_wait, ready_wait, queue))
    return windows


def _service(chance: random.Random, mean: float, pipeline: Pipeline) -> Callable[[], float]:
    if mean == 0.0:
        return lambda: 0.0
    if pipeline.is_exponential:
        rate = 1.0 / mean
        return lambda: chance.expovariate(rate)
    if pipeline.cv == 0.0:
        return lambda: mean
    spread = math.sqrt(math.log1p(pipeline.cv**2))
    middle = math.log(mean) - spread**2 / 2
    gauss, exp = chance.gauss, math.exp
    return lambda: exp(gauss(middle, spread))


def throughput(pipeline: Pipeline, steps: int, seed: int) -> float:
    """Batches a second in the long run."""
    windows = simulate(pipeline, steps, seed)[steps // 20 :]
    return sum(window.batches for window in windows) / sum(window.seconds for window in windows)


def truth(pipeline: Pipeline, steps: int = 20_000, seed: int = 12345) -> Truth:
    """The long run, and what it would be with either side infinitely fast."""
    windows = simulate(pipeline, steps, seed)[steps // 20 :]
    seconds = sum(window.seconds for window in windows)
    rate = sum(window.batches for window in windows) / seconds
    return Truth(
        get_wait_frac=sum(window.get_wait_s for window in windows) / seconds,
        put_wait_frac=sum(window.put_wait_s for window in windows) / (seconds * pipeline.targets),
        batches_per_s=rate,
        fast_targets=throughput(replace(pipeline, targets_work=False), steps, seed) / rate,
        fast_drafter=throughput(replace(pipeline, drafter_works=False), steps, seed) / rate,
    )
