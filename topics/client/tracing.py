"""OpenTelemetry spans of the client; see docs/tracing.md.

OpenTelemetry is used if the program has imported it, and never imported from here: programs that do not trace need no
package and pay one dict lookup per call. Records carry their trace context in `meta.traceparent`.

    publish   a write; it is the parent span of the records
    receive   a claim or fetch that returned records, linked to the spans that wrote them
    process   a worker's handler; its parent is the span that wrote the job
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from topics.api.traces import META_KEY, read_traceparent
from topics.client.answers import Job, Record, Written
from topics.client.flows import Core, Flow, Repeat, Request

LINKS_MAX = 128  # per span
_tracers: list[tuple[Any, Any]] = []  # the current provider and its tracer


def _api() -> Any:
    """opentelemetry.trace, or None."""
    return sys.modules.get("opentelemetry.trace")


def _tracer(api: Any) -> Any:
    provider = api.get_tracer_provider()
    if not _tracers or _tracers[0][0] is not provider:
        import topics

        _tracers[:] = [(provider, api.get_tracer("topics.client", topics.__version__))]
    return _tracers[0][1]


# -- trace contexts ----------------------------------------------------------------------------------------


def _text(context: Any) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags) & 255:02x}"


def current_traceparent() -> str:
    """The traceparent of the current span, or ""."""
    api = _api()
    if api is None:
        return ""
    context = api.get_current_span().get_span_context()
    return _text(context) if context.is_valid else ""


def traceparent_of(record: Record) -> str:
    """The traceparent that a record was written with, or ""."""
    value = record.meta.get(META_KEY) if isinstance(record.meta, Mapping) else None
    return read_traceparent(value.encode("ascii", "replace")) if isinstance(value, str) else ""


def _span_context(api: Any, traceparent: str) -> Any:
    _, trace_id, span_id, flags = traceparent.split("-")
    return api.SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=api.TraceFlags(int(flags, 16))
    )


def context_of(record: Record) -> Any:
    """The context of the span that wrote the record, for `start_as_current_span(…, context=…)`, or None."""
    api, traceparent = _api(), traceparent_of(record)
    if api is None or not traceparent:
        return None
    return api.set_span_in_context(api.NonRecordingSpan(_span_context(api, traceparent)))


# -- sending -----------------------------------------------------------------------------------------------


def traced(request: Request, traceparent: str) -> Request:
    if not traceparent:
        return request
    return dataclasses.replace(request, headers={**request.headers, META_KEY: traceparent})


def traced_meta(meta: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Add the current trace context to the meta of a record that a background thread will write later."""
    traceparent = current_traceparent()
    if not traceparent or (meta is not None and (not isinstance(meta, Mapping) or META_KEY in meta)):
        return meta
    return {**(meta or {}), META_KEY: traceparent}


def publish(core: Core, topic: str, count: int, request: Request, repeat: Repeat) -> Flow[Written]:
    """Send a write within a span."""
    api = _api()
    if api is None:
        return (yield from core.call(request, Written, repeat))
    span = _tracer(api).start_span(
        f"publish {topic}",
        kind=api.SpanKind.PRODUCER,
        attributes=_attributes(core, topic, "publish", "send", count),
    )
    try:
        context = span.get_span_context()
        if context.is_valid:
            request = traced(request, _text(context))
        written = yield from core.call(request, Written, repeat)
        span.set_attribute("topics.first_seq", written.first_seq)
        return written
    except BaseException as error:
        _fail(api, span, error)
        raise
    finally:
        span.end()


def _attributes(core: Core, topic: str, name: str, kind: str, count: int) -> dict[str, Any]:
    """Attributes named by OpenTelemetry's semantic conventions for messaging."""
    return {
        "messaging.system": "topics",
        "messaging.destination.name": topic,
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "messaging.batch.message_count": count,
        "messaging.client.id": core.node,
        "server.address": core.url,
    }


def _fail(api: Any, span: Any, error: BaseException) -> None:
    span.record_exception(error)
    span.set_status(api.Status(api.StatusCode.ERROR, str(error)))


# -- receiving ---------------------------------------------------------------------------------------------


def span_start_ns() -> int:
    """The start time for `trace_receive`; 0 without tracing."""
    return time.time_ns() if _api() is not None else 0


def trace_receive(core: Core, topic: str, records: Sequence[Record], since_ns: int) -> None:
    """Record a span for a call that returned records. Empty polls get none."""
    api = _api()
    if api is None or not records or not since_ns:
        return
    parents = dict.fromkeys(filter(None, map(traceparent_of, records)))
    links = [api.Link(_span_context(api, parent)) for parent in list(parents)[:LINKS_MAX]]
    attributes = _attributes(core, topic, "receive", "receive", len(records))
    span = _tracer(api).start_span(
        f"receive {topic}",
        kind=api.SpanKind.CLIENT,
        attributes=attributes,
        links=links,
        start_time=since_ns,
    )
    span.end()


@contextlib.contextmanager
def processing(core: Core, job: Job) -> Iterator[None]:
    """Run a handler within a span, so that what it writes belongs to the trace of the job."""
    api = _api()
    if api is None:
        yield
        return
    attributes = _attributes(core, job.topic, "process", "process", 1) | {
        "messaging.message.id": str(job.seq),
        "topics.deliveries": job.deliveries,
    }
    span = _tracer(api).start_span(
        f"process {job.topic}", context_of(job), kind=api.SpanKind.CONSUMER, attributes=attributes
    )
    try:
        with api.use_span(span, record_exception=False, set_status_on_exception=False):
            yield
    except BaseException as error:
        _fail(api, span, error)
        raise
    finally:
        span.end()
