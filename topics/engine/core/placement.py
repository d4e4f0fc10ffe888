"""Placement: which shard owns a topic.

Placement depends only on the topic name and the number of shards, so every process computes it without asking. It must
give the same result in every process and every version: Python's `hash()` differs per process, and a different hash or
encoding would look for existing topics in the wrong shard.
"""

import xxhash


def shard_of(topic: str | bytes, shard_count: int) -> int:
    """The shard, in `range(shard_count)`, that owns the topic with this name; bytes are the name in UTF-8."""
    name = topic.encode() if isinstance(topic, str) else topic
    return xxhash.xxh3_64_intdigest(name) % shard_count
