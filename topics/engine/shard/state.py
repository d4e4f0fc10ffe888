"""The state of one shard: its topics, staged and published, and the group being staged.

Commands are decided on the staged state. What they stage is in `frames` (the bytes of the next log entry), `ops` (changes to
publish once that entry is written, or synced) and `ready` (replies that wait for neither); the engine commits. Features handle
the commands: they register in `handlers`, `appliers` and `events`, and the state knows none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from sortedcontainers import SortedList

from topics.api import limits
from topics.api.config import Durability, EngineConfig, TopicConfig
from topics.api.errors import (
    Conflict,
    ShardReadOnly,
    Throttled,
    TopicNotFound,
    TopicsError,
)
from topics.engine.commands import topics as cmd
from topics.engine.core.clock import EngineClock
from topics.engine.core.tasks import TaskOwner, Work, drain
from topics.engine.core.topic_ids import ID_STEP, OwnedIds
from topics.engine.reading.cold_blocks import ColdMiss, ColdReads
from topics.engine.reading.reader import Reader
from topics.engine.shard.events import ShardEvents
from topics.engine.shard.long_commands import LongCommand, LongCommands
from topics.engine.shard.topic_upkeep import Upkeep, UpkeepPending
from topics.engine.storage import frames
from topics.engine.storage.control import TimeCeiling, TopicCreated
from topics.engine.topic.log import Op, Range, TopicLog
from topics.engine.topic.snapshot_row import RowPart

# Cost of removing expired records: per step, per record with its own TTL, per record with a tag.
EXPIRE_STEP_UNITS, EXPIRY_UNITS, TAG_UNITS = 250, 4, 2
CONTROL_BYTES = 512  # upper bound of a control frame, except a long delete


@dataclass(slots=True, eq=False)
class Waiter:
    """A long poll or standing read, parked on a topic."""

    token: object
    command: cmd.Diff
    deadline_ms: int
    log: TopicLog
    head: int  # when it was parked; any later record ends a poll, even one that its filter excludes
    done: bool = False
    is_blocked: bool = False  # the topic has changed, but the reply cannot be sent yet


@dataclass(slots=True)
class EraseRequest:
    log: TopicLog
    ranges: list[Range]
    token: object
    result: cmd.Deleted | None


Handler: TypeAlias = Callable[[object, Any], None]
# Applies a frame to the staged state: of a topic (the topic, the payload, and an op for what readers will see of it), or of
# the shard (the payload alone).
Applier: TypeAlias = Callable[..., None]


class Postpone(Exception):
    """Raised by a read that must be retried once the topic's pending changes are published."""

    def __init__(self, log: TopicLog) -> None:
        super().__init__(log.name)
        self.log = log


class ShardState:
    def __init__(self, config: EngineConfig, clock: EngineClock, reader: Reader, boot_id: str) -> None:
        self.config = config
        self.events = ShardEvents()
        self.clock = clock
        self.reader = reader
        self._boot_id = boot_id
        self.cold = ColdReads(None, reader.cold_blocks, lambda kind, work, done: None)
        self.now_ms = clock.now_ms
        self.staged: dict[str, TopicLog] = {}  # topics by name, including changes that are not published yet
        self.published: dict[str, TopicLog] = {}  # topics by name, as readers see them
        self.by_id: dict[int, TopicLog] = {}
        self.names: SortedList[str] = SortedList()
        self.next_id = config.shard + ID_STEP
        self.owned_ids = OwnedIds(config.shard)
        self.bytes_live = 0  # staged, over all topics
        self.records_live = 0
        self.bytes_reserved = 0  # for decided transactions that are not completely in the log yet
        # This shard's share of the server-wide caps; None: the configured caps apply to this shard alone.
        self.topics_granted: int | None = None
        self.bytes_granted: int | None = None
        # What a failed commit may have left in the log and a restart may bring back: still counts towards the caps.
        self.topics_unknown = 0
        self.bytes_unknown = 0
        self._class_counts: dict[str, int] | None = None
        self.ram_bytes = 0
        self.read_only: str | None = None
        self.cut_off = False  # the end of its log could not be read at start: the newest records are missing
        self.disk_full = False
        self.low_space = False  # less free space than min_free_bytes
        self.log_full = False  # the log since the last checkpoint has reached its maximum size
        # The group being staged.
        self.frames: list[bytes] = []
        self.frame_bytes = 0
        self.frame_count = 0
        self.ops: list[Op] = []
        self.appended: list[tuple[TopicLog, int]] = []  # topics with rows in this group, and their first seqs
        self.room_bytes = 0  # maximum size of this group that fits a log file
        self.make_room: Callable[[int], bool] = lambda size: False
        self.ready: list[tuple[object, object]] = []
        self.file_number = 0
        self.frame_offset = 0  # offset of this group's first frame in the log file
        # Ceilings: a time or seq may be used only below a synced ceiling, so a restart never goes back.
        self.time_ceiling_ms = 0
        self.time_ceiling_synced_ms = 0
        self.time_ceilings: list[tuple[int, int]] = []  # (lsn, ceiling), not yet synced
        self.seq_ceilings: list[tuple[int, TopicLog, int]] = []
        self._new_time_ceiling = 0
        self.new_seq_ceilings: list[tuple[TopicLog, int]] = []
        self.written_lsn = 0
        self.synced_lsn = 0
        self.publishing_lsn = 0  # log position that covers the op being published
        # Whether a reply to this token can be sent now.
        self.can_send: Callable[[object], bool] = lambda token: True
        self.created: list[str] = []  # names that readers see since the last turn
        self.touched: dict[int, TopicLog] = {}  # topics changed since the last checkpoint
        self.erase_requests: list[EraseRequest] = []
        self.dropped_topics: list[TopicLog] = []  # dropped topics whose files are not removed yet
        self.loader: Callable[[TopicLog], None] = lambda log: None
        # Loads a topic in steps; None during recovery: topics are loaded at once.
        self.load_steps: Callable[[TopicLog], Work] | None = None
        self.upkeep = Upkeep(self._upkeep_steps)
        self.counters: dict[str, int] = {}
        # What features add to the engine's background work.
        self.task_owners: list[TaskOwner] = []
        self.busy: list[Callable[[TopicLog], bool]] = []  # whether a job has a file of the topic open
        # For an erase: returns the work on a feature's own files of the topic, for a thread.
        self.erasers: list[Callable[[TopicLog], Callable[[], None]]] = []
        self._command: cmd.Command | None = None  # being handled
        self.handlers: dict[type, Handler] = {}  # by command type; features add theirs
        self.appliers: dict[int, Applier] = {}  # by kind of frame; features add theirs
        self.row_parts: dict[str, RowPart] = {}  # by feature: its part of the rows of a snapshot
        self.long = LongCommands(self._before_slice, self._handle_error)

    # -- turns and groups ----------------------------------------------------------------------------------

    def begin_turn(self, now_ms: int, *, busy: bool) -> None:
        self.now_ms = now_ms
        self.long.begin_turn()
        self.upkeep.begin_turn()
        late = now_ms + limits.TIME_CEILING_STEP_MS // 2 > self.time_ceiling_ms
        if busy and late and not self.read_only and self.has_control_room():
            self.stage_time_ceiling(now_ms + limits.TIME_CEILING_STEP_MS)

    def has_control_room(self) -> bool:
        try:
            return self.has_room(CONTROL_BYTES)
        except ShardReadOnly:  # just became read-only: each request of this turn gets that error
            return False

    def stage_time_ceiling(self, ceiling_ms: int) -> None:
        # Not applied: a start continues from the latest of these, all others do nothing.
        value = TimeCeiling(ceiling_ms, self.now_ms, self.clock.mono_ms, self._boot_id)
        self.log_only(frames.TIME_CEILING, None, value)
        self.time_ceiling_ms = self._new_time_ceiling = ceiling_ms

    def begin_group(self, file_number: int, frame_offset: int, room_bytes: int) -> None:
        self.file_number = file_number
        self.frame_offset = frame_offset
        self.room_bytes = room_bytes

    def has_room(self, size: int) -> bool:
        """Whether `size` more bytes still fit a log file; creates a larger one if needed."""
        return self.frame_bytes + size <= self.room_bytes or self.make_room(self.frame_bytes + size)

    def reserve(self, size: int) -> None:
        """Reserve log space, or raise, before anything is decided."""
        if not self.has_room(size):
            raise Throttled("the disk is full; free some space and retry", limit="disk_full")

    def move_group(self, file_number: int, frame_offset: int) -> None:
        """The group is written to another log file: relocate its rows."""
        shift = frame_offset - self.frame_offset
        moved: dict[int, TopicLog] = {}
        for log, first in self.appended:
            if log.id not in moved:  # a topic's first item has its lowest seq
                moved[log.id] = log
                log.shift_rows(first, shift, file_number)
        self.file_number, self.frame_offset = file_number, frame_offset

    def wrap(self, command: type, handler: Handler) -> Handler:
        """Let a feature handle a command first. Returns the handler with which it continues."""
        inner = self.handlers[command]
        self.handlers[command] = handler
        return inner

    def check_invariants(self) -> None:
        for log in self.by_id.values():
            log.check()
        for check in self.events.checked:
            check()
        total = sum(log.bytes for log in self.staged.values())
        assert total == self.bytes_live, (total, self.bytes_live)
        records = sum(log.count for log in self.staged.values())
        assert records == self.records_live, (records, self.records_live)

    def handle(self, token: object, command: cmd.Command) -> None:
        self._command = command
        try:
            if self.upkeep.queue:
                self._queue_behind_upkeep(getattr(command, "topic", ""))
            self.handlers[type(command)](token, command)
        except (Postpone, UpkeepPending, TopicsError, OSError) as error:
            self._handle_error(token, command, error)

    def _handle_error(self, token: object, command: cmd.Command, error: Exception) -> None:
        """Retry, queue or answer a command whose handler, or sliced work, raised an error."""
        if isinstance(error, Postpone):
            self.add_op(Op(error.log, token, command=command, retry=True))
        elif isinstance(error, UpkeepPending):
            self._wait_for_upkeep(token, command, error.log)
        elif isinstance(error, Conflict | TopicNotFound):
            # A conflict depends on staged state, and a 404 for a write on a drop that readers do not see yet: hold the
            # reply until that is published. A 404 for a read depends on published state and is sent at once.
            known = self.staged if isinstance(error, Conflict) else self.published
            log = known.get(getattr(command, "topic", ""))
            if log is not None and log.pending and self.read_only is None:
                self.add_op(Op(log, token, error, command=command))
            else:
                self.ready.append((token, error))
        elif isinstance(error, ColdMiss):
            self._wait_for_cold(token, command, error)
        elif isinstance(error, TopicsError):
            self.ready.append((token, error))
        elif isinstance(error, OSError):
            # Only reads use the disk here; the engine writes the log.
            self.ready.append((token, TopicsError(f"a file could not be read: {error}")))
        else:
            raise error

    def _queue_behind_upkeep(self, topic: str) -> None:
        """Keep the order: requests that wait for the topic's upkeep go first."""
        log = self.staged.get(topic) or self.published.get(topic)
        if log is not None and self.upkeep.is_queued(log):
            raise UpkeepPending(log)

    def _wait_for_upkeep(self, token: object, command: cmd.Command, log: TopicLog) -> None:
        def resume(error: TopicsError | None) -> None:
            if error is None:
                self.handle(token, command)
            else:
                self.ready.append((token, error))

        self.upkeep.wait(log, resume, token=token)

    def _before_slice(self, long: LongCommand) -> None:
        """Prepare the next slice of a long command: check that its topic is still there and load it."""
        self._command = long.command
        if self.read_only is not None and isinstance(long.command, cmd.Change):
            raise ShardReadOnly(self.read_only, unknown=True)
        if long.log is None:
            return
        if long.log.dropped or long.log.view.dropped:
            raise TopicNotFound(long.log.name)
        self.touch(long.log)

    def _wait_for_cold(self, token: object, command: cmd.Command, miss: ColdMiss) -> None:
        """Retry the command once the cold blocks are fetched. The first attempt has changed nothing."""

        def resume(error: TopicsError | None) -> None:
            if error is None or self.is_outdated(miss):
                self.handle(token, command)
            else:
                self.ready.append((token, error))

        try:
            self.cold.wait(miss, resume, token=token, connection=getattr(command, "connection", 0))
        except TopicsError as error:
            self.ready.append((token, error))

    def is_outdated(self, miss: ColdMiss) -> bool:
        """Whether a segment of a failed fetch was replaced or removed since, so that a retry makes sense."""
        for topic_id, first_seq, generation in (want.segment for want in miss.wants):
            log = self.by_id.get(topic_id)
            found = log.find(first_seq) if log is not None and log.stored is None else None
            meta = found[0].meta if found is not None else None
            if meta is None or (meta.first_seq, meta.generation) != (first_seq, generation):
                return True
        return False

    def log(self, kind: int, log: TopicLog, payload: object, op: Op | None = None) -> None:
        """Log a change of a topic and apply it to the staged state, with the function that replay uses, too."""
        self.log_only(kind, log, payload)
        self.appliers[kind](log, payload, op)

    def log_of_shard(self, kind: int, payload: object) -> None:
        """Log a change that concerns no topic and apply it."""
        self.log_only(kind, None, payload)
        self.appliers[kind](payload)

    def log_if_room(self, kind: int, log: TopicLog, payload: object, op: Op) -> None:
        """Apply a change of a topic that does not depend on the log: without the frame, the next start makes it again."""
        frame = frames.encode_control(kind, log.id, self.now_ms, payload)
        if self.read_only is None and self.has_room(len(frame)):
            self.add_frame(frame)
        self.appliers[kind](log, payload, op)

    def log_only(self, kind: int, log: TopicLog | None, payload: object) -> None:
        """Log a change without applying it, for those whose effect now is not that of a replay. Each caller says why."""
        topic_id = log.id if log is not None else 0
        self.add_frame(frames.encode_control(kind, topic_id, self.now_ms, payload))

    def add_frame(self, frame: bytes) -> None:
        self.frames.append(frame)
        self.frame_bytes += len(frame)
        self.frame_count += 1

    def add_op(self, op: Op) -> None:
        op.log.pending += 1
        self.ops.append(op)

    def committed(self, lsn: int) -> None:
        """The staged group was written to the log at `lsn`."""
        self.frames, self.frame_bytes, self.frame_count = [], 0, 0
        self.ops = []
        self.appended = []
        if self._new_time_ceiling:
            self.time_ceilings.append((lsn, self._new_time_ceiling))
            self._new_time_ceiling = 0
        if self.new_seq_ceilings:
            self.seq_ceilings += [(lsn, log, ceiling) for log, ceiling in self.new_seq_ceilings]
            self.new_seq_ceilings = []

    def synced(self, lsn: int) -> None:
        self.synced_lsn = max(self.synced_lsn, lsn)
        for call in self.events.synced:
            call(lsn)
        while self.time_ceilings and self.time_ceilings[0][0] <= lsn:
            self.time_ceiling_synced_ms = self.time_ceilings.pop(0)[1]
        while self.seq_ceilings and self.seq_ceilings[0][0] <= lsn:
            _, log, ceiling = self.seq_ceilings.pop(0)
            log.ceiling_synced = max(log.ceiling_synced, ceiling)

    def publish(self, op: Op) -> None:
        """Publish an op: apply it to the view, queue the topic for delivery, release its reply."""
        log = op.log
        log.pending -= 1
        if op.plain:
            log.publish(op)
            # As `is_followed`, without the call: nearly all publishes are of this kind.
            if log.waiters or log.outflows or log.consumers is not None or log.unsynced_heads is not None:
                for call in self.events.published:
                    call(log, op)
            self.ready.append((op.token, op.result))
            return
        log.expiring -= op.expiry
        ram_bytes = log.ram_bytes
        log.publish(op)
        self.ram_bytes += log.ram_bytes - ram_bytes
        if op.config is not None or op.dropped:
            self._publish_name(op)
        if log.is_followed:
            for call in self.events.published:
                call(log, op)
        if op.erase is not None:
            self.erase_requests.append(op.erase)
        if op.retry:
            self.handle(op.token, op.command)
        elif op.token is not None:
            self.ready.append((op.token, op.result))

    def count_live(self, op: Op) -> None:
        """Add a staged change of one topic to the shard's totals."""
        self.bytes_live += op.bytes
        self.records_live += op.count

    def classes_changed(self) -> None:
        """Recount topics by durability: a config was published, or recovery has published topics."""
        self._class_counts = None

    def class_counts(self) -> dict[str, int]:
        """The number of published topics by durability, cached."""
        if self._class_counts is None:
            counts = dict.fromkeys(get_args(Durability), 0)
            for log in self.published.values():
                counts[log.view.config.durability] += 1
            self._class_counts = counts
        return dict(self._class_counts)

    def _publish_name(self, op: Op) -> None:
        log = op.log
        if op.dropped:
            if self.published.get(log.name) is log:
                self._count_class(log, -1)
                del self.published[log.name]
                self.names.discard(log.name)
            self.by_id.pop(log.id, None)
            self.touched.pop(log.id, None)
            self.ram_bytes -= log.ram_bytes
            self.dropped_topics.append(log)
            for removed in self.events.topic_removed:
                removed(log)
        elif self.published.get(log.name) is not log:
            if log.name in self.published:
                self.classes_changed()
            self._count_class(log, 1)
            self.published[log.name] = log
            self.names.add(log.name)
            self.created.append(log.name)
        else:
            self.classes_changed()

    def _count_class(self, log: TopicLog, by: int) -> None:
        if self._class_counts is not None:
            self._class_counts[log.view.config.durability] += by

    def fail(self, reason: str) -> None:
        """A commit failed: the shard becomes read-only and reverts to the published state."""
        self.read_only = reason
        topics, size = len(self.staged), self.bytes_live
        for log in list(self.by_id.values()):
            if log.pending or log.next_seq != log.view.head + 1:
                log.discard_staged()
                log.dedupe.discard_after(log.view.head)
        self.staged = dict(self.published)
        self.by_id = {log.id: log for log in self.published.values()}
        self.bytes_live = sum(log.bytes for log in self.staged.values())
        self.records_live = sum(log.count for log in self.staged.values())
        self.topics_unknown = max(0, topics - len(self.staged))
        self.bytes_unknown = max(0, size - self.bytes_live)
        self.frames, self.frame_bytes, self.frame_count = [], 0, 0
        self.ops, self.appended = [], []
        requests, self.erase_requests = self.erase_requests, []
        for request in requests:
            if request.token is not None:
                self.ready.append((request.token, ShardReadOnly(reason, unknown=True)))
        for call in self.events.failed:
            call(reason)

    def recovered(self, salt: int) -> None:
        """The log is replayed. `salt`: different at every start."""
        for call in self.events.recovered:
            call(salt)
        for log in self.by_id.values():
            self.topic_recovered(log)

    def topic_recovered(self, log: TopicLog) -> None:
        for call in self.events.topic_recovered:
            call(log)

    # -- finding topics ------------------------------------------------------------------------------------

    def for_write(self, name: str) -> TopicLog | None:
        log = self.staged.get(name)
        if log is not None:
            self.touch(log)
        return log

    def for_read(self, name: str) -> TopicLog:
        log = self.published.get(name)
        if log is None:
            self.check_log_complete()
            raise TopicNotFound(name)
        self.touch(log)
        self.postpone_if_expiring(log)
        return log

    def loaded_topic(self, name: str) -> TopicLog:
        """A published topic with its deferred replay applied: otherwise a watcher would miss those changes."""
        log = self.published.get(name)
        if log is None:
            self.check_log_complete()
            raise TopicNotFound(name)
        if log.deferred:
            try:
                self.loader(log)
            except OSError as error:
                raise TopicsError(f"a file could not be read: {error}") from error
        return log

    def check_log_complete(self) -> None:
        """Refuse a read of the newest records if the end of the log is missing: records before the damage are readable."""
        if self.cut_off and self.read_only is not None:
            raise ShardReadOnly(self.read_only)

    @staticmethod
    def postpone_if_expiring(log: TopicLog) -> None:
        """Retry a read later while expired records are staged but not published: it must not return them."""
        if log.expiring:
            raise Postpone(log)

    def touch(self, log: TopicLog) -> None:
        """Load a topic and expire its records. Raises UpkeepPending if that takes longer than this turn allows."""
        if log.stored is not None or log.deferred:
            self._do_upkeep(log)
        log.last_touch = self.now_ms
        if ((log.config.ttl_ms or log.expiries) and self._expire(log)) or log.cap_lost >= log.first_seq:
            self._do_upkeep(log)

    def _do_upkeep(self, log: TopicLog) -> None:
        if self.load_steps is None:
            self.upkeep_now(log)
        else:
            self.upkeep.run(log)

    def upkeep_now(self, log: TopicLog) -> None:
        """Load and expire a topic completely, for callers that cannot wait."""
        drain(self._upkeep_steps(log))
        log.last_touch = self.now_ms

    def load_slices(self, log: TopicLog) -> Work:
        """Load a topic in slices, for work that is itself sliced."""
        while log.is_unloaded and not log.dropped:
            if self.load_steps is None:
                self.loader(log)
            else:
                yield from self.load_steps(log)

    def _upkeep_steps(self, log: TopicLog) -> Work:
        yield from self.load_slices(log)
        while (log.config.ttl_ms or log.expiries) and not log.dropped:
            units = self._expire(log)
            if not units:
                break
            yield units
        while log.is_over_cap and not log.dropped:
            units = self._step_units(log)
            self._remove_expired(
                log, [], min(log.cap_lost, log.first_seq + limits.EXPIRE_RECORDS - 1), ttl=False
            )
            if log.is_over_cap:
                yield units

    def _expire(self, log: TopicLog) -> int:
        """Expire a bounded number of records. The topic's TTL moves the floor; a record's own TTL is a silent delete.

        Returns the cost of this step if there is more to do, else 0.
        """
        due, is_more = log.expired_records(self.now_ms, limits.EXPIRE_RECORDS)
        last = log.expired_last(self.now_ms)
        if last - log.first_seq >= limits.EXPIRE_RECORDS:
            upto = log.eviction_end(limits.EXPIRE_RECORDS, 0) or last
            last, is_more = min(last, upto), is_more or upto < last
        if last or due:
            self._remove_expired(log, due, last)
        return self._step_units(log) if is_more else 0

    @staticmethod
    def _step_units(log: TopicLog) -> int:
        """Estimated cost of removing EXPIRE_RECORDS records, which is higher if most have distinct tags."""
        per_record = (
            EXPIRY_UNITS if log.expiries else TAG_UNITS if len(log.tags) > limits.EXPIRE_RECORDS else 0
        )
        return EXPIRE_STEP_UNITS + per_record * limits.EXPIRE_RECORDS

    def _remove_expired(self, log: TopicLog, due: list[int], last: int, *, ttl: bool = True) -> None:
        """Remove records: `due` by their own TTL, and those up to `last` by the topic's TTL or cap."""
        op = Op(log)
        if due:
            log.stage_delete(as_ranges(due), op)
        if last >= log.first_seq:
            log.stage_evict(last, op, ttl=ttl)
        self.count_live(op)
        self.touched[log.id] = log
        if log.pending:
            op.expiry = True
            log.expiring += 1
            self.add_op(op)
        else:
            log.publish(op)

    def check_writable(self) -> None:
        if self.read_only is not None:
            raise ShardReadOnly(self.read_only)

    def create_topic(self, topic_id: int, created: TopicCreated) -> TopicLog:
        """Add a topic to the staged state, live and in replay."""
        log = self.new_log(topic_id, created.name, created.config)
        log.ceiling = created.ceiling
        self.next_id = max(self.next_id, topic_id + ID_STEP)
        self.staged[log.name] = self.by_id[topic_id] = log
        return log

    def new_log(self, topic_id: int, name: str, config: TopicConfig) -> TopicLog:
        return TopicLog(
            topic_id,
            name,
            config,
            segment_max_events=self.config.segment_max_events,
            segment_max_bytes=self.config.segment_max_bytes,
        )

    def answer(self, token: object, result: object, log: TopicLog, *, held: bool = False) -> None:
        """Reply now, or hold the reply until what it depends on is published (`held`) or synced (the time)."""
        unsafe_time = (log.config.ttl_ms or log.expiries) and self.now_ms > self.time_ceiling_synced_ms
        if (held or unsafe_time) and self.read_only is None:
            self.add_op(Op(log, token, result, sync=bool(unsafe_time), command=self._command))
        else:
            self.ready.append((token, result))


def as_ranges(seqs: list[int]) -> list[Range]:
    """Convert ascending seqs to inclusive ranges."""
    ranges: list[Range] = []
    for seq in seqs:
        if ranges and ranges[-1][1] + 1 == seq:
            ranges[-1] = (ranges[-1][0], seq)
        else:
            ranges.append((seq, seq))
    return ranges
