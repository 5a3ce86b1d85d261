"""A training loop whose main thread waits for two slow workers of a DataLoader."""

from __future__ import annotations

import os
import time

import torch
from life import goes_on, say_ready
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset[Tensor]):
    """40 ms a row, asleep as if at a disk."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.04)
        return torch.full((64,), float(index % 7))


def main() -> None:
    torch.set_num_threads(1)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step, batch in enumerate(DataLoader(Slow(), batch_size=4, num_workers=2, prefetch_factor=1)):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 3:
            say_ready()
        if not goes_on():
            os._exit(0)


if __name__ == "__main__":
    main()
