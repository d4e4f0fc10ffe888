"""Reading what lies in the cold tier: by blocks, off the loop, each block by one fetch however many want it.

    plan        the reader finds that a page needs blocks which are not in the cache, and raises ColdMiss
    wait        whoever asked is noted down with them; fetches begin, a few at a time
    resume      the blocks are in the cache, and the same question is asked again, before anything is dropped from it

A block is what one digest in .sum covers, and is compared with it on the thread that has read it. One that does not
agree is kept all the same: its records have digests of their own, and those that are wrong become announced losses.
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
Block: TypeAlias = tuple[bytes, bool]  # the bytes, and whether they agree with their digest
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
    digests: list[bytes] | None  # None: they cannot be read
    blocks: list[int]


class ColdMiss(TopicsError):
    """A read needs what only the cold tier has. Never an answer: whoever catches it waits and asks again."""

    def __init__(self, wants: list[SegmentWant]) -> None:
        super().__init__("what was asked for is in the cold tier")
        self.wants = wants

    @property
    def count(self) -> int:
        return sum(len(want.blocks) for want in self.wants)


class BlockCache:
    """Blocks that were read last, bounded by bytes once `trim` is called."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._blocks: OrderedDict[BlockKey, Block] = OrderedDict()
        self._held: OrderedDict[BlockKey, None] = OrderedDict()  # fetched for somebody who has yet to look
        self._held_bytes = 0

    def get(self, key: BlockKey) -> Block | None:
        block = self._blocks.get(key)
        if block is not None:
            self._blocks.move_to_end(key)
            self._let_go(key)
        return block

    def peek(self, key: BlockKey) -> Block | None:
        """As `get`, but not by those for whom it is held."""
        return self._blocks.get(key)

    def hold(self, keys: list[BlockKey]) -> None:
        """Whoever waited for these looks at them in a later turn: were they gone by then, it would wait for ever."""
        for key in keys:
            if key in self._blocks and key not in self._held:
                self._held[key] = None
                self._held_bytes += len(self._blocks[key][0])
        while self._held_bytes > COLD_HELD_BYTES_MAX and len(self._held) > len(keys):
            self._let_go(next(iter(self._held)))

    def _let_go(self, key: BlockKey) -> None:
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
            self._let_go(key)
            self._bytes -= len(self._blocks.pop(key)[0])


@dataclass(slots=True, eq=False)
class _Waiting:
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
    """Neighbouring blocks of one segment, by one call."""

    want: SegmentWant
    first: int
    count: int
    waiting: list[_Waiting] = field(default_factory=list)

    def block_keys(self) -> list[BlockKey]:
        return [(*self.want.segment, self.first + i) for i in range(self.count)]


class ColdReads:
    def __init__(self, store: SegmentStore | None, cache: BlockCache, submit: Submit) -> None:
        self._store = store
        self._cache = cache
        self._submit = submit
        self._by_block: dict[BlockKey, _Fetch] = {}
        self._line: deque[_Fetch] = deque()
        self._running = 0
        self._waiting: dict[_Waiting, None] = {}
        self._named: dict[object, _Waiting] = {}
        self._later: list[tuple[int, int, Callable[[], None]]] = []
        self._later_count = 0
        self._stopped = False
        self.fetches = 0
        self.failures = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

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
        """Call `resume` once what is missed is in the cache, or with the reason why it cannot be. Whoever has a `name`
        waits once."""
        if self._store is None:
            raise ColdStoreFailed("these records are in the cold tier; set TOPICS_COLD_DIR to read them")
        if self._stopped:
            raise ColdStoreFailed("the server stops; try again shortly")
        if name is not None and name in self._named:
            return
        if len(self._waiting) >= COLD_READERS_MAX:
            raise Throttled(
                "too many reads wait for the cold tier already; come back later",
                limit="cold_reads",
                max=COLD_READERS_MAX,
            )
        needs = [(*want.segment, block) for want in miss.wants for block in want.blocks]
        waiting = _Waiting(resume, needs, token, name, connection)
        self._waiting[waiting] = None
        if name is not None:
            self._named[name] = waiting
        for want in miss.wants:
            self._want(want, waiting)
        if not waiting.fetches:
            self._end(waiting, None)
        self._begin()

    def _want(self, want: SegmentWant, waiting: _Waiting) -> None:
        last = (want.data_bytes - 1) // BLOCK_BYTES
        fetch: _Fetch | None = None
        for block in want.blocks:
            key = (*want.segment, block)
            known = self._cache.peek(key)
            if known is not None:
                waiting.have[key] = known  # it may leave the cache before the others are there
                continue
            running = self._by_block.get(key)
            if running is None:
                if fetch is None or block != fetch.first + fetch.count or fetch.count >= COLD_FETCH_BLOCKS:
                    fetch = _Fetch(want, block, 0)
                    self._line.append(fetch)
                fetch.count += 1
                self._by_block[key] = running = fetch
            if waiting not in running.waiting:
                running.waiting.append(waiting)
                waiting.fetches += 1
        if fetch is not None:
            self._read_ahead(fetch, last)

    def _read_ahead(self, fetch: _Fetch, last: int) -> None:
        """Whoever has read the block before will go on: one call for several blocks costs hardly more than for one."""
        segment, first = fetch.want.segment, fetch.first
        if first and (*segment, first - 1) not in self._cache:
            return
        while fetch.count < COLD_FETCH_BLOCKS and first + fetch.count <= last:
            key = (*segment, first + fetch.count)
            if key in self._cache or key in self._by_block:
                return
            self._by_block[key] = fetch
            fetch.count += 1

    def withdraw(self, is_it: Callable[[object], bool]) -> bool:
        """Forget who waits with such a token, without a word; what is being fetched for them goes to the cache."""
        found = [waiting for waiting in self._waiting if waiting.token is not None and is_it(waiting.token)]
        for waiting in found:
            self._leave(waiting)
        return bool(found)

    def withdraw_connection(self, connection: int) -> None:
        for waiting in [waiting for waiting in self._waiting if waiting.connection == connection]:
            self._leave(waiting)

    # -- fetching ------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        while self._line and self._running < COLD_FETCHES_MAX:
            fetch = self._line.popleft()
            if not any(not waiting.done for waiting in fetch.waiting):
                self._forget(fetch)
                continue
            self._running += 1
            self._submit(READ_KIND, self._reading(fetch), self._done(fetch))

    def _reading(self, fetch: _Fetch) -> Callable[[], object]:
        store = self._store
        assert store is not None

        def read() -> list[Block]:
            blocks = _read_blocks(store, fetch)
            if not all(agrees for _, agrees in blocks):
                blocks = _read_blocks(store, fetch)  # a line may be bad where a disk is not
            return blocks

        return read

    def _done(self, fetch: _Fetch) -> Callable[[object, BaseException | None], None]:
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
            self._begin()

        return done

    def _forget(self, fetch: _Fetch) -> None:
        for key in fetch.block_keys():
            if self._by_block.get(key) is fetch:
                del self._by_block[key]

    def _arrived(self, fetch: _Fetch, blocks: list[Block]) -> None:
        found = dict(zip(fetch.block_keys(), blocks, strict=True))
        for key, block in found.items():
            self._cache.put(key, block)
        for waiting in fetch.waiting:
            if waiting.done:
                continue
            waiting.have.update((key, found[key]) for key in waiting.needs if key in found)
            waiting.fetches -= 1
            if not waiting.fetches:
                self._end(waiting, None)

    def _fail(self, fetch: _Fetch, error: BaseException) -> None:
        path = fetch.want.path
        reason = "is missing there" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        for waiting in fetch.waiting:
            if not waiting.done:
                self._end(waiting, ColdStoreFailed(f"{path} of the cold tier {reason}", path=path))

    def _end(self, waiting: _Waiting, error: TopicsError | None) -> None:
        self._leave(waiting)
        for key, block in waiting.have.items():
            self._cache.put(key, block)
        if waiting.name is not None:
            self._cache.hold(waiting.needs)  # those without a name look at once
        waiting.resume(error)

    def _leave(self, waiting: _Waiting) -> None:
        waiting.done = True
        del self._waiting[waiting]
        if waiting.name is not None:
            self._named.pop(waiting.name, None)

    # -- again later ---------------------------------------------------------------------------------------

    def later(self, now_ms: int, again: Callable[[], None]) -> None:
        """For what nobody waits for: after a failure it is tried again in a while."""
        self._later_count += 1
        heappush(self._later, (now_ms + COLD_RETRY_MS, self._later_count, again))

    @property
    def due_ms(self) -> int | None:
        return self._later[0][0] if self._later else None

    def pass_time(self, now_ms: int) -> None:
        while self._later and self._later[0][0] <= now_ms:
            heappop(self._later)[2]()

    def stop(self) -> None:
        """Nothing more is begun, and nobody is waited for: a store may take its time."""
        self._stopped = True
        self._line.clear()
        self._later.clear()
        for waiting in list(self._waiting):
            self._end(waiting, ColdStoreFailed("the server stops; try again shortly"))


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
