"""Jobs as they come: a claim, or a fetch, without an end. What is not settled when the stream breaks is handed out again."""

from __future__ import annotations

from topics.client.answers import Job, Tombstone
from topics.client.calls import topic_path
from topics.client.errors import ApiError, ConsumerNotFound, NotAQueue, RecordsLost, TopicNotFound
from topics.client.event_stream import Event
from topics.client.flows import Core, Flow, Request, with_query
from topics.client.queue_calls import consumer_path, hold
from topics.client.sources import OnLost, Source
from topics.client.streams import Streaming


class Working(Streaming[Job | Tombstone]):
    """`consumer` is None for a queue's own."""

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

    def _take(self, event: Event) -> None:
        match event.name:
            case "job" | "record":
                job = self._core.decoded(event.data, Job)
                hold(self._topic, self._consumer, self._node, [job])
                self._items.append(job)
            case "tombstone":
                self._items.append(self._core.decoded(event.data, Tombstone))
            case _:  # of a later version
                pass

    def _ends(self, code: int | str, message: str, topic: str) -> None:
        detail = {"topic": self._topic}
        if code == 404:
            kind: type[ApiError] = TopicNotFound if self._consumer is None else ConsumerNotFound
            raise kind(404, kind.code, message, detail)
        if code == 409:
            raise NotAQueue(409, NotAQueue.code, message, detail)
        super()._ends(code, message, topic)


class JobsOf(Source[Job]):
    """The jobs of a stream, without what else it tells."""

    def __init__(self, working: Working, on_lost: OnLost | None) -> None:
        self._working, self._on_lost = working, on_lost

    def take(self) -> Job | None:
        while True:
            item = self._working.take()
            if not isinstance(item, Tombstone):
                return item
            if self._on_lost is None:
                raise RecordsLost(item)
            self._on_lost(item)

    def begin(self) -> Flow[None]:
        return self._working.begin()

    def more(self) -> Flow[bool]:
        return self._working.more()

    def close(self) -> Flow[None]:
        return self._working.close()


def work(
    core: Core, queue: str, max: int = 1, *, lease_ms: int | None = None, node: str | None = None
) -> Source[Job]:
    """Jobs of a queue as they come, at most `max` in hand at a time; ack them as any. It comes back by itself.

    When the connection breaks, or this is closed, what is not settled is handed out again at once. `worker` keeps
    its jobs over broken connections.
    """
    who = node or core.node
    return JobsOf(Working(core, topic_path(queue, "work"), queue, None, max, lease_ms, who), None)


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
    """Records of a consumer as they come, at most `max` in hand at a time; ack them as any. It comes back by itself.

    Records that this consumer will never get raise RecordsLost, or are told to `on_lost`.
    """
    who = node or core.node
    path = consumer_path(topic, consumer, "stream")
    return JobsOf(Working(core, path, topic, consumer, max, lease_ms, who), on_lost)
