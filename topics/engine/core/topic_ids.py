"""Topic ids: allocation, and which shard owns which id.

Shard n allocates n + 1024 k, so shards never allocate the same id. A topic keeps its id for good: the id is in every frame
and names the topic's directory. When the number of shards changes, topics move to shards that did not create them. From then
on a shard owns two kinds of ids: those it *adopted* in that change, and those it allocates itself, from `first_id` on, which
is above every earlier id.

The remaining ids below `first_id` belong to other shards or to topics dropped before the change. Files of dropped topics may
still be in a cold tier that could not be reached at the time, and one shard has to delete them without touching topics of
other shards. That is shard 0, which always exists: it stores the ids that the *other* shards adopted, and owns the rest.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

ID_STEP = 1024


class OwnedIds:
    """The ids owned by one shard. `packed`: the adopted ids as a snapshot stores them, eight bytes each, ascending. `others`: the
    ids adopted by all other shards, packed the same way; None unless this shard owns the ids of dropped topics."""

    __slots__ = ("_adopted", "_others", "_shard", "first_id", "others", "packed")

    def __init__(
        self, shard: int, first_id: int = 0, packed: bytes = b"", others: bytes | None = None
    ) -> None:
        self._shard = shard
        self.first_id = first_id
        self.packed = packed
        self.others = others
        self._adopted = np.frombuffer(packed, dtype="<u8")
        self._others = np.frombuffer(others or b"", dtype="<u8")

    def __contains__(self, topic_id: int) -> bool:
        if topic_id >= self.first_id:
            return topic_id % ID_STEP == self._shard % ID_STEP
        if self.others is not None:
            return not _contains(self._others, topic_id)
        return _contains(self._adopted, topic_id)


def _contains(ids: npt.NDArray[np.uint64], topic_id: int) -> bool:
    at = int(np.searchsorted(ids, topic_id))
    return at < len(ids) and int(ids[at]) == topic_id


def pack_ids(ids: Iterable[int]) -> bytes:
    return np.array(sorted(ids), dtype="<u8").tobytes()


def first_id_after(ids: Iterable[int]) -> int:
    """The first multiple of ID_STEP above all of these ids."""
    return (max(ids, default=0) // ID_STEP + 1) * ID_STEP
