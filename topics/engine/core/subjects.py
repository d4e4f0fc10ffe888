"""Subject patterns and tag matches: which tags a request selects.

A subject is a tag split into tokens at `.`. In a pattern the token `*` stands for exactly one token and a final `>` for
one or more. Only a whole token is a wildcard: `a*` is the literal token `a*`, as in NATS. A subject with an empty token
matches no pattern, since patterns cannot contain empty tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

SEPARATOR = b"."
ANY_TOKEN = b"*"
ANY_TAIL = b">"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A subject pattern, as returned by `parse_pattern`."""

    tokens: tuple[bytes, ...]  # without the final `>`
    has_tail: bool  # whether the pattern ended with `>`
    literal_prefix: bytes  # every match starts with these bytes
    is_literal: bool  # no wildcard: the prefix is the only match

    def matches(self, subject: bytes) -> bool:
        """Whether the pattern matches this subject."""
        if self.is_literal:
            return subject == self.literal_prefix
        # The prefix rules out most subjects without splitting them.
        if not subject.startswith(self.literal_prefix):
            return False
        parts = subject.split(SEPARATOR)
        extra = len(parts) - len(self.tokens)
        if extra < 1 if self.has_tail else extra != 0:
            return False
        if b"" in parts:
            return False
        # With a tail there are more parts than tokens; zip stops at the last token.
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

    def can_match_prefix(self, prefix: bytes) -> bool:
        """Whether some subject that starts with these bytes matches."""
        *parts, partial = prefix.split(SEPARATOR)  # the last token may be incomplete
        if b"" in parts or not all(token in (ANY_TOKEN, part) for token, part in zip(self.tokens, parts)):
            return False
        if len(self.tokens) <= len(parts):
            return self.has_tail
        token = self.tokens[len(parts)]
        return token == ANY_TOKEN or token.startswith(partial)


def _quoted(text: bytes) -> str:
    return repr(text.decode("utf-8", "replace"))


def parse_pattern(text: bytes) -> Pattern:
    """Parse a subject pattern; ValueError says what is wrong with it."""
    if not text:
        raise ValueError("a subject pattern must not be empty")
    tokens = text.split(SEPARATOR)
    for number, token in enumerate(tokens, start=1):
        if not token:
            raise ValueError(f"token {number} of the subject pattern {_quoted(text)} is empty")
        if token == ANY_TAIL and number != len(tokens):
            raise ValueError(
                f"token {number} of the subject pattern {_quoted(text)} is '>', which may only come last"
            )
    has_tail = tokens[-1] == ANY_TAIL
    if has_tail:
        tokens.pop()
    literal = tokens.index(ANY_TOKEN) if ANY_TOKEN in tokens else len(tokens)
    is_literal = literal == len(tokens) and not has_tail
    prefix = SEPARATOR.join(tokens[:literal])
    if literal and not is_literal:
        prefix += SEPARATOR  # a token always follows, so the separator is part of every match
    return Pattern(tuple(tokens), has_tail, prefix, is_literal)


@dataclass(frozen=True, slots=True)
class TagMatch:
    """A condition on the tag of a record. Untagged records never match.

    Eq: this tag. Glob: a literal prefix and a final `*` (`*` alone: every tag). Subject: a subject pattern.
    """

    op: Literal["Eq", "Glob", "Subject"]
    value: bytes
    # Parsed once, because `matches` may run for every tag of a topic.
    pattern: Pattern | None = field(init=False, repr=False, compare=False, default=None)
    prefix: bytes = field(init=False, repr=False, compare=False, default=b"")  # of every matching tag

    def __post_init__(self) -> None:
        prefix = self.value
        if self.op == "Glob":
            if not self.value.endswith(b"*"):
                raise ValueError(f"a Glob must end with '*', and {_quoted(self.value)} does not")
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
        """The only tag this can match; None if it can match several."""
        if self.op == "Eq":
            return self.value
        if self.pattern is not None and self.pattern.is_literal:
            return self.value
        return None

    def matches(self, tag: bytes | None) -> bool:
        """Whether records with this tag match."""
        if tag is None:
            return False
        if self.pattern is not None:
            return self.pattern.matches(tag)
        if self.op == "Glob":
            return tag.startswith(self.prefix)
        return tag == self.value

    def overlaps(self, other: TagMatch) -> bool:
        """Whether some tag matches both."""
        mine, theirs = self.prefix, other.prefix
        if not (mine.startswith(theirs) or theirs.startswith(mine)):
            return False
        if (literal := self.literal) is not None:
            return other.matches(literal)
        if (literal := other.literal) is not None:
            return self.matches(literal)
        if self.pattern is None:
            return other.pattern is None or other.pattern.can_match_prefix(mine)
        return (
            self.pattern.can_match_prefix(theirs)
            if other.pattern is None
            else self.pattern.overlaps(other.pattern)
        )


@dataclass(frozen=True, slots=True)
class TagFilter:
    """Any of several tag matches.

    A tag is split once for all patterns. Patterns with wildcards in the same positions have the same shape and are looked up
    together by their literal tokens: `*.*.paid` and `*.*.sent` cost as much as one of them.
    """

    any_of: tuple[TagMatch, ...]
    _literals: frozenset[bytes] = field(init=False, repr=False, compare=False)
    _globs: tuple[bytes, ...] = field(init=False, repr=False, compare=False)
    _prefixes: tuple[bytes, ...] = field(init=False, repr=False, compare=False)  # of the patterns
    # Minimum number of tokens, whether there may be more, positions of the literal tokens, and their values.
    _shapes: tuple[tuple[int, bool, tuple[int, ...], set[tuple[bytes, ...]]], ...] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        shapes: dict[tuple[int, bool, tuple[int, ...]], set[tuple[bytes, ...]]] = {}
        patterns = [match for match in self.any_of if match.literal is None and match.pattern is not None]
        for match in patterns:
            assert match.pattern is not None
            tokens, has_tail = match.pattern.tokens, match.pattern.has_tail
            positions = tuple(i for i, token in enumerate(tokens) if token != ANY_TOKEN)
            shape = len(tokens) + has_tail, has_tail, positions
            shapes.setdefault(shape, set()).add(tuple(tokens[i] for i in positions))
        names = (match.literal for match in self.any_of)
        object.__setattr__(self, "_literals", frozenset(name for name in names if name is not None))
        object.__setattr__(self, "_globs", tuple(m.prefix for m in self.any_of if m.op == "Glob"))
        object.__setattr__(self, "_prefixes", tuple({match.prefix: None for match in patterns}))
        object.__setattr__(self, "_shapes", tuple((*shape, literals) for shape, literals in shapes.items()))

    @property
    def literal(self) -> bytes | None:
        return self.any_of[0].literal if len(self.any_of) == 1 else None

    @property
    def cost(self) -> int:
        """Approximate cost of one match in microseconds, including access to the record."""
        return 2 + len(self._shapes) // 16

    @property
    def weight(self) -> int:
        """Relative cost of `overlaps`, which is about the product of the weights of both filters."""
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
        for min_tokens, has_tail, positions, literals in self._shapes:
            if (count == min_tokens or (has_tail and count > min_tokens)) and (
                tuple([parts[i] for i in positions]) in literals
            ):
                return True
        return False

    def overlaps(self, other: TagFilter) -> bool:
        """Whether some tag matches both."""
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
        """Whether a pattern of the other filter can match a tag with the prefix of one of these globs."""
        return any(
            match.pattern is not None and match.literal is None and match.pattern.can_match_prefix(glob)
            for glob in self._globs
            for match in other.any_of
        )

    def _shapes_overlap(self, other: TagFilter) -> bool:
        """Two shapes have a subject in common if it can have the same length in both and their literal tokens agree."""
        for min_tokens, has_tail, positions, literals in self._shapes:
            for other_min, other_tail, other_positions, other_literals in other._shapes:
                if min_tokens != other_min and not (has_tail if min_tokens < other_min else other_tail):
                    continue
                if positions == other_positions:
                    if not literals.isdisjoint(other_literals):
                        return True
                    continue
                both = [i for i in positions if i in other_positions]
                mine = {tuple([tokens[positions.index(i)] for i in both]) for tokens in literals}
                theirs = (
                    tuple([tokens[other_positions.index(i)] for i in both]) for tokens in other_literals
                )
                if not mine.isdisjoint(theirs):
                    return True
        return False


def overlap(one: TagFilter | None, other: TagFilter | None) -> bool:
    """Whether some record can pass both filters. None passes every record, including untagged ones."""
    return one is None or other is None or one.overlaps(other)
