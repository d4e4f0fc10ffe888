"""Interned strings with reference counts: index rows hold small ints instead of tags and nodes.

An id whose count falls to zero is released and reused, so memory follows the live strings even if every record has a different
one.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint32]

# Below this many ids a plain loop beats the fixed cost of the numpy calls.
_LOOP_MAX = 64


class StringTable:
    """Strings by id and ids by string. Id 0 means no string and is never counted.

    `ids`, `names` and `counts` may be read by the hot loops of the engine; all changes except `counts[id] += 1` for a known id go
    through the methods.
    """

    __slots__ = ("_free", "counts", "held", "hold", "ids", "names")

    def __init__(self, *, hold: bool = False) -> None:
        """With `hold`, a released id keeps its string until `release_held`, for readers that still see the old state."""
        self.hold = hold
        self.held: deque[int] | tuple[()] = ()  # an empty deque would take 760 bytes per idle topic
        self.ids: dict[bytes, int] = {}
        self.names: list[bytes | None] = [None]
        self.counts: array[int] = array("I", [0])
        self._free: array[int] = array("I")  # a stack, at 4 bytes per released id

    def __len__(self) -> int:
        """Number of strings."""
        return len(self.ids)

    def add(self, name: bytes | None) -> int:
        """The id of this string with one more reference; 0 for None."""
        if name is None:
            return 0
        string_id = self.ids.get(name)
        if string_id is None:
            return self._intern(name, 1)
        self.counts[string_id] += 1
        return string_id

    def add_all(self, names: Sequence[bytes | None]) -> list[int]:
        """`add` for every name, in order."""
        find = self.ids.get
        counts = self.counts
        out: list[int] = []
        put = out.append
        for name in names:
            if name is None:
                put(0)
                continue
            string_id = find(name)
            if string_id is None:
                string_id = self._intern(name, 1)
            else:
                counts[string_id] += 1
            put(string_id)
        return out

    def add_counted(self, names: list[bytes], counts: npt.NDArray[np.int64]) -> Ids:
        """Intern each name with its number of references; a name with 0 references is not interned and gets id 0."""
        if len(names) != counts.size:
            raise ValueError(f"{len(names)} names with {counts.size} counts")
        found = list(map(self.ids.get, names))
        if None in found or not counts.all():
            wanted = counts.tolist()
            fresh = [name for name, known, count in zip(names, found, wanted) if count and known is None]
            self._intern_all(list(dict.fromkeys(fresh)))  # names may repeat
            found = [self.ids[name] if count else 0 for name, count in zip(names, wanted)]
        ids = np.array(found, dtype=np.uint32)
        # `add.at`, since names may repeat.
        np.add.at(np.frombuffer(self.counts, np.uint32), ids, counts.astype(np.uint32))
        return ids

    def id_of(self, name: bytes | None) -> int:
        """The id of this string; 0 if it is not interned."""
        if name is None:
            return 0
        return self.ids.get(name, 0)

    def name(self, string_id: int) -> bytes | None:
        """The string of this id; None for 0 and for a released id."""
        return self.names[string_id]

    def count(self, string_id: int) -> int:
        """Number of references to this id."""
        return self.counts[string_id]

    def release(self, string_id: int) -> bytes | None:
        """Drop one reference. Returns the string if that was the last one and the id was released."""
        if not string_id:
            return None
        left = self.counts[string_id] - 1
        if left < 0:
            raise ValueError(f"string id {string_id} was released more often than added")
        self.counts[string_id] = left
        return None if left else self._forget(string_id)

    def release_many(self, ids: Ids) -> list[tuple[int, bytes]]:
        """Drop one reference per entry other than 0. Returns the released ids with their strings."""
        if ids.size < _LOOP_MAX:
            return self._release_each(ids.tolist())
        distinct, drops = self._tally(ids)
        # Do not bind a view of the counts to a name: while one is alive, for example in a traceback, the array cannot grow.
        left = np.frombuffer(self.counts, np.uint32)[distinct].astype(np.int64) - drops
        if left.size and left.min() < 0:
            wrong = int(distinct[left.argmin()])
            raise ValueError(f"string id {wrong} was released more often than added")
        np.frombuffer(self.counts, np.uint32)[distinct] = left
        return [(string_id, self._forget(string_id)) for string_id in distinct[left == 0].tolist()]

    def _tally(self, ids: Ids) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The distinct ids other than 0, ascending, and the number of occurrences of each."""
        if ids.size * 4 >= len(self.counts):
            often = np.bincount(ids, minlength=1)
            often[0] = 0
            distinct = np.flatnonzero(often)
            return distinct.astype(np.int64), often[distinct].astype(np.int64)
        # Few ids, large table: sorting the ids is cheaper than a pass over the table.
        found, times = np.unique(ids[ids != 0], return_counts=True)
        return found.astype(np.int64), times.astype(np.int64)

    def _release_each(self, ids: list[int]) -> list[tuple[int, bytes]]:
        released: list[tuple[int, bytes]] = []
        for string_id in ids:
            name = self.release(string_id)
            if name is not None:
                released.append((string_id, name))
        return released

    def _intern(self, name: bytes, count: int) -> int:
        """Assign an id to a new string."""
        if self._free:
            string_id = self._free.pop()
            self.names[string_id] = name
            self.counts[string_id] = count
        else:
            string_id = len(self.names)
            self.names.append(name)
            self.counts.append(count)
        self.ids[name] = string_id
        return string_id

    def _intern_all(self, names: list[bytes]) -> None:
        """Assign ids to new strings, without references yet."""
        reused = min(len(self._free), len(names))
        for name in names[:reused]:
            self._intern(name, 0)
        fresh = names[reused:]
        self.ids.update(zip(fresh, range(len(self.names), len(self.names) + len(fresh))))
        self.names += fresh
        self.counts.frombytes(bytes(len(fresh) * self.counts.itemsize))

    def _forget(self, string_id: int) -> bytes:
        """Release an id without references."""
        name = self.names[string_id]
        assert name is not None, f"string id {string_id} is not in use"
        del self.ids[name]
        if self.hold:
            if isinstance(self.held, tuple):
                self.held = deque()
            self.held.append(string_id)
        else:
            self.names[string_id] = None
            self._free.append(string_id)
        return name

    def release_held(self, count: int) -> None:
        """Allow reuse of the `count` ids held longest: no reader can see them any more."""
        for _ in range(count):
            assert isinstance(self.held, deque), "no id is held"
            string_id = self.held.popleft()
            self.names[string_id] = None
            self._free.append(string_id)
        if not self.held:
            self.held = ()

    def all_ids_of(self, name: bytes) -> list[int]:
        """All ids that readers may see for this string, including held ones."""
        found = [string_id for string_id in self.held if self.names[string_id] == name]
        current = self.ids.get(name)
        return found if current is None else [*found, current]
