"""Which shard owns a topic.

The answer depends on the name and the shard count alone, so every process finds it without asking. It must be the
same in every process and every version: Python's own `hash()` differs per process, and another function or another
encoding of the name would look for topics where they are not.
"""

import xxhash


def shard_of(topic: str, shard_count: int) -> int:
    """The shard, in `range(shard_count)`, that owns the topic of this name."""
    return xxhash.xxh3_64_intdigest(topic.encode()) % shard_count
