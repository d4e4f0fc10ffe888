"""Transaction tasks: write staged chunks, decide and carry out commits, remove the file. One task per active transaction.

A commit that fits one envelope is written at once: its records and its end. For a larger commit the order of its chunks is
written to the file and synced, then the decision is logged and synced, and then the chunks are appended,
some at a time, each time with the progress. Before the decision an error is returned to the client. After it the commit can
only be delayed, by lack of space or by a disk that cannot be read. A chunk that has been damaged since is announced as lost.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

from topics.api import limits
from topics.api.errors import (
    Throttled,
    TopicsError,
    TransactionIncomplete,
    TransactionNotFound,
)
from topics.engine.commands import transactions as txc
from topics.engine.commands.topics import Records
from topics.engine.core.tasks import Blocking, Steps, WaitSynced, WaitUntil
from topics.engine.shard.appends import Appends, frame_bytes_at_most
from topics.engine.shard.state import CONTROL_BYTES, ShardState
from topics.engine.shard.transactions import Transaction, Transactions
from topics.engine.storage import frames
from topics.engine.storage.control import Advanced, Decided, Decision
from topics.engine.storage.files import is_out_of_resources
from topics.engine.storage.transaction_file import (
    ChunkPosition,
    encode_decision,
    read_chunks,
    read_decision,
    read_staged,
    write_entries,
)
from topics.engine.topic.log import Op
from topics.engine.topic.transactions import CommitWaiter, StagedChunk

STAGE_KIND = "stage"  # job kind: these may take long and have their own thread
REPORTED_MAX = 20  # parts listed in an error, and chunks per part
FORGOTTEN_BYTES = limits.TXN_PRODUCERS_FORGOTTEN_MAX * (limits.KEY_BYTES_MAX + 4)
PARTS_PER_SLICE = 4096

ChunkSelection = tuple[list[ChunkPosition], int]  # ordered chunks, and the size of the largest record


class TransactionCommits:
    def __init__(self, state: ShardState, appends: Appends, transactions: Transactions) -> None:
        self.state = state
        self.appends = appends
        self.transactions = transactions

    def transaction_steps(self, txn: Transaction) -> Steps:
        """Do all current work of a transaction."""
        while not txn.log.dropped:
            if txn.is_ended:
                yield from self._remove_file(txn)
                return
            if txn.decision is not None:
                if self.transactions.commits_deferred:
                    return
                yield from self._append_decided(txn, txn.decision)
            elif not txn.is_indexed:
                yield from self._index_file(txn)
            elif txn.waiting:
                yield from self._write_chunks(txn)
            elif txn.commit_waiters:
                yield from self._try_commit(txn, txn.commit_waiters[0])
            else:
                return
        self._refuse_written(txn)
        self.transactions.forget_transaction(txn)  # its file is removed with the topic

    def _path(self, txn: Transaction) -> str:
        return f"{self.state.reader.topic_dir(txn.log.id)}/{txn.name}"

    # -- the file ------------------------------------------------------------------------------------------

    def _index_file(self, txn: Transaction) -> Steps:
        """Read the file of a transaction that was begun before the restart, to learn which chunks it has."""
        disk, path = self.transactions.disk, self._path(txn)
        assert disk is not None
        try:
            found = yield Blocking(STAGE_KIND, lambda: read_staged(disk, path))
        except (OSError, TopicsError) as error:  # TopicsError if a newer version wrote it
            self.transactions.answer_all(txn, TopicsError(f"the staged chunks could not be read: {error}"))
            return
        txn.is_indexed = True
        for entry in found:
            txn.end = entry.offset + entry.bytes
            if entry.chunk is not None:
                head = entry.chunk
                placed = entry.offset, entry.bytes, head.records, head.size
                txn.chunks.setdefault((head.part, head.chunk), (placed, head.largest))
        self.transactions.staged_chunks += len(txn.chunks) if txn in self.transactions.open else 0

    def _write_chunks(self, txn: Transaction) -> Steps:
        """Write all waiting chunks, with one sync."""
        self._take_waiting(txn)
        if not txn.writing:
            return
        disk, path, end = self.transactions.disk, self._path(txn), txn.end
        assert disk is not None
        entries = [staged.entry for staged in txn.writing]
        sync = txn.log.config.durability == "fsync"
        try:
            yield Blocking(STAGE_KIND, lambda: write_entries(disk, path, end, entries, sync=sync))
        except OSError as error:
            self._writing_failed(txn, error)
            return
        if txn.is_ended:
            self._refuse_written(txn)
            return
        written, txn.writing = txn.writing, []
        for staged in written:
            head = staged.head
            placed = txn.end, len(staged.entry), head.records, head.size
            txn.chunks[staged.key] = placed, head.largest
            txn.end += len(staged.entry)
            self.transactions.staged_chunks += 1
            self._staged(txn, staged, repeated=False)

    def _take_waiting(self, txn: Transaction) -> None:
        """Move waiting chunks to `writing`. Known ones are answered at once; of duplicates the second keeps waiting."""
        rest: list[StagedChunk] = []
        taken: dict[tuple[str, int], None] = {}
        for staged in txn.waiting:
            if staged.key in txn.chunks:
                self._uncount(txn, staged)
                self._staged(txn, staged, repeated=True)
            elif staged.key in taken:
                rest.append(staged)
            else:
                taken[staged.key] = None
                txn.writing.append(staged)
        txn.waiting = rest

    def _staged(self, txn: Transaction, staged: StagedChunk, *, repeated: bool) -> None:
        head = staged.head
        result = txc.ChunkStaged(txn.log.name, head.part, head.chunk, head.records, repeated)
        self.state.ready.append((staged.token, result))

    def _uncount(self, txn: Transaction, staged: StagedChunk) -> None:
        txn.bytes -= len(staged.entry)
        self.transactions.staged_bytes -= len(staged.entry) if txn in self.transactions.open else 0

    def _refuse_written(self, txn: Transaction) -> None:
        """Refuse chunks that were being written when the transaction ended."""
        writing, txn.writing = txn.writing, []
        for staged in writing:
            self._uncount(txn, staged)
            self.transactions.reply_error(txn, staged.token, TransactionNotFound(txn.log.name, txn.id))

    def _writing_failed(self, txn: Transaction, error: OSError) -> None:
        """Refuse the chunks of a failed write. Unless only space was missing, the file can no longer be trusted, so the
        transaction ends and the producer has to begin it again.
        """
        writing, txn.writing = txn.writing, []
        refusal = _refusal(error)
        for staged in writing:
            self._uncount(txn, staged)
            self.state.ready.append((staged.token, refusal))
        if not is_out_of_resources(error) and not txn.is_ended and self.state.has_control_room():
            self.transactions.end_transaction(txn)

    def _remove_file(self, txn: Transaction) -> Steps:
        """Remove the file once the end of the transaction is synced."""
        disk, path = self.transactions.disk, self._path(txn)
        assert disk is not None
        yield WaitSynced(0)
        if not txn.log.dropped:
            try:
                yield Blocking(STAGE_KIND, lambda: disk.remove(path))
            except OSError:
                self.state.counters["txn_left"] += 1  # the next start removes it
        self.transactions.forget_transaction(txn)

    # -- before the decision -------------------------------------------------------------------------------

    def _try_commit(self, txn: Transaction, waiter: CommitWaiter) -> Steps:
        """Try to commit as the first waiting request asks, or answer it with an error."""
        refusal: TopicsError
        try:
            yield from self._decide(txn, waiter.command)
            return
        except OSError as error:
            refusal = _refusal(error)
        except TopicsError as error:
            refusal = error
        if waiter in txn.commit_waiters:
            txn.commit_waiters.remove(waiter)
            if not waiter.is_answered:
                self.transactions.reply_error(txn, waiter.token, refusal, waiter.command)

    def _decide(self, txn: Transaction, command: txc.CommitTransaction) -> Steps:
        state = self.state
        disk, log, path = self.transactions.disk, txn.log, self._path(txn)
        assert disk is not None and log.transactions is not None
        known = log.transactions
        if known.is_blocked(txn):  # a producer's batches are committed one at a time
            yield WaitUntil(lambda: txn.is_ended or not known.is_blocked(txn))
        chosen, largest = yield from self._select_chunks(txn, command.parts)
        records, size = sum(placed[2] for placed in chosen), sum(placed[3] for placed in chosen)
        self._check_commit(txn, records, size, largest)
        if _fits_one_envelope(chosen):
            read = yield Blocking(STAGE_KIND, lambda: read_chunks(disk, path, chosen))
            self._check_commit(txn, records, size, largest)
            self._check_read(txn, chosen, read)
            self._append_whole(txn, read)
            return
        if state.config.min_free_bytes:
            free = yield Blocking(STAGE_KIND, disk.free_bytes)
            # Until a checkpoint a record is stored twice, in addition to the staged copy.
            if free < state.config.min_free_bytes + 2 * size:
                raise Throttled("not enough disk space for the batch; free some", limit="disk_full")
        entry, end = encode_decision(chosen), txn.end
        yield Blocking(STAGE_KIND, lambda: write_entries(disk, path, end, [entry], sync=True))
        self._check_commit(txn, records, size, largest)
        state.reserve(2 * CONTROL_BYTES)
        txn.end += len(entry)
        txn.bytes += len(entry)
        self.transactions.staged_bytes += len(entry)
        txn.order = chosen
        decision = Decision(end, len(chosen), records, size)
        txn.decide(decision)
        state.bytes_reserved += size
        self.transactions.log_entry(log, frames.TXN_DECIDED, Decided(txn.id, decision))
        yield WaitSynced(0)

    def _select_chunks(
        self, txn: Transaction, parts: list[tuple[str, int, int]]
    ) -> Generator[None, Any, ChunkSelection]:
        """The chunks that a commit names, or an error with what is missing."""
        chosen: list[ChunkPosition] = []
        largest = 0
        problems: list[dict[str, object]] = []
        for i, (part, count, records) in enumerate(parts):
            if count > len(txn.chunks):
                missing = [n for n in range(min(count, REPORTED_MAX)) if (part, n) not in txn.chunks]
                problems.append({"part": part, "chunks": count, "missing": missing})
                continue
            found = [txn.chunks.get((part, n)) for n in range(count)]
            there = [one for one in found if one is not None]
            staged = sum(placed[2] for placed, _ in there)
            if len(there) < count:
                missing = [n for n, one in enumerate(found) if one is None][:REPORTED_MAX]
                problems.append({"part": part, "chunks": count, "missing": missing})
            elif staged != records:
                problems.append({"part": part, "records": records, "staged": staged})
            chosen += [placed for placed, _ in there]
            largest = max([largest, *(size for _, size in there)])
            if i % PARTS_PER_SLICE == PARTS_PER_SLICE - 1:
                yield None
        if problems:
            raise _incomplete(txn, problems)
        return chosen, largest

    def _check_commit(self, txn: Transaction, records: int, size: int, largest: int) -> None:
        """Checks that may refuse the commit before it is decided."""
        self.state.check_writable()
        log = txn.log
        if txn.is_ended or log.dropped:
            raise TransactionNotFound(log.name, txn.id)
        self.state.upkeep_now(log)
        if records:
            self.appends.check_room(log, log.config, log.name, records, size, largest)
        self.transactions.check_producers(log.transactions, txn.producer)

    def _check_read(self, txn: Transaction, chosen: list[ChunkPosition], read: list[Records | None]) -> None:
        """Drop chunks that turned out to be damaged, so that they can be staged again."""
        damaged = {placed[0] for placed, records in zip(chosen, read, strict=True) if records is None}
        if not damaged:
            return
        keys = [key for key, (placed, _) in txn.chunks.items() if placed[0] in damaged]
        for key in keys:
            del txn.chunks[key]
            self.transactions.staged_chunks -= 1
        raise _incomplete(txn, [{"part": part, "missing": [chunk]} for part, chunk in keys])

    # -- appending to the log ------------------------------------------------------------------------------

    def _append_whole(self, txn: Transaction, read: list[Records | None]) -> None:
        """Append a small batch: all records and the end of the transaction in one envelope."""
        log = txn.log
        made = [records for records in read if records is not None]
        self.state.reserve(self._need(txn, made))
        first = log.next_seq
        for records in made:
            self._append_chunk(txn, records, sync=True)
        count = log.next_seq - first
        self._end_committed(txn, first if count else 0, log.next_seq - 1 if count else 0, count, len(made), 0)

    def _need(self, txn: Transaction, made: list[Records]) -> int:
        per_tag = bool(txn.log.config.cap_per_tag)
        need = sum(frame_bytes_at_most(one, None, sum(_sizes(one)), per_tag=per_tag) for one in made)
        known = txn.log.transactions
        assert known is not None
        if len(known.producers) >= limits.TXN_PRODUCERS_MAX:
            need += FORGOTTEN_BYTES
        return need + 4 * CONTROL_BYTES

    def _append_chunk(self, txn: Transaction, records: Records, *, sync: bool) -> None:
        op = Op(txn.log, sync=sync)
        self.appends.stage_append(txn.log, txn.log.config, records, _sizes(records), op, created=False)
        op.plain = False  # it has no reply

    def _append_decided(self, txn: Transaction, decision: Decision) -> Steps:
        """Append the chunks of a decided commit that are not in the log yet. Only dropping the topic ends this early."""
        disk, log, path = self.transactions.disk, txn.log, self._path(txn)
        assert disk is not None
        if txn.order is None:
            try:
                order = yield Blocking(STAGE_KIND, lambda: read_decision(disk, path, decision.offset))
            except OSError:
                yield from self._pause(txn)
                return
            # If the list of chunks cannot be read, all remaining records are lost.
            txn.order = order if order is not None else [(0, 0, 0, 0)] * decision.chunks
            if order is None and not log.dropped:
                self.state.upkeep_now(log)
                while not self._can_append(txn, []):
                    yield from self._pause(txn)
                    if txn.is_ended:
                        return
                self._record_lost_chunk(txn, decision.records - decision.count)
                self._advance(txn, decision, decision.chunks, 0, decision.size - decision.size_done)
        while not txn.is_ended and not self.transactions.commits_deferred:
            placed = _next_slice(txn.order, decision.done)
            try:
                read = yield Blocking(STAGE_KIND, partial(read_chunks, disk, path, placed))
            except OSError:
                yield from self._pause(txn)
                continue
            while not txn.is_ended and not self._can_append(txn, read):
                yield from self._pause(txn)
            if not txn.is_ended:
                self._append_slice(txn, decision, placed, read)
                yield None

    def _pause(self, txn: Transaction) -> Steps:
        at_ms = txn.resume_ms = self.state.clock.mono_ms + limits.TXN_RETRY_MS
        self.transactions.timer_ms = min(self.transactions.timer_ms, at_ms)
        yield WaitUntil(lambda: txn.is_ended or self.state.clock.mono_ms >= at_ms)

    def _can_append(self, txn: Transaction, read: list[Records | None]) -> bool:
        """Whether there is space for a slice. Caps were checked before the decision. The last space is kept for deletes."""
        state = self.state
        try:
            state.upkeep_now(txn.log)
        except (OSError, TopicsError):
            return False
        if (
            state.low_space or state.disk_full or state.log_full
        ) and txn.log.config.durability != "ephemeral":
            return False
        made = [records for records in read if records is not None]
        return state.has_room(self._need(txn, made) + len(read) * CONTROL_BYTES)

    def _append_slice(
        self, txn: Transaction, decision: Decision, placed: list[ChunkPosition], read: list[Records | None]
    ) -> None:
        log = txn.log
        sync = log.config.durability == "fsync"
        first = log.next_seq
        count = size = 0
        for (_, _, records_of, size_of), records in zip(placed, read, strict=True):
            size += size_of
            if records is None:
                self._record_lost_chunk(txn, records_of)
                continue
            self._append_chunk(txn, records, sync=sync)
            count += len(records.payloads)
        if count:
            decision.first_seq = decision.first_seq or first
            decision.last_seq = log.next_seq - 1
        self._advance(txn, decision, decision.done + len(placed), count, size)

    def _record_lost_chunk(self, txn: Transaction, count: int) -> None:
        self.appends.stage_loss(
            txn.log, count, Op(txn.log, sync=txn.log.config.durability == "fsync"), "corrupt"
        )
        self.state.counters["corrupt"] = self.state.counters.get("corrupt", 0) + 1

    def _advance(self, txn: Transaction, decision: Decision, done: int, count: int, size: int) -> None:
        """Log the progress, in the same envelope as the records."""
        self.state.bytes_reserved -= size
        count += decision.count
        size += decision.size_done
        if done == decision.chunks:
            self._end_committed(txn, decision.first_seq, decision.last_seq, count, done, size)
            return
        entry = Advanced(
            txn.id, False, done, decision.first_seq, decision.last_seq, count, size, self.state.now_ms, []
        )
        # Records of an ephemeral topic are not in the log: a restart must append them again, so no progress is logged.
        is_logged = txn.log.config.durability != "ephemeral"
        if is_logged:
            self.transactions.log_entry(txn.log, frames.TXN_ADVANCED, entry)
        assert txn.log.transactions is not None
        txn.log.transactions.note_advanced(entry, is_logged=is_logged)

    def _end_committed(
        self, txn: Transaction, first_seq: int, last_seq: int, count: int, done: int, size: int
    ) -> None:
        """End a commit, in the envelope with its last records. Commit requests are answered once that is synced, in every
        durability class, because the producer then discards the batch.
        """
        state = self.state
        log, known = txn.log, txn.log.transactions
        assert known is not None
        forgotten = known.evictable_producers(txn.producer, state.now_ms) or []
        entry = Advanced(txn.id, True, done, first_seq, last_seq, count, size, state.now_ms, forgotten)
        self.transactions.log_entry(log, frames.TXN_ADVANCED, entry)
        waiter, txn.commit_waiters = txn.commit_waiters, []
        for over in known.note_advanced(entry):
            if over is not txn:
                self.transactions.answer_all(over, TransactionNotFound(log.name, over.id))
            self.transactions.with_work[over] = None
        state.counters["txn_committed"] += 1
        for one in waiter:
            if not one.is_answered:
                state.add_op(Op(log, one.token, self.transactions.committed(log, txn.id), sync=True))
        if not waiter:
            state.add_op(Op(log, sync=True))  # readers see its records, in order, once they are synced


def _sizes(records: Records) -> list[int]:
    return records.sizes if records.sizes is not None else [len(payload) for payload in records.payloads]


def _fits_one_envelope(chosen: list[ChunkPosition]) -> bool:
    if len(chosen) <= 1:
        return True
    records = sum(placed[2] for placed in chosen)
    size = sum(placed[1] for placed in chosen) + records * frames.OVERHEAD_BYTES
    return records <= limits.TXN_WHOLE_RECORDS and size <= limits.TXN_WHOLE_BYTES


def _next_slice(order: list[ChunkPosition], done: int) -> list[ChunkPosition]:
    stop, records, size = done, 0, 0
    while stop < len(order):
        records += order[stop][2]
        size += order[stop][1]
        if stop > done and (records > limits.TXN_SLICE_RECORDS or size > limits.TXN_SLICE_BYTES):
            break
        stop += 1
    return order[done:stop]


def _incomplete(txn: Transaction, problems: list[dict[str, object]]) -> TransactionIncomplete:
    names = ", ".join(str(problem["part"]) for problem in problems[:REPORTED_MAX])
    return TransactionIncomplete(
        f"the staged chunks do not match the commit in {len(problems)} parts ({names}); stage what is missing and commit again",
        topic=txn.log.name,
        txn=f"{txn.id:016x}",
        parts=problems[:REPORTED_MAX],
    )


def _refusal(error: OSError) -> TopicsError:
    if is_out_of_resources(error):
        return Throttled("the disk is full; free some space and retry", limit="disk_full")
    return TopicsError(
        f"the transaction's file could not be written: {error}; begin the transaction again and stage everything again"
    )
