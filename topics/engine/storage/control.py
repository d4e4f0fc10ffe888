"""Payloads of control frames, as MessagePack arrays: fields may be added at the end, never moved."""

from __future__ import annotations

import msgspec

from topics.api.config import ConsumerConfig, TopicConfig
from topics.engine.commands.forwards import Forward


class TopicCreated(msgspec.Struct, frozen=True, array_like=True):
    name: str
    config: TopicConfig
    ceiling: int


class ConfigChanged(msgspec.Struct, frozen=True, array_like=True):
    config: TopicConfig
    ceiling: int
    head: int


class Deletion(msgspec.Struct, frozen=True, array_like=True):
    ranges: list[tuple[int, int]]
    erase: bool = False


class Floors(msgspec.Struct, frozen=True, array_like=True):
    cap_lost: int
    ttl_lost: int


class Skipped(msgspec.Struct, frozen=True, array_like=True):
    first: int
    count: int


class Lost(msgspec.Struct, frozen=True, array_like=True):
    first: int
    last: int
    reason: str


class Swapped(msgspec.Struct, frozen=True, array_like=True):
    first_seq: int
    generation: int
    cap_lost: int
    ttl_lost: int
    tier: str = "hot"


class TimeCeiling(msgspec.Struct, frozen=True, array_like=True):
    ceiling_ms: int
    now_ms: int
    mono_ms: int
    boot_id: str


class ConsumerStored(msgspec.Struct, frozen=True, array_like=True):
    """A consumer was made or changed, and where it stands now."""

    name: str
    config: ConsumerConfig
    cursor: int
    initial_seqs: list[int]
    created_ms: int


class DeadLettersTaken(msgspec.Struct, frozen=True, array_like=True):
    source_id: int
    number: int


class OutflowOpen(msgspec.Struct, frozen=True, array_like=True):
    """A rule copies topics of this shard from now on, or by other words than before."""

    forward: Forward
    starts: list[tuple[int, int, int]]  # topic id, epoch, seq


class InflowOpen(msgspec.Struct, frozen=True, array_like=True):
    uid: int
    name: str
    source: str = ""  # not known of rules from before it was stored


class Copied(msgspec.Struct, frozen=True, array_like=True):
    """Up to this seq of the source all is here. In one envelope with the copies. Below 0: the source is gone."""

    uid: int
    source_id: int
    epoch: int
    seq: int
    total: int
