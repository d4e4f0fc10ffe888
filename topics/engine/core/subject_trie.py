"""Subject trie: finds the subscriptions whose patterns match a subject."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Generic, TypeVar

from topics.api.limits import (
    MATCHES_CACHED_MAX,
    MATCHES_CACHED_SWEPT,
    SUBJECT_CHANGES_KEPT,
    SUBJECT_PATTERN_BYTES_MAX,
)
from topics.engine.core.subjects import ANY_TAIL, ANY_TOKEN, SEPARATOR, Pattern, parse_pattern

S = TypeVar("S", bound=Hashable)
GroupName = bytes | str  # not converted: b"a" and "a" are different groups


@dataclass(frozen=True, slots=True)
class Matched(Generic[S]):
    """The subscribers of a subject: all plain ones, and the members of each group, in order of subscription."""

    plain: tuple[S, ...]
    groups: Mapping[GroupName, tuple[S, ...]]


class _Subscribers(Generic[S]):
    """The subscribers of one pattern, each with the serial of its subscription. Every dict is ordered by its values."""

    __slots__ = ("groups", "plain")

    def __init__(self) -> None:
        self.plain: dict[S, int] = {}
        self.groups: dict[GroupName, dict[S, int]] = {}

    def add(self, subscriber: S, group: GroupName | None, serial: int) -> bool:
        members = self.plain if group is None else self.groups.setdefault(group, {})
        return members.setdefault(subscriber, serial) == serial

    def discard(self, subscriber: S, group: GroupName | None) -> bool:
        members = self.plain if group is None else self.groups.get(group, {})
        if members.pop(subscriber, None) is None:
            return False
        if group is not None and not members:
            del self.groups[group]
        return True

    @property
    def is_empty(self) -> bool:
        return not self.plain and not self.groups


class _Node(Generic[S]):
    """One token of a pattern and its continuations. Wildcards are kept apart from the literal children, so a token of a
    subject is never taken for a wildcard."""

    __slots__ = ("any_token", "children", "here", "tail")

    def __init__(self) -> None:
        self.children: dict[bytes, _Node[S]] = {}
        self.any_token: _Node[S] | None = None
        self.here: _Subscribers[S] | None = None  # the pattern ends with this token
        self.tail: _Subscribers[S] | None = None  # the pattern continues with `>`

    def child(self, token: bytes) -> _Node[S] | None:
        return self.any_token if token == ANY_TOKEN else self.children.get(token)

    def child_or_new(self, token: bytes) -> _Node[S]:
        child = self.child(token)
        if child is None:
            child = _Node()
            if token == ANY_TOKEN:
                self.any_token = child
            else:
                self.children[token] = child
        return child

    def remove_child(self, token: bytes) -> None:
        if token == ANY_TOKEN:
            self.any_token = None
        else:
            del self.children[token]

    @property
    def is_empty(self) -> bool:
        return self.here is None and self.tail is None and self.any_token is None and not self.children


@dataclass(slots=True)
class _Cached(Generic[S]):
    """A cached result, and how many changes of the trie it reflects."""

    matched: Matched[S]
    changes_seen: int


@dataclass(slots=True)
class _Change(Generic[S]):
    """A subscription that was added or removed."""

    pattern: Pattern
    subscriber: S
    group: GroupName | None
    is_added: bool


def _in_order(serials: list[dict[S, int]]) -> tuple[S, ...]:
    """Each subscriber once, in order of its first subscription. The dicts are sorted runs, which sort fast."""
    if len(serials) == 1:
        return tuple(serials[0])
    pairs: list[tuple[S, int]] = []
    for some in serials:
        pairs += some.items()
    pairs.sort(key=itemgetter(1))
    return tuple(dict(pairs))  # a dict keeps the position of the first


def _first_serial(group: tuple[GroupName, list[dict[S, int]]]) -> int:
    return min([next(iter(members.values())) for members in group[1]])


def _merged(found: list[_Subscribers[S]]) -> Matched[S]:
    plain: list[dict[S, int]] = []
    groups: dict[GroupName, list[dict[S, int]]] = {}
    for subscribers in found:
        if subscribers.plain:
            plain.append(subscribers.plain)
        for name, members in subscribers.groups.items():
            groups.setdefault(name, []).append(members)
    in_order = sorted(groups.items(), key=_first_serial) if len(groups) > 1 else groups.items()
    return Matched(_in_order(plain), {name: _in_order(members) for name, members in in_order})


def _with_added(matched: Matched[S], changes: list[_Change[S]]) -> Matched[S]:
    """The result with new subscriptions appended. New ones come last, so a walk of the trie would return the same."""
    plain = dict.fromkeys(matched.plain)
    groups = {name: dict.fromkeys(members) for name, members in matched.groups.items()}
    for change in changes:
        members = plain if change.group is None else groups.setdefault(change.group, {})
        members[change.subscriber] = None
    return Matched(tuple(plain), {name: tuple(members) for name, members in groups.items()})


class SubjectTrie(Generic[S]):
    """Subscriptions by pattern; not thread-safe.

    A subscription is a pattern, a subscriber and optionally a group. A match walks the trie level by level, without
    recursion, and visits each node at most once: with any nesting of wildcards it costs no more than testing each pattern.
    Results are cached by subject. A new or removed subscription does not search the cache, which may hold thousands of
    subjects. It is appended to a change list, and a cached result is brought up to date when it is next used: added
    subscribers are appended, and after a removal the result is computed again.
    """

    def __init__(self) -> None:
        self._root: _Node[S] = _Node()
        self.visited = 0  # nodes visited by all matches so far, as a measure of their cost
        self._count = 0
        self._serial = 0  # of the newest subscription
        self._cache: dict[bytes, _Cached[S]] = {}
        self._changes: list[_Change[S]] = []  # the newest ones
        self._changes_count = 0  # all that were ever recorded

    @property
    def count(self) -> int:
        """Number of subscriptions."""
        return self._count

    def insert(self, pattern: bytes, subscriber: S, group: GroupName | None = None) -> bool:
        """Add a subscription; False if it exists, ValueError if the pattern is invalid."""
        # A matching subject is at least as long as its pattern, so a longer pattern could not match any name.
        if len(pattern) > SUBJECT_PATTERN_BYTES_MAX:
            raise ValueError(f"a subject pattern has at most {SUBJECT_PATTERN_BYTES_MAX} bytes")
        parsed = parse_pattern(pattern)
        node = self._root
        for token in parsed.tokens:
            node = node.child_or_new(token)
        if parsed.has_tail:
            subscribers = node.tail = node.tail or _Subscribers()
        else:
            subscribers = node.here = node.here or _Subscribers()
        self._serial += 1
        if not subscribers.add(subscriber, group, self._serial):
            return False
        self._count += 1
        if not parsed.is_literal or pattern in self._cache:
            self._record(_Change(parsed, subscriber, group, is_added=True))
        return True

    def remove(self, pattern: bytes, subscriber: S, group: GroupName | None = None) -> bool:
        """Remove a subscription; False if there is none, or if the pattern is invalid."""
        tokens = pattern.split(SEPARATOR)
        has_tail = tokens[-1] == ANY_TAIL
        if has_tail:
            tokens.pop()
        path = self._path(tokens)
        if path is None:
            return False
        subscribers = path[-1].tail if has_tail else path[-1].here
        if subscribers is None or not subscribers.discard(subscriber, group):
            return False
        self._count -= 1
        if subscribers.is_empty:
            self._prune(path, tokens, has_tail)
        self._invalidate(pattern, subscriber, group)
        return True

    def match(self, subject: bytes) -> Matched[S]:
        """The subscribers of a subject. The result is shared and immutable; the same object until a change concerns it."""
        cached = self._cache.get(subject)
        if cached is None:
            return self._compute(subject)
        if cached.changes_seen == self._changes_count or self._catch_up(subject, cached):
            return cached.matched
        del self._cache[subject]  # a new result goes to the end, where it is swept last
        return self._compute(subject)

    def _compute(self, subject: bytes) -> Matched[S]:
        parts = subject.split(SEPARATOR)
        if b"" in parts:
            return Matched((), {})
        matched = _merged(self._find(parts))
        self._cache[subject] = _Cached(matched, self._changes_count)
        if len(self._cache) > MATCHES_CACHED_MAX:
            # Keep the newest. In a new dict, since iterating over one with its first entries deleted is slow.
            kept = islice(self._cache.items(), len(self._cache) - MATCHES_CACHED_SWEPT, None)
            self._cache = dict(kept)
        return matched

    def _find(self, parts: list[bytes]) -> list[_Subscribers[S]]:
        found: list[_Subscribers[S]] = []
        level = [self._root]
        for part in parts:
            below: list[_Node[S]] = []
            for node in level:
                if node.tail is not None:
                    found.append(node.tail)
                if (child := node.children.get(part)) is not None:
                    below.append(child)
                if node.any_token is not None:
                    below.append(node.any_token)
            self.visited += len(level)
            level = below
            if not level:
                break
        found += [node.here for node in level if node.here is not None]
        return found

    def _path(self, tokens: list[bytes]) -> list[_Node[S]] | None:
        """The nodes from the root to the one of the last token, or None if there is no such node."""
        path = [self._root]
        for token in tokens:
            node = path[-1].child(token)
            if node is None:
                return None
            path.append(node)
        return path

    def _prune(self, path: list[_Node[S]], tokens: list[bytes], has_tail: bool) -> None:
        """Remove the subscribers of the last node of the path, and every node that is then empty."""
        node = path.pop()
        if has_tail:
            node.tail = None
        else:
            node.here = None
        for parent, token in zip(reversed(path), reversed(tokens)):
            if not node.is_empty:
                return
            parent.remove_child(token)
            node = parent

    def _invalidate(self, pattern: bytes, subscriber: S, group: GroupName | None) -> None:
        """Make sure that no cached result returns a removed subscription."""
        if not self._count:
            self._cache.clear()
            self._changes.clear()
            return
        parsed = parse_pattern(pattern)
        if parsed.is_literal:
            self._cache.pop(pattern, None)
        else:
            self._record(_Change(parsed, subscriber, group, is_added=False))

    def _record(self, change: _Change[S]) -> None:
        if not self._cache:
            return
        self._changes.append(change)
        self._changes_count += 1
        if len(self._changes) < 2 * SUBJECT_CHANGES_KEPT:
            return
        # Drop results that are too old to catch up, so that they do not keep removed subscribers alive.
        del self._changes[:-SUBJECT_CHANGES_KEPT]
        oldest = self._changes_count - SUBJECT_CHANGES_KEPT
        self._cache = {key: cached for key, cached in self._cache.items() if cached.changes_seen >= oldest}

    def _catch_up(self, subject: bytes, cached: _Cached[S]) -> bool:
        """Bring a cached result up to date; False if it has to be computed again. The changes it missed are all kept."""
        missed = self._changes_count - cached.changes_seen
        relevant = [change for change in self._changes[-missed:] if change.pattern.matches(subject)]
        if not all(change.is_added for change in relevant):
            return False
        if relevant:
            cached.matched = _with_added(cached.matched, relevant)
        cached.changes_seen = self._changes_count
        return True
