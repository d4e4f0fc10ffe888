"""A stopped shard with one file of every kind, and checks of what a start does when one of them is damaged.

The files are made once and copied for each case. Everything is read back: a record that was changed or is missing
without a tombstone is an error, whatever the outcome.
"""

from __future__ import annotations

import copy
import errno
from functools import cache

from tests.support.engine_harness import FSYNC, META_DIR, Harness, file_bytes, numbered
from tests.support.sim_disk import SimDisk, _Dir
from topics.api.errors import Corrupt, LogGap, ShardReadOnly, TopicsError, UnsupportedFormat
from topics.engine.commands import topics as c
from topics.engine.core.subjects import TagMatch
from topics.engine.storage.wal import ENVELOPE_BYTES, Envelope, scan

TOPIC = "t"
OTHER = "u"
DELETED = 3
LAST_STORED = 10  # higher seqs are in the log only
LAST = 16

SERVED = "served whole"
ANNOUNCED = "served, with the loss announced"
READ_ONLY = "read-only with the reason"
CUT = "the tail is cut"
REFUSED = "refused by name"
UNSUPPORTED = "refused as another version"
GAP = "refused as a gap in the log"
UNREADABLE = "refused by the disk"


@cache
def _made() -> tuple[Harness, dict[int, bytes]]:
    h = Harness()
    h.put(TOPIC, FSYNC)
    h.put(OTHER, FSYNC)
    for first in (1, 3, 5, 7, 9):
        h.append(
            TOPIC, *numbered(first, 2), tags=[b"odd", b"even"], nodes=[b"n1", None], ttls_ms=[0, 1 << 40]
        )
    h.append(OTHER, *numbered(1, 6))
    h.checkpoint()
    h.do(c.Delete(TOPIC, seqs=[DELETED]))
    h.checkpoint()
    for seq in range(LAST_STORED + 1, LAST + 1):
        h.append(TOPIC, *numbered(seq, 1))
    h.rest()
    h.kill()
    written = {seq: numbered(seq, 1)[0] for seq in range(1, LAST + 1) if seq != DELETED}
    return h, written


class ShardFiles:
    """The shard's files, to be damaged and then opened."""

    def __init__(self) -> None:
        made, self.written = _made()
        self.disk: SimDisk = copy.deepcopy(made.disk)
        self.topic_dir = made.topic_dir(TOPIC)
        self._other_dir = made.topic_dir(OTHER)
        self.h: Harness | None = None
        self.seen: tuple[list[tuple[int, bytes]], list[tuple[int, int, str]]] = [], []
        self.cut_before = False  # by an earlier start, which reported it

    def segment(self, first_seq: int, suffix: str, topic: str = TOPIC) -> str:
        directory = self.topic_dir if topic == TOPIC else self._other_dir
        return f"{directory}/seg-{first_seq:016x}-0.{suffix}"

    def snapshot(self, age: int = 0) -> str:
        """The newest snapshot, or the one before it."""
        names = [path for path in self.disk.paths() if path.startswith(f"{META_DIR}/snap-")]
        return names[-1 - age]

    def log_file(self) -> str:
        """The log file with the newest entries."""
        return [path for path in self.disk.paths() if "/wal-" in path and self.envelopes(path)][-1]

    def spare(self) -> str:
        """The log file that was preallocated for later."""
        return [path for path in self.disk.paths() if "/wal-" in path][-1]

    def envelopes(self, path: str) -> list[Envelope]:
        found = scan(path, int(path[-20:-4]), file_bytes(self.disk, path))
        return found.envelopes if found is not None else []

    def envelope_of(self, seq: int) -> tuple[str, int, Envelope]:
        """File, offset and envelope of this record in the log."""
        for path in self.disk.paths():
            if "/wal-" in path:
                data = file_bytes(self.disk, path)
                for envelope in self.envelopes(path):
                    if numbered(seq, 1)[0] in data[envelope.start : envelope.end]:
                        return path, envelope.start - ENVELOPE_BYTES, envelope
        raise AssertionError(f"no log file contains record {seq}")

    def change(self, path: str, offset: int, data: bytes) -> None:
        """Overwrite bytes in the page cache and on the platter."""
        file = self.disk._find(path)
        for content in (file.live, file.durable):  # type: ignore[union-attr]
            content[offset : offset + len(data)] = data

    def cut(self, path: str, length: int) -> None:
        file = self.disk._find(path)
        for content in (file.live, file.durable):  # type: ignore[union-attr]
            del content[length:]

    def replace_by_directory(self, path: str) -> None:
        parent, _, name = path.rpartition("/")
        directory = self.disk._find(parent)
        assert isinstance(directory, _Dir)
        for entries in (directory.live, directory.durable):
            entries[name] = _Dir()

    def open(self) -> Harness:
        return Harness(disk=self.disk)

    def outcome(self) -> str:
        """Start, read everything back, and classify the result. A second start must give the same result."""
        first = self._start()
        if self.h is not None:
            self.h.kill()
            before = self.seen
            again = self._start()
            assert again == first, f"{first}, but after a restart {again}"
            assert self.seen == before, f"{before}, but after a restart {self.seen}"
        return first

    def _start(self) -> str:
        """Start on the damaged files; `h` is the engine, or None when it refuses to start."""
        self.h = None
        try:
            h = self.h = self.open()
        except UnsupportedFormat:
            return UNSUPPORTED
        except Corrupt:
            return REFUSED
        except LogGap:
            return GAP
        except OSError as error:
            assert error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST), error
            return UNREADABLE
        if isinstance(reply := h.send(c.Diff(TOPIC)), TopicsError):
            assert isinstance(reply, UnsupportedFormat), reply
            self.h = None
            return UNSUPPORTED
        return self._judge(h)

    @staticmethod
    def _must_not_call_it_all(h: Harness, last: int) -> None:
        """While the end of the log is missing, no reader may be told that it has caught up or that its position does
        not exist.
        """
        reason = h.engine.shard.state.read_only
        for command in (
            c.Diff(TOPIC, last),
            c.Diff(TOPIC, last, wait_ms=1000),
            c.Diff(TOPIC, LAST + 1),
            c.Diff("a topic that may have been created after the damaged entry"),
            c.LastByTag(TOPIC, TagMatch("Eq", b"odd"), each=True),
            c.CountByTag(TOPIC, TagMatch("Eq", b"odd")),
        ):
            reply = h.send(command)
            assert isinstance(reply, ShardReadOnly) and reply.reason == reason, (command, reply)

    def _judge(self, h: Harness) -> str:
        rows, gaps = h.read(TOPIC)
        self.seen = rows, gaps
        assert dict(rows).items() <= self.written.items(), f"changed or unknown records: {rows}"
        assert h.rows(OTHER) == list(zip(range(1, 7), numbered(1, 6))), "the damage reached another topic"
        missing = [seq for seq in self.written if seq not in dict(rows)]
        told = [seq for seq in missing if any(first <= seq <= last for first, last, _ in gaps)]
        if h.engine.shard.state.read_only is not None:
            assert missing == list(range(missing[0], LAST + 1)), (
                f"missing records before the damage: {missing}"
            )
            assert isinstance(h.send(c.Append(TOPIC, c.Records([b"1"]))), TopicsError)
            self._must_not_call_it_all(h, missing[0] - 1)
            return READ_ONLY
        if missing == [] and gaps == []:
            return SERVED
        if told == missing:
            assert {reason for _, _, reason in gaps} == {"corrupt"}, gaps
            return ANNOUNCED
        assert h.engine.report.torn or self.cut_before, (
            f"lost without a tombstone: {missing}, announced: {gaps}"
        )
        assert missing == list(range(missing[0], LAST + 1)), f"not a tail: {missing}"
        self.cut_before = True
        return CUT
