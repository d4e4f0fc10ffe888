"""Queues and named consumers: which client got which job, until when, and whether that was right.

A claim says when its leases end and how long they are, and so what time it was on the server's clock. Two leases on
one record are compared by these times; the order of requests matters only where the server was restarted in between.
Otherwise a job is a record: `shown` has deliveries as pages, and `removals` has acks of a queue as deletes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.support.checker.consumers import Consumer
from tests.support.checker.leases import SETTLES, Clock, settles_of
from tests.support.checker.ledger import Ledger
from tests.support.checker.pages import Missing, Read
from tests.support.checker.timeline import FOREVER
from tests.support.history import Event, Op

OF_LEASES = ("lease_id", "deadline", "deliveries")


class Jobs:
    """All leases and settles in one topic."""

    def __init__(self, ledger: Ledger, ops: list[Op]) -> None:
        self.ledger, self.line = ledger, ledger.line
        self.ops = [op for op in ops if op.kind in ("claim", *SETTLES, "put_consumer", "consumer")]
        self.consumers: dict[str, Consumer] = {}
        for op in sorted(self.ops, key=lambda op: op.sent_at):
            name = op.request.get("consumer", "")
            self.consumers.setdefault(name, Consumer(self, name)).ops.append(op)
        self.all_ops = ops
        self.missing: Missing | None = None
        self.pages: list[Read] = []
        self.clock = Clock()
        self.moves = self._moves()
        self.removals = self._removals()

    def shown(self) -> list[Op]:
        """Deliveries, as pages."""
        return [
            Op(
                op.client,
                "handed",
                op.topic,
                {},
                op.sent_at,
                op.answered_at,
                200,
                {"records": [_record(job) for job in op.answer["claimed"]]},
                op.answered_at,
            )
            for op in self.ops
            if op.kind == "claim" and op.ok and op.answer["claimed"]
        ]

    def _removals(self) -> list[Op]:
        """Acks of the queue, as deletes."""
        found = [self.moves] if self.moves is not None else []
        for op in self.ops:
            if op.kind != "ack" or op.refused or op.request.get("consumer"):
                continue
            seqs = [settle.seq for settle in settles_of(op) if settle.counted is not False]
            if seqs:
                answer = {"deleted": len(seqs)} if op.ok else op.answer
                request = {"seqs": seqs}
                found.append(
                    Op(op.client, "delete", op.topic, request, op.sent_at, op.answered_at, op.status, answer, op.settled_at)
                )  # fmt: skip
        return found

    def _moves(self) -> Op | None:
        """A move to a dead letter topic is a delete without an end. `dead_letters` checks where the jobs went."""
        if all(
            config["dead_letter"] is None
            for i in range(len(self.line.back))
            for config in self.line.ever(FOREVER, i)
        ):
            return None
        claims = [op for op in self.ops if op.kind == "claim" and not op.request.get("consumer")]
        if not claims:
            return None
        return Op(
            "dead letters",
            "delete",
            self.ledger.topic,
            {"before_seq": FOREVER},
            min(op.sent_at for op in claims),
        )

    def check(self, missing: Missing, pages: list[Read]) -> None:
        self.missing, self.pages = missing, pages
        self._read_clock()
        for consumer in self.consumers.values():
            consumer.read()
        for text in self.clock.faults():
            self.ledger.blame("time", text)
        for consumer in self.consumers.values():
            consumer.check(missing)

    def _read_clock(self) -> None:
        """A record says when it was written."""
        for era in self.ledger.eras if self.consumers else ():
            for place in era.places:
                op, ts = place.write.ops[0], era.records[place.base].ts
                if ts is not None and len(place.write.ops) == 1 and op.ok:
                    self.clock.add(op, self.life_of(op), ts, ts)

    # -- incarnations of the worker --------------------------------------------------------------------------

    def life_of(self, op: Op) -> int | None:
        """How many restarts there had been when it was executed."""
        end = self.line.settled(op)
        before = sum((event.until or event.at) < op.sent_at for event in self.line.restarts)
        after = sum(event.at < end for event in self.line.restarts)
        return before if before == after else None

    def restarts_between(self, start: int, end: int) -> Iterator[Event]:
        """Restarts that can have happened between something that began at `start` and something that was over at
        `end`.
        """
        for event in self.line.restarts:
            if event.at < end and (event.until or event.at) > start:
                yield event


def _record(job: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in job.items() if name not in OF_LEASES}
