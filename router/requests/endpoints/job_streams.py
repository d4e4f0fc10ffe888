"""Streams of jobs: `/work` of a queue and `/stream` of a consumer are opened at the topic's shard, which pushes from there on."""

from __future__ import annotations

from collections.abc import Callable

from router.requests.call import Call, from_reply
from router.requests.endpoints.watch import (
    OPEN_RETRY_US,
    OPEN_WAIT_US,
    RefusedStream,
    accepts_stream,
    no_place,
    raise_not_acceptable,
)
from router.watch.job_stream import JobEventStream
from topics.api import limits
from topics.api.errors import InvalidRequest
from topics.engine.commands.consumers import QUEUE
from topics.link import wire
from topics.link.job_streams import (
    MAX_MAX,
    MAX_MIN,
    STREAM_MAX_DEFAULT,
    WORK_MAX_DEFAULT,
    JobStreamOptions,
    encode,
)
from topics.protocols.http import sse
from topics.protocols.http.exchange import Respond, Response
from topics.protocols.http.query import number, parse_query

LEASE_MS_MIN, LEASE_MS_MAX = 100, 86_400_000


def work(call: Call, respond: Respond) -> None:
    """GET /v0/topics/:q/work"""
    _open(call, respond, QUEUE, WORK_MAX_DEFAULT)


def stream(call: Call, respond: Respond) -> None:
    """GET /v0/topics/:t/consumers/:c/stream"""
    _open(call, respond, call.consumer.decode("utf-8", "replace"), STREAM_MAX_DEFAULT)


def _open(call: Call, respond: Respond, consumer: str, max_default: int) -> None:
    if not accepts_stream(call.request.accept):
        raise_not_acceptable(respond)
        return
    wish = _wish(call, consumer, max_default)
    leave = None if call.request.method == b"HEAD" else call.services.desk.take_place(call.key)
    opening = JobStreamOpening(call, respond, wish, leave)
    if leave is not None:
        before = call.request.release
        call.request.release = lambda: (before(), opening.client_left())  # type: ignore[assignment, func-returns-value]
    opening.ask()


def _wish(call: Call, consumer: str, max_default: int) -> JobStreamOptions:
    pairs = parse_query(call.request.query)
    node = pairs.get("node", "")
    if not 0 < len(node.encode()) <= limits.NODE_BYTES_MAX:
        raise InvalidRequest(f"say who works: ?node= has 1 to {limits.NODE_BYTES_MAX} bytes")
    most = number(pairs, "max", max_default)
    lease_ms = number(pairs, "lease_ms", -1)
    return JobStreamOptions(
        consumer,
        node,
        min(max(most, MAX_MIN), MAX_MAX),
        min(max(lease_ms, LEASE_MS_MIN), LEASE_MS_MAX) if lease_ms >= 0 else 0,
    )


class JobStreamOpening:
    """A stream that is about to be opened: its shard is asked, until it can answer."""

    def __init__(
        self, call: Call, respond: Respond, wish: JobStreamOptions, leave: Callable[[], None] | None
    ) -> None:
        self._call = call
        self._respond = respond
        self._leave = leave  # gives its place under the caps back; None: it has none
        self._topic = call.topic.decode("utf-8", "replace")
        self._shard = call.services.desk.fanout.shard_of(self._topic)
        self._wish = encode(
            JobStreamOptions(wish.consumer, wish.node, wish.max, wish.lease_ms, check_only=leave is None)
        )
        self._number = 0  # of the WORK, and so of the stream
        self._gone = False
        self._give_up_us = call.services.now_us() + OPEN_WAIT_US

    def ask(self) -> None:
        if self._gone:
            return
        services = self._call.services
        self._number = 0
        self._number = services.core.send(
            self._shard,
            wire.OPEN_JOBS,
            0,
            self._call.topic,
            b"",
            self._wish,
            services.now_us(),
            self._answered,
        )

    def _answered(self, reply: wire.Reply) -> None:
        services = self._call.services
        if reply.status == 503 and self._number:  # it may have been opened, and its answer was given up
            services.desk.leave_jobs(self._shard, self._number)
        if reply.status == 503 and services.now_us() < self._give_up_us and not services.draining:
            if not self._gone:
                services.later(OPEN_RETRY_US, self.ask)
        elif reply.status == 503:
            self._finish(
                Response(200, b"", sse.CONTENT_TYPE, sse.HEAD, stream=RefusedStream(services.draining))
            )
        elif reply.status != 200:
            self._finish(from_reply(reply))
        elif self._gone:
            services.desk.leave_jobs(self._shard, self._number)
        elif services.draining:
            services.desk.leave_jobs(self._shard, self._number)
            self._finish(Response(200, b"", sse.CONTENT_TYPE, sse.HEAD, stream=RefusedStream(stopping=True)))
        elif self._call.request.method == b"HEAD":
            # A stream, so that it is not said to be empty; nothing of it is sent.
            self._finish(
                Response(200, b"", sse.CONTENT_TYPE, sse.HEAD, stream=RefusedStream(services.draining))
            )
        elif self._leave is None:
            self._finish(no_place(self._call))
        else:
            self._open()

    def _open(self) -> None:
        assert self._leave is not None
        desk = self._call.services.desk
        opened = JobEventStream(desk, self._shard, self._number, self._topic, self._leave)
        self._leave = None
        desk.expect_jobs(opened)
        self._respond(Response(200, b"", sse.CONTENT_TYPE, sse.HEAD, stream=opened))

    def _finish(self, response: Response) -> None:
        if self._leave is not None:
            self._leave()
        self._respond(response)

    def client_left(self) -> None:
        if self._leave is not None:
            self._gone = True
            self._leave()
