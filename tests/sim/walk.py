"""A seeded random run of an engine next to the model.

`python -m tests.sim.walk 17` runs seed 17 and prints what happened; `--verbose` prints every step, `--trace` one
digest of all disk calls and replies. All decisions come from one generator, so the run of a seed only changes with
the code.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import random
from collections import Counter

import msgspec

from tests.support import model_commands as d
from tests.support.driver import SMALL, Driver
from tests.support.model import Conf, Match, NewRec
from tests.support.sim_disk import SimulatedCrash
from tests.support.stores import ObjectStore

STEPS = 200
TIERED = msgspec.structs.replace(SMALL, hot_retain_segments=1, cold_cache_bytes=4096)

# The possible configs of each topic; it begins with the first.
CONFIGS: dict[str, list[Conf]] = {
    "fsync": [
        Conf(durability="fsync"),
        Conf(durability="fsync", cap_records=5),
        Conf(durability="fsync", dedupe_node=False),
    ],
    "disk": [Conf(), Conf(cap_records=6), Conf(cap_bytes=200)],
    "memory": [Conf(durability="memory"), Conf(durability="memory", cap_records=4)],
    "ephemeral": [Conf(durability="ephemeral"), Conf(durability="ephemeral", cap_records=3)],
    "fsync-ttl": [Conf(durability="fsync", ttl_ms=400), Conf(durability="fsync", ttl_ms=150, cap_records=3)],
    "disk-ttl": [Conf(ttl_ms=700, cap_records=8), Conf(ttl_ms=300), Conf()],
    "fsync-reject": [
        Conf(durability="fsync", discard="reject", cap_records=6),
        Conf(durability="fsync", discard="reject", cap_bytes=150),
    ],
    "disk-tags": [
        Conf(cap_per_tag=2),
        Conf(cap_per_tag=1, cap_records=5),
        Conf(cap_per_tag=3, max_record_bytes=60),
    ],
    "window": [Conf(idempotency_window_ms=301), Conf(idempotency_window_ms=301, durability="fsync")],
    "changing": [
        Conf(durability=kind, cap_records=cap) for cap in (0, 4) for kind in ("disk", "fsync", "memory")
    ],
}
# Records in RAM and in the log under one name: `--turning` has only such topics.
TURNING: dict[str, list[Conf]] = {
    f"turning-{first}": [
        Conf(durability=kind, cap_records=cap)
        for cap in (0, 3)
        for kind in (first, "ephemeral", "ephemeral", "memory", "disk", "fsync")
    ]
    for first in ("ephemeral", "disk", "fsync")
}
OWN_TTL = (
    "fsync",
    "disk",
    "memory",
    "disk-tags",
)  # never mixed with a topic's TTL: which of them ends a record would be a race
TAGS = [b"a.1", b"a.2", b"a.3", b"b", b"b.1", b""]
NODES = [b"n1", b"n2"]
KEYS = [b"k%d" % i for i in range(6)]


class Walk:
    def __init__(
        self,
        seed: int,
        *,
        steps: int = STEPS,
        trace: bool = False,
        verbose: bool = False,
        turning: bool = False,
        tiers: bool = False,
    ) -> None:
        self.seed = seed
        self.tiers = tiers
        self.configs = TURNING if turning else CONFIGS
        self.steps = steps
        self.verbose = verbose
        self.rng = random.Random(seed * 7919 + 1)
        if tiers:
            self.driver = Driver(seed, config=TIERED, trace=trace, store=ObjectStore())
        else:
            self.driver = Driver(seed, trace=trace)
        self.serial = 0
        self.armed = 0  # steps until a planned fault that has not happened is removed
        self.step_number = 0

    def run(self) -> Counter[str]:
        """Run all steps; AssertionError with the seed when engine and model differ."""
        try:
            self._run()
        except Exception as problem:
            turning = " --turning" if self.configs is TURNING else " --tiers" if self.tiers else ""
            replay = f"python -m tests.sim.walk {self.seed}{turning} --verbose"
            message = f"seed {self.seed}, step {self.step_number}; replay: {replay}"
            raise d.Divergence(f"{message}\n{type(problem).__name__}: {problem}") from problem
        return self.driver.events

    def _run(self) -> None:
        driver = self.driver
        driver.open()
        for number in range(self.steps):
            self.step_number = number
            step = self.rng.choices(*(WEIGHTS_WITH_TIERS if self.tiers else WEIGHTS))[0]
            try:
                self._say(step.__name__)
                step(self)
                self._after()
            except SimulatedCrash:
                driver.events["crash at a call"] += 1
                self._say("  crash")
                self._crash()
        driver.disk_calm()
        driver.drain()
        driver.compare()
        driver.restart()
        driver.close()
        driver.check_erased()

    def _after(self) -> None:
        driver = self.driver
        if self.armed:
            self.armed -= 1
            if not self.armed:
                driver.disk_calm()
        if driver.latched:
            self._say("  read-only")
            driver.disk_calm()
            driver.send(self._write(), *[self._read() for _ in range(3)])
            self._crash()

    def _say(self, *words: object) -> None:
        if self.verbose:
            print(self.step_number, *words, flush=True)

    # ---- random values

    def _name(self) -> str:
        return self.rng.choice(list(self.configs))

    def _payload(self) -> bytes:
        self.serial += 1
        return b'{"serial":%06d,"pad":"%s"}' % (self.serial, b"x" * self.rng.choice([0, 0, 5, 20, 120]))

    def _records(self, name: str) -> list[NewRec]:
        rng = self.rng
        count = rng.choice([1, 1, 1, 2, 3, 5, 9])
        with_ttl = name in OWN_TTL and rng.random() < 0.15
        tagged = rng.random() < (0.9 if "tags" in name else 0.5)
        return [
            NewRec(
                self._payload(),
                tag=rng.choice(TAGS) or None if tagged else None,
                node=rng.choice([None, *NODES]) if rng.random() < 0.4 else None,
                ttl_ms=rng.choice([0, 50, 220]) if with_ttl else 0,
            )
            for _ in range(count)
        ]

    def _match(self) -> Match:
        return self.rng.choice(
            [("eq", b"a.1"), ("eq", b"b"), ("prefix", b"a."), ("prefix", b"b"), ("prefix", b"")]
        )

    def _seq(self, name: str) -> int:
        topic = self.driver.model.topics.get(name)
        if topic is None:
            return self.rng.randrange(0, 5)
        spots = [
            0,
            topic.head,
            topic.head - 1,
            topic.earliest,
            topic.floor - 2,
            topic.head - 6,
            topic.floor // 2,
            topic.head + 3,
        ]
        spots += [loss.first - 1 for loss in topic.losses] + [loss.last - 2 for loss in topic.losses]
        return max(0, self.rng.choice(spots))

    def _ts(self, name: str) -> int:
        topic = self.driver.model.topics.get(name)
        if topic is None or not topic.live:
            return 1
        return self.rng.choice(list(topic.live.values())).ts + self.rng.choice([0, 0, 0, 1, -1, 5_000])

    def _append(self, name: str | None = None) -> d.Sent:
        rng = self.rng
        name = name or self._name()
        args: dict[str, object] = {}
        if name not in self.driver.staged.topics and rng.random() < 0.95:
            args["conf"] = self.configs[name][0]
        if rng.random() < 0.05:
            args["create"] = rng.random() < 0.5
        if rng.random() < 0.3:
            args["key"] = rng.choice(KEYS)
        topic = self.driver.staged.topics.get(name)
        if rng.random() < 0.08:
            args["if_last_seq"] = (topic.head if topic else 0) + rng.choice([0, 0, 1])
        elif rng.random() < 0.08:
            tag = rng.choice(TAGS[:3])
            last = max((rec.seq for rec in topic.live.values() if rec.tag == tag), default=0) if topic else 0
            args["if_tag_last_seq"] = (tag, last + rng.choice([0, 0, 1]))
        return d.append(name, self._records(name), **args)

    def _delete(self) -> d.Sent:
        rng = self.rng
        name = self._name()
        erase = rng.random() < 0.25
        kind = rng.randrange(6)
        if kind == 0:
            return d.delete(name, before_seq=self._seq(name), erase=erase)
        if kind == 1:
            return d.delete(name, match=self._match(), erase=erase)
        if kind == 2:
            return d.delete(name, match=self._match(), before_seq=self._seq(name), erase=erase)
        if kind == 3:
            return d.delete(name, seqs=sorted({self._seq(name) for _ in range(3)}), erase=erase)
        if kind == 4:
            return d.delete(name, match=self._match(), keep=rng.randrange(3), erase=erase)
        return d.delete(name, keep=rng.randrange(8), erase=erase)

    def _write(self) -> d.Sent:
        rng = self.rng
        name = self._name()
        if self.configs is TURNING and rng.random() < 0.25:
            return d.put(name, rng.choice(TURNING[name]))
        roll = rng.random()
        if roll < 0.72:
            return self._append(name)
        if roll < 0.88:
            return self._delete()
        if roll < 0.92:
            return d.skip(name, rng.choice([1, 1, 2, 2, 7, 1_500]))  # the last one passes a seq ceiling
        if roll < 0.98:
            return d.put(name, rng.choice(self.configs[name]))
        return d.drop(name, if_empty=rng.random() < 0.5)

    def _read(self) -> d.Sent:
        rng = self.rng
        name = self._name()
        kind = rng.randrange(12)
        if kind < 6:
            frames = rng.random() < 0.3
            return d.diff(
                name,
                self._seq(name),
                limit=rng.choice([0, 1, 2, 4, 1000]),
                max_bytes=0 if frames else rng.choice([0, 0, 1, 60]),
                nodes=rng.choice([(), (), (b"n1",), (b"n1", b"n2")]),
                match=self._match() if rng.random() < 0.3 else None,
                from_ts=self._ts(name) if rng.random() < 0.3 else 0,
                frames=frames,
            )
        if kind == 6:
            return d.state(name)
        if kind == 7:
            return d.list_topics(
                prefix=rng.choice(["", "disk", "f"]),
                after=rng.choice(["", "disk"]),
                limit=rng.choice([2, 100]),
            )
        if kind == 8:
            return d.last_by_tag(name, self._match(), each=rng.random() < 0.5)
        if kind == 9:
            return d.next_by_tag(name, self._match(), self._seq(name))
        return d.count_by_tag(name, self._match())

    # ---- steps

    def one_write(self) -> None:
        self.driver.send(self._write())

    def some_writes(self) -> None:
        self.driver.send(*[self._append() for _ in range(self.rng.randrange(2, 6))])

    def mixed_turn(self) -> None:
        requests = [self._write() if self.rng.random() < 0.5 else self._read() for _ in range(5)]
        self.driver.send(*requests)

    def some_reads(self) -> None:
        self.driver.send(*[self._read() for _ in range(4)])

    def poll(self) -> None:
        name = self._name()
        topic = self.driver.model.topics.get(name)
        self.driver.send(
            d.diff(
                name,
                topic.head if topic else 0,
                wait_ms=self.rng.choice([40, 500]),
                match=self._match() if self.rng.random() < 0.3 else None,
                frames=self.rng.random() < 0.3,
            )
        )

    def a_job(self) -> None:
        if self.driver.jobs:
            self.driver.run_job()
        else:
            self.driver.tick()

    def drain(self) -> None:
        self.driver.drain()

    def pass_time(self) -> None:
        self.driver.advance(self.rng.choice([1, 7, 60, 120, 250, 1_100]))

    def wall_jumps(self) -> None:
        self.driver.clock.jump_wall(self.rng.choice([-100_000, -500, 500, 100_000]))

    def checkpoint(self) -> None:
        assert self.driver.engine is not None
        self.driver.engine.checkpoint()
        self.driver.tick()

    def compare(self) -> None:
        self.driver.drain()
        self.driver.compare()

    def restart(self) -> None:
        self.driver.restart()

    def stop_short(self) -> None:
        self._crash()

    def plan_crash(self) -> None:
        self.driver.disk_calm()
        self.driver.disk.crash_at(
            self.rng.choice([1, 2, 3, 5, 8, 13, 21, 34]), midway=self.rng.random() < 0.5
        )
        self.armed = 12

    def plan_crash_in_checkpoint(self) -> None:
        self.driver.disk_calm()
        assert self.driver.engine is not None
        self.driver.engine.checkpoint()
        self.driver.disk.crash_at(self.rng.randrange(1, 60), midway=self.rng.random() < 0.5)
        self.armed = 12
        self.driver.tick()
        self.driver.drain()

    def plan_failure(self) -> None:
        self.driver.disk_calm()
        self.driver.disk.fail_at(self.rng.choice([1, 2, 3]), errno.EIO, of=self.rng.choice(["write", "sync"]))
        self.armed = 12

    def store_fails(self) -> None:
        self._store.fail_at(self.rng.choice([1, 2, 3, 5, 8, 13]), errno.EIO)
        self.armed = 12

    def store_is_down(self) -> None:
        self._store.is_down = not self._store.is_down
        self.armed = 6

    def plan_crash_in_store(self) -> None:
        self._store.crash_at(self.rng.choice([1, 2, 3, 5, 8, 13, 21]))
        self.armed = 12

    @property
    def _store(self) -> ObjectStore:
        assert self.driver.store is not None
        return self.driver.store

    def full_disk(self) -> None:
        driver = self.driver
        driver.drain()
        driver.disk.full = True
        try:
            for _ in range(self.rng.randrange(3, 12)):
                sent = self._append() if self.rng.random() < 0.8 else self._delete()
                sent.may_be_full = True
                driver.send(sent)
                if self.rng.random() < 0.5:
                    driver.drain()
            driver.drain()
        finally:
            driver.disk.full = False
        self._service_resumes()

    def _service_resumes(self) -> None:
        driver = self.driver
        for _ in range(30):
            driver.advance(200)
            driver.drain()
            if driver.latched:
                return
            sent = d.append("disk", [NewRec(self._payload())], conf=Conf())
            sent.may_be_full = True
            driver.send(sent)
            driver.drain()
            if sent.acked:
                return
        raise d.Divergence("there is space again, but writes are still refused")

    def _crash(self) -> None:
        rng = self.rng
        self.armed = 0
        how = rng.choice(["kill", "power"])
        self.driver.crash(how, crash_in_recovery=rng.randrange(1, 40) if rng.random() < 0.4 else 0)
        self._say("  back after", how)


WEIGHTS = (
    [
        Walk.one_write, Walk.some_writes, Walk.mixed_turn, Walk.some_reads, Walk.poll, Walk.a_job, Walk.drain,
        Walk.pass_time, Walk.wall_jumps, Walk.checkpoint, Walk.compare, Walk.restart, Walk.stop_short, Walk.plan_crash,
        Walk.plan_crash_in_checkpoint, Walk.plan_failure, Walk.full_disk,
    ],
    [60, 14, 14, 24, 6, 34, 8, 14, 2, 6, 5, 3, 4, 8, 4, 2, 2],
)  # fmt: skip

WEIGHTS_WITH_TIERS = (
    [*WEIGHTS[0], Walk.store_fails, Walk.store_is_down, Walk.plan_crash_in_store, Walk.checkpoint],
    [*WEIGHTS[1], 5, 4, 8, 24],
)


def digest(walk: Walk) -> str:
    """One digest over all disk calls and all replies."""
    driver = walk.driver
    lines = (driver.disk.trace or []) + (driver.replies_trace or [])
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--until", type=int, help="run all seeds up to this one")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--turning", action="store_true", help="topics that change their class")
    parser.add_argument("--tiers", action="store_true", help="with a cold tier, which fails at times")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    for seed in range(options.seed, (options.until or options.seed) + 1):
        walk = Walk(
            seed,
            steps=options.steps,
            trace=options.trace,
            verbose=options.verbose,
            turning=options.turning,
            tiers=options.tiers,
        )
        events = walk.run()
        print(digest(walk) if options.trace else f"seed {seed}: {dict(sorted(events.items()))}")


if __name__ == "__main__":
    main()
