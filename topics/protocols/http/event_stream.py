"""An open event stream: the topics of a watch session, as server-sent events."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from topics.engine.commands.topics import Tombstone
from topics.link import event_ids
from topics.link.watch import EpochChange, OpenedSession
from topics.protocols.http import sse
from topics.protocols.http.exchange import Sink
from topics.protocols.watchers import ENDED, SharedPage, Subscription, Subscriptions, Watcher

if TYPE_CHECKING:
    from topics.protocols.http.ports import Streams

MOVED_MAX = 32  # unsaved cursors that trigger an early save, to keep ids that list only changes short
KNOWN_EPOCHS_MAX = 8  # epoch checksums in an id
_SINGLE = b"1"  # encoding of a page for streams of this topic alone


class EventStream(Watcher):
    def __init__(
        self,
        fanout: Subscriptions,
        service: Streams,
        wid: str,
        number: int,
        opened: OpenedSession,
        prefixes: list[str] | None,
        on_closed: Callable[[], None],
    ) -> None:
        super().__init__(fanout, prefixes)
        spec = opened.spec
        self.wid = wid
        self.number = number
        self.save = opened.save
        self.moved: dict[str, int] = {}  # cursors changed since the last save was sent
        self.saving: dict[str, int] = {}  # cursors of an unacknowledged save
        self.epochs: dict[str, EpochChange] = {}  # unsaved
        self.heartbeat_us = spec.heartbeat_ms * 1000
        self.wrote_us = 0
        self._service = service
        self._spec = spec
        self._starts = opened.cursors
        self._start_epochs = opened.epochs
        # Reported changes of epochs, by topic, with their pieces of event ids.
        self._known_epochs: dict[str, tuple[EpochChange, bytes]] = {}
        for topic, change in opened.told.items():
            self._note_epoch(topic, change)
        self._deleted: dict[str, EpochChange] = {}  # deleted topics, in case they are recreated
        self._on_closed = on_closed
        self._sink: Sink | None = None
        self._is_single = len(opened.cursors) == 1 and not spec.patterns
        self._too_many_sent = False
        self._final_event = b""
        self._counted = 0  # number of subscriptions for which `_lists_all` was computed
        self._lists_all = True

    # -- called by the connection --------------------------------------------------------------------------

    def opened(self, sink: Sink) -> None:
        if self.is_closed:  # ended before it could start
            sink.write(sse.RETRY + self._final_event)
            sink.close()
            return
        self._sink = sink
        self._write(sse.RETRY)
        spec = self._spec
        self._service.opened(self)
        subs: list[Subscription] = []
        for topic, cursor in self._starts.items():
            by_pattern = self._is_by_pattern(topic)
            if not by_pattern or self._covers(topic):
                epoch = self.epoch_of(topic)
                subs.append(self.fanout.add(self, topic, cursor, epoch, by_pattern=by_pattern))
        for sub in subs:
            self.fanout.start(sub, spec.options, spec.group)
        for pattern in spec.patterns:
            self.fanout.watch_names(self, pattern, spec.options, spec.group)
        self._end_if_done()

    def _is_by_pattern(self, topic: str) -> bool:
        """Whether the topic was found only by a pattern: its deletion need not be reported if the client has not seen it."""
        return bool(self._spec.patterns) and topic not in self._spec.names

    def _covers(self, topic: str) -> bool:
        """Whether the key may read the topic: names found by a pattern may come from an id sent by the client."""
        return self.prefixes is None or topic.startswith(tuple(self.prefixes))

    def drained(self) -> None:
        self.fanout.drained(self)

    def closed(self) -> None:
        if not self.is_closed:
            self.fanout.close(self)
            self._service.closed(self)
        self._sink = None
        self._on_closed()

    @property
    def is_full(self) -> bool:
        return self._sink is None or self._sink.is_full

    def _write(self, text: bytes) -> None:
        if self._sink is not None:
            self._sink.write(text)
            self.wrote_us = self.fanout.now_us()

    # -- events --------------------------------------------------------------------------------------------

    def start_of(self, topic: str) -> int:
        return self._starts.get(topic, 0)

    def epoch_of(self, topic: str) -> str | None:
        return self._start_epochs.get(topic)

    def epoch_changed(self, sub: Subscription, before: str | None, gone: Tombstone | None) -> None:
        topic = sub.topic
        assert sub.epoch is not None
        change = EpochChange(sub.epoch)
        if gone is not None and before is not None:
            # Earlier ids of this stream contain cursors of the previous epoch, from its start. Below the gap they are valid in both.
            low = max(self._starts.get(topic, 0), gone.gap_from)
            change = EpochChange(sub.epoch, before, low, sub.cursor)
            self._starts[topic] = gone.earliest_seq - 1
        elif before is None and topic in self._deleted:
            change = change.following(self._deleted.pop(topic))
        self.epochs[topic] = change.following(self.epochs.get(topic))
        if change.before or topic in self._known_epochs:
            heard = self._known_epochs.get(topic)
            self._note_epoch(topic, change.following(heard[0] if heard else None))
        if sub.cursor or change.before:  # otherwise it is saved with the cursor
            if not self.moved:
                self._service.mark_unsaved(self)
            self.moved[topic] = sub.cursor

    def _note_epoch(self, topic: str, change: EpochChange) -> None:
        """Include the epoch in ids from now on. Beyond KNOWN_EPOCHS_MAX the oldest is dropped: its change may be reported again."""
        self._known_epochs.pop(topic, None)
        self._known_epochs[topic] = change, event_ids.epoch_piece(topic, change.epoch)
        if len(self._known_epochs) > KNOWN_EPOCHS_MAX:
            del self._known_epochs[next(iter(self._known_epochs))]

    def _epoch_pieces(self) -> list[bytes]:
        """Epoch checksums for ids: only for cursors that could also belong to the previous epoch."""
        return [
            piece
            for topic, (change, piece) in self._known_epochs.items()
            if topic in self.subs and change.low <= self.subs[topic].cursor <= change.high
        ]

    def write_page(self, sub: Subscription, page: SharedPage) -> None:
        if page.tombstone is not None:
            self._take_tombstone(sub, page)
        self._move(sub, page.to_seq)
        if page.count:
            sub.caught_up_due = not page.caught_up
            if self._is_single and not self._spec.include_epoch and not self._known_epochs:
                text = page.encoded.get(_SINGLE)
                if text is None:
                    text = page.encoded[_SINGLE] = self._text(sub, page)
            else:
                text = self._text(sub, page)
            self._write(text)

    def _take_tombstone(self, sub: Subscription, page: SharedPage) -> None:
        gone = page.tombstone
        assert gone is not None
        recreated = gone.reason == "recreated"
        self._move(sub, page.from_seq)
        reason = "from_seq_too_old" if sub.is_new and not recreated else gone.reason
        self._write(sse.tombstone(page.topic, self._event_id(), gone, reason, self._epoch_member(sub)))
        sub.caught_up_due = True

    def _epoch_member(self, sub: Subscription) -> bytes:
        return sse.epoch_member(sub.epoch) if self._spec.include_epoch else b""

    def _text(self, sub: Subscription, page: SharedPage) -> bytes:
        event_id, epoch = self._event_id(), self._epoch_member(sub)
        text = sse.record(
            page.topic, event_id, page.records, page.from_seq, page.to_seq, page.head_seq, epoch
        )
        if page.caught_up:
            text += sse.caught_up(page.topic, event_id, page.head_seq)
        return text

    def write_caught_up(self, sub: Subscription, head_seq: int) -> None:
        self._write(sse.caught_up(sub.topic.encode(), self._event_id(), head_seq))

    def write_topic_deleted(self, sub: Subscription) -> None:
        if sub.epoch is not None:
            low = max(self._starts.get(sub.topic, 0), 1)
            self._deleted[sub.topic] = EpochChange("", sub.epoch, low, sub.cursor)
        self._move(sub, 0)  # if the topic is recreated, it is read from the beginning
        self._write(sse.topic_deleted(sub.topic.encode(), self._event_id()))
        self._end_if_done()

    def write_too_many_topics(self, topic: str) -> None:
        if not self._too_many_sent:
            self._too_many_sent = True
            message = "the stream has the maximum number of topics; open another stream for the rest"
            self._write(sse.error(429, message, retry_after_ms=0, topics=[topic]))

    def _end_if_done(self) -> None:
        if not self._spec.patterns and all(sub.state is ENDED for sub in self.subs.values()):
            self.end()

    # -- cursors and ids -----------------------------------------------------------------------------------

    def _move(self, sub: Subscription, cursor: int) -> None:
        if sub.cursor != cursor:
            sub.cursor = cursor
            sub.piece = None
            if not self.moved:
                self._service.mark_unsaved(self)
            self.moved[sub.topic] = cursor
            if len(self.moved) > MOVED_MAX and not self._lists_all:
                self._service.save_now(self)

    def _event_id(self) -> bytes:
        if len(self.subs) != self._counted:
            self._counted = len(self.subs)
            self._lists_all = event_ids.lists_all(self.subs)
        if not self._lists_all:
            return self._short_id()
        pieces: list[bytes] = []
        for sub in self.subs.values():
            piece = sub.piece
            if piece is None:
                piece = sub.piece = event_ids.piece(sub.topic, sub.cursor)
            pieces.append(piece)
        return event_ids.join(pieces + self._epoch_pieces())

    def _short_id(self) -> bytes:
        """An id with the cursors changed since the last acknowledged save."""
        pieces = [event_ids.piece(event_ids.SAVE, self.save)]
        for topic, cursor in (self.saving | self.moved).items():
            pieces.append(event_ids.piece(topic, cursor))
        return event_ids.join(pieces + self._epoch_pieces())

    # -- closing -------------------------------------------------------------------------------------------

    def heartbeat(self, now_ms: int) -> None:
        if not self.is_full:
            self._write(sse.heartbeat(now_ms))

    def end_with(self, code: str, message: str) -> None:
        self.end(sse.error(code, message))

    def end(self, last: bytes = b"") -> None:
        """Close the stream after writing `last`. The session stays."""
        if self.is_closed:
            return
        self.fanout.close(self)
        self._service.closed(self)
        self._final_event = last
        if self._sink is not None:
            if last:
                self._sink.write(last)
            self._sink.close()
