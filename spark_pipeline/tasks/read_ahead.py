"""The next page is fetched while the last one is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")

DEPTH = 2  # items that wait; with the one in work and the one in use a reader holds four pages


def read_ahead(items: Iterator[T], depth: int = DEPTH) -> Iterator[T]:
    """The same items, made on another thread. Leaving early ends that thread."""
    waiting: queue.Queue[tuple[str, T | BaseException | None]] = queue.Queue(depth)
    left = threading.Event()

    def put(kind: str, item: T | BaseException | None) -> bool:
        while not left.is_set():
            try:
                waiting.put((kind, item), timeout=0.1)
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
            kind, item = waiting.get()
            if kind == "end":
                return
            if kind == "error":
                assert isinstance(item, BaseException)
                raise item
            yield item  # type: ignore[misc]
    finally:
        left.set()
