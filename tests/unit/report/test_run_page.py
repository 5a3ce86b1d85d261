"""The page of a run tells what its files say, however long, broken or hostile they are."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.report import history
from paceline.report.history import Events, Stages, Steps
from paceline.report.page import MISSING, Html
from paceline.report.run import STYLE, RunView, live_page, run_page, run_parts
from tests.unit.report.reader import HOSTILE, VISIBLE, Reader, check


def line(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "batch": step - 1,
        "loss": 8.0 / step,
        "acceptance_length_est": 1.0 + step / 100,
        "lr": 1e-3,
        "tokens": 100 + step,
        "queue": step % 4,
        "put_wait_s": 0.2,
        "get_wait_s": 0.1,
        "ready_wait_s": 0.0,
        "batches": 1,
        "seconds": 0.5,
    } | changes


def write_lines(path: Path, lines: list[dict[str, Any]], rest: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in lines) + rest)


def table_of(at_s: float, role: str, wall_s: float = 10.0, **own_ms: float) -> dict[str, Any]:
    stages = {name: {"count": 1, "total_ms": 2 * ms, "self_ms": ms} for name, ms in own_ms.items()}
    other_s = wall_s - sum(own_ms.values()) / 1e3
    return {"t": at_s, "interval_s": wall_s, "role": role, "thread": role, "wall_s": wall_s, "other_s": other_s,
            "stages": stages}  # fmt: skip


def view(folder: Path, **changes: Any) -> RunView:
    """A run of 100 steps with something of everything, or of what its folder holds already."""
    if not (folder / "metrics.jsonl").exists():
        lines = [line(step) for step in range(1, 101)]
        lines[49]["validation_acceptance_length"] = 1.75
        lines[99]["validation_acceptance_length"] = 1.5
        write_lines(folder / "metrics.jsonl", lines, '{"step": 101, "lo')
    if not (folder / "events.jsonl").exists():
        events: list[dict[str, Any]] = [{"event": "started", "step": 0}, {"event": "checkpoint", "step": 50}]
        events += [{"event": "target was lost", "role": "target-1", "reason": "its host is gone", "restarts": 1}]
        write_lines(folder / "events.jsonl", [{"time": 1.7e9 + i} | each for i, each in enumerate(events)])
    if not (folder / "stages.jsonl").exists():
        tables = [
            table_of(at, role, **own)
            for at in (1.0, 2.0)
            for role, own in (
                ("drafter-0", {"get_wait": 1000.0, "forward": 3000.0 * at, "unused": 0.0}),
                ("target-10", {"model_forward": 7000.0}),
                ("target-2", {"model_forward": 8000.0}),
            )
        ]
        write_lines(folder / "stages.jsonl", tables)
    steps, events_, stages = (
        Steps(folder / "metrics.jsonl"),
        Events(folder / "events.jsonl"),
        Stages(folder / "stages.jsonl"),
    )
    for each in (steps, events_, stages):
        each.read()
    verdict = {
        "kind": "consumer-bound",
        "gain": {"value": 1.52, "low": 1.4, "high": 1.6},
        "get_wait_frac": {"value": 0.05},
        "put_wait_frac": {"value": 0.34},
        "target_per_s": 87.8,
        "drafter_per_s": 31.8,
        "seconds": 50.0,
        "reason": "the targets wait 34 % of the time for the drafter",
    }
    state = {
        "run": "/runs/a",
        "state": "running",
        "pid": 123,
        "step": 100,
        "total_steps": 400,
        "left_s": 150.0,
        "tok_per_s": 432.1,
        "recent_steps": 20,
        "queue": {"waiting": 2, "depth": 3},
        "in_turn": False,
        "verdict": verdict,
        "ledger": {"issued": 104, "trained": 100, "in_flight": 3, "skipped": 1, "retried": 7},
        "bad_batches": 1,
        "threads": [{"role": "target-0", "thread": "t", "stage": "put_wait", "for_s": 31.0}],
    }
    known: dict[str, Any] = {
        "state": state,
        "steps": steps,
        "events": events_,
        "stages": stages,
        "config": {"topology": {"targets": 2, "drafters": 1, "layout": "split"}, "pipeline": {"queue_depth": 3}},
        "record": {
            "started": 1.7e9,
            "host": "alpha",
            "roles": {"target-0": {"host": "beta", "pid": 7, "device": "cuda:3"}},
            "memory_gib": {"target": 3.0, "drafter": 1.5, "cache": 0.0},
            "draft": {"kind": "dspark", "num_hidden_layers": 5, "block_size": 16, "target_layer_ids": [1, 9]},
        },
        "checkpoints": [{"step": 50, "time": 1.7e9, "bytes": 3 * 2**20, "is_best": True, "is_latest": True}],
        "evaluations": [{"step": 50, "acceptance_length": 2.625, "mismatches": 0}],
        "process_gib": {"now": 2.0, "peak": 2.5},
    }
    return RunView(**known | changes)


def text_of(page: str) -> str:
    return check(page).text()


def test_a_page_shows_what_the_files_say(tmp_path: Path) -> None:
    """Figures are sums of the lines; verdict, ledger, stages, events, memory and roles stand as they were written."""
    parts = run_parts(view(tmp_path))
    shown = text_of(run_page("a", parts))
    loss = sum(8.0 / step for step in range(81, 101)) / 20
    est = sum(1 + step / 100 for step in range(81, 101)) / 20
    for part in (
        "Training: step 100 of 400 (25.0 %), about 2 min left.",
        "432",
        f"{loss:.3f}",
        "average of the last 20 steps",
        f"{est:.2f}",
        "best so far, decoding at step 50",
        "consumer-bound",
        "1.52×",
        "The targets wait 34 % of the time for the drafter.",
        "of 3 places; now 2",
        "Micro-batches left out: 1.",
        "Marked, as something went wrong: 1.",
        "target was lost: role=target-1; its host is gone; restarts=1",
        "4.50 GiB, a calculation: target 3.00 GiB, drafter 1.50 GiB",
        "the process holds 2.00 GiB, 2.50 GiB at the peak",
        "dspark, 5 layers, blocks of 16, target layers 1, 9",
        "3.0 MiB",
        "beta",
        "cuda:3",
        "put_wait",
        "31.0 s",
    ):
        assert part in shown, part
    ledger = re.findall(r"<td>([\d,]+)</td>", parts["batches"])
    assert ledger == ["104", "100", "3", "1", "7"]
    assert [m for m in re.findall(r"<figcaption><b>([\w-]+)</b>", parts["stages"])][:3] == [
        "target-2",
        "target-10",
        "drafter-0",
    ]
    assert re.search(r"forward</th><td>9\.00 s</td><td>45%", parts["stages"])  # of both tables
    assert re.search(r"forward</th><td>6\.00 s</td><td>60%", parts["stages"])  # of the last
    assert "unused" not in parts["stages"]


def test_the_charts_are_of_the_steps(tmp_path: Path) -> None:
    """What a chart tells those who do not see it: its lines' ends, waits as shares of time, an average target's."""
    parts = run_parts(view(tmp_path))
    assert "single steps: 8.00 at 1, 0.08 at 100" in parts["progress"]
    assert "held-out rows, measured: 1.75 at 50, 1.50 at 100" in parts["progress"]
    assert "prompts, decoded: 2.62 at 50" in parts["progress"]
    rate = (sum(100 + step for step in (1, 2)) / 1.0, sum(100 + step for step in (99, 100)) / 1.0)
    assert f"tokens a second: {rate[0]:,.2f} at 1.50, {rate[1]:,.2f} at 99.50" in parts["progress"]
    assert (
        "drafter waits (get): 20.00 at 1.50" in parts["queue"] and "targets wait (put): 20.00 at 1.50" in parts["queue"]
    )
    in_turn = view(tmp_path)
    parts = run_parts(RunView(**vars(in_turn) | {"state": dict(in_turn.state) | {"in_turn": True}}))
    assert "The target&#x27;s turn" in parts["queue"] and "put" not in parts["queue"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"state": "stopped"}, "Stands still at step 100 of 400"),
        ({"state": "stopped"}, "kill -CONT 123 lets it go on"),
        ({"state": "loading or ending"}, "it is loading its models, or about to end"),
        ({"state": "not started"}, "Nothing has been trained here yet."),
        ({"state": "unknown", "host": "far"}, "started on far"),
        ({"state": "died", "ending": {"text": "was killed after step 7"}}, "The last process was killed after step 7."),
        ({"state": "died", "ending": {"text": "x"}}, "It was killed, or died without a word."),
        ({"state": "ended", "ending": {"text": "failed", "kind": "failed", "reason": "no memory"}}, "no memory"),
        ({"state": "ended", "ending": {"text": "finished at step 9", "kind": "finished"}}, "finished at step 9."),
        ({"stalled": {"time": 1.7e9, "reason": "drafter-0 in get_wait"}}, "drafter-0 in get_wait"),
        ({"saving": {"problem": "No space left"}}, "Checkpoints cannot be written. No space left"),
        ({"note": "belongs to another user"}, "belongs to another user"),
        ({"left_s": 30.2}, "about 30 s left"),
        ({"total_steps": None, "left_s": None}, "Training: step 100."),
    ],
)
def test_the_page_says_where_a_run_stands(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """Live, over, dead, elsewhere or in trouble: in a sentence, and loudly where it is trouble."""
    base = view(tmp_path)
    state = dict(base.state) | changes
    shown = text_of(run_page("a", run_parts(RunView(**vars(base) | {"state": state}))))
    assert said in shown


def test_what_is_undecided_claims_no_capacity(tmp_path: Path) -> None:
    """As `paceline status` says none; nor does a run in turn, whose bars are the two sides' shares."""
    base = view(tmp_path)
    for kind, said in (("undecided", "drafter waits (get)"), ("in turn", "the drafter's turn")):
        verdict = dict(base.state["verdict"]) | {"kind": kind}
        shown = run_parts(RunView(**vars(base) | {"state": dict(base.state) | {"verdict": verdict}}))["verdict"]
        assert "could make" not in shown and said in html.unescape(shown)


def test_a_run_without_files_has_a_page(tmp_path: Path) -> None:
    """Nothing is known, and none of it is made up: no figure, no chart, no empty heading."""
    empty = RunView({}, Steps(tmp_path / "m"), Events(tmp_path / "e"), Stages(tmp_path / "s"))
    parts = run_parts(empty)
    shown = text_of(run_page("a", parts))
    assert "No step has been written down yet." in shown and MISSING in shown
    assert [name for name, markup in parts.items() if not markup] == [
        "verdict", "queue", "stages", "batches", "saved", "events", "about",
    ]  # fmt: skip


@pytest.mark.parametrize("wrong", [None, "text", 7, [], {}, math.nan, HOSTILE, [1], True])
def test_values_of_the_wrong_type_make_a_page_all_the_same(tmp_path: Path, wrong: Any) -> None:
    """Every value of every record, one kind of nonsense after the other."""
    base = view(tmp_path)
    write_lines(tmp_path / "w" / "metrics.jsonl", [dict.fromkeys(line(1), wrong) | {"step": 1}, {"step": wrong}])
    write_lines(tmp_path / "w" / "events.jsonl", [{"time": wrong, "event": wrong, "step": wrong, "reason": wrong}])
    write_lines(
        tmp_path / "w" / "stages.jsonl", [dict.fromkeys(table_of(1, "r"), wrong), table_of(1, "r") | {"stages": wrong}]
    )
    broken = view(
        tmp_path / "w",
        state=dict.fromkeys(base.state, wrong),
        record=dict.fromkeys(base.record, wrong),
        config=dict.fromkeys(base.config, wrong),
        report={"verdict": wrong, "ledger": wrong, "tokens": wrong},
        checkpoints=[dict.fromkeys(base.checkpoints[0], wrong)],
        evaluations=[dict.fromkeys(base.evaluations[0], wrong)],
        process_gib={"now": wrong, "peak": wrong},
    )
    reader = Reader(run_page("a", run_parts(broken)))
    assert "script" not in reader.tags and "img" not in reader.tags


def test_what_files_hold_is_text_and_nothing_else(tmp_path: Path) -> None:
    """Markup and control characters in names, reasons, settings and roles are shown, and do nothing."""
    write_lines(tmp_path / "metrics.jsonl", [line(1)])
    write_lines(
        tmp_path / "events.jsonl", [{"time": 1.7e9, "event": HOSTILE, "step": 1, HOSTILE: HOSTILE, "reason": HOSTILE}]
    )
    write_lines(tmp_path / "stages.jsonl", [table_of(1.0, HOSTILE, **{HOSTILE: 5000.0})])
    hostile = view(
        tmp_path,
        state={"run": HOSTILE, "note": HOSTILE, "threads": [{"role": HOSTILE, "thread": HOSTILE, "stage": HOSTILE}],
               "verdict": {"kind": HOSTILE, "reason": HOSTILE}},
        record={"host": HOSTILE, "started": 1.0,
                "roles": {HOSTILE: {"host": HOSTILE, "pid": HOSTILE, "device": HOSTILE}},
                "versions": {HOSTILE: HOSTILE}, "packing": HOSTILE, "memory_gib": {HOSTILE: 1.0}},
        config={"target": {"path": HOSTILE}, HOSTILE: HOSTILE},
    )  # fmt: skip
    shown = text_of(run_page(HOSTILE, run_parts(hostile)))
    assert shown.count(VISIBLE) > 15


# Files that are read on


def test_stretches_are_sums_of_the_lines(tmp_path: Path) -> None:
    """However often neighbours were joined: every line is in one stretch, with its value in sum and extremes."""
    draw = random.Random(0)
    lines = [line(step, loss=draw.gauss(3, 1), queue=draw.randrange(5)) for step in range(1, 10_001)]
    lines[17]["loss"], lines[4000]["loss"] = math.nan, math.inf
    del lines[18]["loss"]
    write_lines(tmp_path / "m", lines)
    steps = Steps(tmp_path / "m")
    steps.read()
    assert history.MAX_STRETCHES / 2 < len(steps.stretches) <= history.MAX_STRETCHES and steps.size == 8
    known = {each["step"]: each for each in lines}
    at = 0
    for stretch in steps.stretches:
        assert stretch.first == at + 1
        at = stretch.last
        inside = [known[step] for step in range(stretch.first, at + 1)]
        for name in history.FIGURES:
            values = [each[name] for each in inside if math.isfinite(each.get(name, math.nan))]
            assert stretch.counts[name] == len(values)
            assert stretch.sums[name] == pytest.approx(sum(values))
            assert (stretch.lowest[name], stretch.highest[name]) == (min(values), max(values))
    assert at == 10_000


def test_reading_on_gives_what_reading_at_once_gives(tmp_path: Path) -> None:
    """In pieces that end anywhere, also within a line."""
    write_lines(tmp_path / "all", [line(step) for step in range(1, 301)])
    data, draw = (tmp_path / "all").read_bytes(), random.Random(1)
    whole, parts = Steps(tmp_path / "all"), Steps(tmp_path / "part")
    whole.read()
    at = 0
    while at < len(data):
        at += draw.randrange(1, 3000)
        (tmp_path / "new").write_bytes(data[:at])
        with open(tmp_path / "part", "ab") as file:
            file.write(data[file.tell() : at])
        parts.read()
    assert parts.stretches == whole.stretches and parts.num_lines == 300


@pytest.mark.parametrize("how", ["truncated", "replaced", "regrown", "gone back"])
def test_a_run_that_goes_back_is_read_again(tmp_path: Path, how: str) -> None:
    """Resuming cuts the file back to the checkpoint; lines of lost steps are of no page after that."""
    place = tmp_path / "m"
    write_lines(place, [line(step, loss=9.0) for step in range(1, 21)])
    steps = Steps(place)
    steps.read()
    again = [line(step, loss=5.0) for step in range(11, 31 if how != "truncated" else 16)]
    if how == "gone back":
        with open(place, "a") as file:
            file.write("".join(json.dumps(each) + "\n" for each in again))
    elif how == "replaced":
        write_lines(tmp_path / "new", [line(step, loss=9.0) for step in range(1, 11)] + again)
        os.replace(tmp_path / "new", place)
    else:
        lines = place.read_bytes().splitlines(keepends=True)[:10]
        os.truncate(place, len(b"".join(lines)))
        with open(place, "a") as file:
            file.write("".join(json.dumps(each) + "\n" for each in again))
    steps.read()
    losses = {each.first: each.sums["loss"] for each in steps.stretches}
    assert losses == {step: 9.0 if step <= 10 else 5.0 for step in range(1, again[-1]["step"] + 1)}


def test_an_addition_to_a_line_is_no_new_file(tmp_path: Path) -> None:
    """An evaluation is added to its step's line in place: nothing is read twice for that."""
    place = tmp_path / "m"
    place.write_text(json.dumps(line(1)) + " " * 128 + "\n")
    steps = Steps(place)
    steps.read()
    size = place.stat().st_size
    with open(place, "r+") as file:
        file.write(json.dumps(line(1) | {"measured_acceptance_length": 2.0}).ljust(size - 1))
    with open(place, "a") as file:
        file.write(json.dumps(line(2)) + "\n")
    steps.read()
    assert steps.num_lines == 2 and [each.first for each in steps.stretches] == [1, 2]


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    """Half lines, other JSON, bytes that are no text, two halves that would make one."""
    place = tmp_path / "m"
    good = [json.dumps(line(step)).encode() for step in (1, 2, 3)]
    bad = [
        b'{"step": 7',
        b'"loss": 1}',
        b"\xff\xfe",
        b"[" * 100_000,
        b"3",
        b"null",
        b"",
        b'{"step": true}',
        b'{"step": "4"}',
    ]
    place.write_bytes(b"\n".join([good[0], *bad, good[1], *bad, good[2]]) + b"\n")
    steps = Steps(place)
    steps.read()
    assert [each.first for each in steps.stretches] == [1, 2, 3]


def test_of_many_events_the_newest_are_kept(tmp_path: Path) -> None:
    """Checkpoints are counted and not listed; what is left out is told."""
    lines = [{"time": 1.7e9 + i, "event": "checkpoint" if i % 2 else "evaluated", "step": i} for i in range(2000)]
    write_lines(tmp_path / "events.jsonl", [*lines, {"time": 1.8e9, "event": "SIGTERM", "step": 2000}])
    parts = run_parts(view(tmp_path))
    assert "1,000 checkpoints that were written are not listed." in parts["events"]
    assert f"{1001 - history.MAX_EVENTS} events before these more are not shown." in parts["events"]
    first = parts["events"].index("SIGTERM")
    assert first < parts["events"].index("step 1,998") and 'class="trouble"' in parts["events"][:first]


@pytest.mark.slow
def test_a_run_of_200_000_steps_is_a_small_page_and_soon_drawn(tmp_path: Path) -> None:
    """Below 2 MB, and below two seconds of a processor; a look at what came after that takes a fraction."""
    form = json.dumps(line(1) | {"step": "S", "loss": "L"}).replace('"S"', "%d").replace('"L"', "%f") + "\n"
    place = tmp_path / "metrics.jsonl"
    place.write_text("".join(form % (step, 3 + step % 7) for step in range(1, 200_001)))
    before = time.process_time()
    big = view(tmp_path)
    page = run_page("a", run_parts(big))
    assert time.process_time() - before < 2.0
    assert len(page) < 500_000
    assert "200,000" in page and big.steps.num_lines == 200_000
    check(page)
    with open(place, "a") as file:
        file.write(form % (200_001, 1.0))
    before = time.process_time()
    big.steps.read()
    run_parts(big)
    assert time.process_time() - before < 0.5
    assert big.steps.num_lines == 200_001


# Served


def test_a_served_page_has_one_script_which_its_policy_knows(tmp_path: Path) -> None:
    """By its digest; and every part has an element that new markup can be put into."""
    script = 'document.title = "<&>";'
    parts = run_parts(view(tmp_path))
    page = live_page("a", parts, "v-1", script)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    reader = Reader(page)
    policy = next(value for name, value in reader.attributes if name == "content" and "default-src" in value)
    assert f"script-src 'sha256-{digest}'" in policy and policy.startswith("default-src 'none'")
    assert "connect-src 'self'" in policy and "unsafe-inline" not in policy.partition("script-src")[2]
    assert page.count("<script") == 1 and f">{script}</script>" in page
    for name in parts:
        assert f'<div id="{name}">' in page
    assert "script" not in Reader(run_page("a", parts)).tags


def test_parts_are_the_same_while_nothing_changes(tmp_path: Path) -> None:
    """No clock is in them: a page that stands still is not sent again."""
    first: dict[str, Html] = run_parts(view(tmp_path))
    time.sleep(1.1)
    assert run_parts(view(tmp_path)) == first
    assert "url(" not in STYLE
