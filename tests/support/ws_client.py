"""A blocking WebSocket client: one frame at a time, strict about what the server may send."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.contract import Json
from tests.support.server import Reply, Server, readable

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
MESSAGE_S = 120.0

KEYS: dict[str, list[str]] = {
    "subscribed": ["op", "request_id", "topics"],
    "unsubscribed": ["op", "request_id", "topics"],
    "ack": ["op", "request_id", "topic", "first_seq", "last_seq", "seqs", "head_seq", "count", "created", "deduped",
            "performance"],
    "pong": ["op", "request_id"],
    "record": ["op", "topic", "from_seq", "to_seq", "head_seq", "records"],
    "caught_up": ["op", "topic", "head_seq"],
    "tombstone": ["op", "topic", "reason", "gap_from", "gap_to", "earliest_seq", "head_seq"],
    "topic_deleted": ["op", "topic", "head_seq", "reason"],
    "error": ["op", "request_id", "code", "message"],
}  # fmt: skip
NO_REQUEST = {"unsupported_message", "server_shutting_down"}  # errors that may lack a request_id


@dataclass(frozen=True)
class Closed(Exception):
    """The server has closed the connection; 1005 is a close without a code, 1006 a connection that ended without a
    close.
    """

    code: int


def upgrade_headers(server: Server, **headers: str) -> dict[str, str]:
    key = base64.b64encode(os.urandom(16)).decode()
    asked = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    return {**server.credentials, **asked, "Sec-WebSocket-Key": key, **headers}


class WebSocket:
    def __init__(
        self, server: Server, path: str = "/v0/ws", *, receive_buffer: int | None = None, **headers: str
    ):
        self.socket = socket.socket(socket.AF_INET)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(120)
        self.socket.connect((server.host, server.port))
        self._bytes = bytearray()
        sent = upgrade_headers(server, **headers)
        lines = [f"GET {path} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in sent.items())]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())
        while b"\r\n\r\n" not in self._bytes:
            data = self.socket.recv(1 << 16)
            assert data, f"closed instead of answered: {bytes(self._bytes)!r}"
            self._bytes += data
        head, _, rest = bytes(self._bytes).partition(b"\r\n\r\n")
        self._bytes = bytearray(rest)
        self._check_head(head.decode("latin-1"), sent["Sec-WebSocket-Key"])

    @staticmethod
    def _check_head(head: str, key: str) -> None:
        status, *fields = head.split("\r\n")
        assert status.startswith("HTTP/1.1 101 "), head
        headers = {name.lower(): value for name, _, value in (field.partition(": ") for field in fields)}
        assert (headers["upgrade"].lower(), headers["connection"].lower()) == ("websocket", "upgrade")
        digest = hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        assert headers["sec-websocket-accept"] == base64.b64encode(digest).decode()
        assert not {"sec-websocket-extensions", "sec-websocket-protocol"} & set(headers)

    def close(self) -> None:
        self.socket.close()

    # -- sending -------------------------------------------------------------------------------------------

    def send(self, op: str, **fields: Any) -> None:
        self.send_text(json.dumps({"op": op, **fields}))

    def send_text(self, text: str) -> None:
        self.send_frame(TEXT, text.encode())

    def send_frame(self, opcode: int, payload: bytes, *, final: bool = True) -> None:
        mask = os.urandom(4)
        size = len(payload)
        if size < 126:
            length = bytes([0x80 | size])
        elif size < 1 << 16:
            length = bytes([0x80 | 126]) + size.to_bytes(2)
        else:
            length = bytes([0x80 | 127]) + size.to_bytes(8)
        repeated = int.from_bytes((mask * (size // 4 + 1))[:size])
        masked = (int.from_bytes(payload) ^ repeated).to_bytes(size)
        self.socket.sendall(bytes([final << 7 | opcode]) + length + mask + masked)

    # -- receiving -----------------------------------------------------------------------------------------

    def ask(self, op: str, **fields: Any) -> Json:
        """Send a command, and return the next message, which must be its reply."""
        self.send(op, **fields)
        reply = self.next()
        assert reply.get("request_id") == fields.get("request_id"), reply
        return reply

    def next(self, timeout_s: float = MESSAGE_S) -> Json:
        """The next message; pings are answered on the way."""
        while True:
            opcode, payload = self.next_frame(timeout_s)
            if opcode == TEXT:
                return check_message(json.loads(payload))
            assert opcode == PING, (opcode, payload)
            self.send_frame(PONG, payload)

    def take(self, *ops: str) -> list[Json]:
        """The next messages, which must be of these kinds."""
        messages = [self.next() for _ in ops]
        assert [message["op"] for message in messages] == list(ops), messages
        return messages

    def next_frame(self, timeout_s: float = MESSAGE_S) -> tuple[int, bytes]:
        """The next message of any opcode, assembled from its frames; a close is raised."""
        give_up = time.monotonic() + timeout_s
        opcode, payload, final = self._one_frame(give_up)
        while not final:
            more, part, final = self._one_frame(give_up)
            assert more == CONTINUATION
            payload += part
        if opcode == CLOSE:
            raise Closed(int.from_bytes(payload[:2]) if payload else 1005)
        return opcode, payload

    def _one_frame(self, give_up: float) -> tuple[int, bytes, bool]:
        first, second = self._take(2, give_up)
        assert not first & 0x70, "a reserved bit is set"
        assert not second & 0x80, "a server must not mask"
        size = second
        if size >= 126:
            size = int.from_bytes(self._take(2 if size == 126 else 8, give_up))
        return first & 0x0F, self._take(size, give_up), bool(first & 0x80)

    def _take(self, size: int, give_up: float) -> bytes:
        while len(self._bytes) < size:
            left = give_up - time.monotonic()
            if left <= 0 or not readable(self.socket, left):
                raise AssertionError("no message in time")
            try:
                data = self.socket.recv(1 << 18)
            except ConnectionResetError:
                data = b""
            if not data:
                raise Closed(1006)
            self._bytes += data
        taken = bytes(self._bytes[:size])
        del self._bytes[:size]
        return taken

    def rest(self) -> tuple[list[Json], int]:
        """Everything until the end, and the code of the close."""
        messages: list[Json] = []
        while True:
            try:
                messages.append(self.next())
            except Closed as closed:
                return messages, closed.code


ANSWERS = ("subscribed", "unsubscribed", "ack", "pong")  # these may name fields that were ignored


def check_message(message: Json) -> Json:
    keys = KEYS[message["op"]]
    if message["op"] == "error" and message["code"] in NO_REQUEST and "request_id" not in message:
        keys = [key for key in keys if key != "request_id"]
    free = {"epoch", "ignored"} if message["op"] in ANSWERS else {"epoch"}
    found = [key for key in message if key not in free]
    assert (sorted(found) == sorted(keys)) if message["op"] == "ack" else (found == keys), message
    if message["op"] == "error":
        assert message["message"]
    if message["op"] == "topic_deleted":
        assert (message["head_seq"], message["reason"]) == (0, "deleted")
    return message


def refused_upgrade(
    server: Server, headers: Mapping[str, str | None] | None = None, path: str = "/v0/ws"
) -> Reply:
    """The answer to a refused WebSocket upgrade; a header of None is left out."""
    sent = {**upgrade_headers(server), **(headers or {})}
    return server.request(
        "GET", path, headers={name: value for name, value in sent.items() if value is not None}
    )
