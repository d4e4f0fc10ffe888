"""Export of cold records to Parquet files, `topic=orders/date=2026-11-16/part-<lo>-<hi>.parquet`, or to Delta tables.

A run can be killed and repeated safely: see spark_pipeline/lake/table.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from spark_pipeline.jobs.engines import Engine
from spark_pipeline.jobs.progress import Progress
from spark_pipeline.lake.formats import folder_of, open_table
from spark_pipeline.lake.table import Busy, ExportFailed, LakeUnavailable, Table, locked
from spark_pipeline.tasks.export import ExportResult, ExportTask, export_slices
from spark_pipeline.tasks.manifest import ColdTopic, FilesGone
from spark_pipeline.tasks.reading import Range, Slice, pack, slices_of
from topics.api.errors import TopicsError
from topics.api.limits import MIB

PART_BYTES = 256 * MIB
TASK_BYTES_MIN = 32 * MIB  # smaller tasks are not worth running in parallel
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Left:
    """A topic that was not exported, and why."""

    topic: str
    state: str  # damaged · failed · busy · changed
    message: str


@dataclass(slots=True)
class Exported:
    topics: int = 0
    files: int = 0
    rows: int = 0
    bytes: int = 0
    damaged: int = 0  # skipped ranges
    left: list[Left] = field(default_factory=list)


@dataclass(slots=True)
class Job:
    out: str
    format: str = "parquet"
    part_bytes: int = PART_BYTES
    skip_damage: bool = False
    found: Exported = field(default_factory=Exported)


def export(
    topics: Sequence[ColdTopic],
    job: Job,
    engine: Callable[[], AbstractContextManager[Engine]],
    progress: Progress,
) -> Exported:
    """Export and publish the topics one after another. The engine is started only if there is something to do."""
    behind: list[ColdTopic] = []
    for topic in topics:
        with _collect_errors(topic, job):
            if _table(topic, job).next_seq < end_of(topic):
                behind.append(topic)
    job.found.topics = len(topics)
    if behind:
        with engine() as started:
            for topic in behind:
                with _collect_errors(topic, job):
                    _export_topic(topic, job, started, progress)
    return job.found


@contextmanager
def _collect_errors(topic: ColdTopic, job: Job) -> Iterator[None]:
    """A problem with one topic must not stop the export of the others."""
    try:
        yield
    except LakeUnavailable:
        raise  # affects all topics
    except Busy as error:
        job.found.left.append(Left(topic.name, "busy", str(error)))
    except FilesGone as error:
        job.found.left.append(Left(topic.name, "changed", str(error)))
    except ExportFailed as error:
        job.found.left.append(Left(topic.name, "failed", str(error)))
    except TopicsError as error:
        job.found.left.append(Left(topic.name, "damaged", str(error)))


def _table(topic: ColdTopic, job: Job) -> Table:
    return open_table(job.format, job.out, topic.name, topic.manifest.topic_id)


def _export_topic(topic: ColdTopic, job: Job, engine: Engine, progress: Progress) -> None:
    folder = folder_of(job.format, job.out, topic.name)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, topic.name):
        table = _table(topic, job)
        if table.next_seq >= end_of(topic):
            # Another run with a newer manifest finished before we got the lock. Publishing our end would move the
            # position back, and the next run would write rows twice.
            return
        table.remove_orphans()
        slices = slices_of(topic, Range(start_seq=table.next_seq))
        tasks = [
            ExportTask(str(folder), part, skip_damage=job.skip_damage)
            for part in _parts(slices, job, engine.workers)
        ]
        results = _run(tasks, engine, progress, topic.name)
        files = [file for result in results for file in result.files]
        table.publish(files, end_of(topic))
    for damage in (one for result in results for one in result.damage):
        job.found.damaged += 1
        text = f"{topic.name}: skipped records {damage.first_seq} to {damage.last_seq}: {damage.what}"
        progress.step("damage", text, topic=topic.name, first_seq=damage.first_seq, last_seq=damage.last_seq)
    rows = sum(file.rows for file in files)
    job.found.files += len(files)
    job.found.rows += rows
    job.found.bytes += sum(file.bytes for file in files)
    text = f"{topic.name}: {rows} records in {len(files)} files, up to seq {end_of(topic) - 1}"
    progress.step("exported", text, topic=topic.name, rows=rows, files=len(files), next_seq=end_of(topic))


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


def end_of(topic: ColdTopic) -> int:
    """The seq at which an export ends. The cold tier may extend beyond it, without live records."""
    return max((segment.next_seq for segment in topic.manifest.segments), default=1)
