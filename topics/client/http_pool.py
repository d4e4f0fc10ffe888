"""HTTP transport for threads: a pool of persistent `http.client` connections.

A connection is not reused if it is readable while idle (the server has closed it), or if it was idle for long. Other
broken connections are left to the retries of the caller.
"""

from __future__ import annotations

import http.client
import os
import select
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Mapping

from topics.client.errors import BadAnswer, Disconnected, Outcome, TimedOut
from topics.client.flows import Request, Response
from topics.client.settings import Settings

IDLE_MAX_S = 30.0  # the server closes after 75 s
CHUNK_BYTES = 1 << 16
ANSWER_BYTES_MAX = 256 << 20  # far more than a page of 8 MiB of records needs


class HttpPool:
    """Thread-safe pool of connections; keeps at most `pool_size` idle ones."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ssl = settings.ssl_context
        if settings.address.is_https and self._ssl is None:
            self._ssl = ssl.create_default_context()
        self._lock = threading.Lock()
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []  # most recently used last
        # Weak references: a stream that is no longer referenced counts as closed.
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._is_closed = False
        self._pid = os.getpid()

    def send(self, request: Request) -> Response:
        timeouts = self._settings.timeouts
        deadline = time.monotonic() + timeouts.answer_s + request.wait_s
        connection = self._take() or self._connect()
        try:
            response = self._ask(connection, request, timeouts.answer_s + request.wait_s)
            body = self._body(connection, response, deadline)
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            self._keep(connection)
        return Response(response.status, body, response.getheader("Retry-After") or "")

    def open(self, request: Request, idle_s: float) -> Stream | Response:
        """Open a stream on a new connection, which is closed with it."""
        if self._is_closed:
            raise RuntimeError("this client is closed")
        connection = self._connect()
        try:
            response = self._ask(connection, request, max(idle_s, self._settings.timeouts.answer_s))
            if response.status != 200:
                deadline = time.monotonic() + self._settings.timeouts.answer_s
                body = self._body(connection, response, deadline)
                connection.close()
                return Response(response.status, body, response.getheader("Retry-After") or "")
        except BaseException:
            connection.close()
            raise
        stream = Stream(self, connection, response, idle_s)
        with self._lock:
            self._streams.add(stream)
        return stream

    def forget(self, stream: Stream) -> None:
        with self._lock:
            self._streams.discard(stream)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            streams = list(self._streams)
        for connection, _ in idle:
            connection.close()
        for stream in streams:
            stream.close()

    # -- connections ---------------------------------------------------------------------------------------

    def _take(self) -> http.client.HTTPConnection | None:
        fresh = time.monotonic() - IDLE_MAX_S
        while True:
            with self._lock:
                if self._is_closed:
                    raise RuntimeError("this client is closed")
                if self._pid != os.getpid():
                    # After a fork, the connections belong to the parent.
                    self._pid, self._idle = os.getpid(), []
                if not self._idle:
                    return None
                connection, since = self._idle.pop()
            if since > fresh and not _is_readable(connection.sock):
                return connection
            connection.close()

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._is_closed and len(self._idle) < self._settings.pool_size:
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        address, timeouts = self._settings.address, self._settings.timeouts
        connection = (
            http.client.HTTPSConnection(
                address.host, address.port, timeout=timeouts.connect_s, context=self._ssl
            )
            if address.is_https
            else http.client.HTTPConnection(address.host, address.port, timeout=timeouts.connect_s)
        )
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            raise BadAnswer(address.url, f"its certificate is not trusted: {error.verify_message}") from error
        except OSError as error:
            raise self.broken(error, "none") from error
        return connection

    # -- one exchange --------------------------------------------------------------------------------------

    def _ask(
        self, connection: http.client.HTTPConnection, request: Request, timeout_s: float
    ) -> http.client.HTTPResponse:
        headers: Mapping[str, str] = {**self._settings.headers, **request.headers}
        connection.sock.settimeout(timeout_s)
        try:
            connection.request(
                request.method, self._settings.address.root + request.path, request.body, dict(headers)
            )
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self.broken(error, "unknown") from error

    def _body(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, deadline: float
    ) -> bytes:
        chunks, size = [], 0
        try:
            while chunk := response.read(CHUNK_BYTES):
                chunks.append(chunk)
                size += len(chunk)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                if size > ANSWER_BYTES_MAX:
                    raise BadAnswer(self._settings.address.url, "the response is too large", "unknown")
                if connection.sock is not None:
                    connection.sock.settimeout(left_s)
            # read(n) does not detect a body that is shorter than its Content-Length.
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
        except (OSError, http.client.HTTPException) as error:
            raise self.broken(error, "unknown") from error
        return b"".join(chunks)

    def broken(self, error: Exception, outcome: Outcome) -> Disconnected:
        url = self._settings.address.url
        if isinstance(error, TimeoutError):
            return TimedOut(url, "no response in time", outcome)
        return Disconnected(url, reason_of(error), outcome)


class Stream:
    """The body of a streaming response."""

    def __init__(
        self,
        pool: HttpPool,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        idle_s: float,
    ) -> None:
        self._pool, self._connection, self._response = pool, connection, response
        self._reading = threading.Lock()
        self._is_closed = False
        # With `Connection: close`, http.client moves the socket from the connection to the response.
        self._socket = _socket_of(connection, response)
        if self._socket is not None:
            self._socket.settimeout(idle_s)

    def read(self) -> bytes:
        with self._reading:
            if self._is_closed:
                return b""
            try:
                return self._response.read1(CHUNK_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise self._pool.broken(error, "none") from error
            finally:
                if self._is_closed:
                    self._release()

    def close(self) -> None:
        """Close; also from another thread, where it wakes up a blocked read."""
        self._is_closed = True
        self._pool.forget(self)
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # already closed
        # http.client fails if a response is closed during a read. In that case the reading thread closes it.
        if self._reading.acquire(blocking=False):
            self._release()
            self._reading.release()

    def _release(self) -> None:
        self._response.close()
        self._connection.close()


def _socket_of(
    connection: http.client.HTTPConnection, response: http.client.HTTPResponse
) -> socket.socket | None:
    found = connection.sock
    if found is None:
        found = getattr(getattr(response.fp, "raw", None), "_sock", None)
    return found


def _is_readable(sock: socket.socket | None) -> bool:
    """An idle connection is readable when the server has closed it."""
    if sock is None:
        return True
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def reason_of(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead | http.client.RemoteDisconnected):
        return "the connection broke"
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "the server does not use TLS; try http:// instead"
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error) or type(error).__name__).lower()
