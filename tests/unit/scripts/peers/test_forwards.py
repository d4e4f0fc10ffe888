"""Goal: copies are counted correctly on every system, and the page shows all results of copies.

Method: answers made by hand; a pair of watchers without sockets; real rendering of small made-up results whose ratios
are computed by hand.
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

from peers import forward_aims, forward_protocols, forwards, merge_results, protocols, report  # noqa: E402
from peers.forward_load import Timings  # noqa: E402
from peers.protocols import BadAnswer  # noqa: E402
from peers.systems import Nats, Redis, Target, Topics  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"


def without_server(kind: type[Target]) -> Any:
    target = kind.__new__(kind)
    target.address, target.durability = "127.0.0.1:1", "disk"
    return target


# -- writes ------------------------------------------------------------------------------------------------------


@given(count=st.integers(1, 3), dests=st.integers(1, 4), data=st.data())
def test_a_transaction_of_redis_is_acknowledged_with_its_last_byte(
    count: int, dests: int, data: st.DataObject
) -> None:
    write = forward_protocols.write(without_server(Redis), b"{}", count, dests)
    streams = dests + 1
    one = b"+OK\r\n" + b"+QUEUED\r\n" * streams + b"*%d\r\n" % streams + b"$4\r\n17-0\r\n" * streams
    answer = one * count
    cut = data.draw(st.integers(1, len(answer) - 1))
    assert [write.is_complete(answer[:cut]), write.is_complete(answer)] == [False, True]
    assert write.records == count
    assert write.request.count(b"XADD") == streams * count
    assert write.request.count(b"MULTI") == write.request.count(b"EXEC") == count


def test_a_refused_transaction_of_redis_is_no_ack() -> None:
    write = forward_protocols.write(without_server(Redis), b"{}", 1, 1)
    with pytest.raises(BadAnswer):
        write.is_complete(b"+OK\r\n+QUEUED\r\n-ERR no such thing\r\n-EXECABORT Transaction discarded\r\n")


@pytest.mark.parametrize(("kind", "dests"), [(Topics, 0), (Topics, 100), (Nats, 100), (Redis, 0)])
def test_a_writer_that_does_not_copy_writes_to_the_source_alone(kind: type[Target], dests: int) -> None:
    target = without_server(kind)
    write = forward_protocols.write(target, b"{}", 1, dests)
    assert write == target.write(b"{}", 1, f"source-{dests}")
    assert b"dest-" not in write.request


@pytest.mark.parametrize("dests", forward_aims.DESTS)
def test_the_copies_of_a_flood_are_bounded(dests: int) -> None:
    most = forwards.requests_max(dests)
    assert dests * most * forwards.BATCH <= forwards.COPIES_MAX
    assert most >= forwards.FLOOD_CLIENTS or not dests


# -- counts ------------------------------------------------------------------------------------------------------


def test_lengths_of_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        protocols, "ask", lambda address, exchange: b":12\r\n:12\r\n:9\r\n"[: 5 * exchange.replies]
    )
    assert forward_protocols.lengths(without_server(Redis), 2) == (12, [12, 9])


def test_lengths_of_nats_are_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"dest-2-0001": 9, "source-2": 12, "dest-2-0000": 12, "other": 5}
    streams = [{"config": {"name": name}, "state": {"messages": count}} for name, count in kept.items()]
    body = json.dumps({"streams": streams}).encode()
    monkeypatch.setattr(protocols, "nats_ask", lambda *asked: b"MSG _INBOX.99999 1 9\r\n" + body + b"\r\n")
    assert forward_protocols.lengths(without_server(Nats), 2) == (12, [12, 9])


def test_lengths_of_topics_do_not_make_it_catch_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Server:
        address = "127.0.0.1:1"

        def call(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
            asked.append(path)
            rows = [{"router": f"dest-2-000{i}", "forwarded_total": total} for i, total in enumerate((12, 9))]
            body = {"head_seq": 12} if path == "/v0/topics/source-2" else {"routers": rows}
            return 200, {}, json.dumps(body).encode()

    target = Topics("disk", Server())  # type: ignore[arg-type]
    assert forward_protocols.lengths(target, 2) == (12, [12, 9])
    assert not any(path.startswith(("/v0/topics/dest", "/v0/routers/")) for path in asked)


def await_copies(monkeypatch: pytest.MonkeyPatch, *seen: tuple[int, list[int]]) -> int:
    left = list(seen)
    monkeypatch.setattr(forward_protocols, "lengths", lambda *asked: left.pop(0))
    monkeypatch.setattr(forwards, "POLL_S", 0.0)
    head = forwards.await_copies(without_server(Redis), len(seen[0][1]))
    assert not left
    return head


def test_copies_are_awaited_until_the_last_dest_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await_copies(monkeypatch, (5, [5, 3]), (6, [6, 5]), (6, [6, 6])) == 6


def test_writes_between_two_polls_are_not_counted_as_second_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await_copies(monkeypatch, (5, [6]), (6, [6]), (6, [6])) == 6


@pytest.mark.parametrize("found", [(5, [5, 6]), (5, [5, 5, 5])])
def test_a_copy_too_many_is_no_result(monkeypatch: pytest.MonkeyPatch, found: tuple[int, list[int]]) -> None:
    monkeypatch.setattr(forward_protocols, "lengths", lambda *asked: found)
    with pytest.raises(BadAnswer):
        forwards.await_copies(without_server(Redis), 2)


def test_copies_that_never_come_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_protocols, "lengths", lambda *asked: (5, [4]))
    monkeypatch.setattr(forwards, "DRAIN_S", 0.0)
    with pytest.raises(BadAnswer, match="4 records of 5"):
        forwards.await_copies(without_server(Redis), 1)


# -- watchers of both ends ---------------------------------------------------------------------------------------


def test_added_latency_of_a_copy_is_between_watchers() -> None:
    timings = Timings()
    timings.send(10.0)
    timings.see("source", 1, 11.0)
    timings.see("source", 0, 11.5)  # a heartbeat
    timings.acknowledged = True
    assert not timings.is_complete
    timings.see("dest", 1, 13.5)
    assert timings.is_complete
    timings.keep()
    assert (list(timings.source), list(timings.dest), list(timings.added)) == ([1.0], [3.5], [2.5])


def test_a_record_that_is_seen_twice_is_no_result() -> None:
    timings = Timings()
    timings.send(0.0)
    timings.see("dest", 1, 1.0)
    with pytest.raises(BadAnswer):
        timings.see("dest", 1, 2.0)
    with pytest.raises(BadAnswer):
        timings.see("source", 2, 2.0)


@pytest.mark.parametrize(("placement", "is_same"), forward_aims.PLACEMENTS.items())
def test_a_dest_is_where_it_is_said_to_be(placement: str, is_same: bool) -> None:
    from topics.engine.core.placement import shard_of

    dest = forwards.named_at("lag-source", is_same)
    assert (shard_of(dest, forwards.SHARDS) == shard_of("lag-source", forwards.SHARDS)) == is_same


# -- aims and page -----------------------------------------------------------------------------------------------


def row(system: str, dests: int, ack_ms: list[float], copies: float = 0.0, **more: Any) -> dict[str, Any]:
    figures = {"ack_p99_ms": 9.0, "writes_per_s": 50.0, "records_per_s": more.get("written", 1000.0)}
    if dests:
        figures["copies_per_s"] = copies
    ours = {"front": 0.5, "shard": 2.5}
    return {
        "system": system,
        "dests": dests,
        "rounds": [{"ack_p50_ms": one, **figures} for one in ack_ms],
        "ack_p50_ms": sorted(ack_ms)[len(ack_ms) // 2],
        **figures,
        "cpu_us_per_copy": {**(ours if system == "topics" else {"server": 4.0}), "load": 1.0},
        "generator_share": more.get("share", 0.1),
    }


def lag_row(placement: str, added_ms: float) -> dict[str, Any]:
    timed = {"p50_ms": added_ms, "source_p50_ms": 1.0, "dest_p50_ms": 1.0 + added_ms}
    return {"placement": placement, **timed, "p99_ms": 5.0, "source_p99_ms": 4.0, "dest_p99_ms": 8.5}


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
        "forward": [
            row("topics", 0, [1.0, 1.0, 2.0]),
            # Quotients 1.1, 1.5 and 1.2, whose median meets the aim.
            row("topics", 1, [1.1, 1.5, 2.4], 900.0, written=500.0),
            row("topics", 100, [2.0, 2.0, 4.0], 3000.0),
            row("nats", 0, [0.5]),
            row("nats", 100, [1.0], 1500.0),
            row("redis", 100, [3.0], 6000.0, share=0.95),
        ],
        "lag": [lag_row("same worker", 0.8), lag_row("another worker", 2.5)],
    }


def section(page: str, title: str) -> str:
    return page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_each_aim_has_its_verdict() -> None:
    summary = section(report.render(results())[0], "Summary")
    acks = "at a pace: p50 of an ack, in ms, over that with none | –"
    for line in (
        f"| source with 1 router, {acks} | 1.5 | – | 1.20 × | ≤ 1.2 × | met |",
        f"| source with 100 routers, {acks} | 2 | – | 2.00 × | ≤ 1.2 × | **missed by 67%** |",
        f"| source with 1000 routers, {acks} | – | – | – | ≤ 1.2 × | not part of this run |",
        "| source with 1000 routers, at a pace: writes/s, over those with none | – | – | – | – | ≥ 0.95 × | not part of this run |",
        "| one source, 10 dests: copies/s | NATS JetStream, default sync | – | – | – | ≥ 1 × | not part of this run |",
        "| one source, 100 dests: copies/s | NATS JetStream, default sync | 3,000 | 1,500 | 2.00 × | ≥ 1 × | met |",
        "| dest at another worker: p50 of what a copy adds from write to seen | – | 2.5 ms | – | – | ≤ 2 ms | **missed by 25%** |",
    ):
        assert line in summary
    assert "2 of 4 measured aims met." in summary


def test_unmeasured_aims_are_listed() -> None:
    held = forward_aims.judge([], [])
    assert len(held) == 7
    assert not any(one.met or one.missed_by for one in held)


def test_where_topics_is_behind_has_copies_too() -> None:
    behind = section(report.render(results())[0], "Where topics is behind")
    assert "| one source, 100 dests | Redis Streams | 3,000 copies/s | 6,000 copies/s | 0.50 × |" in behind
    assert "In 1 of 2 comparisons: 1 of 1 against Redis Streams, 0 of 1 against NATS JetStream." in behind


def test_the_section_shows_every_system_and_both_watchers() -> None:
    page, plots = report.render(results())
    text = section(page, "One source and its copies")
    assert "| 0 | **1 / 9**<br>1.00 ×; 50/s | – | **0.5 / 9**<br>1.00 ×; 50/s |" in text
    assert "| 100 | **2 / 9**<br>2.00 ×; 50/s | **3 / 9**<br>–; 50/s | **1 / 9**<br>2.00 ×; 50/s |" in text
    assert "| 1 | **900**<br>500 written/s, 0.50 × | – | – | – | – |" in text
    written = "<br>1,000 written/s"
    assert (
        f"| 100 | **3,000**{written}, 1.00 × | **6,000**{written}, – | **1,500**{written}, 1.00 × | 0.50 × | 2.00 × |"
        in text
    )
    assert "| 100 | 3 µs (front 0.5, shard 2.5); 10% | 4 µs; 95% | 4 µs; 10% |" in text
    assert "**The generator's core was full** at: Redis Streams, 100 dests." in text
    assert "| dest at the same worker | 1 / 4 | 1.8 / 8.5 | **0.8 / 5** |" in text
    assert "| dest at another worker | 1 / 4 | 3.5 / 8.5 | **2.5 / 5** |" in text
    assert "](benchmarks/forward.svg)" in text
    heads = [one.text for one in ElementTree.fromstring(plots["forward.svg"]).iter(f"{SVG}text")]
    assert {"dests", "copies per second (log)", "p50 of an ack, ms (log)"} <= set(heads)


def test_a_peer_that_is_not_here_says_so() -> None:
    without = results()
    without["forward"] = [one for one in without["forward"] if one["system"] == "topics"]
    without["meta"]["missing"] = {"nats": "it is not here"}
    page, _ = report.render(without)
    assert "| one source, 100 dests: copies/s | NATS JetStream, default sync | 3,000 | – | – | ≥ 1 × | not measured: it is not here |" in page  # fmt: skip
    assert "NATS JetStream (not measured: it is not here)" in section(page, "One source and its copies")


def test_sources_without_dests_alone_make_a_page_too() -> None:
    alone = results()
    alone["forward"], alone["lag"] = [row("topics", 0, [1.0])], []
    page, plots = report.render(alone)
    assert "Copies a second" not in section(page, "One source and its copies")
    ElementTree.fromstring(plots["forward.svg"])


def test_a_run_without_copies_says_so() -> None:
    without = results()
    del without["forward"], without["lag"]
    assert section(report.render(without)[0], "One source and its copies").strip() == "Not part of this run."


def test_copies_that_are_added_bring_both_their_parts() -> None:
    earlier, later = results(), results()
    earlier["lag"], later["failed"] = [], []
    later["forward"] = later["forward"][:2]
    whole = merge_results.merge(earlier, later, ("forward",))
    assert whole["forward"] == later["forward"]
    assert whole["lag"] == later["lag"]
    assert json.loads(json.dumps(whole["aims"])) == merge_results.aims(whole)
