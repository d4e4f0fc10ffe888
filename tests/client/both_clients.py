"""Both clients behind one blocking interface, so that each test is written once: the async one runs in a loop on a thread."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from topics import AsyncClient, Client
from topics.client import AsyncItems, AsyncProducer, AsyncReceipt, AsyncWorker


class Loop:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        """Call it in the loop, and await the result if it is awaitable."""

        async def inside() -> Any:
            result = call()
            return await result if inspect.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(inside(), self.loop).result(timeout_s)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Blocking:
    """An object of the async client, wrapped for blocking use."""

    def __init__(self, loop: Loop, inner: Any) -> None:
        self._loop, self._inner = loop, inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._plain(self._loop.run(lambda: found(*args, **kwargs)))

        return call

    def _plain(self, result: Any) -> Any:
        if isinstance(result, AsyncItems | AsyncProducer | AsyncReceipt | AsyncWorker):
            return Blocking(self._loop, result)
        return result

    def result(self, timeout_s: float = 60.0) -> Any:
        """For a receipt."""

        async def wait() -> Any:
            return await self._inner

        return self._loop.run(wait, timeout_s)

    def worker(self, topic: str, handler: Callable[[Any], Any], **options: Any) -> Any:
        async def wrapped(job: Any) -> None:
            await asyncio.to_thread(handler, job)

        return self._plain(self._loop.run(lambda: self._inner.worker(topic, wrapped, **options)))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self._loop.run(self._inner.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Any:
        self._loop.run(self._inner.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run(lambda: self._inner.__aexit__(kind, error, trace))


def make(kind: str, loop: Loop, url: str | None, **options: Any) -> Any:
    return Client(url, **options) if kind == "threads" else Blocking(loop, AsyncClient(url, **options))
