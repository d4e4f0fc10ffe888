"""Goal: a crowd that comes at once is served in its order, with room for others in between."""

from __future__ import annotations

import asyncio
import itertools

from router.turns import PER_ROUND, Turns
from tests.support.faults import fault


@fault(
    "front",
    "thousands of WebSocket handshakes at once",
    "a few are begun in each round of the loop, in order; other requests are served in between",
)
def test_a_crowd_is_begun_in_rounds() -> None:
    async def crowd() -> list[int]:
        loop = asyncio.get_running_loop()
        turns, begun, seen = Turns(loop), list[int](), list[int]()
        for i in range(5 * PER_ROUND + 3):
            turns.begin(lambda i=i: begun.append(i))  # type: ignore[misc]
        assert len(begun) == PER_ROUND, "the first ones do not wait"
        while len(begun) < 5 * PER_ROUND + 3:
            seen.append(len(begun))
            await asyncio.sleep(0)
        assert begun == sorted(begun)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        turns.begin(lambda: begun.append(-1))
        assert begun[-1] == -1, "the crowd is gone"
        return seen

    seen = asyncio.run(crowd())
    steps = [after - before for before, after in itertools.pairwise(seen)]
    assert steps and max(steps) <= PER_ROUND


def test_those_who_come_later_wait_behind_the_line() -> None:
    async def crowd() -> list[int]:
        turns, begun = Turns(asyncio.get_running_loop()), list[int]()
        for i in range(3 * PER_ROUND):
            turns.begin(lambda i=i: begun.append(i))  # type: ignore[misc]
        await asyncio.sleep(0)
        for i in range(3 * PER_ROUND, 4 * PER_ROUND):
            turns.begin(lambda i=i: begun.append(i))  # type: ignore[misc]
        while len(begun) < 4 * PER_ROUND:
            await asyncio.sleep(0)
        return begun

    assert asyncio.run(crowd()) == list(range(4 * PER_ROUND))
