"""The main function of a shard worker process, which the supervisor starts."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import select
import socket
import sys
import time
from collections.abc import Callable

from topics.api import limits
from topics.api.api_keys import secrets_of
from topics.api.config import EngineConfig
from topics.api.errors import TopicsError
from topics.engine.runtime.engine import Engine
from topics.engine.storage.layout import shard_dir
from topics.link.control_channel import Channel, Drain, Failed, Locked, Message, Ping, Pong
from topics.link.handover import socket_path
from topics.system import logs
from topics.system.process import WorkerSpec
from topics.system.settings import Settings, hands_over
from workers.shard import failpoints
from workers.shard.caps import Caps
from workers.shard.connections import ClientConnections, connections_max
from workers.shard.core import ShardCore
from workers.shard.failpoints import BadFailpoint, FailpointDisk
from workers.shard.local_store import LocalSegmentStore, claim
from workers.shard.loop import ShardLoop
from workers.shard.metrics import ShardMetrics
from workers.shard.posix import PosixDisk, SystemClock

logger = logging.getLogger("topics.shard")

SWITCH_INTERVAL_S = 1e-4  # with the default, a busy event loop notices a finished sync 10 ms late
LOCK_RETRY_S = 0.02
RESERVE_PARTS = 20


def engine_config(settings: Settings, shard: int, generation: int) -> EngineConfig:
    return EngineConfig(
        shard=shard,
        shard_dir=shard_dir(generation, shard),
        wal_file_bytes=settings.wal_file_bytes,
        segment_max_events=settings.segment_max_events,
        segment_max_bytes=settings.segment_max_bytes,
        segment_max_age_ms=settings.segment_max_age_ms,
        snapshot_wal_bytes=settings.wal_file_bytes,
        log_bytes_max=max(limits.LOG_FILES * settings.wal_file_bytes, limits.LOG_BYTES_MIN),
        cache_bytes=settings.cache_bytes,
        memory_bytes_max=settings.max_memory_bytes,
        max_topics=settings.max_topics,
        max_total_bytes=settings.max_total_bytes,
        min_free_bytes=part_of_disk(settings, settings.min_free_bytes),
        reserve_bytes=part_of_disk(settings, limits.RESERVE_BYTES),
        hot_retain_segments=settings.hot_retain_segments,
        hot_retain_bytes=settings.hot_retain_bytes,
        relocate_bytes_per_s=settings.relocate_bytes_per_s,
        cold_cache_bytes=settings.cold_cache_bytes,
        cold_dir=os.path.abspath(settings.cold_dir) if settings.cold_dir else "",
        retire_grace_ms=settings.retire_grace_ms,
        plan_ttl_ms=settings.plan_ttl_ms,
        txn_bytes_max=settings.txn_max_bytes,
        txn_shard_bytes_max=settings.txn_shard_bytes,
        reclaim_bytes_per_s=settings.reclaim_bytes_per_s,
        verify=settings.verify,
    )


def part_of_disk(settings: Settings, size: int) -> int:
    """`size`, but at most a fixed part of the disk, so that small disks remain usable."""
    try:
        disk = os.statvfs(settings.data_dir)
    except OSError:
        return size
    return min(size, disk.f_blocks * disk.f_frsize // RESERVE_PARTS)


def lock_shard(path: str, control: Channel) -> list[Message] | None:
    """Lock the shard's directory for the life of this process. Returns the control messages that arrived meanwhile; None:
    it was told to stop.

    After the supervisor was killed, the previous worker may still be in a sync: two writers on one log must be impossible.
    """
    os.makedirs(path, exist_ok=True)
    fd = os.open(f"{path}/LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    is_reported = False
    received: list[Message] = []  # for the event loop, which does not run yet
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return received
        except BlockingIOError:
            if not is_reported:
                logger.warning(
                    "waiting for the previous worker to release the shard", extra={"fields": {"path": path}}
                )
                control.send(Locked())
                is_reported = True
        for message in control.receive():
            if isinstance(message, Ping):
                control.send(Pong())
            elif isinstance(message, Drain):
                return None
            else:
                received.append(message)
        time.sleep(LOCK_RETRY_S)


def open_disk(data_dir: str, shard: int) -> PosixDisk | FailpointDisk:
    """The disk, with failpoints if a test has enabled them."""
    disk = PosixDisk(data_dir)
    folder = os.environ.get(failpoints.VARIABLE)
    return FailpointDisk(disk, folder, shard) if folder else disk


def open_cold(settings: Settings, shard: int) -> LocalSegmentStore | None:
    """The cold tier, if configured, with failpoints if a test has enabled them."""
    if not settings.cold_dir:
        return None

    def through(disk: PosixDisk) -> PosixDisk | FailpointDisk:
        folder = os.environ.get(failpoints.COLD_VARIABLE)
        return FailpointDisk(disk, folder, shard) if folder else disk

    try:
        identity = claim(settings.data_dir, settings.cold_dir)
        return LocalSegmentStore(settings.cold_dir, shard, identity=identity, through=through)
    except OSError as error:
        # Hot segments are still served.
        logger.error("the cold tier cannot be used until a restart: %s", error)
        return None


def now_us() -> int:
    return time.monotonic_ns() // 1000


def main(spec: WorkerSpec, control_socket: socket.socket) -> int:
    settings = Settings.from_env(os.environ)
    logs.configure(f"shard {spec.shard}", settings.log_format, secrets_of(settings.api_keys))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    config = engine_config(settings, spec.shard, spec.generation)
    control = Channel(control_socket)
    received = lock_shard(f"{settings.data_dir}/{config.shard_dir}", control)
    if received is None:
        return 0
    try:
        disk = open_disk(settings.data_dir, spec.shard)
        cold = open_cold(settings, spec.shard)
    except BadFailpoint as error:
        logger.critical("the shard cannot run: %s", error)
        control.send(Failed(str(error)))
        return 1
    engine = Engine(disk, SystemClock(), config, cold)
    caps = Caps(
        engine,
        shard=spec.shard,
        shards=spec.shards,
        incarnation=spec.incarnation,
        now_us=now_us,
    )
    metrics = ShardMetrics(engine, lambda: disk.write_ns)
    core = ShardCore(
        engine,
        caps,
        metrics,
        incarnation=spec.incarnation,
        now_us=now_us,
        disk=disk,
        shards=spec.shards,
        max_sessions=settings.max_watch_sessions,
        max_sessions_per_key=settings.max_watch_sessions_per_key,
        max_forwards=settings.max_routers,
    )

    def open_clients(epoll: select.epoll, wake: Callable[[], None]) -> ClientConnections:
        return ClientConnections(
            core,
            epoll,
            settings,
            path=socket_path(spec.path),
            shard=spec.shard,
            shards=spec.shards,
            connections_max=connections_max(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
            now_us=now_us,
            wake=wake,
            in_flight=spec.in_flight,
        )

    loop = ShardLoop(core, control, spec.path, open_clients if hands_over(settings, os.environ) else None)
    try:
        loop.handle_control(received)
        loop.run()
    except TopicsError as error:
        logger.critical("the shard cannot run: %s", error, extra={"fields": error.detail})
        control.send(Failed(str(error)))
        return 1
    return 0
