"""A whole server in one process, with clients that write down what they are told: one seed, one story.

    .venv/bin/python -m tests.sim.server_walk 17              tell the story of seed 17
    .venv/bin/python -m tests.sim.server_walk 0 --until 99    a hundred of them
    scripts/sim --seed 17 --steps 400               the same, with progress and totals

Each story draws its own set of operations and faults, so that rare combinations get room: deaths of any process at any
moment and at any call to the disk, power cuts, full and slow and failing disks, rotten files, clocks that are set,
stalls, clean stops. At the end everything is read, the server dies once more, everything is read again, and the checker
judges the history. A failure prints the seed, which replays it exactly.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from tests.sim import router_clients as routers
from tests.sim.clients import CHARACTERS, LOGS, OWN_TTL, SETTLE_US, Appetite, Auditor, Crowd, write_weights
from tests.sim.processes import Machine, SimServer, SimShard, calm
from tests.sim.queue_workers import CONSUMERS, QUEUES, spots_of, take_all
from tests.sim.world import MS, S, World
from tests.support.checker import assert_ok
from tests.support.checker.erases import erased
from tests.support.engine_harness import holders
from tests.support.history import Op
from tests.support.sim_disk import SimDisk
from topics.engine.config import EngineConfig
from topics.engine.placement import shard_of
from topics.settings import Settings

STEPS = 250  # requests of clients
FIRST_WITH_TIERS = 1000
REPAIR_US = 300 * MS  # how long somebody takes to restart a shard that turned read-only


class Failed(AssertionError):
    """A story that must not be, and the seed that tells it again."""


class Mishaps(logging.Handler):
    """Exceptions that a process of the server has caught because it must go on. Here they are failures."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(
                f"{record.getMessage()}: {logging.Formatter().formatException(record.exc_info)}"
            )


class Story:
    def __init__(self, seed: int, *, steps: int = STEPS, verbose: bool = False) -> None:
        self.seed, self.steps, self.verbose = seed, steps, verbose
        self.rng = rng = random.Random(seed * 7919 + 5)
        self.world = World(seed)
        shards = rng.choice((1, 2, 2, 3))
        self.machine = Machine(self.world, seed, shards, tiers=has_tiers(seed))
        self.max_topics = rng.choice((0, 0, 0, 10, 14))
        self.server = SimServer(
            self.world,
            self.machine,
            shards=shards,
            fronts=rng.choice((1, 2)),
            config=self._engine_config(),
            settings=Settings(max_topics=self.max_topics),
        )
        self.server.on_crash = self._crash_at_call
        self.server.may_fail = self._may_fail
        self.crowd = Crowd(
            self.server,
            self._appetite(),
            clients=rng.choice((2, 3, 4, 6)),
            watchers=rng.choice((0, 0, 1, 2, 4)),
        )
        self.crowd.on_answer = self._answered
        if has_routers(seed):
            self._forward()
        elif has_queues(seed):
            self._hire()
        self.history = self.crowd.history
        self.faults = self._draw_faults()
        self.fault_every_us = rng.choice((10, 30, 60)) * MS
        self._next_fault_at = self._next_lull_at = 0  # requests
        self._quiet_until_us = 0
        self._stopping = False
        self.jumped_ms = 0
        self._broken: set[int] = set()  # shards whose disk may fail them right now
        self._rotten: set[str] = set()

    # -- what this story is made of ------------------------------------------------------------------------

    def _engine_config(self) -> EngineConfig:
        rng = self.rng
        config = EngineConfig(
            wal_file_bytes=rng.choice((4096, 4096, 16_384, 65_536)),
            segment_max_events=rng.choice((4, 8, 64)),
            segment_max_age_ms=rng.choice((0, 1000, 3_600_000)),
            snapshot_wal_bytes=rng.choice((4096, 16_384)),
            snapshot_interval_ms=rng.choice((2000, 60_000)),
            cache_bytes=rng.choice((1024, 1 << 20)),
            inline_bytes=rng.choice((0, 4096)),
            rewrite_dead_share=rng.choice((0.5, 2.0)),
            max_topics=self.max_topics,
            verify=rng.random() < 0.1,
        )
        if not self.machine.colds:
            return config
        rng = random.Random(self.seed * 86_028_121 + 23)
        return msgspec.structs.replace(
            config,
            segment_max_events=rng.choice((2, 4, 8)),
            snapshot_wal_bytes=rng.choice((1024, 4096)),
            snapshot_interval_ms=rng.choice((500, 2000)),
            inline_bytes=rng.choice((0, 0, 256)),
            hot_retain_segments=rng.choice((0, 0, 1, 2)),
            hot_retain_bytes=rng.choice((0, 0, 1024)),
            cold_cache_bytes=rng.choice((1024, 1 << 20)),
        )

    def _appetite(self) -> Appetite:
        rng = self.rng
        weights = write_weights()
        for kind in weights:
            if kind != "write" and rng.random() < 0.25:
                weights[kind] = 0
        topics = rng.sample(LOGS, rng.choice((2, 4, len(LOGS))))
        return Appetite(
            weights,
            topics,
            think_us=rng.choice((200, 3 * MS, 20 * MS)),
            keyed=rng.choice((0.0, 0.5, 0.9)),
            erase=rng.choice((0.0, 0.2, 1.0)),
            grouped=rng.random() < 0.2,
        )

    def _hire(self) -> None:
        """In this story some of the topics are queues, others have consumers, and workers share them."""
        rng = random.Random(self.seed * 104_729 + 3)
        topics = self.crowd.appetite.topics
        topics[:] = topics[: rng.choice((1, 2, 4))] + rng.sample(list(QUEUES), rng.choice((1, 2, 3)))
        names = rng.sample(list(CONSUMERS), rng.choice((0, 1, 2)))
        self.crowd.hire(rng.choice((2, 3, 5)), spots_of(topics, names))

    def _forward(self) -> None:
        """In this story some topics are copied to others, and little is done beside that."""
        rng = random.Random(self.seed * 32_452_843 + 7)
        appetite = self.crowd.appetite
        appetite.routers = routers.choose(rng)
        appetite.sources, dests = routers.topics_of(appetite.routers)
        others = appetite.topics[: rng.choice((0, 0, 1, 2))]
        appetite.topics[:] = list(dict.fromkeys((*appetite.sources, *dests, *dests, *others)))
        weights = {"put_router": 12.0, "router": 4.0, "routers": 1.0, "drop_router": 1.0}
        appetite.weights |= {name: weight * rng.choice((0.3, 1.0)) for name, weight in weights.items()}

    def _draw_faults(self) -> dict[Callable[[], None], int]:
        """Some faults, not all: in a story where everything breaks all the time, little happens."""
        every: dict[Callable[[], None], int] = {
            self.kill_shard: 6, self.kill_front: 3, self.kill_server: 2, self.cut_power: 5, self.stop_server: 1,
            self.crash_at_call: 12, self.fail_call: 3, self.fill_disk: 2, self.slow_disk: 3, self.stall: 3,
            self.set_clock: 2, self.rot: 2, self.lull: 2, self.checkpoint: 4,
        }  # fmt: skip
        if self.machine.colds:
            every |= {
                self.lose_cold: 4,
                self.slow_cold: 3,
                self.crash_at_cold_call: 8,
                self.fail_cold_call: 4,
            }
            every |= {self.rot_cold: 2, self.checkpoint: 12}
        chosen = {fault: weight for fault, weight in every.items() if self.rng.random() < 0.6}
        return chosen or {self.kill_shard: 1}

    # -- the story -----------------------------------------------------------------------------------------

    def run(self) -> Counter[str]:
        mishaps, logger = Mishaps(), logging.getLogger("topics")
        logger.addHandler(mishaps)
        try:
            self._run()
            assert not mishaps.found, mishaps.found[0]
        except Exception as problem:
            text = f"seed {self.seed}; replay: .venv/bin/python -m tests.sim.server_walk {self.seed} --steps {self.steps} --verbose"
            raise Failed(f"{text}\n{type(problem).__name__}: {problem}") from problem
        finally:
            logger.removeHandler(mishaps)
        return self.server.counts

    def _run(self) -> None:
        self.server.start()
        self.world.after(5 * MS, self._strike)
        while self.crowd.sent < self.steps:
            self.world.step()
        self._come_to_rest()
        self._audit("first")
        self._one_more_end()
        self._audit("second")
        self._judge()

    def _strike(self) -> None:
        if self.crowd.stopped:
            return
        self.world.after(self.rng.randrange(self.fault_every_us) * 2, self._strike)
        if self._stopping or self.world.now_us < self._quiet_until_us:
            return
        if self.crowd.sent < self._next_fault_at and self.rng.random() < 0.95:
            return  # a server that dies before it has begun to serve shows little
        self._next_fault_at = self.crowd.sent + 3
        fault = self.rng.choices(list(self.faults), list(self.faults.values()))[0]
        self.say(fault.__name__)
        self.server.counts[fault.__name__] += 1
        fault()

    def _come_to_rest(self) -> None:
        """No new requests, no new faults, and everything that is open ends."""
        self.say("rest")
        self.crowd.stop()
        self.machine.calm()
        self.world.run_until(lambda: self.crowd.is_idle, within_us=120 * S, what="every request is answered")
        self._restart_read_only()
        self._await_up()
        self._broken.clear()
        self.world.run_for(SETTLE_US)
        self.crowd.settle()
        self.history.happened("calm")
        self.crowd.rest_watchers()

    def _one_more_end(self) -> None:
        end = self.rng.choice((self.cut_power, self.kill_server, self.stop_server))
        self.say("last", end.__name__)
        end()
        self._await_up()
        if self.crowd.appetite.routers:
            self.world.run_for(self.rng.choice((0, 5 * S)))
        self.crowd.rest_watchers()

    def _await_up(self) -> None:
        self.world.run_until(self.server.is_up, within_us=300 * S, what="every shard serves again")

    def _audit(self, name: str) -> None:
        self.say("audit", name)
        auditor = Auditor(self.crowd, name)
        auditor.read_all()
        take_all(auditor)

    def _judge(self) -> None:
        for worker in filter(None, self.server.workers):
            assert worker.core is not None
            worker.core.engine.check_invariants()
        # A stream may be looking for more at this very moment.
        self.world.run_until(self._nothing_is_asked, within_us=5 * S, what="nothing is on its way")
        for op in self.history.ops:
            if self.max_topics and op.kind == "list" and op.ok:
                assert len(op.answer["topics"]) <= self.max_topics, "more topics than the cap allows"
        assert_ok(self.history)
        self._check_erased(self.history.ops)

    def _nothing_is_asked(self) -> bool:
        links = [link for front in filter(None, self.server.fronts) for link in front.core.links]
        return not any(link.pending or link.cost for link in links)

    def _answered(self, op: Op) -> None:
        if op.kind == "delete" and op.ok and op.request.get("erase"):
            self._check_erased([op])

    def _check_erased(self, erases: list[Op]) -> None:
        """What an erase surely covered stands in no file any more."""
        for needle in erased(self.history, [op for op in erases if op.topic in OWN_TTL]):
            for disk in (*self.machine.disks, *self.machine.colds):
                assert not holders(disk, needle), f"erased, and still in {holders(disk, needle)}: {needle!r}"

    def say(self, *words: object) -> None:
        if self.verbose:
            print(f"{self.world.now_us / 1e6:10.6f}", self.crowd.sent, *words, flush=True)

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
            # Out of the middle of that process's own doing, so not before it has unwound.
            worker.die()
            self.cut_power()

    def _pick(self) -> list[SimShard]:
        living = self._living()
        return [self.rng.choice(living)] if living else []

    def _note(self, kind: str, worker: SimShard) -> None:
        self.history.happened(kind, self._topics_of(worker), f"shard {worker.shard}")

    def _topics_of(self, worker: SimShard) -> list[str]:
        names = [*CHARACTERS, *(name for client in self.crowd.clients for name in client.own)]
        return [name for name in names if shard_of(name, self.server.shards) == worker.shard]

    # -- disks ---------------------------------------------------------------------------------------------

    def _may_fail(self, shard: int) -> bool:
        # With a rotten index and without the records, which are cold, nobody knows what a topic holds.
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
        """Somebody reads the log and restarts what says that it needs it."""
        for worker in self._living():
            if worker.core is not None and worker.core.engine.shard.read_only is not None:
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
        """A bit flips in a stored file while nobody holds it in memory: a segment's, closed or open, or a snapshot."""
        shard = self.rng.randrange(self.server.shards)
        worker = self.server.workers[shard]
        disk = self.machine.disks[shard]
        path = self._rotting(disk)
        file = disk._find(path) if path else None
        if worker is None or not worker.alive or worker.core is None or not getattr(file, "live", b""):
            return
        if path.endswith((".data", ".del")):
            log = worker.core.engine.shard.by_id.get(int(path.split("/")[-2], 16))
            if log is None:
                return
            self.history.happened(
                "rot", [log.name], path
            )  # all else is made anew from these, and costs no record
        self._rotten.add(path)
        offset = self.rng.randrange(len(file.live))  # type: ignore[union-attr]
        disk.flip_bit(path, offset, self.rng.randrange(8))
        self.say("  rot", path, offset)
        self._note("kill", worker)
        self.server.kill_worker(worker)

    def _rotting(self, disk: SimDisk) -> str:
        """A file to rot: each only once, as two rotten places in one can look like a file of another version."""
        snapshots = [path for path in disk.paths() if "/snap-" in path and not path.endswith(".tmp")]
        if self.rng.random() < 0.15:
            # One of two is always good, or there is nothing to start from.
            return snapshots[-1] if len(snapshots) == 2 and not self._rotten & set(snapshots) else ""
        suffix = self.rng.choice((".data", ".data", ".data", ".del", ".idx", ".dict", ".sum"))
        paths = (path for path in disk.paths() if path.startswith("topics/") and path.endswith(suffix))
        stored = [path for path in paths if path not in self._rotten]
        return self.rng.choice(stored) if stored else ""

    # -- the cold tier -------------------------------------------------------------------------------------

    def lose_cold(self) -> None:
        """A disk that is not mounted for a while. Nothing that it holds is lost, and nothing else suffers."""
        shard = self.rng.randrange(self.server.shards)
        self.machine.away.add(shard)
        self.history.happened("error", note=f"cold {shard} away")
        self.world.after(self.rng.choice((20, 300, 3000)) * MS, lambda: self.machine.away.discard(shard))

    def slow_cold(self) -> None:
        shard = self.rng.randrange(self.server.shards)
        self.machine.cold_us[shard] = self.rng.choice((50, 2000)) * MS

        def fast() -> None:
            self.machine.cold_us[shard] = 2 * MS

        self.world.after(self.rng.choice((300, 3000)) * MS, fast)

    def crash_at_cold_call(self) -> None:
        for worker in self._pick():
            disk = self.machine.colds[worker.shard]
            calm(disk)
            disk.crash_at(self.rng.choice((1, 2, 3, 5, 8, 13, 21, 34)), midway=self.rng.random() < 0.5)

    def fail_cold_call(self) -> None:
        """Whatever a cold disk answers, the shard goes on: `_may_fail` does not know of it."""
        for worker in self._pick():
            disk = self.machine.colds[worker.shard]
            calm(disk)
            error = self.rng.choice((errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE))
            disk.fail_at(self.rng.choice((1, 2, 3, 5, 13)), error)
            self.history.happened("error", note=f"cold {worker.shard} {errno.errorcode[error]}")

    def rot_cold(self) -> None:
        """A bit flips in records of the cold tier that are nowhere else."""
        for worker in self._pick():
            disk, hot = self.machine.colds[worker.shard], self.machine.disks[worker.shard]
            paths = [path for path in disk.paths() if path.startswith("topics/") and path.endswith(".data")]
            kept = set(
                hot.paths()
            )  # a question of ours is no call of the shard's, so no planned fault meets it
            alone = [path for path in paths if path not in self._rotten and path not in kept]
            if not alone or worker.core is None:
                continue
            path = self.rng.choice(alone)
            log = worker.core.engine.shard.by_id.get(int(path.split("/")[-2], 16))
            if log is not None:
                self.history.happened("rot", [log.name], path)
                self._rotten.add(path)
                disk.flip_bit(path, self.rng.randrange(len(disk._find(path).live)), self.rng.randrange(8))  # type: ignore[union-attr]
                self._note("kill", worker)
                self.server.kill_worker(worker)

    # -- time ----------------------------------------------------------------------------------------------

    def stall(self) -> None:
        """A worker stands still for a while, as if stopped. Most live to see what waited too long for them."""
        for worker in self._pick():
            until_us = self.world.now_us + self.rng.choice((5, 5, 100, 100, 2000, 35_000)) * MS
            worker.stalled_until_us = until_us
            if until_us > self.world.now_us + 30 * S and self.rng.random() < 0.7:
                self._quiet_until_us = until_us + 5 * MS

    def set_clock(self) -> None:
        jump_ms = self.rng.choice((-90_000, -500, 500, 30_000))
        if self.jumped_ms + jump_ms > 60_000:  # or keys would be forgotten while they are still in use
            return
        self.jumped_ms += max(0, jump_ms)
        self.machine.clock.wall_offset_ms += jump_ms
        self.history.happened("clock", note=str(jump_ms))

    def lull(self) -> None:
        """Nobody asks for anything for a while."""
        if self.crowd.sent < self._next_lull_at:
            return
        self._next_lull_at = self.crowd.sent + 40
        self.crowd.paused_until_us = self.world.now_us + self.rng.choice((1, 6, 6)) * S

    def checkpoint(self) -> None:
        for worker in self._pick():
            if worker.core is not None and worker.core.is_ready and not worker.core.engine.closed:
                worker.core.engine.checkpoint()


def has_queues(seed: int) -> bool:
    """Whether a story is about work as well; of its own chance, so that the others stay as they are."""
    return random.Random(seed * 15_485_863 + 11).random() < 0.4


def has_routers(seed: int) -> bool:
    """Whether a story is about routers; of its own chance as well."""
    return random.Random(seed * 49_979_687 + 19).random() < 0.4


def has_tiers(seed: int) -> bool:
    """Whether old segments move to a cold disk. Planted bugs are pinned to stories of the first hundreds, which stay as they are."""
    return seed >= FIRST_WITH_TIERS and random.Random(seed * 86_028_157 + 29).random() < 0.4


def digest(story: Story) -> str:
    """One number for everything that was said and everything that happened."""
    lines = [repr(op) for op in story.history.ops]
    lines += [
        f"{event.at} {event.kind} {event.note} {sorted(event.topics or ())}" for event in story.history.events
    ]
    lines += [repr(stream) for stream in story.history.streams]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seed", type=int)
    parser.add_argument("--until", type=int, help="run all seeds up to this one")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--digest", action="store_true", help="print one number for the whole story")
    parser.add_argument("--save", type=Path, help="write the history of the last seed told here")
    options = parser.parse_args()
    totals: Counter[str] = Counter()
    began = time.perf_counter()
    for seed in range(options.seed, (options.until or options.seed) + 1):
        story = Story(seed, steps=options.steps, verbose=options.verbose)
        try:
            totals += story.run()
        except Failed as failure:
            print(failure)
            return 1
        finally:
            if options.save:
                story.history.save(options.save)
                print(f"the history of seed {seed} is in {options.save}")
        if options.digest:
            print(seed, digest(story))
    took = time.perf_counter() - began
    print(f"{dict(sorted(totals.items()))} in {took:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
