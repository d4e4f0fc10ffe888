"""A cold directory without a server: segments written with the engine's own writer, and the manifest that a server
would export.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from topics.engine.commands.topics import Records
from topics.engine.storage.files import DIGEST_BYTES, header, xxh
from topics.engine.storage.frames import encode_appends
from topics.engine.storage.manifest import (
    CURRENT_NAME,
    Manifest,
    Segment,
    dead_name,
    encode_current,
    encode_dead,
    encode_manifest,
    manifest_name,
)
from topics.engine.storage.merge_plan_file import PlanGroup, PlanInput
from topics.engine.storage.sealing import seal
from topics.engine.storage.segments import DEL_MAGIC, ROW, SegmentMeta, SegmentWriter, segment_name
from workers.shard.posix import PosixDisk

TS = 1_700_000_000_000


@dataclass
class Record:
    data: bytes
    tag: str | None = None
    node: str | None = None
    meta: bytes = b""
    raw: bool = False
    headers: bytes = b""
    ttl_ms: int = 0
    ts: int = 0  # 0: one ms after the previous record
    gone: bool = False  # purged: the row is there without its bytes


@dataclass
class ColdTier:
    """One topic. Seqs start at 1 and continue across segments."""

    root: Path
    topic: str = "orders"
    topic_id: int = 0x400
    segments: list[Segment] = field(default_factory=list)
    records: dict[int, Record] = field(default_factory=dict)  # by seq, records that have bytes
    dead: set[int] = field(default_factory=set)  # seqs
    chain: bytes = bytes(DIGEST_BYTES)
    number: int = 0

    @property
    def folder(self) -> Path:
        return self.root / "topics" / f"{self.topic_id:016x}"

    @property
    def next_seq(self) -> int:
        return self.segments[-1].next_seq if self.segments else 1

    @property
    def live(self) -> dict[int, Record]:
        return {seq: record for seq, record in self.records.items() if seq not in self.dead}

    def add(self, records: Sequence[Record], generation: int = 0) -> Segment:
        first = self.next_seq
        disk, folder = PosixDisk(str(self.root)), f"topics/{self.topic_id:016x}"
        meta = SegmentMeta(first, generation)
        writer = SegmentWriter(disk, folder, meta)
        tags: dict[bytes, int] = {}
        nodes: dict[bytes, int] = {}
        pieces: list[bytes] = []
        rows = np.zeros(len(records), dtype=ROW)
        expiries: list[tuple[int, int]] = []
        at = meta.data_bytes
        for i, record in enumerate(records):
            record.ts = record.ts or TS + first + i
            rows[i]["ts"] = record.ts
            if record.gone:
                continue
            lengths, flags = encode_appends(
                pieces, _columns(record), topic_id=self.topic_id, first_seq=first + i, ts=record.ts
            )
            rows[i]["offset"], rows[i]["length"] = at, lengths[0]
            rows[i]["flags"] = flags[0] if flags else 0
            rows[i]["size"] = len(record.data) + len(record.meta)
            rows[i]["tag"] = _id(tags, record.tag)
            rows[i]["node"] = _id(nodes, record.node)
            if record.ttl_ms:
                expiries.append((i, record.ts + record.ttl_ms))
            at += lengths[0]
            self.records[first + i] = record
        writer.append(b"".join(pieces), rows, list(tags), list(nodes), expiries)
        writer.sync()
        writer.close()
        digest = seal(disk, folder, meta, self.chain)
        self.chain = meta.link
        segment = Segment(
            name=segment_name(first, generation),
            first_seq=first,
            generation=generation,
            rows=meta.rows,
            live=meta.live,
            data_bytes=meta.data_bytes,
            dead_bytes=0,
            idx_bytes=meta.idx_bytes,
            dict_bytes=meta.dict_bytes,
            tag_names=meta.tag_names,
            node_names=meta.node_names,
            ts_min=meta.ts_min,
            ts_max=meta.ts_max,
            sum_digest=digest.hex(),
        )
        self.segments.append(segment)
        return segment

    def masks(self) -> dict[int, np.ndarray]:
        found = {}
        for segment in self.segments:
            mask = np.zeros(segment.rows, dtype=np.bool_)
            for seq in self.dead:
                if segment.first_seq <= seq < segment.next_seq:
                    mask[seq - segment.first_seq] = True
            if mask.any():
                found[segment.first_seq] = mask
        return found

    def publish(self, losses: Sequence[tuple[int, int, str]] = ()) -> Manifest:
        """Write the next manifest, and CURRENT."""
        self.number += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest = Manifest(
            number=self.number,
            topic=self.topic,
            topic_id=f"{self.topic_id:016x}",
            written_at_ms=TS,
            delete_epoch=0,
            earliest_seq=1,
            cold_next_seq=self.next_seq,
            head_seq=self.next_seq - 1,
            ttl_ms=0,
            segments=self.segments,
            losses=list(losses),
        )
        if masks := self.masks():
            (self.folder / dead_name(self.number)).write_bytes(encode_dead(masks))
        (self.folder / manifest_name(self.number)).write_bytes(encode_manifest(manifest))
        (self.folder / CURRENT_NAME).write_bytes(encode_current(self.number))
        return manifest

    def group(self, staging: Path, number: int = 0, segments: Sequence[Segment] = ()) -> PlanGroup:
        """A merge plan for one of these segments, with the deletion marks that a server would put into staging."""
        staging.mkdir(parents=True, exist_ok=True)
        inputs = []
        masks = self.masks()
        for segment in segments or self.segments:
            dead = None
            if segment.first_seq in masks:
                path = staging / f"{segment.name}.del"
                path.write_bytes(_marks(masks[segment.first_seq]))
                dead = str(path.relative_to(self.root))
            inputs.append(PlanInput(**msgspec.structs.asdict(segment), dead=dead))
        first, last = inputs[0], inputs[-1]
        generation = max(one.generation for one in inputs) + 1
        return PlanGroup(number, first.first_seq, last.next_seq, generation, "11" * 8, "22" * 8, inputs)


def _columns(record: Record) -> Records:
    return Records(
        payloads=[record.headers + record.data + record.meta],
        tags=None if record.tag is None else [record.tag.encode()],
        nodes=None if record.node is None else [record.node.encode()],
        meta_lens=[len(record.meta)] if record.meta else None,
        header_lens=[len(record.headers)] if record.headers else None,
        ttls_ms=[record.ttl_ms] if record.ttl_ms else None,
        raw=record.raw,
    )


def _id(names: dict[bytes, int], name: str | None) -> int:
    return 0 if name is None else names.setdefault(name.encode(), len(names) + 1)


def _marks(mask: np.ndarray) -> bytes:
    rows = np.flatnonzero(mask)
    ranges = np.stack([rows, rows + 1], axis=1).astype("<u4")
    body = len(ranges).to_bytes(4, "little") + ranges.tobytes()
    return header(DEL_MAGIC, 2) + body + xxh(bytes(DIGEST_BYTES) + body)


def some_records(count: int, first: int = 1) -> list[Record]:
    """Records of every kind: tags, nodes, meta, bytes, header blocks, TTLs; short, long and empty ones."""
    found = []
    for i in range(first, first + count):
        kind = i % 7
        found.append(
            Record(
                data=b'{"n":%d,"x":"%b"}' % (i, b"x" * (i * 37 % 300)) if kind != 3 else b'""',
                tag=f"tag-{i % 13}" if kind != 1 else None,
                node=f"node {i % 3}" if kind in (0, 4) else None,
                meta=b'{"m":%d}' % i if kind in (2, 4) else b"",
            )
        )
        if kind == 5:
            found[-1] = Record(data=bytes(range(i % 40)), raw=True, headers=b"H" * (i % 9), tag="raw")
        if kind == 6:
            found[-1].ttl_ms = 10**9 + i
    return found
