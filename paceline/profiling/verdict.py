"""Which side of the pipeline is slower and what a faster one would give, judged by blocked time.

Pure functions on records: the training loop or ``metrics.jsonl`` says what the queue did from step to step, `judge`
what that means. Nothing here reads a clock or imports torch.

The law behind it: in the long run as many batches are made as are taken. Let X be batches a second, g the share of time
in which the drafter waits in get, and p the share in which a target waits in put. Then the drafter could take
``T = X / (1 - g)`` and all targets together could make ``I = X / (1 - p)``; a side that never waits is the limit,
however full or empty the queue looks.

Where g > p, the drafter's wait has two parts: ``1 - I / T``, as the targets are slower, and ``p * I / T``, as the two
miss each other: their times vary, or the queue holds batches back. The first is the larger one where ``g * (1 + p) >
2 * p``; then faster targets are the remedy, else the queue is. The same holds with the sides swapped.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

WAITS = 0.05
"""A side that waits for more of its time than this is worth a verdict: it would do 1.05 times as much without."""
BOTH_WAIT = 0.03
"""Both sides waiting for more than this is a loss that the speed of neither explains."""
STOOD_READY = 0.20
"""Share of the drafter's wait with a step's batches in the queue, above which the queue's rules are to blame."""
NARROW = 0.01
"""An interval of plus or minus this is decided by its middle: a share right on a threshold would never be."""
DRIFT = 0.03
"""Change of the queue over the batches taken, above which the absence of waits proves nothing: it fills or empties."""
MIN_GROUPS, GROUPS = 10, 12
"""Sub-windows that intervals are made from: at least, and what longer records are regrouped into."""
PAUSE = 20.0
"""A window that kept the drafter busy for so many times the median held a validation, a save or a compilation."""
MAX_SHARE = 0.999
"""What capacities and gains are computed from at most, so that they stay finite."""
UNTOLD = 10.0
"""Above this a gain says little more than that one side hardly works: only its lower end is told."""

_T_95 = {9: 2.262, 10: 2.228, 11: 2.201}
"""Student's t, two-sided 95 %, by degrees of freedom."""
_KEYS = ("seconds", "batches", "get_wait_s", "put_wait_s", "ready_wait_s", "queue")


@dataclass(frozen=True)
class Window:
    """What the queue did between two moments.

    Attributes:
        seconds: Wall time.
        batches: Taken by the drafter.
        get_wait_s: The drafter blocked by an empty queue.
        put_wait_s: Targets blocked by a full queue, summed over them; a wait may be counted where it ends.
        ready_wait_s: Part of `get_wait_s` in which at least a step's batches stood in the queue.
        queue: Batches waiting, on average or at the end.
    """

    seconds: float
    batches: float
    get_wait_s: float
    put_wait_s: float
    ready_wait_s: float = 0.0
    queue: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.0f} % [{100 * self.low:.0f}-{100 * self.high:.0f}]"


@dataclass(frozen=True)
class Verdict:
    """Which side is slower, how sure that is, and what a remedy would give.

    Attributes:
        kind: ``producer-bound``, ``consumer-bound``, ``balanced``, ``variance``, ``contradiction``, ``in turn`` or
            ``undecided``.
        gain: Throughput over today's if the slower side were infinitely fast; if the queue were deep enough
            (``variance``) or held nothing back (``contradiction``); if both sides ran at once (``in turn``). None where
            there is nothing to gain or to say. It is an upper limit for ``consumer-bound`` with several targets: they
            also wait for each other's batches, in order, which a faster drafter does not end.
        get_wait_frac, put_wait_frac: Shares of time in which the drafter and the average target were blocked.
        ready_frac: Share of the drafter's wait in which at least a step's batches stood in the queue.
        target_per_s, drafter_per_s: Batches a second that all targets together, and the drafter, could do.
        batches_per_s: Batches a second that came out.
        queue, queue_depth: Batches waiting on average, and places.
        seconds: Time that was judged; pauses are left out.
        more_s: About how many seconds more ``undecided`` needs; else 0.
        reason: What was seen, in one line of plain English.
    """

    kind: str
    gain: Estimate | None
    get_wait_frac: Estimate
    put_wait_frac: Estimate
    ready_frac: float
    target_per_s: float
    drafter_per_s: float
    batches_per_s: float
    queue: float
    queue_depth: int
    seconds: float
    more_s: float
    reason: str

    def line(self) -> str:
        """The verdict with its evidence, and what each side could do by itself."""
        if self.kind in ("undecided", "in turn"):
            return f"{self.kind}: {self.reason}"
        able = f"the targets could make {self.target_per_s:.3g} batches a second, the drafter take"
        return f"{self.kind}: {self.reason} ({able} {self.drafter_per_s:.3g})"

    def brief(self) -> str:
        """A few words for a line of progress."""
        if self.gain is None:
            return self.kind
        return f"{self.kind} {_times(self.gain)}"

    def record(self) -> dict[str, Any]:
        """For JSON; all figures are finite."""
        return {**asdict(self), "line": self.line()}


def judge(
    windows: Sequence[Window],
    *,
    targets: int,
    queue_depth: int,
    batches_per_step: int = 1,
    in_turn: bool = False,
) -> Verdict:
    """What limits the pipeline, and by how much.

    With g and p as above, the estimates choose a line and their 95 % intervals must clear its thresholds. Else, or with
    fewer than ten windows or ten queues of batches, the verdict is ``undecided`` and says how much longer it takes:

    - ``balanced``: g and p below 5 %, one of them below 3 %, and the queue neither fills nor empties.
    - ``producer-bound``: g > 5 %, more than half of it because the targets are slower. ``consumer-bound``: likewise p,
      because the drafter is.
    - ``contradiction``: what is left, if g > 5 % and a step's batches stood in the queue for more than 20 % of that.
    - ``variance``: the rest.

    Batches of several targets stand in the queue out of order whenever the targets are the limit. Nothing is lost by
    that as long as the targets do not wait, so it is not called a contradiction.

    Args:
        windows: In order and without the warm-up (`drop_warm_up`); at least ten, a step or several each. Those with a
            pause of the drafter are left out.
        targets: Target threads that put into the queue.
        queue_depth: Places in the queue.
        batches_per_step: Batches that the drafter takes for an update.
        in_turn: One thread does both in turn, and `get_wait_s` is the target's own time.
    """
    groups = _regrouped(_without_pauses(_where_they_began(windows, targets)))
    whole = _sum(groups)
    if whole.seconds <= 0.0 or whole.batches <= 0.0:
        none = "no batch was taken after the warm-up"
        return _verdict("undecided", None, _Waits.unsure(whole, targets), whole, queue_depth, none)
    if in_turn:
        return _taking_turns(groups, whole, queue_depth)
    known = min(len(groups), whole.batches / queue_depth)
    if known < MIN_GROUPS:
        more_s = whole.seconds * (MIN_GROUPS / known - 1.0)
        seen = f"{whole.batches:.0f} batches in {len(groups)} windows"
        reason = f"{seen}, and it takes {MIN_GROUPS * queue_depth} in {MIN_GROUPS}{_more(more_s)}"
        return _verdict("undecided", None, _Waits.unsure(whole, targets), whole, queue_depth, reason, more_s)
    waits = _Waits.of(groups, targets)
    kind = waits.kind()
    more_s = waits.more_s(kind, whole.seconds)
    if more_s > 0.0:
        reason = f"{waits}, perhaps {kind}{_more(more_s)}"
        return _verdict("undecided", None, waits, whole, queue_depth, reason, more_s)
    reason = _reason(kind, waits, targets, queue_depth, batches_per_step)
    return _verdict(kind, waits.gain(kind), waits, whole, queue_depth, reason)


def windows_of(lines: Iterable[Mapping[str, Any]]) -> list[Window]:
    """The windows in lines of ``metrics.jsonl``, one a step; a line that lacks a figure is passed over."""
    return [
        Window(**{key: float(line[key]) for key in _KEYS})
        for line in lines
        if all(_is_figure(line.get(key)) for key in _KEYS) and line["seconds"] > 0
    ]


def drop_warm_up(windows: Sequence[Window], steps: int = 2) -> list[Window]:
    """The windows after the start-up: those before the first batch was taken go, and `steps` windows from there.

    The first step waits for the first batch and compiles; waits that began in it end in the second. A queue that is
    still filling after that is no harm: `judge` notices.
    """
    served = next((i for i, window in enumerate(windows) if window.batches > 0.0), len(windows))
    return list(windows[served + steps :])


def merge(windows: Sequence[Window], at_most: int = 256) -> list[Window]:
    """At most so many windows of the same time: neighbours are joined, the shortest pair first.

    So they stay about equally long, however often more are appended and merged. `judge` cannot leave out a pause that
    was joined with many steps.
    """
    merged = list(windows)
    while len(merged) >= 2 * at_most:  # one pair after the other would take a second for 10,000 steps
        merged = [_sum(merged[i : i + 2]) for i in range(0, len(merged), 2)]
    while len(merged) > at_most:
        i = min(range(len(merged) - 1), key=lambda i: merged[i].seconds + merged[i + 1].seconds)
        merged[i : i + 2] = [_sum(merged[i : i + 2])]
    return merged


@dataclass(frozen=True)
class _Waits:
    """What the windows say about both sides.

    Attributes:
        g, p: Shares of time in which the drafter and the average target wait.
        ready: Share of the drafter's wait in which a step's batches stood in the queue.
        slow_targets, slow_drafter: Above 0 where more than half of g, or of p, is there because that side is slower.
        drift: Change of the queue over the batches taken.
    """

    g: Estimate
    p: Estimate
    ready: Estimate
    slow_targets: Estimate
    slow_drafter: Estimate
    drift: float

    @classmethod
    def of(cls, groups: Sequence[Window], targets: int) -> _Waits:
        def g(window: Window) -> float:
            return _part(window.get_wait_s, window.seconds)

        def p(window: Window) -> float:
            return _part(window.put_wait_s, window.seconds * targets)

        def ready(window: Window) -> float:
            return _part(window.ready_wait_s, window.get_wait_s)

        def excess(mine: float, other: float) -> float:
            return mine * (1.0 + other) - 2.0 * other

        whole, others = _sum(groups), _others(groups)
        return cls(
            g=_share(_estimate(whole, others, g)),
            p=_share(_estimate(whole, others, p)),
            ready=_share(_estimate(whole, others, ready)),
            slow_targets=_estimate(whole, others, lambda window: excess(g(window), p(window))),
            slow_drafter=_estimate(whole, others, lambda window: excess(p(window), g(window))),
            drift=abs(groups[-1].queue - groups[0].queue) / whole.batches,
        )

    @classmethod
    def unsure(cls, whole: Window, targets: int) -> _Waits:
        """Too few windows for intervals."""

        def unsure(part: float, of: float) -> Estimate:
            return _share(Estimate(_part(part, of), 0.0, 1.0))

        return cls(
            g=unsure(whole.get_wait_s, whole.seconds),
            p=unsure(whole.put_wait_s, whole.seconds * targets),
            ready=unsure(whole.ready_wait_s, whole.get_wait_s),
            slow_targets=Estimate(0.0, -1.0, 1.0),
            slow_drafter=Estimate(0.0, -1.0, 1.0),
            drift=0.0,
        )

    def __str__(self) -> str:
        return f"the drafter waits {self.g} of the time and the targets {self.p}"

    @property
    def longer(self) -> Estimate:
        return max(self.g, self.p, key=lambda share: share.value)

    @property
    def shorter(self) -> Estimate:
        return min(self.p, self.g, key=lambda share: share.value)

    def kind(self) -> str:
        """The verdict if the intervals had no width."""
        if self.longer.value <= WAITS and self.shorter.value <= BOTH_WAIT:
            return "balanced"
        if self.slow_targets.value > 0.0:
            return "producer-bound"
        if self.slow_drafter.value > 0.0:
            return "consumer-bound"
        return "contradiction" if self.g.value > WAITS and self.ready.value > STOOD_READY else "variance"

    def more_s(self, kind: str, seconds: float) -> float:
        """How many seconds more until the intervals clear the thresholds of this kind; 0 if they do."""

        def above(share: Estimate, threshold: float) -> float:
            return _more_s(share.value - threshold, share.value - share.low, NARROW, seconds)

        def below(share: Estimate, threshold: float) -> float:
            return _more_s(threshold - share.value, share.high - share.value, NARROW, seconds)

        # Which part of a wait is the larger matters less than the wait: a quarter of it is narrow enough.
        narrow = max(NARROW, self.longer.value / 4)
        if kind == "balanced":
            filling = seconds * max(0.0, self.drift / DRIFT - 1.0)
            return max(below(self.g, WAITS), below(self.p, WAITS), filling)
        if kind in ("producer-bound", "consumer-bound"):
            wait, excess = (self.g, self.slow_targets) if kind == "producer-bound" else (self.p, self.slow_drafter)
            return max(above(wait, WAITS), _more_s(excess.value, excess.value - excess.low, narrow, seconds))
        no_side = max(
            _more_s(-excess.value, excess.high - excess.value, narrow, seconds)
            for excess in (self.slow_targets, self.slow_drafter)
        )
        if kind == "contradiction":
            return max(no_side, above(self.g, WAITS), above(self.ready, STOOD_READY))
        loss = min(above(self.shorter, BOTH_WAIT), max(above(self.longer, WAITS), no_side))
        innocent = min(below(self.ready, STOOD_READY), below(self.g, WAITS))
        return max(loss, innocent)

    def gain(self, kind: str) -> Estimate | None:
        """What the remedy of this kind gives."""
        if kind == "balanced":
            return None
        share = {"producer-bound": self.g, "consumer-bound": self.p}.get(kind, self.shorter)
        return Estimate(_gain(share.value), _gain(share.low), _gain(share.high))


def _verdict(
    kind: str, gain: Estimate | None, waits: _Waits, whole: Window, queue_depth: int, reason: str, more_s: float = 0.0
) -> Verdict:
    rate = _part(whole.batches, whole.seconds)
    return Verdict(
        kind=kind,
        gain=gain,
        get_wait_frac=waits.g,
        put_wait_frac=waits.p,
        ready_frac=waits.ready.value,
        target_per_s=rate * _gain(waits.p.value),
        drafter_per_s=rate * _gain(waits.g.value),
        batches_per_s=rate,
        queue=whole.queue,
        queue_depth=queue_depth,
        seconds=whole.seconds,
        more_s=more_s,
        reason=reason,
    )


def _taking_turns(groups: Sequence[Window], whole: Window, queue_depth: int) -> Verdict:
    """Nothing waits and nothing is queued: the targets work for the share g, and the drafter for the rest."""
    share = min(whole.get_wait_s / whole.seconds, 1.0)
    g = Estimate(share, 0.0, 1.0)
    if len(groups) >= MIN_GROUPS:
        g = _share(_estimate(whole, _others(groups), lambda window: window.get_wait_s / window.seconds))
    ends = [1.0 / max(end, 1.0 - end) for end in (g.low, g.high)]
    gain = Estimate(1.0 / max(share, 1.0 - share), min(ends), 2.0 if g.low <= 0.5 <= g.high else max(ends))
    rate = whole.batches / whole.seconds
    return Verdict(
        kind="in turn",
        gain=gain,
        get_wait_frac=g,
        put_wait_frac=Estimate(0.0, 0.0, 0.0),
        ready_frac=0.0,
        target_per_s=rate / max(share, 1.0 - MAX_SHARE),
        drafter_per_s=rate * _gain(share),
        batches_per_s=rate,
        queue=0.0,
        queue_depth=queue_depth,
        seconds=whole.seconds,
        more_s=0.0,
        reason=f"the target takes {g} of the time and the drafter the rest; on devices of their own, side by side, "
        f"up to {_times(gain)}",
    )


def _reason(kind: str, waits: _Waits, targets: int, queue_depth: int, batches_per_step: int) -> str:
    gain = waits.gain(kind)
    if gain is None:
        most = _gain(max(waits.g.high, waits.p.high))
        return f"{waits}; making one side faster gives at most {most:.2f}x"
    if kind == "producer-bound":
        return f"the drafter waits {waits.g} of the time for features; with faster targets {_times(gain)}"
    if kind == "consumer-bound":
        up_to = "up to " if targets > 1 else ""
        return f"the targets wait {waits.p} of the time for the drafter; with a faster one {up_to}{_times(gain)}"
    if kind == "contradiction":
        batches = "a batch" if batches_per_step == 1 else f"a step's {batches_per_step} batches"
        return (
            f"the drafter waits {waits.g} of the time, and for {waits.ready} of that {batches} stood in the queue: "
            f"look at order, batching (pipeline.min_ready), a lock or a sync; without them up to {_times(gain)}"
        )
    # Waits at equal speed go down as 1 / places, with a place in each target's and the drafter's hands and one over.
    others = targets + 2
    depth = math.ceil((queue_depth + others) * waits.shorter.value / BOTH_WAIT) - others
    return (
        f"{waits}: their times vary more than pipeline.queue_depth={queue_depth} evens out; about {depth} would leave "
        f"at most {100 * BOTH_WAIT:.0f} %; up to {_times(gain)}"
    )


def _where_they_began(windows: Sequence[Window], targets: int) -> list[Window]:
    """Put waits moved back out of windows that are too short for them.

    A wait may be counted where it ends, a few batches after it began: as many as there are targets. One that is longer
    than the windows of that many lay outside them, as in a validation whose time is not counted, and is cut.
    """
    moved, carried = [], 0.0
    for i in range(len(windows) - 1, -1, -1):
        window = windows[i]
        room, wait = window.seconds * targets, window.put_wait_s
        if wait > room:
            ends = max(1.0, min(targets, window.batches))  # every batch that is taken ends one wait
            since = max(0, i - 1 - math.ceil(targets / max(1.0, window.batches)))
            if wait > ends * sum(each.seconds for each in windows[since : i + 1]):
                wait = room
        carried += wait
        moved.append(replace(window, put_wait_s=min(carried, room)))
        carried -= moved[-1].put_wait_s
    return moved[::-1]


def _without_pauses(windows: Sequence[Window]) -> list[Window]:
    """Without the windows in which the drafter was busy with something else than its batches."""
    busy = [(each.seconds - each.get_wait_s) / each.batches if each.batches > 0.0 else 0.0 for each in windows]
    most = PAUSE * statistics.median(busy) if busy else 0.0
    return [each for each, its in zip(windows, busy, strict=True) if its <= most or most <= 0.0]


def _regrouped(windows: Sequence[Window]) -> list[Window]:
    """`GROUPS` windows of about the same time: what one step leaves in the queue is still felt in the next."""
    windows = [window for window in windows if window.seconds > 0.0]
    if len(windows) <= GROUPS:
        return windows
    seconds, passed = sum(window.seconds for window in windows), 0.0
    groups: list[list[Window]] = [[] for _ in range(GROUPS)]
    for window in windows:
        middle = passed + window.seconds / 2
        groups[min(GROUPS - 1, int(GROUPS * middle / seconds))].append(window)
        passed += window.seconds
    return [_sum(group) for group in groups if group]


def _sum(windows: Sequence[Window]) -> Window:
    seconds = sum(window.seconds for window in windows)
    return Window(
        seconds=seconds,
        batches=sum(window.batches for window in windows),
        get_wait_s=sum(window.get_wait_s for window in windows),
        put_wait_s=sum(window.put_wait_s for window in windows),
        ready_wait_s=sum(window.ready_wait_s for window in windows),
        queue=sum(window.queue * window.seconds for window in windows) / seconds if seconds > 0.0 else 0.0,
    )


def _others(groups: Sequence[Window]) -> list[Window]:
    """For each group the sum of all the others."""
    return [_sum([*groups[:i], *groups[i + 1 :]]) for i in range(len(groups))]


def _estimate(whole: Window, others: Sequence[Window], figure: Callable[[Window], float]) -> Estimate:
    """A figure of all groups together, with an interval by leaving out one group after the other (jackknife).

    Neighbouring groups resemble each other where the queue is slow to change, which makes the interval too narrow; it
    is widened by their correlation r, to ``(1 + r) / (1 - r)`` of the variance.
    """
    n, left_out = len(others), [figure(window) for window in others]
    mean = sum(left_out) / n
    errors = [each - mean for each in left_out]
    squares = sum(error**2 for error in errors)
    if squares > 0.0:
        # 1 / n: the errors sum to 0, which makes unrelated neighbours seem opposed by that much.
        correlation = sum(a * b for a, b in zip(errors, errors[1:], strict=False)) / squares + 1.0 / n
        correlation = min(max(correlation, 0.0), 0.7)
        squares *= (1.0 + correlation) / (1.0 - correlation)
    half = _T_95[n - 1] * math.sqrt(squares * (n - 1) / n)
    value = figure(whole)
    return Estimate(value, value - half, value + half)


def _part(part: float, whole: float) -> float:
    return part / whole if whole > 0.0 else 0.0


def _share(estimate: Estimate) -> Estimate:
    value, low, high = (min(max(each, 0.0), 1.0) for each in (estimate.value, estimate.low, estimate.high))
    return Estimate(value, low, high)


def _more_s(distance: float, half: float, narrow: float, seconds: float) -> float:
    """Seconds more until half an interval is as small as its distance from a threshold, or narrow; 0 if it is.

    It takes four times the time to halve it. On the wrong side of the threshold, at a negative distance, none helps.
    """
    if distance < 0.0:
        return math.inf
    return seconds * max(0.0, (half / max(distance, narrow)) ** 2 - 1.0)


def _gain(share: float) -> float:
    return 1.0 / (1.0 - min(share, MAX_SHARE))


def _times(gain: Estimate) -> str:
    if gain.value > UNTOLD:
        return f"at least {gain.low:.1f}x"
    return f"{gain.value:.2f}x [{gain.low:.2f}-{gain.high:.2f}]"


def _more(seconds: float) -> str:
    shown = f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
    return f"; about {shown} more are needed"


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
