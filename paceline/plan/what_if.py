"""The closed form of throughput by split, and other splits from what a run was measured to do.

Of N targets and M drafters that need t and d seconds a micro-batch, N / t are made and M / d taken a second, and the
smaller is what comes out. In turn, a process makes and takes one in t + d. Waits that times of different length cause
are not in it: with a queue of some batches they cost a few percent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from paceline.errors import ConfigError

Layout = Literal["colocated", "split"]


def split_rate(targets: int, drafters: float, target_s: float, drafter_s: float) -> float:
    """Micro-batches a second of roles side by side: min(N / t, M / d)."""
    return min(targets / target_s, drafters / drafter_s)


def colocated_rate(processes: int, target_s: float, drafter_s: float) -> float:
    """Micro-batches a second of processes that do both in turn: G / (t + d)."""
    return processes / (target_s + drafter_s)


@dataclass(frozen=True)
class Split:
    """Who does what."""

    layout: Layout
    targets: int
    drafters: int

    def __str__(self) -> str:
        return f"{self.drafters} in turn" if self.layout == "colocated" else f"{self.targets}+{self.drafters}"


@dataclass(frozen=True)
class Measured:
    """What a run did.

    Attributes:
        batches_per_s: Micro-batches that came out.
        target_s, drafter_s: Seconds of one on one role, waits left out.
    """

    split: Split
    batches_per_s: float
    target_s: float
    drafter_s: float

    @classmethod
    def of(cls, split: Split, batches_per_s: float, target_per_s: float, drafter_per_s: float) -> Measured:
        """From what a verdict says that all targets together, and all drafters, could do a second."""
        targets = split.drafters if split.layout == "colocated" else split.targets
        return cls(split, batches_per_s, targets / target_per_s, split.drafters / drafter_per_s)


@dataclass(frozen=True)
class Answer:
    """What another split would do.

    Attributes:
        gain: Over what the run did.
        limit: ``targets``, ``drafters``, or ``in turn``.
    """

    split: Split
    batches_per_s: float
    gain: float
    limit: str


def what_if(measured: Measured, split: Split, transport_s: float = 0.0) -> Answer:
    """Throughput of another split on devices like the run's, one a role.

    Args:
        transport_s: Seconds that a micro-batch's features take on the way, on each side, where the run had none of it:
            it was in turn, and the split is not. From a split run it is in the measured times.
    """
    target_s, drafter_s = measured.target_s, measured.drafter_s
    if split.layout == "colocated":
        rate, limit = colocated_rate(split.drafters, target_s, drafter_s), "in turn"
    else:
        if measured.split.layout == "colocated":
            target_s, drafter_s = target_s + transport_s, drafter_s + transport_s
        rate = split_rate(split.targets, split.drafters, target_s, drafter_s)
        limit = "targets" if split.targets / target_s < split.drafters / drafter_s else "drafters"
    return Answer(split, rate, rate / measured.batches_per_s, limit)


def parse_split(text: str, run: Split) -> Split:
    """``targets=6,drafters=2[,layout=split]``; what is left out is the run's. Raises: ConfigError."""
    wanted = f"--what-if {text}: targets=N,drafters=M[,layout=split|colocated] was wanted"
    found: dict[str, str] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(targets|drafters|layout)\s*=\s*(\w+)\s*", part)
        if match is None or match[1] in found:
            raise ConfigError(wanted)
        found[match[1]] = match[2]
    counts = {}
    for name in ("targets", "drafters"):
        if name in found and not (found[name].isdecimal() and 1 <= int(found[name]) <= 100_000):
            raise ConfigError(f"{wanted}, and {name} from 1 to 100000")
        counts[name] = int(found.get(name, getattr(run, name)))
    layout = found.get("layout", "split" if "targets" in found else run.layout)
    if layout not in ("split", "colocated"):
        raise ConfigError(wanted)
    if layout == "colocated":
        if "targets" in found and counts["targets"] not in (1, counts["drafters"]):
            raise ConfigError(f"{wanted}: colocated, every drafter has a target of its own; leave targets out")
        return Split("colocated", 1, counts["drafters"])
    return Split("split", counts["targets"], counts["drafters"])
