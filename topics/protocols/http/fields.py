"""Header fields that a request passes on, the same for all HTTP versions."""

from __future__ import annotations

from collections.abc import Iterable

from topics.protocols.http.exchange import Request

_FIELDS = {
    b"content-type": "content_type",
    b"content-encoding": "content_encoding",
    b"authorization": "authorization",
    b"accept": "accept",
    b"accept-encoding": "accept_encoding",
    b"idempotency-key": "idempotency_key",
    b"traceparent": "traceparent",
    b"topics-strict": "strict",
    b"host": "host",
    b":authority": "host",  # of HTTP/2; h2 has checked that both are equal
    b"origin": "origin",
    b"sec-fetch-site": "fetch_site",
    b"last-event-id": "last_event_id",
}
# Headers that may be repeated, joined by commas; a joined traceparent or origin is invalid. Of others the first counts.
_LISTS = frozenset((b"content-encoding", b"accept", b"accept-encoding", b"traceparent", b"origin"))


def collect_fields(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """One value for each name. Names are in lower case."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name not in found:
            found[name] = value
        elif name in _LISTS:
            found[name] += b", " + value
    return found


def set_fields(request: Request, found: dict[bytes, bytes]) -> None:
    for name, attribute in _FIELDS.items():
        if name in found:
            setattr(request, attribute, found[name])
