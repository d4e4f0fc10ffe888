"""Manifests of the cold tier, and the pins that keep old manifests and their files.

A topic gets a new manifest when its set of cold segments changes and when a client pins a snapshot. The files are put in
this order: dead rows, manifest, CURRENT. Then older manifests are removed. After a crash there may be a manifest that
nothing points to, or one too many; the sweep of the store after the next start removes it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

from topics.api import limits
from topics.api.errors import Corrupt, SnapshotNotFound, Throttled, TopicsError
from topics.engine.core.ports import Disk, SegmentStore
from topics.engine.core.tasks import Blocking, Step, Steps, WaitSynced
from topics.engine.reading.reader import Reader
from topics.engine.shard.shard import Shard
from topics.engine.storage.files import HEADER_BYTES
from topics.engine.storage.frames import DELETED
from topics.engine.storage.manifest import (
    CURRENT_NAME,
    MANIFEST_BYTES_MAX,
    SMALL_BYTES_MAX,
    Manifest,
    Pin,
    RetiredSegment,
    Segment,
    dead_name,
    decode_manifest,
    decode_pin,
    encode_current,
    encode_dead,
    encode_manifest,
    encode_pin,
    manifest_name,
    manifest_number,
    pin_id,
    pin_name,
)
from topics.engine.storage.sealing import read_sum
from topics.engine.storage.segment_store import COLD_IO_KIND, delete_keys, read_small_file
from topics.engine.storage.segments import COLD, Mask, Rows, SegmentMeta, segment_name
from topics.engine.topic.log import Loss, TopicLog
from topics.engine.topic.merges import Merges

DIGESTS_KEPT = 65_536  # cached .sum digests of segments

Name = tuple[int, int]  # first seq and generation of a segment


@dataclass(frozen=True, slots=True)
class _ActivePin:
    """A pin: its manifest, its expiry, and the segments whose files it keeps."""

    manifest: int
    expires_at_ms: int
    names: frozenset[Name]


@dataclass(frozen=True, slots=True)
class _Captured:
    """A topic at one point in time. Rows are views: a concurrent delete may or may not be visible in them."""

    log_id: int
    name: str
    number: int
    now_ms: int
    epoch: int
    earliest_seq: int
    head_seq: int
    ttl_ms: int
    losses: list[Loss]
    merges: Merges
    segments: list[tuple[SegmentMeta, Rows]]


def cold_metas(log: TopicLog) -> list[SegmentMeta]:
    """The segments that a manifest lists: all before the first hot one. Later records are read from the server."""
    metas = log.stored
    if metas is None:
        metas = [chunk.meta for chunk in log.chunks if chunk.meta is not None]
    listed: list[SegmentMeta] = []
    for meta in metas:
        if meta.tier != COLD:
            break
        listed.append(meta)
    return listed


class Manifests:
    """Writes and removes the manifests and pins of a shard's topics."""

    def __init__(self, disk: Disk, store: SegmentStore | None, shard: Shard, reader: Reader) -> None:
        self._disk = disk
        self._store = store
        self._shard = shard
        self._reader = reader
        self._numbers: dict[int, list[int]] = {}  # manifests in the store by topic, ascending
        self._exported: dict[int, int] = {}  # hash of the segments in the newest one
        self._digests: dict[tuple[int, int, int], str] = {}
        self._pins: dict[int, dict[str, _ActivePin]] = {}
        self._next_expiry_ms: int | None = None
        self._is_stale = False  # _next_expiry_ms has to be recomputed
        self.due: dict[int, TopicLog] = {}  # topics that need a new manifest
        self.on_written: Callable[[int], None] = lambda topic_id: None

    # -- state ---------------------------------------------------------------------------------------------

    def newest(self, topic_id: int) -> int | None:
        numbers = self._numbers.get(topic_id)
        return numbers[-1] if numbers else None

    def next_number(self, topic_id: int) -> int:
        return (self.newest(topic_id) or 0) + 1

    def check(self, log: TopicLog) -> None:
        """Schedule a new manifest if the topic's cold segments differ from those in the last one."""
        if self._store is None or log.dropped:
            return
        found = _signature(cold_metas(log))
        if found != self._exported.get(log.id, _signature([])):
            self.due[log.id] = log

    def is_pinned(self, topic_id: int, name: Name) -> bool:
        return any(name in pin.names for pin in self._pins.get(topic_id, {}).values())

    def pins_of(self, topic_id: int) -> int:
        return len(self._pins.get(topic_id, {}))

    def next_expiry_ms(self) -> int | None:
        if self._is_stale:
            self._is_stale = False
            ends = (pin.expires_at_ms for pins in self._pins.values() for pin in pins.values())
            self._next_expiry_ms = min(ends, default=None)
        return self._next_expiry_ms

    def forget(self, topic_id: int) -> None:
        """The topic was removed, with all its files in the store."""
        for table in (self._numbers, self._exported, self._pins, self.due):
            table.pop(topic_id, None)
        self._is_stale = True

    # -- writing -------------------------------------------------------------------------------------------

    def export(self, log: TopicLog) -> Generator[Step, Any, Manifest]:
        """Write a manifest of the topic's current state."""
        self._shard.state.upkeep_now(log)
        yield WaitSynced(0)  # until expirations and losses found by upkeep or loading are published
        while log.is_unloaded:
            self._shard.state.loader(log)
            yield WaitSynced(0)
        self.due.pop(log.id, None)
        signature = _signature(cold_metas(log))
        captured = self._capture(log)
        try:
            manifest: Manifest = yield Blocking(COLD_IO_KIND, partial(self._write, captured))
        except OSError:
            self.due[log.id] = log
            raise
        self.on_written(log.id)
        self._numbers.setdefault(log.id, []).append(manifest.number)
        self._exported[log.id] = signature
        yield from self._drop_old(log.id)
        return manifest

    def _capture(self, log: TopicLog) -> _Captured:
        view, shard = log.view, self._shard
        listed = {meta.first_seq for meta in cold_metas(log)}
        segments = [
            (chunk.meta, chunk.rows)
            for chunk in log.chunks
            if chunk.meta is not None and chunk.first_seq in listed
        ]
        return _Captured(
            log.id, log.name, self.next_number(log.id), shard.state.now_ms, shard.state.written_lsn,
            min(view.first_seq, view.head + 1), view.head, view.config.ttl_ms, list(view.losses), log.merges, segments,
        )  # fmt: skip

    def _write(self, captured: _Captured) -> Manifest:
        """Put the files into the store; runs on another thread."""
        store = self._store
        assert store is not None
        directory = self._reader.topic_dir(captured.log_id)
        masks: dict[int, Mask] = {}
        segments: list[Segment] = []
        cold_next_seq = captured.earliest_seq
        for meta, rows in captured.segments:
            digest = self._digest_of(captured.log_id, directory, meta)
            if digest is None:
                break  # readers could not verify it; they read it and later ones from the server
            present = rows["length"] > 0
            dead = present & ((rows["flags"] & DELETED) != 0)
            dead[: max(0, captured.earliest_seq - meta.first_seq)] |= present[
                : max(0, captured.earliest_seq - meta.first_seq)
            ]
            cold_next_seq = max(cold_next_seq, meta.first_seq + meta.rows)
            # A segment without live records is about to be removed, and an erase may already have removed its files.
            # Recovery from an older snapshot brings it back into the index.
            if not (present & ~dead).any():
                continue
            if dead.any():
                masks[meta.first_seq] = dead
            segments.append(describe(meta, rows, dead, digest))
        retired = [
            RetiredSegment(segment_name(one.first_seq, one.generation), entry.retired_at_ms, entry.plan_id)
            for entry in captured.merges.retired
            for one in entry.segments
        ]
        manifest = Manifest(
            number=captured.number,
            topic=captured.name,
            topic_id=f"{captured.log_id:016x}",
            written_at_ms=captured.now_ms,
            delete_epoch=captured.epoch,
            earliest_seq=captured.earliest_seq,
            cold_next_seq=cold_next_seq,
            head_seq=captured.head_seq,
            ttl_ms=captured.ttl_ms,
            segments=segments,
            losses=captured.losses,
            retired=retired,
            plans=[one.plan_id for one in captured.merges.committed],
        )
        if masks:
            store.put(f"{directory}/{dead_name(manifest.number)}", [encode_dead(masks)])
        store.put(f"{directory}/{manifest_name(manifest.number)}", [encode_manifest(manifest)])
        store.put(f"{directory}/{CURRENT_NAME}", [encode_current(manifest.number)])
        return manifest

    def _digest_of(self, topic_id: int, directory: str, meta: SegmentMeta) -> str | None:
        """The digest at the end of .sum. It is cached: files of a cold segment never change."""
        key = (topic_id, meta.first_seq, meta.generation)
        if key not in self._digests:
            try:
                digest = read_sum(self._disk, directory, meta.first_seq, meta.generation)[1]
            except (Corrupt, FileNotFoundError):
                return None
            if len(self._digests) >= DIGESTS_KEPT:
                self._digests.clear()
            self._digests[key] = digest.hex()
        return self._digests[key]

    def _drop_old(self, topic_id: int) -> Steps:
        store = self._store
        assert store is not None
        numbers = self._numbers.get(topic_id, [])
        pinned = {pin.manifest for pin in self._pins.get(topic_id, {}).values()}
        old = [number for number in numbers[: -limits.MANIFESTS_KEPT] if number not in pinned]
        directory = self._reader.topic_dir(topic_id)
        yield from delete_keys(
            store, [f"{directory}/{name(number)}" for number in old for name in (manifest_name, dead_name)]
        )
        self._numbers[topic_id] = [number for number in self._numbers.get(topic_id, []) if number not in old]

    # -- pins ----------------------------------------------------------------------------------------------

    def pin(self, log: TopicLog, ttl_ms: int) -> Generator[Step, Any, tuple[str, int, Manifest]]:
        """Write a manifest and pin its files. Returns the pin's id, its expiry and the manifest."""
        if self.pins_of(log.id) >= limits.SNAPSHOTS_MAX:
            raise Throttled(
                f"this topic already has {limits.SNAPSHOTS_MAX} snapshots; release one or wait until one expires",
                limit="snapshots",
                max=limits.SNAPSHOTS_MAX,
            )
        manifest = yield from self.export(log)
        snapshot_id = f"{self._disk.random_u64():016x}"
        names = frozenset((one.first_seq, one.generation) for one in manifest.segments)
        pin = _ActivePin(manifest.number, self._shard.state.now_ms + ttl_ms, names)
        # Before it is in the store: segments replaced in the meantime must be kept.
        self._keep(log.id, snapshot_id, pin)
        try:
            yield from self._put_pin(log.id, snapshot_id, pin)
        except OSError:
            self._unpin(log.id, snapshot_id)
            raise
        return snapshot_id, pin.expires_at_ms, manifest

    def renew(self, log: TopicLog, snapshot_id: str, ttl_ms: int) -> Generator[Step, Any, int]:
        pin = self._find(log.id, snapshot_id)
        renewed = _ActivePin(pin.manifest, self._shard.state.now_ms + ttl_ms, pin.names)
        yield from self._put_pin(log.id, snapshot_id, renewed)
        self._keep(log.id, snapshot_id, renewed)
        return renewed.expires_at_ms

    def release(self, log: TopicLog, snapshot_id: str) -> Steps:
        self._find(log.id, snapshot_id)
        yield from self._end_pin(log.id, snapshot_id)

    def expire(self) -> Steps:
        """Remove expired pins."""
        now_ms = self._shard.state.now_ms
        ended = [
            (topic_id, snapshot_id)
            for topic_id, pins in self._pins.items()
            for snapshot_id, pin in pins.items()
            if pin.expires_at_ms <= now_ms
        ]
        for topic_id, snapshot_id in ended:
            yield from self._end_pin(topic_id, snapshot_id)

    def _find(self, topic_id: int, snapshot_id: str) -> _ActivePin:
        pin = self._pins.get(topic_id, {}).get(snapshot_id)
        if pin is None or pin.expires_at_ms <= self._shard.state.now_ms:
            raise SnapshotNotFound(snapshot_id)
        return pin

    def _put_pin(self, topic_id: int, snapshot_id: str, pin: _ActivePin) -> Steps:
        store = self._store
        assert store is not None
        content = encode_pin(Pin(pin.manifest, pin.expires_at_ms))
        key = f"{self._reader.topic_dir(topic_id)}/{pin_name(snapshot_id)}"
        yield Blocking(COLD_IO_KIND, lambda: store.put(key, [content]))

    def _end_pin(self, topic_id: int, snapshot_id: str) -> Steps:
        store = self._store
        assert store is not None
        yield from delete_keys(store, [f"{self._reader.topic_dir(topic_id)}/{pin_name(snapshot_id)}"])
        self._unpin(topic_id, snapshot_id)
        yield from self._drop_old(topic_id)

    def _keep(self, topic_id: int, snapshot_id: str, pin: _ActivePin) -> None:
        self._pins.setdefault(topic_id, {})[snapshot_id] = pin
        self._is_stale = True

    def _unpin(self, topic_id: int, snapshot_id: str) -> None:
        pins = self._pins.get(topic_id, {})
        pins.pop(snapshot_id, None)
        self._is_stale = True
        if not pins:
            self._pins.pop(topic_id, None)

    # -- after a start -------------------------------------------------------------------------------------

    def load(self, topic_id: int, names: list[str]) -> Steps:
        """Load a topic's manifests and pins from the store's file names, and remove obsolete ones."""
        store = self._store
        assert store is not None
        directory = self._reader.topic_dir(topic_id)
        numbers = {name: manifest_number(name) for name in names}
        manifests = sorted(n for name, n in numbers.items() if n is not None and name == manifest_name(n))
        self._numbers[topic_id] = manifests
        stale: list[str] = []
        for name in names:
            snapshot_id = pin_id(name)
            if snapshot_id is None:
                continue
            pin = yield Blocking(COLD_IO_KIND, partial(self._read_pin, directory, name))
            if pin is None or pin.expires_at_ms <= self._shard.state.now_ms:
                stale.append(f"{directory}/{name}")
            else:
                self._keep(topic_id, snapshot_id, pin)
        known = set(manifests)
        stale += [f"{directory}/{name}" for name, n in numbers.items() if n is not None and n not in known]
        yield from delete_keys(store, stale)
        yield from self._drop_old(topic_id)

    def _read_pin(self, directory: str, name: str) -> _ActivePin | None:
        """Read a pin and its manifest. None if either is unusable."""
        store = self._store
        assert store is not None
        try:
            path = f"{directory}/{name}"
            pin = decode_pin(path, read_small_file(store, path, SMALL_BYTES_MAX))
            path = f"{directory}/{manifest_name(pin.manifest)}"
            manifest = decode_manifest(path, read_small_file(store, path, MANIFEST_BYTES_MAX))
        except (TopicsError, FileNotFoundError):
            return None
        names = frozenset((one.first_seq, one.generation) for one in manifest.segments)
        return _ActivePin(pin.manifest, pin.expires_at_ms, names)


def _signature(metas: list[SegmentMeta]) -> int:
    return hash(tuple((meta.first_seq, meta.generation) for meta in metas))


def describe(meta: SegmentMeta, rows: Rows, dead: Mask, digest: str) -> Segment:
    """The manifest entry of a segment."""
    present = rows["length"] > 0
    kept = int(rows["length"][present & ~dead].sum(dtype="int64"))
    return Segment(
        name=segment_name(meta.first_seq, meta.generation),
        first_seq=meta.first_seq,
        generation=meta.generation,
        rows=meta.rows,
        live=int((present & ~dead).sum()),
        data_bytes=meta.data_bytes,
        dead_bytes=meta.data_bytes - HEADER_BYTES - kept,
        idx_bytes=meta.idx_bytes,
        dict_bytes=meta.dict_bytes,
        tag_names=meta.tag_names,
        node_names=meta.node_names,
        ts_min=meta.ts_min,
        ts_max=meta.ts_max,
        sum_digest=digest,
    )
