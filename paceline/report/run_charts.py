"""A run by its steps and stages: loss, acceptance, speed, the queue, and where the time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.report.charts import Series, line_chart, stacked_bar
from paceline.report.history import RoleTime, Steps, Stretch
from paceline.report.page import (
    MISSING,
    Html,
    Record,
    columns,
    duration,
    is_number,
    items_of,
    number,
    part_of,
    tag,
)
from paceline.report.run_view import (
    SHOWN_ROLES,
    RunView,
    evaluations_of,
    mean,
    not_shown,
    num_steps,
    ratio,
    text_of,
    words,
)

LINE_POINTS = 60
"""Points of the averaged line of a chart; what single steps did stands behind it."""
FEW_STEPS = 40
"""Up to so many, the steps themselves are the line."""
SHOWN_THREADS = 64
MAX_PARTS = 7
"""Stages of a role that are shown by themselves; the rest is one part."""


def progress(view: RunView) -> list[Html]:
    """Loss, acceptance length and throughput by step."""
    steps = view.steps
    if not steps.stretches:
        return [tag("p", "No step has been written down yet.")]
    decoded = [(each["step"], each["acceptance_length"]) for each in evaluations_of(view)]
    length = _lines(steps, "acceptance_length_est", "training batches, estimated")
    for name, points in (
        ("held-out rows, measured", steps.measured["validation_acceptance_length"]),
        ("prompts, decoded", decoded or steps.measured["measured_acceptance_length"]),
    ):
        if points:
            length.append(Series(name, points))
    every = f"; of single steps the lowest and the highest of each {number(steps.size)}" if steps.size > 1 else ""
    speed = _rates(steps, "tokens a second", "tokens", "seconds")
    return [
        columns(
            line_chart(
                "Loss",
                _lines(steps, "loss", "loss"),
                x_label="step",
                y_label="loss",
                caption=f"As weighted in training{every}",
            ),
            line_chart(
                "Acceptance length",
                length,
                x_label="step",
                y_label="tokens per forward",
                caption="Tokens per forward pass of the target",
            ),
            line_chart(
                "Throughput",
                speed,
                x_label="step",
                y_label="tokens a second",
                from_zero=True,
                caption="Document tokens trained on; validation and saves are left out of the time",
            ),
        )
    ]


def _groups(stretches: Sequence[Stretch]) -> list[Sequence[Stretch]]:
    size = -(-len(stretches) // LINE_POINTS)
    return [stretches[i : i + size] for i in range(0, len(stretches), size)]


def _middle(group: Sequence[Stretch]) -> float:
    first, last = group[0].first, group[-1].last
    return last if first == last else (first + last) / 2


def _lines(steps: Steps, name: str, label: str, scale: float = 1.0) -> list[Series]:
    """A figure by step: each by itself where there are few, else averages in front of what single steps had."""
    known = [stretch for stretch in steps.stretches if stretch.counts.get(name)]
    if not known:
        return []
    if steps.size == 1 and len(known) <= FEW_STEPS:
        return [Series(label, [(each.first, scale * each.sums[name]) for each in known])]
    single = [point for each in known for point in _ends(each, name, scale)]
    groups = _groups(known)
    size = max(num_steps(group) for group in groups)
    means = Series(
        f"{label}, average of {number(size)} steps" if size > 1 else label,
        [(_middle(group), _scaled(mean(group, name), scale)) for group in groups],
    )
    return [Series("single steps", single, is_faint=True), means] if size > 1 else [means]


def _ends(stretch: Stretch, name: str, scale: float) -> list[tuple[int, float]]:
    """The lowest and the highest of the steps of a stretch."""
    if stretch.first == stretch.last:
        return [(stretch.first, scale * stretch.sums[name])]
    return [(stretch.first, scale * stretch.lowest[name]), (stretch.last, scale * stretch.highest[name])]


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else scale * value


def _rates(
    steps: Steps, label: str, part: str, whole: str, scale: float = 1.0, most: float | None = None
) -> list[Series]:
    """Sums over sums, by groups of steps."""
    points = []
    for group in _groups(steps.stretches) if steps.stretches else []:
        value = _scaled(ratio(group, part, whole), scale)
        points.append((_middle(group), value if most is None or value is None else min(value, most)))
    return [Series(label, points)] if any(value is not None for _, value in points) else []


def queue(view: RunView) -> list[Html]:
    """How full the queue was, and how long each side waited for the other."""
    steps, config = view.steps, view.config
    if not steps.stretches:
        return []
    in_turn = view.state.get("in_turn") is True
    targets = part_of(config, "topology").get("targets")
    num_targets = targets if is_number(targets) and targets > 0 else 1
    get = _rates(steps, "the target's turn" if in_turn else "drafter waits (get)", "get_wait_s", "seconds", 100, 100)
    put = _rates(steps, "targets wait (put)", "put_wait_s", "seconds", 100 / num_targets, 100)
    if in_turn:
        told = "One thread is target and drafter in turn: nothing waits in a queue"
        return [
            columns(
                line_chart(
                    "The target's turn", get, x_label="step", y_label="% of the time", from_zero=True, caption=told
                )
            )
        ]
    waiting, depth = part_of(view.state, "queue"), part_of(config, "pipeline").get("queue_depth")
    places = waiting.get("depth") or (depth if is_number(depth) else None)
    told = f"Batches that wait when a step ends, of {number(places)} places"
    if is_number(waiting.get("waiting")):
        told += f"; now {number(waiting['waiting'])}"
    average = f"; the average of {number(num_targets)} targets" if num_targets > 1 else ""
    return [
        columns(
            line_chart(
                "Queue",
                _lines(steps, "queue", "batches waiting")[-1:],  # single steps have them all, from none to a full one
                x_label="step",
                y_label="batches",
                from_zero=True,
                caption=told,
            ),
            line_chart(
                "Waits",
                [*get, *put],
                x_label="step",
                y_label="% of the time",
                from_zero=True,
                caption=f"Put: the queue is full; get: it is empty{average}",
            ),
        )
    ]


def stages_of(view: RunView) -> list[Html]:
    """Where threads of each role spent their time, as far as it was counted, and where they are."""
    stages, blocks = view.stages, []
    threads = [each for each in items_of(view.state, "threads") if isinstance(each, Mapping)]
    if stages.whole:
        told = (
            f"Counted for {duration(stages.seconds)}, in {number(stages.num_tables)} tables. A stage's time leaves out "
            "that of stages inside of it."
        )
        names = sorted(stages.whole, key=_place)
        bars = [_role(name, stages.whole[name]) for name in names[:SHOWN_ROLES]]
        blocks += [tag("p", told), columns(*bars), *not_shown(len(names) - SHOWN_ROLES, "roles")]
        if stages.num_tables > 1 and stages.last:
            now = [_role(name, stages.last[name]) for name in sorted(stages.last, key=_place)[:SHOWN_ROLES]]
            last = tag("summary", f"The last table alone, {duration(stages.last_s)}")
            blocks.append(tag("details", last, columns(*now)))
    if threads:
        rows = [
            [text_of(each, "role"), text_of(each, "thread"), text_of(each, "stage", "between stages"), _since(each)]
            for each in threads[:SHOWN_THREADS]
        ]
        blocks += [tag("h3", "Threads now"), words(("role", "thread", "where it is", "for"), rows)]
        blocks += not_shown(len(threads) - SHOWN_THREADS, "threads")
    if not stages.whole and blocks:
        blocks.insert(0, tag("p", "Stages were not counted. paceline profile on RUN switches that on in a live run."))
    return blocks


def _since(thread: Record) -> str:
    for_s = thread.get("for_s")
    return duration(for_s) if is_number(for_s) and for_s >= 1 else "< 1 s" if is_number(for_s) else MISSING


def _place(role: str) -> tuple[int, int, str]:
    """Targets, drafters, others, as a batch passes them."""
    kind = 0 if role.startswith("target") else 1 if role.startswith("drafter") else 2
    last = role.rpartition("-")[2]
    return kind, int(last) if last.isascii() and last.isdecimal() else 0, role


def _role(name: str, spent: RoleTime) -> Html:
    longest = sorted(spent.stages.items(), key=lambda pair: -pair[1])
    shown = dict(longest[: MAX_PARTS - 2] if len(longest) > MAX_PARTS - 1 else longest)
    if (rest := sum(spent.stages.values()) - sum(shown.values())) > 0:
        shown["in other stages"] = rest
    shown["in no stage"] = spent.other_s
    return stacked_bar(name, shown)
