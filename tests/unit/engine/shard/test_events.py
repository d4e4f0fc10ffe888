"""Composition of a shard: features register what they handle, and none inherits from another."""

from __future__ import annotations

from typing import get_args

from tests.support.engine_harness import Harness
from topics.api.config import TopicConfig
from topics.engine.commands import topics as c


def test_every_command_has_a_handler() -> None:
    handlers = Harness().engine.shard.state.handlers
    assert set(handlers) == set(get_args(c.Command))


def test_no_feature_inherits_from_another() -> None:
    features = vars(Harness().engine.shard)
    assert "appends" in features and "delivery" in features
    assert {type(feature).__bases__ for feature in features.values()} == {(object,)}


def test_an_outcome_names_the_topics_that_readers_see_since() -> None:
    engine = Harness().engine
    outcome = engine.turn([("token", c.PutTopic("t", TopicConfig()))])
    assert (outcome.replies, outcome.created) == ([], []), "not before the change is synced"
    created = []
    for job in outcome.jobs:
        job.run()
        created += engine.finish(job).created
    assert created == ["t"]


def test_a_feature_that_wraps_a_handler_is_asked_first() -> None:
    h = Harness()
    state, order = h.engine.shard.state, []

    def first(token: object, command: c.PutTopic) -> None:
        order.append(command.topic)
        inner(token, command)

    inner = state.wrap(c.PutTopic, first)
    h.put("t")
    assert order == ["t"] and "t" in state.published
