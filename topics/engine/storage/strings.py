"""Interned strings with reference counts: the small ints that index rows hold instead of tags and nodes.

An id whose count falls to zero is released with its string and given out again, so memory follows what is live
even when every record brings a string of its own.
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

    `ids`, `names` and `counts` are open to the hot loops of the engine; all changes but `counts[id] += 1` on a
    known id go through the methods.
    """

    __slots__ = ("_free", "counts", "held", "hold", "ids", "names")

    def __init__(self, *, hold: bool = False) -> None:
        """With `hold`, a released id keeps its string until `release_held`: readers may lag behind the release."""
        self.hold = hold
        self.held: (
            deque[int] | tuple[()]
        ) = ()  # an empty deque takes 760 bytes, which a topic at rest can do without
        self.ids: dict[bytes, int] = {}
        self.names: list[bytes | None] = [None]
        self.counts: array[int] = array("I", [0])
        self._free: array[int] = array("I")  # a stack, at 4 bytes per released id

    def __len__(self) -> int:
        """How many strings are held."""
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
        """Intern each name with so many references; a name with none is not interned and gets id 0."""
        if len(names) != counts.size:
            raise ValueError(f"{len(names)} names with {counts.size} counts")
        found = list(map(self.ids.get, names))
        if None in found or not counts.all():
            wanted = counts.tolist()
            fresh = [name for name, known, count in zip(names, found, wanted) if count and known is None]
            self._intern_all(list(dict.fromkeys(fresh)))  # a name may come twice
            found = [self.ids[name] if count else 0 for name, count in zip(names, wanted)]
        ids = np.array(found, dtype=np.uint32)
        # `add.at`, since a name may come twice.
        np.add.at(np.frombuffer(self.counts, np.uint32), ids, counts.astype(np.uint32))
        return ids

    def id_of(self, name: bytes | None) -> int:
        """The id of this string, 0 when it is not held."""
        if name is None:
            return 0
        return self.ids.get(name, 0)

    def name(self, string_id: int) -> bytes | None:
        """The string of this id; None for 0 and for a released id."""
        return self.names[string_id]

    def count(self, string_id: int) -> int:
        """How many references this id has."""
        return self.counts[string_id]

    def release(self, string_id: int) -> bytes | None:
        """Drop one reference. The string is returned when that was its last one and it is now forgotten."""
        if not string_id:
            return None
        left = self.counts[string_id] - 1
        if left < 0:
            raise ValueError(f"string id {string_id} was released more often than added")
        self.counts[string_id] = left
        return None if left else self._forget(string_id)

    def release_many(self, ids: Ids) -> list[tuple[int, bytes]]:
        """Drop one reference per entry, zeros aside. Returns the forgotten ids with their strings."""
        if ids.size < _LOOP_MAX:
            return self._release_each(ids.tolist())
        distinct, drops = self._tally(ids)
        # No view of the counts is kept in a name: with one alive, in a traceback say, the array could not grow.
        left = np.frombuffer(self.counts, np.uint32)[distinct].astype(np.int64) - drops
        if left.size and left.min() < 0:
            wrong = int(distinct[left.argmin()])
            raise ValueError(f"string id {wrong} was released more often than added")
        np.frombuffer(self.counts, np.uint32)[distinct] = left
        return [(string_id, self._forget(string_id)) for string_id in distinct[left == 0].tolist()]

    def _tally(self, ids: Ids) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The distinct ids other than 0, ascending, and how often each comes."""
        if ids.size * 4 >= len(self.counts):
            often = np.bincount(ids, minlength=1)
            often[0] = 0
            distinct = np.flatnonzero(often)
            return distinct.astype(np.int64), often[distinct].astype(np.int64)
        # Few ids of a large table: sorting them is cheaper than a pass over the table.
        found, times = np.unique(ids[ids != 0], return_counts=True)
        return found.astype(np.int64), times.astype(np.int64)

    def _release_each(self, ids: list[int]) -> list[tuple[int, bytes]]:
        forgotten: list[tuple[int, bytes]] = []
        for string_id in ids:
            name = self.release(string_id)
            if name is not None:
                forgotten.append((string_id, name))
        return forgotten

    def _intern(self, name: bytes, count: int) -> int:
        """Give a new string an id."""
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
        """Give new strings ids, without references so far."""
        reused = min(len(self._free), len(names))
        for name in names[:reused]:
            self._intern(name, 0)
        fresh = names[reused:]
        self.ids.update(zip(fresh, range(len(self.names), len(self.names) + len(fresh))))
        self.names += fresh
        self.counts.frombytes(bytes(len(fresh) * self.counts.itemsize))

    def _forget(self, string_id: int) -> bytes:
        """Take back an id that nothing refers to."""
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
        """The `count` ids held longest may be reused: no reader can meet them any more."""
        for _ in range(count):
            assert isinstance(self.held, deque), "nothing is on hold"
            string_id = self.held.popleft()
            self.names[string_id] = None
            self._free.append(string_id)
        if not self.held:
            self.held = ()

    def all_ids_of(self, name: bytes) -> list[int]:
        """The ids under which a reader may meet this string, those on hold included."""
        found = [string_id for string_id in self.held if self.names[string_id] == name]
        current = self.ids.get(name)
        return found if current is None else [*found, current]
