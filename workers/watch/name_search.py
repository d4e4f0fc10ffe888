"""Search for topics by name patterns: an incremental scan of a shard's names, a few per step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os.path import commonprefix
from typing import Protocol

from topics.engine.core.subject_trie import SubjectTrie
from topics.engine.core.subjects import parse_pattern

NAMES_PER_STEP = 512  # about 2 ms
NODES_PER_STEP = 8192  # of the trie, about 2 ms: 256 patterns of many wildcards make a name cost 1 ms
LAST = "\U0010ffff"  # sorts after every name with the same prefix


class Names(Protocol):
    def names_between(self, first: str, last: str, *, inclusive: bool) -> Iterable[str]:
        """The names from `first` on, or after it, up to `last`, ascending."""


class NameSearch:
    """Matches all patterns in one scan. It resumes after a name, so topics may be created and dropped meanwhile."""

    def __init__(
        self,
        patterns: list[str],
        prefixes: list[str] | None,
        matches_max: int,
        done: Callable[[dict[str, list[int]]], None],
    ) -> None:
        """`done` gets the matching names, with the indexes of their patterns. ValueError: a pattern is invalid."""
        self._trie: SubjectTrie[int] = SubjectTrie()
        for index, text in enumerate(patterns):
            self._trie.insert(text.encode(), index)
        starts = [parse_pattern(text.encode()).literal_prefix.decode() for text in patterns]
        self._after = commonprefix(starts)  # noqa: RUF071 - of characters, not of path components
        self._end = self._after + LAST
        self._inclusive = True
        self._prefixes = tuple(prefixes) if prefixes is not None else None
        self._matches_max = matches_max
        self._done = done
        self._found: dict[str, list[int]] = {}

    def step(self, names: Names) -> bool:
        """Search some more names. True when the search has ended and `done` was called."""
        names_left, nodes_max = NAMES_PER_STEP, self._trie.visited + NODES_PER_STEP
        for name in names.names_between(self._after, self._end, inclusive=self._inclusive):
            if len(self._found) > self._matches_max:
                break
            if not names_left or self._trie.visited >= nodes_max:
                return False
            names_left -= 1
            self._after, self._inclusive = name, False
            if self._prefixes is None or name.startswith(self._prefixes):
                matching = self._trie.match(name.encode()).plain
                if matching:
                    self._found[name] = sorted(matching)
        self._done(self._found)
        return True
