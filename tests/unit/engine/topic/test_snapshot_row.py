"""The row of a topic in a snapshot: what is captured is what is restored.

Method: the rows of the golden snapshots are restored into new topics and captured again; a shard without a feature refuses a
row with state of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from tests.support.engine_harness import Harness
from tests.unit.engine.storage import test_files_golden as golden
from topics.api.errors import FeatureAbsent
from topics.engine.shard.consumers.leases import QUEUE_CONFIG
from topics.engine.shard.state import ShardState
from topics.engine.topic.log import TopicLog
from topics.engine.topic.snapshot_row import RowPart, ShardRow, TopicRow

ROWS = [
    row
    for name, rows in vars(golden).items()
    if name.endswith("_ROWS") and isinstance(rows, list)
    for row in rows
    if isinstance(row, TopicRow)
]
SHARD_ROWS = [row for row in vars(golden).values() if isinstance(row, ShardRow)]
PATH = "meta/snap-0000000000000001"


def new_state() -> ShardState:
    return Harness().engine.shard.state


def captured(log: TopicLog, row: TopicRow, parts: Iterable[RowPart]) -> TopicRow:
    return TopicRow.capture(
        log,
        parts,
        applied_lsn=row.applied_lsn,
        now_ms=golden.TS,
        segments=row.segments,
        ram_ranges=row.ram_ranges,
        inline=row.inline,
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_restored_row_is_captured_unchanged(row: TopicRow) -> None:
    state = new_state()
    # Whether records have TTLs, and which keys are still in their window, depends on records and time; leases are stored
    # only if they are durable.
    config = msgspec.structs.replace(row.config, durability="fsync", leases_durable=True)
    row = msgspec.structs.replace(row, config=config, may_expire=False, dedupe=[])
    # A queue's own consumer has the config of this version.
    row.consumers = [
        one if one.name else msgspec.structs.replace(one, config=QUEUE_CONFIG) for one in row.consumers
    ]
    encoded = msgspec.msgpack.encode(row)
    log = state.new_log(row.id, row.name, row.config)
    msgspec.msgpack.decode(encoded, type=TopicRow).restore(log, state.row_parts, PATH)
    assert captured(log, row, state.row_parts.values()) == row
    assert msgspec.msgpack.encode(captured(log, row, state.row_parts.values())) == encoded


@pytest.mark.parametrize("row", SHARD_ROWS, ids=lambda row: str(row.number))
def test_the_row_of_the_shard_too(row: ShardRow) -> None:
    state = new_state()
    row.restore_parts(state.row_parts, PATH)
    again = msgspec.structs.replace(row, forwards=[], forward_uid=0, outflows=[])
    for part in state.row_parts.values():
        part.capture_shard(again)
    assert (again.outflows, again.forwards) == (row.outflows, row.forwards)
    assert again.forward_uid >= row.forward_uid


@pytest.mark.parametrize("feature", ["consumers", "forwards", "merges", "transactions"])
def test_state_of_an_absent_feature_is_refused(feature: str) -> None:
    row = next(row for row in ROWS if feature in row.features())
    state = new_state()
    del state.row_parts[feature]
    with pytest.raises(
        FeatureAbsent, match=f"{PATH} has {feature}, of a feature that this shard runs without"
    ):
        row.restore(state.new_log(row.id, row.name, row.config), state.row_parts, PATH)
