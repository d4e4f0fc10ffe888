"""Operations on forwarding rules: create, change, delete and check, as generators that yield what they wait for.

    create   checks ─▶ catalog: making ─▶ dest: inflow ─▶ source: outflow ─▶ catalog: active ─▶ reply
                 if a step is refused: close what is open, drop topics created for the rule, remove it from the catalog
    change   checks ─▶ catalog: active, new version ─▶ source: outflow ─▶ reply
    delete   catalog: ending ─▶ dest: inflow closed, no more copies accepted ─▶ source: outflow closed ─▶ catalog: removed
    check    a restarted worker gets the list of flows that it should have; if it misses one, it was dropped with a topic,
             so the rule is deleted

Every step is logged by the shard that executes it, and is idempotent. After a crash of this shard, operations on rules that
are neither active nor removed are resumed. A step at a worker that is down is executed when it is back. Flows of removed
rules, or of an older version, are found by the check. So a rule exists completely or not at all, whichever process dies.
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
from topics.engine.runtime.boundary import ShardEngine
from topics.link import wire
from topics.link.rules import RuleDropped, RulePut, RuleResult, RuleSpec
from topics.link.watch import Find, FoundTopic
from workers.forward import messages
from workers.forward.rules.book import RuleBook

logger = logging.getLogger("topics.shard")

PAUSE_MS_MIN, PAUSE_MS_MAX = 50, 1_000
DELETE_BATCH = 64  # rules whose steps are in flight together

_decode_found = msgspec.msgpack.Decoder(list[FoundTopic]).decode
_replace = msgspec.structs.replace


class NotReady(TopicsError):
    code = "not_ready"


class StepRefused(TopicsError):
    """Another worker has refused a step; the client gets that reply."""

    def __init__(self, reply: wire.Reply) -> None:
        super().__init__(f"a step was refused: {reply.failure.message}")
        self.reply = reply


@dataclass(slots=True)
class WorkerRequest:
    """A request to a worker; with `retry` it is repeated until there is a reply."""

    shard: int
    op: int
    body: bytes
    retry: bool = True


# What an operation waits for: commands logged by this shard, or replies of workers. Without `retry` a reply may be None.
Wait: TypeAlias = PutForward | tuple[DropForward, ...] | list[WorkerRequest]
Steps: TypeAlias = Generator[Wait, Any, RuleResult | None]
SubSteps: TypeAlias = Generator[Wait, Any, None]


class RuleOperations:
    def __init__(
        self,
        engine: ShardEngine,
        book: RuleBook,
        *,
        shards: int,
        max_forwards: int,
        now_us: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._book = book
        self._own = engine.stats.shard
        self._shards = shards
        self._max_forwards = max_forwards  # 0: unlimited
        self._now_us = now_us
        self.living: dict[int, int] = {}  # the other workers: shard → incarnation
        self.checks: dict[int, tuple[int, int]] = {}  # shards to check: time, last pause in ms

    # -- create and change ---------------------------------------------------------------------------------

    def put(self, spec: RuleSpec) -> Steps:
        known = self._book.find(spec.forward.name)
        if known is not None and not self._book.is_shown(known):
            yield from self.resume(known.uid)
        elif known is not None:
            # A worker that was not checked since its restart may have dropped a topic of this rule.
            for shard in {
                shard_of(known.dest, self._shards),
                *self._source_shards(known),
            } & self.checks.keys():
                yield from self.check(shard, PAUSE_MS_MIN)
        known = self._book.find(spec.forward.name)
        yield from self._check_spec(spec, known)
        if known is None:
            yield from self._make(spec)
            return RulePut(spec.forward, True)
        made_source, made_dest = known.made_source, known.made_dest
        changed = _replace(
            spec.forward, uid=known.uid, state="active", made_source=made_source, made_dest=made_dest
        )
        if changed != known:
            yield from self._change(changed)
        return RulePut(changed, False)

    def _check_spec(self, spec: RuleSpec, known: Forward | None) -> SubSteps:
        """In the order of the HTTP contract."""
        forward, book = spec.forward, self._book
        if not spec.create_dest:
            yield from self._check_dest(forward.dest)
        if book.has_other_source(forward):
            raise ForwardConflict(
                f"topic {forward.dest!r} already has another source; a dest can have only one",
                topic=forward.dest,
                reason="router_dest_fan_in",
            )
        if known is not None:
            _check_unchanged(spec, known)
        elif self._max_forwards and book.count >= self._max_forwards:
            most = self._max_forwards
            raise Throttled(f"there are {most} routers, which is the limit", limit="max_routers", max=most)
        # A cycle can only exist if the rule that closed it was allowed to; putting another rule of it again changes nothing.
        if not forward.allow_cycle and (known is None or known.allow_cycle):
            cycle = book.find_cycle(forward.source, forward.dest)
            if cycle is not None:
                seen = spec.prefixes
                raise ForwardCycle([name if seen is None or name.startswith(seen) else "*" for name in cycle])

    def _check_dest(self, dest: str) -> SubSteps:
        shard = shard_of(dest, self._shards)
        self._require_up([shard])
        (reply,) = yield [WorkerRequest(shard, wire.FIND, msgspec.msgpack.encode(Find([dest])))]
        if reply.code != wire.OK:
            raise StepRefused(reply)
        if not _decode_found(reply.body):
            raise TopicNotFound(dest)

    def _make(self, spec: RuleSpec) -> SubSteps:
        self._require_up([shard_of(spec.forward.dest, self._shards), *self._source_shards(spec.forward)])
        forward = _replace(spec.forward, uid=self._engine.stats.last_forward_uid + 1)
        yield PutForward(forward)
        yield from self._build(forward, create_dest=spec.create_dest)

    def _build(self, forward: Forward, *, create_dest: bool) -> SubSteps:
        """Open the flows of a rule in the state "making". If a step is refused, undo it and raise the refusal."""
        opening = OpenInflow(forward.dest, forward.uid, forward.name, create_dest, forward.source)
        (reply,) = yield [_step(shard_of(forward.dest, self._shards), opening)]
        if reply.code != wire.OK:
            yield (DropForward(forward.uid),)
            raise StepRefused(reply)
        inflow = messages.read_step_done(reply.body)
        assert isinstance(inflow, InflowOpened)
        forward = _replace(forward, made_dest=inflow.made_dest)
        replies = yield [_step(shard, OpenOutflow(forward)) for shard in self._source_shards(forward)]
        refused = next((reply for reply in replies if reply.code != wire.OK), None)
        if refused is not None:
            yield from self._close_outflows(forward)
            yield from self._close_inflow(forward, undo=forward.made_dest)
            yield (DropForward(forward.uid),)
            if any(map(_is_ok, replies)):  # which may have copied records before they were closed
                text = "a worker refused, so the router was removed; other workers may have copied records"
                raise NotReady(text, outcome="unknown")
            raise StepRefused(refused)
        opened = [messages.read_step_done(reply.body) for reply in replies]
        made_source = any(isinstance(outflow, OutflowOpened) and outflow.made_source for outflow in opened)
        yield PutForward(_replace(forward, state="active", made_source=made_source))

    def _change(self, changed: Forward) -> SubSteps:
        """After a crash between the two steps, the check of the source's shard finds the difference."""
        shards = self._source_shards(changed)
        self._require_up(shards)
        yield PutForward(changed)
        replies = yield [_step(shard, OpenOutflow(changed)) for shard in shards]
        if not all(map(_is_ok, replies)):
            # The change is logged, and a refusal would mean that nothing was changed.
            self.check_soon(shards)
            text = "a worker cannot apply the change now; it will when it is ready"
            raise NotReady(text, outcome="unknown")

    # -- delete --------------------------------------------------------------------------------------------

    def drop(self, name: str, prefixes: tuple[str, ...] | None) -> Steps:
        rule = self._book.find(name)
        if rule is not None:
            if not rule.is_covered_by(prefixes):
                raise Forbidden("this key may not use that router")
            self._require_up([shard_of(rule.dest, self._shards)])
            yield from self._end(rule)
        return RuleDropped(name, rule is not None)

    def end_gone(self, uids: list[int]) -> Steps:
        """Delete rules that were dropped with a topic, in batches: there may be thousands. The state "ending" need not be
        logged: a flow of each rule is gone for good, which the check of its shard finds.
        """
        for at in range(0, len(uids), DELETE_BATCH):
            found = [self._book.get(uid) for uid in uids[at : at + DELETE_BATCH]]
            rules = [rule for rule in found if rule is not None]
            if rules:
                yield from self._end_all(rules)
        return None

    def _end_all(self, rules: list[Forward]) -> SubSteps:
        """Like `_end`, for rules that were dropped with a topic."""
        closings = [
            _step(shard_of(rule.dest, self._shards), CloseInflow(rule.dest, rule.uid)) for rule in rules
        ]
        replies = yield closings
        self._check_failed(closings, replies)
        outflows = [(shard, rule) for rule in rules for shard in self._source_shards(rule)]
        closings = [
            _step(shard, CloseOutflow(rule.uid, rule.source), retry=False) for shard, rule in outflows
        ]
        replies = yield closings
        self._check_failed(closings, replies)
        yield tuple(DropForward(rule.uid) for rule in rules)

    def _check_failed(self, asked: list[WorkerRequest], replies: list[wire.Reply | None]) -> None:
        self.check_soon(
            question.shard for question, reply in zip(asked, replies, strict=True) if not _is_ok(reply)
        )

    def _end(self, rule: Forward) -> SubSteps:
        """Close the inflow first, so that no more copies are accepted. If the worker of an outflow is down, the check
        closes it later.
        """
        if rule.state != "ending":
            rule = _replace(rule, state="ending")
            yield PutForward(rule)
        yield from self._close_inflow(rule, undo=False)
        yield from self._close_outflows(rule)
        yield (DropForward(rule.uid),)

    def _close_inflow(self, rule: Forward, *, undo: bool) -> SubSteps:
        shard = shard_of(rule.dest, self._shards)
        (reply,) = yield [_step(shard, CloseInflow(rule.dest, rule.uid, undo))]
        if reply.code != wire.OK:  # a shard that cannot log this cannot accept copies either
            self.check_soon([shard])

    def _close_outflows(self, rule: Forward) -> SubSteps:
        shards = self._source_shards(rule)
        replies = yield [_step(shard, CloseOutflow(rule.uid, rule.source), retry=False) for shard in shards]
        self.check_soon(shard for shard, reply in zip(shards, replies, strict=True) if not _is_ok(reply))

    # -- after a crash -------------------------------------------------------------------------------------

    def resume(self, uid: int) -> Steps:
        rule = self._book.get(uid)
        if rule is not None and (rule.state == "ending" or uid in self._book.gone):
            yield from self._end(rule)
        elif rule is not None and rule.state == "making":
            try:
                yield from self._build(rule, create_dest=True)
            except StepRefused as refused:  # the client was told that the outcome is unknown
                fields = {"router": rule.name, "why": str(refused)}
                logger.warning("a forward could not be created and was removed", extra={"fields": fields})
        return None

    def check(self, shard: int, pause_ms: int) -> Steps:
        body = messages.encode(self._parts_of(shard))
        (reply,) = yield [WorkerRequest(shard, wire.FORWARDS_CHECK, body, retry=False)]
        pause_ms = min(2 * pause_ms, PAUSE_MS_MAX)
        # Scheduled again until it succeeds; a worker that is down is checked when it restarts.
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
            (reply,) = yield [_step(shard, stray, retry=False)]
            if not _is_ok(reply):
                return None
        self.checks.pop(shard, None)
        return None

    def _repair(self, shard: int, uid: int, missed: messages.ForwardsMissed) -> SubSteps:
        rule = self._book.get(uid)
        if rule is None or rule.state != "active":
            return
        if uid in missed.inflows or (uid in missed.outflows and not rule.is_pattern):
            yield from self._end(rule)
        else:
            yield [_step(shard, OpenOutflow(rule), retry=False)]

    def _parts_of(self, shard: int) -> messages.ForwardsCheck:
        """The flows of active rules that a shard should have."""
        check = messages.ForwardsCheck([], [])
        for rule in self._book:
            if rule.state != "active":
                continue
            if shard_of(rule.dest, self._shards) == shard:
                check.inflows.append((rule.dest, rule.uid))
            if shard in self._source_shards(rule):
                check.outflows.append((rule.uid, messages.digest_of(rule)))
        return check

    def check_soon(self, shards: Iterable[int]) -> None:
        for shard in shards:
            self.checks.setdefault(shard, (self._now_us() + PAUSE_MS_MAX * 1000, PAUSE_MS_MAX))

    # -- placement -----------------------------------------------------------------------------------------

    def _source_shards(self, forward: Forward) -> list[int]:
        if forward.is_pattern:
            return list(range(self._shards))
        return [shard_of(forward.source, self._shards)]

    def _require_up(self, shards: Iterable[int]) -> None:
        """Checked before anything begins: a refusal is better for the client than an unknown outcome."""
        for shard in shards:
            if shard != self._own and shard not in self.living:
                raise NotReady("a shard that this router needs is not ready; try again shortly", shard=shard)


def _check_unchanged(spec: RuleSpec, known: Forward) -> None:
    if (known.source, known.dest) == (spec.forward.source, spec.forward.dest):
        return
    # The error below would reveal topics outside of the key's prefixes.
    if not known.is_covered_by(spec.prefixes):
        raise Forbidden("this key may not use the router of that name")
    raise ForwardConflict(
        f"router {known.name!r} copies {known.source!r} to {known.dest!r}; delete it first to change its source or dest",
        router=known.name,
        reason="router_repoint_forbidden",
        existing_source=known.source,
        existing_dest=known.dest,
    )


def _step(shard: int, step: messages.Step, *, retry: bool = True) -> WorkerRequest:
    return WorkerRequest(shard, wire.FORWARD_STEP, messages.encode_step(step), retry)


def _is_ok(reply: wire.Reply | None) -> bool:
    return reply is not None and reply.code == wire.OK
