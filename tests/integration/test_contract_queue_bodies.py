"""Goal: an invalid claim, ack, nack or extend is refused with the right error, in the contract's order, and changes nothing.

Method: one mistake at a time, and two where the order of checks is promised.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.contract import (
    U32_MAX,
    U64_MAX,
    Json,
    ok,
    refused,
    send_text,
    state_of,
)
from tests.support.queue_client import (
    NODE,
    SETTLES,
    call,
    claim,
    counts,
    make_queue,
    settle,
)
from tests.support.server import Server

every_settle = pytest.mark.parametrize("verb", list(SETTLES))


# -- unknown topics, logs, bodies --------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["claim", *SETTLES])
def test_unknown_topics_are_not_created(shared_server: Server, topic: str, verb: str) -> None:
    for name in (topic, ".bad", "x" * 300):
        reply = call(shared_server, name, verb, seqs=[1], lease_ms=1000)
        refused(reply, 404, "topic_not_found", {"topic": name})
    refused(shared_server.get(f"/v0/topics/{topic}"), 404, "topic_not_found")


@pytest.mark.parametrize("verb", ["claim", *SETTLES])
def test_a_log_is_not_a_queue(shared_server: Server, topic: str, verb: str) -> None:
    shared_server.write(topic, 1)
    reply = call(shared_server, topic, verb, seqs=[1], lease_ms=1000)
    refused(reply, 409, "not_a_queue", {"topic": topic})
    assert "queue" not in state_of(shared_server, topic)


@pytest.mark.parametrize("verb", ["claim", *SETTLES])
def test_invalid_bodies(shared_server: Server, topic: str, verb: str) -> None:
    make_queue(shared_server, topic, 1)
    path = f"/v0/topics/{topic}/{verb}"
    for text in ("{", "[]", "null", "5", '"x"', "", " ", '{"node":NaN}', "{'node':'a'}"):
        refused(send_text(shared_server, "POST", path, text), 400, "invalid_request")
    body = b'{"node":"a","seqs":[],"lease_ms":1000}'
    for content_type in ("text/plain", "application/xml", "application/jso"):
        refused(send_text(shared_server, "POST", path, body, content_type), 415, "unsupported_media_type")
    refused(shared_server.request("POST", path, body), 415, "unsupported_media_type")
    reply = shared_server.request("POST", path)
    refused(reply, *((400, "invalid_request") if verb == "claim" else (415, "unsupported_media_type")))
    ok(send_text(shared_server, "POST", path, body, "application/json; charset=utf-8"))


@pytest.mark.parametrize("verb", ["claim", *SETTLES])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_wrong_methods(shared_server: Server, verb: str, method: str) -> None:
    reply = shared_server.request(method, f"/v0/topics/absent/{verb}", b"{")
    refused(reply, 405, "method_not_allowed")
    assert set(reply.headers["allow"].split(", ")) == {"POST", "OPTIONS"}


@pytest.mark.parametrize(
    "body",
    [
        {}, {"node": None}, {"node": ""}, {"node": 5}, {"node": ["a"]}, {"node": "x" * 129}, {"node": "é" * 65},
        {"node": "a", "max": -1}, {"node": "a", "max": 1.0}, {"node": "a", "max": True}, {"node": "a", "max": "1"},
        {"node": "a", "max": None}, {"node": "a", "max": U32_MAX + 1}, {"node": "a", "lease_ms": -1},
        {"node": "a", "lease_ms": 1.5}, {"node": "a", "lease_ms": "1"}, {"node": "a", "lease_ms": U64_MAX + 1},
        {"node": "a", "wait_ms": -1}, {"node": "a", "wait_ms": "1"},
    ],
)  # fmt: skip
def test_bad_claims(shared_server: Server, topic: str, body: Json) -> None:
    make_queue(shared_server, topic, 1)
    refused(shared_server.post(f"/v0/topics/{topic}/claim", body), 400, "invalid_request")
    assert counts(shared_server, topic)["ready"] == 1


def test_a_claim_looks_at_existence_and_type_before_the_node(shared_server: Server, topic: str) -> None:
    for body in ({"node": ""}, {"node": "x" * 129}):
        refused(shared_server.post("/v0/topics/absent/claim", body), 404, "topic_not_found")
    shared_server.write(topic, 1)
    for body in ({"node": ""}, {"node": "x" * 129}):
        refused(shared_server.post(f"/v0/topics/{topic}/claim", body), 409, "not_a_queue")
    # Invalid JSON comes first.
    refused(shared_server.post("/v0/topics/absent/claim", {"node": 5}), 400, "invalid_request")


@every_settle
@pytest.mark.parametrize(
    "wrong",
    [
        {"node": ""}, {"node": None}, {"node": 5}, {"seqs": None}, {"seqs": 5}, {"seqs": [-1]}, {"seqs": ["1"]},
        {"seqs": [1.0]}, {"seqs": [True]}, {"seqs": [U64_MAX + 1]}, {"seqs": [None]}, {"lease_ids": "x"}, {"lease_ids": [5]},
        {"lease_ids": [None]}, {"seqs": [1], "lease_ids": ["", ""]}, {"seqs": [1, 2], "lease_ids": [""]},
        {"lease_ids": ["lease_"]}, {"lease_ids": ["lease_G"]}, {"lease_ids": ["LEASE_1"]}, {"lease_ids": ["lease_1F"]},
        {"lease_ids": ["1"]}, {"lease_ids": [" lease_1"]}, {"lease_ids": ["lease_-1"]}, {"lease_ids": ["lease_0x1"]},
        {"lease_ids": ["lease_1" + "0" * 16]}, {"seqs": [], "lease_ids": [""]},
    ],
)  # fmt: skip
def test_bad_settles(shared_server: Server, topic: str, verb: str, wrong: Json) -> None:
    make_queue(shared_server, topic, 1)
    claim(shared_server, topic)
    reply = call(shared_server, topic, verb, **{"seqs": [1], **SETTLES[verb], **wrong})
    refused(reply, 400, "invalid_request")
    # The whole body is checked before the topic is looked up.
    absent = call(shared_server, "absent", verb, **{"seqs": [1], **SETTLES[verb], **wrong})
    refused(absent, 400, "invalid_request")
    assert counts(shared_server, topic)["in_flight"] == 1


@every_settle
@pytest.mark.parametrize("missing", ["node", "seqs"])
def test_settles_without_required_fields(shared_server: Server, topic: str, verb: str, missing: str) -> None:
    make_queue(shared_server, topic)
    body = {"node": NODE, "seqs": [1], **SETTLES[verb]}
    del body[missing]
    refused(shared_server.post(f"/v0/topics/{topic}/{verb}", body), 400, "invalid_request")


@pytest.mark.parametrize("lease_ms", [-1, 1.5, "1", None, U64_MAX + 1, True])
def test_bad_extends(shared_server: Server, topic: str, lease_ms: Any) -> None:
    make_queue(shared_server, topic)
    refused(call(shared_server, topic, "extend", seqs=[1], lease_ms=lease_ms), 400, "invalid_request")
    refused(call(shared_server, topic, "extend", seqs=[1]), 400, "invalid_request")


@pytest.mark.parametrize(
    "wrong",
    [
        {"delay_ms": -1}, {"delay_ms": 1.5}, {"delay_ms": "1"}, {"delay_ms": None}, {"delay_ms": U64_MAX + 1},
        {"kind": "never"}, {"kind": 5}, {"kind": "RETRY"}, {"reason": 5}, {"kind": "dead", "reason": "x" * 1025},
    ],
)  # fmt: skip
def test_bad_nacks(shared_server: Server, topic: str, wrong: Json) -> None:
    make_queue(shared_server, topic, 1)
    claim(shared_server, topic)
    refused(call(shared_server, topic, "nack", seqs=[1], **wrong), 400, "invalid_request")
    assert counts(shared_server, topic)["in_flight"] == 1


@every_settle
def test_too_many_seqs(shared_server: Server, topic: str, verb: str) -> None:
    make_queue(shared_server, topic)
    assert settle(shared_server, topic, verb, list(range(1, 1001)))["skipped"] == list(range(1, 1001))
    for name in (topic, "absent"):
        reply = call(shared_server, name, verb, seqs=list(range(1001)), **SETTLES[verb])
        refused(reply, 400, "batch_too_large", {"seqs": 1001, "max": 1000})


@every_settle
def test_the_order_of_checks(shared_server: Server, verb: str) -> None:
    """Syntax of `lease_ids`, `node`, length of `seqs`, length of `lease_ids`, existence: the first mistake is reported."""
    many = list(range(1001))

    def message(**body: Any) -> tuple[str, str]:
        reply = call(shared_server, "absent", verb, **{**SETTLES[verb], **body})
        return reply.error["code"], reply.error["message"]

    syntax = message(seqs=many, node="", lease_ids=["x"])
    assert syntax == message(seqs=[1], lease_ids=["x"])
    node = message(seqs=many, node="", lease_ids=[""])
    assert node == message(seqs=[1], node="") != syntax
    assert message(seqs=many, lease_ids=[""])[0] == "batch_too_large"
    length = message(seqs=[1], lease_ids=["", ""])
    assert length[0] == "invalid_request" and length not in (syntax, node)
    assert message(seqs=[1], lease_ids=[""])[0] == "topic_not_found"
