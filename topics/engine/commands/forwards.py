"""What a shard can be asked about forwards (rules that copy one topic into another), and what it answers.

A forward has three parts, each logged by the shard that owns it:

    catalog (shard 0)      the rule itself: `PutForward`, `DropForward`
    shard of the source    its *outflow*: the rule, and from which seq on each topic is copied
    shard of the dest      its *inflow*: how far the copies of each source have come, and how many there are

The inflow is the authority: copies and the new mark are one envelope, so that a copy is there once, whoever crashes. The
uid names a rule for good; a copy under a uid that the dest does not know is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from topics.engine.core.subjects import parse_pattern

TagOp: TypeAlias = Literal["Eq", "Glob", "Subject"]
Guarantee: TypeAlias = Literal["at_least_once", "exactly_once"]
# "making": the other two parts may not be there yet. "ending": they may still be there. Both are gone on with after a crash.
ForwardState: TypeAlias = Literal["making", "active", "ending"]

HOPS_MAX = 8


class Forward(msgspec.Struct, frozen=True, array_like=True):
    """A rule. Stored in full by the catalog and by the outflow."""

    uid: int
    name: str
    source: str  # a topic, or a pattern of topics
    dest: str
    preserve_node: bool = True
    preserve_tag: bool = True
    filter: tuple[tuple[TagOp, str], ...] = ()  # any of them; none: every record
    filter_is_list: bool = False  # how it was written, and is echoed
    allow_cycle: bool = False
    guarantee: Guarantee = "at_least_once"
    state: ForwardState = "making"
    made_source: bool = False  # the topics that it has made itself: a refused rule leaves none behind
    made_dest: bool = False

    @property
    def is_pattern(self) -> bool:
        return is_pattern(self.source)

    def is_covered_by(self, prefixes: tuple[str, ...] | None) -> bool:
        """Whether a key with these prefixes may know of it."""
        return covers(prefixes, self.name, self.source, self.dest)


def is_pattern(source: str) -> bool:
    return "*" in source or ">" in source


def source_prefix(source: str) -> str:
    """What the names of all topics that a source means begin with; of a plain name it is all there is."""
    return parse_pattern(source.encode()).literal_prefix.decode() if is_pattern(source) else source


def covers(prefixes: tuple[str, ...] | None, name: str, source: str, dest: str) -> bool:
    if prefixes is None:
        return True
    return all(text.startswith(prefixes) for text in (name, source_prefix(source), dest))


# -- catalog -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PutForward:
    """Store a rule. The answer waits for a sync."""

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
    """Begin to copy, or go on by a changed rule: where each topic stands is kept. A source that is no pattern is made
    when it is absent. The answer waits for a sync.
    """

    forward: Forward


@dataclass(slots=True)
class OutflowOpened:
    uid: int
    made_source: bool


@dataclass(slots=True)
class CloseOutflow:
    """Copy nothing more. `undo`: the source was made for this rule; it goes if it is empty. Absent is fine."""

    uid: int
    source: str = ""
    undo: bool = False


@dataclass(slots=True)
class OutflowClosed:
    uid: int


@dataclass(slots=True)
class Copies:
    """What the source has for the dest after the seq `after` and up to `upto`: first a stretch that is lost, then records.

    `frames` are whole frames of the source, back to back in the order of their seqs; what lies between them was
    filtered out or deleted. Empty and with `upto == after` it only asks how far the dest is.
    """

    forward: Forward
    source: str  # topic name
    source_id: int
    epochs: list[tuple[int, int]]  # of the source, and their bases; see flows.py
    start: tuple[int, int]  # epoch and seq: where a dest begins that has no mark yet
    after: int
    upto: int
    frames: bytes = b""
    lost: tuple[int, int] | None = None  # first and last seq, both inside
    is_gone: bool = False  # the source was dropped: nothing comes after this, and its mark may be forgotten


# -- the dest's shard --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class OpenInflow:
    """Let copies in. The dest is made when it is absent and `create`; else that is a 404. The answer waits for a sync."""

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
    """Let nothing more in. `undo`: the topic was made for this rule; it goes if it is empty. Absent is fine."""

    topic: str
    uid: int
    undo: bool = False


@dataclass(slots=True)
class InflowClosed:
    uid: int


@dataclass(slots=True)
class TakeCopies:
    """Append what is not there yet, with the new mark, in one envelope. As much as fits of it, in order."""

    topic: str
    copies: Copies


@dataclass(slots=True)
class CopiesTaken:
    uid: int
    source_id: int
    mark: int  # up to this seq of the source all is here
    full: bool = False  # the dest has no room for the next one
    total: int = 0  # copies of this rule so far


ForwardChange: TypeAlias = (
    PutForward | DropForward | OpenOutflow | CloseOutflow | OpenInflow | CloseInflow | TakeCopies
)
ForwardResult: TypeAlias = (
    ForwardPut | ForwardDropped | OutflowOpened | OutflowClosed | InflowOpened | InflowClosed | CopiesTaken
)
