"""Sink transactions: a producer's batch is appended exactly once and as a whole, however often it is sent.

    begin    open the transaction of (producer, batch), or learn that the batch is committed
    stage    write a chunk of records to the transaction's file, checked like a write; they are not records yet
    commit   name the parts in order; once decided, the server completes the commit by itself

Staged chunks are never kept in memory, as a batch may be larger than that. Requests that need the file are queued at the
transaction, and each transaction with work has a background task: it writes staged chunks, decides and carries out the commit,
and removes the file.

A commit that fits one envelope is written at once: its records and its end. For a larger commit the order of its chunks is
written to the file and synced, then the decision is logged and synced, and then the chunks are appended,
some at a time, each time with the progress. Before the decision an error is returned to the client. After it the commit can
only be delayed, by lack of space or by a disk that cannot be read. A chunk that has been damaged since is announced as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeAlias

from topics.api import limits
from topics.api.config import TopicConfig
from topics.api.errors import (
    Conflict,
    InvalidRequest,
    RecordTooLarge,
    ShardReadOnly,
    Throttled,
    TopicNotFound,
    TopicsError,
    TransactionCommitted,
    TransactionIncomplete,
    TransactionNotFound,
)
from topics.engine.commands import topics as cmd
from topics.engine.commands import transactions as txc
from topics.engine.commands.topics import Records
from topics.engine.core.ports import Disk
from topics.engine.core.tasks import Blocking, Lane, Steps, WaitSynced, WaitUntil
from topics.engine.shard.appends import Appends, frame_bytes_at_most
from topics.engine.shard.state import CONTROL_BYTES, ShardState
from topics.engine.storage import frames
from topics.engine.storage.control import Advanced, Decided, Decision, Opened
from topics.engine.storage.files import is_out_of_resources
from topics.engine.storage.transaction_file import (
    ChunkHead,
    ChunkPosition,
    blank_chunks,
    encode_chunk,
    encode_decision,
    parse_name,
    read_chunks,
    read_decision,
    read_staged,
    write_entries,
)
from topics.engine.topic.log import Op, TopicLog
from topics.engine.topic.snapshot_row import RowPart, TopicRow
from topics.engine.topic.transactions import (
    CommitWaiter,
    OpenTransaction,
    StagedChunk,
    TopicTransactions,
    transaction_id,
)

NEVER_MS = 1 << 62
STAGE_KIND = "stage"  # job kind: these may take long and have their own thread
REPORTED_MAX = 20  # parts listed in an error, and chunks per part
FORGOTTEN_BYTES = limits.TXN_PRODUCERS_FORGOTTEN_MAX * (limits.KEY_BYTES_MAX + 4)
PARTS_PER_SLICE = 4096

ChunkSelection: TypeAlias = tuple[
    list[ChunkPosition], int
]  # ordered chunks, and the size of the largest record


Transaction: TypeAlias = OpenTransaction[TopicLog]
TopicTxns: TypeAlias = TopicTransactions[TopicLog]


class Transactions:
    def __init__(self, state: ShardState, appends: Appends, disk: Disk) -> None:
        self.state = state
        self.appends = appends
        self.disk = disk  # for transaction files
        self.open: dict[Transaction, None] = {}  # open, or ended with a file that is not removed yet
        self.staged_bytes = 0
        self.staged_chunks = 0
        self.with_work: dict[Transaction, None] = {}
        self._lanes: dict[Transaction, Lane] = {}
        self.commits_deferred = False  # decided commits continue after the next start
        self.timer_ms = NEVER_MS  # the next transaction timeout, on the monotonic clock
        state.handlers |= {
            txc.BeginTransaction: self._begin_transaction,
            txc.StageChunk: self._stage_chunk,
            txc.CommitTransaction: self._commit_transaction,
            txc.AbortTransaction: self._abort_transaction,
        }
        state.appliers |= {
            frames.TXN_OPENED: self._apply_opened,
            frames.TXN_DECIDED: self._apply_decided,
            frames.TXN_ADVANCED: self._apply_advanced,
            frames.TXN_ENDED: self._apply_ended,
        }
        state.row_parts["transactions"] = RowPart(self._capture, self._restore)
        state.task_owners.append(self)
        state.erasers.append(self._eraser)
        state.busy.append(self.is_busy)
        state.events.topic_dropped.append(self._topic_dropped)
        state.events.recovered.append(self._recovered)
        state.events.failed.append(self._shard_failed)
        state.events.checked.append(self.check_transactions)

    # -- begin ---------------------------------------------------------------------------------------------

    def _begin_transaction(self, token: object, command: txc.BeginTransaction) -> None:
        state = self.state
        state.check_writable()
        log = state.for_write(command.topic)
        config = log.config if log is not None else self._begin_config(command)
        known = log.transactions if log is not None else None
        txn_id = transaction_id(command.producer, command.batch)
        if log is not None and known is not None and self._answer_known(token, log, known, command, txn_id):
            return
        self._check_opening(known, command.producer)
        state.reserve(4 * CONTROL_BYTES)
        created = log is None
        if log is None:
            log = self.appends.create(command.topic, config)
        number = known.number + 1 if known is not None else 1
        ttl_ms = min(max(command.ttl_ms, limits.TXN_TTL_MS_MIN), limits.TXN_TTL_MS_MAX)
        opened = Opened(txn_id, number, command.producer, command.batch, ttl_ms)
        self.log_entry(log, frames.TXN_OPENED, opened)
        assert log.transactions is not None
        self._add_transaction(log.transactions.open[txn_id])
        result = txc.TransactionState(log.name, txn_id, "open", created=created)
        op = Op(log, token, result, sync=created or config.durability == "fsync")
        if created:
            op.config = config
        state.add_op(op)

    def _begin_config(self, command: txc.BeginTransaction) -> TopicConfig:
        """The config of a topic that a transaction creates, as for a write without a config."""
        config = TopicConfig()
        if not (command.create if command.create is not None else config.auto_create):
            raise TopicNotFound(command.topic)
        self.appends.check_creation(command.topic, config)
        return config

    def _answer_known(
        self,
        token: object,
        log: TopicLog,
        known: TopicTxns,
        command: txc.BeginTransaction,
        txn_id: int,
    ) -> bool:
        """Reply if the batch is committed or its transaction is open; returns whether it did."""
        producer = known.producers.get(command.producer)
        if producer is not None and command.batch <= producer.batch:
            result = self.committed(log, txn_id)
            self.state.answer(token, result, log, held=log.pending > 0)
            return True
        txn = known.open.get(txn_id)
        if txn is None:
            return False
        if (txn.producer, txn.batch) != (command.producer, command.batch):
            raise InvalidRequest("another transaction has the same id; use another producer name")
        ttl_ms = min(max(command.ttl_ms, limits.TXN_TTL_MS_MIN), limits.TXN_TTL_MS_MAX)
        if ttl_ms != txn.ttl_ms:
            self.state.reserve(2 * CONTROL_BYTES)
            opened = Opened(txn_id, txn.number, txn.producer, txn.batch, ttl_ms)
            self.log_entry(log, frames.TXN_OPENED, opened)
        self._renew(txn)
        state: txc.TransactionStatus = "committing" if txn.decision is not None else "open"
        result = txc.TransactionState(log.name, txn_id, state, progress=txn.progress)
        self.state.answer(token, result, log, held=log.pending > 0)
        return True

    def _check_opening(self, known: TopicTxns | None, producer: str) -> None:
        if known is not None and len(known.open) >= limits.TXN_OPEN_PER_TOPIC_MAX:
            raise Throttled(
                "too many transactions of this topic are open; commit or abort some",
                limit="txn_open_per_topic",
                max=limits.TXN_OPEN_PER_TOPIC_MAX,
            )
        if len(self.open) >= limits.TXN_OPEN_MAX:
            raise Throttled(
                "too many transactions are open in this topic's shard; commit or abort some",
                limit="txn_open",
                max=limits.TXN_OPEN_MAX,
            )
        self.check_producers(known, producer)

    def check_producers(self, known: TopicTxns | None, producer: str) -> list[str]:
        """The idle producers to drop for a new one; raises if there is no room."""
        forgotten = known.evictable_producers(producer, self.state.now_ms) if known is not None else []
        if forgotten is None:
            raise Throttled(
                "the topic has its maximum number of producers; use fewer producer names, or another topic",
                limit="txn_producers",
                max=limits.TXN_PRODUCERS_MAX,
            )
        return forgotten

    # -- stage ---------------------------------------------------------------------------------------------

    def _stage_chunk(self, token: object, command: txc.StageChunk) -> None:
        self.state.check_writable()
        records = command.records
        sizes = self.appends.check_records(records, None)
        log, txn = self._find_transaction(command.topic, command.txn)
        if txn.decision is not None:
            raise TransactionCommitted(log.name, txn.id)
        self._renew(txn)
        count, largest = len(sizes), max(sizes)
        record_max = min(log.config.max_record_bytes or limits.RECORD_BYTES_MAX, limits.RECORD_BYTES_MAX)
        if largest > record_max:
            raise RecordTooLarge(f"a record of {largest} bytes; the maximum is {record_max}")
        if txn.is_indexed and (command.part, command.chunk) in txn.chunks:
            self.state.ready.append((token, _staged(log, command, count, repeated=True)))
            return
        head = ChunkHead(command.part, command.chunk, count, sum(sizes), largest)
        entry = encode_chunk(head, records)
        self._check_staging(txn, len(entry))
        txn.bytes += len(entry)
        self.staged_bytes += len(entry)
        txn.waiting.append(StagedChunk(token, head, entry))
        self.with_work[txn] = None

    def _check_staging(self, txn: Transaction, size: int) -> None:
        config = self.state.config
        if self.state.low_space or self.state.disk_full:
            raise Throttled("the disk is nearly full; free some space and retry", limit="disk_full")
        if config.txn_bytes_max and txn.bytes + size > config.txn_bytes_max:
            raise Throttled(
                "the transaction has reached its maximum size; commit smaller batches, or raise TOPICS_TXN_MAX_BYTES",
                limit="txn_max_bytes",
                max=config.txn_bytes_max,
            )
        if config.txn_shard_bytes_max and self.staged_bytes + size > config.txn_shard_bytes_max:
            raise Throttled(
                "the open transactions of this topic's shard have reached their maximum size; commit or abort some, or raise "
                "TOPICS_TXN_SHARD_BYTES",
                limit="txn_shard_bytes",
                max=config.txn_shard_bytes_max,
            )
        if self.staged_chunks + len(txn.waiting) >= limits.TXN_CHUNKS_MAX:
            raise Throttled(
                "the open transactions of this topic's shard have too many chunks; send larger ones",
                limit="txn_chunks",
                max=limits.TXN_CHUNKS_MAX,
            )

    def _find_transaction(self, topic: str, txn_id: int) -> tuple[TopicLog, Transaction]:
        log = self.state.for_write(topic)
        if log is None:
            raise TopicNotFound(topic)
        known = log.transactions
        txn = known.open.get(txn_id) if known is not None else None
        if txn is not None:
            return log, txn
        if known is not None and txn_id in known.committed:
            raise TransactionCommitted(topic, txn_id)
        raise TransactionNotFound(topic, txn_id)

    # -- commit and abort ----------------------------------------------------------------------------------

    def _commit_transaction(self, token: object, command: txc.CommitTransaction) -> None:
        state = self.state
        state.check_writable()
        if len({name for name, _, _ in command.parts}) < len(command.parts):
            raise InvalidRequest("a part is listed twice")
        try:
            log, txn = self._find_transaction(command.topic, command.txn)
        except TransactionCommitted:
            log = state.staged[command.topic]
            state.answer(token, self.committed(log, command.txn), log, held=log.pending > 0)
            return
        if len(txn.commit_waiters) >= limits.TXN_COMMITS_WAITING_MAX:
            raise Throttled(
                "too many commit requests for this transaction are waiting; retry later",
                limit="txn_commits_waiting",
                max=limits.TXN_COMMITS_WAITING_MAX,
            )
        self._renew(txn)
        waiter = CommitWaiter(token, command, state.clock.mono_ms + command.wait_ms)
        self.timer_ms = min(self.timer_ms, waiter.until_ms)
        txn.commit_waiters.append(waiter)
        self.with_work[txn] = None

    def committed(self, log: TopicLog, txn_id: int) -> txc.TransactionState:
        """The state of a committed batch. Seqs and counts are known only for a producer's last one."""
        assert log.transactions is not None
        name = log.transactions.committed.get(txn_id)
        if name is None:
            return txc.TransactionState(log.name, txn_id, "committed")
        last = log.transactions.producers[name]
        return txc.TransactionState(
            log.name, txn_id, "committed", last.first_seq, last.last_seq, last.count, 1.0
        )

    def _abort_transaction(self, token: object, command: txc.AbortTransaction) -> None:
        self.state.check_writable()
        log, txn = self._find_transaction(command.topic, command.txn)
        if txn.decision is not None:
            raise TransactionCommitted(log.name, txn.id)
        self.state.reserve(CONTROL_BYTES)
        result = txc.TransactionState(log.name, txn.id, "aborted")
        self.end_transaction(txn, Op(log, token, result, sync=log.config.durability == "fsync"))

    def _topic_dropped(self, log: TopicLog, op: Op) -> None:
        if log.transactions is None:
            return
        for txn in list(log.transactions.open.values()):
            log.transactions.note_ended(txn.id)
            self.state.bytes_reserved -= txn.reserved
            self.answer_all(txn, TopicNotFound(log.name))
            self.with_work[txn] = None

    # -- bookkeeping ---------------------------------------------------------------------------------------

    def log_entry(self, log: TopicLog, kind: int, entry: object) -> None:
        self.state.log(kind, log, entry)
        self.state.touched[log.id] = log

    @staticmethod
    def _capture(log: TopicLog, row: TopicRow) -> None:
        if log.transactions is not None:
            row.transactions = log.transactions.row()

    @staticmethod
    def _restore(log: TopicLog, row: TopicRow) -> None:
        if row.transactions is not None:
            log.transactions = TopicTransactions.restored(log, row.transactions)

    @staticmethod
    def _apply_opened(log: TopicLog, opened: Opened, op: Op | None) -> None:
        if log.transactions is None:
            log.transactions = TopicTransactions()
        log.transactions.note_opened(log, opened)

    @staticmethod
    def _apply_decided(log: TopicLog, decided: Decided, op: Op | None) -> None:
        if log.transactions is not None:
            log.transactions.note_decided(decided)

    @staticmethod
    def _apply_advanced(log: TopicLog, advanced: Advanced, op: Op | None) -> None:
        if log.transactions is not None:
            log.transactions.note_advanced(advanced)

    @staticmethod
    def _apply_ended(log: TopicLog, txn_id: int, op: Op | None) -> None:
        if log.transactions is not None:
            log.transactions.note_ended(txn_id)

    def end_transaction(self, txn: Transaction, op: Op | None = None) -> None:
        """End a transaction without a commit: answer its waiting requests, once that is in the log, and remove its file."""
        log = txn.log
        assert log.transactions is not None
        self.log_entry(log, frames.TXN_ENDED, txn.id)
        self.state.add_op(op or Op(log))
        self.answer_all(txn, TransactionNotFound(log.name, txn.id))
        self.with_work[txn] = None

    def answer_all(self, txn: Transaction, error: TopicsError) -> None:
        """Answer the waiting requests with an error, except those whose chunks are being written."""
        waiting, txn.waiting = txn.waiting, []
        waiter, txn.commit_waiters = txn.commit_waiters, []
        for staged in waiting:
            self.reply_error(txn, staged.token, error)
        for one in waiter:
            if not one.is_answered:
                self.reply_error(txn, one.token, error, one.command)

    def reply_error(
        self, txn: Transaction, token: object, error: TopicsError, command: cmd.Command | None = None
    ) -> None:
        """Reply with an error. As in `handle`, an error that depends on staged state is held until that is published."""
        log = txn.log
        if (
            isinstance(error, Conflict | TransactionNotFound | TopicNotFound)
            and log.pending
            and not self.state.read_only
        ):
            self.state.add_op(Op(log, token, error, command=command))
        else:
            self.state.ready.append((token, error))

    def _add_transaction(self, txn: Transaction) -> None:
        self.open[txn] = None
        self._renew(txn)

    def _renew(self, txn: Transaction) -> None:
        """Restart the transaction's TTL: it is in use."""
        txn.expires_ms = self.state.clock.mono_ms + txn.ttl_ms
        self.timer_ms = min(self.timer_ms, txn.expires_ms)

    def forget_transaction(self, txn: Transaction) -> None:
        """Drop a transaction whose file has been removed."""
        if txn in self.open:
            del self.open[txn]
            self.staged_bytes -= txn.bytes
            self.staged_chunks -= len(txn.chunks)
        self.with_work.pop(txn, None)
        if txn.log.transactions is not None:
            txn.log.transactions.ended.pop(txn.number, None)

    @property
    def open_transactions(self) -> int:
        return sum(not txn.is_ended for txn in self.open)

    # -- tasks ---------------------------------------------------------------------------------------------

    @property
    def has_tasks(self) -> bool:
        return bool(self.open)

    @property
    def lanes(self) -> list[Lane]:
        return list(self._lanes.values())

    def begin_tasks(self) -> list[Lane]:
        """Begin tasks for transactions with work; returns the lanes of all tasks."""
        for txn in list(self.with_work):
            if txn not in self._lanes:
                del self.with_work[txn]
                self._lanes[txn] = Lane("a transaction", self.transaction_steps(txn))
        return self.lanes

    def tasks_stepped(self) -> None:
        for txn, lane in list(self._lanes.items()):
            if lane.task is None and not lane.blocked:
                del self._lanes[txn]
        self.process_transaction_timers()  # last: a commit that is done by now is answered even without a wait

    @property
    def due_ms(self) -> int | None:
        """When the next task or timer is due; 0: now."""
        if (
            any(lane.is_runnable for lane in self._lanes.values())
            or self.with_work.keys() - self._lanes.keys()
        ):
            return 0
        return self.timer_ms if self.open else None

    def is_busy(self, log: TopicLog) -> bool:
        """Whether a file of the topic is being written."""
        return any(txn.log is log and lane.blocked for txn, lane in self._lanes.items())

    def stop_tasks(self) -> None:
        """Decided commits continue after the next start."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes = {}

    def transaction_steps(self, txn: Transaction) -> Steps:
        """Do all current work of a transaction."""
        while not txn.log.dropped:
            if txn.is_ended:
                yield from self._remove_file(txn)
                return
            if txn.decision is not None:
                if self.commits_deferred:
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
        self.forget_transaction(txn)  # its file is removed with the topic

    def _path(self, txn: Transaction) -> str:
        return f"{self.state.reader.topic_dir(txn.log.id)}/{txn.name}"

    # -- the file of a transaction ----------------------------------------------------------------------------

    def _index_file(self, txn: Transaction) -> Steps:
        """Read the file of a transaction that was begun before the restart, to learn which chunks it has."""
        disk, path = self.disk, self._path(txn)
        try:
            found = yield Blocking(STAGE_KIND, lambda: read_staged(disk, path))
        except (OSError, TopicsError) as error:  # TopicsError if a newer version wrote it
            self.answer_all(txn, TopicsError(f"the staged chunks could not be read: {error}"))
            return
        txn.is_indexed = True
        for entry in found:
            txn.end = entry.offset + entry.bytes
            if entry.chunk is not None:
                head = entry.chunk
                placed = entry.offset, entry.bytes, head.records, head.size
                txn.chunks.setdefault((head.part, head.chunk), (placed, head.largest))
        self.staged_chunks += len(txn.chunks) if txn in self.open else 0

    def _write_chunks(self, txn: Transaction) -> Steps:
        """Write all waiting chunks, with one sync."""
        self._take_waiting(txn)
        if not txn.writing:
            return
        disk, path, end = self.disk, self._path(txn), txn.end
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
            self.staged_chunks += 1
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
        self.staged_bytes -= len(staged.entry) if txn in self.open else 0

    def _refuse_written(self, txn: Transaction) -> None:
        """Refuse chunks that were being written when the transaction ended."""
        writing, txn.writing = txn.writing, []
        for staged in writing:
            self._uncount(txn, staged)
            self.reply_error(txn, staged.token, TransactionNotFound(txn.log.name, txn.id))

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
            self.end_transaction(txn)

    def _remove_file(self, txn: Transaction) -> Steps:
        """Remove the file once the end of the transaction is synced."""
        disk, path = self.disk, self._path(txn)
        yield WaitSynced(0)
        if not txn.log.dropped:
            try:
                yield Blocking(STAGE_KIND, lambda: disk.remove(path))
            except OSError:
                self.state.counters["txn_left"] += 1  # the next start removes it
        self.forget_transaction(txn)

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
                self.reply_error(txn, waiter.token, refusal, waiter.command)

    def _decide(self, txn: Transaction, command: txc.CommitTransaction) -> Steps:
        state = self.state
        disk, log, path = self.disk, txn.log, self._path(txn)
        assert log.transactions is not None
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
        self.staged_bytes += len(entry)
        txn.order = chosen
        decision = Decision(end, len(chosen), records, size)
        state.bytes_reserved += size
        self.log_entry(log, frames.TXN_DECIDED, Decided(txn.id, decision))
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
        self.check_producers(log.transactions, txn.producer)

    def _check_read(self, txn: Transaction, chosen: list[ChunkPosition], read: list[Records | None]) -> None:
        """Drop chunks that turned out to be damaged, so that they can be staged again."""
        damaged = {placed[0] for placed, records in zip(chosen, read, strict=True) if records is None}
        if not damaged:
            return
        keys = [key for key, (placed, _) in txn.chunks.items() if placed[0] in damaged]
        for key in keys:
            del txn.chunks[key]
            self.staged_chunks -= 1
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
        disk, log, path = self.disk, txn.log, self._path(txn)
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
        while not txn.is_ended and not self.commits_deferred:
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
        self.timer_ms = min(self.timer_ms, at_ms)
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
        if txn.log.config.durability != "ephemeral":
            self.log_entry(txn.log, frames.TXN_ADVANCED, entry)
        else:
            # Its records are not in the log: a restart must append them again, so no progress is logged.
            assert txn.log.transactions is not None
            txn.log.transactions.note_advanced(entry, is_logged=False)

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
        ended = known.ended_by(txn)
        self.log_entry(log, frames.TXN_ADVANCED, entry)
        waiting, txn.commit_waiters = [one for one in txn.commit_waiters if not one.is_answered], []
        state.counters["txn_committed"] += 1
        for one in waiting:
            state.add_op(Op(log, one.token, self.committed(log, txn.id), sync=True))
        if not waiting:
            state.add_op(Op(log, sync=True))  # readers see its records, in order, once they are synced
        for over in ended:
            if over is not txn:
                self.answer_all(over, TransactionNotFound(log.name, over.id))
            self.with_work[over] = None

    # -- time ----------------------------------------------------------------------------------------------

    def process_transaction_timers(self) -> None:
        """Answer commits whose wait has ended, and end transactions whose TTL has expired."""
        mono_ms = self.state.clock.mono_ms
        if mono_ms < self.timer_ms or self.state.read_only is not None:
            return
        next_ms = NEVER_MS
        for txn in list(self.open):
            for waiter in txn.commit_waiters:
                if waiter.is_answered:
                    continue
                if waiter.until_ms <= mono_ms:
                    waiter.is_answered = True
                    state = txc.TransactionState(txn.log.name, txn.id, "committing", progress=txn.progress)
                    self.state.ready.append((waiter.token, state))
                else:
                    next_ms = min(next_ms, waiter.until_ms)
            if txn.resume_ms > mono_ms:
                next_ms = min(next_ms, txn.resume_ms)
            if txn.is_ended or not txn.is_idle:
                continue
            if txn.expires_ms <= mono_ms and self.state.has_control_room():
                self.end_transaction(txn)
                self.state.counters["txn_expired"] += 1
            else:
                next_ms = min(next_ms, max(txn.expires_ms, mono_ms + limits.TXN_RETRY_MS))
        self.timer_ms = next_ms

    # -- start, erase, failure -----------------------------------------------------------------------------

    def _recovered(self, salt: int) -> None:
        """Continue decided commits, keep open transactions, and remove all other transaction files.

        A later erase relies on there being no file of a committed batch.
        """
        state = self.state
        disk = self.disk
        if state.read_only is not None:
            return
        for log in state.by_id.values():
            known = log.transactions
            if known is None:
                continue
            known.ended = {}
            directory = state.reader.topic_dir(log.id)
            by_name = {txn.name: txn for txn in known.open.values()}
            for name in disk.list(directory):
                txn = by_name.get(name)
                if txn is not None:
                    txn.bytes = _file_bytes(disk, f"{directory}/{name}")
                    self.staged_bytes += txn.bytes
                elif parse_name(name) is not None:
                    disk.remove(f"{directory}/{name}")
            for txn in known.open.values():
                txn.is_indexed = False
                state.bytes_reserved += txn.reserved
                self._add_transaction(txn)
                if txn.decision is not None:
                    self.with_work[txn] = None

    def defer_tasks(self) -> None:
        """The server is stopping: after the current slice, decided commits pause until the next start.

        Waiting commit requests are told that the commit is in progress.
        """
        self.commits_deferred = True
        for txn in self.open:
            if txn.decision is None:
                continue
            for waiter in txn.commit_waiters:
                if not waiter.is_answered:
                    waiter.is_answered = True
                    state = txc.TransactionState(txn.log.name, txn.id, "committing", progress=txn.progress)
                    self.state.ready.append((waiter.token, state))

    def _eraser(self, log: TopicLog) -> Callable[[], None]:
        """The work an erase has to do in a topic's transaction files: remove records that are already in the log.

        Records that are only staged are not affected.
        """
        disk, known = self.disk, log.transactions
        if known is None:
            return lambda: None
        directory = self.state.reader.topic_dir(log.id)
        gone = [f"{directory}/{txn.name}" for txn in known.ended.values()]
        done = [
            (f"{directory}/{txn.name}", txn.order, txn.decision.offset, txn.decision.done)
            for txn in known.open.values()
            if txn.decision is not None
        ]

        def clear() -> None:
            for path in gone:
                disk.remove(path)
            for path, order, offset, count in done:
                # After a restart the list of chunks may not be loaded yet.
                placed = order if order is not None else read_decision(disk, path, offset)
                blank_chunks(disk, path, (placed or [])[:count])

        return clear

    def _shard_failed(self, reason: str) -> None:
        """The shard is read-only: answer waiting requests with an unknown outcome."""
        for txn in self.open:
            writing, txn.writing = txn.writing, []
            for staged in writing:
                self.state.ready.append((staged.token, ShardReadOnly(reason, unknown=True)))
            self.answer_all(txn, ShardReadOnly(reason, unknown=True))

    def check_transactions(self) -> None:
        """Assert that the shard's totals match its transactions."""
        state = self.state
        assert self.staged_bytes == sum(txn.bytes for txn in self.open), self.staged_bytes
        assert self.staged_chunks == sum(len(txn.chunks) for txn in self.open), self.staged_chunks
        if state.read_only is not None:
            return
        reserved = sum(txn.reserved for txn in self.open if not txn.is_ended)
        assert reserved == state.bytes_reserved, (reserved, state.bytes_reserved)
        for log in state.by_id.values():
            known = log.transactions
            if known is None or log.dropped:
                continue
            assert all(txn in self.open for txn in known.open.values()), log.name
            assert len(known.committed) == len(known.producers) <= limits.TXN_PRODUCERS_MAX, log.name
            for txn in known.open.values():
                last = known.producers.get(txn.producer)
                assert last is None or last.batch < txn.batch, (log.name, txn.producer)


def _staged(
    log: TopicLog, command: txc.StageChunk | ChunkHead, records: int, *, repeated: bool
) -> txc.ChunkStaged:
    return txc.ChunkStaged(log.name, command.part, command.chunk, records, repeated)


def _file_bytes(disk: Disk, path: str) -> int:
    handle = disk.open(path)
    try:
        return disk.size(handle)
    finally:
        disk.close(handle)


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
