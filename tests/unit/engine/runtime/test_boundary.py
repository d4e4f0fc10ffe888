"""The boundary of the engine: what a shell may use is one protocol, which the engine has and the decision lists."""

from __future__ import annotations

from pathlib import Path

from tests.support.engine_harness import Harness
from topics.api.config import TopicConfig
from topics.engine.commands.topics import PutTopic
from topics.engine.runtime.boundary import ShardEngine

DECISION = Path(__file__).parents[4] / "docs/decisions/0004-engine-and-shell.md"
MEMBERS = sorted(name for name in vars(ShardEngine) if not name.startswith("_"))


def test_the_engine_has_every_member() -> None:
    engine = Harness().engine
    assert [name for name in MEMBERS if not hasattr(engine, name)] == []


def test_the_decision_names_every_member() -> None:
    text = DECISION.read_text()
    assert [name for name in MEMBERS if f"`{name}`" not in text] == []


def test_a_quota_of_the_shell_binds_the_next_command() -> None:
    h = Harness()
    h.engine.set_quota(0, None)
    refused = h.send(PutTopic("t", TopicConfig()))
    assert type(refused).__name__ == "OverGrant"
    h.engine.set_quota(None, None)
    assert h.send(PutTopic("t", TopicConfig())).created
