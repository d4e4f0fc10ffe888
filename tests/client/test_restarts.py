"""Tails, producers, workers and streams of both clients, while the server is stopped, started, killed and started again.

Method: all of them begin before and are checked afterwards, in one test because a server starts slowly. Every acknowledged record is
there, once and in order, and all of them reconnect by themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tests.client.both_clients import Loop, make
from topics.client import Retries
from topics.testing import TestServer

KINDS = ("threads", "asyncio")


class Follower:
    """Reads a tail until it has seen the last record of this many topics."""

    def __init__(self, tail: Any, topics: int) -> None:
        self.found: list[tuple[str, int, Any]] = []
        self._tail, self._topics = tail, topics
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for record in self._tail:
            self.found.append((record.topic, record.seq, record.data))
            self._topics -= record.data == "end"
            if not self._topics:
                return

    def wait(self) -> list[tuple[str, int, Any]]:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.found


class Sender:
    """Sends numbers until it is stopped."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self._stop = threading.Event()
        self.receipts: list[Any] = []
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        while not self._stop.wait(0.002):
            self.receipts.append(self._producer.send(len(self.receipts)))

    def stop(self) -> list[int]:
        """The seqs, in the order of sending."""
        self._stop.set()
        self._thread.join(60)
        self._producer.close()
        return [receipt.result() for receipt in self.receipts]


class Workers:
    """Processes jobs and records which."""

    def __init__(self, client: Any, queue: str) -> None:
        self.done: list[Any] = []
        self._worker = client.worker(
            queue, lambda job: self.done.append(job.data), poll_ms=200, backoff=Retries(first_s=0.01)
        )
        self._thread = threading.Thread(target=self._worker.run, daemon=True)
        self._thread.start()

    def wait(self, wanted: set[Any]) -> None:
        give_up = threading.Event()
        for _ in range(6000):
            if wanted <= set(self.done):
                break
            give_up.wait(0.01)
        self._worker.stop()
        self._thread.join(60)
        assert wanted <= set(self.done)


def test_everything_continues_over_restarts(restartable_server: TestServer, loop: Loop) -> None:
    with ExitStack() as stack:
        clients: dict[str, Any] = {
            kind: stack.enter_context(make(kind, loop, restartable_server.url, token="root"))
            for kind in KINDS
        }
        for kind, client in clients.items():
            client.create_topic(f"log.{kind}", durability="fsync")
            client.create_topic(f"jobs-{kind}", type="queue")
            client.create_topic(f"events-{kind}")
            client.create_consumer(f"events-{kind}", "c")
        tails = {
            kind: Follower(stack.enter_context(client.tail("log.>", f"jobs-{kind}")), 3)
            for kind, client in clients.items()
        }
        senders = {kind: Sender(client.producer(f"log.{kind}")) for kind, client in clients.items()}
        workers = {kind: Workers(client, f"jobs-{kind}") for kind, client in clients.items()}
        streams = {
            kind: stack.enter_context(client.consume(f"events-{kind}", "c"))
            for kind, client in clients.items()
        }
        stop: Callable[[], Any]
        for number, stop in enumerate((restartable_server.stop, restartable_server.kill)):
            for kind, client in clients.items():
                client.write_many(f"jobs-{kind}", [f"{number}-{i}" for i in range(5)])
            stop()
            calls = {
                kind: BackgroundWrite(client, f"events-{kind}", number) for kind, client in clients.items()
            }
            restartable_server.start()
            for kind, client in clients.items():
                assert calls[kind].wait() == number + 1  # written once, though the server was down at first
                job = next(streams[kind])
                while job.data != number:  # unacked jobs are delivered again
                    job = next(streams[kind])
                assert client.ack(job).done == 1

        for kind in KINDS:
            assert senders[kind].stop() == list(range(1, len(senders[kind].receipts) + 1))
            workers[kind].wait({f"{number}-{i}" for number in range(2) for i in range(5)})
        for kind, client in clients.items():
            client.write(f"log.{kind}", "end")
            client.write(f"jobs-{kind}", "end")
        for kind in KINDS:
            found = tails[kind].wait()
            for other in KINDS:
                seqs = [seq for topic, seq, _ in found if topic == f"log.{other}"]
                assert seqs == list(range(1, len(senders[other].receipts) + 2))
            # A job that was acked before the tail reconnected is deleted, so the tail does not see it.
            jobs = [data for topic, _, data in found if topic == f"jobs-{kind}"]
            written = [*(f"{number}-{i}" for number in range(2) for i in range(5)), "end"]
            assert jobs == [job for job in written if job in jobs]
            assert jobs[-1] == "end"


class BackgroundWrite:
    """A write that starts while the server is down."""

    def __init__(self, client: Any, topic: str, data: Any) -> None:
        self._seq = 0

        def write() -> None:
            self._seq = client.write(topic, data).first_seq

        self._thread = threading.Thread(target=write, daemon=True)
        self._thread.start()

    def wait(self) -> int:
        self._thread.join(60)
        return self._seq
