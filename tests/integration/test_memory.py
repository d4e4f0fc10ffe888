"""Memory far below data, the short forms of `scripts/soak memory`.

Goal: what a shard holds follows the number of records and not their bytes, a start reads indexes and no records, and a topic
at rest costs a few KiB. Method: real processes, and what the kernel counts for them.
"""

from __future__ import annotations

from pathlib import Path

from tests.soak.memory import many_records, many_topics
from tests.support.length import pick


def test_two_hundred_thousand_records(tmp_path: Path) -> None:
    report = many_records(tmp_path, 200_000)
    assert report.data_bytes > 200_000_000
    assert report.problems() == []
    assert report.touch_read_bytes < report.data_bytes // 2


def test_what_a_topic_at_rest_costs(tmp_path: Path) -> None:
    """A hundred thousand of them have to fit into a GiB, together with the processes themselves."""
    report = many_topics(tmp_path, pick(short=2500, long=5000), shards=1)
    assert report.bytes_per_topic < 8192, report
