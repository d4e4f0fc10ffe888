"""An in-memory HTTP/2 connection: h2's own client, a transport that records what is written, and a scripted admission
stub.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from hyperframe.frame import PingFrame

from router.connections.budget import ByteBudget
from router.connections.http2 import Http2Connection
from topics.protocols.http.exchange import Request, Respond, Response

BODY_BYTES_MAX = 300_000
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PING = PingFrame(0, b"01234567").serialize()


def window_update(stream_id: int, size: int) -> bytes:
    return b"\x00\x00\x04\x08\x00" + stream_id.to_bytes(4, "big") + size.to_bytes(4, "big")


class Transport:
    """A fake socket transport. `high_water` is how much may stay unread before writing is paused."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.high_water: int | None = None
        self.closed = self.aborted = False
        self.server: Http2Connection | None = None

    def write(self, data: bytes) -> None:
        assert not self.aborted
        self.writes.append(data)
        if self.high_water is not None and sum(map(len, self.writes)) > self.high_water:
            assert self.server is not None
            self.server.pause_writing()

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def take(self) -> bytes:
        data = b"".join(self.writes)
        self.writes.clear()
        return data


class Admission:
    """Answers a path from `answers`; a path that is not there waits for the test."""

    def __init__(self) -> None:
        self.refusals: dict[bytes, Response] = {}
        self.answers: dict[bytes, Response] = {}
        self.screened: list[tuple[Request, int | None]] = []
        self.handled: list[Request] = []
        self.waiting: dict[bytes, Respond] = {}

    def add_cors(self, origin: bytes, response: Response) -> Response:
        return response

    def check_head(self, request: Request, declared_bytes: int | None) -> Response | None:
        self.screened.append((request, declared_bytes))
        return self.refusals.get(request.path)

    def handle(self, request: Request, respond: Respond) -> None:
        self.handled.append(request)
        answer = self.answers.get(request.path)
        if answer is not None:
            respond(answer)
        elif request.path.startswith(b"/echo"):
            respond(Response(200, bytes(request.body), b"text/plain", b"X-Path: " + request.path + b"\r\n"))
        else:
            self.waiting[request.path] = respond


@dataclass
class ReceivedResponse:
    headers: dict[bytes, bytes] = field(default_factory=dict)
    informational: list[bytes] = field(default_factory=list)
    body: bytes = b""
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> int:
        return int(self.headers[b":status"])

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


class Client:
    """h2's client side. `reading` says whether flow-control windows are given back."""

    def __init__(self) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=True))
        self.h2.initiate_connection()
        self.got: dict[int, ReceivedResponse] = {}
        self.settings: dict[int, int] = {}
        self.goaway: events.ConnectionTerminated | None = None
        self.reading = True
        self.order: list[int] = []
        self.frame_bytes_max = 0

    def stream(self, stream_id: int) -> ReceivedResponse:
        return self.got.setdefault(stream_id, ReceivedResponse())

    def request(
        self, path: str, body: bytes | None = None, *, method: str = "", end: bool = True, **headers: str
    ) -> int:
        stream_id = self.h2.get_next_available_stream_id()
        head = [(":method", method or ("GET" if body is None else "POST")), (":path", path)]
        head += [(":scheme", "http"), (":authority", "here")]
        head += [(name.replace("_", "-"), value) for name, value in headers.items()]
        self.h2.send_headers(stream_id, head, end_stream=end and body is None)
        self.stream(stream_id)
        if body is not None:
            self.send(stream_id, body, end=end)
        return stream_id

    def send(self, stream_id: int, body: bytes, *, end: bool = True) -> None:
        pieces = [body[at : at + 16384] for at in range(0, len(body), 16384)] or [b""]
        for piece in pieces[:-1]:
            self.h2.send_data(stream_id, piece)
        self.h2.send_data(stream_id, pieces[-1], end_stream=end)

    def receive(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            self.on(event)

    def on(self, event: events.Event) -> None:
        match event:
            case events.ResponseReceived():
                assert not self.stream(event.stream_id).headers
                headers = dict(event.headers)
                assert headers.pop(b"date").endswith(
                    b" GMT"
                )  # every answer has a request id, and it is always different
                self.stream(event.stream_id).headers = headers
            case events.InformationalResponseReceived():
                self.stream(event.stream_id).informational.append(dict(event.headers)[b":status"])
            case events.DataReceived():
                self.stream(event.stream_id).body += event.data
                self.order.append(event.stream_id)
                self.frame_bytes_max = max(self.frame_bytes_max, len(event.data))
                if self.reading:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case events.StreamEnded():
                self.stream(event.stream_id).ended = True
            case events.StreamReset():
                self.stream(event.stream_id).reset = event.error_code
            case events.RemoteSettingsChanged():
                self.settings = {code: change.new_value for code, change in event.changed_settings.items()}
            case events.ConnectionTerminated():
                self.goaway = event


class Bench:
    def __init__(self, *, receiving: int = 1 << 20, sending: int = 8 << 20) -> None:
        self.now_us = 1_000_000_000
        self.transport = Transport()
        self.admission = Admission()
        self.receiving = ByteBudget(receiving)
        self.sending = ByteBudget(sending)
        self.server = Http2Connection(
            self.transport,  # type: ignore[arg-type]
            self.admission,
            body_bytes_max=BODY_BYTES_MAX,
            receiving=self.receiving,
            sending=self.sending,
            now_us=lambda: self.now_us,
        )
        self.transport.server = self.server
        self.client = Client()

    def handshake(self) -> Bench:
        self.run()
        return self

    def run(self) -> None:
        """Carry bytes both ways until neither side has any."""
        while True:
            up = self.client.h2.data_to_send()
            if up:
                self.server.data_received(up)
            down = self.transport.take()
            if down:
                self.client.receive(down)
            if not up and not down:
                return

    def raw(self, data: bytes) -> None:
        self.server.data_received(data)

    def check_and_end(self) -> None:
        if not self.server.busy:
            assert (self.receiving.held, self.sending.held) == (0, 0)
        self.server.connection_lost()
        assert not self.server.busy
        assert (self.receiving.held, self.sending.held) == (0, 0)
        for respond in self.admission.waiting.values():
            respond(Response(200, b"too late"))
