"""The event loop of a shard worker: wait → drain the sockets → one turn → start its jobs → send.

    clients handed over  ──TCP─────▶ ┐
    front, other workers ──ROUTER──▶ │
    answers of workers   ──DEALER──▶ ├─ poll ─▶ ShardCore ─▶ replies, and requests to other workers
    supervisor           ──control─▶ │              │ jobs
    finished jobs        ──eventfd─▶ ┘    threads for syncs, rewrites, transactions, the cold tier, all other jobs

When nothing is scheduled, the poll waits without a timeout.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import zmq

from topics.api.limits import COLD_FETCHES_MAX
from topics.engine.runtime.boundary import COLD_KINDS, READ_KIND, REWRITE_KIND, STAGE_KIND, Job
from topics.link import wire
from topics.link.control_channel import (
    Channel,
    CopiesPending,
    Drain,
    FlushCopies,
    Listening,
    Message,
    Peers,
    Ping,
    Pong,
    Ready,
)
from topics.link.sockets import NOBLOCK, NOBLOCK_MORE, descriptor, has_input, has_more
from workers.peers.sockets import PeerSockets
from workers.shard.connections import ClientConnections
from workers.shard.core import Actions, ShardCore

logger = logging.getLogger("topics.shard")

DRAIN_MESSAGES = 256  # per turn; the rest waits for the next
DRAIN_REQUESTS = 32  # enough for group commit; more would delay the first replies
DRAIN_BYTES = 16 << 20
ZERO_COPY_BYTES = 1 << 20  # below it a copy is cheaper than the notification that the buffer may be freed
COPIES_DELAY_NS = 400_000  # copies leave the cores to earlier replies for this long
POLL_MS_MAX = 3_600_000  # a poll timeout has 32 bits, and a consumer may expire in a month
EVENTS_MAX = 64  # per poll. The kernel queues a reported descriptor behind the others, so all have their turn
DRAIN_S = 10.0
DRAIN_POLL_MS = 20
RECOVERY_SLICE_S = 0.02  # between two polls of the sockets

# Given the loop's epoll, and what wakes the loop.
OpenClients = Callable[[select.epoll, Callable[[], None]], ClientConnections]
Finished = tuple[Job, BaseException | None, float]  # job, its error, milliseconds


STAGE_THREADS = 2  # for files of transactions: each file has one job at a time, which may be a sync


class JobThread:
    """Runs jobs in FIFO order, on one thread or several; calls `done` after each."""

    def __init__(self, name: str, done: Callable[[Finished], None], threads: int = 1) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._done = done
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            began = time.perf_counter()
            error: BaseException | None = None
            try:
                job.run()
            except BaseException as failure:
                error = failure
            self._done((job, error, (time.perf_counter() - began) * 1000))


class ShardLoop:
    def __init__(
        self,
        core: ShardCore,
        control: Channel,
        socket_path: str,
        open_clients: OpenClients | None = None,
    ) -> None:
        """`open_clients`: called once the shard is ready, if fronts may hand over connections."""
        self._core = core
        self._open_clients = open_clients
        self._clients: ClientConnections | None = None
        self._control = control
        self._context = zmq.Context(1)
        self._socket = self._open_socket(socket_path)
        self._finished: deque[Finished] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._syncs = JobThread("sync", self._job_done)
        self._others = JobThread("work", self._job_done)
        self._rewrites: JobThread | None = None
        self._stages: JobThread | None = None
        # Never joined: a call to the cold store may take seconds, and longer while the server stops.
        self._moves: JobThread | None = None
        self._fetches: JobThread | None = None
        self._jobs_out = 0
        self._wake_at_ms: int | None = None
        self._has_replied = False  # in this step
        self._copies_at_ns: int | None = None  # when waiting copies are begun
        self._state: tuple[bool, str | None] = (False, None)  # disk full, read-only: as last logged
        self._cold_problem = ""  # as last logged
        self._stopping = False
        self._flushing_copies = False  # the supervisor waits until no copies are pending
        self._copies_pending: bool | None = None  # as last reported to it
        self._control_fd = control.fileno()
        self._poller = select.epoll()
        self._fds = (descriptor(self._socket), self._wake_fd, self._control_fd)
        for fd in self._fds:
            self._poller.register(fd, select.EPOLLIN)
        self._peers = PeerSockets(self._context, self._poller)

    def _open_socket(self, path: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 1000
        socket.sndhwm = socket.rcvhwm = 0  # fronts limit themselves by credits
        socket.sndbuf = socket.rcvbuf = wire.SOCKET_BYTES
        socket.router_mandatory = True
        socket.bind(f"ipc://{path}")
        return socket

    def _job_done(self, finished: Finished) -> None:
        self._finished.append(finished)
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    # -- run -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        self._control.send(Listening())
        self._recover()
        while not self._stopping:
            self._wait()
            self._step()
        self._drain_clients()
        self._close()

    def _recover(self) -> None:
        """Replay the log, and answer with its progress meanwhile."""
        core = self._core
        poll_at = 0.0
        began = time.monotonic()
        gc.disable()  # nothing built here becomes garbage, and scanning it again and again costs more than building it
        for progress in core.engine.recover_steps():
            core.progress = min(progress, 0.9999)
            now = time.monotonic()
            if now >= poll_at:
                poll_at = now + RECOVERY_SLICE_S
                self._poll(0)
                self._receive()
                self._act(core.tend())
                if self._stopping:
                    return
        core.progress = 1.0
        gc.freeze()  # later collections skip it
        gc.enable()
        core.start()
        if self._open_clients is not None:
            self._clients = self._open_clients(self._poller, self._wake)
        self._control.send(Ready())
        fields = {
            "topics": core.engine.stats.topics,
            "records": core.engine.stats.records_live,
            "took_ms": round((time.monotonic() - began) * 1000, 1),
            "read_only": core.engine.stats.read_only,
        }
        logger.info("the shard is ready", extra={"fields": fields})
        self._do(core.turn())

    def _wait(self) -> None:
        timeout_ms: int | None = None
        clients = self._clients
        if (
            self._finished
            or self._core.needs_turn
            or self._core.has_large
            or self._has_messages()
            or (clients is not None and clients.has_work)
        ):
            timeout_ms = 0
        elif self._wake_at_ms is not None:
            timeout_ms = max(0, self._wake_at_ms - time.monotonic_ns() // 1_000_000)
            timeout_ms = min(timeout_ms, POLL_MS_MAX)
        if clients is not None and timeout_ms != 0 and (due_us := clients.wake_at_us()) is not None:
            due_ms = max(0, due_us // 1000 + 1 - time.monotonic_ns() // 1_000_000)
            timeout_ms = due_ms if timeout_ms is None else min(timeout_ms, due_ms)
        if self._copies_at_ns is not None and timeout_ms != 0:
            wait_ns = self._copies_at_ns - time.monotonic_ns()
            if wait_ns > 0:  # epoll has only milliseconds
                select.select((self._poller,), (), (), wait_ns / 1e9)
            timeout_ms = 0
        self._poll(timeout_ms)

    def _has_messages(self) -> bool:
        """Checked before every wait, because ZeroMQ's descriptors are edge-triggered."""
        return self._peers.has_messages or has_input(self._socket)

    def _poll(self, timeout_ms: int | None) -> None:
        clients = self._clients
        ready = self._poller.poll(None if timeout_ms is None else timeout_ms / 1000, EVENTS_MAX)
        if clients is not None:
            clients.received_us = time.monotonic_ns() // 1000
        for fd, events in ready:
            if fd == self._wake_fd:
                # Reset here and not when the job is handled: it may have been handled before the eventfd was written,
                # and an eventfd that stays readable would keep an idle shard spinning.
                os.eventfd_read(self._wake_fd)
            elif fd == self._control_fd:
                self.handle_control(self._control.receive())
                if self._control.closed:
                    self._poller.unregister(fd)
                    self._stopping = True
            else:
                if clients is not None:
                    clients.ready(fd, events)
                self._peers.readable(fd)

    def _step(self) -> None:
        """One iteration: receive, finish jobs, one turn."""
        core = self._core
        self._has_replied = False
        self._receive()
        if self._clients is not None:
            self._clients.run_due(self._clients.received_us)
        while self._finished:
            self._finish(*self._finished.popleft())
        if core.has_large:
            core.read_large()
        due = self._wake_at_ms is not None and self._wake_at_ms <= time.monotonic_ns() // 1_000_000
        if core.needs_turn or due:
            self._do(core.turn())
        elif core.needs_tending or self._flushing_copies:  # the latter is reported with every step
            self._act(core.tend())
        if core.engine.stats.backlog or self._may_copy():
            self._do(core.turn())  # the replies have left: deliver more

    def _may_copy(self) -> bool:
        """Whether to begin copies now. A reply passes through two more threads or processes on its way to the client;
        copies are less urgent, and would delay it if they took the cores at once.
        """
        core = self._core
        if not core.has_copies:
            self._copies_at_ns = None
            return False
        now_ns = time.monotonic_ns()
        if self._copies_at_ns is None and self._has_replied:
            self._copies_at_ns = now_ns + COPIES_DELAY_NS
        if self._copies_at_ns is not None and now_ns < self._copies_at_ns and not core.are_copies_urgent:
            return False
        self._copies_at_ns = None
        return True

    def _drain_clients(self) -> None:
        """Answer the open requests of clients that this worker serves itself."""
        clients = self._clients
        if clients is None:
            return
        clients.drain()
        give_up = time.monotonic() + DRAIN_S
        while not clients.is_drained and time.monotonic() < give_up:
            self._poll(0 if self._core.needs_turn or self._finished else DRAIN_POLL_MS)
            self._step()
        clients.close()
        self._clients = None

    def _close(self) -> None:
        """Finish running jobs, then the engine's last turn, then send the last replies."""
        core = self._core
        gc.disable()  # the process exits soon: do not slow down the last checkpoint
        core.engine.stop_cold()
        while self._jobs_out:
            self._poll(100)
            while self._finished:
                self._finish(*self._finished.popleft())
        if core.is_ready:
            self._send(core.close())
        self._syncs.stop()
        self._others.stop()
        if self._stages is not None:
            self._stages.stop()
        if self._rewrites is not None:
            self._rewrites.stop()
        self._socket.close()
        self._peers.close()
        self._context.term()
        logger.info("the shard is closed")

    # -- in ------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        self._drain_socket()
        self._peers.drain(self._core.receive_reply)

    def handle_control(self, messages: list[Message]) -> None:
        """Messages of the supervisor."""
        for message in messages:
            match message:
                case Ping():
                    self._control.send(Pong())
                case FlushCopies():
                    self._flushing_copies = True
                case Drain():
                    self._stopping = True
                case Peers(workers):
                    self._core.set_peers({peer.shard: peer.incarnation for peer in workers})
                    self._peers.set_peers({peer.shard: peer for peer in workers})

    def _drain_socket(self) -> None:
        receive, core, size = self._socket.recv, self._core, 0
        for _ in range(DRAIN_MESSAGES):
            if not has_input(self._socket):
                return
            peer, message, separate = receive(NOBLOCK), b"", None
            if has_more(self._socket):
                message = receive(NOBLOCK)
            if has_more(self._socket):  # a large body; not copied, as it may be refused
                separate, peer = receive(NOBLOCK, copy=False).buffer, wire.front_of(peer)
            try:
                core.receive(peer, message, separate)
            except wire.BadMessage as error:
                logger.error("a message could not be decoded", extra={"fields": {"error": str(error)}})
            size += len(message) + (len(separate) if separate is not None else 0)
            if size > DRAIN_BYTES or core.pending >= DRAIN_REQUESTS:
                return

    def _finish(self, job: Job, error: BaseException | None, took_ms: float) -> None:
        self._jobs_out -= job.kind not in COLD_KINDS
        self._do(self._core.finish(job, error, took_ms))

    # -- out -----------------------------------------------------------------------------------------------

    def _do(self, actions: Actions) -> None:
        """Carry out what a turn has decided; only then, and if needed, what follows from it."""
        self._act(actions)
        if self._core.needs_tending:
            self._act(self._core.tend())

    def _act(self, actions: Actions) -> None:
        for job in actions.jobs:
            self._jobs_out += job.kind not in COLD_KINDS
            self._thread_for(job.kind).put(job)
        self._wake_at_ms = actions.wake_at_ms
        if self._flushing_copies:
            # Before the replies: a worker that sees its copies acknowledged may then report that it has none pending.
            self._report_copies()
        self._send(actions)
        stats = self._core.engine.stats
        if (stats.is_full, stats.read_only) != self._state:
            self._log_state(stats.is_full, stats.read_only)
        if stats.cold_problem != self._cold_problem:
            self._cold_problem = stats.cold_problem
            logger.warning(self._cold_problem or "the cold tier accepts segments again")

    def _thread_for(self, kind: str) -> JobThread:
        if kind == "sync":
            return self._syncs
        if kind == STAGE_KIND:
            if self._stages is None:
                self._stages = JobThread("stages", self._job_done, STAGE_THREADS)
            return self._stages
        if kind == REWRITE_KIND:  # must not delay checkpoints
            if self._rewrites is None:
                self._rewrites = JobThread("rewrites", self._job_done)
            return self._rewrites
        if kind not in COLD_KINDS:
            return self._others
        if self._moves is None or self._fetches is None:
            self._moves = JobThread("cold-moves", self._job_done)
            self._fetches = JobThread("cold-reads", self._job_done, COLD_FETCHES_MAX)
        return self._fetches if kind == READ_KIND else self._moves

    def _report_copies(self) -> None:
        pending = self._core.forwarding.forwarder.has_pending_copies
        if pending != self._copies_pending:
            self._copies_pending = pending
            self._control.send(CopiesPending(pending))

    def _log_state(self, disk_full: bool, read_only: str | None) -> None:
        """Log when writes become impossible, and when they are possible again."""
        was_full, was_read_only = self._state
        self._state = disk_full, read_only
        if disk_full != was_full:
            text = (
                "the disk is full: writes are refused until space is freed"
                if disk_full
                else "the disk has space again: writes are accepted"
            )
            logger.warning(text)
        if read_only != was_read_only:
            logger.critical("the shard is read-only until a restart", extra={"fields": {"reason": read_only}})

    def _send(self, actions: Actions) -> None:
        self._has_replied = self._has_replied or bool(actions.sends) or bool(actions.local_replies)
        send = self._socket.send
        for peer, parts in actions.sends:
            try:
                send(peer, NOBLOCK_MORE)
                if len(parts) == 1:
                    send(parts[0], NOBLOCK)
                else:
                    send(parts[0], NOBLOCK_MORE)
                    send(parts[1], NOBLOCK, copy=len(parts[1]) < ZERO_COPY_BYTES)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._core.forget_peer(peer)  # that front is gone
        if actions.local_replies and self._clients is not None:
            self._clients.receive_replies(actions.local_replies)
        for shard, message in actions.requests:
            self._peers.send(shard, message)
