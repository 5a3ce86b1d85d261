"""A look at programs whose bottleneck is known before: shares as the kernel counts them, and the cause that it is.

The other truth is the machine's: where it is busy with other things, a thread that waits for a CPU may be told so.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.cli.attach import _meant
from paceline.config import dump_config
from paceline.profiling import look as look_module
from paceline.profiling.causes import asked_ids
from paceline.profiling.collect.threads import parse_schedstat
from paceline.profiling.diff import diff, load_report
from paceline.profiling.evidence import Figure, Hypothesis, Report, Thread
from paceline.profiling.look import Wish, look
from tests.integration.test_profile_live import SLOW_TRAINING, Run, command, environment, started, until
from tests.programs import compiled_driver, running
from tests.toy import Toy
from tests.unit.profiling.test_collect_tools import tool

PATIENCE_S = 90.0
SECONDS = 3.0
POINTS = 0.06
"""Allowed beyond a 95 % interval, for a machine that is busy with other things."""
ATTEMPTS = 3
STARVED = 0.05
"""Share of time without a CPU from which on that may be the verdict, whatever else a program does."""


@pytest.fixture(scope="module", autouse=True)
def py_spy() -> str:
    """Path of py-spy; without the right to read a child nothing here can be told."""
    return tool("py-spy")


@dataclass(frozen=True)
class Taken:
    """What the kernel says of a thread over the window: shares of time on a CPU, and ready without one."""

    cpu: float
    runqueue: float


@dataclass(frozen=True)
class Looked:
    """A report, and what the kernel said meanwhile of each thread of the process that was named."""

    report: Report
    taken: dict[int, Taken]

    def thread(self, name: str) -> Thread:
        """The thread of that Python name."""
        (found,) = (thread for thread in self.report.threads if thread.name == name)
        return found

    def of(self, name: str) -> Taken:
        """What the kernel said of it."""
        return self.taken[self.thread(name).tid]

    def critical(self) -> Thread:
        """The one thread that the verdict is about."""
        (found,) = (thread for thread in self.report.threads if thread.tid in self.report.critical)
        return found

    def is_caused_by(self, cause: str) -> bool:
        """Whether the verdict says so, or that the machine was busy with other things where it was."""
        found = self.report.conclusion.cause
        waits = self.taken.get(self.critical().tid, Taken(0.0, 0.0)).runqueue
        return found == cause or (waits > STARVED and found == "cpu-starvation")


def counters(pid: int) -> dict[int, tuple[float, int, int]]:
    """When, CPU time and run-queue wait of each thread, by the kernel's own count."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            counted = parse_schedstat((folder / "schedstat").read_text())
            found[int(folder.name)] = (time.monotonic(), *(counted or (0, 0, 0))[:2])
    return found


def look_at(pid: int, seconds: float = SECONDS, hypothesis: str = "", **wish: object) -> Looked:
    """A look in this process, with the kernel's counters at both ends of its first window."""
    readings: list[dict[int, tuple[float, int, int]]] = []
    timers: list[threading.Timer] = []

    def begin(_text: str) -> None:
        if not readings:
            readings.append(counters(pid))
            timers.append(threading.Timer(seconds, lambda: readings.append(counters(pid))))
            timers[0].start()

    asked = tuple(asked_ids([hypothesis])) if hypothesis else ()
    report = look(pid, Wish(seconds=seconds, asked=asked, **wish), say=begin)  # type: ignore[arg-type]
    timers[0].join()
    first, last = readings
    taken = {}
    for tid in first.keys() & last.keys():
        ns = 1e9 * (last[tid][0] - first[tid][0])
        taken[tid] = Taken((last[tid][1] - first[tid][1]) / ns, (last[tid][2] - first[tid][2]) / ns)
    return Looked(report, taken)


def judged(report: Report, id: str) -> Hypothesis:
    """One of the hypotheses."""
    return next(each for each in report.hypotheses if each.id == id)


def is_near(figure: Figure, low: float, high: float | None = None) -> bool:
    """Whether the interval, widened by `POINTS`, reaches the truth, which may be a range."""
    return figure.low - POINTS <= (low if high is None else high) and low <= figure.high + POINTS


def is_true_of_the_hog(looked: Looked) -> bool:
    """The lock is held while the hog runs, and mostly while it waits for a CPU; the victim's part is small."""
    hog, victim = looked.of("hog"), looked.of("victim")
    gil = looked.report.observations["gil.share"]
    return is_near(gil, hog.cpu, hog.cpu + hog.runqueue + victim.cpu + victim.runqueue)


@pytest.fixture(scope="module")
def hogs() -> dict[str, Looked]:
    """Looks at programs in which a thread keeps the GIL for 30 and for 80 % of the time."""
    found = {}
    for duty in ("0.3", "0.8"):
        with running("gil_hog.py", duty) as process:
            for _ in range(ATTEMPTS):  # whoever else is at work here may come in between the two readings
                found[duty] = look_at(process.pid)
                if is_true_of_the_hog(found[duty]):
                    break
    return found


# Strangers, of one cause each.


@pytest.mark.parametrize("duty", ["0.3", "0.8"])
def test_the_gils_share_is_what_the_kernel_says_of_its_holder(hogs: dict[str, Looked], duty: str) -> None:
    """The share is the hog's own time, it is named as its holder and by its Python name, with where it was."""
    looked = hogs[duty]
    report = looked.report
    assert is_true_of_the_hog(looked), (report.gil, looked.taken)
    gil = report.gil
    assert gil is not None and gil.holders[0].name == "hog" and gil.holders[0].share > 0.8 * gil.share
    assert any(where.startswith("hold (gil_hog.py:") for where in gil.holders[0].where)
    hog = looked.thread("hog")
    assert hog.gil is not None and hog.cpu is not None and hog.runqueue is not None
    assert is_near(hog.cpu, looked.of("hog").cpu) and is_near(hog.runqueue, looked.of("hog").runqueue)
    assert {thread.name for thread in report.threads} >= {"MainThread", "hog", "victim"}
    assert all(level.disturbance.stop_frac is None for level in report.levels)


def test_a_thread_that_alone_works_in_python_is_no_contention(hogs: dict[str, Looked]) -> None:
    """Judged by itself, the hog is at work: nobody keeps the lock from it."""
    looked = hogs["0.8"]
    assert looked.critical().name == "hog"
    assert judged(looked.report, "gil").outcome == "refuted"
    assert looked.is_caused_by("python") or looked.report.conclusion.cause == ""


def test_a_victim_of_the_gil_is_told_so() -> None:
    """Beside a thread that keeps the GIL for nine tenths of the time, another one's cause is just that."""
    with running("gil_hog.py", "0.9") as process:
        looked = look_at(process.pid, thread="victim")
    assert looked.critical().name == "victim"
    assert looked.is_caused_by("gil"), looked.report.conclusion
    assert judged(looked.report, "gil").outcome == "supported"


def test_multiplying_matrices_is_compute_and_a_suspicion_of_the_gil_is_refuted() -> None:
    """Native code without the GIL: the user's own hypothesis is answered first, by a clear no."""
    pytest.importorskip("numpy")
    with running(
        "matmul.py", "numpy", environment=environment(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    ) as process:
        looked = look_at(process.pid, hypothesis="gil contention?")
    first = looked.report.hypotheses[0]
    assert (first.id, first.asked, first.outcome) == ("gil", True, "refuted"), first
    assert looked.critical().name == "matmul"
    assert looked.is_caused_by("cpu-compute"), looked.report.conclusion
    assert looked.report.observations["critical.gil"].high < 0.2


def test_whoever_waits_for_a_queue_is_no_cause_unless_asked_for() -> None:
    """Where all threads wait, nobody is accused of it; one that is named is starved by its queue."""
    with running("queue_waiters.py") as process:
        everyone = look_at(process.pid, 2.0)
        getter = look_at(process.pid, 2.0, thread="getter-1")
    assert everyone.report.conclusion.cause == ""
    assert not [each.id for each in everyone.report.hypotheses if each.outcome == "supported"]
    assert getter.critical().name == "getter-1"
    assert getter.report.conclusion.cause == "input"
    assert getter.thread("getter-1").categories.keys() == {"queue_wait"}


@pytest.mark.slow
def test_a_lock_convoy_needs_native_stacks_and_is_found_by_them() -> None:
    """Python stacks cannot tell a wait for a lock from work: undecided, and what to measure next. Native ones can."""
    with running("lock_convoy.py") as process:
        before = look_at(process.pid, 2.0, thread="convoy-1").report
        after = look_at(process.pid, 2.0, thread="convoy-1", allow_pause=True, budget=0.3, native_seconds=3.0).report
    assert before.conclusion.cause == "" and judged(before, "lock").outcome == "undecided"
    assert before.conclusion.next and before.conclusion.next_s > 0 and "next" in before.conclusion.line
    level = after.level("4")
    assert level is not None
    if not level.ok or not level.in_verdict:
        pytest.skip(f"no native stacks here: {level.reason}")
    assert after.conclusion.cause == "lock", after.conclusion
    assert after.observations["critical.lock"].low > 0.4  # three of four threads wait


def test_a_thread_without_a_cpu_is_starved_for_as_long_as_the_kernel_says() -> None:
    """Two that share a core wait for it half of the time each."""
    with running("starved.py") as process:
        looked = look_at(process.pid, thread="starved")
        assert len(looked.report.processes) == 2
    figure, truth = looked.report.observations["critical.runqueue"], looked.of("starved")
    assert is_near(figure, truth.runqueue), (figure, truth)
    assert is_near(figure, 0.5, 1.0)
    assert looked.report.conclusion.cause == "cpu-starvation"


@pytest.mark.slow
def test_a_training_loop_on_the_cpu_is_compute() -> None:
    """Of plain PyTorch, in its main thread, nothing to do with the GIL or with a GPU."""
    pytest.importorskip("torch")
    with running("train_loop.py", environment=environment(OMP_NUM_THREADS="1")) as process:
        looked = look_at(process.pid)
    report = looked.report
    assert looked.critical().is_main and looked.critical().name == "MainThread"
    assert looked.is_caused_by("cpu-compute"), report.conclusion
    assert "torch" in report.versions
    for id in ("gil", "input", "launch-overhead", "gpu-bound", "explicit-sync", "allocator-churn", "host-copy"):
        assert judged(report, id).outcome != "supported"


@pytest.mark.slow
def test_a_training_loop_that_waits_for_its_loader_is_told_so() -> None:
    """The cause is in the main thread, and the loader's workers are in the report as its children."""
    pytest.importorskip("torch")
    with running("data_loader.py") as process:
        looked = look_at(process.pid)
        pid = process.pid
    report = looked.report
    assert looked.critical().tid == pid
    assert looked.is_caused_by("input"), report.conclusion
    assert report.observations["critical.queue_wait"].low > 0.5
    workers = [each for each in report.processes if each.parent == pid and each.python]
    assert len(workers) >= 2
    assert {thread.pid for thread in report.threads} >= {each.pid for each in workers}


# A pretended driver.


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``libcuda.so.1`` without a device."""
    return compiled_driver(tmp_path_factory.mktemp("driver"))


def look_natively(pid: int, thread: str, seconds: float, native_seconds: float = 8.0) -> Looked:
    """With native stacks; skips where there are none."""
    looked = look_at(pid, seconds, thread=thread, allow_pause=True, budget=0.4, native_seconds=native_seconds)
    level = looked.report.level("4")
    assert level is not None
    if not level.ok or not level.in_verdict:
        pytest.skip(f"no native stacks here: {level.reason}")
    assert level.disturbance.stop_frac is not None and level.disturbance.stop_frac <= 0.4
    return looked


@pytest.mark.slow
def test_launches_and_waits_have_their_true_shares(driver: Path) -> None:
    """A thread that launches for 80 % of its time and waits for the rest: its verdict is one of the two."""
    for _ in range(ATTEMPTS):
        with running("fake_cuda.py", str(driver), "0.8", "mixed") as process:
            looked = look_natively(process.pid, "mixed", SECONDS)
            process.kill()
            assert process.stdout is not None
            launches = float(re.findall(r"share (\d\.\d{4})\n", process.stdout.read())[-1])
        figures = looked.report.observations
        if is_near(figures["critical.launch"], launches) and is_near(figures["critical.sync"], 1 - launches):
            break
    else:
        pytest.fail(f"{launches} launches: {figures['critical.launch']}, {figures['critical.sync']}")
    report = looked.report
    assert figures["process.cuda"].value == 1.0
    assert looked.is_caused_by("launch-overhead") or looked.is_caused_by("explicit-sync"), report.conclusion
    assert judged(report, "launch-overhead").outcome == "supported"
    assert report.conclusion.gain is None or report.conclusion.gain.value > 1.0


@pytest.mark.slow
def test_pure_launches_are_launch_overhead_and_no_synchronisation(driver: Path) -> None:
    """Nothing waits for the device: that hypothesis is refuted, or at least the figure says so."""
    with running("fake_cuda.py", str(driver), "1.0", "mixed") as process:
        looked = look_natively(process.pid, "mixed", 5.0)
    report = looked.report
    assert report.observations["critical.launch"].value > 0.9
    assert looked.is_caused_by("launch-overhead"), report.conclusion
    sync = judged(report, "explicit-sync")
    assert sync.outcome == ("refuted" if report.observations["critical.sync"].high < 0.05 else "undecided")


@pytest.mark.slow
def test_pure_waits_are_synchronisation(driver: Path) -> None:
    """All of the time in waits for the stream; whether the device is busy meanwhile is unknown, and is asked next."""
    with running("fake_cuda.py", str(driver), "0", "waiting") as process:
        report = look_natively(process.pid, "waiting", 2.0, 4.0).report
    assert report.observations["critical.sync"].value > 0.9
    assert judged(report, "launch-overhead").outcome == "refuted"
    if report.level("5") is None or not report.level("5").ok:  # type: ignore[union-attr]
        assert judged(report, "explicit-sync").outcome == judged(report, "gpu-bound").outcome == "undecided"
        assert report.conclusion.cause == "" and "on the GPU" in report.conclusion.next


# A run of ours.


@pytest.fixture(scope="module")
def training(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A slow run that goes on for longer than all tests here; profiling is not mentioned."""
    folder = tmp_path_factory.mktemp("attached")
    config = toy.config(folder / "run", "data.epochs=4000", "eval.validate_every=100000", "checkpoint.every_steps=1000")
    (folder / "run.yaml").write_text(dump_config(config))
    with started(SLOW_TRAINING, "train", str(folder / "run.yaml"), run_dir=folder / "run") as run:
        until(lambda: run.snapshot().gauges["step"] >= 2, run.process)
        yield run


def check_our_run(report: Report, run: Run) -> None:
    """Roles, stages, queue and pipeline are there."""
    assert report.pid == run.process.pid
    roles = {thread.role: thread for thread in report.threads if thread.role}
    assert roles.keys() >= {"target-0", "drafter-0"}
    assert all(roles[role].cpu is not None for role in ("target-0", "drafter-0"))
    assert roles["target-0"].tid in report.critical or roles["drafter-0"].tid in report.critical
    stages = {record["role"]: record["stages"] for record in report.stages}
    assert stages["target-0"]["model_forward"]["count"] > 0 and stages["drafter-0"]["backward"]["count"] > 0
    assert report.queue is not None and report.queue.targets == 1
    assert report.queue.depth == run.snapshot().gauges["queue_depth"] > 0
    assert report.queue.batches_per_s > 0 and report.queue.get_wait.value <= 1.0
    assert report.pipeline["kind"] and report.conclusion.line.startswith(report.conclusion.side or "cause")
    assert report.run["roles"] == ["drafter-0", "target-0"] and report.run["layout"] == "split"
    assert report.tokens_per_s is not None and report.tokens_per_s.value > 0
    process = next(each for each in report.processes if each.pid == report.pid)
    assert "target-0" in process.role and "drafter-0" in process.role
    level = report.level("0")
    assert level is not None and level.ok


def test_a_run_of_ours_is_looked_at_by_its_folder(training: Run, tmp_path: Path) -> None:
    """With its stages, which are counted for the look only, while the run goes on."""
    before = training.snapshot()
    assert not before.control.is_on
    code, shown = command("profile", "attach", training.path, "--seconds", "3", "--json", tmp_path / "a.json")
    assert code == 0, shown
    for part in ("target-0", "drafter-0", "VERDICT", "DISTURBED no level stopped the process"):
        assert part in shown, shown
    report = load_report(tmp_path / "a.json")
    check_our_run(report, training)
    after = training.snapshot()
    assert not after.control.is_on
    assert (after.control.is_on, after.control.interval_s) == (before.control.is_on, before.control.interval_s)
    assert after.gauges["step"] > before.gauges["step"] and after.gauges["queue_depth"] == before.gauges["queue_depth"]
    assert not training.stages_file.exists()
    # the target was made slow by sleeping; only a look that was too short may not say so
    assert report.queue is not None and report.queue.get_wait.value > report.queue.put_wait.value
    assert report.pipeline["kind"] in ("producer-bound", "undecided"), report.pipeline
    if report.pipeline["kind"] == "producer-bound":
        assert report.conclusion.side == "producer-bound"
        assert [thread.role for thread in report.threads if thread.tid in report.critical] == ["target-0"]
        assert report.conclusion.cause in ("sleep", "cpu-starvation", ""), report.conclusion


def test_a_run_of_ours_is_known_by_its_process_too(training: Run, tmp_path: Path) -> None:
    """From the command line as a user has it; counting that somebody else has on stays on."""
    assert command("profile", "on", training.path, "--interval", "500")[0] == 0
    try:
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "profile", "attach", str(training.process.pid), "--seconds", "2",
             "--json", "-"],
            env=environment(), capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert training.snapshot().control.is_on and training.snapshot().control.interval_s == 500
    finally:
        command("profile", "off", training.path)
    check_our_run(Report.model_validate(json.loads(done.stdout)), training)
    assert not training.snapshot().control.is_on
    assert training.process.poll() is None


def test_without_the_right_to_read_it_a_run_of_ours_samples_itself(
    training: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stacks and the lock's share come through its socket; who holds the lock is then unknown, and accuses nobody."""
    monkeypatch.setattr(look_module, "tool", lambda name: (None, f"pip install {name}"))
    pid, run = _meant(str(training.path))
    report = look(pid, Wish(seconds=2.0), run=run)
    level = report.level("6")
    assert level is not None and level.ok and level.samples > 5
    names = {thread.tid: thread.name for thread in report.threads}
    sampled = {names.get(stack.tid) for stack in report.stacks if stack.level == "6"}
    assert {"MainThread", "target-0"} <= sampled, sampled
    assert report.gil is not None and report.gil.level == "6" and report.gil.holders == ()
    assert "gil.share" in report.observations and "gil.held_by_others" not in report.observations
    assert judged(report, "gil").outcome != "supported"
    missing = {each.id: each.fix for each in report.levels if not each.ok}
    assert missing["2"] == missing["3"] == "pip install py-spy"


# Looks held against each other.


def check_mirrored(a: Report, b: Report) -> None:
    """The same figures are compared and have moved, by the same amount the other way round."""
    there, back = diff(a, b), diff(b, a)
    assert [change.key for change in there.changes] == [change.key for change in back.changes]
    for one, other in zip(there.changes, back.changes, strict=True):
        assert one.delta == -other.delta and one.moved == other.moved
        assert one.interval == pytest.approx((-other.interval[1], -other.interval[0]))
    assert there.only_before == back.only_after and there.only_after == back.only_before
    assert diff(a, a).moved == [] and diff(a, a).verdict is None


@pytest.mark.slow
def test_chance_moves_nothing_between_looks_at_a_steady_program() -> None:
    """Of three pairs at most one, on a machine that others use, where waits for a CPU are the machine's own."""
    with running("gil_hog.py", "0.5") as process:
        looks = [look_at(process.pid).report for _ in range(4)]
    pairs = list(zip(looks, looks[1:], strict=False))
    moved = [[change.key for change in diff(a, b).moved] for a, b in pairs]
    assert sum(any("runqueue" not in key for key in keys) for keys in moved) <= 1, moved
    check_mirrored(*pairs[0])


def test_swapped_reports_turn_every_sign(hogs: dict[str, Looked]) -> None:
    """Of real looks at two programs that differ."""
    check_mirrored(hogs["0.3"].report, hogs["0.8"].report)


def test_a_planted_change_is_found(hogs: dict[str, Looked], tmp_path: Path) -> None:
    """From 30 to 80 % the GIL's share has moved up; a wish that it does not is answered by exit code 1."""
    files = []
    for duty in ("0.3", "0.8"):
        files.append(tmp_path / f"{duty}.json")
        files[-1].write_text(hogs[duty].report.model_dump_json(by_alias=True))
    change = next(each for each in diff(hogs["0.3"].report, hogs["0.8"].report).moved if each.key == "gil.share")
    assert change.direction == "up" and 0.2 < change.delta < 0.8
    code, shown = command("profile", "diff", *files)
    assert code == 0 and "gil.share" in shown
    code, shown = command("profile", "diff", *files, "--fail-on", "gil.share>+0.1")
    assert code == 1 and "failed: " in shown and "gil.share" in shown
    assert command("profile", "diff", *files[::-1], "--fail-on", "gil.share>+0.1")[0] == 0
    assert command("profile", "diff", *files[::-1], "--fail-on", "gil.share<-0.1")[0] == 1


def test_a_saved_report_is_what_was_looked_at(hogs: dict[str, Looked], tmp_path: Path) -> None:
    """It is read back field by field, and shown again in the terminal and as a page that needs nothing else."""
    file = tmp_path / "a.json"
    file.write_text(hogs["0.8"].report.model_dump_json(by_alias=True))
    assert load_report(file) == hogs["0.8"].report
    code, shown = command("profile", "report", file, "--html", tmp_path / "a.html")
    assert code == 0 and "VERDICT" in shown and "hog" in shown
    page = (tmp_path / "a.html").read_text()
    assert "hog" in page and page.lstrip().lower().startswith("<!doctype html>")
    assert not re.search(r"(?:src|href)=[\"']https?://", page)
    assert sorted(os.listdir(tmp_path)) == ["a.html", "a.json"]
