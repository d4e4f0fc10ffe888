"""HTTP transport for asyncio: aiohttp without its own retries, redirects, cookies and limits."""

from __future__ import annotations

import asyncio
import ssl
import weakref

import aiohttp
from yarl import URL

from topics.client.errors import BadAnswer, ClientError, Disconnected, Outcome, TimedOut
from topics.client.flows import Request, Response
from topics.client.http_pool import ANSWER_BYTES_MAX, CHUNK_BYTES, IDLE_MAX_S, reason_of
from topics.client.settings import Settings


class AiohttpSession:
    """An aiohttp session, bound to the event loop that first uses it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None
        # Weak references: a stream that is no longer referenced counts as closed.
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._is_closed = False

    async def send(self, request: Request) -> Response:
        answer_s = self._settings.timeouts.answer_s + request.wait_s
        timeout = aiohttp.ClientTimeout(total=answer_s, sock_connect=self._settings.timeouts.connect_s)
        try:
            async with self._request(request, timeout) as response:
                body = await self._body(response)
                return Response(response.status, body, response.headers.get("Retry-After", ""))
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            raise self.broken(error, "unknown") from error

    async def open(self, request: Request, idle_s: float) -> Stream | Response:
        timeout = aiohttp.ClientTimeout(sock_connect=self._settings.timeouts.connect_s, sock_read=idle_s)
        try:
            response = await self._request(request, timeout)
            if response.status != 200:
                async with response:
                    body = await self._body(response)
                    return Response(response.status, body, response.headers.get("Retry-After", ""))
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            raise self.broken(error, "none") from error
        stream = Stream(self, response)
        self._streams.add(stream)
        return stream

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        chunks, size = [], 0
        async for chunk in response.content.iter_any():
            chunks.append(chunk)
            size += len(chunk)
            if size > ANSWER_BYTES_MAX:
                raise BadAnswer(self._settings.address.url, "the response is too large", "unknown")
        return b"".join(chunks)

    def forget(self, stream: Stream) -> None:
        self._streams.discard(stream)

    async def close(self) -> None:
        self._is_closed = True
        for stream in list(self._streams):
            stream.close()
        if self._session is not None:
            await self._session.close()

    def _request(
        self, request: Request, timeout: aiohttp.ClientTimeout
    ) -> aiohttp.client._RequestContextManager:
        if self._is_closed:
            raise RuntimeError("this client is closed")
        if self._session is None:
            self._session = self._create()
        return self._session.request(
            request.method,
            # Paths are already encoded. yarl would decode unreserved characters such as the dots of `..`.
            URL(self._settings.address.url + request.path, encoded=True),
            data=request.body,
            headers=request.headers,
            timeout=timeout,
            allow_redirects=False,
        )

    def _create(self) -> aiohttp.ClientSession:
        context: ssl.SSLContext | bool = self._settings.ssl_context or True
        return aiohttp.ClientSession(
            # No connection limit: long-lived streams would starve calls.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_MAX_S, ssl=context),
            headers={"Accept": "*/*", "Accept-Encoding": "identity", **self._settings.headers},
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Content-Type"),
            read_bufsize=4 * CHUNK_BYTES,
        )

    def broken(self, error: Exception, outcome: Outcome) -> ClientError:
        url = self._settings.address.url
        match error:
            case aiohttp.ClientConnectorCertificateError():
                return BadAnswer(url, f"its certificate is not trusted: {error.certificate_error}")
            case aiohttp.ConnectionTimeoutError():
                return TimedOut(url, "connecting timed out", "none")
            case aiohttp.ClientConnectorError():
                return Disconnected(url, reason_of(error.os_error), "none")
            case TimeoutError():
                return TimedOut(url, "no response in time", outcome)
            case aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError():
                return Disconnected(url, "the connection broke", outcome)
            case _:
                return Disconnected(url, (str(error) or type(error).__name__).lower(), outcome)


class Stream:
    """The body of a streaming response."""

    def __init__(self, session: AiohttpSession, response: aiohttp.ClientResponse) -> None:
        self._session, self._response = session, response
        self._loop = asyncio.get_running_loop()

    def __del__(self) -> None:
        # aiohttp does not close unreferenced responses. Garbage collection may run in any thread.
        if not self._response.closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._response.close)

    async def read(self) -> bytes:
        try:
            return await self._response.content.readany()
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            raise self._session.broken(error, "none") from error

    def close(self) -> None:
        self._response.close()
        self._session.forget(self)
