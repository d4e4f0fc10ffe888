"""Goal: no command of a consumer blocks its shard, however many tags, leases or records it involves.

Method: each turn gets one command, and the work of each turn is counted. Results of many turns are compared with
those of the simple algorithm, also while records come and go in between.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from tests.support.engine_harness import append
from tests.support.lease_harness import LEASE_MS, LeaseHarness, consumer, log, queue
from tests.support.small_slices import use_small_slices
from topics.api import limits
from topics.api.config import EngineConfig
from topics.api.errors import Throttled, TopicsError
from topics.engine.commands import consumers as k
from topics.engine.commands import topics as c
from topics.engine.core.subjects import TagFilter, TagMatch, overlap
from topics.engine.topic.consumer import TIMEOUTS_PER_SLICE, Consumer

LARGE = EngineConfig(
    wal_file_bytes=1 << 22, snapshot_interval_ms=1 << 40, rewrite_dead_share=2.0, inline_bytes=0
)
MANY = 6_000
TWO_TURNS = 2 * limits.LONG_TURN_UNITS  # the budget of a turn for new commands, and for waiting ones
FILTER = (("Subject", "a.*.x"),)


def with_many_tags(*made: k.PutConsumer, **fields: Any) -> LeaseHarness:
    h = LeaseHarness(log(durability="disk", **fields), engine=LARGE)
    for command in made:
        h.do(command)
    h.do(append("q", *[b"1"] * MANY, tags=[b"a.%d.x" % i for i in range(MANY)]))
    return h


class Calls:
    """How often a method is called, and the most calls in one turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.count = self.most = 0
        method = getattr(owner, name)

        def counted(*args: Any) -> Any:
            self.count += 1
            return method(*args)

        monkeypatch.setattr(owner, name, counted)

    def answer(self, h: LeaseHarness, command: c.Command) -> Any:
        """The answer to a command; each turn until then is checked."""
        self.most, self.count = 0, 0
        (token,) = h.ask(command)
        turns = 1
        while token not in h.replies:
            self.most, self.count = max(self.most, self.count), 0
            if h.jobs:
                h.run_job()
            else:
                h.ask()
            turns += 1
            assert turns < 10_000, "never answered"
        self.most = max(self.most, self.count)
        reply = h.replies[token]
        assert not isinstance(reply, TopicsError), reply
        return reply


def test_filters_are_looked_at_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    h = with_many_tags()
    calls = Calls(monkeypatch, TagFilter, "matches")

    def put(name: str, **fields: Any) -> k.PutConsumer:
        return k.PutConsumer("q", name, consumer(filter=FILTER, **fields))

    for command, lag in (
        (put("c", deliver="all"), MANY),
        (put("c", deliver="all", max_deliver=9), MANY),
        (k.PutConsumer("q", "c", consumer(filter=(*FILTER, ("Subject", "*.*.y")), deliver="all")), MANY),
        (put("last", deliver="last"), 1),
        (k.GetConsumer("q", "c"), MANY),
        (k.PauseConsumer("q", "c", True, 0), MANY),
        (k.PauseConsumer("q", "c", False, 0), MANY),
    ):
        state = calls.answer(h, command)
        assert (state.lag_records, calls.most <= TWO_TURNS) == (lag, True), command
    for to, value, again, skips in (
        ("end", 0, 0, MANY),
        ("seq", 5001, MANY - 5000, 0),
        ("start", 0, 5000, 0),
    ):
        reset = calls.answer(h, k.ResetConsumer("q", "c", to, value))
        assert (reset.redelivers, reset.skips, calls.most <= TWO_TURNS) == (again, skips, True), to
        assert reset.state.lag_records == MANY - (reset.to_seq - 1)
    h.do(c.Delete("q", before_seq=1001))  # enough to have everything counted anew
    claimed = calls.answer(h, h.claim_of(1, consumer="c"))
    assert (claimed.page.seqs, claimed.ready, calls.most <= TWO_TURNS) == ([1001], MANY - 1001, True)
    h.do(c.Delete("q", before_seq=1101))
    settled = calls.answer(h, k.Settle("q", "ack", b"w", [1001], consumer="c"))
    assert (settled.ready, settled.skipped, calls.most <= TWO_TURNS) == (MANY - 1100, [1001], True)
    h.do(c.Delete("q", before_seq=1201))
    rows = calls.answer(h, k.ListConsumers("q", "", 10)).consumers
    assert [row.lag_records for row in rows] == [MANY - 1200, 1] and calls.most <= TWO_TURNS


@pytest.mark.parametrize("kind", ["end", "are due"])
def test_leases_and_delays_that_are_over_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    h = LeaseHarness(queue(durability="disk"), jobs=5000, engine=LARGE)
    for _ in range(5):
        seqs = h.got(1000)
        if kind == "are due":
            h.nack(*seqs, delay_ms=LEASE_MS)
    h.clock.advance(LEASE_MS + 1)
    calls = Calls(monkeypatch, Consumer, "_make_ready")
    state = calls.answer(h, c.State("q", touch=False))
    assert (state.queue.ready, state.queue.in_flight) == (5000, 0)
    assert calls.most <= TWO_TURNS + 2 * TIMEOUTS_PER_SLICE
    for _ in range(5):
        assert h.got(1000)
    h.clock.advance(LEASE_MS + 1)
    claimed = calls.answer(h, h.claim_of(2))
    assert (claimed.page.seqs, claimed.ready) == ([1, 2], 4998)
    assert calls.most <= TWO_TURNS + 2 * TIMEOUTS_PER_SLICE


def test_extending_many_leases_again_and_again_makes_no_turn_long(monkeypatch: pytest.MonkeyPatch) -> None:
    h = LeaseHarness(queue(durability="disk"), jobs=5000, engine=LARGE)
    seqs = [h.got(1000) for _ in range(5)]
    calls = Calls(monkeypatch, Consumer, "_still_leased")
    for i in range(40):
        calls.answer(h, k.Settle("q", "extend", b"w", seqs[i % 5], lease_ms=LEASE_MS + i))
        assert calls.most <= 100
    h.clock.advance(LEASE_MS + 20)
    assert h.counts() == (0, 5000, 0)
    h.clock.advance(100)
    assert h.counts() == (5000, 0, 0)


def test_with_too_many_long_commands_a_change_changes_nothing_and_leases_of_a_lost_connection_still_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h = LeaseHarness(log(durability="disk"), engine=LARGE)
    h.make("c", ack="all", max_ack_pending=10_000)
    h.produce(3000)
    seqs = [seq for _ in range(3) for seq in h.got(1000, consumer="c", connection=7)]
    assert h.engine.shard.state.published["q"].consumers is not None
    found = h.engine.shard.state.published["q"].consumers.named["c"]
    monkeypatch.setattr(limits, "LONG_COMMANDS_MAX", 0)
    h.refused(k.Settle("q", "ack", b"w", seqs[-1:], consumer="c"), Throttled)
    h.refused(k.PauseConsumer("q", "c", True), Throttled)
    assert (len(found.entries), found.is_paused(h.engine.shard.state.now_ms)) == (3000, False)
    assert h.do(k.Release("q", "c", 7)) == k.Released("q", 3000)
    assert found.leases_of(7) == 0


def test_records_only_a_dropped_consumer_needed_are_removed_in_slices() -> None:
    h = with_many_tags(retention="interest")
    h.make("slow")
    h.make("fast")
    h.do(k.ResetConsumer("q", "fast", "end"))
    (token,) = h.ask(k.DropConsumer("q", "slow"))
    counts = [h.engine.shard.state.published["q"].count]
    while token not in h.replies:
        h.run_job() if h.jobs else h.ask()
        counts.append(h.engine.shard.state.published["q"].count)
    assert (h.replies[token].deleted, counts[-1]) == (True, 0), "answered when all of them are gone"
    assert max(before - after for before, after in pairwise(counts)) <= 1024


@pytest.mark.parametrize("end", ["kill_and_open", "power_cut", "restart"])
def test_unfinished_removals_continue_after_a_restart(end: str) -> None:
    h = with_many_tags(retention="interest")
    h.make("slow")
    h.make("fast")
    h.do(k.ResetConsumer("q", "fast", "end"))
    (token,) = h.ask(k.DropConsumer("q", "slow"))
    while not 0 < h.engine.shard.state.published["q"].count < MANY:
        h.run_job() if h.jobs else h.ask()
    assert token not in h.replies
    if end != "restart":
        h.sync()
    getattr(h, end)()
    if end == "power_cut":
        h.open()
    h.rest()
    assert h.state("q").count == 0


@pytest.mark.parametrize("seed", range(4))
def test_counts_over_many_turns_are_right_whatever_happens_meanwhile(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_slices(monkeypatch)
    rng = random.Random(seed)
    h = LeaseHarness(log(durability="disk"))
    tags = [b"a.b", b"a.c", b"b.b"]
    filter = rng.choice([(), (("Subject", "a.*"),), (("Subject", "*.b"), ("Eq", "a.c"))])
    h.do(append("q", *[b"1"] * 40, tags=rng.choices(tags, k=40)))
    h.make("c", filter=(("Eq", "a.b"),))
    topic = h.engine.shard.state.published["q"]
    for command in (
        k.PutConsumer("q", "d", consumer(filter=filter, deliver=rng.choice(["all", "last"]))),
        k.PutConsumer("q", "c", consumer(filter=filter)),
        k.ResetConsumer("q", "c", "seq", rng.randint(1, 40)),
        k.ResetConsumer("q", "c", "end"),
        k.ResetConsumer("q", "d", "start"),
    ):
        (token,) = h.ask(command)
        for _ in range(8):
            seq = rng.randint(1, topic.next_seq - 1)
            h.ask(
                rng.choice(
                    [
                        append("q", b"1", tag=rng.choice(tags)),
                        c.Delete("q", seqs=[seq, min(seq + 2, topic.next_seq - 1)]),
                        c.Delete("q", before_seq=min(seq, 10)),
                    ]
                )
            )
        h.rest()
        assert not isinstance(h.replies[token], TopicsError)
        assert topic.consumers is not None
        one = topic.consumers.named[command.consumer]
        wanted = one.count_matching(topic, one.cursor, topic.next_seq)
        assert h.do(k.GetConsumer("q", command.consumer)).lag_records == wanted


@pytest.mark.parametrize(("cap", "batch"), [(MANY, 1), (MANY, 100), (MANY, 400), (0, 300)])
def test_a_consumer_with_a_backlog_is_not_starved_by_a_writer(cap: int, batch: int) -> None:
    filters = {"c": FILTER, "none": (("Subject", "*.none.y"),)}
    h = with_many_tags(
        *(k.PutConsumer("q", name, consumer(filter=filter)) for name, filter in filters.items()),
        cap_records=cap,
    )
    topic = h.engine.shard.state.published["q"]

    def answer(command: c.Command) -> Any:
        """The answer while records are written in every turn."""
        (token,) = h.ask(command)
        for _ in range(150):  # about 30 for counting, if it is not disturbed
            if token in h.replies:
                return h.replies[token]
            h.clock.advance(2)
            first = topic.next_seq
            h.ask(append("q", *[b"1"] * batch, tags=[b"a.%d.x" % seq for seq in range(first, first + batch)]))
            h.run_jobs()
        raise AssertionError(f"{command} is not answered")

    for _ in range(3):
        claimed = answer(h.claim_of(1, consumer="c"))
        assert len(claimed.page.seqs) == 1
        assert answer(k.Settle("q", "ack", b"w", claimed.page.seqs, consumer="c")).kind == "ack"
        assert answer(h.claim_of(1, consumer="none", wait_ms=20)).page.seqs == []
        assert answer(k.GetConsumer("q", "c")).lag_records > MANY // 2
    assert answer(k.PutConsumer("q", "d", consumer(filter=FILTER, deliver="all"))).created
    assert answer(k.ResetConsumer("q", "c", "end", dry_run=True)).skips > MANY // 2
    assert answer(k.ResetConsumer("q", "c", "start")).state.lag_records > MANY // 2
    h.rest()
    for name in filters:
        assert topic.consumers is not None
        one = topic.consumers.named[name]
        wanted = one.count_matching(topic, one.cursor, topic.next_seq)
        assert h.do(k.GetConsumer("q", name)).lag_records == wanted


def test_a_filter_means_what_its_matches_mean() -> None:
    rng = random.Random(1)
    tokens = [b"a", b"b", b"*", b">"]

    def match() -> TagMatch:
        op = rng.choice(["Subject", "Subject", "Eq", "Glob"])
        if op == "Eq":
            return TagMatch("Eq", rng.choice([b"a", b"a.b", b"*", b"a..b", b"b.a.c"]))
        if op == "Glob":
            return TagMatch("Glob", rng.choice([b"*", b"a*", b"a.*", b"b.a*"]))
        *first, last = rng.choices(tokens, k=rng.randint(1, 4))
        return TagMatch("Subject", b".".join([*(token if token != b">" else b"c" for token in first), last]))

    for _ in range(4000):
        one, other = (TagFilter(tuple(match() for _ in range(rng.randint(1, 3)))) for _ in range(2))
        for _ in range(5):
            tag = b".".join(rng.choices([b"a", b"b", b"c", b"*", b"", b"a*"], k=rng.randint(1, 5)))
            assert one.matches(tag) == any(match.matches(tag) for match in one.any_of), (one, tag)
        pairs = any(mine.overlaps(theirs) for mine in one.any_of for theirs in other.any_of)
        assert overlap(one, other) == overlap(other, one) == pairs, (one, other)
