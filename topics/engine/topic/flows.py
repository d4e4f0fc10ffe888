"""Topic epochs, and the state of a forward at its source (outflow) and at its dest (inflow).

After a crash a topic of class memory or ephemeral may come back with a lower head and give the same seqs to other records.
So a start that may have lowered the head begins a new *epoch*, whose base is the recovered head. The cursor of a reader and
the mark of a forward (the last seq copied) belong to an epoch. A position of an older epoch is valid only up to the lowest
base since: records above that were lost, and their seqs now belong to records that are yet to be read or copied.

Clients see an epoch as an opaque text. It also distinguishes topics of the same name, as topic ids are never reused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from topics.engine.commands.forwards import Forward
from topics.engine.core.subjects import TagFilter, TagMatch

Epochs: TypeAlias = list[tuple[int, int]]  # number and base, both ascending
Mark: TypeAlias = tuple[int, int]  # epoch and seq

EPOCHS_MAX = 64
HEX = re.compile("0|[1-9a-f][0-9a-f]{0,15}")


def current_epoch(epochs: Epochs) -> int:
    return epochs[-1][0] if epochs else 0


def add_epoch(epochs: Epochs, base: int) -> None:
    """Begin a new epoch. Earlier epochs with a base that is not lower are dropped: the new base covers them."""
    number = current_epoch(epochs) + 1
    while epochs and epochs[-1][1] >= base:
        epochs.pop()
    epochs.append((number, base))
    if len(epochs) > EPOCHS_MAX:
        # Join the two oldest, with the lower base: records may be copied twice, but none is skipped.
        epochs[:2] = [(epochs[1][0], epochs[0][1])]


def epoch_text(topic_id: int, epochs: Epochs) -> str:
    return f"{topic_id:x}.{current_epoch(epochs):x}"


def epoch_number(text: str, topic_id: int, epochs: Epochs) -> int | None:
    """The number of an epoch given as text; None: it is invalid or belongs to another topic."""
    instance, _, number = text.partition(".")
    if instance != f"{topic_id:x}" or not HEX.fullmatch(number):
        return None
    found = int(number, 16)
    return found if found <= current_epoch(epochs) else None


def mark_in(mark: Mark, epochs: Epochs) -> Mark:
    """Convert a mark to the current epoch."""
    epoch, seq = mark
    bases = [base for number, base in epochs if number > epoch]
    return (current_epoch(epochs), min(seq, *bases)) if bases else mark


class InflowRow(msgspec.Struct, array_like=True):
    """An inflow, as stored in the dest topic's snapshot row."""

    uid: int
    name: str
    total: int
    marks: list[tuple[int, int, int]]  # source id, epoch, seq
    source: str = ""


class OutflowRow(msgspec.Struct, array_like=True):
    """An outflow, as stored in the shard's snapshot row."""

    forward: Forward
    starts: list[tuple[int, int, int]]  # topic id, epoch, seq


@dataclass(slots=True)
class Inflow:
    """Progress of one forward at its dest topic."""

    name: str
    source: str = ""  # the forward's source, a name or a pattern; empty: unknown
    total: int = 0
    marks: dict[int, Mark] = field(default_factory=dict)  # by source id

    def mark_of(self, source_id: int, start: Mark, epochs: Epochs) -> Mark:
        return mark_in(self.marks.get(source_id, start), epochs)

    def set_mark(self, source_id: int, epoch: int, seq: int) -> None:
        """Store the mark of a source; a negative seq removes it, as a dropped source's id is never reused."""
        if seq < 0:
            self.marks.pop(source_id, None)
        else:
            self.marks[source_id] = epoch, seq

    def row(self, uid: int) -> InflowRow:
        marks = [(source_id, epoch, seq) for source_id, (epoch, seq) in self.marks.items()]
        return InflowRow(uid, self.name, self.total, marks, self.source)

    @classmethod
    def restored(cls, row: InflowRow) -> Inflow:
        marks = {source_id: (epoch, seq) for source_id, epoch, seq in row.marks}
        return cls(row.name, row.source, row.total, marks)


@dataclass(slots=True)
class Outflow:
    """One forward at the source: where it starts in each topic of this shard."""

    forward: Forward
    starts: dict[int, Mark] = field(default_factory=dict)  # by topic id; topics created later start at 0

    def start_of(self, topic_id: int) -> Mark:
        return self.starts.get(topic_id, (0, 0))

    def row(self) -> OutflowRow:
        starts = [(topic_id, epoch, seq) for topic_id, (epoch, seq) in self.starts.items()]
        return OutflowRow(self.forward, starts)

    @classmethod
    def restored(cls, row: OutflowRow) -> Outflow:
        return cls(row.forward, {topic_id: (epoch, seq) for topic_id, epoch, seq in row.starts})


def filter_of(forward: Forward) -> TagFilter | TagMatch | None:
    """The forward's tag filter; None: every record."""
    matches = tuple(TagMatch(op, value.encode()) for op, value in forward.filter)
    if not matches:
        return None
    return matches[0] if len(matches) == 1 else TagFilter(matches)
