"""A shard on a SimDisk with one file of every kind, and helpers that check and repair it.

`rich` makes sealed segments with tags, nodes, expiries, keys and deletes, an open segment, a topic that is stored in
the snapshot, two snapshots, several log files, and a log that continues after the newest snapshot.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Generator, Iterator
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tests.support.engine_harness import DISK, FSYNC, SMALL, WAL_DIR, Harness, file_bytes, numbered
from tests.support.sim_clock import SimClock
from tests.support.sim_disk import SimDisk
from topics.engine.commands import topics as c
from topics.engine.core.subjects import TagMatch
from topics.engine.storage.wal import Envelope, scan
from topics.engine.tools.repair import Repaired, repair_shard
from topics.engine.tools.verify import Finding, ShardFiles, verify_shard

CONFIG = msgspec.structs.replace(SMALL, inline_bytes=300, wal_file_bytes=2048)
TOPICS = ("sealed", "plain", "small", "tail")

Rows = dict[str, list[tuple[int, bytes]]]
T = TypeVar("T")


@dataclass
class Damaged:
    """A closed shard and the records it had."""

    disk: SimDisk
    rows: Rows
    wall_ms: int

    def copy(self) -> Damaged:
        return copy.deepcopy(self)

    def clock(self) -> SimClock:
        return SimClock(self.wall_ms)

    def verify(self) -> ShardFiles:
        return ended(verify_shard(self.disk, self.clock(), CONFIG, 1))

    def repair(self, run: int = 1) -> Repaired:
        return ended(repair_shard(self.disk, self.clock(), CONFIG, 1, run))

    def damage(self) -> list[Finding]:
        return self.verify().damage

    def open(self) -> Harness:
        """An engine on these files, at the time at which they were closed."""
        return Harness(CONFIG, disk=self.disk, clock=self.clock())

    def flip(self, path: str, offset: int, bit: int = 0) -> None:
        self.disk.flip_bit(path, offset, bit)

    def everything(self) -> dict[str, bytes]:
        return {path: self.bytes(path) for path in self.disk.paths()}

    def bytes(self, path: str) -> bytes:
        return file_bytes(self.disk, path)

    def envelopes(self) -> Iterator[tuple[str, Envelope]]:
        for path in self.disk.paths():
            if path.startswith(WAL_DIR):
                found = scan(path, int(path[-20:-4]), self.bytes(path))
                for envelope in found.envelopes if found is not None else []:
                    yield path, envelope


def ended(steps: Generator[str, None, T]) -> T:
    """Run a generator to its end and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result


def judge(h: Harness, wanted: Rows, *, may_return: Container[int] = ()) -> dict[str, list[int]]:
    """Check that no record was invented, changed or lost without a tombstone. Returns the lost ones; deleted records
    `may_return`.
    """
    gone: dict[str, list[int]] = {}
    for topic, rows in wanted.items():
        right = dict(rows)
        found, gaps = h.read(topic)
        for seq, payload in found:
            assert seq in right or seq in may_return, f"{topic} has seq {seq}, which was never written"
            assert payload == right.get(seq, payload), f"{topic} seq {seq} has changed"
        missing = sorted(set(right) - {seq for seq, _ in found})
        for seq in missing:
            assert any(first <= seq <= last for first, last, _ in gaps), (
                f"{topic} lost seq {seq} without a tombstone"
            )
        if missing:
            gone[topic] = missing
    return gone


def rich(*, clean: bool) -> Damaged:
    h = Harness(CONFIG)
    for topic in TOPICS:
        h.put(topic, DISK if topic == "plain" else FSYNC)
    for i in range(1, 11):
        h.append(
            "sealed",
            *numbered(i, 1),
            tags=[b"eu" if i % 2 else b"us"],
            nodes=[b"n%d" % (i % 3)],
            key=b"k%d" % i,
        )
    h.append("plain", *numbered(1, 6))
    h.append("small", *numbered(1, 2))
    h.checkpoint()
    h.do(c.Delete("sealed", match=TagMatch("Eq", b"us"), before_seq=4))
    h.append("plain", *numbered(7, 2), ttls_ms=[10**9, 10**9])
    h.append("small", *numbered(3, 1))
    h.checkpoint()
    for i in range(1, 7):
        h.append("tail", *numbered(i, 1), tag=b"t")
    h.append("sealed", *numbered(11, 2))
    h.append("plain", *numbered(9, 2))
    h.append("small", *numbered(4, 1))
    h.sync()
    h.append("tail", *numbered(7, 1))
    h.sync()
    # One more entry, which confirms that the earlier ones were synced.
    h.append("tail", *numbered(8, 1))
    h.sync()
    rows = {topic: h.rows(topic) for topic in TOPICS}
    if clean:
        h.close()
    else:
        h.kill()
    return Damaged(h.disk, rows, h.clock.wall_ms())
