"""Taking over what a job has made of some segments: nothing of it is believed, and what was compared is what is kept.

For every row that lives the output must have the same record: time, flags, tag, node, size, expiry and the very bytes of the frame. Rows
that are dead may be missing, those that the plan called dead must be. Inputs are compared with their own digests on the way, or a merge
would vouch for what has rotted. The records are copied into place in the pass that compares them: whoever still writes to staging
changes nothing any more.

All of it runs off the loop, in pieces of a MiB, and stops when it is told to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from errno import EACCES, EINVAL, EIO, EISDIR, ELOOP, ENAMETOOLONG, ENOTDIR, ENXIO, EPERM, ESPIPE

import msgspec
import numpy as np
import numpy.typing as npt

from topics.api.errors import Corrupt, TopicsError
from topics.engine.core.ports import Disk, SegmentStore
from topics.engine.storage.cold_files import INDEX_SUFFIXES, read_whole
from topics.engine.storage.files import (
    HEADER_BYTES,
    Hasher,
    header,
    read_range,
    without_digest,
    write_whole,
    xxh,
)
from topics.engine.storage.frames import DEAD, DELETED
from topics.engine.storage.marks import salvage_deleted
from topics.engine.storage.merge_plan_file import (
    FailedSidecar,
    PlanGroup,
    Sidecar,
    decode_sidecar,
    output_key,
    sidecar_key,
)
from topics.engine.storage.sealing import Sum, read_sum, sealed_rows, windows_of
from topics.engine.storage.segments import (
    BLOCK_BYTES,
    COLD,
    DATA_MAGIC,
    DICT_MAGIC,
    EXPIRY,
    IDX_MAGIC,
    ROW,
    ROW_BYTES,
    SUM_MAGIC,
    Mask,
    Rows,
    SegmentMeta,
    parse_dict,
    read_dict,
    runs_of,
    segment_name,
    segment_path,
)

SIDECAR_BYTES_MAX = 64 * 1024
MARK_BYTES = 32  # of a row in .del, at most: blocks of one range each
# What is there is no file that can be read. A store that cannot be used fails in other ways.
NO_FILE = frozenset((EACCES, EINVAL, EISDIR, ELOOP, ENAMETOOLONG, ENOTDIR, ENXIO, EPERM, ESPIPE))


class OutputRefused(TopicsError):
    """The output is not what the plan asked for. `outdated`: it was, and rows that were dead then live now."""

    def __init__(self, reason: str, *, outdated: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.outdated = outdated


class InputDamaged(TopicsError):
    """A segment that was to be merged is not what was written: it stays as it is."""

    def __init__(self, segment: str, reason: str) -> None:
        super().__init__(f"{segment}: {reason}")
        self.segment = segment
        self.reason = reason


class CommitStopped(TopicsError):
    """Nobody wants the outcome any more."""


@dataclass(slots=True)
class CommitProgress:
    """How far a commit is, and whether it is to go on. Written by one thread and read by another, a word at a time."""

    done_bytes: int = 0
    stopped: bool = False

    def passed(self, size: int) -> None:
        self.done_bytes += size
        if self.stopped:
            raise CommitStopped("the plan was given up")


@dataclass(slots=True)
class MergeInput:
    """An input: its segment, its rows in memory, and below which seq nothing is alive."""

    meta: SegmentMeta
    rows: Rows
    first_seq: int

    def dead(self) -> Mask:
        """Rows that no reader sees. What is deleted and not yet published may still live after a crash."""
        dead: Mask = (self.rows["length"] == 0) | ((self.rows["flags"] & DELETED) != 0)
        dead[: max(0, self.first_seq - self.meta.first_seq)] = True
        return dead


@dataclass(slots=True)
class _Output:
    sidecar: Sidecar
    summary: Sum
    files: dict[str, bytes]  # idx, dict, sum
    rows: Rows
    tags: list[bytes]
    nodes: list[bytes]
    expiries: Rows
    meta: SegmentMeta


class Acceptance:
    """One group of a plan: `run` compares and copies, and returns the segment as it lies in both tiers now."""

    def __init__(
        self,
        disk: Disk,
        store: SegmentStore,
        directory: str,
        plan_id: str,
        group: PlanGroup,
        sources: Sequence[MergeInput],
        watch: CommitProgress,
    ) -> None:
        self._disk = disk
        self._store = store
        self._directory = directory
        self._plan_id = plan_id
        self._group = group
        self._sources = sources
        self._watch = watch

    def run(self) -> SegmentMeta:
        output = self._read_output()
        present: Mask = output.rows["length"] > 0
        self._compare_rows(output, present)
        self._copy(output, present)
        return output.meta

    # -- what the job says ---------------------------------------------------------------------------------

    def _read_output(self) -> _Output:
        group = self._group
        path = sidecar_key(self._plan_id, group.group)
        try:
            said = decode_sidecar(path, self._staged(path, SIDECAR_BYTES_MAX), group.group)
        except ValueError as error:
            raise OutputRefused(str(error)) from None
        if isinstance(said, FailedSidecar):
            raise InputDamaged(said.segment[:64], said.failed[:1000])
        # Nothing is kept that the inputs do not have, so nothing that is read here is larger than they are.
        _demand(
            0 < said.data_bytes <= group.data_bytes
            and 0 <= said.dict_bytes <= sum(one.dict_bytes for one in group.inputs),
            "data_bytes or dict_bytes are more than those of the inputs",
        )
        files = {
            suffix: self._staged(output_key(self._plan_id, said, suffix), size)
            for suffix, size in (
                ("sum", 64 * 1024 + 16 * (said.data_bytes // BLOCK_BYTES + 1)),
                ("idx", HEADER_BYTES + ROW_BYTES * group.rows),
                ("dict", said.dict_bytes),
            )
            if suffix != "dict" or said.dict_bytes
        }
        summary = self._check_sum(said, files)
        tags, nodes, expiries = self._check_dict(said, summary, files.get("dict", b""))
        _demand(xxh(files["idx"]) == summary.idx_digest, ".idx does not agree with its digest in .sum")
        _demand(
            files["idx"][:HEADER_BYTES] == header(IDX_MAGIC),
            ".idx does not begin with the header of an index",
        )
        rows = np.frombuffer(files["idx"], dtype=ROW, offset=HEADER_BYTES)
        meta = SegmentMeta(
            group.first_seq, group.generation, summary.rows, summary.data_bytes, summary.dict_bytes,
            summary.tag_names, summary.node_names, sealed=True, tier=COLD, live=summary.live,
            ts_min=summary.ts_min, ts_max=summary.ts_max, link=summary.origin,
        )  # fmt: skip
        return _Output(said, summary, files, rows, tags, nodes, expiries, meta)

    def _staged(self, key: str, size_max: int) -> bytes:
        try:
            return read_whole(self._store, key, size_max)
        except Corrupt as error:
            raise OutputRefused(str(error)) from None
        except OSError as error:
            raise _refused_or_store(key, error) from None

    def _check_sum(self, said: Sidecar, files: dict[str, bytes]) -> Sum:
        group, content = self._group, files["sum"]
        try:
            summary = msgspec.msgpack.decode(without_digest(".sum", content, SUM_MAGIC), type=Sum)
        except (TopicsError, msgspec.DecodeError) as error:
            raise OutputRefused(f".sum: {error}") from None
        _demand(content[-8:].hex() == said.sum_digest, "sum_digest is not the digest that ends .sum")
        wanted = {
            "first_seq": group.first_seq,
            "generation": group.generation,
            "rows": group.rows,
            "chain": bytes.fromhex(group.chain),
            "origin": bytes.fromhex(group.origin),
            "live": said.live,
            "data_bytes": said.data_bytes,
            "dict_bytes": said.dict_bytes,
            "tag_names": said.tag_names,
            "node_names": said.node_names,
            "ts_min": said.ts_min,
            "ts_max": said.ts_max,
        }
        for name, value in wanted.items():
            _demand(getattr(summary, name) == value, f"{name} in .sum is not what plan and sidecar say")
        _demand(said.rows == group.rows, "rows in the sidecar are not those of the plan")
        _demand(
            said.idx_bytes == len(files["idx"]) == HEADER_BYTES + ROW_BYTES * group.rows,
            ".idx has another length",
        )
        _demand(
            len(summary.blocks) == -(-summary.data_bytes // BLOCK_BYTES),
            ".sum has not a digest for each block",
        )
        return summary

    @staticmethod
    def _check_dict(said: Sidecar, summary: Sum, content: bytes) -> tuple[list[bytes], list[bytes], Rows]:
        if not said.dict_bytes:
            _demand(not summary.tag_names and not summary.node_names, "names without a .dict")
            return [], [], np.zeros(0, dtype=EXPIRY)
        _demand(len(content) == said.dict_bytes, ".dict has another length")
        _demand(xxh(content) == summary.dict_digest, ".dict does not agree with its digest in .sum")
        _demand(content[:HEADER_BYTES] == header(DICT_MAGIC), ".dict does not begin with its header")
        try:
            tags, nodes, expiries = parse_dict(".dict", content)
        except Corrupt as error:
            raise OutputRefused(str(error)) from None
        for names, count in ((tags, summary.tag_names), (nodes, summary.node_names)):
            _demand(len(names) == count == len(set(names)), ".dict has another number of names, or one twice")
        return tags, nodes, expiries

    # -- rows ----------------------------------------------------------------------------------------------

    def _compare_rows(self, output: _Output, present: Mask) -> None:
        rows = output.rows
        self._compare_places(output, present)
        at = 0
        expiries: list[tuple[int, int]] = []
        for source in self._sources:
            meta = source.meta
            part = slice(at, at + meta.rows)
            here = present[part]
            before, names, theirs = self._input(meta)
            self._compare_presence(source, before, here)
            _demand(bool((before["ts"] == rows["ts"][part]).all()), f"times of {_name(meta)} have changed")
            for column in ("length", "flags", "size"):
                same = before[column][here] == rows[column][part][here]
                _demand(bool(same.all()), f"{column} of a record of {_name(meta)} has changed")
            for column, old, new in (("tag", names[0], output.tags), ("node", names[1], output.nodes)):
                ids = _renamed(old, new)[before[column][here]]
                _demand(
                    bool((ids == rows[column][part][here]).all()),
                    f"the {column} of a record of {_name(meta)} has changed",
                )
            kept = here[theirs["row"]]
            expiries += zip((theirs["row"][kept] + at).tolist(), theirs["time"][kept].tolist())
            at += meta.rows
            self._watch.passed(0)
        found = sorted(zip(output.expiries["row"].tolist(), output.expiries["time"].tolist()))
        _demand(found == sorted(expiries), "the expiries of records are not those of the inputs")
        times = rows["ts"][rows["ts"] > 0]
        bounds = (int(times.min()), int(times.max())) if len(times) else (0, 0)
        _demand(
            bounds == (output.meta.ts_min, output.meta.ts_max), "ts_min and ts_max are not those of the rows"
        )

    @staticmethod
    def _compare_places(output: _Output, present: Mask) -> None:
        """Records lie back to back in the order of their seqs, and what is gone has left nothing but its time."""
        rows = output.rows
        lengths = rows["length"].astype(np.int64)
        starts = HEADER_BYTES + np.cumsum(lengths) - lengths
        _demand(bool((rows["offset"][present] == starts[present]).all()), "records do not lie back to back")
        _demand(
            HEADER_BYTES + int(lengths.sum()) == output.meta.data_bytes,
            "data_bytes is not that of the records",
        )
        _demand(int(np.count_nonzero(present)) == output.meta.live, "live is not the number of records")
        _demand(
            not (rows["flags"] & DEAD).any() and not rows["pad"].any(), "a row has flags that no file has"
        )
        for column in ("offset", "flags", "tag", "node", "size"):
            _demand(not rows[column][~present].any(), f"a row without a record has a {column}")

    def _compare_presence(self, source: MergeInput, before: Rows, here: Mask) -> None:
        meta = source.meta
        there = before["length"] > 0
        _demand(not (here & ~there).any(), f"a record of {_name(meta)} has come from nowhere")
        planned = self._planned_dead(meta)
        if planned is not None:
            _demand(
                not (here & planned).any(), f"a record of {_name(meta)} that the plan calls dead is there"
            )
        missing = there & ~source.dead() & ~here
        if missing.any():
            seq = meta.first_seq + int(missing.argmax())
            outdated = planned is not None and not (missing & ~planned).any()
            raise OutputRefused(f"record {seq} lives and is missing", outdated=outdated)

    def _planned_dead(self, meta: SegmentMeta) -> Mask | None:
        key = next((one.dead for one in self._group.inputs if one.first_seq == meta.first_seq), None)
        if key is None:
            return None
        bare = SegmentMeta(meta.first_seq, meta.generation, meta.rows)
        return salvage_deleted(self._staged(key, 64 * 1024 + MARK_BYTES * meta.rows), bare)

    def _input(self, meta: SegmentMeta) -> tuple[Rows, tuple[list[bytes], list[bytes]], Rows]:
        """Rows, names and expiries of an input as the hot tier has them, if they are what was sealed."""
        try:
            rows = sealed_rows(self._disk, self._directory, meta)
            if not meta.dict_bytes:
                return rows, ([], []), np.zeros(0, dtype=EXPIRY)
            summary = read_sum(self._disk, self._directory, meta.first_seq, meta.generation)[0]
            path = segment_path(self._directory, meta, "dict")
            if xxh(read_range(self._disk, path, 0, meta.dict_bytes)) != summary.dict_digest:
                raise Corrupt(path, 0, "the dictionary does not agree with its digest")
            tags, nodes, expiries = read_dict(self._disk, self._directory, meta)
            return rows, (tags, nodes), expiries
        except (Corrupt, FileNotFoundError) as error:
            raise InputDamaged(_name(meta), str(error)) from None

    # -- bytes ---------------------------------------------------------------------------------------------

    def _copy(self, output: _Output, present: Mask) -> None:
        meta, store = output.meta, self._store
        path = segment_path(self._directory, meta, "data")
        store.put(path, self._compared(output, present))
        for number, digest in enumerate(output.summary.blocks):
            if xxh(store.read_range(path, number * BLOCK_BYTES, BLOCK_BYTES)) != digest:
                raise OSError(EIO, f"{path} is not in the cold tier as it was put there")
            self._watch.passed(0)
        for suffix in INDEX_SUFFIXES:
            if suffix in output.files:
                path = segment_path(self._directory, meta, suffix)
                store.put(path, [output.files[suffix]])
                write_whole(self._disk, path, output.files[suffix])
        self._disk.sync_dir(self._directory)

    def _compared(self, output: _Output, present: Mask) -> Iterator[bytes]:
        """The output's records, each piece equal to what the inputs have, and each block to its digest."""
        digests = _BlockDigests(output.summary.blocks)
        key = output_key(self._plan_id, output.sidecar, "data")
        at = 0
        for wanted in self._wanted(present):
            piece = self._output_bytes(key, at, len(wanted))
            _demand(piece == wanted, f".data differs from the records at byte {at}")
            digests.add(piece)
            at += len(piece)
            self._watch.passed(len(piece))
            yield piece
        digests.end()
        _demand(not self._output_bytes(key, at, 1), ".data goes on behind its last record")

    def _output_bytes(self, key: str, offset: int, length: int) -> bytes:
        try:
            return self._store.read_range(key, offset, length)
        except OSError as error:
            raise _refused_or_store(key, error) from None

    def _wanted(self, present: Mask) -> Iterator[bytes]:
        yield header(DATA_MAGIC)
        at = 0
        for source in self._sources:
            meta = source.meta
            rows = sealed_rows(self._disk, self._directory, meta)
            kept = rows[present[at : at + meta.rows]]
            at += meta.rows
            starts = kept["offset"].astype(np.int64)
            ends = starts + kept["length"]
            if len(starts) > 1 and (starts[1:] < ends[:-1]).any():
                raise InputDamaged(_name(meta), "frames of different rows overlap")
            read = _CheckedBlocks(self._disk, self._store, self._directory, meta).read
            for window in windows_of(runs_of(starts, ends)):
                base = window[0][0]
                data = read(base, window[-1][1] - base)
                yield b"".join([data[start - base : end - base] for start, end in window])


class _CheckedBlocks:
    """The records of an input, read by blocks that agree with their digests."""

    def __init__(self, disk: Disk, store: SegmentStore, directory: str, meta: SegmentMeta) -> None:
        self._store = store
        self._path = segment_path(directory, meta, "data")
        self._meta = meta
        self._digests = read_sum(disk, directory, meta.first_seq, meta.generation)[0].blocks
        self._held: dict[int, bytes] = {}  # the blocks of the last read: the next one begins in them

    def read(self, offset: int, length: int) -> bytes:
        first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
        self._held = {number: self._block(number) for number in range(first, last + 1)}
        data = b"".join(self._held.values()) if last > first else self._held[first]
        start = offset - first * BLOCK_BYTES
        return data[start : start + length]

    def _block(self, number: int) -> bytes:
        if number in self._held:
            return self._held[number]
        try:
            block = self._store.read_range(self._path, number * BLOCK_BYTES, BLOCK_BYTES)
        except FileNotFoundError:
            raise InputDamaged(_name(self._meta), "is not in the cold tier") from None
        if xxh(block) != self._digests[number]:
            raise InputDamaged(
                _name(self._meta), f"byte {number * BLOCK_BYTES}: a block does not agree with its digest"
            )
        return block


class _BlockDigests:
    """Compares what goes by with a digest for each block."""

    def __init__(self, wanted: list[bytes]) -> None:
        self._wanted = wanted
        self._number = 0
        self._hasher = Hasher()
        self._room = BLOCK_BYTES

    def add(self, data: bytes) -> None:
        while data:
            part, data = data[: self._room], data[self._room :]
            self._hasher.update(part)
            self._room -= len(part)
            if not self._room:
                self._close()

    def end(self) -> None:
        if self._room < BLOCK_BYTES:
            self._close()

    def _close(self) -> None:
        right = self._number < len(self._wanted) and self._hasher.digest() == self._wanted[self._number]
        _demand(right, f"block {self._number} of .data does not agree with its digest in .sum")
        self._number += 1
        self._hasher = Hasher()
        self._room = BLOCK_BYTES


def _refused_or_store(key: str, error: OSError) -> OutputRefused | OSError:
    """What is wrong with a file that a job has put there is no failure of the store."""
    if isinstance(error, FileNotFoundError):
        return OutputRefused(f"{key} is missing")
    if error.errno in NO_FILE:
        return OutputRefused(
            f"{key} cannot be read: {error.strerror}; it must be a plain file that the server may read"
        )
    return error


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise OutputRefused(otherwise)


def _renamed(old: Sequence[bytes], new: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """For each id of the input's names the output's; -1 where it has no such name."""
    ids = {name: i + 1 for i, name in enumerate(new)}
    return np.array([0, *(ids.get(name, -1) for name in old)], dtype=np.int64)


def _name(meta: SegmentMeta) -> str:
    return segment_name(meta.first_seq, meta.generation)
