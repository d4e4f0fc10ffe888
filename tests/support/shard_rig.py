"""Shards behind the wire without processes: real ShardCores on simulated disks, and the messages between them by hand.

`Rig` is one shard and whatever fronts a test makes up. `Cluster` is several, whose catalog messages wait in `wires`
until they are carried, so that a test decides what is lost and what comes late.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from tests.support.engine_harness import SMALL
from tests.support.sim_clock import SimClock
from tests.support.sim_disk import SimDisk
from topics import wire
from topics.engine.config import EngineConfig
from topics.engine.engine import Engine, Job
from workers.caps import Caps
from workers.metrics import ShardMetrics
from workers.shard_core import Actions, ShardCore

FRONT = b"front"
WORKER = b"worker-"  # peers that are other shards of a cluster: worker-1


class Rig:
    """One shard. Replies are kept by peer and id, each of which may come only once."""

    def __init__(
        self,
        config: EngineConfig = SMALL,
        *,
        shards: int = 1,
        incarnation: int = 1,
        clock: SimClock | None = None,
        disk: SimDisk | None = None,
        recovered: bool = True,
    ) -> None:
        self.config = config
        self.clock = clock or SimClock()
        self.disk = disk or SimDisk(config.shard + 1)
        self.incarnation = incarnation
        engine = Engine(self.disk, self.clock, config)
        self.caps = Caps(
            engine, shard=config.shard, shards=shards, incarnation=incarnation, now_us=self.now_us
        )
        self.core = ShardCore(
            engine,
            self.caps,
            ShardMetrics(engine, lambda: 0),
            incarnation=incarnation,
            now_us=self.now_us,
            disk=self.disk,
        )
        self.takes = True  # fronts tell that they have taken their answers
        self.jobs: list[Job] = []
        self.wake_at_ms: int | None = None
        self.replies: dict[tuple[bytes, int], wire.Reply] = {}
        self.order: list[tuple[bytes, int]] = []
        self.pushes: list[tuple[bytes, bytes]] = []  # to other shards
        self._numbers = itertools.count(1)
        if recovered:
            self.recover()

    def now_us(self) -> int:
        return self.clock.monotonic_ms() * 1000

    def recover(self) -> None:
        for progress in self.core.engine.recover_steps():
            self.core.progress = min(progress, 0.9999)
        self.core.progress = 1.0
        self.core.start()
        self.turn()

    # -- in ------------------------------------------------------------------------------------------------

    def receive(
        self,
        op: int,
        topic: str = "t",
        body: Any = b"",
        *,
        peer: bytes = FRONT,
        args: bytes = b"",
        received_us: int | None = None,
        incarnation: int | None = None,
    ) -> tuple[bytes, int]:
        """Hand in one request; returns the key of its reply."""
        number = next(self._numbers)
        text = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
        at_us = self.now_us() if received_us is None else received_us
        head = wire.request_head(number, at_us, 30_000, op, 0, topic.encode(), args, len(text))
        self.core.receive(peer, wire.message_head(incarnation or self.incarnation) + head + text)
        return peer, number

    def turn(self) -> None:
        self._take(self.core.turn())

    def rest(self) -> None:
        """Turns and jobs until nothing is due."""
        self._take(self.core.idle())
        for _ in range(1000):
            if self.jobs:
                job = self.jobs.pop(0)
                job.run()
                self._take(self.core.finish(job, None, 0.0))
            elif self.core.has_requests or self._is_due():
                self.turn()
            else:
                return
        raise AssertionError("the shard never comes to rest")

    def _is_due(self) -> bool:
        return self.wake_at_ms is not None and self.wake_at_ms <= self.clock.monotonic_ms()

    def ask(self, op: int, topic: str = "t", body: Any = b"", **options: Any) -> wire.Reply | None:
        """One request and all that follows from it; None while it is parked."""
        key = self.receive(op, topic, body, **options)
        self.rest()
        return self.replies.get(key)

    # -- out -----------------------------------------------------------------------------------------------

    def _take(self, actions: Actions) -> None:
        self.jobs += actions.jobs
        self.wake_at_ms = actions.wake_at_ms
        self.send(actions)

    def send(self, actions: Actions) -> None:
        for peer, parts in actions.sends:
            if peer.startswith(WORKER):
                self.pushes.append((peer, bytes(parts[0])))
            else:
                self._keep(peer, parts)

    def _keep(self, peer: bytes, parts: list[wire.Buffer]) -> None:
        head = bytes(parts[0])
        assert wire.read_message_head(head) == self.incarnation
        for reply in wire.read_replies(head, *parts[1:]):
            key = (peer, reply.id)
            assert key not in self.replies, f"a second reply to {key}"
            self.replies[key] = reply
            self.order.append(key)
        taken = wire.taken_item(sum(map(len, parts)))
        if self.takes:
            self.core.receive(peer, wire.message_head(self.incarnation) + taken)


def error_of(reply: wire.Reply | None) -> dict[str, Any]:
    assert reply is not None, "not answered"
    return json.loads(bytes(reply.body))["error"]


class Cluster:
    """Shards that share caps; shard 0 has the catalog."""

    def __init__(self, shards: int, **limits: int) -> None:
        self.clock = SimClock()
        self.config = msgspec.structs.replace(SMALL, **limits)
        self.rigs: list[Rig | None] = [None] * shards
        self.disks = [SimDisk(shard + 1) for shard in range(shards)]
        self.wires: deque[tuple[int, int, bytes]] = deque()  # from, to, message
        self._incarnations = itertools.count(1)
        for shard in range(shards):
            self.start(shard)

    def start(self, shard: int) -> Rig:
        config = msgspec.structs.replace(self.config, shard=shard, shard_dir=f"layout-1/shard-{shard:02}")
        rig = Rig(
            config,
            shards=len(self.rigs),
            incarnation=next(self._incarnations),
            clock=self.clock,
            disk=self.disks[shard],
        )
        self.rigs[shard] = rig
        if shard:
            self._meet_catalog(rig)
        else:
            for other in filter(None, self.rigs[1:]):
                self._meet_catalog(other)
        return rig

    def _meet_catalog(self, rig: Rig) -> None:
        if self.rigs[0] is not None:
            rig.core.set_peers({0: self.rigs[0].incarnation})
            self._collect()

    def kill(self, shard: int) -> None:
        """The process ends; the others hear of it at once."""
        rig = self.lose(shard)
        if shard == 0:
            for other in filter(None, self.rigs[1:]):
                other.core.set_peers({})
        elif self.rigs[0] is not None:
            self.rigs[0].caps.shard_down(shard, rig.incarnation)
            self._collect()

    def lose(self, shard: int) -> Rig:
        """The process ends, and nobody has heard of it."""
        rig = self.rigs[shard]
        assert rig is not None
        self.rigs[shard] = None
        self.disks[shard].kill()
        self.wires = deque(w for w in self.wires if w[1] != shard)
        return rig

    def rig(self, shard: int) -> Rig:
        rig = self.rigs[shard]
        assert rig is not None
        return rig

    # -- messages ------------------------------------------------------------------------------------------

    def _living(self) -> Iterable[tuple[int, Rig]]:
        return [(shard, rig) for shard, rig in enumerate(self.rigs) if rig is not None]

    def _collect(self) -> None:
        """Put on the wires what the shards have to say."""
        for shard, rig in self._living():
            rig._take(rig.core.idle())
            if shard and self.rigs[0] is not None:
                for message in rig.core.reports():
                    self.wires.append((shard, 0, message))
            for peer, message in rig.pushes:
                name = peer.removeprefix(WORKER)
                if name.isdigit():  # else it is a socket of a worker that is gone
                    self.wires.append((0, int(name), message))
            rig.pushes = []

    def carry(self) -> bool:
        """One message reaches its end; False when there is none."""
        self._collect()
        if not self.wires:
            return False
        source, target, message = self.wires.popleft()
        rig = self.rigs[target]
        if rig is not None:
            if target == 0:
                rig.core.receive(WORKER + b"%d" % source, message)
            else:
                rig.core.receive_push(message)
        return True

    def rest(self) -> None:
        """Carry and turn until all is quiet."""
        for _ in range(10_000):
            for _, rig in self._living():
                rig.rest()
            if not self.carry():
                return
        raise AssertionError("the shards never come to rest")

    def ask(self, shard: int, op: int, topic: str, body: Any = b"") -> wire.Reply | None:
        rig = self.rig(shard)
        key = rig.receive(op, topic, body)
        self.rest()
        return rig.replies.get(key)

    def used(self) -> tuple[int, int]:
        shards = [rig.core.engine.shard for _, rig in self._living()]
        return sum(len(shard.staged) for shard in shards), sum(shard.bytes_live for shard in shards)
