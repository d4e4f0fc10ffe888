"""A whole server in one process, with clients that record their history; one seed determines everything.

    .venv/bin/python -m tests.sim.server_walk 17              run seed 17
    .venv/bin/python -m tests.sim.server_walk 0 --until 99    run a hundred seeds
    scripts/sim --seed 17 --steps 400               the same, with progress and totals

Each run draws its own set of operations and faults, so that rare combinations occur: deaths of any process at any
moment and at any disk call, power cuts, full and slow and failing disks, damaged files, clock changes, stalls, clean
stops. At the end everything is read, the server dies once more, everything is read again, and the checker checks the
history. A failure prints the seed, which repeats it exactly.
"""

from __future__ import annotations

import argparse
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
from tests.sim.clients import LOGS, OWN_TTL, SETTLE_US, ClientPool, FinalReader, Workload, write_weights
from tests.sim.faults import Faults
from tests.sim.merge_jobs import check_tidy
from tests.sim.processes import Machine, SimServer
from tests.sim.queue_workers import CONSUMERS, QUEUES, take_all, work_sources
from tests.sim.sinks import producers_of
from tests.sim.world import MS, S, World
from tests.support.checker import assert_ok
from tests.support.checker.erases import erased
from tests.support.engine_harness import holders
from tests.support.history import Op
from topics.api import limits
from topics.api.config import EngineConfig
from topics.system.settings import Settings

STEPS = 250  # requests of clients
FIRST_WITH_TIERS = 1000
FIRST_WITH_SINKS = FIRST_WITH_MERGES = 2000
FIRST_WITH_LOST_SOURCES = 3000
MERGED = ["fsync", "fsync-too", "disk", "disk-too", "disk-tags", "changing"]  # topics that get long


class Failed(AssertionError):
    """A run that broke a promise, and the seed that repeats it."""


class CaughtExceptions(logging.Handler):
    """Exceptions that a process of the server logged and survived. In the simulation they are failures."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(
                f"{record.getMessage()}: {logging.Formatter().formatException(record.exc_info)}"
            )


class Simulation(Faults):
    def __init__(self, seed: int, *, steps: int = STEPS, verbose: bool = False) -> None:
        super().__init__()
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
        self.pool = ClientPool(
            self.server,
            self._workload(),
            clients=rng.choice((2, 3, 4, 6)),
            watchers=rng.choice((0, 0, 1, 2, 4)),
        )
        self.pool.on_answer = self._answered
        if has_merges(seed):
            self._add_merges()
        elif has_routers(seed):
            self._add_routers()
        elif has_queues(seed):
            self._add_workers()
        self.history = self.pool.history
        self.whole_records = limits.TXN_WHOLE_RECORDS
        if has_sinks(seed):
            self._add_transactions()
        self.faults = self._draw_faults()
        self.fault_every_us = rng.choice((10, 30, 60)) * MS
        self.rest_requests = 8 if self.pool.mergers else 3  # between two faults, most of the time
        self._next_fault_at = 0  # requests

    # -- parameters of this run ----------------------------------------------------------------------------

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
        config = msgspec.structs.replace(
            config,
            segment_max_events=rng.choice((2, 4, 8)),
            snapshot_wal_bytes=rng.choice((1024, 4096)),
            snapshot_interval_ms=rng.choice((500, 2000)),
            inline_bytes=rng.choice((0, 0, 256)),
            hot_retain_segments=rng.choice((0, 0, 1, 2)),
            hot_retain_bytes=rng.choice((0, 0, 1024)),
            cold_cache_bytes=rng.choice((1024, 1 << 20)),
        )
        if not has_merges(self.seed):
            return config
        return msgspec.structs.replace(
            config,
            segment_max_events=rng.choice((2, 3)),
            hot_retain_segments=rng.choice((0, 0, 1)),
            hot_retain_bytes=0,
            retire_grace_ms=rng.choice((0, 0, 300)),
            plan_ttl_ms=rng.choice((2000, 20_000)),
        )

    def _workload(self) -> Workload:
        rng = self.rng
        weights = write_weights()
        for kind in weights:
            if kind != "write" and rng.random() < 0.25:
                weights[kind] = 0
        topics = rng.sample(LOGS, rng.choice((2, 4, len(LOGS))))
        return Workload(
            weights,
            topics,
            think_us=rng.choice((200, 3 * MS, 20 * MS)),
            keyed=rng.choice((0.0, 0.5, 0.9)),
            erase=rng.choice((0.0, 0.2, 1.0)),
            grouped=rng.random() < 0.2,
        )

    def _add_workers(self) -> None:
        """Some topics are queues, others have consumers, and clients work on them."""
        rng = random.Random(self.seed * 104_729 + 3)
        topics = self.pool.workload.topics
        topics[:] = topics[: rng.choice((1, 2, 4))] + rng.sample(list(QUEUES), rng.choice((1, 2, 3)))
        names = rng.sample(list(CONSUMERS), rng.choice((0, 1, 2)))
        self.pool.add_workers(rng.choice((2, 3, 5)), work_sources(topics, names))

    def _add_routers(self) -> None:
        """Some topics are copied to others, and little else happens."""
        rng = random.Random(self.seed * 32_452_843 + 7)
        workload = self.pool.workload
        workload.routers = list(routers.FROM_MEMORY) if loses_sources(self.seed) else routers.choose(rng)
        workload.sources, dests = routers.topics_of(workload.routers)
        others = workload.topics[: rng.choice((0, 0, 1, 2))]
        workload.topics[:] = list(dict.fromkeys((*workload.sources, *dests, *dests, *others)))
        weights = {"put_router": 12.0, "router": 4.0, "routers": 1.0, "drop_router": 1.0}
        workload.weights |= {name: weight * rng.choice((0.3, 1.0)) for name, weight in weights.items()}
        if loses_sources(self.seed):  # or routers would seldom exist both before and after a crash
            workload.weights |= {"drop": 0, "drop_router": 0}

    def _add_transactions(self) -> None:
        """Some clients write in transactions; the run draws the size from which a batch counts as large."""
        rng = random.Random(self.seed * 67_867_967 + 31)
        self.whole_records = rng.choice((0, 3, limits.TXN_WHOLE_RECORDS))
        self.history.happened("pieces", note=str(self.whole_records))
        producers = producers_of(rng, self.pool.workload.topics)
        self.pool.add_sinks(producers, [rng.random() < 0.4 for _ in producers])

    def _add_merges(self) -> None:
        """Jobs merge cold segments, so few topics get many of them."""
        rng = random.Random(self.seed * 67_867_987 + 43)
        workload = self.pool.workload
        workload.weights |= {
            "put": 0,
            "drop": 0.3,
            "delete": rng.choice((1, 4)),
        }  # or little would become cold
        workload.topics[:] = rng.sample(MERGED, rng.choice((1, 2)))
        self.machine.usual_cold_us = rng.choice((300, 2000))
        self.machine.calm()
        self.pool.add_merges(rng.choice((1, 2, 2)), rng.choice((0, 1, 1)), workload.topics)
        self.world.after(rng.choice((20, 60)) * MS, self._checkpoint_often)

    def _checkpoint_often(self) -> None:
        if not self.pool.stopped:
            self.checkpoint()
            self.world.after(self.rng.choice((10, 30, 90)) * MS, self._checkpoint_often)

    def _draw_faults(self) -> dict[Callable[[], None], int]:
        """Some faults, not all: a run in which everything fails all the time makes no progress."""
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
        if loses_sources(self.seed):
            chosen = {self.kill_shard: 2, self.lull: 1, self.slow_disk: 1}
        return chosen or {self.kill_shard: 1}

    # -- the run -------------------------------------------------------------------------------------------

    def run(self) -> Counter[str]:
        caught, logger = CaughtExceptions(), logging.getLogger("topics")
        logger.addHandler(caught)
        usual = limits.TXN_WHOLE_RECORDS, limits.TXN_SLICE_RECORDS
        limits.TXN_WHOLE_RECORDS, limits.TXN_SLICE_RECORDS = (
            self.whole_records,
            min(self.whole_records, usual[1]),
        )
        try:
            self._run()
            assert not caught.found, caught.found[0]
        except Exception as problem:
            text = f"seed {self.seed}; replay: .venv/bin/python -m tests.sim.server_walk {self.seed} --steps {self.steps} --verbose"
            raise Failed(f"{text}\n{type(problem).__name__}: {problem}") from problem
        finally:
            limits.TXN_WHOLE_RECORDS, limits.TXN_SLICE_RECORDS = usual
            logger.removeHandler(caught)
        return self.server.counts

    def _run(self) -> None:
        self.server.start()
        self.world.after(5 * MS, self._strike)
        while self.pool.sent < self.steps:
            self.world.step()
        self._come_to_rest()
        self._audit("first")
        self._one_more_end()
        self._audit("second")
        self._judge()
        if self.pool.mergers:
            self._tidy_up()

    def _strike(self) -> None:
        if self.pool.stopped:
            return
        self.world.after(self.rng.randrange(self.fault_every_us) * 2, self._strike)
        if self._stopping or self.world.now_us < self._quiet_until_us:
            return
        if self.pool.sent < self._next_fault_at and self.rng.random() < 0.95:
            return  # a server that dies before it serves shows little
        self._next_fault_at = self.pool.sent + self.rest_requests
        fault = self.rng.choices(list(self.faults), list(self.faults.values()))[0]
        self.log_step(fault.__name__)
        self.server.counts[fault.__name__] += 1
        fault()

    def _come_to_rest(self) -> None:
        """No new requests, no new faults, and everything that is open ends."""
        self.log_step("rest")
        self.pool.stop()
        self.machine.calm()
        self.world.run_until(lambda: self.pool.is_idle, within_us=120 * S, what="every request is answered")
        self._restart_read_only()
        self._await_up()
        self._broken.clear()
        self.world.run_for(SETTLE_US)
        self.pool.settle()
        self.history.happened("calm")
        self.pool.rest_watchers()

    def _one_more_end(self) -> None:
        end = self.rng.choice((self.cut_power, self.kill_server, self.stop_server))
        self.log_step("last", end.__name__)
        end()
        self._await_up()
        if self.pool.workload.routers:
            self.world.run_for(self.rng.choice((0, 5 * S)))
        self.pool.rest_watchers()

    def _await_up(self) -> None:
        self.world.run_until(self.server.is_up, within_us=300 * S, what="every shard serves again")

    def _audit(self, name: str) -> None:
        self.log_step("audit", name)
        final_reader = FinalReader(self.pool, name)
        final_reader.read_all()
        take_all(final_reader)

    def _judge(self) -> None:
        for worker in filter(None, self.server.workers):
            assert worker.core is not None
            worker.core.engine.check_invariants()
        # A stream may be searching for more at this moment.
        self.world.run_until(self._nothing_is_asked, within_us=5 * S, what="no message is in flight")
        for op in self.history.ops:
            if self.max_topics and op.kind == "list" and op.ok:
                assert len(op.answer["topics"]) <= self.max_topics, "more topics than the cap allows"
        assert_ok(self.history)
        self._check_erased(self.history.ops)

    def _nothing_is_asked(self) -> bool:
        links = [link for front in filter(None, self.server.fronts) for link in front.core.links]
        return not any(link.pending or link.cost for link in links)

    def _tidy_up(self) -> None:
        """Time ends all pins and plans, and checkpoints release what was merged."""
        final_reader = FinalReader(self.pool, "third")
        engines = [worker.core.engine for worker in self._living() if worker.core is not None]
        for i in range(4):
            for engine in engines:
                names = [log.name for log in engine.shard.state.by_id.values()]
                wish = {"records": [{"data": {"w": "tidy", "i": i}}]}
                next((name for name in names if final_reader.ask("write", name, wish).ok), None)
                engine.checkpoint()
            self.world.run_for(20 * S)
        for engine, disk in zip(engines, self.machine.colds, strict=True):
            named, losses = {}, {}
            for topic_id, log in engine.shard.state.by_id.items():
                metas = (
                    [*log.stored]
                    if log.stored is not None
                    else [chunk.meta for chunk in log.chunks if chunk.meta]
                )
                metas += engine.checkpointer.pending_deletions_of(topic_id)  # removed by the next one
                cold = {(meta.first_seq, meta.generation) for meta in metas if meta.tier == "cold"}
                named[engine.reader.topic_dir(topic_id)] = cold
                losses[engine.reader.topic_dir(topic_id)] = list(log.view.losses)
            check_tidy(disk, named, losses)

    def _answered(self, op: Op) -> None:
        if op.kind == "delete" and op.ok and op.request.get("erase"):
            self._check_erased([op])

    def _check_erased(self, erases: list[Op]) -> None:
        """No file contains what an acknowledged erase covered."""
        for needle in erased(self.history, [op for op in erases if op.topic in OWN_TTL]):
            for disk in (*self.machine.disks, *self.machine.colds):
                assert not holders(disk, needle), f"erased, and still in {holders(disk, needle)}: {needle!r}"

    def log_step(self, *words: object) -> None:
        if self.verbose:
            print(f"{self.world.now_us / 1e6:10.6f}", self.pool.sent, *words, flush=True)


def has_queues(seed: int) -> bool:
    """Whether a run has queues; drawn separately, so that other runs do not change."""
    return random.Random(seed * 15_485_863 + 11).random() < 0.4


def has_routers(seed: int) -> bool:
    """Whether a run has routers; drawn separately, too."""
    return random.Random(seed * 49_979_687 + 19).random() < 0.4


def has_tiers(seed: int) -> bool:
    """Whether old segments move to a cold disk. Planted bugs are found by seeds of the first hundreds, whose runs
    must not change.
    """
    return seed >= FIRST_WITH_TIERS and random.Random(seed * 86_028_157 + 29).random() < 0.4


def has_sinks(seed: int) -> bool:
    """Whether some clients write in transactions; as with tiers, not in runs of the first hundreds."""
    return seed >= FIRST_WITH_SINKS and random.Random(seed * 67_867_979 + 37).random() < 0.4


def has_merges(seed: int) -> bool:
    """Whether jobs merge cold segments."""
    return (
        has_tiers(seed) and seed >= FIRST_WITH_MERGES and random.Random(seed * 67_867_991 + 47).random() < 0.6
    )


def loses_sources(seed: int) -> bool:
    """Whether a run has routers whose sources, in a crash, lose what is only in memory."""
    return (
        has_routers(seed)
        and seed >= FIRST_WITH_LOST_SOURCES
        and random.Random(seed * 67_868_063 + 53).random() < 0.5
    )


def digest(simulation: Simulation) -> str:
    """One digest of the whole history."""
    lines = [repr(op) for op in simulation.history.ops]
    lines += [
        f"{event.at} {event.kind} {event.note} {sorted(event.topics or ())}"
        for event in simulation.history.events
    ]
    lines += [repr(stream) for stream in simulation.history.streams]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seed", type=int)
    parser.add_argument("--until", type=int, help="run all seeds up to this one")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--digest", action="store_true", help="print one digest of the whole run")
    parser.add_argument("--save", type=Path, help="write the history of the last seed told here")
    options = parser.parse_args()
    totals: Counter[str] = Counter()
    began = time.perf_counter()
    for seed in range(options.seed, (options.until or options.seed) + 1):
        simulation = Simulation(seed, steps=options.steps, verbose=options.verbose)
        try:
            totals += simulation.run()
        except Failed as failure:
            print(failure)
            return 1
        finally:
            if options.save:
                simulation.history.save(options.save)
                print(f"the history of seed {seed} is in {options.save}")
        if options.digest:
            print(seed, digest(simulation))
    took = time.perf_counter() - began
    print(f"{dict(sorted(totals.items()))} in {took:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
