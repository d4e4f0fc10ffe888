"""The open streams of this front: their places under the caps, their heartbeats, and the saving of how far they are. Pure.

Streams of jobs have no place to be saved: what was handed out is known at the topic's shard.

Where a stream stands is saved at its session's shard every SAVE_EVERY_US while it moves, and when it ends. A shard that
has restarted hears at once which streams are open here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial

import msgspec

from router.pending import PendingRequests
from router.watch.event_stream import EventStream
from router.watch.fanout import Fanout, Later
from router.watch.job_stream import JobEventStream
from router.watch.watchers import Watcher
from topics.api.api_keys import ApiKey
from topics.link import wire
from topics.link.watch import SaveSession, encode
from topics.system.settings import Settings

SAVE_EVERY_US = 1_000_000
TELL_AFTER_US = 50_000
SWEEP_EVERY_US = 1_000_000
PING_EVERY_SWEEPS = 20
BEAT_TICK_US = 250_000
BEAT_TICK_FROM_US = 5_000_000  # shorter heartbeats keep their own time
STALLED_US = 30_000_000  # a client that takes nothing for so long is let go


_was_taken = msgspec.msgpack.Decoder(bool).decode


class StreamService:
    def __init__(
        self,
        core: PendingRequests,
        fanout: Fanout,
        settings: Settings,
        *,
        now_us: Callable[[], int],
        wall_ms: Callable[[], int],
        later: Later,
    ) -> None:
        self._core = core
        self.fanout = fanout
        self._settings = settings
        self.now_us = now_us
        self._wall_ms = wall_ms
        self._later = later
        self.count = 0  # of open streams and WebSockets
        self._per_key: dict[bytes, int] = {}
        self._sweeps = 0
        self._is_telling = False
        self._streams: dict[int, EventStream] = {}
        self._sockets: dict[Watcher, None] = {}
        self._unsaved: dict[EventStream, None] = {}
        self._is_saving = False  # a timer runs
        self._jobs: dict[int, JobEventStream] = {}
        self.stalled: dict[JobEventStream, int] = {}  # whose clients take nothing, and since when
        self._beats: list[tuple[int, int, EventStream | JobEventStream]] = []
        self._beat_at_us: int | None = None
        fanout.on_end = self._taken_over
        fanout.on_up = self._shard_up
        fanout.on_down = self._shard_down
        fanout.on_jobs = self._on_jobs
        later(SWEEP_EVERY_US, self._sweep)

    # -- caps ----------------------------------------------------------------------------------------------

    def full(self, key: ApiKey | None) -> tuple[str, int] | None:
        """The cap that leaves no place for another stream, if one does."""
        most, most_per_key = self._settings.max_sse_connections, self._settings.max_sse_connections_per_key
        if most and self.count >= most:
            return "max_sse_connections", most
        if key is not None and most_per_key and self._per_key.get(key.digest, 0) >= most_per_key:
            return "max_sse_connections_per_key", most_per_key
        return None

    def take_place(self, key: ApiKey | None, *, in_place_of: str = "") -> Callable[[], None] | None:
        """A place for one stream; what is returned gives it back. None: there is none.

        A stream that goes on in place of one that is open here needs no place beside it: that one ends.
        """
        if self.full(key) is not None and all(s.wid != in_place_of for s in self._streams.values()):
            return None
        digest = key.digest if key is not None else b""
        self.count += 1
        self._tell_count()
        if digest:
            self._per_key[digest] = self._per_key.get(digest, 0) + 1
        held = True

        def give_back() -> None:
            nonlocal held
            if held:
                held = False
                self.count -= 1
                self._tell_count()
                if digest:
                    left = self._per_key[digest] - 1
                    if left:
                        self._per_key[digest] = left
                    else:
                        del self._per_key[digest]

        return give_back

    def _tell_count(self) -> None:
        """The first shard adds the fronts up, for whoever asks any of them for figures."""
        if not self._is_telling:
            self._is_telling = True
            self._later(TELL_AFTER_US, self._tell)

    def _tell(self) -> None:
        self._is_telling = False
        self._core.tell(0, wire.STREAM_COUNT, self.count)

    def next_number(self) -> int:
        return self._core.take_number()

    # -- event streams -------------------------------------------------------------------------------------

    def expect(self, stream: EventStream) -> None:
        """Its session is open; its client may still have to be told."""
        self._streams[stream.number] = stream

    def opened(self, stream: EventStream) -> None:
        self._streams[stream.number] = stream
        self._plan_beat(stream, self._beat_due_us(stream, self.now_us()))

    def closed(self, stream: EventStream) -> None:
        """Its client is gone, or it was ended: the session hears where it stands."""
        self._streams.pop(stream.number, None)
        self._unsaved.pop(stream, None)
        save = stream.save + (2 if stream.saving else 1)  # one may be under way
        cursors = stream.saving | stream.moved
        self.release(SaveSession(stream.wid, stream.number, save, cursors, True, stream.epochs))

    def release(self, wish: SaveSession) -> None:
        self._send_save(wish, lambda reply: None)

    def has_moved(self, stream: EventStream) -> None:
        self._unsaved[stream] = None
        if not self._is_saving:
            self._is_saving = True
            self._later(SAVE_EVERY_US, self._save_all)

    def save_now(self, stream: EventStream) -> None:
        if not stream.saving:
            self._unsaved.pop(stream, None)
            self._save(stream)

    def _save_all(self) -> None:
        self._is_saving = False
        unsaved, self._unsaved = self._unsaved, {}
        for stream in unsaved:
            self._save(stream)

    def _save(self, stream: EventStream) -> None:
        if stream.saving:
            self.has_moved(stream)  # when that one is there
            return
        stream.saving, stream.moved = stream.moved, {}
        number = stream.save + 1
        epochs = {topic: stream.epochs[topic] for topic in stream.saving if topic in stream.epochs}
        wish = SaveSession(stream.wid, stream.number, number, stream.saving, epochs=epochs)
        self._send_save(wish, partial(self._saved, stream, wish))

    def _saved(self, stream: EventStream, wish: SaveSession, reply: wire.Reply) -> None:
        if reply.status == 200 and not _was_taken(reply.body):
            # The session's shard has died, and its file is from before this stream: who comes back is known again.
            stream.end_with("not_ready", "the session's shard has restarted; reconnect to go on")
        elif reply.status == 200:
            stream.save, stream.saving = wish.number, {}
            for topic, change in wish.epochs.items():
                if stream.epochs.get(topic) is change:
                    del stream.epochs[topic]
        elif stream.number in self._streams:
            stream.moved, stream.saving = stream.saving | stream.moved, {}
            self.has_moved(stream)

    def _send_save(self, wish: SaveSession, on_reply: Callable[[wire.Reply], None]) -> None:
        shard = self.fanout.shard_of(wish.wid)
        self._core.send(shard, wire.SESSION, 0, b"", b"", encode(wish), self.now_us(), on_reply)

    def _taken_over(self, number: int) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            stream.end_with("taken_over", "this session is followed through another connection now")

    def _shard_up(self, shard: int) -> None:
        if shard == 0:
            self._tell_count()
        for stream in list(self._streams.values()):
            if self.fanout.shard_of(stream.wid) == shard:
                self._save(stream)

    # -- streams of jobs -----------------------------------------------------------------------------------

    def expect_jobs(self, stream: JobEventStream) -> None:
        """Its shard has opened it; its client may still have to be told."""
        self._jobs[stream.number] = stream

    def jobs_opened(self, stream: JobEventStream) -> None:
        self._plan_beat(stream, self._beat_due_us(stream, self.now_us()))

    def jobs_passed_on(self, stream: JobEventStream) -> None:
        self._core.tell(stream.shard, wire.JOBS_ACK, stream.number)

    def jobs_closed(self, stream: JobEventStream) -> None:
        """Its client is gone, or it was ended: what is not settled goes to others."""
        self._jobs.pop(stream.number, None)
        self.stalled.pop(stream, None)
        self.leave_jobs(stream.shard, stream.number)

    def leave_jobs(self, shard: int, number: int) -> None:
        self._core.tell(shard, wire.CLOSE_JOBS, number)

    def _on_jobs(self, shard: int, reply: wire.Reply) -> None:
        stream = self._jobs.get(reply.id)
        if stream is not None:
            stream.take(reply)
        elif reply.status == 200:
            self.leave_jobs(shard, reply.id)  # nobody waits for that one any more

    def _shard_down(self, shard: int) -> None:
        for stream in [stream for stream in self._jobs.values() if stream.shard == shard]:
            stream.end_with("not_ready", "this topic's shard has stopped; reconnect to go on")

    # -- WebSockets ----------------------------------------------------------------------------------------

    def socket_opened(self, socket: Watcher) -> None:
        self._sockets[socket] = None

    def socket_closed(self, socket: Watcher) -> None:
        self._sockets.pop(socket, None)

    # -- time ----------------------------------------------------------------------------------------------

    @staticmethod
    def _beat_due_us(stream: EventStream | JobEventStream, since_us: int) -> int:
        """When it is to be heard of again. Streams share ticks: a wake-up each would cost more than the beats."""
        tick_us = BEAT_TICK_US if stream.heartbeat_us >= BEAT_TICK_FROM_US else 1
        due_us = since_us + stream.heartbeat_us
        return due_us + -due_us % tick_us

    def _plan_beat(self, stream: EventStream | JobEventStream, at_us: int) -> None:
        heapq.heappush(self._beats, (at_us, stream.number, stream))
        if self._beat_at_us is None or at_us < self._beat_at_us:
            self._beat_at_us = at_us
            self._later(max(0, at_us - self.now_us()), partial(self._beat, at_us))

    def _beat(self, planned_us: int) -> None:
        if planned_us != self._beat_at_us:
            return  # an earlier one was planned after this
        now_us, now_ms = self.now_us(), self._wall_ms()
        self._beat_at_us = None
        beats = self._beats
        again: list[tuple[int, EventStream | JobEventStream]] = []
        while beats and beats[0][0] <= now_us:
            stream = heapq.heappop(beats)[2]
            if stream.is_closed:
                continue
            if stream.wrote_us + stream.heartbeat_us <= now_us:
                stream.beat(now_ms)
                again.append((self._beat_due_us(stream, now_us), stream))
            else:
                again.append((self._beat_due_us(stream, stream.wrote_us), stream))
        for at_us, stream in again:
            heapq.heappush(beats, (at_us, stream.number, stream))
        if beats:
            self._beat_at_us = beats[0][0]
            self._later(max(0, self._beat_at_us - now_us), partial(self._beat, self._beat_at_us))

    def _sweep(self) -> None:
        """Let go of clients that take nothing, and let idle WebSockets be heard of."""
        self._sweeps += 1
        if self._sweeps % PING_EVERY_SWEEPS == 0:
            for socket in list(self._sockets):
                socket.ping()
        late_us = self.now_us() - STALLED_US
        late: list[Watcher | JobEventStream] = [
            w for w, at_us in self.fanout.stalled.items() if at_us <= late_us
        ]
        late += [stream for stream, at_us in self.stalled.items() if at_us <= late_us]
        for client in late:
            client.end_with("slow_consumer", "nothing was taken for 30 s; reconnect to go on")
        self._later(SWEEP_EVERY_US, self._sweep)

    def drain(self) -> None:
        """The server stops: every stream ends, and may be continued when it is back."""
        streams: list[Watcher | JobEventStream] = [
            *self._streams.values(),
            *self._jobs.values(),
            *self._sockets,
        ]
        for stream in streams:
            stream.end_with("server_shutting_down", "the server is stopping; reconnect to go on")
