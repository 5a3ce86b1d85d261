"""Small tries of what a GPU is to run with: ``python -m paceline.cli.trials NAME``, for `paceline doctor`.

Each ends with exit code 0 if it works, and with an error otherwise. They are processes of their own: what is tried may
hang, or end the process.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def compile(device: str) -> None:
    """A compiled function gives what it does uncompiled."""

    def work(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x) * x.square().mean(-1, keepdim=True)

    x = torch.randn(64, 256, device=device)
    torch.testing.assert_close(torch.compile(work, fullgraph=True)(x), work(x))


def flex(device: str) -> None:
    """Attention of a drafter's blocks, forward and backward, is what it is per document."""
    from paceline.dflash.anchors import make_anchors
    from paceline.kernels.attention import BlockLayout, Visibility, attend_per_document
    from paceline.kernels.compiled import run_compiled
    from paceline.kernels.flex import BlockMasks, attend_flex

    num_anchors, block_size, length, visibility = 16, 16, 256, Visibility(causal=False, window=None)
    positions = torch.arange(num_anchors) * 16
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device).requires_grad_()

    blocks = [random(num_anchors, block_size, heads, 64) for heads in (4, 2, 2)]
    context = [random(length, 2, 64) for _ in range(2)]
    masks = BlockMasks(num_anchors, block_size, length, [visibility], torch.device(device))
    masks.update(positions.to(device), torch.zeros_like(positions).to(device))
    layout = BlockLayout.of_row(make_anchors(positions), (0, length), block_size, length)
    query, key, value = blocks
    ways: list[tuple[Any, Any]] = [(masks, attend_flex), (layout, attend_per_document)]
    results = []
    for seen, way in ways:
        arguments = query, *context, key, value, seen.for_layer(visibility), visibility
        out = run_compiled(way, *arguments) if way is attend_flex else way(*arguments)
        results.append([out, *torch.autograd.grad(out.square().sum(), [*blocks, *context])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def graphs(device: str) -> None:
    """A CUDA graph computes anew from what its inputs hold."""
    x = torch.ones(1024, device=device)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        (x * 2).sum()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        total = (x * 2).sum()
    x.fill_(3.0)
    graph.replay()
    if total.item() != 6 * 1024:
        raise SystemExit(f"a replayed graph gave {total.item()}, {6 * 1024} was wanted")


if __name__ == "__main__":
    {"compile": compile, "flex": flex, "graphs": graphs}[sys.argv[1]]("cuda")
