"""Queues in each system: setup, and the claim of a worker. The load generator makes the ack, with the ids it was given.

| | the queue | claim of 8 | ack of 8 |
|---|---|---|---|
| topics | a topic of type `queue` | POST …/claim with `wait_ms` | one POST …/ack |
| Redis | a stream with a consumer group | XREADGROUP COUNT 8 BLOCK | XACK and XDEL of all 8, in one pipeline |
| NATS | a work-queue stream, a durable pull consumer with explicit acks | a fetch with batch 8 | 8 acks in a row, each confirmed |

Redis: in the other two systems an ack removes the job. XACK alone leaves it in the stream, which would grow forever, so
XDEL is part of the work. NATS: an ack without a reply guarantees nothing, while the other two respond; so each ack
requests a reply. Claims wait for jobs in all systems, so that idle workers cost the same.
"""

from __future__ import annotations

import json

from peers import protocols
from peers.protocols import BadAnswer, Exchange
from peers.systems import Redis, Target, Topics

QUEUE = "jobs"
GROUP = "workers"
CLAIM_MAX = 8
WAIT_MS = 1000


def claim(protocol: str, queue: str = QUEUE) -> Exchange:
    """A claim of up to CLAIM_MAX jobs, which waits for the first."""
    worker = b"w" + protocols.CLIENT
    if protocol == "http":
        body = b'{"node":"%b","max":%d,"wait_ms":%d}' % (worker, CLAIM_MAX, WAIT_MS)
        request = protocols.http_post(f"/v0/topics/{queue}/claim", body)
    elif protocol == "resp":
        words = (b"COUNT", b"%d" % CLAIM_MAX, b"BLOCK", b"%d" % WAIT_MS, b"STREAMS", queue.encode(), b">")
        request = protocols.redis_command(b"XREADGROUP", b"GROUP", GROUP.encode(), worker, *words)
    else:
        body = b'{"batch":%d,"expires":%d}' % (CLAIM_MAX, WAIT_MS * 1_000_000)
        request = protocols.nats_publish(f"$JS.API.CONSUMER.MSG.NEXT.{queue}.{GROUP}", body)
    return Exchange(protocol, request, CLAIM_MAX)


def make(target: Target) -> None:
    """Create an empty queue; `target.clear` deletes it."""
    if isinstance(target, Topics):
        make_topics(target)
    elif isinstance(target, Redis):
        words = (b"XGROUP", b"CREATE", QUEUE.encode(), GROUP.encode(), b"$", b"MKSTREAM")
        protocols.ask(target.address, Exchange("resp", protocols.redis_command(*words)))
    else:
        _make_nats(target.address)


def make_topics(target: Topics, queue: str = QUEUE) -> None:
    config = {"type": "queue", "durability": target.durability}
    status, _, text = target.server.call("PUT", f"/v0/topics/{queue}", config)
    if status not in {200, 201}:
        raise BadAnswer(text)


def _make_nats(address: str) -> None:
    stream = {
        "name": QUEUE,
        "subjects": [f"{QUEUE}.>"],
        "storage": "file",
        "retention": "workqueue",
        "num_replicas": 1,
    }
    protocols.nats_ask(address, f"$JS.API.STREAM.CREATE.{QUEUE}", stream)
    consumer = {"durable_name": GROUP, "ack_policy": "explicit", "ack_wait": 30_000_000_000}
    body = {"stream_name": QUEUE, "config": consumer}
    protocols.nats_ask(address, f"$JS.API.CONSUMER.DURABLE.CREATE.{QUEUE}.{GROUP}", body)


def left(target: Target) -> int:
    """Number of jobs in the system, queued or in flight."""
    if isinstance(target, Topics):
        return int(json.loads(target.server.call("GET", f"/v0/topics/{QUEUE}")[2])["count"])
    if isinstance(target, Redis):
        length = protocols.redis_command(b"XLEN", QUEUE.encode())
        return int(protocols.ask(target.address, Exchange("resp", length))[1:])
    answer = protocols.nats_ask(target.address, f"$JS.API.STREAM.INFO.{QUEUE}", None)
    state = json.loads(answer.partition(b"\r\n")[2])["state"]
    return int(state["messages"])
