"""Workers of both kinds: jobs that succeed, fail or are given up; leases are extended while a handler runs; graceful stop."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.cutting_proxy import CuttingProxy
from tests.support.server import ROOT
from tests.support.signals import signal_another_thread
from topics.client import GiveUp, Retries, RetryLater, errors
from topics.testing import TestServer

Connect = Callable[..., Any]
SOON = Retries(first_s=0.01, most_s=0.02)


@contextmanager
def working(client: Any, topic: str, handler: Callable[[Any], Any], **options: Any) -> Iterator[Any]:
    """A worker that runs in a thread and is stopped at the end."""
    options = {"poll_ms": 200, "backoff": SOON, **options}
    worker = client.worker(topic, handler, **options)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join(60)
        assert not thread.is_alive()


def wait(condition: Callable[[], Any]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


@pytest.fixture
def jobs(client: Any, topic: str) -> str:
    client.create_topic(topic, type="queue", dead_letter=f"{topic}.dead")
    return topic


def test_jobs_are_done_failed_and_given_up(client: Any, jobs: str) -> None:
    client.write_many(jobs, ["good", "bad", "hopeless", "later"])
    seen: list[tuple[Any, int]] = []

    def handler(job: Any) -> None:
        seen.append((job.data, job.deliveries))
        if job.data == "bad" and job.deliveries < 3:
            raise OSError("not yet")
        if job.data == "hopeless":
            raise GiveUp("no use")
        if job.data == "later" and job.deliveries == 1:
            raise RetryLater(0.01)

    with working(client, jobs, handler, concurrency=2) as worker:
        wait(lambda: not client.get_topic(jobs).count)
        wait(lambda: worker.stats.done == 3)
    stats = worker.stats
    assert (stats.done, stats.failed, stats.given_up, stats.lost) == (3, 3, 1, 0)
    assert sorted(seen) == [
        ("bad", 1),
        ("bad", 2),
        ("bad", 3),
        ("good", 1),
        ("hopeless", 1),
        ("later", 1),
        ("later", 2),
    ]
    with client.tail(f"{jobs}.*", start="earliest") as dead_letters:
        assert next(dead_letters).meta["$dead_letter_reason"] == "no use"


def test_concurrency_is_bounded(client: Any, jobs: str) -> None:
    client.write_many(jobs, range(12))
    together, most = 0, 0
    lock = threading.Lock()
    meet = threading.Barrier(3)

    def handler(job: Any) -> None:
        nonlocal together, most
        with lock:
            together += 1
            most = max(most, together)
        meet.wait(60)  # until three of them run at once
        with lock:
            together -= 1

    with working(client, jobs, handler, concurrency=3) as worker:
        wait(lambda: worker.stats.done == 12)
    assert most == 3


def test_leases_are_kept_while_a_handler_runs(client: Any, jobs: str) -> None:
    client.write(jobs, "long")
    seen = []

    def handler(job: Any) -> None:
        seen.append(job.deliveries)
        # Longer than the lease: without extensions it would expire, and the job would be delivered again.
        wait(lambda: time.time() * 1000 > job.deadline + 300)

    with working(client, jobs, handler, lease_ms=5000, concurrency=2) as worker:
        wait(lambda: worker.stats.done)
    assert (seen, worker.stats.lost) == ([1], 0)


def test_a_lease_that_was_lost_is_not_settled(client: Any, jobs: str) -> None:
    client.write(jobs, "x")
    seen: list[int] = []
    release = threading.Event()

    def handler(job: Any) -> None:
        seen.append(job.deliveries)
        if job.deliveries == 1:
            client.nack(job)  # without the worker's knowledge
            assert release.wait(60)

    with working(client, jobs, handler, lease_ms=1500, concurrency=2) as worker:
        wait(lambda: worker.stats.done == 1)  # from the second delivery
        wait(lambda: worker.stats.lost == 1)
        release.set()
    assert (seen, worker.stats.done, worker.stats.lost) == ([1, 2], 1, 1)


def test_workers_of_a_consumer(client: Any, topic: str) -> None:
    client.write_many(topic, [1, 2, 3])
    client.create_consumer(topic, "c", dead_letter=f"{topic}.dead")

    def handler(job: Any) -> None:
        if job.data == 2:
            raise GiveUp("two")

    with working(client, topic, handler, consumer="c") as worker:
        wait(lambda: client.get_consumer(topic, "c").ack_floor == 3)
        wait(lambda: worker.stats.done == 2)
    assert worker.stats.given_up == 1


def test_a_queue_without_dead_letters_keeps_jobs_that_are_given_up(client: Any, topic: str) -> None:
    client.create_topic(topic, type="queue")
    client.write(topic, 1)

    def handler(_job: Any) -> None:
        raise GiveUp

    with working(client, topic, handler, backoff=Retries(first_s=60, most_s=60)) as worker:
        wait(lambda: worker.stats.given_up)
    assert client.get_topic(topic).count == 1


def test_broken_connections_lose_no_lease(
    proxy: CuttingProxy, connect: Connect, client: Any, jobs: str
) -> None:
    client.write_many(jobs, range(3))
    begun = threading.Semaphore(0)
    go_on = threading.Event()
    seen: list[int] = []

    def handler(job: Any) -> None:
        seen.append(job.data)
        begun.release()
        assert go_on.wait(60)

    with working(connect(proxy.url), jobs, handler, concurrency=3) as worker:
        for _ in range(3):
            assert begun.acquire(timeout=60)
        proxy.cut()
        go_on.set()
        wait(lambda: worker.stats.done == 3)
    assert (sorted(seen), worker.stats.lost) == ([0, 1, 2], 0)


def test_a_permanent_error_ends_it(client: Any, topic: str) -> None:
    client.create_topic(topic)
    with pytest.raises(errors.NotAQueue):
        client.worker(topic, lambda job: None).run()


def test_a_stop_returns_jobs_that_take_too_long(client: Any, jobs: str) -> None:
    client.write(jobs, "stuck")
    begun, end = threading.Event(), threading.Event()

    def handler(_job: Any) -> None:
        begun.set()
        end.wait(60)

    with working(client, jobs, handler, grace_s=0.05) as worker:
        assert begun.wait(60)
        threading.Timer(0.3, end.set).start()  # the loop of the async client ends only when its threads do
    assert (worker.stats.released, worker.stats.done) == (1, 0)
    (job,) = client.claim(jobs)
    assert job.deliveries == 1  # returned as if it had never been delivered
    end.set()


PROGRAM = """
import asyncio, os, sys, time
from topics import AsyncClient, Client

kind, queue = sys.argv[1:]

def done(job):
    os.write(1, f"done {job.data}\\n".encode())

def begin(job):
    os.write(1, f"begun {job.data}\\n".encode())

if kind == "threads":
    def handler(job):
        begin(job)
        while not worker._is_stopping:  # as long as it takes until the signal is heard
            time.sleep(0.005)
        done(job)
    with Client() as client:
        worker = client.worker(queue, handler, concurrency=2, poll_ms=100)
        stats = worker.run()
else:
    async def handler(job):
        begin(job)
        while not worker._is_stopping:
            await asyncio.sleep(0.005)
        done(job)
    async def main():
        global worker
        async with AsyncClient() as client:
            worker = client.worker(queue, handler, concurrency=2, poll_ms=100)
            return await worker.run()
    stats = asyncio.run(main())
print("stopped", stats.done, stats.lost, flush=True)
"""


@contextmanager
def working_program(server: TestServer, jobs: str, kind: str) -> Iterator[subprocess.Popen[str]]:
    """A worker process with two running jobs."""
    environment = {**os.environ, "TOPICS_URL": server.url, "TOPICS_TOKEN": "root", "PYTHONPATH": str(ROOT)}
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, kind, jobs],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        assert {program.stdout.readline() for _ in range(2)} == {"begun 0\n", "begun 1\n"}
        yield program
    finally:
        program.kill()
        program.wait()


def test_sigterm_finishes_running_jobs(server: TestServer, client: Any, jobs: str, kind: str) -> None:
    client.write_many(jobs, range(5))
    with working_program(server, jobs, kind) as program:
        program.send_signal(signal.SIGTERM)
        rest, _ = program.communicate(timeout=120)
        assert program.returncode == 0
    assert sorted(rest.splitlines()) == ["done 0", "done 1", "stopped 2 0"]
    state = client.get_topic(jobs)
    assert (state.count, state.queue.ready, state.queue.in_flight) == (3, 3, 0)


class StoppingQueue(queue.SimpleQueue[None]):
    """The wake-ups of a worker whose handlers are all busy: it is told to stop just before it reads them."""

    worker: Any
    begun: threading.Event

    def empty(self) -> bool:
        if not self.worker._core.free and not self.worker._is_stopping:
            self.begun.wait(60)
            self.worker.stop()
        return super().empty()


@pytest.mark.parametrize("kind", ["threads"], indirect=True)
def test_a_stop_is_not_lost_among_other_wakeups(client: Any, jobs: str) -> None:
    client.write_many(jobs, range(1))
    begun, end = threading.Event(), threading.Event()

    def handler(_job: Any) -> None:
        begun.set()
        end.wait(60)

    worker = client.worker(jobs, handler, concurrency=1, poll_ms=100, grace_s=0.05)
    worker._wakeups = StoppingQueue()
    worker._wakeups.worker, worker._wakeups.begun = worker, begun
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        thread.join(120)
        assert not thread.is_alive(), "the worker waits for the handler, which never ends"
    finally:
        end.set()
        thread.join()
    assert worker.stats.released == 1


@pytest.mark.parametrize("kind", ["threads"], indirect=True)
def test_a_signal_is_noticed_that_does_not_interrupt_the_wait(
    server: TestServer, client: Any, jobs: str
) -> None:
    client.write_many(jobs, range(2))
    with working_program(server, jobs, "threads") as program:
        signal_another_thread(program.pid, signal.SIGTERM)
        rest, _ = program.communicate(timeout=120)
    assert sorted(rest.splitlines()) == ["done 0", "done 1", "stopped 2 0"]
