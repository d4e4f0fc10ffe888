"""Routers on several shards without processes: requests as a front sends them, and checks of the parts on each shard."""

from __future__ import annotations

import itertools
import json
from typing import Any

from tests.support.shard_answers import ShardAnswer
from tests.support.shard_rig import Cluster, Rig
from topics.engine.core.placement import shard_of
from topics.link import wire
from workers.forward.messages import digest_of

Key = tuple[bytes, int]
SHARDS = 2


def name_on(shard: int, stem: str, shards: int = SHARDS) -> str:
    """A topic name that is placed on this shard."""
    return next(name for name in (f"{stem}{i}" for i in itertools.count()) if shard_of(name, shards) == shard)


def args_of(name: str = "", **fields: Any) -> bytes:
    return wire.encode_args(wire.Args(forward=name, **fields))


def begin_put(made: Cluster, name: str, source: str, dest: str, **fields: Any) -> Key:
    """The request is handed in at the catalog's shard, and nothing else happens yet."""
    body = {"source": source, "dest": dest, **fields}
    return made.rig(0).receive(wire.PUT_FORWARD, "", body, args=args_of(name))


def put(made: Cluster, name: str, source: str, dest: str, **fields: Any) -> ShardAnswer:
    body = {"source": source, "dest": dest, **fields}
    return asked(made, wire.PUT_FORWARD, args_of(name), body)


def drop(made: Cluster, name: str) -> ShardAnswer:
    return asked(made, wire.DROP_FORWARD, args_of(name))


def get(made: Cluster, name: str) -> ShardAnswer:
    return asked(made, wire.GET_FORWARD, args_of(name))


def names(made: Cluster, **fields: Any) -> list[str]:
    reply = asked(made, wire.LIST_FORWARDS, args_of(page_size=1000, **fields))
    return [row["router"] for row in body_of(reply)["routers"]]


def asked(made: Cluster, op: int, args: bytes, body: Any = b"") -> ShardAnswer:
    """The answer; retried for some time while a worker is down."""
    rig = made.rig(0)
    key = rig.receive(op, "", body, args=args)
    for _ in range(50):
        made.rest()
        if key in rig.replies:
            return rig.replies[key]
        made.clock.advance(50)
    raise AssertionError("not answered")


def body_of(reply: ShardAnswer, status: int = 200) -> dict[str, Any]:
    assert reply.status == status, (reply.status, bytes(reply.body))
    body: dict[str, Any] = json.loads(bytes(reply.body))
    return body


def settle(made: Cluster) -> None:
    """Do everything that can be done, including what waits for a pause to end."""
    for _ in range(8):
        made.rest()
        made.clock.advance(1_000)
    made.rest()


def topics(made: Cluster) -> list[str]:
    return sorted(
        name for shard in range(len(made.rigs)) for name in made.rig(shard).core.engine.shard.state.published
    )


def rules(made: Cluster) -> list[str]:
    """The catalog's rules, after a check that the shards have all parts of them and of nothing else."""
    shards = [made.rig(shard).core.engine.shard for shard in range(len(made.rigs))]
    count = len(shards)
    found = list(shards[0].forwards.catalog.values())
    inflows: set[tuple[int, str, int]] = set()
    outflows: set[tuple[int, int, int]] = set()
    for rule in found:
        assert rule.state == "active", rule
        inflows.add((shard_of(rule.dest, count), rule.dest, rule.uid))
        sources = range(count) if rule.is_pattern else [shard_of(rule.source, count)]
        outflows |= {(shard, rule.uid, digest_of(rule)) for shard in sources}
    assert inflows == {
        (i, log.name, uid)
        for i, shard in enumerate(shards)
        for log in shard.state.published.values()
        for uid in log.inflows or ()
    }
    assert outflows == {
        (i, uid, digest_of(outflow.forward))
        for i, shard in enumerate(shards)
        for uid, outflow in shard.forwards.outflows.items()
    }
    desk = made.rig(0).core.rules
    assert desk is not None
    assert {rule.uid: rule for rule in desk.book} == shards[0].forwards.catalog
    return sorted(rule.name for rule in found)


def reply_to(rig: Rig, key: Key) -> ShardAnswer | None:
    return rig.replies.get(key)
