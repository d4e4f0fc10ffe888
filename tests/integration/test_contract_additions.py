"""Goal: this server's additions to the contract work, and do not change the contract's own answers.

Conditional writes, binary payloads, TTLs of single records, further selectors, tags, newest by tag, filtered reads, NDJSON,
raw frames, compression, the OpenAPI document.

Method: a client outside of the server; raw frames are decoded with the engine's own codec and compared with the JSON of the same read.
"""

from __future__ import annotations

import gzip
import json
import zlib
from base64 import b64decode, b64encode
from typing import Any
from urllib.parse import quote

import pytest

import topics
from tests.support.contract import Json, data_of, ok, poll, records_of, refused, state_of
from tests.support.faults import fault
from tests.support.server import Reply, Server, until
from topics.engine.storage import frames
from topics.protocols.http.openapi import document as openapi

JSON = "application/json"
LINES = "application/x-ndjson"
FRAMES = "application/vnd.topics.frames"


def fill(server: Server, topic: str, *tags: str | None) -> None:
    records = [{"data": i, "tag": tag} for i, tag in enumerate(tags, 1)]
    assert server.post(f"/v0/topics/{topic}", {"records": records}).status in (200, 201)


# -- conditional writes ------------------------------------------------------------------------------------


def test_if_last_seq(shared_server: Server, topic: str) -> None:
    wrong = {"topic": topic, "expected": 1, "actual": 0}
    refused(shared_server.write(topic, 1, if_last_seq=1), 409, "wrong_last_seq", wrong)
    refused(shared_server.get(f"/v0/topics/{topic}"), 404, "topic_not_found")
    ok(shared_server.write(topic, 1, 2, if_last_seq=0), 201)
    refused(
        shared_server.write(topic, 3, if_last_seq=0),
        409,
        "wrong_last_seq",
        {"topic": topic, "expected": 0, "actual": 2},
    )
    assert ok(shared_server.write(topic, 3, if_last_seq=2))["first_seq"] == 3
    shared_server.post(f"/v0/topics/{topic}/delete", {"before_seq": 99})
    ok(
        shared_server.write(topic, 4, if_last_seq=3)
    )  # compared with the head, not with the newest live record
    ok(shared_server.write(topic, 5, if_last_seq=None))


def test_if_tag_last_seq(shared_server: Server, topic: str) -> None:
    def write(tag: str, seq: int) -> Reply:
        body = {"records": [{"data": 0, "tag": "t"}], "if_tag_last_seq": {"tag": tag, "seq": seq}}
        return shared_server.post(f"/v0/topics/{topic}", body)

    refused(write("t", 1), 409, "wrong_last_seq", {"topic": topic, "expected": 1, "actual": 0, "tag": "t"})
    ok(write("t", 0), 201)
    refused(write("t", 0), 409, "wrong_last_seq", {"topic": topic, "expected": 0, "actual": 1, "tag": "t"})
    ok(write("t", 1))
    ok(write("other", 0))
    refused(write("t*", 2), 409, "wrong_last_seq")  # a tag, not a pattern
    shared_server.post(f"/v0/topics/{topic}/delete", {"match": "t"})
    ok(write("t", 0))


def test_a_known_key_comes_before_a_condition(shared_server: Server, topic: str) -> None:
    first = ok(shared_server.write(topic, 1, if_last_seq=0, idempotency_key="k"), 201)
    again = ok(shared_server.write(topic, 1, if_last_seq=0, idempotency_key="k"))
    assert again == {**first, "created": False, "deduped": True}


# -- records -----------------------------------------------------------------------------------------------


def test_a_record_with_its_own_ttl(shared_server: Server, topic: str) -> None:
    """It expires silently: not a loss, so no tombstone."""
    records = [
        {"data": 1, "ttl_ms": 50},
        {"data": 2},
        {"data": 3, "ttl_ms": 3_600_000},
        {"data": 4, "ttl_ms": 0},
    ]
    ok(shared_server.post(f"/v0/topics/{topic}", {"records": records}), 201)
    until(lambda: data_of(shared_server, topic) == [2, 3, 4])
    page = ok(shared_server.diff(topic))
    assert (page["tombstone"], page["earliest_seq"]) == (None, 2)
    assert state_of(shared_server, topic)["count"] == 3


@pytest.mark.parametrize("ttl_ms", [2**53, 2**63, 2**64 - 1])
def test_a_record_without_expiry(shared_server: Server, topic: str, ttl_ms: int) -> None:
    ok(shared_server.post(f"/v0/topics/{topic}", {"records": [{"data": 1, "ttl_ms": ttl_ms}]}), 201)
    assert data_of(shared_server, topic) == [1]
    reply = shared_server.post(f"/v0/topics/{topic}", {"records": [{"data": 1, "ttl_ms": 2**64}]})
    refused(reply, 400, "invalid_request")


@pytest.mark.parametrize("payload", [b"", b"\x00", b"plain", bytes(range(256)), b"\xff" * 1000])
def test_bytes_as_a_payload(shared_server: Server, topic: str, payload: bytes) -> None:
    text = b64encode(payload).decode()
    records = [{"data_base64": text, "tag": "t", "node": "n"}, {"data_base64": ""}]
    ok(shared_server.post(f"/v0/topics/{topic}", {"records": records}), 201)
    first, second = records_of(shared_server, topic, include_tags=True)
    del first["$ts"], second["$ts"]
    assert first == {"$seq": 1, "$tag": "t", "$node": "n", "$encoding": "base64", "data": text}
    assert second == {"$seq": 2, "$encoding": "base64", "data": ""}
    assert state_of(shared_server, topic)["bytes"] == len(payload)


@pytest.mark.parametrize(
    "records",
    [
        [{"data_base64": "YQ==", "data": 1}],
        [{"data_base64": "YQ==", "data": None}],
        [{"data_base64": "YQ==", "meta": {}}],
        [{"data_base64": "YQ=="}, {"data": 1}],
        [{"data_base64": "YQ"}],
        [{"data_base64": "Y Q=="}],
        [{"data_base64": "YQ==\n"}],
        [{"data_base64": "-_-_"}],
        [{"data_base64": "é"}],
        [{"data_base64": "YQ==YQ=="}],
    ],
)
def test_invalid_bytes(shared_server: Server, topic: str, records: list[Json]) -> None:
    refused(shared_server.post(f"/v0/topics/{topic}", {"records": records}), 400, "invalid_request")


def test_the_largest_payload_of_bytes(shared_server: Server, topic: str) -> None:
    for size, code in ((1_048_577, "record_too_large"), (1_048_576, "")):
        body = {"records": [{"data_base64": b64encode(bytes(size)).decode()}]}
        reply = shared_server.post(f"/v0/topics/{topic}", body)
        ok(reply, 201) if not code else refused(reply, 400, code)


def test_cap_per_tag(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"cap_per_tag": 2})
    fill(shared_server, topic, "a", "b", "a", None, "a", "a", None, None)
    assert data_of(shared_server, topic) == [2, 4, 5, 6, 7, 8]
    assert ok(shared_server.diff(topic))["tombstone"] is None


def test_max_record_bytes(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"max_record_bytes": 5})
    ok(shared_server.write(topic, "abc"))
    refused(shared_server.write(topic, "abcd"), 400, "record_too_large")


# -- deletes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"seqs": [1]}, [2, 3, 4, 5, 6]),
        ({"seqs": [6, 2, 2, 0, 7, 2**64 - 1]}, [1, 3, 4, 5]),
        ({"seqs": []}, [1, 2, 3, 4, 5, 6]),
        ({"seqs": [1, 2, 3], "match": "a"}, [2, 4, 5, 6]),
        ({"seqs": [1, 4], "before_seq": 4}, [2, 3, 4, 5, 6]),
        ({"keep": 2}, [5, 6]),
        ({"keep": 0}, []),
        ({"keep": 99}, [1, 2, 3, 4, 5, 6]),
        ({"keep": 1, "match": "a"}, [2, 4, 5, 6]),
        ({"keep": 1, "match": "*"}, [4, 5, 6]),
        ({"keep": 2, "before_seq": 4}, None),
        ({"match": "a", "erase": True}, [2, 5, 6]),
        ({"before_seq": 3, "erase": True}, [3, 4, 5, 6]),
    ],
)
def test_further_selectors(shared_server: Server, topic: str, fields: Json, left: list[int] | None) -> None:
    fill(shared_server, topic, "a", "b", "a", "a", "b", None)
    body = ok(shared_server.post(f"/v0/topics/{topic}/delete", fields))
    found = data_of(shared_server, topic)
    assert body["deleted"] == 6 - len(found)
    if left is not None:
        assert found == left


def test_seqs_of_one_delete(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, 1)
    ok(shared_server.post(f"/v0/topics/{topic}/delete", {"seqs": [5] * 10_000}))
    reply = shared_server.post(f"/v0/topics/{topic}/delete", {"seqs": [5] * 10_001})
    refused(reply, 400, "batch_too_large", {"seqs": 10_001, "max": 10_000})
    for seqs in ([-1], [1.0], ["1"], [None], [2**64], [True]):
        refused(shared_server.post(f"/v0/topics/{topic}/delete", {"seqs": seqs}), 400, "invalid_request")


def test_erased_bytes_are_gone_from_disk(shared_server: Server, topic: str) -> None:
    needle = f"needle-{topic}-in-a-haystack"
    shared_server.post(f"/v0/topics/{topic}", {"records": [{"data": needle}, {"data": "stays"}]})

    def on_disk() -> bool:
        files = (path for path in shared_server.data_dir.rglob("*") if path.is_file())
        return any(needle.encode() in path.read_bytes() for path in files)

    assert on_disk()
    assert ok(shared_server.post(f"/v0/topics/{topic}/delete", {"seqs": [1], "erase": True}))["deleted"] == 1
    assert not on_disk()
    assert data_of(shared_server, topic) == ["stays"]


# -- tags --------------------------------------------------------------------------------------------------


def pages(server: Server, path: str, member: str) -> list[list[Json]]:
    found, cursor = [], ""
    while True:
        body = ok(server.get(f"{path}&cursor={cursor}"))
        found.append(body[member])
        if "next_cursor" not in body:
            return found
        cursor = body["next_cursor"]
        assert len(found) < 50, "the cursor does not advance"


def test_tags_and_their_counts(shared_server: Server, topic: str) -> None:
    fill(shared_server, topic, "b", "a", "a.b", "é", "", None, "a", "a.b")
    shared_server.post(f"/v0/topics/{topic}/delete", {"seqs": [8, 1]})
    rows = [{"tag": tag, "count": count} for tag, count in (("", 1), ("a", 2), ("a.b", 1), ("é", 1))]
    path = f"/v0/topics/{topic}/tags?"
    assert ok(shared_server.get(path)) == {"topic": topic, "tags": rows}
    assert ok(shared_server.get(f"{path}prefix=a"))["tags"] == rows[1:3]
    assert ok(shared_server.get(f"{path}prefix={quote('é')}"))["tags"] == rows[3:]
    assert ok(shared_server.get(f"{path}prefix=z"))["tags"] == []
    for size in (1, 2, 3, 4):
        assert [
            row for page in pages(shared_server, f"{path}page_size={size}", "tags") for row in page
        ] == rows
    refused(shared_server.get("/v0/topics/absent/tags"), 404, "topic_not_found", {"topic": "absent"})


def test_newest_by_tag(shared_server: Server, topic: str) -> None:
    fill(shared_server, topic, "eu.tea", "us.jam", "eu.jam", "eu.tea", None, "eu")

    def seqs(query: str) -> list[int]:
        body = ok(shared_server.get(f"/v0/topics/{topic}/last?{query}"))
        assert (body["topic"], body["head_seq"]) == (topic, 6)
        return [record["$seq"] for record in body["records"]]

    assert seqs("tag=eu.tea") == [4]
    assert seqs("tag=eu.*") == [4]
    assert seqs("tag=*") == [6]
    assert seqs("tag=nothing") == []
    assert seqs("subject=eu.%3E") == [4]
    assert seqs("subject=*.jam") == [3]
    assert seqs("tag=eu&subject=us.*") == [2]
    assert sorted(seqs("tag=eu*&each=true")) == [3, 4, 6]
    assert sorted(seqs("subject=*.*&each=1")) == [2, 3, 4]
    (record,) = ok(shared_server.get(f"/v0/topics/{topic}/last?tag=us.jam"))["records"]
    assert record == {"$seq": 2, "$ts": record["$ts"], "$tag": "us.jam", "data": 2}
    refused(shared_server.get(f"/v0/topics/{topic}/last"), 400, "invalid_request")
    for subject in ("", "a..b", "%3E.a", "."):
        refused(shared_server.get(f"/v0/topics/{topic}/last?subject={subject}"), 400, "invalid_request")


@pytest.mark.parametrize("tags", ["abcdefg", "gfedcba", "dbgacfe", "aabbccddeeffgg", "gafbecd"])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_pages_of_the_newest_of_each_tag(shared_server: Server, topic: str, tags: str, size: int) -> None:
    """Every tag once, whatever the order of the writes."""
    fill(shared_server, topic, *tags)
    path = f"/v0/topics/{topic}/last?tag=*&each=true&page_size={size}"
    found = [record["$tag"] for page in pages(shared_server, path, "records") for record in page]
    assert sorted(found) == list("abcdefg")


# -- filtered reads ----------------------------------------------------------------------------------------

TAGS = ["eu.tea", "eu.jam.red", "us.tea", None, "eu", "eu.*", "eu.jam"]


@pytest.mark.parametrize(
    ("tag", "seqs"),
    [
        (None, [1, 2, 3, 4, 5, 6, 7]),
        ("eu", [5]),
        ("eu.*", [1, 2, 6, 7]),
        ("*", [1, 2, 3, 5, 6, 7]),
        (["tag", "Eq", "eu.*"], [6]),
        (["tag", "Glob", "eu.j*"], [2, 7]),
        (["tag", "Subject", "eu.*"], [1, 6, 7]),
        (["tag", "Subject", "eu.>"], [1, 2, 6, 7]),
        (["tag", "Subject", "*.tea"], [1, 3]),
        (["tag", "Subject", ">"], [1, 2, 3, 5, 6, 7]),
        (["tag", "Subject", "eu"], [5]),
        (["tag", "Subject", "eu.jam.>"], [2]),
        ("nothing", []),
    ],
)
def test_reads_by_tag(shared_server: Server, topic: str, tag: Any, seqs: list[int]) -> None:
    fill(shared_server, topic, *TAGS)
    page = ok(shared_server.diff(topic, tag=tag))
    assert [record["$seq"] for record in page["records"]] == seqs
    assert (page["next_from_seq"], page["caught_up"]) == (7, True)
    found, from_seq = [], 0
    while True:
        page = ok(shared_server.diff(topic, tag=tag, limit=1, from_seq=from_seq))
        found += [record["$seq"] for record in page["records"]]
        from_seq = page["next_from_seq"]
        if page["caught_up"]:
            break
    assert found == seqs


@pytest.mark.parametrize(
    "tag",
    [
        ["tag", "Subject", ""],
        ["tag", "Subject", "a..b"],
        ["tag", "Subject", ">.a"],
        ["tag", "Glob", "a"],
        ["tag"],
        [],
        5,
    ],
)
def test_reads_by_no_tag(shared_server: Server, topic: str, tag: Any) -> None:
    shared_server.put(f"/v0/topics/{topic}")
    refused(shared_server.diff(topic, tag=tag), 400, "invalid_request")


def test_from_ts(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, 1)
    (first,) = records_of(shared_server, topic)
    until(
        lambda: (
            ok(shared_server.write(topic, 2)) and records_of(shared_server, topic)[-1]["$ts"] > first["$ts"]
        )
    )
    records = records_of(shared_server, topic)
    last = records[-1]["$ts"]
    assert len(records_of(shared_server, topic, from_ts=first["$ts"])) == len(records)
    assert [r["$ts"] for r in records_of(shared_server, topic, from_ts=last)] == [last]
    page = ok(shared_server.diff(topic, from_ts=last + 3_600_000))
    assert (page["records"], page["caught_up"]) == ([], True)


def test_a_long_poll_with_a_tag(shared_server: Server, topic: str) -> None:
    shared_server.put(f"/v0/topics/{topic}")
    waiting = poll(shared_server, topic, tag="wanted")
    fill(shared_server, topic, "wanted")
    assert [record["data"] for record in ok(waiting.reply())["records"]] == [1]


# -- lines -------------------------------------------------------------------------------------------------


def write_lines(server: Server, path: str, text: str, **headers: str) -> Reply:
    return server.request("POST", f"/v0/topics/{path}", text.encode(), {"Content-Type": LINES, **headers})


@pytest.mark.parametrize(
    "text",
    [
        '{"data":1,"tag":"a"}\n{"data":{"b":"c d"},"node":"own","meta":{"k":1}}\n',
        '{"data":1,"tag":"a"}\n{"data":{"b":"c d"},"node":"own","meta":{"k":1}}',
        '{"data":1,"tag":"a"}\r\n{"data":{"b":"c d"},"node":"own","meta":{"k":1}}\r\n',
        '\n{"data":1,"tag":"a"}\n\n{"data":{"b":"c d"},"node":"own","meta":{"k":1}}\n\n',
    ],
)
def test_lines(shared_server: Server, topic: str, text: str) -> None:
    body = ok(write_lines(shared_server, f"{topic}?node=desk", text), 201)
    assert (body["seqs"], body["count"], body["created"]) == ([1, 2], 2, True)
    records = records_of(shared_server, topic, include_tags=True)
    assert [{**record, "$ts": 0} for record in records] == [
        {"$seq": 1, "$ts": 0, "$node": "desk", "$tag": "a", "data": 1},
        {"$seq": 2, "$ts": 0, "$node": "own", "data": {"b": "c d"}, "meta": {"k": 1}},
    ]
    assert state_of(shared_server, topic)["bytes"] == 1 + 11 + 7


def test_fields_of_lines_in_query_and_header(shared_server: Server, topic: str) -> None:
    line = '{"data":1}\n'
    refused(write_lines(shared_server, f"{topic}?create=false", line), 404, "topic_not_found")
    first = ok(
        write_lines(shared_server, f"{topic}?return_seqs=0&create=true", line, **{"Idempotency-Key": "k"}),
        201,
    )
    assert "seqs" not in first
    assert ok(write_lines(shared_server, topic, line, **{"Idempotency-Key": "k"}))["deduped"]
    refused(write_lines(shared_server, topic, line, **{"Idempotency-Key": "k" * 257}), 400, "invalid_request")
    refused(write_lines(shared_server, f"{topic}?node={'n' * 129}", line), 400, "invalid_request")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "{",
        '{"data":1}\n{',
        '{"data":1} x',
        "5\n",
        "[]",
        '{"data":1}\n{}',
        '{"tag":"a"}',
        '{"data":NaN}',
        "null",
    ],
)
def test_invalid_lines(shared_server: Server, topic: str, text: str) -> None:
    refused(write_lines(shared_server, topic, text), 400, "invalid_request")
    refused(shared_server.get(f"/v0/topics/{topic}"), 404, "topic_not_found")


def test_too_many_lines(shared_server: Server, topic: str) -> None:
    reply = write_lines(shared_server, topic, '{"data":1}\n' * 10_001)
    refused(reply, 400, "batch_too_large", {"records": 10_001, "max": 10_000})
    ok(write_lines(shared_server, f"{topic}?return_seqs=0", '{"data":1}\n' * 10_000), 201)


@pytest.mark.parametrize("sub", ["/diff", "/delete"])
def test_lines_are_for_writes_only(shared_server: Server, topic: str, sub: str) -> None:
    reply = write_lines(shared_server, f"{topic}{sub}", '{"before_seq":1}')
    refused(reply, 415, "unsupported_media_type")


# -- frames ------------------------------------------------------------------------------------------------


def read_frames(server: Server, topic: str, **fields: Any) -> Reply:
    reply = server.request("POST", f"/v0/topics/{topic}/diff", fields, {"Accept": FRAMES})
    assert reply.status == 200
    assert reply.headers["content-type"] == FRAMES
    return reply


def decode(body: bytes) -> list[Json]:
    """Frames as the records of a JSON read with tags."""
    starts: list[int] = []
    frames.frame_starts(body, 0, len(body), starts)
    return [decode_one(body[start:end]) for start, end in zip(starts, [*starts[1:], len(body)])]


def decode_one(frame: bytes) -> Json:
    assert frames.frame_is_valid(frame)
    _, kind, flags, _, seq, ts, node, tag, size = frames.HEADER.unpack_from(frame)
    assert kind == frames.APPEND
    at = frames.HEADER_BYTES
    extensions = frames.read_extensions(frame)
    payload = frame[at + node + tag : at + node + tag + size]
    split = size - int.from_bytes(extensions.get(frames.EXT_META, b""), "little")
    record: Json = {"$seq": seq, "$ts": ts}
    if flags & frames.HAS_NODE:
        record["$node"] = frame[at : at + node].decode()
    if flags & frames.HAS_TAG:
        record["$tag"] = frame[at + node : at + node + tag].decode()
    if flags & frames.RAW:
        return {**record, "$encoding": "base64", "data": b64encode(payload).decode()}
    record["data"] = json.loads(payload[:split])
    return record | ({"meta": json.loads(payload[split:])} if split < size else {})


@pytest.mark.parametrize("durability", ["ephemeral", "disk", "fsync"])
def test_frames_are_the_records_of_the_same_read(shared_server: Server, topic: str, durability: str) -> None:
    shared_server.put(f"/v0/topics/{topic}", {"durability": durability, "cap_records": 9})
    rows = [
        {"data": 1}, {"data": {"a": [1, "é"]}, "tag": "t.é", "node": "n"}, {"data": "x" * 300, "meta": {"k": "v"}},
        {"data": None, "tag": "", "node": ""}, {"data": [], "ttl_ms": 3_600_000, "tag": "t"},
    ]  # fmt: skip
    shared_server.post(f"/v0/topics/{topic}", {"records": rows * 2, "idempotency_key": "k"})
    shared_server.post(f"/v0/topics/{topic}", {"records": [{"data_base64": "AP8="}]})
    shared_server.post(f"/v0/topics/{topic}/delete", {"seqs": [8]})
    for fields in (
        {},
        {"from_seq": 5},
        {"limit": 3},
        {"node": "n"},
        {"tag": "t*"},
        {"from_seq": 11},
        {"from_seq": 99},
    ):
        page = ok(shared_server.diff(topic, include_tags=True, **fields))
        reply = read_frames(shared_server, topic, **fields)
        assert decode(reply.body) == page["records"], fields
        tombstone = json.loads(reply.headers.get("topics-tombstone", "null"))
        assert tombstone == page["tombstone"]
        for header, name in (
            ("next-from-seq", "next_from_seq"),
            ("head-seq", "head_seq"),
            ("earliest-seq", "earliest_seq"),
        ):
            assert int(reply.headers[f"topics-{header}"]) == page[name]
        assert reply.headers["topics-caught-up"] == str(page["caught_up"]).lower()
        assert int(reply.headers["topics-count"]) == len(page["records"])


def test_pages_of_frames_are_larger(shared_server: Server, topic: str) -> None:
    shared_server.post(f"/v0/topics/{topic}?return_seqs=0", {"records": [{"data": "x" * 150}] * 9_000})
    for fields in ({}, {"limit": 0}, {"limit": 1_000_000}, {"limit": 2**32 - 1}):
        assert read_frames(shared_server, topic, **fields).headers["topics-count"] == "9000"
    assert read_frames(shared_server, topic, limit=1001).headers["topics-count"] == "1001"
    empty = shared_server.request("POST", f"/v0/topics/{topic}/diff", headers={"Accept": FRAMES})
    assert empty.headers["topics-count"] == "9000"
    assert len(records_of(shared_server, topic)) == 256  # a JSON page has its own limits


def test_errors_of_a_read_of_frames_are_json(shared_server: Server, topic: str) -> None:
    path = f"/v0/topics/{topic}/diff"
    refused(shared_server.request("POST", path, {}, {"Accept": FRAMES}), 404, "topic_not_found")
    refused(shared_server.request("POST", path, {"limit": -1}, {"Accept": FRAMES}), 400, "invalid_request")


# -- compression -------------------------------------------------------------------------------------------

BODY = json.dumps({"records": [{"data": "x" * 1000}] * 20}).encode()


def write_packed(
    server: Server, topic: str, body: bytes, encoding: str = "gzip", content_type: str = JSON
) -> Reply:
    headers = {"Content-Type": content_type, "Content-Encoding": encoding}
    return server.request("POST", f"/v0/topics/{topic}", body, headers)


def test_compressed_requests(shared_server: Server, topic: str) -> None:
    assert ok(write_packed(shared_server, topic, gzip.compress(BODY)), 201)["count"] == 20
    assert ok(write_packed(shared_server, topic, gzip.compress(BODY), "GZIP"))["count"] == 20
    assert ok(write_packed(shared_server, topic, BODY, "identity"))["count"] == 20
    assert (
        ok(write_packed(shared_server, topic, gzip.compress(b'{"data":1}\n' * 3), content_type=LINES))[
            "count"
        ]
        == 3
    )
    packed = {"Content-Type": JSON, "Content-Encoding": "gzip"}
    reply = shared_server.request("POST", f"/v0/topics/{topic}/diff", gzip.compress(b'{"limit":2}'), packed)
    assert len(ok(reply)["records"]) == 2


BROKEN = {
    "without its end": gzip.compress(BODY)[:-1],
    "without its digest": gzip.compress(BODY)[:-8],
    "cut": gzip.compress(BODY)[:20],
    "a head alone": gzip.compress(BODY)[:5],
    "not packed at all": BODY,
    "packed by zlib": zlib.compress(BODY),
    "rubbish behind it": gzip.compress(BODY) + b"rubbish",
    "in two members, one broken": gzip.compress(BODY[:99]) + gzip.compress(BODY[99:])[:-9],
    "a wrong length": gzip.compress(BODY)[:-4] + bytes(4),
    "no JSON": gzip.compress(b"{"),
    "no UTF-8": gzip.compress(b"\xff"),
    "empty": gzip.compress(b""),
}


@fault("request", "a body that claims to be gzip and is not", "400; nothing is executed")
@pytest.mark.parametrize("what", BROKEN)
def test_invalid_compressed_requests(shared_server: Server, topic: str, what: str) -> None:
    refused(write_packed(shared_server, topic, BROKEN[what]), 400, "invalid_request")


def test_a_compressed_request_may_have_several_members(shared_server: Server, topic: str) -> None:
    packed = b"".join(gzip.compress(part) for part in (BODY[:99], b"", BODY[99:]))
    assert ok(write_packed(shared_server, topic, packed), 201)["count"] == len(json.loads(BODY)["records"])


@pytest.mark.parametrize("encoding", ["deflate", "br", "zstd", "gzip, gzip", "nonsense"])
def test_other_encodings_are_refused(shared_server: Server, topic: str, encoding: str) -> None:
    refused(write_packed(shared_server, topic, BODY, encoding), 415, "unsupported_media_type")


@fault(
    "request",
    "a small gzip body that expands far beyond the limit",
    "413; it is not expanded beyond the limit",
)
def test_a_bomb_is_not_unpacked(shared_server: Server, topic: str) -> None:
    bomb = zlib.compress(bytes((64 << 20) + 1), 1, 31)
    assert len(bomb) < 1 << 20
    refused(write_packed(shared_server, topic, bomb), 413, "payload_too_large")


@pytest.mark.parametrize(
    ("accepted", "is_packed"),
    [
        (None, False), ("", False), ("identity", False), ("br, deflate", False), ("gzip", True), ("GZIP", True),
        ("deflate, gzip;q=0.5, br", True), ("gzip;q=0", False), ("br, gzip; q=0.000", False), ("x-gzipped", False),
    ],
)  # fmt: skip
def test_compressed_answers(shared_server: Server, topic: str, accepted: str | None, is_packed: bool) -> None:
    shared_server.write(topic, *["x" * 100] * 200)
    headers = {} if accepted is None else {"Accept-Encoding": accepted}
    reply = shared_server.request("POST", f"/v0/topics/{topic}/diff", {}, headers)
    assert reply.headers.get("content-encoding") == ("gzip" if is_packed else None)
    body = gzip.decompress(reply.body) if is_packed else reply.body
    assert int(reply.headers["content-length"]) == len(reply.body)
    page = ok(Reply(reply.status, reply.headers, body))
    assert [record["data"] for record in page["records"]] == ["x" * 100] * 200


def test_frames_and_text_are_never_compressed(shared_server: Server, topic: str) -> None:
    shared_server.write(topic, *["x" * 100] * 200)
    headers = {"Accept": FRAMES, "Accept-Encoding": "gzip"}
    assert (
        "content-encoding"
        not in shared_server.request("POST", f"/v0/topics/{topic}/diff", {}, headers).headers
    )


# -- the document ------------------------------------------------------------------------------------------


def test_the_openapi_document(shared_server: Server) -> None:
    reply = shared_server.get("/v0/openapi.json")
    assert (reply.status, reply.headers["content-type"]) == (200, JSON)
    document = reply.json
    assert document["openapi"].startswith("3.1")
    # Its content, and that it has every route, is checked in tests/unit/protocols/http/test_openapi.py.
    assert document["paths"].keys() == openapi.document(topics.__version__)["paths"].keys()
    assert document["info"]["version"] == shared_server.get("/healthz").json["version"]


def test_a_payload_of_bytes_survives_frames(shared_server: Server, topic: str) -> None:
    shared_server.post(f"/v0/topics/{topic}", {"records": [{"data_base64": "AAEC"}]})
    (record,) = decode(read_frames(shared_server, topic).body)
    assert b64decode(record["data"]) == b"\x00\x01\x02"
