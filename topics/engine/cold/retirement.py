"""Retired segments: replaced segments of the cold tier whose files have to stay for a while.

Inputs of a merge stay for a grace period, for readers with an older manifest, and until no kept snapshot refers to them,
because a recovery from it would read them. Segments listed by a pinned manifest, or used by a merge plan, stay until the
pin or the plan ends. An erase ignores all of this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from topics.engine.cold.manifests import Manifests, Name
from topics.engine.core.ports import SegmentStore
from topics.engine.core.tasks import Blocking, Steps
from topics.engine.reading.reader import Reader
from topics.engine.shard.shard import Shard
from topics.engine.storage.control import Merged
from topics.engine.storage.segment_store import COLD_IO_KIND, delete_segment
from topics.engine.storage.segments import COLD, SegmentMeta
from topics.engine.topic.log import TopicLog


class Retirement:
    """Decides when the files of retired segments may be removed."""

    def __init__(
        self, store: SegmentStore | None, shard: Shard, reader: Reader, manifests: Manifests, grace_ms: int
    ) -> None:
        self._store = store
        self._shard = shard
        self._reader = reader
        self._manifests = manifests
        self._grace_ms = grace_ms
        self._due: dict[int, dict[Name, int]] = {}  # by topic: merge inputs and the end of their grace period
        self._referenced: dict[int, set[Name]] = {}  # those of them that a kept snapshot refers to
        self._held: dict[int, dict[Name, SegmentMeta]] = {}  # other segments kept by a pin or a plan
        self._next_ms: int | None = None
        self._is_stale = False  # `_next_ms` has to be recomputed
        self.is_planned: Callable[[int, Name], bool] = lambda topic_id, name: False
        self.on_removable: Callable[[int, SegmentMeta], None] = lambda topic_id, meta: None

    # -- adding and removing -------------------------------------------------------------------------------

    def add(self, log: TopicLog, merged: Merged) -> None:
        """Retire the inputs of a merge. The existing snapshots still refer to them."""
        due_ms = self._shard.state.now_ms + self._grace_ms
        for inputs in merged.inputs:
            for one in inputs:
                name = (one.first_seq, one.generation)
                self._due.setdefault(log.id, {})[name] = due_ms
                self._referenced.setdefault(log.id, set()).add(name)
        self._is_stale = True

    def unreferenced(self, topic_id: int, meta: SegmentMeta) -> None:
        """No kept snapshot refers to this segment any more: remove it unless something else keeps it."""
        name = (meta.first_seq, meta.generation)
        self._referenced.get(topic_id, set()).discard(name)
        self._is_stale = True
        if name in self._due.get(topic_id, {}):
            return
        if self._is_held(topic_id, name):
            self.hold(topic_id, meta)
        else:
            self.on_removable(topic_id, meta)

    def keeps(self, topic_id: int, name: Name) -> bool:
        """Whether the files of a segment found in the store must stay. If a pin or a plan keeps them, that is noted."""
        if name in self._due.get(topic_id, {}):
            return True
        if self._is_held(topic_id, name):
            self.hold(topic_id, SegmentMeta(*name, tier=COLD))
            return True
        return False

    def hold(self, topic_id: int, meta: SegmentMeta) -> None:
        self._held.setdefault(topic_id, {})[meta.first_seq, meta.generation] = meta

    def load(self, log: TopicLog, existing: set[Name], is_referenced: Callable[[Name], bool]) -> None:
        """After a start: load the retired segments that still have files."""
        missing = log.merges.retired_names - existing
        if missing:
            log.merges = log.merges.without(missing)
        for entry in log.merges.retired:
            for one in entry.segments:
                name = (one.first_seq, one.generation)
                self._due.setdefault(log.id, {})[name] = entry.retired_at_ms + self._grace_ms
                if is_referenced(name):
                    self._referenced.setdefault(log.id, set()).add(name)
        self._is_stale = True

    def erased(self, log: TopicLog, last_seq: int) -> None:
        """An erase has removed all retired segments up to this seq."""
        due, held = self._due.get(log.id, {}), self._held.get(log.id, {})
        log.merges = log.merges.without({name for name in due if name[0] <= last_seq})
        self._due[log.id] = {name: due_ms for name, due_ms in due.items() if name[0] > last_seq}
        self._held[log.id] = {name: meta for name, meta in held.items() if name[0] > last_seq}
        self._is_stale = True

    def forget(self, topic_id: int) -> None:
        for table in (self._due, self._referenced, self._held):
            table.pop(topic_id, None)
        self._is_stale = True

    def recheck(self, topic_id: int | None = None) -> None:
        """A pin or a plan has ended: segments that nothing else keeps may be removed."""
        self._is_stale = True
        for topic in [topic_id] if topic_id is not None else list(self._held):
            held = self._held.get(topic, {})
            for name in [name for name in held if not self._is_held(topic, name)]:
                self.on_removable(topic, held.pop(name))
            if not held:
                self._held.pop(topic, None)

    def _is_held(self, topic_id: int, name: Name) -> bool:
        return self._manifests.is_pinned(topic_id, name) or self.is_planned(topic_id, name)

    # -- time ----------------------------------------------------------------------------------------------

    def next_due_ms(self) -> int | None:
        """When the next grace period ends, of segments that nothing else keeps."""
        if self._is_stale:
            self._is_stale = False
            self._next_ms = min(
                (
                    due_ms
                    for topic_id, due in self._due.items()
                    for name, due_ms in due.items()
                    if self._is_removable(topic_id, name)
                ),
                default=None,
            )
        return self._next_ms

    def _is_removable(self, topic_id: int, name: Name) -> bool:
        return name not in self._referenced.get(topic_id, ()) and not self._is_held(topic_id, name)

    def remove_due(self) -> Steps:
        now_ms = self._shard.state.now_ms
        for topic_id, due in list(self._due.items()):
            names = [
                name
                for name, due_ms in due.items()
                if due_ms <= now_ms and self._is_removable(topic_id, name)
            ]
            removed: set[Name] = set()
            try:
                for name in names:
                    yield Blocking(COLD_IO_KIND, partial(self._remove, topic_id, name))
                    removed.add(name)
            finally:
                # Not logged: a recovery from an older state finds that the files are removed.
                for name in removed:
                    due.pop(name, None)
                log = self._shard.state.by_id.get(topic_id)
                if log is not None and removed:
                    log.merges = log.merges.without(removed)
                self._is_stale = True
            if not due:
                self._due.pop(topic_id, None)

    def _remove(self, topic_id: int, name: Name) -> None:
        assert self._store is not None
        delete_segment(self._store, self._reader.topic_dir(topic_id), SegmentMeta(*name))

    # -- metrics -------------------------------------------------------------------------------------------

    def totals(self) -> tuple[int, int]:
        """Number of retired segments, and their bytes."""
        logs = [
            self._shard.state.by_id[topic_id] for topic_id in self._due if topic_id in self._shard.state.by_id
        ]
        return sum(log.merges.retired_segments for log in logs), sum(log.merges.retired_bytes for log in logs)
