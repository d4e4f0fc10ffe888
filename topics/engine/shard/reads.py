"""Read commands: diff and long polls, topic state and lists, reads by tag.

They are answered from published state; a reply that a crash could still contradict is held back. A read that finds nothing
is parked within the same turn, so it cannot miss an append.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from topics.api import limits
from topics.api.errors import InvalidRequest, TopicNotFound, TopicsError
from topics.engine.commands import topics as cmd
from topics.engine.commands.standing_reads import FollowedTopic
from topics.engine.reading.hot_segments import DamagedSegment
from topics.engine.shard.long_commands import Work
from topics.engine.shard.state import Postpone, ShardState, Waiter, as_ranges
from topics.engine.shard.topic_upkeep import UpkeepPending
from topics.engine.storage import frames
from topics.engine.storage.control import Deletion, Lost
from topics.engine.storage.index import SMALL, Chunk
from topics.engine.storage.segments import BLOCK_BYTES
from topics.engine.topic.log import Loss, Op, Range, TopicLog
from topics.engine.topic.tags import scan

SEND_RETRY_MS = 50  # retry interval for an expired long poll whose reply cannot be sent yet
WAKE_COST = 4096  # delivery cost of a long poll that is answered, in addition to its records
CHECK_COST = 2048  # delivery cost of one that is checked and keeps waiting
ROWS_PER_SLICE = 512  # rows scanned at a time when the tag index did not give a live record
WAITERS_DONE_MAX = 64  # answered waiters always tolerated in the heap


class Reads:
    def __init__(self, state: ShardState) -> None:
        self.state = state
        state.handlers |= {
            cmd.Diff: self._diff,
            cmd.State: self._state,
            cmd.ListTopics: self._list,
            cmd.LastByTag: self._last_by_tag,
            cmd.NextByTag: self._next_by_tag,
            cmd.RecordsAt: self._records_at,
            cmd.CountByTag: self._count_by_tag,
            cmd.ListDeleted: self._list_deleted,
        }
        self.waiters_due: dict[int, TopicLog] = {}  # topics that have changed and have waiters
        self.blocked_waiters: dict[int, TopicLog] = {}  # topics with waiters whose reply cannot be sent yet
        self.polls: list[tuple[int, int, Waiter]] = []  # heap: deadline, tie-breaker, long poll
        self._poll_count = 0
        self._waiting = 0  # unanswered waiters
        self._unsynced: dict[int, TopicLog] = {}  # topics with unsynced heads; see `track_synced_head`
        state.events.published.append(self._published)
        state.events.synced.append(self._synced)
        state.events.failed.append(self._shard_failed)

    # -- what they follow ----------------------------------------------------------------------------------

    def _published(self, log: TopicLog, op: Op) -> None:
        if log.waiters and (op.head or op.first_seq or op.dropped or op.loss):
            self.waiters_due[log.id] = log
        if log.unsynced_heads is not None:
            self._note_head(log)

    def _shard_failed(self, reason: str) -> None:
        self.waiters_due |= {log.id: log for log in self.state.by_id.values() if log.waiters}

    def track_synced_head(self, log: FollowedTopic) -> None:
        """From now on keep `log.synced_head` up to date: the head that no crash can undo."""
        assert isinstance(log, TopicLog)
        if log.unsynced_heads is None:
            log.unsynced_heads = deque()
            self.state.publishing_lsn = self.state.written_lsn
            self._note_head(log)

    def _note_head(self, log: TopicLog) -> None:
        state = self.state
        assert log.unsynced_heads is not None
        if state.publishing_lsn <= state.synced_lsn and not log.unsynced_heads:
            log.synced_head = log.view.head
        else:
            log.unsynced_heads.append((state.publishing_lsn, log.view.head))
            self._unsynced[log.id] = log

    def _synced(self, lsn: int) -> None:
        for log in list(self._unsynced.values()):
            heads = log.unsynced_heads
            assert heads is not None
            while heads and heads[0][0] <= lsn:
                log.synced_head = heads.popleft()[1]
                if log.waiters:
                    self.waiters_due[log.id] = log
            if not heads:
                del self._unsynced[log.id]

    # -- diff and long polls -------------------------------------------------------------------------------

    def _diff(self, token: object, command: cmd.Diff) -> None:
        state = self.state
        if min(command.from_seq, command.limit, command.max_bytes, command.wait_ms, command.from_ts) < 0:
            raise InvalidRequest("from_seq, from_ts, limit, max_bytes and wait_ms cannot be negative")
        log = state.for_read(command.topic)
        if command.touch:
            log.last_read_ts = state.now_ms
        page = self.read_page(log, command)
        if self._has_nothing_new(page, page.head_seq) or command.from_seq > page.head_seq:
            state.check_log_complete()
        may_wait = command.standing or (command.wait_ms and len(log.waiters) < limits.WAITERS_PER_TOPIC_MAX)
        # A standing read reports its progress; a client's long poll waits for a record.
        is_news = command.standing and page.next_from_seq != command.from_seq
        if may_wait and not is_news and self._has_nothing_new(page, page.head_seq):
            self.park(token, command, log, page.head_seq)
        else:
            state.answer(token, page, log)

    @staticmethod
    def _has_nothing_new(page: cmd.Page | cmd.FramePage, head: int) -> bool:
        """Whether the page is empty: everything is read, and no record was added since this head."""
        return (
            not (page.count if isinstance(page, cmd.FramePage) else page.seqs)
            and page.tombstone is None
            and page.next_from_seq == page.head_seq == head
        )

    def read_page(self, log: TopicLog, command: cmd.Diff) -> cmd.Page | cmd.FramePage:
        while True:
            try:
                return self.state.reader.diff(log, command)
            except DamagedSegment as damage:
                self.record_losses(log, damage)

    def record_losses(self, log: TopicLog, damage: DamagedSegment) -> None:
        """Replace damaged records by announced losses, so that the read can continue without them."""
        state = self.state
        chunk = damage.chunk
        rows, erased = damage.found or state.reader.damaged_rows(log, chunk)
        if erased:
            self._redelete(log, as_ranges([chunk.first_seq + row for row in erased]))
        state.counters["corrupt"] = state.counters.get("corrupt", 0) + len(rows)
        for first, last in as_ranges([chunk.first_seq + row for row in rows]):
            op = Op(log)
            state.log_if_room(frames.LOSS, log, Lost(first, last, "corrupt"), op)
            state.count_live(op)
            log.publish_now(op)
        state.touched[log.id] = log

    def _redelete(self, log: TopicLog, ranges: list[Range]) -> None:
        """Delete records whose bytes were erased: they were deleted, though no other trace of that is left."""
        state = self.state
        op = Op(log)
        state.log_if_room(frames.DELETE, log, Deletion(ranges), op)
        state.count_live(op)
        log.publish_now(op)

    def park(self, token: object, command: cmd.Diff, log: TopicLog, head: int) -> None:
        """Park a read that has seen the topic up to its head until there is more."""
        wait_ms = min(command.wait_ms, limits.DIFF_WAIT_MS_MAX)
        waiter = Waiter(token, command, self.state.clock.mono_ms + wait_ms, log, head)
        log.waiters.append(waiter)
        self._waiting += 1
        if not command.standing:
            self._push_waiter(waiter, waiter.deadline_ms)

    def unpark(self, token: object, log: TopicLog) -> None:
        """Drop a parked read, for example because its client has disconnected. No effect if it is not parked."""
        state = self.state
        for waiter in log.waiters:
            assert isinstance(waiter, Waiter)
            if waiter.token is token:
                log.waiters.remove(waiter)
                self._close_waiter(waiter)
                return
        # It is being handled (again), and waits for the topic's upkeep or for cold blocks.
        if state.cold.waiting:
            state.cold.withdraw(lambda found: found is token)
        if state.upkeep.queue:
            state.upkeep.withdraw(lambda found: found is token)

    # -- standing reads of the shell, see commands/standing_reads.py -------------------------------------------

    def follow(self, name: str) -> TopicLog:
        return self.state.loaded_topic(name)

    def followed(self, name: str) -> TopicLog | None:
        return self.state.published.get(name)

    def park_standing(self, token: object, command: cmd.Diff, topic: FollowedTopic) -> None:
        assert isinstance(topic, TopicLog)
        self.park(token, command, topic, command.from_seq)
        head = topic.view.head
        readable = min(topic.synced_head, head) if command.synced else head
        if not command.from_seq == readable == head or topic.expiring:
            self.waiters_due[topic.id] = topic  # the scheduler decides when it is read

    def withdraw_standing(self, token: object, name: str) -> None:
        log = self.state.published.get(name)
        if log is not None:
            self.unpark(token, log)

    def note_read(self, name: str) -> None:
        log = self.state.published.get(name)
        if log is not None:
            log.last_read_ts = self.state.now_ms

    def _push_waiter(self, waiter: Waiter, due_ms: int) -> None:
        self._poll_count += 1
        heapq.heappush(self.polls, (due_ms, self._poll_count, waiter))
        if len(self.polls) > 2 * self._waiting + WAITERS_DONE_MAX:
            # Answered waiters would stay until their deadline: half a minute of a busy tail.
            self.polls = [entry for entry in self.polls if not entry[2].done]
            heapq.heapify(self.polls)

    def end_polls(self) -> None:
        """Answer long polls whose deadline has passed."""
        state = self.state
        room = limits.WAKE_BYTES_MAX
        for _ in range(limits.POLLS_ENDED_MAX):
            if room <= 0 or not self.polls or self.polls[0][0] > state.clock.mono_ms:
                return
            waiter = heapq.heappop(self.polls)[2]
            if waiter.done:
                continue
            if state.can_send(waiter.token):
                waiter.log.waiters.remove(waiter)
                room -= self.serve_waiter(waiter, is_last=True)
            else:
                self._push_waiter(waiter, state.clock.mono_ms + SEND_RETRY_MS)

    def serve_waiter(self, waiter: Waiter, *, is_last: bool = False) -> int:
        """Answer a parked read if there is something new for it, or it `is_last`; returns the delivery cost in bytes."""
        log = waiter.log
        size = 0
        try:
            if not log.view.dropped and log.stored is None and not log.deferred:
                page = self.read_page(log, waiter.command)
                if not is_last and self._has_nothing_new(page, waiter.head):
                    log.waiters.append(waiter)
                    return CHECK_COST
                size = page.size
                if type(page) is cmd.Page and page.seqs and log.needs_no_upkeep:
                    self._close_waiter(waiter)
                    if waiter.command.touch:
                        log.last_read_ts = self.state.now_ms
                    self.state.ready.append((waiter.token, page))
                    return size + WAKE_COST
        except (TopicsError, OSError):
            pass  # handled again below, where the error becomes the reply
        self._finish_waiter(waiter)
        return size + WAKE_COST

    def _finish_waiter(self, waiter: Waiter) -> None:
        """Handle the read again without waiting, whatever the reply is."""
        self._close_waiter(waiter)
        if waiter.log.view.dropped:
            self.state.ready.append((waiter.token, TopicNotFound(waiter.log.name)))
            return
        self.state.handle(waiter.token, replace(waiter.command, wait_ms=0))

    def _close_waiter(self, waiter: Waiter) -> None:
        waiter.done = True
        self._waiting -= 1

    def _state(self, token: object, command: cmd.State) -> None:
        log = self.state.for_read(command.topic)
        if command.touch:
            log.last_read_ts = self.state.now_ms
        self.state.answer(token, self._state_of(log), log)

    def _state_of(self, log: TopicLog) -> cmd.TopicState:
        state = state_of(log)
        for call in self.state.events.state_requested:
            call(log, state)
        return state

    def _list(self, token: object, command: cmd.ListTopics) -> None:
        state = self.state
        size = min(max(command.limit, 1), limits.LIST_PAGE_MAX)
        rows: list[cmd.TopicState] = []
        timed: TopicLog | None = None  # a topic whose state depends on the time
        pending: UpkeepPending | None = None
        for name in islice(self._listed(command), size + 1):
            log = state.published[name]
            if log.config.ttl_ms or log.expiries or log.may_expire or log.deferred or log.is_over_cap:
                try:
                    state.touch(log)
                except UpkeepPending as error:  # continue, so that the other topics are queued as well
                    pending = error
                    continue
                state.postpone_if_expiring(log)
                timed = log
            if command.touch and len(rows) < size:
                log.last_read_ts = state.now_ms
            rows.append(self._state_of(log))
        if pending is not None:
            raise pending
        if timed is not None:
            state.answer(token, cmd.TopicList(rows), timed)
        else:
            state.ready.append((token, cmd.TopicList(rows)))

    def _listed(self, command: cmd.ListTopics) -> Iterator[str]:
        """The names of a list request, ascending; names outside its prefixes are skipped without a scan."""
        names = self.state.names
        after = names.bisect_right(command.after) if command.after else 0
        for prefix in narrow_prefixes(command.prefix, command.prefixes):
            for name in names.islice(max(after, names.bisect_left(prefix))):
                if not name.startswith(prefix):
                    break
                yield name

    # -- by tag: scans of the tag index run in slices -------------------------------------------------------

    def _last_by_tag(self, token: object, command: cmd.LastByTag) -> None:
        log = self.state.for_read(command.topic)
        self.state.check_log_complete()
        work = (
            self._last_of_each(token, log, command) if command.each else self._find_one(token, log, command)
        )
        self.state.long.start(token, command, log, work)

    def _next_by_tag(self, token: object, command: cmd.NextByTag) -> None:
        log = self.state.for_read(command.topic)
        self.state.long.start(token, command, log, self._find_one(token, log, command))

    def _last_of_each(
        self, token: object, log: TopicLog, command: cmd.LastByTag, before: cmd.RecordsAt | None = None
    ) -> Work:
        """The last record of each tag of a page; `before`: the same page, after some of its records died."""
        if before is None:
            tags, more = yield from tags_page(log, command, command.after)
        else:
            tags, more = before.tags, before.more
        while True:
            seqs, fit = self._last_seqs(log, tags, command.max_bytes or limits.DIFF_BYTES_MAX)
            if fit < len(tags):
                tags, more = tags[:fit], True
            if seqs or not more:
                break
            # All tags of the page were removed in the meantime: an empty page would have no cursor.
            tags, more = yield from tags_page(log, command, tags[-1])
        self.state.handle(token, cmd.RecordsAt(log.name, log.id, seqs, command, more, tags))

    def _find_one(
        self,
        token: object,
        log: TopicLog,
        command: cmd.LastByTag | cmd.NextByTag,
        before: cmd.RecordsAt | None = None,
    ) -> Work:
        """The newest or the next matching record; `before`: another one, after the record found earlier died."""
        if before is None:
            since = log.next_seq
            seq = yield from find_candidate(log, command)
        else:
            since, seq = before.since, before.seqs[0]
        if not log.is_live(seq):
            seq = yield from find_replacement(log, command, seq, since)
        if not seq and isinstance(command, cmd.NextByTag):
            self.state.check_log_complete()
        self.state.handle(token, cmd.RecordsAt(log.name, log.id, [seq] if seq else [], command, since=since))

    def _records_at(self, token: object, command: cmd.RecordsAt) -> None:
        log = self.state.for_read(command.topic)
        if log.id != command.topic_id:
            raise TopicNotFound(command.topic)
        if log.are_live(np.array(command.seqs, np.uint64)).all():
            self._answer_records(token, log, command.seqs, more=command.more)
            return
        asked = command.command
        if isinstance(asked, cmd.LastByTag) and asked.each:
            work = self._last_of_each(token, log, asked, command)
        else:
            work = self._find_one(token, log, asked, command)
        self.state.long.start(token, command, log, work)

    def _last_seqs(self, log: TopicLog, tags: list[bytes], bytes_max: int) -> tuple[list[int], int]:
        """The last seqs, ascending, of as many tags as fit a page; and the number of those tags."""
        seqs: list[int] = []
        size = 0
        cold: set[tuple[int, int]] = set()  # cold blocks to fetch: the records may be far apart
        taken = b""  # no page may end with the empty tag, as no cursor can express that
        for at, tag in enumerate(tags):
            seq = log.tags.last(tag, log.are_live)
            found = log.find(seq) if seq else None
            if found is None:
                continue
            size += found[0].length_at(found[1])
            if self.state.reader.is_cold(log, found[0]):
                cold.add((found[0].first_seq, found[0].get(found[1])[0] // BLOCK_BYTES))
            if (size > bytes_max or len(cold) > limits.COLD_BLOCKS_PER_READ) and taken:
                return sorted(seqs), at
            seqs.append(seq)
            taken = tag
        return sorted(seqs), len(tags)

    def _answer_records(self, token: object, log: TopicLog, seqs: list[int], *, more: bool = False) -> None:
        """Reply with these records. The tag index is staged state, so the reply is held until that is published."""
        while True:
            page = cmd.Page.empty(
                log.name,
                next_from_seq=seqs[-1] if seqs else log.next_seq - 1,
                head_seq=log.next_seq - 1,
                earliest_seq=log.first_seq,
                scanned=len(seqs),
                more=more,
            )
            picked: list[tuple[Chunk, list[int]]] = []
            for seq in seqs:
                found = log.find(seq)
                if found is None or found[0].flags_at(found[1]) & frames.DEAD:
                    continue
                if picked and picked[-1][0] is found[0]:
                    picked[-1][1].append(found[1])
                else:
                    picked.append((found[0], [found[1]]))
            if seqs and seqs[-1] > log.view.head and self._is_being_staged(log, seqs[-1]):
                raise Postpone(log)
            try:
                if picked:
                    self.state.reader.fill(log, page, [(chunk, np.array(rows)) for chunk, rows in picked])
                break
            except DamagedSegment as damage:
                self.record_losses(log, damage)
        self.state.answer(token, page, log, held=log.pending > 0)

    def _is_being_staged(self, log: TopicLog, seq: int) -> bool:
        """Whether an unpublished record is part of the staged group, so that its frame is not in a file yet."""
        found = log.find(seq) if self.state.appended else None
        if found is None or log.runs[log.run_at(seq)][1] != self.state.file_number:
            return False
        return found[0].get(found[1])[0] >= self.state.frame_offset

    def _count_by_tag(self, token: object, command: cmd.CountByTag) -> None:
        self.state.check_log_complete()
        log = self.state.for_read(command.topic)
        self.state.long.start(token, command, log, self._counts(token, log, command))

    def _counts(self, token: object, log: TopicLog, command: cmd.CountByTag) -> Work:
        counts: list[tuple[bytes, int]] = []
        more, after = True, command.after
        while more and not counts:
            tags, more = yield from tags_page(log, command, after)
            counts = [(tag, count) for tag in tags if (count := log.tags.count(tag))]
            after = tags[-1] if tags else b""
        self.state.answer(token, cmd.TagCounts(log.name, counts, more), log, held=log.pending > 0)

    def _list_deleted(self, token: object, command: cmd.ListDeleted) -> None:
        if min(command.from_seq, command.limit) < 0:
            raise InvalidRequest("from_seq and limit cannot be negative")
        self.state.check_log_complete()
        log = self.state.for_read(command.topic)
        self.state.answer(token, deleted_page(log, command), log)


def deleted_page(log: TopicLog, command: cmd.ListDeleted) -> cmd.DeletedRanges:
    """The seq ranges that readers skip silently: without a live record and without a tombstone for a loss."""
    view = log.view
    limit = min(command.limit or limits.DIFF_LIMIT_DEFAULT, limits.DIFF_LIMIT_MAX)
    first = max(min(command.from_seq, view.head) + 1, view.evict_floor)
    stop = view.head + 1
    live = [np.array([first - 1], np.int64)]
    rows_left = limits.FILTER_ROWS_MAX
    for chunk, low, high in log.spans(max(first, view.first_seq), stop):
        high = min(high, low + rows_left)
        live.append(np.flatnonzero(chunk.live(low, high)) + (chunk.first_seq + low))
        rows_left -= max(high - low, SMALL)  # small chunks cost more than their rows
        if rows_left <= 0:
            stop = chunk.first_seq + high
            break
    edges = np.concatenate([*live, np.array([stop], np.int64)])
    gaps = np.flatnonzero(np.diff(edges) > 1)
    if len(gaps) > limit:
        gaps = gaps[:limit]
        stop = int(edges[gaps[-1] + 1])
    ranges: list[Range] = []
    for gap in zip((edges[gaps] + 1).tolist(), (edges[gaps + 1] - 1).tolist(), strict=True):
        ranges += without_losses(gap, view.losses)
    if len(ranges) > limit:
        ranges = ranges[:limit]
        stop = ranges[-1][1] + 1
    earliest = min(view.first_seq, view.head + 1)
    return cmd.DeletedRanges(log.name, ranges, stop - 1, view.head, earliest)


def without_losses(gap: Range, losses: list[Loss]) -> Iterator[Range]:
    """A range without the losses in it, which are ascending."""
    first, last = gap
    for lost_first, lost_last, _ in losses:
        if lost_last < first:
            continue
        if lost_first > last:
            break
        if first < lost_first:
            yield first, lost_first - 1
        first = lost_last + 1
    if first <= last:
        yield first, last


def tags_page(
    log: TopicLog, command: cmd.LastByTag | cmd.CountByTag, after: bytes
) -> Generator[int, None, tuple[list[bytes], bool]]:
    """One page of matching tags, and whether more follow."""
    size = min(max(command.limit, 0) or limits.TAGS_PAGE_MAX, limits.TAGS_PAGE_MAX)
    tags: list[bytes] = []
    for units, found in scan(lambda: log.tags, command.match, after):
        tags += found
        yield units + len(found)
        if len(tags) > size + 1:
            break
    if tags[:size] == [b""]:
        size += 1  # no cursor can express "after the empty tag", so no page ends with it
    return tags[:size], len(tags) > size


def find_candidate(log: TopicLog, command: cmd.LastByTag | cmd.NextByTag) -> Generator[int, None, int]:
    """The newest or the next seq over all matching tags, or 0. It may have died before the last tag was checked."""
    found = 0
    for units, tags in scan(lambda: log.tags, command.match):
        if isinstance(command, cmd.LastByTag):
            found = max([found, *(log.tags.last(tag, log.are_live) for tag in tags)])
        else:
            seqs = (log.tags.first_at_or_after(tag, command.from_seq, log.are_live) for tag in tags)
            found = min([seq for seq in (found, *seqs) if seq], default=0)
        yield units + 3 * len(tags)
    return found


def find_replacement(
    log: TopicLog, command: cmd.LastByTag | cmd.NextByTag, seq: int, since: int
) -> Generator[int, None, int]:
    """The newest or the next matching record after the candidate `seq` died, or 0.

    All tags were checked after `since` was the next seq, so no record below `since` precedes `seq`. The rest is searched row
    by row: searching all tags again might never end if each candidate died in the meantime. Any record added since was the
    newest at some moment.
    """
    upto = log.next_seq
    if isinstance(command, cmd.LastByTag):
        ranges = [(since, upto), (0, seq)]
    else:
        ranges = [(seq or max(since, command.from_seq), upto)]
    rows = ROWS_PER_SLICE
    while True:
        for first, stop in ranges:
            found = yield from match_in_rows(log, command, first, stop, rows)
            if found:
                return found
        if upto == log.next_seq:
            return 0
        ranges = [(upto, log.next_seq)]
        upto = log.next_seq
        rows *= 2  # so that it catches up with any writer


def match_in_rows(
    log: TopicLog, command: cmd.LastByTag | cmd.NextByTag, first: int, stop: int, most: int
) -> Generator[int, None, int]:
    """The last or the first matching live record in [first, stop), or 0; scans up to `most` rows at a time."""
    newest = isinstance(command, cmd.LastByTag)
    while first < stop:
        if newest:
            span = log.span_before(stop, min(most, stop - first))
        else:
            span = next(log.spans(max(first, log.first_seq), stop), None)
        if span is None:
            return 0
        chunk, low, high = span
        low, high = (max(low, first - chunk.first_seq), high) if newest else (low, min(high, low + most))
        alive = np.flatnonzero(chunk.live(low, high, frames.DEAD)) + low
        names = log.tags.strings.names
        ids = chunk.rows["tag"][alive].tolist()
        seqs = [
            chunk.first_seq + row
            for row, tag in zip(alive.tolist(), ids, strict=True)
            if command.match.matches(names[tag])
        ]
        if seqs:
            return seqs[-1] if newest else seqs[0]
        yield 8 + (high - low) // 16 + len(ids)
        if newest:
            stop = chunk.first_seq + low
        else:
            first = chunk.first_seq + high
    return 0


def narrow_prefixes(prefix: str, prefixes: tuple[str, ...] | None) -> list[str]:
    """Ascending, disjoint prefixes of the names that start with `prefix` and with one of `prefixes`."""
    if prefixes is None:
        return [prefix]
    found: list[str] = []
    for other in sorted(prefixes):
        longer = max(prefix, other, key=len)
        fits = longer.startswith(prefix) and longer.startswith(other)
        if fits and not (found and longer.startswith(found[-1])):
            found.append(longer)
    return found


def state_of(log: TopicLog) -> cmd.TopicState:
    view = log.view
    return cmd.TopicState(
        log.name,
        view.head,
        min(view.first_seq, view.head + 1),
        view.count,
        view.bytes,
        view.config,
        view.last_write_ts or None,
        log.last_read_ts or None,
        log.epoch,
    )
