"""Merge jobs of a simulated server: they merge cold segments and read them as files, with the mistakes that jobs
make.

A job asks for a plan, reads its inputs from the cold disk, puts outputs into staging one file at a time, and asks to
publish them. Meanwhile others write, delete and erase, and processes die: the job too, whose replacement knows
nothing. Some propose wrong outputs; none of those may ever be published. Others pin a snapshot and read the files of
its manifest, which becomes a read in the history, as of the pin, however late it is done.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tests.sim.actors import RETRY_AFTER_US, Actor, NextRequest, is_stopping, json_request
from tests.sim.frames import frames
from tests.sim.processes import Machine
from tests.sim.world import MS
from tests.support.history import Op
from tests.support.merger import Damaged, Merger
from tests.support.sim_disk import SimDisk
from topics.api.errors import Corrupt
from topics.api.limits import TIME_CEILING_STEP_MS
from topics.engine.core.placement import shard_of
from topics.engine.storage.manifest import (
    dead_name,
    decode_dead,
    decode_manifest,
    is_manifest_file,
    manifest_name,
    pin_id,
)
from topics.engine.storage.segment_store import DiskSegmentStore
from topics.engine.storage.segments import parse_segment_name
from topics.protocols.http.exchange import Request

if TYPE_CHECKING:
    from tests.sim.clients import ClientPool

KINDS = ("plan", "merges", "renew", "publish", "abandon", "pin", "renew_pin", "release")
AHEAD_MS = TIME_CEILING_STEP_MS  # after a power cut the server's time is ahead by up to this
MERGED_RECORDS = 8  # a topic with more may have cold segments
LIES = ("flip", "drop", "undead", "alter", "alter", "names", "short")


class JobStore(DiskSegmentStore):
    """The cold disk as a job has it mounted. Planned crashes and errors are meant for the server, and do not apply
    here.
    """

    def __init__(self, machine: Machine, shard: int, name: str) -> None:
        super().__init__(machine.colds[shard], f"staging/{name}")
        self.cold: SimDisk = machine.colds[shard]
        self._machine, self._shard = machine, shard

    def do(self, work: Callable[[], Any]) -> Any:
        """Do everything at one moment."""
        if self._shard in self._machine.away:
            raise OSError(errno.ENODEV, "the cold disk is not mounted")
        disk = self.cold
        planned = disk._plans, disk._armed
        disk._plans, disk._armed = [], False
        try:
            return work()
        finally:
            disk._plans, disk._armed = planned

    def whole(self, key: str) -> bytes:
        return self.read_range(key, 0, self.length(key))


class Outputs(Merger):
    """The outputs that a job makes of a plan, kept until they are put; `lie` names what is wrong with them."""

    def __init__(
        self, store: JobStore, plan: dict[str, Any], attempt: str, rng: Random, lie: str = ""
    ) -> None:
        super().__init__(store, plan, attempt)
        self.made: list[tuple[str, bytes]] = []
        self.rng, self.lie = rng, lie

    def put(self, name: str, data: bytes) -> None:
        self.made.append((f"{self.plan['staging']}/{name}", data))

    def _input(self, one: dict[str, Any]) -> Any:
        rows, names, expiries, content = super()._input(one)
        live = np.flatnonzero(rows["length"])
        if self.lie == "drop" and len(live):
            rows = rows.copy()
            for column in ("length", "offset", "flags", "tag", "node", "size"):
                rows[column][live[0]] = 0
        elif self.lie == "alter" and len(live):
            changed = bytearray(content)
            row = rows[int(self.rng.choice(live.tolist()))]
            changed[int(row["offset"]) + self.rng.randrange(int(row["length"]))] ^= 1 << self.rng.randrange(8)
            content = bytes(changed)
        elif self.lie == "names":
            names = (names[0][::-1], names[1][::-1])
        return rows, names, expiries, content


def wrong_outputs(
    store: JobStore, plan: dict[str, Any], group: dict[str, Any], attempt: str, rng: Random
) -> tuple[str, list[tuple[str, bytes]]]:
    """The outputs of a job with a bug, and the name of the bug."""
    lie = rng.choice(LIES)
    if lie == "undead":
        group = {**group, "inputs": [{**one, "dead": None} for one in group["inputs"]]}
    outputs = Outputs(store, plan, attempt, rng, lie)
    outputs.merge(group)
    made = outputs.made
    if lie in ("flip", "short"):
        at = rng.randrange(len(made))
        name, data = made[at]
        where = rng.randrange(len(data))
        changed = bytes([data[where] ^ 1 << rng.randrange(8)])
        made[at] = name, data[:where] + (changed + data[where + 1 :] if lie == "flip" else b"")
    return lie, made


class Proposals:
    """The outputs of all jobs: the groups that were proposed correctly."""

    def __init__(self) -> None:
        self.right: set[tuple[str, int]] = set()  # plan and group

    def check(self, op: Op) -> None:
        """No wrong output was published."""
        for group in op.answer["groups"]:
            assert (op.request["plan_id"], group["group"]) in self.right, f"wrong output published: {op}"


class MergeJob(Actor):
    def __init__(self, pool: ClientPool, name: str, topics: list[str], proposals: Proposals) -> None:
        self.topic = pool.rng.choice(topics)
        super().__init__(pool, name, begins_within_us=100 * MS)
        self.topics, self.proposals = topics, proposals
        self.attempts = 0
        self.plan: dict[str, Any] | None = None
        self.puts: list[tuple[str, bytes]] | None = None  # None: nothing is made yet

    def _is_busy(self) -> bool:
        if self.plan is None or self._again is not None or not self._work():
            return False
        self.world.after(self.rng.choice((0, 200, 2 * MS, 20 * MS)), self.go)
        return True

    def _send(self, wish: NextRequest) -> None:
        kind, _, request = wish
        super()._send((kind, self.topic, request))  # it may work on another topic by now

    # -- the work --------------------------------------------------------------------------------------------

    def _work(self) -> bool:
        """One step of the work; False: there is a request to send."""
        assert self.plan is not None
        store = JobStore(self.pool.server.machine, shard_of(self.topic, self.pool.server.shards), self.name)
        try:
            if self.puts is None:
                store.do(lambda: self._make(store))
                return True
            if self.puts:
                store.do(lambda: self._put(store))
                return True
        except FileNotFoundError:
            self._forget()  # the plan is over, or its inputs are gone
            return True
        except OSError:
            return self.rng.random() < 0.9  # not mounted: wait, or send the request anyway
        return False

    def _make(self, store: JobStore) -> None:
        assert self.plan is not None
        self.attempts += 1
        self.puts = []
        for group in self.plan["groups"]:
            if store.exists(f"{self.plan['staging']}/group-{group['group']}.json"):
                continue
            honest = Outputs(store, self.plan, f"{self.name}-{self.attempts}", self.rng)
            honest.merge(group)
            lie, made = "", honest.made
            if self.rng.random() < 0.2:
                lie, made = wrong_outputs(store, self.plan, group, f"{self.name}-{self.attempts}", self.rng)
            # A reader would notice a dropped record, unless it is deleted by then: then dropping it is right.
            if made == honest.made or lie == "drop":
                self.proposals.right.add((self.plan["plan_id"], group["group"]))
            self.puts += made

    def _put(self, store: JobStore) -> None:
        assert self.puts
        key, data = self.puts[0]
        if not store.cold.exists(key.rpartition("/")[0]):
            raise FileNotFoundError(errno.ENOENT, key)  # putting it again would keep what was erased
        store.put(key, [data])
        self.puts.pop(0)

    def _forget(self) -> None:
        self.plan = self.puts = None
        if self.rng.random() < 0.6:
            self.topic = choose(self.pool, self.topics)

    # -- requests --------------------------------------------------------------------------------------------

    def _next(self) -> NextRequest:
        rng, plan, topic = self.rng, self.plan, self.topic
        if plan is None:
            return ("merges", topic, {}) if rng.random() < 0.1 else ("plan", topic, self._request())
        mine = {"plan_id": plan["plan_id"], "lease": plan["lease"]}
        mood = rng.random()
        if mood < 0.05:
            return "renew", topic, mine
        if mood < 0.08:
            return "abandon", topic, mine
        if mood < 0.12:
            return "plan", topic, {**self._request(), "lease": plan["lease"]}
        return "publish", topic, {**mine, "wait_ms": rng.choice((0, 5, 300, 10_000))}

    def _delete(self) -> dict[str, Any]:
        """A delete by another client of records that are being merged."""
        assert self.plan is not None
        group = self.rng.choice(self.plan["groups"])
        seqs = range(group["first_seq"], group["next_seq"])
        request: dict[str, Any] = {
            "seqs": sorted(self.rng.sample(seqs, min(len(seqs), self.rng.choice((1, 2, 5)))))
        }
        if self.rng.random() < 0.15:
            request["erase"] = True
        return request

    def _request(self) -> dict[str, Any]:
        """Usually the same request for a topic, or its plan would hardly ever be the current one."""
        often = Random(self.topic) if self.rng.random() < 0.9 else self.rng
        return {
            "target_bytes": often.choice((2000, 8000, 1 << 20)),
            "min_garbage": often.choice((0.1, 0.5)),
            "max_groups": often.choice((1, 3, 64)),
            "lease_ms": self.rng.choice((1000, 1000, 4000)),
        }

    def on_answer(self, op: Op) -> None:
        if op.kind == "delete":
            pass
        elif op.status is None:
            self._unheard(op)
        elif op.ok:
            self._heard(op)
        elif op.status in (404, 409) or op.answer["error"]["code"] == "no_cold_tier":
            self._forget()
        elif op.status == 410:
            self._again = "plan", self.topic, self._request()
        elif op.status == 422:
            self.pool.server.counts["outputs refused"] += 1
            self.puts = None  # wrong outputs are made again
        if self.plan is not None and self.rng.random() < 0.04:
            self._forget()  # it dies; the lease expires
        self.world.after(self._pause_us(op), self.go)

    def _heard(self, op: Op) -> None:
        if op.kind == "plan":
            if op.answer["plan_id"] is None:
                self._forget()
            else:
                if self.plan is None or self.plan["plan_id"] != op.answer["plan_id"]:
                    self.puts = None
                self.plan = op.answer
                if self.rng.random() < 0.4:
                    self._again = "delete", self.topic, self._delete()
        elif op.kind == "publish" and op.status == 200:
            self.proposals.check(op)
            self.pool.server.counts["merges"] += len(op.answer["groups"])
            if self.rng.random() < 0.2:
                self._again = op.kind, op.topic, op.request  # as if there had been no answer
            else:
                self._forget()
        elif op.kind == "abandon":
            self._forget()

    def _unheard(self, op: Op) -> None:
        if op.kind == "publish" and self.rng.random() < 0.6:
            self._again = op.kind, op.topic, op.request
        elif self.rng.random() < 0.5:
            self._again = "plan", self.topic, self._request()

    def _pause_us(self, op: Op) -> int:
        rng, think = self.rng, self.pool.workload.think_us
        if rng.random() < 0.05:
            return rng.choice((300, 1500, 5000)) * MS  # longer than some leases
        if is_stopping(op):
            return RETRY_AFTER_US
        if self.plan is None or not op.ok:
            return rng.choice((5, 30, 150)) * MS
        return rng.choice((0, think // 4, think))


class SnapshotReader(Actor):
    """Pins a snapshot, and reads it from the cold disk some time later."""

    def __init__(self, pool: ClientPool, name: str, topics: list[str]) -> None:
        super().__init__(pool, name, begins_within_us=200 * MS)
        self.topics = topics
        self.topic = ""
        self.pin: Op | None = None
        self._until_us = self._powers = 0

    def go(self) -> None:
        """Not stopped by pauses: files can be read while no requests are sent."""
        pool = self.pool
        if pool.stopped:
            return
        if not pool.has_front:
            self.world.after(20 * MS, self.go)
            return
        if self.pin is not None:
            self._read(self.pin)
        self._send(self._next())

    def _next(self) -> NextRequest:
        rng = self.rng
        if self.pin is not None and rng.random() < 0.9:
            mine = {"snapshot_id": self.pin.answer["snapshot_id"]}
            if rng.random() < 0.7:
                return "renew_pin", self.topic, {**mine, "ttl_ms": rng.choice((8000, 60_000))}
            return "release", self.topic, mine
        self.topic = choose(self.pool, self.topics)
        return "pin", self.topic, {"ttl_ms": rng.choice((1000, 60_000, 60_000))}

    def on_answer(self, op: Op) -> None:
        if op.ok and op.kind in ("pin", "renew_pin"):  # a renewal may shorten it
            self.pin = op if op.kind == "pin" else self.pin
            self._until_us = self.world.now_us + op.request["ttl_ms"] * MS * 8 // 10
            self._powers = self._power_cuts()
        else:
            self.pin = None
        pause_us = (
            self.rng.choice((5, 100, 400, 1500)) if self.pin is not None else self.rng.choice((20, 100))
        )
        self.world.after(pause_us * MS, self.go)

    def _read(self, pin: Op) -> None:
        machine = self.pool.server.machine
        shard = shard_of(self.topic, self.pool.server.shards)
        lost_us = AHEAD_MS * MS * (self._power_cuts() - self._powers)
        if self.world.now_us + lost_us > self._until_us or shard in machine.away:
            return
        store = JobStore(machine, shard, self.name)
        try:
            records = store.do(lambda: list(_listed(store, pin.answer)))
        except FileNotFoundError as missing:
            assert self._may_be_gone(pin), f"{missing} was pinned: {pin}"
            return
        except (Corrupt, Damaged) as damage:
            # An erase that a crash interrupted continues in a segment that is hot again: its copy is made anew, under
            # the same name.
            assert self._happened("rot") or self._may_be_gone(pin), f"no damage was injected: {damage} {pin}"
            return
        answer = {"topic": self.topic, "records": records}
        answer |= {"first_seq": pin.answer["earliest_seq"], "next_seq": pin.answer["cold_next_seq"]}
        read = Op(
            self.name, "scan", self.topic, {}, pin.sent_at, pin.answered_at, 200, answer, pin.answered_at
        )
        self.pool.history.ops.append(read)
        self.pool.server.counts["scans"] += 1

    def _may_be_gone(self, pin: Op) -> bool:
        """Erases and drops ignore pins; setting the clock ends them."""
        changes = (op for op in self.pool.history.ops if op.topic == self.topic and op.sent_at > pin.sent_at)
        before = (
            op
            for op in self.pool.history.ops
            if op.topic == self.topic and (op.settled_at or 1 << 62) > pin.sent_at
        )
        gone = any(op.kind == "drop" or op.request.get("erase") for op in (*changes, *before))
        return gone or self._happened("clock")

    def _power_cuts(self) -> int:
        return self.pool.server.counts["power cuts"]

    def _happened(self, kind: str) -> bool:
        events = self.pool.history.events
        return any(event.kind == kind for event in events)


def choose(pool: ClientPool, topics: list[str]) -> str:
    """A topic that has something to merge, as far as clients know."""
    long = [topic for topic in topics if pool.heads.get(topic, 0) > MERGED_RECORDS]
    return pool.rng.choice(long or topics)


def _listed(store: JobStore, pin: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """The records of a manifest without its dead rows."""
    directory, number = f"topics/{pin['topic_id']}", pin["manifest"]
    manifest = decode_manifest(pin["path"], store.whole(f"{directory}/{manifest_name(number)}"))
    dead_key = f"{directory}/{dead_name(number)}"
    dead = decode_dead(dead_key, store.whole(dead_key), manifest.segments) if store.exists(dead_key) else {}
    reader = Merger(store, pin)
    for segment in manifest.segments:
        rows, _, _, content = reader._input(msgspec.structs.asdict(segment))
        mask = dead.get(segment.first_seq, np.zeros(len(rows), np.bool_))
        for row, is_dead in zip(rows, mask, strict=True):
            if row["length"] and not is_dead:
                yield from frames(content[int(row["offset"]) : int(row["offset"]) + int(row["length"])])


# -- end of the run ------------------------------------------------------------------------------------------


def check_tidy(
    disk: SimDisk, directories: dict[str, set[tuple[int, int]]], losses: dict[str, list[tuple[int, int, str]]]
) -> None:
    """Nothing is left of plans, pins and old segments after their time. `directories`: the cold files of each topic.
    Files of a segment whose marks are damaged are kept, because the lost records may be recoverable.
    """
    for path in disk.paths():
        assert not path.startswith("staging/plans/"), f"{path} belongs to a plan that is over"
        if not path.startswith("topics/"):
            continue
        directory, _, name = path.rpartition("/")
        assert directory in directories, f"{path} belongs to a topic that does not exist"
        parsed = parse_segment_name(name)
        if parsed is not None:
            is_kept = any(first <= parsed[0] <= last for first, last, _ in losses[directory])
            assert is_kept or (parsed[0], parsed[1]) in directories[directory], f"{path} is an orphan"
        else:
            assert is_manifest_file(name) and pin_id(name) is None, f"{path} belongs to a pin that is over"


_PATHS = {
    "plan": "consolidation", "merges": "consolidation", "renew": "consolidation/{plan_id}/renew",
    "publish": "consolidation/{plan_id}/commit", "abandon": "consolidation/{plan_id}/abandon", "pin": "snapshots",
    "renew_pin": "snapshots/{snapshot_id}/renew", "release": "snapshots/{snapshot_id}",
}  # fmt: skip
_METHODS = {"merges": b"GET", "release": b"DELETE"}
_IN_PATH = ("plan_id", "snapshot_id")


def make_call(kind: str, topic: str, request: dict[str, Any]) -> Request:
    path = f"/v0/topics/{topic}/{_PATHS[kind].format(**request)}"
    method = _METHODS.get(kind, b"POST")
    body = {name: value for name, value in request.items() if name not in _IN_PATH}
    return json_request(method, path, body if method == b"POST" else None)
