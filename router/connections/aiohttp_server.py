"""Requests parsed by aiohttp: its parser and flow control, with our admission and serialization of responses.

`finish_response`, the only method with which aiohttp writes a response, is overridden to pass it to the connection. So
responses are the same as on the fast path, and aiohttp never closes a transport. Only the 101 of a WebSocket is
written by aiohttp.
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
from router.watch.sinks import discard, without_websocket
from topics.protocols.http.admission import Admission
from topics.protocols.http.call import error_response
from topics.protocols.http.exchange import Body, Request, Response

if TYPE_CHECKING:
    from router.connections.connection import Connection

FOREVER_S = 1e8  # idle connections are closed by the server's own sweep
# The body of a refused request is read up to this size, as on the fast path, so that the connection can be reused.
DISCARD_MAX = 1 << 20
_AFTER_AUTHORITY = re.compile(rb"[/?].*")


class Passthrough(web.Response):
    """A response that the connection writes, not aiohttp."""

    def __init__(self, response: Response, *, keep: bool = True) -> None:
        super().__init__()
        self._response: Response | None = response
        self.keep = keep

    def take(self) -> Response:
        """The response, once: aiohttp keeps this object until the next request, and it must not keep the body in memory."""
        response, self._response = self._response, None
        assert response is not None
        return response


class AiohttpConnection(RequestHandler):
    """aiohttp's part of a client connection. The transport belongs to the owner."""

    __slots__ = ("owner",)

    def __init__(self, *args: Any, owner: Connection, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.owner = owner

    def detach(self) -> None:
        """Cancel an open request because the owner closes, without touching the transport."""
        self.transport = None
        self.connection_lost(None)

    def connection_lost(self, exc: BaseException | None) -> None:
        # A task that has just been woken for a request would continue without a transport.
        woken = self._task_handler if self._waiter is not None else None
        super().connection_lost(exc)
        if woken is not None:
            woken.cancel()

    async def start(self) -> None:
        # The task starts one loop iteration later, when the client may have disconnected.
        if self._manager is not None:
            await super().start()

    async def finish_response(
        self, request: BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, Socket):
            return resp, True
        if not isinstance(resp, Passthrough):
            answered = await super().finish_response(request, resp, start_time)
            self.owner.slow_ended()
            return answered
        if self._upgraded and self._parser is not None:
            # The upgrade was refused: the next bytes are another request.
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
        """Errors of aiohttp, in the format of this server."""
        if status < 500:
            text = (
                message
                or (exc.message if isinstance(exc, BadHttpMessage) else "")
                or "the request is not HTTP"
            )
            response = error_response("invalid_request", text.replace("\n", " ").strip())
        else:
            self.log_exception("a request failed", exc_info=exc)
            response = error_response("internal", "the request failed; see the server's log")
        return Passthrough(response, keep=False)


class Handler:
    """aiohttp's request handler: converts requests, and passes them to admission."""

    def __init__(
        self, admission: Admission, receiving: ByteBudget, body_bytes_max: int, now_us: Callable[[], int]
    ) -> None:
        self._admission = admission
        self._receiving = receiving
        self._body_bytes_max = body_bytes_max
        self._message_bytes_max = min(body_bytes_max, MESSAGE_BYTES_MAX)
        self._now_us = now_us

    async def __call__(self, web_request: BaseRequest) -> web.StreamResponse:
        request = self._request(web_request)
        declared = web_request.content_length if web_request.body_exists else 0
        early = self._admission.check_head(request, declared)
        if early is not None:
            return Passthrough(early, keep=await self._discard(web_request, declared))
        if web_request.body_exists:
            body = await self._read(web_request)
            if isinstance(body, Response):
                return Passthrough(self._admission.add_cors(request.origin, body), keep=False)
            request.body = body
            request.received_us = self._now_us()  # the time a slow sender took does not count
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        protocol = web_request.protocol
        assert isinstance(protocol, AiohttpConnection)
        owner = protocol.owner
        owner.opened(request)

        def respond(response: Response) -> None:
            if answer.done():  # the client has disconnected
                discard(response)
                return
            owner.response_ready(len(response.body))
            answer.set_result(response)

        self._admission.handle(request, respond)
        try:
            response = await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled():
                discard(answer.result())
            raise
        if response.websocket is not None and request.wants_websocket:
            return await serve_websocket(owner, web_request, response.websocket, self._message_bytes_max)
        return Passthrough(without_websocket(response))

    @staticmethod
    async def _discard(web_request: BaseRequest, declared: int | None) -> bool:
        """Read the body of a refused request. Returns False if it is too large to be worth it."""
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
        """Read the body, within its own limit and the budget for all bodies."""
        if _expects(web_request) and web_request.transport is not None:
            web_request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # Not a list of chunks: many tiny ones would take far more memory than the bytes that are counted.
        body = bytearray()
        size = 0
        try:
            while True:
                chunk = await _next_part(web_request)
                if not chunk:
                    return bytes(body)
                if size + len(chunk) > self._body_bytes_max:
                    return self._admission.too_large()
                if not self._receiving.take(len(chunk)):
                    return error_response(
                        "throttled", "too many request bodies are being received", {"limit": "bodies"}
                    )
                size += len(chunk)
                body += chunk
        except (web.RequestPayloadError, ConnectionError) as error:
            return error_response("invalid_request", f"the body could not be read: {error}")
        finally:
            self._receiving.release(size)


async def _next_part(web_request: BaseRequest) -> bytes:
    if web_request.transport is None:  # otherwise aiohttp raises RuntimeError
        raise ConnectionResetError("the client has disconnected")
    return await web_request.content.readany()


def _expects(web_request: BaseRequest) -> bool:
    """Whether the client waits for a 100 Continue before it sends the body."""
    return web_request.version >= (1, 1) and web_request.headers.get("Expect", "").lower() == "100-continue"


def _split_target(target: bytes) -> tuple[bytes, bytes]:
    """The authority, and the path with its query. A target in absolute form has both and overrides Host; RFC 9112, 3.2.2."""
    if target.startswith(b"/") or target == b"*":
        return b"", target
    rest = target.partition(b"://")[2]
    found = _AFTER_AUTHORITY.search(rest)
    path = found[0] if found is not None else b""
    return rest[: len(rest) - len(path)], path if path.startswith(b"/") else b"/" + path
