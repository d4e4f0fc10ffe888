"""Spans of requests for OpenTelemetry, one for each that comes through the gate; docs/tracing.md.

Nothing of this is imported unless spans are wanted (`topics.system.settings.wants_spans`), and the gate without spans knows nothing of
them. They are sent by a thread of the SDK's, from a buffer with a bound; what does not fit is dropped there, and a collector
that is away costs requests nothing.

The record's own parent stays what the client said: the span here is a sibling of whoever reads the record later.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

import topics
from router.requests.admission import PLACES_MAX, Admission
from topics.api.traces import read_traceparent
from topics.protocols.http.exchange import Request, Respond, Response

logger = logging.getLogger("topics.front")

FLUSH_S = 2.0  # of the time that the front has to stop
_NAMED = (b"topics", b"routers", b"watch")  # whose next part of a path is a name
_NESTED = (b"consumers", b"consolidation", b"snapshots", b"transactions")


class Spans:
    """Where spans go: to the OTLP endpoint that the standard variables name."""

    def __init__(self, front: int) -> None:
        os.environ.setdefault("OTEL_SERVICE_NAME", "topics")
        # A process that ends has flushed, as far as it could; the SDK's own way out would wait for a collector that is away.
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self.tracer = self.provider.get_tracer("topics.front", topics.__version__)
        self.front = front

    def gate(self, *arguments: Any) -> Admission:
        return TracedAdmission(self, *arguments)

    def flush(self) -> None:
        """Send what is there. Blocks, for FLUSH_S at most: the SDK itself may wait longer than it is told to."""
        flushing = threading.Thread(target=self.provider.force_flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)
        if flushing.is_alive():
            logger.warning("spans could not be sent before the end; is the collector there?")


class TracedAdmission(Admission):
    def __init__(self, spans: Spans, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.spans = spans
        self._routes: dict[bytes, str] = {}

    def handle(self, request: Request, respond: Respond) -> None:
        method = request.method.decode("ascii", "replace")
        route = self._route(request.path)
        attributes: dict[str, Any] = {
            "http.request.method": method,
            "url.path": request.path.decode("ascii", "replace"),
            "http.request.body.size": len(request.body),
            "topics.front": self.spans.front,
        }
        if route:
            attributes["http.route"] = route
        span = self.spans.tracer.start_span(
            f"{method} {route}" if route else method,
            parent_of(request.traceparent),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )

        def answered(response: Response) -> None:
            span.set_attribute("http.response.status_code", response.status)
            if response.status >= 500:
                span.set_status(Status(StatusCode.ERROR))
            span.end()  # of a stream this is its beginning: it may go on for days
            respond(response)

        super().handle(request, answered)

    def _route(self, path: bytes) -> str:
        """The path with words for the names in it; empty when there is no such path. Names are no names of spans."""
        known = self._routes.get(path)
        if known is None:
            place = self._places.get(path) or self._find_place(path)
            known = route_of(path) if place[0] is not None else ""
            if len(self._routes) >= PLACES_MAX:
                self._routes.clear()
            self._routes[path] = known
        return known


def route_of(path: bytes) -> str:
    parts = path.split(b"/")  # the first is empty
    if len(parts) > 3 and parts[2] in _NAMED:
        parts[3] = b"{%b}" % parts[2].rstrip(b"s")
    if len(parts) > 5 and parts[4] in _NESTED:
        parts[5] = b"{%b}" % parts[4].rstrip(b"s")
    return b"/".join(parts).decode("ascii", "replace")


def parent_of(header: bytes) -> Any:
    """The context that a request belongs to; None: it begins a trace."""
    traceparent = read_traceparent(header) if header else ""
    if not traceparent:
        return None
    _, trace_id, span_id, flags = traceparent.split("-")
    context = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)))
    return trace.set_span_in_context(NonRecordingSpan(context))
