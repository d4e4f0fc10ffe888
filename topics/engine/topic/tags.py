"""Tag index of one topic: tag → ascending seqs, with lazy removal.

Removing a record passes only its tag id, so its seq stays listed until a read of that tag filters it out. Reads therefore
take `is_live`. It must agree with the calls of `remove`, as a tag that lists as many seqs as it has live records is read
without calling it.

In many topics most tags belong to one record each. Those take one u64 in a column; only a tag with two or more seqs has its
own array.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, repeat
from typing import cast

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedList

from topics.engine.core.subjects import TagMatch
from topics.engine.core.tasks import drain
from topics.engine.storage.strings import Ids, StringTable

Seqs = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
IsLive = Callable[[Seqs], Mask]

# Seqs a read checks at first; doubled while all of them are dead.
_CHUNK = 64
# A list this long keeps its dead head and stores the offset of its first live seq; a shorter one is cheap to shift.
_HEAD_MIN = 512
# Dead seqs a list may have beyond its live count before it must be compacted.
_SLACK = 16
# Names that a scan reads, or sorts, at a time; and the cost of sorting one, in microseconds.
_BATCH = 128
_INDEX_COST = 3
# Added or removed names that may wait to be sorted.
_CHANGES_MAX = 4096
# Names or rows listed by one step of loading: about a millisecond.
LOAD_STEP = 1024
# Below this many ids a plain loop beats the overhead of the numpy calls.
_LOOP_MAX = 64


@dataclass(frozen=True, slots=True)
class LoadPart:
    """The tags of one segment: row i is the record `first_seq + i`."""

    first_seq: int
    tag_ids: Ids  # local ids per row, 0 for none
    names: list[bytes]  # local id i is names[i - 1]
    live: Mask


class _SortedNames:
    """The names of a StringTable in sorted order, maintained in bounded steps.

    The first query starts sorting the existing names, by id. Names below `_indexed` that are added or removed are queued for
    the next query; beyond a bound each change applies two of the queue, so the queue cannot grow.
    """

    __slots__ = ("_applied", "_changes", "_indexed", "_keys", "_strings")

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings
        self._keys: SortedList[bytes] | None = None  # None until the first query
        self._indexed = 0  # ids below this have been sorted
        self._changes: deque[bytes] | tuple[()] = ()  # no deque while it is empty, as in StringTable
        self._applied = 0  # total number of changes applied

    def changed(self, name: bytes, tag_id: int) -> None:
        """A name was added or removed."""
        if tag_id >= self._indexed:
            return
        if isinstance(self._changes, tuple):
            self._changes = deque()
        self._changes.append(name)
        if len(self._changes) > _CHANGES_MAX:
            self._apply_changes(2)

    def target(self) -> tuple[int, int]:
        """The progress at which all current names are sorted."""
        return len(self._strings.names), self._applied + len(self._changes)

    def is_behind(self, target: tuple[int, int]) -> bool:
        return self._indexed < target[0] or self._applied < target[1]

    def index_more(self, limit: int, target: tuple[int, int]) -> int:
        """Sort up to `limit` more names towards a target; returns how many.

        Names added after the target was taken are left: with enough of them its changes would never be reached.
        """
        names, ids, first = self._strings.names, self._strings.ids, self._indexed
        if self._keys is None:
            self._keys = SortedList()
        keys, stale = self._keys, bool(self._changes)
        if first < target[0]:
            stop = min(first + limit, target[0])
            numbered = enumerate(names[first:stop], first)
            # A name may have two ids while readers may still use the older one. And it may already be sorted, if its
            # removal is still queued.
            fresh = [name for at, name in numbered if name is not None and ids.get(name) == at]
            keys.update([name for name in fresh if name not in keys] if stale else fresh)
            self._indexed = stop
            return stop - first
        return self._apply_changes(limit)

    def _apply_changes(self, limit: int) -> int:
        keys, ids, changes = self._keys, self._strings.ids, self._changes
        assert keys is not None, "no names indexed yet"
        count = min(limit, len(changes))
        for _ in range(count):
            assert isinstance(changes, deque)
            name = changes.popleft()
            self._applied += 1
            # It may have been added and removed several times: only its present state matters.
            if not 0 < ids.get(name, 0) < self._indexed:
                keys.discard(name)
            elif name not in keys:
                keys.add(name)
        if not changes:
            self._changes = ()
        return count

    def part(self, after: bytes | None, prefix: bytes, limit: int) -> list[bytes]:
        """Up to `limit` names with this prefix, ascending, greater than `after`."""
        assert self._keys is not None, "no names indexed yet"
        stop = _after_prefix(prefix)
        if after is not None and after >= prefix:
            found = self._keys.irange(after, stop, inclusive=(False, False))
        else:
            found = self._keys.irange(prefix, stop, inclusive=(True, False))
        return list(islice(found, limit))


class TagIndex:
    """The seqs of each tag. A tag is in the index exactly as long as it has a live record.

    For each tag id either `_single` has its only listed seq, or `_lists` has an array of them (and `_single` is 0).
    `_heads` has the number of entries at the start of a list that are known to be dead.
    """

    __slots__ = ("_heads", "_lists", "_overdue", "_single", "_sorted", "strings")

    def __init__(self, *, hold: bool = False) -> None:
        self.strings = StringTable(hold=hold)
        self._single: array[int] = array("Q", [0])
        self._lists: list[array[int] | None] = [None]
        self._heads: dict[int, int] = {}
        self._overdue: dict[int, None] = {}  # an ordered set: sweeps must be deterministic
        self._sorted = _SortedNames(self.strings)

    def __len__(self) -> int:
        """The number of tags with a live record."""
        return len(self.strings)

    # Writing

    def add(self, seq: int, tag: bytes | None) -> int:
        """Add a live record, with a seq above all others. Returns the tag id, 0 for no tag."""
        if tag is None:
            return 0
        tag_id = self.strings.add(tag)
        if self.strings.counts[tag_id] == 1:
            self._add_first(seq, tag_id, tag)
            return tag_id
        seqs = self._lists[tag_id]
        if seqs is None:
            self._add_second(seq, tag_id)
        else:
            seqs.append(seq)
        return tag_id

    def add_batch(self, first_seq: int, tags: Sequence[bytes | None]) -> list[int]:
        """Add live records with consecutive seqs from `first_seq`. Returns their tag ids, 0 for no tag."""
        # Looking them all up first is faster: the cache misses of the lookups overlap.
        # The cast is for None, which is never a key.
        find = cast("Callable[[bytes | None, int], int]", self.strings.ids.get)
        out = list(map(find, tags, repeat(0)))
        counts = self.strings.counts
        lists = self._lists
        seq = first_seq
        for tag_id in out:
            if tag_id:
                counts[tag_id] += 1
                seqs = lists[tag_id]
                if seqs is None:
                    self._add_second(seq, tag_id)
                else:
                    seqs.append(seq)
            else:
                # No tag, or one that was unknown when the batch began.
                at = seq - first_seq
                out[at] = self.add(seq, tags[at])
            seq += 1
        return out

    def load(self, parts: list[LoadPart]) -> list[Ids]:
        """Fill an empty index from segments in ascending order.

        Only live rows are listed and counted. Returns the tag ids of the rows of each part, 0 for dead and untagged ones.
        """
        if len(self.strings):
            raise ValueError("only an empty tag index can be loaded")
        ids: list[Ids] = []
        next_seq = 0
        for part in parts:
            if part.first_seq < next_seq:
                raise ValueError(f"the part at seq {part.first_seq} begins before seq {next_seq}")
            next_seq = part.first_seq + part.tag_ids.size
            ids.append(drain(self.load_steps(part)))
        return ids

    def load_steps(self, part: LoadPart) -> Generator[int, None, Ids]:
        """Load the next segment in steps; yields the number of names or rows of each step."""
        local = np.where(part.live, part.tag_ids, 0)
        counts = np.bincount(local, minlength=len(part.names) + 1)
        if counts.size > len(part.names) + 1:
            raise ValueError(f"the part at seq {part.first_seq} has a tag id without a name")
        known = np.zeros(counts.size, np.uint32)
        for first in range(0, len(part.names), LOAD_STEP):
            names = part.names[first : first + LOAD_STEP]
            known[first + 1 : first + 1 + len(names)] = self.strings.add_counted(
                names, counts[first + 1 : first + 1 + len(names)]
            )
            yield len(names)
        missing = len(self.strings.names) - len(self._lists)
        self._single.frombytes(bytes(missing * self._single.itemsize))
        self._lists += [None] * missing
        ids: Ids = known[local]
        for first in range(0, ids.size, LOAD_STEP):
            self._list_rows(part.first_seq + first, ids[first : first + LOAD_STEP])
            yield min(LOAD_STEP, ids.size - first)
        return ids

    def remove(self, tag_id: int) -> None:
        """A live record with this tag id died; 0 is ignored."""
        name = self.strings.release(tag_id)
        if name is None:
            self._note_overdue(tag_id)
        else:
            self._forget(tag_id, name)

    def remove_many(self, tag_ids: Ids) -> None:
        """Live records with these tag ids, one entry per record, died; zeros are ignored."""
        if tag_ids.size < _LOOP_MAX:
            for tag_id in tag_ids.tolist():
                self.remove(tag_id)
            return
        for tag_id, name in self.strings.release_many(tag_ids):
            self._forget(tag_id, name)
        self._note_all_overdue(tag_ids)

    @property
    def overdue(self) -> int:
        """The number of tags that list too many dead seqs and await a read or a sweep."""
        return len(self._overdue)

    def sweep(self, is_live: IsLive, limit: int) -> int:
        """Compact up to `limit` overdue tags; returns how many remain.

        Without this, a tag that is never read would list every seq it ever had.
        """
        for _ in range(min(limit, len(self._overdue))):
            tag_id, _unused = self._overdue.popitem()
            self._listed(tag_id, is_live)
        return len(self._overdue)

    # Reading

    def count(self, tag: bytes) -> int:
        """The number of live records with this tag."""
        return self.strings.count(self.strings.id_of(tag))

    def seqs(self, tag: bytes, is_live: IsLive) -> Seqs:
        """The live seqs of this tag, ascending. The caller owns the array."""
        tag_id = self.strings.id_of(tag)
        seqs = self._lists[tag_id]
        if seqs is None:
            return self._single_seqs(tag_id)
        if self._all_live(tag_id, seqs):
            return _copy(seqs, self._heads.get(tag_id, 0), len(seqs))
        return self._compact(tag_id, seqs, is_live)

    def single_seq(self, tag: bytes) -> int:
        """The live seq of a tag with a single record; 0: there is none, or perhaps several."""
        return self._single[self.strings.id_of(tag)]

    def first(self, tag: bytes, is_live: IsLive) -> int:
        """The oldest live seq of this tag, 0 when there is none."""
        return self.first_at_or_after(tag, 0, is_live)

    def last(self, tag: bytes, is_live: IsLive) -> int:
        """The newest live seq of this tag, 0 when there is none."""
        tag_id = self.strings.id_of(tag)
        seqs = self._listed(tag_id, is_live)
        if seqs is None:
            return self._single[tag_id]
        return self._search_down(tag_id, seqs, len(seqs) - 1, is_live)

    def first_at_or_after(self, tag: bytes, seq: int, is_live: IsLive) -> int:
        """The oldest live seq of this tag that is not below `seq`, 0 when there is none."""
        tag_id = self.strings.id_of(tag)
        seqs = self._listed(tag_id, is_live)
        if seqs is None:
            single = self._single[tag_id]
            return single if single >= seq else 0
        start = bisect_left(seqs, seq, self._heads.get(tag_id, 0))
        return self._search_up(tag_id, seqs, start, is_live)

    def last_at_or_before(self, tag: bytes, seq: int, is_live: IsLive) -> int:
        """The newest live seq of this tag that is not above `seq`, 0 when there is none."""
        tag_id = self.strings.id_of(tag)
        seqs = self._listed(tag_id, is_live)
        if seqs is None:
            single = self._single[tag_id]
            return single if single <= seq else 0
        above = bisect_right(seqs, seq, self._heads.get(tag_id, 0))
        return self._search_down(tag_id, seqs, above - 1, is_live)

    def exceeding(self, keep: int, first_id: int, limit: int) -> tuple[list[bytes], int | None]:
        """Tags with more than `keep` live records among `limit` ids from `first_id`; and the next id to check, or None."""
        counts = np.array(self.strings.counts[first_id : first_id + limit], dtype=np.uint32)
        names = [self.strings.name(first_id + i) for i in np.flatnonzero(counts > keep).tolist()]
        next_id = first_id + limit
        found = [name for name in names if name is not None]
        return found, next_id if next_id < len(self.strings.counts) else None

    def surplus(self, tag: bytes, keep: int, is_live: IsLive, limit: int | None = None) -> Seqs:
        """The oldest `limit` of the live seqs of this tag beyond its newest `keep`, ascending. Removes nothing."""
        tag_id = self.strings.id_of(tag)
        excess = self.strings.count(tag_id) - max(keep, 0)
        if limit is not None:
            excess = min(excess, limit)
        if excess <= 0:
            return np.zeros(0, np.uint64)
        seqs = self._listed(tag_id, is_live)
        if seqs is None:
            return self._single_seqs(tag_id)
        if self._all_live(tag_id, seqs):
            head = self._heads.get(tag_id, 0)
            return _copy(seqs, head, head + excess)
        return self._oldest(tag_id, seqs, excess, is_live)

    def names(self, match: TagMatch, after: bytes = b"", limit: int | None = None) -> list[bytes]:
        """Up to `limit` matching tags greater than `after`, ascending."""
        found: list[bytes] = []
        for _, names in scan(lambda: self, match, after):
            found += names
            if limit is not None and len(found) >= limit:
                return found[:limit]
        return found

    def check(self, rows: Sequence[tuple[int, bytes | None]]) -> None:
        """For tests: assert that exactly these live records (seq and tag, ascending) are indexed."""
        model: dict[bytes, list[int]] = {}
        for seq, tag in rows:
            if tag is not None:
                model.setdefault(tag, []).append(seq)
        strings = self.strings
        assert sorted(strings.ids) == sorted(model), "held tags differ from the tags of live records"
        for tag, tag_id in strings.ids.items():
            assert strings.name(tag_id) == tag, f"id {tag_id} does not lead back to {tag!r}"
            assert strings.count(tag_id) == len(model[tag]), f"count of {tag!r}"
            listed = self._all_listed(tag_id)
            assert all(a < b for a, b in pairwise(listed)), f"seqs of {tag!r} do not ascend"
            kept = dict.fromkeys(listed)
            assert all(seq in kept for seq in model[tag]), f"a live seq of {tag!r} is not listed"
            too_long = len(listed) > 2 * len(model[tag]) + _SLACK
            assert not too_long or tag_id in self._overdue, (
                f"{tag!r} lists {len(listed)} seqs and is not overdue"
            )
        used = dict.fromkeys(strings.ids.values())
        assert all(tag_id in used for tag_id, seqs in enumerate(self._lists) if seqs is not None), (
            "a list without a tag"
        )
        assert all(self._lists[tag_id] is not None for tag_id in self._heads), "a head without a list"
        assert all(tag_id in used for tag_id, seq in enumerate(self._single) if seq), (
            "a single seq without a tag"
        )
        assert self.names(TagMatch("Glob", b"*")) == sorted(model), "sorted names differ"

    # Adding

    def _add_first(self, seq: int, tag_id: int, tag: bytes) -> None:
        """Add the first record of a tag."""
        if tag_id < len(self._single):
            self._single[tag_id] = seq
        else:
            self._single.append(seq)
            self._lists.append(None)
        self._sorted.changed(tag, tag_id)

    def _add_second(self, seq: int, tag_id: int) -> None:
        """Add a record to a tag that has no list yet."""
        before = self._single[tag_id]
        if before:
            self._lists[tag_id] = array("Q", (before, seq))
            self._single[tag_id] = 0
        else:
            self._single[tag_id] = seq

    def _list_rows(self, first_seq: int, ids: Ids) -> None:
        """List the rows from `first_seq` on under their tag ids (0: no tag), which are already counted."""
        rows = np.flatnonzero(ids)
        ids, seqs = ids[rows], rows.astype(np.uint64) + np.uint64(first_seq)
        # Often most tags have a single record: those need no loop.
        is_only = np.frombuffer(self.strings.counts, np.uint32)[ids] == 1
        np.frombuffer(self._single, np.uint64)[ids[is_only]] = seqs[is_only]
        ids, seqs = ids[~is_only], seqs[~is_only]
        order = np.argsort(ids, kind="stable")
        found, starts = np.unique(ids[order], return_index=True)
        by_tag, stops = seqs[order], [*starts[1:].tolist(), ids.size]
        for tag_id, start, stop in zip(found.tolist(), starts.tolist(), stops):
            several = array("Q", by_tag[start:stop].tobytes())
            listed = self._lists[tag_id]
            if listed is not None:
                listed += several
            elif self._single[tag_id] or stop - start > 1:
                before = self._single[tag_id]
                self._lists[tag_id] = array("Q", (before,)) + several if before else several
                self._single[tag_id] = 0
            else:
                self._single[tag_id] = several[0]

    # Removing

    def _forget(self, tag_id: int, name: bytes) -> None:
        """Drop a tag whose last live record died."""
        if self._lists[tag_id] is None:
            self._single[tag_id] = 0
        else:
            self._lists[tag_id] = None
            self._heads.pop(tag_id, None)
            self._overdue.pop(tag_id, None)
        self._sorted.changed(name, tag_id)

    def _is_too_long(self, tag_id: int, seqs: array[int]) -> bool:
        return len(seqs) > 2 * self.strings.counts[tag_id] + _SLACK

    def _note_overdue(self, tag_id: int) -> None:
        seqs = self._lists[tag_id]
        if seqs is not None and self._is_too_long(tag_id, seqs):
            self._overdue[tag_id] = None

    def _note_all_overdue(self, tag_ids: Ids) -> None:
        touched = np.unique(tag_ids)
        counts = np.frombuffer(self.strings.counts, np.uint32)[touched].astype(np.int64)
        kept = counts > 0
        lists = self._lists
        for tag_id, bound in zip(touched[kept].tolist(), (2 * counts[kept] + _SLACK).tolist()):
            seqs = lists[tag_id]
            if seqs is not None and len(seqs) > bound:
                self._overdue[tag_id] = None

    # Lists

    def _listed(self, tag_id: int, is_live: IsLive) -> array[int] | None:
        """The list of a tag, compacted if it is overdue; None if the tag uses `_single`."""
        seqs = self._lists[tag_id]
        if seqs is not None and self._is_too_long(tag_id, seqs):
            self._compact(tag_id, seqs, is_live)
            return self._lists[tag_id]
        return seqs

    def _all_listed(self, tag_id: int) -> list[int]:
        """Every listed seq of a tag, including dead ones."""
        seqs = self._lists[tag_id]
        if seqs is None:
            return [self._single[tag_id]] if self._single[tag_id] else []
        assert not self._single[tag_id], f"tag id {tag_id} has a single seq and a list"
        return seqs[self._heads.get(tag_id, 0) :].tolist()

    def _all_live(self, tag_id: int, seqs: array[int]) -> bool:
        """Whether no dead seq is listed. Every live seq is, so comparing the counts is enough."""
        return len(seqs) - self._heads.get(tag_id, 0) == self.strings.counts[tag_id]

    def _single_seqs(self, tag_id: int) -> Seqs:
        single = self._single[tag_id]
        return np.array([single] if single else [], np.uint64)

    def _compact(self, tag_id: int, seqs: array[int], is_live: IsLive) -> Seqs:
        """Rewrite a list without its dead seqs; returns the live ones."""
        listed = _copy(seqs, self._heads.get(tag_id, 0), len(seqs))
        live = listed[is_live(listed)]
        # A new array: one that shrinks in place may keep its memory.
        kept: array[int] = array("Q", live.tobytes())
        self._lists[tag_id] = kept
        self._heads.pop(tag_id, None)
        self._overdue.pop(tag_id, None)
        self._normalize(tag_id, kept)
        return live

    def _normalize(self, tag_id: int, seqs: array[int]) -> None:
        """Convert a list that has shrunk to its cheapest form."""
        head = self._heads.get(tag_id, 0)
        left = len(seqs) - head
        if left <= 1:
            self._single[tag_id] = seqs[head] if left else 0
            self._lists[tag_id] = None
            self._heads.pop(tag_id, None)
            self._overdue.pop(tag_id, None)
        elif head and (len(seqs) < _HEAD_MIN or 2 * head > len(seqs)):
            # Shifts at most as many entries as have died, so it is cheap on average.
            del seqs[:head]
            del self._heads[tag_id]

    def _drop(self, tag_id: int, seqs: array[int], start: int, stop: int) -> None:
        """Drop a dead run [start, stop) of a list if that is cheap enough."""
        if start >= stop:
            return
        if start == self._heads.get(tag_id, 0):
            self._heads[tag_id] = stop
        elif stop == len(seqs) or stop - start >= _CHUNK:
            del seqs[start:stop]
        else:
            return
        self._normalize(tag_id, seqs)

    def _search_up(self, tag_id: int, seqs: array[int], start: int, is_live: IsLive) -> int:
        """The first live seq at position `start` or above, 0 when there is none."""
        if start == len(seqs):
            return 0
        if self._all_live(tag_id, seqs):
            return seqs[start]
        at, size, found = start, _CHUNK, 0
        while at < len(seqs):
            chunk = _copy(seqs, at, min(at + size, len(seqs)))
            live = is_live(chunk)
            step = int(live.argmax())
            if live[step]:
                at += step
                found = seqs[at]
                break
            at += chunk.size
            size *= 2
        self._drop(tag_id, seqs, start, at)
        return found

    def _search_down(self, tag_id: int, seqs: array[int], start: int, is_live: IsLive) -> int:
        """The last live seq at position `start` or below, 0 when there is none."""
        head = self._heads.get(tag_id, 0)
        if start < head:
            return 0
        if self._all_live(tag_id, seqs):
            return seqs[start]
        stop, size, found = start + 1, _CHUNK, 0
        while stop > head:
            chunk = _copy(seqs, max(stop - size, head), stop)
            live = is_live(chunk)[::-1]
            step = int(live.argmax())
            if live[step]:
                stop -= step
                found = seqs[stop - 1]
                break
            stop -= chunk.size
            size *= 2
        self._drop(tag_id, seqs, stop, start + 1)
        return found

    def _oldest(self, tag_id: int, seqs: array[int], wanted: int, is_live: IsLive) -> Seqs:
        """The first `wanted` live seqs of a list."""
        at = head = self._heads.get(tag_id, 0)
        # Few at first: if cap_per_tag removes the oldest with each write, only one dead seq precedes it.
        size = 2 * wanted + 2
        found: list[Seqs] = []
        while wanted > 0 and at < len(seqs):
            chunk = _copy(seqs, at, min(at + size, len(seqs)))
            live = chunk[is_live(chunk)][:wanted]
            if live.size:
                found.append(live)
                wanted -= live.size
            at += chunk.size
            size *= 2
        if not found:
            return np.zeros(0, np.uint64)
        self._drop(tag_id, seqs, head, bisect_left(seqs, int(found[0][0]), head))
        return np.concatenate(found)


def scan(
    index_of: Callable[[], TagIndex], match: TagMatch, after: bytes = b""
) -> Iterator[tuple[int, list[bytes]]]:
    """The matching tags greater than `after`, ascending, in batches, each with its cost in microseconds.

    Between two batches the index may change, or be replaced. A tag that has a live record all the time is found; one that is
    added or removed in the meantime may or may not be.
    """
    literal = match.literal
    if literal is not None:
        held = match.matches(literal) and literal in index_of().strings.ids
        yield 1, [literal] if held and (not after or literal > after) else []
        return
    index: TagIndex | None = None
    target = (0, 0)
    last = after or None  # None, as the empty tag is a tag too
    while True:
        if index is not index_of():
            index = index_of()
            target = index._sorted.target()
        if index._sorted.is_behind(target):
            yield index._sorted.index_more(_BATCH, target) * _INDEX_COST, []
            continue
        names = index._sorted.part(last, match.prefix, _BATCH)
        units = len(names) // 4
        found = names
        if match.pattern is not None:  # a Glob is only its prefix
            found = list(filter(match.pattern.matches, names))
            units += len(names) + sum(map(len, names)) // 16
        yield units, found
        if len(names) < _BATCH:
            return
        last = names[-1]


def _copy(seqs: array[int], start: int, stop: int) -> Seqs:
    """A copy, because an array cannot grow while a view of it exists."""
    return np.frombuffer(seqs, np.uint64, stop - start, 8 * start).copy()


def _after_prefix(prefix: bytes) -> bytes | None:
    """The smallest bytes above everything with this prefix; None when there are none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None
