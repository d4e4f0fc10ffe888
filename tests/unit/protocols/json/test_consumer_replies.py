"""Goal: replies about deliveries and settles are exact, and match the published schemas.

Method: results made by hand, with records as frames; the texts are parsed, and checked with the schemas of the
document.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from tests.support.answers import assert_declared
from topics.api.config import ConsumerConfig
from topics.api.responses import consumers
from topics.engine.commands import consumers as con
from topics.engine.commands.page import Page, Tombstone
from topics.engine.commands.topics import Records
from topics.engine.storage.frames import encode_appends
from topics.link import wire
from topics.protocols.http.openapi import document as openapi
from topics.protocols.json import consumer_replies

TS = 1_700_000_000_000
COMPONENTS = openapi.document("1")["components"]


def page(*writes: Records, split: bool = False) -> Page:
    """The writes as a page: in one buffer, or, `split`, each in its own."""
    buffers: list[bytes] = []
    which: list[int] = []
    starts: list[int] = []
    lengths: list[int] = []
    for records in writes:
        pieces: list[bytes] = []
        at = sum(map(len, buffers)) if not split else 0
        for length in encode_appends(pieces, records, topic_id=3, first_seq=len(starts) + 1, ts=TS)[0]:
            which.append(len(buffers))
            starts.append(at)
            lengths.append(length)
            at += length
        buffers.append(b"".join(pieces))
    count = len(starts)
    frames = buffers if split else [b"".join(buffers)]
    columns = np.array(which) if split else None
    page = Page.empty("t", next_from_seq=count, head_seq=count, earliest_seq=1, scanned=count)
    page.seqs, page.timestamps, page.flags = list(range(1, count + 1)), [TS] * count, [0] * count
    page.frames, page.which = frames, columns
    page.starts, page.lengths = np.array(starts), np.array(lengths)
    return page


def claimed(
    records: Page, *, consumer: str = "", leased: bool = True, gone: Tombstone | None = None
) -> con.Claimed:
    count = len(records.seqs)
    ids = [0x1F + i for i in range(count)] if leased else [0] * count
    return con.Claimed("t", consumer, records, ids, [TS + 5] * count, [1 + i for i in range(count)], 7, gone)


def body_of(rendered: Any, component: str, code: int = wire.OK) -> Any:
    assert (rendered[0], rendered[1], rendered[2]) == (code, wire.JSON, b"")
    body = json.loads(bytes(rendered[3]))
    schema = {"$ref": f"#/components/schemas/{component}", "components": COMPONENTS}
    jsonschema_rs.Draft202012Validator(schema).validate(body)
    assert_declared(getattr(consumers, component), bytes(rendered[3]))
    assert body.pop("performance")["server_total_ms"] == 1.5
    return body


FULL = Records(
    [b'{"a":1}{"k":2}', b'"x"'], tags=[b"eu", None], nodes=[None, b"n"], meta_lens=[7, 0], ttls_ms=[0, 5]
)


@pytest.mark.parametrize("split", [False, True])
def test_a_claim(split: bool) -> None:
    records = page(Records([b"1"]), FULL, Records([b"\x00\xff"], raw=True), split=split)
    lease = {"deadline": TS + 5, "$ts": TS}
    assert body_of(consumer_replies.claimed(claimed(records), 1.5), "Claimed") == {
        "topic": "t",
        "claimed": [
            {"$seq": 1, "lease_id": "lease_1f", **lease, "deliveries": 1, "data": 1},
            {
                "$seq": 2, "lease_id": "lease_20", **lease, "deliveries": 2, "data": {"a": 1}, "$tag": "eu",
                "meta": {"k": 2},
            },
            {"$seq": 3, "lease_id": "lease_21", **lease, "deliveries": 3, "data": "x"},
            {
                "$seq": 4, "lease_id": "lease_22", **lease, "deliveries": 4, "data": "AP8=",
                "$encoding": "base64",
            },
        ],
        "count": 4,
        "ready": 7,
    }  # fmt: skip


def test_nothing_claimed() -> None:
    nothing = Page.empty("t", next_from_seq=0, head_seq=0, earliest_seq=1)
    body = body_of(consumer_replies.claimed(claimed(nothing), 1.5), "Claimed")
    assert body == {"topic": "t", "claimed": [], "count": 0, "ready": 7}


def test_a_fetch_without_acks_and_with_a_gap() -> None:
    gone = Tombstone(1, 4, "cap", 4, 5, 9)
    result = claimed(page(Records([b"1"])), consumer="c", leased=False, gone=gone)
    body = body_of(consumer_replies.claimed(result, 1.5), "Fetched")
    assert body["consumer"] == "c"
    assert body["claimed"] == [{"$seq": 1, "$ts": TS, "deliveries": 1, "data": 1}]
    assert body["tombstone"]["gap_to"] == 4
    body = body_of(consumer_replies.claimed(claimed(page(FULL), consumer="c"), 1.5), "Fetched")
    assert body["tombstone"] is None


def test_headers_only() -> None:
    odd = Records([b"[1, 2]"], sizes=[5])
    result = claimed(page(FULL, odd), consumer="c", leased=False)
    body = body_of(consumer_replies.claimed(result, 1.5, headers_only=True), "Fetched")
    assert body["claimed"] == [
        {"$seq": 1, "$ts": TS, "$tag": "eu", "deliveries": 1, "bytes": 14, "meta": {"k": 2}},
        {"$seq": 2, "$ts": TS, "deliveries": 2, "bytes": 3},
        {"$seq": 3, "$ts": TS, "deliveries": 3, "bytes": 5},
    ]


def test_jobs_for_a_stream_begin_with_what_it_adds() -> None:
    (job,) = consumer_replies.render_jobs(claimed(page(Records([b"1"]))), members=b'"topic":"t",')
    assert job.startswith(b'{"topic":"t","$seq":1,')
    assert json.loads(job)["data"] == 1


@pytest.mark.parametrize(
    ("kind", "counted", "component"),
    [("ack", "acked", "Acked"), ("nack", "nacked", "Nacked"), ("term", "termed", "Termed")],
)
def test_settled(kind: Any, counted: str, component: str) -> None:
    result = con.Settled("t", "c", kind, 2, [9, 9], 3, 4)
    body = body_of(consumer_replies.settled(result, 1.5, 0.0), component)
    assert body == {"topic": "t", "consumer": "c", counted: 2, "skipped": [9, 9], "ready": 3, "in_flight": 4}


def test_only_a_sync_that_was_waited_for_is_told() -> None:
    result = con.Settled("t", "", "ack", 1, [], 0, 0)
    rendered = consumer_replies.settled(result, 1.5, 0.25)
    assert json.loads(bytes(rendered[3]))["performance"] == {"server_total_ms": 1.5, "fsync_ms": 0.25}
    assert "consumer" not in body_of(rendered, "Acked")
    plain = consumer_replies.settled(result, 1.5, 0.0)
    assert json.loads(bytes(plain[3]))["performance"] == {"server_total_ms": 1.5}


def test_extended() -> None:
    result = con.Settled("t", "", "extend", 1, [4], 3, 4, {7: TS})
    body = body_of(consumer_replies.settled(result, 1.5, 0.0), "Extended")
    assert body == {"topic": "t", "extended": 1, "skipped": [4], "deadlines": {"7": TS}}


# ---- consumers


def state(
    name: str = "c", config: ConsumerConfig | None = None, *, created: bool = False
) -> con.ConsumerState:
    return con.ConsumerState(
        "t", name, config or ConsumerConfig(), created, TS, 5, 9, 1, 3, 2, 1, 4, 0, 0, 0, 6, 7, TS, False, 0, False,
        Tombstone(1, 4, "cap", 4, 5, 9),
    )  # fmt: skip


def test_a_consumer() -> None:
    for created, code in ((True, wire.CREATED), (False, wire.OK)):
        rendered = consumer_replies.render_consumer(state(created=created), wire.PUT_CONSUMER, 0, 1.5)
        assert body_of(rendered, "ConsumerPut", code)["created"] is created
    body = body_of(consumer_replies.render_consumer(state(), wire.GET_CONSUMER, 0, 1.5), "ConsumerState")
    assert "created" not in body
    assert (body["next_seq"], body["ack_floor"], body["lag_records"]) == (5, 3, 6)
    assert body["paused_until_ts"] is None
    assert body["tombstone"]["reason"] == "cap"


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        (ConsumerConfig(), {"filter": None, "deliver": "all", "backoff_ms": []}),
        (
            ConsumerConfig(
                filter=(("Glob", "eu*"),), deliver="from_seq", deliver_value=4, backoff_ms=(100, 200)
            ),
            {"filter": [["tag", "Glob", "eu*"]], "deliver": {"from_seq": 4}, "backoff_ms": [100, 200]},
        ),
        (ConsumerConfig(deliver="from_ts", deliver_value=TS), {"deliver": {"from_ts": TS}}),
    ],
)
def test_the_config_of_a_consumer(config: ConsumerConfig, shown: dict[str, Any]) -> None:
    rendered = consumer_replies.render_consumer(state(config=config), wire.GET_CONSUMER, 0, 1.5)
    body = body_of(rendered, "ConsumerState")["config"]
    assert {name: body[name] for name in shown} == shown
    assert set(body) == {*ConsumerConfig.__struct_fields__} - {"deliver_value"}


def test_a_list_has_a_cursor_when_there_is_more() -> None:
    rows = [state("a"), state("b"), state("c")]
    body = body_of(consumer_replies.consumer_list(con.ConsumerList("t", rows), 2, 1.5), "ConsumerList")
    assert [row["consumer"] for row in body["consumers"]] == ["a", "b"]
    assert body["next_cursor"] == "Yg"
    body = body_of(consumer_replies.consumer_list(con.ConsumerList("t", rows), 3, 1.5), "ConsumerList")
    assert "next_cursor" not in body


def test_dropped_and_reset() -> None:
    dropped = con.ConsumerDropped("t", "c", False)
    body = body_of(consumer_replies.render_consumer(dropped, wire.DROP_CONSUMER, 0, 1.5), "ConsumerDeleted")
    assert body == {"topic": "t", "consumer": "c", "deleted": False}
    reset = con.ConsumerReset(state(), True, 5, 1, 3, 0)
    body = body_of(consumer_replies.render_consumer(reset, wire.RESET_CONSUMER, 0, 1.5), "ConsumerReset")
    assert body == {
        "topic": "t", "consumer": "c", "dry_run": True, "from_seq": 5, "to_seq": 1, "redelivers": 3, "skips": 0,
    }  # fmt: skip
