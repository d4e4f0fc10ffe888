"""Goal: the checker reports broken promises of queues and consumers, under the right rule, and nothing else.

Method: histories built by hand, as in test_checker, with leases in a few lines. The test makes them illegal by
changing the server's state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.checker import assert_ok
from tests.support.history import Op
from tests.support.scripted_server import Row, ScriptedServer

QUEUE = {"type": "queue", "durability": "fsync", "lease_ms": 500}
KEPT = {**QUEUE, "leases_durable": True}


@dataclass
class Job:
    node: str = ""
    lease_id: str = ""
    until: int = -1  # the lease is valid up to here
    due: int = 0  # not before
    deliveries: int = 0


@dataclass
class Desk:
    config: Row = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)


class JobServer(ScriptedServer):
    def __init__(self, config: Row = QUEUE) -> None:
        super().__init__()
        self.desks: dict[str, Desk] = {"": Desk()}
        self._leases = 0
        self.ask("put", **config)
        self.write(3)

    def restart(self, kind: str = "kill") -> None:
        """Without durable leases, which end with it."""
        self.event(kind, *(["t"] if kind == "kill" else []))
        if not self.held["t"].config.get("leases_durable"):
            self.desks[""] = Desk()

    def later(self, ms: int) -> None:
        self.time += ms

    def claim(self, node: str = "k", **request: Any) -> Op:
        wish: Row = {"node": node, "max": 1000, "lease_ms": 100, **request}
        return self.ask("claim", client=node, **wish)

    def settle(self, kind: str, seqs: list[int], node: str = "k", **request: Any) -> Op:
        return self.ask(kind, client=node, node=node, seqs=seqs, **request)

    def rest(self, consumer: str = "") -> Op:
        """All leases end, and a client takes everything."""
        self.later(100_000)
        self.event("over")
        self.ask("state", client="audit")
        self.read(client="audit", include_tags=True)
        of = {"consumer": consumer} if consumer else {}
        if consumer:
            self.ask("consumer", client="audit", **of)
        return self.claim("audit", **of)

    # -- the server ------------------------------------------------------------------------------------------

    def _desk(self, op: Op) -> Desk:
        return self.desks[op.request.get("consumer", "")]

    def _ready(self, desk: Desk) -> list[int]:
        jobs = (
            (seq, desk.jobs.get(seq, Job())) for seq in sorted(self.held["t"].live) if seq not in desk.done
        )
        return [seq for seq, job in jobs if job.until < self.time >= job.due]

    def _claim(self, op: Op) -> tuple[int, Row]:
        desk, claimed = self._desk(op), []
        for seq in self._ready(desk)[: op.request["max"]]:
            job = desk.jobs.setdefault(seq, Job())
            self._leases += 1
            job.node, job.lease_id = op.request["node"], f"lease_{self._leases:x}"
            job.until, job.deliveries = self.time + op.request["lease_ms"], job.deliveries + 1
            record = {name: value for name, value in self.held["t"].live[seq].items() if name != "$node"}
            lease = {"lease_id": job.lease_id, "deadline": job.until, "deliveries": job.deliveries}
            claimed.append({**record, **lease})
        ready = len(self._ready(desk))
        return 200, {"topic": "t", "claimed": claimed, "count": len(claimed), "ready": ready}

    def _settled(self, op: Op) -> tuple[list[int], Row]:
        desk, held, skipped = self._desk(op), [], []
        ids = op.request.get("lease_ids") or [""] * len(op.request["seqs"])
        for seq, lease_id in zip(op.request["seqs"], ids, strict=True):
            job = desk.jobs.get(seq, Job())
            fits = job.node == op.request["node"] and lease_id in ("", job.lease_id)
            (held if fits and job.until >= self.time else skipped).append(seq)
        return held, {"topic": "t", "skipped": skipped}

    def _ack(self, op: Op) -> tuple[int, Row]:
        held, answer = self._settled(op)
        desk = self._desk(op)
        for seq in held:
            del desk.jobs[seq]
            if op.request.get("consumer"):
                desk.done.add(seq)
            else:
                del self.held["t"].live[seq]
        return 200, {**answer, "acked": len(held), "ready": 0, "in_flight": 0}

    def _nack(self, op: Op) -> tuple[int, Row]:
        held, answer = self._settled(op)
        for seq in held:
            job = self._desk(op).jobs[seq]
            job.until, job.due = -1, self.time + op.request.get("delay_ms", 0)
            job.deliveries -= op.request.get("kind") == "release"
        return 200, {**answer, "nacked": len(held), "ready": 0, "in_flight": 0}

    def _extend(self, op: Op) -> tuple[int, Row]:
        held, answer = self._settled(op)
        for seq in held:
            self._desk(op).jobs[seq].until = self.time + op.request["lease_ms"]
        deadlines = {str(seq): self.time + op.request["lease_ms"] for seq in held}
        return 200, {**answer, "extended": len(held), "deadlines": deadlines}

    def _put_consumer(self, op: Op) -> tuple[int, Row]:
        created = op.request["consumer"] not in self.desks
        self.desks.setdefault(op.request["consumer"], Desk())
        return (201 if created else 200), {**self._consumer(op)[1], "created": created}

    def _consumer(self, op: Op) -> tuple[int, Row]:
        desk = self._desk(op)
        live = [seq for seq in self.held["t"].live if seq not in desk.done]
        zeros = (
            "created_ts next_seq ack_floor delivered redelivered acked in_flight dead_lettered given_up waiting lag_ms "
            "last_activity_ts paused paused_until_ts stalled"
        )
        answer: Row = dict.fromkeys(zeros.split(), 0)
        pending = sum(seq in desk.jobs for seq in live)
        answer |= {
            "ack_pending": pending,
            "lag_records": len(live) - pending,
            "tombstone": None,
            "config": {},
        }
        return 200, {"topic": "t", "consumer": op.request["consumer"], **answer}

    def _state(self, op: Op) -> tuple[int, Row]:
        status, answer = super()._state(op)
        ready = len(self._ready(self.desks[""]))
        return status, {**answer, "queue": {"ready": ready, "in_flight": 0, "dead_lettered": 0}}


def ids(claim: Op) -> list[str]:
    return [job["lease_id"] for job in claim.answer["claimed"]]


# -- legal ---------------------------------------------------------------------------------------------------


def everything_in_order(server: JobServer) -> None:
    claim = server.claim()
    server.settle("ack", [1], lease_ids=ids(claim)[:1])
    server.settle("extend", [2], lease_ms=900)
    server.settle("nack", [3], delay_ms=50)
    server.later(60)
    server.claim("other", lease_ms=1000)
    server.read()
    server.rest()


def a_lease_that_has_ended(server: JobServer) -> None:
    first = server.claim()
    server.later(101)
    server.claim()  # of the same node
    server.settle("ack", [1, 2, 3], lease_ids=ids(first))
    server.settle("ack", [1])
    server.rest()


def leases_end_with_a_restart(server: JobServer) -> None:
    first = server.claim()
    server.restart()
    server.settle("ack", [1], lease_ids=ids(first)[:1])
    server.claim("other")
    server.rest()


def an_ack_of_unknown_outcome(server: JobServer) -> None:
    server.claim()
    server.lose(server.send("ack", node="k", seqs=[1]), executed=True)
    server.lose(server.send("ack", node="k", seqs=[2]))
    server.rest()


def a_claim_that_nobody_heard_of(server: JobServer) -> None:
    server.lose(server.send("claim", node="k", max=2, lease_ms=100), executed=True)
    release = server.send("nack", node="k", seqs=[1])
    release.request["kind"] = "release"
    server.finish(release)
    server.later(101)
    server.rest()


def a_named_consumer(server: JobServer) -> None:
    server.ask("put_consumer", consumer="c", ack_wait_ms=100)
    claim = server.claim(consumer="c")
    claim.answer |= {"consumer": "c", "tombstone": None}
    server.settle("ack", [1, 2], consumer="c")
    server.restart()
    server.rest("c").answer |= {"consumer": "c", "tombstone": None}


def extended_twice_in_one_millisecond(server: JobServer) -> None:
    """The second one is valid, whether it ends later or earlier than the first."""
    server.claim()
    server.settle("extend", [1], lease_ms=100)
    server.settle("extend", [1], lease_ms=4000)
    server.settle("extend", [2], lease_ms=4000)
    server.settle("extend", [2], lease_ms=100)
    server.later(200)
    server.claim("other", lease_ms=1000)
    server.settle("nack", [1])
    server.rest()


def extended_by_two_at_once_in_one_millisecond(server: JobServer) -> None:
    """Which came last is unknown: for one job it was the longer, for the other the shorter."""
    server.claim()
    for seq, first, second in ((1, 100, 4000), (2, 4000, 100)):
        sent = [
            server.send("extend", node="k", seqs=[seq], lease_ms=lease_ms) for lease_ms in (first, second)
        ]
        for op, done in [(op, server.do(op)) for op in sent]:
            server.reply(op, done)
    server.later(200)
    server.claim("other", lease_ms=1000)
    server.settle("nack", [1])
    server.rest()


LEGAL = [
    everything_in_order,
    a_lease_that_has_ended,
    extended_twice_in_one_millisecond,
    extended_by_two_at_once_in_one_millisecond,
    leases_end_with_a_restart,
    an_ack_of_unknown_outcome,
    a_claim_that_nobody_heard_of,
    a_named_consumer,
]


@pytest.mark.parametrize("scenario", LEGAL, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("config", [QUEUE, KEPT], ids=["plain", "kept"])
def test_legal(scenario: Any, config: Row) -> None:
    server = JobServer(config)
    scenario(server)
    assert_ok(server.history)


# -- broken --------------------------------------------------------------------------------------------------


def two_holders(server: JobServer) -> None:
    server.claim()
    server.later(100)  # a lease is valid in its last millisecond
    server.desks[""].jobs[2].until = -1
    server.claim("other")


def an_extended_lease_ends_early(server: JobServer) -> None:
    server.claim()
    server.settle("extend", [1], lease_ms=5000)
    server.later(200)
    server.desks[""].jobs[1].until = -1
    server.claim("other")


def the_last_extend_of_a_millisecond_is_forgotten(server: JobServer) -> None:
    server.claim()
    server.settle("extend", [1], lease_ms=100)
    server.settle("extend", [1], lease_ms=5000)
    server.later(200)
    server.desks[""].jobs[1].until = -1
    server.claim("other")


def the_first_extend_of_a_millisecond_still_counts(server: JobServer) -> None:
    claim = server.claim()
    server.settle("extend", [1], lease_ms=5000)
    server.settle("extend", [1], lease_ms=100)
    server.later(200)
    server.desks[""].jobs[1].until = server.time
    server.claim("other")  # whose time tells what time it is
    server.settle("nack", [1], lease_ids=ids(claim)[:1])


def a_kept_lease_ends_with_a_restart(server: JobServer) -> None:
    server.claim(lease_ms=5000)
    server.restart()
    server.desks[""] = Desk()
    server.claim("other", lease_ms=5000)


def an_acked_job_comes_back(server: JobServer) -> None:
    job = server.held["t"].live[1]
    server.claim()
    server.settle("ack", [1])
    server.restart("power")
    server.held["t"].live[1] = job
    server.claim("other")


def an_acked_job_is_readable(server: JobServer) -> None:
    job = server.held["t"].live[1]
    server.claim()
    server.settle("ack", [1])
    server.held["t"].live[1] = job
    server.read()


def a_job_is_lost(server: JobServer) -> None:
    server.claim()
    server.restart("power")
    del server.held["t"].live[2]
    server.rest()


def a_fenced_lease_is_accepted(server: JobServer) -> None:
    first = server.claim()
    server.later(101)
    server.claim()
    server.settle("ack", [1]).request["lease_ids"] = ids(first)[:1]


def a_lease_of_before_the_restart_is_accepted(server: JobServer) -> None:
    server.claim(lease_ms=5000)
    desk = server.desks[""]
    server.restart()
    server.desks[""] = desk
    server.settle("ack", [1])


def a_late_ack_counts(server: JobServer) -> None:
    server.claim(max=1)
    server.later(101)
    server.claim("other", max=1)
    server.desks[""].jobs[1] = Job("k", "lease_1", server.time)
    server.settle("ack", [1], lease_ids=["lease_1"])


def a_lease_that_holds_is_skipped(server: JobServer) -> None:
    server.claim(lease_ms=5000)
    answer = server.settle("extend", [1, 2], lease_ms=100).answer
    answer |= {"skipped": [1], "extended": 1, "deadlines": {"2": answer["deadlines"]["2"]}}
    server.write()
    server.read()


def deliveries_go_down(server: JobServer) -> None:
    server.claim()
    server.restart()
    server.later(101)
    server.desks[""].jobs[1].deliveries = 0
    server.claim()


def deliveries_begin_at_two(server: JobServer) -> None:
    server.claim().answer["claimed"][0]["deliveries"] = 2


def a_delay_is_forgotten(server: JobServer) -> None:
    server.claim()
    server.settle("nack", [1], delay_ms=5000)
    server.later(100)
    server.desks[""].jobs[1].due = 0
    server.claim()


def one_answer_has_it_twice(server: JobServer) -> None:
    answer = server.claim().answer
    answer["claimed"].insert(0, answer["claimed"][0])
    answer["count"] += 1


def a_job_is_stuck(server: JobServer) -> None:
    server.claim()
    server.later(10_000)
    server.desks[""].jobs[2].due = 1 << 60
    server.rest()


def wrong_counts(server: JobServer) -> None:
    server.rest()
    next(op for op in server.history.ops if op.kind == "state").answer["queue"]["ready"] = 2


def time_runs_back(server: JobServer) -> None:
    server.claim(max=1)
    server.later(-50)
    server.claim("other")


def a_consumer_gets_what_it_acked(server: JobServer) -> None:
    server.ask("put_consumer", consumer="c", ack_wait_ms=100)
    server.claim(consumer="c")
    server.settle("ack", [1], consumer="c")
    server.restart("power")
    server.desks["c"].done.clear()
    server.claim(consumer="c")


def a_consumer_skips_a_record(server: JobServer) -> None:
    server.ask("put_consumer", consumer="c", ack_wait_ms=100)
    server.claim(consumer="c", max=1)
    server.desks["c"].done.add(2)
    server.rest("c").answer |= {"consumer": "c", "tombstone": None}


def a_dead_letter_is_lost(server: JobServer) -> None:
    server.claim()
    del server.held["t"].live[2]
    server.read(client="audit")
    server.write(topic="letters")
    del server.held["letters"].live[1]
    server.read(topic="letters", client="audit")


def _letter(server: JobServer) -> Row:
    job = {name: value for name, value in server.held["t"].live[2].items() if name in ("data", "$ts")}
    meta = {"$dead_letter_from": "t", "$dead_letter_src_seq": "2", "$dead_letter_deliveries": "1"}
    return {**job, "meta": meta}


def a_dead_letter_is_doubled(server: JobServer) -> None:
    server.claim()
    server.write(2, topic="letters")
    server.held["letters"].live = {seq: {"$seq": seq, **_letter(server)} for seq in (1, 2)}
    server.read(topic="letters")


MORTAL = {**QUEUE, "max_deliveries": 1, "dead_letter": "letters"}

BROKEN = [
    ("two-holders", two_holders, QUEUE),
    ("two-holders", an_extended_lease_ends_early, QUEUE),
    ("two-holders", the_last_extend_of_a_millisecond_is_forgotten, QUEUE),
    ("no-lease", the_first_extend_of_a_millisecond_still_counts, QUEUE),
    ("two-holders", a_kept_lease_ends_with_a_restart, KEPT),
    ("undeleted", an_acked_job_comes_back, QUEUE),
    ("undeleted", an_acked_job_is_readable, QUEUE),
    ("lost", a_job_is_lost, QUEUE),
    ("no-lease", a_fenced_lease_is_accepted, QUEUE),
    ("no-lease", a_lease_of_before_the_restart_is_accepted, QUEUE),
    ("no-lease", a_late_ack_counts, QUEUE),
    ("lease-lost", a_lease_that_holds_is_skipped, QUEUE),
    ("deliveries", deliveries_go_down, KEPT),
    ("deliveries", deliveries_begin_at_two, QUEUE),
    ("too-early", a_delay_is_forgotten, QUEUE),
    ("claim", one_answer_has_it_twice, QUEUE),
    ("stuck", a_job_is_stuck, QUEUE),
    ("queue-counts", wrong_counts, QUEUE),
    ("time", time_runs_back, QUEUE),
    ("acked-again", a_consumer_gets_what_it_acked, QUEUE),
    ("skipped", a_consumer_skips_a_record, QUEUE),
    ("letter-lost", a_dead_letter_is_lost, MORTAL),
    ("letter-twice", a_dead_letter_is_doubled, MORTAL),
]


@pytest.mark.parametrize(
    ("rule", "scenario", "config"), BROKEN, ids=lambda part: getattr(part, "__name__", None)
)
def test_each_violation_is_found(rule: str, scenario: Any, config: Row) -> None:
    server = JobServer(config)
    scenario(server)
    assert rule in server.rules()
