"""Answers to writes: seqs, retries, conditions."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from typing import Any

from tests.support.checker.ledger import Era, Ledger, Place, Write
from tests.support.checker.pages import Missing
from tests.support.checker.problem import name_of
from tests.support.checker.timeline import FOREVER
from tests.support.history import Op


class Acks:
    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.line, self.blame = ledger, ledger.line, ledger.blame

    # -- first pass: seqs ----------------------------------------------------------------------------------

    def take(self, op: Op) -> None:
        """A write that was acknowledged and not deduped is at the place in its answer."""
        answer = op.answer
        self._form(op, answer)
        if answer["deduped"]:
            return
        assert op.answered_at is not None
        first, last = self.line.span(op.sent_at, op.answered_at)
        write, era = self.ledger.write_of(op), self.ledger.home_era(first, last)
        if era is not None:
            place = self.ledger.place(write, era, answer["first_seq"], f"acknowledged @{op.answered_at}")
            if place is not None:
                self.ledger.acknowledge(place, op, first, last)

    def _form(self, op: Op, answer: dict[str, Any]) -> None:
        count, first, last = len(op.request["records"]), answer["first_seq"], answer["last_seq"]
        wrong = []
        if not answer["deduped"] and answer["count"] != count:
            wrong.append("count is not that of its records")
        if last != first + answer["count"] - 1 or first < 1:
            wrong.append("first_seq and last_seq do not fit the count")
        if "seqs" in answer and answer["seqs"] != list(range(first, last + 1)):
            wrong.append("seqs are not first_seq to last_seq")
        if "seqs" not in answer and op.request.get("return_seqs", True):
            wrong.append("no seqs")
        if answer["head_seq"] < last:
            wrong.append("the head is behind last_seq")
        if answer["created"] != (op.status == 201) or (
            answer["created"] and (answer["deduped"] or first != 1)
        ):
            wrong.append("created does not fit")
        if (
            op.request.get("if_last_seq") is not None
            and not answer["deduped"]
            and first != op.request["if_last_seq"] + 1
        ):
            wrong.append("if_last_seq did not hold")
        if answer["deduped"] and op.request.get("idempotency_key") is None:
            wrong.append("deduped without a key")
        shown = {name: answer[name] for name in answer if name not in ("seqs", "performance")}
        for text in wrong:
            rule = "condition" if "if_last_seq" in text else "ack"
            self.blame(rule, f"{text}: {name_of(op)}: {shown} {str(answer.get('seqs'))[:80]}")

    # -- second pass: retries ------------------------------------------------------------------------------

    def take_retry(self, op: Op) -> None:
        """A deduped write got the answer of an earlier one with its key, which no restart has lost since."""
        assert op.answered_at is not None
        answer = op.answer
        first, last = self.line.span(op.sent_at, op.answered_at)
        low, high = self.line.back[self.line.instance[first]], self.line.instance[last]
        unplaced: list[Write] = []
        era = self.ledger.home_era(first, last)
        for write in self.ledger.by_key.get(op.request.get("idempotency_key") or "", []):
            if era is not None and self.ledger.must_be_wiped(era, write):
                continue
            for place in write.places:
                fits = place.base == answer["first_seq"] and len(write.records) == answer["count"]
                if fits and low <= place.era.instance <= high:
                    self._told_again(place, op, first, last)
                    return
            if self._may_be_first(write, op, low, high):
                unplaced.append(write)
        if not unplaced:
            self.blame("dedupe", f"no earlier write with its key got {answer['first_seq']}: {name_of(op)}")
        elif era is not None and len(unplaced) == 1:
            place = self.ledger.place(
                unplaced[0], era, answer["first_seq"], f"answered to a retry @{op.answered_at}"
            )
            if place is not None:
                self._told_again(place, op, first, last)

    def _told_again(self, place: Place, op: Op, first: int, last: int) -> None:
        if self.ledger.home_era(first, last) is place.era:
            self.ledger.acknowledge(place, op, first, last)

    def _may_be_first(self, write: Write, op: Op, low: int, high: int) -> bool:
        """Whether it may have been written, at an unknown place."""
        assert op.answered_at is not None
        if not write.tries or write.sent > op.answered_at or len(write.records) != op.answer["count"]:
            return False
        places = sum(low <= place.era.instance <= high for place in write.places)
        if places and not (write.tries > places and self.ledger.may_write_twice(high)):
            return False
        return self.line.instance[write.last] >= low and self.line.instance[write.first] <= high

    def check_twice(self) -> None:
        """A write has one place, and so have all writes of one key, as long as the key is remembered."""
        for write in self.ledger.writes:
            # If it is unknown whether a drop came between two instances, they may be one.
            bases = {(self.line.back[place.era.instance], place.base) for place in write.places}
            if write.key is None and write.copy is None and len(bases) > 1:
                self.blame("twice", f"{name_of(write.ops[0])} is at {sorted(bases)}")
        for key, writes in self.ledger.by_key.items():
            places = {(p.era.instance, p.base): p for write in writes for p in write.places}
            tries = sum(write.tries for write in writes)
            ordered = [places[spot] for spot in sorted(places)]
            for one, two in itertools.pairwise(ordered):
                if one.era.instance != two.era.instance:
                    continue
                if tries < len(places) or not self._may_be_forgotten(one, two):
                    self.blame(
                        "twice",
                        f"key {key!r} was written at {one.base} by {name_of(one.write.ops[0])}, "
                        f"and at {two.base} by {name_of(two.write.ops[-1])}",
                    )

    def _may_be_forgotten(self, one: Place, two: Place) -> bool:
        line = self.line
        window = min(config["idempotency_window_ms"] for config in line.ever(FOREVER, one.era.instance))
        earlier, later = self._ts(one, after=False), self._ts(two, after=True)
        if not window or earlier is None or later is None or later - earlier > window:
            return True
        classes = {self.ledger.class_of(one.write), self.ledger.class_of(two.write)}
        if classes == {"fsync"}:
            return False
        sent, settled = min(one.write.sent, two.write.sent), max(one.write.settled, two.write.settled)
        return any(cut.kind != "drop" and sent < cut.end and cut.start < settled for cut in line.cuts)

    @staticmethod
    def _ts(place: Place, *, after: bool) -> int | None:
        """The latest (or earliest) moment at which it can have been written, from the records around it."""
        era = place.era
        seqs = sorted(seq for seq, placed in era.records.items() if placed.ts is not None)
        at = bisect_left(seqs, place.base) if after else bisect_right(seqs, place.end) - 1
        return era.records[seqs[at]].ts if 0 <= at < len(seqs) else None

    # -- third pass: conditions ----------------------------------------------------------------------------

    def check_condition(self, op: Op, missing: Missing) -> None:
        wanted = op.request.get("if_tag_last_seq")
        if wanted is None or op.answered_at is None or (op.ok and op.answer["deduped"]):
            return
        era = self.ledger.home_era(*self.line.span(op.sent_at, op.answered_at))
        if era is None:
            return
        if op.ok:
            self._newest_is(op, era, wanted["tag"], wanted["seq"], op.answer["first_seq"], missing)
        elif is_wrong_last_seq(op):
            actual = op.answer["error"]["detail"]["actual"]
            self._newest_is(op, era, wanted["tag"], actual, None, missing)

    def _newest_is(self, op: Op, era: Era, tag: str, seq: int, before: int | None, missing: Missing) -> None:
        """`seq` was the newest live record with this tag (0: there was none) when the write was decided."""
        assert op.answered_at is not None
        placed = era.records.get(seq)
        if placed is not None and placed.sent.tag != tag:
            self.blame("condition", f"seq {seq} has the tag {placed.sent.tag!r}, not {tag!r}: {name_of(op)}")
        segment = self.line.span(op.sent_at, op.answered_at)[0]
        seqs = era.tags.get(tag, [])
        for newer in seqs[bisect_right(seqs, seq) :]:
            other = era.records[newer]
            known = (
                newer < before if before is not None else self.ledger.solid_since(other, segment) < op.sent_at
            )
            if known and not missing.may_be_gone(era, other, op.answered_at) and not self._evictable(era, op):
                self.blame(
                    "condition", f"seq {newer} is newer than {seq} and has the tag {tag!r}: {name_of(op)}"
                )
                return

    def _evictable(self, era: Era, op: Op) -> bool:
        assert op.answered_at is not None
        if self.line.corrupted_at < op.answered_at or era.segments.start > 0 or len(era.segments) > 1:
            return True
        return any(
            config["ttl_ms"] or config["cap_records"] or config["cap_bytes"]
            for config in self.line.ever(op.answered_at, era.instance)
        )


def is_wrong_last_seq(op: Op) -> bool:
    return op.status == 409 and op.answer["error"]["code"] == "wrong_last_seq"
