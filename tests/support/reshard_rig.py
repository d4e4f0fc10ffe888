"""A data directory with several shards on one simulated disk: fill it, change the number of shards, compare.

`picture` is everything that a reader, a worker of a queue, a rule or a repeated key could find out, over all shards.
It does not say which shard has what, so pictures before and after a change must be equal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec

from tests.support.engine_harness import (
    DISK,
    EPHEMERAL,
    FSYNC,
    MEMORY,
    SMALL,
    Harness,
    RecordedDisk,
    numbered,
    rows_of,
)
from tests.support.sim_clock import SimClock
from tests.support.sim_disk import SimDisk
from topics.api.config import ConsumerConfig, EngineConfig, TopicConfig
from topics.engine.commands import consumers as k
from topics.engine.commands import forwards as f
from topics.engine.commands import topics as c
from topics.engine.core.placement import shard_of
from topics.engine.core.ports import SegmentStore
from topics.engine.shard.consumers.leases import consumer_rows
from topics.engine.storage.files import read_file
from topics.engine.storage.layout import LAYOUT_NAME, Layout, prepare_layout, publish_layout
from topics.engine.tools.reshard import Progress, Reshard, clear_stale
from topics.engine.tools.verify import Finding, verify_shard
from topics.engine.topic.flows import mark_in
from topics.engine.topic.log import TopicLog
from topics.link.watch import FeedOptions, SessionSpec
from workers.process.reshard_program import carry_watches
from workers.watch import session_file
from workers.watch.feeds import GroupRow
from workers.watch.sessions import SessionRow

# A picture checks the invariants; checking them in every turn would take most of the time.
CONFIG = msgspec.structs.replace(SMALL, wal_file_bytes=16_384, verify=False)
RIDING = msgspec.structs.replace(CONFIG, inline_bytes=4096)  # small topics have no files
NODE = b"w"
DAY_MS = 86_400_000
Picture = dict[str, Any]


class OpenShard(Harness):
    """One shard. The disk belongs to the whole directory: stopping the shard leaves it alone."""

    def __init__(
        self, config: EngineConfig, disk: SimDisk, clock: SimClock, cold: SegmentStore | None = None
    ) -> None:
        self.config, self.disk, self.clock, self.cold = config, disk, clock, cold
        self.replies, self.order, self.jobs = {}, [], []
        self._tokens = 0
        self._wake_at = None
        self.open()

    def close(self) -> None:
        """Stop as the shell does: running jobs continue to their next slice."""
        self.engine.stop_cold()
        self.rest()
        self._take(self.engine.close())
        self._die()


class Fleet:
    """All shards of a data directory."""

    def __init__(
        self,
        shards: int,
        *,
        config: EngineConfig = CONFIG,
        seed: int = 1,
        disk: SimDisk | None = None,
        cold: SegmentStore | None = None,
    ) -> None:
        self.config = config
        self.cold = cold
        self.clock = SimClock()
        self.open_shards: list[OpenShard] = []
        self._lines: list[
            RecordedDisk
        ] = []  # disks of interrupted changes: what is left of those must not write any more
        if disk is not None:
            self.disk = disk
            return
        self.disk = SimDisk(seed)
        prepare_layout(self.disk, Layout.of(1, shards))
        publish_layout(self.disk)
        self.open()

    # ---- start and stop

    @property
    def layout(self) -> Layout:
        return msgspec.json.decode(read_file(self.disk, LAYOUT_NAME), type=Layout)

    def open(self) -> None:
        layout = self.layout
        self.open_shards = [
            OpenShard(
                msgspec.structs.replace(self.config, shard=shard, shard_dir=layout.shard_dir(shard)),
                self.disk,
                self.clock,
                self.cold,
            )
            for shard in range(layout.shards)
        ]
        for open_shard in self.open_shards:
            open_shard.rest()

    def close(self) -> None:
        for open_shard in self.open_shards:
            open_shard.close()
        self.open_shards = []
        self.disk.kill()

    def kill(self) -> None:
        self._end()
        self.disk.kill()

    def power_cut(self) -> None:
        self._end()
        self.disk.crash()
        self.clock = SimClock(self.clock.wall_ms())

    def _end(self) -> None:
        for open_shard in self.open_shards:
            open_shard._die()
        for line in self._lines:
            line.cut()
        self.open_shards, self._lines = [], []

    def die(self, how: str) -> None:
        if how == "power":
            self.power_cut()
        else:
            self.kill()

    def reshard(self, shards: int, look: Callable[[Progress], None] = lambda progress: None) -> Reshard:
        """Change the number of shards, as the process does that the supervisor starts."""
        self._lines.append(line := RecordedDisk(self.disk))
        disk: Any = line
        work = Reshard(
            disk,
            self.clock,
            self.config,
            self.layout,
            shards,
            lambda old, new: carry_watches(disk, old, new),
            self.cold,
        )
        for progress in work.steps():
            look(progress)
        return work

    def start(self, shards: int) -> None:
        """Start with this configured number of shards."""
        if shards != self.layout.shards:
            self.reshard(shards)
        else:
            clear_stale(self.disk, self.layout)
        self.open()

    def verify(self) -> list[Finding]:
        """What `topics verify` finds. The shards must be closed."""
        layout = self.layout
        found: list[Finding] = []
        for shard in range(layout.shards):
            config = msgspec.structs.replace(self.config, shard=shard, shard_dir=layout.shard_dir(shard))
            steps = verify_shard(self.disk, self.clock, config, layout.shards)
            while True:
                try:
                    next(steps)
                except StopIteration as ended:
                    found += ended.value.findings
                    break
        return found

    # ---- requests

    def owner(self, topic: str) -> OpenShard:
        return self.open_shards[shard_of(topic, len(self.open_shards))]

    def do(self, command: Any) -> Any:
        return self.owner(command.topic).do(command)

    def append(self, topic: str, *payloads: bytes, **options: Any) -> Any:
        return self.owner(topic).append(topic, *payloads, **options)

    def put(self, topic: str, config: TopicConfig) -> None:
        self.owner(topic).put(topic, config)

    def sync(self) -> None:
        self.clock.advance(200)
        for open_shard in self.open_shards:
            open_shard.rest()

    def checkpoint(self) -> None:
        for open_shard in self.open_shards:
            open_shard.checkpoint()

    def logs(self) -> dict[str, TopicLog]:
        return {
            name: log
            for open_shard in self.open_shards
            for name, log in open_shard.engine.shard.state.published.items()
        }

    def claim(self, topic: str, max: int, **options: Any) -> k.Claimed:
        found = self.do(k.Claim(topic, node=NODE, max=max, **options))
        assert isinstance(found, k.Claimed)
        return found

    # ---- dead letters and copies, delivered by the test

    def letters(self, topic: str) -> list[k.DeadLetter]:
        open_shard = self.owner(topic)
        return open_shard.engine.shard.dead_letters.dead_letters_to_send(
            open_shard.engine.shard.state.published[topic], 64, 1 << 20
        )

    def take_letters(self, letters: list[k.DeadLetter]) -> k.DeadLettersTaken:
        taken = self.do(k.TakeDeadLetters(letters[0].target, letters[0].source_id, letters))
        assert isinstance(taken, k.DeadLettersTaken)
        return taken

    def ship(self, topic: str) -> int:
        shipped = 0
        while letters := self.letters(topic):
            taken = self.take_letters(letters)
            self.do(k.SettleDeadLetters(topic, letters[0].source_id, taken.last_number, True))
            self.owner(topic).rest()
            shipped += len(letters)
        return shipped

    def make_rule(self, rule: f.Forward, *, at: list[int] | None = None) -> None:
        """Make a rule as the catalog does. `at`: only these shards know it yet, and it is still being made."""
        self.open_shards[0].do(f.PutForward(rule))
        self.do(f.OpenInflow(rule.dest, rule.uid, rule.name))
        homes = (
            range(len(self.open_shards))
            if rule.is_pattern
            else [shard_of(rule.source, len(self.open_shards))]
        )
        for shard in homes if at is None else at:
            self.open_shards[shard].do(f.OpenOutflow(rule))
        if at is None:
            self.open_shards[0].do(f.PutForward(msgspec.structs.replace(rule, state="active")))

    def copy(self, uid: int, source: str, count: int = 1000) -> int:
        """Copy up to this many records; returns how many were copied."""
        shard = self.owner(source).engine.shard
        log, rule = shard.state.published[source], shard.forwards.outflows[uid].forward
        mark = self.do(f.TakeCopies(rule.dest, shard.forwards.empty_copies(log, rule, 0))).mark
        copies = shard.forwards.copies_after(log, rule, mark, count, 1 << 20)
        if copies is None:
            return 0
        before = self.owner(rule.dest).state(rule.dest).head_seq
        self.do(f.TakeCopies(rule.dest, copies))
        return self.owner(rule.dest).state(rule.dest).head_seq - before

    # ---- comparison

    def picture(self) -> Picture:
        topics = {name: self._topic(name, log) for name, log in sorted(self.logs().items())}
        shards = [open_shard.engine.shard for open_shard in self.open_shards]
        for open_shard in self.open_shards:
            open_shard.engine.check_invariants()
        sessions: dict[str, SessionRow] = {}
        groups: list[GroupRow] = []
        for open_shard in self.open_shards:
            rows = session_file.read(self.disk, open_shard.config.shard_dir)
            if rows is not None:
                sessions |= {session.wid: session for session in rows.sessions}
                groups += rows.groups
                assert all(
                    shard_of(wid, len(self.open_shards)) == open_shard.config.shard
                    for wid in (s.wid for s in rows.sessions)
                )
                assert all(
                    shard_of(group[0], len(self.open_shards)) == open_shard.config.shard
                    for group in rows.groups
                )
        return {
            "topics": topics,
            "records": sum(shard.state.records_live for shard in shards),
            "bytes": sum(shard.state.bytes_live for shard in shards),
            "rules": shards[0].forwards.catalog,
            "last uid": shards[0].forwards.last_uid,
            "rules elsewhere": [shard.forwards.catalog for shard in shards[1:] if shard.forwards.catalog],
            "sessions": sessions,
            "groups": sorted(groups),
        }

    def _topic(self, name: str, log: TopicLog) -> Picture:
        open_shard = self.owner(name)
        rows: list[Any] = []
        gaps: list[tuple[int, int, str]] = []
        cursor = 0
        while True:
            page = open_shard.diff(name, cursor, limit=1000, max_bytes=8 << 20, touch=False)
            if page.tombstone is not None:
                gaps.append((page.tombstone.gap_from, page.tombstone.gap_to, page.tombstone.reason))
            payloads = shard_rows(page)
            tags = page.tags or [None] * len(payloads)
            nodes = page.nodes or [None] * len(payloads)
            rows += [(*row, tag, node) for row, tag, node in zip(payloads, tags, nodes, strict=True)]
            if page.next_from_seq >= page.head_seq:
                break
            cursor = page.next_from_seq
        state = open_shard.state(name)
        consumers, letters = consumer_rows(log)
        outflows = open_shard.engine.shard.forwards.outflows
        sources = {other.id: other for other in self.logs().values()}
        inflows = {
            uid: (
                flow.total,
                {
                    sources[sid].name: mark_in(mark, sources[sid].epochs)[1]
                    for sid, mark in flow.marks.items()
                    if sid in sources
                },
            )
            for uid, flow in (log.inflows or {}).items()
        }
        return {
            "id": log.id,
            "rows": rows,
            "gaps": gaps,
            "state": (state.head_seq, state.earliest_seq, state.count, state.bytes, state.config, state.last_write_ts, state.queue),
            "losses": list(log.view.losses),
            "lost": (log.view.cap_lost, log.view.ttl_lost),
            "keys": dict(log.dedupe.entries),
            "consumers": {row.name: row for row in consumers},
            "letters": letters,
            "inflows": inflows,
            # A rule that is being made may not be known to every shard yet.
            "outflows": {
                uid: mark_in(outflows[uid].start_of(log.id), log.epochs)[1]
                for uid in log.outflows
                if self.open_shards[0].engine.shard.forwards.catalog[uid].state == "active"
            },
            "ceiling": log.ceiling,
        }  # fmt: skip


def shard_rows(page: c.Page) -> list[tuple[int, int, bytes]]:
    return [
        (seq, int(ts), payload) for (seq, payload), ts in zip(rows_of(page), page.timestamps, strict=True)
    ]


def after_power_cut(before: Picture, after: Picture) -> Picture:
    """The picture with the changes that a power cut may cause: seqs of `disk` topics that were reserved ahead are
    skipped, and announced.
    """
    after = copy.deepcopy(after)
    for name, topic in after["topics"].items():
        was = before["topics"].get(name)
        if was is None or topic["state"][4].durability != "disk":
            continue
        head = was["state"][0]
        if topic["state"][0] <= head:
            continue
        assert topic["gaps"] and topic["gaps"][-1][2] == "crash", (name, topic["gaps"])
        assert topic["gaps"][-1][1] == topic["state"][0]
        assert topic["gaps"][-1][0] > head, (name, topic["gaps"])
        for key in ("gaps", "losses"):
            topic[key] = [gap for gap in topic[key] if gap[0] <= head]
        earliest = min(topic["state"][1], head + 1)
        topic["state"] = (head, earliest, *topic["state"][2:])
        topic["ceiling"] = was["ceiling"]
    return after


def same(before: Picture, after: Picture, *, power: bool = False) -> None:
    if power:
        after = after_power_cut(before, after)
    assert sorted(after["topics"]) == sorted(before["topics"])
    for name, topic in before["topics"].items():
        for what, value in topic.items():
            assert after["topics"][name][what] == value, (name, what, value, after["topics"][name][what])
    for what, value in before.items():
        assert after[what] == value, (what, value, after[what])


def fill(fleet: Fleet) -> None:
    """Some data of every kind on every shard, including what a restart may lose, such as leases in memory."""
    # Each power cut takes some seconds: nothing may expire meanwhile.
    classes = [
        msgspec.structs.replace(kind, idempotency_window_ms=DAY_MS)
        for kind in (FSYNC, DISK, MEMORY, TopicConfig(durability="fsync", cap_records=3), EPHEMERAL)
    ]
    for i in range(10):
        fleet.put(f"t{i}", classes[i % len(classes)])
        fleet.append(f"t{i}", *numbered(1, 6), tag=b"a%d" % (i % 2), nodes=[b"n"] * 6, key=b"first")
    fleet.put("aged", TopicConfig(durability="fsync", ttl_ms=DAY_MS))
    fleet.append("aged", *numbered(1, 2))
    fleet.put("gone", FSYNC)
    fleet.append("gone", *numbered(1, 9))
    fleet.put(
        "q",
        TopicConfig(
            type="queue",
            durability="fsync",
            lease_ms=DAY_MS,
            leases_durable=True,
            max_deliveries=1,
            dead_letter="dead",
        ),
    )
    fleet.append("q", *numbered(1, 8))
    fleet.put("light", TopicConfig(type="queue", durability="disk", lease_ms=DAY_MS))
    fleet.append("light", *numbered(1, 4))
    fleet.checkpoint()
    fleet.clock.advance(3_000)
    fleet.do(c.Delete("t0", seqs=[2, 4]))
    fleet.do(c.Delete("t5", seqs=[1], erase=True))
    fleet.do(c.Skip("t1", 3))
    fleet.append("t1", b'"after the skip"', key=b"second")
    for name, acks in (("mine", [1, 3]), ("yours", [])):
        fleet.do(k.PutConsumer("t0", name, ConsumerConfig(ack_wait_ms=DAY_MS, max_ack_pending=3)))
        fleet.claim("t0", 2, consumer=name)
        if acks:
            fleet.do(k.Settle("t0", "ack", NODE, acks, consumer=name))
    fleet.claim("q", 3)
    fleet.do(k.Settle("q", "ack", NODE, [1]))
    fleet.do(k.Settle("q", "nack", NODE, [2], delay_ms=DAY_MS))
    fleet.do(k.Settle("q", "nack", NODE, [3], nack="dead", reason="bad"))  # a dead letter that is being moved
    fleet.claim("q", 2)
    fleet.claim("light", 1)
    fleet.make_rule(f.Forward(1, "literal", "t0", "copies"))
    fleet.make_rule(f.Forward(2, "pattern", "p.>", "many"))
    fleet.make_rule(f.Forward(3, "new", "p.*", "few"), at=[0])
    for i in range(4):
        fleet.put(f"p.{i}", (FSYNC, MEMORY)[i % 2])
        fleet.append(f"p.{i}", *numbered(1, 3))
        fleet.copy(2, f"p.{i}", 2)
    fleet.append("t0", *numbered(10, 3))
    fleet.copy(1, "t0", 2)
    fleet.do(c.DropTopic("gone"))
    fleet.append("t9", *numbered(7, 2))  # in memory only
    save_watches(fleet)
    fleet.sync()


def save_watches(fleet: Fleet) -> None:
    shards = len(fleet.open_shards)
    for open_shard in fleet.open_shards:
        mine = open_shard.config.shard
        sessions = [
            SessionRow(
                f"wid_{i}", b"", SessionSpec(FeedOptions(), 1000, ["t0"]), {"t0": i}, i, 0, False, [], []
            )
            for i in range(8)
            if shard_of(f"wid_{i}", shards) == mine
        ]
        ids = {name: log.id for name, log in open_shard.engine.shard.state.published.items()}
        groups = [(name, ids[name], "crew", i) for i, name in enumerate(sorted(ids))]
        session_file.write(fleet.disk, open_shard.config.shard_dir, session_file.WatchRows(sessions, groups))
