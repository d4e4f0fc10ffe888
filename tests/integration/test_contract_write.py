"""Goal: a write is checked in the contract's order, is atomic, and is answered with its seqs; idempotency.

Method: every limit exactly at its value and one beyond it; for the order of checks a request that breaks two rules at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.contract import (
    DEFAULT_CONFIG,
    Json,
    data_of,
    fresh,
    ok,
    one_record,
    records_of,
    refused,
    send_text,
    state_of,
)
from tests.support.faults import fault
from tests.support.server import Server, until

RECORD_MAX = 1_048_576
META_MAX = 16_384


def write(server: Server, topic: str, *records: Json, **fields: Any) -> Any:
    return server.post(f"/v0/topics/{topic}", {"records": list(records), **fields})


# -- the answer --------------------------------------------------------------------------------------------


def test_the_whole_answer(shared_server: Server, topic: str) -> None:
    body = {"records": [{"data": i} for i in range(3)]}
    expected = {
        "topic": topic, "first_seq": 1, "last_seq": 3, "seqs": [1, 2, 3], "head_seq": 3, "count": 3,
        "created": True, "deduped": False,
    }  # fmt: skip
    assert ok(shared_server.post(f"/v0/topics/{topic}", body), 201) == expected
    expected |= {"first_seq": 4, "last_seq": 6, "seqs": [4, 5, 6], "head_seq": 6, "created": False}
    assert ok(shared_server.post(f"/v0/topics/{topic}", body)) == expected
    expected |= {"first_seq": 7, "last_seq": 9, "head_seq": 9}
    del expected["seqs"]
    assert ok(shared_server.post(f"/v0/topics/{topic}?return_seqs=false", body)) == expected
    assert data_of(shared_server, topic) == [0, 1, 2] * 3


def test_a_batch_has_the_order_of_its_array(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, *"dcba")
    assert [(r["$seq"], r["data"]) for r in records_of(shared_server, topic)] == list(enumerate("dcba", 1))


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_every_class_has_the_same_answer(shared_server: Server, topic: str, durability: str) -> None:
    assert ok(shared_server.write(topic, 1, config={"durability": durability}), 201)["created"]
    body = ok(shared_server.write(topic, 2))
    assert (body["first_seq"], body["head_seq"]) == (2, 2)
    assert data_of(shared_server, topic) == [1, 2]


# -- records -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [{}, {"records": []}, {"records": [{}]}, {"records": [{"tag": "a"}]}, {"data": 1}]
)
def test_records_and_their_data_are_required(shared_server: Server, topic: str, body: Json) -> None:
    refused(shared_server.post(f"/v0/topics/{topic}", body), 400, "invalid_request")


@fault("request", "one record of a batch is invalid", "400; nothing of the batch is written")
def test_one_bad_record_fails_the_batch(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, 0)
    for bad in ({}, {"data": 1, "tag": "x" * 257}, {"data": 1, "meta": {"a": "x" * META_MAX}}):
        refused(write(shared_server, topic, {"data": 1}, bad, {"data": 2}), 400, "invalid_request")
    refused(write(shared_server, topic, {"data": 1}, {"data": "x" * RECORD_MAX}), 400, "record_too_large")
    assert state_of(shared_server, topic)["head_seq"] == 1


@pytest.mark.parametrize("count", [10_000, 10_001])
def test_records_of_one_write(shared_server: Server, topic: str, count: int) -> None:
    reply = shared_server.post(f"/v0/topics/{topic}?return_seqs=0", {"records": [{"data": 0}] * count})
    if count == 10_000:
        assert ok(reply, 201)["last_seq"] == count
    else:
        refused(reply, 400, "batch_too_large", {"records": count, "max": 10_000})
        refused(shared_server.get(f"/v0/topics/{topic}"), 404, "topic_not_found")


def text(size: int, letter: str = "x") -> str:
    """A JSON string of `size` bytes with its quotes; two-byte letters are padded with one-byte ones."""
    inner = size - 2
    count = inner // len(letter.encode())
    return '"' + letter * count + "x" * (inner - count * len(letter.encode())) + '"'


def keys(count: int) -> str:
    return "{" + ",".join(f'"{i}":{i}' for i in range(count)) + "}"


# The field, its limit, and the members of a record whose field has the given size.
LIMITS: list[tuple[str, int, Callable[[int], str]]] = [
    ("data", RECORD_MAX, lambda n: f'"data":{text(n)}'),
    ("data, two bytes a letter", RECORD_MAX, lambda n: f'"data":{text(n, "é")}'),
    ("data, escaped", RECORD_MAX, lambda n: '"data":' + text(n, "é").replace("é", "\\u00e9", 1)),
    ("data, with blanks", RECORD_MAX, lambda n: f'"data":[1,{" " * 100}{text(n - 4)} ]'),
    ("data and meta", RECORD_MAX, lambda n: f'"data":{text(n - 7)},"meta":{{"k":1}}'),
    ("tag", 256, lambda n: f'"data":1,"tag":{text(n + 2)}'),
    ("tag, two bytes a letter", 256, lambda n: f'"data":1,"tag":{text(n + 2, "é")}'),
    ("node", 128, lambda n: f'"data":1,"node":{text(n + 2)}'),
    ("node, two bytes a letter", 128, lambda n: f'"data":1,"node":{text(n + 2, "é")}'),
    ("meta", META_MAX, lambda n: f'"data":1,"meta":{{"k":{text(n - 6)}}}'),
    ("meta, no object", META_MAX, lambda n: f'"data":1,"meta":{text(n)}'),
    ("meta, with blanks", META_MAX, lambda n: f'"data":1,"meta":{{ "k" : {text(n - 6)} }}'),
    ("keys of meta", 64, lambda n: f'"data":1,"meta":{keys(n)}'),
    ("keys of meta, with blanks", 64, lambda n: f'"data":1,"meta": \n{keys(n)}'),
]


@fault(
    "request",
    "a record, tag, node or meta larger than its limit",
    "400 with the limit; nothing of the batch is written",
)
@pytest.mark.parametrize(("what", "limit", "members"), LIMITS, ids=[row[0] for row in LIMITS])
def test_limits_of_a_record(
    shared_server: Server, topic: str, what: str, limit: int, members: Callable[[int], str]
) -> None:
    path = f"/v0/topics/{topic}"
    code = "record_too_large" if what.startswith("data") else "invalid_request"
    refused(send_text(shared_server, "POST", path, one_record(members(limit + 1))), 400, code)
    ok(send_text(shared_server, "POST", path, one_record(members(limit))), 201)


def test_the_node_of_a_batch(shared_server: Server, topic: str) -> None:
    records = [{"data": 1}, {"data": 2, "node": "own"}, {"data": 3, "node": None}, {"data": 4, "node": ""}]
    ok(write(shared_server, topic, *records, node="batch"), 201)
    assert [r["$node"] for r in records_of(shared_server, topic)] == ["batch", "own", "batch", ""]
    refused(write(shared_server, topic, {"data": 1}, node="n" * 129), 400, "invalid_request")
    ok(write(shared_server, topic, {"data": 1}, node="n" * 128))


# -- creation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "creates"),
    [
        ({}, True),
        ({"create": True}, True),
        ({"create": False}, False),
        ({"create": None}, True),
        ({"config": {}}, True),
        ({"config": {"auto_create": True}}, True),
        ({"config": {"auto_create": False}}, False),
        ({"config": {"auto_create": False}, "create": None}, False),
        ({"config": {"auto_create": False}, "create": True}, True),
        ({"config": {"auto_create": True}, "create": False}, False),
    ],
)
def test_create_option_decides_whether_a_write_creates(
    shared_server: Server, topic: str, fields: Json, creates: bool
) -> None:
    reply = shared_server.write(topic, 1, **fields)
    if creates:
        assert ok(reply, 201)["created"]
    else:
        refused(reply, 404, "topic_not_found", {"topic": topic})
        refused(shared_server.get(f"/v0/topics/{topic}"), 404, "topic_not_found")
    shared_server.put(f"/v0/topics/{topic}", {"auto_create": False})
    assert not ok(shared_server.write(topic, 1, **fields))["created"]


def test_a_config_is_used_only_by_the_write_that_creates(shared_server: Server, topic: str) -> None:
    ok(shared_server.write(topic, 1, config={"cap_records": 5}), 201)
    ok(shared_server.write(topic, 2, config={"cap_records": 1, "type": "queue"}))
    assert state_of(shared_server, topic)["config"] == {**DEFAULT_CONFIG, "cap_records": 5}
    assert data_of(shared_server, topic) == [1, 2]


def test_disable_backpressure_is_accepted(shared_server: Server, topic: str) -> None:
    ok(shared_server.write(topic, 1, disable_backpressure=True), 201)


# -- the order of checks -----------------------------------------------------------------------------------

LONG_KEY = "k" * 257
LARGE = {"data": "x" * RECORD_MAX}


@pytest.mark.parametrize(
    ("name", "body", "status", "code"),
    [
        ("absent", {"records": [{"data": 1}] * 10_001, "idempotency_key": LONG_KEY}, 400, "batch_too_large"),
        ("absent", {"records": [LARGE], "idempotency_key": LONG_KEY}, 400, "invalid_request"),
        ("absent", {"records": [LARGE], "create": False}, 400, "record_too_large"),
        (".bad", {"records": [LARGE]}, 400, "record_too_large"),
        (".bad", {"records": [{"data": 1}], "create": False}, 404, "topic_not_found"),
        (".bad", {"records": [{"data": 1}]}, 400, "invalid_request"),
        ("absent", {"records": [], "create": False}, 400, "invalid_request"),
    ],
)
def test_the_order_of_checks(shared_server: Server, name: str, body: Json, status: int, code: str) -> None:
    refused(shared_server.post(f"/v0/topics/{name}", body), status, code)


def test_a_known_key_comes_before_a_full_topic(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"cap_records": 2, "discard": "reject"})
    first = ok(shared_server.write(topic, 1, 2, idempotency_key="k"))
    for data in ([1, 2], [3], [1, 2, 3, 4, 5]):
        assert ok(shared_server.write(topic, *data, idempotency_key="k")) == {**first, "deduped": True}
    refused(shared_server.write(topic, 3), 422, "topic_full")
    # More than the cap can ever hold: not retryable, and reported before the topic is called full.
    refused(shared_server.write(topic, 3, 4, 5), 400, "record_too_large")


# -- caps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "fits", "too_many"),
    [({"cap_records": 3}, [1, 2, 3], [1, 2, 3, 4]), ({"cap_bytes": 6}, ["abcd"], ["abcde"])],
)
def test_a_topic_that_rejects(
    shared_server: Server, topic: str, config: Json, fits: list[Any], too_many: list[Any]
) -> None:
    config = {"discard": "reject", **config}
    shared_server.put(f"/v0/topics/{topic}", config)
    refused(shared_server.write(topic, *too_many), 400, "record_too_large")
    assert ok(shared_server.write(topic, *fits))["head_seq"] == len(fits)
    detail = {
        "topic": topic,
        "cap_records": config.get("cap_records", 0),
        "cap_bytes": config.get("cap_bytes", 0),
        "head_seq": len(fits),
        "earliest_seq": 1,
    }
    refused(shared_server.write(topic, 0), 422, "topic_full", detail)
    assert data_of(shared_server, topic) == fits
    shared_server.post(f"/v0/topics/{topic}/delete", {"before_seq": 2})
    assert ok(shared_server.write(topic, 0))["first_seq"] == len(fits) + 1  # the refusal used no seq
    assert shared_server.diff(topic).json["tombstone"] is None


def test_a_creating_write_beyond_the_cap_creates_nothing(shared_server: Server, topic: str) -> None:
    config = {"cap_records": 1, "discard": "reject"}
    refused(shared_server.write(topic, 1, 2, config=config), 400, "record_too_large")
    refused(shared_server.get(f"/v0/topics/{topic}"), 404, "topic_not_found")


def test_a_topic_that_drops_the_oldest(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"cap_records": 3})
    body = ok(shared_server.write(topic, *range(5)))
    assert (body["seqs"], body["count"]) == ([1, 2, 3, 4, 5], 5)
    assert data_of(shared_server, topic) == [2, 3, 4]
    shared_server.put(f"/v0/topics/{topic}", {"cap_bytes": 4})
    ok(shared_server.write(topic, "ab"))
    assert data_of(shared_server, topic) == ["ab"]
    ok(shared_server.write(topic, "larger than the cap"))
    assert state_of(shared_server, topic)["head_seq"] == 7


# -- idempotency -------------------------------------------------------------------------------------------


def test_a_repeated_key_appends_nothing(shared_server: Server, topic: str) -> None:
    first = ok(shared_server.write(topic, 1, 2, idempotency_key="k"), 201)
    ok(shared_server.write(topic, 3))
    again = ok(shared_server.write(topic, "another", "payload", "entirely", idempotency_key="k"))
    assert again == {**first, "created": False, "deduped": True}
    assert (again["count"], again["head_seq"]) == (2, 2)
    assert data_of(shared_server, topic) == [1, 2, 3]
    brief = ok(
        shared_server.post(
            f"/v0/topics/{topic}?return_seqs=0", {"records": [{"data": 1}], "idempotency_key": "k"}
        )
    )
    assert "seqs" not in brief


def test_a_key_belongs_to_a_topic(shared_server: Server) -> None:
    for name in (fresh(), fresh()):
        assert not ok(shared_server.write(name, 1, idempotency_key="same"), 201)["deduped"]


@pytest.mark.parametrize(
    ("in_header", "in_body", "used"),
    [
        ("h", {}, "h"),
        ("h", {"idempotency_key": None}, "h"),
        ("h", {"idempotency_key": "b"}, "b"),
        (None, {"idempotency_key": "b"}, "b"),
    ],
)
def test_the_header_and_the_body(
    shared_server: Server, topic: str, in_header: str | None, in_body: Json, used: str
) -> None:
    headers = {"Idempotency-Key": in_header} if in_header else {}
    body = {"records": [{"data": 1}], **in_body}
    ok(shared_server.request("POST", f"/v0/topics/{topic}", body, headers), 201)
    for key in ("h", "b"):
        assert ok(shared_server.write(topic, 1, idempotency_key=key))["deduped"] == (key == used)


@pytest.mark.parametrize(
    ("key", "is_good"),
    [("", False), ("k", True), ("k" * 256, True), ("k" * 257, False), ("é" * 128, True), ("é" * 129, False)],
)
def test_the_length_of_a_key(shared_server: Server, topic: str, key: str, is_good: bool) -> None:
    reply = shared_server.write(topic, 1, idempotency_key=key)
    if is_good:
        ok(reply, 201)
        assert ok(shared_server.write(topic, 1, idempotency_key=key))["deduped"]
    else:
        refused(reply, 400, "invalid_request")


def test_the_length_of_a_key_in_the_header(shared_server: Server, topic: str) -> None:
    body = {"records": [{"data": 1}]}
    refused(
        shared_server.request("POST", f"/v0/topics/{topic}", body, {"Idempotency-Key": "k" * 257}),
        400,
        "invalid_request",
    )
    ok(shared_server.request("POST", f"/v0/topics/{topic}", body, {"Idempotency-Key": "k" * 256}), 201)


def test_a_failed_write_leaves_no_key(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"cap_records": 1, "discard": "reject"})
    shared_server.write(topic, 0)
    refused(shared_server.write(topic, 1, idempotency_key="k"), 422, "topic_full")
    shared_server.post(f"/v0/topics/{topic}/delete", {"before_seq": 9})
    assert not ok(shared_server.write(topic, 1, idempotency_key="k"))["deduped"]


def test_a_window_of_zero_remembers_nothing(shared_server: Server, topic: str) -> None:
    config = {"idempotency_window_ms": 0}
    for status in (201, 200, 200):
        assert not ok(shared_server.write(topic, 1, idempotency_key="k", config=config), status)["deduped"]


def test_the_window_runs_from_the_first_success(shared_server: Server, topic: str) -> None:
    """If repeats extended it, these repeats would be deduplicated for ever."""
    shared_server.put(f"/v0/topics/{topic}", {"idempotency_window_ms": 400})
    began = time.monotonic()
    first = ok(shared_server.write(topic, 1, idempotency_key="k"))
    second = ok(shared_server.write(topic, 1, idempotency_key="k"))
    assert second["deduped"] or time.monotonic() - began > 0.4
    if not second["deduped"]:  # the machine paused longer than the window
        first = second
    later = until(
        lambda: next(
            (b for b in [ok(shared_server.write(topic, 2, idempotency_key="k"))] if not b["deduped"]), None
        )
    )
    assert later["first_seq"] == first["last_seq"] + 1


def test_racing_writes_of_one_key(shared_server: Server, topic: str) -> None:
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda i: shared_server.write(topic, i, idempotency_key="k"), range(16)))
    bodies = [ok(reply, reply.status) for reply in replies]
    assert sorted(body["deduped"] for body in bodies) == [False] + [True] * 15
    assert sum(reply.status == 201 for reply in replies) == 1
    assert {body["first_seq"] for body in bodies} == {1}
    assert len(data_of(shared_server, topic)) == 1


def test_concurrent_writers_get_seqs_without_gaps(shared_server: Server, topic: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda i: shared_server.write(topic, *[i] * (i % 3 + 1)), range(40)))
    seqs = [seq for reply in replies for seq in reply.json["seqs"]]
    assert sorted(seqs) == list(range(1, len(seqs) + 1))
    read = {record["$seq"]: record["data"] for record in records_of(shared_server, topic)}
    assert read == {seq: i for i, reply in enumerate(replies) for seq in reply.json["seqs"]}
    times = [record["$ts"] for record in records_of(shared_server, topic)]
    assert times == sorted(times)
