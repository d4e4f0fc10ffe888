"""Forwarding service of a shard: sending of copies, catch-up of reads, totals, and rules dropped with a topic.

    CATCH_UP          the shard of a dest requests everything that this one has published: see forwarder.py
    FORWARD_TOTALS    number of copies made by rules; a named topic catches up first, see catch_up.py
    FORWARDS_CHECK    the catalog lists the parts of rules that this shard should have
    FORWARDS_GONE     sent by this shard when rules were dropped with a topic

The reply to the drop of a topic, with the names of its rules, waits until the catalog has dropped them, too, or for
REMOVAL_US. The catalog is told until it replies; after a crash, the next FORWARDS_CHECK finds the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from topics.engine.commands import forwards as fwd
from topics.engine.runtime.boundary import ShardEngine
from topics.engine.runtime.stats import Stats
from topics.link import wire
from topics.link.reports import ShardReport
from workers.forward import messages
from workers.forward.catch_up import CatchUps
from workers.forward.forwarder import Forwarder, Submit
from workers.peers.links import OnReply, PeerLinks, Send

CATALOG_SHARD = 0
REMOVAL_US = 2_000_000
RETRY_US = 1_000_000

DroppedRules = list[tuple[int, str]]  # uid and name of rules
Ask = Callable[[int, int, bytes, bytes, OnReply], bool]


@dataclass(slots=True, eq=False)
class RuleRemoval:
    """Rules that were dropped with a topic, and the reply that waits for the catalog."""

    forwards: DroppedRules
    answer: Callable[[], None] | None
    until_us: int
    retry_at_us: int | None = None  # None: waiting for the catalog's reply


@dataclass(slots=True, eq=False)
class TotalsQuery:
    """A request for totals. Totals that depend on unsynced records come later."""

    peer: bytes
    request: wire.Request
    totals: dict[int, int]
    left: int = 1


def check_rules(stats: Stats, check: messages.ForwardsCheck) -> messages.ForwardsMissed:
    """How the flows of this shard differ from those that the catalog expects."""
    missed = messages.ForwardsMissed()
    if stats.read_only is not None:
        # Its log may not be fully replayed, and nothing can be corrected before a restart, after which it is checked again.
        return missed
    for topic, uid in check.inflows:
        if uid not in stats.inflows(topic):
            missed.inflows.append(uid)
    known = stats.outflows()
    for uid, digest in check.outflows:
        forward = known.get(uid)
        if forward is None:
            missed.outflows.append(uid)
        elif messages.digest_of(forward) != digest:
            missed.stale_outflows.append(uid)
    inflows = {uid for _, uid in check.inflows}
    missed.stray_inflows = [(topic, uid) for topic, uid in stats.all_inflows() if uid not in inflows]
    outflows = {uid for uid, _ in check.outflows}
    missed.stray_outflows = [uid for uid in known if uid not in outflows]
    return missed


class Forwarding:
    def __init__(
        self,
        engine: ShardEngine,
        links: PeerLinks,
        *,
        shards: int,
        ask: Ask,
        submit: Submit,
        count: Callable[[TotalsQuery, fwd.TakeCopies], None],
        send: Send,
        now_us: Callable[[], int],
    ) -> None:
        """`ask` sends a request to any shard, including this one, and never replies before it returns. `submit` and `count`
        queue commands for this shard's engine; their results go to `forwarder.on_result` and `on_total`.
        """
        self._stats = engine.stats
        self._ask = ask
        self._count = count
        self._send = send
        self._now_us = now_us
        self.forwarder = Forwarder(engine, links, shards=shards, submit=submit, now_us=now_us)
        self.catch_ups = CatchUps(engine, links, self.forwarder, shards=shards, now_us=now_us)
        self._removals: list[RuleRemoval] = []
        self._ops: dict[int, Callable[[bytes, wire.Request], None]] = {
            wire.CATCH_UP: self._on_catch_up,
            wire.FORWARD_TOTALS: self._on_totals,
            wire.FORWARDS_CHECK: self._on_check,
        }

    # -- in ------------------------------------------------------------------------------------------------

    def receive(self, peer: bytes, request: wire.Request) -> bool:
        """Handle a request about forwards; False: it is not one. A TopicsError is sent as the reply."""
        handler = self._ops.get(request.op)
        if handler is None:
            return False
        handler(peer, request)
        return True

    def set_peers(self, living: dict[int, int]) -> None:
        self.forwarder.set_peers(living)
        for removal in self._removals:
            if removal.retry_at_us is not None:
                removal.retry_at_us = self._now_us()

    def on_step(self, done: object) -> None:
        """The engine has executed a step of a rule."""
        if isinstance(done, fwd.OutflowClosed):
            self.forwarder.rule_closed(done.uid)
        elif isinstance(done, fwd.InflowClosed):
            self.catch_ups.forget(done.uid)

    def _reply(self, peer: bytes, request: wire.Request, body: object) -> None:
        self._send(peer, request.id, wire.OK, wire.MSGPACK, b"", messages.encode(body))

    def report(self, report: ShardReport) -> None:
        """Add the metrics of forwarding."""
        report.copy_batches = self.forwarder.batches_sent
        report.flows_owing = self.forwarder.flows_owing()
        report.catch_ups = self.catch_ups.rounds
        report.catch_ups_late = self.catch_ups.late

    # -- requests ------------------------------------------------------------------------------------------

    def _on_catch_up(self, peer: bytes, request: wire.Request) -> None:
        uids = messages.read_catch_up(request.body).uids
        self.forwarder.catch_up(uids, lambda behind: self._reply(peer, request, messages.CaughtUp(behind)))

    def _on_totals(self, peer: bytes, request: wire.Request) -> None:
        wanted = messages.read_want_totals(request.body)
        topic = request.topic.decode("utf-8", "replace")
        if not topic or not self.catch_ups.hold(
            topic, peer, request, lambda: self._read_totals(peer, request, wanted)
        ):
            self._read_totals(peer, request, wanted)

    def _read_totals(self, peer: bytes, request: wire.Request, wanted: messages.WantTotals) -> None:
        query = TotalsQuery(peer, request, {})
        for topic, uid in wanted.inflows:
            found = self._stats.inflow_total(topic, uid)
            if found is None:
                continue
            name, total = found
            if total is not None:
                query.totals[uid] = total
            else:  # the total may include unsynced records, or not be replayed yet: let the engine answer
                query.left += 1
                rule = fwd.Forward(uid, name, "", topic)
                self._count(query, fwd.TakeCopies(topic, fwd.Copies(rule, "", 0, [], (0, 0), 0, 0)))
        self._part_done(query)

    def on_total(self, query: TotalsQuery, result: object) -> None:
        if isinstance(result, fwd.CopiesTaken):  # else the topic, or the rule, is gone
            query.totals[result.uid] = result.total
        self._part_done(query)

    def _part_done(self, query: TotalsQuery) -> None:
        query.left -= 1
        if not query.left:
            is_late = bool(query.request.flags & wire.LATE)
            self._reply(query.peer, query.request, messages.ForwardTotals(query.totals, is_late))

    def _on_check(self, peer: bytes, request: wire.Request) -> None:
        self._reply(peer, request, check_rules(self._stats, messages.read_check(request.body)))

    # -- rules dropped with a topic ------------------------------------------------------------------------

    def on_dropped(self, forwards: DroppedRules, answer: Callable[[], None]) -> None:
        """Tell the catalog; `answer` is called when it has dropped the rules, or after REMOVAL_US."""
        for uid, _ in forwards:
            self.forwarder.rule_closed(uid)
            self.catch_ups.forget(uid)
        now_us = self._now_us()
        removal = RuleRemoval(forwards, answer, now_us + REMOVAL_US, now_us)
        self._removals.append(removal)
        self._announce(removal)

    def _announce(self, removal: RuleRemoval) -> None:
        removal.retry_at_us = None
        body = messages.encode(messages.ForwardsGone(removal.forwards))
        if not self._ask(CATALOG_SHARD, wire.FORWARDS_GONE, b"", body, partial(self._on_reply, removal)):
            removal.retry_at_us = self._now_us() + RETRY_US

    def _on_reply(self, removal: RuleRemoval, reply: wire.Reply | None) -> None:
        if reply is not None and reply.code == wire.OK:
            self._finish(removal)
        else:
            removal.retry_at_us = self._now_us() + RETRY_US

    def _finish(self, removal: RuleRemoval) -> None:
        if removal in self._removals:
            self._removals.remove(removal)
            self._answer(removal)

    @staticmethod
    def _answer(removal: RuleRemoval) -> None:
        answer, removal.answer = removal.answer, None
        if answer is not None:
            answer()

    # -- time ----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        if self._removals:
            now_us = self._now_us()
            for removal in list(self._removals):
                if removal.until_us <= now_us:
                    self._answer(removal)
                if removal.retry_at_us is not None and removal.retry_at_us <= now_us:
                    self._announce(removal)
        self.catch_ups.tick()
        self.forwarder.tick()

    @property
    def wake_at_us(self) -> int | None:
        due = [self.forwarder.wake_at_us, self.catch_ups.wake_at_us]
        due += [removal.retry_at_us for removal in self._removals]
        due += [removal.until_us for removal in self._removals if removal.answer is not None]
        return min((at_us for at_us in due if at_us is not None), default=None)
