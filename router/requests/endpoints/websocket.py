"""The server's end of one WebSocket: commands in, news out.

Commands are carried out in the order they come, and each is answered before the next begins: an answer is always in
front of the pushes that it causes, and after `unsubscribed` nothing more of that topic comes. While the client does not
take what was written, no command is begun and no news are read for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from router.requests.call import Call, key_prefixes
from router.requests.endpoints.watch import (
    Resolved,
    bound_names,
    check_group,
    check_names,
    feed_options,
    is_pattern,
    no_place,
    resolve,
    starts,
    wants_epoch,
)
from router.watch.sinks import no_upgrade
from router.watch.watchers import SharedPage, Subscription, Watcher
from topics.api.errors import Forbidden, InvalidRequest, TopicsError
from topics.api.requests import U32, U64, Epoch, PublishBody, StartBody, WatchBody
from topics.link import wire
from topics.link.watch import STREAM_TOPICS_MAX
from topics.protocols.http.bodies import BodyType, UnknownField, decode
from topics.protocols.http.count_bound import RECORDS
from topics.protocols.http.exchange import Respond, Response, Sink
from topics.protocols.http.sse import epoch_member, tombstone_members
from topics.protocols.websocket.frames import PING_FRAME, text_frame

# Beyond them the client is not read from; see `is_busy`.
COMMANDS_WAITING_MAX = 64
COMMANDS_BYTES_MAX = 1 << 20
COMMAND_BYTES_MAX = 1 << 20  # of one that is no publish: decoding more would keep all others waiting
CHECKED_BYTES_MAX = 1 << 20  # of a publish; what is wrong with a larger one is for its shard to say
NAME_MAX = 255  # of a topic; a longer one fits no message to a shard, which checks the rest

_SOCKET, _SOCKET_WITH_EPOCH = b"ws", b"ws epoch"
NOTHING = msgspec.Raw(b"")  # of `Raw | None` msgspec would take null alone
_encode = msgspec.json.encode


class Command(msgspec.Struct):
    """What is known of any command before its `op` is."""

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


class SocketWatcher(Watcher):
    def __init__(self, call: Call, leave: Callable[[], None]) -> None:
        super().__init__(call.services.desk.fanout, key_prefixes(call))
        self._call = call
        self._leave = leave
        self._sink: Sink | None = None
        self._commands: deque[str | None] = deque()  # None: a binary message
        self._waiting_bytes = 0  # of the commands
        self._is_working = False
        self._patterns: dict[str, StartBody] = {}
        self._include_epoch = False  # once a subscription has asked for it

    # -- the connection's calls ----------------------------------------------------------------------------

    def opened(self, sink: Sink) -> None:
        self._sink = sink
        self._call.services.desk.socket_opened(self)

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
        self._call.services.desk.socket_closed(self)
        self._sink = None
        self._commands.clear()
        self._waiting_bytes = 0
        self._leave()

    @property
    def is_full(self) -> bool:
        return self._sink is None or self._sink.is_full

    @property
    def is_busy(self) -> bool:
        """So many commands wait that no more should be read."""
        return len(self._commands) >= COMMANDS_WAITING_MAX or self._waiting_bytes >= COMMANDS_BYTES_MAX

    def _write(self, payload: bytes) -> None:
        if self._sink is not None:
            self._sink.write(text_frame(payload))

    def ping(self) -> None:
        """So that proxies keep the connection, and the loss of a client is noticed."""
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
                         "message": "messages are JSON text"}
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
                raise InvalidRequest(f"a command other than publish has at most {COMMAND_BYTES_MAX} bytes")
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
        """An answer came later: go on with what waits."""
        self._done()
        self._work()

    def _ping(self, command: Command, request_id: bytes, message: str) -> None:
        _, ignored = self._read(_ping, message)
        self._write(b'{"op":"pong","request_id":%b%b}' % (request_id, ignored))
        self._done()

    def _check_scope(self, scope: str) -> None:
        key = self._call.key
        if key is not None and scope not in key.scopes:
            raise Forbidden(f"this key lacks the scope {scope}")

    def _subscribe(self, command: Command, request_id: bytes, message: str) -> None:
        self._check_scope("read")
        bound_names(message.encode())
        wish, ignored = self._read(_subscribe, message)
        wanted: dict[str, StartBody] = dict(wish.topics)
        if wish.topic is not None:
            wanted.setdefault(wish.topic, StartBody(wish.from_seq, wish.tail, wish.epoch))
        if not wanted:
            raise InvalidRequest("say which topic: topic or topics")
        check_names(self._call, wanted)
        body = WatchBody(
            topics=wanted,
            node=wish.node,
            limit=wish.limit or 1000,
            max_batch_bytes=wish.max_batch_bytes,
            include_data=wish.include_data,
            include_meta=wish.include_meta,
            include_tags=wish.include_tags,
            consistency=wish.consistency,
            group=wish.group,
            include_epoch=wish.include_epoch,
        )
        options = feed_options(body)
        check_group(body)

        def subscribed(found: Resolved) -> None:
            if self.is_closed:
                return  # the client has gone meanwhile
            new = sum(name not in self.subs for name in found.topics)
            if len(self.subs) + new > STREAM_TOPICS_MAX:
                self._refuse(
                    request_id, "invalid_request", f"a socket follows at most {STREAM_TOPICS_MAX} topics"
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
                self.fanout.look_out(self, pattern, options, body.group)
            self._finish()

        resolve(
            self._call,
            wanted,
            wish.lenient,
            lambda response: self._refuse_with(request_id, response),
            subscribed,
        )

    def _read(self, kind: BodyType, message: str) -> tuple[Any, bytes]:
        """A command, and a member `ignored` for its answer if it has fields that its op does not know."""
        try:
            wish, ignored = kind.read(message.encode(), is_strict=self._call.is_strict)
        except UnknownField:
            raise
        except InvalidRequest as error:
            raise InvalidJson(str(error)) from None
        return wish, b',"ignored":' + _encode(ignored) if ignored else b""

    def _unsubscribe(self, command: Command, request_id: bytes, message: str) -> None:
        wish, ignored = self._read(_unsubscribe, message)
        names: list[str] = list(wish.topics)
        if wish.topic is not None:
            names.append(wish.topic)
        for name in names:
            self.fanout.unsubscribe(self, name)
            if is_pattern(name):
                self._patterns.pop(name, None)
                self.fanout.stop_looking_out(self, name)
        self._write(
            b'{"op":"unsubscribed","request_id":%b,"topics":%b%b}'
            % (request_id, _encode(list(dict.fromkeys(names))), ignored)
        )
        self._done()

    def _publish(self, command: Command, request_id: bytes, message: str) -> None:
        self._check_scope("write")
        key, topic = self._call.key, command.topic
        if topic is None:
            raise InvalidJson("a publish has a topic")
        text = message.encode()
        if len(message) <= CHECKED_BYTES_MAX and not RECORDS.is_exceeded(text):
            try:
                write = _publish(text)
            except msgspec.DecodeError as error:
                raise InvalidJson(f"the message does not fit: {error}") from None
            if any(not row.data and row.data_base64 is None for row in write.records):
                raise InvalidJson("a record has data")
        if len(topic) > NAME_MAX:
            raise InvalidRequest(f"a topic name has 1 to {NAME_MAX} characters")
        if bytes(command.config) not in (b"", b"null") and key is not None and "admin" not in key.scopes:
            raise Forbidden("publishing with a config needs the scope admin")
        if key is not None and not key.covers(topic):
            raise Forbidden("this key may not use that name")
        flags = wire.PUBLISH | (wire.STRICT if self._call.is_strict else 0)
        if not command.return_seqs:
            flags |= wire.NO_SEQS
        if key is not None and "admin" not in key.scopes:
            flags |= wire.NO_ADMIN
        args = wire.encode_args(wire.Args(prefixes=self.prefixes)) if self.prefixes is not None else b""
        services = self._call.services
        services.core.send(
            self.fanout.shard_of(topic),
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
        body = bytes(reply.body)
        if reply.status not in (200, 201):
            self._refuse_with(request_id, Response(reply.status, body))
            return
        if not with_seqs:
            body = body.replace(b',"head_seq":', b',"seqs":null,"head_seq":', 1)
        self._write(b'{"op":"ack","request_id":%b,%b' % (request_id, body[1:]))
        self._finish()

    # -- news ----------------------------------------------------------------------------------------------

    def start_of(self, topic: str) -> int:
        return 0  # what is found later is new

    def take(self, sub: Subscription, news: SharedPage) -> None:
        if news.tombstone is not None:
            members = tombstone_members(news.topic, news.tombstone, news.tombstone.reason)
            self._write(b'{"op":"tombstone",%b%b}' % (members, self._epoch_member(sub)))
            sub.owes_caught_up = True
        sub.cursor = news.to_seq
        if not news.count:
            return
        sub.owes_caught_up = not news.caught_up
        kind = _SOCKET_WITH_EPOCH if self._include_epoch else _SOCKET
        frames = news.texts.get(kind)
        if frames is None:
            frames = news.texts[kind] = self._frames(news, self._epoch_member(sub))
        if self._sink is not None:
            self._sink.write(frames)

    def _epoch_member(self, sub: Subscription) -> bytes:
        return epoch_member(sub.epoch) if self._include_epoch else b""

    @staticmethod
    def _frames(news: SharedPage, epoch: bytes) -> bytes:
        frames = text_frame(
            b'{"op":"record","topic":"%b","from_seq":%d,"to_seq":%d,"head_seq":%d,"records":[%b]%b}'
            % (news.topic, news.after_gap, news.to_seq, news.head_seq, news.records, epoch)
        )
        if news.caught_up:
            frames += text_frame(
                b'{"op":"caught_up","topic":"%b","head_seq":%d}' % (news.topic, news.head_seq)
            )
        return frames

    def tell_caught_up(self, sub: Subscription, head_seq: int) -> None:
        self._write(b'{"op":"caught_up","topic":"%b","head_seq":%d}' % (sub.topic.encode(), head_seq))

    def tell_gone(self, sub: Subscription) -> None:
        self.subs.pop(sub.topic, None)
        self._write(
            b'{"op":"topic_deleted","topic":"%b","head_seq":0,"reason":"deleted"}' % sub.topic.encode()
        )

    def tell_too_many(self, topic: str) -> None:
        self._refuse(
            b"null", "throttled", f"{topic!r} is not followed: a socket follows {STREAM_TOPICS_MAX} topics"
        )


class InvalidJson(TopicsError):
    """A message whose fields are not what its op takes."""

    code = "invalid_json"


def open_websocket(call: Call, respond: Respond) -> None:
    """GET /v0/ws"""
    if not call.request.wants_websocket:
        respond(no_upgrade())
        return
    leave = call.services.desk.take_place(call.key)
    if leave is None:
        respond(no_place(call))
        return
    respond(Response(101, websocket=SocketWatcher(call, leave)))
