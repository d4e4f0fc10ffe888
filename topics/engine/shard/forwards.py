"""Forwards: rules that copy records from source topics to a dest topic, possibly on another shard.

    source                                dest
    copies_after ─────────────────────▶   TakeCopies: records above the mark of this forward and source are appended,
                                          together with the new mark, in one envelope
    the next batch ◀───────────────────   mark

The source keeps no state about batches in transit: after a restart it asks the dest for its mark. A dest accepts only a batch
that continues from its mark, for a forward it knows. So each record is copied once and in order, however often it is sent.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container

from topics.api.config import TopicConfig
from topics.api.errors import Forbidden, ForwardNotFound, TopicNotFound, TopicsError
from topics.engine.commands import forwards as fwd
from topics.engine.commands import topics as cmd
from topics.engine.commands.copies import SourceTopic
from topics.engine.core.subject_trie import SubjectTrie
from topics.engine.core.subjects import parse_pattern
from topics.engine.reading.cold_blocks import ColdMiss
from topics.engine.reading.copies import CopyRun, CopyUnpacker, runs_of
from topics.engine.shard.appends import Appends, frame_bytes_at_most
from topics.engine.shard.reads import Reads
from topics.engine.shard.state import CONTROL_BYTES, ShardState
from topics.engine.shard.topic_upkeep import UpkeepPending
from topics.engine.storage import frames
from topics.engine.storage.control import Copied, InflowOpen, OutflowOpen
from topics.engine.topic.flows import (
    Inflow,
    Outflow,
    OutflowRow,
    add_epoch,
    current_epoch,
    filter_of,
    mark_in,
)
from topics.engine.topic.log import Op, TopicLog
from topics.engine.topic.snapshot_row import RowPart, ShardRow, TopicRow

START_BYTES = 24  # maximum size of one start position in an outflow's frame
GONE = -1  # mark of a dropped source


class Forwards:
    def __init__(self, state: ShardState, appends: Appends, reads: Reads) -> None:
        self.state = state
        self.appends = appends
        self.reads = reads
        self.catalog: dict[int, fwd.Forward] = {}  # the catalog of forwards, by uid
        self.last_uid = 0  # the highest uid ever assigned
        self.outflows: dict[int, Outflow] = {}
        self._patterns: SubjectTrie[int] = SubjectTrie()
        self._literals: dict[str, list[int]] = {}
        self._unpacking = CopyUnpacker()
        self.copies_due: dict[int, TopicLog] = {}  # topics with new records to copy
        # New records of these topics since copies were last started, each divided by the topic's number of forwards:
        # the more forwards, the more batching pays.
        self.copies_due_records = 0.0
        self._no_topic = self.state.new_log(0, "", TopicConfig())  # for ops that belong to no topic
        state.handlers |= {
            fwd.PutForward: self._put_forward,
            fwd.DropForward: self._drop_forward,
            fwd.OpenOutflow: self._open_outflow,
            fwd.CloseOutflow: self._close_outflow,
            fwd.OpenInflow: self._open_inflow,
            fwd.CloseInflow: self._close_inflow,
            fwd.TakeCopies: self._take_copies,
        }
        state.appliers |= {
            frames.FORWARD_PUT: self.store_forward,
            frames.FORWARD_DELETE: self._apply_forward_delete,
            frames.OUTFLOW_OPEN: self._apply_outflow_open,
            frames.OUTFLOW_CLOSE: self._apply_outflow_close,
            frames.INFLOW_OPEN: self._apply_inflow_open,
            frames.INFLOW_CLOSE: self._apply_inflow_close,
            frames.COPIED: self._apply_copied,
            frames.EPOCH: self._apply_epoch,
        }
        state.row_parts["forwards"] = RowPart(
            self._capture, self._restore, self._capture_shard, self._restore_shard
        )
        self._inner_drop_topic = state.wrap(cmd.DropTopic, self._check_drop_topic)
        state.events.topic_created.append(self._attach_outflows)
        state.events.topic_dropped.append(self._topic_dropped)
        state.events.published.append(self._published)
        state.events.checked.append(self.check_forwards)

    def _published(self, log: TopicLog, op: Op) -> None:
        if log.outflows and op.head:
            self.copies_due[log.id] = log
            self.copies_due_records += op.count / len(log.outflows)

    @staticmethod
    def _capture(log: TopicLog, row: TopicRow) -> None:
        row.inflows = [inflow.row(uid) for uid, inflow in (log.inflows or {}).items()]

    @staticmethod
    def _restore(log: TopicLog, row: TopicRow) -> None:
        log.inflows = {inflow.uid: Inflow.restored(inflow) for inflow in row.inflows}

    def _capture_shard(self, row: ShardRow) -> None:
        row.forwards, row.forward_uid = list(self.catalog.values()), self.last_uid
        row.outflows = [outflow.row() for outflow in self.outflows.values()]

    def _restore_shard(self, row: ShardRow) -> None:
        for forward in row.forwards:
            self.store_forward(forward)
        self.last_uid = max(self.last_uid, row.forward_uid)
        for outflow in row.outflows:
            self.store_outflow(outflow)

    # -- catalog -------------------------------------------------------------------------------------------

    def _put_forward(self, token: object, command: fwd.PutForward) -> None:
        state = self.state
        state.check_writable()
        state.reserve(4 * CONTROL_BYTES + 512 * (1 + len(command.forward.filter)))
        forward = command.forward
        state.log_of_shard(frames.FORWARD_PUT, forward)
        state.add_op(Op(self._no_topic, token, fwd.ForwardPut(forward), sync=True))

    def _drop_forward(self, token: object, command: fwd.DropForward) -> None:
        state = self.state
        state.check_writable()
        state.reserve(CONTROL_BYTES)
        state.log_of_shard(frames.FORWARD_DELETE, command.uid)
        state.add_op(Op(self._no_topic, token, fwd.ForwardDropped(command.uid), sync=True))

    def _apply_forward_delete(self, uid: int) -> None:
        self.catalog.pop(uid, None)

    def store_forward(self, forward: fwd.Forward) -> None:
        self.catalog[forward.uid] = forward
        self.last_uid = max(self.last_uid, forward.uid)

    # -- source --------------------------------------------------------------------------------------------

    def _open_outflow(self, token: object, command: fwd.OpenOutflow) -> None:
        state = self.state
        state.check_writable()
        forward = command.forward
        known = self.outflows.get(forward.uid)
        logs = self._sources_of(forward) if known is None else []
        state.reserve(8 * CONTROL_BYTES + 512 * len(forward.filter) + START_BYTES * len(logs))
        op = Op(self._no_topic, token, sync=True)
        made = False
        if not forward.is_pattern and known is None and not logs:
            config = TopicConfig()
            self.appends.check_creation(forward.source, config)
            log = self.appends.create(forward.source, config)
            logs, made = [log], True
            state.touched[log.id] = log
            op = Op(log, token, config=config, sync=True)
        if known is None:
            starts = {log.id: (current_epoch(log.epochs), log.next_seq - 1) for log in logs}
        else:
            starts = known.starts
        opened = OutflowOpen(forward, [(topic_id, *start) for topic_id, start in starts.items()])
        state.log_of_shard(frames.OUTFLOW_OPEN, opened)
        for log in logs:
            log.outflows = tuple(sorted((*log.outflows, forward.uid)))
            if not forward.is_pattern:
                self.copies_due[log.id] = log
        op.result = fwd.OutflowOpened(forward.uid, made)
        state.add_op(op)

    def _apply_outflow_open(self, opened: OutflowOpen) -> None:
        self.store_outflow(OutflowRow(opened.forward, opened.starts))

    def _sources_of(self, forward: fwd.Forward) -> list[TopicLog]:
        """The topics of this shard that a forward copies, with their deferred replay applied."""
        if not forward.is_pattern:
            log = self.state.for_write(forward.source)
            return [log] if log is not None else []
        pattern = parse_pattern(forward.source.encode())
        prefix = pattern.literal_prefix.decode()
        logs = [
            log
            for name, log in self.state.staged.items()
            if name.startswith(prefix) and pattern.matches(name.encode())
        ]
        for log in logs:
            if log.deferred:
                self.state.loader(log)
        return logs

    def store_outflow(self, row: OutflowRow) -> None:
        forward = row.forward
        if forward.uid not in self.outflows:
            if forward.is_pattern:
                self._patterns.insert(forward.source.encode(), forward.uid)
            else:
                self._literals.setdefault(forward.source, []).append(forward.uid)
        self.outflows[forward.uid] = Outflow.restored(row)

    def _close_outflow(self, token: object, command: fwd.CloseOutflow) -> None:
        state = self.state
        state.check_writable()
        state.reserve(2 * CONTROL_BYTES)
        log = state.staged.get(command.source)
        op = Op(log if log is not None else self._no_topic, token, fwd.OutflowClosed(command.uid), sync=True)
        state.log_of_shard(frames.OUTFLOW_CLOSE, command.uid)
        state.add_op(op)
        if command.undo:
            self._undo_topic(command.source, op)

    def _apply_outflow_close(self, uid: int) -> None:
        outflow = self.outflows.pop(uid, None)
        if outflow is None:
            return
        source = outflow.forward.source
        if outflow.forward.is_pattern:
            self._patterns.remove(source.encode(), uid)
            logs = [log for log in self.state.by_id.values() if uid in log.outflows]
        else:
            self._literals[source].remove(uid)
            if not self._literals[source]:
                del self._literals[source]
            logs = [log for log in (self.state.staged.get(source),) if log is not None]
        for log in logs:
            log.outflows = tuple(other for other in log.outflows if other != uid)

    def _attach_outflows(self, log: TopicLog) -> None:
        if not self.outflows:
            return
        by_pattern = self._patterns.match(log.name.encode()).plain if self._patterns.count else ()
        log.outflows = tuple(sorted((*self._literals.get(log.name, ()), *by_pattern)))

    def _may_have_copies(self, log: TopicLog) -> bool:
        """Whether a dest may lack records of a topic. Of many topics that match a pattern, most have nothing new.

        A forward with a single source always asks its dest, so that the dest learns the source's position.
        """
        head = log.next_seq - 1
        for uid in log.outflows:
            outflow = self.outflows[uid]
            if not outflow.forward.is_pattern or head > mark_in(outflow.start_of(log.id), log.epochs)[1]:
                return True
        return False

    def start_forwards(self, lowered: Container[str], head_of: Callable[[TopicLog], int]) -> list[bytes]:
        """After replay: attach forwards to topics, and begin an epoch for topics whose durability class is in `lowered`,
        as a crash may have lowered their head. Returns the epoch frames, to be synced before any read or copy.
        """
        state = self.state
        for outflow in self.outflows.values():
            outflow.starts = {key: mark for key, mark in outflow.starts.items() if key in state.by_id}
        epoch_frames: list[bytes] = []
        for log in list(state.by_id.values()):
            if self.outflows:
                self._attach_outflows(log)
                if log.outflows and log.deferred:
                    state.loader(log)
            if log.config.durability in lowered:
                base = head_of(log)
                self._apply_epoch(log, base, None)  # the frame is part of the log file that recovery begins
                state.touched[log.id] = log
                epoch_frames.append(frames.encode_control(frames.EPOCH, log.id, state.now_ms, base))
            if log.outflows and self._may_have_copies(log):
                self.copies_due[log.id] = log
        return epoch_frames

    def due_topics(self) -> list[TopicLog]:
        return list(self.copies_due.values())

    @property
    def has_due(self) -> bool:
        return bool(self.copies_due)

    def set_due(self, topic: SourceTopic) -> None:
        assert isinstance(topic, TopicLog)
        self.copies_due[topic.id] = topic

    def expedite(self, topic: SourceTopic) -> None:
        assert isinstance(topic, TopicLog)
        for call in self.state.events.copies_awaited:
            call(topic)

    def forward(self, uid: int) -> fwd.Forward | None:
        outflow = self.outflows.get(uid)
        return outflow.forward if outflow is not None else None

    def copies_after(
        self, log: SourceTopic, forward: fwd.Forward, after: int, count: int, max_bytes: int
    ) -> fwd.Copies | None:
        """The records of a topic that a forward copies after a seq; None: there are none yet."""
        assert isinstance(log, TopicLog)
        if log.dropped:
            return None
        try:
            self.state.touch(log)
        except UpkeepPending:
            self.state.upkeep.wait(
                log, lambda error: self._copies_ready(log, forward.uid, error), name=("copies", forward.uid)
            )
            return None
        if log.view.head <= after:
            return None
        command = cmd.Diff(log.name, after, count, max_bytes=max_bytes, touch=False, frames=True)
        command.match = filter_of(forward)
        try:
            page = self.reads.read_page(log, command)
        except ColdMiss as miss:
            uid = forward.uid
            self.state.cold.wait(
                miss, lambda error: self._copies_ready(log, uid, error), name=("copies", log.id, uid)
            )
            return None
        assert isinstance(page, cmd.FramePage)
        if page.next_from_seq <= after:
            return None
        gap = page.tombstone
        if gap is not None and gap.reason == "source_trim" and forward.allow_cycle:
            gap = None  # a gap has no hop count: in a cycle it would circulate forever
        lost = (gap.gap_from, gap.gap_to) if gap is not None else None
        copies = self.empty_copies(log, forward, after)
        copies.upto, copies.frames, copies.lost = page.next_from_seq, b"".join(page.chunks), lost
        return copies

    def _copies_ready(self, log: TopicLog, uid: int, error: TopicsError | None) -> None:
        """Records that a forward waited for can be read now, for a while. After an error the copier retries by itself."""
        if error is None:
            for call in self.state.events.copies_readable:
                call(log, uid)

    def empty_copies(self, log: SourceTopic, forward: fwd.Forward, after: int) -> fwd.Copies:
        """A batch without records, which asks the dest for its mark."""
        assert isinstance(log, TopicLog)
        start = self.outflows[forward.uid].start_of(log.id)
        return fwd.Copies(forward, log.name, log.id, list(log.epochs), start, after, after)

    def check_forwards(self) -> None:
        """Assert that every topic knows its forwards, and that every start position belongs to an existing topic."""
        if self.state.read_only is not None:
            return  # copying has stopped
        for log in self.state.by_id.values():
            if log.dropped:
                continue
            uids = [
                uid
                for uid, outflow in self.outflows.items()
                if outflow.forward.source == log.name
                or (outflow.forward.is_pattern and uid in self._patterns.match(log.name.encode()).plain)
            ]
            assert list(log.outflows) == sorted(uids), (log.name, log.outflows, uids)
        for outflow in self.outflows.values():
            assert outflow.starts.keys() <= self.state.by_id.keys(), outflow
        known = [uid for uids in self._literals.values() for uid in uids]
        assert len(known) + self._patterns.count == len(self.outflows)

    # -- dest ----------------------------------------------------------------------------------------------

    def _open_inflow(self, token: object, command: fwd.OpenInflow) -> None:
        state = self.state
        state.check_writable()
        state.reserve(4 * CONTROL_BYTES)
        log = state.for_write(command.topic)
        made = log is None
        op = Op(log or self._no_topic, token, fwd.InflowOpened(command.uid, made), sync=True)
        if log is None:
            if not command.create:
                raise TopicNotFound(command.topic)
            config = TopicConfig()
            self.appends.check_creation(command.topic, config)
            log = op.log = self.appends.create(command.topic, config)
            op.config = config
        if command.uid not in (log.inflows or {}):
            state.log(frames.INFLOW_OPEN, log, InflowOpen(command.uid, command.name, command.source))
        state.touched[log.id] = log
        state.add_op(op)

    def _close_inflow(self, token: object, command: fwd.CloseInflow) -> None:
        state = self.state
        state.check_writable()
        state.reserve(2 * CONTROL_BYTES)
        log = state.for_write(command.topic)
        op = Op(log or self._no_topic, token, fwd.InflowClosed(command.uid), sync=True)
        if log is not None and command.uid in (log.inflows or {}):
            state.log(frames.INFLOW_CLOSE, log, command.uid)
            state.touched[log.id] = log
        state.add_op(op)
        if command.undo:
            self._undo_topic(command.topic, op)

    @staticmethod
    def _apply_inflow_open(log: TopicLog, opened: InflowOpen, op: Op | None) -> None:
        log.inflows = {**(log.inflows or {}), opened.uid: Inflow(opened.name, opened.source)}

    @staticmethod
    def _apply_inflow_close(log: TopicLog, uid: int, op: Op | None) -> None:
        log.inflows = {other: flow for other, flow in (log.inflows or {}).items() if other != uid} or None

    @staticmethod
    def _apply_copied(log: TopicLog, copied: Copied, op: Op | None) -> None:
        inflow = (log.inflows or {}).get(copied.uid)
        if inflow is not None:
            inflow.total = copied.total
            inflow.set_mark(copied.source_id, copied.epoch, copied.seq)

    @staticmethod
    def _apply_epoch(log: TopicLog, base: int, op: Op | None) -> None:
        add_epoch(log.epochs, base)

    def _undo_topic(self, name: str, op: Op) -> None:
        """Drop a topic that was created for a forward that is then refused, unless it has been used since."""
        state = self.state
        log = state.staged.get(name)
        if log is None or log.next_seq > 1 or log.inflows or log.outflows or log.config != TopicConfig():
            return
        if log.transactions is not None:
            return
        if log.consumers is not None and log.consumers.named:
            return
        self.appends.stage_drop(log, op)

    def _forwards_of(self, log: TopicLog) -> list[tuple[int, str]]:
        """The forwards that end with a topic: those it is the dest of, and those it is the only source of."""
        found = dict(self._inflows_of(log))
        for uid in log.outflows:
            forward = self.outflows[uid].forward
            if not forward.is_pattern:
                found[uid] = forward.name
        return sorted(found.items())

    @staticmethod
    def _inflows_of(log: TopicLog) -> list[tuple[int, str]]:
        return [(uid, inflow.name) for uid, inflow in (log.inflows or {}).items()]

    def _may_end_forwards(
        self, log: TopicLog, ending: list[tuple[int, str]], prefixes: tuple[str, ...] | None
    ) -> bool:
        if prefixes is None:
            return True
        inflows = log.inflows or {}
        return all(
            fwd.covers(prefixes, name, inflows[uid].source, log.name)
            if uid in inflows
            else self.outflows[uid].forward.is_covered_by(prefixes)
            for uid, name in ending
        )

    def _check_drop_topic(self, token: object, command: cmd.DropTopic) -> None:
        """Whether the key may end the forwards that end with the topic; and log space for that."""
        log = self.state.staged.get(command.topic)
        if log is not None and (log.inflows or log.outflows):
            ending = self._forwards_of(log)
            if not self._may_end_forwards(log, ending, command.prefixes):
                raise Forbidden(
                    "deleting the topic would delete a router that this key may not use; delete the router first, with a key that may"
                )
            self.state.reserve((1 + len(ending)) * CONTROL_BYTES)
        self._inner_drop_topic(token, command)

    def _topic_dropped(self, log: TopicLog, op: Op) -> None:
        """End the forwards of a dropped topic, in its envelope: they must not apply to a new topic of this name."""
        ending = self._forwards_of(log)
        ended = {uid for uid, _ in ending}
        for uid in log.outflows:
            if uid in ended:
                self.state.log_of_shard(frames.OUTFLOW_CLOSE, uid)
            else:
                self.outflows[uid].starts.pop(log.id, None)
        log.outflows = ()
        self.copies_due.pop(log.id, None)
        if isinstance(op.result, cmd.TopicDropped):
            op.result.forwards = ending

    def _take_copies(self, token: object, command: fwd.TakeCopies) -> None:
        state = self.state
        state.check_writable()
        copies = command.copies
        uid = copies.forward.uid
        log = state.for_write(command.topic)
        inflow = log.inflows.get(uid) if log is not None and log.inflows is not None else None
        if log is None or inflow is None:
            raise ForwardNotFound(copies.forward.name)
        if copies.is_gone:
            self._forget_source(log, uid, copies.source_id, token)
            return
        epoch, mark = inflow.mark_of(copies.source_id, copies.start, copies.epochs)
        result = fwd.CopiesTaken(uid, copies.source_id, mark, total=inflow.total)
        if copies.upto <= mark or copies.after > mark:
            # Held, as copies below the mark may not be visible yet, and a read may be waiting for them.
            state.answer(token, result, log, held=log.pending > 0)
            return
        runs, upto = self._fitting_runs(log, copies, mark, result)
        lost = self._lost_count(copies, mark, upto)
        if upto == mark:
            state.answer(token, result, log, held=log.pending > 0)
            return
        last = self._stage_copies(log, runs, lost)
        count = sum(len(run.seqs) for run in runs)
        state.counters["copies"] = state.counters.get("copies", 0) + count
        state.log(frames.COPIED, log, Copied(uid, copies.source_id, epoch, upto, inflow.total + count))
        state.touched[log.id] = log
        result.mark, result.total = upto, inflow.total
        if last is None:
            state.add_op(Op(log, token, result))
        else:
            last.token, last.result = token, result

    def _forget_source(self, log: TopicLog, uid: int, source_id: int, token: object) -> None:
        state = self.state
        assert log.inflows is not None
        inflow = log.inflows[uid]
        if source_id in inflow.marks:
            state.reserve(CONTROL_BYTES)
            state.log(frames.COPIED, log, Copied(uid, source_id, 0, GONE, inflow.total))
            state.touched[log.id] = log
        state.add_op(Op(log, token, fwd.CopiesTaken(uid, source_id, 0, total=inflow.total)))

    def _fitting_runs(
        self, log: TopicLog, copies: fwd.Copies, mark: int, result: fwd.CopiesTaken
    ) -> tuple[list[CopyRun], int]:
        """The records to append, and the source seq up to which they go."""
        config = log.config
        if config.discard != "reject" or not (config.cap_records or config.cap_bytes):
            return self._unpacking.runs_of(copies, mark), copies.upto
        runs = runs_of(copies, mark)
        return runs, self._fit_to_caps(log, copies, runs, result)

    @staticmethod
    def _fit_to_caps(log: TopicLog, copies: fwd.Copies, runs: list[CopyRun], result: fwd.CopiesTaken) -> int:
        """Truncate the runs to what fits a dest with discard reject; returns the source seq up to which that is."""
        config = log.config
        taken = log.reserved
        records = config.cap_records - log.count - taken[0] if config.cap_records else None
        size = config.cap_bytes - log.bytes - taken[1] if config.cap_bytes else None
        for i, run in enumerate(runs):
            fits = _fit_count(run, records, size)
            if fits < len(run.seqs):
                upto = run.seqs[fits] - 1
                run.cut(fits)
                del runs[i + 1 :]
                result.full = True
                return upto
            records = records - fits if records is not None else None
            size = size - sum(run.sizes) if size is not None else None
        return copies.upto

    @staticmethod
    def _lost_count(copies: fwd.Copies, mark: int, upto: int) -> int:
        """The number of records that the source lost before they could be copied."""
        if copies.lost is None:
            return 0
        first, last = copies.lost
        return max(0, min(last, upto) - max(first, mark + 1) + 1)

    def _stage_copies(self, log: TopicLog, runs: list[CopyRun], lost: int) -> Op | None:
        """Stage the copies; returns the last append. The reply can wait for that, as the mark is in the same envelope."""
        config = log.config
        writes = [(run.records(), run.sizes) for run in runs if run.seqs]
        total = sum(sum(sizes) for _, sizes in writes)
        # The record size is not checked: the source topic accepted the record, and only its meta may have grown.
        self.appends.check_space(log, config, total)
        per_tag = bool(config.cap_per_tag)
        need = sum(
            frame_bytes_at_most(records, None, sum(sizes), per_tag=per_tag) for records, sizes in writes
        )
        self.state.reserve(need + 4 * CONTROL_BYTES)
        sync = config.durability == "fsync"
        if lost:
            self.appends.stage_loss(log, lost, Op(log, sync=sync))
        op = None
        for records, sizes in writes:
            if op is not None:
                op.plain = False  # it has no reply
            op = Op(log, sync=sync)
            self.appends.stage_append(log, config, records, sizes, op, created=False)
        return op


def _fit_count(run: CopyRun, records: int | None, size: int | None) -> int:
    """The number of records of a run that fit the remaining records and bytes."""
    count = len(run.seqs)
    if records is not None:
        count = min(count, max(records, 0))
    if size is not None:
        sums: list[int] = []
        total = 0
        for one in run.sizes[:count]:
            total += one
            sums.append(total)
        count = bisect.bisect_right(sums, size)
    return count
