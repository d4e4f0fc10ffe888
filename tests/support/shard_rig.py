"""Shards without processes: real ShardCores on simulated disks; the test carries the messages between them.

`Rig` is one shard, with as many fronts as a test wants. `Cluster` is several shards, whose messages to each other
wait in `wires` until they are carried, so a test decides what is lost or late.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from tests.support.engine_harness import SMALL
from tests.support.shard_answers import ShardAnswer, as_answer
from tests.support.sim_clock import SimClock
from tests.support.sim_disk import SimDisk
from topics.api.config import EngineConfig
from topics.engine.core.ports import SegmentStore
from topics.engine.runtime.engine import Engine, Job
from topics.link import wire
from workers.peers.links import Message
from workers.shard.caps import Caps
from workers.shard.core import FROM_WORKERS, Actions, ShardCore
from workers.shard.metrics import ShardMetrics

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
        max_forwards: int = 0,
        cold: SegmentStore | None = None,
    ) -> None:
        self.config = config
        self.clock = clock or SimClock()
        self.disk = disk or SimDisk(config.shard + 1)
        self.incarnation = incarnation
        engine = Engine(self.disk, self.clock, config, cold)
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
            shards=shards,
            max_forwards=max_forwards,
        )
        self.takes = True  # fronts acknowledge the answers they have received
        self.jobs: list[Job] = []
        self.wake_at_ms: int | None = None
        self.replies: dict[tuple[bytes, int], ShardAnswer] = {}
        self.order: list[tuple[bytes, int]] = []
        self.answers: list[tuple[bytes, list[wire.Buffer]]] = []  # to other shards, and pushes
        self.asks: list[Message] = []  # to other shards
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
        encoding: int | None = None,
    ) -> tuple[bytes, int]:
        """Hand in one request; returns the key of its reply."""
        number = next(self._numbers)
        text = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
        at_us = self.now_us() if received_us is None else received_us
        if encoding is None:
            encoding = wire.MSGPACK if op in FROM_WORKERS else wire.JSON
        head = wire.request_head(number, at_us, 30_000, op, 0, topic.encode(), args, len(text), encoding)
        self.core.receive(peer, wire.message_head(incarnation or self.incarnation) + head + text)
        return peer, number

    def turn(self) -> None:
        self._take(self.core.turn())

    def rest(self) -> None:
        """Run turns and jobs until nothing is due."""
        self._take(self.core.tend())
        for _ in range(1000):
            if not self.step():
                return
        raise AssertionError("the shard always has more work to do")

    def step(self) -> bool:
        """One job, or one turn; False when nothing is due."""
        if self.jobs:
            job = self.jobs.pop(0)
            error: Exception | None = None
            try:
                job.run()
            except OSError as failure:
                error = failure
            self._take(self.core.finish(job, error, 0.0))
        elif self.core.has_large:
            self.core.read_large()
        elif self.core.needs_turn or self.core.has_copies or self._is_due():
            self.turn()
        else:
            return False
        return True

    def _is_due(self) -> bool:
        return self.wake_at_ms is not None and self.wake_at_ms <= self.clock.monotonic_ms()

    def ask(self, op: int, topic: str = "t", body: Any = b"", **options: Any) -> ShardAnswer | None:
        """One request and everything that follows from it; None while it is parked."""
        key = self.receive(op, topic, body, **options)
        self.rest()
        return self.replies.get(key)

    # -- out -----------------------------------------------------------------------------------------------

    def _take(self, actions: Actions) -> None:
        self._act(actions)
        if self.core.needs_tending:
            self._act(self.core.tend())

    def _act(self, actions: Actions) -> None:
        self.jobs += actions.jobs
        self.wake_at_ms = actions.wake_at_ms
        self.asks += actions.requests
        self.send(actions)

    def send(self, actions: Actions) -> None:
        for peer, parts in actions.sends:
            if peer.startswith(WORKER):
                self.answers.append((peer, parts))
            else:
                self._keep(peer, parts)

    def _keep(self, peer: bytes, parts: list[wire.Buffer]) -> None:
        head = bytes(parts[0])
        assert wire.read_message_head(head) == self.incarnation
        for reply in wire.read_replies(head, *parts[1:]):
            key = (peer, reply.id)
            assert key not in self.replies, f"a second reply to {key}"
            self.replies[key] = as_answer(reply)
            self.order.append(key)
        taken = wire.window_update(sum(map(len, parts)))
        if self.takes:
            self.core.receive(peer, wire.message_head(self.incarnation) + taken)


def error_of(reply: ShardAnswer | None) -> dict[str, Any]:
    assert reply is not None, "not answered"
    return json.loads(bytes(reply.body))["error"]


@dataclass(slots=True)
class WireMessage:
    """A message between two shards. An answer is for one incarnation; a request reaches whichever is running."""

    sender: bytes
    source: int
    target: int
    parts: list[wire.Buffer]
    answer_to: bytes | None = None


def name_of(rig: Rig) -> bytes:
    """The name of its sockets at other shards: each incarnation has its own."""
    return WORKER + b"%d-%d" % (rig.config.shard, rig.incarnation)


def shard_config(config: EngineConfig, shard: int) -> EngineConfig:
    return msgspec.structs.replace(config, shard=shard, shard_dir=f"layout-1/shard-{shard:02}")


class Cluster:
    """Shards with links to each other; shard 0 has the catalog."""

    def __init__(
        self,
        shards: int,
        disks: list[SimDisk] | None = None,
        *,
        max_forwards: int = 0,
        cold: SegmentStore | None = None,
        **limits: int,
    ) -> None:
        self.cold = cold
        self.max_forwards = max_forwards
        self.clock = SimClock()
        self.config = msgspec.structs.replace(SMALL, **limits)
        self.rigs: list[Rig | None] = [None] * shards
        self.disks = disks or [SimDisk(shard + 1) for shard in range(shards)]
        self.wires: deque[WireMessage] = deque()
        self._incarnations = itertools.count(1)
        for shard in range(shards):
            self.start(shard)

    def start(self, shard: int, *, heard: bool = True) -> Rig:
        """Start a new incarnation. The others learn of it at once, unless they are never to learn of it."""
        rig = Rig(
            shard_config(self.config, shard),
            shards=len(self.rigs),
            incarnation=next(self._incarnations),
            clock=self.clock,
            disk=self.disks[shard],
            max_forwards=self.max_forwards,
            cold=self.cold,
        )
        self.rigs[shard] = rig
        self._tell_peers([rig] if not heard else [other for _, other in self._living()])
        return rig

    def kill(self, shard: int) -> None:
        """The process ends; the others learn of it at once."""
        self.lose(shard)
        self._tell_peers([rig for _, rig in self._living()])

    def _tell_peers(self, rigs: list[Rig]) -> None:
        living = {shard: rig.incarnation for shard, rig in self._living()}
        for rig in rigs:
            rig.core.set_peers(living)
        self._collect()

    def lose(self, shard: int) -> Rig:
        """The process ends, and the others do not learn of it."""
        rig = self.rigs[shard]
        assert rig is not None
        self.rigs[shard] = None
        self.disks[shard].kill()
        self.wires = deque(message for message in self.wires if message.target != shard)
        return rig

    def cut_power(self) -> None:
        """All processes end, and unsynced data is lost or not."""
        for shard, _ in self._living():
            self.lose(shard)
            self.disks[shard].crash()
        self.wires.clear()
        self.clock = SimClock(self.clock.wall_ms())

    def rig(self, shard: int) -> Rig:
        rig = self.rigs[shard]
        assert rig is not None
        return rig

    # -- messages ------------------------------------------------------------------------------------------

    def _living(self) -> Iterable[tuple[int, Rig]]:
        return [(shard, rig) for shard, rig in enumerate(self.rigs) if rig is not None]

    def _collect(self) -> None:
        """Put outgoing messages of the shards on the wires."""
        for shard, rig in self._living():
            rig._take(rig.core.tend())
            sender = name_of(rig)
            asks, rig.asks = rig.asks, []
            self.wires += [WireMessage(sender, shard, target, parts) for target, parts in asks]
            answers, rig.answers = rig.answers, []
            for peer, parts in answers:
                target = int(peer.removeprefix(WORKER).split(b"-")[0])
                self.wires.append(WireMessage(sender, shard, target, parts, peer))

    def carry(self) -> bool:
        """Deliver one message; False when there is none."""
        self._collect()
        if not self.wires:
            return False
        message = self.wires.popleft()
        rig = self.rigs[message.target]
        first, *apart = message.parts
        if rig is not None and message.answer_to is None:
            rig.core.receive(message.sender, bytes(first), *apart)
        elif rig is not None and message.answer_to == name_of(rig):
            rig.core.receive_reply(message.source, bytes(first), *apart)
        return True

    def step(self) -> bool:
        """The next thing that is due: a job, a turn or a message; False when there is none."""
        self._collect()
        for _, rig in self._living():
            if rig.step():
                return True
        return self.carry()

    def rest(self) -> None:
        """Deliver messages and make turns until nothing is due."""
        for _ in range(10_000):
            for _, rig in self._living():
                rig.rest()
            if not self.carry():
                return
        raise AssertionError("the shards always have more work to do")

    def ask(self, shard: int, op: int, topic: str, body: Any = b"", args: bytes = b"") -> ShardAnswer | None:
        rig = self.rig(shard)
        key = rig.receive(op, topic, body, args=args)
        self.rest()
        return rig.replies.get(key)

    def used(self) -> tuple[int, int]:
        shards = [rig.core.engine.shard for _, rig in self._living()]
        return sum(len(shard.state.staged) for shard in shards), sum(
            shard.state.bytes_live for shard in shards
        )
