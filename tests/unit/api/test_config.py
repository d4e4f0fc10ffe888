"""A setting is declared once: documents, requests and storage get it from the declaration."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from topics.api import config
from topics.api.config import ConfigBody, ConsumerBody, ConsumerConfig, TopicConfig
from topics.client import answers
from topics.engine.commands.topics import TopicPut
from topics.link import wire
from topics.protocols.http.openapi.schemas import components
from topics.protocols.json import replies, requests
from topics.protocols.json.consumer_requests import consumer_config

SCHEMAS = components()
TOPIC = set(TopicConfig.__struct_fields__) | {"durable"}
CONSUMER = set(ConsumerBody.__struct_fields__)


def other(kind: Any, default: Any) -> Any:
    """A value of a setting that differs from its default."""
    found = msgspec.inspect.type_info(kind)
    while isinstance(found, msgspec.inspect.Metadata):
        found = found.type
    if isinstance(found, msgspec.inspect.UnionType):
        found = next(one for one in found.types if not isinstance(one, msgspec.inspect.NoneType))
    while isinstance(found, msgspec.inspect.Metadata):
        found = found.type
    match found:
        case msgspec.inspect.LiteralType(values):
            return next(value for value in values if value != default)
        case msgspec.inspect.BoolType():
            return not default
        case msgspec.inspect.IntType():
            return 4321
        case msgspec.inspect.StrType():
            return "elsewhere"
    raise AssertionError(f"no example of {found}")


@pytest.mark.parametrize("field", msgspec.structs.fields(TopicConfig), ids=lambda field: field.name)
def test_a_setting_of_a_topic_is_taken_stored_answered_and_decoded(field: Any) -> None:
    wanted = other(field.type, field.default)
    body = json.dumps({field.name: wanted}).encode()
    taken = requests.read_config(wire.Request(1, 0, 0, 0, 0, b"t", b"", body), wire.NO_ARGS)
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(taken), type=TopicConfig)
    answer = replies.topic_put(TopicPut("t", False, stored), 1.0)[3]
    assert json.loads(bytes(answer))["config"][field.name] == wanted
    decoded = msgspec.json.decode(bytes(answer), type=answers.TopicPut)
    assert getattr(decoded.config, field.name) == wanted


def test_every_setting_is_in_the_document_and_an_option_of_the_client() -> None:
    assert set(SCHEMAS["ConfigBody"]["properties"]) == set(ConfigBody.__struct_fields__) == TOPIC
    assert set(SCHEMAS["TopicConfig"]["properties"]) == set(answers.TopicConfig.__struct_fields__) == TOPIC
    assert set(answers.TopicOptions.__annotations__) == TOPIC
    assert set(SCHEMAS["ConsumerBody"]["properties"]) == CONSUMER
    assert set(SCHEMAS["ConsumerConfig"]["properties"]) == CONSUMER
    assert set(answers.ConsumerConfig.__struct_fields__) == CONSUMER
    assert set(answers.ConsumerOptions.__annotations__) == CONSUMER
    assert set(ConsumerConfig.__struct_fields__) - {"deliver_value"} == CONSUMER


def test_settings_left_out_have_the_same_defaults_everywhere() -> None:
    assert ConfigBody().config() == TopicConfig()
    assert consumer_config(ConsumerBody()) == ConsumerConfig()
    shown = json.loads(msgspec.json.encode(config.topic_settings(TopicConfig())))
    assert shown.keys() == TOPIC - {"cap_per_tag", "max_record_bytes", "retention"}
    decoded = msgspec.convert(shown, answers.TopicConfig)
    assert all(
        getattr(decoded, name) == getattr(TopicConfig(), name) for name in TopicConfig.__struct_fields__
    )
