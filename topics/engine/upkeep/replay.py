"""Log replay: applies decoded frames through the same staging and publishing code as live requests."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from topics.api.errors import Corrupt, FeatureAbsent
from topics.engine.commands.forwards import Forward
from topics.engine.core.ports import Disk
from topics.engine.core.topic_ids import ID_STEP
from topics.engine.reading.reader import Reader
from topics.engine.shard.shard import Shard
from topics.engine.shard.state import EraseRequest, as_ranges
from topics.engine.storage import frames
from topics.engine.storage.control import (
    ConfigChanged,
    ConsumerStored,
    Copied,
    DeadLettersReceived,
    Deletion,
    Event,
    Floors,
    InflowOpen,
    Lost,
    Merged,
    MergedGroup,
    MergeInput,
    OutflowOpen,
    Skipped,
    Swapped,
    TimeCeiling,
    TopicCreated,
)
from topics.engine.storage.frames import Columns
from topics.engine.storage.index import Chunk
from topics.engine.storage.sealing import meta_from_sum, sealed_rows
from topics.engine.storage.segments import COLD, Rows, SegmentMeta
from topics.engine.storage.wal import (
    Envelope,
)
from topics.engine.topic.consumer import TopicConsumers
from topics.engine.topic.flows import Inflow, OutflowRow, add_epoch
from topics.engine.topic.log import Op, TopicLog
from topics.engine.topic.merges import chunks_of, join_rows, retired_meta, swap_chunks
from topics.engine.upkeep.checkpoint import Checkpointer
from topics.engine.upkeep.loading import Loader
from topics.engine.upkeep.recovery_report import RecoveryReport

Lsns = npt.NDArray[np.uint64]

# Frames that belong to no topic: the catalog's forward rules, and the flows out of this shard.
FORWARD_KINDS = (frames.FORWARD_PUT, frames.FORWARD_DELETE, frames.OUTFLOW_OPEN, frames.OUTFLOW_CLOSE)
TXN_KINDS = (frames.TXN_OPENED, frames.TXN_DECIDED, frames.TXN_ADVANCED, frames.TXN_ENDED)
FLOW_KINDS = (frames.INFLOW_OPEN, frames.INFLOW_CLOSE, frames.COPIED, frames.EPOCH)


class Replay:
    """Applies the frames of log files to a shard, in order."""

    def __init__(
        self,
        disk: Disk,
        shard: Shard,
        reader: Reader,
        checkpointer: Checkpointer,
        loader: Loader,
        report: RecoveryReport,
    ) -> None:
        self._disk = disk
        self._shard = shard
        self._reader = reader
        self._checkpointer = checkpointer
        self._loader = loader
        self._report = report
        self._deleted: dict[int, None] = {}  # topics that a later log entry deletes
        self._deferred_heads: dict[int, int] = {}  # heads of topics with deferred appends, by topic id
        self.time: TimeCeiling | None = None  # the latest in the log

    def drop_deleted_topics(self, columns: Columns) -> None:
        """Drop topics that the log deletes. They are not replayed at all: their files may be gone already."""
        for i in np.nonzero(columns.headers["type"] == frames.TOPIC_DELETE)[0].tolist():
            topic_id = int(columns.headers["topic"][i])
            self._deleted[topic_id] = None
            log = self._shard.state.by_id.get(topic_id)
            if log is not None:
                self._delete_topic(log)

    def apply(self, columns: Columns, lsns: Lsns, number: int, shift: int) -> None:
        """Apply frames in order; runs of appends are vectorized. `shift`: file offset of the buffer's first byte."""
        count = len(columns.starts)
        self._report.replayed_frames += count
        at = 0
        for i in [*np.nonzero(columns.headers["type"] != frames.APPEND)[0].tolist(), count]:
            if i > at:
                self._replay_appends(columns, at, i, number, shift, lsns)
            if i < count:
                self._replay_control(columns, i, int(lsns[i]))
            at = i + 1

    def head_of(self, log: TopicLog) -> int:
        """The head of a topic, including deferred appends. Seqs skipped after those are not counted."""
        return max(log.next_seq - 1, self._deferred_heads.get(log.id, 0))

    # -- appends -------------------------------------------------------------------------------------------

    def _replay_appends(
        self, columns: Columns, first: int, stop: int, number: int, shift: int, lsns: Lsns
    ) -> None:
        topics = columns.headers["topic"][first:stop]
        if stop - first == 1 or (topics == topics[0]).all():
            self._append_run(int(topics[0]), columns.slice(first, stop), number, shift, lsns[first:stop])
            return
        order = np.argsort(topics, kind="stable")
        edges = np.nonzero(np.diff(topics[order]))[0] + 1
        for group in np.split(order, edges):
            picked = group + first
            self._append_run(int(topics[group[0]]), columns.take(picked), number, shift, lsns[picked])

    def _append_run(self, topic_id: int, columns: Columns, number: int, shift: int, lsns: Lsns) -> None:
        log = self._shard.state.by_id.get(topic_id)
        if log is None or int(lsns[-1]) <= log.applied_lsn:
            return  # the topic is deleted later in the log, or its snapshot has these records
        self._shard.state.touched[log.id] = log
        if log.config.durability == "memory":
            # Deferred until the topic is loaded, so that it does not delay readiness.
            self._deferred_heads[log.id] = int(columns.headers["seq"][-1])
            log.deferred.append(lambda: self._apply_appends(log, columns, number, shift, lsns))
        else:
            self._apply_appends(log, columns, number, shift, lsns)

    def _apply_appends(self, log: TopicLog, columns: Columns, number: int, shift: int, lsns: Lsns) -> None:
        if log.stored is not None:
            self._loader.load(log)
        seqs = columns.headers["seq"]
        fresh = (lsns > log.applied_lsn) & (seqs >= log.next_seq)
        if not fresh.all():
            picked = np.nonzero(fresh)[0]
            if not len(picked):
                return
            columns, lsns = columns.take(picked), lsns[picked]
            seqs = columns.headers["seq"]
        first = int(seqs[0])
        if first > log.next_seq:
            # The topic was ephemeral in between: those records were never logged.
            self._loader.record_loss(log, log.next_seq, first - 1, "crash")
        op = Op(log)
        self._add_columns(log, columns, number, shift, op)
        log.count += op.count
        log.bytes += op.bytes
        self._shard.state.count_live(op)
        op.head = log.next_seq - 1
        op.first_seq = log.first_seq
        op.write_ts = int(columns.headers["ts"][-1])
        log.publish(op)
        erased = seqs[(columns.headers["flags"] & frames.ERASED) != 0]
        if len(erased):
            # An erased record is deleted, even if the log entry of its delete is damaged.
            deletion = Op(log)
            log.stage_delete(as_ranges(erased.tolist()), deletion)
            self._shard.state.count_live(deletion)
            log.publish(deletion)

    def _add_columns(self, log: TopicLog, columns: Columns, number: int, shift: int, op: Op) -> None:
        headers, starts = columns.headers, columns.starts
        count = len(starts)
        flags = headers["flags"]
        first = log.next_seq
        combined = int(np.bitwise_or.reduce(flags)) if count else 0
        sizes = headers["data_len"].astype(np.int64)
        tags = self._strings(columns, "tag") if combined & frames.HAS_TAG else None
        nodes = self._strings(columns, "node") if combined & frames.HAS_NODE else None
        tag_ids = log.tags.add_batch(first, tags) if tags is not None else None
        node_ids = log.nodes.add_all(nodes) if nodes is not None else None
        expiries = self._extensions(log, columns, first, sizes) if combined & frames.HAS_EXT else []
        if not log.runs or log.runs[-1][1] != number:
            log.runs.append((first, number))
        lengths = headers["length"].astype(np.int64) + 4
        log.add_columns(starts + shift, lengths, headers["ts"], flags, tag_ids, node_ids, sizes)
        log.add_expiries(expiries)
        op.count += count
        op.bytes += int(sizes.sum())

    @staticmethod
    def _strings(columns: Columns, kind: str) -> list[bytes | None]:
        buffer = columns.buffer
        begins = columns.starts + frames.HEADER_BYTES
        if kind == "tag":
            begins = begins + columns.headers["node_len"]
        has_name = columns.headers["flags"] & (frames.HAS_TAG if kind == "tag" else frames.HAS_NODE)
        ends = begins + columns.headers[f"{kind}_len"]
        return [
            buffer[begin:end] if present else None
            for begin, end, present in zip(begins.tolist(), ends.tolist(), has_name.tolist(), strict=True)
        ]

    def _extensions(
        self, log: TopicLog, columns: Columns, first: int, sizes: npt.NDArray[np.int64]
    ) -> list[tuple[int, int]]:
        """Apply sizes and idempotency keys; return the seq and expiry time of each record that has one."""
        expiries: list[tuple[int, int]] = []
        window_ms = log.config.idempotency_window_ms
        for i in np.nonzero(columns.headers["flags"] & frames.HAS_EXT)[0].tolist():
            found = frames.read_extensions(columns.buffer, int(columns.starts[i]))
            if frames.EXT_SIZE in found:
                sizes[i] = int.from_bytes(found[frames.EXT_SIZE], "little")
            if frames.EXT_EXPIRES in found:
                expiries.append((first + i, int.from_bytes(found[frames.EXT_EXPIRES], "little")))
            if frames.EXT_KEY in found and window_ms:
                count = int.from_bytes(found[frames.EXT_BATCH], "little")
                entry = (first + i, count, int(columns.headers["ts"][i]))
                log.dedupe.add(found[frames.EXT_KEY], entry, window_ms=window_ms)
        return expiries

    # -- control -------------------------------------------------------------------------------------------

    def _replay_control(self, columns: Columns, i: int, lsn: int) -> None:
        kind, topic_id = int(columns.headers["type"][i]), int(columns.headers["topic"][i])
        if kind in self._shard.absent_kinds:
            raise FeatureAbsent(f"the log has frames of kind {kind}")
        payload, ts = columns.payload(i), int(columns.headers["ts"][i])
        if kind == frames.TIME_CEILING:
            self.time = msgspec.msgpack.decode(payload, type=TimeCeiling)
            return
        if kind == frames.TOPIC_CREATE:
            self._create_topic(topic_id, msgspec.msgpack.decode(payload, type=TopicCreated))
            return
        if kind in FORWARD_KINDS:
            self._replay_forward(kind, payload)
            return
        log = self._shard.state.by_id.get(topic_id)
        if log is None or lsn <= log.applied_lsn:
            return
        self._shard.state.touched[log.id] = log
        if kind in FLOW_KINDS:  # never deferred: a forward that is missing in its topic is treated as ended
            self._replay_flow(log, kind, payload)
            return
        if kind in TXN_KINDS:  # independent of the rows
            assert self._shard.transactions is not None
            self._shard.transactions.replay_transaction(log, kind, payload)
            return
        if log.deferred and kind == frames.CONFIG:
            # The new durability may not allow deferred appends.
            self._loader.load(log)
        if log.deferred:
            log.deferred.append(lambda: self._apply_control(log, kind, payload, ts))
        else:
            self._apply_control(log, kind, payload, ts)

    def _replay_forward(self, kind: int, payload: bytes) -> None:
        shard, decode = self._shard, msgspec.msgpack.decode
        if kind == frames.FORWARD_PUT:
            shard.forwards.store_forward(decode(payload, type=Forward))
        elif kind == frames.FORWARD_DELETE:
            shard.forwards.catalog.pop(decode(payload, type=int), None)
        elif kind == frames.OUTFLOW_OPEN:
            opened = decode(payload, type=OutflowOpen)
            shard.forwards.store_outflow(OutflowRow(opened.forward, opened.starts))
        else:
            shard.forwards.remove_outflow(decode(payload, type=int))

    @staticmethod
    def _replay_flow(log: TopicLog, kind: int, payload: bytes) -> None:
        decode = msgspec.msgpack.decode
        if kind == frames.INFLOW_OPEN:
            open_ = decode(payload, type=InflowOpen)
            log.inflows = {**(log.inflows or {}), open_.uid: Inflow(open_.name, open_.source)}
        elif kind == frames.INFLOW_CLOSE:
            gone = decode(payload, type=int)
            log.inflows = {uid: flow for uid, flow in (log.inflows or {}).items() if uid != gone} or None
        elif kind == frames.COPIED:
            copied = decode(payload, type=Copied)
            inflow = (log.inflows or {}).get(copied.uid)
            if inflow is not None:
                inflow.total = copied.total
                inflow.set_mark(copied.source_id, copied.epoch, copied.seq)
        else:
            add_epoch(log.epochs, decode(payload, type=int))

    def _create_topic(self, topic_id: int, created: TopicCreated) -> None:
        self._shard.state.next_id = max(self._shard.state.next_id, topic_id + ID_STEP)
        if topic_id in self._shard.state.by_id or topic_id in self._deleted:
            return
        log = self._shard.state.new_log(topic_id, created.name, created.config)
        log.ceiling = created.ceiling
        self._shard.state.touched[topic_id] = log
        self.register_topic(log)

    def register_topic(self, log: TopicLog) -> None:
        shard = self._shard
        shard.state.staged[log.name] = shard.state.published[log.name] = log
        shard.state.by_id[log.id] = log
        shard.state.names.add(log.name)
        shard.state.bytes_live += log.bytes
        shard.state.records_live += log.count
        shard.state.classes_changed()

    def _delete_topic(self, log: TopicLog) -> None:
        shard = self._shard
        shard.state.by_id.pop(log.id)
        shard.state.touched.pop(log.id, None)
        shard.appends.trimming.pop(log.id, None)
        if shard.state.published.get(log.name) is log:
            del shard.state.published[log.name], shard.state.staged[log.name]
            shard.state.names.discard(log.name)
        shard.state.bytes_live -= log.bytes
        shard.state.records_live -= log.count
        shard.state.classes_changed()
        log.dropped = log.view.dropped = True
        self._checkpointer.rows.pop(log.id, None)
        shard.state.dropped_topics.append(log)

    def _apply_control(self, log: TopicLog, kind: int, payload: bytes, ts: int) -> None:
        if log.stored is not None:
            self._loader.load(log)
        decode = msgspec.msgpack.decode
        op = Op(log)
        if kind == frames.DELETE:
            deletion = decode(payload, type=Deletion)
            log.stage_delete(deletion.ranges, op)
            if deletion.erase:
                log.erasing.append(deletion.ranges)
        elif kind == frames.EVICT:
            floors = decode(payload, type=Floors)
            head = log.next_seq - 1
            log.stage_floors(min(floors.cap_lost, head), min(floors.ttl_lost, head), op)
        elif kind == frames.SKIP:
            skipped = decode(payload, type=Skipped)
            if skipped.first > log.next_seq:  # records that were never logged
                self._loader.record_loss(log, log.next_seq, skipped.first - 1, "crash")
            if skipped.first + skipped.count > log.next_seq:
                log.stage_skip(skipped.first + skipped.count - log.next_seq, op)
        elif kind == frames.LOSS:
            lost = decode(payload, type=Lost)
            log.stage_loss((lost.first, lost.last, lost.reason), op)
        elif kind == frames.CONFIG:
            changed = decode(payload, type=ConfigChanged)
            if changed.head >= log.next_seq:
                self._loader.record_loss(log, log.next_seq, changed.head, "crash")
            was_ram, is_ram = (c.durability == "ephemeral" for c in (log.config, changed.config))
            if was_ram != is_ram and log.chunks and log.chunks[-1].count:
                log.chunks[-1].closed = True
            if changed.config.cap_per_tag != log.config.cap_per_tag:  # deletes by the trim follow in the log
                log.trim_from = 0
                self._shard.appends.trimming[log.id] = log
            log.config = op.config = changed.config
            self._shard.state.classes_changed()
            log.ceiling = changed.ceiling
        elif kind == frames.SEQ_CEILING:
            log.ceiling = max(log.ceiling, decode(payload, type=int))
        elif kind == frames.SEGMENT_SWAP:
            swapped = decode(payload, type=Swapped)
            log.stage_floors(swapped.cap_lost, swapped.ttl_lost, op)
            self._apply_swap(log, swapped, op)
        elif kind == frames.SEGMENT_MERGE:
            merged = decode(payload, type=Merged)
            log.stage_floors(merged.cap_lost, merged.ttl_lost, op)
            self._apply_merge(log, merged, op, ts)
        elif kind == frames.LEASE:
            event = decode(payload, type=Event)
            if not event.consumer:
                self._shard.leases.queue_of(log)
            if log.consumers is not None:
                log.consumers.apply(event)
        elif kind == frames.CONSUMER_PUT:
            self._shard.consumers.store_consumer(log, decode(payload, type=ConsumerStored))
        elif kind == frames.CONSUMER_DELETE:
            consumer = (
                log.consumers.named.get(decode(payload, type=str)) if log.consumers is not None else None
            )
            if consumer is not None:
                self._shard.consumers.remove_consumer(log, consumer)
        elif kind == frames.LETTERS_TAKEN:
            taken = decode(payload, type=DeadLettersReceived)
            log.consumers = log.consumers or TopicConsumers()
            log.consumers.note_received(taken.source_id, taken.number)
        elif kind == frames.ERASE_DONE:
            log.forget_erasing(decode(payload, type=list[tuple[int, int]]))
        self._shard.state.count_live(op)
        log.publish(op)

    def resume_erases(self) -> None:
        """After replay, request the erases that were not finished, with one request for each topic."""
        for log in self._shard.state.by_id.values():
            if log.erasing:
                request = EraseRequest(log, log.join_erasing(log.erasing), None, None)
                self._shard.state.erase_requests.append(request)

    def _apply_swap(self, log: TopicLog, swapped: Swapped, op: Op) -> None:
        """Switch a segment to its new generation. Deletes replayed so far are flags in memory or in the old .del file."""
        first_seq, generation = swapped.first_seq, swapped.generation
        directory = self._reader.topic_dir(log.id)
        if log.stored is not None:
            self._loader.load(log)
        for chunk in log.chunks:
            meta = chunk.meta
            if meta is None or meta.first_seq != first_seq or meta.generation >= generation:
                continue
            try:
                new, rows = self._read_sealed(directory, first_seq, generation, swapped.tier)
            except (Corrupt, FileNotFoundError) as error:
                self._report.corrupt.append(str(error))
                self._loader.add_suspects(log, [meta])
                continue  # the old generation stays
            if len(rows) != chunk.count:
                self._replace_run(log, new, rows, op)
                return
            self._delete_omitted(log, [chunk], rows, op)
            chunk.rows["offset"], chunk.rows["length"] = rows["offset"], rows["length"]
            self._checkpointer.delete_later(log.id, meta)
            chunk.meta, chunk.marked = new, None
            # When recovering from the older snapshot, some rows may have been only in the log.
            chunk.stored, chunk.closed, chunk.expiries = chunk.count, True, ()
            chunk.tag_ids, chunk.node_ids, chunk.index_hash, chunk.rebuilt_index = {}, {}, None, None
            late = np.nonzero(((chunk.rows["flags"] & frames.DEAD) != 0) & (rows["length"] > 0))[0]
            chunk.unmarked = [(int(i), int(i) + 1) for i in late]

    def _replace_run(self, log: TopicLog, new: SegmentMeta, rows: Rows, op: Op) -> None:
        """Replace several segments: the one to replace was a merge of them that is already gone.

        If their rows do not match either, nothing is replaced: the log and the old generation have all records.
        """
        chunks = chunks_of(log, new.first_seq, new.first_seq + new.rows)
        if chunks is None or len(chunks) == 1:
            return
        self._delete_omitted(log, chunks, rows, op)
        metas = [chunk.meta for chunk in chunks if chunk.meta is not None]
        swap_chunks(log, chunks, new, join_rows(chunks, rows))
        for meta in metas:
            self._checkpointer.delete_later(log.id, meta)

    @staticmethod
    def _delete_omitted(log: TopicLog, chunks: list[Chunk], rows: Rows, op: Op) -> None:
        """Delete live records that the new generation omits: they had expired when it was written."""
        alive = np.concatenate([chunk.live(0, chunk.count, frames.DEAD) for chunk in chunks])
        ended = np.flatnonzero(alive & (rows["length"] == 0)) + chunks[0].first_seq
        log.stage_delete(as_ranges(ended.tolist()), op)

    def _read_sealed(
        self, directory: str, first_seq: int, generation: int, tier: str
    ) -> tuple[SegmentMeta, Rows]:
        """Read the index of a new generation; if it is damaged, restore it from the cold tier."""
        while True:
            try:
                meta = meta_from_sum(self._disk, directory, first_seq, generation, tier=tier)
                return meta, sealed_rows(self._disk, directory, meta)
            except (Corrupt, FileNotFoundError) as error:
                if tier != COLD or not self._loader.restore_index(directory, first_seq, generation):
                    raise
                self._report.rebuilt.append(str(error))

    def _apply_merge(self, log: TopicLog, merged: Merged, op: Op, ts: int) -> None:
        """Replace each run of segments by the segment they were merged into.

        A run stays as it is if the merged segment cannot be read, or if recovery from the older snapshot has divided the
        records into different segments.
        """
        directory = self._reader.topic_dir(log.id)
        done: list[tuple[MergedGroup, list[MergeInput]]] = []
        for group, inputs in zip(merged.groups, merged.inputs, strict=True):
            chunks = chunks_of(log, group.first_seq, group.next_seq)
            if chunks is None:
                continue
            try:
                meta, rows = self._read_sealed(directory, group.first_seq, group.generation, COLD)
            except (Corrupt, FileNotFoundError) as error:
                self._report.corrupt.append(str(error))
                self._loader.add_suspects(log, [chunk.meta for chunk in chunks if chunk.meta is not None])
                continue
            if len(rows) != group.rows:
                continue
            self._delete_omitted(log, chunks, rows, op)
            swap_chunks(log, chunks, meta, join_rows(chunks, rows))
            for one in inputs:
                self._checkpointer.delete_later(log.id, retired_meta(one))
            done.append((group, inputs))
        groups, inputs_done = [group for group, _ in done], [inputs for _, inputs in done]
        log.merges = log.merges.with_plan(
            msgspec.structs.replace(merged, groups=groups, inputs=inputs_done), ts
        )


def decode(data: bytes, envelopes: list[Envelope]) -> tuple[Columns, Lsns]:
    """Decode the frames of many envelopes at once; returns their columns and the LSN of each frame."""
    starts: list[int] = []
    counts: list[int] = []
    for envelope in envelopes:
        before = len(starts)
        frames.frame_starts(data, envelope.start, envelope.end, starts)
        counts.append(len(starts) - before)
    lsns = np.array([envelope.lsn for envelope in envelopes], dtype=np.uint64)
    return frames.decode_columns(data, starts), np.repeat(lsns, counts)
