"""The page of a look at a running process: the verdict first, then what it rests on.

Its reader wants to know which side is slow, why, and how sure that is; each part below the verdict answers the next
doubt: what waits for what, what threads did, where in the code, by which evidence, and what the look itself disturbed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from paceline.report import flame
from paceline.report.attach_text import (
    CATEGORIES,
    answer_text,
    busiest_first,
    category_name,
    clean,
    figure_text,
    first,
    gain_means,
    gil_text,
    gils_of,
    heading,
    is_idle,
    level_name,
    main_categories,
    next_text,
    pipeline_parts,
    ranked,
    share_text,
    short,
    short_rate,
    shortened,
    thread_name,
    title_of,
    value_of,
    verdict_title,
    when,
)
from paceline.report.charts import Series, line_chart
from paceline.report.page import (
    MISSING,
    Html,
    Record,
    badge,
    bullets,
    facts,
    figures,
    is_number,
    items_of,
    join,
    note,
    page,
    part_of,
    section,
    table,
    tag,
)

MAX_ROWS, MAX_ALL_ROWS, MAX_PROCESSES = 40, 200, 50
"""Threads of a process, and of all, that have a row, more are named only; and processes whose threads are shown."""

MAX_NAMED = 300
"""Idle threads that are named, processes, observations: more help nobody."""

MAX_FLAMES, MAX_CELLS = 12, 2400
"""Threads with a flame graph, and cells of all of them: what keeps a page below a megabyte or two."""

EFFECTS = {"supports": "for", "refutes": "against", "neither": "neither", "missing": "missing"}

ABOUT_THREADS = """\
Upper bar: on a CPU (filled), ready but without one (hatched), neither (empty); the upright mark is how long it held the
GIL. Lower bar: what its stacks were at."""

ABOUT_JUDGED = " Judged threads are those that the cause was looked for in."

ABOUT_FLAMES = """\
Each cell is a call, below its caller; its width is its share of the thread's samples. Branches end in a cell, in bold,
that names what the thread did there. Dashed: it waits."""

ABOUT_SCORE = """\
A cause is supported, refuted or undecided by points that evidence gives; what was predicted stands beside what was
seen. Points compare causes with each other, they are no probability."""

ABOUT_STOPS = """\
What each level saw, and what it did to the process: stopped is the share of the level's window in which the process
could not run because of it."""

PREDICTED, SEEN, FIGURE, SPEAKS, POINTS = "predicted", "seen", "figure", "speaks", "points"

STYLE = (
    flame.STYLE
    + """
.lead { font-size: clamp(1.15rem, 1rem + .7vw, 1.45rem); line-height: 1.45; color: var(--ink); max-width: 44em; }
.figures .interval { display: inline; white-space: nowrap; margin: 0; }
.answer { margin: 0 0 1.2rem; }
.answer b { display: block; }
.whole { white-space: nowrap; }
.lead + .facts, .figures + .facts { margin-top: 1.8rem; }
td { white-space: nowrap; }
.words td { white-space: normal; }
.facts .line + .line { margin-top: .4rem; }
.told { margin-bottom: .3rem; }
.outcome { font-weight: 650; white-space: nowrap; }
.pipe { display: block; width: 100%; max-width: 940px; height: auto; margin: 0 0 1.2rem; }
.pipe.tall { display: none; max-width: 360px; }
.pipe text { fill: var(--ink); font-size: 14px; }
.pipe .head { font-size: 16px; font-weight: 650; }
.pipe .quiet { fill: var(--soft); }
.pipe .card { fill: var(--panel); stroke: var(--rule); }
.pipe .slow .card { stroke: var(--ink); stroke-width: 2.5; }
.pipe .frame { fill: var(--paper); stroke: var(--c4); }
.pipe .part { fill: var(--c0); }
.pipe .hatch { stroke: var(--c1); stroke-width: 3; }
.pipe .edge { stroke: var(--c1); fill: none; }
.pipe .arrow { stroke: var(--soft); stroke-width: 2; fill: none; }
.pipe .tip { fill: var(--soft); }
.small .drawing { height: 6.5rem; }
.threads { list-style: none; margin: 0; padding: 0; max-width: none; }
.threads > li { display: grid; grid-template-columns: minmax(9rem, 15rem) 1fr; gap: .2rem 1.5rem; padding: .7rem 0;
  border-top: 1px solid var(--rule); }
.threads .who { min-width: 0; overflow-wrap: anywhere; }
.threads .who small { display: block; }
.threads .badge { margin-left: 0; }
.threads .did { min-width: 0; }
.threads .did small { display: block; margin: .15rem 0 .45rem; }
.lane { position: relative; display: flex; height: 1.15rem; background: var(--panel);
  box-shadow: inset 0 0 0 1px var(--c4); }
.lane > i { flex: none; min-width: 1px; overflow: hidden; font: .75rem/1.15rem inherit; }
.lane .cpu { background: var(--c0); }
.lane .ready { background: repeating-linear-gradient(135deg, var(--c1) 0 3px, var(--paper) 3px 6px); }
.lane .gil { position: absolute; top: -3px; bottom: -3px; width: 4px; margin-left: -2px; background: var(--ink);
  border: solid var(--paper); border-width: 0 1px; }
.lane span { font-size: .75rem; line-height: 1.15rem; font-style: normal; padding: 0 .35em; white-space: nowrap;
  display: block; overflow: hidden; text-overflow: ellipsis; color: var(--ink); }
.swatch { display: inline-block; width: 1.3em; height: .85em; margin-right: .35em; vertical-align: -.05em; }
.leaves { font-size: .875rem; padding-left: 1.2em; margin: 0 0 1rem; max-width: none; overflow-wrap: anywhere; }
.leaves code { font: .8rem ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
.more summary { font-size: 1rem; color: var(--ink); }
.more { margin: 0; padding: .55rem 0; border-top: 1px solid var(--rule); }
.more > :last-child { margin-bottom: .8rem; }
.more[open] > summary { margin-bottom: .6rem; }
.words { overflow-x: auto; }
.words td, .words th { text-align: left; min-width: 5.5rem; }
.words th:first-child { min-width: 11rem; max-width: 22rem; overflow-wrap: anywhere; }
.words td.wide { min-width: 15rem; }
.words tr.supports td:nth-child(4), .words tr.refutes td:nth-child(4) { font-weight: 650; }
.tree { list-style: none; padding: 0; margin: 0 0 1.4rem; max-width: none; font-size: .875rem; }
.tree li { padding: .25rem 0 .25rem calc(var(--depth) * 1.2rem); overflow-wrap: anywhere; }
@media (max-width: 46rem) {
  .pipe.wide { display: none; }
  .pipe.tall { display: block; }
  .threads > li { grid-template-columns: 1fr; }
  .figures b { font-size: 1.7rem; }
  .words th:first-child { min-width: 7.5rem; overflow-wrap: break-word; }
  .words td { min-width: 0; }
  .evidence thead { display: none; }
  .evidence table, .evidence tbody, .evidence tr { display: block; }
  .evidence tr { padding: .5rem 0; }
  .evidence th, .evidence td, .evidence td.wide, .evidence th:first-child { display: grid; max-width: none;
    grid-template-columns: 5.5rem 1fr; gap: 0 .8rem; padding: .1rem 0; }
  .evidence th::before, .evidence td::before { content: attr(data-label); color: var(--soft); font-size: .875rem;
    font-weight: 400; grid-row: span 2; }
  .evidence .line { grid-column: 2; }
}
"""
)


def render_html(report: Record) -> str:
    """The page as one HTML file; parts that were not seen are left out, or said to be missing.

    Args:
        report: `evidence.Report` as JSON.
    """
    return page(
        verdict_title(report),
        _prose(part_of(report, "conclusion").get("line") or ""),
        *_verdict(report),
        section("What you asked", *_asked(report)),
        section("Queue and waits", *_pipeline(report)),
        section("What threads did", *_threads(report)),
        section("Who held the GIL", *_gil(report)),
        section("Where in the code", *_flames(report)),
        section("Categories", *_categories(report)),
        section("Causes and evidence", *_hypotheses(report)),
        section("Stages", *_stages(report)),
        section("GPUs and memory", *_gpus(report)),
        section("What was disturbed, and what is missing", *_levels(report)),
        section("The process", *_process(report)),
        style=STYLE,
    )


def _prose(text: object) -> Html:
    """A sentence whose figures stay with their intervals on one line."""
    parts = re.split(r"(\S{1,12}(?: %)? \[[^\]\s]{1,24}\])", str(text))
    return join(tag("span", part, class_="whole") if i % 2 else part for i, part in enumerate(parts))


# Verdict


def _verdict(report: Record) -> list[Html]:
    conclusion = part_of(report, "conclusion")
    cause, upcoming = conclusion.get("cause"), next_text(conclusion)
    blocks = [tag("p", tag("small", heading(report)))]
    if not cause:
        what = f"Measure next: {upcoming}." if upcoming else "Nothing is known that would decide it."
        blocks.append(note(tag("b", "Undecided. "), what, is_warning=True))
    shown = {
        "Slower side": conclusion.get("side"),
        "Cause": title_of(report, cause) if cause else "",
        "Against it": _against(conclusion) if cause else "",
        "Measure next": upcoming if cause else "",
    }
    blocks.append(_headline(report))
    return [*blocks, facts({name: value for name, value in shown.items() if value})]


def _against(conclusion: Record) -> object:
    against = items_of(conclusion, "against")
    return join([tag("span", each, class_="line") for each in against]) if against else "nothing that was seen"


def _headline(report: Record) -> Html:
    conclusion, queue = part_of(report, "conclusion"), part_of(report, "queue")
    gil = next(iter(gils_of(report)), {})
    utilisations = [gpu.get("utilisation") for gpu in items_of(report, "gpus")]
    busiest = max(utilisations, key=lambda each: value_of(each) or 0.0, default=None)
    steps = short_rate(value_of(report["steps_per_s"])) if report.get("steps_per_s") else ""
    known = [
        (conclusion.get("gain"), "gain", gain_means(conclusion)),
        (queue.get("get_wait"), "of the time the drafter waits", "for features (get)"),
        (queue.get("put_wait"), "of the time targets wait", "for room in the queue (put)"),
        ({"value": gil.get("share"), "interval": items_of(gil, "interval")}, "of the time the GIL is held", ""),
        (busiest, "of the time the GPU runs anything", "busiest GPU, if several"),
        (report.get("tokens_per_s"), "tokens a second", f"{steps} steps a second" if steps else ""),
    ]
    items = []
    for figure, label, remark in known:
        if value_of(figure) is not None:
            value, _, interval = figure_text(figure).partition(" [")
            items.append((value.removesuffix(" a second"), label, _remark(remark, interval)))
    return figures(*items) if items else Html()


def _remark(remark: str, interval: str) -> Html:
    behind = tag("span", f"[{interval}", class_="interval") if interval else Html()
    return join([remark, " " if remark and interval else "", behind])


def _asked(report: Record) -> list[Html]:
    return [
        tag("p", tag("b", title_of(report, each.get("id"))), _prose(_sentence(answer_text(each))), class_="answer lead")
        for each in ranked(report)
        if each.get("asked")
    ]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


# Queue and waits


def _pipeline(report: Record) -> list[Html]:
    queue, pipeline = part_of(report, "queue"), part_of(report, "pipeline")
    line = pipeline.get("line")
    blocks = [_picture(report, tall) for tall in (False, True)] if queue else []
    if line:
        blocks.append(tag("p", _prose(line)))
    points = [(each[0], each[1]) for each in items_of(queue, "history") if isinstance(each, list) and len(each) == 2]
    if points:
        history = [Series("batches", points)]
        drawn = line_chart("Batches in the queue", history, x_label="seconds", y_label="batches", from_zero=True)
        blocks.append(tag("div", drawn, class_="small"))
    return blocks


def _picture(report: Record, is_tall: bool) -> Html:
    """Targets, queue and drafter: beside each other, or below each other for a phone."""
    parts, queue = pipeline_parts(report), part_of(report, "queue")
    side = part_of(report, "conclusion").get("side") or part_of(report, "pipeline").get("kind")
    fill = (value_of(queue.get("waiting")) or 0.0) / max(1, queue.get("depth") or 1)
    name = "hatch-tall" if is_tall else "hatch-wide"
    makes = f"could make {parts['can_make']} batches a second" if parts["can_make"] else ""
    takes = f"could take {parts['can_take']} batches a second" if parts["can_take"] else ""
    put, get = (value_of(queue.get(wait)) for wait in ("put_wait", "get_wait"))
    cards = [
        _card(parts["targets"], side == "producer-bound", put, True, name, f"waiting {parts['put_wait']}", makes),
        _card("queue", False, fill, False, name, f"{parts['waiting']} batches in it", ""),
        _card("drafter", side == "consumer-bound", get, True, name, f"waiting {parts['get_wait']}", takes),
    ]
    step_x, step_y = (0, 170) if is_tall else (340, 0)
    drawn = [tag("g", card, transform=f"translate({1 + i * step_x} {1 + i * step_y})") for i, card in enumerate(cards)]
    for i in range(2):
        drawn.append(_arrow(f"{parts['rate']}/s", i, is_tall))
    width, height = (340, 470) if is_tall else (936, 132)
    spoken = (
        f"{parts['targets']} waiting {parts['put_wait']}, {makes}; queue with {parts['waiting']} batches; "
        f"drafter waiting {parts['get_wait']}, {takes}; {parts['rate']} batches a second"
    )
    pattern = tag(
        "pattern",
        tag("line", x1=0, y1=0, x2=0, y2=7, class_="hatch"),
        id=name,
        width=7,
        height=7,
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )
    return tag(
        "svg",
        tag("title", spoken),
        tag("defs", pattern),
        *drawn,
        role="img",
        viewBox=f"0 0 {width} {height}",
        class_="pipe tall" if is_tall else "pipe wide",
    )


def _card(head: str, is_slow: bool, share: float | None, is_wait: bool, hatch: str, says: str, able: str) -> Html:
    """A side with its share of waiting, hatched, or the queue with how full it is."""
    width = 222 * min(max(share or 0.0, 0.0), 1.0)
    bar = [tag("rect", x=16, y=40, width=222, height=16, class_="frame")]
    if is_wait:
        place = {"x": 16, "y": 40, "width": f"{width:.1f}", "height": 16}
        bar.append(tag("rect", fill=f"url(#{hatch})", **place))
        bar.append(tag("rect", **place, class_="edge"))
    else:
        bar.append(tag("rect", x=16, y=40, width=f"{width:.1f}", height=16, class_="part"))
    return tag(
        "g",
        tag("rect", x=0, y=0, width=254, height=128, rx=6, class_="card"),
        tag("text", head, x=16, y=27, class_="head"),
        tag("text", "the slower side", x=238, y=27, text_anchor="end", class_="head") if is_slow else Html(),
        *bar,
        tag("text", says, x=16, y=80),
        tag("text", able, x=16, y=106, class_="quiet") if able else Html(),
        class_="slow" if is_slow else None,
    )


def _arrow(rate: str, i: int, is_tall: bool) -> Html:
    if is_tall:
        x, y = 128, 132 + 170 * i
        shape = tag("path", d=f"M{x} {y}V{y + 28}", class_="arrow")
        tip = tag("path", d=f"M{x - 6} {y + 26}L{x} {y + 36}L{x + 6} {y + 26}Z", class_="tip")
        return tag("g", shape, tip, tag("text", rate, x=x + 16, y=y + 23))
    x = 258 + 340 * i
    shape = tag("path", d=f"M{x} 65H{x + 68}", class_="arrow")
    tip = tag("path", d=f"M{x + 67} 59L{x + 79} 65L{x + 67} 71Z", class_="tip")
    return tag("g", shape, tip, tag("text", rate, x=x + 37, y=53, text_anchor="middle"))


# Threads


def _threads(report: Record) -> list[Html]:
    threads, critical = items_of(report, "threads"), items_of(report, "critical")
    if not threads:
        return []
    shown = {name for thread in threads for name, _ in main_categories(thread, len(CATEGORIES))}
    key = flame.kinds(name for name in CATEGORIES if name in shown)
    blocks: list[Html] = [tag("p", ABOUT_THREADS, ABOUT_JUDGED if critical else ""), key]
    by_process: dict[object, list[Record]] = {report.get("pid"): []}
    for thread in threads:
        by_process.setdefault(thread.get("pid"), []).append(thread)
    room = MAX_ALL_ROWS
    still = {
        pid: of
        for pid, of in by_process.items()
        if of and pid != report.get("pid") and all(is_idle(thread, critical) for thread in of)
    }
    at_work = [(pid, of) for pid, of in by_process.items() if of and pid not in still]
    for pid, of in at_work[:MAX_PROCESSES]:
        busy = busiest_first((thread for thread in of if not is_idle(thread, critical)), critical)
        shown_here, rest = busy[: min(MAX_ROWS, room)], busy[min(MAX_ROWS, room) :]
        room -= len(shown_here)
        if len(by_process) > 1:
            blocks.append(tag("h3", _process_name(report, pid)))
        if shown_here:
            blocks.append(tag("ul", *(_thread(each, critical) for each in shown_here), class_="threads"))
        blocks.append(_idle([*rest, *(thread for thread in of if is_idle(thread, critical))], bool(rest)))
    if len(at_work) > MAX_PROCESSES:
        told = f"Threads of {len(at_work) - MAX_PROCESSES:,} more processes are left out."
        blocks.append(tag("p", tag("small", told)))
    if still:
        names = [tag("li", _process_name(report, pid)) for pid in list(still)[:MAX_PROCESSES]]
        told = f"and {len(still)} {'process' if len(still) == 1 else 'processes'} in which nothing ran"
        blocks.append(tag("details", tag("summary", told), tag("ul", *names, class_="leaves")))
    return blocks


def _process_name(report: Record, pid: object) -> str:
    process = first(items_of(report, "processes"), "pid", pid)
    role, command = clean(process.get("role") or ""), shortened(clean(process.get("command") or ""), 80)
    return ", ".join(filter(None, [f"Process {pid}", role, command]))


def _thread(thread: Record, critical: Sequence[object]) -> Html:
    remarks = [f"{thread.get('tid')}", thread.get("comm") if thread.get("comm") != thread.get("name") else ""]
    remarks += ["began in the window"] * bool(thread.get("is_new")) + ["ended"] * bool(thread.get("is_gone"))
    mark = badge("judged") if thread.get("tid") in critical else Html()
    who = tag(
        "div",
        tag("b", shortened(thread_name(thread), 64)),
        tag("small", ", ".join(map(clean, filter(None, remarks)))),
        mark,
        class_="who",
    )
    return tag("li", who, tag("div", *_lanes(thread), class_="did"))


def _lanes(thread: Record) -> list[Html]:
    cpu, ready, gil = (value_of(thread.get(name)) for name in ("cpu", "runqueue", "gil"))
    blocks = []
    if cpu is not None or ready is not None or gil is not None:
        bars = [_bar("cpu", cpu), _bar("ready", min(ready or 0.0, 1.0 - min(cpu or 0.0, 1.0)))]
        if gil is not None and gil > 0:
            bars.append(tag("i", class_="gil", style=f"left:{100 * min(gil, 1.0):.1f}%"))
        told = _measured(thread)
        blocks += [tag("div", *bars, class_="lane", role="img", aria_label=told), tag("small", told)]
    known = main_categories(thread, len(CATEGORIES))
    if known:
        total = max(1.0, sum(share for _, share in known))
        bars = [_bar(flame.fill(name), share / total, category_name(name)) for name, share in known]
        shown = ", ".join(f"{category_name(name)} {share_text(share)}" for name, share in known[:5])
        blocks += [tag("div", *bars, class_="lane", role="img", aria_label=shown), tag("small", shown)]
    return blocks or [tag("small", "nothing was measured")]


def _measured(thread: Record) -> str:
    names = {"cpu": "on a CPU", "runqueue": "ready without one", "gil": "held the GIL"}
    parts = [
        f"{figure_text(thread[name])} {told}" for name, told in names.items() if value_of(thread.get(name)) is not None
    ]
    if is_number(switches := thread.get("involuntary")) and switches >= 1:
        parts.append(f"{short(switches)} times a second taken off its CPU")
    if thread.get("syscall"):
        parts.append(f"mostly in {clean(thread['syscall'])}")
    if (stopped := value_of(part_of(thread, "states").get("t"))) is not None and stopped > 0:
        parts.append(f"{share_text(stopped)} stopped by the tool")
    return ", ".join(parts)


def _bar(kind: str, share: float | None, label: str = "") -> Html:
    if share is None or share <= 0:
        return Html()
    inside = tag("span", label) if label and share >= 0.15 else Html()
    return tag("i", inside, class_=kind, style=f"width:{100 * min(share, 1.0):.2f}%")


def _idle(threads: Sequence[Record], are_some_busy: bool) -> Html:
    if not threads:
        return Html()
    names: dict[tuple[str, str], list[object]] = {}
    for thread in threads[:MAX_NAMED]:
        names.setdefault((thread_name(thread), clean(thread.get("syscall") or "")), []).append(thread.get("tid"))
    items = [
        f"{name}{f' in {syscall}' if syscall else ''}: {', '.join(map(clean, tids))}"
        for (name, syscall), tids in names.items()
    ]
    if len(threads) > MAX_NAMED:
        items.append(f"and {len(threads) - MAX_NAMED:,} more")
    kind = "less busy and idle" if are_some_busy else "idle"
    told = f"and {len(threads):,} {kind} thread{'s' if len(threads) != 1 else ''}"
    return tag("details", tag("summary", told), tag("ul", *(tag("li", item) for item in items), class_="leaves"))


# GIL


def _gil(report: Record) -> list[Html]:
    blocks, gils = [], gils_of(report)
    for gil in gils:
        of = f"{_process_name(report, gil.get('pid'))}: " if len(gils) > 1 else ""
        blocks.append(tag("p", _prose(f"{of}{_sentence(gil_text(gil))}")))
        rows = [
            [
                f"{clean(each.get('name'))} ({each.get('tid')})",
                tag(
                    "span",
                    figure_text({"value": each.get("share"), "interval": items_of(each, "interval")}),
                    class_="whole",
                ),
                join([tag("span", where, class_="line mono") for where in items_of(each, "where")]),
            ]
            for each in items_of(gil, "holders")[:MAX_ROWS]
        ]
        if rows:
            blocks.append(_words(["held by", "share of the time", "mostly in"], rows))
    return blocks


# Flame graphs


def _flames(report: Record) -> list[Html]:
    stacks = items_of(report, "stacks")
    level = next((id for id in ("4", "3") if any(each.get("level") == id for each in stacks)), None)
    if level is None:
        return []
    by_thread: dict[tuple[object, object], list[Record]] = {}
    for stack in stacks:
        if stack.get("level") == level:
            by_thread.setdefault((stack.get("pid"), stack.get("tid")), []).append(stack)
    threads = {(each.get("pid"), each.get("tid")): each for each in items_of(report, "threads")}
    critical = items_of(report, "critical")
    known = busiest_first(items_of(report, "threads"), critical)
    rank = {
        (each.get("pid"), each.get("tid")): i
        for i, each in enumerate(known)
        if each.get("role") or each.get("tid") in critical
    }
    order = sorted(by_thread, key=lambda key: (rank.get(key, len(rank)), -_busy_samples(by_thread[key])))
    shown = order[:MAX_FLAMES]
    room = min(flame.MAX_CELLS, MAX_CELLS // len(shown))
    seen = {flame.category_of(each) for key in shown for each in by_thread[key]}
    blocks = [tag("p", f"{_level_told(report, level)} {ABOUT_FLAMES}")]
    blocks.append(flame.kinds(name for name in CATEGORIES if name in seen))
    for i, key in enumerate(shown):
        thread = threads.get(key, {})
        name = f"{thread_name(thread) if thread else 'thread'} ({key[1]})"
        total = sum(map(flame.count_of, by_thread[key]))
        summary = tag("summary", tag("b", name), f", {total:,} samples: {_mix(by_thread[key], total)}")
        drawing = flame.flame_graph(f"Stacks of {name}", by_thread[key], max_cells=room)
        # Threads of the same name close each other: a selector without a script.
        blocks.append(tag("details", summary, drawing, name="flame", open="" if i == 0 else None, class_="more"))
    if len(order) > len(shown):
        blocks.append(tag("p", tag("small", f"{len(order) - len(shown):,} threads with fewer samples are left out.")))
    return blocks


def _level_told(report: Record, level: str) -> str:
    record = first(items_of(report, "levels"), "id", level)
    told = f"From level {level_name(record)}." if record else f"From level {level}."
    if record and not record.get("in_verdict", True):
        told += f" The verdict does not rest on it: {clean(record.get('reason') or 'it is not sound enough')}."
    return told


def _busy_samples(stacks: Sequence[Record]) -> int:
    return sum(flame.count_of(each) for each in stacks if flame.category_of(each) not in flame.WAITING)


def _mix(stacks: Sequence[Record], total: int) -> str:
    counts: dict[str, int] = {}
    for stack in stacks:
        counts[flame.category_of(stack)] = counts.get(flame.category_of(stack), 0) + flame.count_of(stack)
    most = sorted(counts.items(), key=lambda each: -each[1])[:3]
    return ", ".join(f"{category_name(name)} {share_text(count / max(1, total))}" for name, count in most)


# Categories


def _categories(report: Record) -> list[Html]:
    blocks = []
    for each in items_of(report, "sorted"):
        level = first(items_of(report, "levels"), "id", each.get("level"))
        name = f"Level {level_name(level) if level else clean(each.get('level'))}"
        is_weak = bool(each.get("is_weak"))
        told = f"{each.get('samples', 0):,} samples; no rule knows {figure_text(each.get('unmatched'))} of them"
        told += "; more than a fifth, so this level is weak" if is_weak else ""
        kept = part_of(each, "categories")
        rows = [
            [
                join([tag("i", class_=f"swatch {flame.fill(category)}"), category_name(category)]),
                tag("span", figure_text(kept[category]), class_="whole"),
                ", ".join(map(clean, items_of(kept[category], "rules"))) or MISSING,
            ]
            for category in sorted(kept, key=lambda name: -(value_of(kept[name]) or 0.0))
        ]
        blocks.append(tag("h3", name, badge("weak") if is_weak else Html()))
        blocks.append(tag("p", tag("small", _prose(told)), class_="told"))
        blocks.append(_words(["category", "share of samples", "rules"], rows))
    return blocks


def _words(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """A table of words, which stand left; wide ones scroll inside."""
    return tag("div", table(head, rows), class_="words")


# Hypotheses


def _hypotheses(report: Record) -> list[Html]:
    known = ranked(report)
    return [tag("p", ABOUT_SCORE), *map(_hypothesis, known)] if known else []


def _hypothesis(hypothesis: Record) -> Html:
    outcome = clean(hypothesis.get("outcome"))
    is_open = outcome == "supported" or bool(hypothesis.get("asked"))
    score = f", {short(hypothesis.get('score'))} points"
    gain = f", gain {figure_text(hypothesis['gain'])}" if hypothesis.get("gain") else ""
    summary = tag(
        "summary",
        tag("b", hypothesis.get("title") or hypothesis.get("id")),
        ": ",
        tag("span", outcome, class_="outcome"),
        f"{score}{gain}",
        badge("asked") if hypothesis.get("asked") else Html(),
    )
    upcoming = next_text(hypothesis)
    below = tag("p", f"Measure next: {upcoming}.") if upcoming else Html()
    rows = map(_evidence, items_of(hypothesis, "evidence"))
    head = tag("tr", *(tag("th", name, scope="col") for name in (PREDICTED, SEEN, FIGURE, SPEAKS, POINTS)))
    body = tag("table", tag("thead", head), tag("tbody", *rows))
    evidence = tag("div", body, class_="scroll words evidence", tabindex="0")
    if not items_of(hypothesis, "evidence"):
        evidence = tag("p", "Nothing was seen for or against it.")
    identity = tag("p", tag("small", f"id: {clean(hypothesis.get('id'))}"))
    return tag("details", summary, evidence, below, identity, open="" if is_open else None, class_="more")


def _evidence(evidence: Record) -> Html:
    effect, figure = clean(evidence.get("effect")), part_of(evidence, "figure")
    wanted = tag(
        "span",
        tag("span", evidence.get("key"), class_="mono"),
        " ",
        tag("span", evidence.get("wanted"), class_="whole"),
    )
    source = [f"level {clean(figure['level'])}"] if figure.get("level") is not None else []
    source += [f"{figure['samples']:,} samples"] if is_number(figure.get("samples")) else []
    source += [f"rules {', '.join(map(clean, items_of(figure, 'rules')))}"] if items_of(figure, "rules") else []
    behind = tag("small", ", ".join(source), class_="line") if source else Html()
    points = value_of(evidence.get("points")) or 0.0
    return tag(
        "tr",
        tag("th", wanted, scope="row", data_label=PREDICTED),
        tag("td", tag("span", _prose(evidence.get("says"))), class_="wide", data_label=SEEN),
        tag("td", tag("span", figure_text(figure) if figure else MISSING, class_="whole"), behind, data_label=FIGURE),
        tag("td", EFFECTS.get(effect, effect), data_label=SPEAKS),
        tag("td", f"{points:+.2g}" if points else "0", data_label=POINTS),
        class_=effect if effect in EFFECTS else None,
    )


# Stages, GPUs, memory


def _stages(report: Record) -> list[Html]:
    blocks = []
    for record in items_of(report, "stages"):
        stages, wall = part_of(record, "stages"), record.get("wall_s")
        if not any(_runs(stage) for stage in stages.values()):
            continue
        has_device = any("device_avg_ms" in stage or "lag_avg_ms" in stage for stage in stages.values())
        head = ["stage", "count", "avg ms", "p50", "p99", "max", "own share", "share"]
        head += ["device ms", "lag ms", "drained"] if has_device else []
        rows = [_stage(name, stage, wall, has_device) for name, stage in stages.items() if _runs(stage)]
        never = [clean(name) for name, stage in stages.items() if not _runs(stage)]
        role, thread = clean(record.get("role") or ""), clean(record.get("thread") or "")
        told = f"{record.get('batches', MISSING)} batches in {short(wall)} s"
        if is_number(wall) and wall > 0 and is_number(record.get("other_s")):
            told += f"; {share_text(record['other_s'] / wall)} of the time in no stage"
        told += f"; one batch in {record['sampled_one_in']} was counted" if record.get("sampled_one_in") else ""
        told += f"; never: {', '.join(never)}" if never else ""
        blocks.append(tag("h3", f"{role} ({thread})" if thread not in ("", role) else role))
        blocks += [tag("p", tag("small", told), class_="told"), table(head, rows)]
    return blocks


def _runs(stage: object) -> bool:
    return isinstance(stage, Mapping) and bool(stage.get("count") or stage.get("recompute_count"))


def _stage(name: str, stage: Record, wall: object, has_device: bool) -> list[object]:
    def share(key: str) -> str:
        ms = stage.get(key)
        return share_text(ms / 1000 / wall) if is_number(ms) and is_number(wall) and wall > 0 else MISSING

    again = f" (+{stage['recompute_count']} computed again)" if stage.get("recompute_count") else ""
    failed = f" ({stage['errors']} failed)" if stage.get("errors") else ""
    cells: list[object] = [f"{clean(name)}{again}{failed}", stage.get("count", 0)]
    cells += [_ms(stage.get(key)) for key in ("avg_ms", "p50_ms", "p99_ms", "max_ms")]
    cells += [share("self_ms"), share("total_ms")]
    if has_device:
        drained = stage.get("drained_frac")
        cells += [_ms(stage.get("device_avg_ms")), _ms(stage.get("lag_avg_ms")), share_text(drained)]
    return cells


def _ms(value: object) -> str:
    if not is_number(value):
        return MISSING
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:,.1f}"


def _gpus(report: Record) -> list[Html]:
    blocks = [block for gpu in items_of(report, "gpus") for block in _gpu(gpu)]
    counters = [[clean(name), figure_text(figure)] for name, figure in part_of(report, "allocator").items()]
    if counters:
        blocks += [tag("h3", "Device allocator"), table(["counter", "over the window"], counters)]
    for number, collective in enumerate(items_of(report, "collectives")[:MAX_ROWS]):
        if number == 0:
            blocks.append(tag("h3", "Collectives"))
        shown = ((name, value) for name, value in collective.items() if isinstance(value, (str, int, float)))
        blocks.append(tag("p", ", ".join(f"{clean(name)} {clean(value)}" for name, value in shown)))
    return blocks


def _gpu(gpu: Record) -> list[Html]:
    used, total = (figure_text({"value": gpu.get(key), "unit": "bytes"}) for key in ("memory_used", "memory_total"))
    ours = {
        True: "the process runs on it",
        False: "the process was not seen on it",
        None: "whether it is ours: not known",
    }
    links = [f"in {figure_text(gpu['pcie_rx_gb_s'])}"] if gpu.get("pcie_rx_gb_s") else []
    links += [f"out {figure_text(gpu['pcie_tx_gb_s'])}"] if gpu.get("pcie_tx_gb_s") else []
    links += (
        [f"of at most {short(gpu['pcie_limit_gb_s'])} GB/s"] if links and is_number(gpu.get("pcie_limit_gb_s")) else []
    )
    limits = ", ".join(
        f"{clean(name)} {share_text(share)} of readings" for name, share in part_of(gpu, "limits").items()
    )
    shown = {
        "Any kernel runs": gpu.get("utilisation") and figure_text(gpu["utilisation"]),
        "Memory": f"{used} of {total}" if is_number(gpu.get("memory_used")) else "",
        "Power": _of(gpu, "power_w", "power_limit_w", "W"),
        "SM clock": _of(gpu, "sm_clock_mhz", "max_sm_clock_mhz", "MHz"),
        "PCIe": ", ".join(links),
        "Clocks held back by": limits,
        "Driver": gpu.get("driver"),
    }
    name = f"GPU {gpu.get('index')}, {clean(gpu.get('name'))}: {ours.get(gpu.get('is_ours'), ours[None])}"
    return [tag("h3", name), facts({key: value for key, value in shown.items() if value})]


def _of(gpu: Record, key: str, limit: str, unit: str) -> str:
    if not gpu.get(key):
        return ""
    return figure_text(gpu[key]) + (f" of {short(gpu[limit])} {unit}" if is_number(gpu.get(limit)) else "")


# What was disturbed, and what is missing


def _levels(report: Record) -> list[Html]:
    levels = items_of(report, "levels")
    blocks = []
    for level in levels:
        if level.get("ok") and level.get("in_verdict", True) and not level.get("reason"):
            continue
        state = "missing" if not level.get("ok") else "seen" if level.get("in_verdict", True) else "not in the verdict"
        parts: list[object] = [tag("b", f"Level {level_name(level)}: {state}. ")]
        for before, key in (("", "reason"), ("What helps: ", "fix"), ("Without it: ", "costs")):
            if level.get(key):
                told = f"{before}{clean(level[key]).rstrip('.')}."
                parts.append(tag("span", told[:1].upper() + told[1:], class_="line"))
        blocks.append(note(*parts, is_warning=state != "seen"))
    rows = [_level(level) for level in levels]
    if rows:
        head = ["level", "state", "window s", "samples", "failed", "stopped", "predicted", "longest ms", "tool CPU s"]
        blocks.insert(0, table(head, rows))
        blocks.insert(0, tag("p", ABOUT_STOPS))
    return [*blocks, bullets(*items_of(report, "notes")) if items_of(report, "notes") else Html()]


def _level(level: Record) -> list[object]:
    state = "missing" if not level.get("ok") else "in the verdict" if level.get("in_verdict", True) else "left out"
    of = part_of(level, "disturbance")
    longest = of.get("longest_stop_s")
    return [
        level_name(level),
        state,
        short(level.get("seconds")) if level.get("ok") else MISSING,
        level.get("samples", 0),
        level.get("errors", 0),
        share_text(of.get("stop_frac")),
        share_text(of.get("predicted_stop_frac")),
        short(1000 * longest) if is_number(longest) else MISSING,
        short(of.get("tool_cpu_s")),
    ]


# The process


def _process(report: Record) -> list[Html]:
    host, run = part_of(report, "host"), part_of(report, "run")
    machine = [
        clean(host.get("cpu_model") or ""),
        f"{host['cores']} cores" if host.get("cores") else "",
        f"{short(host['cpus'])} usable" if host.get("cpus") else "",
        f"load {short(host['load'])}" if host.get("load") else "",
        f"held back in {figure_text(host['throttled'])} of periods" if host.get("throttled") else "",
    ]
    shown: dict[str, object] = {
        "Begin": when(report),
        "Window": f"{short(report.get('seconds'))} s",
        "Machine": ", ".join(filter(None, machine)),
        "Kernel": host.get("kernel"),
        "Versions": ", ".join(f"{clean(name)} {clean(value)}" for name, value in part_of(report, "versions").items()),
        "Run": ", ".join(f"{clean(k)} {clean(v)}" for k, v in run.items() if isinstance(v, (str, int, float))),
        "Schema": report.get("schema"),
    }
    return [_tree(report), facts({name: value for name, value in shown.items() if value}), _observations(report)]


def _tree(report: Record) -> Html:
    """Processes below their parents; commands are redacted already."""
    processes = items_of(report, "processes")[:MAX_NAMED]
    parents = {each.get("pid"): each.get("parent") for each in processes}
    items = []
    for process in _in_order(processes):
        depth, pid = 0, process.get("parent")
        while pid in parents and depth < 8:
            depth, pid = depth + 1, parents[pid]
        about = [
            f"Python {clean(process['python'])}" if process.get("python") else "",
            process.get("role"),
            process.get("end"),
        ]
        told = ", ".join(clean(each) for each in about if each)
        command = tag("span", process.get("command"), class_="mono")
        items.append(
            tag("li", tag("b", process.get("pid")), f" {told}: " if told else " ", command, style=f"--depth:{depth}")
        )
    return tag("ul", *items, class_="tree") if items else Html()


def _in_order(processes: Sequence[Record]) -> list[Record]:
    """Each process right before its children."""
    pids = {each.get("pid") for each in processes}
    children: dict[object, list[Record]] = {}
    for each in processes:
        parent = each.get("parent")
        children.setdefault(parent if parent in pids and parent != each.get("pid") else None, []).append(each)
    ordered, waiting = [], children.pop(None, [])[::-1]
    while waiting:
        each = waiting.pop()
        ordered.append(each)
        waiting += children.pop(each.get("pid"), [])[::-1]
    return ordered + [each for rest in children.values() for each in rest]


def _observations(report: Record) -> Html:
    found = list(part_of(report, "observations").items())[:MAX_NAMED]
    if not found:
        return Html()
    rows = [[clean(name), figure_text(figure), clean(figure.get("level", MISSING))] for name, figure in found]
    told = tag("summary", f"{len(found)} observations that causes were judged by")
    return tag("details", told, table(["observation", "figure", "level"], rows))
