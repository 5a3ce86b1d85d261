"""What happened between two snapshots of a page, by thread: a table for people, and records for files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from paceline.profiling.page import Snapshot, ThreadSnapshot
from paceline.profiling.stages import DRAFTER_STAGES, TARGET_STAGES
from paceline.profiling.stats import ProfileStats, merged

INSIDE = {"create_block_mask_swa", "layers", "chunked_loss", "recompute"}
"""Stages that stand inside others, as far as is known before they have run."""

MIN_WALL_S = 1e-3


@dataclass(frozen=True)
class ThreadInterval:
    """A thread in a role over an interval.

    Attributes:
        wall_s: Time of the interval in which the thread was there.
        covered_s: Time of it in any stage, the part of one that is still open included; of all batches, though some be
            left out of `stages`.
        open_stage, open_s: Stage that it is in at the end, and for how long it has been; None between stages.
        num_batches: Batches begun.
        stages: By name; runs that ended in the interval.
        open_outer, open_outer_s: The outermost stage around it.
        carried: By stage, seconds that a run which ended in the interval had before it.
        sample_every: One in so many of its batches was counted.
    """

    role: str
    thread: str
    tid: int
    wall_s: float
    covered_s: float
    open_stage: str | None
    open_s: float
    num_batches: int
    stages: dict[str, ProfileStats]
    open_outer: str | None = None
    open_outer_s: float = 0.0
    carried: dict[str, float] = field(default_factory=dict)
    sample_every: int = 1

    @property
    def other_s(self) -> float:
        """Time in no stage."""
        return max(0.0, self.wall_s - self.covered_s)

    def is_inside(self, stage: str) -> bool:
        """Whether the stage's runs were all in others: their time is in that of the others as well."""
        stats = self.stages[stage]
        return stats.outermost == 0 if stats.count else stage in INSIDE

    def seconds_in(self, stage: str) -> float:
        """Time of the interval spent in a stage, whether its runs began before it or end after it.

        Estimated where batches are left out.
        """
        seconds = max(0.0, self.stages[stage].total_ns / 1e9 - self.carried.get(stage, 0.0)) * self.sample_every
        if stage == self.open_stage:
            seconds += min(self.open_s, self.wall_s)
        elif stage == self.open_outer:
            seconds += min(self.open_outer_s, self.wall_s)
        return min(seconds, self.wall_s)


@dataclass(frozen=True)
class Interval:
    """What happened between two snapshots.

    Attributes:
        at_s: End, seconds since 1970.
        seconds: Length.
        sample_every: One in so many batches was counted; counts and sums are of those alone.
    """

    at_s: float
    seconds: float
    sample_every: int
    threads: list[ThreadInterval]
    first_step: int
    last_step: int

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot, number: int | None = None) -> Interval:
        """From one snapshot of a page to a later one.

        Args:
            number: The page's number of the interval, where the longest runs are known by.
        """
        earlier = {thread.block: thread for thread in before.threads}
        now = {thread.block: thread.generation for thread in after.threads}
        retired = [thread for thread in before.threads if now.get(thread.block) != thread.generation]
        threads = []
        for thread in after.threads:
            found = earlier.get(thread.block)
            if found is not None and found.generation != thread.generation:
                found = None  # another thread's; its counts are with those of ended threads
            elif found is not None and thread.block == 0:
                found = _together(found, retired)
            if thread.is_live or (found is not None and found.is_live) or _has_moved(found, thread):
                threads.append(_thread_between(found, before, thread, after, number))
        return cls(
            at_s=after.epoch_ns / 1e9,
            seconds=(after.taken_ns - before.taken_ns) / 1e9,
            sample_every=max(1, after.sample_every),
            threads=threads,
            first_step=max(before.gauges["step"], after.gauges["first_step"]),
            last_step=after.gauges["step"],
        )

    def records(self) -> list[dict[str, Any]]:
        """Lines for ``stages.jsonl``, one a thread; stages of its role that never ran have count 0."""
        return [
            {
                "t": round(self.at_s, 3),
                "interval_s": round(self.seconds, 3),
                "role": thread.role,
                "thread": thread.thread,
                "tid": thread.tid,
                "batches": thread.num_batches,
                "wall_s": round(thread.wall_s, 4),
                "other_s": round(thread.other_s, 4),
                **({"sampled_one_in": self.sample_every} if self.sample_every > 1 else {}),
                "stages": {
                    name: _record(stats)
                    for name, stats in thread.stages.items()
                    if stats.count or stats.recompute_count or name in stages_of(thread.role)
                },
            }
            for thread in self.threads
        ]

    def table(self) -> str:
        """For people: one aligned table."""
        steps = f", steps {self.first_step + 1} to {self.last_step}" if self.last_step > self.first_step else ""
        sampled = f", one batch in {self.sample_every} counted" if self.sample_every > 1 else ""
        has_device = any(stats.device_count for thread in self.threads for stats in thread.stages.values())
        head = ["stage", "count", "avg ms", "max ms", "p99 ms", "share"]
        rows = [[*head, *(["device ms", "lag ms", "drained"] if has_device else [])]]
        notes: dict[int, str] = {}
        for thread in self.threads:
            lines = list(_rows(thread, has_device))
            if not lines:
                continue
            notes[len(rows)] = f"{thread.role}" + (f" ({thread.thread})" if thread.thread != thread.role else "")
            rows += lines
        widths = [max(len(row[i]) for row in rows if len(row) > 1) for i in range(len(rows[0]))]
        text = [f"profile of {self.seconds:{'.1f' if self.seconds >= 1 else '.2g'}} s{steps}{sampled}"]
        for number, row in enumerate(rows):
            if number in notes:
                text.append(f"  {notes[number]}")
            if len(row) == 1:
                text.append(f"    {row[0]}")
                continue
            cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
            text.append("    " + "  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
        return "\n".join(text)


def stages_of(role: str) -> tuple[str, ...]:
    """Stages that a role reports, whether they ran or not."""
    if role.startswith("target"):
        return TARGET_STAGES
    return DRAFTER_STAGES if role.startswith("drafter") else ()


def _together(ended: ThreadSnapshot, retired: list[ThreadSnapshot]) -> ThreadSnapshot:
    """Counts of ended threads, with those of blocks that were added to them since."""
    threads = [ended, *retired]
    stages = {name: merged(thread.stages[name] for thread in threads) for name in ended.stages}
    return replace(ended, stages=stages, top_ns=sum(thread.top_ns for thread in threads))


def _has_moved(before: ThreadSnapshot | None, after: ThreadSnapshot) -> bool:
    """Whether the thread has done anything since."""
    if before is None:
        return after.num_batches > 0 or any(_num_runs(stats) for stats in after.stages.values())
    return after.num_batches != before.num_batches or any(
        _num_runs(stats) != _num_runs(before.stages[name]) for name, stats in after.stages.items()
    )


def _num_runs(stats: ProfileStats) -> int:
    return stats.count + stats.recompute_count


def _thread_between(
    before: ThreadSnapshot | None, first: Snapshot, after: ThreadSnapshot, last: Snapshot, number: int | None
) -> ThreadInterval:
    sample_every = max(1, last.sample_every) if after.num_batches else 1  # who counts no batches leaves none out
    if before is not None and (before.is_live or before.joined_ns == after.joined_ns):
        begin = before.at_ns
    else:
        begin = max(first.taken_ns, after.joined_ns)
    end = after.left_ns or after.at_ns
    stages = {}
    for name, stats in after.stages.items():
        part = stats if before is None else stats.since(before.stages[name])
        stages[name] = replace(part, max_ns=None if number is None else _longest(part, after.longest[name], number))
    carried = _carried(before, first, after, stages) if before is not None and sample_every == 1 else {}
    top_s = (after.top_ns - (before.top_ns if before is not None else 0)) / 1e9
    if before is not None and before.outer is not None and before.outer != after.outer:  # it has ended since
        top_s = max(0.0, top_s - (before.at_ns - before.outer.since_ns) / 1e9)
    open_s, open_outer_s = (
        max(0.0, (end - running.since_ns) / 1e9) if running else 0.0 for running in (after.inner, after.outer)
    )
    wall_s = max(MIN_WALL_S, (end - begin) / 1e9)
    if after.joined_ns >= begin or not after.joined_ns:  # perhaps several threads, one after another or side by side
        wall_s = max(wall_s, top_s)
    return ThreadInterval(
        role=after.role,
        thread=after.thread,
        tid=after.tid,
        wall_s=wall_s,
        covered_s=min(top_s + min(open_outer_s, wall_s), wall_s),
        open_stage=after.inner.stage if after.inner else None,
        open_s=open_s,
        open_outer=after.outer.stage if after.outer else None,
        open_outer_s=open_outer_s,
        num_batches=after.num_batches - (before.num_batches if before is not None else 0),
        stages=stages,
        carried=carried,
        sample_every=sample_every,
    )


def _carried(
    before: ThreadSnapshot, first: Snapshot, after: ThreadSnapshot, stages: dict[str, ProfileStats]
) -> dict[str, float]:
    """Seconds before the interval of runs that were open at its beginning and have been counted since."""
    carried = {}
    for running in (before.inner, before.outer):
        if running is None or running in (after.inner, after.outer):  # it goes on
            continue
        is_counted = first.control.is_on and running.since_ns >= first.control_since_ns  # others were dropped
        if is_counted and stages[running.stage].count:
            carried[running.stage] = (before.at_ns - running.since_ns) / 1e9
    return carried


def _longest(part: ProfileStats, longest: dict[int, int], number: int) -> int | None:
    """Longest run of the interval of that number; the next one has begun when the counts are read."""
    if part.count == 1:
        return part.total_ns
    found = [longest[each] for each in (number, number + 1) if each in longest]
    return min(max(found), part.total_ns) if part.count and found else None


def _record(stats: ProfileStats) -> dict[str, Any]:
    record: dict[str, Any] = {
        "count": stats.count,
        "avg_ms": round(stats.avg_ns / 1e6, 4),
        "max_ms": round((stats.max_ns or 0) / 1e6, 4),
        "p50_ms": round(stats.percentile(0.5) / 1e6, 4),
        "p90_ms": round(stats.percentile(0.9) / 1e6, 4),
        "p99_ms": round(stats.percentile(0.99) / 1e6, 4),
        "total_ms": round(stats.total_ns / 1e6, 4),
        "self_ms": round(stats.self_ns / 1e6, 4),
    }
    if stats.errors:
        record["errors"] = stats.errors
    if stats.recompute_count:
        record |= {"recompute_count": stats.recompute_count, "recompute_ms": round(stats.recompute_ns / 1e6, 4)}
    if stats.device_count:
        record |= {
            "device_count": stats.device_count,
            "device_avg_ms": round(stats.device_ns / stats.device_count / 1e6, 4),
        }
    if stats.lag_count:
        record |= {
            "lag_count": stats.lag_count,
            "lag_avg_ms": round(stats.lag_ns / stats.lag_count / 1e6, 4),
            "drained_frac": round(stats.drained / stats.lag_count, 4),
        }
    return record


def _rows(thread: ThreadInterval, has_device: bool) -> list[list[str]]:
    own = stages_of(thread.role)
    rows, idle = [], []
    for name, stats in thread.stages.items():
        if stats.count or stats.recompute_count or name in (thread.open_stage, thread.open_outer):
            share = thread.seconds_in(name) / thread.wall_s
            rows.append([*_cells(name, thread.is_inside(name), stats, share), *_device_cells(stats, has_device)])
        elif name in own:
            idle.append(name)
    if rows and own:
        other = f"{100 * thread.other_s / thread.wall_s:.1f} %"
        rows.append(["other", "", "", "", "", other, *[""] * (3 * has_device)])
    if thread.open_stage is not None and thread.open_s > 1.0:
        rows.append([f"(in {thread.open_stage} for {thread.open_s:.1f} s)"])
    if rows and idle:
        rows.append([f"(never: {', '.join(idle)})"])
    return rows


def _cells(name: str, is_inside: bool, stats: ProfileStats, share: float) -> list[str]:
    label = ("  " if is_inside else "") + name
    if stats.errors:
        label += f" ({stats.errors} failed)"
    if stats.recompute_count:
        label += f" (+{stats.recompute_count} computed again)"
    if not stats.count:
        return [label, "0", "", "", "", f"{100 * share:.1f} %"]
    longest = "" if stats.max_ns is None else _ms(stats.max_ns)
    return [label, str(stats.count), _ms(stats.avg_ns), longest, _ms(stats.percentile(0.99)), f"{100 * share:.1f} %"]


def _device_cells(stats: ProfileStats, has_device: bool) -> list[str]:
    if not has_device:
        return []
    device = _ms(stats.device_ns / stats.device_count) if stats.device_count else ""
    if not stats.lag_count:
        return [device, "", ""]
    return [device, _ms(stats.lag_ns / stats.lag_count), f"{100 * stats.drained / stats.lag_count:.0f} %"]


def _ms(ns: float) -> str:
    ms = ns / 1e6
    return f"{ms:.3f}" if ms < 10 else f"{ms:.2f}" if ms < 100 else f"{ms:,.1f}"
