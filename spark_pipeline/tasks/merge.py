"""Merges the segments of one group of a plan into one segment, in staging. The server decides whether to accept it.

Live frames are copied unchanged, in runs, so their digests stay valid. The index is made dense again, names get new ids,
and dead rows keep only their time. The files of each attempt have unique names, and the sidecar, which names the
attempt, is renamed into place after all of them are synced. So any number of tasks may work on a group, be killed, or
finish late: the last sidecar always refers to complete files.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from spark_pipeline.tasks.segments import SegmentReader
from topics.api.errors import Corrupt, TopicsError
from topics.api.limits import MIB
from topics.engine.storage.delete_marks import mark_blocks
from topics.engine.storage.files import DIGEST_BYTES, HEADER_BYTES, Hasher, header, with_digest, xxh
from topics.engine.storage.frames import DEAD
from topics.engine.storage.merge_plan_file import FailedSidecar, PlanGroup, PlanInput, Sidecar, decode_sidecar
from topics.engine.storage.sealing import Sum
from topics.engine.storage.segments import (
    BLOCK_BYTES,
    DATA_MAGIC,
    DEL_MAGIC,
    EXPIRY,
    ROW,
    SUM_MAGIC,
    IndexFiles,
    Mask,
    Rows,
    runs_of,
)

READ_BYTES = 16 * MIB
READ_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class MergeTask:
    """One group and the location of its files. Small, since it is sent to workers."""

    cold_dir: str
    staging: str  # relative to the cold directory
    topic_id: str
    group: PlanGroup

    @property
    def folder(self) -> str:
        return f"{self.cold_dir}/topics/{self.topic_id}"

    @property
    def staging_dir(self) -> Path:
        return Path(self.cold_dir, self.staging)

    @property
    def sidecar(self) -> Path:
        return self.staging_dir / f"group-{self.group.group}.json"


@dataclass(frozen=True, slots=True)
class MergeResult:
    """Result for one group. `segment` and `failed`: a damaged input, and the damage."""

    group: int
    rows: int = 0
    live: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    resumed: bool = False
    segment: str = ""
    failed: str = ""
    at: dict[str, Any] = field(default_factory=dict)  # host and process of the task


def merge_group(task: MergeTask) -> MergeResult:
    """Merge a group, unless that is done already. A damaged input is a result; an OSError is raised and can be retried."""
    bytes_in = task.group.data_bytes
    done = _finished(task)
    if done is not None:
        return _result(done, bytes_in, resumed=True)
    try:
        made = _Merge(task).run()
    except InputDamaged as error:
        failed = FailedSidecar(task.group.group, str(error), error.segment)
        _put_sidecar(task, msgspec.json.encode(failed))
        return MergeResult(
            task.group.group, bytes_in=bytes_in, segment=error.segment, failed=str(error), at=_here()
        )
    return _result(made, bytes_in, resumed=False)


def _result(sidecar: Sidecar, bytes_in: int, *, resumed: bool) -> MergeResult:
    return MergeResult(
        sidecar.group, sidecar.rows, sidecar.live, bytes_in, sidecar.data_bytes, resumed, at=_here()
    )


def _here() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid()}


class InputDamaged(Exception):
    def __init__(self, segment: str, error: Exception) -> None:
        super().__init__(str(error))
        self.segment = segment


# ── Resuming ──────────────────────────────────────────────────────────────────────────


def _finished(task: MergeTask) -> Sidecar | None:
    """The sidecar of an earlier run, if its files exist and the summary matches.

    Failed groups are tried again: the input may have been restored.
    """
    try:
        found = decode_sidecar(str(task.sidecar), task.sidecar.read_bytes(), task.group.group)
    except (FileNotFoundError, ValueError):
        return None
    if isinstance(found, FailedSidecar):
        return None
    stem = _stem(task, found.attempt)
    sizes = {"data": found.data_bytes, "idx": found.idx_bytes, "dict": found.dict_bytes}
    try:
        if any(size and os.stat(f"{stem}.{suffix}").st_size != size for suffix, size in sizes.items()):
            return None
        with open(f"{stem}.sum", "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return None
    is_intact = (
        content[-DIGEST_BYTES:].hex() == found.sum_digest
        and xxh(content[:-DIGEST_BYTES]) == content[-DIGEST_BYTES:]
    )
    return found if is_intact else None


def _stem(task: MergeTask, attempt: str) -> str:
    return str(task.staging_dir / f"group-{task.group.group}.{attempt}")


# ── Merging ───────────────────────────────────────────────────────────────────────────


class _Merge:
    def __init__(self, task: MergeTask) -> None:
        self._task = task
        self._group = task.group
        # Unique among all attempts, on any machine.
        self._attempt = f"{os.getpid()}-{os.urandom(6).hex()}"
        self._tags: dict[bytes, int] = {}
        self._nodes: dict[bytes, int] = {}
        self._expiries: list[Rows] = []

    def run(self) -> Sidecar:
        try:
            return self._run()
        except BaseException:
            # After a kill these files stay until the plan's staging directory is deleted.
            for suffix in ("data", "idx", "dict", "sum"):
                Path(f"{_stem(self._task, self._attempt)}.{suffix}").unlink(missing_ok=True)
            raise

    def _run(self) -> Sidecar:
        group = self._group
        rows = np.zeros(group.rows, dtype=ROW)
        with _DataFile(self._path("data")) as data:
            for source in group.inputs:
                try:
                    self._add(source, rows, data)
                except TopicsError as error:
                    raise InputDamaged(source.name, error) from error
                except FileNotFoundError as error:
                    # A missing file is damage, unless the whole cold tier is not mounted here.
                    if not os.path.isdir(self._task.folder):
                        raise
                    raise InputDamaged(source.name, error) from error
        expiries = np.concatenate([np.zeros(0, dtype=EXPIRY), *self._expiries])
        index = IndexFiles.build(rows, list(self._tags), list(self._nodes), expiries)
        _write_synced(self._path("idx"), index.idx)
        if index.names:
            _write_synced(self._path("dict"), index.names)
        times = rows["ts"][rows["ts"] > 0]
        summary = Sum(
            first_seq=group.first_seq,
            generation=group.generation,
            rows=group.rows,
            live=int(np.count_nonzero(rows["length"])),
            data_bytes=data.size,
            dict_bytes=len(index.names),
            tag_names=index.tag_names,
            node_names=index.node_names,
            ts_min=int(times.min()) if len(times) else 0,
            ts_max=int(times.max()) if len(times) else 0,
            idx_digest=xxh(index.idx),
            dict_digest=xxh(index.names) if index.names else b"",
            blocks=data.blocks,
            chain=bytes.fromhex(group.chain),
            origin=bytes.fromhex(group.origin),
        )
        content = with_digest(SUM_MAGIC, msgspec.msgpack.encode(summary))
        _write_synced(self._path("sum"), content)
        sidecar = Sidecar(
            group=group.group,
            attempt=self._attempt,
            rows=summary.rows,
            live=summary.live,
            data_bytes=summary.data_bytes,
            idx_bytes=len(index.idx),
            dict_bytes=summary.dict_bytes,
            tag_names=summary.tag_names,
            node_names=summary.node_names,
            ts_min=summary.ts_min,
            ts_max=summary.ts_max,
            sum_digest=content[-DIGEST_BYTES:].hex(),
        )
        _put_sidecar(self._task, msgspec.json.encode(sidecar))
        return sidecar

    def _path(self, suffix: str) -> str:
        return f"{_stem(self._task, self._attempt)}.{suffix}"

    def _add(self, source: PlanInput, rows: Rows, data: _DataFile) -> None:
        """Add one input: copy its rows into the output's, and append its live frames."""
        task, at = self._task, source.first_seq - self._group.first_seq
        reader = SegmentReader(task.folder, source, int(task.topic_id, 16))
        before = reader.index()
        live: Mask = before["length"] > 0
        if source.dead is not None:
            live &= ~_planned_dead(f"{task.cold_dir}/{source.dead}", source)
        part = rows[at : at + source.rows]
        part["ts"] = before["ts"]
        kept = before[live]
        lengths = kept["length"].astype(np.int64)
        kept["offset"] = data.size + np.cumsum(lengths) - lengths
        kept["flags"] &= 0xFF ^ DEAD
        kept["pad"] = 0
        tags, nodes, expiries = reader.names()
        for column, names, known in (("tag", tags, self._tags), ("node", nodes, self._nodes)):
            kept[column] = _new_ids(reader.path("idx"), kept[column], names, known)
        part[live] = kept
        self._expiries.append(_shifted_expiries(reader.path("dict"), expiries, live, at))
        for piece in reader.pieces(before, np.flatnonzero(live), rows_max=READ_ROWS, bytes_max=READ_BYTES):
            view = memoryview(piece.data)
            data.write([view[start:end] for start, end in runs_of(piece.starts, piece.ends)])


def _planned_dead(path: str, source: PlanInput) -> Mask:
    """The rows that are dead according to the plan, from the .del file in staging."""
    content = Path(path).read_bytes()
    mask = np.zeros(source.rows, dtype=np.bool_)
    reached = HEADER_BYTES
    for ranges, whole, _, end in mark_blocks(content):
        if not whole:
            break
        reached = end
        for first, stop in ranges.tolist():
            mask[first:stop] = True
    if content[:8] != DEL_MAGIC or reached != len(content):
        raise Corrupt(path, reached, "the digest of the deletion marks does not match")
    return mask


def _new_ids(
    path: str, ids: npt.NDArray[np.uint32], names: list[bytes], known: dict[bytes, int]
) -> npt.NDArray[np.uint32]:
    """Map ids of names to those of the output, which are assigned in the order of appearance."""
    if not len(ids) or not ids.any():
        return ids
    if int(ids.max()) > len(names):
        raise Corrupt(path, HEADER_BYTES, "a row refers to a tag or node that does not exist")
    used, first_at = np.unique(ids, return_index=True)
    table = np.zeros(len(names) + 1, dtype=np.uint32)
    for i in used[np.argsort(first_at)].tolist():
        if i:
            table[i] = known.setdefault(names[i - 1], len(known) + 1)
    return table[ids]


def _shifted_expiries(path: str, expiries: Rows, live: Mask, at: int) -> Rows:
    """Expiries of the live records, with their rows in the output."""
    if not len(expiries):
        return expiries
    if int(expiries["row"].max()) >= len(live):
        raise Corrupt(path, HEADER_BYTES, "an expiry refers to a row that does not exist")
    kept: Rows = expiries[live[expiries["row"]]].copy()
    kept["row"] += at
    return kept


# ── Files ─────────────────────────────────────────────────────────────────────────────


class _DataFile:
    """Writer of the output's .data file, which computes block digests and syncs it at the end."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _file_mode(path))
        self.size = 0
        self.blocks: list[bytes] = []
        self._hasher, self._room = Hasher(), BLOCK_BYTES

    def __enter__(self) -> _DataFile:
        self.write([memoryview(header(DATA_MAGIC))])
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                if self._room < BLOCK_BYTES:
                    self.blocks.append(self._hasher.digest())
                os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def write(self, runs: list[memoryview]) -> None:
        for run in _joined(runs):
            self._hash(run)
            done = 0
            while done < len(run):
                done += os.write(self._fd, run[done:])
            self.size += len(run)

    def _hash(self, run: memoryview) -> None:
        at = 0
        while at < len(run):
            part = run[at : at + self._room]
            self._hasher.update(part)
            at += len(part)
            self._room -= len(part)
            if not self._room:
                self.blocks.append(self._hasher.digest())
                self._hasher, self._room = Hasher(), BLOCK_BYTES


def _joined(runs: list[memoryview]) -> Iterator[memoryview]:
    """Join short runs: copying them is cheaper than a write call for each."""
    short: list[memoryview] = []
    size = 0
    for run in runs:
        if len(run) >= BLOCK_BYTES or size >= BLOCK_BYTES:
            if short:
                yield memoryview(b"".join(short))
            short, size = [], 0
        if len(run) >= BLOCK_BYTES:
            yield run
        else:
            short.append(run)
            size += len(run)
    if short:
        yield memoryview(b"".join(short))


def _file_mode(path: str) -> int:
    """The permissions of the directory, which the server has created: the files will belong to the server."""
    return os.stat(os.path.dirname(path)).st_mode & 0o666


def _write_synced(path: str, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _file_mode(path))
    try:
        view, done = memoryview(content), 0
        while done < len(view):
            done += os.write(fd, view[done:])
        os.fsync(fd)
    finally:
        os.close(fd)


def _put_sidecar(task: MergeTask, content: bytes) -> None:
    """Write the sidecar last, after the directory entries of the attempt's files are synced."""
    folder = task.staging_dir
    _sync_dir(folder)
    temporary = f"{task.sidecar}.{os.getpid()}-{os.urandom(6).hex()}.tmp"
    _write_synced(temporary, content)
    os.replace(temporary, task.sidecar)
    _sync_dir(folder)


def _sync_dir(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
