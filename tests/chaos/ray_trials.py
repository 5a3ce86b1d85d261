"""Seeded trials of runs on Ray: processes, hosts and the driver are struck at random instants, and the run is resumed.

Every start is a `paceline train` or `paceline resume` of its own. A trial ends in one of `OUTCOMES`; those that are not
in `GOOD` are bugs.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tests.chaos.harness import Bits, Ended, World, bits_of, newest_step
from tests.chaos.trials import HANG, OTHER_BITS, OTHER_END, SAME_BITS, TRACEBACK
from tests.toy import build_toy

CLOSE, LEFT_BEHIND, UNEVEN = "same losses", "left behind", "uneven ledger"
OUTCOMES = (SAME_BITS, CLOSE, OTHER_BITS, HANG, TRACEBACK, OTHER_END, LEFT_BEHIND, UNEVEN)
GOOD = (SAME_BITS, CLOSE)

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0
"""A start that takes longer hangs: an undisturbed one takes some twenty seconds of two loaded cores."""

AFTER_S = 20.0
"""What a trial started has to be gone so long after its end."""

AGENTS, AGENTS_S = ("ray::DashboardAgent", "ray::RuntimeEnvAgent"), 90.0
"""Two small processes of Ray's own that notice only a minute later that its cluster was killed with the driver."""

MAX_STARTS = 8
STORE_BYTES = 256 << 20
REASSOCIATION = 1e-4
"""How far losses may be apart where the number of drafters changed."""

WHILE_STARTING = 0.2
"""Probability that a strike comes before the training has begun."""

CHANGED_DRAFTERS = 0.25
"""Probability that a trial of two drafters goes on with one at times."""

SETTINGS = (
    "run.device=cpu",
    "data.epochs=10",
    "draft.num_layers=1",
    "optim.tokens_per_step=512",  # four micro-batches, which two drafters share
    "checkpoint.every_steps=4",
    "checkpoint.keep_last=2",
    "eval.validate_every=10",
)


@dataclass(frozen=True)
class Layout:
    """Where the roles of a start run. `is_joined`: on the cluster that is there, not on one of the run's own."""

    executor: Literal["local", "ray"]
    layout: Literal["split", "colocated"]
    targets: int
    drafters: int = 1
    is_joined: bool = False

    @property
    def processes(self) -> int:
        """Actors."""
        if self.executor == "local":
            return 0
        return self.drafters - 1 + (self.targets if self.layout == "split" else 0)

    def settings(self, address: str | None) -> list[str]:
        """The section of the run file."""
        return [
            f"topology.executor={self.executor}",
            f"topology.address={address if self.is_joined and self.executor == 'ray' else 'null'}",
            f"topology.layout={self.layout}",
            f"topology.targets={self.targets}",
            f"topology.drafters={self.drafters}",
        ]

    def __str__(self) -> str:
        where = "" if self.executor == "local" else " joined" if self.is_joined else " own"
        return f"{self.executor}{where} {self.layout} {self.targets}+{self.drafters}"


STRAIGHT = Layout("local", "split", 1)
CALM = {
    "split": Layout("ray", "split", 1, drafters=2),
    "colocated": Layout("ray", "colocated", 1, drafters=2),
}
"""Undisturbed runs of two drafters."""


class Command:
    """A `paceline` command that is under way. Ray's processes are children of it, and end by themselves or not."""

    def __init__(self, arguments: list[str], output: Path) -> None:
        self.started = time.monotonic()
        self._output = output
        environment = os.environ | {"PYTHONFAULTHANDLER": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline", *arguments],
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment,
            )  # fmt: skip
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code once it has ended."""
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it has not ended."""
        if self.poll() is None:
            self._process.send_signal(number)

    def hangs(self) -> Ended:
        """End it; its output has the stacks of its threads."""
        self.send(signal.SIGABRT)
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return Ended(None, self.output())

    def output(self) -> str:
        """What it has written."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def ended(self, limit_s: float = LIMIT_S) -> Ended:
        """Wait for its end."""
        while self.poll() is None:
            if time.monotonic() - self.started > limit_s:
                return self.hangs()
            time.sleep(0.01)
        return Ended(self.poll(), self.output())


class Hosts:
    """A cluster that is there: a head, and a second raylet that may go."""

    def __init__(self, head_cpus: int, second_cpus: int) -> None:
        from ray.cluster_utils import Cluster

        self._second_cpus = second_cpus
        self.head_cpus = head_cpus
        self._cluster = Cluster(initialize_head=True, head_node_args=_node(head_cpus) | {"include_dashboard": False})
        self.address: str = self._cluster.address
        self._second: Any = None
        self.add()

    def add(self) -> None:
        """Have a second host, if there is none."""
        if self._second is None:
            self._second = self._cluster.add_node(**_node(self._second_cpus))

    def lose(self) -> bool:
        """Kill the second host's raylet; whether there was one."""
        second, self._second = self._second, None
        if second is not None:
            self._cluster.remove_node(second, allow_graceful=False)
        return second is not None

    def close(self) -> None:
        """End it."""
        self._cluster.shutdown()


def _node(cpus: int) -> dict[str, Any]:
    return {"num_cpus": cpus, "object_store_memory": STORE_BYTES}


@dataclass
class RayWorld(World):
    """Adds the undisturbed runs of two drafters."""

    calm: dict[str, Bits] | None = None

    def arguments(self, run: Path, layout: Layout, address: str | None, resumes: bool) -> list[str]:
        """Of the command that starts a run, or goes on with it."""
        settings = layout.settings(address)
        return ["resume", str(run), *settings] if resumes else ["train", str(self.run_file(run, *settings))]


def build(folder: Path) -> RayWorld:
    """Make target and data, and train what nobody disturbs: by one drafter here, and by two on Ray in both layouts."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    world = RayWorld(folder, build_toy(folder), SETTINGS)

    def run(name: str, layout: Layout) -> Bits:
        ended = Command(world.arguments(folder / name, layout, None, False), folder / f"{name}.log").ended()
        assert ended.code == 0, ended.output
        return bits_of(folder / name)

    world.bits = run("straight", STRAIGHT)
    world.steps = len(world.bits.lines)
    started = time.monotonic()
    world.calm = {name: run(f"calm-{name}", layout) for name, layout in CALM.items()}
    world.seconds = (time.monotonic() - started) / len(CALM)
    for bits in world.calm.values():
        assert (apart := not_close(bits, world.bits)) is None, apart
    return world


def not_close(one: Bits, other: Bits) -> str | None:
    """Where the losses of two runs differ by more than another order of sums explains."""
    if len(one.lines) != len(other.lines):
        return f"{len(one.lines)} and {len(other.lines)} metrics lines"
    for mine, its in zip(one.lines, other.lines, strict=True):
        for key, value in mine.items():
            is_real = key in ("loss", "grad_norm", "acceptance_length_est")
            if abs(value - its[key]) > (REASSOCIATION * abs(its[key]) if is_real else 0.0):
                return f"{key} of step {mine['step']}: {value} and {its[key]}"
    return None


def processes_of(run: Path, drivers: list[int]) -> Iterator[tuple[int, str]]:
    """Processes of a run, by where their output goes: actors with their role, and those of clusters of its own.

    Ray names the folder of a cluster after the process that started it.
    """
    sessions = tuple(f"_{pid}/" for pid in drivers)
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) in (os.getpid(), *drivers):
            continue
        output = _open_files(process, "1")
        if output and output[0].startswith(str(run / "logs")):
            yield int(process.name), Path(output[0]).stem
        elif drivers and any(
            "/session_" in file and mark in file for file in _open_files(process) for mark in sessions
        ):
            yield int(process.name), "of the cluster"


def _open_files(process: Path, *descriptors: str) -> list[str]:
    """Where a process's descriptors lead, all of them if none is named."""
    files = []
    with contextlib.suppress(OSError):
        for descriptor in descriptors or os.listdir(process / "fd"):
            files.append(os.readlink(process / "fd" / descriptor))
    return files


def actors_of(run: Path, kind: str) -> list[int]:
    """Processes of a run's targets or drafters."""
    return sorted(pid for pid, role in processes_of(run, []) if role.startswith(kind))


TARGET, DRAFTER, DRIVER = "target", "drafter", "driver"
KILLED, FROZEN, HOST_LOST = "SIGKILL", "SIGSTOP, SIGCONT", "host lost"
STRIKES = (
    f"{TARGET} {KILLED}", f"{DRAFTER} {KILLED}", HOST_LOST, f"{DRIVER} {KILLED}", f"{DRIVER} SIGTERM",
    f"{DRIVER} SIGINT", f"{TARGET} {FROZEN}", f"{DRAFTER} {FROZEN}",
)  # fmt: skip


@dataclass(frozen=True)
class Strike:
    """What is to come, and when.

    Attributes:
        step: The last one before it; None: while a start loads.
        delay_s: After that.
    """

    name: str
    step: int | None
    delay_s: float


@dataclass(frozen=True)
class RayTrial:
    """What came of one.

    Attributes:
        starts: Layout, strikes that hit and exit code of each.
        refusals: Starts that ended with a reason, as hosts were lost or what started was struck.
        num_missed: Strikes that found nothing to strike, or a run that had ended.
        drivers: Processes that were `paceline`.
        left_s: Seconds until all that it had started was gone, but for Ray's `AGENTS`.
    """

    index: int
    outcome: str
    starts: list[dict[str, Any]]
    refusals: list[str]
    num_missed: int
    drivers: list[int]
    left_s: float
    seconds: float
    detail: str = ""

    @property
    def strikes(self) -> list[str]:
        """Those that hit."""
        return [name.removesuffix(" while starting") for start in self.starts for name in start["strikes"]]


class _Trial:
    def __init__(self, world: RayWorld, seed: int, index: int) -> None:
        self.world, self.index = world, index
        self.chance = random.Random(f"ray/{seed}/{index}")
        self.run = world.folder / f"ray-trial-{index}"
        self.first = self._first_layout()
        self.changes_drafters = self.first.drafters > 1 and self.chance.random() < CHANGED_DRAFTERS
        self.hosts: Hosts | None = None
        self.drivers: list[int] = []
        self.starts: list[dict[str, Any]] = []
        self.refusals: list[str] = []
        self.strikes = self._draw_strikes()
        self.num_missed = 0
        self.num_drafters: set[int] = set()

    def _first_layout(self) -> Layout:
        is_joined = self.index // 3 % 2 == 1
        if self.index % 3 == 0:
            return Layout("ray", "split", self.chance.randint(1, 3), is_joined=is_joined)
        if self.index % 3 == 1:
            return Layout("ray", "split", self.chance.randint(1, 2), drafters=2, is_joined=is_joined)
        return Layout("ray", "colocated", 1, drafters=2, is_joined=is_joined)

    def _draw_strikes(self) -> list[Strike]:
        fitting = [name for name in STRIKES if self._fits(name)]
        names = [fitting[self.index // 6 % len(fitting)]]  # each comes first at times
        names += [self.chance.choice(fitting) for _ in range(self.chance.randint(0, 2))]
        steps = sorted(self.chance.randint(0, self.world.steps - 1) for _ in names)
        return [
            Strike(name, None, self.chance.uniform(0.0, 0.6 * self.world.seconds))
            if self.chance.random() < WHILE_STARTING
            else Strike(name, step, self.chance.uniform(0.0, 0.2))
            for name, step in zip(names, steps, strict=True)
        ]

    def _fits(self, name: str) -> bool:
        if name.startswith(TARGET):
            return self.first.layout == "split"
        if name.startswith(DRAFTER):
            return self.first.drafters > 1
        return name != HOST_LOST or self.first.is_joined

    def _next_layout(self) -> Layout:
        """Of a later start: the same, other numbers, the other layout, or another executor."""
        first, chance = self.first, self.chance
        if chance.random() < 0.5:
            return first
        is_joined = first.is_joined and chance.random() < 0.7
        if first.drafters == 1 or (self.changes_drafters and chance.random() < 0.6):
            if chance.random() < 0.5:
                return Layout("local", "split", chance.randint(1, 2))
            return Layout("ray", "split", chance.randint(1, 3), is_joined=is_joined)
        if chance.random() < 0.5:
            return Layout("ray", "colocated", 1, drafters=2, is_joined=is_joined)
        return Layout("ray", "split", chance.randint(1, 2), drafters=2, is_joined=is_joined)

    def do(self) -> RayTrial:
        """Strike, resume and compare."""
        began = time.monotonic()
        try:
            if self.first.is_joined:
                most = 4  # two drafters and two targets, or three targets, and room
                self.hosts = Hosts(self.chance.choice((1, 2, most)), most)
            outcome, detail = self._to_the_end()
            left_s, left = self._left_behind()
        finally:
            if self.hosts is not None:
                self.hosts.close()
        if outcome in GOOD and left:
            outcome, detail = LEFT_BEHIND, "; ".join(left)
        if outcome in GOOD:
            shutil.rmtree(self.run, ignore_errors=True)
        seconds = time.monotonic() - began
        return RayTrial(
            self.index, outcome, self.starts, self.refusals, self.num_missed, self.drivers, left_s, seconds, detail
        )

    def _to_the_end(self) -> tuple[str, str]:
        layout = self.first
        for number in range(MAX_STARTS):
            ended = self._start(number, layout)
            outcome = self._judge(ended, layout)
            if outcome is not None:
                return outcome, ended.output[-12_000:]
            if ended.code == 0 and newest_step(self.run / "checkpoints") == self.world.steps:
                self.num_missed += len(self.strikes)
                outcome, detail = self._compare()
                return outcome, detail and detail + "\n" + ended.output[-4000:]
            layout = self._next_layout()
        return OTHER_END, f"not finished after {MAX_STARTS} starts"

    def _start(self, number: int, layout: Layout) -> Ended:
        if self.hosts is not None and layout.is_joined and (number == 0 or self.hosts.head_cpus < layout.processes):
            self.hosts.add()
        has_saved = newest_step(self.run / "checkpoints") is not None
        address = None if self.hosts is None else self.hosts.address
        arguments = self.world.arguments(self.run, layout, address, has_saved and self.chance.random() < 0.7)
        self.hit: list[str] = []
        self.num_drafters.add(layout.drafters)
        self.num_events = self._count("events.jsonl")
        command = Command(arguments, self.world.folder / f"{self.run.name}-{number}.log")
        self.drivers.append(command.pid)
        began, due_since = time.monotonic(), None
        while command.poll() is None:
            if time.monotonic() - command.started > LIMIT_S:
                ended = command.hangs()
                break
            if self.strikes and self._is_due(self.strikes[0], layout):
                due_since = due_since or time.monotonic()
                if time.monotonic() - due_since >= self.strikes[0].delay_s:
                    self._strike(self.strikes.pop(0), command)
                    due_since = None
            time.sleep(0.01)
        else:
            ended = command.ended()
        seconds = round(time.monotonic() - began, 1)
        self.starts.append(
            {
                "layout": str(layout),
                "command": arguments[0],
                "strikes": self.hit,
                "code": ended.code,
                "seconds": seconds,
            }
        )
        return ended

    def _trains(self) -> bool:
        return self._count("events.jsonl") > self.num_events

    def _is_due(self, strike: Strike, layout: Layout) -> bool:
        if strike.step is None:
            kind = strike.name.split()[0]
            return kind not in (TARGET, DRAFTER) or bool(actors_of(self.run, kind)) or self._trains()
        return self._trains() and self._count("metrics.jsonl") >= strike.step

    def _count(self, name: str) -> int:
        file = self.run / name
        return file.read_bytes().count(b"\n") if file.is_file() else 0

    def _strike(self, strike: Strike, command: Command) -> None:
        kind, _, what = strike.name.partition(" ")
        when = "" if self._trains() else " while starting"
        if strike.name == HOST_LOST:
            assert self.hosts is not None
            hits = self.hosts.lose()
            if self.chance.random() < 0.5:
                time.sleep(self.chance.uniform(0.0, 2.0))
                self.hosts.add()
        elif kind == DRIVER:
            hits = _wait_for_handlers(command) if what != KILLED else command.poll() is None
            number = {KILLED: signal.SIGKILL}.get(what) or signal.Signals[what]
            command.send(number)
        else:
            pids = actors_of(self.run, kind)
            hits = bool(pids)
            if pids:
                self._strike_process(self.chance.choice(pids), what)
        if hits:
            self.hit.append(strike.name + when)
        else:
            self.num_missed += 1

    def _strike_process(self, pid: int, what: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            if what == KILLED:
                os.kill(pid, signal.SIGKILL)
                return
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self.chance.uniform(0.1, 3.0))
            os.kill(pid, signal.SIGCONT)

    def _judge(self, ended: Ended, layout: Layout) -> str | None:
        """What a start has shown by itself; None: nothing but that the run goes on, or is finished."""
        if ended.code is None:
            return HANG
        has_room = self.hosts is None or self.hosts.head_cpus >= layout.processes
        may_refuse = (HOST_LOST in self.hit and not has_room) or any(
            name.endswith("while starting") for name in self.hit
        )
        if ended.code == 1 and "\npaceline: " in ended.output and may_refuse:  # after the role's own traceback
            self.refusals.append(ended.output[ended.output.rindex("paceline: ") :][:500])
            return None
        if ended.has_traceback:
            return TRACEBACK
        if ended.code == 0 or (ended.code == -signal.SIGKILL and f"{DRIVER} {KILLED}" in self._hit_names()):
            return None
        is_finished = newest_step(self.run / "checkpoints") == self.world.steps
        num_asked = sum(self._hit_names().count(f"{DRIVER} {name}") for name in ("SIGINT", "SIGTERM"))
        if ended.code in (-signal.SIGTERM, 128 + signal.SIGINT) and (is_finished or num_asked > 1):
            return None  # asked again, a run ends without saving, and goes on from its last checkpoint
        return OTHER_END

    def _hit_names(self) -> list[str]:
        return [name.removesuffix(" while starting") for name in self.hit]

    def _compare(self) -> tuple[str, str]:
        bits = bits_of(self.run)
        steps = [line["step"] for line in bits.lines]
        if steps != list(range(1, self.world.steps + 1)):
            return OTHER_BITS, f"steps of metrics.jsonl: {steps}"
        if left := [path.name for path in (self.run / "checkpoints").iterdir() if path.name.startswith(".")]:
            return OTHER_BITS, f"left over: {left}"
        ledger = json.loads((self.run / "report.json").read_text(encoding="utf-8"))["ledger"]
        if ledger["issued"] != ledger["trained"] + ledger["in_flight"] + ledger["skipped"]:
            return UNEVEN, str(ledger)
        if len(self.num_drafters) > 1:
            apart = not_close(bits, self.world.bits)
            return (CLOSE, "") if apart is None else (OTHER_BITS, apart)
        assert self.world.calm is not None
        wanted = self.world.bits if self.num_drafters == {1} else self.world.calm[self.first.layout]
        difference = wanted.difference(bits)
        return (SAME_BITS, "") if difference is None else (OTHER_BITS, difference)

    def _left_behind(self) -> tuple[float, list[str]]:
        """Seconds until nothing is left, and what is left all the same, which is ended."""
        began = time.monotonic()
        while left := [
            each for each in processes_of(self.run, self.drivers) if not title_of(each[0]).startswith(AGENTS)
        ]:
            if time.monotonic() - began > AFTER_S:
                break
            time.sleep(0.2)
        found = [f"{role}, process {pid}: {title_of(pid)[:200]}" for pid, role in left]
        for pid, _ in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return time.monotonic() - began, found


def title_of(pid: int) -> str:
    """What a process calls itself; empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def left_at_the_end(trials: list[RayTrial]) -> list[str]:
    """What is there of all trials when Ray's agents have had their time."""
    drivers = [driver for trial in trials for driver in trial.drivers]
    began = time.monotonic()
    while (left := list(processes_of(Path(os.devnull), drivers))) and time.monotonic() - began < AGENTS_S:
        time.sleep(0.5)
    return [f"process {pid}: {title_of(pid)[:200]}" for pid, _ in left]


def _wait_for_handlers(command: Command) -> bool:
    """Python takes some time to become a command that can be asked to stop; whether it did, and has not ended."""
    from tests.chaos.trials import takes_requests

    while command.poll() is None and not takes_requests(command.pid):
        time.sleep(0.002)
    return command.poll() is None


def ray_trial(world: RayWorld, seed: int, index: int) -> RayTrial:
    """One trial."""
    return _Trial(replace(world), seed, index).do()


def told(trial: RayTrial) -> str:
    """A trial in a line; of a bug all that is known."""
    starts = (f"{start['layout']} {start['strikes'] or ''} {start['code']}" for start in trial.starts)
    line = f"trial {trial.index}: {trial.outcome} in {trial.seconds:.0f} s: {', then '.join(starts)}"
    return line if trial.outcome in GOOD else f"{line}\n{trial.detail}"
