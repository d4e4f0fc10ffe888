"""Copies on their way: from topics of this shard, by their outflows, to their dests, here or at another worker.

    shard.flowing ──▶ its turn: `serve` ──▶ a batch of each flow ──▶ TakeCopies at the dest's shard ──▶ the dest's mark
          ▲                                                                                                  │
          └──────────── there is more, or a pause is over ◀──────────────────────────────────────────────────┘

When a topic has its turn the shard's scheduler decides, among all that it delivers.

A *flow* is one rule and one topic that it copies. The dest is the authority on how far it is: what is known here is what it
said last, and nothing of it is stored. After a start of either side the first message of a flow only asks. A batch may be
sent as often as need be: the dest takes what lies above its mark.

    idle ──▶ ready ──▶ sent ──▶ idle       nothing is owed
               ▲         ├────▶ ready      there is more
               │         ├────▶ resting    there is a little more, and the topic has many dests
               │         └────▶ paused     full, down, refused: 50 ms … 1 s, or until somebody wants to catch up
               └── crowded                 as much as may be is on its way to that shard

Copies of a topic with many dests are sent in rounds: see copy_rounds.py.

A *chase* is what a dest asks for before it is read: each flow of its rules that owes something is followed until the dest
has what was published when it was asked for, or the flow cannot go on.

Bounds: one batch of a flow on its way, BATCH_RECORDS and BATCH_BYTES in it; BATCHES_MAX and BYTES_MAX to one shard.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from topics.api.errors import TopicsError
from topics.api.limits import KIB, MIB
from topics.engine.commands import forwards as fwd
from topics.engine.core.placement import shard_of
from topics.engine.core.priority import effective_priority
from topics.engine.runtime.engine import Engine
from topics.engine.shard.scheduler import WAIT_MAX_MS, Scheduler
from topics.engine.topic.log import TopicLog
from topics.link import wire
from workers.forward import messages as forward_messages
from workers.forward.copy_rounds import CopyRounds, CopyState
from workers.peers.links import PeerLinks

logger = logging.getLogger("topics.shard")

BATCH_RECORDS = 1024
BATCH_BYTES = 1 * MIB
BATCHES_MAX = 128
BYTES_MAX = 16 * MIB
BATCH_COST = (
    16 * KIB
)  # of a batch beside its bytes, for the scheduler: both its ends share a core, about 50 µs
READS_KEPT = 16  # each up to BATCH_BYTES
LEAVES_MAX = 64  # topics that are gone, told of in one go
PAUSE_MS_MIN, PAUSE_MS_MAX = 50, 1_000
CHASE_US = 1_000_000  # whoever asked for it does not wait any longer
SWEEP_MIN = 64  # so few topics may be known here after they are gone

IDLE, READY, SENT, CROWDED, RESTING, PAUSED, GONE = range(7)
UNKNOWN = -1


@dataclass(slots=True, eq=False)
class CatchUpTarget:
    """What somebody wants to catch up with."""

    until_us: int
    done: Callable[[list[int]], None]  # with the rules that could not get there
    left: int = 1
    behind: list[int] = field(default_factory=list)

    def part_done(self) -> None:
        self.left -= 1
        if not self.left:
            self.done(self.behind)


@dataclass(slots=True, eq=False)
class OutgoingFlow:
    uid: int
    stream: CopiedTopic
    shard: int  # of the dest
    state: int = IDLE
    mark: int = UNKNOWN  # up to here the dest has all
    pause_ms: int = 0
    paused_until_us: int = 0
    chases: list[tuple[int, CatchUpTarget]] = field(default_factory=list)  # up to which seq


Read = tuple[
    tuple[int, int, object], fwd.Copies | None
]  # head, where it begins and what is wanted; what was found


@dataclass(slots=True, eq=False, kw_only=True)
class CopiedTopic(CopyState):
    """A topic that is copied."""

    log: TopicLog
    flows: dict[int, OutgoingFlow] = field(default_factory=dict)  # by rule
    ready: deque[OutgoingFlow] = field(default_factory=deque)
    outflows: tuple[int, ...] = ()  # as they were when `flows` was made from them
    head: int = UNKNOWN  # as it was when idle flows were last looked at


@dataclass(slots=True, eq=False)
class CopyBatch:
    flow: OutgoingFlow
    after: int
    upto: int
    bytes: int

    @property
    def only_asks(self) -> bool:
        return self.after == self.upto


@dataclass(slots=True)
class DestinationWindow:
    """To one shard: what is on its way, and who waits until there is less."""

    batches: int = 0
    bytes: int = 0
    crowd: Scheduler[OutgoingFlow] = field(default_factory=lambda: Scheduler(_priority_of))

    @property
    def is_crowded(self) -> bool:
        return self.batches >= BATCHES_MAX or self.bytes + BATCH_BYTES > BYTES_MAX


def _priority_of(flow: OutgoingFlow) -> float:
    log = flow.stream.log
    return effective_priority(log.view.config, log.last_read_ts or None, log.last_touch)


Submit = Callable[[CopyBatch, fwd.TakeCopies], None]
Wanted = tuple[int, object, bool]  # after which seq, by which filter, whether it may circle


class Forwarder:
    def __init__(
        self,
        engine: Engine,
        links: PeerLinks,
        *,
        shards: int,
        submit: Submit,
        now_us: Callable[[], int],
    ) -> None:
        self._shard = engine.shard
        self._own = engine.config.shard
        self._links = links
        self._submit = submit  # copies for a topic of this shard; the answer comes to `on_result`
        self._now_us = now_us
        self._streams: dict[int, CopiedTopic] = {}
        self._read_of = (0, UNKNOWN)  # a topic and its head
        self._reads: dict[Wanted, fwd.Copies] = {}  # of it
        self._by_rule: dict[int, dict[CopiedTopic, None]] = {}
        self._swept = 0  # streams after the last sweep
        self._owing: dict[int, dict[OutgoingFlow, None]] = {}  # flows that are not idle, by rule
        self._ways = [DestinationWindow() for _ in range(shards)]
        # Whose topics were dropped: the dests may forget how far they were.
        self._leaving: deque[OutgoingFlow] = deque()
        self._pausing: list[tuple[int, int, OutgoingFlow]] = []  # until when, a number, who
        self._pauses = 0
        self._rounds: CopyRounds[CopiedTopic] = CopyRounds(now_us)
        self._chases: deque[CatchUpTarget] = deque()  # in the order of their ends
        self._peers: dict[int, int] = {}
        self._is_closed = False
        self.batches_sent = 0

    # -- lives and deaths ----------------------------------------------------------------------------------

    def set_peers(self, living: dict[int, int]) -> None:
        """A dest that has started anew may have less than before."""
        new = {shard for shard, number in living.items() if self._peers.get(shard) != number}
        self._peers = dict(living)
        new.discard(self._own)
        if not new:
            return
        for stream in self._streams.values():
            for flow in stream.flows.values():
                if flow.shard in new:
                    flow.mark = UNKNOWN
                    flow.pause_ms = 0
                    if flow.state in (IDLE, RESTING, PAUSED):
                        self._make_ready(flow)

    def closed(self, uid: int) -> None:
        """A rule has ended here, or the topics that it copies have changed."""
        for stream in list(self._by_rule.get(uid, ())):
            self._match_rules(stream)

    def close(self) -> None:
        """Nothing is waited for: what is owed is asked for after the next start."""
        self._is_closed = True

    @property
    def has_pending_copies(self) -> bool:
        """Whether something is to be sent or answered that nothing stands in the way of."""
        if self._shard.copies_due:
            return True
        return any(flow.state != PAUSED for flows in self._owing.values() for flow in flows)

    @property
    def has_waiting_readers(self) -> bool:
        """Whether somebody waits for copies."""
        return bool(self._chases)

    def flows_owing(self) -> int:
        self._look_at_news()
        return sum(map(len, self._owing.values()))

    # -- time ----------------------------------------------------------------------------------------------

    @property
    def wake_at_us(self) -> int | None:
        if self._is_closed:
            return None
        due = [self._pausing[0][0]] if self._pausing else []
        if self._chases:
            due.append(self._chases[0].until_us)
        if self._rounds.wake_at_us is not None:
            due.append(self._rounds.wake_at_us)
        return min(due, default=None)

    def tick(self) -> None:
        """Let time pass; who may go on is in `shard.flowing` afterwards."""
        if self._pausing or self._chases:
            self._let_time_pass(self._now_us())
        for stream in self._rounds.rested():
            for flow in stream.flows.values():
                if flow.state == RESTING:
                    self._make_ready(flow)
        if self._leaving and not self._is_closed:
            self._take_leave()
        for way in self._ways:
            if way.crowd and not way.batches:  # whoever was let in had nothing to send
                self._let_in(way)

    def _let_time_pass(self, now_us: int) -> None:
        while self._pausing and self._pausing[0][0] <= now_us:
            until_us, _, flow = heapq.heappop(self._pausing)
            if flow.state == PAUSED and flow.paused_until_us == until_us:
                self._make_ready(flow)
        while self._chases and (self._chases[0].until_us <= now_us or not self._chases[0].left):
            chase = self._chases.popleft()
            if chase.left:
                chase.left = 0
                chase.done(chase.behind)

    # -- a topic -------------------------------------------------------------------------------------------

    def has_new_copies(self, log: TopicLog) -> bool:
        """A topic has something new: those of its flows that owe something are ready. Whether there are any."""
        return bool(self._line_up(log).ready)

    def send_copies(self, log: TopicLog, room: int) -> int:
        """A batch for each flow of a topic that owes something, until the room is used up; returns what was used. If
        something is left the topic is in `shard.flowing` again.
        """
        if self._is_closed:
            return 0
        stream = self._line_up(log)
        self._rounds.begin(stream, len(stream.flows))
        if self._read_of != (log.id, log.view.head) or len(self._reads) > READS_KEPT:
            self._read_of, self._reads = (log.id, log.view.head), {}
        used = 0
        while stream.ready and used < room:
            flow = stream.ready.popleft()
            if flow.state == READY:
                used += self._send(flow)
        if stream.ready:
            self._shard.copies_due[log.id] = log
        else:
            self._reads = {}
        return used

    def resume_copies(self, log: TopicLog, uid: int) -> None:
        """What its flow could not read has come from the cold tier."""
        stream = self._streams.get(log.id)
        flow = stream.flows.get(uid) if stream is not None else None
        if flow is not None and flow.state == PAUSED:
            flow.pause_ms = 0
            self._make_ready(flow)

    def _look_at_news(self) -> None:
        """What was published since the last turn for copies; the others were looked at."""
        for log in list(self._shard.copies_due.values()):
            self._line_up(log)

    def _line_up(self, log: TopicLog) -> CopiedTopic:
        """Idle flows that owe something now are ready, or rest."""
        stream = self._streams.get(log.id)
        if stream is None:
            stream = self._add_stream(log)
        if stream.outflows is not log.outflows or log.dropped:
            self._match_rules(stream)
        head = log.view.head
        if head != stream.head:
            stream.head = head
            for flow in stream.flows.values():
                if flow.state == IDLE and flow.mark < head:
                    if self._may_rest(flow):
                        self._rest(flow)
                    else:
                        self._owe(flow)
                elif flow.state == RESTING and not self._may_rest(flow):
                    self._owe(flow)
        return stream

    def _add_stream(self, log: TopicLog) -> CopiedTopic:
        if len(self._streams) > 2 * self._swept + SWEEP_MIN:
            for stream in [stream for stream in self._streams.values() if stream.log.dropped]:
                self._match_rules(stream)
            self._swept = len(self._streams)
        self._streams[log.id] = stream = CopiedTopic(log=log)
        return stream

    def _match_rules(self, stream: CopiedTopic) -> None:
        """A flow for each rule of the topic, and none for others."""
        log = stream.log
        stream.outflows = log.outflows
        stream.head = UNKNOWN
        uids = dict.fromkeys(() if log.dropped else log.outflows)
        for uid in [uid for uid in stream.flows if uid not in uids]:
            flow = stream.flows.pop(uid)
            self._remove(flow)
            if log.dropped and uid in self._shard.outflows:
                self._leaving.append(flow)
            del self._by_rule[uid][stream]
            if not self._by_rule[uid]:
                del self._by_rule[uid]
        for uid in uids:
            if uid not in stream.flows:
                dest = self._shard.outflows[uid].forward.dest
                stream.flows[uid] = OutgoingFlow(uid, stream, shard_of(dest, len(self._ways)))
                self._by_rule.setdefault(uid, {})[stream] = None
        if not stream.flows:
            self._streams.pop(log.id, None)

    def _remove(self, flow: OutgoingFlow) -> None:
        self._owe_nothing(flow, GONE)
        for _, chase in flow.chases:
            chase.part_done()
        flow.chases = []

    # -- states of a flow ----------------------------------------------------------------------------------

    def _owe(self, flow: OutgoingFlow) -> None:
        flow.state = READY
        flow.stream.ready.append(flow)
        self._owing.setdefault(flow.uid, {})[flow] = None

    def _make_ready(self, flow: OutgoingFlow) -> None:
        self._owe(flow)
        log = flow.stream.log
        self._shard.copies_due[log.id] = log

    def _may_rest(self, flow: OutgoingFlow) -> bool:
        stream = flow.stream
        return flow.mark != UNKNOWN and self._rounds.may_rest(stream, stream.log.view.head - flow.mark)

    def _rest(self, flow: OutgoingFlow) -> None:
        flow.state = RESTING
        self._owing.setdefault(flow.uid, {})[flow] = None
        self._rounds.rest(flow.stream)

    def _owe_nothing(self, flow: OutgoingFlow, state: int) -> None:
        flow.state = state
        flows = self._owing.get(flow.uid)
        if flows is not None:
            flows.pop(flow, None)
            if not flows:
                del self._owing[flow.uid]

    def _pause(self, flow: OutgoingFlow, *, is_full: bool = False) -> None:
        """The same once more, after a while. Nobody waits for it who wants to catch up; and unless the dest is full, and so
        as far as it can be, they are told.
        """
        flow.state = PAUSED
        flow.pause_ms = min(max(2 * flow.pause_ms, PAUSE_MS_MIN), PAUSE_MS_MAX)
        flow.paused_until_us = self._now_us() + flow.pause_ms * 1000
        self._pauses += 1
        heapq.heappush(self._pausing, (flow.paused_until_us, self._pauses, flow))
        chases, flow.chases = flow.chases, []
        for _, chase in chases:
            if not is_full:
                chase.behind.append(flow.uid)
            chase.part_done()

    def _go_on(self, flow: OutgoingFlow) -> None:
        """The dest has said how far it is. Those who waited for it hear that last: they may ask for more at once, and must find
        the flow as it is then.
        """
        flow.pause_ms = 0
        if flow.mark >= flow.stream.log.view.head:
            self._owe_nothing(flow, IDLE)
        elif not flow.chases and self._may_rest(flow):
            self._rest(flow)
        else:
            self._make_ready(flow)
        self._reach(flow)

    @staticmethod
    def _reach(flow: OutgoingFlow) -> None:
        """Those who waited for no more than what the dest has."""
        if flow.chases:
            reached = [chase for seq, chase in flow.chases if seq <= flow.mark]
            flow.chases = [entry for entry in flow.chases if entry[0] > flow.mark]
            for chase in reached:
                chase.part_done()

    # -- out -----------------------------------------------------------------------------------------------

    def _send(self, flow: OutgoingFlow) -> int:
        way = self._ways[flow.shard]
        if way.is_crowded:
            flow.state = CROWDED
            self._crowd(flow)
            return 0
        try:
            copies = self._copies(flow)
        except (TopicsError, OSError) as error:  # one topic that cannot be read must not take the shard down
            logger.error("copies cannot be read", extra={"fields": {"error": str(error)}})
            self._pause(flow)
            return BATCH_COST
        if copies is None:
            self._nothing_found(flow)
            return 0
        flow.state = SENT
        if not self._post(flow, copies):
            self._pause(flow)
        return BATCH_COST + len(copies.frames)

    def _post(self, flow: OutgoingFlow, copies: fwd.Copies) -> bool:
        """Whether it is on its way."""
        batch = CopyBatch(flow, copies.after, copies.upto, len(copies.frames))
        way = self._ways[flow.shard]
        way.batches += 1
        way.bytes += batch.bytes
        self.batches_sent += 1
        dest = copies.forward.dest
        if flow.shard == self._own:
            self._submit(batch, fwd.TakeCopies(dest, copies))
            return True
        body, heard = forward_messages.encode(copies), partial(self._heard, batch)
        if self._links.ask(flow.shard, wire.COPIES, dest.encode(), body, heard):
            return True
        self._leave(batch)
        return False

    def _take_leave(self) -> None:
        """What is not said, because this shard or that one dies, costs a few bytes there until the rule ends."""
        for _ in range(min(len(self._leaving), LEAVES_MAX)):
            flow = self._leaving[0]
            outflow, way = self._shard.outflows.get(flow.uid), self._ways[flow.shard]
            if outflow is not None and (way.is_crowded or self._is_closed):
                return
            self._leaving.popleft()
            if outflow is not None:
                copies = self._shard.empty_copies(flow.stream.log, outflow.forward, 0)
                copies.is_gone = True
                self._post(flow, copies)

    def _copies(self, flow: OutgoingFlow) -> fwd.Copies | None:
        """One read for all rules that want the same, also over several slices of a topic."""
        log = flow.stream.log
        forward = self._shard.outflows[flow.uid].forward
        if flow.mark == UNKNOWN:
            return self._shard.empty_copies(log, forward, 0)
        wanted = flow.mark, forward.filter, forward.allow_cycle
        found = self._reads.get(wanted)
        if found is None:
            found = self._shard.copies_after(log, forward, flow.mark, BATCH_RECORDS, BATCH_BYTES)
            if found is None:
                return None
            self._reads[wanted] = found
        if found.forward is forward:
            return found
        copies = self._shard.empty_copies(log, forward, flow.mark)
        copies.upto, copies.frames, copies.lost = found.upto, found.frames, found.lost
        return copies

    def _nothing_found(self, flow: OutgoingFlow) -> None:
        if flow.mark >= flow.stream.log.view.head:
            self._go_on(flow)
        else:
            self._pause(flow)  # what is there cannot be read yet

    # -- answers -------------------------------------------------------------------------------------------

    def _heard(self, batch: CopyBatch, reply: wire.Reply | None) -> None:
        """Of another worker; None: nobody knows."""
        if reply is None:
            self._not_taken(batch)
        elif reply.status == 200:
            try:
                self._taken(batch, forward_messages.read_taken(reply.body))
            except TopicsError as error:
                logger.error("an answer to copies cannot be read", extra={"fields": {"error": str(error)}})
                self._not_taken(batch)
        else:
            self._not_taken(batch)

    def on_result(self, batch: CopyBatch, result: object) -> None:
        """Of the own engine."""
        if isinstance(result, fwd.CopiesTaken):
            self._taken(batch, result)
        else:
            self._not_taken(batch)

    def _taken(self, batch: CopyBatch, taken: fwd.CopiesTaken) -> None:
        self._leave(batch)
        flow = batch.flow
        if flow.state != SENT:
            return  # it has ended
        flow.mark = taken.mark
        if taken.mark > batch.after:
            flow.pause_ms = 0
        if taken.full or (taken.mark <= batch.after and not batch.only_asks):
            self._reach(flow)
            self._pause(flow, is_full=taken.full)
        else:
            self._go_on(flow)

    def _not_taken(self, batch: CopyBatch) -> None:
        """That shard is down, or has refused it, or may have taken it all the same: it is asked again how far it is."""
        self._leave(batch)
        flow = batch.flow
        flow.mark = UNKNOWN
        if flow.state == SENT:
            self._pause(flow)

    def _leave(self, batch: CopyBatch) -> None:
        way = self._ways[batch.flow.shard]
        way.batches -= 1
        way.bytes -= batch.bytes
        self._let_in(way)

    def _crowd(self, flow: OutgoingFlow) -> None:
        """Wait until there is less on its way to that shard; those whose copies somebody waits for go first."""
        now_ms = self._now_us() // 1000
        since_ms = now_ms - WAIT_MAX_MS if flow.chases else now_ms
        self._ways[flow.shard].crowd.add(flow, now_ms, since_ms=since_ms)

    def _let_in(self, way: DestinationWindow) -> None:
        """One for one: those who were let in before may not have sent anything yet."""
        while (entry := way.crowd.pick(self._now_us() // 1000)) is not None:
            way.crowd.done(entry, BATCH_COST)
            if entry.item.state == CROWDED:
                self._make_ready(entry.item)
                return

    # -- catching up ---------------------------------------------------------------------------------------

    def chase(self, uids: Iterable[int], done: Callable[[list[int]], None]) -> None:
        """Bring all that these rules have published so far to their dests. `done` hears of it, perhaps at once."""
        self._look_at_news()
        chase = CatchUpTarget(self._now_us() + CHASE_US, done)
        for uid in uids:
            for flow in list(self._owing.get(uid, ())):
                flow.chases.append((flow.stream.log.view.head, chase))
                chase.left += 1
                if flow.state in (RESTING, PAUSED):
                    self._make_ready(flow)
                elif flow.state == CROWDED:
                    self._crowd(flow)  # where it was it is passed over
                if flow.state == READY:
                    flow.stream.ready.appendleft(flow)
                    self._shard.expedite(flow.stream.log)
        if chase.left > 1:
            self._chases.append(chase)
        chase.part_done()
