"""Data directories to damage: plain files that engines left behind, and the records in them.

`images` are made once by a run on a simulated disk: a stopped shard and a killed one, topics with their own files and
topics that are stored in the snapshot, with tags, nodes, expiry times, keys, deletes, erases and sealed segments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import msgspec

from tests.support.engine_harness import DISK, FSYNC, MEMORY, SMALL, Harness, file_bytes, numbered
from tests.support.sim_disk import SimDisk
from topics.api.config import EngineConfig
from topics.engine.commands import topics as c
from topics.engine.storage.frames import APPEND, HEADER, HEADER_BYTES

ERASED = 6  # of the topic `tagged`


class Row(NamedTuple):
    """A record as a reader gets it."""

    seq: int
    payload: bytes
    tag: bytes | None
    ts: int


@dataclass
class Image:
    """The files of a shard by path, and every record that was ever written, by topic and seq."""

    config: EngineConfig
    files: dict[str, bytes]
    written: dict[str, dict[int, Row]] = field(default_factory=dict)
    live: dict[str, set[int]] = field(default_factory=dict)
    erased: dict[str, set[int]] = field(default_factory=dict)

    @property
    def paths(self) -> list[str]:
        return list(self.files)

    def disk(self, changed: dict[str, bytes | None]) -> SimDisk:
        """A disk with these files, some changed, or removed (None)."""
        disk = SimDisk(1)
        for path, data in (self.files | changed).items():
            if data is not None:
                _put(disk, path, data)
        disk.sync_all()
        return disk


def _put(disk: SimDisk, path: str, data: bytes) -> None:
    folder = path.rpartition("/")[0]
    parts = folder.split("/")
    for i in range(1, len(parts) + 1):
        disk.make_dir("/".join(parts[:i]))
    handle = disk.open(path, create=True)
    disk.write(handle, 0, data)
    disk.close(handle)


@cache
def images() -> tuple[Image, ...]:
    inline = msgspec.structs.replace(SMALL, inline_bytes=4096, segment_max_events=64)
    return _made(SMALL, clean=False), _made(SMALL, clean=True), _made(inline, clean=True)


def _made(config: EngineConfig, *, clean: bool) -> Image:
    h = Harness(config)
    image = Image(config, {})
    h.put("plain", FSYNC)
    h.put("tagged", DISK)
    h.put("held", MEMORY)
    for first in range(1, 11, 2):  # two segments of four records each are sealed, a third is open
        h.append("plain", *numbered(first, 2))
        h.append("tagged", *numbered(first, 2, 40), tags=[b"a", b"b.c"], nodes=[b"n", None])
        h.append("held", *numbered(first, 2), ttls_ms=[0, 1 << 40], key=b"k%d" % first)
    _note(h, image)
    h.checkpoint()
    h.do(c.Delete("plain", seqs=[2, 5]))
    h.do(c.Delete("tagged", seqs=[ERASED], erase=True))
    h.checkpoint()
    for topic in ("plain", "tagged"):
        h.append(topic, *numbered(11, 4), tags=[b"late"] * 4)
    h.sync()
    _note(h, image)
    if clean:
        h.close()
    else:
        h.rest()
        h.kill()
    image.files = {path: file_bytes(h.disk, path) for path in h.disk.paths()}
    return image


def _note(h: Harness, image: Image) -> None:
    for topic in h.engine.shard.state.published:
        rows = {row.seq: row for row in read_all(h, topic)[0]}
        image.written.setdefault(topic, {}).update(rows)
        image.erased[topic] = {ERASED} if topic == "tagged" else set()
        image.live[topic] = set(rows)


def read_all(h: Harness, topic: str) -> tuple[list[Row], list[tuple[int, int]]]:
    """Every record of a topic and every range announced as lost. Raises the error that a read is answered with."""
    rows: list[Row] = []
    gaps: list[tuple[int, int]] = []
    cursor = 0
    while True:
        page: Any = h.send(c.Diff(topic, cursor, limit=1000, max_bytes=8 << 20, touch=False))
        if isinstance(page, Exception):
            raise page
        if page.tombstone is not None:
            gaps.append((page.tombstone.gap_from, page.tombstone.gap_to))
        tags = page.tags or [None] * len(page.seqs)
        for i, seq in enumerate(page.seqs):
            rows.append(Row(int(seq), _payload(page, i), tags[i], int(page.timestamps[i])))
        if page.next_from_seq >= page.head_seq:
            return rows, gaps
        assert page.next_from_seq > cursor, "the cursor does not advance"
        cursor = page.next_from_seq


def _payload(page: c.Page, i: int) -> bytes:
    """The payload of one record, from a frame that must be its own."""
    buffer, at = page.frames[page.which[i] if page.which is not None else 0], page.starts[i]
    _, kind, _, _, seq, _, node_len, tag_len, data_len = HEADER.unpack_from(buffer, at)
    assert (kind, seq) == (APPEND, page.seqs[i]), "the frame belongs to another record"
    start = at + HEADER_BYTES + node_len + tag_len
    return bytes(buffer[start : start + data_len])
