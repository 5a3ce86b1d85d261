"""The ordered channel: order, capacity in batches and bytes, waits, and how both sides let go."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from paceline.pipeline.channel import ChannelClosed, OrderedChannel
from paceline.records import FeatureBatch, TokenBatch

PATIENCE_S = 10.0


def batch(number: int, width: int = 1) -> FeatureBatch:
    """A batch whose every feature element is its number."""
    ids = torch.arange(4)
    tokens = TokenBatch.pack(number, [(0, ids, torch.ones(4, dtype=torch.bool))], 4)
    return FeatureBatch(tokens, torch.full((4, width), float(number)))


def channel(end: int, **options: int) -> OrderedChannel:
    settings = {"queue_depth": 2, "max_bytes": 1 << 20} | options
    return OrderedChannel(0, end, **settings)


def start(function, *args) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(("queue_depth", "producers", "min_ready"), [(1, 1, 1), (1, 4, 1), (3, 2, 3), (8, 5, 2)])
def test_batches_arrive_in_order_whoever_is_first(queue_depth: int, producers: int, min_ready: int) -> None:
    """With producers of random speed every batch arrives once, in order and intact, and the queue keeps its depth."""
    end, lock, numbers = 60, threading.Lock(), iter(range(60))
    queue = channel(end, queue_depth=queue_depth, min_ready=min_ready)

    def produce(seed: int) -> None:
        chance = random.Random(seed)
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            time.sleep(chance.random() * 0.002)
            queue.put(batch(number))

    threads = [start(produce, seed) for seed in range(producers)]
    deepest = 0
    for wanted in range(end):
        deepest = max(deepest, queue.num_ready)
        got = queue.get()
        assert got.tokens.number == wanted
        assert torch.equal(got.context_feature, torch.full((4, 1), float(wanted)))
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert deepest <= queue_depth
    with pytest.raises(ChannelClosed):
        queue.get()


def test_a_full_queue_blocks_its_producer_and_measures_it() -> None:
    """A batch beyond the window waits until one is taken, and only that wait is counted."""
    queue = channel(5, queue_depth=2)
    queue.put(batch(0))
    queue.put(batch(1))
    blocked = start(queue.put, batch(2))
    time.sleep(0.1)
    assert blocked.is_alive() and queue.num_ready == 2
    assert queue.get().tokens.number == 0
    blocked.join(PATIENCE_S)
    waits = queue.take_waits()
    assert 0.05 < waits.put_s < 5 and waits.get_s < 0.05 and waits.ready_s == 0.0
    assert queue.take_waits() == (0.0, 0.0, 0.0)


def test_an_empty_queue_blocks_its_consumer_and_measures_it() -> None:
    """The time that the consumer is blocked is its get wait."""
    queue = channel(1)
    threading.Timer(0.1, queue.put, [batch(0)]).start()
    queue.get()
    waits = queue.take_waits()
    assert 0.05 < waits.get_s < 5 and waits.put_s < 0.05 and waits.ready_s == 0.0


@pytest.mark.parametrize(("waiting", "is_ready"), [([1, 2], True), ([1], False)])
def test_a_wait_for_order_is_told_from_a_wait_for_supply(waiting: list[int], is_ready: bool) -> None:
    """While as many batches stand in the queue as a step takes, but not the next one, the get wait is also a ready
    wait."""
    queue = channel(4, queue_depth=4, batches_per_step=2)
    for number in waiting:
        queue.put(batch(number))
    threading.Timer(0.1, queue.put, [batch(0)]).start()
    assert queue.get().tokens.number == 0
    waits = queue.take_waits()
    assert 0.05 < waits.get_s < 5 and waits.ready_s == (waits.get_s if is_ready else 0.0)


def test_bytes_bound_the_queue_but_never_lock_out_the_next_batch() -> None:
    """Beyond the bytes later batches wait, while the one needed next passes and `min_ready` gives way."""
    queue = channel(3, queue_depth=3, max_bytes=batch(0).num_bytes, min_ready=3)
    first, later = start(queue.put, batch(1)), start(queue.put, batch(2))
    time.sleep(0.1)
    assert queue.num_ready == 1  # one of the two fits; the other waits for its bytes
    queue.put(batch(0))
    assert [queue.get().tokens.number for _ in range(3)] == [0, 1, 2]
    for thread in (first, later):
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_min_ready_holds_back_the_first_batch() -> None:
    """`get` waits until that many consecutive batches are there, and for fewer at the end."""
    queue = channel(3, queue_depth=3, min_ready=2)
    queue.put(batch(0))
    got: list[int] = []
    consumer = start(lambda: got.extend(queue.get().tokens.number for _ in range(3)))
    time.sleep(0.1)
    assert got == []
    queue.put(batch(1))
    queue.put(batch(2))
    consumer.join(PATIENCE_S)
    assert got == [0, 1, 2]


def test_closing_releases_a_blocked_producer() -> None:
    """A producer blocked on a full queue ends when the consumer leaves, and nothing is kept."""
    queue, outcome = channel(9, queue_depth=1), []

    def produce() -> None:
        try:
            queue.put(batch(5))
        except ChannelClosed:
            outcome.append("closed")

    thread = start(produce)
    time.sleep(0.05)
    queue.close()
    thread.join(PATIENCE_S)
    assert outcome == ["closed"] and queue.num_ready == 0


def test_a_failure_reaches_the_consumer_at_once_and_releases_the_others() -> None:
    """The first failure is raised by `get` though batches wait, and other producers end."""
    queue, released = channel(9, queue_depth=1), []

    def produce() -> None:
        try:
            queue.put(batch(3))
        except ChannelClosed:
            released.append(True)

    thread = start(produce)
    queue.put(batch(0))
    queue.fail(RuntimeError("first"))
    queue.fail(RuntimeError("second"))
    with pytest.raises(RuntimeError, match="first"):
        queue.get()
    thread.join(PATIENCE_S)
    assert released == [True]
