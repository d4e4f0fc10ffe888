"""Subject patterns and tag matches: which tags a request means. The trie: who subscribed to what matches a subject.

A subject is a tag read as tokens split on `.`. In a pattern the token `*` stands for exactly one token and a final
`>` for one or more. Only a whole token is a wildcard: `a*` is the literal token `a*`, as in NATS. A subject with an
empty token matches no pattern, since a pattern cannot name one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Generic, Literal, TypeVar

from topics.api.limits import (
    MATCHES_CACHED_MAX,
    MATCHES_CACHED_SWEPT,
    SUBJECT_CHANGES_KEPT,
    SUBJECT_PATTERN_BYTES_MAX,
)

SEPARATOR = b"."
ANY_TOKEN = b"*"
ANY_TAIL = b">"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed subject pattern; `parse_pattern` makes it."""

    tokens: tuple[bytes, ...]  # without the final `>`
    has_tail: bool  # whether the pattern ended with `>`
    literal_prefix: bytes  # every match starts with these bytes
    is_literal: bool  # no wildcard: the prefix is the only match

    def matches(self, subject: bytes) -> bool:
        """Whether the pattern covers this subject."""
        if self.is_literal:
            return subject == self.literal_prefix
        # The prefix refuses most subjects without splitting them.
        if not subject.startswith(self.literal_prefix):
            return False
        parts = subject.split(SEPARATOR)
        extra = len(parts) - len(self.tokens)
        if extra < 1 if self.has_tail else extra != 0:
            return False
        if b"" in parts:
            return False
        # A tail leaves more parts than tokens; zip stops at the shorter.
        return all(token in (ANY_TOKEN, part) for token, part in zip(self.tokens, parts))

    def overlaps(self, other: Pattern) -> bool:
        """Whether some subject matches both."""
        if len(self.tokens) == len(other.tokens):
            if self.has_tail != other.has_tail:
                return False
        elif not (self if len(self.tokens) < len(other.tokens) else other).has_tail:
            return False
        for mine, theirs in zip(self.tokens, other.tokens):
            if mine != theirs and ANY_TOKEN not in (mine, theirs):
                return False
        return True

    def matches_some(self, prefix: bytes) -> bool:
        """Whether some subject that starts with these bytes matches."""
        *parts, begun = prefix.split(SEPARATOR)  # the last one may go on
        if b"" in parts or not all(token in (ANY_TOKEN, part) for token, part in zip(self.tokens, parts)):
            return False
        if len(self.tokens) <= len(parts):
            return self.has_tail
        token = self.tokens[len(parts)]
        return token == ANY_TOKEN or token.startswith(begun)


def _shown(text: bytes) -> str:
    return repr(text.decode("utf-8", "replace"))


def parse_pattern(text: bytes) -> Pattern:
    """Parse a subject pattern; ValueError says what is wrong with it."""
    if not text:
        raise ValueError("a subject pattern must not be empty")
    tokens = text.split(SEPARATOR)
    for place, token in enumerate(tokens, start=1):
        if not token:
            raise ValueError(f"token {place} of the subject pattern {_shown(text)} is empty")
        if token == ANY_TAIL and place != len(tokens):
            raise ValueError(
                f"token {place} of the subject pattern {_shown(text)} is '>', which may only come last"
            )
    has_tail = tokens[-1] == ANY_TAIL
    if has_tail:
        tokens.pop()
    literal = tokens.index(ANY_TOKEN) if ANY_TOKEN in tokens else len(tokens)
    is_literal = literal == len(tokens) and not has_tail
    prefix = SEPARATOR.join(tokens[:literal])
    if literal and not is_literal:
        prefix += SEPARATOR  # something always follows, so the separator is certain too
    return Pattern(tuple(tokens), has_tail, prefix, is_literal)


@dataclass(frozen=True, slots=True)
class TagMatch:
    """Which tags are meant. No match ever covers an untagged record.

    Eq: the tag itself. Glob: a literal prefix and a final `*` (alone: every tag). Subject: a subject pattern.
    """

    op: Literal["Eq", "Glob", "Subject"]
    value: bytes
    # Parsed once, because `matches` may run for every tag of a topic.
    pattern: Pattern | None = field(init=False, repr=False, compare=False, default=None)
    prefix: bytes = field(init=False, repr=False, compare=False, default=b"")  # every matching tag starts so

    def __post_init__(self) -> None:
        prefix = self.value
        if self.op == "Glob":
            if not self.value.endswith(b"*"):
                raise ValueError(f"a Glob must end with '*', and {_shown(self.value)} does not")
            prefix = self.value[:-1]
        elif self.op == "Subject":
            pattern = parse_pattern(self.value)
            object.__setattr__(self, "pattern", pattern)
            prefix = pattern.literal_prefix
        elif self.op != "Eq":
            raise ValueError(f"a tag match is Eq, Glob or Subject, not {self.op!r}")
        object.__setattr__(self, "prefix", prefix)

    @property
    def literal(self) -> bytes | None:
        """The only tag this can match, or None when it can match several."""
        if self.op == "Eq":
            return self.value
        if self.pattern is not None and self.pattern.is_literal:
            return self.value
        return None

    def matches(self, tag: bytes | None) -> bool:
        """Whether a record with this tag is meant."""
        if tag is None:
            return False
        if self.pattern is not None:
            return self.pattern.matches(tag)
        if self.op == "Glob":
            return tag.startswith(self.prefix)
        return tag == self.value

    def overlaps(self, other: TagMatch) -> bool:
        """Whether some tag is meant by both."""
        mine, theirs = self.prefix, other.prefix
        if not (mine.startswith(theirs) or theirs.startswith(mine)):
            return False
        if (literal := self.literal) is not None:
            return other.matches(literal)
        if (literal := other.literal) is not None:
            return self.matches(literal)
        if self.pattern is None:
            return other.pattern is None or other.pattern.matches_some(mine)
        return (
            self.pattern.matches_some(theirs)
            if other.pattern is None
            else self.pattern.overlaps(other.pattern)
        )


@dataclass(frozen=True, slots=True)
class TagFilter:
    """Which tags are meant by any of several matches.

    A tag is split once for all patterns. Those with the same wildcards in the same places have one shape, and are looked up
    together by their other tokens: `*.*.paid` and `*.*.sent` cost as much as one of them.
    """

    any_of: tuple[TagMatch, ...]
    _literals: frozenset[bytes] = field(init=False, repr=False, compare=False)
    _globs: tuple[bytes, ...] = field(init=False, repr=False, compare=False)
    _prefixes: tuple[bytes, ...] = field(init=False, repr=False, compare=False)  # of the patterns
    # By how many tokens a subject has, at least: whether it may have more, where tokens are given, and which.
    _shapes: tuple[tuple[int, bool, tuple[int, ...], set[tuple[bytes, ...]]], ...] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        shapes: dict[tuple[int, bool, tuple[int, ...]], set[tuple[bytes, ...]]] = {}
        patterns = [match for match in self.any_of if match.literal is None and match.pattern is not None]
        for match in patterns:
            assert match.pattern is not None
            tokens, has_tail = match.pattern.tokens, match.pattern.has_tail
            given = tuple(i for i, token in enumerate(tokens) if token != ANY_TOKEN)
            shape = len(tokens) + has_tail, has_tail, given
            shapes.setdefault(shape, set()).add(tuple(tokens[i] for i in given))
        literals = (match.literal for match in self.any_of)
        object.__setattr__(self, "_literals", frozenset(name for name in literals if name is not None))
        object.__setattr__(self, "_globs", tuple(m.prefix for m in self.any_of if m.op == "Glob"))
        object.__setattr__(self, "_prefixes", tuple({match.prefix: None for match in patterns}))
        object.__setattr__(self, "_shapes", tuple((*shape, given) for shape, given in shapes.items()))

    @property
    def literal(self) -> bytes | None:
        return self.any_of[0].literal if len(self.any_of) == 1 else None

    @property
    def cost(self) -> int:
        """What a match costs, in microseconds or so, a look at the record included."""
        return 2 + len(self._shapes) // 16

    @property
    def weight(self) -> int:
        """What comparing it costs, about: as the product of both."""
        return 1 + len(self._shapes) + len(self._globs) + len(self._literals) // 4

    def matches(self, tag: bytes | None) -> bool:
        if tag is None:
            return False
        if tag in self._literals or (self._globs and tag.startswith(self._globs)):
            return True
        if not self._shapes or not tag.startswith(self._prefixes):
            return False
        parts = tag.split(SEPARATOR)
        if b"" in parts:
            return False
        count = len(parts)
        for least, may_go_on, given, wanted in self._shapes:
            if (count == least or (may_go_on and count > least)) and (
                tuple([parts[i] for i in given]) in wanted
            ):
                return True
        return False

    def overlaps(self, other: TagFilter) -> bool:
        """Whether some tag is meant by both."""
        if any(map(other.matches, self._literals)) or any(map(self.matches, other._literals)):
            return True
        return (
            (self._shapes != () and other._shapes != () and self._shapes_overlap(other))
            or any(glob.startswith(other._globs) for glob in self._globs)
            or any(glob.startswith(self._globs) for glob in other._globs)
            or self._globs_overlap(other)
            or other._globs_overlap(self)
        )

    def _globs_overlap(self, other: TagFilter) -> bool:
        """Whether some pattern of another filter can mean a tag that starts like one of these."""
        return any(
            match.pattern is not None and match.literal is None and match.pattern.matches_some(glob)
            for glob in self._globs
            for match in other.any_of
        )

    def _shapes_overlap(self, other: TagFilter) -> bool:
        """Two shapes have a subject in common if as many tokens do for both, and where both give one, it is the same."""
        for least, may_go_on, given, wanted in self._shapes:
            for its_least, it_may_go_on, its_given, its_wanted in other._shapes:
                if least != its_least and not (may_go_on if least < its_least else it_may_go_on):
                    continue
                if given == its_given:
                    if not wanted.isdisjoint(its_wanted):
                        return True
                    continue
                both = [i for i in given if i in its_given]
                mine = {tuple([tokens[given.index(i)] for i in both]) for tokens in wanted}
                theirs = (tuple([tokens[its_given.index(i)] for i in both]) for tokens in its_wanted)
                if not mine.isdisjoint(theirs):
                    return True
        return False


def overlap(one: TagFilter | None, other: TagFilter | None) -> bool:
    """Whether some record passes both filters. None passes every record, also an untagged one."""
    return one is None or other is None or one.overlaps(other)


S = TypeVar("S", bound=Hashable)
GroupName = bytes | str  # compared as given: the bytes and the text of a name are two names


@dataclass(frozen=True, slots=True)
class Matched(Generic[S]):
    """Who gets a subject: every plain subscriber, and one member of each group. Who subscribed first stands first."""

    plain: tuple[S, ...]
    groups: Mapping[GroupName, tuple[S, ...]]


class _Subscribers(Generic[S]):
    """Those of one pattern. Each maps to the serial of its subscription, so every dict is ordered by its values."""

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
    """One token of a pattern, and what follows it. Wildcards stand beside the children, so that no token of a
    subject is ever taken for one."""

    __slots__ = ("any_token", "children", "here", "tail")

    def __init__(self) -> None:
        self.children: dict[bytes, _Node[S]] = {}
        self.any_token: _Node[S] | None = None
        self.here: _Subscribers[S] | None = None  # of the pattern that ends with this token
        self.tail: _Subscribers[S] | None = None  # of the pattern that goes on with `>`

    def child(self, token: bytes) -> _Node[S] | None:
        return self.any_token if token == ANY_TOKEN else self.children.get(token)

    def grow(self, token: bytes) -> _Node[S]:
        child = self.child(token)
        if child is None:
            child = _Node()
            if token == ANY_TOKEN:
                self.any_token = child
            else:
                self.children[token] = child
        return child

    def cut(self, token: bytes) -> None:
        if token == ANY_TOKEN:
            self.any_token = None
        else:
            del self.children[token]

    @property
    def is_empty(self) -> bool:
        return self.here is None and self.tail is None and self.any_token is None and not self.children


@dataclass(slots=True)
class _Cached(Generic[S]):
    """A result, and how many changes of the trie it knows of."""

    matched: Matched[S]
    changes_seen: int


@dataclass(slots=True)
class _Change(Generic[S]):
    """One subscription that came, or one that went."""

    pattern: Pattern
    subscriber: S
    group: GroupName | None
    is_added: bool


def _in_order(holders: list[dict[S, int]]) -> tuple[S, ...]:
    """Everybody once, by their first subscription. The dicts are ordered runs, which is what sorting likes best."""
    if len(holders) == 1:
        return tuple(holders[0])
    pairs: list[tuple[S, int]] = []
    for holder in holders:
        pairs += holder.items()
    pairs.sort(key=itemgetter(1))
    return tuple(dict(pairs))  # of several subscriptions of one, the first gives the place


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
    return Matched(_in_order(plain), {name: _in_order(holders) for name, holders in in_order})


def _with_added(matched: Matched[S], changes: list[_Change[S]]) -> Matched[S]:
    """Later subscriptions come last, so this is the result that a walk of the trie would give."""
    plain = dict.fromkeys(matched.plain)
    groups = {name: dict.fromkeys(members) for name, members in matched.groups.items()}
    for change in changes:
        members = plain if change.group is None else groups.setdefault(change.group, {})
        members[change.subscriber] = None
    return Matched(tuple(plain), {name: tuple(members) for name, members in groups.items()})


class SubjectTrie(Generic[S]):
    """Who subscribed to the patterns that match a subject. For one thread.

    A subscription is a pattern, a subscriber and perhaps a group. A match walks the trie level by level, without
    recursion, and meets every node at most once: however the wildcards are nested, it costs no more than looking at
    each pattern. Results are cached by subject. The cache is not searched when a pattern comes or goes, which would make
    every subscription pay for a thousand subjects; the change is noted, and a cached result catches up with the
    notes when it is next asked for: it takes in who came, and is made anew if somebody went.
    """

    def __init__(self) -> None:
        self._root: _Node[S] = _Node()
        self._count = 0
        self._serial = 0  # of the newest subscription
        self._cache: dict[bytes, _Cached[S]] = {}
        self._changes: list[_Change[S]] = []  # the newest
        self._changes_count = 0  # of all that were ever noted

    @property
    def count(self) -> int:
        """How many subscriptions there are."""
        return self._count

    def insert(self, pattern: bytes, subscriber: S, group: GroupName | None = None) -> bool:
        """Add a subscription; False when it is there already, ValueError when the pattern is none."""
        # No subject is shorter than a pattern that matches it, so a longer pattern would match no name.
        if len(pattern) > SUBJECT_PATTERN_BYTES_MAX:
            raise ValueError(f"a subject pattern has at most {SUBJECT_PATTERN_BYTES_MAX} bytes")
        parsed = parse_pattern(pattern)
        node = self._root
        for token in parsed.tokens:
            node = node.grow(token)
        if parsed.has_tail:
            subscribers = node.tail = node.tail or _Subscribers()
        else:
            subscribers = node.here = node.here or _Subscribers()
        self._serial += 1
        if not subscribers.add(subscriber, group, self._serial):
            return False
        self._count += 1
        if not parsed.is_literal or pattern in self._cache:
            self._note(_Change(parsed, subscriber, group, is_added=True))
        return True

    def remove(self, pattern: bytes, subscriber: S, group: GroupName | None = None) -> bool:
        """Take a subscription away; False when there is none like it, also when the pattern could never be one."""
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
        self._forget(pattern, subscriber, group)
        return True

    def match(self, subject: bytes) -> Matched[S]:
        """Who gets this subject. The result is shared and never changes; until a change concerns it, it is the same."""
        cached = self._cache.get(subject)
        if cached is None:
            return self._match_anew(subject)
        if cached.changes_seen == self._changes_count or self._catch_up(subject, cached):
            return cached.matched
        del self._cache[subject]  # a new result goes to the end, furthest from the next sweep
        return self._match_anew(subject)

    def _match_anew(self, subject: bytes) -> Matched[S]:
        parts = subject.split(SEPARATOR)
        if b"" in parts:
            return Matched((), {})
        matched = _merged(self._find(parts))
        self._cache[subject] = _Cached(matched, self._changes_count)
        if len(self._cache) > MATCHES_CACHED_MAX:
            # The newest stay. A new dict, since one emptied from its front is slow to walk from there.
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
            level = below
            if not level:
                break
        found += [node.here for node in level if node.here is not None]
        return found

    def _path(self, tokens: list[bytes]) -> list[_Node[S]] | None:
        """The nodes from the root to that of the last token, or None when it is not there."""
        path = [self._root]
        for token in tokens:
            node = path[-1].child(token)
            if node is None:
                return None
            path.append(node)
        return path

    def _prune(self, path: list[_Node[S]], tokens: list[bytes], has_tail: bool) -> None:
        """The last node of the path lost its last subscriber: nodes that lead nowhere go."""
        node = path.pop()
        if has_tail:
            node.tail = None
        else:
            node.here = None
        for parent, token in zip(reversed(path), reversed(tokens)):
            if not node.is_empty:
                return
            parent.cut(token)
            node = parent

    def _forget(self, pattern: bytes, subscriber: S, group: GroupName | None) -> None:
        """No cached result shows a subscription that went."""
        if not self._count:
            self._cache.clear()
            self._changes.clear()
            return
        parsed = parse_pattern(pattern)
        if parsed.is_literal:
            self._cache.pop(pattern, None)
        else:
            self._note(_Change(parsed, subscriber, group, is_added=False))

    def _note(self, change: _Change[S]) -> None:
        if not self._cache:
            return
        self._changes.append(change)
        self._changes_count += 1
        if len(self._changes) < 2 * SUBJECT_CHANGES_KEPT:
            return
        # Results too old to catch up go now, so that they do not hold on to subscribers that left.
        del self._changes[:-SUBJECT_CHANGES_KEPT]
        oldest = self._changes_count - SUBJECT_CHANGES_KEPT
        self._cache = {key: cached for key, cached in self._cache.items() if cached.changes_seen >= oldest}

    def _catch_up(self, subject: bytes, cached: _Cached[S]) -> bool:
        """Bring a cached result up to date; False when it has to be made anew. The notes reach back to all of them."""
        missed = self._changes_count - cached.changes_seen
        concerning = [change for change in self._changes[-missed:] if change.pattern.matches(subject)]
        if not all(change.is_added for change in concerning):
            return False
        if concerning:
            cached.matched = _with_added(cached.matched, concerning)
        cached.changes_seen = self._changes_count
        return True
