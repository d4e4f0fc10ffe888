"""Goal: a thousand watchers get every record in order and soon, though one in twenty does not read; these lose nothing either.

Method: one process reads all streams but the stalled ones, whose connections have small buffers. These also follow a topic of
large records, far more than any buffer on the way holds. The front's memory is measured.
"""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.contract import Json, ok
from tests.support.faults import fault
from tests.support.frame_checker import FrameChecker
from tests.support.length import pick
from tests.support.server import Server, running
from tests.support.sse_client import EventStream, Frame, open_stream, pump, watch

WATCHERS = 1000
STALLED = WATCHERS // 20
WRITES = pick(short=10, long=25)
STALLED_BUFFER = 16_384
LARGE_BYTES = 250_000  # one of them fills a frame
LARGE_RECORDS = 24
GROWTH_MAX = 90 << 20  # of the front; all unread frames of the stalled would be twice that
PROMPT_S = 120.0  # for one record to reach all, on a busy machine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    with running(tmp_path_factory.mktemp("crowd")) as made:
        yield made


def rss_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) * 1024


def open_many(
    server: Server, topics: Json, count: int, receive_buffer: int | None = None
) -> list[EventStream]:
    def one(_: int) -> EventStream:
        return open_stream(server, watch(server, topics), receive_buffer=receive_buffer)

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(one, range(count)))


@fault(
    "client",
    "one watcher in twenty stops reading",
    "the others get every record at once; the front buffers little for the stalled; they resume from their cursors",
)
def test_a_thousand_watchers_and_some_are_stalled(server: Server) -> None:
    for name in ("small", "large"):
        ok(server.write(name, 0), 201)
    front = server.pid("front 0")
    healthy = open_many(server, {"small": {}}, WATCHERS - STALLED)
    both = {"small": {}, "large": {}}
    stalled_sessions = [watch(server, both) for _ in range(STALLED)]
    stalled = [open_stream(server, session, receive_buffer=STALLED_BUFFER) for session in stalled_sessions]
    frame_checkers = {stream: FrameChecker({"small": 0}) for stream in healthy}

    def take(stream: EventStream, frame: Frame) -> None:
        frame_checkers[stream].take(frame)

    def all_have(seq: int) -> bool:
        return all(frame_checker.cursors["small"] == seq for frame_checker in frame_checkers.values())

    pump(healthy, lambda: all_have(1), take)
    before = rss_bytes(front)
    grown = 0
    for _ in range(LARGE_RECORDS):
        ok(server.write("large", "x" * LARGE_BYTES))
        grown = max(grown, rss_bytes(front) - before)
    slowest = 0.0
    for i in range(WRITES):
        started = time.monotonic()
        ok(server.write("small", i))
        pump(healthy, lambda i=i: all_have(i + 2), take, PROMPT_S)
        slowest = max(slowest, time.monotonic() - started)
        grown = max(grown, rss_bytes(front) - before)
    assert grown < GROWTH_MAX, f"the front grew by {grown >> 20} MiB"
    assert all(
        frame_checker.seqs["small"] == list(range(1, WRITES + 2)) for frame_checker in frame_checkers.values()
    )
    for stream in healthy:
        stream.close()
    recover(server, dict(zip(stalled, stalled_sessions)))
    print(f"slowest {slowest * 1000:.0f} ms, front grew by {grown >> 20} MiB")


def recover(server: Server, sessions: dict[EventStream, Json]) -> None:
    """All of them read what they missed; one whose stream was cut resumes with its id."""
    frame_checkers = {stream: FrameChecker({"small": 0, "large": 0}) for stream in sessions}
    end = {"small": WRITES + 1, "large": LARGE_RECORDS + 1}
    for stream in sessions:
        wake(stream)
    pump(
        list(frame_checkers),
        lambda: all(
            frame_checker.cursors == end or stream.ended for stream, frame_checker in frame_checkers.items()
        ),
        lambda stream, frame: frame_checkers[stream].take(frame),
    )
    for stream, frame_checker in frame_checkers.items():
        stream.close()
        if frame_checker.cursors != end:
            again = open_stream(server, sessions[stream], last_event_id=frame_checker.last_id)
            pump([again], lambda: frame_checker.cursors == end, lambda _, frame: frame_checker.take(frame))  # noqa: B023
            again.close()
        assert frame_checker.seqs["small"] == list(range(1, WRITES + 2))
        assert frame_checker.seqs["large"] == list(range(1, LARGE_RECORDS + 2))
        assert not frame_checker.gaps


def wake(stream: EventStream) -> None:
    """A stalled client reads again, with a larger buffer."""
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
