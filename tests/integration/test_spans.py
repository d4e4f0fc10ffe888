"""Goal: one trace connects a program's span, its write, the server and the worker that processes the record; tracing is off by default.

Method: a real server and a real program, each with the OpenTelemetry SDK, and a collector that receives their spans over OTLP.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.otlp_receiver import OtlpReceiver, Span, collecting
from tests.support.server import PATIENCE_S, ROOT, running
from topics.system.settings import Settings, wants_spans

SERVER, CLIENT, PRODUCER, CONSUMER = 2, 3, 4, 5  # kinds of spans, as OTLP has them
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100"}


@pytest.fixture(scope="module", params=["blocking", "asyncio"])
def spans_and_output(
    request: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[OtlpReceiver, Any]]:
    """The collector's spans, and the output of the program."""
    with collecting() as receiver:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, **SOON}
        with running(tmp_path_factory.mktemp("traced"), environment=environ) as server:
            program = subprocess.run(
                [sys.executable, "-m", "tests.support.traced_program", f"http://{server.host}:{server.port}", request.param],
                cwd=ROOT,
                env={**os.environ, **environ, "OTEL_SERVICE_NAME": "program"},
                capture_output=True,
                text=True,
                timeout=4 * PATIENCE_S,
                check=False,
            )  # fmt: skip
            assert program.returncode == 0, program.stderr
            assert server.stop() == 0
        # Both have ended, and have sent all their spans.
        yield receiver, json.loads(program.stdout)


def test_a_trace_from_the_span_of_a_program_to_its_worker(spans_and_output: tuple[OtlpReceiver, Any]) -> None:
    receiver, _ = spans_and_output
    order, publish = receiver.one("order"), receiver.one("publish jobs")
    receive, process = receiver.one("receive jobs"), receiver.one("process jobs")
    assert (publish.parent_id, process.parent_id) == (order.span_id, publish.span_id)
    assert publish.trace_id == process.trace_id == order.trace_id
    assert (publish.kind, receive.kind, process.kind) == (PRODUCER, CLIENT, CONSUMER)
    assert receive.links == [publish.span_id]
    # The records that the handler wrote belong to the trace, too, and so does their processing.
    done, later = receiver.one("publish done"), receiver.one("read later")
    assert (done.parent_id, later.parent_id) == (process.span_id, done.span_id)
    assert later.trace_id == order.trace_id
    assert process.is_error  # the handler gave up


def test_records_carry_it(spans_and_output: tuple[OtlpReceiver, Any]) -> None:
    receiver, printed = spans_and_output
    (done,) = printed["done"]
    assert ids_in(done) == ids_of(receiver.one("publish done"))
    # Each record of a batching producer has the trace of its own send().
    batched, in_none = printed["batched"]
    assert ids_in(batched) == ids_of(receiver.one("many"))
    assert in_none is None


def ids_in(meta: dict[str, str]) -> list[str]:
    (traceparent,) = meta.values()
    return traceparent.split("-")[1:3]


def ids_of(span: Span) -> list[str]:
    return [span.trace_id, span.span_id]


def test_the_server_has_a_span_for_each_request(spans_and_output: tuple[OtlpReceiver, Any]) -> None:
    receiver, _ = spans_and_output
    spans = [span for span in receiver.spans if span.service == "topics"]
    assert {span.kind for span in spans} == {SERVER}
    publish = receiver.one("publish jobs")
    (write,) = [span for span in spans if span.parent_id == publish.span_id]
    assert (write.name, write.attributes["http.response.status_code"]) == ("POST /v0/topics/{topic}", 200)
    assert write.attributes["url.path"] == "/v0/topics/jobs"
    look = receiver.one("look")
    under = {span.name for span in spans if span.parent_id == look.span_id}
    assert under == {"GET /v0/topics/{topic}"}
    (claim, *_) = [span for span in spans if span.name == "POST /v0/topics/{topic}/claim"]
    assert claim.parent_id == ""


def test_a_write_that_fails_has_a_span_that_says_so(spans_and_output: tuple[OtlpReceiver, Any]) -> None:
    receiver, _ = spans_and_output
    failed = receiver.one("publish none")
    assert failed.is_error
    assert failed.parent_id == receiver.one("look").span_id


# ---- without tracing


def test_without_the_variables_opentelemetry_is_not_imported() -> None:
    code = "import router.front, topics.client.asynchronous, topics.client.worker, topics.cli.__main__, workers.process.supervisor"
    assert "opentelemetry" not in modules_of(f"{code}\nassert router.front.open_spans(0) is None")


def modules_of(code: str) -> str:
    text = f"{code}\nimport sys\nprint(*sys.modules)"
    return subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def test_an_unreachable_collector_does_no_harm(tmp_path: Path) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", **SOON}
    with running(tmp_path, environment=environ) as server:
        assert server.write("a", 1).status == 201
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"TOPICS_OTEL": "1"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
        ({"TOPICS_OTEL": "0", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"TOPICS_OTEL": "1", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_when_spans_are_wanted(environ: dict[str, str], wanted: bool) -> None:
    assert wants_spans(environ) is wanted


def test_wanted_without_the_packages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topics.system.settings.find_spec", lambda name: None)
    (problem,) = Settings(otel=True).problems()
    assert "topics[otel]" in problem
    assert Settings().problems() == []
