"""Forwards between shards of a `Cluster`: writes, copies, and reads that wait for copies."""

from __future__ import annotations

import itertools
import json
from typing import Any

from tests.support.shard_answers import ShardAnswer
from tests.support.shard_rig import Cluster, WireMessage
from tests.support.sim_disk import SimDisk
from topics.api.limits import KIB, MIB
from topics.engine.commands import forwards as fwd
from topics.engine.core.placement import shard_of
from topics.link import wire
from workers.forward import messages as forward_messages
from workers.forward.forwarder import PAUSE_MS_MAX

SHARDS = 2


def name_on(shard: int, stem: str, shards: int = SHARDS) -> str:
    """A topic name that is placed on this shard."""
    return next(name for name in (f"{stem}{i}" for i in itertools.count()) if shard_of(name, shards) == shard)


def cluster(disks: list[SimDisk] | None = None, *, shards: int = SHARDS, **limits: int) -> Cluster:
    """Shards without total caps unless the test sets some: a write is then acked by its own shard alone."""
    settings = {"max_topics": 0, "max_total_bytes": 0, "wal_file_bytes": 64 * KIB} | limits
    return Cluster(shards, disks, **settings)


def home(made: Cluster, topic: str) -> int:
    return shard_of(topic, len(made.rigs))


def ask(made: Cluster, op: int, topic: str, body: Any = b"") -> ShardAnswer:
    reply = made.ask(home(made, topic), op, topic, body)
    assert reply is not None, "not answered"
    return reply


def step(made: Cluster, shard: int, command: forward_messages.Step) -> forward_messages.StepDone:
    reply = made.ask(shard, wire.FORWARD_STEP, "", forward_messages.encode_step(command))
    assert reply is not None and reply.status == 200, reply
    return forward_messages.read_step_done(reply.body)


def forward(
    made: Cluster,
    source: str,
    dest: str,
    *,
    name: str = "rule",
    filter: tuple[tuple[str, str], ...] = (),
    **fields: Any,
) -> fwd.Forward:
    """Create a router with the requests that a client would send."""
    body = {"source": source, "dest": dest, **fields}
    if filter:
        body["filter"] = [["tag", op, value] for op, value in filter]
    reply = ask_catalog(made, wire.PUT_FORWARD, name, body)
    assert reply.status in (200, 201), bytes(reply.body)
    rules = made.rig(0).core.engine.shard.forwards.catalog.values()
    return next(rule for rule in rules if rule.name == name)


def ask_catalog(made: Cluster, op: int, name: str, body: Any = b"") -> ShardAnswer:
    rig = made.rig(0)
    key = rig.receive(op, "", body, args=wire.encode_args(wire.Args(forward=name)))
    made.rest()
    assert key in rig.replies, "not answered"
    return rig.replies[key]


def put(made: Cluster, topic: str, **config: Any) -> None:
    assert ask(made, wire.PUT_TOPIC, topic, config).status in (200, 201)


def records(texts: list[str], tag: str | None = None) -> dict[str, Any]:
    return {"records": [{"data": text} | ({"tag": tag} if tag is not None else {}) for text in texts]}


def write(made: Cluster, topic: str, texts: list[str], tag: str | None = None) -> None:
    """One write, which is acked; its consequences have not happened yet."""
    rig = made.rig(home(made, topic))
    key = rig.receive(wire.WRITE, topic, records(texts, tag))
    for _ in range(1000):
        if key in rig.replies:
            break
        if not rig.step():
            made.step()
    assert rig.replies[key].status in (200, 201), bytes(rig.replies[key].body)


def numbered(first: int, last: int) -> list[str]:
    return [f"record {i}" for i in range(first, last + 1)]


def page(made: Cluster, topic: str, from_seq: int = 0) -> dict[str, Any]:
    body = {"from_seq": from_seq, "max_batch_bytes": 8 * MIB, "limit": 1000}
    reply = ask(made, wire.DIFF, topic, body)
    assert reply.status == 200, bytes(reply.body)
    found: dict[str, Any] = json.loads(bytes(reply.body))
    return found


def texts(made: Cluster, topic: str) -> list[str]:
    """The data of the live records of a topic, in order. The read catches up."""
    found: list[str] = []
    from_seq = 0
    while True:
        read = page(made, topic, from_seq)
        found += [record["data"] for record in read["records"]]
        from_seq = read["next_from_seq"]
        if from_seq >= read["head_seq"]:
            return found


def stored(made: Cluster, topic: str) -> int:
    """How many records a topic holds now; the read does not catch up."""
    log = made.rig(home(made, topic)).core.engine.shard.state.published.get(topic)
    return log.view.count if log is not None else 0


def settle(made: Cluster) -> None:
    """Do everything that can be done, including what waits for a pause to end."""
    for _ in range(4):
        made.rest()
        made.clock.advance(PAUSE_MS_MAX + 1)
    made.rest()


def copies_on_wires(made: Cluster, mark: bytes = b"record ") -> list[WireMessage]:
    made._collect()
    return [
        message
        for message in made.wires
        if message.answer_to is None and mark in b"".join(map(bytes, message.parts))
    ]
