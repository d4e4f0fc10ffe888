"""The HTTP server of a front: listening socket, sweep of idle connections, draining."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from router.connections.budget import ByteBudget
from router.connections.connection import Connection
from router.connections.handover import Handovers
from router.connections.http2 import Http2Connection
from topics.api.api_keys import parse_keys
from topics.protocols.http.admission import Admission
from topics.protocols.http.call import Services

logger = logging.getLogger("topics.front")

SWEEP_EVERY_S = 1.0
RECEIVING_BYTES_MAX = 256 << 20  # of incomplete request bodies, over all connections
SENDING_BYTES_MAX = 256 << 20  # of unsent HTTP/2 responses
DRAIN_S = 10.0
OFFLOADED_MAX = 64  # bodies waiting for (de)compression; more are sent uncompressed, or refused
LONG_POLL_GRACE_US = 200_000  # a younger read is not waiting yet, and gets its reply


class Server:
    def __init__(
        self,
        services: Services,
        loop: asyncio.AbstractEventLoop,
        make_admission: Callable[..., Admission] = Admission,
        *,
        hands_over: bool = False,
    ) -> None:
        """`hands_over`: workers may serve connections."""
        self.services = services
        self._loop = loop
        settings = services.settings
        self.now_us = services.now_us
        self.fast_path = settings.fast_path
        self.body_bytes_max = settings.max_body_bytes
        self.connections: set[Connection] = set()
        self.stalled_bytes = 0
        self.receiving = ByteBudget(RECEIVING_BYTES_MAX)
        self._sending = ByteBudget(SENDING_BYTES_MAX)
        self._offloaded = 0
        self._threads = ThreadPoolExecutor(2, "gzip")
        # One large body at a time, without delaying small ones.
        self._large_threads = ThreadPoolExecutor(1, "gunzip")
        self.admission = make_admission(
            services, parse_keys(settings.api_keys), self.buffered_bytes, self._offload
        )
        self.handovers = (
            Handovers(services.shards.count, loop, self.now_us, self._take_back, settings.handover)
            if hands_over
            else None
        )
        self._taking_back: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None

    @property
    def draining(self) -> bool:
        return self.services.draining

    def buffered_bytes(self) -> int:
        return self.stalled_bytes + self._sending.held

    def buffered_share(self) -> float:
        return self.buffered_bytes() / SENDING_BYTES_MAX

    def _offload(
        self, work: Callable[[], Any], done: Callable[[Any], None], size: int = 0, *, is_large: bool = False
    ) -> bool:
        """Run a function on another thread. Returns False if too many are waiting."""
        if self._offloaded >= OFFLOADED_MAX or not self.receiving.take(size):
            return False
        self._offloaded += 1

        def guarded() -> Any:
            try:
                return work()
            except Exception:
                logger.exception("offloaded work failed")
                return None

        def finished(future: asyncio.Future[Any]) -> None:
            self._offloaded -= 1
            self.receiving.release(size)
            done(future.result())

        threads = self._large_threads if is_large else self._threads
        self._loop.run_in_executor(threads, guarded).add_done_callback(finished)
        return True

    # -- connections ---------------------------------------------------------------------------------------

    async def start(self, listening: socket.socket) -> None:
        self._listener = await self._loop.create_server(
            lambda: Connection(self), sock=listening, backlog=4096
        )
        self._sweep_timer = self._loop.call_later(SWEEP_EVERY_S, self._sweep)

    def _take_back(self, sock: socket.socket, early: bytes, returns: int) -> None:
        """Serve a connection that a worker has returned, with its unread bytes."""

        async def connect() -> None:
            try:
                await self._loop.connect_accepted_socket(
                    lambda: Connection(self, returns=returns, early=early), sock
                )
            except OSError:  # the client has disconnected
                sock.close()

        task = self._loop.create_task(connect())
        self._taking_back.add(task)
        task.add_done_callback(self._taking_back.discard)

    def new_http2_connection(self, transport: asyncio.Transport) -> Http2Connection:
        return Http2Connection(
            transport,
            self.admission,
            body_bytes_max=self.services.settings.max_body_bytes,
            receiving=self.receiving,
            sending=self._sending,
            now_us=self.now_us,
        )

    def _sweep(self) -> None:
        settings, now_us = self.services.settings, self.now_us()
        idle_us, request_us = settings.keepalive_ms * 1000, settings.request_timeout_ms * 1000
        for connection in list(self.connections):
            connection.sweep(now_us, idle_us=idle_us, request_us=request_us)
        self._sweep_timer = self._loop.call_later(SWEEP_EVERY_S, self._sweep)

    # -- draining ------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Stop accepting connections, and wait up to DRAIN_S for open requests."""
        self.services.draining = True
        if self.handovers is not None:
            self.handovers.drain()
        if self._listener is not None:
            self._listener.close()
        self.services.shards.end_polls(self.now_us() - LONG_POLL_GRACE_US)
        for connection in list(self.connections):
            connection.drain()
        give_up = self._loop.time() + DRAIN_S
        while self.admission.open and self._loop.time() < give_up:
            self.services.shards.end_polls(self.now_us() - LONG_POLL_GRACE_US)
            await asyncio.sleep(0.02)
        await self._flush(give_up)
        if self.handovers is not None:
            self.handovers.close()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        self._threads.shutdown(wait=False)
        self._large_threads.shutdown(wait=False)

    async def _flush(self, give_up: float) -> None:
        """Wait for unsent responses and closing streams."""
        while self._loop.time() < give_up and any(
            c.is_streaming or (c.transport is not None and c.transport.get_write_buffer_size())
            for c in self.connections
        ):
            await asyncio.sleep(0.02)
