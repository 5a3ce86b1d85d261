"""`status`, `top` and what they know of a run: from files and pages alone."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from paceline.cli import main, profile, run_state, watch
from paceline.cli.top_frame import Frame, StageRow, ThreadRows, lines_of
from paceline.control.socket import serving
from paceline.errors import CheckpointError, PacelineError
from paceline.profiling import page as layout
from paceline.profiling import stages
from paceline.profiling.page import CONTROL, Control, Page, PageError, pages_in, read_page, write_word

ODD = "r[bold]o[/bold]le\x1b[31m \u202e漢字漢字 [link=x]"


def frame(**changes: Any) -> Frame:
    stage = [
        StageRow("get_wait", 0.5, 21.5, is_wait=True),
        StageRow("forward", 0.3, 4.25, is_open=True),
        StageRow("create_block_mask_swa", 0.1, 1.0, is_inside=True),
        StageRow("layers", 0.2, None, is_open=True, is_inside=True),
        StageRow("grad_norm_item", 0.0, 0.001),
    ]
    threads = [
        ThreadRows(
            "target-0", "target-0", "put_wait", 3.0, batch=7, is_waiting=True, stages=stage[:1], other_share=0.5
        ),
        ThreadRows("drafter-0", "MainThread", "layers", 0.01, batch=6, stages=stage, other_share=0.2),
        ThreadRows(ODD, ODD, ODD, 99.0, stages=[StageRow(ODD, 1.0, 1e6)]),
    ]
    known: dict[str, Any] = dict(
        run=f"/runs/{ODD}",
        process=f"process 123 on {ODD}",
        running_s=4000.0,
        step=1234,
        total_steps=5000,
        left_s=12_000.0,
        tok_per_s=16_480.0,
        queue=2,
        queue_depth=3,
        put_wait_frac=0.12,
        get_wait_frac=0.5,
        seconds=1.0,
        verdict="producer-bound: " + "the drafter waits 33 % of the time " * 8 + ODD,
        counting="counting for this view",
        threads=threads,
    )
    return Frame(**known | changes)


def text_of(lines: list[Any]) -> str:
    return "\n".join(line.plain for line in lines)


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("width", [40, 60, 79, 80, 100, 160, 200])
def test_a_frame_fits_its_terminal(width: int, ascii_only: bool) -> None:
    """No line is wider than the terminal, breaks, or steers it, whatever names a page holds."""
    for state in ("", "stopped by a signal: `kill -CONT 123` lets it go on"):
        for line in lines_of(frame(state=state, still_s=7.0), width, ascii_only=ascii_only):
            assert cell_len(line.plain) <= width
            assert line.plain.isprintable(), repr(line.plain)
            assert line.plain.isascii() or not ascii_only


@pytest.mark.parametrize("height", [1, 3, 8, 12, 16, 20, 50])
def test_a_frame_fits_the_height(height: int) -> None:
    """Where there is little room, threads stay longer than stages, and long stages longer than short ones."""
    lines = lines_of(frame(), 80, height)
    assert len(lines) <= height
    shown = text_of(lines)
    if height >= 12:
        assert "in layers for 0.01 s" in shown and "in put_wait for 3.00 s" in shown
    assert ("grad_norm_item" in shown) == (height == 50)
    assert ("get_wait " in shown) == (height >= 12)


def test_a_frame_says_what_is_known() -> None:
    """Steps, speed, queue, waits, verdict, and every thread with its stages as bars by their share."""
    shown = text_of(lines_of(frame(), 160))
    for part in (
        "1,234/5,000  24.7 %  16,480 tokens/s  about 3 h 20 min left",
        "2/3  put wait 12.0 %  get wait 50.0 %  of the last 1.00 s",
        "producer-bound: the drafter waits",
        "drafter-0  in layers for 0.01 s  batch 6  MainThread",
        "r[bold]o[/bold]le\\x1b[31m",
    ):
        assert part in shown
    assert "no stage has changed" not in shown
    bars = {line.split()[0]: line.count("█") for line in shown.splitlines() if " % " in line and "ms" in line}
    assert bars["get_wait"] == 30 and bars["create_block_mask_swa"] == 6
    assert "   other                      50.0 %" in shown
    assert "      create_block_mask_swa" not in shown and "     create_block_mask_swa" in shown


def test_a_frame_of_one_that_stands_still_says_so() -> None:
    """A process that is stopped, or in which nothing moves, is called that; one without a queue shows turns."""
    assert "no stage has changed for 7.00 s" in text_of(lines_of(frame(still_s=7.0), 80))
    assert "no stage has changed for 2.00 s" in text_of(lines_of(frame(state="stopped", still_s=2.0), 80))
    assert "no stage has changed" not in text_of(lines_of(frame(still_s=2.0), 80))
    shown = text_of(lines_of(frame(in_turn=True, queue_depth=0), 80))
    assert "50.0 %  of the time it is the target's turn" in shown
    assert "take turns" in text_of(lines_of(frame(in_turn=True, get_wait_frac=None, threads=[]), 80))


class Run:
    """A run folder with the page of this process."""

    def __init__(self, path: Path, page: Page) -> None:
        self.path, self.page = path, page

    @property
    def control(self) -> Control:
        return Control.of(self.page.words[CONTROL])

    def watcher(self) -> watch.Watcher:
        run = run_state.open_run(self.path)
        return watch.Watcher(run, run_state.need_live_pages(run), None)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.yaml").write_text("unreadable: on purpose")
    page = stages.open_run(path / "profile")
    assert page is not None
    yield Run(path, page)
    stages.close_run(page, path / "profile")


def look_of(watcher: watch.Watcher) -> Frame:
    found = watcher.look()
    assert found is not None
    return found


def test_watching_counts_and_takes_it_back(run: Run) -> None:
    """A viewer switches counting on without tables; afterwards it is off as before, however often that was asked."""
    watcher = run.watcher()
    assert look_of(watcher).counting == "counting for this view"
    assert run.control.is_on and run.control.interval_s == 0
    watcher.close()
    assert not run.control.is_on
    watcher.close()
    assert not run.control.is_on


def test_watching_leaves_alone_what_somebody_else_set(run: Run) -> None:
    """Tables that were on before, or were asked for meanwhile, stay on."""
    write_word(run.page.path, CONTROL, Control().changed(True, 7.0).word)
    watcher = run.watcher()
    assert look_of(watcher).counting == "a table every 7 s"
    watcher.close()
    assert run.control == Control(1, True, 7.0)
    write_word(run.page.path, CONTROL, run.control.changed(False, 0.0).word)
    watcher = run.watcher()
    look_of(watcher)
    write_word(run.page.path, CONTROL, run.control.changed(True, 5.0).word)
    assert look_of(watcher).counting == "a table every 5 s"
    watcher.close()
    assert run.control.is_on and run.control.interval_s == 5


def test_two_viewers_do_not_hinder_each_other(run: Run) -> None:
    """The one that stays goes on counting when the other has left; after both it is off."""
    first, second = run.watcher(), run.watcher()
    look_of(first)
    look_of(second)
    first.close()
    assert not run.control.is_on
    look_of(second)
    assert run.control.is_on
    second.close()
    assert not run.control.is_on


def test_a_thread_shows_its_stages_and_where_it_is(run: Run) -> None:
    """Shares are of the interval between two looks; a stage that stays open is there from its beginning."""
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with stages.as_role("target-3"):
            stages.next_batch(41)
            with stages.READ_BATCH:
                pass
            with stages.MODEL_FORWARD:
                entered.set()
                leave.wait(60)

    thread = threading.Thread(target=work, name=ODD)
    thread.start()
    try:
        assert entered.wait(60)
        watcher = run.watcher()
        assert not look_of(watcher).threads[0].stages
        time.sleep(0.05)
        seen = look_of(watcher)
        watcher.close()
    finally:
        leave.set()
        thread.join()
    (row,) = seen.threads
    assert (row.role, row.stage, row.batch) == ("target-3", "model_forward", 41)
    assert "?" in row.thread and row.for_s >= 0.05 and seen.still_s >= 0.05
    (stage,) = row.stages
    assert stage.name == "model_forward" and stage.is_open and stage.share == 1.0 and stage.avg_ms is None
    assert row.other_share == 0.0
    assert seen.put_wait_frac == 0.0


def test_a_watched_process_that_ends_ends_the_watch(run: Run) -> None:
    """When the page is gone there is no frame, and leaving is no error."""
    watcher = run.watcher()
    look_of(watcher)
    stages.close_run(run.page, run.path / "profile")
    assert watcher.look() is None and watcher.has_ended
    watcher.close()


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([(0, 0)], None),
        ([(0, 100), (1, 100), (2, 100)], None),
        ([(0, 100), (1, 200)], None),  # how long that step took is not known
        ([(0, 100), (1, 200), (3, 400)], 100.0),
        ([(0, 0), (0.1, 100), (2.1, 300), (4.1, 500), (6, 500)], 100.0),
        ([(0, 0), (0.1, 100), (2.1, 300), (4.1, 500), (14, 500)], 0.0),
        ([(second, 50 * second) for second in range(200)] + [(200 + i, 10_000 + 500 * i) for i in range(30)], 500.0),
    ],
)
def test_the_speed_is_that_of_the_last_seconds(samples: list[tuple[float, int]], expected: float | None) -> None:
    """It is counted from one change to another, and is 0 once a step takes far longer than the ones before."""
    rate = watch._Rate()
    for at_s, tokens in samples:
        rate.add(int(1e9 * at_s), tokens)
    found = rate.per_s(int(1e9 * samples[-1][0]))
    assert found is None if expected is None else found == pytest.approx(expected, rel=1e-3)


# Runs without a process


def write_run(path: Path, *events: tuple[str, int], steps: int = 0, **files: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text("unreadable: on purpose")
    lines = [{"time": 1.7e9 + i, "event": kind, "step": step} for i, (kind, step) in enumerate(events)]
    (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = [
        {"step": i + 1, "tokens": 100, "seconds": 0.5, "put_wait_s": 0.1, "get_wait_s": 0.0, "ready_wait_s": 0.0,
         "batches": 1, "queue": 1}
        for i in range(steps)
    ]  # fmt: skip
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics) + '{"step": 99, "tok')
    for name, content in {"run": {"host": platform.node(), "pid": 1}, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def command(*arguments: object) -> tuple[int, str]:
    """Exit code and what is printed, of the command in this process."""
    result = CliRunner().invoke(main.app, [str(argument) for argument in arguments])
    if isinstance(result.exception, PacelineError):
        return 1, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_status_of_a_finished_run(tmp_path: Path) -> None:
    """All of it comes from the files; a last line cut short by a crash is passed over."""
    path = write_run(
        tmp_path / "run",
        ("started", 0),
        ("checkpoint", 20),
        ("finished", 40),
        steps=40,
        report={"step": 40, "total_steps": 40, "best_acceptance_length": 2.5},
    )
    (path / "checkpoints" / "step-00000040").mkdir(parents=True)
    (path / "checkpoints" / "latest").symlink_to("step-00000040")
    code, shown = command("status", path)
    assert code == 0
    assert "ended       the last process finished at step 40, 20" in shown
    for part in ("40 of 40 (100.0 %)", "200 tokens/s over the last 20 steps", "step 40, ", "length 2.50"):
        assert part in shown
    state = json.loads(command("status", path, "--json")[1])
    assert (state["state"], state["step"], state["tok_per_s"], state["pid"]) == ("ended", 40, 200.0, None)
    assert state["ending"]["kind"] == "finished" and state["threads"] == [] and state["profiling"] is None


@pytest.mark.parametrize(
    ("events", "state", "text"),
    [
        ([("started", 0)], "died", "was killed, or died without a word, some time after step 3,"),
        ([("started", 0), ("SIGTERM", 3)], "ended", "was stopped (SIGTERM) at step 3,"),
        ([("started", 0), ("SIGHUP", 3), ("set", 4)], "ended", "was stopped (SIGHUP) at step 3,"),
        ([("started", 0), ("stop", 3)], "ended", "was stopped by `paceline stop` at step 3,"),
        ([("started", 0), ("SIGUSR1", 3)], "ended", "was stopped (SIGUSR1) at step 3,"),
        ([("started", 0), ("max_hours", 3)], "ended", "was stopped by its time limit (run.max_hours) at step 3,"),
        ([("started", 0), ("stalled", 2), ("checkpoint failed", 2), ("anything new", 2)], "died", "after step 3,"),
        ([("started", 0), ("failed", 2)], "ended", "failed at step 2,"),
        ([("started", 0), ("failed", 2), ("resumed", 2)], "died", "some time after step 3,"),
        ([], "not started", ""),
    ],
)
def test_the_status_says_how_a_run_ended(tmp_path: Path, events: list[tuple[str, int]], state: str, text: str) -> None:
    """Stopped, failed or killed: what the events say, and the metrics where they say nothing."""
    path = write_run(tmp_path / "run", *events, steps=3)
    assert json.loads(command("status", path, "--json")[1])["state"] == state
    code, shown = command("status", path)
    assert code == 0 and f"  {state}" in shown and text in shown


def test_the_status_of_a_run_elsewhere_says_where(tmp_path: Path) -> None:
    """A process of another host cannot be looked at, so nothing is said of whether it lives."""
    path = write_run(tmp_path / "run", ("started", 0), steps=3, run={"host": "else\x1bwhere", "pid": 1})
    code, shown = command("status", path)
    assert code == 0 and "its process was started on else\\x1bwhere: look there" in shown
    code, shown = command("top", path)
    assert code == 1 and "was started on else\\x1bwhere: give this command there" in shown


def test_processes_without_a_page_here_are_asked_for(run: Run) -> None:
    """Those of a run on Ray that are on other hosts: in `status`, and in `top`; who does not answer is named."""
    assert watch.state_of(run_state.open_run(run.path))["elsewhere"] == []
    (run.path / "config.yaml").write_text(
        "target: {path: t}\ndata: {path: d}\ntopology: {executor: ray, targets: 3}\n", encoding="utf-8"
    )
    thread = {"role": "target-1", "thread": "t", "tid": 7, "stage": "put_wait", "for_s": 75.0}
    far = {
        "role": "target-1",
        "host": "far",
        "pid": os.getpid(),
        "device": "cuda:0",
        "answers": True,
        "threads": [thread],
    }
    processes = [
        far,
        {**far, "role": "target-0", "host": platform.node()},  # has a page here
        {**far, "role": "target-2", "answers": False, "threads": []},
    ]
    with serving(run.path / "profile" / "control.sock", {"elsewhere": lambda _: {"processes": processes}}):
        found = watch.state_of(run_state.open_run(run.path))["elsewhere"]
        assert [each["role"] for each in found] == ["target-1", "target-2"]
        shown = CliRunner(env={"COLUMNS": "200"}).invoke(main.app, ["status", str(run.path)]).stdout
        assert "target-1 in put_wait for 1 min 15 s; process" in shown and "on far, cuda:0" in shown
        assert "target-2 does not answer" in shown
        rows = watch._Elsewhere(lambda: found)
        deadline = time.monotonic() + 60.0
        while not (seen := rows.rows()) and time.monotonic() < deadline:
            time.sleep(0.01)
        rows.close()
        assert [(each.role, each.stage, each.is_waiting) for each in seen] == [("target-1 on far", "put_wait", True)]


def test_the_status_of_a_live_run(run: Run) -> None:
    """A page makes it live: progress, queue, whether it is profiled, and where each thread is."""
    for name, value in (("step", 5), ("total_steps", 50), ("queue", 2), ("queue_depth", 3)):
        run.page.set_gauge(name, value)
    with stages.as_role("drafter-0"), stages.BACKWARD:
        state = json.loads(command("status", run.path, "--json")[1])
        shown = command("status", run.path)[1]
    assert (state["state"], state["pid"], state["step"], state["total_steps"]) == ("running", os.getpid(), 5, 50)
    assert state["queue"] == {"waiting": 2, "depth": 3}
    assert state["profiling"] == {"on": False, "interval_s": 0.0}
    assert [(thread["role"], thread["stage"]) for thread in state["threads"]] == [("drafter-0", "backward")]
    assert "drafter-0  in backward for" in shown and "profiling   off" in shown


def test_the_status_says_what_became_of_the_batches(run: Run) -> None:
    """Issued is trained, in flight and skipped; those that were left out as not finite are counted."""
    assert json.loads(command("status", run.path, "--json")[1])["ledger"] is None
    for name, value in (("issued", 1234), ("trained", 1200), ("skipped", 4), ("retried", 2)):
        run.page.set_gauge(name, value)
    (run.path / "bad_batches.jsonl").write_text('{"batch": 7}\n{"batch": 8}\n')
    shown = command("status", run.path)[1]
    assert "batches     1,234 issued = 1,200 trained + 30 in flight + 4 skipped; 2 retried" in shown
    assert "bad batches 2 left out" in shown
    state = json.loads(command("status", run.path, "--json")[1])
    assert state["ledger"] == {"issued": 1234, "trained": 1200, "in_flight": 30, "skipped": 4, "retried": 2}
    assert state["bad_batches"] == 2
    assert look_of(run.watcher()).ledger.startswith("1,234 issued = ")


@pytest.mark.parametrize("gauges", [{"issued": 5, "trained": 6}, {"issued": 5, "trained": 4, "skipped": 3}])
def test_a_ledger_adds_up_however_it_was_read(gauges: dict[str, int]) -> None:
    """Its numbers are read one after another while the run goes on."""
    found = run_state.ledger_of(gauges)
    assert found is not None and found["in_flight"] == 0
    assert found["issued"] == found["trained"] + found["in_flight"] + found["skipped"]


def test_the_status_of_an_ended_run_has_the_reports_ledger(tmp_path: Path) -> None:
    """There is no page any more."""
    ledger = {"issued": 9, "trained": 8, "in_flight": 0, "skipped": 1, "retried": 0}
    path = write_run(tmp_path / "run", ("started", 0), ("finished", 4), report={"ledger": ledger})
    assert json.loads(command("status", path, "--json")[1])["ledger"] == ledger
    assert "9 issued = 8 trained + 0 in flight + 1 skipped\n" in command("status", path)[1]


def write_events(run: Run, *events: tuple[str, int, str]) -> None:
    lines = [{"time": time.time(), "event": kind, "step": step, "reason": why} for kind, step, why in events]
    (run.path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_status_is_loud_about_saves_that_fail(run: Run) -> None:
    """The process is asked, and else the events; a save that works ends it."""
    (run.path / "checkpoints" / "step-00000040").mkdir(parents=True)
    (run.path / "checkpoints" / "latest").symlink_to("step-00000040")
    write_events(run, ("started", 0, ""), ("checkpoint", 40, ""), ("checkpoint failed", 60, "no space\x1b[31m left"))
    shown = command("status", run.path)[1]
    assert "saving      FAILS: no space\\x1b[31m left; the last complete one: step 40, 0." in shown
    assert look_of(run.watcher()).alarms[0].startswith("saving FAILS: no space")
    assert json.loads(command("status", run.path, "--json")[1])["saving"]["problem"] == "no space\x1b[31m left"

    answer: dict[str, Any] = {"saving": {"problem": None, "saved_step": 60, "writing": True}}
    with serving(run.path / "profile" / "control.sock", {"status": lambda request: answer}):
        state = json.loads(command("status", run.path, "--json")[1])
        assert state["saving"] == answer["saving"]
        assert "FAILS" not in command("status", run.path)[1]
        answer["saving"]["problem"] = "quota"
        assert "FAILS: quota" in command("status", run.path)[1]
        assert look_of(run.watcher()).alarms[0].startswith("saving FAILS: quota")

    write_events(run, ("checkpoint failed", 60, "full"), ("checkpoint", 80, ""))
    assert "FAILS" not in command("status", run.path)[1] and look_of(run.watcher()).alarms == []


def test_the_status_says_that_nothing_moves(run: Run) -> None:
    """If that is what the watchdog said last; other news in between does not hide it."""
    stalled = ("stalled", 60, "nothing has moved; drafter-0 has been in backward")
    write_events(run, ("started", 0, ""), stalled, ("set", 60, ""), ("checkpoint failed", 60, "full"))
    shown = command("status", run.path)[1]
    assert "stalled     said 0." in shown and "ago: nothing has moved; drafter-0 has been in backward" in shown
    assert [alarm[:8] for alarm in look_of(run.watcher()).alarms] == ["stalled:", "saving F"]
    assert "nothing has moved" in json.loads(command("status", run.path, "--json")[1])["stalled"]["reason"]
    for later in (("moves again", 60, ""), ("resumed", 60, ""), ("failed", 60, "")):
        write_events(run, stalled, later)
        assert "stalled" not in command("status", run.path)[1]


def test_a_process_that_does_not_answer_delays_the_status_by_a_moment(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does not say, events say."""
    monkeypatch.setattr(watch, "ASK_S", 0.1)
    write_events(run, ("checkpoint failed", 60, "full"))
    is_over = threading.Event()
    with serving(run.path / "profile" / "control.sock", {"status": lambda request: {"late": is_over.wait(60)}}):
        assert "FAILS: full" in command("status", run.path)[1]
        is_over.set()


@pytest.mark.parametrize("width", [40, 80, 160])
def test_a_frame_shows_alarms_ledger_and_checkpoint(width: int) -> None:
    """Alarms come first, in red, and wrap; none of it is wider than the terminal."""
    lines = lines_of(
        frame(
            ledger="1,234 issued = 1,200 trained + 30 in flight + 4 skipped",
            checkpoint="step 40, 12 min 3 s ago",
            alarms=[f"saving FAILS: no space {ODD}", "stalled: nothing has moved for 300 s"],
        ),
        width,
    )
    assert all(cell_len(line.plain) <= width and line.plain.isprintable() for line in lines)
    words = " ".join(text_of(lines).split())
    assert words.index("saving FAILS") < words.index("stalled: nothing") < words.index("1,234/5,000")
    assert "saved step 40, 12 min 3 s ago" in words and "batches 1,234 issued = 1,200" in words
    assert any("bold red" in str(span.style) for line in lines for span in line.spans if "FAILS" in line.plain)


# What stands in the way


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    """The message says what was given and what was wanted."""
    for arguments in (("status",), ("top",), ("profile", "on"), ("profile", "off"), ("profile", "trace")):
        code, shown = command(*arguments, tmp_path / "missing")
        assert code == 1 and "missing is no folder; a run folder is wanted" in shown
        code, shown = command(*arguments, tmp_path)
        assert code == 1 and "is no run folder: it has no config.yaml" in shown


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([], "and none has; `paceline train` starts one"),
        ([("started", 0), ("finished", 3)], "the last one finished at step 3, "),
        ([("started", 0), ("failed", 3)], "the last one failed at step 3, "),
        ([("started", 0)], "the last one was killed, or died without a word, some time after step 3, "),
    ],
)
def test_a_run_without_a_process_is_refused(tmp_path: Path, events: list[tuple[str, int]], message: str) -> None:
    """The message says how the last process ended, and what to do."""
    path = write_run(tmp_path / "run", *events, steps=3)
    for arguments in (("top",), ("profile", "on"), ("profile", "off"), ("profile", "trace"), ("profile", "torch")):
        code, shown = command(*arguments, path)
        assert code == 1 and f"no process trains in {path}" in shown and message in shown


def test_a_process_that_has_no_page_yet_is_named(tmp_path: Path) -> None:
    """While models load there is a lock and nothing else; a lock that nobody holds any more is no process."""
    path = tmp_path / "run"
    path.mkdir()
    with run_state.RunFolder(path).lock():
        code, shown = command("profile", "on", path)
        assert code == 1 and f"process {os.getpid()} holds {path} but has no profile page" in shown
        assert "loading its models" in command("status", path)[1]
    code, shown = command("profile", "on", path)
    assert code == 1 and "no process trains" in shown


def dead_process() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_the_page_of_a_killed_process_is_no_process(run: Run) -> None:
    """A page whose process has gone is passed over; its number given to another process does not revive it."""
    words = run.page.words
    words[layout._STARTED] += 1
    with pytest.raises(CheckpointError, match="no process trains"):
        run_state.need_live_pages(run_state.open_run(run.path))
    words[layout._STARTED] -= 1
    words[layout._PID] = dead_process()
    with pytest.raises(CheckpointError, match="no process trains"):
        run_state.need_live_pages(run_state.open_run(run.path))


def test_the_page_of_another_version_is_refused(run: Run) -> None:
    """The message says to use the other version; a dead process's page of another version is nothing."""
    run.page.words[layout._LAYOUT] += 1
    for arguments in (("top",), ("profile", "on"), ("profile", "trace")):
        code, shown = command(*arguments, run.path)
        assert code == 1 and f"the page has layout {layout.LAYOUT + 1}" in shown and str(run.path) in shown
    assert "the page has layout" in command("status", run.path)[1]
    (link,) = pages_in(run.path / "profile")
    link.rename(link.with_name(link.name.replace(f"-{os.getpid()}-", f"-{dead_process()}-")))
    assert run_state.live_pages(run_state.open_run(run.path)) == []


def test_a_page_that_may_not_be_read_names_its_user(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says whose it is, and what to do."""

    def refuse(path: Path) -> None:
        raise PageError(f"{path} cannot be read") from PermissionError(13, "Permission denied")

    monkeypatch.setattr(run_state, "read_page", refuse)
    code, shown = command("profile", "on", run.path)
    assert code == 1 and "belongs to another user" in shown and "give this command as that user" in shown


# Switching


def test_profile_on_and_off_change_the_word(run: Run) -> None:
    """Each says what it did, and whether that was so already; the interval is the page's."""
    code, shown = command("profile", "on", run.path, "--interval", "2.5")
    assert code == 0
    where = run.path / "profile" / "stages.jsonl"
    assert shown == f"profiling is on in process {os.getpid()}, a table every 2.5 s, in its output and in {where}\n"
    assert run.control == Control(1, True, 2.5)
    assert "already on" in command("profile", "on", run.path, "--interval", "2.5")[1]
    assert run.control == Control(1, True, 2.5)
    assert "without tables" in command("profile", "on", run.path, "--interval", "0")[1]
    assert run.control == Control(2, True, 0.0)
    assert command("profile", "off", run.path)[1] == f"profiling is off in process {os.getpid()}\n"
    assert "already off" in command("profile", "off", run.path)[1]
    assert run.control == Control(3, False, 0.0)


@pytest.mark.parametrize("interval", ["-1", "0.01", "nan", "inf", "1e9"])
def test_an_interval_that_cannot_be_is_refused(run: Run, interval: str) -> None:
    """Nothing is switched then."""
    code, shown = command("profile", "on", run.path, f"--interval={interval}")
    assert code == 1 and "seconds from 0.1 to 86400 were wanted" in shown
    assert run.control == Control()


def test_two_traces_at_a_time_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is open is left to whoever opened it; one that nobody answers is closed again."""
    pytest.importorskip("perfetto")
    until = time.monotonic_ns() + 60 * 10**9
    write_word(run.page.path, layout.TRACE_UNTIL, until)
    code, shown = command("profile", "trace", run.path)
    assert code == 1 and f"process {os.getpid()} is being traced for another " in shown
    assert run.page.words[layout.TRACE_UNTIL] == until
    write_word(run.page.path, layout.TRACE_UNTIL, 0)
    monkeypatch.setattr(profile, "PATIENCE_S", 0.1)
    code, shown = command("profile", "trace", run.path, "--seconds", "0.1")
    assert code == 1 and "did not write the trace" in shown and f"`paceline top {run.path}` still reads" in shown
    assert run.page.words[layout.TRACE_UNTIL] == 0
    code, shown = command("profile", "trace", run.path, "--out", run.path / "no" / "folder" / "x")
    assert code == 1 and "there is no folder" in shown


def test_switching_reads_the_page_of_this_version_only(run: Run) -> None:
    """What the command wrote is what the process reads."""
    command("profile", "on", run.path)
    assert read_page(run.page.path).control == Control(1, True, 10.0)


def test_long_files_are_read_from_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only whole lines of the last part count, and lines that are no objects do not."""
    monkeypatch.setattr(run_state, "TAIL_BYTES", 100)
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"step": i}) + "\n" for i in range(100)) + "[1]\n7\n{broken\n")
    steps = [line["step"] for line in run_state.tail_lines(path)]
    assert steps == list(range(steps[0], 100)) and 2 <= len(steps) <= 8
    path.write_text('{"step": 1}\n{"step": 2}')
    assert [line["step"] for line in run_state.tail_lines(path)] == [1, 2]
    assert run_state.tail_lines(tmp_path / "missing") == []
