"""Open streams of a front: connection caps, heartbeats, saving of cursors. No sockets and no clock.

The cursors of an event stream are saved at the shard of its session every SAVE_EVERY_US while they move, and when it ends. A
restarted shard is informed at once of the streams that are open here. Job streams have no cursors: the topic's shard
keeps track of leases.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial

import msgspec

from router.pending import PendingRequests
from router.watch.fanout import Fanout
from topics.api.api_keys import ApiKey
from topics.link import wire
from topics.link.watch import SaveSession, encode
from topics.protocols.http.call import Services
from topics.protocols.http.event_stream import EventStream
from topics.protocols.http.job_stream import JobEventStream
from topics.protocols.http.ports import Later
from topics.protocols.watchers import Watcher
from topics.system.settings import Settings

SAVE_EVERY_US = 1_000_000
REPORT_AFTER_US = 50_000
SWEEP_EVERY_US = 1_000_000
PING_EVERY_SWEEPS = 20
HEARTBEAT_TICK_US = 250_000
HEARTBEAT_TICK_FROM_US = 5_000_000  # shorter heartbeat intervals are not aligned to ticks
STALLED_US = 30_000_000  # a client that does not read for this long is disconnected


_was_accepted = msgspec.msgpack.Decoder(bool).decode


def start_streams(
    services: Services, core: PendingRequests, later: Later, wall_ms: Callable[[], int]
) -> StreamService:
    """Create the stream service of a front. `later` calls a function after a number of microseconds."""
    fanout = Fanout(core, services.now_us, later)
    streams = StreamService(
        core, fanout, services.settings, now_us=services.now_us, wall_ms=wall_ms, later=later
    )
    services.later, services.streams = later, streams
    return streams


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
        self._is_reporting = False
        self._streams: dict[int, EventStream] = {}
        self._sockets: dict[Watcher, None] = {}
        self._unsaved: dict[EventStream, None] = {}
        self._is_saving = False  # a timer runs
        self._jobs: dict[int, JobEventStream] = {}
        self.stalled: dict[JobEventStream, int] = {}  # whose clients do not read, and since when
        self._heartbeats: list[tuple[int, int, EventStream | JobEventStream]] = []
        self._next_heartbeat_us: int | None = None
        fanout.on_end = self._taken_over
        fanout.on_up = self._shard_up
        fanout.on_down = self._shard_down
        fanout.on_jobs = self._on_jobs
        later(SWEEP_EVERY_US, self._sweep)

    # -- caps ----------------------------------------------------------------------------------------------

    def reached_cap(self, key: ApiKey | None) -> tuple[str, int] | None:
        """The cap that prevents another stream, if any."""
        maximum, per_key = self._settings.max_sse_connections, self._settings.max_sse_connections_per_key
        if maximum and self.count >= maximum:
            return "max_sse_connections", maximum
        if key is not None and per_key and self._per_key.get(key.digest, 0) >= per_key:
            return "max_sse_connections_per_key", per_key
        return None

    def reserve(self, key: ApiKey | None, *, replacing: str = "") -> Callable[[], None] | None:
        """Reserve a slot for one stream. Returns a function that releases it; None if a cap is reached.

        A stream that replaces one that is open here needs no additional slot: the old one ends.
        """
        if self.reached_cap(key) is not None and all(s.wid != replacing for s in self._streams.values()):
            return None
        digest = key.digest if key is not None else b""
        self.count += 1
        self._report_count_soon()
        if digest:
            self._per_key[digest] = self._per_key.get(digest, 0) + 1
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self.count -= 1
                self._report_count_soon()
                if digest:
                    left = self._per_key[digest] - 1
                    if left:
                        self._per_key[digest] = left
                    else:
                        del self._per_key[digest]

        return release

    def _report_count_soon(self) -> None:
        """Report the number of streams to shard 0, which adds up the fronts for the metrics."""
        if not self._is_reporting:
            self._is_reporting = True
            self._later(REPORT_AFTER_US, self._report_count)

    def _report_count(self) -> None:
        self._is_reporting = False
        self._core.tell(0, wire.STREAM_COUNT, self.count)

    def next_number(self) -> int:
        return self._core.new_number()

    # -- event streams -------------------------------------------------------------------------------------

    def add(self, stream: EventStream) -> None:
        """Add a stream whose session is open; its response may not be sent yet."""
        self._streams[stream.number] = stream

    def opened(self, stream: EventStream) -> None:
        self._streams[stream.number] = stream
        self._schedule_heartbeat(stream, self._heartbeat_due_us(stream, self.now_us()))

    def closed(self, stream: EventStream) -> None:
        """Remove a stream that has ended, and save its cursors."""
        self._streams.pop(stream.number, None)
        self._unsaved.pop(stream, None)
        save = stream.save + (2 if stream.saving else 1)  # one may be in flight
        cursors = stream.saving | stream.moved
        self.close_session(SaveSession(stream.wid, stream.number, save, cursors, True, stream.epochs))

    def close_session(self, save: SaveSession) -> None:
        self._send_save(save, lambda reply: None)

    def mark_unsaved(self, stream: EventStream) -> None:
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
            self.mark_unsaved(stream)  # after the save in flight
            return
        stream.saving, stream.moved = stream.moved, {}
        number = stream.save + 1
        epochs = {topic: stream.epochs[topic] for topic in stream.saving if topic in stream.epochs}
        save = SaveSession(stream.wid, stream.number, number, stream.saving, epochs=epochs)
        self._send_save(save, partial(self._saved, stream, save))

    def _saved(self, stream: EventStream, save: SaveSession, reply: wire.Reply) -> None:
        if reply.code == wire.OK and not _was_accepted(reply.body):
            # The session's shard has restarted from a file that is older than this stream. Reconnecting registers it again.
            stream.end_with("not_ready", "the session's shard has restarted; reconnect to continue")
        elif reply.code == wire.OK:
            stream.save, stream.saving = save.number, {}
            for topic, change in save.epochs.items():
                if stream.epochs.get(topic) is change:
                    del stream.epochs[topic]
        elif stream.number in self._streams:
            stream.moved, stream.saving = stream.saving | stream.moved, {}
            self.mark_unsaved(stream)

    def _send_save(self, save: SaveSession, on_reply: Callable[[wire.Reply], None]) -> None:
        shard = self.fanout.shard_of(save.wid)
        self._core.ask(shard, wire.SESSION, 0, b"", b"", encode(save), self.now_us(), on_reply)

    def _taken_over(self, number: int) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            stream.end_with("taken_over", "another connection has opened this session")

    def _shard_up(self, shard: int) -> None:
        if shard == 0:
            self._report_count_soon()
        for stream in list(self._streams.values()):
            if self.fanout.shard_of(stream.wid) == shard:
                self._save(stream)

    # -- job streams ---------------------------------------------------------------------------------------

    def add_job_stream(self, stream: JobEventStream) -> None:
        """Add a stream that the shard has opened; its response may not be sent yet."""
        self._jobs[stream.number] = stream

    def job_stream_opened(self, stream: JobEventStream) -> None:
        self._schedule_heartbeat(stream, self._heartbeat_due_us(stream, self.now_us()))

    def ack_jobs(self, stream: JobEventStream) -> None:
        self._core.tell(stream.shard, wire.JOBS_ACK, stream.number)

    def job_stream_closed(self, stream: JobEventStream) -> None:
        """Remove a stream that has ended; the shard redelivers its unsettled jobs."""
        self._jobs.pop(stream.number, None)
        self.stalled.pop(stream, None)
        self.close_job_stream(stream.shard, stream.number)

    def close_job_stream(self, shard: int, number: int) -> None:
        self._core.tell(shard, wire.CLOSE_JOBS, number)

    def _on_jobs(self, shard: int, reply: wire.Reply) -> None:
        stream = self._jobs.get(reply.id)
        if stream is not None:
            stream.receive(reply)
        elif reply.code == wire.OK:
            self.close_job_stream(shard, reply.id)  # the stream is already closed here

    def _shard_down(self, shard: int) -> None:
        for stream in [stream for stream in self._jobs.values() if stream.shard == shard]:
            stream.end_with("not_ready", "this topic's shard has stopped; reconnect to continue")

    # -- WebSockets ----------------------------------------------------------------------------------------

    def socket_opened(self, socket: Watcher) -> None:
        self._sockets[socket] = None

    def socket_closed(self, socket: Watcher) -> None:
        self._sockets.pop(socket, None)

    # -- time ----------------------------------------------------------------------------------------------

    @staticmethod
    def _heartbeat_due_us(stream: EventStream | JobEventStream, since_us: int) -> int:
        """When the next heartbeat is due. Streams share ticks, because a timer for each would cost more than the heartbeats."""
        tick_us = HEARTBEAT_TICK_US if stream.heartbeat_us >= HEARTBEAT_TICK_FROM_US else 1
        due_us = since_us + stream.heartbeat_us
        return due_us + -due_us % tick_us

    def _schedule_heartbeat(self, stream: EventStream | JobEventStream, at_us: int) -> None:
        heapq.heappush(self._heartbeats, (at_us, stream.number, stream))
        if self._next_heartbeat_us is None or at_us < self._next_heartbeat_us:
            self._next_heartbeat_us = at_us
            self._later(max(0, at_us - self.now_us()), partial(self._heartbeat, at_us))

    def _heartbeat(self, planned_us: int) -> None:
        if planned_us != self._next_heartbeat_us:
            return  # an earlier one was scheduled after this
        now_us, now_ms = self.now_us(), self._wall_ms()
        self._next_heartbeat_us = None
        beats = self._heartbeats
        again: list[tuple[int, EventStream | JobEventStream]] = []
        while beats and beats[0][0] <= now_us:
            stream = heapq.heappop(beats)[2]
            if stream.is_closed:
                continue
            if stream.wrote_us + stream.heartbeat_us <= now_us:
                stream.heartbeat(now_ms)
                again.append((self._heartbeat_due_us(stream, now_us), stream))
            else:
                again.append((self._heartbeat_due_us(stream, stream.wrote_us), stream))
        for at_us, stream in again:
            heapq.heappush(beats, (at_us, stream.number, stream))
        if beats:
            self._next_heartbeat_us = beats[0][0]
            self._later(
                max(0, self._next_heartbeat_us - now_us), partial(self._heartbeat, self._next_heartbeat_us)
            )

    def _sweep(self) -> None:
        """Disconnect clients that do not read, and ping WebSockets."""
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
            client.end_with("slow_consumer", "nothing was read for 30 s; reconnect to continue")
        self._later(SWEEP_EVERY_US, self._sweep)

    def drain(self) -> None:
        """End all streams, because the server is stopping. Clients can resume them after the restart."""
        streams: list[Watcher | JobEventStream] = [
            *self._streams.values(),
            *self._jobs.values(),
            *self._sockets,
        ]
        for stream in streams:
            stream.end_with("server_shutting_down", "the server is stopping; reconnect to continue")
