"""A user's program with tracing, run as a process of its own, because a tracer provider is global to a process.

    python -m tests.support.traced_program URL blocking|asyncio

Spans are exported as the OTEL_… variables say. It prints the records that it read as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from topics import AsyncClient, Client
from topics.client import GiveUp, Job
from topics.client.errors import TopicNotFound
from topics.client.tracing import context_of

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("program")


def blocking(url: str) -> Any:
    with Client(url) as client:
        client.create_topic("jobs", type="queue")
        with tracer.start_as_current_span("order"):
            client.write("jobs", {"item": "tea"})
        with tracer.start_as_current_span("many"), client.producer("batched") as producer:
            producer.send(1)
        producer = client.producer("batched")
        producer.send(2)  # outside of any trace
        producer.close()

        def handle(job: Job) -> None:
            client.write("done", job.data)
            worker.stop()
            raise GiveUp("once is enough")

        worker = client.worker("jobs", handle, poll_ms=100)
        worker.run()
        with tracer.start_as_current_span("look"):
            client.get_topic("jobs")
            try:
                client.write("none", 1, create=False)
            except TopicNotFound:
                pass
        (record,) = client.records("done")
        with tracer.start_as_current_span("read later", context=context_of(record)):
            pass
        return {topic: [record.meta for record in client.records(topic)] for topic in ("done", "batched")}


async def asynchronous(url: str) -> Any:
    async with AsyncClient(url) as client:
        await client.create_topic("jobs", type="queue")
        with tracer.start_as_current_span("order"):
            await client.write("jobs", {"item": "tea"})
        producer = client.producer("batched")
        with tracer.start_as_current_span("many"):
            await producer.send(1)
        await producer.send(2)  # outside of any trace; the producer's task was started inside one
        await producer.close()

        async def handle(job: Job) -> None:
            await client.write("done", job.data)
            worker.stop()
            raise GiveUp("once is enough")

        worker = client.worker("jobs", handle, poll_ms=100)
        await worker.run()
        with tracer.start_as_current_span("look"):
            await client.get_topic("jobs")
            try:
                await client.write("none", 1, create=False)
            except TopicNotFound:
                pass
        (record,) = [record async for record in client.records("done")]
        with tracer.start_as_current_span("read later", context=context_of(record)):
            pass
        return {
            topic: [record.meta async for record in client.records(topic)] for topic in ("done", "batched")
        }


if __name__ == "__main__":
    _, address, kind = sys.argv
    found = blocking(address) if kind == "blocking" else asyncio.run(asynchronous(address))
    provider.shutdown()
    print(json.dumps(found))
