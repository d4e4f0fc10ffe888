"""The blocking client."""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from topics.client import calls, job_streams, queue_calls, router_calls, transaction_calls, watch_streams
from topics.client.errors import ClientError
from topics.client.flows import (
    Close,
    Core,
    Effect,
    Flow,
    Open,
    Read,
    Retries,
    Send,
    Sleep,
    copy_signature,
)
from topics.client.http_pool import HttpPool
from topics.client.settings import Timeouts, make_settings
from topics.client.sources import Source

if TYPE_CHECKING:
    from topics.client.producer import Producer
    from topics.client.worker import Handler, Worker

P = ParamSpec("P")
T = TypeVar("T")


class Items(Generic[T]):
    """Iterator over the items of a call. It remains usable after an exception."""

    def __init__(self, client: Client, source: Source[T]) -> None:
        self._client, self._source = client, source
        self._has_more = True

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        while True:
            item = self._source.take()
            if item is not None:
                return item
            if not self._has_more:
                raise StopIteration
            self._has_more = self._client.run(self._source.more())

    @property
    def cursors(self) -> dict[str, int]:
        """By topic, the seq of the last item returned, to resume later with `tail(…, cursors=…)`."""
        return self._source.cursors

    @property
    def epochs(self) -> dict[str, str]:
        """By topic, the epoch of its cursor: `tail(…, cursors=…, epochs=…)` detects topics that were created again."""
        return self._source.epochs

    def close(self) -> None:
        """Close the stream."""
        self._has_more = False
        self._client.run(self._source.close())

    def __enter__(self) -> Self:
        self._client.run(self._source.begin())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _call(build: Callable[Concatenate[Core, P], Flow[T]]) -> Callable[Concatenate[Client, P], T]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(build(self._core, *args, **kwargs))

    copy_signature(method, build, "{}")
    return method


def _items(build: Callable[Concatenate[Core, P], Source[T]]) -> Callable[Concatenate[Client, P], Items[T]]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Items[T]:
        return Items(self, build(self._core, *args, **kwargs))

    copy_signature(method, build, "Items[{}]")
    return method


class Client:
    """Blocking, thread-safe client. The default URL is TOPICS_URL, or http://127.0.0.1:4000.

    With `raw=True`, the data of records is left undecoded (`msgspec.Raw`).
    `now`, `sleep` and `chance` replace the clock and randomness in tests.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        node: str | None = None,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        ssl_context: ssl.SSLContext | None = None,
        pool_size: int = 16,
        raw: bool = False,
        now: Callable[[], float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        chance: random.Random | None = None,
    ) -> None:
        settings = make_settings(
            url, token, node, timeouts, retries, ssl_context, now, chance, pool_size, raw
        )
        self._core = settings.core
        self._pool = HttpPool(settings)
        self._sleep = sleep

    @property
    def url(self) -> str:
        return self._core.url

    @property
    def node(self) -> str:
        """The name of this client as a lease holder."""
        return self._core.node

    def close(self) -> None:
        """Close all connections. Reads of open streams raise RuntimeError."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, flow: Flow[T]) -> T:
        """Drive a flow to its result."""
        try:
            effect = next(flow)
            while True:
                try:
                    result = self._perform(effect)
                except ClientError as error:
                    effect = flow.throw(error)
                else:
                    effect = flow.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value

    def _perform(self, effect: Effect) -> Any:
        match effect:
            case Send(request):
                return self._pool.send(request)
            case Read(stream):
                return stream.read()
            case Sleep(seconds):
                return self._sleep(seconds)
            case Open(request, idle_s):
                return self._pool.open(request, idle_s)
            case Close(stream):
                return stream.close()

    create_topic = _call(calls.create_topic)
    update_topic = _call(calls.update_topic)
    get_topic = _call(calls.get_topic)
    topics = _items(calls.topics)
    delete_topic = _call(calls.delete_topic)

    write = _call(calls.write)
    write_many = _call(calls.write_many)

    read = _call(calls.read)
    records = _items(calls.records)
    last = _call(calls.last)
    last_by_tag = _items(calls.last_by_tag)
    tags = _items(calls.tags)

    delete = _call(calls.delete)
    deleted_ranges = _items(calls.deleted_ranges)
    purge = _call(calls.purge)

    tail = _items(watch_streams.tail)
    watch = _items(watch_streams.watch)

    claim = _call(queue_calls.claim)
    fetch = _call(queue_calls.fetch)
    ack = _call(queue_calls.ack)
    nack = _call(queue_calls.nack)
    extend = _call(queue_calls.extend)
    term = _call(queue_calls.term)
    work = _items(job_streams.work)
    consume = _items(job_streams.consume)

    create_consumer = _call(queue_calls.create_consumer)
    get_consumer = _call(queue_calls.get_consumer)
    consumers = _items(queue_calls.consumers)
    delete_consumer = _call(queue_calls.delete_consumer)
    pause_consumer = _call(queue_calls.pause_consumer)
    resume_consumer = _call(queue_calls.resume_consumer)
    reset_consumer = _call(queue_calls.reset_consumer)

    begin_transaction = _call(transaction_calls.begin_transaction)
    stage = _call(transaction_calls.stage)
    commit_transaction = _call(transaction_calls.commit_transaction)
    abort_transaction = _call(transaction_calls.abort_transaction)
    write_batch = _call(transaction_calls.write_batch)

    create_router = _call(router_calls.create_router)
    get_router = _call(router_calls.get_router)
    routers = _items(router_calls.routers)
    delete_router = _call(router_calls.delete_router)

    health = _call(calls.health)
    ready = _call(calls.ready)
    wait_ready = _call(calls.wait_ready)
    metrics = _call(calls.metrics)
    metrics_text = _call(calls.metrics_text)

    def producer(
        self,
        topic: str,
        *,
        linger_ms: float = 5.0,
        max_batch_bytes: int = 1 << 20,
        max_buffer_bytes: int = 32 << 20,
        deliver_for_s: float = 60.0,
        send_timeout_s: float = 120.0,
    ) -> Producer:
        """Create a producer, which writes records in batches, in order and without duplicates. Close it, or use `with`."""
        from topics.client.producer import Batching, Producer

        options = Batching(linger_ms, max_batch_bytes, max_buffer_bytes, deliver_for_s, send_timeout_s)
        return Producer(self, topic, options)

    def worker(
        self,
        topic: str,
        handler: Handler,
        *,
        consumer: str | None = None,
        concurrency: int = 1,
        lease_ms: int = 30_000,
        poll_ms: int = 2_000,
        backoff: Retries | None = None,
        grace_s: float = 25.0,
    ) -> Worker:
        """Create a worker for a queue or a consumer; call its `run`. When the handler returns, the job is acked; when it raises, the job is retried."""
        from topics.client.worker import BACKOFF, Worker, WorkerOptions

        options = WorkerOptions(concurrency, lease_ms, poll_ms, backoff or BACKOFF, grace_s)
        return Worker(self, topic, handler, consumer, options)
