"""The client knows the server's settings, options of calls and error codes, and accepts those of newer servers."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from topics.api import config
from topics.api import requests as schemas
from topics.client import answers, calls, errors, queue_calls, router_calls, transaction_calls, watch_streams
from topics.protocols.http.errors import STATUS


def test_topic_and_consumer_settings_can_be_given() -> None:
    assert set(config.TopicOptions.__annotations__) == set(config.ConfigBody.__struct_fields__)
    assert set(config.ConsumerOptions.__annotations__) == set(config.ConsumerBody.__struct_fields__)


def test_a_client_decodes_values_that_it_does_not_know() -> None:
    """A newer server may have more settings, and more values of known ones."""
    newer = {"type": "stack", "durability": "paper", "retention": "weather", "colour": "blue"}
    decoded = msgspec.convert(newer, answers.TopicConfig)
    assert (decoded.type, decoded.durability, decoded.ttl_ms) == ("stack", "paper", 0)
    assert msgspec.convert({"replay": "backwards"}, answers.ConsumerConfig).replay == "backwards"


def test_the_client_has_a_parameter_for_each_request_field() -> None:
    def names(kind: Any) -> set[str]:
        return {field.encode_name for field in msgspec.structs.fields(kind)}

    def parameters(call: Any) -> set[str]:
        return set(inspect.signature(call).parameters)

    assert names(schemas.ForwardBody) <= parameters(router_calls.create_router)
    assert names(schemas.WriteBody) - {"records"} <= parameters(calls.write_many)
    assert names(schemas.RecordBody) - {"data_base64"} <= parameters(calls.write)
    assert names(schemas.DeleteBody) <= parameters(calls.delete)
    # `node` of a read says whose records are left out, and has another name here. Reads always request epochs.
    assert names(schemas.DiffBody) - {"node", "from_ts", "include_epoch"} <= parameters(calls.read)
    for call in (watch_streams.watch, watch_streams.tail):
        assert names(schemas.WatchBody) - {"node", "topics", "include_epoch"} <= parameters(call)
    assert names(schemas.ClaimBody) <= parameters(queue_calls.claim)
    assert names(schemas.FetchBody) <= parameters(queue_calls.fetch)
    assert names(schemas.BeginBody) <= parameters(transaction_calls.begin_transaction)
    assert names(schemas.StageBody) <= parameters(transaction_calls.stage)


def test_every_code_has_its_exception() -> None:
    # Error codes of requests that this client does not make.
    others = {
        "method_not_allowed",
        "not_acceptable",
        "request_timeout",
        "unsupported_media_type",
        "header_fields_too_large",
        # of merges of the cold tier
        "plan_not_found",
        "plan_leased",
        "snapshot_not_found",
        "no_cold_tier",
        "inputs_changed",
        "lease_lost",
        "output_invalid",
    }
    assert set(errors._BY_CODE) == set(STATUS) - others
