"""The front process, started by the supervisor."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import time
from typing import TYPE_CHECKING

import uvloop

import topics
from router.pressure import FrontPressure
from router.server import Server
from router.shard_client import ShardClient
from router.watch.service import start_streams
from topics.api.api_keys import secrets_of
from topics.link.control_channel import Drain, LoopChannel, Message, Peers, Ping, Pong, Serving
from topics.protocols.http.admission import Admission
from topics.protocols.http.call import Services
from topics.system import logs
from topics.system.extras import install_command
from topics.system.process import FrontSpec
from topics.system.settings import Settings, hands_over, wants_spans

if TYPE_CHECKING:
    from router.spans import Spans

logger = logging.getLogger("topics.front")


def now_us() -> int:
    return time.monotonic_ns() // 1000


def open_spans(front: int) -> Spans | None:
    if not wants_spans(os.environ):
        return None
    try:
        from router.spans import Spans
    except ImportError as error:
        # With TOPICS_OTEL=1 the server would not have started; the OTEL_ variables may be meant for other programs.
        logger.warning(
            "request spans are off: %s; run %s, or set TOPICS_OTEL=0", error, install_command("otel")
        )
        return None
    return Spans(front)


async def serve(spec: FrontSpec, control: socket.socket, settings: Settings) -> None:
    loop = asyncio.get_running_loop()
    client = ShardClient(spec.shards, loop, now_us)
    services = Services(
        client.core, settings, now_us, topics.__version__, spec.started_us, in_flight=spec.in_flight
    )
    streams = start_streams(
        services,
        client.core,
        lambda us, call: loop.call_later(us / 1e6, call),
        lambda: time.time_ns() // 1_000_000,
    )
    spans = open_spans(spec.front)
    server = Server(
        services,
        loop,
        Admission if spans is None else spans.admission,
        hands_over=hands_over(settings, os.environ),
    )
    streams.fanout.buffered_bytes = server.buffered_bytes
    pressure = FrontPressure(
        client.core, now_us=now_us, later=services.later, buffered_share=server.buffered_share
    )
    services.pressure = lambda: pressure.value
    ended = asyncio.Event()

    def on_message(message: Message) -> None:
        match message:
            case Ping():
                channel.send(Pong())
            case Peers(workers, outages):
                client.set_peers(workers)
                if server.handovers is not None:
                    server.handovers.set_peers(workers)
                client.core.outages = outages
            case Drain():
                ended.set()

    channel = LoopChannel(control, on_message)
    await server.start(spec.listener)
    channel.send(Serving())
    gc.collect()
    gc.freeze()
    pressure.start()
    await ended.wait()
    logger.info("front draining")
    services.draining = True  # determines the close code of WebSockets
    streams.drain()
    await server.drain()
    await client.settle()
    client.close()
    if spans is not None:
        await loop.run_in_executor(None, spans.flush)


def main(spec: FrontSpec, control: socket.socket) -> int:
    settings = Settings.from_env(os.environ)
    logs.configure(f"front {spec.front}", settings.log_format, secrets_of(settings.api_keys))
    uvloop.run(serve(spec, control, settings))
    return 0
