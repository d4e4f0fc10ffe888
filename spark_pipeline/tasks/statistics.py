"""Additive statistics of records, from the indexes of cold segments and, for newer records, over HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from spark_pipeline.tasks.columns import Frames
from spark_pipeline.tasks.http_reading import Gap, HttpSlice, read_frames
from spark_pipeline.tasks.reading import Slice, Wanted
from spark_pipeline.tasks.segments import SegmentReader
from topics.api.errors import TopicsError
from topics.engine.storage.segments import ROW, Mask, Rows

HOUR_MS = 3_600_000
TAGS_MAX = 10_000  # counted tags, the most frequent ones
SKETCH = 1024  # smallest hashes of tags to keep, for an estimate of their number to 3 %
SEGMENTS_MAX = 64  # per task; each has an index of a few MiB
HTTP_RECORDS_MIN = 20_000  # smaller tasks do not pay off
SIZE_STEPS = 8  # classes of record sizes per power of two


@dataclass(slots=True)
class Statistics:
    """Statistics of live records, except where it says dead."""

    segments: int = 0
    rows: int = 0
    live: int = 0
    dead: int = 0  # deleted records whose bytes are still in the file
    data_bytes: int = 0
    live_bytes: int = 0  # of frames
    dead_bytes: int = 0
    payload_bytes: int = 0
    # By hour since the epoch: records, payload bytes.
    hours: dict[int, tuple[int, int]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)  # class of payload size → records
    tags: Counter[str] = field(default_factory=Counter)
    tag_hashes: list[int] = field(default_factory=list)  # the smallest ones, ascending
    untagged: int = 0
    out_of_order: int = 0  # records older than their predecessor
    gaps: int = 0  # runs of seqs without live records, between live records
    ts_min: int = 0
    ts_max: int = 0
    # Of the first and last live records, 0 if there are none; used to count gaps between parts of a topic.
    first_seq: int = 0
    last_seq: int = 0
    first_ts: int = 0
    last_ts: int = 0

    def append(self, other: Statistics) -> None:
        """Add the next part of the same topic, including a gap between the two."""
        if self.last_seq and other.first_seq:
            self.gaps += other.first_seq - self.last_seq > 1
            self.out_of_order += 0 < other.first_ts < self.last_ts
        if other.first_seq:
            if not self.first_seq:
                self.first_seq, self.first_ts = other.first_seq, other.first_ts
            self.last_seq, self.last_ts = other.last_seq, other.last_ts
        self.add(other)

    def add(self, other: Statistics) -> None:
        """Add the statistics of any other records."""
        for name in (
            "segments", "rows", "live", "dead", "data_bytes", "live_bytes", "dead_bytes", "payload_bytes",
            "untagged", "out_of_order", "gaps",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for hour, (records, size) in other.hours.items():
            had = self.hours.get(hour, (0, 0))
            self.hours[hour] = had[0] + records, had[1] + size
        for kind, records in other.sizes.items():
            self.sizes[kind] = self.sizes.get(kind, 0) + records
        self.tags = Counter(dict((self.tags + other.tags).most_common(TAGS_MAX)))
        self.tag_hashes = sorted({*self.tag_hashes, *other.tag_hashes})[:SKETCH]
        times = [ts for ts in (self.ts_min, other.ts_min) if ts]
        self.ts_min, self.ts_max = min(times, default=0), max(self.ts_max, other.ts_max)

    def tag_count(self) -> int:
        """Number of tags: exact below SKETCH, then an estimate."""
        if len(self.tag_hashes) < SKETCH:
            return len(self.tag_hashes)
        return round((SKETCH - 1) / (self.tag_hashes[-1] / 2**64))

    def size_percentile(self, share: float) -> int:
        """The payload size that this share of the records does not exceed, to about 9 %."""
        wanted = share * sum(self.sizes.values())
        reached = 0
        for kind in sorted(self.sizes):
            reached += self.sizes[kind]
            if reached >= wanted:
                return size_of_class(kind)
        return 0


def size_of_class(kind: int) -> int:
    """The largest size of a class."""
    return int(2 ** (kind / SIZE_STEPS)) if kind else 0


def statistics_of(part: Slice) -> Statistics:
    """Statistics of a whole segment, from its index and names; records are not read."""
    reader = SegmentReader(part.folder, part.segment, part.topic_id)
    rows, tags = reader.index(), reader.names()[0]
    present: Mask = rows["length"] > 0
    live = present.copy()
    if part.dead is not None:
        bits = np.frombuffer(part.dead, dtype=np.uint8)
        live &= ~np.unpackbits(bits, count=part.rows, bitorder="little").astype(np.bool_)
    kept = rows[live]
    found = Statistics(
        segments=1,
        rows=len(rows),
        live=len(kept),
        dead=int(np.count_nonzero(present & ~live)),
        data_bytes=part.segment.data_bytes,
        live_bytes=int(kept["length"].sum(dtype=np.int64)),
        dead_bytes=int(rows["length"][present & ~live].sum(dtype=np.int64)),
        payload_bytes=int(kept["size"].sum(dtype=np.int64)),
    )
    if len(kept):
        _count_gaps(found, np.flatnonzero(live) + part.segment.first_seq + part.first_row)
        _count_times(found, kept)
        _count_sizes(found, kept["size"])
        _count_tags(found, kept["tag"], tags)
    return found


def statistics_of_frames(frames: Frames) -> Statistics:
    """Statistics of records read over HTTP. Deleted records show only as gaps."""
    headers = frames.headers
    lengths = int((headers["length"].astype(np.int64) + 4).sum())
    sizes = frames.sizes()
    found = Statistics(
        live=len(headers),
        data_bytes=lengths,
        live_bytes=lengths,
        payload_bytes=int(sizes.sum()),
    )
    if len(headers):
        _count_gaps(found, headers["seq"].astype(np.int64))
        kept = np.zeros(len(headers), dtype=ROW)
        kept["ts"], kept["size"] = headers["ts"], sizes
        _count_times(found, kept)
        _count_sizes(found, kept["size"])
        tags = frames.tag().dictionary_encode()
        ids = (tags.indices.cast("int64").fill_null(-1).to_numpy(zero_copy_only=False) + 1).astype(np.uint32)
        _count_tags(found, ids, tags.dictionary.cast("binary").to_pylist())
    return found


def _count_gaps(found: Statistics, seqs: npt.NDArray[np.int64]) -> None:
    found.first_seq, found.last_seq = int(seqs[0]), int(seqs[-1])
    found.gaps = int(np.count_nonzero(np.diff(seqs) > 1))


def _count_times(found: Statistics, kept: Rows) -> None:
    ts = kept["ts"].astype(np.int64)
    found.first_ts, found.last_ts = int(ts[0]), int(ts[-1])
    found.ts_min, found.ts_max = int(ts.min()), int(ts.max())
    found.out_of_order = int(np.count_nonzero(np.diff(ts) < 0))
    hours, where = np.unique(ts // HOUR_MS, return_inverse=True)
    records = np.bincount(where)
    sizes = np.bincount(where, weights=kept["size"]).astype(np.int64)
    found.hours = dict(zip(hours.tolist(), zip(records.tolist(), sizes.tolist())))


def _count_sizes(found: Statistics, sizes: npt.NDArray[np.uint32]) -> None:
    # The smallest class whose upper bound is at least the size.
    kinds = np.where(sizes > 0, np.ceil(SIZE_STEPS * np.log2(np.maximum(sizes, 1)) - 1e-9), 0).astype(
        np.int64
    )
    # Otherwise a size of one byte would be in the class of empty records.
    kinds[sizes == 1] = 1
    used, counts = np.unique(kinds, return_counts=True)
    found.sizes = dict(zip(used.tolist(), counts.tolist()))


def _count_tags(found: Statistics, ids: npt.NDArray[np.uint32], names: list[bytes]) -> None:
    counts = np.bincount(ids, minlength=len(names) + 1)
    found.untagged = int(counts[0])
    used = (np.flatnonzero(counts[1:]) + 1).tolist()
    found.tag_hashes = sorted(xxhash.xxh3_64_intdigest(names[i - 1]) for i in used)[:SKETCH]
    most = sorted(used, key=lambda i: -counts[i])[:TAGS_MAX]
    found.tags = Counter({names[i - 1].decode("utf-8", "replace"): int(counts[i]) for i in most})


# ── Counting a topic ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class CountTask:
    topic: str
    parts: tuple[Slice | HttpSlice, ...]


@dataclass(slots=True)
class TopicStatistics:
    """Statistics of parts of a topic."""

    topic: str
    cold: Statistics = field(default_factory=Statistics)
    hot: Statistics = field(default_factory=Statistics)
    lost: list[Gap] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(
        default_factory=list
    )  # segment and error, of parts that could not be counted

    def append(self, other: TopicStatistics) -> None:
        """Add the parts that follow."""
        self.cold.append(other.cold)
        self.hot.append(other.hot)
        self.lost += [gap for gap in other.lost if gap not in self.lost]
        self.failed += other.failed


def tasks_of(topic: str, slices: Sequence[Slice], http: Sequence[HttpSlice], workers: int) -> list[CountTask]:
    """Several tasks per worker, so that a slow one does not delay the job."""
    step = max(min(-(-len(slices) // (workers * 2)), SEGMENTS_MAX), 1)
    found = [CountTask(topic, tuple(slices[first : first + step])) for first in range(0, len(slices), step)]
    return found + [CountTask(topic, (part,)) for part in http]


def split_http(whole: HttpSlice, workers: int) -> list[HttpSlice]:
    span = whole.end_seq - whole.start_seq
    if span <= 0:
        return []
    count = max(min(workers * 4, span // HTTP_RECORDS_MIN), 1)
    edges = [whole.start_seq + span * i // count for i in range(count + 1)]
    return [
        HttpSlice(whole.url, whole.token_env, whole.topic, first, stop) for first, stop in pairwise(edges)
    ]


def count(task: CountTask) -> TopicStatistics:
    found = TopicStatistics(task.topic)
    for part in task.parts:
        if isinstance(part, HttpSlice):
            found.hot.append(_count_http(part, found.lost))
            continue
        try:
            found.cold.append(statistics_of(part))
        except (TopicsError, OSError) as error:
            # Reported and skipped. Not counted as a gap, since its records are not known.
            found.failed.append((part.segment.name, str(error)))
            found.cold.append(
                Statistics(first_seq=part.segment.first_seq, last_seq=part.segment.next_seq - 1)
            )
    return found


def _count_http(part: HttpSlice, lost: list[Gap]) -> Statistics:
    total = Statistics(rows=part.end_seq - part.start_seq)
    for frames in read_frames(part, Wanted(), lost):
        total.append(statistics_of_frames(frames))
    return total
