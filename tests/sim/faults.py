"""Faults of a simulated server: process deaths, disk errors, full disks, bit rot, an unmounted cold tier, clock
changes, stalls, lulls.

Each method that `Simulation` draws from is one fault; its name appears in the totals of `scripts/sim`.
"""

from __future__ import annotations

import errno
import random

from tests.sim.clients import CONFIGS, ClientPool
from tests.sim.processes import Machine, SimServer, SimShard, calm
from tests.sim.world import MS, S, World
from tests.support.history import History
from tests.support.sim_disk import SimDisk
from topics.engine.core.placement import shard_of

REPAIR_US = 300 * MS  # how long an operator takes to restart a shard that turned read-only


class Faults:
    rng: random.Random
    world: World
    machine: Machine
    server: SimServer
    pool: ClientPool
    history: History

    def __init__(self) -> None:
        self._next_lull_at = 0  # requests
        self._quiet_until_us = 0
        self._stopping = False
        self.jumped_ms = 0
        self._broken: set[int] = set()  # shards whose disk may cause failures right now
        self._rotten: set[str] = set()

    def log_step(self, *words: object) -> None:
        """Print a step, with --verbose."""

    # -- deaths --------------------------------------------------------------------------------------------

    def _living(self) -> list[SimShard]:
        return [worker for worker in self.server.workers if worker is not None and worker.alive]

    def kill_shard(self) -> None:
        for worker in self._pick():
            self._note("kill", worker)
            self.server.kill_worker(worker)

    def kill_front(self) -> None:
        fronts = [front for front in self.server.fronts if front is not None and front.alive]
        if fronts:
            self.history.happened("front")
            self.server.kill_front(self.rng.choice(fronts))

    def kill_server(self) -> None:
        self.history.happened("kill", note="all")
        self.server.kill_all()
        self.server.start_after(self.rng.choice((1, 20)) * MS)

    def cut_power(self) -> None:
        self.history.happened("power")
        self.server.cut_power()
        self._broken.clear()
        self.server.start_after(self.rng.choice((1, 20)) * MS)

    def stop_server(self) -> None:
        self.machine.calm()
        self._broken.clear()
        event = self.history.happened("stop")
        self._stopping = True
        self.server.stop(within_us=20 * S)
        self._stopping = False
        event.until = self.history.now()
        self.server.start()

    def crash_at_call(self) -> None:
        for worker in self._pick():
            disk = self.machine.disks[worker.shard]
            calm(disk)
            disk.crash_at(self.rng.choice((1, 2, 3, 5, 8, 13, 21, 34, 80)), midway=self.rng.random() < 0.5)

    def _crash_at_call(self, worker: SimShard) -> None:
        if self.rng.random() < 0.5:
            self._note("kill", worker)
            self.server.kill_worker(worker)
        else:
            # After the current call: the process is in the middle of it and has to unwind first.
            worker.die()
            self.cut_power()

    def _pick(self) -> list[SimShard]:
        living = self._living()
        return [self.rng.choice(living)] if living else []

    def _note(self, kind: str, worker: SimShard) -> None:
        self.history.happened(kind, self._topics_of(worker), f"shard {worker.shard}")

    def _topics_of(self, worker: SimShard) -> list[str]:
        names = [*CONFIGS, *(name for client in self.pool.clients for name in client.own)]
        return [name for name in names if shard_of(name, self.server.shards) == worker.shard]

    # -- disks ---------------------------------------------------------------------------------------------

    def _may_fail(self, shard: int) -> bool:
        # With a damaged index and without the records, which are cold, the contents of a topic are unknown.
        needs_cold = bool(self.machine.colds) and bool(self._rotten)
        return shard in self._broken or self.machine.disks[shard].full or needs_cold

    def fail_call(self) -> None:
        for worker in self._pick():
            disk = self.machine.disks[worker.shard]
            calm(disk)
            error, of = self.rng.choice(
                (
                    (errno.EIO, "sync"), (errno.EIO, "sync"), (errno.EIO, "sync"), (errno.EIO, "write"),
                    (errno.EIO, None), (errno.ENOSPC, "write"), (errno.ENOSPC, "allocate"), (errno.EMFILE, "open"),
                    (errno.EACCES, "open"), (errno.EROFS, None), (errno.EIO, "sync_dir"), (errno.EIO, "rename"),
                )
            )  # fmt: skip
            disk.fail_at(self.rng.choice((1, 2, 3, 5, 13)), error, of=of)
            self._broken.add(worker.shard)
            self.history.happened("error", note=f"shard {worker.shard} {errno.errorcode[error]} {of}")
            self.world.after(REPAIR_US, self._restart_read_only)

    def _restart_read_only(self) -> None:
        """An operator reads the log and restarts shards that need it."""
        for worker in self._living():
            if worker.core is not None and worker.core.engine.shard.state.read_only is not None:
                self.server.counts["read only"] += 1
                calm(self.machine.disks[worker.shard])
                self._note("kill", worker)
                self.server.kill_worker(worker)

    def fill_disk(self) -> None:
        shard = self.rng.randrange(self.server.shards)
        disk = self.machine.disks[shard]
        disk.full = True
        self.history.happened("full", note=f"shard {shard}")

        def free() -> None:
            disk.full = False
            self.history.happened("freed", note=f"shard {shard}")

        self.world.after(self.rng.choice((20, 300, 3000)) * MS, free)

    def slow_disk(self) -> None:
        shard = self.rng.randrange(self.server.shards)
        self.machine.job_us[shard] = self.rng.choice((5, 50, 400)) * MS

        def fast() -> None:
            self.machine.job_us[shard] = 200

        self.world.after(self.rng.choice((20, 300)) * MS, fast)

    def rot(self) -> None:
        """A bit flips in a stored file that is not in memory: a segment's, closed or open, or a snapshot."""
        shard = self.rng.randrange(self.server.shards)
        worker = self.server.workers[shard]
        disk = self.machine.disks[shard]
        path = self._rotting(disk)
        file = disk._find(path) if path else None
        if worker is None or not worker.alive or worker.core is None or not getattr(file, "live", b""):
            return
        if path.endswith((".data", ".del")) or (self.machine.colds and path.startswith("topics/")):
            # Everything else is rebuilt from these without losing a record; but an erase may take records from the
            # cold tier, also of a segment that moves there later, and a crash may leave a snapshot that still names
            # them.
            log = worker.core.engine.shard.state.by_id.get(int(path.split("/")[-2], 16))
            if log is None:
                return
            self.history.happened("rot", [log.name], path)
        self._rotten.add(path)
        offset = self.rng.randrange(len(file.live))  # type: ignore[union-attr]
        disk.flip_bit(path, offset, self.rng.randrange(8))
        self.log_step("  rot", path, offset)
        self._note("kill", worker)
        self.server.kill_worker(worker)

    def _rotting(self, disk: SimDisk) -> str:
        """A file to damage, each only once: two damaged places in one file can look like a file of another version."""
        snapshots = [path for path in disk.paths() if "/snap-" in path and not path.endswith(".tmp")]
        if self.rng.random() < 0.15:
            # One of two stays intact, or there is nothing to start from.
            return snapshots[-1] if len(snapshots) == 2 and not self._rotten & set(snapshots) else ""
        suffix = self.rng.choice((".data", ".data", ".data", ".del", ".idx", ".dict", ".sum"))
        paths = (path for path in disk.paths() if path.startswith("topics/") and path.endswith(suffix))
        stored = [path for path in paths if path not in self._rotten]
        return self.rng.choice(stored) if stored else ""

    # -- the cold tier -------------------------------------------------------------------------------------

    def lose_cold(self) -> None:
        """A cold disk that is not mounted for a while. Nothing on it is lost, and nothing else is affected."""
        shard = self.rng.randrange(self.server.shards)
        self.machine.away.add(shard)
        self.history.happened("error", note=f"cold {shard} away")
        self.world.after(self.rng.choice((20, 300, 3000)) * MS, lambda: self.machine.away.discard(shard))

    def slow_cold(self) -> None:
        shard = self.rng.randrange(self.server.shards)
        self.machine.cold_us[shard] = self.rng.choice((50, 2000)) * MS

        def fast() -> None:
            self.machine.cold_us[shard] = self.machine.usual_cold_us

        self.world.after(self.rng.choice((300, 3000)) * MS, fast)

    def crash_at_cold_call(self) -> None:
        for worker in self._pick():
            disk = self.machine.colds[worker.shard]
            calm(disk)
            disk.crash_at(self.rng.choice((1, 2, 3, 5, 8, 13, 21, 34)), midway=self.rng.random() < 0.5)

    def fail_cold_call(self) -> None:
        """Whatever a cold disk answers, the shard goes on: `_may_fail` does not consider it."""
        for worker in self._pick():
            disk = self.machine.colds[worker.shard]
            calm(disk)
            error = self.rng.choice((errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE))
            disk.fail_at(self.rng.choice((1, 2, 3, 5, 13)), error)
            self.history.happened("error", note=f"cold {worker.shard} {errno.errorcode[error]}")

    def rot_cold(self) -> None:
        """A bit flips in records of the cold tier that are stored nowhere else."""
        for worker in self._pick():
            disk, hot = self.machine.colds[worker.shard], self.machine.disks[worker.shard]
            paths = [path for path in disk.paths() if path.startswith("topics/") and path.endswith(".data")]
            kept = set(
                hot.paths()
            )  # our own lookup is not a call of the shard, so planned faults do not apply
            alone = [path for path in paths if path not in self._rotten and path not in kept]
            if not alone or worker.core is None:
                continue
            path = self.rng.choice(alone)
            log = worker.core.engine.shard.state.by_id.get(int(path.split("/")[-2], 16))
            if log is not None:
                self.history.happened("rot", [log.name], path)
                self._rotten.add(path)
                disk.flip_bit(path, self.rng.randrange(len(disk._find(path).live)), self.rng.randrange(8))  # type: ignore[union-attr]
                self._note("kill", worker)
                self.server.kill_worker(worker)

    # -- time ----------------------------------------------------------------------------------------------

    def stall(self) -> None:
        """A worker stands still for a while, as if stopped. Most survive, and then find requests that have waited too
        long.
        """
        for worker in self._pick():
            until_us = self.world.now_us + self.rng.choice((5, 5, 100, 100, 2000, 35_000)) * MS
            worker.stalled_until_us = until_us
            if until_us > self.world.now_us + 30 * S and self.rng.random() < 0.7:
                self._quiet_until_us = until_us + 5 * MS

    def set_clock(self) -> None:
        jump_ms = self.rng.choice((-90_000, -500, 500, 30_000))
        if self.jumped_ms + jump_ms > 60_000:  # or idempotency keys would be forgotten while still in use
            return
        self.jumped_ms += max(0, jump_ms)
        self.machine.clock.wall_offset_ms += jump_ms
        self.history.happened("clock", note=str(jump_ms))

    def lull(self) -> None:
        """No client sends a request for a while."""
        if self.pool.sent < self._next_lull_at:
            return
        self._next_lull_at = self.pool.sent + 40
        self.pool.paused_until_us = self.world.now_us + self.rng.choice((1, 6, 6)) * S

    def checkpoint(self) -> None:
        for worker in self._pick():
            if worker.core is not None and worker.core.is_ready and not worker.core.engine.closed:
                worker.core.engine.checkpoint()
