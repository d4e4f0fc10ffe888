"""Row selection: the live rows of a page that pass its filter, up to its limits. Reads only the index."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from topics.api import limits
from topics.engine.commands.topics import FramePage, Page
from topics.engine.core.subjects import TagFilter, TagMatch
from topics.engine.storage.frames import DELETED
from topics.engine.storage.index import Chunk
from topics.engine.topic.log import TopicLog

# Rows examined at once by a read with a tag match: few at first, since one match may be enough.
FILTER_STEP_MIN, FILTER_STEP_MAX = 256, 8192

Picked = npt.NDArray[np.intp]  # row numbers of one chunk, ascending


class RowFilter:
    """The filter of one read: excludes records of its own nodes and records whose tag does not match.

    Rows hold tag ids, and a name may have several ids while deletes wait for their sync. A literal match looks up its ids
    at the start. Any other match is evaluated once for each id that occurs. The rows and names of one read are limited.
    """

    __slots__ = ("_excluded", "_match", "_names", "_names_left", "_only", "_rows_left", "_step", "_verdicts")

    def __init__(self, log: TopicLog, nodes: tuple[bytes, ...], match: TagMatch | TagFilter | None) -> None:
        self._excluded = [i for node in nodes for i in log.nodes.all_ids_of(node)]
        self._match = match
        self._names = log.tags.strings.names
        literal = match.literal if match is not None else None
        self._only = log.tags.strings.all_ids_of(literal) if literal is not None else None
        # Per tag id: 0 not evaluated yet, 1 matches, 2 does not. Untagged rows (id 0) never match.
        several = match is not None and literal is None
        self._verdicts = np.zeros(len(self._names) if several else 1, dtype=np.uint8)
        self._verdicts[0] = 2
        self._rows_left = limits.FILTER_ROWS_MAX
        self._names_left = 2 * limits.FILTER_NAMES_MAX // (match.cost if isinstance(match, TagFilter) else 2)
        self._step = FILTER_STEP_MAX if self._only is not None else FILTER_STEP_MIN

    def stop(self, low: int, high: int, upto: int) -> int:
        """The row up to which to examine at once: beyond the size of the page, since matches may be rare."""
        if self._match is None:
            return upto
        step, self._step = self._step, min(2 * self._step, FILTER_STEP_MAX)
        upto = max(upto, low + step)
        if self._only is None:
            upto = min(upto, low + self._names_left)  # each row may have a different tag
        return min(high, upto, low + self._rows_left)

    @property
    def is_exhausted(self) -> bool:
        """Whether this read has examined as many rows or names as it may."""
        return self._match is not None and (self._rows_left <= 0 or self._names_left <= 0)

    def narrow(self, alive: npt.NDArray[np.bool_], chunk: Chunk, low: int, high: int) -> None:
        """Clear the rows that do not pass in `alive`, the mask of the rows [low, high)."""
        if self._excluded:
            nodes = chunk.rows["node"][low:high]
            for node in self._excluded:
                alive &= nodes != node
        if self._match is None:
            return
        self._rows_left -= high - low
        tags = chunk.rows["tag"][low:high]
        if self._only is None:
            # Live rows only: the tag id of a dead row may have been released.
            rows = np.flatnonzero(alive)
            ids = tags[rows]
            self._evaluate(ids)
            alive[rows] = self._verdicts[ids] == 1
            return
        matching = np.zeros(high - low, dtype=np.bool_)
        for tag in self._only:
            matching |= tags == tag
        alive &= matching

    def _evaluate(self, tags: npt.NDArray[np.uint32]) -> None:
        """Evaluate the match for tag ids that have not occurred before."""
        assert self._match is not None
        unknown = np.unique(tags[self._verdicts[tags] == 0]).tolist()
        matches, names = self._match.matches, self._names
        for tag in unknown:
            self._verdicts[tag] = 1 if matches(names[tag]) else 2
        self._names_left -= len(unknown)


def collect(
    log: TopicLog,
    page: Page | FramePage,
    cursor: int,
    stop: int,
    limit: int,
    budget: int,
    weight: str,
    row_filter: RowFilter | None,
    dead: int = DELETED,
) -> list[tuple[Chunk, Picked]]:
    """Select the rows of a page and set how far it got. `weight` is the column that the byte budget counts."""
    first = max(cursor + 1, log.view.first_seq)
    picked: list[tuple[Chunk, Picked]] = []
    examined = max(cursor, min(first, stop) - 1)
    full = False
    for chunk, low, high in log.spans(first, stop):
        while low < high and not full:
            upto = min(high, low + max(limit * 2, 64))
            if row_filter is not None:
                upto = row_filter.stop(low, high, upto)
            rows, examined_row, limit, budget, full = _pick(
                chunk, low, upto, limit, budget, weight, row_filter, bool(picked), dead
            )
            if len(rows):
                picked.append((chunk, rows))
            examined = chunk.first_seq + examined_row
            low = upto
            if row_filter is not None and row_filter.is_exhausted:
                full = True
        if full:
            break
    if not full:
        examined = max(examined, stop - 1)
    page.scanned = examined - cursor
    page.next_from_seq = max(examined, cursor)
    return picked


def _pick(
    chunk: Chunk,
    low: int,
    high: int,
    limit: int,
    budget: int,
    weight: str,
    row_filter: RowFilter | None,
    has_rows: bool,
    dead: int,
) -> tuple[Picked, int, int, int, bool]:
    """Live rows of [low, high) up to the limits. Returns rows, last examined row, remaining limit and budget, whether it is full."""
    alive = chunk.live(low, high, dead)
    if row_filter is not None:
        row_filter.narrow(alive, chunk, low, high)
    found = np.flatnonzero(alive)
    if not len(found):
        return found, high - 1, limit, budget, False
    sizes = np.cumsum(chunk.rows[weight][low:high][found[:limit]], dtype=np.int64)
    taken = int(np.searchsorted(sizes, budget, side="right"))
    if not taken and not has_rows:
        taken = 1  # a page has at least one record, however large
    rows = found[:taken] + low
    if taken == limit:
        return rows, int(rows[-1]), 0, 0, True
    if taken < len(found):
        # The record that did not fit starts the next page.
        return rows, int(found[taken]) + low - 1, limit - taken, 0, True
    return rows, high - 1, limit - taken, budget - int(sizes[-1]), False
