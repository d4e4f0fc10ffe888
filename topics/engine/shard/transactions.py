"""Sink transactions: a producer's batch is appended exactly once and as a whole, however often it is sent.

    begin    open the transaction of (producer, batch), or learn that the batch is committed
    stage    write a chunk of records to the transaction's file, checked like a write; they are not records yet
    commit   name the parts in order; once decided, the server completes the commit by itself

Staged chunks are never kept in memory, as a batch may be larger than that. Requests that need the file are queued at the
transaction; transaction_commit.py does the work, with disk access off the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

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
    TransactionNotFound,
)
from topics.engine.commands import topics as cmd
from topics.engine.commands import transactions as txc
from topics.engine.core.ports import Disk
from topics.engine.shard.appends import Appends
from topics.engine.shard.state import CONTROL_BYTES, ShardState
from topics.engine.storage import frames
from topics.engine.storage.control import Advanced, Decided, Opened
from topics.engine.storage.transaction_file import (
    ChunkHead,
    blank_chunks,
    encode_chunk,
    parse_name,
    read_decision,
)
from topics.engine.topic.log import Op, TopicLog
from topics.engine.topic.transactions import (
    CommitWaiter,
    OpenTransaction,
    StagedChunk,
    TopicTransactions,
    transaction_id,
)

ENTRY_TYPES: dict[int, type] = {
    frames.TXN_OPENED: Opened,
    frames.TXN_DECIDED: Decided,
    frames.TXN_ADVANCED: Advanced,
    frames.TXN_ENDED: int,
}
NEVER_MS = 1 << 62

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
        self.commits_deferred = False  # decided commits continue after the next start
        self.timer_ms = NEVER_MS  # the next transaction timeout, on the monotonic clock
        state.handlers |= {
            txc.BeginTransaction: self._begin_transaction,
            txc.StageChunk: self._stage_chunk,
            txc.CommitTransaction: self._commit_transaction,
            txc.AbortTransaction: self._abort_transaction,
        }
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
        if log.transactions is None:
            log.transactions = TopicTransactions()
        number = log.transactions.number + 1
        ttl_ms = min(max(command.ttl_ms, limits.TXN_TTL_MS_MIN), limits.TXN_TTL_MS_MAX)
        opened = Opened(txn_id, number, command.producer, command.batch, ttl_ms)
        self.log_entry(log, frames.TXN_OPENED, opened)
        self._add_transaction(log.transactions.note_opened(log, opened))
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
            known.note_opened(log, opened)
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
        self.end_transaction(txn)
        result = txc.TransactionState(log.name, txn.id, "aborted")
        self.state.add_op(Op(log, token, result, sync=log.config.durability == "fsync"))

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
        self.state.add_frame(frames.encode_control(kind, log.id, self.state.now_ms, entry))
        self.state.touched[log.id] = log

    def end_transaction(self, txn: Transaction) -> None:
        """End a transaction without a commit: answer its waiting requests and remove its file."""
        log = txn.log
        assert log.transactions is not None
        self.log_entry(log, frames.TXN_ENDED, txn.id)
        log.transactions.note_ended(txn.id)
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

    # -- time ----------------------------------------------------------------------------------------------

    @property
    def transactions_due_ms(self) -> int | None:
        return self.timer_ms if self.open else None

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

    def replay_transaction(self, log: TopicLog, kind: int, payload: bytes) -> None:
        if log.transactions is None:
            log.transactions = TopicTransactions()
        log.transactions.replay(log, msgspec.msgpack.decode(payload, type=ENTRY_TYPES[kind]))

    def _recovered(self, salt: int) -> None:
        """Continue decided commits, keep open transactions, and remove all other transaction files.

        A later erase relies on there being no file of a committed batch.
        """
        state = self.state
        disk = self.disk
        if state.read_only is not None or disk is None:
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

    def defer_commits(self) -> None:
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

    def transaction_eraser(self, log: TopicLog) -> Callable[[], None]:
        """The work an erase has to do in a topic's transaction files: remove records that are already in the log.

        Records that are only staged are not affected.
        """
        disk, known = self.disk, log.transactions
        if disk is None or known is None:
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
