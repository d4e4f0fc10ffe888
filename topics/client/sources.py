"""Sources of items for iteration, without I/O: a buffer of items, and a flow that fetches more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from topics.client.answers import Page, Record, Tombstone
from topics.client.errors import RecordsLost
from topics.client.flows import Flow

T = TypeVar("T")
OnLost = Callable[[Tombstone], None]


class Source(Generic[T]):
    """An iterator calls `take` until the buffer is empty, and then runs `more`."""

    def begin(self) -> Flow[None]:
        """Fix the start position ("now"). Without this call, the first `more` does."""
        return
        yield

    def take(self) -> T | None:
        """The next buffered item, if any."""
        raise NotImplementedError

    def more(self) -> Flow[bool]:
        """Fetch more items. False: there will be no more."""
        raise NotImplementedError

    def close(self) -> Flow[None]:
        """Release the connection."""
        return
        yield

    @property
    def cursors(self) -> dict[str, int]:
        """By topic: the seq after which to continue later."""
        return {}

    @property
    def epochs(self) -> dict[str, str]:
        """By topic: the epoch of its cursor."""
        return {}


class Pages(Source[T]):
    """A paginated list; each page contains the cursor of the next one."""

    def __init__(self, fetch: Callable[[str | None], Flow[tuple[list[T], str | None]]]) -> None:
        self._fetch = fetch
        self._rows: deque[T] = deque()
        self._cursor: str | None = None

    def take(self) -> T | None:
        return self._rows.popleft() if self._rows else None

    def more(self) -> Flow[bool]:
        rows, self._cursor = yield from self._fetch(self._cursor)
        self._rows.extend(rows)
        return self._cursor is not None


class RecordPages(Source[Record]):
    """The records of a topic up to its current end, page by page."""

    def __init__(
        self,
        topic: str,
        read: Callable[[int, str | None], Flow[Page]],
        from_seq: int | None,
        on_lost: OnLost | None,
        epoch: str | None = None,
    ) -> None:
        self._topic, self._read, self._on_lost = topic, read, on_lost
        # Reading from the oldest record: what was deleted before it is not a loss.
        self._from_oldest = from_seq is None
        self._from_seq = from_seq or 0
        self._seen = self._from_seq
        self._epoch = self._seen_epoch = epoch
        self._lost: Tombstone | None = None
        self._records: deque[Record] = deque()

    def take(self) -> Record | None:
        lost, self._lost = self._lost, None
        if lost is not None or self._records:
            self._seen_epoch = self._epoch
        if lost is not None:
            self._seen = lost.cursor_after(self._seen)
            if self._on_lost is None:
                raise RecordsLost(lost)
            self._on_lost(lost)
        if not self._records:
            return None
        record = self._records.popleft()
        self._seen = record.seq if self._records else self._from_seq
        return record

    def more(self) -> Flow[bool]:
        page = yield from self._read(self._from_seq, self._epoch)
        self._epoch = page.epoch or self._epoch
        lost = page.tombstone
        is_loss = lost is not None and not (self._from_oldest and lost.gap_from == 1)
        self._lost = lost if is_loss else None
        self._from_oldest = False
        self._records.extend(page.records)
        self._from_seq = page.next_from_seq
        if not self._records and self._lost is None:
            self._seen, self._seen_epoch = self._from_seq, self._epoch
        return not page.caught_up

    @property
    def cursors(self) -> dict[str, int]:
        return {self._topic: self._seen}

    @property
    def epochs(self) -> dict[str, str]:
        return {self._topic: self._seen_epoch} if self._seen_epoch else {}
