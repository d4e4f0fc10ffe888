"""Verification of a merge output: the files written by an external job are untrusted and compared with the inputs.

For every live row the output must have the same record: time, flags, tag, node, size, expiry and the exact bytes of the
frame. Dead rows may be missing; those marked dead in the plan must be. Inputs are verified against their own digests,
otherwise a merge would put valid digests on corrupt records. Records are copied into place in the same pass that compares
them, so that later writes to staging have no effect.

Everything runs off the event loop, in pieces of a MiB, and can be stopped.
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
from topics.engine.storage.delete_marks import salvage_deleted
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
from topics.engine.storage.merge_plan_file import (
    FailedSidecar,
    PlanGroup,
    Sidecar,
    decode_sidecar,
    output_key,
    sidecar_key,
)
from topics.engine.storage.sealing import Sum, read_sum, sealed_rows, windows_of
from topics.engine.storage.segment_store import INDEX_SUFFIXES, read_small_file
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
MARK_BYTES = 32  # most bytes of a row in .del: one block with one range
# Errors that mean that the path is not a readable file. A failing store raises other errors.
NOT_A_FILE = frozenset((EACCES, EINVAL, EISDIR, ELOOP, ENAMETOOLONG, ENOTDIR, ENXIO, EPERM, ESPIPE))


class OutputRefused(TopicsError):
    """The output does not match the plan. `outdated`: it does, but rows that were dead when it was made are live now."""

    def __init__(self, reason: str, *, outdated: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.outdated = outdated


class InputDamaged(TopicsError):
    """An input segment is damaged. It is left as it is."""

    def __init__(self, segment: str, reason: str) -> None:
        super().__init__(f"{segment}: {reason}")
        self.segment = segment
        self.reason = reason


class CommitStopped(TopicsError):
    """The commit was stopped because its plan was abandoned."""


@dataclass(slots=True)
class CommitProgress:
    """Progress of a commit and its stop flag. Each field is written by one thread and read by another."""

    done_bytes: int = 0
    stopped: bool = False

    def advance(self, size: int) -> None:
        """Count processed bytes; raises if the commit was stopped."""
        self.done_bytes += size
        if self.stopped:
            raise CommitStopped("the plan was abandoned")


@dataclass(slots=True)
class MergeInput:
    """An input: its segment, its rows in memory, and the topic's first live seq."""

    meta: SegmentMeta
    rows: Rows
    first_seq: int

    def dead(self) -> Mask:
        """Rows that no reader can see. Unpublished deletes do not count: a crash may undo them."""
        dead: Mask = (self.rows["length"] == 0) | ((self.rows["flags"] & DELETED) != 0)
        dead[: max(0, self.first_seq - self.meta.first_seq)] = True
        return dead


@dataclass(slots=True)
class _Output:
    """The files of an output, decoded."""

    sidecar: Sidecar
    summary: Sum
    files: dict[str, bytes]  # idx, dict, sum
    rows: Rows
    tags: list[bytes]
    nodes: list[bytes]
    expiries: Rows
    meta: SegmentMeta


class OutputVerifier:
    """Verifies one group of a plan: `run` compares and copies, and returns the segment, now in both tiers."""

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

    # -- the job's files -----------------------------------------------------------------------------------

    def _read_output(self) -> _Output:
        group = self._group
        path = sidecar_key(self._plan_id, group.group)
        try:
            sidecar = decode_sidecar(path, self._staged(path, SIDECAR_BYTES_MAX), group.group)
        except ValueError as error:
            raise OutputRefused(str(error)) from None
        if isinstance(sidecar, FailedSidecar):
            raise InputDamaged(sidecar.segment[:64], sidecar.failed[:1000])
        # An output contains only records of its inputs, so no file that is read here is larger than theirs.
        _require(
            0 < sidecar.data_bytes <= group.data_bytes
            and 0 <= sidecar.dict_bytes <= sum(one.dict_bytes for one in group.inputs),
            "data_bytes or dict_bytes is larger than the total of the inputs",
        )
        files = {
            suffix: self._staged(output_key(self._plan_id, sidecar, suffix), size)
            for suffix, size in (
                ("sum", 64 * 1024 + 16 * (sidecar.data_bytes // BLOCK_BYTES + 1)),
                ("idx", HEADER_BYTES + ROW_BYTES * group.rows),
                ("dict", sidecar.dict_bytes),
            )
            if suffix != "dict" or sidecar.dict_bytes
        }
        summary = self._check_sum(sidecar, files)
        tags, nodes, expiries = self._check_dict(sidecar, summary, files.get("dict", b""))
        _require(xxh(files["idx"]) == summary.idx_digest, ".idx does not match its digest in .sum")
        _require(
            files["idx"][:HEADER_BYTES] == header(IDX_MAGIC),
            ".idx does not start with an index header",
        )
        rows = np.frombuffer(files["idx"], dtype=ROW, offset=HEADER_BYTES)
        meta = SegmentMeta(
            group.first_seq, group.generation, summary.rows, summary.data_bytes, summary.dict_bytes,
            summary.tag_names, summary.node_names, sealed=True, tier=COLD, live=summary.live,
            ts_min=summary.ts_min, ts_max=summary.ts_max, link=summary.origin,
        )  # fmt: skip
        return _Output(sidecar, summary, files, rows, tags, nodes, expiries, meta)

    def _staged(self, key: str, size_max: int) -> bytes:
        try:
            return read_small_file(self._store, key, size_max)
        except Corrupt as error:
            raise OutputRefused(str(error)) from None
        except OSError as error:
            raise _as_refusal(key, error) from None

    def _check_sum(self, sidecar: Sidecar, files: dict[str, bytes]) -> Sum:
        group, content = self._group, files["sum"]
        try:
            summary = msgspec.msgpack.decode(without_digest(".sum", content, SUM_MAGIC), type=Sum)
        except (TopicsError, msgspec.DecodeError) as error:
            raise OutputRefused(f".sum: {error}") from None
        _require(content[-8:].hex() == sidecar.sum_digest, "sum_digest is not the digest at the end of .sum")
        expected = {
            "first_seq": group.first_seq,
            "generation": group.generation,
            "rows": group.rows,
            "chain": bytes.fromhex(group.chain),
            "origin": bytes.fromhex(group.origin),
            "live": sidecar.live,
            "data_bytes": sidecar.data_bytes,
            "dict_bytes": sidecar.dict_bytes,
            "tag_names": sidecar.tag_names,
            "node_names": sidecar.node_names,
            "ts_min": sidecar.ts_min,
            "ts_max": sidecar.ts_max,
        }
        for name, value in expected.items():
            _require(
                getattr(summary, name) == value, f"{name} in .sum does not match the plan and the sidecar"
            )
        _require(sidecar.rows == group.rows, "rows in the sidecar does not match the plan")
        _require(
            sidecar.idx_bytes == len(files["idx"]) == HEADER_BYTES + ROW_BYTES * group.rows,
            ".idx has the wrong length",
        )
        _require(
            len(summary.blocks) == -(-summary.data_bytes // BLOCK_BYTES),
            ".sum does not have one digest for each block",
        )
        return summary

    @staticmethod
    def _check_dict(sidecar: Sidecar, summary: Sum, content: bytes) -> tuple[list[bytes], list[bytes], Rows]:
        if not sidecar.dict_bytes:
            _require(not summary.tag_names and not summary.node_names, "there are names but no .dict")
            return [], [], np.zeros(0, dtype=EXPIRY)
        _require(len(content) == sidecar.dict_bytes, ".dict has the wrong length")
        _require(xxh(content) == summary.dict_digest, ".dict does not match its digest in .sum")
        _require(
            content[:HEADER_BYTES] == header(DICT_MAGIC), ".dict does not start with a dictionary header"
        )
        try:
            tags, nodes, expiries = parse_dict(".dict", content)
        except Corrupt as error:
            raise OutputRefused(str(error)) from None
        for names, count in ((tags, summary.tag_names), (nodes, summary.node_names)):
            _require(
                len(names) == count == len(set(names)), ".dict has the wrong number of names, or a duplicate"
            )
        return tags, nodes, expiries

    # -- rows ----------------------------------------------------------------------------------------------

    def _compare_rows(self, output: _Output, present: Mask) -> None:
        rows = output.rows
        self._check_layout(output, present)
        at = 0
        expiries: list[tuple[int, int]] = []
        for source in self._sources:
            meta = source.meta
            part = slice(at, at + meta.rows)
            here = present[part]
            before, names, theirs = self._input(meta)
            self._compare_presence(source, before, here)
            _require(bool((before["ts"] == rows["ts"][part]).all()), f"times of {_name(meta)} differ")
            for column in ("length", "flags", "size"):
                same = before[column][here] == rows[column][part][here]
                _require(bool(same.all()), f"{column} of a record of {_name(meta)} differs")
            for column, old, new in (("tag", names[0], output.tags), ("node", names[1], output.nodes)):
                ids = _map_ids(old, new)[before[column][here]]
                _require(
                    bool((ids == rows[column][part][here]).all()),
                    f"the {column} of a record of {_name(meta)} differs",
                )
            kept = here[theirs["row"]]
            expiries += zip((theirs["row"][kept] + at).tolist(), theirs["time"][kept].tolist())
            at += meta.rows
            self._watch.advance(0)
        found = sorted(zip(output.expiries["row"].tolist(), output.expiries["time"].tolist()))
        _require(found == sorted(expiries), "the expiries differ from those of the inputs")
        times = rows["ts"][rows["ts"] > 0]
        bounds = (int(times.min()), int(times.max())) if len(times) else (0, 0)
        _require(
            bounds == (output.meta.ts_min, output.meta.ts_max), "ts_min and ts_max do not match the rows"
        )

    @staticmethod
    def _check_layout(output: _Output, present: Mask) -> None:
        """Records must be contiguous and ordered by seq. Rows without a record have only a time."""
        rows = output.rows
        lengths = rows["length"].astype(np.int64)
        starts = HEADER_BYTES + np.cumsum(lengths) - lengths
        _require(bool((rows["offset"][present] == starts[present]).all()), "records are not contiguous")
        _require(
            HEADER_BYTES + int(lengths.sum()) == output.meta.data_bytes,
            "data_bytes does not match the records",
        )
        _require(
            int(np.count_nonzero(present)) == output.meta.live, "live does not match the number of records"
        )
        _require(not (rows["flags"] & DEAD).any() and not rows["pad"].any(), "a row has invalid flags")
        for column in ("offset", "flags", "tag", "node", "size"):
            _require(not rows[column][~present].any(), f"a row without a record has a {column}")

    def _compare_presence(self, source: MergeInput, before: Rows, here: Mask) -> None:
        meta = source.meta
        existed = before["length"] > 0
        _require(not (here & ~existed).any(), f"there is a record that {_name(meta)} does not have")
        planned = self._planned_dead(meta)
        if planned is not None:
            _require(
                not (here & planned).any(), f"a record of {_name(meta)} is present that is dead in the plan"
            )
        missing = existed & ~source.dead() & ~here
        if missing.any():
            seq = meta.first_seq + int(missing.argmax())
            outdated = planned is not None and not (missing & ~planned).any()
            raise OutputRefused(f"record {seq} is live but missing", outdated=outdated)

    def _planned_dead(self, meta: SegmentMeta) -> Mask | None:
        key = next((one.dead for one in self._group.inputs if one.first_seq == meta.first_seq), None)
        if key is None:
            return None
        bare = SegmentMeta(meta.first_seq, meta.generation, meta.rows)
        return salvage_deleted(self._staged(key, 64 * 1024 + MARK_BYTES * meta.rows), bare)

    def _input(self, meta: SegmentMeta) -> tuple[Rows, tuple[list[bytes], list[bytes]], Rows]:
        """Rows, names and expiries of an input from the hot tier, verified against their digests."""
        try:
            rows = sealed_rows(self._disk, self._directory, meta)
            if not meta.dict_bytes:
                return rows, ([], []), np.zeros(0, dtype=EXPIRY)
            summary = read_sum(self._disk, self._directory, meta.first_seq, meta.generation)[0]
            path = segment_path(self._directory, meta, "dict")
            if xxh(read_range(self._disk, path, 0, meta.dict_bytes)) != summary.dict_digest:
                raise Corrupt(path, 0, "the dictionary does not match its digest")
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
                raise OSError(EIO, f"{path} in the cold tier differs from what was written")
            self._watch.advance(0)
        for suffix in INDEX_SUFFIXES:
            if suffix in output.files:
                path = segment_path(self._directory, meta, suffix)
                store.put(path, [output.files[suffix]])
                write_whole(self._disk, path, output.files[suffix])
        self._disk.sync_dir(self._directory)

    def _compared(self, output: _Output, present: Mask) -> Iterator[bytes]:
        """The output's .data in pieces, each compared with the inputs' records, and each block with its digest."""
        digests = _BlockDigests(output.summary.blocks)
        key = output_key(self._plan_id, output.sidecar, "data")
        at = 0
        for expected in self._expected(present):
            piece = self._output_bytes(key, at, len(expected))
            _require(piece == expected, f".data differs from the records at byte {at}")
            digests.add(piece)
            at += len(piece)
            self._watch.advance(len(piece))
            yield piece
        digests.end()
        _require(not self._output_bytes(key, at, 1), ".data has bytes after its last record")

    def _output_bytes(self, key: str, offset: int, length: int) -> bytes:
        try:
            return self._store.read_range(key, offset, length)
        except OSError as error:
            raise _as_refusal(key, error) from None

    def _expected(self, present: Mask) -> Iterator[bytes]:
        """What .data must contain, from the inputs."""
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
    """Reads .data of an input by blocks, each verified against its digest."""

    def __init__(self, disk: Disk, store: SegmentStore, directory: str, meta: SegmentMeta) -> None:
        self._store = store
        self._path = segment_path(directory, meta, "data")
        self._meta = meta
        self._digests = read_sum(disk, directory, meta.first_seq, meta.generation)[0].blocks
        self._held: dict[int, bytes] = {}  # blocks of the last read; the next one starts in them

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
                _name(self._meta), f"byte {number * BLOCK_BYTES}: a block does not match its digest"
            )
        return block


class _BlockDigests:
    """Verifies a stream of bytes against the digests of its blocks."""

    def __init__(self, expected: list[bytes]) -> None:
        self._expected = expected
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
        matches = self._number < len(self._expected) and self._hasher.digest() == self._expected[self._number]
        _require(matches, f"block {self._number} of .data does not match its digest in .sum")
        self._number += 1
        self._hasher = Hasher()
        self._room = BLOCK_BYTES


def _as_refusal(key: str, error: OSError) -> OutputRefused | OSError:
    """Turn an error about a file of the job into a refusal: the store has not failed."""
    if isinstance(error, FileNotFoundError):
        return OutputRefused(f"{key} is missing")
    if error.errno in NOT_A_FILE:
        return OutputRefused(
            f"{key} cannot be read: {error.strerror}; it must be a regular file that the server can read"
        )
    return error


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise OutputRefused(reason)


def _map_ids(old: Sequence[bytes], new: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Maps name ids of the input to those of the output; -1 if the output does not have the name."""
    ids = {name: i + 1 for i, name in enumerate(new)}
    return np.array([0, *(ids.get(name, -1) for name in old)], dtype=np.int64)


def _name(meta: SegmentMeta) -> str:
    return segment_name(meta.first_seq, meta.generation)
