"""Read-ahead: fetches the next items in a background thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")

DEPTH = 2  # queued items; with the one being fetched and the one in use, four pages are in memory


def read_ahead(items: Iterator[T], depth: int = DEPTH) -> Iterator[T]:
    """Iterate in a background thread and yield the items. Closing the generator ends the thread."""
    ready: queue.Queue[tuple[str, T | BaseException | None]] = queue.Queue(depth)
    closed = threading.Event()

    def put(kind: str, item: T | BaseException | None) -> bool:
        while not closed.is_set():
            try:
                ready.put((kind, item), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def fetch() -> None:
        try:
            for item in items:
                if not put("item", item):
                    return
            put("end", None)
        except BaseException as error:
            put("error", error)

    threading.Thread(target=fetch, name="read-ahead", daemon=True).start()
    try:
        while True:
            kind, item = ready.get()
            if kind == "end":
                return
            if kind == "error":
                assert isinstance(item, BaseException)
                raise item
            yield item  # type: ignore[misc]
    finally:
        closed.set()
