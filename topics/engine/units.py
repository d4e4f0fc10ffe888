"""Names for the numbers that must not be mixed up."""

from __future__ import annotations

from typing import NewType

Seq = NewType("Seq", int)  # a record's place in its topic, from 1; 0 is "nothing yet"
Lsn = NewType("Lsn", int)  # an envelope's number in a shard's log, from 1
TopicId = NewType("TopicId", int)  # never repeats in a data directory
