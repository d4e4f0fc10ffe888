"""Goal: the memory that a front uses for clients is bounded, and a client beyond a bound is refused and told which.

Method: the admission of requests of a front with its bounds reached; no process.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

from router.pending import PendingRequests
from tests.support.faults import fault
from topics.link import wire
from topics.protocols.http.admission import LARGE_RESPONSE, SLOW_READERS_BYTES_MAX, Admission
from topics.protocols.http.call import Services
from topics.protocols.http.exchange import Request, Response
from topics.system.settings import Settings

JSON = b"application/json"
BODY = b'{"records":[{"data":1}]}'


class Bench:
    """Admission over one shard; work for another thread runs at once unless its queue is full or slow."""

    def __init__(self) -> None:
        self.core = PendingRequests(1)
        self.core.worker_up(0, 1)
        self.buffered = 0
        self.queue_is_full = self.queue_is_slow = False
        self.queue: list[Callable[[], None]] = []
        services = Services(self.core, Settings(), lambda: 0, "0", 0)
        self.admission = Admission(services, [], lambda: self.buffered, self._offload)
        self.answers: list[Response] = []

    def _offload(
        self, work: Callable[[], Any], done: Callable[[Any], None], size: int = 0, *, is_large: bool = False
    ) -> bool:
        if self.queue_is_slow:
            self.queue.append(lambda: done(work()))
        elif not self.queue_is_full:
            done(work())
        return not self.queue_is_full

    def ask(self, method: bytes, path: bytes, body: bytes = b"", **headers: bytes) -> None:
        request = Request(method, path, b"", 0, body, content_type=JSON, **headers)
        self.admission.handle(request, self.answers.append)

    def answer(self, body: bytes) -> None:
        """The worker's answer to the one request that it got."""
        ((_, parts),) = self.core.take_messages()
        (request,) = wire.read_requests(bytes(parts[0]), *parts[1:])
        head = wire.reply_head(request.id, wire.OK, wire.JSON, b"", len(body))
        self.core.receive(0, wire.message_head(1) + head + body)

    @property
    def only(self) -> Response:
        (response,) = self.answers
        return response

    def refused(self, limit: str) -> None:
        response = self.only
        error = json.loads(bytes(response.body))["error"]
        assert (response.status, error["code"], error["detail"]) == (429, "throttled", {"limit": limit})
        assert b"Retry-After" in response.head
        assert self.admission.open == 0


# ---- compression and decompression


@fault(
    "front",
    "more compressed bodies wait to be unpacked than a front may hold",
    "further ones are refused with 429 and limit gzip, and not carried out",
)
def test_queue_of_bodies_to_unpack() -> None:
    bench = Bench()
    bench.queue_is_full = True
    bench.ask(b"POST", b"/v0/topics/a", gzip.compress(BODY), content_encoding=b"gzip")
    bench.refused("gzip")
    assert bench.core.take_messages() == [], "nothing reached the shard"
    bench.answers.clear()
    bench.queue_is_full = False
    bench.ask(b"POST", b"/v0/topics/a", gzip.compress(BODY), content_encoding=b"gzip")
    bench.answer(b"{}")
    assert bench.only.status == 200


@fault(
    "front",
    "a small gzip body that unpacks to millions of records",
    "400 after the first MiB; the rest is not unpacked",
)
@pytest.mark.parametrize("path", [b"/v0/topics/a", b"/v0/topics/a/transactions/0000000000000001/stage"])
def test_only_the_beginning_of_a_flood_is_unpacked(path: bytes) -> None:
    bench = Bench()
    bench.queue_is_slow = True
    bench.ask(b"POST", path, gzip.compress(b'{"records":[' + b"{}," * 4_000_000), content_encoding=b"gzip")
    bench.queue.pop()()
    assert bench.queue == [] and bench.core.take_messages() == []
    assert (bench.only.status, b"batch_too_large" in bytes(bench.only.body)) == (400, True)
    bench.answers.clear()
    body = b'{"records":[{"data":1},{"data":"%b"}]}' % (b"x" * (2 << 20))
    bench.ask(b"POST", path, gzip.compress(body), content_encoding=b"gzip")
    bench.queue.pop()()
    assert bench.queue and not bench.answers, "a large body waits for its turn once more"
    bench.queue.pop()()
    ((_, parts),) = bench.core.take_messages()
    assert parts[1] == body


@fault(
    "front",
    "more answers wait to be compressed than a front may hold",
    "further ones are sent plain",
)
def test_queue_of_answers_to_pack() -> None:
    bench = Bench()
    bench.queue_is_full = True
    bench.ask(b"POST", b"/v0/topics/a/diff", b"{}", accept_encoding=b"gzip")
    bench.answer(b"x" * 20_000)
    assert (bench.only.status, bytes(bench.only.body)) == (200, b"x" * 20_000)
    assert b"Content-Encoding" not in bench.only.head


# ---- answers that are not read

BUFFERED = "reads are refused with 429 and limit buffered; writes are served"


@fault("front", "more answers wait for slow readers than a front may hold", BUFFERED)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        (b"POST", b"/v0/topics/a/diff"),
        (b"GET", b"/v0/topics"),
        (b"GET", b"/v0/topics/a/tags"),
        (b"GET", b"/v0/topics/a/last"),
    ],
)
def test_reads_while_too_much_is_buffered(method: bytes, path: bytes) -> None:
    bench = Bench()
    bench.buffered = SLOW_READERS_BYTES_MAX + 1
    bench.ask(method, path)
    bench.refused("buffered")
    bench.answers.clear()
    bench.ask(b"POST", b"/v0/topics/a", BODY)
    bench.answer(b"{}")
    assert bench.only.status == 200


@fault("front", "too much is buffered when the answer to an earlier read comes", BUFFERED)
def test_large_answer_that_comes_when_too_much_is_buffered() -> None:
    bench = Bench()
    bench.ask(b"POST", b"/v0/topics/a/diff", b"{}")
    bench.buffered = SLOW_READERS_BYTES_MAX + 1
    bench.answer(b"x" * LARGE_RESPONSE)
    bench.refused("buffered")


def test_large_answer_to_a_write_is_sent_all_the_same() -> None:
    """The write was refused with 429 although it was done, and a client that tried again wrote twice."""
    bench = Bench()
    bench.ask(b"POST", b"/v0/topics/a", BODY)
    bench.buffered = SLOW_READERS_BYTES_MAX + 1
    bench.answer(b"x" * LARGE_RESPONSE)
    assert bench.only.status == 200


def test_small_answer_is_sent_all_the_same() -> None:
    bench = Bench()
    bench.ask(b"POST", b"/v0/topics/a/diff", b"{}")
    bench.buffered = SLOW_READERS_BYTES_MAX + 1
    bench.answer(b"x" * (LARGE_RESPONSE - 1))
    assert bench.only.status == 200


def test_answers_that_are_being_compressed_count() -> None:
    bench = Bench()
    bench.queue_is_slow = True
    bench.buffered = SLOW_READERS_BYTES_MAX - LARGE_RESPONSE + 1
    bench.ask(b"POST", b"/v0/topics/a/diff", b"{}", accept_encoding=b"gzip")
    bench.answer(b"x" * LARGE_RESPONSE)
    assert not bench.answers
    bench.ask(b"POST", b"/v0/topics/a/diff", b"{}")
    assert bench.only.status == 429
    bench.answers.clear()
    bench.queue.pop()()
    assert b"Content-Encoding: gzip" in bench.only.head
    bench.ask(b"POST", b"/v0/topics/a/diff", b"{}")
    assert len(bench.answers) == 1, "there is room again"
