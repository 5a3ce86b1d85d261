"""The page of a look begins with its verdict and shows all it rests on, as text, whoever named the threads."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from paceline.profiling import evidence
from paceline.report.attach import MAX_FLAMES, render_html
from tests.unit.report.attach_reports import PID, TARGETS, foreign_report, pipeline_report, python_frames
from tests.unit.report.reader import HOSTILE, VISIBLE, check


def headings(page: str) -> list[str]:
    """Second-level headings in order."""
    return re.findall(r"<h2>([^<]*)</h2>", page)


def with_text(value: Any, text: str) -> Any:
    """The same report with another text in the place of every one that is foreign."""
    ours = {"supported", "refuted", "undecided", "supports", "refutes", "neither", "missing", "producer-bound"}
    if isinstance(value, dict):
        kept = ("level", "unit", "category")
        return {
            (text if key.startswith("num_") else key): each if key in kept else with_text(each, text)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [with_text(each, text) for each in value]
    return text if isinstance(value, str) and value not in ours else value


def test_verdict_is_first_and_all_parts_follow() -> None:
    """The page opens with the verdict, then what the user asked, then the parts in the order of doubts."""
    page = render_html(pipeline_report())
    reader = check(page)
    text = reader.text()
    assert "<h1>Producer-bound: launch overhead</h1>" in page
    assert text.index("producer-bound (target side)") < text.index("What you asked")
    assert headings(page) == [
        "What you asked",
        "Queue and waits",
        "What threads did",
        "Who held the GIL",
        "Where in the code",
        "Categories",
        "Causes and evidence",
        "Stages",
        "GPUs and memory",
        "What was disturbed, and what is missing",
        "The process",
    ]
    assert "Refuted: the GIL is held 8 % [6.3-10] of the time (predicted > 70 %, level 2)." in text
    assert "nothing that was seen" in text


def test_foreign_process_has_neither_queue_nor_stages() -> None:
    """Parts that were not seen vanish with their headings, and an undecided verdict says what to measure."""
    page = render_html(foreign_report())
    text = check(page).text()
    expected = ["What threads did", "Causes and evidence", "What was disturbed, and what is missing", "The process"]
    assert headings(page) == expected
    assert "<h1>Undecided</h1>" in page and "<svg" not in page
    assert "Measure next: the same look with the right to trace (about 8 s)." in text
    assert "What helps: run it as root, or with --cap-add SYS_PTRACE." in text


def test_empty_report_is_a_page() -> None:
    """Nothing seen is a page that says so."""
    report = evidence.Report(taken_at=0, seconds=0, pid=1).model_dump(mode="json", by_alias=True)
    assert "Nothing is known that would decide it" in check(render_html(report)).text()


def test_queue_is_drawn_for_wide_and_narrow_windows() -> None:
    """Both drawings carry the waits, the fill and the rates, and mark the slower side in words."""
    page = render_html(pipeline_report())
    drawings = re.findall(r'<svg role="img" viewBox="[^"]*" class="pipe.*?</svg>', page)
    assert len(drawings) == 2
    for drawing in drawings:
        for told in ("2 targets", "the slower side", "4.8 of 20 batches in it", "waiting 16 % [13-19]", "8.13/s"):
            assert f">{told}</text>" in drawing
        assert 'width="53.3"' in drawing  # 4.8 of 20 of the bar
    assert "Batches in the queue" in page


def test_threads_have_bars_and_idle_ones_are_folded() -> None:
    """Roles come first, each with its shares in words and a mark for the GIL; the idle ones are a click away."""
    page = render_html(pipeline_report())
    text = check(page).text()
    assert text.index("target-0") < text.index("drafter-0 (drafter-step)") < text.index("pt_autograd_0")
    assert "97 % on a CPU, 1 % ready without one, 3 % [1.8-4.2] held the GIL" in text
    assert 'style="left:3.0%"' in page
    assert "launch 41 %, dispatch 30 %, Python 17 %, GIL wait 7 %" in text
    assert "and 22 idle threads" in text and "Process 4790" in text


def test_flame_graphs_are_of_the_native_level_one_open() -> None:
    """Level 4 is drawn where it is there and said to be left out of the verdict, else level 3; one thread is open."""
    report = pipeline_report()
    page = render_html(report)
    opened = re.findall(r'<details name="flame"( open="")? class="more">', page)
    assert opened == [' open=""', "", ""]
    assert "The verdict does not rest on it: it stopped the process 5.2 % of its window" in check(page).text()
    assert "cuLaunchKernel" in page
    report["stacks"] = [each for each in report["stacks"] if each["level"] == "3"]
    page = render_html(report)
    assert "From level 3, Python stacks" in check(page).text() and "cuLaunchKernel" not in page


def test_hypotheses_show_predicted_and_seen() -> None:
    """Supported and asked ones stand open, and evidence has what was wanted, seen, its source, effect and points."""
    page = render_html(pipeline_report())
    check(page)
    states = dict(
        re.findall(r'<details class="more"><summary><b>([^<]*)</b>|<details open="" class="more"><summary><b>()', page)
    )
    assert {"The GPU is the limit", "Clocks are held back"} <= set(states)
    assert page.count('<details open="" class="more"><summary><b>') == 2
    row = next(row for row in re.findall(r"<tr class=.*?</tr>", page) if "launch_and_dispatch" in row)
    shown = re.sub(r"<[^>]*>", " ", row)
    for told in ("&gt; 50 %", "71 % [67-75]", "level 3, 412 samples, rules launch.cuda, dispatch.ops", "for", "+2"):
        assert told in shown


def test_levels_stages_gpus_and_processes_are_shown() -> None:
    """What stopped the process, stages with their device times, GPUs, and commands as they were redacted."""
    text = check(render_html(pipeline_report())).text()
    for told in ("5.2 %", "2.6 %", "left out", "pip install nvidia-ml-py", "target_prefill", "71.20", "0.011", "92 %"):
        assert told in text
    for told in (
        "never: transfer",
        "NVIDIA H200",
        "88 GiB of 140 GiB",
        "--hub-token ***",
        "exited",
        "paceline.attach/1",
    ):
        assert told in text
    assert "no rule knows 24 % [19-29] of them; more than a fifth, so this level is weak" in text


@pytest.mark.parametrize("make", [pipeline_report, foreign_report])
def test_hostile_texts_are_shown_as_text(make: Any) -> None:
    """Whatever a process calls its threads, calls and commands, no text becomes markup or leaves its place."""
    page = render_html(with_text(make(), HOSTILE))
    text = check(page).text()
    assert "<script" not in page and "<img" not in page
    assert "</script></title></style><img src=x" in text


def test_hostile_frame_and_thread_name_are_escaped() -> None:
    """A thread and a frame called <script> read as that."""
    report = copy.deepcopy(pipeline_report())
    report["threads"][1]["name"] = report["stacks"][0]["frames"][0]["name"] = "<script>alert(1)</script>"
    report["stacks"][1]["level"] = "4"
    report["conclusion"]["line"] = HOSTILE
    page = render_html(report)
    assert "<script" not in page and VISIBLE in check(page).text()


def test_twenty_thousand_stacks_make_a_page_of_bounded_size() -> None:
    """Stacks of hundreds of threads with long names stay below two megabytes; who is left out is counted."""
    report = pipeline_report()
    long = "void at::native::kernel<" + "c10::BFloat16, " * 30 + ">"
    report["stacks"] = [
        evidence.Stack(
            level="4",
            pid=PID,
            tid=TARGETS[i % 2] if i % 3 else 5000 + i % 300,
            frames=python_frames(*(f"{long}{(i >> shift) % 5}" for shift in range(8))),
            count=1 + i % 3,
            category=evidence.CATEGORIES[i % 18],
        ).model_dump(mode="json")
        for i in range(20_000)
    ]
    report["threads"] += [{**report["threads"][-1], "pid": PID, "tid": 5000 + i} for i in range(300)]
    report["processes"] *= 500
    page = render_html(report)
    assert len(page.encode()) < 2_000_000
    assert page.count('name="flame"') == MAX_FLAMES
    assert "threads with fewer samples are left out" in check(page).text()


def test_threads_of_many_processes_are_bounded() -> None:
    """A hundred busy workers do not fill the page: rows are for the first, others are named, and the rest counted."""
    report = pipeline_report()
    busy = report["threads"][1]
    workers = [{**busy, "pid": 9000 + i, "tid": 20_000 + 50 * i + j, "role": ""} for i in range(100) for j in range(50)]
    report["threads"] += workers
    page = render_html(report)
    assert page.count('<div class="who">') == 200 and len(page.encode()) < 1_000_000
    assert "Threads of 51 more processes are left out." in check(page).text()


def test_processes_that_are_their_own_ancestors_end() -> None:
    """A cycle of parents, which recycled numbers can make, is shown once and does not hang."""
    report = foreign_report()
    one = report["processes"][0]
    report["processes"] = [
        {**one, "pid": 5, "parent": 6},
        {**one, "pid": 6, "parent": 5},
        {**one, "pid": 7, "parent": 7},
    ]
    check(render_html(report))
