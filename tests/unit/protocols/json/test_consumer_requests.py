"""Goal: a body about queues and consumers becomes the right command, and the first error in it is reported.

Method: bodies as bytes, commands as values; test_openapi compares the schemas of these bodies with the same code.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from topics.api.config import ConsumerConfig
from topics.api.errors import Forbidden, TopicsError
from topics.engine.commands import consumers as con
from topics.link import wire
from topics.protocols.json.consumer_requests import READERS

U64 = 2**64 - 1
DAY_MS = 86_400_000


def read(op: int, body: Any, *, consumer: str = "", flags: int = 0, prefixes: list[str] | None = None) -> Any:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = wire.Request(1, 0, 1000, op, flags, b"t", b"", text)
    return READERS[op]("t", request, wire.Args(consumer=consumer, prefixes=prefixes))[0]


def refusal(op: int, body: Any, **options: Any) -> TopicsError:
    with pytest.raises(TopicsError) as caught:
        read(op, body, **options)
    return caught.value


# ---- claims


def test_a_claim_of_a_queue() -> None:
    assert read(wire.CLAIM, {"node": "w"}) == con.Claim("t", "", b"w", 1)
    body = {"node": "ä", "max": 8, "lease_ms": 500, "wait_ms": 20_000, "max_bytes": 5}
    assert read(wire.CLAIM, body) == con.Claim("t", "", "ä".encode(), 8, 500, 0, 20_000)


def test_a_fetch_of_a_consumer() -> None:
    body = {"node": "w", "max": 8, "max_bytes": 5, "wait_ms": 7, "lease_ms": None}
    assert read(wire.CLAIM, body, consumer="c") == con.Claim("t", "c", b"w", 8, 0, 5, 7)


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ({"max": 0}, {"max": 1}),
        ({"max": 2**32 - 1}, {"max": 1000}),
        ({"lease_ms": 0}, {"lease_ms": 100}),
        ({"lease_ms": U64}, {"lease_ms": DAY_MS}),
        ({"wait_ms": 2**32 - 1}, {"wait_ms": 30_000}),
        ({"max_bytes": 0}, {"max_bytes": 1 << 20}),
        ({"max_bytes": U64}, {"max_bytes": 8 << 20}),
    ],
)
def test_a_claim_is_clamped(sent: dict[str, int], meant: dict[str, int]) -> None:
    meant = {"max_bytes": 1 << 20, **meant}
    assert read(wire.CLAIM, {"node": "w", **sent}, consumer="c") == con.Claim("t", "c", b"w", **meant)


@pytest.mark.parametrize("node", ["", "n" * 129])
def test_the_node_of_a_claim_is_for_the_engine_which_looks_at_the_topic_first(node: str) -> None:
    assert read(wire.CLAIM, {"node": node}).node == node.encode()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", {}, {"node": 5}])
def test_a_claim_that_is_no_json_of_that_kind(body: Any) -> None:
    assert refusal(wire.CLAIM, body).code == "invalid_request"


# ---- ack, nack, extend, term


def test_settling() -> None:
    body = {"node": "w", "seqs": [3, 4, 5], "lease_ids": ["lease_1f", "", "lease_0000000000000001"]}
    assert read(wire.ACK, body) == con.Settle("t", "ack", b"w", [3, 4, 5], [0x1F, 0, 1])
    assert read(wire.TERM, body | {"reason": "r"}, consumer="c") == con.Settle(
        "t", "term", b"w", [3, 4, 5], [0x1F, 0, 1], "c", reason="r"
    )
    assert read(wire.NACK, {"node": "w", "seqs": [1], "delay_ms": 5, "kind": "release"}) == con.Settle(
        "t", "nack", b"w", [1], delay_ms=5, nack="release"
    )
    assert read(wire.EXTEND, {"node": "w", "seqs": [], "lease_ms": 500}) == con.Settle(
        "t", "extend", b"w", [], lease_ms=500
    )


def test_settling_is_clamped() -> None:
    assert read(wire.NACK, {"node": "w", "seqs": [1], "delay_ms": U64}).delay_ms == DAY_MS
    assert read(wire.EXTEND, {"node": "w", "seqs": [1], "lease_ms": 1}).lease_ms == 100
    assert read(wire.EXTEND, {"node": "w", "seqs": [1], "lease_ms": U64}).lease_ms == DAY_MS


@pytest.mark.parametrize("token", ["lease_0", "lease_0000000000000000"])
def test_a_lease_that_nobody_has_is_not_taken_for_no_fence(token: str) -> None:
    assert read(wire.ACK, {"node": "w", "seqs": [1], "lease_ids": [token]}).lease_ids != [0]


@pytest.mark.parametrize(
    "token",
    ["lease_", "lease_1F", "lease_0x1", "lease_1_0", "lease_ 1", "lease_1\n", "1f", "lease_" + "1" * 17],
)
def test_lease_ids_that_are_none(token: str) -> None:
    assert refusal(wire.ACK, {"node": "w", "seqs": [1], "lease_ids": [token]}).code == "invalid_request"


@pytest.mark.parametrize("op", [wire.ACK, wire.NACK, wire.EXTEND, wire.TERM])
def test_the_order_of_checks(op: int) -> None:
    many = list(range(1, 1002))
    wrong = {"node": "", "seqs": many, "lease_ids": ["x"], "lease_ms": 500}
    assert "lease id" in str(refusal(op, wrong))
    wrong["lease_ids"] = ["lease_1"]
    assert "node" in str(refusal(op, wrong))
    wrong["node"] = "w"
    error = refusal(op, wrong)
    assert (error.code, error.detail) == ("batch_too_large", {"seqs": 1001, "max": 1000})
    wrong["seqs"] = many[:1000]
    assert "lease_ids" in str(refusal(op, wrong))


# ---- consumers


def test_a_consumer_with_all_defaults() -> None:
    for body in (b"", {}):
        assert read(wire.PUT_CONSUMER, body, consumer="c") == con.PutConsumer("t", "c", ConsumerConfig())


def test_a_consumer_with_everything() -> None:
    body = {
        "ack": "all",
        "ack_wait_ms": 5000,
        "max_deliver": 3,
        "backoff_ms": [100, 1000],
        "filter": "eu.*",
        "deliver": {"from_ts": 9},
        "max_ack_pending": 5,
        "max_waiting": 6,
        "headers_only": True,
        "dead_letter": "lost",
        "inactive_ttl_ms": 60_000,
        "replay": "original",
    }
    assert read(wire.PUT_CONSUMER, body, consumer="c").config == ConsumerConfig(
        "all", 5000, 3, (100, 1000), (("Glob", "eu.*"),), "from_ts", 9, 5, 6, True, "lost", 60_000, "original"
    )


def test_a_consumer_is_clamped() -> None:
    low = {"ack_wait_ms": 0, "backoff_ms": [0], "max_ack_pending": 0, "max_waiting": 0, "inactive_ttl_ms": 1}
    config = read(wire.PUT_CONSUMER, low, consumer="c").config
    assert (config.ack_wait_ms, config.backoff_ms, config.max_ack_pending) == (100, (100,), 1)
    assert (config.max_waiting, config.inactive_ttl_ms) == (1, 1000)
    high = {name: [U64] if name == "backoff_ms" else U64 for name in low}
    config = read(wire.PUT_CONSUMER, high, consumer="c").config
    assert (config.ack_wait_ms, config.backoff_ms, config.max_ack_pending) == (DAY_MS, (DAY_MS,), 100_000)
    assert (config.max_waiting, config.inactive_ttl_ms) == (10_000, 30 * DAY_MS)


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        (None, ()),
        ([], ()),
        ("eu", (("Eq", "eu"),)),
        (["tag", "Glob", "eu*"], (("Glob", "eu*"),)),
        (["tag", "Subject", "a.>"], (("Subject", "a.>"),)),
        (["a.*", "b.>"], (("Subject", "a.*"), ("Subject", "b.>"))),
        (["tag", "other", "a"], (("Subject", "tag"), ("Subject", "other"), ("Subject", "a"))),
        ([["tag", "Eq", "x"], "a.>"], (("Eq", "x"), ("Subject", "a.>"))),
    ],
)
def test_filters(sent: Any, meant: Any) -> None:
    assert read(wire.PUT_CONSUMER, {"filter": sent}, consumer="c").config.filter == meant


@pytest.mark.parametrize("pattern", [">", "eu.>", "*.tea", "orders.*.new", "orders.*.>"])
def test_a_subject_pattern_that_would_be_taken_for_a_tag_is_refused(pattern: str) -> None:
    error = refusal(wire.PUT_CONSUMER, {"filter": pattern}, consumer="c")
    assert error.code == "invalid_request"
    assert '["a.>"]' in str(error)
    for sent, op in (([pattern], "Subject"), (["tag", "Eq", pattern], "Eq")):
        assert read(wire.PUT_CONSUMER, {"filter": sent}, consumer="c").config.filter == ((op, pattern),)


@pytest.mark.parametrize("tag", ["*", "eu.*", "eu*", "eu.>x", "e>u", ">.eu", "a*.b", ""])
def test_tags_and_prefixes_in_a_string(tag: str) -> None:
    op = "Glob" if tag.endswith("*") else "Eq"
    assert read(wire.PUT_CONSUMER, {"filter": tag}, consumer="c").config.filter == ((op, tag),)


@pytest.mark.parametrize(
    ("op", "body", "words"),
    [
        (wire.NACK, {"node": "w", "seqs": [1], "kind": "drop"}, "dead, release, retry"),
        (wire.PUT_CONSUMER, {"ack": "some"}, "all, explicit, none"),
        (wire.PUT_CONSUMER, {"deliver": "first"}, "all, last, last_per_tag, new"),
        (wire.RESET_CONSUMER, {"to": "begin"}, "end, start"),
    ],
)
def test_an_error_for_an_unknown_word_lists_the_known_ones(op: int, body: Any, words: str) -> None:
    assert str(refusal(op, body, consumer="c")).endswith(f"; send one of {words}")


def test_where_dead_letters_may_go() -> None:
    body = {"dead_letter": "b.dead"}
    error = refusal(wire.PUT_CONSUMER, body, consumer="c", prefixes=["a."])
    assert isinstance(error, Forbidden)
    assert error.detail == {"topic": "b.dead"}
    assert read(wire.PUT_CONSUMER, body, consumer="c", prefixes=["a.", "b."]).config.dead_letter == "b.dead"


def test_steering() -> None:
    assert read(wire.PAUSE_CONSUMER, b"", consumer="c") == con.PauseConsumer("t", "c", True)
    assert read(wire.PAUSE_CONSUMER, {"until_ts": 5}, consumer="c") == con.PauseConsumer("t", "c", True, 5)
    resumed = read(wire.PAUSE_CONSUMER, b"junk", consumer="c", flags=wire.RESUME)
    assert resumed == con.PauseConsumer("t", "c", False)
    assert read(wire.RESET_CONSUMER, {"to": "end"}, consumer="c") == con.ResetConsumer("t", "c", "end")
    body = {"to": {"ts": 7}, "dry_run": True}
    assert read(wire.RESET_CONSUMER, body, consumer="c") == con.ResetConsumer("t", "c", "ts", 7, True)
