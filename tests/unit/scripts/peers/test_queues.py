"""Goal: the jobs of a queue are read right however the bytes are cut, and the page says how queues stand, hiding nothing.

Method: answers cut anywhere; producers and workers fed by hand; real rendering of small made-up results whose ratios are
worked out by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "scripts"))

from peers import merge_results, queue_aims, report  # noqa: E402
from peers.protocols import BadAnswer, Exchange, payload  # noqa: E402
from peers.queue_load import Producer, State, Work, Worker  # noqa: E402
from peers.queue_protocols import CLAIM_MAX, calls  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
PROTOCOLS = ("http", "resp", "nats")
DATA = payload(100)
CONFIRMED = b"MSG _INBOX.00003 1 0\r\n\r\n"
TIMEOUT = (
    b"HMSG _INBOX.00003 1 81 81\r\nNATS/1.0 408 Request Timeout\r\n"
    b"Nats-Pending-Messages: 3\r\nNats-Pending-Bytes: 0\r\n\r\n\r\n"
)


def http(body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def job(protocol: str, number: int) -> bytes:
    """What names a job in an ack."""
    if protocol == "http":
        return b"%d" % number
    return (
        b"1794803448625-%d" % number
        if protocol == "resp"
        else b"jobs.workers.1.%d.%d.17.0" % (number, number)
    )


def claim_answer(protocol: str, count: int) -> bytes:
    names = [job(protocol, number) for number in range(7, 7 + count)]
    if protocol == "http":
        jobs = [
            b'{"$seq":%b,"lease_id":"lease_2f","deadline":17,"$ts":16,"deliveries":1,"data":%b}' % (n, DATA)
            for n in names
        ]
        return http(b'{"topic":"jobs","claimed":[%b],"count":%d,"ready":0}' % (b",".join(jobs), count))
    if protocol == "resp":
        entry = b"*2\r\n$%d\r\n%b\r\n*2\r\n$1\r\nd\r\n$100\r\n%b\r\n"
        entries = [entry % (len(name), name, DATA) for name in names]
        head = b"*1\r\n*2\r\n$4\r\njobs\r\n*%d\r\n" % count
        return head + b"".join(entries) if count else b"*-1\r\n"
    messages = [b"MSG jobs.1 1 $JS.ACK.%b 100\r\n%b\r\n" % (name, DATA) for name in names]
    return b"".join(messages) + (TIMEOUT if count < CLAIM_MAX else b"")


def ack_answer(protocol: str, count: int) -> bytes:
    if protocol == "http":
        return http(b'{"topic":"jobs","acked":%d,"skipped":[],"ready":0,"in_flight":0}' % count)
    return b":%d\r\n:%d\r\n" % (count, count) if protocol == "resp" else CONFIRMED * count


def beginnings(data: st.DataObject, answer: bytes) -> list[bytes]:
    """What has come after each of some pieces, the last of which completes it."""
    return [answer[:cut] for cut in sorted(data.draw(st.sets(st.integers(1, len(answer) - 1), max_size=12)))]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(count=st.integers(0, CLAIM_MAX), data=st.data())
def test_a_claim_is_complete_with_its_last_byte_and_names_its_jobs(
    protocol: str, count: int, data: st.DataObject
) -> None:
    answer = claim_answer(protocol, count)
    system = calls(protocol)
    assert all(system.claimed(came) is None for came in beginnings(data, answer))
    assert system.claimed(answer) == [job(protocol, number) for number in range(7, 7 + count)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(count=st.integers(1, CLAIM_MAX), data=st.data())
def test_an_ack_is_complete_with_its_last_byte(protocol: str, count: int, data: st.DataObject) -> None:
    answer = ack_answer(protocol, count)
    system = calls(protocol)
    assert not any(system.acked(came, count) for came in beginnings(data, answer))
    assert system.acked(answer, count)


@given(at=st.integers(0, CLAIM_MAX), count=st.sampled_from([2, CLAIM_MAX]))
def test_a_ping_of_nats_between_messages_counts_for_nothing(at: int, count: int) -> None:
    nats = calls("nats")
    place = min(at, count) * len(claim_answer("nats", CLAIM_MAX)) // CLAIM_MAX
    answer = claim_answer("nats", count)
    assert nats.claimed(answer[:place] + b"PING\r\n" + answer[place:]) == nats.claimed(answer)
    assert nats.acked(CONFIRMED * at + b"PING\r\n" + CONFIRMED * (CLAIM_MAX - at), CLAIM_MAX)


@given(cut=st.integers(1, 5))
def test_half_a_ping_is_not_left_for_the_next_answer(cut: int) -> None:
    begun = b"PING\r\n"[:cut]
    assert calls("nats").claimed(claim_answer("nats", CLAIM_MAX) + begun) is None
    assert not calls("nats").acked(CONFIRMED * CLAIM_MAX + begun, CLAIM_MAX)


@pytest.mark.parametrize(
    ("protocol", "refusal"),
    [
        ("http", http(b"{}", b"404 Not Found")),
        ("resp", b"-NOGROUP No such key\r\n"),
        ("nats", b"HMSG _INBOX.00003 1 40 40\r\nNATS/1.0 409 Consumer Deleted\r\n\r\n\r\n"),
    ],
)
def test_a_refusal_is_no_claim(protocol: str, refusal: bytes) -> None:
    with pytest.raises(BadAnswer):
        calls(protocol).claimed(refusal)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_ack_of_other_jobs_than_asked_is_refused(protocol: str) -> None:
    with pytest.raises(BadAnswer):
        calls(protocol).acked(ack_answer(protocol, 8), 7)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_ack_names_each_job(protocol: str) -> None:
    jobs = [job(protocol, number) for number in (10, 11)]
    request = calls(protocol).ack(3, jobs)
    assert all(request.count(one) == (2 if protocol == "resp" else 1) for one in jobs)
    if protocol == "resp":
        assert request.startswith(b"*5\r\n$4\r\nXACK\r\n$4\r\njobs\r\n$7\r\nworkers\r\n$16\r\n")
        assert b"*4\r\n$4\r\nXDEL\r\n$4\r\njobs\r\n$16\r\n" in request


def shared_state(*, held: int = 0, waiting_max: int = 250) -> tuple[State, Producer, Worker]:
    batch = Exchange("http", b"batch", 100)
    state = State(Work("http", "", batch, 1, 1, waiting_max, 1.0, held=held))
    return state, Producer(state, batch, 1), Worker(state, 0)


def test_a_producer_sends_while_there_is_room() -> None:
    state, producer, _ = shared_state()
    assert producer.next() == b"batch"
    assert producer.feed(http(b"{}")) == b"batch"
    assert producer.feed(http(b"{}")) == b""  # 200 wait, and 100 more would be too many
    assert producer.idle
    state.acked += 50
    assert producer.next() == b"batch"
    assert state.sent == 300


def test_a_worker_acks_what_it_claimed_and_claims_again() -> None:
    state, _, worker = shared_state()
    claim = worker.next()
    answer = claim_answer("http", 3)
    assert worker.feed(answer[:50]) == b""
    assert worker.feed(answer[50:]).endswith(b'"seqs":[7,8,9]}')
    assert state.handed_out == [[b"7", b"8", b"9"]]
    assert worker.feed(ack_answer("http", 3)) == claim
    assert state.acked == 3
    assert worker.feed(claim_answer("http", 0)) == claim
    assert len(state.claims) == len(state.acks) == 1  # a claim that found nothing is not timed


def test_a_worker_stops_when_nothing_is_left_and_nothing_comes() -> None:
    state, producer, worker = shared_state()
    producer.next()
    claim = worker.next()
    state.over = True
    assert worker.feed(claim_answer("http", 0)) == claim  # a batch is still on its way
    producer.feed(http(b"{}"))
    assert worker.feed(claim_answer("http", 1))
    assert worker.feed(ack_answer("http", 1)) == claim
    assert worker.feed(claim_answer("http", 0)) == b""
    assert worker.idle


def test_a_queue_that_is_to_stay_as_long_as_it_is_is_not_drained() -> None:
    state, producer, worker = shared_state(held=1000, waiting_max=1000)
    assert producer.next() == b""
    worker.next()
    worker.feed(claim_answer("http", 1))
    state.over = True
    assert worker.feed(ack_answer("http", 1)) == b""
    assert worker.idle


def row(durability: str, workers: int, system: str, rates: list[float], **more: Any) -> dict[str, Any]:
    timed = {"p50_ms": 1.5, "p99_ms": 3.0, "ack_p50_ms": 0.5, "ack_p99_ms": 2.0}
    ours = {"front": 6.0, "shard": 9.0}
    return {
        "durability": durability,
        "workers": workers,
        "system": system,
        "rounds": [{"jobs_per_s": rate, **timed} for rate in rates],
        "jobs_per_s": sorted(rates)[len(rates) // 2],
        "jobs_per_claim": more.get("jobs_per_claim", 8.0),
        **timed,
        "cpu_us_per_job": {**(ours if system == "topics" else {"server": 10.0}), "load": 4.0},
        "generator_share": more.get("share", 0.5),
    }


def held_row(jobs: int, p50_ms: list[float]) -> dict[str, Any]:
    rounds = [{"p50_ms": one, "p99_ms": 9.0, "ack_p50_ms": 0.5, "ack_p99_ms": 2.0} for one in p50_ms]
    return {"jobs": jobs, "rounds": rounds, **rounds[len(rounds) // 2]}


def results() -> dict[str, Any]:
    return {
        "meta": {
            "date": "2026-01-02",
            "machine": "a made-up machine",
            "cores": 2,
            "kernel": "6.1",
            "python": "3.11",
            "filesystem": "ext4",
            "fsync_us": {"p50": 400, "p99": 1500},
            "versions": {},
            "missing": {},
            "seconds_per_point": 10,
            "rounds": 3,
            "command": "scripts/bench peers",
            "took_s": 1200,
        },
        "points": [],
        "queue": [
            # Quotients 1.8, 2.2 and 2.4, whose median meets the aim of 2.
            row("fsync", 16, "topics", [1800, 2200, 2400]),
            row("fsync", 16, "redis", [1000, 1000, 1000]),
            row("fsync", 16, "nats", [2000, 2000, 2000], share=0.95),
            row("disk", 50, "topics", [3000], jobs_per_claim=7.25),
            row("disk", 50, "redis", [6000]),
            row("disk", 50, "nats", [2500]),
        ],
        # Quotients 1.1, 1.5 and 1.2.
        "waiting": [held_row(1_000_000, [1.1, 1.5, 2.4]), held_row(1_000, [1.0, 1.0, 2.0])],
    }


def section(page: str, title: str) -> str:
    return page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_each_aim_has_its_verdict() -> None:
    summary = section(report.render(results())[0], "Summary")
    for line in (
        "| queue, 16 workers, fsync: jobs/s | Redis Streams, `always` | 2,200 | 1,000 | 2.20 × | ≥ 2 × | met |",
        "| queue, 16 workers, fsync: jobs/s | NATS JetStream, sync `always` | 2,200 | 2,000 | 1.10 × | ≥ 2 × | **missed by 45%** |",
        "| queue, 50 workers, fsync: jobs/s | Redis Streams, `always` | – | – | – | ≥ 2 × | not part of this run |",
        "| queue, 16 workers, disk: jobs/s | the slower peer | – | – | – | ≥ 1 × | not part of this run |",
        "| queue, 50 workers, disk: jobs/s | the slower: NATS JetStream, default sync | 3,000 | 2,500 | 1.20 × | ≥ 1 × | met |",
        "| p50 of a claim with 1,000,000 jobs waiting, in ms, over that with 1,000 | – | 1.5 | – | 1.20 × | ≤ 1.2 × | met |",
    ):
        assert line in summary
    assert "3 of 4 measured aims met." in summary


def test_the_slower_peer_is_not_guessed_when_one_is_missing() -> None:
    without = results()
    without["queue"] = [one for one in without["queue"] if one["system"] != "nats"]
    without["meta"]["missing"] = {"nats": "it is not here"}
    summary = section(report.render(without)[0], "Summary")
    line = "| queue, 50 workers, disk: jobs/s | the slower peer | 3,000 | – | – | ≥ 1 × | not measured: it is not here |"
    assert line in summary


def test_what_was_not_measured_is_an_aim_all_the_same() -> None:
    held = queue_aims.judge([], [])
    assert len(held) == 7
    assert not any(one.met or one.missed_by for one in held)


def test_where_topics_is_behind_has_queues_too() -> None:
    behind = section(report.render(results())[0], "Where topics is behind")
    assert "| queue, disk, 50 workers | Redis Streams | 3,000 jobs/s | 6,000 jobs/s | 0.50 × |" in behind
    assert "In 1 of 4 comparisons: 1 of 2 against Redis Streams, 0 of 2 against NATS JetStream." in behind


def test_the_section_shows_every_system_and_the_generator() -> None:
    page, plots = report.render(results())
    text = section(page, "A queue and its workers")
    cell = "<br>claim 1.5 / 3<br>ack 0.5 / 2"
    assert f"| 50 | **3,000**{cell} | **6,000**{cell} | **2,500**{cell} | 0.50 × | 1.20 × |" in text
    assert "| disk | 50 | 15 µs (front 6, shard 9); 7.25; 50% | 10 µs; 8; 50% | 10 µs; 8; 50% |" in text
    assert "**The generator's core was full** at: NATS JetStream, fsync, 16 workers." in text
    assert "| 1,000,000 | 1.5 | 9 | 1.20 × | 0.5 | 2 | 1.00 × |" in text
    for name in ("queue.svg", "waiting.svg"):
        assert f"](benchmarks/{name})" in text
        ElementTree.fromstring(plots[name])
    heads = [one.text for one in ElementTree.fromstring(plots["queue.svg"]).iter(f"{SVG}text")]
    assert {"workers", "jobs per second (log)", "p50 of a claim, ms (log)", "fsync", "disk"} <= set(heads)


def test_a_run_without_queues_says_so() -> None:
    without = results()
    del without["queue"], without["waiting"]
    assert section(report.render(without)[0], "A queue and its workers").strip() == "Not part of this run."


def test_queues_that_are_added_bring_both_their_parts() -> None:
    earlier, later = results(), results()
    earlier["waiting"], later["failed"] = [], []
    later["queue"] = later["queue"][:2]
    whole = merge_results.merge(earlier, later, ("queue",))
    assert whole["queue"] == later["queue"]
    assert whole["waiting"] == later["waiting"]
    assert json.loads(json.dumps(whole["aims"])) == merge_results.aims(whole)
