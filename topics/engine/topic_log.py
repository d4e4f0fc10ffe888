"""One topic's log: seqs, rows, floors, tags; decisions on what is staged, answers from what is published.

Two states live here side by side. The *staged* one (`next_seq`, `count`, `bytes`, `first_seq`, `config` …) is what
decisions read: it already contains what waits for a sync. The *published* one (`view`) is what readers see. Every
change is first made to the staged state, which records what it did in an `Op`; publishing applies those ops to the
view in the same order. Replay does both at once, so recovery runs the code that live operation runs.

A staged delete is a flag on the row that readers ignore and deciders obey; an append is rows past the view's head.

Invariants: evict_floor <= earliest <= head+1 in both states, and view + pending ops == staged.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from topics.engine.config import TopicConfig
from topics.engine.consumer import TopicConsumers
from topics.engine.dedupe import DedupeWindow
from topics.engine.flows import Epochs, Inflow
from topics.engine.frames import DEAD, DELETED, STAGED_DELETE
from topics.engine.index import SMALL, Chunk
from topics.engine.limits import LOSS_RANGES_MAX
from topics.engine.merges import NO_MERGES
from topics.engine.segments import SegmentMeta
from topics.engine.strings import StringTable
from topics.engine.tags import TagIndex
from topics.engine.transaction_state import TopicTransactions

Range = tuple[int, int]  # first and last seq, both inside
Loss = tuple[int, int, str]
# From this seq on: a log file's number, a RAM block of records that are never logged, or the frames of a small topic
# as its snapshot row holds them.
Run = tuple[int, int | bytearray | bytes]


class Op:
    """What one staged change did, to be repeated on the view when its gate opens.

    Defaults are class attributes: most ops set a few of them, and one object a write is made on the hot path.
    """

    plain: bool = False  # an append and nothing else
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
    tags_held: int = 0  # ids whose last record this op removes; readers may meet them until it is published
    nodes_held: int = 0
    command: Any = None  # of a read whose answer is held back: asked again if the commit fails
    erase: Any = None  # what to do with the bytes once the delete is published
    later: bool = False  # the command is asked again when this op's turn comes
    free: bool = False  # it tells of nothing that readers see, and waits for no change before it
    letters: int = 0  # up to this number letters may be sent once it is published
    expiry: bool = False  # what time did, waiting behind changes that are not published yet

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
    """What readers see."""

    head: int = 0
    first_seq: int = 1  # every row below is dead for readers
    count: int = 0
    bytes: int = 0
    cap_lost: int = 0  # highest live seq that a cap took
    ttl_lost: int = 0
    config: TopicConfig = field(default_factory=TopicConfig)
    losses: list[Loss] = field(default_factory=list)
    last_write_ts: int = 0
    dropped: bool = False

    @property
    def evict_floor(self) -> int:
        return max(self.cap_lost, self.ttl_lost) + 1


class TopicLog:
    __slots__ = (
        "_rows_max",
        "_segment_bytes_max",
        "_starts",
        "applied_lsn",
        "bytes",
        "cap_lost",
        "ceiling",
        "ceiling_base",
        "ceiling_synced",
        "ceiling_ts",
        "chunks",
        "config",
        "consumers",
        "count",
        "dedupe",
        "deferred",
        "doomed",
        "dropped",
        "epochs",
        "erasing",
        "expiries",
        "expiring",
        "first_seq",
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
        "next_seq",
        "nodes",
        "outflows",
        "parked_losses",
        "pending",
        "ram_bytes",
        "runs",
        "safe_head",
        "stored",
        "sum_chain",
        "tags",
        "transactions",
        "trim_from",
        "ttl_lost",
        "unsafe_heads",
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
        self.id = topic_id
        self.name = name
        self.config = config
        self.applied_lsn = 0  # the snapshot it was restored from contains the log up to here
        self._rows_max = segment_max_events
        self._segment_bytes_max = segment_max_bytes
        self.next_seq = 1
        self.first_seq = 1  # staged: every row below is dead
        self.count = 0
        self.bytes = 0
        self.cap_lost = 0
        self.ttl_lost = 0
        self.dropped = False
        self.view = View(config=config)
        self.chunks: list[Chunk] = []
        self._starts: list[int] = []  # first seq of each chunk
        self.stored: list[SegmentMeta] | None = None  # segments not loaded yet
        self.inline: tuple[int, int, bytes] | None = None  # instead of segments, as the snapshot row holds it
        self.deferred: list[Callable[[], None]] = []  # replay work put off until first touch
        self.runs: list[Run] = []
        self.tags = TagIndex(hold=True)
        self.nodes = StringTable(hold=True)
        self.dedupe = DedupeWindow()
        self.expiries: list[tuple[int, int]] = []  # heap of (time, seq) of records with a TTL of their own
        self.expiring = 0  # expiry ops among the pending ones
        self.pending = 0  # ops staged and not yet published
        self.gate_lsn = 0  # the last of them becomes visible when this is synced
        self.ceiling = 0  # highest seq that may be used; 0: not bounded
        self.ceiling_synced = 0
        self.ceiling_ts = 0
        self.ceiling_base = 0  # the head when it was raised last
        self.last_read_ts = 0
        self.last_touch = 0
        self.waiters: list[object] = []
        # Of a topic that somebody watches for what is synced: (lsn, head) of what is published and not synced yet.
        self.unsafe_heads: deque[tuple[int, int]] | None = None
        self.safe_head = 0
        self.consumers: TopicConsumers | None = None
        self.outflows: tuple[int, ...] = ()  # uids of the rules that copy it
        self.epochs: Epochs = []
        self.parked_losses: tuple[Loss, ...] = ()  # logged, and not published before their sync
        self.inflows: dict[int, Inflow] | None = None  # by uid of the rules that bring it copies
        self.transactions: TopicTransactions[TopicLog] | None = None
        self.doomed: list[
            SegmentMeta
        ] = []  # segments with nothing live, to be unlinked once no snapshot names them
        self.sum_chain = bytes(8)
        # The tag id from which on `cap_per_tag` has to be looked at for what was there before it; None: nowhere.
        self.trim_from: int | None = None
        self.may_expire = False  # not loaded yet, and has records with a TTL of their own
        self.erasing: list[list[Range]] = []
        self.merges = NO_MERGES
        self.flag_changes = 0  # how often rows were staged as deleted, or published as that
        self.ram_bytes = 0

    # -- rows ----------------------------------------------------------------------------------------------

    @property
    def is_away(self) -> bool:
        """Its rows, or changes to them, wait on disk for somebody to need them."""
        return self.stored is not None or bool(self.deferred)

    @property
    def is_timeless(self) -> bool:
        """All of it is in memory, and time does nothing to it."""
        timed = self.config.ttl_ms or self.expiries or self.expiring or self.may_expire
        return not timed and not self.is_away

    def chunk_for_append(self, now_ms: int) -> Chunk:
        """The chunk that takes the next row."""
        if self.chunks:
            chunk = self.chunks[-1]
            if (
                not chunk.closed
                and chunk.count < chunk.rows_max
                and chunk.frame_bytes < self._segment_bytes_max
                and chunk.first_seq + chunk.count == self.next_seq
            ):
                return chunk
            self._close_last()
        chunk = Chunk(self.next_seq, self._rows_max, now_ms)
        self.chunks.append(chunk)
        self._starts.append(chunk.first_seq)
        return chunk

    def _close_last(self) -> None:
        last = self.chunks[-1]
        if last.count:
            last.closed = True
        else:
            self.chunks.pop()
            self._starts.pop()

    def adopt(self, chunks: list[Chunk]) -> None:
        """Put chunks that were read from segments in front of what is there."""
        self.chunks = chunks + self.chunks
        self._starts = [chunk.first_seq for chunk in self.chunks]

    def spans(self, first_seq: int, stop_seq: int) -> Iterator[tuple[Chunk, int, int]]:
        """The row spans that cover the seqs [first_seq, stop_seq)."""
        i = max(0, bisect_right(self._starts, first_seq) - 1)
        while i < len(self.chunks):
            chunk = self.chunks[i]
            if chunk.first_seq >= stop_seq:
                return
            first = max(0, first_seq - chunk.first_seq)
            stop = min(chunk.count, stop_seq - chunk.first_seq)
            if first < stop:
                yield chunk, first, stop
            i += 1

    def find(self, seq: int) -> tuple[Chunk, int] | None:
        i = bisect_right(self._starts, seq) - 1
        if i < 0:
            return None
        chunk = self.chunks[i]
        row = seq - chunk.first_seq
        return (chunk, row) if row < chunk.count else None

    def are_live(self, seqs: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which of these seqs, ascending, are live in the staged state."""
        alive = np.zeros(len(seqs), dtype=np.bool_)
        if len(seqs) < 8:
            for k in range(len(seqs)):
                alive[k] = self.is_live(int(seqs[k]))
            return alive
        lo, starts = 0, self._starts
        while lo < len(seqs):  # over the chunks that have some of them: a topic may have thousands
            i = bisect_right(starts, int(seqs[lo])) - 1
            hi = int(seqs.searchsorted(np.uint64(starts[i + 1]))) if i + 1 < len(starts) else len(seqs)
            if i >= 0:
                chunk = self.chunks[i]
                rows = (seqs[lo:hi] - np.uint64(chunk.first_seq)).astype(np.intp)
                inside = rows < chunk.count
                picked = chunk.rows[rows[inside]]
                good = ((picked["flags"] & DEAD) == 0) & (picked["length"] != 0)
                part = np.zeros(hi - lo, dtype=np.bool_)
                part[inside] = good
                alive[lo:hi] = part
            lo = hi
        return alive & (seqs >= np.uint64(self.first_seq))

    def is_live(self, seq: int) -> bool:
        if seq < self.first_seq:
            return False
        found = self.find(seq)
        return (
            found is not None and not found[0].flags_at(found[1]) & DEAD and found[0].length_at(found[1]) > 0
        )

    def count_live(self, first_seq: int, stop_seq: int) -> int:
        """How many of the seqs [first_seq, stop_seq) are live in the staged state."""
        spans = self.spans(max(first_seq, self.first_seq), stop_seq)
        return sum(int(chunk.live(first, stop, DEAD).sum()) for chunk, first, stop in spans)

    def last_live(self, stop_seq: int) -> int:
        """The last live seq below `stop_seq`, or 0."""
        for chunk in reversed(self.chunks):
            stop = min(chunk.count, stop_seq - chunk.first_seq)
            alive = np.flatnonzero(chunk.live(0, max(stop, 0), DEAD))
            if len(alive):
                last = chunk.first_seq + int(alive[-1])
                return last if last >= self.first_seq else 0
        return 0

    def tag_counts(self, first_seq: int, stop_seq: int) -> list[tuple[bytes | None, int]]:
        """The tags of the live records of [first_seq, stop_seq), and how many have each; a tag may come several times."""
        names = self.tags.strings.names
        found: list[tuple[bytes | None, int]] = []
        for chunk, first, stop in self.spans(max(first_seq, self.first_seq), stop_seq):
            if stop - first < SMALL:
                for row in range(first, stop):
                    _, length, _, flags, tag, _, _ = chunk.get(row)
                    if length and not flags & DEAD:
                        found.append((names[tag] if tag else None, 1))
                continue
            ids = chunk.rows["tag"][first:stop][chunk.live(first, stop, DEAD)]
            each, counts = np.unique(ids, return_counts=True)
            found += [(names[tag] if tag else None, n) for tag, n in zip(each.tolist(), counts.tolist())]
        return found

    # -- staged changes ------------------------------------------------------------------------------------

    def settle_first(self) -> None:
        """Move `first_seq` to the first live row, or to `next_seq`. Amortised: each dead row is passed once."""
        if self.stored is not None and self.count:
            return  # not loaded: what is live stands where the snapshot says
        seq = self.first_seq
        for chunk, first, stop in self.spans(seq, self.next_seq):
            row = first
            while row < stop:
                if not chunk.flags_at(row) & DEAD and chunk.length_at(row):
                    self.first_seq = chunk.first_seq + row
                    return
                row += 1
                if row - first == 16:  # a long dead stretch: look at the rest at once
                    alive = chunk.live(row, stop, DEAD)
                    if alive.any():
                        self.first_seq = chunk.first_seq + row + int(alive.argmax())
                        return
                    break
        self.first_seq = self.next_seq

    def kill(self, first_seq: int, last_seq: int, op: Op, *, mark: bool) -> int:
        """Remove the live rows of a range from counts and tags; return the highest seq removed, or 0."""
        highest = 0
        if self.consumers is not None:
            self.consumers.forget(self, first_seq, last_seq)
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
        for first, last in ranges:
            self.kill(first, last, op, mark=True)
        op.ranges = [*op.ranges, *ranges]
        self.count += op.count - count
        self.bytes += op.bytes - size
        self._settle(op)

    def stage_evict(self, last_seq: int, op: Op, *, ttl: bool) -> None:
        """Everything up to `last_seq` is lost to a cap or to the topic's TTL."""
        count, size = op.count, op.bytes
        lost = self.kill(self.first_seq, last_seq, op, mark=False)
        self.count += op.count - count
        self.bytes += op.bytes - size
        if lost:
            if ttl:
                self.ttl_lost = max(self.ttl_lost, lost)
            else:
                self.cap_lost = max(self.cap_lost, lost)
        op.cap_lost, op.ttl_lost = self.cap_lost, self.ttl_lost
        self.first_seq = max(self.first_seq, last_seq + 1)
        self._settle(op)

    def stage_floors(self, cap_lost: int, ttl_lost: int, op: Op) -> None:
        """Replay an evict watermark: whatever is live at or below it goes, and the floors stand where they stood."""
        highest = max(cap_lost, ttl_lost)
        if highest >= self.first_seq:
            self.stage_evict(highest, op, ttl=ttl_lost > cap_lost)
        self.cap_lost = max(self.cap_lost, cap_lost)
        self.ttl_lost = max(self.ttl_lost, ttl_lost)
        op.cap_lost, op.ttl_lost = self.cap_lost, self.ttl_lost
        op.first_seq = self.first_seq

    def stage_skip(self, count: int, op: Op) -> None:
        """Take seqs without rows: the next chunk begins behind the hole."""
        self.next_seq += count
        op.head = self.next_seq - 1
        self._settle(op)

    def stage_loss(self, loss: Loss, op: Op) -> None:
        """A range is lost; live records in it, if any, go."""
        count, size = op.count, op.bytes
        self.kill(loss[0], loss[1], op, mark=True)
        op.ranges = [*op.ranges, (loss[0], loss[1])]
        self.count += op.count - count
        self.bytes += op.bytes - size
        if loss[1] >= self.next_seq:
            self.next_seq = loss[1] + 1
            op.head = loss[1]
        op.loss = loss
        self._settle(op)

    def logged_losses(self) -> list[Loss]:
        """Those that readers hear of, and those that they will hear of once they are safe."""
        losses = list(self.view.losses)
        for loss in self.parked_losses:
            add_loss(losses, loss)
        return losses

    def _settle(self, op: Op) -> None:
        self.settle_first()
        op.first_seq = self.first_seq

    def front_beyond(self, records: int, size: int) -> int:
        """The last seq that must go so that at least `records` records and `size` bytes go from the front."""
        last = 0
        for chunk, first, stop in self.spans(self.first_seq, self.next_seq):
            if records < SMALL and size <= 0:
                for row in range(first, stop):
                    if records <= 0:
                        return last
                    if not chunk.flags_at(row) & DEAD and chunk.length_at(row):
                        records -= 1
                        last = chunk.first_seq + row
                if records <= 0:
                    return last
                continue
            picked = np.nonzero(chunk.live(first, stop, DEAD))[0]
            if not len(picked):
                continue
            sizes = np.cumsum(chunk.rows["size"][first:stop][picked], dtype=np.int64)
            enough = max(records, int(np.searchsorted(sizes, size)) + 1 if size > 0 else 0)
            if enough <= len(picked):
                return chunk.first_seq + first + int(picked[enough - 1])
            last = chunk.first_seq + first + int(picked[-1])
            records -= len(picked)
            size -= int(sizes[-1])
        return last

    def expired_last(self, now_ms: int) -> int:
        """The last seq that the topic's TTL has ended, or 0. `now - ts > ttl`, strictly."""
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
        """The seq of the first record that readers see with a time of `ts` or later; behind the head without one."""
        view = self.view
        for chunk, first, stop in self.spans(view.first_seq, view.head + 1):
            if chunk.ts_at(stop - 1) < ts:
                continue
            first += int(np.searchsorted(chunk.rows["ts"][first:stop], np.uint64(ts)))
            alive = chunk.live(first, stop)
            if alive.any():
                return chunk.first_seq + first + int(alive.argmax())
        return view.head + 1

    def due_records(self, now_ms: int) -> list[int]:
        """Live records whose own TTL has ended."""
        due: list[int] = []
        while self.expiries and self.expiries[0][0] < now_ms:
            seq = heapq.heappop(self.expiries)[1]
            if self.is_live(seq):
                due.append(seq)
        return sorted(due)

    # -- publication ---------------------------------------------------------------------------------------

    def publish_found(self, op: Op) -> None:
        """Make visible at once what was found to be so, past changes that still wait for their sync: where the first
        record is in their wake is not for readers to see yet.
        """
        if self.pending:
            op.first_seq = 0
        self.publish(op)

    def publish(self, op: Op) -> None:
        """Make one staged change visible."""
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
                self._reclaim()
        view.cap_lost = max(view.cap_lost, op.cap_lost)
        view.ttl_lost = max(view.ttl_lost, op.ttl_lost)
        if op.config is not None:
            view.config = op.config
        if op.loss is not None:
            add_loss(view.losses, op.loss)
            if self.parked_losses:
                self.parked_losses = tuple(loss for loss in self.parked_losses if loss != op.loss)
        if op.tags_held:
            self.tags.strings.let_go(op.tags_held)
        if op.nodes_held:
            self.nodes.let_go(op.nodes_held)
        if op.write_ts:
            view.last_write_ts = op.write_ts
        if op.dropped:
            view.dropped = True

    def _mark(self, ranges: Sequence[Range]) -> None:
        """Turn staged deletes into deletes."""
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

    def _reclaim(self) -> None:
        """Let go of whole chunks below everything live. The last chunk stays while it can take rows."""
        view = self.view
        while self.chunks and self.chunks[0].next_seq <= min(view.first_seq, self.first_seq):
            chunk = self.chunks[0]
            if len(self.chunks) == 1 and not (chunk.closed or chunk.count >= chunk.rows_max):
                break
            self.chunks.pop(0)
            self._starts.pop(0)
            if chunk.meta is not None:
                self.doomed.append(chunk.meta)
        self.trim_runs()

    def trim_runs(self) -> None:
        """Forget log runs and RAM blocks that no live row needs."""
        keep = bisect_right(self.runs, self.view.first_seq, key=_run_seq) - 1
        if keep > 0:
            for _, where in self.runs[:keep]:
                if isinstance(where, bytearray):
                    self.ram_bytes -= len(where)
            del self.runs[:keep]

    def is_in_ram(self, chunk: Chunk) -> bool:
        """Whether a chunk's unstored rows are in RAM blocks; a chunk never mixes them with logged ones."""
        if chunk.stored or not chunk.count:
            return False
        run = self.run_at(chunk.next_seq - 1)  # blocks of its first rows are gone when those are dead
        return run >= 0 and isinstance(self.runs[run][1], bytearray)

    def trim_stored_runs(self) -> None:
        """Forget log runs below the first row that is not in a segment."""
        first = next((c.first_seq + c.stored for c in self.chunks if c.stored < c.count), self.next_seq)
        keep = [
            run
            for i, run in enumerate(self.runs)
            if isinstance(run[1], bytearray) or i + 1 == len(self.runs) or self.runs[i + 1][0] > first
        ]
        if first == self.next_seq:
            keep = [run for run in keep if isinstance(run[1], bytearray)]
        self.runs = keep

    def release_ram(self) -> int:
        """Drop RAM blocks whose rows are in segments by now; returns the (negative) change of RAM bytes."""
        if not self.ram_bytes:
            return 0
        before = self.ram_bytes
        kept: list[Run] = []
        for i, (seq, where) in enumerate(self.runs):
            until = self.runs[i + 1][0] if i + 1 < len(self.runs) else self.next_seq
            spans = list(self.spans(seq, until))
            if isinstance(where, bytearray) and spans and all(c.stored >= stop for c, _, stop in spans):
                self.ram_bytes -= len(where)
            else:
                kept.append((seq, where))
        self.runs = kept
        return self.ram_bytes - before

    def can_unload(self) -> bool:
        """Whether everything about the rows is in segments and in the last snapshot."""
        return (
            not self.pending
            and not self.erasing
            and self.trim_from is None
            and not self.runs
            and all(c.meta is not None and c.stored == c.count and not c.unmarked for c in self.chunks)
        )

    def unload(self) -> None:
        """Give up the index rows; the next touch reads them again."""
        self.stored = [chunk.meta for chunk in self.chunks if chunk.meta is not None]
        self.may_expire = bool(self.expiries)
        self.chunks, self._starts, self.expiries = [], [], []
        self.tags, self.nodes = TagIndex(hold=True), StringTable(hold=True)

    def move_to_block(self, first_seq: int, stop_seq: int, block: bytes) -> None:
        """Rows [first_seq, stop_seq) lie in `block` from now on; what comes after them stays where it is."""
        rest: list[Run] = []
        if stop_seq < self.next_seq:
            at = find_run(self.runs, stop_seq)
            rest = [(stop_seq, self.runs[at][1]), *self.runs[at + 1 :]]
        self.runs = [(first_seq, block), *rest]

    def remove_chunk(self, chunk: Chunk) -> None:
        self.chunks.remove(chunk)
        self._starts = [c.first_seq for c in self.chunks]

    def replace_chunks(self, old: Sequence[Chunk], merged: Chunk) -> None:
        """One chunk for several neighbours, with the same rows."""
        at = self.chunks.index(old[0])
        assert self.chunks[at : at + len(old)] == list(old), "neighbours, in order"
        assert merged.count == sum(chunk.count for chunk in old)
        self.chunks[at : at + len(old)] = [merged]
        self._starts = [chunk.first_seq for chunk in self.chunks]

    def front_is_in_ram(self, last_seq: int) -> bool:
        """Whether everything live up to `last_seq` is in RAM blocks only."""
        run = self.run_at(self.first_seq)
        if run < 0 or not isinstance(self.runs[run][1], bytearray):
            return False
        first_logged = next((seq for seq, where in self.runs[run:] if isinstance(where, int)), self.next_seq)
        return last_seq < first_logged and all(
            not chunk.stored for chunk, _, _ in self.spans(self.first_seq, last_seq + 1)
        )

    def shift_rows(self, first_seq: int, shift: int, file_number: int) -> None:
        """Rows from `first_seq` on go to another log file than was thought, `shift` bytes on."""
        for chunk, first, stop in self.spans(first_seq, self.next_seq):
            offsets = chunk.rows["offset"][first:stop]
            offsets += np.uint32(shift & 0xFFFF_FFFF)  # wraps, so that a negative shift works as well
        while self.runs and self.runs[-1][0] >= first_seq:
            self.runs.pop()
        self.runs.append((first_seq, file_number))

    def run_at(self, seq: int) -> int:
        """Position in `runs` of the run that holds `seq`."""
        return find_run(self.runs, seq)

    # -- after a failed commit -----------------------------------------------------------------------------

    def discard_staged(self) -> None:
        """Forget everything that was not published; the shard takes no more changes."""
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

    def rebuild_strings(self) -> None:
        """Tags and nodes again from the rows: the tables counted changes that never happened."""
        tags, nodes = TagIndex(hold=True), StringTable(hold=True)
        for chunk in self.chunks:
            rows = chunk.rows
            alive = np.nonzero(chunk.live(0, chunk.count, DEAD))[0]
            for i in alive.tolist():
                if chunk.first_seq + i < self.first_seq:
                    continue
                tag, node = int(rows["tag"][i]), int(rows["node"][i])
                if tag:
                    rows["tag"][i] = tags.add(chunk.first_seq + i, self.tags.strings.name(tag))
                if node:
                    rows["node"][i] = nodes.add(self.nodes.name(node))
        self.tags, self.nodes = tags, nodes

    # -- proofs --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert what must hold at every moment."""
        if self.is_away:
            return
        view = self.view
        assert view.evict_floor <= view.first_seq or not view.count, (self.name, view)
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
        for before, after in zip(self.chunks, self.chunks[1:], strict=False):
            assert before.next_seq <= after.first_seq


def _run_seq(run: Run) -> int:
    return run[0]


def find_run(runs: list[Run], seq: int) -> int:
    """Position of the run that holds `seq`."""
    return bisect_right(runs, seq, key=_run_seq) - 1


def add_loss(losses: list[Loss], loss: Loss) -> None:
    """Keep the ranges ascending and apart; one that touches another of the same reason is joined to it."""
    losses.append(loss)
    losses.sort()
    joined: list[Loss] = []
    for first, last, reason in losses:
        if joined and first <= joined[-1][1] + 1 and (joined[-1][2] == reason or first <= joined[-1][1]):
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]), joined[-1][2])
        else:
            joined.append((first, last, reason))
    while len(joined) > LOSS_RANGES_MAX:  # a too wide announcement is safe, a missing one is not
        gaps = [(joined[i + 1][0] - joined[i][1], i) for i in range(len(joined) - 1)]
        i = min(gaps)[1]
        joined[i : i + 2] = [(joined[i][0], joined[i + 1][1], joined[i][2])]
    losses[:] = joined
