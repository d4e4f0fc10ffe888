"""Sends the copies of routers: from source topics on this shard to destinations on this shard or another.

    due topics of the engine ──▶ `send_copies` ──▶ a batch per flow ──▶ TakeCopies at the dest's shard ──▶ the dest's mark
             ▲                                                                                             │
             └──────────── more to copy, or a pause has ended ◀────────────────────────────────────────────┘

The shard's scheduler decides when copies of a topic are sent, among everything that it delivers.

A *flow* is a pair of a rule and a source topic. Its *mark* is the last seq that the dest has seen. The dest stores it;
here it is only cached. After a restart of either side, the first message of a flow only queries it. A batch may be sent any
number of times: the dest ignores records up to its mark.

    idle ──▶ ready ──▶ sent ──▶ idle       nothing left to copy
               ▲         ├────▶ ready      more to copy
               │         ├────▶ delayed    a little more to copy, and the topic has many dests
               │         └────▶ paused     full, down or refused: for 50 ms … 1 s, or until a reader wants to catch up
               └── queued                  the window of that shard is full

Copies of a topic with many dests are sent in rounds: see copy_rounds.py.

A *catch-up* precedes a read of a dest: it waits until each flow of the dest's rules has copied everything that was
published when it began, or cannot continue.

Limits: one batch in flight per flow, with BATCH_RECORDS and BATCH_BYTES; BATCHES_MAX and BYTES_MAX in flight to one shard.
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
from topics.engine.commands.copies import SourceTopic
from topics.engine.core.placement import shard_of
from topics.engine.core.priority import effective_priority
from topics.engine.core.scheduler import WAIT_MAX_MS, Scheduler
from topics.engine.runtime.boundary import ShardEngine
from topics.link import wire
from workers.forward import messages as forward_messages
from workers.forward.copy_rounds import CopyRounds, CopyState
from workers.peers.links import PeerLinks

logger = logging.getLogger("topics.shard")

BATCH_RECORDS = 1024
BATCH_BYTES = 1 * MIB
BATCHES_MAX = 128
BYTES_MAX = 16 * MIB
BATCH_COST = 16 * KIB  # of a batch besides its bytes, for the scheduler: 50 µs for both ends on one core
READS_KEPT = 16  # each up to BATCH_BYTES
ANNOUNCED_MAX = 64  # dropped topics announced to dests per tick
PAUSE_MS_MIN, PAUSE_MS_MAX = 50, 1_000
CATCH_UP_US = 1_000_000  # readers do not wait any longer
SWEEP_MIN = 64  # dropped topics may stay in memory up to about this number

IDLE, READY, SENT, QUEUED, DELAYED, PAUSED, REMOVED = range(7)
UNKNOWN = -1


@dataclass(slots=True, eq=False)
class CatchUpWait:
    """A catch-up in progress."""

    until_us: int
    done: Callable[[list[int]], None]  # gets the rules that are still behind
    left: int = 1  # flows that have not caught up, plus one while they are being collected
    behind: list[int] = field(default_factory=list)

    def part_done(self) -> None:
        self.left -= 1
        if not self.left:
            self.done(self.behind)


@dataclass(slots=True, eq=False)
class OutgoingFlow:
    uid: int
    topic: CopiedTopic
    shard: int  # of the dest
    state: int = IDLE
    mark: int = UNKNOWN
    pause_ms: int = 0
    paused_until_us: int = 0
    waits: list[tuple[int, CatchUpWait]] = field(default_factory=list)  # each with the seq that it waits for


@dataclass(slots=True, eq=False, kw_only=True)
class CopiedTopic(CopyState):
    """A source topic."""

    log: SourceTopic
    flows: dict[int, OutgoingFlow] = field(default_factory=dict)  # by rule
    ready: deque[OutgoingFlow] = field(default_factory=deque)
    outflows: tuple[int, ...] = ()  # the log's, when `flows` was last updated
    head: int = UNKNOWN  # the log's, when idle flows were last checked


@dataclass(slots=True, eq=False)
class CopyBatch:
    flow: OutgoingFlow
    after: int
    upto: int
    bytes: int

    @property
    def is_query(self) -> bool:
        return self.after == self.upto


@dataclass(slots=True)
class DestinationWindow:
    """Copies in flight to one shard, and the flows that wait for room."""

    batches: int = 0
    bytes: int = 0
    queue: Scheduler[OutgoingFlow] = field(default_factory=lambda: Scheduler(_priority_of))

    @property
    def is_full(self) -> bool:
        return self.batches >= BATCHES_MAX or self.bytes + BATCH_BYTES > BYTES_MAX


def _priority_of(flow: OutgoingFlow) -> float:
    log = flow.topic.log
    return effective_priority(log.view.config, log.last_read_ts or None, log.last_touch)


Submit = Callable[[CopyBatch, fwd.TakeCopies], None]
ReadKey = tuple[int, object, bool]  # seq to read after, filter, allow_cycle


class Forwarder:
    def __init__(
        self,
        engine: ShardEngine,
        links: PeerLinks,
        *,
        shards: int,
        submit: Submit,
        now_us: Callable[[], int],
    ) -> None:
        self._source = engine.copies
        self._own = engine.stats.shard
        self._links = links
        self._submit = submit  # copies for a topic of this shard; the result goes to `on_result`
        self._now_us = now_us
        self._topics: dict[int, CopiedTopic] = {}
        self._read_of = (0, UNKNOWN)  # id and head of the topic that `_reads` belongs to
        self._reads: dict[ReadKey, fwd.Copies] = {}
        self._by_rule: dict[int, dict[CopiedTopic, None]] = {}
        self._swept = 0  # number of topics after the last sweep
        self._pending: dict[int, dict[OutgoingFlow, None]] = {}  # flows that are not idle, by rule
        self._windows = [DestinationWindow() for _ in range(shards)]
        # Flows of dropped topics: their dests may discard the marks.
        self._dropped: deque[OutgoingFlow] = deque()
        self._pausing: list[tuple[int, int, OutgoingFlow]] = []  # heap: end of the pause, tie-breaker, flow
        self._pauses = 0
        self._rounds: CopyRounds[CopiedTopic] = CopyRounds(now_us)
        self._catch_ups: deque[CatchUpWait] = deque()  # by deadline
        self._peers: dict[int, int] = {}
        self._is_closed = False
        self.is_changed = False  # the engine has called since the last tick
        self.batches_sent = 0

    # -- peers and rules -----------------------------------------------------------------------------------

    def set_peers(self, living: dict[int, int]) -> None:
        """After a restart of a worker, its dests may have fewer copies than before."""
        new = {shard for shard, number in living.items() if self._peers.get(shard) != number}
        self._peers = dict(living)
        new.discard(self._own)
        if not new:
            return
        for topic in self._topics.values():
            for flow in topic.flows.values():
                if flow.shard in new:
                    flow.mark = UNKNOWN
                    flow.pause_ms = 0
                    if flow.state in (IDLE, DELAYED, PAUSED):
                        self._make_ready(flow)

    def rule_closed(self, uid: int) -> None:
        """A rule was closed on this shard, or its source topics have changed."""
        for topic in list(self._by_rule.get(uid, ())):
            self._match_rules(topic)

    def close(self) -> None:
        """Stop sending. Pending copies are sent after the next start."""
        self._is_closed = True

    @property
    def has_pending_copies(self) -> bool:
        """Whether copies wait to be sent or acknowledged, except those of paused flows."""
        if self._source.has_due:
            return True
        return any(flow.state != PAUSED for flows in self._pending.values() for flow in flows)

    @property
    def has_waiting_readers(self) -> bool:
        """Whether reads wait for copies."""
        return bool(self._catch_ups)

    def flows_owing(self) -> int:
        self._refresh_new()
        return sum(map(len, self._pending.values()))

    # -- time ----------------------------------------------------------------------------------------------

    @property
    def wake_at_us(self) -> int | None:
        if self._is_closed:
            return None
        due = [self._pausing[0][0]] if self._pausing else []
        if self._catch_ups:
            due.append(self._catch_ups[0].until_us)
        if self._rounds.wake_at_us is not None:
            due.append(self._rounds.wake_at_us)
        return min(due, default=None)

    def tick(self) -> None:
        """Run expired timers; flows that may continue make their topics due again."""
        self.is_changed = False
        if self._pausing or self._catch_ups:
            self._expire(self._now_us())
        for topic in self._rounds.take_due():
            for flow in topic.flows.values():
                if flow.state == DELAYED:
                    self._make_ready(flow)
        if self._dropped and not self._is_closed:
            self._announce_dropped()
        for window in self._windows:
            if window.queue.size and not window.batches:  # the flows admitted before had nothing to send
                self._admit_next(window)

    def _expire(self, now_us: int) -> None:
        while self._pausing and self._pausing[0][0] <= now_us:
            until_us, _, flow = heapq.heappop(self._pausing)
            if flow.state == PAUSED and flow.paused_until_us == until_us:
                self._make_ready(flow)
        while self._catch_ups and (self._catch_ups[0].until_us <= now_us or not self._catch_ups[0].left):
            wait = self._catch_ups.popleft()
            if wait.left:
                wait.left = 0
                wait.done(wait.behind)

    # -- a topic -------------------------------------------------------------------------------------------

    def has_new_copies(self, log: SourceTopic) -> bool:
        """A topic has new records: make its flows ready. Returns whether any is."""
        self.is_changed = True
        return bool(self._refresh(log).ready)

    def send_copies(self, log: SourceTopic, room: int) -> int:
        """Send a batch for each ready flow of a topic, until `room` is used up; returns the room used. If flows remain, the
        topic is due again.
        """
        self.is_changed = True
        if self._is_closed:
            return 0
        topic = self._refresh(log)
        self._rounds.begin(topic, len(topic.flows))
        if self._read_of != (log.id, log.view.head) or len(self._reads) > READS_KEPT:
            self._read_of, self._reads = (log.id, log.view.head), {}
        used = 0
        while topic.ready and used < room:
            flow = topic.ready.popleft()
            if flow.state == READY:
                used += self._send(flow)
        if topic.ready:
            self._source.set_due(log)
        else:
            self._reads = {}
        return used

    def resume_copies(self, log: SourceTopic, uid: int) -> None:
        """The records that a flow waited for were fetched from the cold tier."""
        self.is_changed = True
        topic = self._topics.get(log.id)
        flow = topic.flows.get(uid) if topic is not None else None
        if flow is not None and flow.state == PAUSED:
            flow.pause_ms = 0
            self._make_ready(flow)

    def _refresh_new(self) -> None:
        """Check topics with records published since the last turn for copies; all others are up to date."""
        for log in self._source.due_topics():
            self._refresh(log)

    def _refresh(self, log: SourceTopic) -> CopiedTopic:
        """Make idle flows with new records ready, or delay them."""
        topic = self._topics.get(log.id)
        if topic is None:
            topic = self._add_topic(log)
        if topic.outflows is not log.outflows or log.dropped:
            self._match_rules(topic)
        head = log.view.head
        if head != topic.head:
            topic.head = head
            for flow in topic.flows.values():
                if flow.state == IDLE and flow.mark < head:
                    if self._may_delay(flow):
                        self._delay(flow)
                    else:
                        self._set_ready(flow)
                elif flow.state == DELAYED and not self._may_delay(flow):
                    self._set_ready(flow)
        return topic

    def _add_topic(self, log: SourceTopic) -> CopiedTopic:
        if len(self._topics) > 2 * self._swept + SWEEP_MIN:
            for topic in [topic for topic in self._topics.values() if topic.log.dropped]:
                self._match_rules(topic)
            self._swept = len(self._topics)
        self._topics[log.id] = topic = CopiedTopic(log=log)
        return topic

    def _match_rules(self, topic: CopiedTopic) -> None:
        """Add and remove flows so that there is one per rule of the topic."""
        log = topic.log
        topic.outflows = log.outflows
        topic.head = UNKNOWN
        uids = dict.fromkeys(() if log.dropped else log.outflows)
        for uid in [uid for uid in topic.flows if uid not in uids]:
            flow = topic.flows.pop(uid)
            self._remove(flow)
            if log.dropped and self._source.forward(uid) is not None:
                self._dropped.append(flow)
            del self._by_rule[uid][topic]
            if not self._by_rule[uid]:
                del self._by_rule[uid]
        for uid in uids:
            if uid not in topic.flows:
                forward = self._source.forward(uid)
                assert forward is not None
                dest = forward.dest
                topic.flows[uid] = OutgoingFlow(uid, topic, shard_of(dest, len(self._windows)))
                self._by_rule.setdefault(uid, {})[topic] = None
        if not topic.flows:
            self._topics.pop(log.id, None)

    def _remove(self, flow: OutgoingFlow) -> None:
        self._end_pending(flow, REMOVED)
        for _, wait in flow.waits:
            wait.part_done()
        flow.waits = []

    # -- states of a flow ----------------------------------------------------------------------------------

    def _set_ready(self, flow: OutgoingFlow) -> None:
        flow.state = READY
        flow.topic.ready.append(flow)
        self._pending.setdefault(flow.uid, {})[flow] = None

    def _make_ready(self, flow: OutgoingFlow) -> None:
        self._set_ready(flow)
        log = flow.topic.log
        self._source.set_due(log)

    def _may_delay(self, flow: OutgoingFlow) -> bool:
        topic = flow.topic
        return flow.mark != UNKNOWN and self._rounds.may_delay(topic, topic.log.view.head - flow.mark)

    def _delay(self, flow: OutgoingFlow) -> None:
        flow.state = DELAYED
        self._pending.setdefault(flow.uid, {})[flow] = None
        self._rounds.delay(flow.topic)

    def _end_pending(self, flow: OutgoingFlow, state: int) -> None:
        flow.state = state
        flows = self._pending.get(flow.uid)
        if flows is not None:
            flows.pop(flow, None)
            if not flows:
                del self._pending[flow.uid]

    def _pause(self, flow: OutgoingFlow, *, is_full: bool = False) -> None:
        """Retry after a delay. Catch-ups do not wait for that; they report the flow as behind, unless the dest is full and
        therefore as far as it can be.
        """
        flow.state = PAUSED
        flow.pause_ms = min(max(2 * flow.pause_ms, PAUSE_MS_MIN), PAUSE_MS_MAX)
        flow.paused_until_us = self._now_us() + flow.pause_ms * 1000
        self._pauses += 1
        heapq.heappush(self._pausing, (flow.paused_until_us, self._pauses, flow))
        waits, flow.waits = flow.waits, []
        for _, wait in waits:
            if not is_full:
                wait.behind.append(flow.uid)
            wait.part_done()

    def _advance(self, flow: OutgoingFlow) -> None:
        """Continue after the dest's reply. Waits are finished last: their callbacks may begin another catch-up, which must
        find the flow in its new state.
        """
        flow.pause_ms = 0
        if flow.mark >= flow.topic.log.view.head:
            self._end_pending(flow, IDLE)
        elif not flow.waits and self._may_delay(flow):
            self._delay(flow)
        else:
            self._make_ready(flow)
        self._finish_waits(flow)

    @staticmethod
    def _finish_waits(flow: OutgoingFlow) -> None:
        """Finish the waits for seqs up to the mark."""
        if flow.waits:
            reached = [wait for seq, wait in flow.waits if seq <= flow.mark]
            flow.waits = [entry for entry in flow.waits if entry[0] > flow.mark]
            for wait in reached:
                wait.part_done()

    # -- out -----------------------------------------------------------------------------------------------

    def _send(self, flow: OutgoingFlow) -> int:
        window = self._windows[flow.shard]
        if window.is_full:
            flow.state = QUEUED
            self._enqueue(flow)
            return 0
        try:
            copies = self._copies(flow)
        except (TopicsError, OSError) as error:  # one unreadable topic must not take the shard down
            logger.error("records to copy cannot be read", extra={"fields": {"error": str(error)}})
            self._pause(flow)
            return BATCH_COST
        if copies is None:
            self._nothing_found(flow)
            return 0
        flow.state = SENT
        if not self._transmit(flow, copies):
            self._pause(flow)
        return BATCH_COST + len(copies.frames)

    def _transmit(self, flow: OutgoingFlow, copies: fwd.Copies) -> bool:
        """Send a batch; False: not possible now."""
        batch = CopyBatch(flow, copies.after, copies.upto, len(copies.frames))
        window = self._windows[flow.shard]
        window.batches += 1
        window.bytes += batch.bytes
        self.batches_sent += 1
        dest = copies.forward.dest
        if flow.shard == self._own:
            self._submit(batch, fwd.TakeCopies(dest, copies))
            return True
        body, on_reply = forward_messages.encode(copies), partial(self._on_reply, batch)
        if self._links.ask(flow.shard, wire.COPIES, dest.encode(), body, on_reply):
            return True
        self._release(batch)
        return False

    def _announce_dropped(self) -> None:
        """Tell dests that source topics were dropped. If a crash prevents that, a few bytes stay there until the rule is
        deleted."""
        for _ in range(min(len(self._dropped), ANNOUNCED_MAX)):
            flow = self._dropped[0]
            forward, window = self._source.forward(flow.uid), self._windows[flow.shard]
            if forward is not None and (window.is_full or self._is_closed):
                return
            self._dropped.popleft()
            if forward is not None:
                copies = self._source.empty_copies(flow.topic.log, forward, 0)
                copies.is_gone = True
                self._transmit(flow, copies)

    def _copies(self, flow: OutgoingFlow) -> fwd.Copies | None:
        """The next batch of a flow. Rules with the same mark and filter share a read, also over several slices."""
        log = flow.topic.log
        forward = self._source.forward(flow.uid)
        assert forward is not None
        if flow.mark == UNKNOWN:
            return self._source.empty_copies(log, forward, 0)
        wanted = flow.mark, forward.filter, forward.allow_cycle
        found = self._reads.get(wanted)
        if found is None:
            found = self._source.copies_after(log, forward, flow.mark, BATCH_RECORDS, BATCH_BYTES)
            if found is None:
                return None
            self._reads[wanted] = found
        if found.forward is forward:
            return found
        copies = self._source.empty_copies(log, forward, flow.mark)
        copies.upto, copies.frames, copies.lost = found.upto, found.frames, found.lost
        return copies

    def _nothing_found(self, flow: OutgoingFlow) -> None:
        if flow.mark >= flow.topic.log.view.head:
            self._advance(flow)
        else:
            self._pause(flow)  # the records cannot be read yet

    # -- replies -------------------------------------------------------------------------------------------

    def _on_reply(self, batch: CopyBatch, reply: wire.Reply | None) -> None:
        """Reply of another worker; None: the outcome is unknown."""
        if reply is None:
            self._rejected(batch)
        elif reply.code == wire.OK:
            try:
                self._accepted(batch, forward_messages.read_taken(reply.body))
            except TopicsError as error:
                logger.error("a reply to copies cannot be decoded", extra={"fields": {"error": str(error)}})
                self._rejected(batch)
        else:
            self._rejected(batch)

    def on_result(self, batch: CopyBatch, result: object) -> None:
        """Result of this shard's engine."""
        if isinstance(result, fwd.CopiesTaken):
            self._accepted(batch, result)
        else:
            self._rejected(batch)

    def _accepted(self, batch: CopyBatch, taken: fwd.CopiesTaken) -> None:
        self._release(batch)
        flow = batch.flow
        if flow.state != SENT:
            return  # it was removed
        flow.mark = taken.mark
        if taken.mark > batch.after:
            flow.pause_ms = 0
        if taken.full or (taken.mark <= batch.after and not batch.is_query):
            self._finish_waits(flow)
            self._pause(flow, is_full=taken.full)
        else:
            self._advance(flow)

    def _rejected(self, batch: CopyBatch) -> None:
        """The shard is down, has refused the batch, or may have accepted it all the same: query the mark again."""
        self._release(batch)
        flow = batch.flow
        flow.mark = UNKNOWN
        if flow.state == SENT:
            self._pause(flow)

    def _release(self, batch: CopyBatch) -> None:
        window = self._windows[batch.flow.shard]
        window.batches -= 1
        window.bytes -= batch.bytes
        self._admit_next(window)

    def _enqueue(self, flow: OutgoingFlow) -> None:
        """Wait for room in the shard's window; flows with waiting readers go first."""
        now_ms = self._now_us() // 1000
        since_ms = now_ms - WAIT_MAX_MS if flow.waits else now_ms
        self._windows[flow.shard].queue.add(flow, now_ms, since_ms=since_ms)

    def _admit_next(self, window: DestinationWindow) -> None:
        """Admit one flow per batch that has left: flows admitted before may not have sent anything yet."""
        while (entry := window.queue.pick(self._now_us() // 1000)) is not None:
            window.queue.done(entry, BATCH_COST)
            if entry.item.state == QUEUED:
                self._make_ready(entry.item)
                return

    # -- catching up ---------------------------------------------------------------------------------------

    def catch_up(self, uids: Iterable[int], done: Callable[[list[int]], None]) -> None:
        """Call `done` when everything that these rules have published so far is copied, perhaps at once."""
        self._refresh_new()
        wait = CatchUpWait(self._now_us() + CATCH_UP_US, done)
        for uid in uids:
            for flow in list(self._pending.get(uid, ())):
                flow.waits.append((flow.topic.log.view.head, wait))
                wait.left += 1
                if flow.state in (DELAYED, PAUSED):
                    self._make_ready(flow)
                elif flow.state == QUEUED:
                    self._enqueue(flow)  # in front; its old entry is skipped
                if flow.state == READY:
                    flow.topic.ready.appendleft(flow)
                    self._source.expedite(flow.topic.log)
        if wait.left > 1:
            self._catch_ups.append(wait)
        wait.part_done()
