"""Queues in each system: setup, requests of a worker, and parsing of responses.

| | the queue | claim of 8 | ack of 8 |
|---|---|---|---|
| topics | a topic of type `queue` | POST …/claim with `wait_ms` | one POST …/ack |
| Redis | a stream with a consumer group | XREADGROUP COUNT 8 BLOCK | XACK and XDEL of all 8, in one pipeline |
| NATS | a work-queue stream, a durable pull consumer with explicit acks | a fetch with batch 8 | 8 acks in a row, each confirmed |

Redis: in the other two systems an ack removes the job. XACK alone leaves it in the stream, which would grow forever, so
XDEL is part of the work. NATS: an ack without a reply guarantees nothing, while the other two respond; so each ack
requests a reply. Claims wait for jobs in all systems, so that idle workers cost the same.

A worker has one request in flight. `claimed` and `acked` get all data received since it was sent.
"""

from __future__ import annotations

import json
from typing import Protocol

from peers import protocols
from peers.protocols import BadAnswer, Exchange
from peers.systems import Redis, Target, Topics

QUEUE = "jobs"
GROUP = "workers"
CLAIM_MAX = 8
WAIT_MS = 1000

REDIS_QUEUE = b"$%d\r\n%b\r\n" % (len(QUEUE), QUEUE.encode())
REDIS_GROUP = b"$%d\r\n%b\r\n" % (len(GROUP), GROUP.encode())
# Start of a response to XREADGROUP; the number of its jobs follows.
REDIS_HEAD = b"*1\r\n*2\r\n" + REDIS_QUEUE + b"*"
REDIS_NOTHING = b"*-1\r\n"
REDIS_AFTER_ID = b"\r\n*2\r\n$1\r\nd\r\n"
REDIS_HEAD_LINES = 5
REDIS_JOB_LINES = 8
NATS_PING = b"PING\r\n"
NATS_END = b"\r\n\r\n\r\n"  # end of a message without contents, which is a status


class Calls(Protocol):
    def claim(self, worker: int) -> bytes: ...

    def claimed(self, came: bytes) -> list[bytes] | None:
        """The jobs, by the names that an ack needs; None: the response is incomplete."""

    def ack(self, worker: int, jobs: list[bytes]) -> bytes: ...

    def acked(self, came: bytes, jobs: int) -> bool:
        """False: the response is incomplete. Raises BadAnswer if fewer jobs were settled."""


class HttpCalls:
    def __init__(self, queue: str) -> None:
        self._path = f"/v0/topics/{queue}"

    def claim(self, worker: int) -> bytes:
        body = b'{"node":"w%05d","max":%d,"wait_ms":%d}' % (worker, CLAIM_MAX, WAIT_MS)
        return protocols.http_post(f"{self._path}/claim", body)

    def claimed(self, came: bytes) -> list[bytes] | None:
        if not http_complete(came):
            return None
        return [part[: part.index(b",")] for part in came.split(b'"$seq":')[1:]]

    def ack(self, worker: int, jobs: list[bytes]) -> bytes:
        body = b'{"node":"w%05d","seqs":[%b]}' % (worker, b",".join(jobs))
        return protocols.http_post(f"{self._path}/ack", body)

    def acked(self, came: bytes, jobs: int) -> bool:
        if not http_complete(came):
            return False
        if b'"acked":%d' % jobs not in came:
            raise BadAnswer(came[:500])
        return True


def http_complete(came: bytes) -> bool:
    end = came.find(b"\r\n\r\n")
    if end < 0:
        return False
    if not came.startswith(b"HTTP/1.1 2"):
        raise BadAnswer(came[:500])
    at = came.find(b"Content-Length: ", 0, end)
    return len(came) >= end + 4 + int(came[at + 16 : came.find(b"\r", at)])


class RedisCalls:
    def claim(self, worker: int) -> bytes:
        words = (b"COUNT", b"%d" % CLAIM_MAX, b"BLOCK", b"%d" % WAIT_MS, b"STREAMS", QUEUE.encode(), b">")
        return protocols.redis_command(b"XREADGROUP", b"GROUP", GROUP.encode(), b"w%05d" % worker, *words)

    def claimed(self, came: bytes) -> list[bytes] | None:
        if not came.startswith(REDIS_HEAD):
            if came == REDIS_NOTHING:
                return []
            if REDIS_HEAD.startswith(came) or REDIS_NOTHING.startswith(came):
                return None
            raise BadAnswer(came[:500])
        end = came.find(b"\r", len(REDIS_HEAD))
        if end < 0 or came.count(b"\n") < REDIS_HEAD_LINES + REDIS_JOB_LINES * int(
            came[len(REDIS_HEAD) : end]
        ):
            return None
        return [part[part.rindex(b"\n") + 1 :] for part in came.split(REDIS_AFTER_ID)[:-1]]

    def ack(self, worker: int, jobs: list[bytes]) -> bytes:
        """XACK and XDEL, with the same ids."""
        ids = b"".join([b"$%d\r\n%b\r\n" % (len(job), job) for job in jobs])
        settle = b"*%d\r\n$4\r\nXACK\r\n%b%b%b" % (3 + len(jobs), REDIS_QUEUE, REDIS_GROUP, ids)
        return settle + b"*%d\r\n$4\r\nXDEL\r\n%b%b" % (2 + len(jobs), REDIS_QUEUE, ids)

    def acked(self, came: bytes, jobs: int) -> bool:
        whole = b":%d\r\n" % jobs * 2
        if not whole.startswith(came):
            raise BadAnswer(came[:500])
        return came == whole


class NatsCalls:
    def claim(self, worker: int) -> bytes:
        body = b'{"batch":%d,"expires":%d}' % (CLAIM_MAX, WAIT_MS * 1_000_000)
        request = protocols.nats_publish(f"$JS.API.CONSUMER.MSG.NEXT.{QUEUE}.{GROUP}", body)
        return request.replace(protocols.CLIENT, b"%05d" % worker)

    def claimed(self, came: bytes) -> list[bytes] | None:
        """Two lines per job. A status ends a batch that was not filled in time."""
        if b"-ERR" in came:
            raise BadAnswer(came[:500])
        if b"NATS/1.0 " in came:
            if not came.replace(NATS_PING, b"").endswith(NATS_END):
                return None
            if b"NATS/1.0 408 " not in came:
                raise BadAnswer(came[-500:])
        elif nats_lines(came) < 2 * CLAIM_MAX:
            return None
        return [part[: part.index(b" ")] for part in came.split(b" $JS.ACK.")[1:]]

    def ack(self, worker: int, jobs: list[bytes]) -> bytes:
        return b"".join([b"PUB $JS.ACK.%b _INBOX.%05d 4\r\n+ACK\r\n" % (job, worker) for job in jobs])

    def acked(self, came: bytes, jobs: int) -> bool:
        """The confirmations are messages without contents."""
        lines = nats_lines(came)
        if b"-ERR" in came or b"NATS/1.0" in came or lines > 2 * jobs:
            raise BadAnswer(came[:500])
        return lines == 2 * jobs


def nats_lines(came: bytes) -> int:
    """Remove PINGs of the server. An incomplete line may be the start of one: then the response is incomplete."""
    return came.count(b"\n") - came.count(NATS_PING) if came.endswith(b"\r\n") else 0


def calls(protocol: str, queue: str = QUEUE) -> Calls:
    """Only topics is measured with several queues; peers have one."""
    if protocol == "http":
        return HttpCalls(queue)
    return RedisCalls() if protocol == "resp" else NatsCalls()


def make(target: Target) -> None:
    """Create an empty queue; `target.clear` deletes it."""
    if isinstance(target, Topics):
        make_topics(target)
    elif isinstance(target, Redis):
        words = (b"XGROUP", b"CREATE", QUEUE.encode(), GROUP.encode(), b"$", b"MKSTREAM")
        protocols.ask(target.address, Exchange("resp", protocols.redis_command(*words), lines=1))
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
        return int(protocols.ask(target.address, Exchange("resp", length, lines=1))[1:])
    answer = protocols.nats_ask(target.address, f"$JS.API.STREAM.INFO.{QUEUE}", None)
    state = json.loads(answer.partition(b"\r\n")[2])["state"]
    return int(state["messages"])
