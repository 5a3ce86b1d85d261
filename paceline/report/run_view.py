"""What a run's page is drawn from, and what its parts have in common."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.report.history import Events, Stages, Steps, Stretch
from paceline.report.page import (
    MISSING,
    Html,
    Record,
    is_number,
    number,
    table,
    tag,
)

SHOWN_ROLES = 64
"""Roles that are shown; of more their number is told."""
MAX_TEXT = 1200
"""Characters of an event that are shown: a traceback of the run's log belongs elsewhere."""


@dataclass(frozen=True)
class RunView:
    """All that is known of a run at a moment; anything may be empty.

    Attributes:
        state: As `paceline status --json` says it.
        record, report, config: ``run.json``, ``report.json`` and ``config.yaml``.
        checkpoints: `step`, `time`, `bytes`, `is_latest` and `is_best` of each complete one, in order.
        evaluations: `step`, `acceptance_length` and `mismatches` of each beside training, in order.
        process_gib: `now` and `peak` of the process on this host.
    """

    state: Record
    steps: Steps
    events: Events
    stages: Stages
    record: Record = field(default_factory=dict)
    report: Record = field(default_factory=dict)
    config: Record = field(default_factory=dict)
    checkpoints: Sequence[Record] = ()
    evaluations: Sequence[Record] = ()
    process_gib: Record = field(default_factory=dict)


def text_of(record: Record, name: str, default: str = MISSING) -> str:
    """A text of a record."""
    value = record.get(name)
    return value if isinstance(value, str) and value else default


def clock(at_s: object) -> str:
    """A moment in seconds since 1970 as local date and time."""
    if not is_number(at_s):
        return MISSING
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
    except (ValueError, OverflowError, OSError):
        return MISSING


def gib(value: object) -> str:
    """A size."""
    return f"{number(value, 2 if is_number(value) and value < 9.995 else 1)} GiB"


def cut(text: object) -> str:
    """A text, cut where it is long."""
    text = str(text)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " ..."


def evaluations_of(view: RunView) -> list[Record]:
    """Those that say a step and an acceptance length."""
    wanted = ("step", "acceptance_length")
    return [each for each in view.evaluations if all(is_number(each.get(name)) for name in wanted)]


def num_steps(stretches: Iterable[Stretch]) -> int:
    """Steps that stretches are made of."""
    return sum(max(stretch.counts.values(), default=0) for stretch in stretches)


def mean(stretches: Iterable[Stretch], name: str) -> float | None:
    """Average over steps of stretches; None where none has the figure."""
    found = [stretch for stretch in stretches if stretch.counts.get(name)]
    count = sum(stretch.counts[name] for stretch in found)
    return sum(stretch.sums[name] for stretch in found) / count if count else None


def ratio(stretches: Iterable[Stretch], part: str, whole: str) -> float | None:
    """Sum over sum of the steps that have both."""
    found = [stretch for stretch in stretches if stretch.counts.get(part) and stretch.counts.get(whole)]
    total = sum(stretch.sums[whole] for stretch in found)
    return sum(stretch.sums[part] for stretch in found) / total if total > 0 else None


def words(head: Sequence[str], rows: Iterable[Sequence[object]], kind: str = "") -> Html:
    """A table of words, which stand on the left; those of ``settings`` are broken where they are long."""
    return tag("div", table(head, rows), class_=f"words {kind}".strip())


def not_shown(count: int, what: str) -> list[Html]:
    return [tag("p", f"{number(count)} {what} more are not shown.")] if count > 0 else []
