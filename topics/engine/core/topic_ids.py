"""Topic ids: who gives which, and whose directory is whose.

Shard n gives n + 1024 k, so that ids of different shards never meet. An id stays with its topic for ever: it stands in every
frame and names the topic's directory. When the number of shards changes, topics come to shards that did not make them.
From then on a shard owns two kinds of ids: those that it *adopted* at that change, and those that it gives itself, which begin
at `first_id`, beyond every id that there was. What lies between belongs to others, or to nobody any more.

What is nobody's any more is of topics that were dropped before the change. Their files are gone by then from the data
directory, but not from a cold tier that was out of reach. Somebody has to remove them, and this must not be another shard's
topic: so shard 0, which is always there, is told which ids the *others* have adopted, and owns the rest.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

ID_STEP = 1024


class OwnIds:
    """The ids of one shard. `packed` is how a snapshot keeps the adopted ones: eight bytes each, ascending. `others`, in the same
    way, are those that all other shards have adopted; None: it is not this shard that owns what is nobody's."""

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
            return not _is_among(self._others, topic_id)
        return _is_among(self._adopted, topic_id)


def _is_among(ids: npt.NDArray[np.uint64], topic_id: int) -> bool:
    at = int(np.searchsorted(ids, topic_id))
    return at < len(ids) and int(ids[at]) == topic_id


def pack_ids(ids: Iterable[int]) -> bytes:
    return np.array(sorted(ids), dtype="<u8").tobytes()


def first_id_after(ids: Iterable[int]) -> int:
    """The first id of a round of ids, one for each shard, beyond all of these."""
    return (max(ids, default=0) // ID_STEP + 1) * ID_STEP
