"""Goal: whatever process dies, no watcher misses a record or gets one twice, and streams that do not need it are not affected.

Method: real processes are killed under open streams while records are written. A ledger over all streams of a client refuses a
frame that does not begin where the one before ended. A client behaves like a browser: it reconnects with its last id.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import IO

import pytest

from tests.support.contract import Json, fresh, ok
from tests.support.faults import fault
from tests.support.frame_checker import FrameChecker
from tests.support.server import Server, running, until
from tests.support.sse_client import EventStream, NotOpened, open_stream, pump, try_open, watch
from tests.support.ws_client import WebSocket
from topics.engine.core.placement import shard_of

SHARDS = 2
Start = Callable[..., Server]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("restarts"), shards=SHARDS) as made:
        yield made


def on_shard(shard: int) -> str:
    """A new topic name that is placed on this shard."""
    return next(name for name in (fresh("r") for _ in range(1000)) if shard_of(name, SHARDS) == shard)


def killed(server: Server, name: str) -> None:
    """kill -9, and wait until the supervisor has started the next process."""
    before = server.pid(name)
    os.kill(before, signal.SIGKILL)
    until(lambda: server.children().get(name) not in (None, before))


class Writer:
    """Writes numbers to topics, each once and in order, over all restarts of the server."""

    def __init__(self, server: Server, names: list[str], count: int) -> None:
        self.server, self.names, self.count = server, names, count
        self.written = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for i in range(self.count):
            for name in self.names:
                until(lambda name=name, i=i: self._write(name, i))
            self.written = i + 1

    def _write(self, name: str, number: int) -> bool:
        try:
            return self.server.write(name, number, idempotency_key=str(number)).status in (200, 201)
        except (OSError, http.client.HTTPException):
            return False

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


class Browser:
    """A client with one session that reconnects with its last id until the stream opens."""

    def __init__(self, server: Server, names: list[str]) -> None:
        self.server, self.names = server, names
        self.session: Json = watch(server, {name: {} for name in names})
        self.frame_checker = FrameChecker(dict.fromkeys(names, 0), keeps_data=True)
        self.streams = 0
        self.stream = self.connect()

    def connect(self) -> EventStream:
        self.streams += 1
        stream: EventStream = until(
            lambda: try_open(self.server, self.session, last_event_id=self.frame_checker.last_id), 30, 0.05
        )
        return stream

    def read_until(self, count: int) -> None:
        """Until this many records of each topic have arrived."""
        while any(len(self.frame_checker.seqs[name]) < count for name in self.names):
            frame = self.stream.read(30)
            if frame is None:
                self.stream.close()
                self.stream = self.connect()
            else:
                self.frame_checker.take(frame)

    def has_seen(self, count: int) -> None:
        self.read_until(count)
        for name in self.names:
            assert self.frame_checker.seqs[name] == list(range(1, count + 1))
            assert self.frame_checker.data[name] == list(range(count))
        assert not self.frame_checker.gaps
        self.stream.close()


# -- workers -----------------------------------------------------------------------------------------------


@fault(
    "worker",
    "the worker of a watched topic is killed",
    "the stream stays open and continues without loss or duplicates; streams of other shards notice nothing",
)
@pytest.mark.parametrize("shard", [0, 1])
def test_the_worker_of_a_topic_dies(server: Server, shard: int) -> None:
    """Shard 0 also stores the sessions."""
    hit, other = on_shard(shard), on_shard(1 - shard)
    for name in (hit, other):
        ok(server.write(name, 0, idempotency_key="0"), 201)
    browsers = [Browser(server, [hit]), Browser(server, [other]), Browser(server, [hit, other])]
    for browser in browsers:
        browser.read_until(1)
    writer = Writer(server, [hit, other], 60)
    for step in (15, 35):
        until(lambda step=step: writer.written >= step)
        killed(server, f"shard {shard}")
    writer.join()
    for browser in browsers:
        browser.has_seen(60)
        assert browser.streams == 1, "the stream was cut"


def test_while_a_worker_is_down_topics_of_others_continue(server: Server) -> None:
    """Its successor waits for the shard's lock, which the test holds."""
    away, other = on_shard(1), on_shard(0)
    for name in (away, other):
        ok(server.write(name, 0), 201)
    both = Browser(server, [away, other])
    both.read_until(1)
    websocket = WebSocket(server)
    websocket.ask("subscribe", topics={other: {"tail": True}, away: {"tail": True}})
    websocket.take("caught_up", "caught_up")
    with hold_lock(server, 1):
        for i in range(1, 10):
            ok(server.write(other, i))
            pump(
                [both.stream],
                lambda i=i: both.frame_checker.cursors[other] == i + 1,
                lambda _, f: both.frame_checker.take(f),
            )
            [record, _] = websocket.take("record", "caught_up")
            assert record["topic"] == other
    server.wait_ready()
    ok(server.write(away, 1))
    pump(
        [both.stream],
        lambda: both.frame_checker.cursors[away] == 2,
        lambda _, frame: both.frame_checker.take(frame),
    )
    [record, _] = websocket.take("record", "caught_up")
    assert (record["topic"], record["from_seq"]) == (away, 1)
    assert both.streams == 1
    both.stream.close()
    websocket.close()


@contextlib.contextmanager
def hold_lock(server: Server, shard: int) -> Iterator[None]:
    """Kill a shard's worker, and block its successor by holding the shard's lock."""
    with (server.data_dir / "layout-1" / f"shard-{shard:02}" / "LOCK").open() as file:
        os.kill(server.pid(f"shard {shard}"), signal.SIGKILL)
        until(lambda: locks(file), 10, 0.001)  # before the supervisor has started another one
        yield


def locks(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# -- fronts ------------------------------------------------------------------------------------------------


@fault(
    "front",
    "the front of a watcher is killed",
    "the client reconnects with its last id, misses nothing and gets nothing twice",
)
def test_the_front_dies(server: Server) -> None:
    names = [on_shard(0), on_shard(1)]
    for name in names:
        ok(server.write(name, 0, idempotency_key="0"), 201)
    browser = Browser(server, names)
    writer = Writer(server, names, 60)
    browser.read_until(20)
    killed(server, "front 0")
    writer.join()
    browser.has_seen(60)
    assert browser.streams >= 2


def test_the_front_and_all_workers_die(server: Server) -> None:
    names = [on_shard(0), on_shard(1)]
    for name in names:
        ok(server.write(name, 0, idempotency_key="0"), 201)
    browser = Browser(server, names)
    writer = Writer(server, names, 40)
    browser.read_until(15)
    pids = server.children()
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    until(lambda: len(now := server.children()) == len(pids) and not set(now.values()) & set(pids.values()))
    writer.join()
    browser.has_seen(40)


# -- the whole server --------------------------------------------------------------------------------------


@fault(
    "supervisor",
    "the whole server is restarted under watchers",
    "they reconnect with their last ids; no session is lost",
)
def test_the_server_restarts_on_its_port(start_server: Start) -> None:
    port = free_port()
    server = start_server(environment={"TOPICS_PORT": str(port)}, shards=SHARDS)
    names = [on_shard(0), on_shard(1)]
    for name in names:
        ok(server.write(name, 0, idempotency_key="0"), 201)
    browser = Browser(server, names)
    silent = watch(server, {name: {} for name in names})  # has never been opened
    forgetful = watch(server, {name: {} for name in names})  # reconnects without an id
    frame_checker = FrameChecker(dict.fromkeys(names, 0))
    stream = open_stream(server, forgetful)
    writer = Writer(server, names, 60)
    browser.read_until(15)
    server.stop()
    frame_checker.take_all(stream.rest())  # all that was sent; the server continues from there
    server.start()
    assert server.port == port
    stream = open_stream(server, forgetful)
    pump([stream], lambda: frame_checker.count >= 60, lambda _, frame: frame_checker.take(frame))
    stream.close()
    browser.read_until(30)
    server.kill()
    server.start()
    writer.join()
    browser.has_seen(60)
    stream = open_stream(server, silent)
    frame_checker = FrameChecker(dict.fromkeys(names, 0))
    pump([stream], lambda: frame_checker.count == 120, lambda _, frame: frame_checker.take(frame))
    stream.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


# -- streams opened during a restart -----------------------------------------------------------------------


@fault(
    "worker",
    "a stream is opened while the worker of its session restarts",
    "the request waits: a browser gives up after any answer but a stream",
)
def test_a_stream_waits_for_its_session(server: Server) -> None:
    name = on_shard(1)
    ok(server.write(name, 1), 201)
    session = watch(server, name)
    opened: list[EventStream] = []
    failed: list[Exception] = []

    def ask() -> None:
        try:
            opened.append(open_stream(server, session))
        except (NotOpened, OSError) as error:
            failed.append(error)

    with hold_lock(server, 0):
        until(lambda: server.get("/readyz").status == 503)
        asking = threading.Thread(target=ask)
        asking.start()
        # Others are served meanwhile, also those who asked later.
        for i in range(20):
            ok(server.write(name, i))
        assert not opened
        assert not failed
    asking.join(120)
    assert not failed, failed
    [stream] = opened
    assert stream.until_records(21)
    stream.close()


def test_a_stream_waits_for_its_topic(server: Server) -> None:
    """The session is available, one of its topics is not yet: the stream opens, and continues once it is."""
    away, other = on_shard(1), on_shard(0)
    for name in (away, other):
        ok(server.write(name, 1), 201)
    session = watch(server, {away: {}, other: {}})
    frame_checker = FrameChecker({away: 0, other: 0})
    with hold_lock(server, 1):
        until(lambda: server.get("/readyz").status == 503)
        stream = open_stream(server, session)
        pump([stream], lambda: frame_checker.cursors[other] == 1, lambda _, frame: frame_checker.take(frame))
        assert frame_checker.cursors[away] == 0
    pump([stream], lambda: frame_checker.cursors[away] == 1, lambda _, frame: frame_checker.take(frame))
    stream.close()
