"""Topics of a cold directory and their manifests, whose format is in topics/engine/storage/manifest.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spark_pipeline.tasks.names import pick_names, split_names
from topics.engine.storage.manifest import (
    CURRENT_NAME,
    SMALL_BYTES_MAX,
    Manifest,
    Segment,
    dead_name,
    decode_current,
    decode_dead,
    decode_manifest,
    manifest_name,
)
from topics.engine.storage.segments import Mask, SegmentMeta
from topics.system.read_only_disk import read_small

_TRIES = 4


class FilesGone(Exception):
    """Files listed in a manifest no longer exist. (A pin protects them, but not from an erase.)"""


class NoManifest(Exception):
    """There is nothing to read; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ColdTopic:
    """A topic as described by one manifest, and its directory."""

    folder: str
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.manifest.topic

    def dead(self) -> dict[int, Mask]:
        """Masks of deleted rows, by the first seq of their segment."""
        path = f"{self.folder}/{dead_name(self.manifest.number)}"
        try:
            content = Path(path).read_bytes()
        except FileNotFoundError:
            return {}
        return decode_dead(path, content, self.manifest.segments)


def topics_in(cold_dir: str) -> Iterator[ColdTopic]:
    """All topics in the cold tier, with their newest manifests."""
    root = Path(cold_dir) / "topics"
    try:
        names = sorted(os.listdir(root))
    except (FileNotFoundError, NotADirectoryError):
        raise NoManifest(
            f"{cold_dir} has no directory topics/: give the server's TOPICS_COLD_DIR, or its URL"
        ) from None
    for name in names:
        if (root / name / CURRENT_NAME).is_file():
            yield ColdTopic(str(root / name), read_current(str(root / name)))


def find_topics(cold_dir: str, wanted: str) -> list[ColdTopic]:
    """The topics of a comma-separated list of names and patterns; NoManifest if one matches nothing."""
    parts = split_names(wanted)
    found = {topic.name: topic for topic in topics_in(cold_dir)}
    picked = pick_names(sorted(found), parts)
    if isinstance(picked, str):
        content = f"it has {', '.join(sorted(found)[:8])}" if found else "it has no manifests yet"
        raise NoManifest(
            f"no topic {picked!r} in the cold tier at {cold_dir} ({content}); give a URL to read records that are not cold yet"
        )
    return [found[name] for name in picked]


def read_current(folder: str) -> Manifest:
    """The newest manifest. Retried, because a running server may replace it meanwhile."""
    path = f"{folder}/{CURRENT_NAME}"
    for tries_left in reversed(range(_TRIES)):
        try:
            number = decode_current(path, read_small(path, SMALL_BYTES_MAX))
        except FileNotFoundError:
            raise NoManifest(f"{folder} has no manifest: this topic has no cold records") from None
        try:
            return read_manifest(f"{folder}/{manifest_name(number)}")
        except FileNotFoundError:
            if not tries_left:
                raise
    raise AssertionError("not reached")


def read_manifest(path: str) -> Manifest:
    return decode_manifest(path, Path(path).read_bytes())


def meta_of(segment: Segment) -> SegmentMeta:
    """The segment's metadata in the form of the engine's readers."""
    return SegmentMeta(
        first_seq=segment.first_seq,
        generation=segment.generation,
        rows=segment.rows,
        data_bytes=segment.data_bytes,
        dict_bytes=segment.dict_bytes,
        tag_names=segment.tag_names,
        node_names=segment.node_names,
        sealed=True,
        live=segment.live,
        ts_min=segment.ts_min,
        ts_max=segment.ts_max,
    )
