"""A front with one shard and no sockets: a client's bytes in, bytes to the client out, all at once.

The connection, admission, the endpoints and the shard are the real ones. Compression runs inline instead of on a
thread, and the clock is simulated, so the same bytes always give the same answers.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from router.connections.connection import Connection
from router.pending import PendingRequests
from router.server import Server
from tests.support.shard_rig import Rig
from topics.link import wire
from topics.protocols.http.call import Services
from topics.protocols.http.errors import STATUS
from topics.protocols.http1.session import CLOSED, IDLE
from topics.system.settings import Settings

BODY_BYTES_MAX = 4096
SUCCESSES = frozenset((200, 201, 204))
STATUSES = SUCCESSES | frozenset(STATUS.values())
RECORDS = [{"data": i, "tag": f"a.{i}", "node": "n", "meta": {"m": i}} for i in range(3)]


class InlineServer(Server):
    def _offload(
        self, work: Callable[[], Any], done: Callable[[Any], None], size: int = 0, *, is_large: bool = False
    ) -> bool:
        done(work())
        return True


class FrontRig(Rig):
    """A shard whose replies go to the front's core."""

    front: PendingRequests | None = None

    def _keep(self, peer: bytes, parts: list[wire.Buffer]) -> None:
        if self.front is None:
            super()._keep(peer, parts)
        else:
            self.front.receive(0, bytes(parts[0]), *parts[1:])


class Transport:
    """A fake transport: records what was written and how the connection ended."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.closed = self.aborted = self.ended = False

    def write(self, data: bytes) -> None:
        assert not self.ended and not self.aborted, "a write after the end"
        self.out += data

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, _name: str, default: Any = None) -> Any:
        return default


class FrontWorld:
    """A front, its shard with a topic `t`, and one connection; to be used inside the running loop."""

    def __init__(self, *, fast_path: bool = True, keys: str = "") -> None:
        self.failures: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.failures.append(repr(context)))
        self.rig = FrontRig()
        made = self.rig.ask(wire.WRITE, "t", {"records": RECORDS})
        assert made is not None and made.status == 201
        self.core = PendingRequests(1)
        self.core.worker_up(0, self.rig.incarnation)
        self.rig.front = self.core
        settings = Settings(
            fast_path=fast_path, api_keys=keys, max_body_bytes=BODY_BYTES_MAX, allowed_hosts="x"
        )
        services = Services(self.core, settings, self.rig.now_us, "0", 0)
        self.server = InlineServer(services, loop)
        self.transport = Transport()
        self.connection = Connection(self.server)
        self.connection.connection_made(cast(Any, self.transport))

    async def feed(self, parts: Iterable[bytes]) -> None:
        for part in parts:
            if self.transport.closed:
                break
            self.connection.data_received(part)
            if self.connection.session.state not in (IDLE, CLOSED):  # otherwise there is nothing to do
                await self.settle()
        await self.settle()

    async def settle(self) -> None:
        """Run until the loop, the shard and the front are idle."""
        for _ in range(200):
            out = len(self.transport.out)
            for _ in range(4):
                await asyncio.sleep(0)
            messages = self.core.take_messages()
            for _, parts in messages:
                self.rig.core.receive(b"front", bytes(parts[0]), *parts[1:])
            self.rig.rest()
            if not messages and len(self.transport.out) == out:
                return
        raise AssertionError("the front does not become idle")

    async def end(self) -> None:
        """The client ends its side; long polls time out; then the connection must be closed and all its resources freed."""
        if not self.transport.closed:
            self.connection.eof_received()
        for _ in range(3):
            self.rig.clock.advance(31_000)
            await self.settle()
            self.connection.sweep(self.rig.now_us(), idle_us=1, request_us=1)
            await self.settle()
        assert self.transport.closed, "the connection stays open after its client has gone"
        self.connection.connection_lost(None)
        await self.settle()
        assert not self.core.in_flight, "a request is not answered"
        assert not self.server.admission.open, "admission still counts a request that has ended"
        assert not self.server.connections and not self.server.stalled_bytes
        assert not self.server.receiving.held and not self.server._sending.held, (
            "bytes of a budget are not released"
        )
        assert not self.failures, self.failures


@dataclass(frozen=True)
class Answer:
    status: int
    code: str  # of an error
    body: bytes
    stays: bool  # the connection stays open


_HEAD = re.compile(rb"HTTP/1\.1 (\d{3}) [A-Za-z -]+\r\n((?:[A-Za-z-]+: [^\r\n]*\r\n)*)\r\n")


def read_answers(out: bytes, heads_max: int) -> list[Answer]:
    """Parse all answers of an HTTP/1 connection and check each against the contract; up to `heads_max` may lack their body."""
    answers: list[Answer] = []
    at = bodiless = 0
    while at < len(out):
        found = _HEAD.match(out, at)
        assert found is not None, f"no HTTP/1.1 answer at byte {at}: {out[at : at + 200]!r}"
        at = found.end()
        status = int(found[1])
        if status == 100:
            continue
        headers = dict(line.split(b": ", 1) for line in found[2].lower().split(b"\r\n") if line)
        size = int(headers.get(b"content-length", 0))
        assert (b"content-length" in headers) != (status == 204), headers
        if size and (at == len(out) or out.startswith(b"HTTP/1.1 ", at)):
            bodiless += 1
            body = b""
        else:
            body = out[at : at + size]
            assert len(body) == size, "an answer is truncated"
            at += size
        stays = headers.get(b"connection") != b"close"
        answers.append(Answer(status, check_answer(status, body), body, stays))
        assert stays or at == len(out), "an answer after the last one"
    assert bodiless <= heads_max, "an answer has no body"
    return answers


def check_answer(status: int, body: bytes) -> str:
    """The error code, whose envelope must be the contract's; a 5xx is a failure."""
    assert status in STATUSES, f"a status that the contract does not have: {status}"
    assert status < 500, f"{status}: {body[:300]!r}"
    if status in SUCCESSES or not body:
        return ""
    error = json.loads(body)["error"]
    assert {"code", "message"} <= set(error) <= {"code", "message", "detail"}, error
    assert STATUS[error["code"]] == status, error
    return str(error["code"])
