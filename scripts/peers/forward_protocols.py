"""Forwarding in each system: setup, writes, and counting of copies.

| | copies | made by |
|---|---|---|
| topics | a router per destination | the server, after the ack |
| NATS | a stream per destination, with the source among its `sources` | the server, after the ack |
| Redis | not supported. The writer adds each record to the source and all destinations in one MULTI/EXEC, as its users do | the writer, before the ack |

Each set of destinations has its own source, and all names contain the number of destinations.
"""

from __future__ import annotations

import json
from typing import Any

from peers import protocols
from peers.protocols import BadAnswer, Exchange
from peers.systems import Redis, Target, Topics

PAGE_SIZE = 1000  # routers per response; there are no more


def source_of(dests: int) -> str:
    return f"source-{dests}"


def dests_of(dests: int) -> list[str]:
    return [f"dest-{dests}-{i:04}" for i in range(dests)]


def make(target: Target, dests: int) -> None:
    source = source_of(dests)
    target.make(source)
    if isinstance(target, Topics):
        for dest in dests_of(dests):
            make_router(target, source, dest)
    elif not isinstance(target, Redis):
        for dest in dests_of(dests):
            stream = {"name": dest, "storage": "file", "num_replicas": 1, "sources": [{"name": source}]}
            protocols.nats_ask(target.address, f"$JS.API.STREAM.CREATE.{dest}", stream)


def make_router(target: Topics, source: str, dest: str) -> None:
    """Destinations created by a router have durability `disk`, as measured here."""
    status, _, text = target.server.call("PUT", f"/v0/routers/{dest}", {"source": source, "dest": dest})
    if status not in {200, 201}:
        raise BadAnswer(text)


def clear(target: Target, dests: int) -> None:
    """Delete the source first, and its routers with it, so that nothing is copied when destinations are deleted."""
    if isinstance(target, Redis):
        for dest in dests_of(dests):
            protocols.ask(target.address, Exchange("resp", protocols.redis_command(b"DEL", dest.encode())))
        target.clear(source_of(dests))  # this also compacts Redis's log
        return
    for stream in (source_of(dests), *dests_of(dests)):
        target.clear(stream)


def write(target: Target, payload: bytes, count: int, dests: int) -> Exchange:
    source = source_of(dests)
    if isinstance(target, Redis) and dests:
        return redis_write(payload, count, (source, *dests_of(dests)))
    return target.write(payload, count, source)


def redis_write(payload: bytes, count: int, streams: tuple[str, ...]) -> Exchange:
    """One transaction per record. Its replies: OK, one for each command that is queued, and the array of the results."""
    adds = [protocols.redis_command(b"XADD", stream.encode(), b"*", b"d", payload) for stream in streams]
    one = b"".join((protocols.redis_command(b"MULTI"), *adds, protocols.redis_command(b"EXEC")))
    return Exchange("resp", one * count, count, (2 + len(streams)) * count)


def lengths(target: Target, dests: int) -> tuple[int, list[int]]:
    """The number of records in the source, and of copies in each destination, without forcing forwarding to catch up."""
    source = source_of(dests)
    if isinstance(target, Topics):
        head = _json_of(target, f"/v0/topics/{source}")["head_seq"]
        rows = (
            _json_of(target, f"/v0/routers?source={source}&page_size={PAGE_SIZE}")["routers"] if dests else []
        )
        return head, [row["forwarded_total"] for row in rows]
    if isinstance(target, Redis):
        streams = (source, *dests_of(dests))
        asked = b"".join([protocols.redis_command(b"XLEN", stream.encode()) for stream in streams])
        answer = protocols.ask(target.address, Exchange("resp", asked, replies=len(streams)))
        head, *found = (int(line[1:]) for line in answer.split())
        return head, found
    answer = protocols.nats_ask(target.address, "$JS.API.STREAM.LIST", {"offset": 0})
    streams = json.loads(answer.partition(b"\r\n")[2])["streams"]
    messages = {one["config"]["name"]: int(one["state"]["messages"]) for one in streams}
    return messages[source], [messages[dest] for dest in dests_of(dests)]


def _json_of(target: Topics, path: str) -> dict[str, Any]:
    status, _, text = target.server.call("GET", path)
    if status != 200:
        raise BadAnswer(text)
    found: dict[str, Any] = json.loads(text)
    return found
