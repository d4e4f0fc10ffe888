"""Goal: every process and every version places a topic on the same shard, and shards get equal shares.

Method: golden values, which must never change (a change would lose every existing topic), and counts over kinds of
names that are in use.
"""

from collections import Counter

import pytest

from topics.engine.core.placement import shard_of

SHARD_COUNTS = (1, 2, 3, 4, 8, 16)

# The empty name's digest, 0x2d06800538d394c2, is XXH3-64's published test vector, so this row also pins the function.
GOLDEN = {
    "": (0, 0, 1, 2, 2, 2),
    "orders": (0, 1, 0, 3, 3, 11),
    "orders.eu": (0, 1, 2, 1, 5, 13),
    "jobs/email": (0, 0, 1, 0, 0, 0),
    "größe": (0, 0, 0, 0, 4, 12),
    "日本": (0, 0, 2, 0, 0, 0),
}


@pytest.mark.parametrize("topic", GOLDEN)
def test_golden_values(topic: str) -> None:
    assert tuple(shard_of(topic, count) for count in SHARD_COUNTS) == GOLDEN[topic]
    assert tuple(shard_of(topic.encode(), count) for count in SHARD_COUNTS) == GOLDEN[topic]


def test_the_full_digest_is_used() -> None:
    # With a count above every digest the remainder is the digest itself.
    assert shard_of("", 2**64) == 0x2D06800538D394C2
    assert shard_of("orders", 2**64) == 0xA88CCDC9FA4974FB


@pytest.mark.parametrize("pattern", ["topic-{}", "tenant.{}.events", "{:08d}"])
@pytest.mark.parametrize("shard_count", [2, 3, 4, 7, 16])
def test_shares_are_even(pattern: str, shard_count: int) -> None:
    topic_count = 10_000
    counts = Counter(shard_of(pattern.format(i), shard_count) for i in range(topic_count))
    fair_share = topic_count / shard_count

    assert sorted(counts) == list(range(shard_count))
    # 16 shards of 625 topics: chance alone gives a standard deviation of 4 %.
    assert min(counts.values()) > 0.85 * fair_share
    assert max(counts.values()) < 1.15 * fair_share
