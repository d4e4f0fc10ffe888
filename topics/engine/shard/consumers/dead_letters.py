"""Dead letters: records that exhausted their deliveries and move to another topic, possibly on another shard.

    source                                  target
    MOVE, with a number, synced
      dead_letters_to_send ─────────────▶   TakeDeadLetters: those above the highest number received from this source
                                            are appended, with the new highest number, in one envelope; synced
      SettleDeadLetters ◀───────────────    reply
    the job is deleted, or the entry dropped

After a crash at any point the dead letter is still at the source, moving, and is sent again with its number, which the
target recognises. If the target refuses it, the record becomes ready again.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from topics.api import limits
from topics.api.config import TopicConfig
from topics.api.errors import CallerError, TopicsError
from topics.engine.commands import consumers as con
from topics.engine.commands import topics as cmd
from topics.engine.commands.page import Page
from topics.engine.reading.cold_blocks import ColdMiss
from topics.engine.reading.hot_segments import DamagedSegment
from topics.engine.shard.appends import Appends, frame_bytes_at_most
from topics.engine.shard.consumers.claims import Claims
from topics.engine.shard.consumers.leases import SEQ_BYTES, Leases, empty_page, rows_of
from topics.engine.shard.reads import Reads
from topics.engine.shard.state import CONTROL_BYTES, ShardState, as_ranges
from topics.engine.shard.topic_upkeep import UpkeepPending
from topics.engine.storage import frames
from topics.engine.storage.control import DeadLettersReceived, Event
from topics.engine.topic.consumer import MOVED, UNMOVED, TopicConsumers
from topics.engine.topic.log import Op, TopicLog

_meta = msgspec.json.Decoder(dict[str, msgspec.Raw])


class DeadLetters:
    def __init__(
        self, state: ShardState, appends: Appends, reads: Reads, leases: Leases, claims: Claims
    ) -> None:
        self.state = state
        self.appends = appends
        self.reads = reads
        self.leases = leases
        self.claims = claims
        state.handlers |= {
            con.TakeDeadLetters: self._take_dead_letters,
            con.SettleDeadLetters: self._settle_dead_letters,
        }
        state.appliers[frames.LETTERS_TAKEN] = self._apply_received
        self.due: dict[int, TopicLog] = {}  # topics with dead letters that may be sent
        state.events.topic_recovered.append(self._topic_recovered)
        state.events.topic_removed.append(lambda log: self.due.pop(log.id, None))
        state.events.published.append(self._published)

    def _topic_recovered(self, log: TopicLog) -> None:
        consumers = log.consumers
        if consumers is not None:
            consumers.synced_dead_letter = consumers.next_dead_letter - 1
            if consumers.dead_letters:
                self.due[log.id] = log

    def _published(self, log: TopicLog, op: Op) -> None:
        if op.dead_letters and log.consumers is not None:
            log.consumers.synced_dead_letter = max(log.consumers.synced_dead_letter, op.dead_letters)
            self.due[log.id] = log

    # -- source --------------------------------------------------------------------------------------------

    def next_dead_letters(self, topic_id: int, count: int, max_bytes: int) -> list[con.DeadLetter]:
        log = self.due.get(topic_id)
        return self.dead_letters_to_send(log, count, max_bytes) if log is not None else []

    def dead_letters_to_send(self, log: TopicLog, count: int, max_bytes: int) -> list[con.DeadLetter]:
        """The next dead letters that may be sent, in order of their numbers, all for one target."""
        state = self.state
        consumers = log.consumers
        if consumers is None or log.dropped or not consumers.dead_letters:
            self.due.pop(log.id, None)
            return []
        try:
            state.touch(log)
            return self._collect_dead_letters(log, consumers, count, max_bytes)
        except UpkeepPending:
            self.due.pop(log.id, None)
            state.upkeep.wait(log, lambda error: self._retry_dead_letters(log, error), name="letters")
            return []
        except ColdMiss as miss:
            self.due.pop(log.id, None)
            try:
                state.cold.wait(
                    miss, lambda error: self._retry_dead_letters(log, error), name=("letters", log.id)
                )
            except TopicsError:
                self.due[log.id] = log  # the sender retries
                raise
            return []

    def _retry_dead_letters(self, log: TopicLog, error: TopicsError | None) -> None:
        def again() -> None:
            self.due[log.id] = log

        if error is None:
            again()
        else:
            self.state.cold.retry_later(self.state.clock.mono_ms, again)

    def _collect_dead_letters(
        self, log: TopicLog, consumers: TopicConsumers, count: int, max_bytes: int
    ) -> list[con.DeadLetter]:
        found: list[con.DeadLetter] = []
        left = 0
        # Again while damaged records were dropped, with their dead letters, and none was found.
        while not found and left != len(consumers.dead_letters):
            left = len(consumers.dead_letters)
            found = self._read_dead_letters(log, consumers, count, max_bytes)
        if not found:
            self.due.pop(log.id, None)
        return found

    def _read_dead_letters(
        self, log: TopicLog, consumers: TopicConsumers, count: int, max_bytes: int
    ) -> list[con.DeadLetter]:
        found: list[con.DeadLetter] = []
        target = ""
        for number, (consumer, seq, to, deliveries, reason) in list(
            islice(consumers.dead_letters.items(), count)
        ):
            if number > consumers.synced_dead_letter or (target and to != target):
                break
            try:
                letter = self._read_dead_letter(log, consumer, seq, number, to, deliveries, reason)
            except ColdMiss:
                if not found:
                    raise
                break
            if letter is None:
                continue
            if found and (len(letter.data) > max_bytes or letter.raw != found[0].raw):
                break
            max_bytes -= len(letter.data)
            target = to
            found.append(letter)
        return found

    def _read_dead_letter(
        self, log: TopicLog, consumer: str, seq: int, number: int, target: str, deliveries: int, reason: str
    ) -> con.DeadLetter | None:
        page = empty_page(log)
        try:
            if not log.is_live(seq):
                return None
            self.state.reader.fill(log, page, rows_of(log, [seq]))
        except DamagedSegment as damage:
            self.reads.record_losses(log, damage)
            return None
        data, meta, raw, header_len = content_of(page)
        added = {
            "$dead_letter_from": log.name,
            "$dead_letter_deliveries": str(deliveries),
            "$dead_letter_src_seq": str(seq),
        }
        if consumer:
            added["$dead_letter_consumer"] = consumer
        if reason:
            added["$dead_letter_reason"] = reason
        return con.DeadLetter(
            log.name, log.id, consumer, seq, number, target, deliveries, reason, data, _with_origin(meta, added),
            page.tags[0] if page.tags is not None else None,
            page.nodes[0] if page.nodes is not None else None, raw, header_len,
        )  # fmt: skip

    def _settle_dead_letters(self, token: object, command: con.SettleDeadLetters) -> None:
        """The target has received the dead letters up to a number, or refused them."""
        state = self.state
        state.check_writable()
        log = state.by_id.get(command.source_id)
        if log is None or log.dropped or log.consumers is None:
            state.ready.append((token, con.DeadLettersSettled(command.topic)))
            return
        state.touch(log)
        consumers = log.consumers
        by_consumer: dict[str, list[int]] = {}
        for number, letter in consumers.dead_letters.items():
            if number > command.number:
                break
            by_consumer.setdefault(letter[0], []).append(letter[1])
        # A refusal is synced before the next dead letter is sent: a target that has received that one treats every
        # lower number as received.
        sync = not command.done or log.config.durability == "fsync"
        op = Op(log, token, con.DeadLettersSettled(command.topic), sync=sync)
        for name, seqs in by_consumer.items():
            state.reserve(2 * CONTROL_BYTES + 2 * len(seqs) * SEQ_BYTES)
            consumer = consumers.find(name)
            if consumer is None:
                consumers.drop_dead_letters(name, set(seqs))
                continue
            if not command.done:
                event = Event(name, UNMOVED, seqs, state.now_ms + limits.DEAD_LETTER_RETRY_MS)
            else:
                event = Event(name, MOVED, seqs)
            self.leases.apply_event(log, consumer, event)
            self.claims.wake_claims(log, consumer)
        for name, seqs in by_consumer.items() if command.done else ():
            # Only after all events: a record deleted for one consumer may also be moving for another, which counts it.
            if not name:
                self.appends.log_delete(log, as_ranges(sorted(seqs)), op)
            else:
                self.leases.prune_into(log, seqs, op)
        if not consumers.dead_letters:
            self.due.pop(log.id, None)
        state.count_live(op)
        state.add_op(op)

    # -- target --------------------------------------------------------------------------------------------

    def _take_dead_letters(self, token: object, command: con.TakeDeadLetters) -> None:
        state = self.state
        state.check_writable()
        log = state.for_write(command.topic)
        has = 0
        if log is not None and log.consumers is not None:
            has = log.consumers.received.get(command.source_id, 0)
        letters = [letter for letter in command.dead_letters if letter.number > has]
        last = max([has, *(letter.number for letter in command.dead_letters)])
        result = con.DeadLettersTaken(command.topic, command.source_id, last)
        if not letters:
            assert log is not None
            # They may not be synced here yet, and the source is about to delete them.
            state.add_op(Op(log, token, result, sync=True))
            return
        try:
            op = self._append_dead_letters(log, command.topic, letters)
        except CallerError:
            if log is None or has < command.dead_letters[0].number:
                raise
            # Some were received, though the source does not know: tell it, so that it does not reuse their numbers.
            result.last_number = has
            state.add_op(Op(log, token, result, sync=True))
            return
        op.token, op.result = token, result
        state.log(frames.LETTERS_TAKEN, op.log, DeadLettersReceived(command.source_id, last))

    @staticmethod
    def _apply_received(log: TopicLog, received: DeadLettersReceived, op: Op | None) -> None:
        if log.consumers is None:
            log.consumers = TopicConsumers()
        log.consumers.note_received(received.source_id, received.number)

    def _append_dead_letters(self, log: TopicLog | None, name: str, letters: list[con.DeadLetter]) -> Op:
        """Append them as one write, synced in every durability class."""
        config = log.config if log is not None else TopicConfig()
        records = cmd.Records(
            [letter.data + letter.meta for letter in letters],
            tags=[letter.tag for letter in letters],
            nodes=[letter.node for letter in letters],
            meta_lens=[len(letter.meta) for letter in letters],
        )
        # A write has either raw or JSON payloads.
        records.raw = letters[0].raw
        if records.raw:
            records = cmd.Records(
                [letter.data for letter in letters], tags=records.tags, nodes=records.nodes, raw=True,
                header_lens=[letter.header_len for letter in letters],
            )  # fmt: skip
        sizes = [len(payload) for payload in records.payloads]
        if log is None:
            self.appends.check_creation(name, config, sum(sizes))
        # The record size is not checked: the source topic accepted the record, and only its meta has grown.
        self.appends.check_room(log, config, name, len(sizes), sum(sizes), 0)
        per_tag = bool(config.cap_per_tag)
        self.state.reserve(
            frame_bytes_at_most(records, None, sum(sizes), per_tag=per_tag) + 2 * CONTROL_BYTES
        )
        created = log is None
        if log is None:
            log = self.appends.create(name, config)
        op = Op(log, sync=True)
        self.appends.stage_append(log, config, records, sizes, op, created=created)
        return op


def content_of(page: Page) -> tuple[bytes, bytes, bool, int]:
    """Data, meta, whether the data is raw, and the length of its header block, of a page's only record."""
    frame, start = page.frames[0], int(page.starts[0])
    _, _, flags, _, _, _, node_len, tag_len, data_len = frames.HEADER.unpack_from(frame, start)
    at = start + frames.HEADER_BYTES + node_len + tag_len
    payload = bytes(frame[at : at + data_len])
    found = frames.read_extensions(frame, start) if flags & frames.HAS_EXT else {}
    if flags & frames.RAW:
        return payload, b"", True, int.from_bytes(found.get(frames.EXT_HEADERS, b""), "little")
    meta_len = int.from_bytes(found.get(frames.EXT_META, b""), "little")
    return payload[: data_len - meta_len], payload[data_len - meta_len :], False, 0


def _with_origin(meta: bytes, added: dict[str, str]) -> bytes:
    """The meta with the fields that describe the origin added; a meta that is not an object is replaced."""
    try:
        fields: dict[str, object] = dict(_meta.decode(meta)) if meta else {}
    except msgspec.DecodeError:
        fields = {}
    return msgspec.json.encode(fields | added)
