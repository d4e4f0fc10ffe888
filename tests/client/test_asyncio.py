"""Cancellation of waiting calls, which only the async client has."""

from __future__ import annotations

import asyncio

import pytest

from topics.client import AsyncClient, ClientError
from topics.testing import TestServer


def test_a_cancelled_wait_loses_nothing(server: TestServer, topic: str) -> None:
    async def main() -> list[int]:
        async with server.async_client() as client:
            await client.create_topic(topic)
            found: list[int] = []
            async with client.tail(topic) as tail:
                for i in range(20):
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.002):
                            while True:
                                found.append((await anext(tail)).data)
                    await client.write(topic, i)
                while len(found) < 20:
                    found.append((await anext(tail)).data)
            return found

    assert asyncio.run(main()) == list(range(20))


def test_a_tail_is_cancelled_while_it_connects(server: TestServer, topic: str) -> None:
    async def main() -> None:
        async with server.async_client() as client:
            await client.write(topic, 1)
            for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.004):
                tail = client.tail(topic, start="earliest")
                try:
                    async with asyncio.timeout(delay_s):
                        await anext(tail)
                except TimeoutError:
                    assert (await anext(tail)).data == 1
                await tail.close()

    asyncio.run(main())


def test_receipts_of_a_cancelled_producer_are_resolved(topic: str) -> None:
    async def main() -> None:
        client = AsyncClient("http://127.0.0.1:1", token="")
        producer = client.producer(topic, linger_ms=0, max_batch_bytes=20)
        receipts = [await producer.send("x" * 15) for _ in range(3)]
        async with asyncio.timeout(60):
            while len(producer._batcher._batches) == 3:  # until the first one is being sent
                await asyncio.sleep(0)
        assert producer._task is not None
        producer._task.cancel()
        with pytest.raises(ClientError) as caught:
            await receipts[0]
        assert caught.value.outcome == "unknown"
        for receipt in receipts[1:]:
            with pytest.raises(RuntimeError, match="cancelled"):
                await receipt
        await client.close()

    asyncio.run(main())


def test_many_calls_at_a_time(server: TestServer, topic: str) -> None:
    async def main() -> None:
        async with server.async_client() as client:
            await asyncio.gather(*(client.write(topic, i) for i in range(100)))
            assert sorted([record.data async for record in client.records(topic)]) == list(range(100))

    asyncio.run(main())
