"""One open event stream: a session's topics, written to one client as server-sent events."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from router.watch.fanout import Fanout
from router.watch.watchers import ENDED, SharedPage, Subscription, Watcher
from topics.engine.commands.topics import Tombstone
from topics.link.watch import EpochChange, OpenedSession
from topics.protocols.http import event_ids, sse
from topics.protocols.http.exchange import Sink

if TYPE_CHECKING:
    from router.watch.service import StreamService

MOVED_MAX = 32  # of an id that names changes: more are saved before their time, so that it stays short
HEARD_MAX = 8  # topics of which an id says that the client has heard of their epoch
_SINGLE = b"1"  # the text for a stream of this topic alone


class EventStream(Watcher):
    def __init__(
        self,
        fanout: Fanout,
        desk: StreamService,
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
        self.moved: dict[str, int] = {}  # cursors since the last save that was sent
        self.saving: dict[str, int] = {}  # and those of a save that is not acknowledged
        self.epochs: dict[str, EpochChange] = {}  # that are not saved
        self.heartbeat_us = spec.heartbeat_ms * 1000
        self.wrote_us = 0
        self._desk = desk
        self._spec = spec
        self._starts = opened.cursors
        self._start_epochs = opened.epochs
        self._heard: dict[
            str, tuple[EpochChange, bytes]
        ] = {}  # of topics whose change was told, what ids say of it
        for topic, change in opened.told.items():
            self._has_told(topic, change)
        self._gone: dict[str, EpochChange] = {}  # topics that were deleted, should they be made again
        self._on_closed = on_closed
        self._sink: Sink | None = None
        self._is_single = len(opened.cursors) == 1 and not spec.patterns
        self._refused = False
        self._farewell = b""
        self._counted = 0  # of the subs, when `_names_all` was found out
        self._names_all = True

    # -- the connection's calls ----------------------------------------------------------------------------

    def opened(self, sink: Sink) -> None:
        if self.is_closed:  # it was ended before it could begin
            sink.write(sse.RETRY + self._farewell)
            sink.close()
            return
        self._sink = sink
        self._write(sse.RETRY)
        spec = self._spec
        self._desk.opened(self)
        subs: list[Subscription] = []
        for topic, cursor in self._starts.items():
            by_pattern = self._is_by_pattern(topic)
            if not by_pattern or self._covers(topic):
                epoch = self.epoch_of(topic)
                subs.append(self.fanout.add(self, topic, cursor, epoch, by_pattern=by_pattern))
        for sub in subs:
            self.fanout.start(sub, spec.options, spec.group)
        for pattern in spec.patterns:
            self.fanout.look_out(self, pattern, spec.options, spec.group)
        self._end_if_done()

    def _is_by_pattern(self, topic: str) -> bool:
        """A topic that only patterns led to may be gone without anybody noticing."""
        return bool(self._spec.patterns) and topic not in self._spec.names

    def _covers(self, topic: str) -> bool:
        """Whether the key may see it: what a pattern has found may come from an id that the client sent."""
        return self.prefixes is None or topic.startswith(tuple(self.prefixes))

    def drained(self) -> None:
        self.fanout.drained(self)

    def closed(self) -> None:
        if not self.is_closed:
            self.fanout.close(self)
            self._desk.closed(self)
        self._sink = None
        self._on_closed()

    @property
    def is_full(self) -> bool:
        return self._sink is None or self._sink.is_full

    def _write(self, text: bytes) -> None:
        if self._sink is not None:
            self._sink.write(text)
            self.wrote_us = self.fanout.now_us()

    # -- news ----------------------------------------------------------------------------------------------

    def start_of(self, topic: str) -> int:
        return self._starts.get(topic, 0)

    def epoch_of(self, topic: str) -> str | None:
        return self._start_epochs.get(topic)

    def has_epoch(self, sub: Subscription, before: str | None, gone: Tombstone | None) -> None:
        topic = sub.topic
        assert sub.epoch is not None
        change = EpochChange(sub.epoch)
        if gone is not None and before is not None:
            # Ids of this stream have named cursors of the epoch before from where it began; below the gap they mean the same.
            low = max(self._starts.get(topic, 0), gone.gap_from)
            change = EpochChange(sub.epoch, before, low, sub.cursor)
            self._starts[topic] = gone.earliest_seq - 1
        elif before is None and topic in self._gone:
            change = change.following(self._gone.pop(topic))
        self.epochs[topic] = change.following(self.epochs.get(topic))
        if change.before or topic in self._heard:
            heard = self._heard.get(topic)
            self._has_told(topic, change.following(heard[0] if heard else None))
        if sub.cursor or change.before:  # else it is saved when the cursor is
            if not self.moved:
                self._desk.has_moved(self)
            self.moved[topic] = sub.cursor

    def _has_told(self, topic: str, change: EpochChange) -> None:
        """Ids say so from now on. Of more than HEARD_MAX topics the first are left out: a client that comes back may be told again."""
        self._heard.pop(topic, None)
        self._heard[topic] = change, event_ids.epoch_piece(topic, change.epoch)
        if len(self._heard) > HEARD_MAX:
            del self._heard[next(iter(self._heard))]

    def _heard_pieces(self) -> list[bytes]:
        """What ids say beside cursors: only where the cursor could be one of the epoch before."""
        return [
            piece
            for topic, (change, piece) in self._heard.items()
            if topic in self.subs and change.low <= self.subs[topic].cursor <= change.high
        ]

    def take(self, sub: Subscription, news: SharedPage) -> None:
        if news.tombstone is not None:
            self._take_tombstone(sub, news)
        self._move(sub, news.to_seq)
        if news.count:
            sub.owes_caught_up = not news.caught_up
            if self._is_single and not self._spec.include_epoch and not self._heard:
                text = news.texts.get(_SINGLE)
                if text is None:
                    text = news.texts[_SINGLE] = self._text(sub, news)
            else:
                text = self._text(sub, news)
            self._write(text)

    def _take_tombstone(self, sub: Subscription, news: SharedPage) -> None:
        gone = news.tombstone
        assert gone is not None
        recreated = gone.reason == "recreated"
        self._move(sub, news.after_gap)
        reason = "from_seq_too_old" if sub.fresh and not recreated else gone.reason
        self._write(sse.tombstone(news.topic, self._event_id(), gone, reason, self._epoch_member(sub)))
        sub.owes_caught_up = True

    def _epoch_member(self, sub: Subscription) -> bytes:
        return sse.epoch_member(sub.epoch) if self._spec.include_epoch else b""

    def _text(self, sub: Subscription, news: SharedPage) -> bytes:
        event_id, epoch = self._event_id(), self._epoch_member(sub)
        text = sse.record(
            news.topic, event_id, news.records, news.after_gap, news.to_seq, news.head_seq, epoch
        )
        if news.caught_up:
            text += sse.caught_up(news.topic, event_id, news.head_seq)
        return text

    def tell_caught_up(self, sub: Subscription, head_seq: int) -> None:
        self._write(sse.caught_up(sub.topic.encode(), self._event_id(), head_seq))

    def tell_gone(self, sub: Subscription) -> None:
        if sub.epoch is not None:
            low = max(self._starts.get(sub.topic, 0), 1)
            self._gone[sub.topic] = EpochChange("", sub.epoch, low, sub.cursor)
        self._move(sub, 0)  # should it be made again, all of it is new to whoever goes on from here
        self._write(sse.topic_deleted(sub.topic.encode(), self._event_id()))
        self._end_if_done()

    def tell_too_many(self, topic: str) -> None:
        if not self._refused:
            self._refused = True
            message = "a stream follows no more topics than that; use another one for the rest"
            self._write(sse.error(429, message, retry_after_ms=0, topics=[topic]))

    def _end_if_done(self) -> None:
        if not self._spec.patterns and all(sub.state is ENDED for sub in self.subs.values()):
            self.end()

    # -- where it stands -----------------------------------------------------------------------------------

    def _move(self, sub: Subscription, cursor: int) -> None:
        if sub.cursor != cursor:
            sub.cursor = cursor
            sub.piece = None
            if not self.moved:
                self._desk.has_moved(self)
            self.moved[sub.topic] = cursor
            if len(self.moved) > MOVED_MAX and not self._names_all:
                self._desk.save_now(self)

    def _event_id(self) -> bytes:
        if len(self.subs) != self._counted:
            self._counted = len(self.subs)
            self._names_all = event_ids.lists_all(self.subs)
        if not self._names_all:
            return self._short_id()
        pieces: list[bytes] = []
        for sub in self.subs.values():
            piece = sub.piece
            if piece is None:
                piece = sub.piece = event_ids.piece(sub.topic, sub.cursor)
            pieces.append(piece)
        return event_ids.join(pieces + self._heard_pieces())

    def _short_id(self) -> bytes:
        """What has moved since the last save that is certain to be known."""
        pieces = [event_ids.piece(event_ids.SAVE, self.save)]
        for topic, cursor in (self.saving | self.moved).items():
            pieces.append(event_ids.piece(topic, cursor))
        return event_ids.join(pieces + self._heard_pieces())

    # -- the end -------------------------------------------------------------------------------------------

    def beat(self, now_ms: int) -> None:
        if not self.is_full:
            self._write(sse.heartbeat(now_ms))

    def end_with(self, code: str, message: str) -> None:
        self.end(sse.error(code, message))

    def end(self, last: bytes = b"") -> None:
        """Close the stream; `last` is what it has to say. The session stays."""
        if self.is_closed:
            return
        self.fanout.close(self)
        self._desk.closed(self)
        self._farewell = last
        if self._sink is not None:
            if last:
                self._sink.write(last)
            self._sink.close()
