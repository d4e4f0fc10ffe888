"""Streams of jobs: endless versions of claim and fetch. Jobs not settled when the stream breaks are redelivered."""

from __future__ import annotations

from topics.client.answers import Job, Tombstone
from topics.client.calls import topic_path
from topics.client.errors import ApiError, ConsumerNotFound, NotAQueue, RecordsLost, TopicNotFound
from topics.client.flows import Core, Flow, Request, with_query
from topics.client.queue_calls import consumer_path, fill_in_holder
from topics.client.sources import OnLost, Source
from topics.client.sse import Event
from topics.client.streams import ReconnectingStream


class JobStream(ReconnectingStream[Job | Tombstone]):
    """Jobs of a queue, or of a consumer if one is given."""

    def __init__(
        self,
        core: Core,
        path: str,
        topic: str,
        consumer: str | None,
        max: int,
        lease_ms: int | None,
        node: str,
    ) -> None:
        super().__init__(core)
        self._path = with_query(path, {"node": node, "max": max, "lease_ms": lease_ms})
        self._topic, self._consumer, self._node = topic, consumer, node

    def _prepare(self) -> Flow[Request]:
        return Request("GET", self._path, None, {"Accept": "text/event-stream"})
        yield

    def _handle(self, event: Event) -> None:
        match event.name:
            case "job" | "record":
                job = self._core.decoded(event.data, Job)
                fill_in_holder(self._topic, self._consumer, self._node, [job])
                self._items.append(job)
            case "tombstone":
                self._items.append(self._core.decoded(event.data, Tombstone))
            case _:  # of a newer server
                pass

    def _handle_error(self, code: int | str, message: str, topic: str) -> None:
        detail = {"topic": self._topic}
        if code == 404:
            kind: type[ApiError] = TopicNotFound if self._consumer is None else ConsumerNotFound
            raise kind(404, kind.code, message, detail)
        if code == 409:
            raise NotAQueue(409, NotAQueue.code, message, detail)
        super()._handle_error(code, message, topic)


class JobSource(Source[Job]):
    """The jobs of a stream; tombstones are reported."""

    def __init__(self, stream: JobStream, on_lost: OnLost | None) -> None:
        self._stream, self._on_lost = stream, on_lost

    def take(self) -> Job | None:
        while True:
            item = self._stream.take()
            if not isinstance(item, Tombstone):
                return item
            if self._on_lost is None:
                raise RecordsLost(item)
            self._on_lost(item)

    def begin(self) -> Flow[None]:
        return self._stream.begin()

    def more(self) -> Flow[bool]:
        return self._stream.more()

    def close(self) -> Flow[None]:
        return self._stream.close()


def work(
    core: Core, queue: str, max: int = 1, *, lease_ms: int | None = None, node: str | None = None
) -> Source[Job]:
    """Stream jobs of a queue, at most `max` unsettled at a time; ack them as usual. Reconnects automatically.

    When the connection breaks, or this is closed, unsettled jobs are redelivered at once. A `worker` keeps its jobs
    across broken connections.
    """
    holder = node or core.node
    return JobSource(JobStream(core, topic_path(queue, "work"), queue, None, max, lease_ms, holder), None)


def consume(
    core: Core,
    topic: str,
    consumer: str,
    max: int = 100,
    *,
    lease_ms: int | None = None,
    node: str | None = None,
    on_lost: OnLost | None = None,
) -> Source[Job]:
    """Stream records of a consumer, at most `max` unsettled at a time; ack them as usual. Reconnects automatically.

    Records that the consumer has lost raise RecordsLost, or call `on_lost`.
    """
    holder = node or core.node
    path = consumer_path(topic, consumer, "stream")
    return JobSource(JobStream(core, path, topic, consumer, max, lease_ms, holder), on_lost)
