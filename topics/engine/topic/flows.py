"""Epochs of a topic, and what is kept of a forward at both of its ends.

A topic of class memory or ephemeral may come back from a crash with a lower head and give the same seqs to other records.
So a start that may have lowered its head begins a new *epoch* of it, with the head it came back with as its base. A cursor of
a reader and the mark of a forward belong to an epoch. Of an older one only as much counts as every base since: what lies above
one of them was lost, and what bears these seqs now is yet to be read or copied.

Readers know an epoch by a text, opaque to them, that also tells apart topics of the same name: ids are never given again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from topics.engine.commands.forwards import Forward
from topics.engine.core.subjects import TagFilter, TagMatch

Epochs: TypeAlias = list[tuple[int, int]]  # number and base, both rising
Mark: TypeAlias = tuple[int, int]  # epoch and seq

EPOCHS_MAX = 64
HEX = re.compile("0|[1-9a-f][0-9a-f]{0,15}")


def current_epoch(epochs: Epochs) -> int:
    return epochs[-1][0] if epochs else 0


def add_epoch(epochs: Epochs, base: int) -> None:
    """Begin a new epoch. An earlier base that is not below it no longer says anything."""
    number = current_epoch(epochs) + 1
    while epochs and epochs[-1][1] >= base:
        epochs.pop()
    epochs.append((number, base))
    if (
        len(epochs) > EPOCHS_MAX
    ):  # the lower base for both: something may be copied again, nothing is left out
        epochs[:2] = [(epochs[1][0], epochs[0][1])]


def epoch_text(topic_id: int, epochs: Epochs) -> str:
    return f"{topic_id:x}.{current_epoch(epochs):x}"


def epoch_number(text: str, topic_id: int, epochs: Epochs) -> int | None:
    """Which of a topic's epochs this is; None: of another topic, or of none."""
    instance, _, number = text.partition(".")
    if instance != f"{topic_id:x}" or not HEX.fullmatch(number):
        return None
    found = int(number, 16)
    return found if found <= current_epoch(epochs) else None


def mark_in(mark: Mark, epochs: Epochs) -> Mark:
    """A mark as it stands in the newest epoch."""
    epoch, seq = mark
    bases = [base for number, base in epochs if number > epoch]
    return (current_epoch(epochs), min(seq, *bases)) if bases else mark


class InflowRow(msgspec.Struct, array_like=True):
    """Of a dest, in its row of the snapshot."""

    uid: int
    name: str
    total: int
    marks: list[tuple[int, int, int]]  # source id, epoch, seq
    source: str = ""


class OutflowRow(msgspec.Struct, array_like=True):
    """In the shard's row of the snapshot."""

    forward: Forward
    starts: list[tuple[int, int, int]]  # topic id, epoch, seq


@dataclass(slots=True)
class Inflow:
    """What one rule has brought to a topic."""

    name: str
    source: str = ""  # of the rule: a name or a pattern; empty: not known
    total: int = 0
    marks: dict[int, Mark] = field(default_factory=dict)  # by source id

    def mark_of(self, source_id: int, start: Mark, epochs: Epochs) -> Mark:
        return mark_in(self.marks.get(source_id, start), epochs)

    def set_mark(self, source_id: int, epoch: int, seq: int) -> None:
        """Ids are never given again: of a source that is gone nothing need be known."""
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
    """What one rule copies from topics of this shard."""

    forward: Forward
    starts: dict[int, Mark] = field(default_factory=dict)  # by topic id; a topic that was made later has none

    def start_of(self, topic_id: int) -> Mark:
        return self.starts.get(topic_id, (0, 0))

    def row(self) -> OutflowRow:
        starts = [(topic_id, epoch, seq) for topic_id, (epoch, seq) in self.starts.items()]
        return OutflowRow(self.forward, starts)

    @classmethod
    def restored(cls, row: OutflowRow) -> Outflow:
        return cls(row.forward, {topic_id: (epoch, seq) for topic_id, epoch, seq in row.starts})


def filter_of(forward: Forward) -> TagFilter | TagMatch | None:
    """Which tags a rule copies; None: every record."""
    matches = tuple(TagMatch(op, value.encode()) for op, value in forward.filter)
    if not matches:
        return None
    return matches[0] if len(matches) == 1 else TagFilter(matches)
