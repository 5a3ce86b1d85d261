"""The page of a run, live or over: where it stands, what limits it, how it came there, and what went wrong when.

    run_page(name, run_parts(view))       one file that stays as it is
    live_page(name, run_parts(view), ..)  the same, kept up to date by `report.live`

Each part is markup by itself, so that only those that have changed are sent again. Times of the day are written out and
none is counted from now: a run that stands still has a page that does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.report.charts import bar_chart
from paceline.report.history import Stretch
from paceline.report.page import (
    Html,
    Record,
    columns,
    duration,
    figures,
    is_number,
    join,
    note,
    number,
    page,
    part_of,
    percent,
    section,
    tag,
)
from paceline.report.run_charts import progress, queue, stages_of
from paceline.report.run_log import about, batches, events_of, saved
from paceline.report.run_view import (
    RunView,
    clock,
    cut,
    evaluations_of,
    mean,
    num_steps,
    text_of,
)

RECENT_STEPS = 20
"""Steps that figures of now are averaged over, at least."""
STYLE = """
.live { color: var(--soft); font-size: .875rem; margin: 0 0 .6rem; }
.live::before { content: ""; display: inline-block; width: .6em; height: .6em; border-radius: 50%; margin-right: .5em;
  background: var(--c4); }
.live.on::before { background: var(--c2); }
.live.off::before { background: var(--warning-edge); }
.state { font-size: 1.15rem; color: var(--ink); }
.events { list-style: none; padding: 0; margin: 0; max-width: none; }
.events li { display: grid; grid-template-columns: 12.5rem 6rem 1fr; gap: .1rem 1rem; padding: .45rem .8rem;
  border-top: 1px solid var(--rule); border-left: 3px solid transparent; }
.events li > * { min-width: 0; overflow-wrap: anywhere; }
.events time, .events i { color: var(--soft); font-style: normal; }
.events .trouble { border-left-color: var(--warning-edge); background: var(--warning); }
.events .trouble b::before { content: "! "; }
.small .figures { margin: 0; }
.small .figures b { font-size: 1.4rem; letter-spacing: -.01em; }
.words td, .words th { text-align: left; white-space: nowrap; }
.settings td { white-space: normal; overflow-wrap: anywhere; min-width: 9rem; }
.shares th:first-child { white-space: nowrap; }
@media (max-width: 40rem) {
  .events li { grid-template-columns: 1fr auto; }
  .events li > :last-child { grid-column: 1 / -1; }
  .facts div { grid-template-columns: 1fr; gap: 0; }
}
"""


def run_parts(view: RunView) -> dict[str, Html]:
    """The parts of the page in reading order, by the name of the element that holds each."""
    return {
        "now": _now(view),
        "verdict": section("What limits it", *_verdict(view)),
        "progress": section("Progress", *progress(view)),
        "queue": section("Queue and waits", *queue(view)),
        "stages": section("Where the time goes", *stages_of(view)),
        "batches": section("Batches", *batches(view)),
        "saved": section("Checkpoints", *saved(view)),
        "events": section("What happened", *events_of(view)),
        "about": section("The run", *about(view)),
    }


def run_page(name: str, parts: Mapping[str, Html]) -> str:
    """The page as one HTML file that runs nothing."""
    return page(f"Run {name}", None, *_elements(parts), style=STYLE)


def live_page(name: str, parts: Mapping[str, Html], version: str, script: str) -> str:
    """The page as it is served: `script` puts new parts in place of old ones.

    Args:
        version: What `parts` are; the script asks for what came after.
    """
    told = "This page keeps itself up to date; that takes a browser that runs scripts."
    status = tag("p", told, class_="live", id="live", data_version=version)
    return page(f"Run {name}", None, status, *_elements(parts), style=STYLE, script=script)


def _elements(parts: Mapping[str, Html]) -> Iterable[Html]:
    return (tag("div", markup, id=name) for name, markup in parts.items())


def _now(view: RunView) -> Html:
    state = view.state
    return join([tag("p", _sentence(state), class_="state"), *_alarms(view), _headline(view)])


def _sentence(state: Record) -> str:
    phase, step, total = state.get("state"), state.get("step"), state.get("total_steps")
    ending = text_of(part_of(state, "ending"), "text", "")
    if phase in ("running", "stopped"):
        at = f"step {number(step)}"
        if is_number(step) and is_number(total) and total > 0:
            at += f" of {number(total)} ({100 * step / total:.1f} %)"
        left = f", about {_minutes(state['left_s'])} left" if is_number(state.get("left_s")) else ""
        return f"Training: {at}{left}." if phase == "running" else f"Stands still at {at}."
    known = {
        "loading or ending": "A process holds the run: it is loading its models, or about to end.",
        "not started": "Nothing has been trained here yet.",
        "unknown": f"Its process was started on {text_of(state, 'host')}: whether it runs is to be seen there.",
    }
    if ending and phase not in known:
        said, _, _ = ending.partition(": ")  # the reason, if there is one, follows in a warning
        return f"The last process {said}."
    return known.get(str(phase), "What became of the run is not known.")


def _minutes(seconds: float) -> str:
    """Time that is left, no finer than it is known."""
    return f"{seconds:.0f} s" if seconds < 60 else duration(60 * round(seconds / 60)).removesuffix(" 0 s")


def _alarms(view: RunView) -> list[Html]:
    """What nobody should miss."""
    state, found = view.state, list[Html]()

    def warn(headline: str, text: object = "") -> None:
        found.append(note(tag("strong", headline), " ", cut(text), is_warning=True))

    ending, pid = part_of(state, "ending"), state.get("pid")
    if state.get("state") == "stopped":
        warn("Stopped by a signal or a debugger.", f"kill -CONT {number(pid).replace(',', '')} lets it go on.")
    if state.get("state") == "died":
        warn("It was killed, or died without a word.", "paceline resume goes on from the last complete checkpoint.")
    elif ending.get("kind") == "failed":
        warn("It failed.", text_of(ending, "reason", "The reason was not written down."))
    if stalled := part_of(state, "stalled"):
        warn(f"Nothing moves since {clock(stalled.get('time'))}.", text_of(stalled, "reason", ""))
    if problem := part_of(state, "saving").get("problem"):
        warn("Checkpoints cannot be written.", problem)
    if is_number(bad := state.get("bad_batches")) and bad > 0:
        warn(f"Micro-batches left out: {number(bad)}.", "bad_batches.jsonl names the files and lines in them.")
    if problem := state.get("note"):
        warn("Not all of it can be read.", problem)
    return found


def _headline(view: RunView) -> Html:
    state, recent = view.state, _recent(view.steps.stretches)
    told = f"average of the last {number(num_steps(recent))} steps" if recent else ""
    done, total = state.get("step"), state.get("total_steps")
    shown: list[tuple[object, str, object]] = [
        (number(done), "steps", f"of {number(total)}" if is_number(total) else ""),
        (number(state.get("tok_per_s")), "tokens a second", f"over the last {number(state.get('recent_steps'))} steps"),
        (number(mean(recent, "loss"), 3), "loss", told),
        (number(mean(recent, "acceptance_length_est"), 2), "acceptance length, estimated", "on training batches"),
    ]
    best = _best(view)
    if best is not None:
        shown.append((number(best[0], 2), "acceptance length, measured", best[1]))
    return figures(*shown)


def _best(view: RunView) -> tuple[float, str] | None:
    """The highest measured acceptance length, by decoding if that was done, and what it is."""
    steps = view.steps
    decoded = [(each["acceptance_length"], each["step"]) for each in evaluations_of(view)]
    if decoded:
        value, at = max(decoded)
        return value, f"best so far, decoding at step {number(at)}"
    if found := steps.measured["validation_acceptance_length"]:
        at, value = max(found, key=lambda pair: pair[1])
        return value, f"best so far, on held-out rows at step {number(at)}"
    value = view.state.get("best_acceptance_length")
    return (value, "best so far, on held-out rows") if is_number(value) else None


def _recent(stretches: Sequence[Stretch]) -> list[Stretch]:
    """The last stretches, of `RECENT_STEPS` steps together if there are so many."""
    found: list[Stretch] = []
    for stretch in reversed(stretches):
        if num_steps(found) >= RECENT_STEPS:
            break
        found.insert(0, stretch)
    return found


def _verdict(view: RunView) -> list[Html]:
    is_over = view.state.get("pid") is None
    reported, seen = part_of(view.report, "verdict"), part_of(view.state, "verdict")
    verdict = reported if is_over and reported else seen or reported
    if not verdict:
        return []
    kind, gain = text_of(verdict, "kind"), part_of(verdict, "gain")
    in_turn, is_decided = kind == "in turn", kind not in ("in turn", "undecided")
    shown: list[tuple[object, str, object]] = [(kind, "verdict", f"over {duration(verdict.get('seconds'))}")]
    if is_number(gain.get("value")):
        interval = f"95 % interval {number(gain.get('low'), 2)} to {number(gain.get('high'), 2)}"
        shown.append((f"{number(gain['value'], 2)}×", "the speed, at most, with the remedy", interval))
    for name, label in (("target_per_s", "the targets could make"), ("drafter_per_s", "the drafter could take")):
        if is_number(verdict.get(name)) and is_decided:
            shown.append((f"{verdict[name]:.3g}", label, "batches a second"))
    get_s, put_s = (part_of(verdict, f"{side}_wait_frac").get("value") for side in ("get", "put"))
    if in_turn:
        bars = {"the target's turn": get_s, "the drafter's turn": 1 - get_s if is_number(get_s) else None}
    else:
        bars = {"drafter waits (get)": get_s, "targets wait (put)": put_s}
    chart = bar_chart("Share of the time", bars, percent, whole=1.0)
    reason = text_of(verdict, "reason", "")
    told = tag("p", _sentenced(reason)) if reason else Html()
    return [told, columns(tag("div", figures(*shown), class_="small"), chart)]


def _sentenced(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "."
