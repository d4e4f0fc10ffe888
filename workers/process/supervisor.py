"""The supervisor: opens the port, starts workers and fronts, restarts dead processes, drains all of them at shutdown.

It never touches records. If the configured number of shards differs from that of the data directory, a child process
(reshard_program.py) changes it first. The supervisor guarantees:

- One server per data directory (lock), and one process per shard: a dead worker is reaped before its exit is announced
  and before its successor is started.
- Fronts and workers know the reachable workers: a new `peers` message goes out when a worker has exited, and when its
  successor listens.
- The order of a shutdown: fronts finish their requests; workers send each other the pending copies of forwards; when
  there are none left, or after FLUSH_COPIES_S, workers write their last snapshots and exit.

Signals: SIGTERM and SIGINT drain; a second one, half a second later or more, kills all processes. SIGHUP is ignored.

Exit codes:

    0  drained and stopped
    1  an unexpected error, or a stop that had to be forced
    2  the configuration or the data directory's layout was refused
    3  another server holds the data directory
    4  the address or port cannot be bound
    5  stopped while a shard was down or a process kept failing
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import topics
from topics.api.api_keys import parse_keys
from topics.engine.storage.layout import Layout
from topics.link.control_channel import (
    CopiesPending,
    Drain,
    Failed,
    FlushCopies,
    Listening,
    Locked,
    Message,
    Peers,
    Ping,
    Pong,
    Ready,
    Serving,
)
from topics.system.in_flight import InFlightTable
from topics.system.logs import log
from topics.system.settings import Settings, find_warnings
from workers.process import exit_codes, listeners
from workers.process import reshard as resharding
from workers.process.child import Child
from workers.process.data_directory import PRIVATE_UMASK, DataDirectory
from workers.process.exit_codes import BadConfiguration, Refusal
from workers.process.liveness import Heartbeat, ping_interval_s
from workers.process.slots import FrontMain, FrontSlot, Slot, WorkerMain, WorkerSlot

SHARDS_DEFAULT_MAX = 8
FRONT_DRAIN_S = 12.0  # fronts allow their clients 10 s
FLUSH_COPIES_S = 10.0
SAME_SIGNAL_S = 0.5  # a stop of both the process and its group sends two signals that mean one
REASON_MAX = 500  # characters of a failure reason; every error for the shard's topics repeats it
WORKER_DRAIN_S = 60.0  # enough for the final snapshot of a full shard on a slow disk

logger = logging.getLogger("topics.supervisor")


def serve(settings: Settings, worker_main: WorkerMain, front_main: FrontMain) -> int:
    """Run the server until it is stopped; returns the exit code."""
    # If SIGCHLD was inherited as ignored, children could not be waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A umask rather than modes: it covers files of all processes, and the default ACL of a directory overrides it.
    os.umask(PRIVATE_UMASK)
    try:
        _check(settings)
        directory = DataDirectory(settings.data_dir)
        try:
            return _serve_from(directory, settings, worker_main, front_main)
        finally:
            directory.close()
    except Refusal as refusal:
        logger.error("not started: %s", refusal)
        return refusal.exit_code
    except Exception:
        logger.exception("unexpected error")
        return exit_codes.UNEXPECTED


def _check(settings: Settings) -> None:
    """Log problems of the environment. Refuse unsafe settings, or any problem with TOPICS_STRICT_SETTINGS=1."""
    found = find_warnings(os.environ)
    for warning in found:
        logger.warning("%s", warning.text)
    if problems := settings.problems():
        raise BadConfiguration("; ".join(problems))
    if found and settings.strict_settings:
        names = ", ".join(warning.variable for warning in found)
        raise BadConfiguration(f"TOPICS_STRICT_SETTINGS=1 refuses {names}; correct or unset them")


def _serve_from(
    directory: DataDirectory, settings: Settings, worker_main: WorkerMain, front_main: FrontMain
) -> int:
    raise_open_files()
    bound = listeners.bind(settings.host, settings.port, settings.fronts)
    # After binding the port: a start that fails for it must not change the number of shards. Clients that connect early
    # wait in the backlog for the first front.
    layout = directory.layout(settings.wal_shards or min(os.cpu_count() or 1, SHARDS_DEFAULT_MAX))
    shards = settings.wal_shards or layout.shards
    if shards != layout.shards or directory.has_stale_layouts(layout):
        code = resharding.run(directory, shards)
        if code is not None:
            return code
        layout = directory.layout(shards)
    address = listeners.address_of(bound[0])
    if settings.port_file:
        listeners.write_port_file(settings.port_file, address)
    run_dir = directory.make_run_dir()
    log(
        logger,
        logging.INFO,
        f"topics {topics.__version__} on http://{address}",
        data_dir=directory.path,
        shards=layout.shards,
        fronts=len(bound),
        pid=os.getpid(),
        keys=len(parse_keys(settings.api_keys)),
    )
    try:
        supervisor = Supervisor(
            settings,
            layout=layout,
            bound=bound,
            run_dir=run_dir,
            worker_main=worker_main,
            front_main=front_main,
        )
        return asyncio.run(supervisor.run())
    finally:
        directory.remove_run_dir(run_dir)


def raise_open_files() -> None:
    """Raise the limit of open files to the hard limit, for child processes too: connections and segments need many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Supervisor:
    """The running processes."""

    def __init__(
        self,
        settings: Settings,
        *,
        layout: Layout,
        bound: Sequence[socket.socket],
        run_dir: Path,
        worker_main: WorkerMain,
        front_main: FrontMain,
    ) -> None:
        self._timeout_s = settings.ping_timeout_ms / 1000
        table = InFlightTable(layout.shards + len(bound), len(parse_keys(settings.api_keys)))
        self._workers = [
            WorkerSlot(shard, layout, run_dir, worker_main, table) for shard in range(layout.shards)
        ]
        self._fronts = [
            FrontSlot(front, layout.shards, listener, front_main, table)
            for front, listener in enumerate(bound)
        ]
        self._slots: list[Slot] = [*self._workers, *self._fronts]
        self._stopping = asyncio.Event()
        self._stopping_since_s = 0.0
        self._forced = asyncio.Event()
        self._copies_flushed = asyncio.Event()
        self._announced = False
        self._told = Peers([])

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_stop_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            for slot in self._slots:
                self._start(slot)
            self._tick()
            await self._stopping.wait()
            return await self._drain()
        finally:
            await self._end_all([slot.child for slot in self._slots if slot.child], limit_s=0)

    def _on_stop_signal(self) -> None:
        if self._stopping.is_set():
            if self._loop.time() - self._stopping_since_s < SAME_SIGNAL_S:
                return
            log(logger, logging.WARNING, "second signal: killing all processes")
            self._forced.set()
            for slot in self._slots:
                if slot.child:
                    slot.child.kill()
            return
        self._stopping_since_s = self._loop.time()
        self._stopping.set()

    # -- children --------------------------------------------------------------------------------------------

    def _start(self, slot: Slot) -> None:
        slot.restart = None
        try:
            slot.child = Child(
                slot.name,
                slot.next_entry(),
                inherited=slot.inherited(),
                heartbeat=Heartbeat(self._timeout_s),
                on_message=lambda child, message: self._received(slot, child, message),
                on_end=lambda child: self._ended(slot, child),
            )
        except OSError as error:
            # Out of processes, memory or descriptors: try again later.
            self._restart_later(slot, worked_s=0.0, reason=str(error))
            self._tell_peers()
            return
        slot.child.channel.send(self._peers())
        log(logger, logging.INFO, f"{slot.name} started", pid=slot.child.pid)

    def _received(self, slot: Slot, child: Child, message: Message) -> None:
        match message:
            case Pong():
                child.heartbeat.answered()
            case Failed(reason):
                child.reason = reason[:REASON_MAX]
            case Locked() if isinstance(slot, WorkerSlot):
                slot.locked = True
                self._tell_peers()
            case Listening() if isinstance(slot, WorkerSlot):
                slot.listening, slot.locked = True, False
                self._tell_peers()
            case Ready() | Serving():
                was_failing = slot.is_failing
                slot.up_since_s = self._loop.time()
                if was_failing:
                    self._tell_peers()
                log(
                    logger,
                    logging.INFO,
                    f"{slot.name} is {'ready' if isinstance(message, Ready) else 'serving'}",
                )
                self._announce()
            case CopiesPending(pending) if isinstance(slot, WorkerSlot):
                slot.copies_pending = pending
                self._check_copies()
            case _:
                log(logger, logging.WARNING, f"{slot.name} sent an unexpected message", message=message)

    def _ended(self, slot: Slot, child: Child) -> None:
        worked_s = 0.0 if slot.up_since_s is None else self._loop.time() - slot.up_since_s
        slot.vacate()
        if not self._stopping.is_set():
            self._restart_later(slot, worked_s=worked_s, reason=child.end_text)
        elif child.exit_code != 0:
            log(logger, logging.WARNING, f"{slot.name} failed", pid=child.pid, reason=child.end_text)
        else:
            log(logger, logging.INFO, f"{slot.name} stopped", pid=child.pid)
        self._tell_peers()
        if isinstance(slot, WorkerSlot):
            self._check_copies()

    def _restart_later(self, slot: Slot, *, worked_s: float, reason: str) -> None:
        delay_s = slot.backoff.delay_after(worked_s)
        slot.last_end = reason
        slot.restart = self._loop.call_later(delay_s, self._start, slot)
        level, what = (logging.ERROR, "keeps failing") if slot.is_failing else (logging.WARNING, "died")
        log(
            logger,
            level,
            f"{slot.name} {what}",
            reason=reason,
            failures=slot.backoff.failures,
            restart_in_ms=round(delay_s * 1000),
        )

    def _tick(self) -> None:
        """Ping all children and kill those that have not answered for too long; their exit restarts them."""
        self._ticker = self._loop.call_later(ping_interval_s(self._timeout_s), self._tick)
        for child in [slot.child for slot in self._slots if slot.child]:
            if child.heartbeat.tick():
                child.channel.send(Ping())
            elif child.heartbeat.hung and not child.killed:
                log(logger, logging.ERROR, f"{child.name} does not answer: killing it", pid=child.pid)
                child.reason = "it did not answer and was killed"
                child.kill()

    # -- peers -----------------------------------------------------------------------------------------------

    def _peers(self) -> Peers:
        return Peers(
            [slot.peer for slot in self._workers if slot.listening],
            [outage for slot in self._slots if (outage := slot.outage)],
        )

    def _tell_peers(self) -> None:
        peers = self._peers()
        if peers == self._told:
            return
        self._told = peers
        for slot in self._slots:
            if slot.child:
                slot.child.channel.send(peers)

    def _announce(self) -> None:
        if not self._announced and all(slot.up for slot in self._slots):
            self._announced = True
            log(logger, logging.INFO, "all processes are up")

    # -- shutdown --------------------------------------------------------------------------------------------

    async def _drain(self) -> int:
        """Fronts first: workers must still answer while fronts finish their requests."""
        log(logger, logging.INFO, "draining")
        self._ticker.cancel()
        # A shard that is down gets no last snapshot, and a process that keeps failing did not serve.
        failing = [
            slot for slot in self._slots if slot.is_failing or (slot in self._workers and not slot.child)
        ]
        for slot in self._slots:
            if slot.restart:
                slot.restart.cancel()
        workers = [slot.child for slot in self._workers if slot.child]
        sound = [slot.child for slot in self._workers if slot.child and not slot.is_failing]
        fronts = [slot.child for slot in self._fronts if slot.child]
        for child in fronts:
            child.channel.send(Drain())
        for front in self._fronts:
            front.stop_accepting()
        await self._end_all(fronts, limit_s=FRONT_DRAIN_S)
        await self._flush_copies()
        for child in workers:
            child.channel.send(Drain())
        await self._end_all(workers, limit_s=WORKER_DRAIN_S)
        code = exit_codes.FAILING if failing else exit_codes.CLEAN
        if self._forced.is_set() or any(child.exit_code != 0 for child in sound):
            code = exit_codes.UNEXPECTED
        if failing:
            names = [slot.name for slot in failing]
            log(logger, logging.ERROR, "stopped while processes were failing", processes=names)
        else:
            log(logger, logging.INFO, "stopped", clean=code == exit_codes.CLEAN)
        return code

    async def _flush_copies(self) -> None:
        """Let serving workers send each other the pending copies of forwards; the rest is sent after the next start."""
        self._copies_flushed.clear()  # a worker that exited meanwhile may have set it
        for slot in self._workers:
            if slot.child and slot.up:
                slot.copies_pending = True  # until it reports otherwise
                slot.child.channel.send(FlushCopies())
        self._check_copies()
        try:
            await asyncio.wait_for(self._copies_flushed.wait(), FLUSH_COPIES_S)
        except TimeoutError:
            behind = [slot.name for slot in self._workers if slot.copies_pending]
            log(logger, logging.WARNING, "pending copies will be sent after the next start", workers=behind)

    def _check_copies(self) -> None:
        """A worker that accepts copies may have new copies to send itself. It reports that before it acknowledges them.
        So once all messages received by now are handled and no worker has pending copies, there are none left.
        """

        def check_again() -> None:
            if not any(slot.copies_pending for slot in self._workers):
                self._copies_flushed.set()

        if self._stopping.is_set() and not any(slot.copies_pending for slot in self._workers):
            self._loop.call_soon(check_again)

    async def _end_all(self, children: Sequence[Child], limit_s: float) -> None:
        """Wait until all have exited; kill those still running after `limit_s` or at a second signal."""
        ends: asyncio.Future[list[bool]] = asyncio.gather(*(child.ended.wait() for child in children))
        forced: asyncio.Future[bool] = asyncio.ensure_future(self._forced.wait())
        await asyncio.wait((ends, forced), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        for child in children:
            if not child.ended.is_set():
                log(logger, logging.WARNING, f"{child.name} did not stop: killing it", pid=child.pid)
                child.kill()
        await ends
