"""HTTP/2 sessions: the h2 library with our settings and additional limits, and conversion of header lists."""

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
from topics.protocols.http.fields import collect_fields, set_fields
from topics.protocols.http1.responses import date_line

STREAMS_MAX = 256
HEAD_BYTES_MAX = 16 * 1024
HEAD_BLOCK_BYTES_MAX = 4 * HEAD_BYTES_MAX  # Huffman codes have at most 30 bits: valid heads are shorter
STREAM_WINDOW_BYTES = 1 << 20
CONNECTION_WINDOW_BYTES = 8 << 20
SETTINGS = {
    SettingCodes.MAX_CONCURRENT_STREAMS: STREAMS_MAX,
    SettingCodes.MAX_HEADER_LIST_SIZE: HEAD_BYTES_MAX,
    SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
    SettingCodes.ENABLE_PUSH: 0,
}
# A client may open streams before it has received our settings. We refuse single streams; h2 would close the connection.
SETTINGS_ENFORCED_BY_H2 = SETTINGS | {SettingCodes.MAX_CONCURRENT_STREAMS: 1 << 16}

# h2 stores every setting, known or not, and iterates over all of them for each SETTINGS frame.
REMOTE_SETTINGS_MAX = 64
# The client may offer a table of up to 4 GiB for our header compression, and hpack searches it linearly.
ENCODER_TABLE_BYTES_MAX = 4096

NOT_IN_HTTP2 = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)

Headers = Iterable[tuple[bytes, bytes]]


class Http2Session(H2Connection):
    # The default of 65,536 takes several MiB for each long-lived connection.
    MAX_CLOSED_STREAMS = 2048

    def __init__(self) -> None:
        # Validating our own headers would cost more than encoding them.
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
        """Parse received bytes, and check sizes early: h2 checks a frame once it is complete, and a header block at its end."""
        batch = self.receive_data(data)
        rest = self.incoming_buffer._data
        if len(rest) >= 3 and int.from_bytes(rest[:3], "big") > self.max_inbound_frame_size:
            self.close_connection(ErrorCodes.FRAME_SIZE_ERROR)
            raise FrameTooLargeError
        if sum(len(frame.data) for frame in self.incoming_buffer._headers_buffer) > HEAD_BLOCK_BYTES_MAX:
            self.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
            raise DenialOfServiceError
        return batch

    def goaway(self) -> bytes:
        """A GOAWAY that keeps open streams alive: after close_connection() h2 would send nothing more on them."""
        return GoAwayFrame(0, last_stream_id=self.highest_inbound_stream_id).serialize()

    def limit_settings(self) -> bool:
        """Limit the client's settings after a change. Returns False if there are too many."""
        # Not min(): assigning the current size makes hpack forget a change that is not announced yet.
        if self.encoder.header_table_size > ENCODER_TABLE_BYTES_MAX:  # noqa: PLR1730
            self.encoder.header_table_size = ENCODER_TABLE_BYTES_MAX
        # The next header block announces these changes. At most two are allowed: the smallest and the last.
        if len(changes := self.encoder.table_size_changes) > 2:
            self.encoder.table_size_changes = [min(changes), changes[-1]]
        return len(self.remote_settings) <= REMOTE_SETTINGS_MAX

    def _begin_new_stream(self, stream_id: int, allowed_ids: AllowedStreamIDs) -> H2Stream:
        """Disable h2's check of the body length: it would close the connection, where resetting the stream is enough.

        curl ends its body early if it gets the response before it has sent everything.
        """
        stream = super()._begin_new_stream(stream_id, allowed_ids)
        stream._track_content_length = _ignore  # type: ignore[method-assign]
        return stream

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[events.Event]]:
        """Keep the connection open: h2 would close both directions, but the client still waits for its open streams."""
        return [], [events.ConnectionTerminated()]


def _ignore(length: int, end_stream: bool) -> None:
    pass


def read_head(headers: Headers, now_us: int) -> tuple[Request, int | None, bool]:
    """The request without its body, the declared length, and whether the client waits for a 100 Continue."""
    found = collect_fields(headers)
    # Only CONNECT has no path.
    path, _, query = found.get(b":path", b"/").partition(b"?")
    request = Request(found[b":method"], path, query, now_us)
    set_fields(request, found)
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
