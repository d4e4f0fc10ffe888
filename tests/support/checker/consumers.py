"""Deliveries of one queue or one named consumer: leases, and what was settled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support.checker.leases import SETTLES, Lease, Settle, settles_of, told_before
from tests.support.checker.pages import Missing
from tests.support.checker.problem import name_of
from tests.support.checker.takeover import Takeover
from tests.support.checker.timeline import FOREVER
from tests.support.history import Event, Op

if TYPE_CHECKING:
    from tests.support.checker.jobs import Jobs


@dataclass(slots=True, eq=False)
class Consumer:
    """All deliveries and settles of a queue, or of one named consumer."""

    jobs: Jobs
    name: str
    ops: list[Op] = field(default_factory=list)
    leases: dict[int, list[Lease]] = field(default_factory=dict)  # by seq
    settles: dict[int, list[Settle]] = field(default_factory=dict)
    lost_claims: list[Op] = field(default_factory=list)  # claims with unknown results

    def blame(self, rule: str, text: str) -> None:
        who = f"{self.name}: " if self.name else ""
        self.jobs.ledger.blame(rule, who + text)

    def read(self) -> None:
        for op in self.ops:
            if op.kind == "claim":
                self._take_claim(op)
            elif op.kind in SETTLES:
                self._take_settle(op)

    def check(self, missing: Missing) -> None:
        for seq, leases in self.leases.items():
            self._check_holders(leases)
            self._check_delays(leases)
            self._check_deliveries(leases)
            self._check_last(leases)
            self._check_acked(seq, leases)
        for settles in self.settles.values():
            for settle in settles:
                if settle.counted:
                    self._check_counted(settle)
                elif settle.counted is False:
                    self._check_skipped(settle, missing)
        for event in self.jobs.line.overs:
            Takeover(self, event.at).check()

    # -- answers ---------------------------------------------------------------------------------------------

    def _take_claim(self, op: Op) -> None:
        jobs, line = self.jobs, self.jobs.line
        if not op.ok:
            if not op.refused or op.detail.get("limit") == "buffered":
                self.lost_claims.append(op)
            return
        assert op.answered_at is not None
        answer, life = op.answer, jobs.life_of(op)
        seqs = [job["$seq"] for job in answer["claimed"]]
        if answer["count"] != len(seqs) or seqs != sorted(set(seqs)) or len(seqs) > op.request["max"]:
            self.blame("claim", f"{seqs} with count {answer['count']} is not a valid answer to {name_of(op)}")
        first, last = line.span(op.sent_at, op.answered_at)
        era = jobs.ledger.home_era(first, last)
        short, long = self._lease_ms(op)
        for job in answer["claimed"]:
            until = job["deadline"]
            lease = Lease(
                op, job["$seq"], op.request["node"], job["lease_id"], job["deliveries"], until, until - long,
                until - short, era, life,
            )  # fmt: skip
            self.leases.setdefault(lease.seq, []).append(lease)
        if answer["claimed"]:
            until = answer["claimed"][0]["deadline"]
            jobs.clock.add(op, life, until - long, until - short)

    def _lease_ms(self, op: Op) -> tuple[int, int]:
        """The shortest and the longest lease that it can give."""
        wanted = op.request.get("lease_ms")
        if wanted is not None:
            return wanted, wanted
        line = self.jobs.line
        assert op.answered_at is not None
        if self.name:
            puts = [put for put in self.ops if put.kind == "put_consumer" and not put.refused]
            times = [put.request.get("ack_wait_ms", 30_000) for put in puts] or [30_000]
        else:
            first, last = line.span(op.sent_at, op.answered_at)
            low, high = line.back[line.instance[first]], line.instance[last]
            times = [c["lease_ms"] for c in line.configs(op.sent_at, op.answered_at, low, high)]
        return min(times), max(times)

    def _take_settle(self, op: Op) -> None:
        for settle in settles_of(op):
            self.settles.setdefault(settle.seq, []).append(settle)
        if not op.ok:
            return
        answer, count = op.answer, len(op.request["seqs"])
        done = answer[{"ack": "acked", "nack": "nacked", "extend": "extended"}[op.kind]]
        skipped = answer["skipped"]
        covers_more = self.name and self._acks_all
        if (done + len(skipped) != count and not covers_more) or not set(skipped) <= set(op.request["seqs"]):
            self.blame("settle", f"{done} done and {skipped} skipped is not a valid answer to {name_of(op)}")
        if op.kind == "extend":
            life, wanted = self.jobs.life_of(op), op.request["lease_ms"]
            for until in answer["deadlines"].values():
                self.jobs.clock.add(op, life, until - wanted, until - wanted)

    @property
    def _acks_all(self) -> bool:
        return any(op.kind == "put_consumer" and op.request.get("ack") == "all" for op in self.ops)

    def acks_up_to(self, seq: int) -> Iterator[Op]:
        """Acks that may have covered it, where an ack covers everything before."""
        if self._acks_all:
            for op in self.ops:
                if op.kind == "ack" and not op.refused and max(op.request["seqs"]) >= seq:
                    yield op

    # -- ends of leases --------------------------------------------------------------------------------------

    def _is_kept(self, event: Event) -> bool:
        """Whether leases survive this restart: those of a power cut may have been logged but not synced."""
        line = self.jobs.line
        if event.kind == "power" or any(end == (event.until or event.at) for _, end in line.latches):
            return False
        if line.corrupted_at < event.at:
            return False
        configs = [c for instance in range(len(line.back)) for c in line.ever(FOREVER, instance)]
        kept = bool(self.name) or all(config["leases_durable"] for config in configs)
        return kept and all(config["durability"] in ("disk", "fsync") for config in configs)

    def _forgotten_between(self, start: int, end: int) -> bool:
        return any(not self._is_kept(event) for event in self.jobs.restarts_between(start, end))

    def _ends_of(self, lease: Lease, by_ms: int) -> tuple[int, int] | None:
        """When the lease ends, with extensions up to then: between these two; None when that is unknown."""
        extends: list[tuple[int, int, Op]] = []
        for settle in self.settles.get(lease.seq, []):
            if settle.op.kind != "extend" or not settle.may_be_of(lease):
                continue
            if settle.counted is None:
                if self._may_be_during(settle.op, lease):
                    return None
                continue
            to = settle.op.answer["deadlines"][str(lease.seq)]
            at = to - settle.op.request["lease_ms"]
            if not settle.id and self._somebody_later(lease, at):
                continue
            if lease.since_ms <= at <= by_ms and self._may_be_during(settle.op, lease):
                extends.append((at, to, settle.op))
        if not extends:
            return lease.until_ms, lease.until_ms
        newest = max(at for at, _, _ in extends)
        # Several may fall into one millisecond: then the last one counts, which is known if one was sent after the
        # other's answer.
        last = [(to, op) for at, to, op in extends if at == newest]
        ends = [to for to, op in last if not any(told_before(op, other.sent_at) for _, other in last)]
        return min(ends), max(ends)

    def _somebody_later(self, lease: Lease, at_ms: int) -> bool:
        return any(
            lease.latest_ms < other.since_ms <= at_ms
            for other in self.leases[lease.seq]
            if other is not lease
        )

    def _may_be_during(self, op: Op, lease: Lease) -> bool:
        """Not over before the lease was requested."""
        return self.jobs.line.settled(op) > lease.op.sent_at

    def _given_back(self, lease: Lease, by: int) -> bool:
        """Whether a client may have ended it before a moment."""
        return any(
            settle.op.kind in ("ack", "nack")
            and settle.may_be_of(lease)
            and settle.op.sent_at < by
            and self._may_be_during(settle.op, lease)
            for settle in self.settles.get(lease.seq, [])
        )

    # -- one holder ------------------------------------------------------------------------------------------

    def _check_holders(self, leases: list[Lease]) -> None:
        clear = [lease for lease in leases if lease.life is not None and lease.era is not None]
        clear.sort(key=lambda lease: (lease.life, lease.latest_ms, lease.deliveries))
        for one, two in itertools.pairwise(clear):
            if one.era is not two.era or self._may_follow(one, two):
                continue
            if one.life == two.life and one.latest_ms >= two.since_ms and self._may_follow(two, one):
                continue
            self.blame("two-holders", f"{two}, and before that {one}")

    def _may_follow(self, one: Lease, two: Lease) -> bool:
        assert two.op.answered_at is not None
        ends = self._ends_of(one, two.latest_ms)
        return (
            ends is None
            or ends[0] < two.latest_ms
            or self._given_back(one, two.op.answered_at)
            or self._forgotten_between(one.op.sent_at, two.op.answered_at)
        )

    def _check_delays(self, leases: list[Lease]) -> None:
        """A job that was nacked with a delay comes later."""
        for lease in leases:
            if lease.life is None:
                continue
            for settle in self.settles.get(lease.seq, []):
                nack, life = settle.op, self.jobs.life_of(settle.op)
                delay_ms = nack.request.get("delay_ms")
                if (
                    not delay_ms
                    or not settle.counted
                    or life != lease.life
                    or (nack.answered_at or 0) > lease.op.sent_at
                ):
                    continue
                due_ms = self.jobs.clock.at_least(life, nack.sent_at) + delay_ms
                if lease.latest_ms < due_ms:
                    self.blame("too-early", f"{lease}, and {name_of(nack)} gave it back until {due_ms}")

    # -- deliveries ------------------------------------------------------------------------------------------

    def _check_deliveries(self, leases: list[Lease]) -> None:
        clear = [lease for lease in leases if lease.life is not None and lease.era is not None]
        clear.sort(key=lambda lease: (lease.life, lease.latest_ms, lease.deliveries))
        for lease in clear:
            others = sum(other is not lease and self._may_precede(other, lease) for other in leases)
            most = 1 + others + sum(op.sent_at < (lease.op.answered_at or 0) for op in self.lost_claims)
            if not 1 <= lease.deliveries <= most:
                self.blame("deliveries", f"delivery {lease.deliveries}, at most {most} of {lease}")
        for one, two in itertools.pairwise(clear):
            assert two.op.answered_at is not None
            if one.era is not two.era or self._forgotten_between(one.op.sent_at, two.op.answered_at):
                continue
            if one.latest_ms >= two.since_ms:
                continue  # their order is unknown
            releases = sum(
                settle.op.request.get("kind") == "release" and settle.counted is not False
                for settle in self.settles.get(two.seq, [])
            )
            if two.deliveries < one.deliveries + 1 - releases:
                self.blame("deliveries", f"delivery {two.deliveries} of {two}, and {one.deliveries} of {one}")

    def _may_precede(self, other: Lease, lease: Lease) -> bool:
        """Whether it counts as a delivery before this one."""
        if other.op.sent_at > (lease.op.answered_at or FOREVER):
            return False
        if self.name or other.life is None or lease.life is None:
            return True
        configs = self.jobs.line.ever(FOREVER, lease.era.instance) if lease.era is not None else []
        return other.life == lease.life or any(config["leases_durable"] for config in configs)

    def _check_last(self, leases: list[Lease]) -> None:
        """No job is delivered after its last delivery."""
        line = self.jobs.line
        if self.name:
            most = max(
                (op.request.get("max_deliver") or FOREVER for op in self.ops if op.kind == "put_consumer"),
                default=FOREVER,
            )
        else:
            configs = [config for i in range(len(line.back)) for config in line.ever(FOREVER, i)]
            most = max(config["max_deliveries"] or FOREVER for config in configs)
        for lease in leases:
            if lease.deliveries > most:
                self.blame("too-often", f"delivery {lease.deliveries} of {lease}")

    # -- acked is acked --------------------------------------------------------------------------------------

    def _check_acked(self, seq: int, leases: list[Lease]) -> None:
        """A named consumer does not get again what it has acked. (A queue's acks are deletes.)"""
        if not self.name:
            return
        line = self.jobs.line
        for settle in self.settles.get(seq, []):
            op = settle.op
            if op.kind != "ack" or not settle.counted:
                continue
            for lease in leases:
                assert op.answered_at is not None and lease.op.answered_at is not None
                first, last = line.span(op.sent_at, lease.op.answered_at)
                if first == last and op.answered_at < lease.op.sent_at:
                    self.blame("acked-again", f"{lease}, and {name_of(op)} had acked it")

    # -- counts of settles -----------------------------------------------------------------------------------

    def _check_counted(self, settle: Settle) -> None:
        """Only clients that can have had a lease."""
        op = settle.op
        assert op.answered_at is not None
        lost = (claim for claim in self.lost_claims if claim.request["node"] == op.request["node"])
        if not settle.id and any(claim.sent_at < op.answered_at for claim in lost):
            return
        mine = [
            lease
            for lease in self.leases.get(settle.seq, [])
            if settle.may_be_of(lease) and lease.op.sent_at < op.answered_at
        ]
        whys = [self._over_before(lease, settle) for lease in mine]
        if not all(whys):
            return
        reason = "; ".join(filter(None, whys)) or "it was never delivered"
        self.blame("no-lease", f"seq {settle.seq} counted for {name_of(op)}: {reason}")

    def _over_before(self, lease: Lease, settle: Settle) -> str:
        """Why the lease was certainly over when this was sent; "" when it was not, or that is unknown."""
        sent = settle.op.sent_at
        for other in self.leases[lease.seq]:
            later = other.since_ms > lease.latest_ms and other.life == lease.life is not None
            if later and told_before(other.op, sent):
                return f"it went on as {other}"
        for other_settle in self.settles[lease.seq]:
            op = other_settle.op
            ended = op.kind in ("ack", "nack") and other_settle.counted and other_settle.id == lease.id
            if ended and told_before(op, sent):
                return f"{name_of(op)} had settled it before"
        ends = self._ends_of(lease, FOREVER)
        life = self.jobs.life_of(settle.op)
        if ends is not None and life is not None and life == lease.life:
            now_ms = self.jobs.clock.at_least(life, sent)
            if ends[1] < now_ms:
                return f"it had ended at {ends[1]}, and the time was {now_ms}"
        if self.name or self._ever_kept:
            return ""
        for event in self.jobs.line.restarts:
            certain = event.kind != "kill" or event.topics is not None
            if certain and told_before(lease.op, event.at) and (event.until or event.at) < sent:
                return f"the server was restarted @{event.at}"
        return ""

    @property
    def _ever_kept(self) -> bool:
        line = self.jobs.line
        return any(c["leases_durable"] for i in range(len(line.back)) for c in line.ever(FOREVER, i))

    def _check_skipped(self, settle: Settle, missing: Missing) -> None:
        """Not a client that certainly had a lease."""
        op = settle.op
        life = self.jobs.life_of(op)
        assert op.answered_at is not None
        if life is None or op.request["seqs"].count(settle.seq) > 1:
            return
        for lease in self.leases.get(settle.seq, []):
            fits = lease.node == op.request["node"] and settle.id in ("", lease.id)
            if (
                not fits
                or lease.life != life
                or lease.era is None
                or (lease.op.answered_at or FOREVER) > op.sent_at
            ):
                continue
            if self._given_back(lease, op.answered_at) or any(self.acks_up_to(lease.seq)):
                continue
            if any(
                other is not lease and other.since_ms >= lease.since_ms for other in self.leases[lease.seq]
            ):
                continue
            now_ms = self.jobs.clock.at_most(life, op.answered_at)
            ends = self._ends_of(lease, FOREVER)
            if ends is None or ends[0] < now_ms or self._may_be_removed(lease, missing, op.answered_at):
                continue
            self.blame("lease-lost", f"skipped by {name_of(op)}: {lease}, and it was {now_ms} at most")

    def _may_be_removed(self, lease: Lease, missing: Missing, by: int) -> bool:
        era = lease.era
        assert era is not None
        placed = era.records.get(lease.seq)
        limits = ("ttl_ms", "cap_records", "cap_bytes", "cap_per_tag")
        configs = self.jobs.line.ever(by, era.instance)
        if (
            placed is None
            or self.jobs.line.corrupted_at < by
            or any(c[name] for c in configs for name in limits)
        ):
            return True
        return missing.may_be_gone(era, placed, by)
