"""Whether what the cold tier says of a topic is whole and speaks of files that are there. A server needs none of it, jobs do."""

from __future__ import annotations

from topics.api.errors import TopicsError
from topics.engine.core.ports import SegmentStore
from topics.engine.storage.cold_files import read_whole
from topics.engine.storage.manifest import (
    CURRENT_NAME,
    Manifest,
    dead_name,
    decode_current,
    decode_dead,
    decode_manifest,
    decode_pin,
    is_of_manifests,
    manifest_name,
    manifest_number,
    pinned_id,
)
from topics.engine.storage.segments import parse_segment_name

BYTES_MAX = 1 << 30
SMALL_BYTES_MAX = 4096  # of CURRENT and pins


def check_manifests(store: SegmentStore, directory: str) -> list[tuple[str, str]]:
    """Path and problem, for each file of the topic that is not as it should be."""
    keys = store.list(f"{directory}/")
    names = {key.rpartition("/")[2] for key in keys}
    problems: list[tuple[str, str]] = []
    manifests: dict[int, Manifest] = {}
    for name in sorted(names):
        path = f"{directory}/{name}"
        number = manifest_number(name)
        try:
            if number is not None and name == manifest_name(number):
                manifests[number] = decode_manifest(path, read_whole(store, path, BYTES_MAX))
            elif pinned_id(name) is not None:
                decode_pin(path, read_whole(store, path, SMALL_BYTES_MAX))
            elif not is_of_manifests(name) and parse_segment_name(name) is None:
                problems.append((path, "is no file of topics"))
        except (TopicsError, OSError) as error:
            problems.append((path, str(error)))
    for number, manifest in manifests.items():
        problems += _check_one(store, directory, names, number, manifest)
    if CURRENT_NAME in names:
        path = f"{directory}/{CURRENT_NAME}"
        try:
            current = decode_current(path, read_whole(store, path, SMALL_BYTES_MAX))
            if current not in manifests:
                problems.append((path, f"names {manifest_name(current)}, which is not there or damaged"))
            else:
                problems += _missing(directory, names, manifests[current])
        except (TopicsError, OSError) as error:
            problems.append((path, str(error)))
    return problems


def _check_one(
    store: SegmentStore, directory: str, names: set[str], number: int, manifest: Manifest
) -> list[tuple[str, str]]:
    if manifest.number != number:
        return [(f"{directory}/{manifest_name(number)}", f"says that it is number {manifest.number}")]
    path = f"{directory}/{dead_name(number)}"
    if dead_name(number) not in names:
        return []
    try:
        decode_dead(path, read_whole(store, path, BYTES_MAX), manifest.segments)
    except (TopicsError, OSError) as error:
        return [(path, str(error))]
    return []


def _missing(directory: str, names: set[str], manifest: Manifest) -> list[tuple[str, str]]:
    return [
        (f"{directory}/{name}", f"{manifest_name(manifest.number)} lists it, and it is missing")
        for segment in manifest.segments
        for name in (f"{segment.name}.{suffix}" for suffix in ("data", "idx", "sum"))
        if name not in names
    ]
