"""Requests that aiohttp parses: its parser and its flow control, our gate, and our own bytes for the answer.

`finish_response` is the one place where aiohttp writes an answer. It is ours here and passes the response to the
connection, so it has the same bytes whichever way its request came in, and aiohttp never closes a transport. Only the
101 of a WebSocket is aiohttp's own.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest

from router.connections.budget import ByteBudget
from router.connections.websockets import MESSAGE_BYTES_MAX, Socket, asks_for_websocket, serve_websocket
from router.requests.admission import Admission
from router.requests.call import error_response
from router.watch.sinks import abandon, without_websocket
from topics.protocols.http.exchange import Body, Request, Response

if TYPE_CHECKING:
    from router.connections.connection import Connection

FOREVER_S = 1e8  # idle connections are closed by the server's own sweep
# The body of a refused request is still read up to this size, as on the fast path, so that the connection may stay.
DISCARD_MAX = 1 << 20
_AFTER_AUTHORITY = re.compile(rb"[/?].*")


class Plain(web.Response):
    """A response that is written by the connection."""

    def __init__(self, response: Response, *, keep: bool = True) -> None:
        super().__init__()
        self._response: Response | None = response
        self.keep = keep

    def take(self) -> Response:
        """The response, once: aiohttp keeps this object until the next request, and a page must not stay with it."""
        response, self._response = self._response, None
        assert response is not None
        return response


class AiohttpConnection(RequestHandler):
    """aiohttp's side of one client connection; the transport belongs to the connection that owns it."""

    __slots__ = ("owner",)

    def __init__(self, *args: Any, owner: Connection, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.owner = owner

    def leave(self) -> None:
        """The owner closes: end what is open, and leave the transport alone."""
        self.transport = None
        self.connection_lost(None)

    def connection_lost(self, exc: BaseException | None) -> None:
        # A task that has just been woken for a request would go on with it, and with nothing left to do so.
        woken = self._task_handler if self._waiter is not None else None
        super().connection_lost(exc)
        if woken is not None:
            woken.cancel()

    async def start(self) -> None:
        # Its task begins a turn later, and the client may be gone by then.
        if self._manager is not None:
            await super().start()

    async def finish_response(
        self, request: BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, Socket):
            return resp, True
        if not isinstance(resp, Plain):
            answered = await super().finish_response(request, resp, start_time)
            self.owner.slow_ended()
            return answered
        if self._upgraded and self._parser is not None:
            # It asked for another protocol and did not get it: what comes next is a request again.
            self._parser.set_upgraded(False)
            self._upgraded = False
        response = resp.take()
        resp._keep_alive = self.owner.answer_slow(
            response,
            resp.keep and bool(request.keep_alive),
            http10=request.version < (1, 1),
            with_body=request.method != "HEAD",
        )
        return resp, not resp._keep_alive

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp itself refuses, in the words of this server."""
        if status < 500:
            text = (
                message
                or (exc.message if isinstance(exc, BadHttpMessage) else "")
                or "the request is not HTTP"
            )
            response = error_response("invalid_request", text.replace("\n", " ").strip())
        else:
            self.log_exception("a request failed", exc_info=exc)
            response = error_response("internal", "the request failed; the server's log says why")
        return Plain(response, keep=False)


class Handler:
    """aiohttp's handler: from its request to ours, through the gate, and back."""

    def __init__(
        self, gate: Admission, receiving: ByteBudget, body_bytes_max: int, now_us: Callable[[], int]
    ) -> None:
        self._gate = gate
        self._receiving = receiving
        self._body_bytes_max = body_bytes_max
        self._message_bytes_max = min(body_bytes_max, MESSAGE_BYTES_MAX)
        self._now_us = now_us

    async def __call__(self, web_request: BaseRequest) -> web.StreamResponse:
        request = self._request(web_request)
        declared = web_request.content_length if web_request.body_exists else 0
        early = self._gate.screen(request, declared)
        if early is not None:
            return Plain(early, keep=await self._discard(web_request, declared))
        if web_request.body_exists:
            body = await self._read(web_request)
            if isinstance(body, Response):
                return Plain(self._gate.let_read(request.origin, body), keep=False)
            request.body = body
            request.received_us = self._now_us()  # what a slow sender took is not the server's time
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        protocol = web_request.protocol
        assert isinstance(protocol, AiohttpConnection)
        owner = protocol.owner
        owner.opened(request)

        def respond(response: Response) -> None:
            if answer.done():  # the client is gone, and nobody waits
                abandon(response)
                return
            owner.answer_is_here(len(response.body))
            answer.set_result(response)

        self._gate.handle(request, respond)
        try:
            response = await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled():
                abandon(answer.result())
            raise
        if response.websocket is not None and request.wants_websocket:
            return await serve_websocket(owner, web_request, response.websocket, self._message_bytes_max)
        return Plain(without_websocket(response))

    @staticmethod
    async def _discard(web_request: BaseRequest, declared: int | None) -> bool:
        """Read the body of a request that is refused already; False when it is not worth it."""
        if not web_request.body_exists:
            return True
        if declared is None or declared > DISCARD_MAX or _expects(web_request):
            return False
        try:
            while await _next_part(web_request):
                pass
        except (web.RequestPayloadError, ConnectionError):
            return False
        return True

    def _request(self, web_request: BaseRequest) -> Request:
        authority, target = _split_target(web_request.raw_path.encode("utf-8", "surrogateescape"))
        path, _, query = target.partition(b"?")
        headers = web_request.headers

        def header(name: str, first: bool = True) -> bytes:
            values = headers.getall(name, [])
            return ", ".join(values[:1] if first else values).encode("utf-8", "surrogateescape")

        return Request(
            web_request.method.encode(),
            path,
            query,
            self._now_us(),
            b"",
            content_type=header("Content-Type"),
            content_encoding=header("Content-Encoding", first=False),
            authorization=header("Authorization"),
            accept=header("Accept", first=False),
            accept_encoding=header("Accept-Encoding", first=False),
            idempotency_key=header("Idempotency-Key"),
            traceparent=header("traceparent", first=False),
            strict=header("Topics-Strict"),
            host=authority or header("Host"),
            origin=header("Origin", first=False),
            fetch_site=header("Sec-Fetch-Site"),
            last_event_id=header("Last-Event-ID"),
            wants_websocket=asks_for_websocket(web_request),
        )

    async def _read(self, web_request: BaseRequest) -> Body | Response:
        """The body, within its own bound and that of all bodies together."""
        if _expects(web_request) and web_request.transport is not None:
            web_request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # Not a list of pieces: many tiny ones would weigh far more than the bytes that are counted.
        body = bytearray()
        size = 0
        try:
            while True:
                chunk = await _next_part(web_request)
                if not chunk:
                    return bytes(body)
                if size + len(chunk) > self._body_bytes_max:
                    return self._gate.too_large()
                if not self._receiving.take(len(chunk)):
                    return error_response(
                        "throttled", "too many bodies are being received", {"limit": "bodies"}
                    )
                size += len(chunk)
                body += chunk
        except (web.RequestPayloadError, ConnectionError) as error:
            return error_response("invalid_request", f"the body could not be read: {error}")
        finally:
            self._receiving.give(size)


async def _next_part(web_request: BaseRequest) -> bytes:
    if web_request.transport is None:  # else aiohttp calls it a RuntimeError
        raise ConnectionResetError("the client is gone")
    return await web_request.content.readany()


def _expects(web_request: BaseRequest) -> bool:
    """The client waits for a 100 before it sends the body."""
    return web_request.version >= (1, 1) and web_request.headers.get("Expect", "").lower() == "100-continue"


def _split_target(target: bytes) -> tuple[bytes, bytes]:
    """The authority, and the path with its query. A target that is a whole URL has both, and Host is ignored; RFC 9112, 3.2.2."""
    if target.startswith(b"/") or target == b"*":
        return b"", target
    rest = target.partition(b"://")[2]
    found = _AFTER_AUTHORITY.search(rest)
    path = found[0] if found is not None else b""
    return rest[: len(rest) - len(path)], path if path.startswith(b"/") else b"/" + path
