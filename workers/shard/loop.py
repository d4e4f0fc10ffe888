"""The loop of a shard worker: wait → drain the sockets → one turn → start its jobs → send.

    front, other workers ──ROUTER──▶ ┐
    answers of workers   ──DEALER──▶ ├─ poll ─▶ ShardCore ─▶ replies, and requests to other workers
    supervisor           ──control─▶ │              │ jobs
    finished jobs        ──eventfd─▶ ┘    syncs on one thread, transactions and the cold tier on threads of their own, all else on another

When nothing is due the poll waits without a timer.
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
from topics.engine.reading.cold_blocks import READ_KIND
from topics.engine.runtime.engine import COLD_KINDS, Job
from topics.engine.shard.transaction_commit import STAGE_KIND
from topics.engine.upkeep.compaction import REWRITE_KIND
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
from topics.link.sockets import descriptor, has_input
from workers.peers.sockets import PeerSockets
from workers.shard.core import Actions, ShardCore

logger = logging.getLogger("topics.shard")

DRAIN_MESSAGES = 256  # in one turn; the rest waits for the next
DRAIN_REQUESTS = 32  # enough to share a write; more would keep the fronts waiting for the first answers
DRAIN_BYTES = 16 << 20
SHARE_BYTES = 1 << 20  # below it a copy costs less than the thread that has to hear when it may be freed
COPIES_WAIT_NS = 400_000  # they leave the cores to the answers before them for so long
POLL_MS_MAX = 3_600_000  # a wait has 32 bits, and an idle consumer may be due in a month
RECOVERY_SLICE_S = 0.02  # between two looks at the sockets

Finished = tuple[Job, BaseException | None, float]


STAGE_THREADS = 2  # files of transactions: each has one job at a time, which may be a sync


class JobThread:
    """Runs jobs in the order of their coming; whoever made it is woken when one is done."""

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
    def __init__(self, core: ShardCore, control: Channel, socket_path: str) -> None:
        self._core = core
        self._control = control
        self._context = zmq.Context(1)
        self._socket = self._open_socket(socket_path)
        self._finished: deque[Finished] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._syncs = JobThread("sync", self._job_done)
        self._others = JobThread("work", self._job_done)
        self._rewrites: JobThread | None = None
        # A cold store may take seconds a call, and as long as it likes when the server stops: nobody joins these.
        self._stages: JobThread | None = None
        self._moves: JobThread | None = None
        self._fetches: JobThread | None = None
        self._jobs_out = 0
        self._wake_at_ms: int | None = None
        self._has_answered = False  # in this step
        self._copies_at_ns: int | None = None  # when those that wait are begun
        self._state: tuple[bool, str | None] = (False, None)  # disk full, read-only: as told last
        self._cold_problem = ""  # as told last
        self._stopping = False
        self._flushing_copies = False  # the supervisor wants to know whether copies are owed
        self._copies_pending: bool | None = None  # as told last
        self._control_fd = control.fileno()
        self._poller = select.poll()
        self._fds = (descriptor(self._socket), self._wake_fd, self._control_fd)
        for fd in self._fds:
            self._poller.register(fd, select.POLLIN)
        self._peers = PeerSockets(self._context, self._poller)

    def _open_socket(self, path: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 1000
        socket.sndhwm = socket.rcvhwm = 0  # fronts hold themselves to their credits
        socket.sndbuf = socket.rcvbuf = wire.SOCKET_BYTES
        socket.router_mandatory = True
        socket.bind(f"ipc://{path}")
        return socket

    def _job_done(self, finished: Finished) -> None:
        self._finished.append(finished)
        os.eventfd_write(self._wake_fd, 1)

    # -- life ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        self._control.send(Listening())
        self._recover()
        while not self._stopping:
            self._wait()
            self._step()
        self._close()

    def _recover(self) -> None:
        """Replay the log, and meanwhile tell everybody how far it is."""
        core = self._core
        look_at = 0.0
        began = time.monotonic()
        gc.disable()  # all of it stays: to walk it again and again while it grows would take longer than to build it
        for progress in core.engine.recover_steps():
            core.progress = min(progress, 0.9999)
            now = time.monotonic()
            if now >= look_at:
                look_at = now + RECOVERY_SLICE_S
                self._poll(0)
                self._receive()
                self._do(core.idle())
                if self._stopping:
                    return
        core.progress = 1.0
        gc.freeze()  # nor need it be walked later
        gc.enable()
        core.start()
        self._control.send(Ready())
        fields = {
            "topics": len(core.engine.shard.published),
            "records": core.engine.shard.records_live,
            "took_ms": round((time.monotonic() - began) * 1000, 1),
            "read_only": core.engine.shard.read_only,
        }
        logger.info("the shard is ready", extra={"fields": fields})
        self._do(core.turn())

    def _wait(self) -> None:
        timeout_ms: int | None = None
        if self._finished or self._core.has_requests or self._core.has_large or self._has_mail():
            timeout_ms = 0
        elif self._wake_at_ms is not None:
            timeout_ms = max(0, self._wake_at_ms - time.monotonic_ns() // 1_000_000)
            timeout_ms = min(timeout_ms, POLL_MS_MAX)
        if self._copies_at_ns is not None and timeout_ms != 0:
            wait_ns = self._copies_at_ns - time.monotonic_ns()
            if wait_ns > 0:  # less than a poll can wait. What other workers say has that much time, too
                select.select(self._fds, (), (), wait_ns / 1e9)
            timeout_ms = 0
        self._poll(timeout_ms)

    def _has_mail(self) -> bool:
        """A message waits. ZeroMQ's descriptors only tell of news, so this is asked before every wait."""
        return self._peers.has_mail or has_input(self._socket)

    def _poll(self, timeout_ms: int | None) -> None:
        for fd, _ in self._poller.poll(timeout_ms):
            if fd == self._wake_fd:
                # Here and not with the job it announces: that one may have been seen before its bell rang, and a bell
                # that nobody stops would keep an idle shard spinning.
                os.eventfd_read(self._wake_fd)
            elif fd == self._control_fd:
                self.obey(self._control.receive())
                if self._control.closed:
                    self._poller.unregister(fd)
                    self._stopping = True
            else:
                self._peers.ring(fd)

    def _step(self) -> None:
        """Everything that is due, once."""
        core = self._core
        self._has_answered = False
        self._receive()
        while self._finished:
            self._finish(*self._finished.popleft())
        if core.has_large:
            core.read_large()
        due = self._wake_at_ms is not None and self._wake_at_ms <= time.monotonic_ns() // 1_000_000
        if core.has_requests or due:
            self._do(core.turn())
        else:
            self._do(core.idle())
        if core.engine.shard.backlog or self._may_copy():
            self._do(core.turn())  # the answers have left: now for more of what is to be delivered

    def _may_copy(self) -> bool:
        """Whether copies are begun now. An answer has two processes to pass on its way out of here: if the copies, which have
        time, took the cores at once, whoever waits for it would wait for them.
        """
        core = self._core
        if not core.has_copies:
            self._copies_at_ns = None
            return False
        now_ns = time.monotonic_ns()
        if self._copies_at_ns is None and self._has_answered:
            self._copies_at_ns = now_ns + COPIES_WAIT_NS
        if self._copies_at_ns is not None and now_ns < self._copies_at_ns and not core.are_copies_urgent:
            return False
        self._copies_at_ns = None
        return True

    def _close(self) -> None:
        """Finish the jobs that are out, then the engine's last turn, then the last replies."""
        core = self._core
        gc.disable()  # the process ends: a checkpoint of many topics need not wait for it
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
        self._peers.drain(self._core.receive_answer)

    def obey(self, messages: list[Message]) -> None:
        """What the supervisor says."""
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
            peer, message, apart = receive(zmq.NOBLOCK), b"", None
            if self._socket.rcvmore:
                message = receive(zmq.NOBLOCK)
            if self._socket.rcvmore:  # a large body, which may be refused before it is worth a copy
                apart, peer = receive(zmq.NOBLOCK, copy=False).buffer, wire.front_of(peer)
            try:
                core.receive(peer, message, apart)
            except wire.BadMessage as error:
                logger.error("a message could not be read", extra={"fields": {"error": str(error)}})
            size += len(message) + (len(apart) if apart is not None else 0)
            if size > DRAIN_BYTES or core.waiting >= DRAIN_REQUESTS:
                return

    def _finish(self, job: Job, error: BaseException | None, took_ms: float) -> None:
        self._jobs_out -= job.kind not in COLD_KINDS
        self._do(self._core.finish(job, error, took_ms))

    # -- out -----------------------------------------------------------------------------------------------

    def _do(self, actions: Actions) -> None:
        for job in actions.jobs:
            self._jobs_out += job.kind not in COLD_KINDS
            self._thread_for(job.kind).put(job)
        self._wake_at_ms = actions.wake_at_ms
        if self._flushing_copies:
            # Before the answers: whoever hears that its copies were taken may then say that it owes none.
            self._report_copies()
        self._send(actions)
        shard = self._core.engine.shard
        disk_full = shard.disk_full or shard.low_space
        if (disk_full, shard.read_only) != self._state:
            self._tell_state(disk_full, shard.read_only)
        if self._core.engine.relocator.problem != self._cold_problem:
            self._cold_problem = self._core.engine.relocator.problem
            logger.warning(self._cold_problem or "the cold tier takes segments again")

    def _thread_for(self, kind: str) -> JobThread:
        if kind == "sync":
            return self._syncs
        if kind == STAGE_KIND:
            if self._stages is None:
                self._stages = JobThread("stages", self._job_done, STAGE_THREADS)
            return self._stages
        if kind == REWRITE_KIND:  # not in the way of checkpoints
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
        owes = self._core.forwarding.forwarder.has_pending_copies
        if owes != self._copies_pending:
            self._copies_pending = owes
            self._control.send(CopiesPending(owes))

    def _tell_state(self, disk_full: bool, read_only: str | None) -> None:
        """What keeps the shard from writing is news, and so is its end."""
        was_full, was_read_only = self._state
        self._state = disk_full, read_only
        if disk_full != was_full:
            text = (
                "the disk is full: appends are refused until there is space"
                if disk_full
                else "there is space again"
            )
            logger.warning(text)
        if read_only != was_read_only:
            logger.critical("the shard is read-only until a restart", extra={"fields": {"reason": read_only}})

    def _send(self, actions: Actions) -> None:
        self._has_answered = self._has_answered or bool(actions.sends)
        for peer, parts in actions.sends:
            try:
                if len(parts) == 1:
                    self._socket.send_multipart([peer, parts[0]], zmq.NOBLOCK)
                else:
                    self._socket.send(peer, zmq.NOBLOCK | zmq.SNDMORE)
                    self._socket.send(parts[0], zmq.NOBLOCK | zmq.SNDMORE)
                    self._socket.send(parts[1], zmq.NOBLOCK, copy=len(parts[1]) < SHARE_BYTES)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self._core.forget_peer(peer)  # that front is gone, and whoever waited there with it
        for shard, message in actions.asks:
            self._peers.send(shard, message)
