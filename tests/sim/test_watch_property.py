"""Goal: whatever is written, deleted and evicted while watchers connect, disconnect, read slowly and lose their front
or shard, each of them gets every live record exactly once, in order, and learns of every unexpected gap.

Method: Hypothesis generates the steps, on a simulated server with one topic. Watchers always reconnect with the last
id that they have seen, or with that of their beginning. What they received is compared with plain sets of seqs; the
checker runs as well, but is not needed to fail.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.sim.clients import ClientPool, FinalReader, Workload
from tests.sim.processes import Machine, SimServer
from tests.sim.watchers import REST_US, SimSink, Watcher
from tests.sim.world import MS, S, World
from tests.support import length
from tests.support.checker import assert_ok
from tests.support.checker.streams import read_id
from tests.support.history import Op
from topics.api.config import EngineConfig
from topics.system.settings import Settings

pytestmark = pytest.mark.sim

TOPIC = "t"
WISHES: list[dict[str, Any]] = [
    {"topics": {TOPIC: {}}},
    {"topics": {TOPIC: {}}},  # shares the feed of the first
    {"topics": {">": {}}, "limit": 2},
    {"topics": {TOPIC: {}}, "max_batch_bytes": 1, "consistency": "strong"},
]


def _id_of(cursors: dict[str, int]) -> str:
    return urlsafe_b64encode(json.dumps(cursors).encode()).rstrip(b"=").decode()


class Follower(Watcher):
    """A watcher that does what the test says."""

    restless = 0.0
    start: str | None = None  # the id of one that has seen nothing yet

    def __init__(self, pool: ClientPool, name: str, wish: dict[str, Any]) -> None:
        self.wish = wish
        super().__init__(pool, name)

    def _request(self) -> dict[str, Any]:
        return self.wish

    def on_answer(self, op: Op) -> None:
        if op.ok:
            self.start = _id_of({topic: row["from_seq"] for topic, row in op.answer["topics"].items()})
        super().on_answer(op)

    def _last_id(self) -> str | None:
        """Without an id the stream would continue at the server's position, after records that were written but never
        arrived.
        """
        return self.seen[-1] if self.seen else self.start

    def _behave(self, sink: SimSink) -> None:
        pass

    def _pause_us(self) -> int:
        return 0

    # -- what it received ------------------------------------------------------------------------------------

    @property
    def seqs(self) -> list[int]:
        return [
            record["$seq"]
            for stream in self._streams
            for frame in stream.frames
            if frame.event == "record"
            for record in frame.data["records"]
        ]

    @property
    def gaps(self) -> set[int]:
        found: set[int] = set()
        for stream in self._streams:
            for frame in stream.frames:
                if frame.event == "tombstone":
                    found.update(range(frame.data["gap_from"], frame.data["gap_to"] + 1))
        return found

    @property
    def _streams(self) -> list[Any]:
        return [stream for stream in self.history.streams if stream.client == self.name]


@dataclass
class WatchRun:
    seed: int
    wishes: list[dict[str, Any]] = field(default_factory=lambda: WISHES)
    head: int = 0
    deleted: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.world = World(self.seed)
        self.server = SimServer(
            self.world,
            Machine(self.world, self.seed, 1),
            shards=1,
            fronts=2,
            config=EngineConfig(wal_file_bytes=16_384, segment_max_events=4, snapshot_wal_bytes=4096),
            settings=Settings(),
        )
        self.pool = ClientPool(self.server, Workload(), clients=0)
        self.writer = FinalReader(self.pool, "writer")
        self.server.start()
        self.await_up()
        self.ask("put", {"durability": "fsync"})
        self.pool.watchers += [Follower(self.pool, f"w{i}", wish) for i, wish in enumerate(self.wishes)]
        self.world.run_until(
            lambda: all(watcher.wid for watcher in self.pool.watchers), within_us=S, what="sessions"
        )

    def await_up(self) -> None:
        self.world.run_until(self.server.is_up, within_us=60 * S, what="all processes serve")

    def ask(self, kind: str, request: dict[str, Any]) -> Any:
        self.await_up()
        return self.writer.ask(kind, TOPIC, request).answer

    # -- steps -----------------------------------------------------------------------------------------------

    def write(self, count: int) -> None:
        records = [{"data": {"n": self.head + i}} for i in range(count)]
        self.head = self.ask("write", {"records": records})["head_seq"]

    def delete(self, back: int) -> None:
        """One record, or all that are older."""
        seq = max(0, self.head - back // 2)
        if back % 2:
            self.ask("delete", {"seqs": [seq]})
            self.deleted.add(seq)
        else:
            self.ask("delete", {"before_seq": seq})
            self.deleted.update(range(1, seq))

    def evict(self, kept: int) -> None:
        self.ask("put", {"durability": "fsync", "cap_records": kept})

    def leave(self, who: int) -> None:
        watcher = self.pool.watchers[who % len(self.wishes)]
        if watcher.sink is not None:
            watcher.sink.hang_up("client")

    def dawdle(self, who: int) -> None:
        watcher = self.pool.watchers[who % len(self.wishes)]
        if watcher.sink is not None:
            watcher.sink.stall((1 + who) * 20 * MS)

    def kill(self, who: int) -> None:
        front = self.server.fronts[who % 2]
        worker = self.server.workers[0]
        if who > 1 and front is not None and front.alive:
            self.server.kill_front(front)
        elif who <= 1 and worker is not None and worker.alive:
            self.pool.history.happened("kill", [TOPIC])
            self.server.kill_worker(worker)

    def wait(self, how: int) -> None:
        self.world.run_for((50, 400, 5000, 1_500_000)[how % 4])

    # -- the end ---------------------------------------------------------------------------------------------

    def rest(self) -> set[int]:
        """The live seqs when everything has arrived."""
        self.await_up()
        self.pool.stop()
        self.pool.rest_watchers()
        self.writer.read_all()
        pages = [op.answer["records"] for op in self.pool.history.ops if op.kind == "diff"]
        assert_ok(self.pool.history)
        return {record["$seq"] for page in pages for record in page}

    def end(self) -> None:
        living = self.rest()
        for watcher in self.pool.watchers:
            assert isinstance(watcher, Follower)
            seqs, gaps = watcher.seqs, watcher.gaps
            assert seqs == sorted(set(seqs)), f"{watcher.name} got records twice, or out of order: {seqs}"
            assert living <= set(seqs), f"{watcher.name} never got {sorted(living - set(seqs))}"
            assert not gaps & set(seqs), (
                f"{watcher.name} got {sorted(gaps & set(seqs))}, and was told that they are gone"
            )
            silent = set(range(1, self.head + 1)) - set(seqs) - gaps - self.deleted
            assert not silent, f"{watcher.name} was not told about the loss of {sorted(silent)}"

    def end_group(self, steps: list[str]) -> None:
        living = self.rest()
        got: list[int] = []
        for watcher in self.pool.watchers:
            assert isinstance(watcher, Follower)
            got += watcher.seqs
            for stream in watcher._streams:
                seqs = [r["$seq"] for frame in stream.frames for r in frame.data.get("records", ())]
                assert seqs == sorted(seqs), f"{watcher.name} got {seqs}"
        assert len(got) == len(set(got)), f"delivered twice: {sorted(got)}"
        if "leave" not in steps:
            assert living <= set(got), f"delivered to no member: {sorted(living - set(got))}"


def steps_of(*kinds: tuple[str, int, int]) -> st.SearchStrategy[list[tuple[str, int]]]:
    each = st.one_of(*(st.tuples(st.just(name), st.integers(least, most)) for name, least, most in kinds))
    return st.lists(each, min_size=3, max_size=25)


STEPS = steps_of(
    ("write", 1, 4), ("write", 1, 4), ("delete", 0, 12), ("evict", 1, 6), ("leave", 0, 3), ("dawdle", 0, 3),
    ("kill", 0, 3), ("wait", 0, 3), ("wait", 0, 3),
)  # fmt: skip
GROUP_STEPS = steps_of(
    ("write", 1, 4), ("write", 1, 4), ("delete", 0, 12), ("leave", 0, 3), ("dawdle", 0, 3), ("wait", 0, 3)
)
GROUP_WISHES: list[dict[str, Any]] = [
    {"topics": {TOPIC: {}}, "group": "g"},
    {"topics": {TOPIC: {}}, "group": "g", "limit": 1},
    {"topics": {">": {}}, "group": "g", "consistency": "strong"},
]


@settings(
    max_examples=length.pick(short=15, long=300), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(seed=st.integers(0, 10_000), steps=STEPS)
def test_each_living_record_comes_once_and_every_gap_is_announced(
    seed: int, steps: list[tuple[str, int]]
) -> None:
    watch_run = WatchRun(seed)
    for name, number in steps:
        getattr(watch_run, name)(number)
    watch_run.end()


@settings(
    max_examples=length.pick(short=10, long=200), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(seed=st.integers(0, 10_000), steps=GROUP_STEPS)
def test_a_group_gives_each_record_to_one_member(seed: int, steps: list[tuple[str, int]]) -> None:
    """To exactly one member while all stay; what was in flight to one that leaves may be lost, and is never delivered
    twice.
    """
    watch_run = WatchRun(seed, GROUP_WISHES)
    for name, number in steps:
        getattr(watch_run, name)(number)
    watch_run.end_group([name for name, _ in steps])


def test_the_watchers_of_a_tale_are_connected_and_read_on_by_themselves() -> None:
    """Otherwise the property would hold because nothing happens."""
    watch_run = WatchRun(1)
    watch_run.write(3)
    watch_run.wait(2)
    watch_run.leave(0)
    watch_run.write(2)
    watch_run.world.run_for(REST_US)
    for watcher in watch_run.pool.watchers:
        assert isinstance(watcher, Follower)
        assert watcher.seqs == [1, 2, 3, 4, 5]


def test_every_id_names_every_topic() -> None:
    """A stream that joined a running feed sent one before it had begun to follow its other topics."""
    wish = {"topics": {TOPIC: {}, "u": {}}, "lenient": True}
    watch_run = WatchRun(1, [{"topics": {TOPIC: {}}}])
    watch_run.writer.ask("put", "u", {})
    watch_run.world.run_for(REST_US)
    late = Follower(watch_run.pool, "late", wish)
    watch_run.pool.watchers.append(late)
    watch_run.world.run_for(REST_US)
    assert late.seen
    assert all(set(read_id(text) or ()) == {TOPIC, "u"} for text in late.seen)
