"""Topic ids: who gives which, and whose directory is whose.

Shard n gives n + 1024 k, so that ids of different shards never meet. An id stays with its topic for ever: it stands in every
frame and names the topic's directory. When the number of shards changes, topics come to shards that did not make them.
From then on a shard owns two kinds of ids: those that it *adopted* at that change, and those that it gives itself, which begin
at `first_id`, beyond every id that there was. What lies between belongs to others, or to nobody any more.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

ID_STEP = 1024


class OwnIds:
    """The ids of one shard. `packed` is how a snapshot keeps the adopted ones: eight bytes each, ascending."""

    __slots__ = ("_adopted", "_shard", "first_id", "packed")

    def __init__(self, shard: int, first_id: int = 0, packed: bytes = b"") -> None:
        self._shard = shard
        self.first_id = first_id
        self.packed = packed
        self._adopted = np.frombuffer(packed, dtype="<u8")

    def __contains__(self, topic_id: int) -> bool:
        if topic_id >= self.first_id and topic_id % ID_STEP == self._shard % ID_STEP:
            return True
        at = int(np.searchsorted(self._adopted, topic_id))
        return at < len(self._adopted) and int(self._adopted[at]) == topic_id


def pack_ids(ids: Iterable[int]) -> bytes:
    return np.array(sorted(ids), dtype="<u8").tobytes()


def first_id_after(ids: Iterable[int]) -> int:
    """The first id of a round of ids, one for each shard, beyond all of these."""
    return (max(ids, default=0) // ID_STEP + 1) * ID_STEP
