"""What everybody does in the cold tier: the files of a segment there, and removing files in a safe order."""

from __future__ import annotations

from functools import partial

from topics.api.errors import Corrupt
from topics.api.limits import SLICE_TOPICS
from topics.engine.core.ports import SegmentStore
from topics.engine.core.tasks import Blocking, Steps
from topics.engine.storage.segments import SegmentMeta, segment_path

MOVE_KIND = "cold_move"
INDEX_SUFFIXES = ("idx", "dict", "sum")  # on the hot tier as well
SUFFIXES = ("data", *INDEX_SUFFIXES)  # in the order of copying


def read_whole(store: SegmentStore, key: str, bytes_max: int) -> bytes:
    """A small file. Corrupt when it is not small: nobody here has written that."""
    size = store.length(key)
    if size > bytes_max:
        raise Corrupt(key, bytes_max, f"has {size} bytes, which is far too long")
    return store.read_range(key, 0, size)


def delete_segment(store: SegmentStore, directory: str, meta: SegmentMeta) -> None:
    """.sum first, as everywhere: no .sum is left that promises the rest."""
    for suffix in reversed(SUFFIXES):
        store.delete(segment_path(directory, meta, suffix))


def delete_keys(store: SegmentStore, keys: list[str]) -> Steps:
    def delete(some: list[str]) -> None:
        for key in some:
            store.delete(key)

    keys = sorted(keys, key=lambda key: (not key.endswith(".sum"), key))
    for first in range(0, len(keys), SLICE_TOPICS):
        yield Blocking(MOVE_KIND, partial(delete, keys[first : first + SLICE_TOPICS]))
