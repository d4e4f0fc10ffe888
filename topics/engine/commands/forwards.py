"""Commands on forwards (rules that copy one topic into another), and their results.

A forward has three parts, each logged by the shard that owns it:

    catalog (shard 0)      the rule itself: `PutForward`, `DropForward`
    shard of the source    its *outflow*: the rule, and the seq from which each topic is copied
    shard of the dest      its *inflow*: the last seq copied from each source, and the number of copies

The inflow is authoritative: copies and the new position are written in one envelope, so a crash of either side cannot
duplicate a copy. The uid identifies a rule for good; copies under a uid that the dest does not know are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from topics.engine.core.subjects import parse_pattern

TagOp: TypeAlias = Literal["Eq", "Glob", "Subject"]
Guarantee: TypeAlias = Literal["at_least_once", "exactly_once"]
# "making": the other two parts may not exist yet. "ending": they may still exist. Both continue after a crash.
ForwardState: TypeAlias = Literal["making", "active", "ending"]

HOPS_MAX = 8


class Forward(msgspec.Struct, frozen=True, array_like=True):
    """A rule, as stored by the catalog and by the outflow."""

    uid: int
    name: str
    source: str  # a topic, or a pattern of topics
    dest: str
    preserve_node: bool = True
    preserve_tag: bool = True
    filter: tuple[tuple[TagOp, str], ...] = ()  # any of them; empty: every record
    filter_is_list: bool = False  # as it was written, for echoing
    allow_cycle: bool = False
    guarantee: Guarantee = "at_least_once"
    state: ForwardState = "making"
    made_source: bool = False  # created by this rule: removed again if the rule is refused
    made_dest: bool = False

    @property
    def is_pattern(self) -> bool:
        return is_pattern(self.source)

    def is_covered_by(self, prefixes: tuple[str, ...] | None) -> bool:
        """Whether an API key with these prefixes may see it."""
        return covers(prefixes, self.name, self.source, self.dest)


def is_pattern(source: str) -> bool:
    return "*" in source or ">" in source


def source_matches(source: str, topic: str) -> bool:
    return parse_pattern(source.encode()).matches(topic.encode()) if is_pattern(source) else source == topic


def source_prefix(source: str) -> str:
    """The common prefix of all topics that match a source; a plain name is its own prefix."""
    return parse_pattern(source.encode()).literal_prefix.decode() if is_pattern(source) else source


def covers(prefixes: tuple[str, ...] | None, name: str, source: str, dest: str) -> bool:
    if prefixes is None:
        return True
    return all(text.startswith(prefixes) for text in (name, source_prefix(source), dest))


# -- catalog -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PutForward:
    """Store a rule. The result waits for a sync."""

    forward: Forward


@dataclass(slots=True)
class ForwardPut:
    forward: Forward


@dataclass(slots=True)
class DropForward:
    uid: int


@dataclass(slots=True)
class ForwardDropped:
    uid: int


# -- the source's shard ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class OpenOutflow:
    """Start copying, or continue with a changed rule from the stored positions. A source that is not a pattern is created if
    it does not exist. The result waits for a sync.
    """

    forward: Forward


@dataclass(slots=True)
class OutflowOpened:
    uid: int
    made_source: bool


@dataclass(slots=True)
class CloseOutflow:
    """Stop copying. `undo`: the source was created for this rule; drop it if it is empty. No error if there is no outflow."""

    uid: int
    source: str = ""
    undo: bool = False


@dataclass(slots=True)
class OutflowClosed:
    uid: int


@dataclass(slots=True)
class Copies:
    """What the source has for the dest after the seq `after` and up to `upto`: an optional lost range, then records.

    `frames` are whole frames of the source, back to back in order of seq; missing seqs were filtered out or deleted. An
    empty batch with `upto == after` only asks for the position of the dest.
    """

    forward: Forward
    source: str  # topic name
    source_id: int
    epochs: list[tuple[int, int]]  # epochs of the source with their base seqs; see flows.py
    start: tuple[int, int]  # epoch and seq where a dest without a position begins
    after: int
    upto: int
    frames: bytes = b""
    lost: tuple[int, int] | None = None  # first and last seq, inclusive
    is_gone: bool = False  # the source was dropped: this is the last batch, and its position can be removed


# -- the dest's shard --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class OpenInflow:
    """Accept copies. A missing dest is created if `create`, else it is a 404. The result waits for a sync."""

    topic: str
    uid: int
    name: str  # of the rule
    create: bool = True
    source: str = ""  # of the rule


@dataclass(slots=True)
class InflowOpened:
    uid: int
    made_dest: bool


@dataclass(slots=True)
class CloseInflow:
    """Refuse further copies. `undo`: the topic was created for this rule; drop it if it is empty. No error if there is no inflow."""

    topic: str
    uid: int
    undo: bool = False


@dataclass(slots=True)
class InflowClosed:
    uid: int


@dataclass(slots=True)
class TakeCopies:
    """Append the copies that the dest does not have yet, with the new position, in one envelope; as many as fit, in order."""

    topic: str
    copies: Copies


@dataclass(slots=True)
class CopiesTaken:
    uid: int
    source_id: int
    mark: int  # position: copied up to this seq of the source
    full: bool = False  # the dest has no room for the next record
    total: int = 0  # copies made by this rule so far


ForwardChange: TypeAlias = (
    PutForward | DropForward | OpenOutflow | CloseOutflow | OpenInflow | CloseInflow | TakeCopies
)
ForwardResult: TypeAlias = (
    ForwardPut | ForwardDropped | OutflowOpened | OutflowClosed | InflowOpened | InflowClosed | CopiesTaken
)
