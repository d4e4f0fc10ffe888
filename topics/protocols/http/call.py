"""Context of an endpoint call, and helpers to send requests to shards."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from topics.api.api_keys import ApiKey
from topics.api.errors import TopicsError
from topics.engine.core.placement import shard_of
from topics.link import wire
from topics.link.frame_page import decode_fields
from topics.protocols.http.errors import STATUS, error_body, error_head
from topics.protocols.http.exchange import Request, Respond, Response
from topics.protocols.http.ports import Later, Shards, Streams
from topics.protocols.json.replies import tombstone
from topics.protocols.json.unknown_fields import ignored_header
from topics.system.in_flight import InFlightTable
from topics.system.settings import Settings

FRAMES_TYPE = b"application/vnd.topics.frames"
JSON_TYPE = b"application/json"
LINES_TYPE = b"application/x-ndjson"
ANY_TYPE = b""  # a prefix of every content type
CATALOG_SHARD = 0
_STATUS = {wire.OK: 200, wire.CREATED: 201, wire.UNFINISHED: 202}


@dataclass(slots=True)
class Services:
    """The parts of the process that endpoints use."""

    shards: Shards
    settings: Settings
    now_us: Callable[[], int]
    version: str
    started_us: int
    draining: bool = False
    in_flight: tuple[InFlightTable, int] | None = (
        None  # shared with other processes, and the number of this one
    )
    random_bytes: Callable[[int], bytes] = secrets.token_bytes
    # Set once the streams of the process are started.
    later: Later = field(init=False)
    streams: Streams = field(init=False)
    pressure: Callable[[], float] = lambda: 0.0  # of this process

    def shard_of(self, name: str) -> int:
        return shard_of(name, self.shards.count)


@dataclass(slots=True)
class Call:
    request: Request
    topic: bytes  # or router, session; percent-decoded; empty if the route has none
    key: ApiKey | None  # None: authentication is off
    services: Services
    consumer: bytes = b""  # or plan, snapshot, transaction; percent-decoded; empty if the route has none

    @property
    def is_strict(self) -> bool:
        """Whether unknown fields in the body are an error."""
        return self.request.strict == b"1" or self.services.settings.strict_requests

    @property
    def total_ms(self) -> float:
        return (self.services.now_us() - self.request.received_us) / 1000


Endpoint: TypeAlias = Callable[[Call, Respond], None]


def error_response(code: str, message: str, detail: dict[str, object] | None = None) -> Response:
    status = STATUS[code]
    return Response(status, error_body(code, message, detail), JSON_TYPE, error_head(status))


def no_upgrade() -> Response:
    response = error_response(
        "invalid_request", "this path is a WebSocket; send an upgrade request over HTTP/1.1"
    )
    response.head += b"Sec-WebSocket-Version: 13\r\n"
    return response


def refusal(error: TopicsError) -> Response:
    return error_response(error.code, str(error), error.detail)


def from_reply(reply: wire.Reply) -> Response:
    if reply.kind == wire.JSON:
        return Response(_STATUS[reply.code], reply.body)
    if reply.code == wire.ERROR:
        failure = reply.failure
        return error_response(failure.code, failure.message, failure.detail)
    return Response(200, reply.body, FRAMES_TYPE, frame_page_head(reply.fields))


def frame_page_head(fields: bytes) -> bytes:
    """The header lines of a page of frames."""
    page = decode_fields(fields)
    head = (
        b"Topics-Next-From-Seq: %d\r\nTopics-Head-Seq: %d\r\nTopics-Earliest-Seq: %d\r\n"
        b"Topics-Count: %d\r\nTopics-Caught-Up: %b\r\n"
        % (
            page.next_from_seq,
            page.head_seq,
            page.earliest_seq,
            page.count,
            b"true" if page.next_from_seq == page.head_seq else b"false",
        )
    )
    if page.epoch:
        head += b"Topics-Epoch: %b\r\n" % page.epoch.encode()
    if page.tombstone is not None:
        head += b"Topics-Tombstone: %b\r\n" % tombstone(page.tombstone)
    if page.catch_up_timed_out:
        head += b"Topics-Catch-Up-Timed-Out: true\r\n"
    return head + ignored_header(page.ignored) if page.ignored else head


def ask_owner(
    call: Call,
    op: int,
    respond: Respond,
    flags: int = 0,
    args: wire.Args | None = None,
    encoding: int = wire.JSON,
) -> None:
    """Send the request to the shard that owns the topic, and respond with its reply."""
    shards, request = call.services.shards, call.request
    if call.is_strict:
        flags |= wire.STRICT
    shard = shard_of(call.topic, shards.count)
    encoded = wire.encode_args(args) if args is not None else b""
    number = shards.ask(
        shard,
        op,
        flags,
        call.topic,
        encoded,
        request.body,
        request.received_us,
        lambda reply: respond(from_reply(reply)),
        encoding,
    )
    if number and op in wire.POLLS:
        release = request.release

        def cancel() -> None:
            release()
            if op == wire.CLAIM:  # a waiting claim would still lease a job
                shards.tell(shard, wire.CANCEL_CLAIM, number, call.topic, encoded)
            else:
                shards.cancel(shard, number)

        request.release = cancel


def ask_catalog(call: Call, op: int, respond: Respond, args: wire.Args) -> None:
    """Send the request to the shard that holds the catalog, and respond with its reply."""
    request = call.request
    call.services.shards.ask(
        CATALOG_SHARD,
        op,
        wire.STRICT if call.is_strict else 0,
        b"",
        wire.encode_args(args),
        request.body,
        request.received_us,
        lambda reply: respond(from_reply(reply)),
    )


def ask_all(
    call: Call, op: int, done: Callable[[list[wire.Reply]], None], args: wire.Args | None = None
) -> None:
    """Send a request to every shard; `done` gets the replies in the order of the shards."""
    shards = call.services.shards
    encoded = wire.encode_args(args) if args is not None else b""
    replies: dict[int, wire.Reply] = {}

    def gather(shard: int, reply: wire.Reply) -> None:
        replies[shard] = reply
        if len(replies) == shards.count:
            done([replies[i] for i in range(shards.count)])

    for i in range(shards.count):
        shards.ask(i, op, 0, b"", encoded, b"", call.request.received_us, partial(gather, i))


def key_prefixes(call: Call) -> list[str] | None:
    """The prefixes that the key is limited to; None if it is not."""
    return list(call.key.prefixes) if call.key is not None and call.key.prefixes else None
