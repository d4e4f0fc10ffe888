"""Clients of a simulated server that watch: they create a session, follow it over several connections, and record
every event.

A connection is a `SimSink`: what the server writes travels in pieces of any size, as fast as the client takes it. A
client reads slowly, or not at all for a while; it disconnects without notice and comes back with the id of its last
event, an older one, or none, through any front.
"""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING, Any

from tests.sim.actors import json_request
from tests.sim.world import MS, S
from tests.support.history import Frame, Op, Stream
from topics.protocols.http.exchange import Request, Response
from topics.protocols.http.exchange import Stream as ServerEnd

if TYPE_CHECKING:
    from tests.sim.clients import ClientPool
    from tests.sim.processes import SimFront

PATTERNS = ["fsync*", "*", ">"]  # the first is none: a wildcard is a whole token
FULL_BYTES = (1, 400, 4000, 1 << 20)  # what a connection holds before it is full
NODES = ["n1", "n2"]


class SimSink:
    """The server's end of a connection, and the way to the client."""

    def __init__(self, watcher: Watcher, front: SimFront, server_end: ServerEnd, record: Stream) -> None:
        self.watcher, self.front, self.server_end, self.record = watcher, front, server_end, record
        self._world, self._rng = watcher.world, watcher.rng
        self._buffer: deque[bytes] = deque()
        self._bytes = 0
        self._full_bytes = self._rng.choice(FULL_BYTES)
        self._was_full = False
        self._closing = False
        self._broken = False
        self._moving = False
        self._stalled_until_us = 0
        self.gone = False  # for the client
        self.text = b""  # the beginning of an event

    # -- the server's side -----------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        return self._bytes >= self._full_bytes

    def write(self, data: bytes) -> None:
        assert not self._closing, f"written after the end: {data!r}"
        self._buffer.append(data)
        self._bytes += len(data)
        self._was_full |= self.is_full
        self._move()

    def close(self) -> None:
        self._closing = True
        self._move()

    def abort(self) -> None:
        self._buffer.clear()
        self._bytes = 0
        self.close()

    # -- in flight -------------------------------------------------------------------------------------------

    def stall(self, time_us: int) -> None:
        """The client reads nothing for a while."""
        self._stalled_until_us = self._world.now_us + time_us

    def wake(self) -> None:
        self._stalled_until_us = 0
        self._full_bytes = FULL_BYTES[-1]
        self._move()

    def _move(self) -> None:
        if not self._moving and not self.gone:
            self._moving = True
            wait_us = max(self.watcher.pool._net_us(), self._stalled_until_us - self._world.now_us)
            self._world.after(wait_us, self._arrive)

    def _arrive(self) -> None:
        self._moving = False
        if self.gone:
            return
        if self._world.now_us < self._stalled_until_us:
            self._move()
            return
        if self._buffer:
            data = self._buffer.popleft()
            if self._rng.random() < 0.1:  # in pieces
                cut = self._rng.randrange(len(data) + 1)
                self._buffer.appendleft(data[cut:])
                data = data[:cut]
            self._bytes -= len(data)
            self.watcher.took(self, data)
        if self.gone:
            return
        if self._was_full and not self.is_full and self.front.alive:
            self._was_full = False
            self.server_end.drained()
        if self._buffer:
            self._move()
        elif self._closing:
            self.hang_up("broken" if self._broken else "server")

    def front_died(self) -> None:
        """What had left the front may still arrive, and so does the end of the connection."""
        if self._rng.random() < 0.5:
            self._buffer.clear()
        self._closing = self._broken = True
        self._move()

    def hang_up(self, end: str) -> None:
        """The connection is closed. The server notices a moment later."""
        if self.gone:
            return
        self.gone = True
        self.watcher.pool.history.ended(self.record, end)
        front, server_end = self.front, self.server_end
        self._world.after(self.watcher.pool._net_us(), lambda: front.alive and server_end.closed())
        self.watcher.disconnected(self)


class Watcher:
    """One session after the other, with one connection at a time."""

    patience = 1.0
    restless = 0.03  # how often it disconnects when it sees an event, and before its stream is open

    def __init__(self, pool: ClientPool, name: str) -> None:
        self.pool, self.name = pool, name
        self.rng, self.world, self.history = pool.rng, pool.world, pool.history
        self.wid = ""
        self.seen: list[str] = []  # ids in the order of arrival
        self.sink: SimSink | None = None
        self._opening: tuple[Stream, SimFront, Request] | None = None
        self._tries = 0
        self.world.after(self.rng.randrange(8 * MS), self.go)

    @property
    def is_connected(self) -> bool:
        return self.sink is not None and not self.sink.gone

    # -- sessions --------------------------------------------------------------------------------------------

    def go(self) -> None:
        """Create a session, or connect to the existing one."""
        if self.is_connected or self._opening is not None:
            return
        if not self.pool.has_front:
            self.world.after(5 * MS, self.go)
        elif self.wid:
            self._connect()
        elif not self.pool.stopped:
            request = self._request()
            op = self.history.sent(self.name, "watch", "", request)
            body = {name: value for name, value in request.items() if name != "lenient"}
            query = b"lenient=true" if request.get("lenient") else b""
            assert self.pool.send(self, op, json_request(b"POST", "/v0/watch", body, query))

    def on_answer(self, op: Op) -> None:
        """The answer to the creation of a session."""
        if op.ok:
            self.wid, self.seen = op.answer["wid"], []
            self.world.after(self.rng.choice((0, 1, 5)) * MS, self.go)
        else:
            self.world.after(self.rng.choice((3, 30)) * MS, self.go)

    def _request(self) -> dict[str, Any]:
        rng, pool = self.rng, self.pool
        if pool.workload.grouped:
            return self._group_request()
        names = [*pool.workload.topics, *(name for client in pool.clients for name in client.own)]
        topics: dict[str, Any] = {}
        for name in rng.sample(names, min(len(names), rng.choice((1, 1, 2, 4)))):
            topics[name] = rng.choice(
                (
                    {},
                    {},
                    {"tail": True},
                    {"from_seq": max(0, pool.heads.get(name, 0) - rng.choice((0, 2, 9)))},
                )
            )
        if rng.random() < 0.3:
            topics = {rng.choice((">", "*")): rng.choice(({}, {"tail": True}))} | (
                topics if rng.random() < 0.3 else {}
            )
        request: dict[str, Any] = {"topics": topics, "include_tags": rng.random() < 0.5}
        if rng.random() < 0.2:
            request["limit"] = rng.choice((1, 2, 5))
        if rng.random() < 0.2:
            request["max_batch_bytes"] = rng.choice((1, 100, 500))
        if rng.random() < 0.15:
            request["include_meta"] = False
        if rng.random() < 0.25:
            request["consistency"] = "strong"
        if rng.random() < 0.2:
            request["group"] = rng.choice(("g", "h"))
        elif rng.random() < 0.3:
            request["node"] = rng.choice([NODES[0], NODES])
        if rng.random() < 0.7:
            request["lenient"] = True
        return request

    def _group_request(self) -> dict[str, Any]:
        """The request of all watchers that share a group."""
        rng = self.rng
        topics = rng.choice(({">": {}}, {name: {} for name in self.pool.workload.topics}))
        request: dict[str, Any] = {"topics": topics, "group": "g", "lenient": True}
        if rng.random() < 0.3:
            request["limit"] = rng.choice((1, 2, 5))
        return request

    # -- connections -----------------------------------------------------------------------------------------

    def _connect(self) -> None:
        fronts = [front for front in self.pool.server.fronts if front is not None and front.alive]
        front = self.rng.choice(fronts)
        last_id = self._last_id()
        record = self.history.opening(self.name, self.wid, last_id)
        request = Request(b"GET", f"/v0/watch/{self.wid}".encode(), b"", 0, accept=b"text/event-stream")
        request.last_event_id = (last_id or "").encode()
        self._opening = (record, front, request)
        self.world.after(self.pool._net_us(), lambda: self._arrive(record, front, request))
        if self.rng.random() < self.restless and not self.pool.stopped:
            self.world.after(self.rng.randrange(5 * MS), lambda: self._give_up(record))

    def _last_id(self) -> str | None:
        """Most reconnect with the last id that they have seen. After a rewind, later ids were not seen.

        Without an id the stream continues at the server's position; older ids may be ahead of that.
        """
        mood = self.rng.random()
        if mood < 0.12 or not self.seen:
            self.seen = []
            return None
        if mood < 0.3:
            self.seen = self.seen[: self.rng.randrange(len(self.seen)) + 1]
        return self.seen[-1]

    def _arrive(self, record: Stream, front: SimFront, request: Request) -> None:
        if self._opening is None or self._opening[0] is not record or not front.alive:
            return

        def respond(response: Response) -> None:
            if response.stream is None:
                self.world.after(self.pool._net_us(), lambda: self._refused(record, response.status))
            elif self._opening is None or self._opening[0] is not record:
                response.stream.closed()  # the client has left
            else:
                self._opening = None
                self.history.opened(record, response.status)
                self.sink = sink = SimSink(self, front, response.stream, record)
                self._behave(sink)
                response.stream.opened(sink)

        front.handle(request, respond)

    def _behave(self, sink: SimSink) -> None:
        """How this connection will behave."""
        if self.pool.stopped:
            sink.wake()
            return
        rng = self.rng
        life_us = rng.choice((1, 20, 200, 2000, 20_000)) * MS
        self.world.after(rng.randrange(life_us), lambda: self._leave(sink))
        if rng.random() < 0.15:
            stall_us = rng.choice((5, 100, 100, 2000, 40_000)) * MS
            self.world.after(rng.randrange(5 * MS), lambda: sink.stall(stall_us))

    def _leave(self, sink: SimSink) -> None:
        if not self.pool.stopped and self.sink is sink:
            sink.hang_up("client")

    def _give_up(self, record: Stream) -> None:
        """The client does not wait for the answer."""
        if self._opening is not None and self._opening[0] is record:
            request = self._opening[2]
            self._lost()
            request.release()

    def _lost(self) -> None:
        assert self._opening is not None
        self.history.ended(self._opening[0], "broken")
        self._opening = None
        self.world.after(self._pause_us(), self.go)

    def _refused(self, record: Stream, status: int) -> None:
        if self._opening is None or self._opening[0] is not record:
            return
        self._opening = None
        self.history.opened(record, status)
        self.history.ended(record, "server")
        if status == 404:
            self.wid = ""
        self.world.after(self._pause_us(), self.go)

    def front_died(self, front: SimFront) -> None:
        if self._opening is not None and self._opening[1] is front:
            self._lost()
        if self.sink is not None and self.sink.front is front and not self.sink.gone:
            self.sink.front_died()

    def disconnected(self, sink: SimSink) -> None:
        self.sink = None
        frames = sink.record.frames
        if sink.record.end == "server" and not (frames and frames[-1].event == "error"):
            self.wid = ""  # all of its topics are gone
        self.world.after(self._pause_us(), self.go)

    def _pause_us(self) -> int:
        return self.rng.choice((0, 1, 5, 50, 1500)) * MS

    # -- events ----------------------------------------------------------------------------------------------

    def took(self, sink: SimSink, data: bytes) -> None:
        """Bytes of the stream: an event is complete with its empty line."""
        *blocks, sink.text = (sink.text + data).split(b"\n\n")
        for block in blocks:
            if not sink.gone:
                self._event(sink, block.decode())

    def _event(self, sink: SimSink, block: str) -> None:
        if block == "retry: 2000" or block.startswith(": hb "):
            return
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        assert set(fields) in ({"event", "id", "data"}, {"event", "data"}), block
        event_id = fields.get("id")
        frame = self.history.saw(sink.record, fields["event"], event_id, json.loads(fields["data"]))
        if frame.data.get("reason") in ("recreated", "deleted"):
            self.seen = []  # those are of the earlier topic of this name, and ahead of the new one
        if event_id is not None:
            self.seen.append(event_id)
        self._learn(frame)
        if not self.pool.stopped and self.rng.random() < self.restless:
            sink.hang_up("client")

    def _learn(self, frame: Frame) -> None:
        self.pool.server.counts[f"frame {frame.event}"] += 1
        if frame.event == "record":
            topic = frame.data["topic"]
            self.pool.heads[topic] = max(self.pool.heads.get(topic, 0), frame.data["head_seq"])

    # -- end of the run --------------------------------------------------------------------------------------

    def come_to_rest(self) -> None:
        """From here on it reads everything at once, and stays connected."""
        if self.sink is not None:
            self.sink.wake()
        self.go()

    @property
    def is_at_rest(self) -> bool:
        return not self.wid or self.is_connected


REST_US = 5 * S  # until everything has arrived: retries, take-overs, rejoining groups
