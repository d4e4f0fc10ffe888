"""All that a shard does about forwards beside its engine, in one place: its flows, reads that catch up, ends of rules.

    CATCH_UP          the shard of a dest wants what this one has published: see forwarder.py
    FORWARD_TOTALS    how many copies rules have made; of one topic by name: it catches up first, see catch_up.py
    FORWARDS_CHECK    the catalog says which parts of rules this shard should have
    FORWARDS_GONE     said by this shard when a topic was dropped, and rules with it

Who drops a topic hears which rules went with it when the catalog has dropped them, too, or after ENDING_US. The catalog is
told until it answers; what a crash swallows is found by the next FORWARDS_CHECK.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from topics.engine.commands import forwards as fwd
from topics.engine.runtime.engine import Engine
from topics.link import wire
from topics.link.reports import ShardReport
from workers.forward import messages
from workers.forward.catch_up import LATE, CatchUps
from workers.forward.forwarder import Forwarder, Submit
from workers.forward.parts import check_parts
from workers.peers.links import OnReply, PeerLinks, Send

CATALOG_SHARD = 0
ENDING_US = 2_000_000
TELL_AGAIN_US = 1_000_000

Ended = list[tuple[int, str]]  # uid and name of rules
Ask = Callable[[int, int, bytes, bytes, OnReply], bool]


@dataclass(slots=True, eq=False)
class RuleRemoval:
    """Rules that went with a topic, and who waits for the end of them."""

    forwards: Ended
    answer: Callable[[], None] | None
    until_us: int
    again_at_us: int | None = None  # None: the catalog was told, and has not answered


@dataclass(slots=True, eq=False)
class TotalsQuery:
    """A wish for totals. Some of them rest on what is not synced yet, and come later."""

    peer: bytes
    request: wire.Request
    totals: dict[int, int]
    left: int = 1


class Forwarding:
    def __init__(
        self,
        engine: Engine,
        links: PeerLinks,
        *,
        shards: int,
        ask: Ask,
        submit: Submit,
        count: Callable[[TotalsQuery, fwd.TakeCopies], None],
        send: Send,
        now_us: Callable[[], int],
    ) -> None:
        """`ask` is of any shard, this one too, and never answers at once. `submit` and `count` are commands to the own
        engine, whose answers come to `forwarder.on_result` and `on_total`.
        """
        self._shard = engine.shard
        self._ask = ask
        self._count = count
        self._send = send
        self._now_us = now_us
        self.forwarder = Forwarder(engine, links, shards=shards, submit=submit, now_us=now_us)
        self.catch_ups = CatchUps(engine, links, self.forwarder, shards=shards, now_us=now_us)
        self._endings: list[RuleRemoval] = []
        self._ops: dict[int, Callable[[bytes, wire.Request], None]] = {
            wire.CATCH_UP: self._on_catch_up,
            wire.FORWARD_TOTALS: self._on_totals,
            wire.FORWARDS_CHECK: self._on_check,
        }

    # -- in ------------------------------------------------------------------------------------------------

    def receive(self, peer: bytes, request: wire.Request) -> bool:
        """Whether it was about forwards; a TopicsError is what the other side is to be told."""
        handler = self._ops.get(request.op)
        if handler is None:
            return False
        handler(peer, request)
        return True

    def set_peers(self, living: dict[int, int]) -> None:
        self.forwarder.set_peers(living)
        for ending in self._endings:
            if ending.again_at_us is not None:
                ending.again_at_us = self._now_us()

    def on_step(self, done: object) -> None:
        """The engine has taken a step of a rule."""
        if isinstance(done, fwd.OutflowClosed):
            self.forwarder.closed(done.uid)
        elif isinstance(done, fwd.InflowClosed):
            self.catch_ups.forget(done.uid)

    def _reply(self, peer: bytes, request: wire.Request, body: object) -> None:
        self._send(peer, request.id, 200, wire.INTERNAL, b"", messages.encode(body))

    def report(self, report: ShardReport) -> None:
        """What is to be told of it in metrics."""
        report.copy_batches = self.forwarder.batches_sent
        report.flows_owing = self.forwarder.flows_owing()
        report.catch_ups = self.catch_ups.rounds
        report.catch_ups_late = self.catch_ups.late

    # -- questions -----------------------------------------------------------------------------------------

    def _on_catch_up(self, peer: bytes, request: wire.Request) -> None:
        uids = messages.read_catch_up(request.body).uids
        self.forwarder.chase(uids, lambda behind: self._reply(peer, request, messages.CaughtUp(behind)))

    def _on_totals(self, peer: bytes, request: wire.Request) -> None:
        wish = messages.read_want_totals(request.body)
        topic = request.topic.decode("utf-8", "replace")
        if not topic or not self.catch_ups.hold(
            topic, peer, request, lambda: self._total(peer, request, wish)
        ):
            self._total(peer, request, wish)

    def _total(self, peer: bytes, request: wire.Request, wish: messages.WantTotals) -> None:
        counting = TotalsQuery(peer, request, {})
        for topic, uid in wish.inflows:
            log = self._shard.published.get(topic)
            inflow = log.inflows.get(uid) if log is not None and log.inflows is not None else None
            if log is None or inflow is None:
                continue
            if not (log.pending or log.deferred) or self._shard.read_only is not None:
                counting.totals[uid] = inflow.total
            else:  # what it counts may not be safe yet, or not be replayed: the engine knows when
                counting.left += 1
                rule = fwd.Forward(uid, inflow.name, "", topic)
                self._count(counting, fwd.TakeCopies(topic, fwd.Copies(rule, "", 0, [], (0, 0), 0, 0)))
        self._counted(counting)

    def on_total(self, counting: TotalsQuery, result: object) -> None:
        if isinstance(result, fwd.CopiesTaken):  # else the topic, or the rule, is gone
            counting.totals[result.uid] = result.total
        self._counted(counting)

    def _counted(self, counting: TotalsQuery) -> None:
        counting.left -= 1
        if not counting.left:
            is_late = bool(counting.request.flags & LATE)
            self._reply(counting.peer, counting.request, messages.ForwardTotals(counting.totals, is_late))

    def _on_check(self, peer: bytes, request: wire.Request) -> None:
        self._reply(peer, request, check_parts(self._shard, messages.read_check(request.body)))

    # -- rules that end with a topic -----------------------------------------------------------------------

    def on_dropped(self, forwards: Ended, answer: Callable[[], None]) -> None:
        """Tell the catalog; `answer` is called when it has dropped them, or when that takes too long."""
        for uid, _ in forwards:
            self.forwarder.closed(uid)
            self.catch_ups.forget(uid)
        now_us = self._now_us()
        ending = RuleRemoval(forwards, answer, now_us + ENDING_US, now_us)
        self._endings.append(ending)
        self._tell(ending)

    def _tell(self, ending: RuleRemoval) -> None:
        ending.again_at_us = None
        body = messages.encode(messages.ForwardsGone(ending.forwards))
        if not self._ask(CATALOG_SHARD, wire.FORWARDS_GONE, b"", body, partial(self._told, ending)):
            ending.again_at_us = self._now_us() + TELL_AGAIN_US

    def _told(self, ending: RuleRemoval, reply: wire.Reply | None) -> None:
        if reply is not None and reply.status == 200:
            self._ended(ending)
        else:
            ending.again_at_us = self._now_us() + TELL_AGAIN_US

    def _ended(self, ending: RuleRemoval) -> None:
        if ending in self._endings:
            self._endings.remove(ending)
            self._answer(ending)

    @staticmethod
    def _answer(ending: RuleRemoval) -> None:
        answer, ending.answer = ending.answer, None
        if answer is not None:
            answer()

    # -- time ----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        if self._endings:
            now_us = self._now_us()
            for ending in list(self._endings):
                if ending.until_us <= now_us:
                    self._answer(ending)
                if ending.again_at_us is not None and ending.again_at_us <= now_us:
                    self._tell(ending)
        self.catch_ups.tick()
        self.forwarder.tick()

    @property
    def wake_at_us(self) -> int | None:
        due = [self.forwarder.wake_at_us, self.catch_ups.wake_at_us]
        due += [ending.again_at_us for ending in self._endings]
        due += [ending.until_us for ending in self._endings if ending.answer is not None]
        return min((at_us for at_us in due if at_us is not None), default=None)
