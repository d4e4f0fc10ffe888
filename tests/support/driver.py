"""Runs an engine on a SimDisk next to a model, and compares them after every reply, restart and crash.

There are two models. `staged` applies every write when it is submitted, because the engine decides on staged state;
it gives the expected reply. `model` applies a write when its reply arrives, because readers may see it from then on;
it gives the expected result of reads. Time does not pass while a write waits for its sync, so both decide at the same
time.

`log` keeps the writes since the last restart in order, acked or not. After a restart tests/support/restart_check.py
checks which of them are missing and whether they may be; the state that it finds becomes the new model.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.support.model import Model, NewRec, PageView, Refused
from tests.support.model_commands import (
    Divergence,
    Seen,
    Sent,
    agree,
    append,
    drop,
    is_cut,
    plain,
    read_all,
    seen_of,
)
from tests.support.restart_check import RestartCheck
from tests.support.sim_clock import SimClock
from tests.support.sim_disk import SimDisk, SimulatedCrash
from tests.support.stores import ObjectStore
from topics.api.config import EngineConfig
from topics.api.errors import EraseDeferred, ShardReadOnly, Throttled, TopicsError
from topics.engine.commands import topics as c
from topics.engine.runtime.engine import Engine

SMALL = EngineConfig(
    wal_file_bytes=4096,
    segment_max_events=4,
    segment_max_bytes=2048,
    segment_max_age_ms=2_000,
    snapshot_wal_bytes=6_000,
    snapshot_interval_ms=1_000,
    cache_bytes=1024,
    memory_bytes_max=1 << 20,
    index_rows_max=64,
    rewrite_dead_share=0.4,
    verify=True,
)


class _DetachableDisk:
    """An engine's disk, which can be detached when the engine dies: calls made while its remains are garbage
    collected have no effect.
    """

    def __init__(self, disk: SimDisk) -> None:
        self._disk: SimDisk | None = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name) if self._disk is not None else lambda *_, **__: None

    def detach(self) -> None:
        self._disk = None


class Driver:
    """One engine, one disk, one clock, and a record of what the engine acked."""

    def __init__(
        self,
        seed: int,
        *,
        config: EngineConfig = SMALL,
        trace: bool = False,
        store: ObjectStore | None = None,
    ) -> None:
        """With a `store`, old segments are relocated to it all the time."""
        self.store = store
        self.seed = seed
        self.config = config
        self.rng = random.Random(seed)
        self.disk = SimDisk(seed)
        if trace:
            self.disk.trace = []
        self.clock = SimClock()
        self.events: Counter[str] = Counter()
        self.replies_trace: list[str] | None = [] if trace else None
        self.model = Model()
        self.staged = Model()
        self.base = Model()
        self.log: list[Sent] = []
        self.waiting: dict[int, Sent] = {}
        self.asked: dict[int, Any] = {}
        self.unsettled: list[Sent] = []
        self.jobs: list[Any] = []
        self.erased: list[bytes] = []
        self.sync_floor = 0  # everything submitted up to here is known to be synced
        self.latched = False
        self.faulty = (
            False  # a fault is planned or has happened: a read may fail, an append may find the disk full
        )
        self.closing = False
        self.changes = 0
        self.wake_at: int | None = None
        self._next_index = 1
        self._disk_access = _DetachableDisk(self.disk)
        self._now = 0
        self._acked_now = 0  # time of the newest acked write; the engine's time may never be below it
        self._forgotten: list[tuple[str, bytes]] = []  # keys whose records the last restart lost
        self.engine: Engine | None = None

    # ---- start and stop

    def open(self) -> None:
        """Open the engine, again if a planned crash happens during recovery; then check what it shows."""
        self._open("clean")

    def _open(self, how: str, *, inner: Callable[[], None] | None = None) -> None:
        while True:
            try:
                self._disk_access = _DetachableDisk(self.disk)
                engine = Engine.open(self._disk_access, self.clock, self.config, self.store)
            except SimulatedCrash:
                self.events["crash in recovery"] += 1
                again = self.rng.choice(["kill", "power"])
                self._cut(again)
                how = "power" if "power" in (how, again) else how if how != "clean" else "kill"
                if inner is not None:
                    inner()
                continue
            break
        self.engine = engine
        self.disk_calm()
        report = engine.report
        if report.torn:
            self.events["torn"] += 1
        if report.corrupt:
            raise Divergence(f"recovery after {how} reports a damaged log: {report}")
        self._judge(how)

    def disk_calm(self) -> None:
        """Drop planned faults that have not happened."""
        self.disk._plans.clear()
        self.disk._armed = False
        self.store_calm()

    def store_calm(self) -> None:
        if self.store is not None:
            self.store.calm()
            self.store.is_down = False

    def _cut(self, how: str) -> None:
        self._disk_access.detach()
        self.engine = None
        self.jobs.clear()
        if how == "power":
            self.disk.crash()
            self.clock = SimClock(self.clock.wall_ms() + self.rng.randrange(0, 3_000))
            self.events["power cuts"] += 1
        else:
            self.disk.kill()
            self.events["kills"] += 1

    def crash(self, how: str, *, crash_in_recovery: int = 0) -> None:
        """Crash ("kill" or "power"), restart, and check every promise."""
        self._take_counters()
        self._cut(how)
        if crash_in_recovery:
            self.disk.crash_at(crash_in_recovery, midway=self.rng.random() < 0.5)
        again = [self.rng.randrange(1, 60)] if crash_in_recovery and self.rng.random() < 0.3 else []
        self._open(how, inner=lambda: self.disk.crash_at(again.pop()) if again else None)

    def close(self) -> None:
        """Clean stop; the engine runs its own jobs meanwhile."""
        assert self.engine is not None
        self.drain()
        self.closing = True
        self.engine.close()
        self.closing = False
        self.latched = self.latched or self.engine.shard.state.read_only is not None
        self._take_counters()
        self.engine = None
        self.disk.kill()  # handles are closed; nothing is lost

    def restart(self) -> None:
        """Stop and start. A fault during the stop makes it a crash, which is checked as such."""
        self.drain()
        if not self.latched:
            self.close()
            self._open("kill" if self.latched else "clean")
        else:
            self.crash("kill")

    def _take_counters(self) -> None:
        if self.engine is not None:
            for name, count in self.engine.counters.items():
                self.events[name] += count
            if self.store is not None:
                self.events["cold fetches"] += self.engine.cold.fetches

    def engine_now(self) -> int:
        """The engine's time as of its last turn."""
        assert self.engine is not None
        now: int = self.engine.clock.now_ms
        return now

    # ---- turns

    def send(self, *requests: Sent) -> None:
        """One turn with these requests. A planned crash in it raises SimulatedCrash."""
        assert self.engine is not None
        batch = []
        for sent in requests:
            sent.index = self._next_index
            self._next_index += 1
            batch.append((sent.index, sent.command))
        error: BaseException | None = None
        outcome = None
        try:
            outcome = self.engine.turn(batch)
        except SimulatedCrash as crash:
            error = crash
        now = self.engine_now()
        if now < self._now:
            raise Divergence(f"engine time went back from {self._now} to {now}")
        self._now = now
        for sent in requests:
            sent.now = now
            self.waiting[sent.index] = sent
            sent.changes_seen = self.changes
            if sent.wait_until:
                sent.wait_until += self.clock.monotonic_ms()
            if not sent.writes:
                # Answers by tag are based on staged state, and wait until that is published.
                sent.options = [sent.apply(self.model, now), sent.apply(self.staged, now)]
            elif not self.latched:
                self._stage(sent)
        if error is not None:
            raise error
        self._take(outcome)

    def _stage(self, sent: Sent) -> None:
        before, payloads = self._mark(sent)
        sent.expected = sent.apply(self.staged, sent.now)
        after, left = self._mark(sent)
        sent.changed = before != after
        if sent.is_erase:
            sent.erases = sorted(payloads - left)
        if sent.changed and not isinstance(sent.expected, Refused):
            self.log.append(sent)

    def _mark(self, sent: Sent) -> tuple[object, set[bytes]]:
        topic = self.staged.topics.get(sent.topic)
        if topic is None:
            return None, set()
        topic.expire(sent.now)
        payloads = {rec.payload for rec in topic.live.values()} if sent.is_erase else set()
        return (topic.instance, topic.view()), payloads

    def tick(self) -> None:
        self.send()

    def run_job(self, position: int | None = None) -> None:
        assert self.engine is not None
        job = self.jobs.pop(self.rng.randrange(len(self.jobs)) if position is None else position)
        error: OSError | None = None
        try:
            job.run()
        except OSError as problem:
            error = problem
        self._take(self.engine.finish(job, error))

    def drain(self) -> None:
        """Run jobs and turns until every write is answered and no job is left."""
        for round_number in range(400):
            while self.jobs:
                self.run_job(0)
            if not any(sent.writes or not sent.wait_until for sent in self.waiting.values()):
                self._check_parked()
                return
            self.tick()
            if not self.jobs and round_number > 3:
                wait_ms = self.wake_at - self.clock.monotonic_ms() if self.wake_at is not None else 1
                self.clock.advance(min(max(wait_ms, 1), 1000))
        raise Divergence(f"never answered: {self._unanswered()}")

    def advance(self, ms: int) -> None:
        """Let time pass. Writes in flight are answered first, so that both models decide at the same time."""
        self.drain()
        self.clock.advance(ms)
        self.tick()

    def _unanswered(self) -> list[object]:
        return [sent.command for sent in self.waiting.values() if not sent.wait_until]

    # ---- replies

    def _take(self, outcome: Any) -> None:
        self.jobs += outcome.jobs
        self.wake_at = outcome.wake_at_ms
        reads: list[tuple[Sent, Any, list[Any]]] = []
        writes: list[tuple[Sent, Any]] = []
        for token, result in outcome.replies:
            if token < 0:
                self.asked[token] = result
                continue
            sent = self.waiting.pop(token, None)
            if sent is None:
                raise Divergence(f"a reply without a request, or a second reply: {token} {result}")
            if self.replies_trace is not None:
                self.replies_trace.append(f"{token} {plain(sent.kind, result)}")
            if sent.writes:
                writes.append((sent, result))
            else:
                reads.append((sent, result, sent.options))
        self._offer(reads)
        writes.sort(key=lambda write: not isinstance(write[1], Throttled))  # later ones were based on these
        for sent, result in writes:
            if self._take_write(sent, result):
                self._offer(reads, sent.topic)
        for sent, result, options in reads:
            self._take_read(sent, result, options)
        while self.unsettled:
            self._settle(self.unsettled.pop(0))

    def _offer(self, reads: list[tuple[Sent, Any, list[Any]]], topic: str | None = None) -> None:
        """Add what the model shows now to the allowed results of each open read."""
        for sent, _, options in reads:
            if topic is None or sent.topic in ("", topic):
                options.append(sent.apply(self.model, self._now))
        shown = [erase for erase in self.waiting.values() if erase.is_erase and self._may_show(erase)]
        if shown and reads:
            model = self.model.copy()
            for erase in shown:
                erase.apply(model, erase.now)
            for sent, _, options in reads:
                options.append(sent.apply(model, self._now))

    def _may_show(self, erase: Sent) -> bool:
        """Whether readers may see this delete although its answer still waits for the overwriting of the bytes."""
        return not erase.applied and erase.expected is not None and not self._waits_behind(erase)

    def _take_write(self, sent: Sent, result: Any) -> bool:
        """Compare the reply, and apply the write to the model. True when readers may see a change."""
        assert self.engine is not None
        if isinstance(result, ShardReadOnly):
            self._take_read_only(sent, unknown=result.detail.get("outcome") == "unknown")
            return False
        if self.latched and sent.expected is None:
            if not isinstance(result, TopicsError):
                raise Divergence(f"accepted by a read-only shard: {sent.kind} {sent.topic} {result}")
            return False
        put_off = isinstance(result, EraseDeferred) and self.store is not None
        if isinstance(result, Throttled | EraseDeferred) and (
            put_off or result.detail.get("limit") == "disk_full"
        ):
            if not (sent.may_be_full or self.faulty or put_off):
                raise Divergence(f"disk full without a planned fault: {sent.kind} {sent.topic} {result}")
            if sent.is_erase:
                # The records are deleted anyway; only their bytes stay until there is room for the intent.
                self.events["erase put off"] += 1
                sent.acked = True
                self._show(sent)
                self.changes += 1
                return True
            if sent.kind != "append":
                raise Divergence(f"a full disk refused a {sent.kind} of {sent.topic}")
            self.events["disk full"] += 1
            if sent in self.log:
                self.log.remove(sent)
                self._restage()
            return False
        got = plain(sent.kind, result)
        if sent.is_erase and got == Refused("internal"):
            # Overwriting the bytes failed, and the error says so; the records are deleted, or may be.
            self.events["erase failed"] += 1
            self.unsettled.append(sent)
            return False
        if got != sent.expected:
            raise Divergence(f"{sent.command}\n  engine {got} {result}\n  model  {sent.expected}")
        sent.acked = True
        self._acked_now = max(self._acked_now, sent.now if sent.changed else 0)
        if isinstance(got, Refused):
            self.events[got.code] += 1
            return False
        if got[0] == "appended" and got[5]:
            self.events["dedupe hit"] += 1
        if not sent.changed:
            return False
        for earlier in sorted(self.waiting.values(), key=lambda earlier: earlier.index):
            if earlier.topic != sent.topic or earlier.index > sent.index or not earlier.writes:
                continue
            if earlier.is_erase:
                self._show(
                    earlier
                )  # visible with its sync; only its answer waits for the overwriting of the bytes
            elif earlier.changed:
                raise Divergence(f"{sent.topic!r}: reply {sent.index} came before reply {earlier.index}")
        self._show(sent)
        sent.synced = self._promised(sent, result)
        if sent.synced:
            self.sync_floor = max(self.sync_floor, sent.index)
        if sent.is_erase:
            self.events["erase asked"] += 1
            self.erased += sent.erases
        self.changes += 1
        return True

    def _take_read_only(self, sent: Sent, *, unknown: bool) -> None:
        """The shard is read-only. A write of unknown outcome stays in `log`, as a restart may show it; any other
        refused write is removed for good.
        """
        self.latched = True
        self.events["outcome unknown" if unknown else "read only"] += 1
        if unknown:
            if sent.expected is None or isinstance(sent.expected, Refused):
                raise Divergence(
                    f"unknown outcome of a write that was certainly not executed: {sent.command}"
                )
            if sent.is_erase and not sent.applied:
                self.unsettled.append(sent)
        elif sent.applied:
            raise Divergence(f"refused although readers have seen it: {sent.command}")
        elif sent in self.log:
            self.log.remove(sent)
            self._restage()

    def _show(self, sent: Sent) -> None:
        if sent.applied:
            return
        sent.applied = True
        again = sent.apply(self.model, sent.now)
        if again != sent.expected:
            raise Divergence(f"the models differ: {sent.kind} of {sent.topic!r}: {again}, {sent.expected}")

    def _promised(self, sent: Sent, result: Any) -> bool:
        """Whether this ack promises that the write is synced."""
        if (
            sent.kind in ("put", "drop")
            or getattr(result, "created", False)
            or getattr(result, "synced", False)
        ):
            return True
        topic = self.model.topics.get(sent.topic)
        return topic is not None and topic.conf.durability == "fsync"

    def _restage(self) -> None:
        self.staged = self.model.copy()
        for sent in self.log:
            if not sent.acked and not sent.applied:
                sent.expected = sent.apply(self.staged, sent.now)

    def _take_read(self, sent: Sent, result: Any, options: list[Any]) -> None:
        got = plain(sent.kind, result)
        if self.faulty and isinstance(got, Refused) and got.code == "internal":
            self.events["failed read"] += 1
            return
        if self.store is not None and got == Refused("not_ready"):
            self.events["failed cold read"] += 1
            return
        if not any(agree(got, option) for option in options):
            for erase in [*self.waiting.values(), *self.unsettled]:
                if erase.is_erase and sent.topic in ("", erase.topic) and self._may_show(erase):
                    self._show(erase)
                    options.append(sent.apply(self.model, self._now))
        if self.store is not None and any(is_cut(got, option) for option in options):
            self.events["cut page"] += 1
            return
        if not any(agree(got, option) for option in options):
            raise Divergence(
                f"{sent.kind} of {sent.topic!r} {sent.args} at {self._now}\n  engine {got}\n"
                + "\n".join(f"  model  {option}" for option in options)
            )
        if isinstance(got, PageView):
            if got.gap is not None:
                self.events[f"gap {got.gap.reason}"] += 1
                stone = result.tombstone
                if got.gap.reason in ("cap", "ttl", "mixed"):
                    exact = (stone.earliest_seq, stone.missed_estimate)
                    wanted = (got.gap.gap_to + 1, got.gap.gap_to - got.gap.gap_from + 1)
                    if exact != wanted:
                        raise Divergence(f"tombstone of {sent.topic!r}: {exact}, not {wanted}")
            empty = not got.rows and got.gap is None and sent.args["from_seq"] == got.head_seq
            if sent.wait_until and empty:
                if self.clock.monotonic_ms() < sent.wait_until and self.changes == sent.changes_seen:
                    raise Divergence(f"a long poll of {sent.topic!r} returned early without records")
                self.events["poll timeout"] += 1

    def _settle(self, erase: Sent) -> None:
        """An erase failed: find out whether its delete became visible."""
        if not self._may_show(erase):
            return
        state_now = plain("state", self._ask(c.State(erase.topic, touch=False)))
        shown = self.model.copy()
        if erase.apply(shown, erase.now) == erase.expected and state_now == shown.state(
            self._now, erase.topic
        ):
            self._show(erase)

    def _waits_behind(self, sent: Sent) -> bool:
        return any(
            other.writes
            and other.changed
            and not other.applied
            and other.topic == sent.topic
            and other.index < sent.index
            for other in self.waiting.values()
        )

    def _check_parked(self) -> None:
        for sent in self.waiting.values():
            wanted = sent.apply(self.model, self._now)
            self.events["poll parked"] += 1
            if isinstance(wanted, Refused) or wanted.rows or wanted.gap is not None:
                raise Divergence(
                    f"a long poll of {sent.topic!r} at {sent.args} was not answered with {wanted}"
                )
            if self.clock.monotonic_ms() > sent.wait_until:
                raise Divergence(f"a long poll of {sent.topic!r} is past its deadline")

    # ---- reading everything

    def look(self) -> dict[str, Seen]:
        """Read all topics through the engine. The models are not changed."""
        self.store_calm()
        assert self.engine is not None
        listed = self._ask(c.ListTopics(limit=1000))
        found = {}
        for row in listed.topics:
            name = row.topic
            s = plain("state", self._ask(c.State(name, touch=False)))
            rows, gaps = read_all(self._reader(name))
            found[name] = Seen(s[5], s[1], s[2], s[3], s[4], rows, gaps)
        return found

    def _reader(self, name: str) -> Callable[[int], PageView]:
        def read(cursor: int) -> PageView:
            command = c.Diff(name, cursor, limit=1000, max_bytes=8 << 20, touch=False)
            view = plain("diff", self._ask(command))
            if self.faulty and isinstance(view, Refused) and view.code == "internal":
                view = plain("diff", self._ask(command))  # a planned fault may fail one read
            assert isinstance(view, PageView), (name, cursor, view)
            return view

        return read

    def _ask(self, command: c.Command) -> Any:
        """One read, answered before anything else is sent."""
        assert self.engine is not None
        token = -self._next_index
        self._next_index += 1
        outcome = self.engine.turn([(token, command)])
        self._now = self.engine_now()
        self._take(outcome)
        for _ in range(100):
            if token in self.asked:
                return self.asked.pop(token)
            if self.jobs:
                self.run_job(0)
            else:
                self.tick()
        raise Divergence(f"{command} was never answered")

    def compare(self) -> None:
        """Check that everything visible in the engine equals the model."""
        found = self.look()
        if sorted(found) != sorted(self.model.topics):
            raise Divergence(f"topics {sorted(found)}, not {sorted(self.model.topics)}")
        for name, seen in found.items():
            wanted = seen_of(self.model.topics[name], self._now)
            if seen != wanted:
                raise Divergence(f"{name!r}:\n  engine {seen}\n  model  {wanted}")
        assert self.engine is not None
        self.engine.check_invariants()

    # ---- checks after a restart

    def _judge(self, how: str) -> None:
        assert self.engine is not None
        unsure = how == "power" or (how == "kill" and self.latched)
        old, log, before, floor = self.base, self.log, self._acked_now, self.sync_floor
        # Unanswered requests of the old engine are void. The new state is read with a fresh reader.
        self.waiting.clear()
        self.unsettled.clear()
        self.jobs.clear()
        self.latched = False
        self.model, self.staged = Model(), Model()
        self.disk.full = False
        found = self.look()
        now = self._now
        if now < before:
            raise Divergence(f"engine time went back over a {how}: from {before} to {now}")
        truth = Model()
        truth.instances = 1_000_000 + self._next_index
        judge = RestartCheck(how, unsure=unsure, sync_floor=floor, now=now, events=self.events)
        names = sorted(set(old.topics) | {sent.topic for sent in log} | set(found))
        to_drop = []
        for name in names:
            matched, certain = judge.verdict(name, old, log, found.get(name))
            if matched is not None:
                truth.topics[name] = matched
                if not certain:
                    to_drop.append(name)
        self._forgotten = judge.forgotten
        self.model = truth
        self.base, self.staged = truth.copy(), truth.copy()
        self.log = []
        self.changes += 1
        self.engine.check_invariants()
        self._retry_keys()
        for name in to_drop:
            self.events["adopted"] += 1
            self.send(drop(name))

    def _retry_keys(self) -> None:
        """Retry with the key of an acked write: the answer has the first seqs, or it is written again if the restart
        lost it.
        """
        retries = []
        for name, topic in self.model.topics.items():
            topic.expire(self._now)
            for key in list(topic.keys)[-2:]:
                retries.append(append(name, [NewRec(b'"retry"')], key=key))
        for name, key in self._forgotten:
            self.events["key forgotten"] += 1
            retries.append(append(name, [NewRec(b'"retry"')], key=key))
        if retries:
            self.send(*retries)
            self.drain()

    # ---- erased payloads

    def check_erased(self) -> None:
        """No file may contain an erased payload. The engine must be stopped."""
        for path in self.disk.paths():
            handle = self.disk.open(path)
            content = self.disk.read(handle, 0, self.disk.size(handle))
            self.disk.close(handle)
            for payload in self.erased:
                if payload in content:
                    raise Divergence(
                        f"{path} still contains the erased {payload!r} at {content.index(payload)}"
                    )
        for key, content in (self.store.objects if self.store is not None else {}).items():
            for payload in self.erased:
                if payload in content:
                    raise Divergence(f"the cold {key} still contains the erased {payload!r}")
