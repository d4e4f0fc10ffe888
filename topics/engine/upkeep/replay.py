"""Log replay: the order of frames, and which were already applied; `ShardState.appliers` knows what they change.

Frames of a topic of class memory wait until it is first used (`TopicLog.deferred`), so that they do not delay the start.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from topics.api.errors import FeatureAbsent, UnknownFrame
from topics.engine.core.topic_ids import ID_STEP
from topics.engine.shard.state import EraseRequest, ShardState, as_ranges
from topics.engine.storage import frames
from topics.engine.storage.control import KINDS, FrameKind, ReplayOrder, Scope, TimeCeiling, TopicCreated
from topics.engine.storage.frames import Columns
from topics.engine.storage.wal import Envelope
from topics.engine.topic.log import Op, TopicLog
from topics.engine.upkeep.checkpoint import Checkpointer
from topics.engine.upkeep.loading import Loader
from topics.engine.upkeep.recovery_report import RecoveryReport

# Replay itself knows what to do with these.
OWN_KINDS = (frames.APPEND, frames.TOPIC_CREATE, frames.TOPIC_DELETE, frames.TIME_CEILING, frames.WAL_START)

Lsns = npt.NDArray[np.uint64]


class Replay:
    """Applies the frames of log files to a shard, in order."""

    def __init__(
        self, state: ShardState, checkpointer: Checkpointer, loader: Loader, report: RecoveryReport
    ) -> None:
        self._state = state
        self._checkpointer = checkpointer
        self._loader = loader
        self._report = report
        self._deleted: dict[int, None] = {}  # topics that a later log entry deletes
        self._deferred_heads: dict[int, int] = {}  # heads of topics with deferred appends, by topic id
        self.time: TimeCeiling | None = None  # the latest in the log
        state.events.records_missing.append(self._record_missing)

    def check_kinds(self, path: str, columns: Columns) -> None:
        """Refuse a log with frames that nothing here can apply."""
        known = self._state.appliers.keys() | set(OWN_KINDS)
        i = columns.first_not_in(known)
        if i is None:
            return
        kind = int(columns.headers["type"][i])
        if kind in KINDS:
            raise FeatureAbsent(path, f"log frames of the kind {KINDS[kind].name}")
        raise UnknownFrame(path, int(columns.starts[i]), kind)

    def drop_deleted_topics(self, columns: Columns) -> None:
        """Drop topics that the log deletes. They are not replayed at all: their files may be gone already."""
        for i in np.nonzero(columns.headers["type"] == frames.TOPIC_DELETE)[0].tolist():
            topic_id = int(columns.headers["topic"][i])
            self._deleted[topic_id] = None
            log = self._state.by_id.get(topic_id)
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
        log = self._state.by_id.get(topic_id)
        if log is None or int(lsns[-1]) <= log.applied_lsn:
            return  # the topic is deleted later in the log, or its snapshot has these records
        self._state.touched[log.id] = log
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
        self._state.count_live(op)
        op.head = log.next_seq - 1
        op.first_seq = log.first_seq
        op.write_ts = int(columns.headers["ts"][-1])
        log.publish(op)
        erased = seqs[(columns.headers["flags"] & frames.ERASED) != 0]
        if len(erased):
            # An erased record is deleted, even if the log entry of its delete is damaged.
            deletion = Op(log)
            log.stage_delete(as_ranges(erased.tolist()), deletion)
            self._state.count_live(deletion)
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
        kind, topic_id = KINDS[int(columns.headers["type"][i])], int(columns.headers["topic"][i])
        state = self._state
        if kind.scope is Scope.FILE:
            return
        if kind.number == frames.TIME_CEILING:
            self.time = kind.decode(columns.payload(i))
            return
        if kind.scope is Scope.SHARD:
            state.appliers[kind.number](kind.decode(columns.payload(i)))
            return
        if kind.number == frames.TOPIC_CREATE:
            self._create_topic(topic_id, kind.decode(columns.payload(i)))
            return
        log = state.by_id.get(topic_id)
        if log is None or lsn <= log.applied_lsn:
            return  # the topic is deleted later in the log, or its snapshot has this change
        state.touched[log.id] = log
        payload, ts = columns.payload(i), int(columns.headers["ts"][i])
        if log.deferred and kind.replay is ReplayOrder.LOADED:
            self._loader.load(log)
        if log.deferred and kind.replay is ReplayOrder.DEFERRED:
            log.deferred.append(lambda: self._apply_control(log, kind, payload, ts))
        else:
            self._apply_control(log, kind, payload, ts)

    def _apply_control(self, log: TopicLog, kind: FrameKind, payload: bytes, ts: int) -> None:
        if log.stored is not None and kind.replay is not ReplayOrder.AT_ONCE:
            self._loader.load(log)
        op = Op(log)
        op.logged_ms = ts
        self._state.appliers[kind.number](log, kind.decode(payload), op)
        self._state.count_live(op)
        log.publish(op)
        if op.config is not None:
            self._state.classes_changed()

    def _record_missing(self, log: TopicLog, first: int, last: int) -> None:
        self._loader.record_loss(log, first, last, "crash")

    # -- topics --------------------------------------------------------------------------------------------

    def _create_topic(self, topic_id: int, created: TopicCreated) -> None:
        state = self._state
        if topic_id in state.by_id or topic_id in self._deleted:
            state.next_id = max(state.next_id, topic_id + ID_STEP)
            return
        log = state.create_topic(topic_id, created)
        state.touched[topic_id] = log
        self.register_topic(log)

    def register_topic(self, log: TopicLog) -> None:
        state = self._state
        state.staged[log.name] = state.published[log.name] = log
        state.by_id[log.id] = log
        state.names.add(log.name)
        state.bytes_live += log.bytes
        state.records_live += log.count
        state.classes_changed()

    def _delete_topic(self, log: TopicLog) -> None:
        state = self._state
        state.by_id.pop(log.id)
        state.touched.pop(log.id, None)
        if state.published.get(log.name) is log:
            del state.published[log.name], state.staged[log.name]
            state.names.discard(log.name)
        state.bytes_live -= log.bytes
        state.records_live -= log.count
        state.classes_changed()
        log.dropped = log.view.dropped = True
        self._checkpointer.rows.pop(log.id, None)
        state.dropped_topics.append(log)
        for call in state.events.topic_removed:
            call(log)

    def resume_erases(self) -> None:
        """After replay, request the erases that were not finished, with one request for each topic."""
        for log in self._state.by_id.values():
            if log.erasing:
                request = EraseRequest(log, log.join_erasing(log.erasing), None, None)
                self._state.erase_requests.append(request)


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
