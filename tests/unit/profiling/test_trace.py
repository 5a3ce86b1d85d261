"""The Perfetto file is read back with the format's own schema."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from paceline.profiling import page as layout
from paceline.profiling import stages
from paceline.profiling.trace import TraceError, write_perfetto
from tests.toy import Toy, train

STAGES = ["read_batch", "model_forward", "pack_hidden", "get_wait", "draw_blocks", "forward", "layers", "put_wait"]
READ, MODEL, PACK, GET, DRAW, FORWARD, LAYERS, PUT = range(8)


@dataclass
class Slice:
    """A slice as a viewer builds it from begin and end events."""

    track: str
    name: str
    begin: int
    depth: int
    batch: int | None
    is_open: bool
    flows: list[int]
    ended_flows: list[int]
    end: int = -1


@dataclass
class Read:
    """What a file says.

    Attributes:
        pid, process: Of the last process; `processes`: names of all by number.
        threads: Names of thread tracks by thread id; `extra`: names of tracks below the process.
    """

    pid: int = 0
    process: str = ""
    processes: dict[int, str] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    clocks: dict[int, int] = field(default_factory=dict)

    def of(self, track: str) -> list[Slice]:
        return [each for each in self.slices if each.track == track]

    def arrows(self) -> list[tuple[Slice, Slice]]:
        """Source and end of each flow; every flow has exactly one of both."""
        sources = {flow: each for each in self.slices for flow in each.flows}
        ends = {flow: each for each in self.slices for flow in each.ended_flows}
        assert sources.keys() == ends.keys()
        assert len(sources) == sum(len(each.flows) for each in self.slices)
        assert len(ends) == sum(len(each.ended_flows) for each in self.slices)
        return [(sources[flow], ends[flow]) for flow in sources]


def read(path: Path) -> Read:
    """Follow the rules of the format: interned names and defaults of a sequence, stacks of open slices by track."""
    data = path.read_bytes()
    trace = pb.Trace.FromString(data)
    known = pb.Trace.FromString(data)
    known.DiscardUnknownFields()
    assert known.ByteSize() == trace.ByteSize() == len(data)
    found, tracks = Read(), dict[int, str]()
    names_of: dict[int, dict[int, str]] = {}
    notes_of: dict[int, dict[int, str]] = {}
    stacks: dict[int, list[Slice]] = {}
    last: dict[int, int] = {}
    for packet in trace.packet:
        sequence = packet.trusted_packet_sequence_id
        assert sequence != 0
        if packet.sequence_flags & pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED:
            assert sequence not in names_of  # one process each
            assert packet.trace_packet_defaults.timestamp_clock_id == pb.BUILTIN_CLOCK_MONOTONIC
            names_of[sequence] = {each.iid: each.name for each in packet.interned_data.event_names}
            notes_of[sequence] = {each.iid: each.name for each in packet.interned_data.debug_annotation_names}
        names, notes = names_of[sequence], notes_of[sequence]
        if packet.HasField("clock_snapshot"):
            found.clocks = {clock.clock_id: clock.timestamp for clock in packet.clock_snapshot.clocks}
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert track.uuid not in tracks
            if track.HasField("process"):
                found.pid, found.process = track.process.pid, track.process.process_name
                assert found.pid not in found.processes
                found.processes[found.pid] = found.process
                tracks[track.uuid] = "process"
            elif track.HasField("thread"):
                assert track.thread.pid == found.pid and track.thread.tid not in found.threads
                tracks[track.uuid] = found.threads[track.thread.tid] = track.thread.thread_name
            else:
                assert tracks[track.parent_uuid] == "process"
                tracks[track.uuid] = track.name
                found.extra.append(track.name)
        if not packet.HasField("track_event"):
            continue
        assert packet.sequence_flags & pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        event, stack = packet.track_event, stacks.setdefault(packet.track_event.track_uuid, [])
        assert last.get(event.track_uuid, 0) <= packet.timestamp
        last[event.track_uuid] = packet.timestamp
        if event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            said = {notes[note.name_iid]: note for note in event.debug_annotations}
            each = Slice(
                track=tracks[event.track_uuid],
                name=names[event.name_iid],
                begin=packet.timestamp,
                depth=len(stack),
                batch=said["batch"].int_value if "batch" in said else None,
                is_open="open" in said and said["open"].bool_value,
                flows=list(event.flow_ids),
                ended_flows=list(event.terminating_flow_ids),
            )
            found.slices.append(each)
            stack.append(each)
        else:
            assert event.type == pb.TrackEvent.TYPE_SLICE_END
            stack.pop().end = packet.timestamp
    assert not any(stacks.values())  # every begin has its end
    assert len(found.processes) == len(names_of)
    return found


def thread(
    role: str, name: str, tid: int, events: list[list[int]], still: list[list[int]] | None = None
) -> dict[str, Any]:
    return {"role": role, "thread": name, "tid": tid, "events": events, "open": still or []}


def window(*threads: dict[str, Any], until: int = 1000) -> dict[str, Any]:
    """As `collect_events` gives it."""
    return {
        "pid": 77,
        "until_ns": until,
        "monotonic_ns": until + 5,
        "epoch_ns": 1_700_000_000_000_000_000,
        "stages": STAGES,
        "threads": list(threads),
    }


def written(tmp_path: Path, *threads: dict[str, Any], until: int = 1000) -> Read:
    write_perfetto([window(*threads, until=until)], tmp_path / "x.pftrace")
    return read(tmp_path / "x.pftrace")


def test_a_window_has_a_process_and_a_track_for_each_role(tmp_path: Path) -> None:
    """Tracks are named after the roles, with the thread's name where a role has several threads."""
    found = written(
        tmp_path,
        thread("target-0", "target-0", 11, [[READ, 1, 2, 0, 0]]),
        thread("drafter-0", "MainThread", 10, []),
        thread("drafter-0", "pt_autograd_0", 12, []),
    )
    assert (found.pid, found.process) == (77, "paceline train")
    assert found.threads == {11: "target-0", 10: "drafter-0 (MainThread)", 12: "drafter-0 (pt_autograd_0)"}
    assert found.extra == []


def test_slices_carry_stage_times_and_batch(tmp_path: Path) -> None:
    """A run of a stage is a slice of its name from its begin to its end, with its batch unless it has none."""
    found = written(tmp_path, thread("target-0", "target-0", 11, [[READ, 5, 9, 0, 41], [PUT, 9, 30, 0, -1]]))
    assert [(each.name, each.begin, each.end, each.batch) for each in found.slices] == [
        ("read_batch", 5, 9, 41),
        ("put_wait", 9, 30, None),
    ]


def test_an_open_stage_ends_with_the_window(tmp_path: Path) -> None:
    """What was still running is drawn up to the window's end and says so; its finished inner stages lie inside."""
    events, still = [[LAYERS, 20, 40, 1, 3]], [[FORWARD, 10, 1000, 0, 3], [LAYERS, 1000, 1000, 1, 3]]
    found = written(tmp_path, thread("drafter-0", "MainThread", 10, events, still))
    assert [(each.name, each.begin, each.end, each.depth, each.is_open) for each in found.slices] == [
        ("forward", 10, 1000, 0, True),
        ("layers", 20, 40, 1, False),
    ]


def test_a_stage_that_outlasts_the_one_around_it_is_cut(tmp_path: Path) -> None:
    """Slices of a track nest: a child whose clock was read after its parent's ends with the parent."""
    found = written(tmp_path, thread("drafter-0", "m", 10, [[FORWARD, 10, 30, 0, 0], [LAYERS, 10, 31, 1, 0]]))
    assert [(each.begin, each.end) for each in found.slices] == [(10, 31), (10, 30)]
    found = written(tmp_path, thread("drafter-0", "m", 10, [[LAYERS, 12, 31, 1, 0], [FORWARD, 10, 30, 0, 0]]))
    assert [(each.name, each.begin, each.end, each.depth) for each in found.slices] == [
        ("forward", 10, 30, 0),
        ("layers", 12, 30, 1),
    ]


def test_two_roles_of_one_thread_have_tracks_of_their_own(tmp_path: Path) -> None:
    """Taking turns, a stage of one role begins inside a stage of the other and outlasts it: neither is cut."""
    found = written(
        tmp_path,
        thread("target-0", "MainThread", 10, [[MODEL, 11, 15, 0, 0], [PUT, 16, 60, 0, 0]]),
        thread("drafter-0", "MainThread", 10, [[GET, 10, 20, 0, -1], [FORWARD, 21, 50, 0, 0]]),
    )
    assert found.threads == {10: "drafter-0"} and found.extra == ["target-0"]
    assert [(each.name, each.end, each.depth) for each in found.of("target-0")] == [
        ("model_forward", 15, 0),
        ("put_wait", 60, 0),
    ]
    assert [(each.name, each.end, each.depth) for each in found.of("drafter-0")] == [
        ("get_wait", 20, 0),
        ("forward", 50, 0),
    ]


def test_an_arrow_follows_each_batch(tmp_path: Path) -> None:
    """From the last forward pass or packing of a batch to what the drafter does first with it, and no other."""
    found = written(
        tmp_path,
        thread(
            "target-1",
            "target-1",
            12,
            [
                [MODEL, 10, 20, 0, 4],
                [PACK, 20, 30, 0, 4],
                [PUT, 30, 90, 0, 4],
                [MODEL, 95, 99, 0, 6],
                [MODEL, 100, 110, 0, 8],
            ],
        ),
        thread("target-0", "target-0", 11, [[MODEL, 5, 40, 0, 5], [PACK, 20, 39, 1, 5]], [[MODEL, 900, 1000, 0, 7]]),
        thread(
            "drafter-0",
            "MainThread",
            10,
            [
                [GET, 1, 33, 0, 3],  # for batch 4, which it does not know yet
                [DRAW, 35, 36, 0, 4],
                [FORWARD, 36, 60, 0, 4],
                [GET, 60, 61, 0, 4],
                [MODEL, 62, 70, 0, 4],  # validation runs the target too, as the drafter
                [FORWARD, 71, 80, 0, 5],
                [FORWARD, 90, 92, 0, 6],  # a batch that a target then made again
                [GET, 120, 130, 0, 8],  # all that is left of batch 8
                [FORWARD, 900, 910, 0, 9],  # made before the window
            ],
        ),
    )
    arrows = sorted((a.track, a.name, a.end, b.name, b.begin, b.batch) for a, b in found.arrows())
    assert arrows == [
        ("target-0", "model_forward", 40, "forward", 71, 5),
        ("target-1", "pack_hidden", 30, "draw_blocks", 35, 4),
    ]


def test_processes_of_all_hosts_are_in_one_file(tmp_path: Path) -> None:
    """Named after role and host; ids of another host, which may be the same, are moved apart, and arrows cross."""
    driver = window(
        thread("drafter-0", "MainThread", 10, [[FORWARD, 50, 60, 0, 4], [FORWARD, 70, 80, 0, 5]]),
        thread("lane-0", "target-0", 11, []),
    )
    other_stages = ["spare", *STAGES]  # numbers are a process's own
    target = window(thread("target-0", "t", 11, [[1 + MODEL, 30, 40, 0, 4], [1 + MODEL, 41, 60, 0, 5]]), until=999)
    rank = window(thread("drafter-1", "d", 20, [[1 + FORWARD, 65, 69, 0, 5]]), until=1001)
    write_perfetto(
        [
            driver | {"role": "drafter-0", "host": "here"},
            target | {"role": "target-0", "host": "there", "stages": other_stages},
            rank | {"role": "drafter-1", "host": "here", "stages": other_stages, "pid": 78},
        ],
        tmp_path / "x.pftrace",
    )
    found = read(tmp_path / "x.pftrace")
    far = 77 + (1 << 22)
    assert found.processes == {77: "drafter-0 on here", far: "target-0 on there", 78: "drafter-1 on here"}
    assert found.threads[11 + (1 << 22)] == "target-0" and found.threads[11] == "lane-0"
    assert [each.name for each in found.of("target-0")] == ["model_forward", "model_forward"]
    arrows = sorted((a.track, a.end, b.track, b.begin, b.batch) for a, b in found.arrows())
    assert arrows == [("target-0", 40, "drafter-0", 50, 4), ("target-0", 60, "drafter-1", 65, 5)]


def test_clocks_are_those_of_the_machine(tmp_path: Path) -> None:
    """Events are in monotonic time, tied to the boot clock and to the calendar at one moment."""
    found = written(tmp_path, thread("target-0", "target-0", 11, []), until=time.monotonic_ns())
    gap = found.clocks[pb.BUILTIN_CLOCK_BOOTTIME] - found.clocks[pb.BUILTIN_CLOCK_MONOTONIC]
    assert abs(gap - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns())) < 100_000_000
    assert found.clocks[pb.BUILTIN_CLOCK_REALTIME] == 1_700_000_000_000_000_000


def test_files_of_two_processes_can_be_joined(tmp_path: Path) -> None:
    """Track, flow and sequence ids of another process, or of another window, are others."""
    ids = []
    for number, content in enumerate((window(), window() | {"pid": 78}, window(until=2000))):
        write_perfetto([content], tmp_path / str(number))
        trace = pb.Trace.FromString((tmp_path / str(number)).read_bytes())
        sequence = trace.packet[0].trusted_packet_sequence_id
        ids.append((sequence, next(p.track_descriptor.uuid for p in trace.packet if p.HasField("track_descriptor"))))
    assert len({sequence for sequence, _ in ids}) == len({uuid for _, uuid in ids}) == 3


@st.composite
def runs(draw: st.DrawFn) -> list[list[int]]:
    """Stages as a thread leaves them: properly nested, in the order of their ends, clock readings that may be equal."""
    events: list[list[int]] = []
    stack: list[list[int]] = []
    now = 1
    for is_enter, passed in draw(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=40)):
        now += passed
        if is_enter or not stack:
            stack.append([draw(st.integers(0, 7)), now, len(stack)])
        else:
            stage, begin, depth = stack.pop()
            events.append([stage, begin, now, depth, 0])
    while stack:
        stage, begin, depth = stack.pop()
        events.append([stage, begin, now, depth, 0])
    return events


@settings(max_examples=60, deadline=None)
@given(events=runs())
def test_no_run_is_lost_or_bent(events: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever a thread did comes back, every run with its own times, nested as the format wants it."""
    found = written(tmp_path_factory.mktemp("trace"), thread("target-0", "target-0", 11, events))
    assert sorted((each.name, each.begin, each.end) for each in found.slices) == sorted(
        (STAGES[stage], begin, end) for stage, begin, end, _, _ in events
    )


@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(
        st.tuples(st.integers(0, 7), st.integers(1, 30), st.integers(1, 30), st.integers(0, 3), st.integers(-1, 2)),
        max_size=20,
    )
)
def test_any_readings_make_a_valid_file(
    events: list[tuple[int, ...]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Readings that cannot be, such as an end before its begin, still give slices that nest, and no more of them."""
    found = written(tmp_path_factory.mktemp("trace"), thread("target-0", "target-0", 11, [list(e) for e in events]))
    assert len(found.slices) == len(events)
    assert all(each.begin <= each.end for each in found.slices)


@pytest.mark.parametrize("layout_name", ["split", "colocated"])
def test_a_real_run_makes_a_real_trace(toy: Toy, tmp_path: Path, layout_name: str) -> None:
    """The window of a training run has all its stages, and arrows from target to drafter that go forward in time."""
    found: dict[str, Any] = {}

    def at_step(step: int) -> None:
        page = stages._page
        assert page is not None
        if step == 3:
            page.words[layout.TRACE_UNTIL] = time.monotonic_ns() + 10**12
        if step == 12:
            found.update(stages.collect_events(page, time.monotonic_ns()))

    train(toy.config(tmp_path / "run", f"topology.layout={layout_name}"), at_step)
    write_perfetto([found], tmp_path / "x.pftrace")
    trace = read(tmp_path / "x.pftrace")
    names = {each.name for each in trace.slices}
    assert {"read_batch", "model_forward", "forward", "layers", "backward", "optimizer", "log"} <= names
    assert len(trace.slices) == sum(len(each["events"]) + len(each["open"]) for each in found["threads"])
    assert {*trace.threads.values(), *trace.extra} == {each["role"] for each in found["threads"]}
    arrows = trace.arrows()
    assert len(arrows) >= 6
    for source, end in arrows:
        assert source.track.startswith("target") and end.track == "drafter-0"
        assert source.batch == end.batch and source.end <= end.begin
        assert end.name in ("draw_blocks", "forward", "create_block_mask")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """What cannot be written whole is not there at all, and the message says which file it was."""
    place = tmp_path / "x.pftrace"
    place.write_text("old")
    events = [[READ, begin, begin + 1, 0, 0] for begin in range(1, 5000, 2)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(TraceError, match="x.pftrace cannot be written: File too large"):
            write_perfetto([window(thread("target-0", "target-0", 11, events))], place)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["x.pftrace"] and place.read_text() == "old"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """An impossible place is an error of ours, not a traceback."""
    with pytest.raises(TraceError, match="nowhere.*No such file"):
        write_perfetto([window()], tmp_path / "nowhere" / "x.pftrace")


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the command, and nothing is written."""
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace", None)
    with pytest.raises(TraceError, match="pip install perfetto"):
        write_perfetto([window()], tmp_path / "x.pftrace")
    assert not list(tmp_path.iterdir())
