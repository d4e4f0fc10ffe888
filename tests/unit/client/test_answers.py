"""The client's types say what the server's do: fields, which of them may be missing, codes of errors, options of calls."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from topics.api import requests as schemas
from topics.api.http_errors import STATUS
from topics.api.responses import consumers as consumer_responses
from topics.api.responses import forwards as forward_responses
from topics.api.responses import records as responses
from topics.api.responses import transactions as transaction_responses
from topics.client import answers, calls, errors, queue_calls, router_calls, transaction_calls, watch_streams

PAIRS = [
    (responses.Config, answers.TopicConfig),
    (responses.TopicPut, answers.TopicPut),
    (responses.TopicState, answers.Topic),
    (responses.QueueState, answers.QueueState),
    (responses.TopicRow, answers.TopicRow),
    (responses.TopicList, answers.TopicList),
    (responses.TopicDeleted, answers.TopicDeleted),
    (responses.Written, answers.Written),
    (responses.Record, answers.Record),
    (responses.Tombstone, answers.Tombstone),
    (responses.DiffPage, answers.Page),
    (responses.Deleted, answers.Deleted),
    (responses.DeletedRange, answers.DeletedRange),
    (responses.DeletedRanges, answers.DeletedRanges),
    (responses.TagCount, answers.TagCount),
    (responses.TagList, answers.TagList),
    (responses.LastRecords, answers.LastRecords),
    (responses.WatchedTopic, answers.WatchedTopic),
    (responses.WatchMade, answers.WatchMade),
    (responses.Health, answers.Health),
    (responses.Readiness, answers.Readiness),
    (consumer_responses.Job, answers.Job),
    (consumer_responses.Claimed, answers.Claimed),
    (consumer_responses.Fetched, answers.Claimed),
    (consumer_responses.Acked, answers.SettledPart),
    (consumer_responses.Nacked, answers.SettledPart),
    (consumer_responses.Extended, answers.SettledPart),
    (consumer_responses.Termed, answers.SettledPart),
    (consumer_responses.ConsumerConfig, answers.ConsumerConfig),
    (consumer_responses.ConsumerRow, answers.Consumer),
    (forward_responses.ForwardPut, answers.Router),
    (forward_responses.Forward, answers.Router),
    (forward_responses.ForwardRow, answers.RouterRow),
    (forward_responses.ForwardList, answers.RouterList),
    (forward_responses.ForwardDeleted, answers.RouterDeleted),
    (transaction_responses.Transaction, answers.Transaction),
    (transaction_responses.ChunkStaged, answers.ChunkStaged),
    (transaction_responses.TransactionAborted, answers.TransactionAborted),
]


def fields(kind: Any) -> dict[str, bool]:
    """By its name in JSON: whether it is always there."""
    return {field.encode_name: field.required for field in msgspec.structs.fields(kind)}


def test_every_field_is_understood_and_none_is_missed() -> None:
    for said, understood in PAIRS:
        there, known = fields(said), fields(understood)
        assert set(there) <= set(known), said
        assert {name for name, required in known.items() if required} <= {
            name for name, required in there.items() if required
        }, said


def test_what_can_be_asked_for_can_be_said() -> None:
    def names(kind: Any) -> set[str]:
        return set(fields(kind))

    def parameters(call: Any) -> set[str]:
        return set(inspect.signature(call).parameters)

    assert set(answers.TopicOptions.__annotations__) == names(schemas.ConfigBody)
    assert set(answers.ConsumerOptions.__annotations__) == names(schemas.ConsumerBody)
    assert names(schemas.ForwardBody) <= parameters(router_calls.create_router)
    assert names(schemas.WriteBody) - {"records"} <= parameters(calls.write_many)
    assert names(schemas.RecordBody) - {"data_base64"} <= parameters(calls.write)
    assert names(schemas.DeleteBody) <= parameters(calls.delete)
    # `node` of a read says whose records are left out, and is called so.
    # Epochs are always asked for by who reads.
    assert names(schemas.DiffBody) - {"node", "from_ts", "include_epoch"} <= parameters(calls.read)
    for call in (watch_streams.watch, watch_streams.tail):
        assert names(schemas.WatchBody) - {"node", "topics", "include_epoch"} <= parameters(call)
    assert names(schemas.ClaimBody) <= parameters(queue_calls.claim)
    assert names(schemas.FetchBody) <= parameters(queue_calls.fetch)
    assert names(schemas.BeginBody) <= parameters(transaction_calls.begin_transaction)
    assert names(schemas.StageBody) <= parameters(transaction_calls.stage)


def test_every_code_has_its_exception() -> None:
    # Codes of requests that this client does not make.
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
