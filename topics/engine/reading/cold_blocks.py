"""Block cache and fetch queue of the cold tier.

    plan        the reader needs blocks that are not in the cache, and raises ColdMiss
    wait        the request waits for its blocks; a few fetches run at a time, and waiting requests share them
    resume      the blocks are in the cache, and the read runs again before anything is evicted

A block is the range covered by one digest in .sum, and is compared with it on the thread that reads it. A block that does
not match is kept: its records have their own digests, and the damaged ones become announced losses.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TypeAlias

from topics.api.errors import ColdStoreFailed, Throttled, TopicsError
from topics.api.limits import (
    COLD_FETCH_BLOCKS,
    COLD_FETCHES_MAX,
    COLD_HELD_BYTES_MAX,
    COLD_READERS_MAX,
    COLD_RETRY_MS,
)
from topics.engine.core.ports import SegmentStore
from topics.engine.storage.files import xxh
from topics.engine.storage.segments import BLOCK_BYTES

READ_KIND = "cold_read"

SegmentKey: TypeAlias = tuple[int, int, int]  # topic, first seq, generation
BlockKey: TypeAlias = tuple[int, int, int, int]  # and the block's number
Block: TypeAlias = tuple[bytes, bool]  # the bytes, and whether they match their digest
Submit: TypeAlias = Callable[
    [str, Callable[[], object], Callable[[object, BaseException | None], None]], None
]
Resume: TypeAlias = Callable[[TopicsError | None], None]


@dataclass(slots=True)
class SegmentWant:
    """Blocks of one segment that a read needs, ascending."""

    segment: SegmentKey
    path: str
    data_bytes: int
    digests: list[bytes] | None  # None: .sum cannot be read
    blocks: list[int]


class ColdMiss(TopicsError):
    """A read needs blocks of the cold tier that are not in the cache. Never sent to a client: the request waits and runs again."""

    def __init__(self, wants: list[SegmentWant]) -> None:
        super().__init__("the records are in the cold tier")
        self.wants = wants

    @property
    def count(self) -> int:
        return sum(len(want.blocks) for want in self.wants)


class BlockCache:
    """LRU cache of blocks; `trim` enforces its limit in bytes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._blocks: OrderedDict[BlockKey, Block] = OrderedDict()
        self._held: OrderedDict[BlockKey, None] = (
            OrderedDict()
        )  # fetched for a request that has not run again yet
        self._held_bytes = 0

    def get(self, key: BlockKey) -> Block | None:
        block = self._blocks.get(key)
        if block is not None:
            self._blocks.move_to_end(key)
            self._unhold(key)
        return block

    def peek(self, key: BlockKey) -> Block | None:
        """`get` without touching the LRU order or the hold."""
        return self._blocks.get(key)

    def hold(self, keys: list[BlockKey]) -> None:
        """Keep blocks until they are read. The request that waited for them runs in a later turn; if they were evicted before, it
        would wait forever."""
        for key in keys:
            if key in self._blocks and key not in self._held:
                self._held[key] = None
                self._held_bytes += len(self._blocks[key][0])
        while self._held_bytes > COLD_HELD_BYTES_MAX and len(self._held) > len(keys):
            self._unhold(next(iter(self._held)))

    def _unhold(self, key: BlockKey) -> None:
        if key in self._held:
            del self._held[key]
            self._held_bytes -= len(self._blocks[key][0])

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def put(self, key: BlockKey, block: Block) -> None:
        old = self._blocks.pop(key, None)
        grown = len(block[0]) - (len(old[0]) if old is not None else 0)
        self._bytes += grown
        self._held_bytes += grown if key in self._held else 0
        self._blocks[key] = block

    def trim(self) -> None:
        surplus = self._bytes - self._bytes_max
        dropped: list[BlockKey] = []
        for key, block in self._blocks.items():
            if surplus <= 0:
                break
            if key not in self._held:
                dropped.append(key)
                surplus -= len(block[0])
        for key in dropped:
            self._bytes -= len(self._blocks.pop(key)[0])

    def forget_topic(self, topic_id: int) -> None:
        for key in [key for key in self._blocks if key[0] == topic_id]:
            self._unhold(key)
            self._bytes -= len(self._blocks.pop(key)[0])


@dataclass(slots=True, eq=False)
class _Waiter:
    resume: Resume
    needs: list[BlockKey]
    token: object
    name: object
    connection: int
    have: dict[BlockKey, Block] = field(default_factory=dict)
    fetches: int = 0
    done: bool = False


@dataclass(slots=True, eq=False)
class _Fetch:
    """One call for adjacent blocks of one segment."""

    want: SegmentWant
    first: int
    count: int
    waiters: list[_Waiter] = field(default_factory=list)

    def block_keys(self) -> list[BlockKey]:
        return [(*self.want.segment, self.first + i) for i in range(self.count)]


class ColdReads:
    """Requests that wait for blocks of the cold tier, and the fetches that bring them."""

    def __init__(self, store: SegmentStore | None, cache: BlockCache, submit: Submit) -> None:
        self._store = store
        self._cache = cache
        self._submit = submit
        self._by_block: dict[BlockKey, _Fetch] = {}
        self._queue: deque[_Fetch] = deque()
        self._running = 0
        self._waiters: dict[_Waiter, None] = {}
        self._named: dict[object, _Waiter] = {}
        self._retries: list[tuple[int, int, Callable[[], None]]] = []
        self._retry_count = 0
        self._stopped = False
        self.fetches = 0
        self.failures = 0

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    # -- waiting -------------------------------------------------------------------------------------------

    def wait(
        self,
        miss: ColdMiss,
        resume: Resume,
        *,
        token: object = None,
        name: object = None,
        connection: int = 0,
    ) -> None:
        """Call `resume` when the missing blocks are in the cache, or with the error if they cannot be read. A second wait with the
        same `name` is ignored."""
        if self._store is None:
            raise ColdStoreFailed("these records are in the cold tier; set TOPICS_COLD_DIR to read them")
        if self._stopped:
            raise ColdStoreFailed("the server is shutting down; try again shortly")
        if name is not None and name in self._named:
            return
        if len(self._waiters) >= COLD_READERS_MAX:
            raise Throttled(
                "too many reads are waiting for the cold tier; try again later",
                limit="cold_reads",
                max=COLD_READERS_MAX,
            )
        needs = [(*want.segment, block) for want in miss.wants for block in want.blocks]
        waiter = _Waiter(resume, needs, token, name, connection)
        self._waiters[waiter] = None
        if name is not None:
            self._named[name] = waiter
        for want in miss.wants:
            self._add_fetches(want, waiter)
        if not waiter.fetches:
            self._finish(waiter, None)
        self._start_fetches()

    def _add_fetches(self, want: SegmentWant, waiter: _Waiter) -> None:
        last = (want.data_bytes - 1) // BLOCK_BYTES
        fetch: _Fetch | None = None
        for block in want.blocks:
            key = (*want.segment, block)
            known = self._cache.peek(key)
            if known is not None:
                waiter.have[key] = known  # it may be evicted before the others arrive
                continue
            running = self._by_block.get(key)
            if running is None:
                if fetch is None or block != fetch.first + fetch.count or fetch.count >= COLD_FETCH_BLOCKS:
                    fetch = _Fetch(want, block, 0)
                    self._queue.append(fetch)
                fetch.count += 1
                self._by_block[key] = running = fetch
            if waiter not in running.waiters:
                running.waiters.append(waiter)
                waiter.fetches += 1
        if fetch is not None:
            self._read_ahead(fetch, last)

    def _read_ahead(self, fetch: _Fetch, last: int) -> None:
        """Extend a sequential fetch: reading several blocks by one call costs hardly more than reading one."""
        segment, first = fetch.want.segment, fetch.first
        if first and (*segment, first - 1) not in self._cache:
            return
        while fetch.count < COLD_FETCH_BLOCKS and first + fetch.count <= last:
            key = (*segment, first + fetch.count)
            if key in self._cache or key in self._by_block:
                return
            self._by_block[key] = fetch
            fetch.count += 1

    def withdraw(self, matches: Callable[[object], bool]) -> bool:
        """Cancel the waits whose token matches, without a call of `resume`; blocks being fetched still go to the cache."""
        found = [waiter for waiter in self._waiters if waiter.token is not None and matches(waiter.token)]
        for waiter in found:
            self._remove(waiter)
        return bool(found)

    def withdraw_connection(self, connection: int) -> None:
        for waiter in [waiter for waiter in self._waiters if waiter.connection == connection]:
            self._remove(waiter)

    # -- fetching ------------------------------------------------------------------------------------------

    def _start_fetches(self) -> None:
        while self._queue and self._running < COLD_FETCHES_MAX:
            fetch = self._queue.popleft()
            if not any(not waiter.done for waiter in fetch.waiters):
                self._forget(fetch)
                continue
            self._running += 1
            self._submit(READ_KIND, self._read_job(fetch), self._on_done(fetch))

    def _read_job(self, fetch: _Fetch) -> Callable[[], object]:
        store = self._store
        assert store is not None

        def read() -> list[Block]:
            blocks = _read_blocks(store, fetch)
            if not all(is_intact for _, is_intact in blocks):
                blocks = _read_blocks(store, fetch)  # the error may be in the transfer, not in the store
            return blocks

        return read

    def _on_done(self, fetch: _Fetch) -> Callable[[object, BaseException | None], None]:
        def done(value: object, error: BaseException | None) -> None:
            self._running -= 1
            self._forget(fetch)
            if error is not None:
                if not isinstance(error, OSError | TopicsError):
                    raise error
                self.failures += 1
                self._fail(fetch, error)
            elif not self._stopped:
                self.fetches += 1
                assert isinstance(value, list)
                self._arrived(fetch, value)
            self._start_fetches()

        return done

    def _forget(self, fetch: _Fetch) -> None:
        for key in fetch.block_keys():
            if self._by_block.get(key) is fetch:
                del self._by_block[key]

    def _arrived(self, fetch: _Fetch, blocks: list[Block]) -> None:
        found = dict(zip(fetch.block_keys(), blocks, strict=True))
        for key, block in found.items():
            self._cache.put(key, block)
        for waiter in fetch.waiters:
            if waiter.done:
                continue
            waiter.have.update((key, found[key]) for key in waiter.needs if key in found)
            waiter.fetches -= 1
            if not waiter.fetches:
                self._finish(waiter, None)

    def _fail(self, fetch: _Fetch, error: BaseException) -> None:
        path = fetch.want.path
        reason = "is missing there" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        for waiter in fetch.waiters:
            if not waiter.done:
                self._finish(waiter, ColdStoreFailed(f"{path} of the cold tier {reason}", path=path))

    def _finish(self, waiter: _Waiter, error: TopicsError | None) -> None:
        self._remove(waiter)
        for key, block in waiter.have.items():
            self._cache.put(key, block)
        if waiter.name is not None:
            self._cache.hold(waiter.needs)  # without a name `resume` reads them at once
        waiter.resume(error)

    def _remove(self, waiter: _Waiter) -> None:
        waiter.done = True
        del self._waiters[waiter]
        if waiter.name is not None:
            self._named.pop(waiter.name, None)

    # -- retries -------------------------------------------------------------------------------------------

    def retry_later(self, now_ms: int, retry: Callable[[], None]) -> None:
        """Call `retry` after a delay: for failed work that no client waits for."""
        self._retry_count += 1
        heappush(self._retries, (now_ms + COLD_RETRY_MS, self._retry_count, retry))

    @property
    def due_ms(self) -> int | None:
        """When the next retry is due."""
        return self._retries[0][0] if self._retries else None

    def pass_time(self, now_ms: int) -> None:
        """Run the retries that are due."""
        while self._retries and self._retries[0][0] <= now_ms:
            heappop(self._retries)[2]()

    def stop(self) -> None:
        """Start nothing more, and fail what waits: a store may be slow."""
        self._stopped = True
        self._queue.clear()
        self._retries.clear()
        for waiter in list(self._waiters):
            self._finish(waiter, ColdStoreFailed("the server is shutting down; try again shortly"))


def _read_blocks(store: SegmentStore, fetch: _Fetch) -> list[Block]:
    want = fetch.want
    start = fetch.first * BLOCK_BYTES
    end = min(start + fetch.count * BLOCK_BYTES, want.data_bytes)
    data = store.read_range(want.path, start, end - start)
    if len(data) != end - start:
        raise ColdStoreFailed(
            f"{want.path} of the cold tier ends {end - start - len(data)} bytes early", path=want.path
        )
    blocks: list[Block] = []
    for i in range(fetch.count):
        block = data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] if fetch.count > 1 else data
        blocks.append((block, want.digests is not None and xxh(block) == want.digests[fetch.first + i]))
    return blocks
