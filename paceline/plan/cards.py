"""What cards can do: data sheets, and the share of them that training reaches; or this machine, measured.

Only the H200 was measured (benchmarks/results/step-h200.json). For every other card the shares are the H200's, by
guess: a card that its power holds back less reaches more of its data sheet, one that it holds back more reaches less.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError

GPUS_PER_HOST = 8
MATMUL_SHARE = 0.7207
"""Of the H200's 989 TFLOP/s in bfloat16, that matrix products of a whole step reach: the card is held back by its
power. Fitted on the run `qwen3-8b`."""
MEMORY_SHARE = 0.6383
"""Of 4,800 GB/s, that kernels between matrix products reach on the bytes counted in `plan.speed`. Fitted likewise."""
LINK_SHARE = 0.8
"""Of a link's data sheet, that collectives reach. A guess."""
CALIBRATION_S = 45.0
"""Longest that `calibrate` takes, and less where its work is done sooner."""


@dataclass(frozen=True)
class Card:
    """A device for one role, or for two in turn.

    Attributes:
        memory_gib: That a process can use.
        tflop_per_s: Dense bfloat16 with float32 sums, by the data sheet; float32 on a CPU.
        matmul_share: Of it, that the matrix products of a step reach.
        memory_gb_per_s, memory_share: Likewise for memory.
        link_gb_per_s: To another card of its host, one way.
        host_gb_per_s: To its host's memory, one way.
        has_fp8: Whether `target.fp8` is possible.
        softmax_factor: Time of attention's exponentials over the H200's.
        source: Where the shares come from.
        is_cpu: No GPU.
    """

    name: str
    memory_gib: float
    tflop_per_s: float
    memory_gb_per_s: float
    link_gb_per_s: float
    host_gb_per_s: float
    has_fp8: bool = True
    matmul_share: float = MATMUL_SHARE
    memory_share: float = MEMORY_SHARE
    softmax_factor: float = 1.0
    source: str = "a guess: the H200's shares"
    is_cpu: bool = False

    @property
    def matmul_per_s(self) -> float:
        """Operations a second of matrix products."""
        return 1e12 * self.tflop_per_s * self.matmul_share

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second of what lies between them."""
        return 1e9 * self.memory_gb_per_s * self.memory_share


def _like_h200(name: str, gib: float, tflop_per_s: float, memory: float, link: float, host: float, **more: Any) -> Card:
    return Card(name, gib, tflop_per_s, memory, link, host, softmax_factor=989 / tflop_per_s, **more)


CARDS = {
    card.name: card
    for card in (
        Card("h200", 139.8, 989.0, 4800.0, 450.0, 64.0, source="measured: benchmarks/results/step-h200.json"),
        _like_h200("h100", 79.1, 989.0, 3350.0, 450.0, 64.0),
        _like_h200("a100-80g", 79.1, 312.0, 2039.0, 300.0, 32.0, has_fp8=False),
        _like_h200("a100-40g", 39.4, 312.0, 1555.0, 300.0, 32.0, has_fp8=False),
        _like_h200("l40s", 44.4, 362.0, 864.0, 32.0, 32.0),
        _like_h200("rtx4090", 23.5, 165.2, 1008.0, 32.0, 32.0),
        _like_h200("b200", 178.0, 2250.0, 8000.0, 900.0, 64.0),
    )
}
"""By name; figures of the makers' data sheets, memory as a process sees it."""


def parse_gpus(text: str) -> tuple[int, Card]:
    """Number and card of ``8xh200``; a card alone is one. Raises: ConfigError naming what there is."""
    match = re.fullmatch(r"(?:(\d+)x)?([a-z0-9-]+)", text.strip().lower())
    card = CARDS.get(match[2]) if match else None
    if match is None or card is None:
        raise ConfigError(f"--gpus {text}: a number and a card was wanted, 8xh200; cards are {', '.join(CARDS)}")
    count = int(match[1] or 1)
    if not 1 <= count <= 4096:
        raise ConfigError(f"--gpus {text}: 1 to 4096 GPUs were wanted")
    return count, card


def calibrate() -> tuple[int, Card]:
    """GPUs of this machine, or its CPU as one, with rates measured for some seconds, never a minute."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from paceline.plan.speed import value

    started = time.perf_counter()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32

    def rate(work: Callable[[], Any], amount: float, seconds: float) -> float:
        """Amount a second, of calls made for some seconds after a third as long unread: power and caches settle."""
        for limit in (seconds / 3, seconds):
            calls, begun = 0, time.perf_counter()
            while not calls or (time.perf_counter() - begun < limit and time.perf_counter() - started < CALIBRATION_S):
                work()
                calls += 1
                if on_gpu:
                    torch.cuda.synchronize()
        return amount * calls / (time.perf_counter() - begun)

    size = 8192 if on_gpu else 1536
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    matmul = rate(lambda: torch.mm(a, b, out=product), 2.0 * size**3, 6.0 if on_gpu else 3.0)
    place = torch.empty(1 << (30 if on_gpu else 27), dtype=torch.uint8, device=device)
    other = torch.empty_like(place)
    copied = rate(lambda: other.copy_(place), 2.0 * place.numel(), 2.0)
    heads, length, width = (32, 4096, 128) if on_gpu else (8, 1024, 64)
    query, key, value_of_key = (torch.randn(1, heads, length, width, device=device, dtype=dtype) for _ in range(3))
    kernel = SDPBackend.FLASH_ATTENTION  # on a GPU the same one on every card from Ampere on

    def attend() -> None:
        with sdpa_kernel(kernel):
            scaled_dot_product_attention(query, key, value_of_key, is_causal=True)

    scores = rate(attend, heads * length**2 / 2, 2.0)
    exponential_s = max(0.0, 1.0 / scores - 4 * width / matmul)
    if not on_gpu:
        return 1, Card(
            name="this machine's CPU",
            memory_gib=_host_gib(),
            tflop_per_s=matmul / 1e12,
            memory_gb_per_s=copied / 1e9,
            link_gb_per_s=copied / 1e9,
            host_gb_per_s=copied / 1e9,
            has_fp8=False,
            matmul_share=1.0,
            memory_share=1.0,
            softmax_factor=exponential_s / value("target_score_flex"),
            source="measured here",
            is_cpu=True,
        )
    on_host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    moved = rate(lambda: place[: on_host.numel()].copy_(on_host), on_host.numel(), 1.0)
    count, memory = torch.cuda.device_count(), torch.cuda.get_device_properties(device).total_memory
    return count, Card(
        name=torch.cuda.get_device_name(device),
        memory_gib=memory / 2**30,
        tflop_per_s=matmul / 1e12,
        memory_gb_per_s=copied / 1e9,
        link_gb_per_s=moved / 1e9,  # between cards nothing was measured: as by way of the host
        host_gb_per_s=moved / 1e9,
        has_fp8=torch.cuda.get_device_capability(device) >= (8, 9),
        matmul_share=1.0,
        memory_share=1.0,
        softmax_factor=max(0.2, exponential_s / FLASH_SCORE_S),
        source="measured here",
    )


FLASH_SCORE_S = 1.41e-12
"""Seconds of a score in PyTorch's own attention (flash) on an H200, less what its products take: the work unit's 34
target layers take 43.8 ms."""


def _host_gib() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
