"""From what a look saw to its verdict: a pure function of the report, so that a saved one can be judged again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.profiling import observations as observe
from paceline.profiling.causes import conclude, judge_causes
from paceline.profiling.evidence import Conclusion, Figure, LevelId, Report, Thread
from paceline.profiling.observations import Key


def judged(report: Report, asked: Sequence[str] = ()) -> Report:
    """The report with observations, hypotheses and conclusion.

    Args:
        asked: Ids of hypotheses that the user wants an answer to; those that the report already holds stay asked.
    """
    asked = [*asked, *(each.id for each in report.hypotheses if each.asked and each.id not in asked)]
    figures = figures_of(report)
    is_stopped = _stands_stopped(report.threads, report.pid)
    hypotheses = judge_causes({} if is_stopped else figures, asked=asked, seconds=report.seconds)
    if is_stopped:
        conclusion = Conclusion(
            line=f"process {report.pid} stood stopped, by a signal or a debugger: there is no cause to look for",
            next=f"let it go on: `kill -CONT {report.pid}`, or end its debugger",
        )
    elif report.threads and not report.critical:
        conclusion = Conclusion(
            line="every thread waits, for a queue, a lock, a file or a time: nothing is at work that could be faster",
            next="judge one of them all the same: --thread NAME",
        )
    else:
        names = sorted({thread.role or thread.name for thread in report.threads if thread.tid in report.critical})
        where, side = ", ".join(names[:3]), report.pipeline
        conclusion = conclude(
            hypotheses,
            side=str(side.get("kind", "")),
            side_line=str(side.get("line", "")),
            gain=_side_gain(side) if side.get("kind") != "in turn" else None,  # that is of a second device
            where=where,
        )
    return report.model_copy(
        update={"observations": figures, "hypotheses": tuple(hypotheses), "conclusion": conclusion}
    )


def figures_of(report: Report) -> dict[str, Figure]:
    """Observations by name."""
    critical: set[Key] = {(thread.pid, thread.tid) for thread in report.threads if thread.tid in report.critical}
    where = next(iter(sorted(critical)), (report.pid, 0))[0]
    figures = observe.of_threads(report.threads, critical)
    figures |= observe.of_host(report.host, report.threads, report.processes)
    levels: tuple[LevelId, ...] = ("6", "3", "4b", "4")
    for id in levels:
        level = report.level(id)
        if level is not None and level.ok and level.in_verdict:
            figures |= observe.of_stacks(report.stacks, id, critical)
    gil = next((each for each in (*report.gils, report.gil) if each is not None and each.pid == where), None)
    if gil is not None:
        figures |= observe.of_gil(gil, critical)
    figures |= observe.of_allocator(report.allocator)
    figures |= observe.of_gpus(report.gpus)
    uses_cuda = next((each.cuda for each in report.processes if each.pid == where), None)
    if uses_cuda is not None:
        figures["process.cuda"] = Figure.read(float(uses_cuda), "1")
    roles = {role for thread in report.threads if (thread.pid, thread.tid) in critical for role in _roles(thread)}
    figures |= observe.of_stages(report.stages, roles)
    figures |= observe.of_device(report.stages, figures)
    if report.queue is not None:
        figures |= observe.of_queue(report.queue)
    side, kind = _side_gain(report.pipeline), report.pipeline.get("kind")
    if side is not None and kind in ("producer-bound", "consumer-bound"):
        figures["side.gain"] = side
    if "steps_done" in report.run:
        figures["run.warming_up"] = Figure.read(float(report.run["steps_done"] < 5), "0")
    mains = {thread.pid: {(thread.pid, thread.tid)} for thread in report.threads if thread.is_main}
    ranks: tuple[LevelId, ...] = ("3", "4")
    for id in ranks:
        figures |= observe.of_ranks(report.stacks, mains, id)
    figures |= observe.of_levels(report.levels)
    return observe.with_derived(figures)


def _roles(thread: Thread) -> list[str]:
    return [role for role in thread.role.split("+") if role]


def _side_gain(pipeline: dict[str, Any]) -> Figure | None:
    gain = pipeline.get("gain")
    if not gain:
        return None
    return Figure(value=gain["value"], interval=(gain["low"], gain["high"]), unit="ratio", level="0")


def _stands_stopped(threads: Sequence[Thread], pid: int) -> bool:
    """Whether the process stood still for most of the look, so that nothing which it was at costs it any time."""
    states = [thread.states for thread in threads if thread.pid == pid and thread.is_main]
    return any(each.get("T", 0.0) + each.get("t", 0.0) > 0.5 for each in states)
