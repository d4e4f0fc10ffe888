"""Much more data than memory: the short forms of `scripts/soak memory`.

Goal: a shard's memory depends on the number of records and not on their bytes, a start reads indexes and no records, and an idle
topic takes a few KiB. Method: real processes, and the kernel's figures.
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


def test_memory_of_an_idle_topic(tmp_path: Path) -> None:
    """A hundred thousand of them, with the processes, have to fit into a GiB."""
    report = many_topics(tmp_path, pick(short=2500, long=5000), shards=1)
    assert report.bytes_per_topic < 8192, report
