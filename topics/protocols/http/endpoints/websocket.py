"""The WebSocket endpoint: commands from the client, pages of records to it.

Commands are executed in order, and each is answered before the next one starts: an answer always precedes the pushes that
it causes, and after `unsubscribed` nothing more of that topic is sent. While the client does not read, no command is started
and nothing is read for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from topics.api.errors import Forbidden, InvalidRequest, TopicsError
from topics.api.fields import U32, U64
from topics.api.requests import Epoch, PublishBody, StartBody, WatchBody
from topics.link import wire
from topics.link.watch import STREAM_TOPICS_MAX
from topics.protocols.http.call import Call, key_prefixes, no_upgrade
from topics.protocols.http.endpoints.watch import (
    Resolved,
    bound_names,
    check_group,
    check_names,
    feed_options,
    is_pattern,
    no_capacity,
    resolve,
    starts,
    wants_epoch,
)
from topics.protocols.http.exchange import Respond, Response, Sink
from topics.protocols.http.sse import epoch_member, tombstone_members
from topics.protocols.json.bodies import BodyType, UnknownField, decode
from topics.protocols.json.count_bound import RECORDS
from topics.protocols.watchers import SharedPage, Subscription, Watcher
from topics.protocols.websocket.frames import PING_FRAME, text_frame

# Waiting commands beyond which nothing is read from the client; see `is_busy`.
COMMANDS_WAITING_MAX = 64
COMMANDS_BYTES_MAX = 1 << 20
COMMAND_BYTES_MAX = 1 << 20  # of a command other than publish: decoding more would block the event loop
CHECKED_BYTES_MAX = 1 << 20  # of a publish; larger ones are validated by the shard
NAME_MAX = 255  # of a topic; a longer one does not fit into a message to a shard, which checks the rest

_SOCKET, _SOCKET_WITH_EPOCH = b"ws", b"ws epoch"
NOTHING = msgspec.Raw(b"")  # not `Raw | None`, which msgspec decodes only from null
_encode = msgspec.json.encode


class Command(msgspec.Struct):
    """The fields of a command that are needed before its `op` is known."""

    op: Literal["subscribe", "unsubscribe", "publish", "ping"]
    request_id: msgspec.Raw = msgspec.Raw(b"null")
    topic: str | None = None
    config: msgspec.Raw = NOTHING
    return_seqs: bool = True


class Ping(msgspec.Struct):
    op: str
    request_id: msgspec.Raw = NOTHING


class Subscribe(Ping):
    topic: str | None = None
    topics: dict[str, StartBody] = {}
    from_seq: U64 = 0
    tail: bool = False
    node: str | list[str] | None = None
    limit: U32 = 1000
    max_batch_bytes: U64 = 1 << 20
    include_data: bool = True
    include_meta: bool = True
    include_tags: bool = False
    lenient: bool = False
    consistency: Literal["eventual", "strong"] = "eventual"
    group: str | None = None
    epoch: Epoch | None = None
    include_epoch: bool = False


class Unsubscribe(Ping):
    topic: str | None = None
    topics: list[str] = []


_command = msgspec.json.Decoder(Command).decode
_ping = BodyType(Ping)
_subscribe = BodyType(Subscribe)
_unsubscribe = BodyType(Unsubscribe)
_publish = msgspec.json.Decoder(PublishBody).decode


class WebSocketWatcher(Watcher):
    def __init__(self, call: Call, release_slot: Callable[[], None]) -> None:
        super().__init__(call.services.streams.fanout, key_prefixes(call))
        self._call = call
        self._release_slot = release_slot
        self._sink: Sink | None = None
        self._commands: deque[str | None] = deque()  # None: a binary message
        self._waiting_bytes = 0  # of the commands
        self._is_working = False
        self._patterns: dict[str, StartBody] = {}
        self._include_epoch = False  # true once a subscription has requested it

    # -- called by the connection --------------------------------------------------------------------------

    def opened(self, sink: Sink) -> None:
        self._sink = sink
        self._call.services.streams.socket_opened(self)

    def received(self, message: str) -> None:
        self._commands.append(message)
        self._waiting_bytes += len(message)
        self._work()

    def received_bytes(self) -> None:
        self._commands.append(None)
        self._work()

    def drained(self) -> None:
        self.fanout.drained(self)
        self._work()

    def closed(self) -> None:
        if not self.is_closed:
            self.fanout.close(self)
        self._call.services.streams.socket_closed(self)
        self._sink = None
        self._commands.clear()
        self._waiting_bytes = 0
        self._release_slot()

    @property
    def is_full(self) -> bool:
        return self._sink is None or self._sink.is_full

    @property
    def is_busy(self) -> bool:
        """Too many commands are waiting to read more."""
        return len(self._commands) >= COMMANDS_WAITING_MAX or self._waiting_bytes >= COMMANDS_BYTES_MAX

    def _write(self, payload: bytes) -> None:
        if self._sink is not None:
            self._sink.write(text_frame(payload))

    def ping(self) -> None:
        """Send a ping, to keep the connection open in proxies and to notice a lost client."""
        if self._sink is not None and not self._sink.is_full:
            self._sink.write(PING_FRAME)

    def end_with(self, code: str, message: str) -> None:
        if self.is_closed:
            return
        self.fanout.close(self)
        self._write(_encode({"op": "error", "code": code, "message": message}))
        if self._sink is not None:
            self._sink.close()

    # -- commands ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._commands and not self._is_working and not self.is_full and not self.is_closed:
            message = self._commands.popleft()
            if message is None:
                self._write(
                    _encode(
                        {"op": "error", "request_id": None, "code": "unsupported_message",
                         "message": "messages must be JSON text"}
                    )
                )  # fmt: skip
                continue
            self._waiting_bytes -= len(message)
            self._is_working = True
            self._begin(message)

    def _done(self) -> None:
        self._is_working = False

    def _begin(self, message: str) -> None:
        try:
            command: Command = decode(_command, message.encode("utf-8", "replace"))
        except InvalidRequest as error:
            self._refuse(b"null", "invalid_json", str(error))
            self._done()
            return
        request_id = bytes(command.request_id)
        try:
            if command.op != "publish" and len(message) > COMMAND_BYTES_MAX:
                raise InvalidRequest(
                    f"a command other than publish may have at most {COMMAND_BYTES_MAX} bytes"
                )
            getattr(self, f"_{command.op}")(command, request_id, message)
        except TopicsError as error:
            self._refuse(b"null" if isinstance(error, InvalidJson) else request_id, error.code, str(error))
            self._done()

    def _refuse(self, request_id: bytes, code: str, message: str) -> None:
        self._write(
            b'{"op":"error","request_id":%b,"code":%b,"message":%b}'
            % (request_id, _encode(code), _encode(message))
        )

    def _refuse_with(self, request_id: bytes, response: Response) -> None:
        if self.is_closed:
            return
        error = msgspec.json.decode(response.body)["error"]
        self._refuse(request_id, error["code"], error["message"])
        self._finish()

    def _finish(self) -> None:
        """Continue with waiting commands after a delayed answer."""
        self._done()
        self._work()

    def _ping(self, command: Command, request_id: bytes, message: str) -> None:
        _, ignored = self._decode(_ping, message)
        self._write(b'{"op":"pong","request_id":%b%b}' % (request_id, ignored))
        self._done()

    def _check_scope(self, scope: str) -> None:
        key = self._call.key
        if key is not None and scope not in key.scopes:
            raise Forbidden(f"this key lacks the scope {scope}")

    def _subscribe(self, command: Command, request_id: bytes, message: str) -> None:
        self._check_scope("read")
        bound_names(message.encode())
        subscribe, ignored = self._decode(_subscribe, message)
        wanted: dict[str, StartBody] = dict(subscribe.topics)
        if subscribe.topic is not None:
            start = StartBody(subscribe.from_seq, subscribe.tail, subscribe.epoch)
            wanted.setdefault(subscribe.topic, start)
        if not wanted:
            raise InvalidRequest("a subscribe must have topic or topics")
        check_names(self._call, wanted)
        body = WatchBody(
            topics=wanted,
            node=subscribe.node,
            limit=subscribe.limit or 1000,
            max_batch_bytes=subscribe.max_batch_bytes,
            include_data=subscribe.include_data,
            include_meta=subscribe.include_meta,
            include_tags=subscribe.include_tags,
            consistency=subscribe.consistency,
            group=subscribe.group,
            include_epoch=subscribe.include_epoch,
        )
        options = feed_options(body)
        check_group(body)

        def subscribed(found: Resolved) -> None:
            if self.is_closed:
                return  # the client has disconnected
            new = sum(name not in self.subs for name in found.topics)
            if len(self.subs) + new > STREAM_TOPICS_MAX:
                self._refuse(
                    request_id,
                    "invalid_request",
                    f"a WebSocket may follow at most {STREAM_TOPICS_MAX} topics",
                )
                self._finish()
                return
            self._include_epoch = self._include_epoch or wants_epoch(body)
            topics = _encode(starts(found, include_epoch=self._include_epoch))
            self._write(b'{"op":"subscribed","request_id":%b,"topics":%b%b}' % (request_id, topics, ignored))
            for name, (start, _) in found.topics.items():
                by_pattern = name not in wanted
                self.fanout.subscribe(
                    self,
                    name,
                    start,
                    options,
                    epoch=found.epochs[name],
                    group=body.group,
                    by_pattern=by_pattern,
                )
            for pattern in found.patterns:
                self._patterns[pattern] = wanted[pattern]
                self.fanout.watch_names(self, pattern, options, body.group)
            self._finish()

        resolve(
            self._call,
            wanted,
            subscribe.lenient,
            lambda response: self._refuse_with(request_id, response),
            subscribed,
        )

    def _decode(self, kind: BodyType, message: str) -> tuple[Any, bytes]:
        """The command, and the member `ignored` of its answer if it has unknown fields."""
        try:
            command, ignored = kind.read(message.encode(), is_strict=self._call.is_strict)
        except UnknownField:
            raise
        except InvalidRequest as error:
            raise InvalidJson(str(error)) from None
        return command, b',"ignored":' + _encode(ignored) if ignored else b""

    def _unsubscribe(self, command: Command, request_id: bytes, message: str) -> None:
        unsubscribe, ignored = self._decode(_unsubscribe, message)
        names: list[str] = list(unsubscribe.topics)
        if unsubscribe.topic is not None:
            names.append(unsubscribe.topic)
        for name in names:
            self.fanout.unsubscribe(self, name)
            if is_pattern(name):
                self._patterns.pop(name, None)
                self.fanout.unwatch_names(self, name)
        self._write(
            b'{"op":"unsubscribed","request_id":%b,"topics":%b%b}'
            % (request_id, _encode(list(dict.fromkeys(names))), ignored)
        )
        self._done()

    def _publish(self, command: Command, request_id: bytes, message: str) -> None:
        self._check_scope("write")
        key, topic = self._call.key, command.topic
        if topic is None:
            raise InvalidJson("a publish must have a topic")
        text = message.encode()
        if len(message) <= CHECKED_BYTES_MAX and not RECORDS.is_exceeded(text):
            try:
                write = _publish(text)
            except msgspec.DecodeError as error:
                raise InvalidJson(f"the message is invalid: {error}") from None
            if any(not row.data and row.data_base64 is None for row in write.records):
                raise InvalidJson("a record must have data")
        if len(topic) > NAME_MAX:
            raise InvalidRequest(f"a topic name must have 1 to {NAME_MAX} characters")
        if bytes(command.config) not in (b"", b"null") and key is not None and "admin" not in key.scopes:
            raise Forbidden("publishing with a config requires the scope admin")
        if key is not None and not key.covers(topic):
            raise Forbidden("this key may not access this name")
        flags = wire.PUBLISH | (wire.STRICT if self._call.is_strict else 0)
        if not command.return_seqs:
            flags |= wire.NO_SEQS
        if key is not None and "admin" not in key.scopes:
            flags |= wire.NO_ADMIN
        args = wire.encode_args(wire.Args(prefixes=self.prefixes)) if self.prefixes is not None else b""
        services = self._call.services
        services.shards.ask(
            services.shard_of(topic),
            wire.WRITE,
            flags,
            topic.encode(),
            args,
            text,
            services.now_us(),
            lambda reply: self._published(request_id, command.return_seqs, reply),
        )

    def _published(self, request_id: bytes, with_seqs: bool, reply: wire.Reply) -> None:
        if self.is_closed:
            return
        if reply.code == wire.ERROR:
            failure = reply.failure
            self._refuse(request_id, failure.code, failure.message)
            self._finish()
            return
        body = bytes(reply.body)
        if not with_seqs:
            body = body.replace(b',"head_seq":', b',"seqs":null,"head_seq":', 1)
        self._write(b'{"op":"ack","request_id":%b,%b' % (request_id, body[1:]))
        self._finish()

    # -- pushes --------------------------------------------------------------------------------------------

    def start_of(self, topic: str) -> int:
        return 0  # topics found later are new

    def write_page(self, sub: Subscription, page: SharedPage) -> None:
        if page.tombstone is not None:
            members = tombstone_members(page.topic, page.tombstone, page.tombstone.reason)
            self._write(b'{"op":"tombstone",%b%b}' % (members, self._epoch_member(sub)))
            sub.caught_up_due = True
        sub.cursor = page.to_seq
        if not page.count:
            return
        sub.caught_up_due = not page.caught_up
        kind = _SOCKET_WITH_EPOCH if self._include_epoch else _SOCKET
        frames = page.encoded.get(kind)
        if frames is None:
            frames = page.encoded[kind] = self._frames(page, self._epoch_member(sub))
        if self._sink is not None:
            self._sink.write(frames)

    def _epoch_member(self, sub: Subscription) -> bytes:
        return epoch_member(sub.epoch) if self._include_epoch else b""

    @staticmethod
    def _frames(page: SharedPage, epoch: bytes) -> bytes:
        frames = text_frame(
            b'{"op":"record","topic":"%b","from_seq":%d,"to_seq":%d,"head_seq":%d,"records":[%b]%b}'
            % (page.topic, page.from_seq, page.to_seq, page.head_seq, page.records, epoch)
        )
        if page.caught_up:
            frames += text_frame(
                b'{"op":"caught_up","topic":"%b","head_seq":%d}' % (page.topic, page.head_seq)
            )
        return frames

    def write_caught_up(self, sub: Subscription, head_seq: int) -> None:
        self._write(b'{"op":"caught_up","topic":"%b","head_seq":%d}' % (sub.topic.encode(), head_seq))

    def write_topic_deleted(self, sub: Subscription) -> None:
        self.subs.pop(sub.topic, None)
        self._write(
            b'{"op":"topic_deleted","topic":"%b","head_seq":0,"reason":"deleted"}' % sub.topic.encode()
        )

    def write_too_many_topics(self, topic: str) -> None:
        self._refuse(
            b"null",
            "throttled",
            f"{topic!r} is not followed: a WebSocket may follow at most {STREAM_TOPICS_MAX} topics",
        )


class InvalidJson(TopicsError):
    """A message with invalid fields for its op."""

    code = "invalid_json"


def open_websocket(call: Call, respond: Respond) -> None:
    """GET /v0/ws"""
    if not call.request.wants_websocket:
        respond(no_upgrade())
        return
    release_slot = call.services.streams.reserve(call.key)
    if release_slot is None:
        respond(no_capacity(call))
        return
    respond(Response(101, websocket=WebSocketWatcher(call, release_slot)))
