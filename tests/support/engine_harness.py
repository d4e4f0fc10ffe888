"""An engine on a SimDisk under a test's control: turns, jobs in any order, crashes, and reads of whole topics.

`ask` makes one turn and runs nothing else, so a test sees what may leave before a sync. `send` asks, then runs jobs
and turns until it has the answer. `rest` runs everything that is due, without passing time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.sim_clock import SimClock
from tests.support.sim_disk import SimDisk
from topics.api.config import EngineConfig, TopicConfig
from topics.api.errors import TopicsError
from topics.engine.commands import topics as c
from topics.engine.core.ports import SegmentStore
from topics.engine.runtime.engine import Engine, Job, Outcome
from topics.engine.storage.frames import HEADER, HEADER_BYTES

META_DIR = "layout-1/shard-00/meta"
WAL_DIR = "layout-1/shard-00/wal"

# Small files, so that a few records seal segments and rotate logs; every topic has files of its own. No background
# work starts because of time or size unless a test asks for it.
SMALL = EngineConfig(
    wal_file_bytes=4096,
    segment_max_events=4,
    cache_bytes=1024,
    snapshot_interval_ms=1 << 40,
    rewrite_dead_share=2.0,
    inline_bytes=0,
    verify=True,
)

FSYNC = TopicConfig(durability="fsync")
DISK = TopicConfig(durability="disk")
MEMORY = TopicConfig(durability="memory")
EPHEMERAL = TopicConfig(durability="ephemeral")


class RecordedDisk:
    """The engine's disk: records each call with its path, and can be detached when the engine dies."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk: SimDisk | None = disk
        self._paths: dict[int, str] = {}
        self.calls: list[tuple[str, str]] = []
        self.each_call: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        if self._disk is None:
            return lambda *_, **__: None
        method = getattr(self._disk, name)

        def call(*args: Any, **options: Any) -> Any:
            first = args[1] if name == "rename" else args[0] if args else ""
            self.calls.append((name, self._paths.get(first, "?") if isinstance(first, int) else first))
            self.each_call()
            result = method(*args, **options)
            if name == "open":
                self._paths[result] = first
            return result

        return call

    def cut(self) -> None:
        self._disk = None

    def reads(self, ending: str) -> list[str]:
        return [path for name, path in self.calls if name == "read" and path.endswith(ending)]


class Harness:
    def __init__(
        self,
        config: EngineConfig = SMALL,
        *,
        seed: int = 1,
        disk: SimDisk | None = None,
        cold: SegmentStore | None = None,
        clock: SimClock | None = None,
    ) -> None:
        self.config = config
        self.cold = cold
        self.disk = disk or SimDisk(seed)
        self.clock = clock or SimClock()
        self.replies: dict[int, Any] = {}
        self.order: list[int] = []  # tokens in the order of their replies
        self.jobs: list[Job] = []
        self._tokens = 0
        self._wake_at: int | None = None
        self.open()

    # ---- start and stop

    def open(self) -> None:
        self.line = RecordedDisk(self.disk)
        self.jobs = []
        self.engine = Engine.open(self.line, self.clock, self.config, self.cold)

    def _die(self) -> None:
        self.line.cut()
        self.jobs = []

    def kill(self) -> None:
        """The process dies; the page cache stays."""
        self._die()
        self.disk.kill()

    def power_cut(self, *, wall_ms: int | None = None) -> None:
        """Power cut: the machine restarts with a new monotonic clock."""
        self._die()
        self.disk.crash()
        self.clock = SimClock(self.clock.wall_ms() if wall_ms is None else wall_ms)

    def reboot(self) -> None:
        """A reboot after a clean stop, when all that matters is synced."""
        self._die()
        self.disk.crash()
        self.clock = SimClock(self.clock.wall_ms())

    def close(self) -> None:
        self.rest()
        self._take(self.engine.close())
        self._die()
        self.disk.kill()

    def restart(self) -> None:
        self.close()
        self.open()

    def kill_and_open(self) -> None:
        self.kill()
        self.open()

    # ---- turns

    def ask(self, *commands: c.Command) -> list[int]:
        """One turn with these commands; returns their tokens."""
        tokens = list(range(self._tokens + 1, self._tokens + 1 + len(commands)))
        self._tokens += len(commands)
        self._take(self.engine.turn(list(zip(tokens, commands))))
        return tokens

    def _take(self, outcome: Outcome) -> None:
        for token, reply in outcome.replies:
            assert isinstance(token, int)
            assert token not in self.replies, f"a second reply to {token}: {reply}"
            self.replies[token] = reply
            self.order.append(token)
        self.jobs += outcome.jobs
        self._wake_at = outcome.wake_at_ms

    def run_job(self, kind: str | None = None) -> Job:
        """Run the first job, or the first of this kind, and report it."""
        job = next(job for job in self.jobs if kind in (None, job.kind))
        self.jobs.remove(job)
        error: OSError | TopicsError | None = None
        try:
            job.run()
        except (OSError, TopicsError) as failure:
            error = failure
        self._take(self.engine.finish(job, error))
        return job

    def go_on_without(self, kind: str) -> None:
        """Run the first job of another kind, or one turn when there is none."""
        other = next((job.kind for job in self.jobs if job.kind != kind), None)
        if other is not None:
            self.run_job(other)
        else:
            self.ask()

    def rest(self) -> None:
        """Run jobs and turns until nothing is due."""
        for _ in range(10_000):
            if self.jobs:
                self.run_job()
                continue
            self.ask()
            if not self.jobs and (self._wake_at is None or self._wake_at > self.clock.monotonic_ms()):
                return
        raise AssertionError("the engine always has more work to do")

    def send(self, command: c.Command) -> Any:
        """The answer to one command, which may be an error."""
        (token,) = self.ask(command)
        for _ in range(10_000):
            if token in self.replies:
                return self.replies[token]
            if self.jobs:
                self.run_job()
            else:
                self.ask()
        raise AssertionError(f"never answered: {command}")

    def do(self, command: c.Command) -> Any:
        """The answer to one command, which must not be an error."""
        reply = self.send(command)
        assert not isinstance(reply, TopicsError), f"{command}: {reply!r}"
        return reply

    def refused(self, command: c.Command, error: type[TopicsError]) -> Any:
        """The error with which one command must be refused."""
        reply = self.send(command)
        assert isinstance(reply, error), f"{command}: {reply!r}"
        return reply

    def pass_time(self, ms: int) -> None:
        self.clock.advance(ms)
        self.rest()

    def sync(self) -> None:
        """Let the background sync cover everything written."""
        self.pass_time(200)

    def checkpoint(self) -> None:
        self.engine.checkpoint()
        self.rest()

    # ---- short forms

    def put(self, topic: str, config: TopicConfig = FSYNC) -> Any:
        return self.do(c.PutTopic(topic, config))

    def append(self, topic: str, *payloads: bytes, tag: bytes | None = None, **options: Any) -> Any:
        return self.do(append(topic, *payloads, tag=tag, **options))

    def state(self, topic: str) -> c.TopicState:
        found = self.do(c.State(topic, touch=False))
        assert isinstance(found, c.TopicState)
        return found

    def diff(self, topic: str, from_seq: int = 0, **options: Any) -> c.Page:
        page = self.do(c.Diff(topic, from_seq, **options))
        assert isinstance(page, c.Page)
        return page

    def read(self, topic: str) -> tuple[list[tuple[int, bytes]], list[tuple[int, int, str]]]:
        """All rows and all announced gaps of a topic, from the start."""
        rows: list[tuple[int, bytes]] = []
        gaps: list[tuple[int, int, str]] = []
        cursor = 0
        while True:
            page = self.diff(topic, cursor, limit=1000, max_bytes=8 << 20, touch=False)
            if page.tombstone is not None:
                stone = page.tombstone
                gaps.append((stone.gap_from, stone.gap_to, stone.reason))
            rows += rows_of(page)
            if page.next_from_seq >= page.head_seq:
                return rows, gaps
            assert page.next_from_seq > cursor, "the reader makes no progress"
            cursor = page.next_from_seq

    def rows(self, topic: str) -> list[tuple[int, bytes]]:
        return self.read(topic)[0]

    def seqs(self, topic: str) -> list[int]:
        return [seq for seq, _ in self.rows(topic)]

    def gaps(self, topic: str) -> list[tuple[int, int, str]]:
        return self.read(topic)[1]

    def topic_dir(self, topic: str) -> str:
        return f"topics/{self.engine.shard.state.published[topic].id:016x}"

    def segment_files(self, topic: str) -> list[str]:
        """Names of the topic's files."""
        prefix = self.topic_dir(topic) + "/"
        return [path.removeprefix(prefix) for path in self.disk.paths() if path.startswith(prefix)]

    def wal_files(self) -> list[str]:
        return [path for path in self.disk.paths() if path.startswith(WAL_DIR)]

    def snapshots(self) -> list[str]:
        return [path for path in self.disk.paths() if path.startswith(f"{META_DIR}/snap-")]


def append(topic: str, *payloads: bytes, tag: bytes | None = None, **options: Any) -> c.Append:
    """An Append of these payloads, all with the same tag; column options are passed to its Records."""
    columns = {
        name: options.pop(name)
        for name in ("tags", "nodes", "ttls_ms", "sizes", "raw", "header_lens", "meta_lens")
        if name in options
    }
    if tag is not None:
        columns["tags"] = [tag] * len(payloads)
    key = options.pop("key", None)
    return c.Append(topic, c.Records(list(payloads), **columns), idempotency_key=key, **options)


def rows_of(page: c.Page) -> list[tuple[int, bytes]]:
    """Seq and payload of each record of a page, from its frames."""
    rows = []
    for i, seq in enumerate(page.seqs):
        buffer, at = page.frames[page.which[i] if page.which is not None else 0], page.starts[i]
        _, kind, _, _, frame_seq, ts, node_len, tag_len, data_len = HEADER.unpack_from(buffer, at)
        assert (kind, frame_seq, ts) == (1, seq, page.timestamps[i]), "the frame is of another record"
        start = at + HEADER_BYTES + node_len + tag_len
        rows.append((seq, bytes(buffer[start : start + data_len])))
    return rows


def numbered(first: int, count: int, pad: int = 0) -> list[bytes]:
    """Payloads that contain their number."""
    return [b'"record %d%s"' % (i, b"." * pad) for i in range(first, first + count)]


def file_bytes(disk: SimDisk, path: str) -> bytes:
    handle = disk.open(path)
    try:
        return disk.read(handle, 0, disk.size(handle))
    finally:
        disk.close(handle)


def overwrite(disk: SimDisk, path: str, data: bytes) -> None:
    """Replace a file's contents, in the page cache and on the platter."""
    disk.make_dir(path.rpartition("/")[0])
    handle = disk.open(path, create=True)
    disk.truncate(handle, 0)
    disk.write(handle, 0, data)
    disk.sync(handle)
    disk.close(handle)
    disk.sync_dir(path.rpartition("/")[0])


def lose(disk: SimDisk, path: str) -> None:
    """Remove a file, durably."""
    disk.remove(path)
    disk.sync_dir(path.rpartition("/")[0])


def holders(disk: SimDisk, needle: bytes) -> list[str]:
    """Files that contain these bytes, in the page cache or on the platter."""
    found = []
    for path in disk.paths():
        file = disk._find(path)
        if needle in bytes(file.live) or needle in bytes(file.durable):  # type: ignore[union-attr, arg-type]
            found.append(path)
    return found


# ---- a shard with one topic, "t"


def fsync(**fields: object) -> TopicConfig:
    return TopicConfig(durability="fsync", **fields)  # type: ignore[arg-type]


def with_topic(config: TopicConfig = FSYNC, engine: EngineConfig = SMALL) -> Harness:
    h = Harness(engine)
    h.put("t", config)
    return h


def with_records(count: int, config: TopicConfig = FSYNC) -> Harness:
    h = with_topic(config)
    h.append("t", *numbered(1, count))
    return h


def with_tags(tags: str, config: TopicConfig = FSYNC) -> Harness:
    """One record for each letter, with the letter as its tag; `-` means no tag."""
    h = with_topic(config)
    h.append(
        "t", *numbered(1, len(tags)), tags=[None if letter == "-" else letter.encode() for letter in tags]
    )
    return h
