"""One topic's log, in two states: staged, which decisions are based on, and published, which readers see.

The staged state (`next_seq`, `count`, `bytes`, `first_seq`, `config` …) includes changes that wait for a sync; `view` is the
published one. Every change is first made to the staged state and recorded in an `Op`; publishing applies the ops to the view
in the same order. Replay does both at once, so recovery runs the same code as live operation.

A staged delete is a row flag that decisions see and readers ignore; staged appends are rows past the view's head.

Invariants: evict_floor <= earliest <= head+1 in both states, except while many records are being evicted (`is_over_cap`);
and view + pending ops == staged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from topics.api.config import TopicConfig
from topics.api.limits import LOSS_RANGES_MAX
from topics.engine.storage.frames import DEAD, DELETED, STAGED_DELETE
from topics.engine.storage.index import SMALL
from topics.engine.storage.segments import SegmentMeta
from topics.engine.storage.strings import StringTable
from topics.engine.topic.consumer import TopicConsumers
from topics.engine.topic.dedupe import DedupeWindow
from topics.engine.topic.flows import Epochs, Inflow, epoch_number, epoch_text, mark_in
from topics.engine.topic.merges import NO_MERGES
from topics.engine.topic.rows import Location, TopicRows
from topics.engine.topic.tags import TagIndex
from topics.engine.topic.transactions import TopicTransactions

Range = tuple[int, int]  # first and last seq, inclusive
Loss = tuple[int, int, str]
Run = tuple[int, Location]  # from this seq on


class Op:
    """One staged change, to be applied to the view once it may be published, and the reply that waits for that.

    Defaults are class attributes because most ops set only a few, and the hot path creates one op per write.
    """

    plain: bool = False  # a plain append: no eviction, config or loss
    head: int = 0  # 0: unchanged
    count: int = 0
    bytes: int = 0
    first_seq: int = 0
    cap_lost: int = 0
    ttl_lost: int = 0
    ranges: Sequence[Range] = ()
    config: TopicConfig | None = None
    loss: Loss | None = None
    dropped: bool = False
    write_ts: int = 0
    tags_held: int = (
        0  # string ids whose last record this op removes; readers may use them until it is published
    )
    nodes_held: int = 0
    command: Any = None  # a read whose reply is held back: handled again if the commit fails
    erase: Any = None  # the EraseRequest to start once the delete is published
    retry: bool = False  # handle the command again when this op is published
    unordered: bool = (
        False  # changes nothing that readers see, so it need not wait for earlier ops of the topic
    )
    dead_letters: int = 0  # dead letters up to this number may be sent once it is published
    logged_ms: int = 0  # in replay: when the change was logged
    expiry: bool = False  # expired records, queued behind ops that are not published yet

    def __init__(
        self, log: TopicLog, token: object = None, result: object = None, *, sync: bool = False, **fields: Any
    ) -> None:
        self.log = log
        self.token = token
        self.result = result
        self.sync = sync  # visible only once its envelope is synced
        if fields:
            self.__dict__.update(fields)


@dataclass(slots=True)
class View:
    """The published state of a topic."""

    head: int = 0
    first_seq: int = 1  # every row below is dead for readers
    count: int = 0
    bytes: int = 0
    cap_lost: int = 0  # highest seq evicted by a cap while it was live
    ttl_lost: int = 0
    config: TopicConfig = field(default_factory=TopicConfig)
    losses: list[Loss] = field(default_factory=list)
    last_write_ts: int = 0
    dropped: bool = False

    @property
    def evict_floor(self) -> int:
        return max(self.cap_lost, self.ttl_lost) + 1


class TopicLog(TopicRows):
    __slots__ = (
        "applied_lsn",
        "bytes",
        "cap_lost",
        "ceiling",
        "ceiling_base",
        "ceiling_synced",
        "ceiling_ts",
        "config",
        "consumers",
        "count",
        "dead_segments",
        "dedupe",
        "deferred",
        "dropped",
        "epochs",
        "erasing",
        "expiring",
        "flag_changes",
        "gate_lsn",
        "id",
        "inflows",
        "inline",
        "last_read_ts",
        "last_touch",
        "may_expire",
        "merges",
        "name",
        "outflows",
        "pending",
        "stored",
        "sum_chain",
        "synced_head",
        "transactions",
        "trim_from",
        "ttl_lost",
        "unpublished_losses",
        "unsynced_heads",
        "view",
        "waiters",
    )

    def __init__(
        self,
        topic_id: int,
        name: str,
        config: TopicConfig,
        *,
        segment_max_events: int,
        segment_max_bytes: int,
    ) -> None:
        super().__init__(segment_max_events=segment_max_events, segment_max_bytes=segment_max_bytes)
        self.id = topic_id
        self.name = name
        self.config = config
        self.applied_lsn = 0  # the snapshot it was restored from covers the log up to here
        self.count = 0
        self.bytes = 0
        self.cap_lost = 0
        self.ttl_lost = 0
        self.dropped = False
        self.view = View(config=config)
        self.stored: list[SegmentMeta] | None = None  # segments that are not loaded yet
        self.inline: tuple[int, int, bytes] | None = None  # records of a small topic, from its snapshot row
        self.deferred: list[Callable[[], None]] = []  # replay work deferred until the topic is first used
        self.dedupe = DedupeWindow()
        self.expiring = 0  # expiry ops among the pending ones
        self.pending = 0  # ops staged and not yet published
        self.gate_lsn = 0  # pending ops may be published once the log is synced up to here
        self.ceiling = 0  # highest seq that may be assigned; 0: no bound
        self.ceiling_synced = 0
        self.ceiling_ts = 0
        self.ceiling_base = 0  # the head when the ceiling was last raised
        self.last_read_ts = 0
        self.last_touch = 0
        self.waiters: list[object] = []
        # (lsn, head) of published changes that are not synced yet; None: not tracked for this topic.
        self.unsynced_heads: deque[tuple[int, int]] | None = None
        self.synced_head = 0
        self.consumers: TopicConsumers | None = None
        self.outflows: tuple[int, ...] = ()  # uids of the forwards that copy from it
        self.epochs: Epochs = []
        self.unpublished_losses: tuple[Loss, ...] = ()  # logged, but not synced yet
        self.inflows: dict[int, Inflow] | None = None  # by uid of the forwards that copy into it
        self.transactions: TopicTransactions[TopicLog] | None = None
        self.dead_segments: list[
            SegmentMeta
        ] = []  # without live records; unlinked once no snapshot names them
        self.sum_chain = bytes(8)
        # The tag id at which trimming to a new `cap_per_tag` continues; None: nothing to trim.
        self.trim_from: int | None = None
        self.may_expire = False  # not loaded, and has records with their own TTL
        self.erasing: list[list[Range]] = []  # deleted records whose bytes are not overwritten yet
        self.merges = NO_MERGES
        self.flag_changes = 0  # incremented whenever delete flags of rows change

    @property
    def is_followed(self) -> bool:
        """Whether a publish concerns more than its writer: parked reads, consumers, forwards, readers of the synced head."""
        return bool(
            self.waiters or self.outflows or self.consumers is not None or self.unsynced_heads is not None
        )

    @property
    def is_head_tracked(self) -> bool:
        """Whether `synced_head` is known."""
        return self.unsynced_heads is not None

    @property
    def reserved(self) -> tuple[int, int]:
        """Records and bytes that are promised, but not appended yet."""
        return self.transactions.reserved if self.transactions is not None else (0, 0)

    @property
    def is_unloaded(self) -> bool:
        """Whether rows, or replayed changes to them, are not loaded yet."""
        return self.stored is not None or bool(self.deferred)

    @property
    def needs_no_upkeep(self) -> bool:
        """Whether the topic is loaded and nothing in it can expire or waits to be evicted."""
        timed = self.config.ttl_ms or self.expiries or self.expiring or self.may_expire
        return not timed and not self.is_unloaded and not self.is_over_cap

    @property
    def is_over_cap(self) -> bool:
        """Whether records that a cap has evicted are still in the index. The floor is already past them, in the log too.

        They are removed in steps (shard/state.py) before the next request to the topic.
        """
        return self.cap_lost >= self.first_seq

    @property
    def epoch(self) -> str:
        """Identifies this incarnation of the topic and how often its head went back; see flows.py."""
        return epoch_text(self.id, self.epochs)

    def cursor_of(self, epoch: str, cursor: int) -> int | None:
        """Convert a cursor of some epoch to the current one; None: it belongs to another topic."""
        number = epoch_number(epoch, self.id, self.epochs)
        return None if number is None else mark_in((number, cursor), self.epochs)[1]

    # -- staged changes ------------------------------------------------------------------------------------

    def advance_first_seq(self) -> None:
        """Move `first_seq` to the first live row, or to `next_seq`. Amortised: each dead row is passed once."""
        if self.stored is not None and self.count:
            return  # not loaded: the snapshot's value holds
        seq = self.first_seq
        for chunk, first, stop in self.spans(seq, self.next_seq):
            row = first
            while row < stop:
                if not chunk.flags_at(row) & DEAD and chunk.length_at(row):
                    self.first_seq = chunk.first_seq + row
                    return
                row += 1
                if row - first == 16:  # a long dead run: check the rest with numpy
                    alive = chunk.live(row, stop, DEAD)
                    if alive.any():
                        self.first_seq = chunk.first_seq + row + int(alive.argmax())
                        return
                    break
        self.first_seq = self.next_seq

    def remove_rows(self, first_seq: int, last_seq: int, op: Op, *, mark: bool) -> int:
        """Remove the live rows of a range from consumers, counts and tags; return the highest seq removed, or 0."""
        if self.consumers is not None:
            self.consumers.forget(self, first_seq, last_seq)
        return self._remove_rows(first_seq, last_seq, op, mark=mark)

    def _remove_rows(self, first_seq: int, last_seq: int, op: Op, *, mark: bool) -> int:
        highest = 0
        tags, nodes = self.tags.strings, self.nodes
        op.tags_held -= len(tags.held)
        op.nodes_held -= len(nodes.held)
        for chunk, first, stop in self.spans(max(first_seq, self.first_seq), last_seq + 1):
            if mark and first < chunk.stored:
                chunk.unmarked.append((first, min(stop, chunk.stored)))  # for the next checkpoint's .del
            if stop - first < SMALL:
                for row in range(first, stop):
                    _, length, _, flags, tag, node, size = chunk.get(row)
                    if flags & DEAD or not length:
                        continue
                    highest = chunk.first_seq + row
                    if mark:
                        chunk.set_flag(row, STAGED_DELETE)
                    if tag:
                        self.tags.remove(tag)
                    if node:
                        self.nodes.release(node)
                    op.count -= 1
                    op.bytes -= size
                continue
            alive = chunk.live(first, stop, DEAD)
            picked = np.nonzero(alive)[0]
            if not len(picked):
                continue
            highest = chunk.first_seq + first + int(picked[-1])
            rows = chunk.rows[first:stop]
            if mark:
                rows["flags"][picked] |= STAGED_DELETE
            self.tags.remove_many(rows["tag"][picked])
            self.nodes.release_many(rows["node"][picked])
            op.count -= len(picked)
            op.bytes -= int(rows["size"][picked].sum(dtype=np.int64))
        op.tags_held += len(tags.held)
        op.nodes_held += len(nodes.held)
        self.flag_changes += mark
        return highest

    def stage_delete(self, ranges: list[Range], op: Op) -> None:
        count, size = op.count, op.bytes
        if self.consumers is not None:
            if len(ranges) == 1:
                self.consumers.forget(self, *ranges[0])
            else:
                self.consumers.forget_many(self, ranges)
        for first, last in ranges:
            self._remove_rows(first, last, op, mark=True)
        op.ranges = [*op.ranges, *ranges]
        self.count += op.count - count
        self.bytes += op.bytes - size
        self._update_first_seq(op)

    def stage_evict(self, last_seq: int, op: Op, *, ttl: bool) -> None:
        """Evict everything up to `last_seq`, by a cap or by the topic's TTL."""
        count, size = op.count, op.bytes
        lost = self.remove_rows(self.first_seq, last_seq, op, mark=False)
        self.count += op.count - count
        self.bytes += op.bytes - size
        if lost:
            if ttl:
                self.ttl_lost = max(self.ttl_lost, lost)
            else:
                self.cap_lost = max(self.cap_lost, lost)
        op.cap_lost, op.ttl_lost = self.cap_lost, self.ttl_lost
        self.first_seq = max(self.first_seq, last_seq + 1)
        self._update_first_seq(op)

    def stage_floors(self, cap_lost: int, ttl_lost: int, op: Op) -> None:
        """Replay logged eviction floors: remove live records at or below them and restore the floors."""
        highest = max(cap_lost, ttl_lost)
        if highest >= self.first_seq:
            self.stage_evict(highest, op, ttl=ttl_lost > cap_lost)
        self.cap_lost = max(self.cap_lost, cap_lost)
        self.ttl_lost = max(self.ttl_lost, ttl_lost)
        op.cap_lost, op.ttl_lost = self.cap_lost, self.ttl_lost
        op.first_seq = self.first_seq

    def stage_skip(self, count: int, op: Op) -> None:
        """Use up seqs without rows: the next chunk begins after the gap."""
        self.next_seq += count
        op.head = self.next_seq - 1
        self._update_first_seq(op)

    def stage_loss(self, loss: Loss, op: Op) -> None:
        """Record a lost range, removing its live records, if any."""
        count, size = op.count, op.bytes
        self.remove_rows(loss[0], loss[1], op, mark=True)
        op.ranges = [*op.ranges, (loss[0], loss[1])]
        self.count += op.count - count
        self.bytes += op.bytes - size
        if loss[1] >= self.next_seq:
            self.next_seq = loss[1] + 1
            op.head = loss[1]
        op.loss = loss
        self._update_first_seq(op)

    def logged_losses(self) -> list[Loss]:
        """All losses in the log, including those that are not published yet."""
        losses = list(self.view.losses)
        for loss in self.unpublished_losses:
            add_loss(losses, loss)
        return losses

    def _update_first_seq(self, op: Op) -> None:
        self.advance_first_seq()
        op.first_seq = self.first_seq

    def expired_last(self, now_ms: int) -> int:
        """The last seq expired by the topic's TTL, or 0. Expired means `now - ts > ttl`, strictly."""
        ttl_ms = self.config.ttl_ms
        if not ttl_ms:
            return 0
        oldest_ms = now_ms - ttl_ms
        last = 0
        for chunk, first, stop in self.spans(self.first_seq, self.next_seq):
            if chunk.ts_at(first) >= oldest_ms:
                break
            if chunk.ts_at(stop - 1) < oldest_ms:
                last = chunk.first_seq + stop - 1
                continue
            ended = int(np.searchsorted(chunk.rows["ts"][first:stop], np.uint64(oldest_ms)))
            return chunk.first_seq + first + ended - 1
        return last

    def first_since(self, ts: int) -> int:
        """The seq of the first visible record with a timestamp of `ts` or later; head+1 if there is none."""
        view = self.view
        for chunk, first, stop in self.spans(view.first_seq, view.head + 1):
            if chunk.ts_at(stop - 1) < ts:
                continue
            first += int(np.searchsorted(chunk.rows["ts"][first:stop], np.uint64(ts)))
            alive = chunk.live(first, stop)
            if alive.any():
                return chunk.first_seq + first + int(alive.argmax())
        return view.head + 1

    # -- publication ---------------------------------------------------------------------------------------

    def publish_now(self, op: Op) -> None:
        """Publish a change ahead of ops that still wait for their sync.

        The view's `first_seq` stays, as it may depend on those ops.
        """
        if self.pending:
            op.first_seq = 0
        self.publish(op)

    def publish(self, op: Op) -> None:
        """Apply one staged change to the view."""
        view = self.view
        if op.plain:
            view.head = op.head
            view.count += op.count
            view.bytes += op.bytes
            view.last_write_ts = op.write_ts
            return
        if op.head:
            view.head = op.head
        view.count += op.count
        view.bytes += op.bytes
        if op.ranges:
            self._mark(op.ranges)
        if op.first_seq > view.first_seq:
            view.first_seq = op.first_seq
            if self.chunks and self.chunks[0].next_seq <= op.first_seq:
                self.drop_dead_chunks()
        view.cap_lost = max(view.cap_lost, op.cap_lost)
        view.ttl_lost = max(view.ttl_lost, op.ttl_lost)
        if op.config is not None:
            view.config = op.config
        if op.loss is not None:
            add_loss(view.losses, op.loss)
            if self.unpublished_losses:
                self.unpublished_losses = tuple(loss for loss in self.unpublished_losses if loss != op.loss)
        if op.tags_held:
            self.tags.strings.release_held(op.tags_held)
        if op.nodes_held:
            self.nodes.release_held(op.nodes_held)
        if op.write_ts:
            view.last_write_ts = op.write_ts
        if op.dropped:
            view.dropped = True

    def _mark(self, ranges: Sequence[Range]) -> None:
        """Turn staged deletes into published ones."""
        self.flag_changes += 1
        for first_seq, last_seq in ranges:
            for chunk, first, stop in self.spans(first_seq, last_seq + 1):
                if stop - first < SMALL:
                    for row in range(first, stop):
                        if chunk.flags_at(row) & STAGED_DELETE:
                            chunk.set_flag(row, DELETED)
                else:
                    flags = chunk.rows["flags"][first:stop]
                    flags |= (flags & STAGED_DELETE) << 1

    def drop_dead_chunks(self) -> bool:
        """Drop whole chunks below the first live record; returns whether there were any.

        The last chunk stays while it can take rows.
        """
        view, count = self.view, len(self.chunks)
        while self.chunks and self.chunks[0].next_seq <= min(view.first_seq, self.first_seq):
            chunk = self.chunks[0]
            if len(self.chunks) == 1 and not (chunk.closed or chunk.count >= chunk.rows_max):
                break
            self.chunks.pop(0)
            self._starts.pop(0)
            if chunk.meta is not None:
                self.dead_segments.append(chunk.meta)
        self.trim_runs(view.first_seq)
        return len(self.chunks) < count

    def can_unload(self) -> bool:
        """Whether all row state is in segments and in the last snapshot."""
        return (
            not self.pending
            and not self.erasing
            and self.trim_from is None
            and not self.runs
            and all(c.meta is not None and c.stored == c.count and not c.unmarked for c in self.chunks)
        )

    def unload(self) -> None:
        """Drop the index rows from memory; the next use loads them again."""
        self.stored = [chunk.meta for chunk in self.chunks if chunk.meta is not None]
        self.may_expire = bool(self.expiries)
        self.chunks, self._starts, self.expiries = [], [], []
        self.tags, self.nodes = TagIndex(hold=True), StringTable(hold=True)

    # -- erasing -------------------------------------------------------------------------------------------

    def join_erasing(self, pieces: list[list[Range]]) -> list[Range]:
        """Join these items of `erasing` into one, which is returned."""
        known = {id(piece) for piece in pieces}
        ranges = _joined(chain.from_iterable(pieces))
        self.erasing = [piece for piece in self.erasing if id(piece) not in known]
        self.erasing.append(ranges)
        return ranges

    def forget_erasing(self, done: list[Range]) -> None:
        """The bytes of these ranges are erased, however they were split in the log."""
        firsts = [first for first, _ in done]

        def is_done(first: int, last: int) -> bool:
            i = bisect_right(firsts, first) - 1
            return i >= 0 and last <= done[i][1]

        self.erasing = [piece for piece in self.erasing if not all(is_done(*ends) for ends in piece)]

    # -- after a failed commit -----------------------------------------------------------------------------

    def discard_staged(self) -> None:
        """Revert to the published state; the shard accepts no more changes."""
        view = self.view
        while self.chunks and self.chunks[-1].first_seq > view.head:
            self.chunks.pop()
            self._starts.pop()
        if self.chunks and self.chunks[-1].next_seq > view.head + 1:
            self.chunks[-1].cut(max(0, view.head + 1 - self.chunks[-1].first_seq))
        for chunk in self.chunks:
            flags = chunk.rows["flags"]
            flags &= np.where(flags & DELETED, 0xFF, 0xFF ^ STAGED_DELETE).astype(np.uint8)
        self.next_seq = view.head + 1
        self.first_seq = view.first_seq
        self.count, self.bytes = view.count, view.bytes
        self.cap_lost, self.ttl_lost = view.cap_lost, view.ttl_lost
        self.config = view.config
        self.dropped = view.dropped
        self.pending = self.expiring = 0
        self.rebuild_strings()

    # -- invariants ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert the invariants."""
        if self.is_unloaded:
            return
        view = self.view
        is_evicting = self.is_over_cap or self.expiring
        assert view.evict_floor <= view.first_seq or not view.count or is_evicting, (self.name, view)
        assert 0 <= view.head < self.next_seq, (self.name, view.head, self.next_seq)
        if not self.pending:
            assert (view.count, view.bytes, view.head) == (self.count, self.bytes, self.next_seq - 1), (
                self.name
            )
        count = size = 0
        for chunk, first, stop in self.spans(self.first_seq, self.next_seq):
            alive = chunk.live(first, stop, DEAD)
            count += int(alive.sum())
            size += int(chunk.rows["size"][first:stop][alive].sum(dtype=np.int64))
        assert (count, size) == (self.count, self.bytes), (self.name, count, size, self.count, self.bytes)
        assert self._starts == [chunk.first_seq for chunk in self.chunks]
        assert all(chunk.stored <= row for chunk in self.chunks for row, _ in chunk.expiries[:1]), self.name
        for before, after in zip(self.chunks, self.chunks[1:], strict=False):
            assert before.next_seq <= after.first_seq


def add_loss(losses: list[Loss], loss: Loss) -> None:
    """Insert a loss. Ranges stay ascending and disjoint; adjacent ranges with the same reason are joined."""
    losses.append(loss)
    losses.sort()
    joined: list[Loss] = []
    for first, last, reason in losses:
        if joined and first <= joined[-1][1] + 1 and (joined[-1][2] == reason or first <= joined[-1][1]):
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]), joined[-1][2])
        else:
            joined.append((first, last, reason))
    while len(joined) > LOSS_RANGES_MAX:  # announcing too wide a loss is safe, omitting one is not
        gaps = [(joined[i + 1][0] - joined[i][1], i) for i in range(len(joined) - 1)]
        i = min(gaps)[1]
        joined[i : i + 2] = [(joined[i][0], joined[i + 1][1], joined[i][2])]
    losses[:] = joined


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Ranges in ascending order, with adjacent ones joined."""
    out: list[Range] = []
    for first, last in sorted(ranges):
        if out and first <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(out[-1][1], last))
        else:
            out.append((first, last))
    return out
