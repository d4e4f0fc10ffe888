"""Goal: deletes of records remove exactly what their selectors name, at once, permanently and without tombstones.

Method: one topic with known tags per case; the answer and the remaining records are compared as a whole.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.contract import U64_MAX, Json, data_of, ok, records_of, refused, state_of
from tests.support.queue_client import claim, make_queue, seqs_of, settle
from tests.support.server import Server, until

TAGS = ["a", "ab", "a*", "a*b", "b", "", "*", None, "a", "a.b", "é", "ab*"]
ALL = list(range(1, len(TAGS) + 1))


def fill(server: Server, topic: str) -> None:
    records = [{"data": i, "tag": tag} for i, tag in enumerate(TAGS, 1)]
    ok(server.post(f"/v0/topics/{topic}", {"records": records}), 201)


def delete(server: Server, topic: str, **fields: Any) -> Json:
    return ok(server.post(f"/v0/topics/{topic}/delete", fields))


@pytest.mark.parametrize(
    ("fields", "gone"),
    [
        ({"before_seq": 0}, []),
        ({"before_seq": 1}, []),
        ({"before_seq": 2}, [1]),
        ({"before_seq": 12}, ALL[:-1]),
        ({"before_seq": 13}, ALL),
        ({"before_seq": U64_MAX}, ALL),
        ({"match": "a"}, [1, 9]),
        ({"match": ["tag", "Eq", "a"]}, [1, 9]),
        ({"match": "a*"}, [1, 2, 3, 4, 9, 10, 12]),
        ({"match": ["tag", "Glob", "a*"]}, [1, 2, 3, 4, 9, 10, 12]),
        ({"match": ["tag", "Eq", "a*"]}, [3]),
        ({"match": "a*b"}, [4]),
        ({"match": ["tag", "Eq", "a*b"]}, [4]),
        ({"match": ["tag", "Glob", "a**"]}, [3, 4]),
        ({"match": "a*b*"}, [4]),
        ({"match": "*"}, [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12]),
        ({"match": ["tag", "Glob", "*"]}, [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12]),
        ({"match": ["tag", "Eq", "*"]}, [7]),
        ({"match": "**"}, [7]),
        ({"match": ""}, [6]),
        ({"match": ["tag", "Eq", ""]}, [6]),
        ({"match": "é"}, [11]),
        ({"match": "é*"}, [11]),
        ({"match": "A"}, []),
        ({"match": "absent"}, []),
        ({"match": "absent*"}, []),
        ({"match": "a", "before_seq": 9}, [1]),
        ({"match": "a", "before_seq": 1}, []),
        ({"match": "a*", "before_seq": 4}, [1, 2, 3]),
        ({"match": "a", "before_seq": None}, [1, 9]),
        ({"match": None, "before_seq": 3}, [1, 2]),
        ({"subject": ">"}, [1, 2, 3, 4, 5, 7, 9, 10, 11, 12]),
        ({"subject": "*"}, [1, 2, 3, 4, 5, 7, 9, 11, 12]),
        ({"subject": "*.*"}, [10]),
        ({"subject": "a.>"}, [10]),
        ({"subject": "a"}, [1, 9]),
        ({"subject": "a*"}, [3]),
        ({"subject": "é"}, [11]),
        ({"subject": "absent.>"}, []),
        ({"subject": ">", "before_seq": 3}, [1, 2]),
        ({"subject": None, "before_seq": 3}, [1, 2]),
        ({"subject": "*", "match": None}, [1, 2, 3, 4, 5, 7, 9, 11, 12]),
        ({"subject": "*", "match": "a*"}, [1, 2, 3, 4, 9, 12]),
        ({"subject": "*.b", "match": "a*"}, [10]),
        ({"subject": "a", "match": "b"}, []),
        ({"subject": "*", "match": "a*", "before_seq": 4}, [1, 2, 3]),
        ({"subject": ">", "seqs": [2, 8, 10]}, [2, 10]),
        ({"subject": "*", "match": "a*", "seqs": [2, 5, 10]}, [2]),
        ({"subject": "*", "keep": 1}, [1]),
        ({"subject": "*", "match": "a", "keep": 0}, [1, 9]),
        ({"subject": "a", "erase": True}, [1, 9]),
    ],
)
def test_selectors(shared_server: Server, topic: str, fields: Json, gone: list[int]) -> None:
    fill(shared_server, topic)
    left = [seq for seq in ALL if seq not in gone]
    expected = {
        "topic": topic,
        "deleted": len(gone),
        "earliest_seq": left[0] if left else 13,
        "head_seq": 12,
        "count": len(left),
        "bytes": sum(len(str(seq)) for seq in left),
    }
    assert delete(shared_server, topic, **fields) == expected
    assert data_of(shared_server, topic) == left
    assert delete(shared_server, topic, **fields) == {**expected, "deleted": 0}
    state = state_of(shared_server, topic)
    assert {name: state[name] for name in expected if name != "deleted"} == {
        name: value for name, value in expected.items() if name != "deleted"
    }


@pytest.mark.parametrize(
    "match",
    [
        [], ["tag"], ["tag", "Eq"], ["tag", "Eq", "a", "b"], ["node", "Eq", "a"], ["Tag", "Eq", "a"], ["tag", "eq", "a"],
        ["tag", "Ne", "a"], ["tag", "Glob", "a"], ["tag", "Glob", ""], ["tag", "Glob", "*a"], ["tag", "Eq", 5],
        ["tag", "Eq", None], ["tag", "Subject", "a.*"], 5, True, {"tag": "a"}, ["a", "b"], [["tag", "Eq", "a"]],
    ],
)  # fmt: skip
def test_invalid_predicates(shared_server: Server, topic: str, match: Any) -> None:
    fill(shared_server, topic)
    reply = shared_server.post(f"/v0/topics/{topic}/delete", {"match": match, "before_seq": 99})
    refused(reply, 400, "invalid_request")
    assert data_of(shared_server, topic) == ALL
    refused(shared_server.post("/v0/topics/absent/delete", {"match": match}), 400, "invalid_request")


@pytest.mark.parametrize("subject", ["", ".", "a.", ".a", "a..b", ">.a", "a.>.b", 5, True, ["a"], {}])
def test_invalid_subjects(shared_server: Server, topic: str, subject: Any) -> None:
    fill(shared_server, topic)
    reply = shared_server.post(f"/v0/topics/{topic}/delete", {"subject": subject, "before_seq": 99})
    refused(reply, 400, "invalid_request")
    assert data_of(shared_server, topic) == ALL
    refused(shared_server.post("/v0/topics/absent/delete", {"subject": subject}), 400, "invalid_request")


def test_deleted_ranges(shared_server: Server, topic: str) -> None:
    """Deliberate removals are listed, in pages; records that a cap dropped are not."""
    path = f"/v0/topics/{topic}/deleted"
    fill(shared_server, topic)
    empty = {"topic": topic, "ranges": [], "next_from_seq": 12, "head_seq": 12, "earliest_seq": 1}
    assert ok(shared_server.get(path)) == {**empty, "caught_up": True}
    delete(shared_server, topic, seqs=[1, 4, 5, 6, 8, 12])
    rows = [{"first_seq": a, "last_seq": b} for a, b in ((1, 1), (4, 6), (8, 8), (12, 12))]
    assert ok(shared_server.get(path)) == {**empty, "ranges": rows, "earliest_seq": 2, "caught_up": True}
    found, at = [], 0
    for last in (1, 6, 8, 12):
        page = ok(shared_server.get(f"{path}?from_seq={at}&limit=1"))
        assert (page["next_from_seq"], page["caught_up"]) == (last, last == 12)
        found += page["ranges"]
        at = page["next_from_seq"]
    assert found == rows
    # From the middle of a range, and beyond the head.
    assert ok(shared_server.get(f"{path}?from_seq=5"))["ranges"][0] == {"first_seq": 6, "last_seq": 6}
    for beyond in (12, 99, U64_MAX):
        assert ok(shared_server.get(f"{path}?from_seq={beyond}")) == {
            **empty,
            "earliest_seq": 2,
            "caught_up": True,
        }
    # As everywhere in a query, an invalid number counts as absent; 0 is the default of reads.
    for query in ("from_seq=-1&limit=x", "limit=0", "limit=99999999999999999999"):
        assert ok(shared_server.get(f"{path}?{query}"))["ranges"] == rows
    # A cap drops records as lost; deleted ones below them are part of that gap.
    shared_server.put(f"/v0/topics/{topic}", {"cap_records": 3})
    page = ok(shared_server.get(path))
    assert page["ranges"] == [{"first_seq": 8, "last_seq": 8}, {"first_seq": 12, "last_seq": 12}]
    assert (page["earliest_seq"], ok(shared_server.diff(topic))["tombstone"]["gap_to"]) == (9, 7)
    refused(shared_server.get("/v0/topics/absent/deleted"), 404, "topic_not_found", {"topic": "absent"})


def test_acks_dead_letters_and_ttls_are_deletes(shared_server: Server, topic: str) -> None:
    make_queue(shared_server, topic, 1, 2, dead_letter=f"{topic}.dead")
    records = [{"data": 3, "ttl_ms": 1}, {"data": 4}]
    ok(shared_server.post(f"/v0/topics/{topic}", {"records": records}))
    assert seqs_of(claim(shared_server, topic, 2)) == [1, 2]
    settle(shared_server, topic, "ack", [1])
    settle(shared_server, topic, "nack", [2], kind="dead")
    until(lambda: state_of(shared_server, topic)["count"] == 1)
    assert ok(shared_server.get(f"/v0/topics/{topic}/deleted"))["ranges"] == [{"first_seq": 1, "last_seq": 3}]


@pytest.mark.parametrize(
    "body", [{}, {"before_seq": None}, {"match": None}, {"subject": None}, {"erase": True}, {"unknown": 1}]
)
def test_a_selector_is_needed(shared_server: Server, topic: str, body: Json) -> None:
    refused(shared_server.post(f"/v0/topics/{topic}/delete", body), 400, "invalid_request")
    fill(shared_server, topic)
    refused(shared_server.post(f"/v0/topics/{topic}/delete", body), 400, "invalid_request")


@pytest.mark.parametrize(
    "body", [{"before_seq": 1}, {"match": "a"}, {"match": "a", "before_seq": 1}, {"seqs": [1]}]
)
def test_an_absent_topic(shared_server: Server, topic: str, body: Json) -> None:
    reply = shared_server.post(f"/v0/topics/{topic}/delete", body)
    refused(reply, 404, "topic_not_found", {"topic": topic})


def test_later_records_are_not_deleted(shared_server: Server, topic: str) -> None:
    fill(shared_server, topic)
    delete(shared_server, topic, before_seq=U64_MAX)
    delete(shared_server, topic, match="*")
    later = [{"data": "later", "tag": "a"}, {"data": "later"}]
    ok(shared_server.post(f"/v0/topics/{topic}", {"records": later}))
    assert [record["$seq"] for record in records_of(shared_server, topic)] == [13, 14]
    page = ok(shared_server.diff(topic))
    assert (page["tombstone"], page["earliest_seq"]) == (None, 13)


def test_deletes_do_not_make_room_for_old_seqs(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"cap_records": 3})
    shared_server.write(topic, 1, 2, 3)
    delete(shared_server, topic, before_seq=3)
    shared_server.write(topic, 4, 5)  # deleted records do not count against the cap
    assert data_of(shared_server, topic) == [3, 4, 5]
    assert ok(shared_server.diff(topic))["tombstone"] is None


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_deletes_in_every_class(shared_server: Server, topic: str, durability: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"durability": durability})
    ok(shared_server.post(f"/v0/topics/{topic}", {"records": [{"data": 1, "tag": "a"}, {"data": 2}]}))
    assert delete(shared_server, topic, match="a")["deleted"] == 1
    assert data_of(shared_server, topic) == [2]
