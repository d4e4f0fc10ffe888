"""Job streams: `/work` of a queue and `/stream` of a consumer. They are opened at the topic's shard, which then pushes jobs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

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
from topics.protocols.http.call import Call, from_reply
from topics.protocols.http.endpoints.watch import (
    OPEN_RETRY_US,
    OPEN_WAIT_US,
    RefusedStream,
    accepts_stream,
    no_capacity,
    respond_not_acceptable,
)
from topics.protocols.http.exchange import Respond, Response
from topics.protocols.http.job_stream import JobEventStream
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
        respond_not_acceptable(respond)
        return
    options = _options(call, consumer, max_default)
    release_slot = None if call.request.method == b"HEAD" else call.services.streams.reserve(call.key)
    opening = JobStreamOpening(call, respond, options, release_slot)
    if release_slot is not None:
        before = call.request.release
        call.request.release = lambda: (before(), opening.client_disconnected())  # type: ignore[assignment, func-returns-value]
    opening.ask()


def _options(call: Call, consumer: str, max_default: int) -> JobStreamOptions:
    pairs = parse_query(call.request.query)
    node = pairs.get("node", "")
    if not 0 < len(node.encode()) <= limits.NODE_BYTES_MAX:
        raise InvalidRequest(
            f"the query must have node, the name of the worker, of 1 to {limits.NODE_BYTES_MAX} bytes"
        )
    maximum = number(pairs, "max", max_default)
    lease_ms = number(pairs, "lease_ms", -1)
    return JobStreamOptions(
        consumer,
        node,
        min(max(maximum, MAX_MIN), MAX_MAX),
        min(max(lease_ms, LEASE_MS_MIN), LEASE_MS_MAX) if lease_ms >= 0 else 0,
    )


class JobStreamOpening:
    """Opens a job stream at its shard, and retries until the shard is ready."""

    def __init__(
        self, call: Call, respond: Respond, options: JobStreamOptions, release_slot: Callable[[], None] | None
    ) -> None:
        self._call = call
        self._respond = respond
        self._release_slot = release_slot  # None: no slot is reserved
        self._topic = call.topic.decode("utf-8", "replace")
        self._shard = call.services.shard_of(self._topic)
        self._options = encode(msgspec.structs.replace(options, check_only=release_slot is None))
        self._number = 0  # of the OPEN_JOBS, and so of the stream
        self._gone = False
        self._give_up_us = call.services.now_us() + OPEN_WAIT_US

    def ask(self) -> None:
        if self._gone:
            return
        services = self._call.services
        self._number = 0
        self._number = services.shards.ask(
            self._shard,
            wire.OPEN_JOBS,
            0,
            self._call.topic,
            b"",
            self._options,
            services.now_us(),
            self._replied,
            wire.EVENTS,
        )

    def _replied(self, reply: wire.Reply) -> None:
        services, is_unavailable = self._call.services, reply.error_code in wire.UNAVAILABLE
        if is_unavailable and self._number:  # it may have been opened although no reply came in time
            services.streams.close_job_stream(self._shard, self._number)
        if is_unavailable and services.now_us() < self._give_up_us and not services.draining:
            if not self._gone:
                services.later(OPEN_RETRY_US, self.ask)
        elif is_unavailable:
            self._finish(
                Response(200, b"", sse.CONTENT_TYPE, sse.HEAD, stream=RefusedStream(services.draining))
            )
        elif reply.code != wire.OK:
            self._finish(from_reply(reply))
        elif self._gone:
            services.streams.close_job_stream(self._shard, self._number)
        elif services.draining:
            services.streams.close_job_stream(self._shard, self._number)
            self._finish(Response(200, b"", sse.CONTENT_TYPE, sse.HEAD, stream=RefusedStream(stopping=True)))
        elif self._call.request.method == b"HEAD":
            # With a stream, so that there is no Content-Length; its body is not sent.
            self._finish(
                Response(200, b"", sse.CONTENT_TYPE, sse.HEAD, stream=RefusedStream(services.draining))
            )
        elif self._release_slot is None:
            self._finish(no_capacity(self._call))
        else:
            self._open()

    def _open(self) -> None:
        assert self._release_slot is not None
        streams = self._call.services.streams
        opened = JobEventStream(streams, self._shard, self._number, self._topic, self._release_slot)
        self._release_slot = None
        streams.add_job_stream(opened)
        self._respond(Response(200, b"", sse.CONTENT_TYPE, sse.HEAD, stream=opened))

    def _finish(self, response: Response) -> None:
        if self._release_slot is not None:
            self._release_slot()
        self._respond(response)

    def client_disconnected(self) -> None:
        if self._release_slot is not None:
            self._gone = True
            self._release_slot()
