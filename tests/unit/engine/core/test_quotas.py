"""Caps over all shards: never exceeded, and never refused while there is room.

Goal: the promises of quotas.py. Method: single cases with all messages written out; then clusters with random
creates, deletes, delays, and deaths of workers and of the catalog. After every step use and grants are below the
caps; at rest every request for a grant has its answer, and the answer is right.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import msgspec
import pytest

from tests.support import length
from topics.api import limits
from topics.engine.core.quotas import Catalog, Escrow, Message, QuotaGrant, QuotaRecall, QuotaReport

MANY_BYTES = 1 << 40


def begun(shards: int, max_topics: int, max_total_bytes: int = 0) -> tuple[Catalog, list[Escrow]]:
    """A catalog that every shard has reported to, with nothing used."""
    catalog = Catalog(shards, max_topics, max_total_bytes)
    escrows = [Escrow(shard, 1) for shard in range(shards)]
    for escrow in escrows:
        assert catalog.report(escrow.begin(0, 0)) == []
    return catalog, escrows


def ask(escrow: Escrow, topics: int = 0, size: int = 0, used: tuple[int, int] = (0, 0)) -> QuotaReport:
    report = escrow.want(topics, size, *used)
    assert report is not None
    return report


def only(messages: list[Message]) -> Any:
    assert len(messages) == 1, messages
    return messages[0][1]


# ---- single cases


def test_messages_travel_as_arrays() -> None:
    decoder = msgspec.msgpack.Decoder(QuotaReport | QuotaGrant | QuotaRecall)
    for message in (
        QuotaReport(1, 2, 3, 4, 5, 6, 7, 8, True),
        QuotaGrant(1, 2, True, 3, 4),
        QuotaRecall(5, 6),
    ):
        assert decoder.decode(msgspec.msgpack.encode(message)) == message


def test_nothing_is_granted_before_every_shard_has_reported() -> None:
    catalog = Catalog(3, 100, 0)
    first, second, third = (Escrow(shard, 1) for shard in range(3))
    assert catalog.report(first.begin(5, 0)) == []
    assert catalog.report(ask(first, 1, used=(5, 0))) == []
    assert catalog.report(second.begin(0, 0)) == []
    ((shard, grant),) = catalog.report(third.begin(0, 0))
    assert (shard, grant) == (0, QuotaGrant(8, 0, False))


@pytest.mark.parametrize(
    "cap, shards, chunk", [(100_000, 4, 256), (160, 4, 10), (3, 4, 1), (0, 4, 256), (1024, 1, 256)]
)
def test_topics_come_in_chunks_while_there_is_plenty(cap: int, shards: int, chunk: int) -> None:
    catalog, escrows = begun(shards, cap)
    assert only(catalog.report(ask(escrows[0], 1))).topics == (
        chunk if chunk * shards + 1 <= cap or not cap else 1
    )


@pytest.mark.parametrize("cap, want, granted", [(MANY_BYTES, 10, limits.GRANT_BYTES_MAX), (1600, 10, 200)])
def test_bytes_come_in_chunks_while_there_is_plenty(cap: int, want: int, granted: int) -> None:
    catalog, escrows = begun(2, 0, cap)
    assert only(catalog.report(ask(escrows[0], 0, want))) == QuotaGrant(0, granted, False)


def test_a_large_want_is_granted_in_full() -> None:
    catalog, escrows = begun(2, 0, 1600)
    assert only(catalog.report(ask(escrows[0], 0, 900))) == QuotaGrant(0, 900, False)


def test_just_what_is_wanted_when_space_is_short() -> None:
    catalog, escrows = begun(2, 0, 1600)
    catalog.report(ask(escrows[0], 0, 1300))
    assert only(catalog.report(ask(escrows[1], 0, 10))) == QuotaGrant(0, 10, False)


def test_only_what_is_wanted_grows() -> None:
    catalog, escrows = begun(2, 100, 1600)
    assert only(catalog.report(ask(escrows[0], 1))).bytes == 0


def test_a_want_that_does_not_fit_recalls_from_the_others_and_takes_what_they_return() -> None:
    catalog, (a, b) = begun(2, 4)
    assert a.granted(only(catalog.report(ask(a, 4))))
    assert a.topics == 4
    ((shard, recall),) = catalog.report(ask(b, 2))
    assert (shard, recall) == (0, QuotaRecall(1))
    answer = a.recalled(recall, 2, 0)
    assert a.topics == 2
    assert answer is not None
    assert catalog.report(answer) == [(1, QuotaGrant(2, 0, False))]


def test_a_want_larger_than_what_remains_gets_nothing_and_hears_that_it_is_final() -> None:
    catalog, (a, b) = begun(2, 10, 100)
    a.granted(only(catalog.report(ask(a, 0, 40))))
    ((_, recall),) = catalog.report(ask(b, 1, 100))
    answer = a.recalled(recall, 0, 40)
    assert answer is not None
    (message,) = catalog.report(answer)
    assert message == (1, QuotaGrant(1, 0, True))
    assert b.granted(message[1])
    assert (b.topics, b.bytes) == (1, 0)
    # The remaining 60 are given to a request that fits.
    assert only(catalog.report(ask(b, 0, 60))) == QuotaGrant(0, 60, False)


def test_alone_a_shard_is_told_at_once() -> None:
    catalog, (a,) = begun(1, 2)
    a.granted(only(catalog.report(ask(a, 2))))
    assert only(catalog.report(ask(a, 1, used=(2, 0)))) == QuotaGrant(0, 0, True)


def test_two_shards_that_want_at_once_do_not_wait_for_each_other() -> None:
    catalog, (a, b) = begun(2, 4)
    a.granted(only(catalog.report(ask(a, 2))))
    b.granted(only(catalog.report(ask(b, 2))))
    # a uses one of two, b none; both request three more than they use.
    first = ask(a, 3, used=(1, 0))
    second = ask(b, 3)
    ((to_b, recall),) = catalog.report(first)
    assert to_b == 1
    assert catalog.report(second) == []
    answer = b.recalled(recall, 0, 0)
    assert answer is not None
    assert (answer.granted_topics, answer.want_topics) == (0, 3)
    out = catalog.report(answer)
    assert out[0] == (0, QuotaGrant(2, 0, False))
    assert a.granted(QuotaGrant(2, 0, False))
    # Now b is first, but a has used everything.
    (recalled,) = out[1:]
    assert recalled == (0, QuotaRecall(1))
    answer = a.recalled(QuotaRecall(1), 4, 0)
    assert answer is not None
    assert catalog.report(answer) == [(1, QuotaGrant(0, 0, True))]


def test_a_recall_that_crosses_a_grant_counts_the_grant_as_held() -> None:
    catalog, (a, b, c) = begun(3, 6)
    c.granted(only(catalog.report(ask(c, 4))))
    recalls = catalog.report(ask(b, 3))  # to a and c
    assert [shard for shard, _ in recalls] == [0, 2]
    # Before its recall arrives, a requests too; c answers and so frees enough for both.
    late = ask(a, 1)
    assert catalog.report(late) == []
    freed = c.recalled(QuotaRecall(1), 0, 0)
    assert freed is not None
    out = catalog.report(freed)
    assert out == [(1, QuotaGrant(3, 0, False)), (0, QuotaGrant(1, 0, False))]
    # a gets the recall first. Its report repeats a request that was granted already, which is ignored.
    crossing = a.recalled(QuotaRecall(1), 0, 0)
    assert crossing is not None
    assert (crossing.granted_topics, crossing.want_topics) == (0, 1)
    assert catalog.report(crossing) == []
    assert a.granted(QuotaGrant(1, 0, False))
    assert not a.is_asking
    # And what is under way is not free: 6 - 3 - 1.
    assert catalog.report(ask(c, 3)) == [(0, QuotaRecall(1)), (1, QuotaRecall(1))]


def test_a_report_from_before_the_recall_is_no_answer_to_it() -> None:
    catalog, (a, b) = begun(2, 2)
    a.granted(only(catalog.report(ask(a, 2))))
    crossing = ask(a, 3)
    assert catalog.report(ask(b, 1)) == [(0, QuotaRecall(1))]
    assert catalog.report(crossing) == []
    answer = a.recalled(QuotaRecall(1), 0, 0)
    assert answer is not None
    assert catalog.report(answer)[0] == (1, QuotaGrant(1, 0, False))


def test_a_shard_that_is_down_is_not_waited_for_and_its_grant_stays_counted() -> None:
    catalog, (a, b) = begun(2, 4)
    a.granted(only(catalog.report(ask(a, 4))))
    assert catalog.report(ask(b, 1)) == [(0, QuotaRecall(1))]
    assert catalog.shard_down(0) == [(1, QuotaGrant(0, 0, True))]
    b.granted(QuotaGrant(0, 0, True))
    # The next one is refused at once, until a is back and reports what it really uses.
    assert catalog.report(ask(b, 1)) == [(1, QuotaGrant(0, 0, True))]
    b.granted(QuotaGrant(0, 0, True))
    assert catalog.report(Escrow(0, 2).begin(3, 0)) == []
    assert only(catalog.report(ask(b, 1))) == QuotaGrant(1, 0, False)


def test_a_new_incarnation_answers_the_recall_of_the_old_one() -> None:
    catalog, (a, b) = begun(2, 4)
    a.granted(only(catalog.report(ask(a, 4))))
    assert catalog.report(ask(b, 1)) == [(0, QuotaRecall(1))]
    assert catalog.report(Escrow(0, 2).begin(3, 0)) == [(1, QuotaGrant(1, 0, False))]


def test_reports_of_the_dead_are_ignored() -> None:
    catalog, (a, b) = begun(2, 4)
    late, beginning = ask(a, 4), Escrow(0, 1).begin(0, 0)
    assert catalog.report(Escrow(0, 2).begin(3, 0)) == []
    assert catalog.report(late) == []
    assert catalog.report(beginning) == []
    assert only(catalog.report(ask(b, 1))) == QuotaGrant(1, 0, False)
    catalog.shard_down(1)
    assert catalog.report(QuotaReport(1, 1, 0, 0, 1)) == []


def test_a_want_of_the_dead_leaves_the_line() -> None:
    catalog, (a, b, c) = begun(3, 4)
    a.granted(only(catalog.report(ask(a, 4))))
    catalog.report(ask(b, 1))
    assert catalog.report(ask(c, 1)) == []
    assert catalog.shard_down(1) == [(0, QuotaRecall(1))]  # c is first now, and only a is asked
    answer = a.recalled(QuotaRecall(1), 3, 0)  # the recall for b
    assert answer is not None
    assert catalog.report(answer) == [(2, QuotaGrant(1, 0, False))]


def test_a_lowered_cap_grants_nothing_until_usage_has_fallen() -> None:
    catalog = Catalog(2, 5, 0)
    a, b = Escrow(0, 1), Escrow(1, 1)
    catalog.report(a.begin(6, 0))
    catalog.report(b.begin(1, 0))
    ((_, recall),) = catalog.report(ask(b, 1, used=(1, 0)))
    answer = a.recalled(recall, 6, 0)
    assert answer is not None
    (message,) = catalog.report(answer)
    assert message == (1, QuotaGrant(0, 0, True))
    b.granted(message[1])
    ((_, recall),) = catalog.report(ask(b, 1, used=(1, 0)))
    answer = a.recalled(recall, 3, 0)
    assert answer is not None
    assert only(catalog.report(answer)) == QuotaGrant(1, 0, False)


def test_one_want_at_a_time_and_none_without_a_catalog() -> None:
    _, (a, _) = begun(2, 4)
    assert a.want(1, 0, 0, 0) is not None
    assert a.want(1, 0, 0, 0) is None
    a.catalog_lost()
    assert not a.is_asking
    assert a.want(1, 0, 0, 0) is None
    assert not a.granted(QuotaGrant(1, 0, False))
    assert a.recalled(QuotaRecall(1), 0, 0) is None
    report = a.begin(0, 0)
    assert (report.session, report.seen, report.begins) == (2, 0, True)
    assert not a.granted(QuotaGrant(1, 0, False, 1, 1))
    assert not a.granted(QuotaGrant(1, 0, False, 0, 2))
    assert a.recalled(QuotaRecall(1, 1), 0, 0) is None
    assert a.want(1, 0, 0, 0) is not None


def test_usage_that_comes_to_light_counts_as_held() -> None:
    catalog, (a, b) = begun(2, 0, 100)
    report = ask(a, 0, 10, used=(0, 50))
    assert (report.granted_bytes, report.want_bytes) == (50, 10)
    assert only(catalog.report(report)) == QuotaGrant(0, 12, False)
    ((_, recall),) = catalog.report(ask(b, 0, 60))
    answer = a.recalled(recall, 0, 70)
    assert answer is not None
    assert answer.granted_bytes == 70


def test_a_want_that_fits_by_now_is_answered_all_the_same() -> None:
    catalog, (a, _) = begun(2, 4)
    a.granted(only(catalog.report(ask(a, 2))))
    assert only(catalog.report(ask(a, 1))) == QuotaGrant(1, 0, False)


def test_late_news_of_a_death_do_not_touch_the_next_incarnation() -> None:
    catalog, (_, b) = begun(2, 4)
    second = Escrow(0, 2)
    catalog.report(second.begin(3, 0))
    assert catalog.shard_down(0, incarnation=1) == []
    assert catalog.report(ask(b, 2)) == [(0, QuotaRecall(2, 1))]
    assert catalog.shard_down(0, incarnation=2) == [(1, QuotaGrant(0, 0, True))]


# ---- clusters


class Worker:
    """A shard and the part of its shell that the catalog's header describes."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self.incarnation = 0
        self.used = (0, 0)  # topics and bytes
        self.escrow: Escrow | None = None  # None: dead
        self.parked: deque[tuple[int, int]] = deque()
        self.answers: list[bool] = []
        self.asks = False  # the front one was just requested
        self.denied: tuple[int, int] | None = None  # it was just refused

    def demand(self) -> tuple[int, int]:
        """What it uses and what waits for room."""
        topics, size = self.used
        return topics + sum(entry[0] for entry in self.parked), size + sum(entry[1] for entry in self.parked)

    def fits(self, topics: int, size: int) -> bool:
        """Whether the engine would not raise OverGrant."""
        assert self.escrow is not None
        return (not topics or self.used[0] + topics <= self.escrow.topics) and (
            not size or self.used[1] + size <= self.escrow.bytes
        )

    def take(self, topics: int, size: int) -> QuotaReport | None:
        """A client requests so many topics and bytes. Returns the resulting report."""
        if self.parked or not self.fits(topics, size):
            self.parked.append((topics, size))
            return self.go_on(final=False)
        self._serve(topics, size)
        return None

    def _serve(self, topics: int, size: int) -> None:
        self.used = self.used[0] + topics, self.used[1] + size
        self.answers.append(True)

    def go_on(self, *, final: bool) -> QuotaReport | None:
        """Try the waiting requests again, from the front. `final` is about the first of them."""
        assert self.escrow is not None
        while self.parked:
            if self.fits(*self.parked[0]):
                self._serve(*self.parked.popleft())
            elif final:
                self.denied = self.parked.popleft()
                self.answers.append(False)
            else:
                report = self.escrow.want(*self.parked[0], *self.used)
                self.asks = report is not None
                return report
            final = False
        return None


class Cluster:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.shards = self.rng.choice([1, 2, 3, 5])
        self.max_topics = self.rng.choice([1, 3, 10, 40])
        self.max_bytes = self.rng.choice([50, 400, 3000])
        self.workers = [Worker(shard) for shard in range(self.shards)]
        self.up: list[deque[QuotaReport]] = [deque() for _ in self.workers]
        self.down: list[deque[QuotaGrant | QuotaRecall]] = [deque() for _ in self.workers]
        self.catalog: Catalog | None = None
        self.history: list[list[tuple[int, int]]] = []  # step by step what each shard uses and waits for
        self.asked_at = [0] * self.shards
        self.calm_since = 0  # all shards have been alive, and known to be, since this step
        self.denials = 0
        self.dead: list[tuple[int, int]] = []  # incarnations whose death the catalog does not know yet
        self.start_catalog()
        for worker in self.workers:
            self.start(worker)

    # -- events

    def start_catalog(self) -> None:
        self.catalog = Catalog(self.shards, self.max_topics, self.max_bytes)
        self.dead = [(worker.shard, worker.incarnation) for worker in self.workers if worker.escrow is None]
        for worker in self.workers:
            if worker.escrow is not None:
                self.begin(worker)

    def stop_catalog(self) -> None:
        self.calm_since = len(self.history) + 1
        self.catalog = None
        self.dead = []
        for worker in self.workers:
            self.up[worker.shard].clear()
            self.down[worker.shard].clear()
            if worker.escrow is not None:
                worker.escrow.catalog_lost()

    def start(self, worker: Worker) -> None:
        self.calm_since = len(self.history) + 1
        worker.incarnation += 1
        worker.escrow = Escrow(worker.shard, worker.incarnation)
        if self.catalog is not None:
            self.begin(worker)
        else:
            worker.escrow.topics, worker.escrow.bytes = worker.used

    def begin(self, worker: Worker) -> None:
        assert worker.escrow is not None
        self.post(worker, worker.escrow.begin(*worker.used))
        self.post(worker, worker.go_on(final=False))

    def kill(self, worker: Worker) -> None:
        """Its earlier messages may still arrive; messages to it are lost."""
        self.calm_since = len(self.history) + 1
        worker.escrow = None
        worker.parked.clear()
        self.down[worker.shard].clear()
        lost = self.rng.randrange(len(self.up[worker.shard]) + 1)
        for _ in range(lost):
            self.up[worker.shard].pop()
        if self.catalog is not None:
            self.dead.append((worker.shard, worker.incarnation))

    def post(self, worker: Worker, report: QuotaReport | None) -> None:
        if report is not None:
            self.up[worker.shard].append(report)

    def deliver_up(self, shard: int) -> None:
        if self.catalog is not None and self.up[shard]:
            report = self.up[shard].popleft()
            if report.begins:  # until then the catalog counts what the shard had before
                self.calm_since = len(self.history) + 1
            self.send(self.catalog.report(report))

    def send(self, messages: list[Message]) -> None:
        for shard, message in messages:
            if self.workers[shard].escrow is not None:
                self.down[shard].append(message)

    def deliver_down(self, shard: int) -> None:
        worker = self.workers[shard]
        if worker.escrow is None or not self.down[shard]:
            return
        message = self.down[shard].popleft()
        if isinstance(message, QuotaRecall):
            self.post(worker, worker.escrow.recalled(message, *worker.used))
        elif worker.escrow.granted(message):
            self.post(worker, worker.go_on(final=message.final))

    def tell_of_death(self) -> None:
        if self.dead and self.catalog is not None:
            shard, incarnation = self.dead.pop(0)
            self.send(self.catalog.shard_down(shard, incarnation))

    # -- random steps

    def step(self) -> None:
        rng = self.rng
        worker = rng.choice(self.workers)
        roll = rng.random()
        if roll < 0.25 and worker.escrow is not None:
            topics, size = rng.choice([(1, 0), (1, 5), (0, 20), (0, 90), (2, 0)])
            self.post(worker, worker.take(topics, size))
        elif roll < 0.35:
            topics, size = worker.used
            worker.used = max(0, topics - rng.choice([0, 1])), rng.randrange(size + 1)
        elif roll < 0.62:
            self.deliver_up(worker.shard)
        elif roll < 0.90:
            self.deliver_down(worker.shard)
        elif roll < 0.93:
            self.kill(worker) if worker.escrow is not None else self.start(worker)
        elif roll < 0.96:
            self.tell_of_death()
        elif roll < 0.98 and worker.escrow is None:
            self.start(worker)
        elif roll > 0.99:
            self.start_catalog() if self.catalog is None else self.stop_catalog()
        self.check()

    def check(self) -> None:
        used = [worker.used for worker in self.workers]
        assert sum(topics for topics, _ in used) <= self.max_topics
        assert sum(size for _, size in used) <= self.max_bytes
        held = [
            (worker.escrow.topics, worker.escrow.bytes) if worker.escrow is not None else worker.used
            for worker in self.workers
        ]
        assert sum(topics for topics, _ in held) <= self.max_topics
        assert sum(size for _, size in held) <= self.max_bytes
        self.check_denials()

    def check_denials(self) -> None:
        """Every refusal had a reason: at some time since the request not all of it fitted."""
        self.history.append([worker.demand() for worker in self.workers])
        alive = self.catalog is not None and all(worker.escrow is not None for worker in self.workers)
        alive = alive and not any(report.begins for reports in self.up for report in reports)
        for worker in self.workers:
            asked_at = self.asked_at[worker.shard]
            if worker.denied is not None and alive and self.calm_since <= asked_at:
                self.denials += 1
                since = self.history[asked_at:]
                # Each shard was asked at its own time, so the maximum that each had counts; this one is among them.
                most = [
                    [max(step[shard][kind] for step in since) for shard in range(self.shards)]
                    for kind in (0, 1)
                ]
                assert sum(most[0]) > self.max_topics or sum(most[1]) > self.max_bytes, (
                    f"shard {worker.shard} was refused {worker.denied} without a reason: {most}"
                )
            worker.denied = None
            if worker.asks:
                self.asked_at[worker.shard] = len(self.history) - 1
                worker.asks = False

    def rest(self) -> None:
        """All shards are alive, and every message arrives."""
        if self.catalog is None:
            self.start_catalog()
        for worker in self.workers:
            if worker.escrow is None:
                self.start(worker)
        for _ in range(10_000):
            if not any(self.up) and not any(self.down):
                break
            shard = self.rng.randrange(self.shards)
            self.rng.choice([self.deliver_up, self.deliver_down])(shard)
            self.check()
        assert not any(self.up), "messages never end"
        for worker in self.workers:
            assert worker.escrow is not None
            assert not worker.parked, "a request was never answered"
            assert not worker.escrow.is_asking

    def total(self) -> tuple[int, int]:
        used = [worker.used for worker in self.workers]
        return sum(topics for topics, _ in used), sum(size for _, size in used)

    def ask_alone(self) -> None:
        """One request while all is quiet: granted exactly when it fits."""
        worker = self.rng.choice(self.workers)
        topics, size = self.rng.choice([(1, 0), (1, 5), (0, 20), (0, 1), (0, 90), (3, 0)])
        used_topics, used_bytes = self.total()
        fits = used_topics + topics <= self.max_topics and used_bytes + size <= self.max_bytes
        worker.answers.clear()
        self.post(worker, worker.take(topics, size))
        self.rest()
        assert worker.answers == [fits], (topics, size, self.total(), self.max_topics, self.max_bytes)


@pytest.mark.parametrize("first", length.seeds(short=10, long=400)[::10])
def test_clusters_under_chance(first: int) -> None:
    denials = 0
    for seed in range(first, first + 10):
        cluster = Cluster(seed)
        try:
            for _ in range(6):
                for _ in range(80):
                    cluster.step()
                cluster.rest()
                for _ in range(6):
                    cluster.ask_alone()
        except AssertionError as problem:
            raise AssertionError(f"seed {seed}: {problem}") from problem
        denials += cluster.denials
    assert denials > 20, "too few refusals to prove anything"


def test_wants_at_the_same_time_are_served_while_they_fit() -> None:
    """All request one topic at once: exactly as many are granted as were free."""
    for seed in range(20):
        cluster = Cluster(seed)
        cluster.rest()
        for worker in cluster.workers:
            worker.answers.clear()
            for _ in range(4):
                cluster.post(worker, worker.take(1, 0))
        cluster.rest()
        served = sum(sum(worker.answers) for worker in cluster.workers)
        assert served == min(4 * cluster.shards, cluster.max_topics), seed
