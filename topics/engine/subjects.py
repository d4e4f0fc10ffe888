"""Subject patterns and tag matches: which tags a request means.

A subject is a tag read as tokens split on `.`. In a pattern the token `*` stands for exactly one token and a final
`>` for one or more. Only a whole token is a wildcard: `a*` is the literal token `a*`, as in NATS. A subject with an
empty token matches no pattern, since a pattern cannot name one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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

    def __post_init__(self) -> None:
        if self.op == "Glob":
            if not self.value.endswith(b"*"):
                raise ValueError(f"a Glob must end with '*', and {_shown(self.value)} does not")
        elif self.op == "Subject":
            object.__setattr__(self, "pattern", parse_pattern(self.value))
        elif self.op != "Eq":
            raise ValueError(f"a tag match is Eq, Glob or Subject, not {self.op!r}")

    @property
    def literal(self) -> bytes | None:
        """The only tag this can match, or None when it can match several."""
        if self.op == "Eq":
            return self.value
        if self.pattern is not None and self.pattern.is_literal:
            return self.value
        return None

    @property
    def prefix(self) -> bytes:
        """Bytes every matching tag starts with."""
        if self.pattern is not None:
            return self.pattern.literal_prefix
        return self.value[:-1] if self.op == "Glob" else self.value

    def matches(self, tag: bytes | None) -> bool:
        """Whether a record with this tag is meant."""
        if tag is None:
            return False
        if self.pattern is not None:
            return self.pattern.matches(tag)
        if self.op == "Glob":
            return tag.startswith(self.value[:-1])
        return tag == self.value
