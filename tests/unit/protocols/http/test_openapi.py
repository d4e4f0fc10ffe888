"""The OpenAPI document is valid and correct: it matches the types that check bodies, in both directions.

Samples are given to the code that reads requests, with its msgspec types, and to the JSON schema; both must agree.
The HTTP page is checked against the same facts: its decoder runs, and it names every code, field, route and metric.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from topics.api import config
from topics.api import requests as schemas
from topics.api.config import ConsumerConfig, TopicConfig
from topics.api.errors import CODES, InvalidRequest, TopicsError
from topics.api.fields import HIDDEN
from topics.api.limits import BATCH_RECORDS_MAX
from topics.api.operations import OPERATIONS
from topics.api.responses import records as responses
from topics.engine.commands.topics import Records, Tombstone
from topics.engine.storage.frames import encode_appends
from topics.engine.storage.manifest import Manifest, RetiredSegment, Segment
from topics.link import wire
from topics.protocols.http import metrics_text
from topics.protocols.http.errors import STATUS, error_body
from topics.protocols.http.openapi import document as openapi
from topics.protocols.json import consumer_requests, requests
from topics.protocols.json import forwards as forward_requests
from topics.protocols.json import transactions as transaction_requests

ROOT = Path(__file__).resolve().parents[4]
PAGES = [*sorted((ROOT / "docs" / "http").glob("*.md")), ROOT / "docs" / "transactions.md"]
PAGE = "".join(page.read_text() for page in PAGES)
CONSOLIDATION_PAGE = (ROOT / "docs" / "consolidation.md").read_text()
CONSUMERS_PAGE = (ROOT / "docs" / "consumers.md").read_text()
DOCUMENT = openapi.document("1.2.3")
SCHEMAS = DOCUMENT["components"]["schemas"]
REQUESTS = (
    config.ConfigBody,
    schemas.RecordBody,
    schemas.TagLastSeq,
    schemas.WriteBody,
    schemas.DiffBody,
    schemas.DeleteBody,
    schemas.StartBody,
    schemas.WatchBody,
    schemas.ClaimBody,
    schemas.AckBody,
    schemas.NackBody,
    schemas.ExtendBody,
    schemas.ForwardBody,
    schemas.BeginBody,
    schemas.StageBody,
    schemas.CommitPartsBody,
)
CONSUMER_REQUESTS = (
    schemas.FetchBody,
    schemas.TermBody,
    config.ConsumerBody,
    config.DeliverFrom,
    schemas.PauseBody,
    schemas.ResetBody,
    schemas.ResetTo,
)
MERGE_REQUESTS = (schemas.PlanBody, schemas.LeaseBody, schemas.CommitBody, schemas.SnapshotBody)


def answers_of(*tags: str) -> list[type[msgspec.Struct]]:
    """Bodies of the answers of these sections."""
    found = [body for one in OPERATIONS if one.tag in tags for body, _ in one.answers.values()]
    return [*dict.fromkeys(body for body in found if body is not None)]


ANSWERS = [responses.ErrorBody, *answers_of(*(one.tag for one in OPERATIONS))]


def every(node: Any, key: str) -> Iterator[Any]:
    """The values of this key, wherever it is."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            yield from every(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from every(value, key)


def shown(body: type[msgspec.Struct]) -> list[Any]:
    """The fields that a document shows."""
    return [field for field in msgspec.structs.fields(body) if HIDDEN not in config.marks_of(field)]


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def resolve(ref: str) -> Any:
    node: Any = DOCUMENT
    for name in ref.removeprefix("#/").split("/"):
        node = node[name]
    return node


@functools.cache
def validator(component: str) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(
        {"$ref": f"#/components/schemas/{component}", "components": DOCUMENT["components"]}
    )


# -- the document ------------------------------------------------------------------------------------------


def test_every_schema_is_a_valid_schema() -> None:
    parameters = [p["schema"] for _, _, operation in operations() for p in operation.get("parameters", [])]
    for schema in [*SCHEMAS.values(), *parameters]:
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema)


def test_every_reference_resolves() -> None:
    refs = list(every(DOCUMENT, "$ref"))
    assert refs
    assert all(resolve(ref) for ref in refs)


def test_every_schema_is_used() -> None:
    used = {ref.rpartition("/")[2] for ref in every(DOCUMENT, "$ref") if "/schemas/" in ref}
    # Lines have no schema of their own in OpenAPI 3.1; the record is named in the description.
    assert set(SCHEMAS) == used | {"RecordBody"}


def test_it_is_json_and_made_afresh() -> None:
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT
    other = openapi.document("1.2.3")
    assert other == DOCUMENT
    other["paths"].clear()
    assert openapi.document("1.2.3") == DOCUMENT


def test_every_field_appears() -> None:
    for body in (*REQUESTS, *CONSUMER_REQUESTS, *MERGE_REQUESTS, *ANSWERS):
        names = {field.encode_name for field in shown(body)}
        assert set(SCHEMAS[body.__name__]["properties"]) - {"ignored"} == names, body


def test_every_field_of_a_request_is_described() -> None:
    for body in (*REQUESTS, *CONSUMER_REQUESTS, *MERGE_REQUESTS):
        for name, schema in SCHEMAS[body.__name__]["properties"].items():
            assert schema.get("description"), (body, name)


def test_defaults_are_in_the_descriptions() -> None:
    """As a keyword, a default makes generated types require the field."""
    for body in (*REQUESTS, *CONSUMER_REQUESTS, *MERGE_REQUESTS):
        for field in msgspec.structs.fields(body):
            schema = SCHEMAS[body.__name__]["properties"][field.encode_name]
            assert "default" not in schema
            if field.default and isinstance(field.default, str | int | float):
                said = msgspec.json.encode(field.default).decode()
                assert schema["description"].endswith(f" Default: {said}."), (body, field.name)


def test_generated_types_know_every_answer() -> None:
    """What such tools take for `unknown`: an answer or a body with a content type that has no schema, or an array with `anyOf`."""
    for method, path, operation in operations():
        for status, answer in operation["responses"].items():
            for kind, content in answer.get("content", {}).items():
                assert content.get("schema"), (method, path, status, kind)
    for name, schema in SCHEMAS.items():
        for field, found in schema.get("properties", {}).items():
            assert not ("items" in found and "anyOf" in found), (name, field)


# -- operations --------------------------------------------------------------------------------------------


def test_the_routes() -> None:
    assert {(method, path) for method, path, _ in operations()} == {
        ("GET", "/v0/topics"),
        ("PUT", "/v0/topics/{topic}"),
        ("GET", "/v0/topics/{topic}"),
        ("DELETE", "/v0/topics/{topic}"),
        ("POST", "/v0/topics/{topic}"),
        ("POST", "/v0/topics/{topic}/raw"),
        ("GET", "/v0/topics/{topic}/records"),
        ("POST", "/v0/topics/{topic}/diff"),
        ("POST", "/v0/topics/{topic}/delete"),
        ("GET", "/v0/topics/{topic}/deleted"),
        ("GET", "/v0/topics/{topic}/tags"),
        ("GET", "/v0/topics/{topic}/last"),
        ("POST", "/v0/topics/{topic}/transactions"),
        ("POST", "/v0/topics/{topic}/transactions/{txn}/stage"),
        ("POST", "/v0/topics/{topic}/transactions/{txn}/commit"),
        ("POST", "/v0/topics/{topic}/transactions/{txn}/abort"),
        ("POST", "/v0/topics/{topic}/claim"),
        ("POST", "/v0/topics/{topic}/ack"),
        ("POST", "/v0/topics/{topic}/nack"),
        ("POST", "/v0/topics/{topic}/extend"),
        ("GET", "/v0/topics/{topic}/work"),
        ("GET", "/v0/topics/{topic}/consumers"),
        ("PUT", "/v0/topics/{topic}/consumers/{consumer}"),
        ("GET", "/v0/topics/{topic}/consumers/{consumer}"),
        ("DELETE", "/v0/topics/{topic}/consumers/{consumer}"),
        ("POST", "/v0/topics/{topic}/consumers/{consumer}/fetch"),
        ("POST", "/v0/topics/{topic}/consumers/{consumer}/ack"),
        ("POST", "/v0/topics/{topic}/consumers/{consumer}/nack"),
        ("POST", "/v0/topics/{topic}/consumers/{consumer}/extend"),
        ("POST", "/v0/topics/{topic}/consumers/{consumer}/term"),
        ("POST", "/v0/topics/{topic}/consumers/{consumer}/pause"),
        ("POST", "/v0/topics/{topic}/consumers/{consumer}/resume"),
        ("POST", "/v0/topics/{topic}/consumers/{consumer}/reset"),
        ("GET", "/v0/topics/{topic}/consumers/{consumer}/stream"),
        ("GET", "/v0/routers"),
        ("PUT", "/v0/routers/{router}"),
        ("GET", "/v0/routers/{router}"),
        ("DELETE", "/v0/routers/{router}"),
        ("POST", "/v0/topics/{topic}/consolidation"),
        ("GET", "/v0/topics/{topic}/consolidation"),
        ("POST", "/v0/topics/{topic}/consolidation/{plan_id}/renew"),
        ("POST", "/v0/topics/{topic}/consolidation/{plan_id}/commit"),
        ("POST", "/v0/topics/{topic}/consolidation/{plan_id}/abandon"),
        ("POST", "/v0/topics/{topic}/snapshots"),
        ("POST", "/v0/topics/{topic}/snapshots/{snapshot_id}/renew"),
        ("DELETE", "/v0/topics/{topic}/snapshots/{snapshot_id}"),
        ("POST", "/v0/watch"),
        ("GET", "/v0/watch/{wid}"),
        ("GET", "/v0/ws"),
        ("GET", "/v0/health"),
        ("GET", "/v0/ready"),
        ("GET", "/healthz"),
        ("GET", "/readyz"),
        ("GET", "/v0/metrics"),
        ("GET", "/metrics"),
        ("GET", "/v0/openapi.json"),
    }


def test_operation_ids_are_unique() -> None:
    ids = [operation["operationId"] for _, _, operation in operations()]
    assert len(set(ids)) == len(ids)


def test_every_operation_says_how_it_fails() -> None:
    for method, path, operation in operations():
        statuses = {int(status) for status in operation["responses"]}
        # All other statuses are errors with our body; a WebSocket begins with 101.
        assert statuses & {200, 201} or (path, 101 in statuses) == ("/v0/ws", True), (method, path)
        assert {400, 401, 408, 431, 500} <= statuses, (method, path)
        assert statuses - {101, 200, 201, 202} <= set(STATUS.values()), (method, path)
        if "{topic}" in path:
            assert {403, 429, 503} <= statuses, (method, path)
        assert ({413, 415} <= statuses) == ("requestBody" in operation), (method, path)


def test_every_code_is_described_under_its_status() -> None:
    assert set(openapi.CODES) == set(STATUS) == set(CODES)
    for code, status in STATUS.items():
        assert f"`{code}`" in DOCUMENT["components"]["responses"][f"Error{status}"]["description"]


def test_a_request_with_fields_may_be_strict_and_its_answer_may_name_what_was_ignored() -> None:
    for method, path, operation in operations():
        names = {parameter["name"] for parameter in operation.get("parameters", [])}
        body = operation.get("requestBody", {"content": {"application/json": {"schema": {}}}})
        has_fields = "$ref" in body["content"]["application/json"]["schema"]
        assert ("Topics-Strict" in names) == has_fields, (method, path)
        for status, answer in operation["responses"].items() if has_fields else ():
            if status.startswith("2"):
                schema = resolve(answer["content"]["application/json"]["schema"]["$ref"])
                assert schema["properties"]["ignored"]["maxItems"] == 16
    assert "ignored" not in SCHEMAS["ErrorBody"]["properties"]


def test_only_429_and_503_say_when_to_come_back() -> None:
    with_header = {
        name for name, response in DOCUMENT["components"]["responses"].items() if "headers" in response
    }
    assert with_header == {"Error429", "Error503"}


def test_a_key_is_optional_everywhere() -> None:
    for security in [DOCUMENT["security"], *every(DOCUMENT["paths"], "security")]:
        assert security[0] == {}
        assert list(security[1]) == ["bearerAuth"]


# -- samples both ways -------------------------------------------------------------------------------------

U64 = 2**64 - 1
SAMPLES: list[tuple[type[msgspec.Struct], bool, Any]] = [
    (config.ConfigBody, True, {}),
    (config.ConfigBody, True, {"type": "queue", "lease_ms": 5, "dead_letter": "lost.jobs"}),
    (config.ConfigBody, True, {"durability": None, "priority": None, "dead_letter": None}),
    (config.ConfigBody, True, {"durability": "fsync", "priority": -(2**31), "cap_bytes": U64}),
    (config.ConfigBody, True, {"later": {"a": 1}}),
    (config.ConfigBody, False, {"type": "stack"}),
    (config.ConfigBody, False, {"type": None}),
    (config.ConfigBody, False, {"ttl_ms": -1}),
    (config.ConfigBody, False, {"ttl_ms": "5"}),
    (config.ConfigBody, False, {"ttl_ms": 1.5}),
    (config.ConfigBody, False, {"ttl_ms": True}),
    (config.ConfigBody, False, {"ttl_ms": None}),
    (config.ConfigBody, False, {"cap_records": U64 + 1}),
    (config.ConfigBody, False, {"priority": 2**31}),
    (config.ConfigBody, False, {"durable": "yes"}),
    (config.ConfigBody, False, {"durability": "tape"}),
    (config.ConfigBody, False, []),
    (schemas.RecordBody, True, {"data": None}),
    (schemas.RecordBody, True, {"data": [1, {"a": None}], "tag": None, "node": None, "meta": None}),
    (schemas.RecordBody, True, {"data": 1, "tag": "t", "node": "n", "meta": {"k": 1}, "ttl_ms": U64}),
    (schemas.RecordBody, True, {"data": 1, "meta": "text", "data_base64": None}),
    (schemas.RecordBody, True, {"data_base64": "", "meta": None}),
    (schemas.RecordBody, True, {"data_base64": "AAEC/w==", "tag": "b"}),
    (schemas.RecordBody, False, {}),
    (schemas.RecordBody, False, {"tag": "t"}),
    (schemas.RecordBody, False, {"data_base64": None}),
    (schemas.RecordBody, False, {"data_base64": "AA=", "tag": "b"}),
    (schemas.RecordBody, False, {"data_base64": "not base64!"}),
    (schemas.RecordBody, False, {"data": 1, "data_base64": "AA=="}),
    (schemas.RecordBody, False, {"meta": {}, "data_base64": "AA=="}),
    (schemas.RecordBody, False, {"data": 1, "tag": 5}),
    (schemas.RecordBody, False, {"data": 1, "ttl_ms": None}),
    (schemas.RecordBody, False, {"data": 1, "ttl_ms": U64 + 1}),
    (schemas.RecordBody, False, {"data": 1, "tag": "t" * 257}),
    (schemas.RecordBody, False, {"data": 1, "node": "n" * 129}),
    (schemas.RecordBody, False, {"data": 1, "meta": {str(i): i for i in range(65)}}),
    (schemas.RecordBody, False, 5),
    (schemas.WriteBody, True, {"records": [{"data": 1}]}),
    (schemas.WriteBody, True, {"records": [{"data_base64": "AA=="}, {"data_base64": "AAE="}]}),
    (schemas.WriteBody, True, {"records": [{"data": 1}], "config": {"type": "queue"}, "create": True}),
    (schemas.WriteBody, True, {"records": [{"data": 1}], "config": None, "create": None, "node": None}),
    (schemas.WriteBody, True, {"records": [{"data": 1}], "idempotency_key": "k" * 256}),
    (schemas.WriteBody, True, {"records": [{"data": 1}], "if_last_seq": 0}),
    (schemas.WriteBody, True, {"records": [{"data": 1}], "if_tag_last_seq": {"tag": "t", "seq": 7}}),
    (schemas.WriteBody, True, {"records": [{"data": 1}] * BATCH_RECORDS_MAX}),
    (schemas.WriteBody, False, {}),
    (schemas.WriteBody, False, {"records": []}),
    (schemas.WriteBody, False, {"records": None}),
    (schemas.WriteBody, False, {"records": [{"data": 1}] * (BATCH_RECORDS_MAX + 1)}),
    (schemas.WriteBody, False, {"records": [{"data": 1}, {}]}),
    (schemas.WriteBody, False, {"records": [{"data": 1}, {"data_base64": "AA=="}]}),
    (schemas.WriteBody, False, {"records": [{"data": 1}], "idempotency_key": ""}),
    (schemas.WriteBody, False, {"records": [{"data": 1}], "idempotency_key": "k" * 257}),
    (schemas.WriteBody, False, {"records": [{"data": 1}], "create": "yes"}),
    (schemas.WriteBody, False, {"records": [{"data": 1}], "disable_backpressure": None}),
    (schemas.WriteBody, False, {"records": [{"data": 1}], "config": {"type": 1}}),
    (schemas.WriteBody, False, {"records": [{"data": 1}], "if_last_seq": -1}),
    (schemas.WriteBody, False, {"records": [{"data": 1}], "if_last_seq": U64 + 1}),
    (schemas.WriteBody, False, {"records": [{"data": 1}], "if_tag_last_seq": {"tag": "t"}}),
    (schemas.DiffBody, True, {}),
    (schemas.DiffBody, True, {"from_seq": U64, "limit": 2**32 - 1, "wait_ms": 2**32 - 1}),
    (schemas.DiffBody, True, {"node": "a", "tag": None}),
    (schemas.DiffBody, True, {"node": ["a", "b"], "tag": "eu.*"}),
    (schemas.DiffBody, True, {"node": None, "tag": ["tag", "Subject", "orders.*.>"]}),
    (schemas.DiffBody, True, {"tag": ["tag", "Eq", ""], "from_ts": 5}),
    (schemas.DiffBody, True, {"tag": ["tag", "Subject", ">x.>"]}),
    (schemas.DiffBody, False, {"from_seq": -1}),
    (schemas.DiffBody, False, {"from_seq": U64 + 1}),
    (schemas.DiffBody, False, {"limit": 2**32}),
    (schemas.DiffBody, False, {"limit": None}),
    (schemas.DiffBody, False, {"node": 5}),
    (schemas.DiffBody, False, {"node": ["a", 5]}),
    (schemas.DiffBody, False, {"include_tags": 1}),
    (schemas.DiffBody, False, {"tag": ["tag", "Eq"]}),
    (schemas.DiffBody, False, {"tag": ["node", "Eq", "a"]}),
    (schemas.DiffBody, False, {"tag": ["tag", "Like", "a"]}),
    (schemas.DiffBody, False, {"tag": ["tag", "Glob", "a"]}),
    (schemas.DiffBody, False, {"tag": ["tag", "Subject", "a..b"]}),
    (schemas.DiffBody, False, {"tag": ["tag", "Subject", "a.>.b"]}),
    (schemas.DiffBody, False, {"tag": ["tag", "Subject", ""]}),
    (schemas.DeleteBody, True, {"before_seq": 0}),
    (schemas.DeleteBody, True, {"match": "a*", "keep": 3}),
    (schemas.DeleteBody, True, {"match": ["tag", "Glob", "*"], "before_seq": None}),
    (schemas.DeleteBody, True, {"seqs": [], "erase": True}),
    (schemas.DeleteBody, True, {"seqs": [1, U64]}),
    (schemas.DeleteBody, False, {}),
    (schemas.DeleteBody, False, {"erase": True}),
    (schemas.DeleteBody, False, {"before_seq": None, "match": None, "seqs": None, "keep": None}),
    (schemas.DeleteBody, False, {"match": ["tag", "Subject", "a.>"]}),
    (schemas.DeleteBody, False, {"match": []}),
    (schemas.DeleteBody, False, {"seqs": [-1]}),
    (schemas.DeleteBody, False, {"seqs": [U64 + 1]}),
    (schemas.DeleteBody, False, {"seqs": list(range(10_001))}),
    (schemas.DeleteBody, False, {"keep": 1.5}),
    (schemas.DeleteBody, False, {"before_seq": 5, "erase": None}),
    (config.ConfigBody, True, {"retention": "interest"}),
    (config.ConfigBody, False, {"retention": "forever"}),
    (schemas.ClaimBody, True, {"node": "w"}),
    (schemas.ClaimBody, True, {"node": "w", "max": 2**32 - 1, "lease_ms": U64, "wait_ms": 2**32 - 1}),
    (schemas.ClaimBody, True, {"node": "w", "lease_ms": None, "max": 0}),
    (schemas.ClaimBody, False, {}),
    (schemas.ClaimBody, False, {"node": None}),
    (schemas.ClaimBody, False, {"node": "w", "max": 2**32}),
    (schemas.ClaimBody, False, {"node": "w", "max": None}),
    (schemas.ClaimBody, False, {"node": "w", "lease_ms": U64 + 1}),
    (schemas.ClaimBody, False, {"node": "w", "wait_ms": -1}),
    (schemas.FetchBody, True, {"node": "w", "max_bytes": U64, "lease_ms": None}),
    (schemas.FetchBody, False, {"node": "w", "max_bytes": U64 + 1}),
    (schemas.AckBody, True, {"node": "w", "seqs": []}),
    (schemas.AckBody, True, {"node": "w", "seqs": [1, U64], "lease_ids": ["lease_0af", ""]}),
    (schemas.AckBody, True, {"node": "w", "seqs": [1] * 1000, "lease_ids": []}),
    (schemas.AckBody, False, {"node": "w"}),
    (schemas.AckBody, False, {"seqs": [1]}),
    (schemas.AckBody, False, {"node": "", "seqs": [1]}),
    (schemas.AckBody, False, {"node": "w" * 129, "seqs": [1]}),
    (schemas.AckBody, False, {"node": "w", "seqs": None}),
    (schemas.AckBody, False, {"node": "w", "seqs": [-1]}),
    (schemas.AckBody, False, {"node": "w", "seqs": [U64 + 1]}),
    (schemas.AckBody, False, {"node": "w", "seqs": [1] * 1001}),
    (schemas.AckBody, False, {"node": "w", "seqs": [1], "lease_ids": None}),
    (schemas.AckBody, False, {"node": "w", "seqs": [1], "lease_ids": ["lease_XY"]}),
    (schemas.AckBody, False, {"node": "w", "seqs": [1], "lease_ids": ["lease_"]}),
    (schemas.AckBody, False, {"node": "w", "seqs": [1], "lease_ids": ["lease_" + "f" * 17]}),
    (schemas.AckBody, False, {"node": "w", "seqs": [1], "lease_ids": ["0af"]}),
    (schemas.NackBody, True, {"node": "w", "seqs": [1], "delay_ms": U64, "kind": "dead", "reason": "r"}),
    (schemas.NackBody, True, {"node": "w", "seqs": [1], "kind": "release"}),
    (schemas.NackBody, False, {"node": "w", "seqs": [1], "kind": "drop"}),
    (schemas.NackBody, False, {"node": "w", "seqs": [1], "delay_ms": U64 + 1}),
    (schemas.NackBody, False, {"node": "w", "seqs": [1], "delay_ms": None}),
    (schemas.NackBody, False, {"node": "w", "seqs": [1], "reason": "r" * 1025}),
    (schemas.ExtendBody, True, {"node": "w", "seqs": [1], "lease_ms": 0}),
    (schemas.ExtendBody, False, {"node": "w", "seqs": [1]}),
    (schemas.ExtendBody, False, {"node": "w", "seqs": [1], "lease_ms": None}),
    (schemas.ExtendBody, False, {"node": "w", "seqs": [1], "lease_ms": U64 + 1}),
    (schemas.TermBody, True, {"node": "w", "seqs": [1], "reason": "r" * 1024}),
    (schemas.TermBody, False, {"node": "w", "seqs": [1], "reason": "r" * 1025}),
    (config.ConsumerBody, True, {}),
    (
        config.ConsumerBody,
        True,
        {"ack": "all", "ack_wait_ms": 0, "max_deliver": 2**32 - 1, "replay": "original"},
    ),
    (config.ConsumerBody, True, {"backoff_ms": [0, U64], "max_ack_pending": 0, "max_waiting": U64}),
    (config.ConsumerBody, True, {"filter": None, "dead_letter": None, "inactive_ttl_ms": 1}),
    (config.ConsumerBody, True, {"filter": "eu.*", "deliver": "last_per_tag", "dead_letter": "lost"}),
    (config.ConsumerBody, True, {"filter": ["tag", "Subject", "a.>"], "deliver": {"from_seq": U64}}),
    (config.ConsumerBody, True, {"filter": ["a.*.b", ">", ["tag", "Eq", "x"]], "deliver": {"from_ts": 0}}),
    (config.ConsumerBody, True, {"filter": ["tag", "b", "c"]}),
    (config.ConsumerBody, True, {"filter": []}),
    (config.ConsumerBody, False, {"ack": "some"}),
    (config.ConsumerBody, False, {"max_deliver": 2**32}),
    (config.ConsumerBody, False, {"backoff_ms": [1] * 33}),
    (config.ConsumerBody, False, {"backoff_ms": [U64 + 1]}),
    (config.ConsumerBody, False, {"backoff_ms": None}),
    (config.ConsumerBody, True, {"filter": "eu.>x"}),
    (config.ConsumerBody, False, {"filter": "eu.>"}),
    (config.ConsumerBody, False, {"filter": "orders.*.new"}),
    (config.ConsumerBody, False, {"filter": ["a..b"]}),
    (config.ConsumerBody, False, {"filter": ["tag", "Glob", "a"]}),
    (config.ConsumerBody, False, {"filter": [["tag", "Glob", "a"]]}),
    (config.ConsumerBody, False, {"filter": [["tag", "Eq"]]}),
    (config.ConsumerBody, False, {"filter": ["a"] * 33}),
    (config.ConsumerBody, False, {"filter": "t" * 257}),
    (config.ConsumerBody, False, {"deliver": "some"}),
    (config.ConsumerBody, False, {"deliver": {}}),
    (config.ConsumerBody, False, {"deliver": {"from_seq": 1, "from_ts": 1}}),
    (config.ConsumerBody, False, {"deliver": {"from_seq": U64 + 1}}),
    (config.ConsumerBody, False, {"deliver": None}),
    (config.ConsumerBody, False, {"inactive_ttl_ms": U64 + 1}),
    (config.ConsumerBody, False, {"headers_only": 1}),
    (schemas.PauseBody, True, {}),
    (schemas.PauseBody, True, {"until_ts": U64}),
    (schemas.PauseBody, False, {"until_ts": U64 + 1}),
    (schemas.PauseBody, False, {"until_ts": None}),
    (schemas.ResetBody, True, {"to": "start"}),
    (schemas.ResetBody, True, {"to": {"seq": 0}, "dry_run": True}),
    (schemas.ResetBody, True, {"to": {"ts": U64}}),
    (schemas.ResetBody, False, {}),
    (schemas.ResetBody, False, {"to": "middle"}),
    (schemas.ResetBody, False, {"to": {}}),
    (schemas.ResetBody, False, {"to": {"seq": 1, "ts": 1}}),
    (schemas.ResetBody, False, {"to": {"seq": U64 + 1}}),
    (schemas.ResetBody, False, {"to": "end", "dry_run": None}),
    (schemas.ForwardBody, True, {"source": "a", "dest": "b"}),
    (schemas.ForwardBody, True, {"source": "a.>", "dest": "b", "filter": None, "guarantee": "exactly_once"}),
    (
        schemas.ForwardBody,
        True,
        {"source": "*.b", "dest": "b", "preserve_tag": False, "preserve_node": False},
    ),
    (schemas.ForwardBody, True, {"source": ">", "dest": "b..c", "create_dest": False, "allow_cycle": True}),
    (schemas.ForwardBody, True, {"source": "a", "dest": "b", "filter": "eu.*.x"}),
    (schemas.ForwardBody, True, {"source": "a", "dest": "b", "filter": "eu.>"}),
    (schemas.ForwardBody, True, {"source": "a", "dest": "b", "filter": ["tag", "Glob", "eu*"]}),
    (schemas.ForwardBody, True, {"source": "a", "dest": "b", "filter": ["tag", "Subject", "eu.b"]}),
    (schemas.ForwardBody, True, {"source": "a", "dest": "b", "filter": ["eu.*", ">", ["tag", "Eq", "x"]]}),
    (schemas.ForwardBody, True, {"source": "a", "dest": "b", "filter": [["tag", "Eq", "x"]]}),
    (schemas.ForwardBody, False, {}),
    (schemas.BeginBody, True, {"producer": "q", "batch": 0}),
    (schemas.BeginBody, True, {"producer": "x" * 256, "batch": U64, "ttl_ms": 0, "create": None}),
    (schemas.BeginBody, False, {"producer": "", "batch": 0}),
    (schemas.BeginBody, False, {"producer": "q", "batch": -1}),
    (schemas.BeginBody, False, {"producer": "q", "batch": U64 + 1}),
    (schemas.StageBody, True, {"part": "p", "chunk": 0, "records": [{"data": None}]}),
    (
        schemas.StageBody,
        True,
        {"part": "p", "chunk": 2**32 - 1, "records": [{"data_base64": "AA=="}], "node": "n"},
    ),
    (schemas.StageBody, False, {"part": "", "chunk": 0, "records": [{"data": 1}]}),
    (schemas.StageBody, False, {"part": "p", "chunk": 0, "records": []}),
    (schemas.StageBody, False, {"part": "p", "chunk": 0, "records": [{"data": 1}, {"data_base64": "AA=="}]}),
    (schemas.StageBody, False, {"part": "p", "chunk": -1, "records": [{"data": 1}]}),
    (schemas.CommitPartsBody, True, {"parts": []}),
    (schemas.CommitPartsBody, True, {"parts": [{"part": "p", "chunks": 0, "records": 0}], "wait_ms": 0}),
    (schemas.CommitPartsBody, False, {"parts": [{"part": "p", "chunks": 1}]}),
    (schemas.CommitPartsBody, False, {"parts": [{"part": "", "chunks": 1, "records": 1}]}),
    (schemas.CommitPartsBody, False, {}),
    (schemas.ForwardBody, False, {"source": "a"}),
    (schemas.ForwardBody, False, {"source": "a", "dest": None}),
    (schemas.ForwardBody, False, {"source": ".a", "dest": "b"}),
    (schemas.ForwardBody, False, {"source": "a", "dest": "b.*"}),
    (schemas.ForwardBody, False, {"source": "a*", "dest": "b"}),
    (schemas.ForwardBody, False, {"source": "a.>.c", "dest": "b"}),
    (schemas.ForwardBody, False, {"source": "a..*", "dest": "b"}),
    (schemas.ForwardBody, False, {"source": "a." * 127 + ">x", "dest": "b"}),
    (schemas.ForwardBody, False, {"source": "a." * 127 + "*.", "dest": "b"}),
    (schemas.ForwardBody, False, {"source": "a", "dest": "b", "guarantee": "maybe"}),
    (schemas.ForwardBody, False, {"source": "a", "dest": "b", "allow_cycle": None}),
    (schemas.ForwardBody, False, {"source": "a", "dest": "b", "filter": []}),
    (schemas.ForwardBody, False, {"source": "a", "dest": "b", "filter": ["tag", "Eq"]}),
    (schemas.ForwardBody, False, {"source": "a", "dest": "b", "filter": ["tag", "Eq", "a", "b"]}),
    (schemas.ForwardBody, False, {"source": "a", "dest": "b", "filter": ["node", "Eq", "a"]}),
    (schemas.ForwardBody, False, {"source": "a", "dest": "b", "filter": ["tag", "Ne", "a"]}),
    (schemas.ForwardBody, False, {"source": "a", "dest": "b", "filter": ["tag", "Glob", "a"]}),
    (schemas.ForwardBody, False, {"source": "a", "dest": "b", "filter": ["a.b"]}),
    (schemas.ForwardBody, False, {"source": "a", "dest": "b", "filter": ["a.*"] * 33}),
    (schemas.ForwardBody, False, {"source": "a", "dest": "b", "filter": "t" * 257}),
]
# Further checks are made by the front: the contract tests of watching cover them.
WATCHES: list[tuple[bool, bool, Any]] = [  # fits the schema, fits the types
    (True, True, {"topics": {"t": {}}}),
    (True, True, {"topics": {"t": {"from_seq": U64, "tail": True}, "a.*.>": {"tail": True}}}),
    (True, True, {"topics": {"t": {}}, "node": ["a"], "limit": 2**32 - 1, "max_batch_bytes": U64}),
    (True, True, {"topics": {"t": {}}, "node": None, "group": None, "consistency": "strong"}),
    (True, True, {"topics": {"t": {}}, "group": "g" * 128, "node": None, "heartbeat_ms": 0}),
    (False, False, {}),
    (False, False, {"topics": None}),
    (False, False, {"topics": ["t"]}),
    (False, False, {"topics": {"t": None}}),
    (False, False, {"topics": {"t": {"from_seq": -1}}}),
    (False, False, {"topics": {"t": {"tail": 1}}}),
    (False, False, {"topics": {"t": {}}, "consistency": "none"}),
    (False, False, {"topics": {"t": {}}, "limit": 2**32}),
    (False, False, {"topics": {"t": {}}, "heartbeat_ms": None}),
    (False, False, {"topics": {"t": {}}, "group": 5}),
    (False, True, {"topics": {}}),
    (False, True, {"topics": {f"t{i}": {} for i in range(257)}}),
    (False, True, {"topics": {"t": {}}, "group": ""}),
    (False, True, {"topics": {"t": {}}, "group": "g" * 129}),
    (False, True, {"topics": {"t": {}}, "group": "g", "node": "n"}),
]


def sample_id(value: object) -> str:
    return value.__name__ if isinstance(value, type) else json.dumps(value)[:60]


def samples_of(body: type[msgspec.Struct]) -> list[tuple[bool, Any]]:
    return [(accepted, sample) for of, accepted, sample in SAMPLES if of is body]


BODIES = pytest.mark.parametrize(
    "body", list(dict.fromkeys(body for body, _, _ in SAMPLES)), ids=lambda body: body.__name__
)


@BODIES
def test_the_schema_agrees(body: type[msgspec.Struct]) -> None:
    for accepted, sample in samples_of(body):
        assert validator(body.__name__).is_valid(sample) == accepted, sample_id(sample)


def read(body: type[msgspec.Struct], sample: Any) -> None:
    """Read a sample as a worker reads a request, with all checks beyond the types; raises if it is refused."""
    request = wire.Request(1, 0, 1000, 0, 0, b"t", b"", json.dumps(sample).encode())
    match body.__name__:
        case "ConfigBody":
            requests.read_config(request, wire.NO_ARGS)
        case "RecordBody":
            requests.read_lines("t", request, wire.NO_ARGS)
        case "WriteBody":
            requests.read_write("t", request, wire.NO_ARGS, lambda name: True)
        case "DiffBody":
            requests.read_diff("t", request)
        case "DeleteBody":
            command = requests.read_delete("t", request)
            if (command.before_seq, command.match, command.seqs, command.keep) == (None,) * 4:
                raise InvalidRequest("the engine refuses it")
        case "ForwardBody":
            forward_requests.read_spec(request, wire.Args(forward="r"))
        case "BeginBody" | "StageBody" | "CommitPartsBody" as name:
            ops = {
                "BeginBody": wire.TXN_BEGIN,
                "StageBody": wire.TXN_STAGE,
                "CommitPartsBody": wire.TXN_COMMIT,
            }
            transaction_requests.READERS[ops[name]]("t", request, wire.Args(txn="0" * 16))
        case name:
            op, named = CONSUMER_OPS[name]
            args = wire.Args(consumer="c") if named else wire.NO_ARGS
            consumer_requests.READERS[op]("t", request, args)


CONSUMER_OPS = {
    "ClaimBody": (wire.CLAIM, False),
    "FetchBody": (wire.CLAIM, True),
    "AckBody": (wire.ACK, False),
    "NackBody": (wire.NACK, False),
    "ExtendBody": (wire.EXTEND, False),
    "TermBody": (wire.TERM, True),
    "ConsumerBody": (wire.PUT_CONSUMER, True),
    "PauseBody": (wire.PAUSE_CONSUMER, True),
    "ResetBody": (wire.RESET_CONSUMER, True),
}


@BODIES
def test_the_server_agrees(body: type[msgspec.Struct]) -> None:
    for accepted, sample in samples_of(body):
        try:
            read(body, sample)
        except TopicsError as refused:
            assert not accepted, (sample_id(sample), refused)
            assert STATUS[refused.code] == 400, sample_id(sample)
        else:
            assert accepted, sample_id(sample)


@pytest.mark.parametrize(("fits", "decodes", "sample"), WATCHES, ids=sample_id)
def test_watches(fits: bool, decodes: bool, sample: Any) -> None:
    assert validator("WatchBody").is_valid(sample) == fits
    try:
        msgspec.json.decode(json.dumps(sample), type=schemas.WatchBody)
    except msgspec.ValidationError:
        assert not decodes
    else:
        assert decodes


def test_one_known_difference() -> None:
    """For JSON Schema 5.0 is an integer; the server requires 5."""
    assert validator("DiffBody").is_valid({"from_seq": 5.0})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"from_seq":5.0}', type=schemas.DiffBody)


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("orders", True),
        ("0.a:b_c-d", True),
        ("a" * 255, True),
        ("", False),
        (".a", False),
        ("a/b", False),
        ("ä", False),
        ("a" * 256, False),
    ],
)
def test_names_where_topics_are_created(name: str, accepted: bool) -> None:
    for method, path, operation in operations():
        if (method, path) in {("PUT", "/v0/topics/{topic}"), ("POST", "/v0/topics/{topic}")}:
            schema = operation["parameters"][0]["schema"]
            assert jsonschema_rs.Draft202012Validator(schema).is_valid(name) == accepted


# -- responses ---------------------------------------------------------------------------------------------


def test_the_config_of_a_response_is_a_topics_config() -> None:
    fields = {field.name for field in msgspec.structs.fields(config.TopicSettings)}
    assert fields == {*TopicConfig.__struct_fields__, "durable"}
    assert fields == set(config.ConfigBody.__struct_fields__)


def test_the_config_of_a_consumer_in_a_response_is_a_consumers_config() -> None:
    fields = {field.name for field in msgspec.structs.fields(config.ConsumerSettings)}
    assert fields == {*ConsumerConfig.__struct_fields__} - {"deliver_value"}
    assert fields == set(config.ConsumerBody.__struct_fields__)


def test_a_tombstone_is_the_engines() -> None:
    gone = json.loads(msgspec.json.encode(Tombstone(1, 4, "cap", 4, 5, 9)))
    assert set(gone) == {field.name for field in shown(responses.Tombstone)}
    assert validator("Tombstone").is_valid(gone)


def test_an_error_fits_its_schema() -> None:
    for code in STATUS:
        assert validator("ErrorBody").is_valid(json.loads(error_body(code, "so it is", {"topic": "t"})))
        assert validator("ErrorBody").is_valid(json.loads(error_body(code, "so it is")))
    assert not validator("ErrorBody").is_valid({"error": {"code": "oops", "message": "no such code"}})


def test_a_record_needs_a_seq_and_a_time_only() -> None:
    assert validator("Record").is_valid({"$seq": 1, "$ts": 2})
    assert validator("Record").is_valid({"$seq": 1, "$ts": 2, "$tag": "t", "$node": "n", "data": None})
    assert validator("Record").is_valid({"$seq": 1, "$ts": 2, "$encoding": "base64", "data": "AA=="})
    assert not validator("Record").is_valid({"$seq": 1})
    assert not validator("Record").is_valid({"$seq": 1, "$ts": 2, "$tag": None})


# -- the documentation page --------------------------------------------------------------------------------


def test_the_pages_decoder_works() -> None:
    source, _ = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    space: dict[str, Any] = {}
    exec(source, space)
    pieces: list[bytes] = []
    records = Records(
        [b'{"a":1}{"k":2}', b'"x"'],
        tags=[b"eu", None],
        nodes=[None, b"n"],
        meta_lens=[7, 0],
        ttls_ms=[0, 5],
    )
    encode_appends(pieces, records, topic_id=3, first_seq=7, ts=1_700_000_000_000, key=b"key")
    encode_appends(pieces, Records([b"\x00\xff"], raw=True), topic_id=3, first_seq=9, ts=1_700_000_000_001)
    assert list(space["records"](b"".join(pieces))) == [
        {"seq": 7, "ts": 1_700_000_000_000, "node": None, "tag": "eu", "data": {"a": 1}, "meta": {"k": 2}},
        {"seq": 8, "ts": 1_700_000_000_000, "node": "n", "tag": None, "data": "x", "meta": None},
        {"seq": 9, "ts": 1_700_000_000_001, "node": None, "tag": None, "data": b"\x00\xff", "meta": None},
    ]
    assert list(space["records"](b"")) == []


def test_the_page_names_what_there_is() -> None:
    wanted = {f"`{code}`" for code in STATUS}
    for body in (
        *REQUESTS,
        responses.ErrorBody,
        *answers_of("topics", "records", "routers", "watch", "server"),
    ):
        wanted |= {f"`{field.encode_name}`" for field in shown(body)}
    for _, path, operation in operations():
        if "/{consumer}" in path or operation["tags"] == ["consolidation"]:
            continue  # these have a page of their own
        wanted.add(re.sub(r"\{(\w+)\}", r":\1", path))
        wanted |= {f"`{p['name']}`" for p in operation.get("parameters", []) if p["name"] != "topic"}
    wanted -= {"`error`", "`performance`", "`wal`", "`consumer`"}
    assert sorted(name for name in wanted if name not in PAGE) == []


def test_the_page_of_consumers_names_what_there_is() -> None:
    wanted = {"`consumer_not_found`"}
    for body in (*CONSUMER_REQUESTS, *answers_of("queues", "consumers")):
        wanted |= {f"`{field.encode_name}`" for field in shown(body)}
    wanted -= {"`seq`", "`ts`", "`from_ts`"}  # in objects, which are shown whole
    assert sorted(name for name in wanted if name not in CONSUMERS_PAGE) == []
    actions = {path.rpartition("/")[2] for _, path, _ in operations() if "/{consumer}/" in path}
    assert sorted(action for action in actions if f"{action}`" not in CONSUMERS_PAGE) == []


def test_the_page_of_consolidation_names_what_there_is() -> None:
    wanted = {"`state`", "`first_seq`", "`next_seq`", "`generation`", "`chain`", "`origin`", "`inputs`"}
    for body in (*MERGE_REQUESTS, *answers_of("consolidation"), Manifest, Segment, RetiredSegment):
        wanted |= {f"`{field.encode_name}`" for field in shown(body)}
    wanted -= {"`performance`", "`path`", "`snapshot_id`"}
    for _, path, operation in operations():
        if operation["tags"] == ["consolidation"]:
            wanted.add(re.sub(r"\{(\w+)\}", r":\1", path))
    assert sorted(name for name in wanted if name not in CONSOLIDATION_PAGE) == []


def test_the_page_names_every_metric_and_the_json_form_fits() -> None:
    totals = metrics_text.Totals([], 1, 0, 0)
    names = re.findall(r"^# TYPE (\w+) ", metrics_text.as_text(totals).decode(), flags=re.MULTILINE)
    assert names
    assert [name for name in names if f"`{name}" not in PAGE] == []
    figures = metrics_text.as_json(totals) | {"performance": {"server_total_ms": 0.1}}
    assert set(figures) == set(responses.Metrics.__struct_fields__)
    assert validator("Metrics").is_valid(json.loads(json.dumps(figures)))
