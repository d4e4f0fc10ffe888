"""Heads, floors and counts: they never go back, and match the known records."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import dataclass, field

from tests.support.checker.acks import is_wrong_last_seq
from tests.support.checker.ledger import Era, Ledger
from tests.support.checker.pages import Missing, Read
from tests.support.checker.problem import name_of
from tests.support.checker.timeline import FOREVER
from tests.support.history import Op

CHANGES = ("write", "delete", "put", "drop")


@dataclass(slots=True)
class Observation:
    """Numbers that an answer gave for a topic."""

    op: Op
    sent: int
    answered: int
    first: int
    last: int
    head: int | None = None
    earliest: int | None = None
    count: int | None = None
    recorded: bool = False  # repeated from a first write: true when that was written, not now
    staged: bool = False  # including writes that are not visible yet and may still fail


@dataclass(slots=True)
class HighestBefore:
    """The highest value that was known before a moment."""

    moments: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    whys: list[Op] = field(default_factory=list)

    def fill(self, rows: list[tuple[int, int, Op]]) -> HighestBefore:
        best = -1
        for moment, value, why in sorted(rows, key=lambda row: row[0]):
            if value > best:
                best = value
                self.moments.append(moment)
                self.values.append(value)
                self.whys.append(why)
        return self

    def before(self, moment: int) -> int:
        at = bisect_left(self.moments, moment)
        return self.values[at - 1] if at else -1

    def why(self, moment: int) -> str:
        """The answer with the highest value before a moment."""
        return name_of(self.whys[bisect_left(self.moments, moment) - 1])


def observations_of(ledger: Ledger, op: Op) -> list[Observation]:
    if op.answered_at is None:
        return []
    first, last = ledger.line.span(op.sent_at, op.answered_at)
    observation = Observation(op, op.sent_at, op.answered_at, first, last)
    answer = op.answer
    if not op.ok:
        if op.request.get("if_last_seq") is None or not is_wrong_last_seq(op):
            return []
        observation.head, observation.staged = answer["error"]["detail"]["actual"], True
        return [observation]
    if op.kind == "list":
        answer = next(row for row in op.answer["topics"] if row["topic"] == ledger.topic)
    if op.kind == "write":
        observation.head, observation.recorded = answer["head_seq"], answer["deduped"]
    elif op.kind in ("diff", "state", "delete", "list", "last"):
        observation.head = answer["head_seq"]
        observation.earliest = answer.get("earliest_seq")
        observation.count = answer.get("count")
    else:
        return []
    return [observation]


class Counters:
    def __init__(self, ledger: Ledger, missing: Missing, observations: list[Observation]) -> None:
        self.ledger, self.missing, self.observations = ledger, missing, observations
        self.line, self.blame = ledger.line, ledger.blame
        self._counts: dict[int, tuple[list[int], list[int], list[int], list[int]]] = {}

    def check(self) -> None:
        by_era: dict[int, list[Observation]] = {}
        by_segment: dict[int, list[Observation]] = {}
        for observation in self.observations:
            if self.line.era[observation.first] == self.line.era[observation.last]:
                by_era.setdefault(self.line.era[observation.first], []).append(observation)
            if observation.first == observation.last:
                by_segment.setdefault(observation.first, []).append(observation)
        for era in self.ledger.eras:
            self._heads(era, by_era.get(era.number, []))
        for segment, observations in by_segment.items():
            self._floors(segment, observations)
            for observation in observations:
                if observation.count is not None:
                    self._count(segment, observation)

    # -- heads ---------------------------------------------------------------------------------------------

    def _heads(self, era: Era, observations: list[Observation]) -> None:
        rows = [
            (observation.answered, observation.head, observation.op)
            for observation in observations
            if observation.head is not None and not observation.staged
        ]
        for place in era.places:
            known = min(place.known_at, place.write.settled)
            if known < FOREVER:
                rows.append((known, place.end, place.write.ops[0]))
        known_heads = HighestBefore().fill(rows)
        highest = self._highest(era)
        for observation in observations:
            if observation.head is None:
                continue
            low = known_heads.before(observation.sent)
            if observation.head < low and not observation.recorded:
                why = known_heads.why(observation.sent)
                rule = "condition" if observation.staged else "head"
                self.blame(
                    rule, f"head {observation.head} of {name_of(observation.op)} is behind {low} of {why}"
                )
            if highest is not None and observation.answered < self.line.skipped:
                top = max(0, highest.before(observation.answered))
                top += self.ledger.unplaced[era.number].before(observation.answered)
                if observation.head > top:
                    rule = "condition" if observation.staged else "head"
                    self.blame(
                        rule,
                        f"head {observation.head} of {name_of(observation.op)} is past anything written: {top}",
                    )
            torn = era.batch_at(observation.head)
            if torn is not None and torn.end > observation.head:
                self.blame(
                    "batch",
                    f"head {observation.head} of {name_of(observation.op)} is inside {torn.base} to {torn.end}",
                )
        self._orders(era, known_heads)

    def _highest(self, era: Era) -> HighestBefore | None:
        """The highest seq that can have been assigned; None when a crash may have skipped some."""
        line = self.line
        if (
            line.back[era.instance] != era.instance
            or line.corrupted_at < FOREVER
            or self.ledger.may_have_holes
        ):
            return None
        places = [p for other in self.ledger.eras if other.instance == era.instance for p in other.places]
        return HighestBefore().fill([(place.write.sent, place.end, place.write.ops[0]) for place in places])

    def _orders(self, era: Era, known_heads: HighestBefore) -> None:
        """A write comes after everything that was known when it was sent."""
        for place in era.places:
            if place.write.last < era.segments.start:
                continue  # carried over
            low = known_heads.before(place.write.sent)
            if place.base <= low:
                what, why = name_of(place.write.ops[0]), known_heads.why(place.write.sent)
                self.blame("order", f"{what} got {place.base}, although the head was {low} before: {why}")

    # -- floors --------------------------------------------------------------------------------------------

    def _floors(self, segment: int, observations: list[Observation]) -> None:
        rows = [(s.answered, s.earliest, s.op) for s in observations if s.earliest is not None]
        known = HighestBefore().fill(rows)
        era = self.ledger.eras[self.line.era[segment]]
        lasting = self._lasting(era, segment)
        for observation in observations:
            if observation.earliest is None or observation.head is None:
                continue
            low = known.before(observation.sent)
            if (
                observation.earliest < low and self.line.corrupted_at > observation.answered
            ):  # damage is found again by each reader
                why = known.why(observation.sent)
                self.blame(
                    "earliest",
                    f"earliest_seq {observation.earliest} of {name_of(observation.op)} is behind {low} of {why}",
                )
            if not 1 <= observation.earliest <= observation.head + 1:
                self.blame(
                    "earliest",
                    f"earliest_seq {observation.earliest} of {name_of(observation.op)}, head {observation.head}",
                )
            for seq, since in lasting:
                if seq >= observation.earliest:
                    break
                if since < observation.sent:
                    self.blame(
                        "earliest",
                        f"earliest_seq {observation.earliest} of {name_of(observation.op)}: where is seq {seq}?",
                    )
                    break

    def _lasting(self, era: Era, segment: int) -> list[tuple[int, int]]:
        """Records that nothing can have removed, and since when they are known."""
        if self._retains_less(era, FOREVER) or self.line.corrupted_at < FOREVER:
            return []
        found = []
        for seq in sorted(era.records):
            placed = era.records[seq]
            since = self.ledger.solid_since(placed, segment)
            if since < FOREVER and not self.missing.may_be_gone(era, placed, FOREVER):
                found.append((seq, since))
        return found

    def _retains_less(self, era: Era, by: int) -> bool:
        return any(
            config["ttl_ms"]
            or ((config["cap_records"] or config["cap_bytes"]) and config["discard"] == "old")
            for config in self.line.ever(by, era.instance)
        )

    def _caps_tags(self, era: Era) -> bool:
        return any(config["cap_per_tag"] for config in self.line.ever(FOREVER, era.instance))

    # -- a state and a page with nothing in between ---------------------------------------------------------

    def check_quiet(self, pages: list[Read], ops: list[Op]) -> None:
        """If nothing changed between them, a state equals what the next page shows. Losses of a source change a dest
        at a time that no write shows.
        """
        if self.ledger.may_have_holes:
            return
        changes = sorted(
            (op.sent_at, self.line.settled(op)) for op in ops if op.kind in CHANGES and not op.refused
        )
        starts = [start for start, _ in changes]
        ends = list(itertools.accumulate((end for _, end in changes), max))
        states = sorted(
            (s for s in self.observations if s.op.kind in ("state", "list")), key=lambda s: s.answered
        )
        answered = [observation.answered for observation in states]
        for page in pages:
            at = bisect_left(answered, page.sent)
            if not at or page.segment is None or not _is_whole(page) or self._expires(page):
                continue
            state = states[at - 1]
            before = bisect_left(starts, page.answered)
            if state.first != page.segment or (before and ends[before - 1] > state.sent):
                continue
            answer = page.op.answer
            shown = (answer["head_seq"], answer["earliest_seq"], len(page.seqs))
            if (state.head, state.earliest, state.count) != shown:
                told = f"head {state.head}, earliest {state.earliest}, count {state.count}"
                self.blame("count", f"{told} of {name_of(state.op)}, and then {shown} of {name_of(page.op)}")

    def _expires(self, page: Read) -> bool:
        assert page.era is not None
        line = self.line
        if line.corrupted_at < page.answered or any(
            c["ttl_ms"] for c in line.ever(page.answered, page.era.instance)
        ):
            return True
        unplaced = self.ledger.unplaced[page.era.number].some_before(page.answered)
        records = itertools.chain(
            (placed.sent for placed in page.era.records.values()),
            (record for write in unplaced for record in write.records),
        )
        return any(record.ttl_ms for record in records)

    # -- counts --------------------------------------------------------------------------------------------

    def _count(self, segment: int, observation: Observation) -> None:
        assert observation.count is not None
        era = self.ledger.eras[self.line.era[segment]]
        solid, going, sent, gone = self._moments(era, segment)
        least = bisect_left(solid, observation.sent) - bisect_left(going, observation.answered)
        if self._retains_less(era, observation.answered) or self.line.corrupted_at < observation.answered:
            least = 0
        if observation.count < least:
            self.blame(
                "count",
                f"{observation.count} records of {name_of(observation.op)}: there are at least {least}",
            )
        if self.line.back[era.instance] != era.instance or self.line.corrupted_at < observation.answered:
            return
        most = bisect_left(sent, observation.answered) - bisect_left(gone, observation.sent)
        most += self.ledger.unplaced[era.number].before(observation.answered)
        if observation.count > most:
            self.blame(
                "count", f"{observation.count} records of {name_of(observation.op)}: there are at most {most}"
            )

    def _moments(self, era: Era, segment: int) -> tuple[list[int], list[int], list[int], list[int]]:
        """When records were known, could be removed, were sent, and were removed."""
        found = self._counts.get(segment)
        if found is None:
            solid, going, sent, gone = [], [], [], []
            for placed in era.records.values():
                since = self.ledger.solid_since(placed, segment)
                if since < FOREVER:
                    solid.append(since)
                    if self.missing.may_be_gone(era, placed, FOREVER):
                        capped = placed.sent.ttl_ms or placed.may_go == FOREVER or self._caps_tags(era)
                        going.append(-1 if capped else placed.may_go)
                sent.append(placed.sent.write.sent)
                if segment in placed.gone:
                    gone.append(placed.gone[segment])
            found = self._counts[segment] = (sorted(solid), sorted(going), sorted(sent), sorted(gone))
        return found


def _is_whole(page: Read) -> bool:
    """From the beginning to the head, without a filter."""
    request, answer = page.op.request, page.op.answer
    filtered = page.nodes or page.match or request.get("from_ts") or request.get("from_seq")
    return not filtered and bool(answer["caught_up"])
