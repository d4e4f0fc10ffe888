"""Goal: admission, endpoints and encodings need no front and no link: they serve clients right next to an engine.

Method: bytes of requests in, bytes of responses out. The port `Shards` is a shard in this process: the encoding that a
request names reads it, an engine on a simulated disk executes it, and the same encoding renders the result. Nothing but
the socket, the loop and the disk is missing of a worker that serves clients itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from tests.support.engine_harness import Harness
from topics.api.errors import TopicsError
from topics.engine.commands import topics as cmd
from topics.engine.runtime.engine import Job, Outcome
from topics.engine.storage.frames import HEADER_BYTES
from topics.link import wire
from topics.link.control_channel import Outage
from topics.protocols.http.admission import Admission
from topics.protocols.http.call import Services
from topics.protocols.http.exchange import Response
from topics.protocols.http.ports import OnReply
from topics.protocols.http1.plain_head import read_plain_head
from topics.protocols.http1.responses import render_head
from topics.system.settings import Settings
from workers.shard.encodings import ShardFacts, shard_encodings

FRAMES_TYPE = "application/vnd.topics.frames"


class OwnShard:
    """The port `Shards` over an engine in this process. Requests are executed by `turn`, all of them in one."""

    count = 1
    refused_full = 0

    def __init__(self, harness: Harness) -> None:
        self.outages: list[Outage] = []
        self.engine = harness.engine
        self._encodings = shard_encodings(ShardFacts(self.engine))
        self._numbers = count(1)
        self._waiting: list[tuple[tuple[wire.Request, Any, OnReply], cmd.Command]] = []
        self.jobs: list[Job] = []

    def ask(
        self,
        shard: int,
        op: int,
        flags: int,
        topic: bytes,
        args: bytes,
        body: wire.Buffer,
        received_us: int,
        on_reply: OnReply,
        encoding: int = wire.JSON,
    ) -> int:
        request = wire.Request(next(self._numbers), 0, 0, op, flags, topic, args, body, encoding)
        parameters = wire.decode_args(args) if args else wire.NO_ARGS
        try:
            command, options = self._encodings[encoding].read[op](topic.decode(), request, parameters)
        except TopicsError as error:
            on_reply(wire.Reply(request.id, *wire.refused(error)))
        else:
            self._waiting.append(((request, options, on_reply), command))
        return request.id

    # No client disconnects in these tests: all that is cancelled is answered already.

    def tell(self, shard: int, op: int, number: int, topic: bytes = b"", args: bytes = b"") -> None: ...

    def cancel(self, shard: int, number: int) -> None: ...

    def end_polls(self, before_us: int) -> None: ...

    def turn(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._answer(self.engine.turn(waiting))

    def run_job(self) -> None:
        job = self.jobs.pop(0)
        job.run()
        self._answer(self.engine.finish(job))

    def _answer(self, outcome: Outcome) -> None:
        self.jobs += outcome.jobs
        for (request, options, on_reply), result in outcome.replies:  # type: ignore[misc]
            on_reply(wire.Reply(request.id, *self._render(request, options, result)))

    def _render(self, request: wire.Request, options: Any, result: object) -> wire.Result:
        encoding = self._encodings[request.encoding]
        if isinstance(result, TopicsError):
            return wire.refused(result)
        if isinstance(result, cmd.Appended):
            rendered = encoding.appended(result, with_seqs=True, total_ms=0.0, append_ms=0.0, sync_ms=0.0)
        else:
            rendered = encoding.render(request, result, options, 0.0, 0.0)
        return encoding.marked(request, rendered)


class Worker:
    """Connections of clients, without sockets."""

    def __init__(self) -> None:
        self.shard = OwnShard(Harness())
        services = Services(self.shard, Settings(), lambda: 0, "test", 0)
        self.admission = Admission(services, [], lambda: 0, lambda *_, **__: False)

    def receive(self, data: bytes) -> list[bytes]:
        """The bytes of one request; the response is appended to the returned list once it is there."""
        head = read_plain_head(data)
        assert head is not None and head.end == len(data)
        sent: list[bytes] = []

        def respond(response: Response) -> None:
            sent.append(render_head(response) + bytes(response.body))

        self.admission.handle(head.request(data[head.head_len :], 0), respond)
        return sent

    def ask(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        sent = self.receive(data)
        self.shard.turn()
        while not sent:
            self.shard.run_job()
        return read(sent)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.shard.engine.check_invariants()


def post(path: str, body: Any, **headers: str) -> bytes:
    text = json.dumps(body).encode()
    lines = {
        "Host": "127.0.0.1",
        "Content-Type": "application/json",
        "Content-Length": str(len(text)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST /v0/topics/{path} HTTP/1.1\r\n{head}\r\n".encode() + text


def read(sent: list[bytes]) -> tuple[int, dict[str, str], bytes]:
    (response,) = sent
    head, _, body = response.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert int(headers["Content-Length"]) == len(body)
    return int(status.split()[1]), headers, body


def test_written_records_are_read(worker: Worker) -> None:
    status, _, body = worker.ask(post("orders", {"records": [{"data": {"n": 1}}, {"data": 2, "tag": "eu"}]}))
    assert (status, json.loads(body)["seqs"]) == (201, [1, 2])
    status, headers, body = worker.ask(post("orders/diff", {"tag": "eu"}))
    page = json.loads(body)
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert [(row["$seq"], row["data"]) for row in page["records"]] == [(2, 2)]
    assert page["caught_up"]


def test_a_write_is_not_answered_before_its_sync(worker: Worker) -> None:
    config = {"durability": "fsync"}
    sent = worker.receive(post("orders", {"records": [{"data": 1}], "config": config}))
    worker.shard.turn()
    assert sent == []
    while not sent:
        worker.shard.run_job()
    assert read(sent)[0] == 201


def test_requests_of_one_turn_are_answered_in_order(worker: Worker) -> None:
    sent = [worker.receive(post("orders", {"records": [{"data": n}]})) for n in range(3)]
    worker.shard.turn()
    while not all(sent):
        worker.shard.run_job()
    assert [json.loads(read(one)[2])["first_seq"] for one in sent] == [1, 2, 3]


def test_the_reply_has_the_encoding_that_the_request_names(worker: Worker) -> None:
    worker.ask(post("orders", {"records": [{"data": 1}]}))
    status, headers, body = worker.ask(post("orders/diff", {"a_typo": 1}, Accept=FRAMES_TYPE))
    assert (status, headers["Content-Type"]) == (200, FRAMES_TYPE)
    assert (headers["Topics-Next-From-Seq"], headers["Topics-Count"], headers["Topics-Caught-Up"]) == (
        "1",
        "1",
        "true",
    )
    assert headers["Topics-Ignored"] == "a_typo"
    assert len(body) > HEADER_BYTES


def test_jobs_are_claimed_and_acked(worker: Worker) -> None:
    worker.ask(post("mails", {"records": [{"data": "a"}], "config": {"type": "queue"}}))
    status, _, body = worker.ask(post("mails/claim", {"max": 5, "node": "n"}))
    (job,) = json.loads(body)["claimed"]
    assert (status, job["data"]) == (200, "a")
    lease = {"node": "n", "seqs": [job["$seq"]], "lease_ids": [job["lease_id"]]}
    status, _, body = worker.ask(post("mails/ack", lease))
    assert (status, json.loads(body)["acked"]) == (200, 1)


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (post("unknown/diff", {}), 404, "topic_not_found"),
        (post("orders", {"records": []}), 400, "invalid_request"),
        (post("orders", {"recordz": []}, Topics_Strict="1"), 400, "invalid_request"),
        (post("orders", {}, Content_Type="text/plain"), 415, "unsupported_media_type"),
        (post("orders/diff", {}, Host="evil.example"), 421, "misdirected_request"),
    ],
)
def test_errors_are_those_of_the_contract(
    worker: Worker, request_bytes: bytes, status: int, code: str
) -> None:
    answered, _, body = worker.ask(request_bytes)
    assert (answered, json.loads(body)["error"]["code"]) == (status, code)
