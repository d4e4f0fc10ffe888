"""Computes stages from marks: follows each write by its request number through front and worker to the reader's response.

The stages of a delivery are contiguous, so that they add up to the latency that the client measures. Stages with a slash
in their names are parts of the stage before the slash.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from peers import stage_marks as points
from peers.stage_load import Seen
from peers.stage_marks import Mark

SERVER_STAGES = ("parse", "queue", "stage", "write", "sync", "index", "wake", "render", "return", "socket")
CLIENT_STAGES = ("arrive", "leave")


@dataclass(slots=True)
class Passed:
    """When a request passed the points of the front."""

    parsing: int = 0
    placed: int = 0
    linked: int = 0
    returned: int = 0
    answering: int = 0
    written: int = 0


@dataclass(slots=True)
class Turn:
    began: int
    sync: int  # number of the sync it reports; 0: none
    appending: int = 0
    appended: int = 0
    woken: int = 0
    sent: int = 0
    reads: dict[int, int] = field(default_factory=dict)  # request → last seq in its response


@dataclass(slots=True)
class Write:
    received: int = 0
    decoded: int = 0
    staged_in: Turn | None = None
    published: int = 0
    published_in: Turn | None = None


def follow_front(marks: Iterable[Mark]) -> dict[int, Passed]:
    requests: dict[int, Passed] = {}
    placed: list[Passed] = []
    returned = answering = 0
    for point, number, _, ns in marks:
        match point:
            case points.PARSING:
                requests[number] = Passed(parsing=ns)
            case points.PLACED:
                requests[number].placed = ns
                placed.append(requests[number])
            case points.LINKED:
                for passed in placed:
                    passed.linked = ns
                placed = []
            case points.RETURNED:
                returned = ns
            case points.ANSWERING:
                answering = ns
            case points.WRITTEN if number in requests:
                passed = requests[number]
                passed.returned, passed.answering, passed.written = returned, answering, ns
    return requests


def follow_worker(marks: Iterable[Mark]) -> dict[int, tuple[int, Write]]:
    """Writes by seq, with their request numbers."""
    open_writes: dict[int, Write] = {}
    writes: dict[int, tuple[int, Write]] = {}
    received: list[Write] = []
    turn = Turn(0, 0)
    for point, request, number, ns in marks:
        match point:
            case points.RECEIVED:
                open_writes[request] = Write(received=ns)
                received.append(open_writes[request])
            case points.DECODED:
                for write in received:
                    write.decoded = ns
                received = []
            case points.TURN:
                turn = Turn(ns, number)
            case points.TAKEN if request in open_writes:
                open_writes[request].staged_in = turn
            case points.APPENDING:
                turn.appending = ns
            case points.APPENDED:
                turn.appended = ns
            case points.PUBLISHED if request in open_writes:
                write = open_writes.pop(request)
                write.published, write.published_in = ns, turn
                writes[number] = request, write
            case points.WOKEN:
                turn.woken = ns
            case points.READ:
                turn.reads[request] = number
            case points.SENT:
                turn.sent = turn.sent or ns
    return writes


def follow_syncs(marks: Iterable[Mark]) -> dict[int, tuple[int, int]]:
    """Start and end of each sync, in its thread."""
    began: dict[int, int] = {}
    spans: dict[int, tuple[int, int]] = {}
    for point, _, number, ns in marks:
        if point == points.SYNCING:
            began[number] = ns
        else:
            spans[number] = began[number], ns
    return spans


def deliveries(
    seen: Seen,
    front: dict[int, Passed],
    worker: dict[int, tuple[int, Write]],
    syncs: dict[int, tuple[int, int]],
) -> list[dict[str, int]]:
    """For each write whose publication woke the reader: the duration of every stage, in nanoseconds."""
    found: list[dict[str, int]] = []
    for seq, sent in seen.sent.items():
        if seq not in worker or seq not in seen.read:
            continue
        request, write = worker[seq]
        assert write.published_in is not None
        reads = write.published_in.reads
        reader = next((number for number, to in reads.items() if to >= seq), None)
        if reader is None:
            continue  # the reader was not waiting at that moment
        found.append(_stages(sent, seen.read[seq], front[request], front[reader], write, syncs))
        found[-1]["write ack"] = seen.acked[seq] - sent
    return found


def acknowledgements(
    seen: Seen,
    front: dict[int, Passed],
    worker: dict[int, tuple[int, Write]],
    syncs: dict[int, tuple[int, int]],
) -> list[dict[str, int]]:
    """For each write: the duration of every stage until its own response, for a run without a reader."""
    found: list[dict[str, int]] = []
    for seq, sent in seen.sent.items():
        request, write = worker[seq]
        found.append(_stages(sent, seen.acked[seq], front[request], front[request], write, syncs))
        found[-1]["write ack"] = seen.acked[seq] - sent
    return found


def _stages(
    sent: int, seen: int, out: Passed, back: Passed, write: Write, syncs: dict[int, tuple[int, int]]
) -> dict[str, int]:
    first, last = write.staged_in, write.published_in
    assert first is not None and last is not None
    # The client may wake before the front's system call returns.
    written = min(back.written, seen)
    began = last.began if last.sync else first.appended
    woken = last.woken or write.published
    stages = {
        "arrive": out.parsing - sent,
        "parse": out.placed - out.parsing,
        "queue": first.began - out.placed,
        "queue/tick": out.linked - out.placed,
        "queue/link": write.received - out.linked,
        "queue/decode": write.decoded - write.received,
        "queue/turn": first.began - write.decoded,
        "stage": first.appending - first.began,
        "write": first.appended - first.appending,
        "index": write.published - began,
        "wake": woken - write.published,
        "render": last.sent - woken,
        "return": back.returned - last.sent,
        "socket": written - back.returned,
        "socket/answer": back.answering - back.returned,
        "socket/send": written - back.answering,
        "leave": seen - written,
        "end to end": seen - sent,
    }
    if last.sync:
        sync_began, sync_ended = syncs[last.sync]
        stages["sync"] = last.began - first.appended
        stages["sync/start"] = sync_began - first.appended
        stages["sync/fdatasync"] = sync_ended - sync_began
        stages["sync/report"] = last.began - sync_ended
    stages["sum"] = sum(stages.get(name, 0) for name in SERVER_STAGES)
    return stages
