"""One frame of `paceline top`: what it shows, and how that becomes lines of a terminal. Reads nothing itself."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from paceline.cli.run_state import one_line
from paceline.report.page import duration

NAME_WIDTH = 25
"""Cells of a stage's name; that of the longest stage inside another."""

STILL_S = 5.0
"""Seconds without any change from which on a frame says so."""

NO_WEIGHT = 0.005
"""Share below which a stage is worth less than a gap, where there is no room for all."""

MIN_WIDTH = 40
MAX_BAR = 60


@dataclass(frozen=True)
class StageRow:
    """A stage of a thread over the last interval.

    Attributes:
        share: Of the thread's time, 0 to 1.
        avg_ms: Of the runs that ended; None if none did.
    """

    name: str
    share: float
    avg_ms: float | None = None
    is_open: bool = False
    is_inside: bool = False
    is_wait: bool = False


@dataclass(frozen=True)
class ThreadRows:
    """A thread in a role.

    Attributes:
        stage, for_s: Where it is, and how long it has been; None between stages.
        stages: In the order of a batch; empty before the first interval is over.
        other_share: Time in none of them.
    """

    role: str
    thread: str
    stage: str | None
    for_s: float
    batch: int | None = None
    is_waiting: bool = False
    stages: Sequence[StageRow] = ()
    other_share: float | None = None


@dataclass(frozen=True)
class Frame:
    """Everything that is shown.

    Attributes:
        process: Such as ``process 123 on host-a``.
        state: Empty for a process that runs; else what it does in place of it.
        still_s: Seconds since any thread has entered or left a stage, as far as is known.
        left_s, tok_per_s: None where they are not known.
        put_wait_frac, get_wait_frac: Shares of the last interval, 0 to 1; None before it is over.
        in_turn: One thread is target and drafter in turn; there is no queue.
        seconds: Length of the last interval.
        ledger, checkpoint: What became of batches, and the last checkpoint.
        alarms: What nobody should miss.
        counting: Whether and for whom stages are counted.
    """

    run: str
    process: str
    state: str = ""
    running_s: float = 0.0
    still_s: float = 0.0
    step: int = 0
    total_steps: int = 0
    left_s: float | None = None
    tok_per_s: float | None = None
    queue: int = 0
    queue_depth: int = 0
    put_wait_frac: float | None = None
    get_wait_frac: float | None = None
    in_turn: bool = False
    seconds: float = 0.0
    verdict: str = ""
    ledger: str = ""
    checkpoint: str = ""
    alarms: Sequence[str] = ()
    counting: str = ""
    threads: Sequence[ThreadRows] = field(default_factory=list)


def lines_of(frame: Frame, width: int, height: int | None = None, ascii_only: bool = False) -> list[Text]:
    """The frame in lines that fit; where there are more than `height`, the shortest stages are left out."""
    width = max(MIN_WIDTH, width)
    bar = _ascii_bar if ascii_only else _block_bar
    lines = [*_head(frame, width, bar), Text()]
    threads = [(_where(thread, width), list(_stages(thread, width, bar))) for thread in frame.threads]
    lines += _body(threads, None if height is None else height - len(lines))
    if height is not None and len(lines) > height:
        lines = [*lines[: max(0, height - 1)], Text(f" ... {len(lines) - height + 1} lines more", style="dim")]
    for line in lines:
        if ascii_only:
            line.plain = line.plain.encode("ascii", "replace").decode("ascii")
        line.rstrip()
        line.no_wrap, line.overflow = True, "crop"
        line.truncate(width, overflow="crop" if ascii_only else "ellipsis")
    return lines


def _body(threads: Sequence[tuple[Text, Sequence[_Stage]]], height: int | None) -> list[Text]:
    """Threads and their stages, as many as fit, the longest ones; gaps between threads only beside all that weigh."""
    stages = [stage for _, its in threads for stage in its]
    num_weighty = sum(stage.share >= NO_WEIGHT for stage in stages)
    room = len(stages) if height is None else height - 2 * len(threads) + 1
    gap = [Text()]
    if num_weighty > room:
        room, gap = room + len(threads) - 1, []
    kept = {id(stage) for stage in sorted(stages, key=lambda stage: -round(stage.share, 3))[: max(0, room)]}
    lines: list[Text] = []
    for where, its in threads:
        lines += [*(gap if lines else []), where, *(stage.line for stage in its if id(stage) in kept)]
    return lines


@dataclass(frozen=True)
class _Stage:
    """A stage's line, and what it weighs."""

    line: Text
    share: float


Bar = Callable[[float, int], str]


def _head(frame: Frame, width: int, bar: Bar) -> Iterator[Text]:
    running = f"for {duration(frame.running_s)}" if frame.running_s > 0 else ""
    yield _joined([(frame.run, "bold"), (frame.process, ""), (running, ""), (frame.counting, "dim")], width)
    if frame.state:
        yield Text(f" {frame.state}", style="bold red")
    for alarm in frame.alarms:
        yield from _labelled(" ", alarm, width, "bold red")
    if frame.still_s >= STILL_S or (frame.state and frame.still_s > 0):
        yield Text(f" no stage has changed for {duration(frame.still_s)}", style="bold yellow")
    if frame.total_steps > 0:
        yield _progress(frame, width, bar)
    yield _queue(frame, width, bar)
    for name, text in (("batches", frame.ledger), ("saved", frame.checkpoint), ("verdict", frame.verdict)):
        yield from _labelled(f" {name:<10}", text, width, "")


def _labelled(label: str, text: str, width: int, style: str) -> Iterator[Text]:
    """A text in three lines at most."""
    room = max(20, width - len(label) - 1)
    for i, part in enumerate(textwrap.wrap(one_line(text), room, max_lines=3, placeholder=" ...")):
        yield Text().append(label if i == 0 else " " * len(label), style="dim").append(part, style=style)


def _progress(frame: Frame, width: int, bar: Bar) -> Text:
    share = frame.step / frame.total_steps
    speed = "" if frame.tok_per_s is None else f"{frame.tok_per_s:,.0f} tokens/s"
    left = "" if frame.left_s is None else f"about {duration(frame.left_s)} left"
    count = f"{frame.step:,}/{frame.total_steps:,}"
    return _with_bar("step", share, "cyan", [count, f"{100 * share:.1f} %", speed, left], width, bar)


def _queue(frame: Frame, width: int, bar: Bar) -> Text:
    if frame.in_turn:
        if frame.get_wait_frac is None:
            return Text(" target and drafter take turns", style="dim")
        facts = [_percent(frame.get_wait_frac).strip(), "of the time it is the target's turn"]
        return _with_bar("in turn", frame.get_wait_frac, "magenta", facts, width, bar)
    facts = [f"{frame.queue}/{frame.queue_depth}"]
    for name, share in (("put wait", frame.put_wait_frac), ("get wait", frame.get_wait_frac)):
        if share is not None:
            facts.append(f"{name} {_percent(share).strip()}")
    if frame.seconds > 0:
        facts.append(f"of the last {duration(frame.seconds)}")
    return _with_bar("queue", frame.queue / max(1, frame.queue_depth), "magenta", facts, width, bar)


def _with_bar(label: str, share: float, style: str, facts: Iterable[str], width: int, bar: Bar) -> Text:
    size = max(8, min(40, width - 70))
    line = Text().append(f" {label:<9} ", style="dim").append(_in_rail(bar(share, size), size, bar), style=style)
    for fact in filter(None, facts):
        if cell_len(line.plain) + 2 + cell_len(fact) > width:
            break
        line.append(f"  {fact}")
    return line


def _in_rail(drawn: str, size: int, bar: Bar) -> str:
    """A bar whose full length can be seen."""
    rest = size - cell_len(drawn)
    return drawn + ("." if bar is _ascii_bar else "·") * rest


def _where(thread: ThreadRows, width: int) -> Text:
    """A thread's first line."""
    style = "yellow" if thread.is_waiting else "red" if thread.for_s > STILL_S else "green"
    where = (
        ("between stages", "dim")
        if thread.stage is None
        else (f"in {thread.stage} for {duration(thread.for_s)}", style)
    )
    batch = f"batch {thread.batch:,}" if thread.batch is not None else ""
    name = thread.thread if thread.thread != thread.role else ""
    return _joined([(thread.role, "bold"), where, (batch, ""), (name, "dim")], width)


def _stages(thread: ThreadRows, width: int, bar: Bar) -> Iterator[_Stage]:
    """A line for each of its stages, and one for the time in none."""
    shows_ms = width >= 76
    size = max(4, min(MAX_BAR, width - 3 - NAME_WIDTH - 10 - 14 * shows_ms - 1))
    for stage in thread.stages:
        mark = " " if not stage.is_open else ">" if bar is _ascii_bar else "▸"
        label = set_cell_size(("  " if stage.is_inside else "") + one_line(stage.name), NAME_WIDTH)
        line = Text().append(f" {mark} ", style="bold").append(label).append(f" {_percent(stage.share)}  ")
        if shows_ms:
            line.append(" " * 14 if stage.avg_ms is None else f"{_ms(stage.avg_ms):>9} ms  ", style="dim")
        colour = "yellow" if stage.is_wait else "blue" if stage.is_inside else "green"
        yield _Stage(line.append(bar(stage.share, size), style=colour), stage.share)
    if thread.other_share is not None:
        line = Text(f"   {set_cell_size('other', NAME_WIDTH)} {_percent(thread.other_share)}  ", style="dim")
        yield _Stage(line.append(" " * 14 * shows_ms).append(bar(thread.other_share, size)), thread.other_share)


def _joined(parts: Iterable[tuple[str, str]], width: int) -> Text:
    """Parts side by side, as many from the left as fit; the first is cut if it alone is too long."""
    line = Text(" ")
    for content, style in parts:
        text = one_line(content)
        if not text:
            continue
        gap = "  " if len(line.plain) > 1 else ""
        if cell_len(line.plain) + len(gap) + cell_len(text) > width and gap:
            continue
        line.append(gap).append(text, style=style)
    return line


def _block_bar(share: float, size: int) -> str:
    eighths = round(8 * size * min(1.0, max(0.0, share)))
    full, part = divmod(eighths, 8)
    return "█" * full + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[part]


def _ascii_bar(share: float, size: int) -> str:
    return "#" * round(size * min(1.0, max(0.0, share)))


def _percent(share: float) -> str:
    return f"{100 * share:5.1f} %"


def _ms(ms: float) -> str:
    return f"{ms:.3f}" if ms < 10 else f"{ms:.2f}" if ms < 100 else f"{ms:,.1f}"
