"""What is done to forwards, step by step: each operation is a generator that yields what it waits for.

    make     checks ─▶ catalog: making ─▶ dest: inflow ─▶ source: outflow ─▶ catalog: active ─▶ answer
                 refused at a step: what is there already is closed, topics that were made for it go, the catalog forgets it
    change   checks ─▶ catalog: active, as it is said now ─▶ source: outflow ─▶ answer
    end      catalog: ending ─▶ dest: inflow closed, nothing comes in any more ─▶ source: outflow closed ─▶ catalog: gone
    check    whoever comes up is told what it should have; what it misses was dropped with a topic, so the rule is ended

Every step is logged by whoever takes it, and may be taken again. After a crash of this shard, rules that are neither active
nor gone are gone on with. A step at a worker that is down is taken when it is back. What a worker keeps of a rule that is
gone, or of an older version of it, is found by the check. So a rule is there in full or not at all, whoever dies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from topics.api.errors import (
    Forbidden,
    ForwardConflict,
    ForwardCycle,
    Throttled,
    TopicNotFound,
    TopicsError,
)
from topics.engine.commands.forwards import (
    CloseInflow,
    CloseOutflow,
    DropForward,
    Forward,
    InflowOpened,
    OpenInflow,
    OpenOutflow,
    OutflowOpened,
    PutForward,
)
from topics.engine.core.placement import shard_of
from topics.engine.runtime.engine import Engine
from topics.link import wire
from topics.link.watch import Find, FoundTopic
from workers.codec.replies import Rendered
from workers.forward import messages
from workers.forward.parts import digest_of
from workers.forward.requests import ForwardSpec, forward_dropped, forward_put
from workers.forward.rules.book import RuleBook

logger = logging.getLogger("topics.shard")

PAUSE_MS_MIN, PAUSE_MS_MAX = 50, 1_000
ENDED_AT_ONCE = 64  # rules; their steps are on their way together

_decode_found = msgspec.msgpack.Decoder(list[FoundTopic]).decode
_replace = msgspec.structs.replace


class NotReady(TopicsError):
    code = "not_ready"


class StepRefused(TopicsError):
    """Another worker has refused a step; a client gets its words."""

    def __init__(self, reply: wire.Reply) -> None:
        super().__init__(f"a step was refused with {reply.status}")
        self.reply = reply


@dataclass(slots=True)
class WorkerRequest:
    """A question to a worker. It is asked until there is an answer, if it is `urgent`, and else once."""

    shard: int
    op: int
    body: bytes
    urgent: bool = True


# What an operation waits for: something to be logged here, or the answers of workers. One that is not urgent may have None.
Wait: TypeAlias = PutForward | tuple[DropForward, ...] | list[WorkerRequest]
Steps: TypeAlias = Generator[Wait, Any, Rendered | None]
Doing: TypeAlias = Generator[Wait, Any, None]
TotalMs: TypeAlias = Callable[[], float]


class RuleOperations:
    def __init__(
        self,
        engine: Engine,
        book: RuleBook,
        *,
        shards: int,
        max_forwards: int,
        now_us: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._book = book
        self._own = engine.config.shard
        self._shards = shards
        self._max_forwards = max_forwards  # 0: no bound
        self._now_us = now_us
        self.living: dict[int, int] = {}  # the other workers: shard → incarnation
        self.checks: dict[int, tuple[int, int]] = {}  # shards to check: when, and the last pause in ms

    # -- making --------------------------------------------------------------------------------------------

    def put(self, wish: ForwardSpec, total_ms: TotalMs) -> Steps:
        known = self._book.find(wish.forward.name)
        if known is not None and not self._book.is_shown(known):
            yield from self.go_on_with(known.uid)
        elif known is not None:
            # A worker that has not been looked at since it came up may have dropped a topic of this rule.
            for shard in {
                shard_of(known.dest, self._shards),
                *self._source_shards(known),
            } & self.checks.keys():
                yield from self.check(shard, PAUSE_MS_MIN)
        known = self._book.find(wish.forward.name)
        yield from self._check_wish(wish, known)
        if known is None:
            yield from self._make(wish)
            return forward_put(wish.forward, True, total_ms())
        made_source, made_dest = known.made_source, known.made_dest
        changed = _replace(
            wish.forward, uid=known.uid, state="active", made_source=made_source, made_dest=made_dest
        )
        if changed != known:
            yield from self._change(changed)
        return forward_put(changed, False, total_ms())

    def _check_wish(self, wish: ForwardSpec, known: Forward | None) -> Doing:
        """In the contract's order."""
        forward, book = wish.forward, self._book
        if not wish.create_dest:
            yield from self._check_dest(forward.dest)
        if book.has_other_source(forward):
            raise ForwardConflict(
                f"topic {forward.dest!r} has copies of another topic already; a dest has one source",
                topic=forward.dest,
                reason="router_dest_fan_in",
            )
        if known is not None:
            _check_same_way(wish, known)
        elif self._max_forwards and book.count >= self._max_forwards:
            most = self._max_forwards
            raise Throttled(f"there are {most} routers already", limit="max_routers", max=most)
        # What closed a circle was allowed to. To put another rule of this circle again changes nothing about that.
        if not forward.allow_cycle and (known is None or known.allow_cycle):
            cycle = book.find_cycle(forward.source, forward.dest)
            if cycle is not None:
                seen = wish.prefixes
                raise ForwardCycle([name if seen is None or name.startswith(seen) else "*" for name in cycle])

    def _check_dest(self, dest: str) -> Doing:
        shard = shard_of(dest, self._shards)
        self._need_up([shard])
        (reply,) = yield [WorkerRequest(shard, wire.FIND, msgspec.msgpack.encode(Find([dest])))]
        if reply.status != 200:
            raise StepRefused(reply)
        if not _decode_found(reply.body):
            raise TopicNotFound(dest)

    def _make(self, wish: ForwardSpec) -> Doing:
        self._need_up([shard_of(wish.forward.dest, self._shards), *self._source_shards(wish.forward)])
        forward = _replace(wish.forward, uid=self._engine.shard.forward_uid + 1)
        yield PutForward(forward)
        yield from self._build(forward, create_dest=wish.create_dest)

    def _build(self, forward: Forward, *, create_dest: bool) -> Doing:
        """The parts of a rule that the catalog has as "making"; or it is undone, and the refusal raised."""
        opening = OpenInflow(forward.dest, forward.uid, forward.name, create_dest, forward.source)
        (reply,) = yield [_step(shard_of(forward.dest, self._shards), opening)]
        if reply.status != 200:
            yield (DropForward(forward.uid),)
            raise StepRefused(reply)
        inflow = messages.read_step_done(reply.body)
        assert isinstance(inflow, InflowOpened)
        forward = _replace(forward, made_dest=inflow.made_dest)
        replies = yield [_step(shard, OpenOutflow(forward)) for shard in self._source_shards(forward)]
        refused = next((reply for reply in replies if reply.status != 200), None)
        if refused is not None:
            yield from self._close_outflows(forward)
            yield from self._close_inflow(forward, undo=forward.made_dest)
            yield (DropForward(forward.uid),)
            if any(map(_is_ok, replies)):  # which may have copied something before it was closed
                text = "a worker could not take its part, so the router is undone; other parts may have copied records"
                raise NotReady(text, outcome="unknown")
            raise StepRefused(refused)
        opened = [messages.read_step_done(reply.body) for reply in replies]
        made_source = any(isinstance(outflow, OutflowOpened) and outflow.made_source for outflow in opened)
        yield PutForward(_replace(forward, state="active", made_source=made_source))

    def _change(self, changed: Forward) -> Doing:
        """A crash between the two is found by the check of the source's shard."""
        shards = self._source_shards(changed)
        self._need_up(shards)
        yield PutForward(changed)
        replies = yield [_step(shard, OpenOutflow(changed)) for shard in shards]
        if not all(map(_is_ok, replies)):
            # It is logged, and a refusal would say that nothing was changed.
            self.check_soon(shards)
            text = "a worker cannot take the change now; it goes on when it can"
            raise NotReady(text, outcome="unknown")

    # -- ending --------------------------------------------------------------------------------------------

    def drop(self, name: str, prefixes: tuple[str, ...] | None, total_ms: TotalMs) -> Steps:
        rule = self._book.find(name)
        if rule is not None:
            if not rule.is_covered_by(prefixes):
                raise Forbidden("this key may not use that router")
            self._need_up([shard_of(rule.dest, self._shards)])
            yield from self._end(rule)
        return forward_dropped(name, rule is not None, total_ms())

    def end_gone(self, uids: list[int]) -> Steps:
        """Many at a time: a topic may have had thousands. They need no word that they are ending: a part of each is gone
        for good, and the check of its shard finds that.
        """
        for at in range(0, len(uids), ENDED_AT_ONCE):
            found = [self._book.get(uid) for uid in uids[at : at + ENDED_AT_ONCE]]
            rules = [rule for rule in found if rule is not None]
            if rules:
                yield from self._end_all(rules)
        return None

    def _end_all(self, rules: list[Forward]) -> Doing:
        """As `_end`, of rules that went with a topic."""
        closings = [
            _step(shard_of(rule.dest, self._shards), CloseInflow(rule.dest, rule.uid)) for rule in rules
        ]
        replies = yield closings
        self._look_again_at(closings, replies)
        outflows = [(shard, rule) for rule in rules for shard in self._source_shards(rule)]
        closings = [
            _step(shard, CloseOutflow(rule.uid, rule.source), urgent=False) for shard, rule in outflows
        ]
        replies = yield closings
        self._look_again_at(closings, replies)
        yield tuple(DropForward(rule.uid) for rule in rules)

    def _look_again_at(self, asked: list[WorkerRequest], replies: list[wire.Reply | None]) -> None:
        self.check_soon(
            question.shard for question, reply in zip(asked, replies, strict=True) if not _is_ok(reply)
        )

    def _end(self, rule: Forward) -> Doing:
        """The inflow first and in any case: from then on nothing comes in. An outflow whose worker is down is closed by the
        check when it is back.
        """
        if rule.state != "ending":
            rule = _replace(rule, state="ending")
            yield PutForward(rule)
        yield from self._close_inflow(rule, undo=False)
        yield from self._close_outflows(rule)
        yield (DropForward(rule.uid),)

    def _close_inflow(self, rule: Forward, *, undo: bool) -> Doing:
        shard = shard_of(rule.dest, self._shards)
        (reply,) = yield [_step(shard, CloseInflow(rule.dest, rule.uid, undo))]
        if reply.status != 200:  # who cannot log that cannot take copies either
            self.check_soon([shard])

    def _close_outflows(self, rule: Forward) -> Doing:
        shards = self._source_shards(rule)
        replies = yield [_step(shard, CloseOutflow(rule.uid, rule.source), urgent=False) for shard in shards]
        self.check_soon(shard for shard, reply in zip(shards, replies, strict=True) if not _is_ok(reply))

    # -- after a crash -------------------------------------------------------------------------------------

    def go_on_with(self, uid: int) -> Steps:
        rule = self._book.get(uid)
        if rule is not None and (rule.state == "ending" or uid in self._book.gone):
            yield from self._end(rule)
        elif rule is not None and rule.state == "making":
            try:
                yield from self._build(rule, create_dest=True)
            except StepRefused as refused:  # whoever asked for it was told that nobody knows
                fields = {"router": rule.name, "why": str(refused)}
                logger.warning("a forward is undone", extra={"fields": fields})
        return None

    def check(self, shard: int, pause_ms: int) -> Steps:
        body = messages.encode(self._parts_of(shard))
        (reply,) = yield [WorkerRequest(shard, wire.FORWARDS_CHECK, body, urgent=False)]
        pause_ms = min(2 * pause_ms, PAUSE_MS_MAX)
        # Until all is done; who is down is looked at when it comes.
        if shard in self.living or shard == self._own:
            self.checks.setdefault(shard, (self._now_us() + pause_ms * 1000, pause_ms))
        if not _is_ok(reply):
            return None
        missed = messages.read_missed(reply.body)
        for uid in (*missed.inflows, *missed.outflows, *missed.stale_outflows):
            yield from self._repair(shard, uid, missed)
        strays: list[messages.Step] = [
            *(CloseInflow(topic, uid) for topic, uid in missed.stray_inflows if self._book.get(uid) is None),
            *(CloseOutflow(uid) for uid in missed.stray_outflows if self._book.get(uid) is None),
        ]
        for stray in strays:
            (reply,) = yield [_step(shard, stray, urgent=False)]
            if not _is_ok(reply):
                return None
        self.checks.pop(shard, None)
        return None

    def _repair(self, shard: int, uid: int, missed: messages.ForwardsMissed) -> Doing:
        rule = self._book.get(uid)
        if rule is None or rule.state != "active":
            return
        if uid in missed.inflows or (uid in missed.outflows and not rule.is_pattern):
            yield from self._end(rule)
        else:
            yield [_step(shard, OpenOutflow(rule), urgent=False)]

    def _parts_of(self, shard: int) -> messages.ForwardsCheck:
        """What a shard should have of the rules that are active."""
        check = messages.ForwardsCheck([], [])
        for rule in self._book:
            if rule.state != "active":
                continue
            if shard_of(rule.dest, self._shards) == shard:
                check.inflows.append((rule.dest, rule.uid))
            if shard in self._source_shards(rule):
                check.outflows.append((rule.uid, digest_of(rule)))
        return check

    def check_soon(self, shards: Iterable[int]) -> None:
        for shard in shards:
            self.checks.setdefault(shard, (self._now_us() + PAUSE_MS_MAX * 1000, PAUSE_MS_MAX))

    # -- where things are ----------------------------------------------------------------------------------

    def _source_shards(self, forward: Forward) -> list[int]:
        if forward.is_pattern:
            return list(range(self._shards))
        return [shard_of(forward.source, self._shards)]

    def _need_up(self, shards: Iterable[int]) -> None:
        """Before anything is begun: a client is better told to come back than left without knowing."""
        for shard in shards:
            if shard != self._own and shard not in self.living:
                raise NotReady("a shard that this router needs is not ready; try again shortly", shard=shard)


def _check_same_way(wish: ForwardSpec, known: Forward) -> None:
    if (known.source, known.dest) == (wish.forward.source, wish.forward.dest):
        return
    # The refusal below would name topics that the key may not know of.
    if not known.is_covered_by(wish.prefixes):
        raise Forbidden("this key may not use the router of that name")
    raise ForwardConflict(
        f"router {known.name!r} copies {known.source!r} to {known.dest!r}; delete it first to point it elsewhere",
        router=known.name,
        reason="router_repoint_forbidden",
        existing_source=known.source,
        existing_dest=known.dest,
    )


def _step(shard: int, step: messages.Step, *, urgent: bool = True) -> WorkerRequest:
    return WorkerRequest(shard, wire.FORWARD_STEP, messages.encode_step(step), urgent)


def _is_ok(reply: wire.Reply | None) -> bool:
    return reply is not None and reply.status == 200
