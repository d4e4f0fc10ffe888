"""Commands that change a topic: append, skip, delete, and creating, configuring and dropping topics.

Each is decided on staged state and becomes log frames and an op.

| command | frames | visible |
|---|---|---|
| append, delete, skip | append · delete · evict · seq ceiling | as the topic's durability class requires |
| put, drop, create | topic create · config · topic delete | after a sync, in every class |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import msgspec
import numpy as np

from topics.api import limits
from topics.api.config import TopicConfig
from topics.api.errors import (
    BatchTooLarge,
    Forbidden,
    InvalidRequest,
    OverGrant,
    RecordTooLarge,
    Throttled,
    TopicExistsIncompatible,
    TopicFull,
    TopicNotEmpty,
    TopicNotFound,
    TopicsError,
    WrongLastSeq,
)
from topics.engine.commands import topics as cmd
from topics.engine.core.subjects import TagMatch
from topics.engine.shard.long_commands import Work
from topics.engine.shard.state import CONTROL_BYTES, EraseRequest, ShardState, as_ranges
from topics.engine.storage import frames
from topics.engine.storage.control import ConfigChanged, Deletion, Floors, Lost, Skipped, TopicCreated
from topics.engine.topic.log import Op, Range, TopicLog
from topics.engine.topic.tags import Seqs, scan

RANGE_BYTES = 20  # maximum size of one range in a delete frame
RANGE_COST = 12  # cost of one range of a delete, without its rows
DELETE_BATCH = 16_384  # seqs of a delete by tag that are sorted together
# Slices of a delete: the cost of finding and deleting it, in microseconds, and its ranges.
DeleteSlices: TypeAlias = Iterator[tuple[int, list[Range]]]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}\Z")


class Appends:
    def __init__(self, state: ShardState) -> None:
        self.state = state
        state.handlers |= {
            cmd.Append: self._append,
            cmd.Skip: self._skip,
            cmd.Delete: self._delete,
            cmd.PutTopic: self._put_topic,
            cmd.DropTopic: self._drop_topic,
        }
        state.appliers |= {
            frames.DELETE: self._apply_delete,
            frames.EVICT: self._apply_evict,
            frames.SKIP: self._apply_skip,
            frames.LOSS: self._apply_loss,
            frames.CONFIG: self._apply_config,
            frames.SEQ_CEILING: self._apply_seq_ceiling,
            frames.ERASE_DONE: self._apply_erase_done,
        }
        self.trimming: dict[int, TopicLog] = {}  # topics being trimmed to a new cap_per_tag
        state.events.topic_removed.append(lambda log: self.trimming.pop(log.id, None))

    # -- append --------------------------------------------------------------------------------------------

    def _append(self, token: object, command: cmd.Append) -> None:
        state = self.state
        state.check_writable()
        records = command.records
        plain = command.idempotency_key is None and frames.is_plain(records)
        if plain and len(records.payloads) == 1:
            sizes = [len(records.payloads[0])]
        else:
            sizes = self.check_records(records, command.idempotency_key)
        log = state.for_write(command.topic)
        created = log is None
        config = log.config if log is not None else self._creation_config(command, sizes)
        key = command.idempotency_key
        if (
            log is not None
            and key is not None
            and self._deduped(token, log, key, include_epoch=command.include_epoch)
        ):
            return
        if command.if_last_seq is not None or command.if_tag_last_seq is not None:
            self._check_conditions(log, command)
        one = len(sizes) == 1
        size, largest = (sizes[0], sizes[0]) if one else (sum(sizes), max(sizes))
        self.check_room(log, config, command.topic, len(sizes), size, largest)
        if plain:
            need = size + frames.OVERHEAD_BYTES * len(sizes) + 3 * CONTROL_BYTES
        else:
            need = frame_bytes_at_most(records, key, size, per_tag=bool(config.cap_per_tag))
        if state.frame_bytes + need > state.room_bytes:
            state.reserve(need)
        if log is None:
            log = self.create(command.topic, config)
        op = Op(log, token, sync=created or config.durability == "fsync")
        first = log.next_seq
        self.stage_append(log, config, records, sizes, op, created=created, key=key, plain=plain)
        op.result = cmd.Appended(command.topic, first, len(sizes), op.head, created, False, op.sync)
        if command.include_epoch:
            op.result.epoch = log.epoch

    def stage_append(
        self,
        log: TopicLog,
        config: TopicConfig,
        records: cmd.Records,
        sizes: list[int],
        op: Op,
        *,
        created: bool,
        key: bytes | None = None,
        plain: bool = False,
    ) -> None:
        """Stage the append of records that were checked before."""
        state = self.state
        self._stage_records(log, records, sizes, key, plain=plain)
        count = len(sizes)
        size = sizes[0] if count == 1 else sum(sizes)
        log.count += count
        log.bytes += size
        op.count = count
        op.bytes = size
        op.head = log.next_seq - 1
        op.write_ts = state.now_ms
        if created or config.cap_records or config.cap_bytes or config.cap_per_tag:
            self._apply_caps(log, config, records, op, created=created)
        else:
            op.plain = True
        if config.durability == "disk" and op.head * 2 > log.ceiling + log.ceiling_base:
            self._raise_ceiling(log)
        if (log.ceiling and op.head > log.ceiling_synced) or state.now_ms > state.time_ceiling_synced_ms:
            op.sync = True  # seqs and times may be revealed only below a synced ceiling
        state.bytes_live += op.bytes
        state.records_live += op.count
        state.touched[log.id] = log
        log.pending += 1
        state.ops.append(op)

    def _apply_caps(
        self, log: TopicLog, config: TopicConfig, records: cmd.Records, op: Op, *, created: bool
    ) -> None:
        """Side effects of an append: it may create the topic, and evict older records."""
        op.first_seq = log.first_seq
        if created:
            op.config = config
        if config.cap_per_tag and records.tags is not None:
            # At most one for each record, which is the reserved log space. There are more only after the cap was lowered,
            # and those are trimmed in the background (`trim_slice`).
            surplus = self._surplus(log, config.cap_per_tag, records.tags, len(records.tags))
            if surplus:
                self.log_delete(log, surplus, op)
        if (config.cap_records and log.count > config.cap_records) or (
            config.cap_bytes and log.bytes > config.cap_bytes
        ):
            self._evict(log, config, op, len(records.payloads))

    def check_records(self, records: cmd.Records, key: bytes | None) -> list[int]:
        """Check limits that depend only on the request; returns the accounted sizes."""
        count = len(records.payloads)
        if not count:
            raise InvalidRequest("a write needs at least one record")
        if count > limits.BATCH_RECORDS_MAX:
            raise BatchTooLarge(
                f"{count} records in one write; send at most {limits.BATCH_RECORDS_MAX}",
                records=count,
                max=limits.BATCH_RECORDS_MAX,
            )
        if key is not None and not 0 < len(key) <= limits.KEY_BYTES_MAX:
            raise InvalidRequest(f"an idempotency key must have 1 to {limits.KEY_BYTES_MAX} bytes")
        for column in (
            records.tags,
            records.nodes,
            records.meta_lens,
            records.header_lens,
            records.ttls_ms,
            records.sizes,
        ):
            if column is not None and len(column) != count:
                raise InvalidRequest(f"a column of {len(column)} values for {count} records")
        sizes = records.sizes if records.sizes is not None else [len(payload) for payload in records.payloads]
        if records.tags is not None and any(
            tag is not None and len(tag) > limits.TAG_BYTES_MAX for tag in set(records.tags)
        ):
            raise InvalidRequest(f"a tag is longer than {limits.TAG_BYTES_MAX} bytes")
        if records.nodes is not None and any(
            node is not None and len(node) > limits.NODE_BYTES_MAX for node in set(records.nodes)
        ):
            raise InvalidRequest(f"a node name is longer than {limits.NODE_BYTES_MAX} bytes")
        return sizes

    def _creation_config(self, command: cmd.Append, sizes: list[int]) -> TopicConfig:
        config = command.config or TopicConfig()
        create = command.create if command.create is not None else config.auto_create
        if not create:
            raise TopicNotFound(command.topic)
        if command.config is not None and not command.may_configure:
            raise Forbidden("creating a topic with a config requires the admin scope")
        self.check_creation(command.topic, config, sum(sizes))
        return config

    def check_creation(self, name: str, config: TopicConfig, size: int = 0) -> None:
        state = self.state
        if not NAME.match(name):
            raise InvalidRequest(
                f"{name!r} is not a valid topic name: use 1 to 255 of A-Z a-z 0-9 . _ : -, starting with a letter or digit"
            )
        self._check_config(name, config)
        bound = state.topics_granted if state.topics_granted is not None else state.config.max_topics or None
        if bound is not None and len(state.staged) >= bound:
            cap = state.config.max_topics
            message = f"the server has its maximum of {cap} topics; delete some or raise TOPICS_MAX_TOPICS"
            if state.topics_granted is None:
                raise Throttled(message, limit="max_topics", max=cap)
            raise self._over_grant(message, 1, size, limit="max_topics", max=cap)

    @staticmethod
    def _check_config(name: str, config: TopicConfig) -> None:
        """Reject a config that could not be read back from storage."""
        try:
            msgspec.convert(msgspec.to_builtins(config), TopicConfig)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"the config of {name!r} is not valid: {error}") from None
        numbers = (getattr(config, field) for field in TopicConfig.__struct_fields__ if field != "priority")
        if any(isinstance(number, int) and number < 0 for number in numbers):
            raise InvalidRequest(f"the config of {name!r} has a negative number")
        if config.dead_letter is not None:
            if not NAME.match(config.dead_letter):
                raise InvalidRequest(f"dead_letter {config.dead_letter!r} is not a valid topic name")
            if config.type == "queue" and config.dead_letter == name:
                raise InvalidRequest("a queue cannot be its own dead letter topic")

    def _deduped(self, token: object, log: TopicLog, key: bytes, *, include_epoch: bool) -> bool:
        found = log.dedupe.find(key, now_ms=self.state.now_ms, window_ms=log.config.idempotency_window_ms)
        if found is None:
            return False
        first, count, _ = found
        result = cmd.Appended(log.name, first, count, first + count - 1, False, True)
        if include_epoch:
            result.epoch = log.epoch
        self.state.answer(token, result, log, held=first + count - 1 > log.view.head)
        return True

    def _check_conditions(self, log: TopicLog | None, command: cmd.Append) -> None:
        if command.if_last_seq is not None:
            actual = log.next_seq - 1 if log is not None else 0
            if actual != command.if_last_seq:
                raise WrongLastSeq(command.topic, command.if_last_seq, actual)
        if command.if_tag_last_seq is not None:
            tag, expected = command.if_tag_last_seq
            actual = log.tags.last(tag, log.are_live) if log is not None else 0
            if actual != expected:
                raise WrongLastSeq(command.topic, expected, actual, tag.decode("utf-8", "replace"))

    def check_room(
        self, log: TopicLog | None, config: TopicConfig, name: str, count: int, size: int, largest: int
    ) -> None:
        record_max = min(config.max_record_bytes or limits.RECORD_BYTES_MAX, limits.RECORD_BYTES_MAX)
        if largest > record_max:
            raise RecordTooLarge(f"a record of {largest} bytes; the maximum is {record_max}")
        if config.discard == "reject":
            self._check_reject_caps(log, config, name, count, size)
        self.check_space(log, config, size)

    def check_space(self, log: TopicLog | None, config: TopicConfig, size: int) -> None:
        """Check the limits on total bytes, memory, disk space and log size."""
        state = self.state
        bound = (
            state.bytes_granted if state.bytes_granted is not None else state.config.max_total_bytes or None
        )
        if bound is not None and state.bytes_live + state.bytes_reserved + size > bound:
            cap = state.config.max_total_bytes
            message = f"the server stores its maximum of {cap} bytes; delete records or raise TOPICS_MAX_TOTAL_BYTES"
            if state.bytes_granted is None:
                raise Throttled(message, limit="max_total_bytes", max=cap)
            raise self._over_grant(message, int(log is None), size, limit="max_total_bytes", max=cap)
        if config.durability == "ephemeral":
            if state.ram_bytes + size > state.config.memory_bytes_max:
                raise Throttled(
                    "ephemeral records have reached their memory limit; raise TOPICS_MAX_MEMORY_BYTES or set a cap",
                    limit="max_memory_bytes",
                    max=state.config.memory_bytes_max,
                )
        elif state.low_space:
            raise Throttled(
                "the disk is nearly full; free some space and retry",
                limit="disk_full",
                min_free_bytes=state.config.min_free_bytes,
            )
        elif state.disk_full:
            raise Throttled("the disk is full; free some space and retry", limit="disk_full")
        elif state.log_full:
            raise Throttled(
                "writes are ahead of checkpoints and the log is full; retry later",
                limit="log",
                max=state.config.log_bytes_max,
                retry_after_ms=limits.LOG_RETRY_MS,
            )

    def _over_grant(self, message: str, topics: int, size: int, **detail: object) -> OverGrant:
        """The error for a request beyond this shard's grant, with everything it needs.

        Topics and bytes are requested together: requested one by one, two shards could keep taking them from each other.
        """
        state = self.state
        need_topics = need_bytes = 0
        if state.topics_granted is not None:
            need_topics = max(0, len(state.staged) + topics - state.topics_granted)
        if state.bytes_granted is not None:
            need_bytes = max(0, state.bytes_live + state.bytes_reserved + size - state.bytes_granted)
        return OverGrant(
            message, topics=topics, size=size, need_topics=need_topics, need_bytes=need_bytes, **detail
        )

    @staticmethod
    def _check_reject_caps(
        log: TopicLog | None, config: TopicConfig, name: str, count: int, size: int
    ) -> None:
        cap_records, cap_bytes = config.cap_records, config.cap_bytes
        if (cap_records and count > cap_records) or (cap_bytes and size > cap_bytes):
            raise RecordTooLarge(f"the write exceeds the cap of topic {name!r} and can never fit")
        live, live_bytes = (log.count, log.bytes) if log is not None else (0, 0)
        if log is not None:
            reserved = log.reserved
            live, live_bytes = live + reserved[0], live_bytes + reserved[1]
        if (cap_records and live + count > cap_records) or (cap_bytes and live_bytes + size > cap_bytes):
            assert log is not None
            raise TopicFull(
                f"topic {name!r} is full and rejects writes; delete records or raise its caps",
                topic=name,
                cap_records=cap_records,
                cap_bytes=cap_bytes,
                head_seq=log.next_seq - 1,
                earliest_seq=log.first_seq,
            )

    def create(self, name: str, config: TopicConfig) -> TopicLog:
        state = self.state
        ceiling = limits.SEQ_CEILING_STEP_MIN if config.durability == "disk" else 0
        created = TopicCreated(name, config, ceiling)
        log = state.create_topic(state.next_id, created)
        if ceiling:
            log.ceiling_ts = state.now_ms
            state.new_seq_ceilings.append((log, ceiling))
        state.log_only(frames.TOPIC_CREATE, log, created)
        for call in state.events.topic_created:
            call(log)
        return log

    def _stage_records(
        self, log: TopicLog, records: cmd.Records, sizes: list[int], key: bytes | None, *, plain: bool
    ) -> None:
        """Encode the frames and add the rows of one write."""
        state = self.state
        ram = log.config.durability == "ephemeral"
        first, now_ms = log.next_seq, state.now_ms
        pieces: list[bytes] = [] if ram else state.frames
        lengths, flags = frames.encode_appends(
            pieces, records, topic_id=log.id, first_seq=first, ts=now_ms, key=key, plain=plain
        )
        if ram:
            offset = self._keep_in_ram(log, b"".join(pieces))
        else:
            offset = state.frame_offset + state.frame_bytes
            state.frame_bytes += sum(lengths)
            state.frame_count += len(lengths)
            state.appended.append((log, first))
            if not log.runs or log.runs[-1][1] != state.file_number:
                log.runs.append((first, state.file_number))
        if plain:
            log.add_rows(offset, lengths, now_ms, None, None, None, sizes)
            return
        tags = log.tags.add_batch(first, records.tags) if records.tags is not None else None
        nodes = log.nodes.add_all(records.nodes) if records.nodes is not None else None
        log.add_rows(offset, lengths, now_ms, flags, tags, nodes, sizes)
        if records.ttls_ms is not None:
            log.add_expiries(
                (seq, now_ms + ttl_ms) for seq, ttl_ms in enumerate(records.ttls_ms, first) if ttl_ms
            )
        if key is not None and log.config.idempotency_window_ms:
            entry, window_ms = (first, len(lengths), now_ms), log.config.idempotency_window_ms
            log.dedupe.add(key, entry, window_ms=window_ms, in_ram=ram)

    def _keep_in_ram(self, log: TopicLog, data: bytes) -> int:
        """Append frames of an ephemeral topic to its RAM blocks; returns their offset."""
        last = log.runs[-1][1] if log.runs else None
        if not isinstance(last, bytearray) or len(last) + len(data) > limits.RAM_BLOCK_BYTES:
            last = bytearray()
            log.runs.append((log.next_seq, last))
        offset = len(last)
        last += data
        log.ram_bytes += len(data)
        self.state.ram_bytes += len(data)
        return offset

    @staticmethod
    def _surplus(log: TopicLog, keep: int, tags: Iterable[bytes | None], limit: int) -> list[Range]:
        """Records beyond `cap_per_tag`: all but the newest `keep` of each tag, up to `limit` of them."""
        surplus: list[int] = []
        for tag in dict.fromkeys(tags):
            if tag is not None and log.tags.count(tag) > keep:
                surplus += log.tags.surplus(tag, keep, log.are_live, limit - len(surplus)).tolist()
                if len(surplus) >= limit:
                    break
        return as_ranges(sorted(surplus))

    def trim_slice(self, log: TopicLog) -> bool:
        """Delete a slice of the existing records that exceed a new `cap_per_tag`; False: there is no log space for it."""
        state = self.state
        if not state.has_room(limits.TRIM_RECORDS * RANGE_BYTES + CONTROL_BYTES):
            return False
        ranges = self._next_surplus(log, log.config.cap_per_tag)
        state.touched[log.id] = log
        if ranges:
            op = Op(log, sync=log.config.durability == "fsync")
            self.log_delete(log, ranges, op)
            state.count_live(op)
            state.add_op(op)
        return True

    def _next_surplus(self, log: TopicLog, keep: int) -> list[Range]:
        """The next surplus records from tag id `log.trim_from` on, which advances. Tags and records are bounded."""
        first = log.trim_from
        if first is None or not keep:
            log.trim_from = None
            self.trimming.pop(log.id, None)
            return []
        tags, next_id = log.tags.exceeding(keep, first, limits.TRIM_TAGS)
        ranges = self._surplus(log, keep, tags, limits.TRIM_RECORDS)
        if sum(last - first + 1 for first, last in ranges) < limits.TRIM_RECORDS:
            log.trim_from = next_id
            if next_id is None:
                self.trimming.pop(log.id, None)
        return ranges

    def log_delete(self, log: TopicLog, ranges: list[Range], op: Op, *, erase: bool = False) -> None:
        for i in range(0, len(ranges), limits.RANGES_PER_FRAME_MAX):
            part = Deletion(ranges[i : i + limits.RANGES_PER_FRAME_MAX], erase)
            self.state.log(frames.DELETE, log, part, op)

    @staticmethod
    def _apply_delete(log: TopicLog, deletion: Deletion, op: Op) -> None:
        log.stage_delete(deletion.ranges, op)
        if deletion.erase:
            log.erasing.append(deletion.ranges)

    def _evict(self, log: TopicLog, config: TopicConfig, op: Op, written: int = 0) -> None:
        """Evict records beyond a cap, in the envelope of the write that exceeded it.

        At least twice as many records as were written are removed at once, so a steady writer never gets ahead of eviction.
        The rest are below the floor already, and requests to the topic wait until they are removed.
        """
        over = log.count - config.cap_records if config.cap_records else 0
        over_bytes = log.bytes - config.cap_bytes if config.cap_bytes else 0
        last = log.eviction_end(max(over, 0), max(over_bytes, 0))
        in_ram = log.front_is_in_ram(last)
        at_once = max(limits.EXPIRE_RECORDS, 2 * written)
        log.stage_evict(min(last, log.first_seq + at_once - 1), op, ttl=False)
        if last >= log.first_seq:
            log.cap_lost = op.cap_lost = last
            self.state.upkeep.enqueue(log)
        if in_ram:
            return  # a restart loses these records anyway
        # Replay evicts up to the floors at once.
        self.state.log_only(frames.EVICT, log, Floors(log.cap_lost, log.ttl_lost))

    @staticmethod
    def _apply_evict(log: TopicLog, floors: Floors, op: Op) -> None:
        head = log.next_seq - 1
        log.stage_floors(min(floors.cap_lost, head), min(floors.ttl_lost, head), op)

    def _raise_ceiling(self, log: TopicLog) -> None:
        """Raise the seq ceiling when half of it is used, by about two seconds of traffic, so writes rarely wait for it."""
        state = self.state
        head = log.next_seq - 1
        elapsed_ms = max(1, state.now_ms - log.ceiling_ts)
        recent = head - log.ceiling_base
        step = min(
            max(limits.SEQ_CEILING_STEP_MIN, recent * 2000 // elapsed_ms, recent), limits.SEQ_CEILING_STEP_MAX
        )
        if head + step <= log.ceiling:
            return
        log.ceiling_base, log.ceiling_ts = head, state.now_ms
        state.log(frames.SEQ_CEILING, log, head + step)
        state.new_seq_ceilings.append((log, log.ceiling))

    @staticmethod
    def _apply_seq_ceiling(log: TopicLog, ceiling: int, op: Op | None) -> None:
        log.ceiling = max(log.ceiling, ceiling)

    def _skip(self, token: object, command: cmd.Skip) -> None:
        state = self.state
        state.check_writable()
        if not 0 < command.count <= limits.SKIP_MAX:
            raise InvalidRequest(f"skip takes 1 to {limits.SKIP_MAX} seqs")
        log = state.for_write(command.topic)
        if log is None:
            raise TopicNotFound(command.topic)
        state.reserve(CONTROL_BYTES)
        first = log.next_seq
        op = Op(log, token, sync=log.config.durability == "fsync")
        state.log(frames.SKIP, log, Skipped(first, command.count), op)
        if log.config.durability == "disk":
            self._raise_ceiling(log)
            op.sync = op.sync or op.head > log.ceiling_synced
        op.result = cmd.Appended(log.name, first, command.count, op.head, synced=op.sync)
        state.touched[log.id] = log
        state.add_op(op)

    def _apply_skip(self, log: TopicLog, skipped: Skipped, op: Op) -> None:
        self._note_missing(log, skipped.first)
        if skipped.first + skipped.count > log.next_seq:
            log.stage_skip(skipped.first + skipped.count - log.next_seq, op)

    def _note_missing(self, log: TopicLog, next_seq: int) -> None:
        """Replay: records up to this seq were never logged."""
        if next_seq > log.next_seq:
            for call in self.state.events.records_missing:
                call(log, log.next_seq, next_seq - 1)

    # -- delete --------------------------------------------------------------------------------------------

    def _delete(self, token: object, command: cmd.Delete) -> None:
        selectors = (command.before_seq, command.match, command.subject, command.seqs, command.keep)
        if all(selector is None for selector in selectors):
            raise InvalidRequest("specify what to delete: before_seq, match, subject, seqs or keep")
        if min(command.before_seq or 0, command.keep or 0) < 0:
            raise InvalidRequest("before_seq and keep cannot be negative")
        self.state.check_writable()
        log = self.state.for_write(command.topic)
        if log is None:
            raise TopicNotFound(command.topic)
        # Only records that exist now are deleted, however long it takes.
        stop = log.next_seq
        before = stop if command.before_seq is None else min(command.before_seq, stop)
        if command.keep is not None and command.match is None and command.subject is None:
            surplus = log.count - command.keep
            before = min(before, log.eviction_end(surplus, 0) + 1 if surplus > 0 else 0)
        slices = self._delete_slices(log, command, stop, before)
        self.state.long.start(token, command, log, self._delete_steps(token, log, command, slices))

    def _delete_steps(self, token: object, log: TopicLog, command: cmd.Delete, slices: DeleteSlices) -> Work:
        """Delete in slices. Each is logged and published like a separate delete; the reply is for all of them.

        With `erase` each slice is logged as an erase, because after a crash no later delete would find its records.
        """
        state = self.state
        sync = log.config.durability == "fsync"
        removed, is_begun, is_done = 0, False, False
        pieces: list[list[Range]] = []
        try:
            for units, ranges in slices:
                if ranges:
                    state.reserve(len(ranges) * RANGE_BYTES + CONTROL_BYTES)
                    is_begun = True
                    op = Op(log, sync=sync)
                    known = len(log.erasing)
                    self.log_delete(log, ranges, op, erase=command.erase)
                    removed -= op.count
                    state.count_live(op)
                    state.touched[log.id] = log
                    state.add_op(op)
                    if command.erase:
                        pieces += log.erasing[known:]
                yield units
            is_done = True
        except TopicsError as error:
            if is_begun:
                error.detail["outcome"] = "unknown"
            raise
        finally:
            if pieces and not is_done and not log.dropped and state.read_only is None:
                self._stage_erase(log, pieces, None, None)
        result = cmd.Deleted(log.name, removed, log.first_seq, log.next_seq - 1, log.count, log.bytes)
        if pieces:
            self._stage_erase(log, pieces, token, result)
        else:
            state.add_op(Op(log, token, result, sync=sync))

    def _stage_erase(
        self, log: TopicLog, pieces: list[list[Range]], token: object, result: cmd.Deleted | None
    ) -> None:
        """Request that the bytes of deleted records be overwritten. The reply waits for that."""
        ranges = log.join_erasing(pieces)
        self.state.add_op(Op(log, sync=True, erase=EraseRequest(log, ranges, token, result)))

    @staticmethod
    def _delete_slices(log: TopicLog, command: cmd.Delete, stop: int, before: int) -> DeleteSlices:
        """The live records below `before` that the selectors match; `keep` counts records below `stop`."""
        matches = [match for match in (command.match, command.subject) if match is not None]
        if command.seqs is not None:
            named = np.unique(np.array(command.seqs, np.uint64))
            named = named[named < before]
            named = named[log.are_live(named)]
            if matches:
                named = _tagged(log, named, matches, command.keep)
            yield from _slice_seqs(log, named)
        elif matches:
            found: list[Seqs] = []
            singles: list[int] = []
            count = 0
            for units, tags in scan(lambda: log.tags, matches[-1]):
                for tag in tags:
                    if not matches[0].matches(tag):
                        continue
                    only = log.tags.single_seq(tag)  # the common case if there are many tags
                    if not only:
                        seqs = _deletable_of(log, tag, stop, command.keep)
                        found.append(seqs[seqs < before])
                        units += 6 + seqs.size // 64
                        count += seqs.size
                    elif only < before and not command.keep:
                        singles.append(only)
                        count += 1
                yield units + len(tags), []
                if count >= DELETE_BATCH:
                    yield from _slice_seqs(
                        log, np.sort(np.concatenate([*found, np.array(singles, np.uint64)]))
                    )
                    found, singles, count = [], [], 0
            yield from _slice_seqs(log, np.sort(np.concatenate([*found, np.array(singles, np.uint64)])))
        elif before > log.first_seq:
            yield from _slice_ranges(log, [(log.first_seq, before - 1)])

    def stage_loss(self, log: TopicLog, count: int, op: Op, reason: str = "source_trim") -> None:
        """Use up one seq for each record that is lost, and announce them as a loss."""
        lost = Lost(log.next_seq, log.next_seq + count - 1, reason)
        self.state.log(frames.LOSS, log, lost, op)
        log.unpublished_losses += ((lost.first, lost.last, reason),)
        if log.config.durability == "disk":
            self._raise_ceiling(log)
            op.sync = op.sync or op.head > log.ceiling_synced
        self.state.add_op(op)

    @staticmethod
    def _apply_loss(log: TopicLog, lost: Lost, op: Op) -> None:
        log.stage_loss((lost.first, lost.last, lost.reason), op)

    @staticmethod
    def _apply_erase_done(log: TopicLog, ranges: list[Range], op: Op | None) -> None:
        log.forget_erasing(ranges)

    # -- topics --------------------------------------------------------------------------------------------

    def _put_topic(self, token: object, command: cmd.PutTopic) -> None:
        state = self.state
        state.check_writable()
        config = command.config
        state.reserve(4 * CONTROL_BYTES)
        log = state.for_write(command.topic)
        if log is None:
            self.check_creation(command.topic, config)
            log = self.create(command.topic, config)
            op = Op(log, token, cmd.TopicPut(command.topic, True, config), config=config, sync=True)
            state.touched[log.id] = log
            state.add_op(op)
            return
        if log.config.type != config.type:
            raise TopicExistsIncompatible(command.topic, log.config.type, config.type)
        self._check_config(command.topic, config)
        result = cmd.TopicPut(command.topic, False, config)
        if log.config == config:
            state.answer(token, result, log, held=log.pending > 0)
            return
        before, op = log.config, Op(log, token, result, config=config, sync=True)
        self._change_config(log, config, op)
        for call in state.events.config_changed:
            call(log, before, op)

    def _change_config(self, log: TopicLog, config: TopicConfig, op: Op) -> None:
        state = self.state
        trims = config.cap_per_tag != log.config.cap_per_tag
        state.reserve(4 * CONTROL_BYTES + (limits.TRIM_RECORDS * RANGE_BYTES if trims else 0))
        ceiling = 0  # those of another class must not apply if the class changes back
        if config.durability == "disk":
            ceiling = log.ceiling
            if log.next_seq - 1 + limits.SEQ_CEILING_STEP_MIN > ceiling:
                log.ceiling_base = log.next_seq - 1
                ceiling = log.ceiling_base + limits.SEQ_CEILING_STEP_MIN
                state.new_seq_ceilings.append((log, ceiling))
        else:
            log.ceiling_synced = 0
            state.new_seq_ceilings = [entry for entry in state.new_seq_ceilings if entry[0] is not log]
            state.seq_ceilings = [entry for entry in state.seq_ceilings if entry[1] is not log]
        state.log(frames.CONFIG, log, ConfigChanged(config, ceiling, log.next_seq - 1), op)
        surplus = self._next_surplus(log, config.cap_per_tag) if trims else []
        if surplus:
            self.log_delete(log, surplus, op)
        # A shorter TTL acts at once, and its floor is logged, so that a longer one later brings nothing back. If many records
        # expire, later requests wait until they are removed.
        last = log.expired_last(state.now_ms)
        if last >= log.first_seq:
            log.stage_evict(min(last, log.first_seq + limits.EXPIRE_RECORDS - 1), op, ttl=True)
            if last >= log.first_seq:
                state.upkeep.enqueue(log)
        if log.ttl_lost or log.cap_lost:
            # The records up to the floors are removed already, or will be by upkeep.
            state.log_only(frames.EVICT, log, Floors(log.cap_lost, log.ttl_lost))
        if config.discard == "old" and (
            (config.cap_records and log.count > config.cap_records)
            or (config.cap_bytes and log.bytes > config.cap_bytes)
        ):
            self._evict(log, config, op)
        state.count_live(op)
        state.touched[log.id] = log
        state.add_op(op)

    def _apply_config(self, log: TopicLog, changed: ConfigChanged, op: Op) -> None:
        self._note_missing(log, changed.head + 1)
        config = changed.config
        was_ram, is_ram = log.config.durability == "ephemeral", config.durability == "ephemeral"
        if was_ram != is_ram and log.chunks and log.chunks[-1].count:
            # Records in RAM and records in the log never share a segment.
            log.chunks[-1].closed = True
        if config.cap_per_tag != log.config.cap_per_tag:  # the deletes by the trim follow in the log
            log.trim_from = 0
            self.trimming[log.id] = log
        log.config = op.config = config
        log.ceiling = changed.ceiling

    def _drop_topic(self, token: object, command: cmd.DropTopic) -> None:
        state = self.state
        state.check_writable()
        state.reserve(CONTROL_BYTES)
        log = state.for_write(command.topic)
        if log is None:
            absent = cmd.TopicDropped(command.topic, False)
            going = state.published.get(command.topic)  # a drop is staged, which a crash could still undo
            if going is None:
                state.ready.append((token, absent))
            else:
                state.answer(token, absent, going, held=True)
            return
        if command.if_empty and log.count:
            raise TopicNotEmpty(command.topic, log.count)
        op = Op(log, token, cmd.TopicDropped(command.topic, True), sync=True)
        state.add_op(op)
        self.stage_drop(log, op)

    def stage_drop(self, log: TopicLog, op: Op) -> None:
        """Stage the drop of a topic. What features log because of it is in the same envelope.

        The op was added before: replies that tell of the drop are held as long as it is pending.
        """
        state = self.state
        # Not applied: a replay drops the topic before it begins.
        state.log_only(frames.TOPIC_DELETE, log, None)
        log.dropped = op.dropped = True
        del state.staged[log.name]
        state.bytes_live -= log.bytes
        state.records_live -= log.count
        for call in state.events.topic_dropped:
            call(log, op)


def _deletable_of(log: TopicLog, tag: bytes, stop: int, keep: int | None) -> Seqs:
    """The live seqs of a tag below `stop`, except the newest `keep` of them."""
    seqs = log.tags.seqs(tag, log.are_live)
    seqs = seqs[: int(seqs.searchsorted(np.uint64(stop)))]
    return seqs[: max(0, seqs.size - keep)] if keep else seqs


def _tagged(log: TopicLog, seqs: Seqs, matches: list[TagMatch], keep: int | None) -> Seqs:
    """The live seqs whose tag matches and that `keep` does not exclude."""
    tags: dict[bytes, Seqs] = {}
    picked: list[bool] = []
    for seq in seqs.tolist():
        found = log.find(seq)
        tag = log.tags.strings.name(found[0].get(found[1])[4]) if found is not None else None
        is_selected = tag is not None and all(match.matches(tag) for match in matches)
        if tag is not None and is_selected and keep:
            if tag not in tags:
                tags[tag] = _deletable_of(log, tag, log.next_seq, keep)
            is_selected = bool(tags[tag].size) and seq <= int(tags[tag][-1])
        picked.append(is_selected)
    return seqs[np.array(picked, np.bool_)]


def _slice_seqs(log: TopicLog, seqs: Seqs) -> DeleteSlices:
    """Split ascending seqs into delete slices."""
    for i in range(0, seqs.size, DELETE_BATCH):
        part = seqs[i : i + DELETE_BATCH]
        ends = np.flatnonzero(np.diff(part) > 1)
        firsts = part[np.concatenate([[0], ends + 1])].tolist()
        lasts = part[np.concatenate([ends, [part.size - 1]])].tolist()
        yield from _slice_ranges(log, list(zip(firsts, lasts, strict=True)))


def _slice_ranges(log: TopicLog, ranges: list[Range]) -> DeleteSlices:
    """Split ascending ranges into delete slices."""
    piece: list[Range] = []
    units = 0
    for first, last in ranges:
        while first <= last:
            stop, cost = log.delete_slice(first, last + 1)
            piece.append((first, stop - 1))
            units += RANGE_COST + cost
            first = stop
            if units >= limits.LONG_SLICE_UNITS:
                yield units, piece
                piece, units = [], 0
    if piece:
        yield units, piece


def frame_bytes_at_most(records: cmd.Records, key: bytes | None, size: int, *, per_tag: bool) -> int:
    """Upper bound of the log space that a write takes, including its control frames."""
    total = (
        sum(map(len, records.payloads)) + CONTROL_BYTES * 3
        if records.sizes is not None
        else size + CONTROL_BYTES * 3
    )
    # With cap_per_tag each record may evict another, which takes a range in a delete frame.
    per_record = frames.OVERHEAD_BYTES + (RANGE_BYTES if per_tag else 0)
    if records.tags is not None:
        total += sum(len(tag) for tag in records.tags if tag)
    if records.nodes is not None:
        total += sum(len(node) for node in records.nodes if node)
    if (
        records.meta_lens is not None
        or records.ttls_ms is not None
        or records.sizes is not None
        or records.hops is not None
        or records.raw
    ):
        per_record += 40
    return total + per_record * len(records.payloads) + (len(key) + 16 if key is not None else 0)
