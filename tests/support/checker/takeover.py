"""The end of a run: when every lease has ended, the next claim gets all jobs, and the counters match."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tests.support.checker.problem import name_of
from tests.support.checker.shapes import match_of
from tests.support.checker.timeline import FOREVER
from tests.support.history import Op

if TYPE_CHECKING:
    from tests.support.checker.consumers import Consumer


class Takeover:
    """When every lease has ended, the next claim gets all jobs, and the counters match."""

    def __init__(self, consumer: Consumer, at: int) -> None:
        self.consumer, self.at = consumer, at
        self.line = consumer.jobs.line

    def check(self) -> None:
        later = [op for op in self.consumer.ops if op.sent_at > self.at and op.kind == "claim"]
        if not later or not later[0].ok or later[0].answered_at is None:
            return
        claim = later[0]
        asked = [
            op for op in self.consumer.jobs.all_ops
            if self.at < op.sent_at and (op.answered_at or FOREVER) < claim.sent_at and op.client == claim.client
        ]  # fmt: skip
        states = [op for op in asked if op.kind == "state" and op.ok]
        pages = [op for op in asked if op.kind == "diff" and op.ok and op.answer["caught_up"]]
        if not states or not pages or self._expires(claim):
            return
        records = pages[-1].answer["records"]
        if self.consumer.name:
            self._check_named(claim, records, asked)
        else:
            self._check_queue(claim, records, states[-1])

    def _expires(self, claim: Op) -> bool:
        assert claim.answered_at is not None
        configs = [c for i in range(len(self.line.back)) for c in self.line.ever(claim.answered_at, i)]
        return self.line.corrupted_at < claim.answered_at or any(config["ttl_ms"] for config in configs)

    def _check_queue(self, claim: Op, records: list[dict[str, Any]], state: Op) -> None:
        if self.consumer.jobs.moves is not None:
            return  # some may have had their last delivery: `dead_letters` checks what became of them
        blame, live = self.consumer.blame, [record["$seq"] for record in records]
        counts = state.answer["queue"]
        if (counts["ready"], counts["in_flight"]) != (len(live), 0):
            blame(
                "queue-counts", f"{counts} of {name_of(state)}, and {len(live)} jobs are there, none leased"
            )
        got = [job["$seq"] for job in claim.answer["claimed"]]
        if claim.answer["ready"] != len(live) - len(got):
            blame("queue-counts", f"{claim.answer['ready']} are left after {name_of(claim)}, of {len(live)}")
        if not claim.answer["ready"] and got != live:
            blame("stuck", f"{sorted(set(live) - set(got))} are never delivered: {name_of(claim)}")

    def _check_named(self, claim: Op, records: list[dict[str, Any]], asked: list[Op]) -> None:
        consumer = self.consumer
        puts = [op for op in consumer.ops if op.kind == "put_consumer" and not op.refused]
        configs = [op.request for op in puts]
        narrow = any(config.get("max_ack_pending", 1000) <= len(records) for config in configs)
        if not configs or claim.answer["tombstone"] is not None or narrow:
            return
        match = match_of(configs[0].get("filter"))
        wanted = {record["$seq"] for record in records if match is None or match(record.get("$tag"))}
        got = {job["$seq"] for job in claim.answer["claimed"]}
        if got - wanted:
            consumer.blame("consumer", f"{sorted(got - wanted)} are not for it: {name_of(claim)}")
        due = {seq for seq in wanted if not self._may_be_done(seq, claim)}
        if any(config.get("deliver", "all") == "new" for config in configs):
            due &= set(self._written_after(puts))
        if any(config.get("max_deliver") for config in configs):
            due -= self._may_be_given_up(due, configs)
        if due - got and not claim.answer["ready"]:
            consumer.blame("skipped", f"{sorted(due - got)} are never delivered: {name_of(claim)}")
        for op in asked if not any(config.get("max_deliver") for config in configs) else ():
            if op.kind == "consumer" and op.ok and op.request["consumer"] == consumer.name:
                self._check_counts(op, claim, len(got))

    def _may_be_given_up(self, seqs: set[int], configs: list[dict[str, Any]]) -> set[int]:
        """Those that may have had their last delivery."""
        lost = len(self.consumer.lost_claims)
        most = min(config.get("max_deliver") or FOREVER for config in configs)
        return {
            seq
            for seq in seqs
            if len(self.consumer.leases.get(seq, ())) + lost >= most
            or any(settle.op.request.get("kind") == "dead" for settle in self.consumer.settles.get(seq, ()))
        }

    def _check_counts(self, state: Op, claim: Op, got: int) -> None:
        answer = state.answer
        counts = {name: answer[name] for name in ("ack_pending", "in_flight", "lag_records")}
        if (
            answer["in_flight"]
            or counts["ack_pending"] + counts["lag_records"] != got + claim.answer["ready"]
        ):
            self.consumer.blame(
                "consumer-counts", f"{counts} of {name_of(state)}, and then {got} by {name_of(claim)}"
            )

    def _may_be_done(self, seq: int, claim: Op) -> bool:
        acks = (settle.op for settle in self.consumer.settles.get(seq, []) if settle.counted is not False)
        ops = itertools.chain((op for op in acks if op.kind == "ack"), self.consumer.acks_up_to(seq))
        return any(op.sent_at < claim.sent_at for op in ops)

    def _written_after(self, puts: list[Op]) -> Iterator[int]:
        """Seqs that were written while the consumer existed."""
        made = min((op.answered_at or FOREVER for op in puts if op.ok), default=FOREVER)
        for era in self.consumer.jobs.ledger.eras:
            for seq, placed in era.records.items():
                if placed.sent.write.sent > made:
                    yield seq
