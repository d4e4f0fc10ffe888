"""Requests over sockets, for threads: the standard library's HTTP with connections that are kept.

A kept connection may have been closed meanwhile: one that has something to read although nothing was asked is not
used again, and neither is one that was idle for long. What still breaks is the business of whoever repeats requests.
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
ANSWER_BYTES_MAX = 256 << 20  # far above what a page of 8 MiB of records can have


class HttpPool:
    """Any number of threads; at most `pool_size` idle connections are kept."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ssl = settings.ssl_context
        if settings.address.is_https and self._ssl is None:
            self._ssl = ssl.create_default_context()
        self._lock = threading.Lock()
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []  # the one used last is last
        # Weakly: who breaks out of a loop over a stream and forgets it has closed it.
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
        """A stream has a connection of its own, which ends with it."""
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
                    # A forked child must not speak on its parent's connections, nor end them.
                    self._pid, self._idle = os.getpid(), []
                if not self._idle:
                    return None
                connection, since = self._idle.pop()
            if since > fresh and not _has_news(connection.sock):
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
                    raise BadAnswer(self._settings.address.url, "its answer has no end", "unknown")
                if connection.sock is not None:
                    connection.sock.settimeout(left_s)
            # A read of so many bytes does not notice that there are fewer than was said.
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
        except (OSError, http.client.HTTPException) as error:
            raise self.broken(error, "unknown") from error
        return b"".join(chunks)

    def broken(self, error: Exception, outcome: Outcome) -> Disconnected:
        url = self._settings.address.url
        if isinstance(error, TimeoutError):
            return TimedOut(url, "it does not answer in time", outcome)
        return Disconnected(url, reason_of(error), outcome)


class Stream:
    """The bytes of an answer without an end."""

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
        # http.client gives its socket away with the answer to a request that ends the connection.
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
        """Also from another thread: one that reads wakes up, and finds the end."""
        self._is_closed = True
        self._pool.forget(self)
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is closed already
        # http.client does not survive that its response is closed under it: who reads does it then.
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


def _has_news(sock: socket.socket | None) -> bool:
    """Something to read on a connection where nothing was asked: its end."""
    if sock is None:
        return True
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def reason_of(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead | http.client.RemoteDisconnected):
        return "the connection broke"
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS; is its address one of http://?"
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error) or type(error).__name__).lower()
