"""A trace window as a Perfetto file: a row for each thread and role, of all processes, and arrows that follow batches.

Native protobuf, not JSON: ui.perfetto.dev opens it at any size, and `trace_processor` takes SQL. A slice is one run of
a stage; the arrow of a batch goes from where its target was done with it to where the drafter began on it, so its
length is the time that the batch waited.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.files import staged_file
from paceline.profiling.stages import GET_WAIT, MODEL_FORWARD, PACK_HIDDEN, REMOTE_WAIT

PACKETS_AT_ONCE = 4096
"""Packets that are turned into bytes together; a window of a long run does not fit into memory twice."""

MAX_PIDS = 1 << 22
"""Numbers that Linux gives processes and threads at most; the file has room for 511 hosts of them."""

_BATCH_IID, _OPEN_IID = 1, 2


class TraceError(PacelineError):
    """A trace that cannot be written."""


@dataclass
class _Slice:
    """One run of a stage.

    Attributes:
        flows: Arrows that begin here; `ends_flows`: arrows that end here.
    """

    stage: int
    begin_ns: int
    end_ns: int
    depth: int
    batch: int
    is_open: bool
    flows: list[int] = field(default_factory=list)
    ends_flows: list[int] = field(default_factory=list)


@dataclass
class _Track:
    role: str
    name: str
    tid: int
    slices: list[_Slice]


@dataclass
class _Process:
    """One process of the window.

    Attributes:
        pid, first_tid: Of another host they have that host's number on top: ids are of one host alone.
        base: The first of its ids for tracks, from which no other process's are less than 2^24 away.
        sequence: Id of its packets.
    """

    name: str
    pid: int
    first_tid: int
    stages: list[str]
    tracks: list[_Track]
    base: int
    sequence: int


def write_perfetto(processes: list[dict[str, Any]], out: Path) -> None:
    """Write what `stages.collect_events` found as a Perfetto trace, whole or not at all.

    Stages that were open when the window ended end with it and carry the note ``open``. Call it on the machine and in
    the boot that the first process is of: the file ties its clock to the boot clock, the one that system traces go by.
    Args:
        processes: All by the clock of the first one; with ``role`` and ``host`` where there are several.
    Raises: TraceError if the file cannot be written, or the package that writes it is not there.
    """
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb
    except ImportError as error:
        raise TraceError(f"a Perfetto trace needs the package perfetto ({error}): pip install perfetto") from error
    packets = _packets(pb, processes)
    try:
        with staged_file(out) as partial, open(partial, "wb") as file:
            while chunk := list(itertools.islice(packets, PACKETS_AT_ONCE)):
                file.write(pb.Trace(packet=chunk).SerializeToString())  # traces one after another are one trace
    except OSError as error:
        raise TraceError(f"the trace {out} cannot be written: {error.strerror or error}") from error


def _packets(pb: Any, found: list[dict[str, Any]]) -> Iterator[Any]:
    """All packets, a sequence for each process, in an order in which each only needs what stands before it."""
    hosts = list(dict.fromkeys(each.get("host") for each in found))
    processes = [_process(each, hosts.index(each.get("host"))) for each in found]
    _connect(processes)
    for process in processes:
        yield from _of_process(pb, process, found[0])


def _process(events: dict[str, Any], host: int) -> _Process:
    # ids that differ between processes and windows: files may be joined end to end
    seed = f"{events['pid']} {events['until_ns']}" + (f" {events['host']}" if host else "")
    digest = hashlib.blake2b(seed.encode(), digest_size=5).digest()
    return _Process(
        name=f"{events['role']} on {events['host']}" if "role" in events else "paceline train",
        pid=events["pid"] + host * MAX_PIDS,
        first_tid=host * MAX_PIDS,
        stages=events["stages"],
        tracks=_tracks(events),
        base=int.from_bytes(digest, "little") << 24,
        sequence=int.from_bytes(digest[:4], "little") or 1,
    )


def _of_process(pb: Any, process: _Process, clock: dict[str, Any]) -> Iterator[Any]:
    """Args: clock: The process whose clock all times are by."""
    base, sequence = process.base, process.sequence
    first = pb.TracePacket(trusted_packet_sequence_id=sequence)
    first.sequence_flags = pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    first.trace_packet_defaults.timestamp_clock_id = pb.BUILTIN_CLOCK_MONOTONIC
    for number, name in enumerate(process.stages):
        first.interned_data.event_names.add(iid=number + 1, name=name)
    for iid, name in ((_BATCH_IID, "batch"), (_OPEN_IID, "open")):
        first.interned_data.debug_annotation_names.add(iid=iid, name=name)
    yield first
    yield _clocks(pb, clock, sequence)

    described = pb.TracePacket(trusted_packet_sequence_id=sequence)
    described.track_descriptor.uuid = base
    described.track_descriptor.process.pid = process.pid
    described.track_descriptor.process.process_name = process.name
    yield described
    seen: set[int] = set()
    for number, track in enumerate(process.tracks, start=1):
        descriptor = pb.TracePacket(trusted_packet_sequence_id=sequence)
        descriptor.track_descriptor.uuid = base + number
        if track.tid in seen:  # a thread in two roles: stages of one begin in the other's and outlast them
            descriptor.track_descriptor.parent_uuid = base
            descriptor.track_descriptor.name = track.name
        else:
            descriptor.track_descriptor.thread.pid = process.pid
            descriptor.track_descriptor.thread.tid = process.first_tid + track.tid
            descriptor.track_descriptor.thread.thread_name = track.name
        seen.add(track.tid)
        yield descriptor
    for number, track in enumerate(process.tracks, start=1):
        yield from _slices(pb, track, base + number, sequence)


def _clocks(pb: Any, events: dict[str, Any], sequence: int) -> Any:
    """What the clocks of the machine showed at one moment; the events are in monotonic time."""
    packet = pb.TracePacket(trusted_packet_sequence_id=sequence)
    snapshot, now = packet.clock_snapshot, events["monotonic_ns"]
    suspended = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()  # the one counts it, the other not
    for clock, value in (
        (pb.BUILTIN_CLOCK_MONOTONIC, now),
        (pb.BUILTIN_CLOCK_BOOTTIME, now + max(0, suspended)),
        (pb.BUILTIN_CLOCK_REALTIME, events["epoch_ns"]),
    ):
        snapshot.clocks.add(clock_id=clock, timestamp=value)
    snapshot.primary_trace_clock = pb.BUILTIN_CLOCK_BOOTTIME
    return packet


def _tracks(events: dict[str, Any]) -> list[_Track]:
    """A track for each thread in each role, named after the role; its slices nest."""
    tracks, until = [], events["until_ns"]
    threads = sorted(events["threads"], key=lambda thread: (thread["role"], thread["thread"], thread["tid"]))
    roles = [thread["role"] for thread in threads]
    for thread in threads:
        role, name = thread["role"], thread["thread"]
        is_plain = name == role or roles.count(role) == 1
        found = [
            _Slice(stage, begin, end, depth, batch, is_open)
            for is_open, runs in ((False, thread["events"]), (True, thread["open"]))
            for stage, begin, end, depth, batch in runs
            if begin < until or not is_open
        ]
        tracks.append(_Track(role, role if is_plain else f"{role} ({name})", thread["tid"], _nested(found)))
    return tracks


def _nested(slices: list[_Slice]) -> list[_Slice]:
    """In the order of their beginnings, outer ones first; what reaches over the end of an outer one is cut there."""
    slices = sorted(slices, key=lambda each: (each.begin_ns, -each.end_ns, each.depth))
    around: list[_Slice] = []
    for each in slices:
        while around and around[-1].end_ns <= each.begin_ns:
            around.pop()
        each.end_ns = max(each.begin_ns, min(each.end_ns, around[-1].end_ns if around else each.end_ns))
        around.append(each)
    return slices


def _connect(processes: list[_Process]) -> None:
    """An arrow for every batch of which both ends are in the window."""
    made: dict[int, _Slice] = {}
    for each, name in _of_role(processes, "target"):
        if name in (MODEL_FORWARD.name, PACK_HIDDEN.name) and not each.is_open:
            if each.batch not in made or each.end_ns > made[each.batch].end_ns:
                made[each.batch] = each
    begun: dict[int, _Slice] = {}
    for each, name in _of_role(processes, "drafter"):
        source = made.get(each.batch)
        if source is None or name in (GET_WAIT.name, REMOTE_WAIT.name) or each.begin_ns < source.end_ns:
            continue  # the wait for the next batch still has the number of the last
        if each.batch not in begun or each.begin_ns < begun[each.batch].begin_ns:
            begun[each.batch] = each
    for number, batch in enumerate(sorted(begun), start=1):
        made[batch].flows.append(processes[0].base + number)
        begun[batch].ends_flows.append(processes[0].base + number)


def _of_role(processes: list[_Process], kind: str) -> Iterator[tuple[_Slice, str]]:
    """Slices that have a batch, with the names of their stages."""
    for process in processes:
        for track in process.tracks:
            if track.role.startswith(kind):
                yield from ((each, process.stages[each.stage]) for each in track.slices if each.batch >= 0)


def _slices(pb: Any, track: _Track, uuid: int, sequence: int) -> Iterator[Any]:
    """Begin and end of every slice, in the order of time."""
    around: list[_Slice] = []
    for each in track.slices:
        while around and around[-1].end_ns <= each.begin_ns:
            yield _end(pb, around.pop(), uuid, sequence)
        packet = _event(pb, each.begin_ns, uuid, sequence)
        event = packet.track_event
        event.type = pb.TrackEvent.TYPE_SLICE_BEGIN
        event.name_iid = each.stage + 1
        if each.batch >= 0:
            event.debug_annotations.add(name_iid=_BATCH_IID, int_value=each.batch)
        if each.is_open:
            event.debug_annotations.add(name_iid=_OPEN_IID, bool_value=True)
        event.flow_ids.extend(each.flows)
        event.terminating_flow_ids.extend(each.ends_flows)
        yield packet
        around.append(each)
    while around:
        yield _end(pb, around.pop(), uuid, sequence)


def _end(pb: Any, each: _Slice, uuid: int, sequence: int) -> Any:
    packet = _event(pb, each.end_ns, uuid, sequence)
    packet.track_event.type = pb.TrackEvent.TYPE_SLICE_END
    return packet


def _event(pb: Any, timestamp: int, uuid: int, sequence: int) -> Any:
    packet = pb.TracePacket(trusted_packet_sequence_id=sequence, timestamp=timestamp)
    packet.sequence_flags = pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
    packet.track_event.track_uuid = uuid
    return packet
