"""OpenTelemetry spans, one per request; docs/tracing.md.

This module is only imported if spans are enabled (`topics.system.settings.wants_spans`). A thread of the SDK sends them
from a bounded buffer and drops those that do not fit, so an unreachable collector does not slow down requests.

The `traceparent` stored with a record is the client's, not that of this span: spans of readers are siblings of this one.
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
from topics.api.traces import read_traceparent
from topics.protocols.http.admission import PATHS_CACHED_MAX, Admission
from topics.protocols.http.exchange import Request, Respond, Response

logger = logging.getLogger("topics.front")

FLUSH_S = 2.0  # part of the time that a front has to stop
_NAMED = (b"topics", b"routers", b"watch")  # path segments that are followed by a name
_NESTED = (b"consumers", b"consolidation", b"snapshots", b"transactions")


class Spans:
    """Sends spans to the OTLP endpoint of the standard environment variables."""

    def __init__(self, front: int) -> None:
        os.environ.setdefault("OTEL_SERVICE_NAME", "topics")
        # `flush` is called before the process exits; the SDK's exit handler would wait for an unreachable collector.
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self.tracer = self.provider.get_tracer("topics.front", topics.__version__)
        self.front = front

    def admission(self, *arguments: Any) -> Admission:
        return TracedAdmission(self, *arguments)

    def flush(self) -> None:
        """Send buffered spans. Blocks for at most FLUSH_S; on a thread, because the SDK may exceed its timeout."""
        flushing = threading.Thread(target=self.provider.force_flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)
        if flushing.is_alive():
            logger.warning("not all spans were sent before shutdown; is the collector reachable?")


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
            span.end()  # for a stream at its start: it may last for days
            respond(response)

        super().handle(request, answered)

    def _route(self, path: bytes) -> str:
        """The path with placeholders for names, as span names must have low cardinality; empty for unknown paths."""
        route = self._routes.get(path)
        if route is None:
            match = self._matches.get(path) or self._match(path)
            route = route_of(path) if match[0] is not None else ""
            if len(self._routes) >= PATHS_CACHED_MAX:
                self._routes.clear()
            self._routes[path] = route
        return route


def route_of(path: bytes) -> str:
    parts = path.split(b"/")  # the first is empty
    if len(parts) > 3 and parts[2] in _NAMED:
        parts[3] = b"{%b}" % parts[2].rstrip(b"s")
    if len(parts) > 5 and parts[4] in _NESTED:
        parts[5] = b"{%b}" % parts[4].rstrip(b"s")
    return b"/".join(parts).decode("ascii", "replace")


def parent_of(header: bytes) -> Any:
    """The parent context of a request; None if it starts a trace."""
    traceparent = read_traceparent(header) if header else ""
    if not traceparent:
        return None
    _, trace_id, span_id, flags = traceparent.split("-")
    context = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)))
    return trace.set_span_in_context(NonRecordingSpan(context))
