"""The processes of a simulated server: the shipped cores of shard and front, with simulated sockets, threads and
disk.

    client ──▶ SimFront (admission, endpoints, PendingRequests)
                 │ links
                 ▼
               SimShard (ShardCore, Engine, Caps) ──▶ SimDisk, hot and cold

The shipped shells are replaced: workers.shard.loop by `SimShard._step`, router.shard_client by `SimFront._flush`, the
supervisor by `SimServer` (it notices a death later, starts a successor with a new incarnation, and tells all other
processes).

A message to a worker that died reaches its successor, and the answer of a dead worker reaches a front that knows of
its death already. Real sockets do less, but neither may do harm.
"""

from __future__ import annotations

import errno
import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from typing import Any

import msgspec

from router.pending import PendingRequests
from router.watch.service import start_streams
from tests.sim.world import MS, DetachableDisk, Links, MachineClock, S, World
from tests.support.sim_disk import SimDisk, SimulatedCrash
from topics.api.config import EngineConfig
from topics.api.errors import TopicsError
from topics.engine.runtime.engine import COLD_KINDS, Engine, Job
from topics.engine.shard.transactions import STAGE_KIND
from topics.engine.storage.segment_store import DiskSegmentStore
from topics.link import wire
from topics.protocols.http.admission import Admission
from topics.protocols.http.call import Services
from topics.protocols.http.exchange import Request, Respond
from topics.system.settings import Settings
from workers.process.supervisor import FLUSH_COPIES_S
from workers.shard.caps import Caps
from workers.shard.core import Actions, ShardCore
from workers.shard.loop import DRAIN_REQUESTS
from workers.shard.metrics import ShardMetrics

THREADS = ("sync", STAGE_KIND, *COLD_KINDS)  # kinds of jobs that have a thread of their own
Message = tuple[bytes, list[wire.Buffer]]  # peer, parts


class Machine:
    """What survives processes: the disks, one per shard and perhaps a cold one, and the clocks."""

    def __init__(self, world: World, seed: int, shards: int, *, tiers: bool = False) -> None:
        self.world = world
        self.clock = MachineClock(world)
        self.disks = [SimDisk(seed * 1000 + shard) for shard in range(shards)]
        self.colds = [SimDisk(seed * 1000 + 500 + shard) for shard in range(shards)] if tiers else []
        self.away: set[int] = set()  # shards whose cold disk is not mounted
        self.job_us = [200] * shards  # about how long a sync takes
        self.usual_cold_us = 2 * MS
        self.cold_us = [self.usual_cold_us] * shards  # and a job of the cold tier

    def calm(self) -> None:
        """Remove all planned faults."""
        for disk in (*self.disks, *self.colds):
            calm(disk)
            disk.full = False
        self.job_us = [200] * len(self.disks)
        self.cold_us = [self.usual_cold_us] * len(self.disks)
        self.away.clear()

    def kill(self, shard: int) -> None:
        """The process that used these disks is dead."""
        self.disks[shard].kill()
        if self.colds:
            self.colds[shard].kill()


class ColdMount(DiskSegmentStore):
    """A process's access to its cold disk: every call first checks whether it is mounted."""

    def __init__(self, machine: Machine, shard: int) -> None:
        self.disk = DetachableDisk(machine.colds[shard])
        super().__init__(self.disk, f"staging/shard-{shard:02}")  # type: ignore[arg-type]
        self._away, self._shard = machine.away, shard

    def put_steps(self, key: str, pieces: Iterable[bytes]) -> Generator[None, None, None]:
        self._look()
        for _ in super().put_steps(key, pieces):
            yield
            self._look()

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        self._look()
        return super().read_range(key, offset, length)

    def delete(self, key: str) -> None:
        self._look()
        super().delete(key)

    def list(self, prefix: str) -> list[str]:
        self._look()
        return super().list(prefix)

    def exists(self, key: str) -> bool:
        self._look()
        return super().exists(key)

    def length(self, key: str) -> int:
        self._look()
        return super().length(key)

    def _look(self) -> None:
        if self._shard in self._away:
            raise OSError(errno.ENODEV, "the cold disk is not mounted")


def calm(disk: SimDisk) -> None:
    disk._plans.clear()
    disk._armed = False


class SimShard:
    """One worker. A step drains the inbox, reports finished jobs and has one turn, as in the shipped loop."""

    def __init__(self, server: SimServer, shard: int, incarnation: int) -> None:
        self.server = server
        self.world = server.world
        self.machine = server.machine
        self.shard = shard
        self.incarnation = incarnation
        self.name = b"worker-%d-%d" % (shard, incarnation)
        self.alive = True
        self.stopping = False
        self.stalled_until_us = 0
        self.disk = DetachableDisk(self.machine.disks[shard])
        self.cold = ColdMount(self.machine, shard) if self.machine.colds else None
        self._inbox: deque[Callable[[], None]] = deque()
        self._finished: deque[tuple[Job, BaseException | None]] = deque()
        self._threads: dict[str, deque[Job]] = {name: deque() for name in (*THREADS, "work")}
        self._busy = dict.fromkeys(self._threads, False)
        self._jobs_out = 0
        self._wake_at_ms: int | None = None
        self._step_at_us: int | None = None
        self._recovery: Any = None
        self.core: ShardCore | None = None
        self.world.after(server.rng.choice((500, 2 * MS, 10 * MS)), self._begin)

    # -- start and stop ------------------------------------------------------------------------------------

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run code of this process; a planned crash ends the process, and a disk fault may."""
        try:
            action()
        except SimulatedCrash:
            self.server.crashed(self)
        except (TopicsError, OSError) as error:
            # As in workers.shard.program: it logs the reason and ends. The only allowed reason is a broken disk.
            self.server.failed(self, error)

    def _begin(self) -> None:
        if self.alive:
            self._guarded(self._open)

    def _open(self) -> None:
        config = msgspec.structs.replace(
            self.server.config, shard=self.shard, shard_dir=f"layout-1/shard-{self.shard:02}"
        )
        engine = Engine(self.disk, self.machine.clock, config, self.cold)  # type: ignore[arg-type]
        now_us = self.machine.clock.monotonic_us
        caps = Caps(
            engine,
            shard=self.shard,
            shards=self.server.shards,
            incarnation=self.incarnation,
            now_us=now_us,
        )
        metrics = ShardMetrics(engine, lambda: 0)
        self.core = ShardCore(
            engine,
            caps,
            metrics,
            incarnation=self.incarnation,
            now_us=now_us,
            disk=self.disk,  # type: ignore[arg-type]
            shards=self.server.shards,
            max_sessions=self.server.settings.max_watch_sessions,
            max_sessions_per_key=self.server.settings.max_watch_sessions_per_key,
        )
        self._recovery = engine.recover_steps()
        self.server.listening(self)
        self._recover()

    def _recover(self) -> None:
        """A slice of the replay; messages that arrive meanwhile are answered."""
        if not self.alive:
            return
        self._guarded(self._recover_slice)

    def _recover_slice(self) -> None:
        core = self.core
        assert core is not None
        for _ in range(self.server.rng.choice((1, 5, 50))):
            progress = next(self._recovery, None)
            if progress is None:
                core.progress = 1.0
                core.start()
                self._do(core.turn())
                self.server.ready(self)
                self._plan_step()
                return
            core.progress = min(progress, 0.9999)
        self._drain()
        self._act(core.tend())
        if self.stopping:
            self.server.ended(self)
            return
        self.world.after(self.server.rng.choice((20, 200, 2 * MS)), self._recover)

    def die(self) -> None:
        """The process ends, and calls of its remains do not reach the disk."""
        self.alive = False
        self.disk.cut()
        if self.cold is not None:
            self.cold.disk.cut()

    def stop(self) -> None:
        """SIGTERM: finish running jobs, have a last turn, answer."""
        self.stopping = True
        if self.core is not None:
            self.core.engine.stop_cold()
        self._plan_step()

    # -- the loop ------------------------------------------------------------------------------------------

    def _plan_step(self, at_us: int | None = None) -> None:
        when_us = max(
            at_us if at_us is not None else self.world.now_us + self.server.rng.choice((0, 5, 20, 300)),
            self.stalled_until_us,
            self.world.now_us,
        )
        if self._step_at_us is None or when_us < self._step_at_us:
            self._step_at_us = when_us
            self.world.at(when_us, self._wake)

    def _wake(self) -> None:
        if not self.alive or self.world.now_us != self._step_at_us:
            return
        self._step_at_us = None
        if self.world.now_us < self.stalled_until_us:
            self._plan_step(self.stalled_until_us)
        elif self.core is not None and self.core.is_ready:
            self._guarded(self._step)

    def _step(self) -> None:
        core = self.core
        assert core is not None
        if self.stopping:
            self._finish_jobs()
            if not self._jobs_out:
                self._send(core.close())
                self.server.ended(self)
            return
        self._drain()
        self._finish_jobs()
        if core.has_large:
            core.read_large()
        if core.needs_turn or core.has_copies or self._is_due():
            self._do(core.turn())
        elif core.needs_tending:
            self._act(core.tend())
        if self._inbox or self._finished or core.needs_turn or core.has_large or core.has_copies:
            self._plan_step()
        elif self._wake_at_ms is not None:
            self._plan_step(self.machine.clock.time_of(self._wake_at_ms))

    def _is_due(self) -> bool:
        return self._wake_at_ms is not None and self._wake_at_ms <= self.machine.clock.monotonic_ms()

    def _drain(self) -> None:
        assert self.core is not None
        while self._inbox and self.core.pending < DRAIN_REQUESTS:
            self._inbox.popleft()()

    def _finish_jobs(self) -> None:
        assert self.core is not None
        while self._finished:
            job, error = self._finished.popleft()
            self._jobs_out -= job.kind not in COLD_KINDS
            self._do(self.core.finish(job, error, 0.1))

    def _do(self, actions: Actions) -> None:
        """As ShardLoop does."""
        self._act(actions)
        if self.core is not None and self.core.needs_tending:
            self._act(self.core.tend())

    def _act(self, actions: Actions) -> None:
        for job in actions.jobs:
            self._jobs_out += job.kind not in COLD_KINDS
            thread = job.kind if job.kind in THREADS else "work"
            self._threads[thread].append(job)
            self._start_job(thread)
        self._wake_at_ms = actions.wake_at_ms
        self._send(actions)

    # -- jobs ----------------------------------------------------------------------------------------------

    def _start_job(self, thread: str) -> None:
        if self._busy[thread] or not self._threads[thread]:
            return
        self._busy[thread] = True
        job = self._threads[thread].popleft()
        begin_us = self._job_us(thread) * self.server.rng.choice((1, 1, 2, 8)) // 2
        self.world.after(begin_us, lambda: self.alive and self._guarded(lambda: self._run_job(thread, job)))

    def _run_job(self, thread: str, job: Job) -> None:
        error: BaseException | None = None
        try:
            job.run()
        except SimulatedCrash:
            raise
        except Exception as failure:
            error = failure
        self.world.after(
            self._job_us(thread) // 2, lambda: self.alive and self._job_ended(thread, job, error)
        )

    def _job_us(self, thread: str) -> int:
        return (self.machine.cold_us if thread in COLD_KINDS else self.machine.job_us)[self.shard]

    def _job_ended(self, thread: str, job: Job, error: BaseException | None) -> None:
        self._busy[thread] = False
        self._finished.append((job, error))
        self._start_job(thread)
        self._plan_step()

    # -- messages ------------------------------------------------------------------------------------------

    def hear(self, peer: bytes, parts: list[wire.Buffer]) -> None:
        self._take(lambda: self._core().receive(peer, bytes(parts[0]), *parts[1:]))

    def hear_answer(self, shard: int, parts: list[wire.Buffer]) -> None:
        """A message of another worker, on this worker's link to it."""
        self._take(lambda: self._core().receive_reply(shard, bytes(parts[0]), *parts[1:]))

    def hear_peers(self, living: dict[int, int]) -> None:
        self._take(lambda: self._core().set_peers(living))

    def hear_front_gone(self, peer: bytes) -> None:
        """A message could not be sent: that front is dead."""
        self._take(lambda: self._core().forget_peer(peer))

    def _core(self) -> ShardCore:
        assert self.core is not None
        return self.core

    def _take(self, message: Callable[[], None]) -> None:
        self._inbox.append(message)
        self._plan_step()

    def _send(self, actions: Actions) -> None:
        for peer, parts in actions.sends:
            self.server.carry_reply(self, peer, parts)
        for shard, parts in actions.requests:
            self.server.carry_request(self.name, shard, parts)


class SimFront:
    """One front: requests go through the shipped admission and endpoints; only sockets and the event loop are
    replaced.
    """

    def __init__(self, server: SimServer, number: int, life: int) -> None:
        self.server = server
        self.world = server.world
        self.number = number
        self.name = b"front-%d-%d" % (number, life)
        self.alive = True
        self.core = PendingRequests(server.shards, self._schedule)
        now_us = server.machine.clock.monotonic_us
        self.services = Services(self.core, server.settings, now_us, "sim", now_us())
        self.services.random_bytes = random.Random(life).randbytes  # names of sessions
        self.streams = start_streams(self.services, self.core, self._later, server.machine.clock.wall_ms)
        self.admission = Admission(self.services, [], lambda: 0, self._offload)
        self._scheduled = False
        self.world.after(1 * S, self._expire)

    def handle(self, request: Request, respond: Respond) -> None:
        request.received_us = self.server.machine.clock.monotonic_us()
        self.admission.handle(request, respond)

    def _offload(
        self, work: Callable[[], Any], done: Callable[[Any], None], size: int = 0, *, is_large: bool = False
    ) -> bool:
        self.world.after(300, lambda: self.alive and done(work()))
        return True

    def _later(self, delay_us: int, action: Callable[[], None]) -> None:
        self.world.after(delay_us, lambda: self.alive and action())

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.world.after(self.server.rng.choice((0, 10, 100)), self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self.alive:
            for shard, parts in self.core.take_messages():
                self.server.carry_request(self.name, shard, parts)

    def hear(self, shard: int, parts: list[wire.Buffer]) -> None:
        self.core.receive(shard, bytes(parts[0]), *parts[1:])

    def hear_peers(self, living: dict[int, int]) -> None:
        self.core.set_peers(living)

    def _expire(self) -> None:
        if self.alive:
            self.core.expire(self.services.now_us())
            self.world.after(1 * S, self._expire)

    def drain(self) -> None:
        """The server stops: open long polls are not waited for, all other requests are."""
        self.streams.drain()
        self.services.draining = True
        self.core.end_polls(self.services.now_us())

    def die(self) -> None:
        self.alive = False


class SimServer:
    """All processes, and the supervisor: starts, restarts and notifications."""

    def __init__(
        self,
        world: World,
        machine: Machine,
        *,
        shards: int,
        fronts: int,
        config: EngineConfig,
        settings: Settings,
    ) -> None:
        self.world, self.machine, self.rng = world, machine, world.rng
        self.shards, self.config, self.settings = shards, config, settings
        self.links = Links(world)
        self.workers: list[SimShard | None] = [None] * shards
        self.fronts: list[SimFront | None] = [None] * fronts
        self.counts: Counter[str] = Counter()
        self.on_front_death: Callable[[SimFront], None] = lambda front: None
        self.on_crash: Callable[[SimShard], None] = self.kill_worker
        self.may_fail: Callable[[int], bool] = lambda shard: False
        self._listening: dict[int, int] = {}
        self._lives = 0
        self._running = False

    # -- start and stop ------------------------------------------------------------------------------------

    def start_after(self, delay_us: int) -> None:
        """An operator starts the server again, unless it is stopped on purpose before that."""
        stops = self.counts["stops"]
        self.world.after(delay_us, lambda: self.counts["stops"] == stops and self.start())

    def start(self) -> None:
        self._running = True
        self.counts["starts"] += 1
        for shard in range(self.shards):
            self._start_worker(shard)
        for number in range(len(self.fronts)):
            self._start_front(number)

    def _start_worker(self, shard: int) -> None:
        if self._running and self.workers[shard] is None:
            self._lives += 1
            self.workers[shard] = SimShard(self, shard, self._lives)

    def _start_front(self, number: int) -> None:
        if self._running and self.fronts[number] is None:
            self._lives += 1
            self.fronts[number] = front = SimFront(self, number, self._lives)
            front.hear_peers(dict(self._listening))

    def kill_worker(self, worker: SimShard) -> None:
        self.counts["kills"] += 1
        self.machine.kill(worker.shard)
        self.ended(worker)

    def ended(self, worker: SimShard) -> None:
        """The process is gone. The supervisor notices a moment later, tells all others, and starts a successor."""
        if worker.alive and worker.core is not None:
            self.counts["moves"] += worker.core.engine.counters.get("relocations", 0)
            self.counts["cold fetches"] += worker.core.engine.cold.fetches
        worker.die()

        def noticed() -> None:
            if self.workers[worker.shard] is not worker:
                return
            self.workers[worker.shard] = None
            if self._listening.pop(worker.shard, None) is not None:
                self._tell_peers()
            self.world.after(self.rng.choice((1, 5, 50)) * MS, lambda: self._start_worker(worker.shard))

        self.world.after(self.rng.choice((10, 200, 5 * MS)), noticed)

    def kill_front(self, front: SimFront) -> None:
        self.counts["front kills"] += 1
        front.die()
        self.on_front_death(front)

        def noticed() -> None:
            if self.fronts[front.number] is front:
                self.fronts[front.number] = None
                self.world.after(self.rng.choice((1, 5, 50)) * MS, lambda: self._start_front(front.number))

        self.world.after(200, noticed)

    def kill_all(self) -> None:
        """The supervisor dies, and all its children."""
        self._running = False
        for worker in self._living_workers():
            self.kill_worker(worker)
        for front in list(filter(None, self.fronts)):
            self.kill_front(front)
        self.workers = [None] * self.shards
        self.fronts = [None] * len(self.fronts)
        self._listening = {}

    def cut_power(self) -> None:
        self.counts["power cuts"] += 1
        self.kill_all()
        for disk in (*self.machine.disks, *self.machine.colds):
            disk.crash()
        self.machine.clock.boot()

    def stop(self, within_us: int) -> None:
        """A clean stop of everything, fronts first, as the supervisor does it."""
        self.counts["stops"] += 1
        self._running = False
        fronts = [front for front in self.fronts if front is not None and front.alive]
        for front in fronts:
            front.drain()
        end_us = self.world.now_us + within_us
        while any(front.admission.open for front in fronts) and self.world.now_us < end_us:
            self.world.run_for(5 * MS)
        for front in fronts:
            front.die()
            self.on_front_death(front)
        self.fronts = [None] * len(self.fronts)
        self._settle()
        for worker in self._living_workers():
            worker.stop()
        self.world.run_until(
            lambda: not self._living_workers(),
            within_us=60 * S,
            what="the workers stop when they are told to",
        )
        for disk in (*self.machine.disks, *self.machine.colds):
            disk.kill()
        self.workers = [None] * self.shards
        self._listening = {}

    def _settle(self) -> None:
        """Workers deliver their pending copies and dead letters, for a while."""
        end_us = self.world.now_us + int(FLUSH_COPIES_S * S)
        while self.world.now_us < end_us:
            cores = [worker.core for worker in self._living_workers() if worker.core is not None]
            if not any(core.is_ready and core.forwarding.forwarder.has_pending_copies for core in cores):
                return
            self.world.run_for(1 * MS)

    def _living_workers(self) -> list[SimShard]:
        return [worker for worker in self.workers if worker is not None and worker.alive]

    # -- messages of workers -------------------------------------------------------------------------------

    def crashed(self, worker: SimShard) -> None:
        self.counts["crashes at a call"] += 1
        self.on_crash(worker)

    def failed(self, worker: SimShard, error: Exception) -> None:
        """It ended by itself, as a shard that cannot run does."""
        if not self.may_fail(worker.shard):
            raise AssertionError(f"shard {worker.shard} failed on an intact disk: {error!r}") from error
        self.counts["failed starts"] += 1
        self.machine.kill(worker.shard)
        self.ended(worker)

    def listening(self, worker: SimShard) -> None:
        if self.workers[worker.shard] is worker:
            self._listening[worker.shard] = worker.incarnation
            self._tell_peers()

    def ready(self, worker: SimShard) -> None:
        self.counts["recoveries"] += 1

    def _tell_peers(self) -> None:
        living = dict(self._listening)
        processes: list[SimShard | SimFront | None] = [*self.workers, *self.fronts]
        for process in processes:
            if process is not None and process.alive:
                self._tell(process, living)

    def _tell(self, process: SimShard | SimFront, living: dict[int, int]) -> None:
        def deliver() -> None:
            if process.alive and (isinstance(process, SimFront) or process.core is not None):
                process.hear_peers(living)

        self.links.send(b"supervisor", process.name, deliver)

    # -- messages ------------------------------------------------------------------------------------------

    def carry_request(self, sender: bytes, shard: int, parts: list[wire.Buffer]) -> None:
        """Deliver to the shard's worker at the time of arrival, which may be the successor of the addressee."""

        def deliver() -> None:
            worker = self.workers[shard]
            if worker is not None and worker.alive and worker.core is not None:
                worker.hear(sender, parts)

        self.links.send(sender, b"shard-%d" % shard, deliver)

    def carry_reply(self, worker: SimShard, peer: bytes, parts: list[wire.Buffer]) -> None:
        def deliver() -> None:
            for front in self.fronts:
                if front is not None and front.alive and front.name == peer:
                    front.hear(worker.shard, parts)
            for other in self.workers:
                if other is not None and other.alive and other.core is not None and other.name == peer:
                    other.hear_answer(worker.shard, parts)
            if peer.startswith(b"front") and not any(front and front.name == peer for front in self.fronts):
                worker.hear_front_gone(peer)

        self.links.send(worker.name, peer, deliver)

    # -- state ---------------------------------------------------------------------------------------------

    def is_up(self) -> bool:
        """Every process runs and knows the others, and every shard serves and accepts writes."""
        living = {worker.shard: worker.incarnation for worker in self._living_workers()}
        return all(
            front is not None
            and front.alive
            and {shard: link.incarnation for shard, link in enumerate(front.core.links)} == living
            for front in self.fronts
        ) and all(
            worker is not None
            and worker.alive
            and worker.core is not None
            and worker.core.is_ready
            and worker.core._peers == living
            and worker.core.engine.shard.state.read_only is None
            for worker in self.workers
        )
