"""Who waits for whom among the streams of a split target: no race, and no part that waits for a later one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.models.split import Parts
from tests.unit.models.fake_streams import FakeGpus, FakeStream, fake_gpus

DEVICES = tuple(torch.device("cuda", i) for i in range(3))
SIZE = 8


class Layer(nn.Module):
    """Takes memory for what it makes on the way and for its result."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SIZE, SIZE, device=device), requires_grad=False)

    def forward(self, hidden: Tensor, mask: Tensor | None, tables: tuple[Tensor, Tensor]) -> Tensor:
        mixed = torch.mm(hidden, self.weight).mul(tables[0]).add(tables[1])
        mixed = mixed if mask is None else mixed.add(mask)
        return hidden.add(mixed)


class Belt:
    """What `Target` does with a row, in a few lines that fake GPUs can run; two layers a part, all tapped."""

    def __init__(self, gpus: FakeGpus, devices: tuple[torch.device, ...] = DEVICES) -> None:
        self.gpus, self.devices = gpus, devices
        self.layers = nn.ModuleList(Layer(device) for device in devices for _ in range(2))
        self.parts = Parts(self.layers, None, range(0, 2 * len(devices), 2), devices)
        self._here = threading.local()
        for i, layer in enumerate(self.layers):
            layer.register_forward_hook(self._capture(i))

    def features(self) -> Tensor:
        first = self.devices[0]
        with self.parts.own_streams():
            slot = torch.empty(SIZE, SIZE * len(self.layers), device=first)
            mask, late = (torch.zeros(SIZE, SIZE, device=first) for _ in range(2))
            self._here.slot = slot
            with self.parts.row([{}] * len(dict.fromkeys(self.devices))):
                hidden = torch.ones(SIZE, SIZE, device=first)
                tables = hidden.cos(), hidden.sin()
                for i, layer in enumerate(self.layers):  # one mask is first wanted in the middle of the second part
                    hidden = layer(hidden, (late if i == 3 else mask) if i % 2 else None, tables)
                del hidden, tables
            del mask, late
            slot.narrow(0, 0, 2).zero_()  # the padding
        self.parts.hand_over(slot)
        return slot

    def _capture(self, place: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
            self.gpus.copy(self._here.slot.narrow(1, place * SIZE, SIZE), output)

        return hook


def in_threads(gpus: FakeGpus, mode: FakeTensorMode, *works: Callable[[], None]) -> None:
    """Run each in a thread of its own, and raise what they raise."""
    failed: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            with mode, gpus:
                work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    if failed:
        raise failed[0]


def test_rows_of_several_threads_race_for_nothing() -> None:
    """Three threads, four rows each, features used by a drafter on the default stream and freed while it is at them."""
    with fake_gpus(3) as gpus:
        mode = FakeTensorMode()
        with mode:
            belt = Belt(gpus)
        turns = [threading.Semaphore(int(i == 0)) for i in range(3)]

        def work(i: int) -> None:
            for _ in range(4):
                turns[i].acquire()
                try:
                    features = belt.features()
                    features.mul(2.0)  # the drafter, which is handed them once they are there
                    del features
                    gc.collect()
                finally:
                    turns[(i + 1) % 3].release()

        in_threads(gpus, mode, *(lambda i=i: work(i) for i in range(3)))  # type: ignore[misc]
        assert len([each for each in gpus.launches if "mm" in each[2]]) == 12 * 6


def test_no_part_waits_for_a_row_that_is_further_on() -> None:
    """The first part can begin with a row before the second is done with the one before, and so on along the belt."""
    with fake_gpus(3) as gpus:
        mode = FakeTensorMode()
        with mode:
            belt = Belt(gpus)
        products: list[list[tuple[FakeStream, int, str, dict[FakeStream, int]]]] = []

        def row() -> None:
            belt.features()
            products.append([each for each in gpus.launches if "mm" in each[2]][-6:])

        for _ in range(3):
            in_threads(gpus, mode, row)
        for before, after in zip(products, products[1:], strict=False):
            for part in range(3):
                stream, tick = before[2 * part + 1][:2]
                assert after[2 * part][0] is stream and after[2 * part][3][stream] > tick  # one row after the other
                for later in before[2 * part + 2 :]:
                    assert after[2 * part][3].get(later[0], 0) < later[1]


def test_parts_of_one_gpu_share_its_streams() -> None:
    """As on a machine with one GPU: nothing races, and what is there is not copied."""
    with fake_gpus(1) as gpus, FakeTensorMode(), gpus:
        belt = Belt(gpus, (DEVICES[0],) * 3)
        for _ in range(2):
            belt.features().mul(2.0)
        assert not [each for each in gpus.launches if "_to_copy" in each[2]]


@pytest.mark.parametrize("mistake", ["own_streams", "_leave", "record"])
def test_the_fake_gpus_find_mistakes(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wait at the end, without one behind a part, or with memory given back too early, they object."""
    with fake_gpus(3) as gpus:
        if mistake == "own_streams":
            monkeypatch.setattr(FakeStream, "synchronize", lambda self: None)
        if mistake == "_leave":
            monkeypatch.setattr(FakeStream, "wait_stream", lambda self, other: None)
        if mistake == "record":
            monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
        with pytest.raises(AssertionError, match="may"), FakeTensorMode(), gpus:
            belt = Belt(gpus)
            for _ in range(3):
                features = belt.features()
                features.mul(2.0)
                del features
                gc.collect()
