"""Goal: a read returns the records, the end of what it covered, and every loss, and waits only when it must.

Method: whole pages are compared. Long polls are sent first and answered by a later change; only tests of deadlines wait for time
to pass, with short deadlines.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.contract import (
    U32_MAX,
    U64_MAX,
    Json,
    data_of,
    ok,
    one_record,
    poll,
    records_of,
    refused,
    send_text,
)
from tests.support.server import Server, until


def page_of(server: Server, topic: str, **fields: Any) -> Json:
    """A page whose records are reduced to their seqs."""
    page = ok(server.diff(topic, **fields))
    page["records"] = [record["$seq"] for record in page["records"]]
    return page


def page(
    topic: str, records: list[int], next_from_seq: int, head: int, earliest: int, tombstone: Any = None
) -> Json:
    return {
        "topic": topic,
        "records": records,
        "next_from_seq": next_from_seq,
        "head_seq": head,
        "earliest_seq": earliest,
        "caught_up": next_from_seq == head,
        "tombstone": tombstone,
        "lag": head - next_from_seq,
    }


def gap(first: int, last: int, reason: str, head: int, earliest: int | None = None) -> Json:
    return {
        "gap_from": first,
        "gap_to": last,
        "reason": reason,
        "missed_estimate": last - first + 1,
        "earliest_seq": last + 1 if earliest is None else earliest,
        "head_seq": head,
    }


# -- pages -------------------------------------------------------------------------------------------------


def test_an_absent_topic(shared_server: Server, topic: str) -> None:
    refused(shared_server.diff(topic), 404, "topic_not_found", {"topic": topic})
    refused(shared_server.diff(topic, wait_ms=30_000), 404, "topic_not_found", {"topic": topic})
    refused(shared_server.get(f"/v0/topics/{topic}"), 404, "topic_not_found")  # a read creates nothing


def test_a_whole_page(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}")
    assert page_of(shared_server, topic) == page(topic, [], 0, 0, 1)
    shared_server.write(topic, *range(5))
    assert page_of(shared_server, topic) == page(topic, [1, 2, 3, 4, 5], 5, 5, 1)
    assert page_of(shared_server, topic, from_seq=2) == page(topic, [3, 4, 5], 5, 5, 1)
    assert page_of(shared_server, topic, from_seq=1, limit=2) == page(topic, [2, 3], 3, 5, 1)
    assert page_of(shared_server, topic, from_seq=4) == page(topic, [5], 5, 5, 1)
    assert page_of(shared_server, topic, from_seq=5) == page(topic, [], 5, 5, 1)
    assert list(ok(shared_server.diff(topic))["records"][0]) == ["$seq", "$ts", "data"]


def test_following_next_from_seq_reads_everything_once(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, *range(50))
    shared_server.post(f"/v0/topics/{topic}/delete", {"seqs": [1, 7, 8, 9, 21, 50]})
    seen: list[int] = []
    from_seq, pages = 0, 0
    while True:
        found = page_of(shared_server, topic, from_seq=from_seq, limit=7)
        seen += found["records"]
        assert found["next_from_seq"] > from_seq
        from_seq, pages = found["next_from_seq"], pages + 1
        if found["caught_up"]:
            break
    assert seen == sorted(set(range(1, 51)) - {1, 7, 8, 9, 21, 50})
    assert (from_seq, pages) == (50, 7)


@pytest.mark.parametrize(
    ("limit", "count"),
    [(0, 256), (1, 1), (256, 256), (1000, 1000), (1001, 1000), (U32_MAX, 1000), (None, 256)],
)
def test_limit(shared_server: Server, limit: int | None, count: int) -> None:
    body = {"records": [{"data": 0}] * 1100, "idempotency_key": "once"}
    shared_server.post("/v0/topics/read-limit", body)
    fields = {} if limit is None else {"limit": limit}
    found = page_of(shared_server, "read-limit", **fields)
    assert found == page("read-limit", list(range(1, count + 1)), count, 1100, 1)


# -- bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_batch_bytes", "count"),
    [(1, 1), (99, 1), (100, 1), (199, 1), (200, 2), (250, 2), (1000, 10), (0, 10)],
)
@pytest.mark.parametrize(
    "members",
    [
        f'"data":"{"x" * 98}"',
        f'"data":"{"x" * 91}","meta":{{"k":1}}',
        f'"data": [1,{" " * 5000}"{"x" * 94}"]',
        f'"data":"{"x" * 98}","tag":"{"t" * 200}","node":"{"n" * 100}"',
        '"data":"' + r"\u0041" * 98 + '"',
    ],
    ids=["plain", "meta", "blanks", "labels", "escapes"],
)  # fmt: skip
def test_max_batch_bytes_counts_the_bytes_of_records(
    shared_server: Server, topic: str, members: str, max_batch_bytes: int, count: int
) -> None:
    text = one_record("},{".join([members] * 10))
    ok(send_text(shared_server, "POST", f"/v0/topics/{topic}", text), 201)
    found = page_of(shared_server, topic, max_batch_bytes=max_batch_bytes)
    assert found["records"] == list(range(1, count + 1))


def test_the_default_and_the_largest_max_batch_bytes(shared_server: Server, topic: str) -> None:
    size = 1_048_576
    for _ in range(10):
        shared_server.write(topic, "x" * (size - 2))
    for max_batch_bytes, count in (
        (0, 1),
        (1, 1),
        (size, 1),
        (2 * size - 1, 1),
        (2 * size, 2),
        (8 * size, 8),
        (U64_MAX, 8),
    ):
        found = page_of(shared_server, topic, max_batch_bytes=max_batch_bytes)
        assert found["records"] == list(range(1, count + 1)), max_batch_bytes


# -- filters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "seqs"),
    [
        (None, [1, 2, 3, 4]),
        ("a", [2, 3, 4]),
        ("b", [1, 3, 4]),
        (["a", "b"], [3, 4]),
        (["a"], [2, 3, 4]),
        ([], [1, 2, 3, 4]),
        ("", [1, 2, 3, 4]),
        ("c", [1, 2, 3, 4]),
        ("A", [1, 2, 3, 4]),
        ("aa", [1, 2, 4]),
        (["a", "a", "aa", "b"], [4]),
    ],
)
def test_own_records_are_left_out(shared_server: Server, topic: str, node: Any, seqs: list[int]) -> None:
    records = [{"data": 0, "node": name} for name in ("a", "b", "aa", None)]
    shared_server.post(f"/v0/topics/{topic}", {"records": records})
    assert page_of(shared_server, topic, node=node) == page(topic, seqs, 4, 4, 1)


def test_filtered_records_advance_the_cursor(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, *range(300), node="me")
    assert page_of(shared_server, topic, node="me", limit=10) == page(topic, [], 300, 300, 1)


def test_dedupe_node_switches_the_filter_off(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"dedupe_node": False})
    shared_server.write(topic, 1, 2, node="me")
    assert page_of(shared_server, topic, node="me")["records"] == [1, 2]


@pytest.mark.parametrize("include_tags", [True, False])
@pytest.mark.parametrize("include_meta", [True, False])
@pytest.mark.parametrize("include_data", [True, False])
def test_optional_fields_are_included_on_request(
    shared_server: Server, topic: str, include_tags: bool, include_meta: bool, include_data: bool
) -> None:
    rows = [
        {"data": 1, "tag": "t", "meta": {"k": 1}, "node": "n"},
        {"data": 2, "meta": {"k": 2}},
        {"data": 3},
    ]
    shared_server.post(f"/v0/topics/{topic}", {"records": rows})
    found = records_of(
        shared_server, topic, include_tags=include_tags, include_meta=include_meta, include_data=include_data
    )
    for record in found:
        del record["$ts"]
    shown = {"data": include_data, "meta": include_meta, "$tag": include_tags, "$node": True, "$seq": True}
    names = {"tag": "$tag", "node": "$node"}
    expected = [
        {"$seq": seq, **{names.get(key, key): value for key, value in row.items()}}
        for seq, row in enumerate(rows, 1)
    ]
    assert found == [{key: value for key, value in row.items() if shown[key]} for row in expected]


# -- tombstones --------------------------------------------------------------------------------------------


def test_a_cap_is_announced(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"cap_records": 3})
    shared_server.write(topic, *range(5))
    assert page_of(shared_server, topic) == page(topic, [3, 4, 5], 5, 5, 3, gap(1, 2, "cap", 5))
    assert page_of(shared_server, topic, from_seq=1) == page(topic, [3, 4, 5], 5, 5, 3, gap(2, 2, "cap", 5))
    assert page_of(shared_server, topic, from_seq=2) == page(topic, [3, 4, 5], 5, 5, 3)
    assert page_of(shared_server, topic, limit=1) == page(topic, [3], 3, 5, 3, gap(1, 2, "cap", 5))
    assert page_of(shared_server, topic, from_seq=3, limit=1) == page(topic, [4], 4, 5, 3)


def test_deletes_behind_a_gap_are_silent(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"cap_records": 3})
    shared_server.write(topic, *range(5))
    shared_server.post(f"/v0/topics/{topic}/delete", {"before_seq": 5})
    assert page_of(shared_server, topic) == page(topic, [5], 5, 5, 5, gap(1, 2, "cap", 5))
    assert page_of(shared_server, topic, from_seq=2) == page(topic, [5], 5, 5, 5)


def test_deletes_in_front_of_a_gap_do_not_hide_it(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"cap_records": 2})
    shared_server.write(topic, 1, 2)
    shared_server.post(f"/v0/topics/{topic}/delete", {"before_seq": 2})
    shared_server.write(topic, 3, 4)
    assert page_of(shared_server, topic) == page(topic, [3, 4], 4, 4, 3, gap(1, 2, "cap", 4))


def test_deletes_alone_are_silent(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, *range(5))
    shared_server.post(f"/v0/topics/{topic}/delete", {"before_seq": 4})
    assert page_of(shared_server, topic) == page(topic, [4, 5], 5, 5, 4)
    assert page_of(shared_server, topic, from_seq=1) == page(topic, [4, 5], 5, 5, 4)
    shared_server.post(f"/v0/topics/{topic}/delete", {"before_seq": 99})
    assert page_of(shared_server, topic) == page(topic, [], 5, 5, 6)


def test_a_ttl_is_announced(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"ttl_ms": 50})
    shared_server.write(topic, 1, 2, 3)
    until(lambda: page_of(shared_server, topic)["tombstone"])
    assert page_of(shared_server, topic) == page(topic, [], 3, 3, 4, gap(1, 3, "ttl", 3))
    assert page_of(shared_server, topic, from_seq=2) == page(topic, [], 3, 3, 4, gap(3, 3, "ttl", 3))
    assert page_of(shared_server, topic, from_seq=3) == page(topic, [], 3, 3, 4)
    shared_server.put(f"/v0/topics/{topic}")
    shared_server.write(topic, 4)
    assert page_of(shared_server, topic) == page(topic, [4], 4, 4, 4, gap(1, 3, "ttl", 4))


def test_both_causes_are_mixed(shared_server: Server, topic: str) -> None:
    """A cause counts if it applies to the part of the gap that this reader has not read."""
    shared_server.put(f"/v0/topics/{topic}", {"cap_records": 2})
    shared_server.write(topic, 1, 2, 3, 4)
    shared_server.put(f"/v0/topics/{topic}", {"ttl_ms": 30})
    until(lambda: page_of(shared_server, topic)["earliest_seq"] == 5)
    assert page_of(shared_server, topic)["tombstone"] == gap(1, 4, "mixed", 4)
    assert page_of(shared_server, topic, from_seq=1)["tombstone"] == gap(2, 4, "mixed", 4)
    assert page_of(shared_server, topic, from_seq=2)["tombstone"] == gap(3, 4, "ttl", 4)


@pytest.mark.parametrize("from_seq", [3, 4, 100, 2**63, U64_MAX])
def test_a_cursor_beyond_the_head_is_from_another_topic(
    shared_server: Server, topic: str, from_seq: int
) -> None:
    shared_server.put(f"/v0/topics/{topic}")
    assert page_of(shared_server, topic, from_seq=from_seq) == page(
        topic, [], 0, 0, 1, gap(1, 0, "recreated", 0)
    )
    shared_server.write(topic, 1, 2)
    found = page_of(shared_server, topic, from_seq=from_seq)
    assert found["tombstone"] == gap(1, 2, "recreated", 2, found["tombstone"]["earliest_seq"])
    assert found == page(topic, [1, 2], 2, 2, 1, found["tombstone"])
    assert page_of(shared_server, topic, from_seq=2) == page(topic, [], 2, 2, 1)


def test_recreated_resumes_at_the_first_live_record(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, *range(6))
    shared_server.post(f"/v0/topics/{topic}/delete", {"before_seq": 3})
    found = page_of(shared_server, topic, from_seq=50, limit=2)
    assert (found["records"], found["next_from_seq"], found["lag"]) == ([3, 4], 4, 2)
    assert found["tombstone"]["reason"] == "recreated"


# -- long polls --------------------------------------------------------------------------------------------


def test_a_long_poll_ends_with_the_next_record(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, 1)
    waiting = poll(shared_server, topic, from_seq=1)
    shared_server.write(topic, 2)
    assert data_of(shared_server, topic) == [1, 2]
    body = ok(waiting.reply())
    assert [record["data"] for record in body["records"]] == [2]
    assert (body["next_from_seq"], body["caught_up"]) == (2, True)


def test_many_polls_of_one_topic(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}")
    waiting = [poll(shared_server, topic, limit=i % 3) for i in range(20)]
    shared_server.write(topic, 1)
    assert all([r["data"] for r in ok(one.reply())["records"]] == [1] for one in waiting)


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_a_long_poll_on_every_class(shared_server: Server, topic: str, durability: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"durability": durability})
    waiting = poll(shared_server, topic, wait_ms=U32_MAX)
    shared_server.write(topic, 1)
    assert len(ok(waiting.reply())["records"]) == 1


def test_a_long_poll_ends_at_its_deadline(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, 1)
    began = time.monotonic()
    assert page_of(shared_server, topic, from_seq=1, wait_ms=120) == page(topic, [], 1, 1, 1)
    assert time.monotonic() - began > 0.1


def test_a_long_poll_ends_with_a_filtered_record_too(shared_server: Server, topic: str) -> None:
    """Its cursor moves past the record, so that it is not filtered again."""
    shared_server.put(f"/v0/topics/{topic}")
    waiting = poll(shared_server, topic, node="me")
    shared_server.write(topic, 1, node="me")
    body = ok(waiting.reply())
    assert (body["records"], body["next_from_seq"]) == ([], 1)


@pytest.mark.parametrize("durability", ["ephemeral", "disk", "fsync"])
@pytest.mark.parametrize("how", ["filtered", "deleted", "another tag", "too early"])
def test_a_long_poll_waits_when_its_first_look_is_caught_up(
    shared_server: Server, topic: str, how: str, durability: str
) -> None:
    """Caught up means that no records are left, also if the cursor had to move past filtered ones."""
    shared_server.put(f"/v0/topics/{topic}", {"durability": durability})
    shared_server.write(topic, 1, 2, node="me")
    if how == "deleted":
        shared_server.post(f"/v0/topics/{topic}/delete", {"before_seq": 9})
    asked: Json = {
        "filtered": {"node": "me"},
        "deleted": {},
        "another tag": {"tag": "t"},
        "too early": {"from_ts": 2**50},
    }[how]
    assert ok(shared_server.diff(topic, wait_ms=50, **asked))["next_from_seq"] == 2
    waiting = poll(shared_server, topic, **asked)
    shared_server.write(topic, 3)
    body = ok(waiting.reply())
    assert (body["next_from_seq"], body["caught_up"]) == (3, True)
    assert [record["$seq"] for record in body["records"]] == ([3] if how in ("filtered", "deleted") else [])


@pytest.mark.parametrize("from_seq", [0, 1, 99])
def test_a_long_poll_does_not_wait_when_there_is_something(
    shared_server: Server, topic: str, from_seq: int
) -> None:
    """Records after the cursor, or a tombstone."""
    shared_server.write(topic, 1, 2)
    began = time.monotonic()
    body = ok(shared_server.diff(topic, from_seq=from_seq, wait_ms=30_000))
    assert body["records"] or body["tombstone"]
    assert time.monotonic() - began < 25


def test_a_tombstone_alone_ends_the_wait(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"ttl_ms": 30})
    shared_server.write(topic, 1)
    until(lambda: page_of(shared_server, topic)["tombstone"])
    assert page_of(shared_server, topic, wait_ms=30_000)["tombstone"]["reason"] == "ttl"


def test_a_poll_whose_client_disconnects_does_no_harm(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}")
    left, stays = poll(shared_server, topic), poll(shared_server, topic)
    left._connection.close()
    shared_server.write(topic, 1)
    assert len(ok(stays.reply())["records"]) == 1
