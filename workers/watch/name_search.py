"""Which topics match patterns: a walk over a shard's names, a few at a time, so that nobody waits for its end."""

from __future__ import annotations

from collections.abc import Callable
from os.path import commonprefix

from sortedcontainers import SortedList

from topics.engine.core.subject_trie import SubjectTrie
from topics.engine.core.subjects import parse_pattern

NAMES_PER_STEP = 512  # about 2 ms
NODES_PER_STEP = 8192  # of the trie, about 2 ms: 256 patterns of many wildcards make a name cost 1 ms
LAST = "\U0010ffff"  # after every name that begins alike


class NameSearch:
    """All patterns are looked for in one walk. It goes on by names, so topics may come and go meanwhile."""

    def __init__(
        self,
        patterns: list[str],
        prefixes: list[str] | None,
        matches_max: int,
        done: Callable[[dict[str, list[int]]], None],
    ) -> None:
        """ValueError: something is no pattern. `done` gets names, with the places of the patterns that they match."""
        self._trie: SubjectTrie[int] = SubjectTrie()
        for place, text in enumerate(patterns):
            self._trie.insert(text.encode(), place)
        starts = [parse_pattern(text.encode()).literal_prefix.decode() for text in patterns]
        self._after = commonprefix(starts)  # noqa: RUF071 - of characters, not of path components
        self._end = self._after + LAST
        self._inclusive = True
        self._prefixes = tuple(prefixes) if prefixes is not None else None
        self._matches_max = matches_max
        self._done = done
        self._found: dict[str, list[int]] = {}

    def step(self, names: SortedList[str]) -> bool:
        """Search some more names. True when the search has ended and `done` was called."""
        names_left, nodes_max = NAMES_PER_STEP, self._trie.visited + NODES_PER_STEP
        for name in names.irange(self._after, self._end, inclusive=(self._inclusive, True)):
            if len(self._found) > self._matches_max:
                break
            if not names_left or self._trie.visited >= nodes_max:
                return False
            names_left -= 1
            self._after, self._inclusive = name, False
            if self._prefixes is None or name.startswith(self._prefixes):
                places = self._trie.match(name.encode()).plain
                if places:
                    self._found[name] = sorted(places)
        self._done(self._found)
        return True
