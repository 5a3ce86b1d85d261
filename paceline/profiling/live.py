"""Inside the training process: a thread that watches the page's control word, prints tables and writes files.

It takes no part in the counting. When it cannot run, as in a process that hangs, the page still says everything.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from paceline.profiling import page as layout
from paceline.profiling import stages
from paceline.profiling.intervals import Interval
from paceline.profiling.page import Control, Page, Snapshot

log = logging.getLogger(__name__)

STAGES_FILE = "stages.jsonl"
POLL_S = 0.2
"""Seconds between looks at the control word: a change shows in the output that much later; in the counts, at once."""

MAX_COST_FRAC = 0.01
"""Share of a thread's time that counting may take; above, batches are left out."""


COST_EVERY_NS = 10 * 10**9
"""How often the cost is looked at where no tables are made."""


def trace_file(folder: Path, until_ns: int) -> Path:
    """Where the events of a trace window are written when it is over."""
    return folder / f"trace-{until_ns}.json"


class Others(Protocol):
    """The run's processes beside this one."""

    def count(self, is_on: bool) -> None:
        """Have all count stages, or leave it; does not wait for them."""

    def snapshots(self, ends_interval: bool = True) -> dict[str, Snapshot]:
        """Their pages by role, of those that answer soon."""

    def places(self) -> dict[str, dict[str, Any]]:
        """Where each role runs: ``pid``, ``host`` and ``device``."""

    def trace(self, left_ns: int) -> None:
        """Have all keep the runs of their stages for so long; does not wait for them."""

    def events(self) -> list[dict[str, Any]]:
        """What they kept, as `stages.collect_events` has it but by this process's clock, with ``role``, ``host``, how
        far the clock there was ``ahead_ns``, and ``clock_error_ns``: how wrong that may be."""


class Reporter:
    """Prints and records each interval while profiling is on.

    Args:
        page: This process's.
        folder: The run's ``profile`` folder.
        show: Prints a text.
        interval_s: On from the start with so many seconds; 0: off until switched on.
        others: Processes that count when this one does, and have a part of each table; None: there are none.
    """

    def __init__(
        self,
        page: Page,
        folder: Path,
        show: Callable[[str], None],
        interval_s: float = 0.0,
        others: Others | None = None,
    ) -> None:
        self._others, self._others_before = others, dict[str, Snapshot]()
        self._page, self._folder, self._show = page, folder, show
        self._control = Control.of(page.words[layout.CONTROL])
        self._first: Snapshot | None = None
        self._trace_until = self._told_until = 0
        self._has_failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="profiler", daemon=True)
        if interval_s > 0:
            self.switch(True, interval_s)

    def start(self) -> None:
        """Start watching; an interval that is due from the start begins now."""
        self._look_safely()
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread is to be had: the last look still makes a table
            log.warning("no tables while the run lasts: %s", error)

    def stop(self) -> None:
        """Print the last, partial interval and end. In a forked child: nothing."""
        if self._page.pid != os.getpid():
            return
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)
        if not self._thread.is_alive():
            self._look_safely(is_last=True)

    def switch(self, is_on: bool, interval_s: float) -> None:
        """Change the control word, as others may."""
        self._page.set_control(Control.of(self._page.words[layout.CONTROL]).changed(is_on, interval_s))

    def toggle(self, interval_s: float = 10.0) -> None:
        """Tables if there are none, and off if there are; `paceline top` counts without tables, which is neither."""
        now = Control.of(self._page.words[layout.CONTROL])
        has_tables = now.is_on and now.interval_s > 0
        self.switch(not has_tables, 0.0 if has_tables else interval_s)

    def _run(self) -> None:
        with stages.named_thread("profiler"):
            while not self._stop.wait(POLL_S):
                self._look_safely()

    def _look_safely(self, is_last: bool = False) -> None:
        if self._has_failed:
            if Control.of(self._page.words[layout.CONTROL]).is_on:
                self.switch(False, 0.0)  # whoever switched it on again sees that it is off
            return
        try:
            self._look(is_last)
        except Exception as error:  # whatever it is, the run is worth more than its profile
            log.warning("profiling stops: %s: %s", type(error).__name__, error)
            self._has_failed = True
            self.switch(False, 0.0)

    def _look(self, is_last: bool = False) -> None:
        control = Control.of(self._page.words[layout.CONTROL])
        if control != self._control or (control.is_on and self._first is None):
            if self._control.is_on and self._control.interval_s and self._first is not None:
                self._emit()
            control = Control.of(self._page.words[layout.CONTROL])  # off by now if nothing can be written
            self._change(control)
        if self._first is not None and control.interval_s:
            passed_s = (time.monotonic_ns() - self._first.taken_ns) / 1e9
            if passed_s >= control.interval_s or is_last:
                self._emit()
        elif self._first is not None and time.monotonic_ns() - self._first.taken_ns > COST_EVERY_NS:
            before, self._first = self._first, self._take()  # counted for `paceline top`, without tables
            self._sample(Interval.between(before, self._first))
        self._trace()

    def _change(self, control: Control) -> None:
        if control.is_on and control.interval_s and not (self._control.is_on and self._control.interval_s):
            self._show(f"profiling is on, a table every {control.interval_s:g} s; {self._cost_note()}")
        elif self._control.interval_s and not control.interval_s:
            self._show("profiling is off")
        self._control = control
        if self._others is not None:
            self._others.count(control.is_on)
            self._others_before = self._others.snapshots() if control.is_on and control.interval_s else {}
        self._first = self._take() if control.is_on else None

    def _cost_note(self) -> str:
        off, on = (self._page.words[word] for word in (layout.COST_OFF, layout.COST_ON))
        return f"a stage costs {on / 1e3:.1f} us ({off / 1e3:.1f} us when off)"

    def _take(self) -> Snapshot:
        self._page.words[layout.INTERVAL] += 1
        return self._page.snapshot()

    def _emit(self) -> None:
        before, number = self._first, self._page.words[layout.INTERVAL]
        assert before is not None
        self._first = after = self._take()
        interval = Interval.between(before, after, number)
        self._sample(interval)
        interval = self._with_others(interval)
        self._show(interval.table())
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / STAGES_FILE, "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(record) + "\n" for record in interval.records()))
        except OSError as error:
            log.warning("profiling is off: %s cannot be written: %s", self._folder / STAGES_FILE, error.strerror)
            self.switch(False, 0.0)
            self._control, self._first = Control.of(self._page.words[layout.CONTROL]), None

    def _with_others(self, interval: Interval) -> Interval:
        """The interval with the threads of the other processes that were there at both ends of it."""
        if self._others is None:
            return interval
        before, self._others_before = self._others_before, self._others.snapshots()
        self._others.count(True)  # also of those that have come since
        threads = list(interval.threads)
        for role, after in self._others_before.items():
            if role in before and before[role].pid == after.pid:
                threads += Interval.between(before[role], after, after.interval - 1).threads
        return replace(interval, threads=threads)

    def _sample(self, interval: Interval) -> None:
        """Count fewer batches where counting all of them costs more than it may, and say so; what a stage costs when
        off remains."""
        words, busiest = self._page.words, max(interval.threads, key=_num_runs, default=None)
        if busiest is None or busiest.num_batches < 3:
            return
        a_run_ns = max(0, words[layout.COST_ON] - words[layout.COST_OFF])
        cost = _num_runs(busiest) * interval.sample_every * a_run_ns / 1e9 / busiest.wall_s
        every = max(1, math.ceil(cost / MAX_COST_FRAC))
        if every > 2 * words[layout.SAMPLE_EVERY] or (every > 1 and words[layout.SAMPLE_EVERY] == 1):
            words[layout.SAMPLE_EVERY] = every  # never back: intervals of two kinds would be hard to compare
            self._show(
                f"counting every batch costs {busiest.role} {100 * cost:.1f} % of its time: one in {every} is counted "
                "from here on"
            )

    def _trace(self) -> None:
        """Tell the other processes of a window that has begun, and write down the events of one that is over."""
        until, now = self._page.words[layout.TRACE_UNTIL], time.monotonic_ns()
        if until > now and until != self._told_until and self._others is not None:
            self._told_until = until
            self._others.trace(until - now)
        if until and until != self._trace_until and now >= until:
            self._trace_until = until
            processes = [stages.collect_events(self._page, until)]
            if self._others is not None:
                elsewhere = self._others.events() if self._told_until == until else []
                missing = sorted(set(self._others.places()) - {each["role"] for each in elsewhere})
                own = {"role": "drafter-0", "host": platform.node(), "missing": missing}
                processes = [processes[0] | own, *elsewhere]
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                place = trace_file(self._folder, until)
                partial = place.with_name(f".{place.name}.{os.getpid()}")
                partial.write_text(json.dumps({"processes": processes}), encoding="utf-8")
                os.replace(partial, place)
            except OSError as error:
                log.warning("the trace cannot be written below %s: %s", self._folder, error.strerror)


def _num_runs(thread: Any) -> int:
    return sum(stats.count for stats in thread.stages.values())
