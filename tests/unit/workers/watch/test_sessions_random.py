"""Watch sessions, their file and event ids together, in random runs.

Goal: a client that reconnects with the last event id that it received misses no record, whatever died meanwhile, and
gets none twice when nothing died. Method: a front, a client that loses the end of each stream, and a worker that
restarts from its file.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

import msgspec

from tests.support import length
from tests.support.sim_disk import SimDisk
from tests.unit.link.test_event_ids import made
from tests.unit.workers.watch.test_sessions import FRONT, PATTERN, T0, make, opened, saved
from topics.engine.storage.watch_file import WatchEntry
from topics.link import event_ids
from topics.link.watch import SaveSession
from workers.watch import session_file
from workers.watch.session_file import WatchFile
from workers.watch.sessions import ERA_MS, Sessions


class SessionRun:
    """One session of a pattern, read by one client that gets the frames of each stream up to some point."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        start = {f"t.{i}": 5 for i in range(self.rng.choice([1, 60, 64, 65, 70]))}
        self.sessions = make(start, spec=PATTERN)
        self.disk = SimDisk(seed)
        self.disk.make_dir("d")
        self.file = WatchFile(self.disk, "d")
        self.write_file()
        self.got = dict(start)  # the client's positions at its last event id, or at the beginning
        self.last_event_id = ""
        self.streams = count(1)
        self.stream = 0
        self.cursors: dict[str, int] = {}
        self.number = 0
        self.moved: dict[str, int] = {}  # since the last save
        self.frames: list[tuple[str, dict[str, int]]] = []  # in flight to the client
        self.repeats = 0
        self.now_ms = T0

    def connect(self) -> None:
        """Take over a session without a stream, or by force."""
        self.stream = next(self.streams)
        self.now_ms += ERA_MS
        answer = opened(self.sessions, self.stream, self.last_event_id, now_ms=self.now_ms, force=True)
        if not self.last_event_id:
            self.got = dict(answer.cursors)
        for topic in self.got.keys() | answer.cursors.keys():
            at, got = answer.cursors.get(topic, 0), self.got.get(topic, 0)
            assert at <= got, f"{topic} continues after {at}, but the client has only {got}"
            self.repeats += got - at
        self.cursors, self.number = answer.cursors, answer.save
        self.moved, self.frames = {}, []
        self._send()

    def _send(self) -> None:
        if event_ids.lists_all(self.cursors):
            text = made(self.cursors)
        else:
            text = made(self.moved, self.number)
        self.frames.append((text, dict(self.cursors)))

    def advance(self) -> None:
        topic = f"t.{self.rng.randrange(80)}"
        self.cursors[topic] = self.moved[topic] = self.cursors.get(topic, 0) + self.rng.randrange(1, 4)
        self._send()

    def deliver(self) -> None:
        taken = self.rng.randint(0, len(self.frames))
        if taken:
            self.last_event_id, self.got = self.frames[taken - 1]
            del self.frames[:taken]

    def save(self, *, closes: bool = False) -> None:
        self.number += 1
        assert saved(self.sessions, self.number, self.moved, stream=self.stream, closes=closes)
        self.moved = {}

    def write_file(self) -> None:
        taken = self.sessions.take(10)
        if self.file.wants_all or self.rng.random() < 0.1:
            self.file.write(self.sessions.rows(), self.sessions.changes(), [])
        else:
            rows, changes = [list(map(msgspec.Raw, some)) for some in (taken.rows, taken.changes)]
            self.file.append(WatchEntry(rows, [], changes, taken.ended))

    def lose_worker(self) -> None:
        self.sessions = Sessions(0)
        found = session_file.read(self.disk, "d")
        assert found is not None
        self.sessions.load(found.sessions, T0)
        self.file = WatchFile(self.disk, "d")

    def steps(self) -> Iterator[str]:
        kinds = ["advance"] * 6 + ["deliver"] * 3 + ["save"] * 3 + ["file"] * 2
        kinds += ["close", "front", "worker", "hang"]
        for _ in range(self.rng.randrange(5, 80)):
            yield self.rng.choice(kinds)

    def run(self) -> None:
        self.connect()
        for step in self.steps():
            match step:
                case "advance":
                    self.advance()
                case "deliver":
                    self.deliver()
                case "save":
                    self.save()
                case "file":
                    self.write_file()
                case "close":
                    self.save(closes=True)
                    self.connect()
                case "front":
                    self.sessions.front_gone(FRONT, T0)
                    self.connect()
                case "worker":
                    self.lose_worker()
                    if self.rng.random() < 0.5:
                        self.connect()
                    else:
                        self.stream_stays()
                case "hang":
                    self.connect()

    def stream_stays(self) -> None:
        """It continues with the new worker, unless that one's file is from before the stream."""
        self.number += 1
        request = SaveSession("w", self.stream, self.number, self.moved)
        if self.sessions.save(FRONT, request, T0):
            self.moved = {}
        else:
            self.connect()


def test_a_client_that_reconnects_with_its_last_id_misses_nothing() -> None:
    for seed in length.seeds(short=100, long=3000):
        try:
            SessionRun(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_a_client_that_got_everything_before_a_close_repeats_nothing() -> None:
    session_run = SessionRun(3)
    session_run.connect()
    for _ in range(200):
        session_run.advance()
        if session_run.rng.random() < 0.1:
            session_run.save()
        if session_run.rng.random() < 0.1:
            session_run.last_event_id, session_run.got = session_run.frames[-1]
            session_run.save(closes=True)
            session_run.write_file()
            if session_run.rng.random() < 0.5:
                session_run.lose_worker()
            session_run.connect()
    assert session_run.repeats == 0
