"""Payloads of control frames, as MessagePack arrays. Fields are only ever added at the end."""

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
    """A consumer was created or changed; its config and position."""

    name: str
    config: ConsumerConfig
    cursor: int
    initial_seqs: list[int]
    created_ms: int


class DeadLettersReceived(msgspec.Struct, frozen=True, array_like=True):
    source_id: int
    number: int


class OutflowOpen(msgspec.Struct, frozen=True, array_like=True):
    """A forward copies topics of this shard from now on, or its rule changed."""

    forward: Forward
    starts: list[tuple[int, int, int]]  # topic id, epoch, seq


class InflowOpen(msgspec.Struct, frozen=True, array_like=True):
    uid: int
    name: str
    source: str = ""  # empty for rules stored by versions without this field


class Copied(msgspec.Struct, frozen=True, array_like=True):
    """Copied up to this seq of the source; in one envelope with the copies. Negative: the source was dropped."""

    uid: int
    source_id: int
    epoch: int
    seq: int
    total: int
