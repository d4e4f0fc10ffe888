"""The h2 library as this server uses it: our settings, the bounds it lacks, and heads from and to its header lists."""

from __future__ import annotations

from collections.abc import Iterable

from h2 import events
from h2.config import H2Configuration
from h2.connection import AllowedStreamIDs, H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import DenialOfServiceError, FrameTooLargeError
from h2.settings import SettingCodes, Settings
from h2.stream import H2Stream
from hyperframe.frame import Frame, GoAwayFrame

from topics.protocols.http.exchange import Request, Response
from topics.protocols.http1.responses import date_line

STREAMS_MAX = 256
HEAD_BYTES_MAX = 16 * 1024
HEAD_BLOCK_BYTES_MAX = (
    4 * HEAD_BYTES_MAX
)  # Huffman codes are at most 30 bits, so an honest head is never longer
STREAM_WINDOW_BYTES = 1 << 20
CONNECTION_WINDOW_BYTES = 8 << 20
SETTINGS = {
    SettingCodes.MAX_CONCURRENT_STREAMS: STREAMS_MAX,
    SettingCodes.MAX_HEADER_LIST_SIZE: HEAD_BYTES_MAX,
    SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
    SettingCodes.ENABLE_PUSH: 0,
}
# A client may open streams before it has seen our settings. Ours is to refuse one of them; h2 would end the connection.
SETTINGS_ENFORCED_BY_H2 = SETTINGS | {SettingCodes.MAX_CONCURRENT_STREAMS: 1 << 16}

# h2 keeps every setting, known or not, and goes through all of them with each SETTINGS frame.
REMOTE_SETTINGS_MAX = 64
# The client may offer 4 GiB for our header compression; hpack searches the table entry by entry.
ENCODER_TABLE_BYTES_MAX = 4096

FIELDS = {
    b"content-type": "content_type",
    b"content-encoding": "content_encoding",
    b"authorization": "authorization",
    b"accept": "accept",
    b"accept-encoding": "accept_encoding",
    b"idempotency-key": "idempotency_key",
    b"traceparent": "traceparent",
    b"topics-strict": "strict",
    b"host": "host",
    b":authority": "host",  # h2 has compared the two
    b"origin": "origin",
    b"sec-fetch-site": "fetch_site",
    b"last-event-id": "last_event_id",
}
# What may come several times. Of the others the first counts; two parents of a trace are none, and two origins no origin.
LISTS = frozenset((b"content-encoding", b"accept", b"accept-encoding", b"traceparent", b"origin"))
NOT_IN_HTTP2 = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)

Headers = Iterable[tuple[bytes, bytes]]


class Http2Session(H2Connection):
    # 65,536 by default, which is several MiB for each connection that lives long.
    MAX_CLOSED_STREAMS = 2048

    def __init__(self) -> None:
        # Checking our own headers byte by byte would cost more than encoding them.
        super().__init__(
            H2Configuration(
                client_side=False, validate_outbound_headers=False, normalize_outbound_headers=False
            )
        )
        self.local_settings = Settings(client=False, initial_values=SETTINGS)
        self.decoder.max_header_list_size = HEAD_BYTES_MAX
        self.initiate_connection()
        self.local_settings = Settings(client=False, initial_values=SETTINGS_ENFORCED_BY_H2)
        self.increment_flow_control_window(CONNECTION_WINDOW_BYTES - self.inbound_flow_control_window)

    def feed(self, data: bytes) -> list[events.Event]:
        """h2 looks at a frame's length only when the whole frame is there, and at a header block when it has ended."""
        batch = self.receive_data(data)
        rest = self.incoming_buffer._data
        if len(rest) >= 3 and int.from_bytes(rest[:3], "big") > self.max_inbound_frame_size:
            self.close_connection(ErrorCodes.FRAME_SIZE_ERROR)
            raise FrameTooLargeError
        if sum(len(frame.data) for frame in self.incoming_buffer._headers_buffer) > HEAD_BLOCK_BYTES_MAX:
            self.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
            raise DenialOfServiceError
        return batch

    def farewell(self) -> bytes:
        """A GOAWAY for new streams only: after close_connection() h2 sends nothing on the open ones either."""
        return GoAwayFrame(0, last_stream_id=self.highest_inbound_stream_id).serialize()

    def bound_settings(self) -> bool:
        """To be called when the client has changed its settings; false when there are too many to live with."""
        # Not min(): setting the size that it has makes hpack forget a change that is not announced yet.
        if self.encoder.header_table_size > ENCODER_TABLE_BYTES_MAX:  # noqa: PLR1730
            self.encoder.header_table_size = ENCODER_TABLE_BYTES_MAX
        # The next header block announces all of these, and at most two are allowed: the smallest and the last.
        if len(changes := self.encoder.table_size_changes) > 2:
            self.encoder.table_size_changes = [min(changes), changes[-1]]
        return len(self.remote_settings) <= REMOTE_SETTINGS_MAX

    def _begin_new_stream(self, stream_id: int, allowed_ids: AllowedStreamIDs) -> H2Stream:
        """A body that is not as long as declared is one stream's fault; h2 would end the connection.

        curl ends its body early when the answer is there before it has sent everything.
        """
        stream = super()._begin_new_stream(stream_id, allowed_ids)
        stream._track_content_length = _ignore  # type: ignore[method-assign]
        return stream

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[events.Event]]:
        """h2 would close both directions, but a client that says goodbye still waits for its open streams."""
        return [], [events.ConnectionTerminated()]


def _ignore(length: int, end_stream: bool) -> None:
    pass


def read_head(headers: Headers, now_us: int) -> tuple[Request, int | None, bool]:
    """The request without its body, its declared length, and whether the client waits for a 100."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name not in found:
            found[name] = value
        elif name in LISTS:
            found[name] += b", " + value
    # Only CONNECT comes without a path.
    path, _, query = found.get(b":path", b"/").partition(b"?")
    request = Request(found[b":method"], path, query, now_us)
    for name, attribute in FIELDS.items():
        if name in found:
            setattr(request, attribute, found[name])
    length = found.get(b"content-length")
    expects = found.get(b"expect", b"").lower() == b"100-continue"
    return request, None if length is None else int(length), expects


def response_headers(response: Response) -> list[tuple[bytes, bytes]]:
    headers = [(b":status", b"%d" % response.status)]
    if response.status != 204:
        if response.content_type:
            headers.append((b"content-type", response.content_type))
        if response.stream is None:
            headers.append((b"content-length", b"%d" % len(response.body)))
    headers.append((b"date", date_line.value()))
    for line in response.head.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        name = name.strip().lower()
        if colon and name not in NOT_IN_HTTP2:
            headers.append((name, value.strip()))
    return headers
