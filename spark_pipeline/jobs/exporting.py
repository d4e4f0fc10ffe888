"""Exporting cold records to a lake of Parquet files, `topic=orders/date=2026-11-16/part-<lo>-<hi>.parquet`.

Each topic's folder has a `_manifest.json`, which says what has been exported: the files, and the seq from which the next run
goes on. Order of a run: tasks write files aside and sync them; they get their names; folders are synced; the manifest is
replaced by a rename. A crash before that rename leaves files that the manifest does not name: the next run removes them first,
and writes the same rows again. So each row is in one file, and a run with nothing new changes nothing.

Runs keep out of each other's way by a lock on `_lock`, which ends with the process.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import msgspec

from spark_pipeline.jobs.engines import Engine
from spark_pipeline.jobs.progress import Progress
from spark_pipeline.tasks.export import ExportFile, ExportResult, ExportTask, export_slices, sync
from spark_pipeline.tasks.manifest import ColdTopic
from spark_pipeline.tasks.reading import Range, Slice, pack, slices_of
from topics.engine.limits import MIB

MANIFEST = "_manifest.json"
LOCK = "_lock"
PART_BYTES = 256 * MIB
TASK_BYTES_MIN = 32 * MIB  # smaller ones are not worth being done beside others
POLL_S = 0.2


class ExportFailed(Exception):
    """The text says what is in the way, and what to do."""


class Busy(Exception):
    """Another run exports the same topic."""


class LakeFile(msgspec.Struct, frozen=True):
    """Seqs are half-open."""

    path: str
    rows: int
    bytes: int
    first_seq: int
    next_seq: int


class LakeManifest(msgspec.Struct):
    topic: str
    topic_id: str
    next_seq: int = 1  # all before is exported, or was dead or gone
    rows: int = 0
    bytes: int = 0
    files: list[LakeFile] = []
    version: int = 1


@dataclass(slots=True)
class Exported:
    topics: int = 0
    files: int = 0
    rows: int = 0
    bytes: int = 0
    damaged: int = 0  # ranges that were left out


@dataclass(slots=True)
class Job:
    out: str
    part_bytes: int = PART_BYTES
    skip_damage: bool = False
    found: Exported = field(default_factory=Exported)


def export(
    topics: Sequence[ColdTopic],
    job: Job,
    engine: Callable[[], AbstractContextManager[Engine]],
    progress: Progress,
) -> Exported:
    """One topic after another; each is published by itself. The engine is started only when there is something to do."""
    behind = [topic for topic in topics if _is_behind(topic, _folder(job.out, topic.name))]
    job.found.topics = len(topics)
    if behind:
        with engine() as started:
            for topic in behind:
                _export_topic(topic, job, started, progress)
    return job.found


def _is_behind(topic: ColdTopic, folder: Path) -> bool:
    return _read(topic, folder).next_seq < _end_of(topic)


def _export_topic(topic: ColdTopic, job: Job, engine: Engine, progress: Progress) -> None:
    folder = _folder(job.out, topic.name)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, topic.name):
        manifest = _read(topic, folder)  # another run may have been at it before the lock was ours
        _remove_orphans(folder, manifest)
        slices = slices_of(topic, Range(start_seq=manifest.next_seq))
        tasks = [
            ExportTask(str(folder), part, skip_damage=job.skip_damage)
            for part in _parts(slices, job, engine.workers)
        ]
        results = _run(tasks, engine, progress, topic.name)
        files = [file for result in results for file in result.files]
        _publish(folder, manifest, files, _end_of(topic))
    for damage in (one for result in results for one in result.damage):
        job.found.damaged += 1
        text = f"{topic.name}: left out records {damage.first_seq} to {damage.last_seq}: {damage.what}"
        progress.step("damage", text, topic=topic.name, first_seq=damage.first_seq, last_seq=damage.last_seq)
    rows = sum(file.rows for file in files)
    job.found.files += len(files)
    job.found.rows += rows
    job.found.bytes += sum(file.bytes for file in files)
    text = f"{topic.name}: {rows} records in {len(files)} files, up to seq {_end_of(topic) - 1}"
    progress.step("exported", text, topic=topic.name, rows=rows, files=len(files), next_seq=_end_of(topic))


def _parts(slices: Sequence[Slice], job: Job, workers: int) -> list[list[Slice]]:
    total = sum(part.data_bytes for part in slices)
    return pack(slices, bytes_max=job.part_bytes, parts_min=min(workers, total // TASK_BYTES_MIN))


def _run(tasks: list[ExportTask], engine: Engine, progress: Progress, topic: str) -> list[ExportResult]:
    if not tasks:
        return []
    running = engine.start(export_slices, tasks)
    try:
        while not running.wait(POLL_S):
            progress.bar(f"exporting {topic}", running.done(), len(tasks))
        return running.results()
    except BaseException:
        running.cancel()
        raise


# ── The folder of a topic ─────────────────────────────────────────────────────────────


def _folder(out: str, topic: str) -> Path:
    return Path(os.path.abspath(out)) / f"topic={quote(topic, safe='')}"


def _end_of(topic: ColdTopic) -> int:
    return max((segment.next_seq for segment in topic.manifest.segments), default=1)


def read_manifest(folder: Path) -> LakeManifest | None:
    """None: nothing is exported yet."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=LakeManifest)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        # Without it nobody knows which files count: to guess would be to write rows twice.
        raise ExportFailed(
            f"{folder / MANIFEST} cannot be read ({error}); take it from a backup, or remove {folder} to export all of it again"
        ) from error


def _read(topic: ColdTopic, folder: Path) -> LakeManifest:
    found = read_manifest(folder)
    if found is None:
        return LakeManifest(topic.name, topic.manifest.topic_id)
    if found.topic_id != topic.manifest.topic_id:
        raise ExportFailed(
            f"{folder} holds an earlier topic of the name {topic.name}, which was deleted and made anew: move that folder away, or export to another one"
        )
    return found


@contextmanager
def _locked(folder: Path, topic: str) -> Iterator[None]:
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"another run is exporting {topic} to {folder}; run it again later") from None
        yield
    finally:
        os.close(fd)


def _remove_orphans(folder: Path, manifest: LakeManifest) -> None:
    """What a run has left that came to no end. Only names that are ours."""
    named = {file.path for file in manifest.files}
    for pattern in ("date=*/part-*.parquet", "date=*/.part-*"):
        for path in folder.glob(pattern):
            if path.relative_to(folder).as_posix() not in named:
                path.unlink(missing_ok=True)


def _publish(folder: Path, manifest: LakeManifest, files: Sequence[ExportFile], next_seq: int) -> None:
    for file in files:
        os.replace(folder / file.aside, folder / file.path)
    for place in sorted({(folder / file.path).parent for file in files}):
        sync(place)
    manifest.files = [
        *manifest.files,
        *(LakeFile(file.path, file.rows, file.bytes, file.first_seq, file.next_seq) for file in files),
    ]
    manifest.next_seq = next_seq
    manifest.rows = sum(file.rows for file in manifest.files)
    manifest.bytes = sum(file.bytes for file in manifest.files)
    aside = folder / f".{MANIFEST}"
    aside.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    sync(aside)
    sync(folder)  # the folders of new days come before the manifest that names what is in them
    os.replace(aside, folder / MANIFEST)
    sync(folder)
    sync(folder.parent)
