"""Goal: streams of jobs and of consumers' records behave as the contract says, over both protocols; a lost client's jobs go to others at once.

Method: real servers, seen as a client. What happens "at once" is polled for without looking at a clock.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.contract import Json, fresh, ok, refused
from tests.support.h2_client import Http2Client
from tests.support.length import pick
from tests.support.server import Reply, Server, readable, running, until
from tests.support.sse_client import EventStream, Http2Stream, Protocol, open_stream

KEYS = "s3cret-all,s3cret-read:read,s3cret-write:write,s3cret-both:read+write,s3cret-team:read+write:team."
both_protocols = pytest.mark.parametrize("protocol", ["http1", "h2c"])


@pytest.fixture
def queue(shared_server: Server) -> str:
    return make_queue(shared_server)


def make_queue(server: Server, prefix: str = "q", **config: Any) -> str:
    name = fresh(prefix)
    ok(server.put(f"/v0/topics/{name}", {"type": "queue", **config}), 201)
    return name


def make_consumer(server: Server, name: str = "c", **config: Any) -> str:
    topic = fresh("t")
    ok(server.put(f"/v0/topics/{topic}", config.pop("topic", {})), 201)
    ok(server.put(f"/v0/topics/{topic}/consumers/{name}", config), 201)
    return topic


def work(
    server: Server, queue: str, query: str = "node=n", protocol: Protocol = "http1", **options: Any
) -> EventStream:
    return open_stream(server, f"/v0/topics/{queue}/work?{query}", protocol=protocol, **options)


def consume(
    server: Server, topic: str, query: str = "node=n", protocol: Protocol = "http1", name: str = "c"
) -> EventStream:
    return open_stream(server, f"/v0/topics/{topic}/consumers/{name}/stream?{query}", protocol=protocol)


def claim(server: Server, queue: str, node: str = "other", count: int = 100) -> list[Json]:
    claimed: list[Json] = ok(server.post(f"/v0/topics/{queue}/claim", {"node": node, "max": count}))[
        "claimed"
    ]
    return claimed


def ack(server: Server, path: str, *jobs: Json, node: str = "n", call: str = "ack", **fields: Any) -> Json:
    """Settle jobs of a stream, with their lease ids."""
    body = {
        "node": node,
        "seqs": [job["$seq"] for job in jobs],
        "lease_ids": [job["lease_id"] for job in jobs],
        **fields,
    }
    return ok(server.post(f"/v0/topics/{path}/{call}", body))


def jobs_of(stream: EventStream, count: int, event: str = "job") -> list[Json]:
    return [frame.data for frame in stream.take(*[event] * count)]


def get(server: Server, path: str, protocol: Protocol = "http1", **headers: str) -> Reply:
    if protocol == "http1":
        return server.get(path, **headers)
    client = Http2Client(server)
    try:
        return client.request("GET", path, {**server.credentials, **headers}.items())
    finally:
        client.close()


# -- jobs --------------------------------------------------------------------------------------------------


@both_protocols
def test_a_job_as_it_is_pushed(shared_server: Server, queue: str, protocol: Protocol) -> None:
    body = {"node": "maker", "records": [{"data": {"a": [1, "ä"]}, "tag": "x", "meta": {"m": 1}}]}
    ok(shared_server.post(f"/v0/topics/{queue}", body))
    stream = work(shared_server, queue, "node=n&lease_ms=60000", protocol)
    (frame,) = stream.take("job")
    job = frame.data
    assert frame.id == "1"
    assert job == {
        "topic": queue,
        "$seq": 1,
        "lease_id": job["lease_id"],
        "deadline": job["deadline"],
        "$ts": job["$ts"],
        "$tag": "x",
        "deliveries": 1,
        "data": {"a": [1, "ä"]},
        "meta": {"m": 1},
    }
    assert job["lease_id"].startswith("lease_") and int(job["lease_id"][6:], 16)
    assert job["deadline"] - job["$ts"] >= 60_000
    assert ack(shared_server, queue, job) == {
        "topic": queue, "acked": 1, "skipped": [], "ready": 0, "in_flight": 0,
    }  # fmt: skip
    stream.close()


@both_protocols
def test_jobs_come_as_they_are_written_and_acks_make_room(
    shared_server: Server, queue: str, protocol: Protocol
) -> None:
    stream = work(shared_server, queue, "node=n&max=2", protocol)
    ok(shared_server.write(queue, *range(10)))
    done: list[Json] = jobs_of(stream, 2)
    assert ok(shared_server.get(f"/v0/topics/{queue}"))["queue"]["in_flight"] == 2
    ack(shared_server, queue, *done)
    for _ in range(4):
        pair = jobs_of(stream, 2)
        ack(shared_server, queue, pair[1])
        ack(shared_server, queue, pair[0])
        done += pair
    assert sorted(job["data"] for job in done) == list(range(10))
    ok(shared_server.write(queue, "late"))
    assert jobs_of(stream, 1)[0]["data"] == "late"
    stream.close()


@pytest.mark.parametrize("lease_ms", [86_400_000, 200], ids=["a nack", "an expiry"])
def test_the_end_of_a_lease_makes_room(shared_server: Server, queue: str, lease_ms: int) -> None:
    stream = work(shared_server, queue, f"node=n&lease_ms={lease_ms}")
    ok(shared_server.write(queue, 1))
    (first,) = jobs_of(stream, 1)
    if lease_ms > 200:
        ack(shared_server, queue, first, call="nack")
    (second,) = jobs_of(stream, 1)
    assert [job["deliveries"] for job in (first, second)] == [1, 2]
    assert first["lease_id"] != second["lease_id"]
    stream.close()


@both_protocols
def test_a_lost_client_s_jobs_go_to_others_at_once(
    shared_server: Server, queue: str, protocol: Protocol
) -> None:
    ok(shared_server.write(queue, *range(4)))
    (kept,) = claim(shared_server, queue, "n", 1)
    gone = work(shared_server, queue, "node=n&max=2&lease_ms=86400000", protocol)
    jobs_of(gone, 2)
    stays = work(shared_server, queue, "node=n&lease_ms=86400000")
    (held,) = jobs_of(stays, 1)
    if isinstance(gone, Http2Stream):
        gone.leave()
    else:
        gone.close()
    found: dict[int, int] = {}

    def are_back() -> bool:
        found.update({job["$seq"]: job["deliveries"] for job in claim(shared_server, queue)})
        return len(found) == 2

    until(are_back)
    assert found == {2: 2, 3: 2}
    assert ack(shared_server, queue, kept, held)["acked"] == 2
    stays.close()
    gone.close()


def test_another_stream_takes_over(shared_server: Server, queue: str) -> None:
    ok(shared_server.write(queue, "x"))
    first = work(shared_server, queue, "node=a&lease_ms=86400000")
    jobs_of(first, 1)
    second = work(shared_server, queue, "node=b")
    first.close()
    assert jobs_of(second, 1)[0]["deliveries"] == 2
    second.close()


def test_several_streams_share_a_queue(shared_server: Server, queue: str) -> None:
    streams = [work(shared_server, queue, f"node=n{i}&max=5") for i in range(4)]
    ok(shared_server.write(queue, *range(20)))
    seqs = [job["$seq"] for stream in streams for job in jobs_of(stream, 5)]
    assert sorted(seqs) == list(range(1, 21))
    for stream in streams:
        stream.close()


def test_many_large_jobs_come_whole(shared_server: Server, queue: str) -> None:
    sizes = [10, 300_000, 1_000_000, 1000, 900_000, 50_000]
    for size in sizes:
        ok(shared_server.write(queue, "x" * size))
    for protocol in ("http1", "h2c"):
        stream = work(shared_server, queue, "node=n&max=100", protocol)  # type: ignore[arg-type]
        assert sorted(len(job["data"]) for job in jobs_of(stream, len(sizes))) == sorted(sizes)
        stream.close()
        until(lambda: ok(shared_server.get(f"/v0/topics/{queue}"))["queue"]["in_flight"] == 0)


def test_a_client_that_reads_nothing_does_not_block_others(shared_server: Server, queue: str) -> None:
    slow = work(shared_server, queue, "node=slow&max=1000&lease_ms=86400000", receive_buffer=4096)
    for _ in range(60):
        ok(shared_server.write(queue, *["x" * 100_000] * 2))
    quick = work(shared_server, queue, "node=n&max=1000")
    held = ok(shared_server.get(f"/v0/topics/{queue}"))["queue"]
    assert held["in_flight"] + held["ready"] == 120
    # The slow client gets two pushes and what the kernel buffers; the rest is for the one that reads.
    first = jobs_of(quick, 60)
    assert len({job["$seq"] for job in first}) == 60
    slow.close()
    jobs_of(quick, 60)
    quick.close()


# -- records of consumers ----------------------------------------------------------------------------------


@both_protocols
def test_a_record_as_it_is_pushed(shared_server: Server, protocol: Protocol) -> None:
    topic = make_consumer(shared_server)
    ok(shared_server.write(topic, {"a": 1}))
    stream = consume(shared_server, topic, protocol=protocol)
    (frame,) = stream.take("record")
    record = frame.data
    assert (frame.id, record["topic"], record["consumer"], record["deliveries"]) == ("1", topic, "c", 1)
    assert record["data"] == {"a": 1}
    ack(shared_server, f"{topic}/consumers/c", record)
    ok(shared_server.write(topic, *range(5)))
    assert [record["$seq"] for record in jobs_of(stream, 5, "record")] == [2, 3, 4, 5, 6]
    stream.close()
    again = consume(shared_server, topic, protocol=protocol)  # continues after the acked records
    assert [(r["$seq"], r["deliveries"]) for r in jobs_of(again, 5, "record")] == [
        (n, 2) for n in range(2, 7)
    ]
    again.close()
    assert len(ok(shared_server.diff(topic))["records"]) == 6


def test_no_more_than_max_ack_pending(shared_server: Server) -> None:
    topic = make_consumer(shared_server, max_ack_pending=3)
    streams = [consume(shared_server, topic, f"node=n{i}&max=2") for i in range(2)]
    ok(shared_server.write(topic, *range(10)))
    until(lambda: ok(shared_server.get(f"/v0/topics/{topic}/consumers/c"))["ack_pending"] == 3)
    seen = 0
    while seen < 10:
        for i, stream in enumerate(streams):
            while stream.waiting or readable(stream.socket, 0.05):
                frame = stream.next()
                ack(shared_server, f"{topic}/consumers/c", frame.data, node=f"n{i}")
                seen += 1
    state = ok(shared_server.get(f"/v0/topics/{topic}/consumers/c"))
    assert (state["acked"], state["lag_records"], state["ack_pending"]) == (10, 0, 0)
    for stream in streams:
        stream.close()


@both_protocols
def test_without_acks_everything_flows(shared_server: Server, protocol: Protocol) -> None:
    topic = make_consumer(shared_server, ack="none")
    count = pick(short=600, long=3000)
    ok(shared_server.write(topic, *range(count)))
    stream = consume(shared_server, topic, "node=n&max=1", protocol)
    records = jobs_of(stream, count, "record")
    assert [record["data"] for record in records] == list(range(count))
    assert "lease_id" not in records[0]
    stream.close()


def test_losses_are_reported(shared_server: Server) -> None:
    topic = make_consumer(shared_server, topic={"cap_records": 2})
    ok(shared_server.write(topic, *range(5)))
    stream = consume(shared_server, topic)
    gone, *records = stream.take("tombstone", "record", "record")
    assert (gone.data["gap_from"], gone.data["gap_to"], gone.data["reason"]) == (1, 3, "cap")
    assert [record.data["$seq"] for record in records] == [4, 5]
    stream.close()


# -- refusals ----------------------------------------------------------------------------------------------


@both_protocols
def test_the_order_of_refusals(shared_server: Server, queue: str, protocol: Protocol) -> None:
    log = fresh("log")
    ok(shared_server.write(log, 1), 201)
    html = {"Accept": "text/html"}

    def refused_with(status: int, code: str, path: str, **headers: str) -> None:
        refused(get(shared_server, f"/v0/topics/{path}", protocol, **headers), status, code)

    for path in ("absent/work", f"{log}/work", f"{queue}/work", "absent/consumers/c/stream"):
        refused_with(406, "not_acceptable", path, **html)
        for query in ("", "?node=", "?node=" + "x" * 129, "?max=1"):
            refused_with(400, "invalid_request", path + query)
    refused_with(404, "topic_not_found", "absent/work?node=n")
    refused_with(404, "topic_not_found", "absent/consumers/c/stream?node=n")
    refused_with(409, "not_a_queue", f"{log}/work?node=n")
    refused_with(404, "consumer_not_found", f"{log}/consumers/c/stream?node=n")
    refused_with(404, "consumer_not_found", f"{queue}/consumers/%00/stream?node=n")
    for path in (f"{queue}/work", f"{queue}/consumers/c/stream"):
        reply = shared_server.post(f"/v0/topics/{path}", {})
        refused(reply, 405, "method_not_allowed")
        assert reply.headers["allow"] == "GET, HEAD, OPTIONS"
    assert shared_server.request("HEAD", f"/v0/topics/{queue}/work?node=n").status == 200
    assert ok(shared_server.get(f"/v0/topics/{queue}"))["queue"]["in_flight"] == 0


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("guarded"), environment={"TOPICS_API_KEYS": KEYS}) as server:
        yield server
        assert "s3cret" not in server.log


@both_protocols
@pytest.mark.parametrize("tail", ["work", "consumers/c/stream"])
def test_keys(guarded: Server, protocol: Protocol, tail: str) -> None:
    everyone = guarded.with_key("s3cret-all")
    for prefix in ("q", "team.q"):
        name = make_queue(everyone, prefix)
        ok(everyone.put(f"/v0/topics/{name}/consumers/c", {}), 201)
        path = f"/v0/topics/{name}/{tail}?node=n"
        for query in ("", "&token=nobody", "&token="):
            refused(get(guarded, path + query, protocol), 401, "unauthorized")
        for secret in ("s3cret-read", "s3cret-write", *(["s3cret-team"] if prefix == "q" else [])):
            refused(get(guarded.with_key(secret), path, protocol), 403, "forbidden")
            refused(get(guarded, f"{path}&token={secret}", protocol), 403, "forbidden")
        ok(everyone.write(name, 1))
        allowed = ["s3cret-both", *(["s3cret-team"] if prefix != "q" else [])]
        for secret in allowed:
            for server, query in ((guarded.with_key(secret), ""), (guarded, f"&token={secret}")):
                stream = open_stream(server, path + query, protocol=protocol)
                assert stream.next().data["data"] == 1
                stream.close()


def test_caps(start_server: Callable[..., Server]) -> None:
    server = start_server(environment={"TOPICS_MAX_SSE_CONNECTIONS": "2"})
    queue, topic = make_queue(server), make_consumer(server)
    streams = [work(server, queue), consume(server, topic, protocol="h2c")]
    until(lambda: sse_connections(server) == 2)
    for path in (f"{queue}/work", f"{topic}/consumers/c/stream"):
        for protocol in ("http1", "h2c"):
            refused(get(server, f"/v0/topics/{path}?node=n", protocol), 429, "throttled")  # type: ignore[arg-type]
    refused(server.get("/v0/topics/absent/work?node=n"), 404, "topic_not_found")
    for stream in streams:
        stream.close()
    until(lambda: sse_connections(server) == 0)


def sse_connections(server: Server) -> int:
    return int(ok(server.get("/v0/metrics", Accept="application/json"))["sse_connections"])


# -- end of streams ----------------------------------------------------------------------------------------


@both_protocols
def test_a_deleted_topic_or_consumer_ends_its_streams(shared_server: Server, protocol: Protocol) -> None:
    queue, topic = make_queue(shared_server), make_consumer(shared_server)
    ok(shared_server.write(queue, 1))
    streams = [
        work(shared_server, queue, protocol=protocol),
        consume(shared_server, topic, protocol=protocol),
    ]
    jobs_of(streams[0], 1)
    ok(shared_server.delete(f"/v0/topics/{queue}"))
    ok(shared_server.delete(f"/v0/topics/{topic}/consumers/c"))
    for stream, name in zip(streams, (queue, topic)):
        (last,) = stream.rest()
        assert (last.event, last.data["code"], last.data["topic"]) == ("error", 404, name)


@both_protocols
def test_a_stop_ends_streams_with_an_error_frame(
    start_server: Callable[..., Server], protocol: Protocol
) -> None:
    server = start_server()
    queue, topic = make_queue(server), make_consumer(server)
    ok(server.write(queue, 1))
    streams = [work(server, queue, protocol=protocol), consume(server, topic, protocol=protocol)]
    jobs_of(streams[0], 1)
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    for stream in streams:
        (last,) = stream.rest()
        assert last.data["code"] == "server_shutting_down"
    server.process.wait(120)
