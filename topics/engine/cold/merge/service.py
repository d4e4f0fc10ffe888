"""Merging of cold segments by external jobs: the server plans and publishes, a job does the merging.

    plan       choose runs of adjacent cold segments, put plan.json and the marks of dead rows into staging, grant a lease
    (job)      writes one segment for each run, in staging
    commit     compare each output with its inputs, copy it into place, swap all of them in with one log entry, write a
               manifest
    retire     keep the old files for a grace period, and as long as a pin or a plan needs them

The log entry is the commit point: after an earlier crash the old segments are in use, and the next start removes the
other files; after a later crash the new segments are in use. The lease only avoids duplicate work. A topic has at most one
plan. The shard executes one step at a time, off the event loop, and clients wait for the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from topics.api import limits
from topics.api.config import EngineConfig
from topics.api.errors import (
    ColdStoreFailed,
    Corrupt,
    InputsChanged,
    NoColdTier,
    OutputInvalid,
    PlanLeased,
    PlanNotFound,
    ShardReadOnly,
    Throttled,
    TopicNotFound,
    TopicsError,
)
from topics.engine.cold.manifests import Manifests
from topics.engine.cold.merge.commit import MergeCommitter, committed_body
from topics.engine.cold.merge.planner import PLAN_BYTES_MAX, ActivePlan, Planner
from topics.engine.cold.merge.verify import CommitStopped
from topics.engine.cold.retirement import Retirement
from topics.engine.commands import merges as mrg
from topics.engine.core.ports import Disk, SegmentStore
from topics.engine.core.tasks import Blocking, Step, Steps, WaitSynced
from topics.engine.reading.reader import Reader
from topics.engine.shard.shard import Shard
from topics.engine.storage.merge_plan_file import (
    PLAN_NAME,
    STAGING,
    PlanFile,
    decode_plan,
    parse_staging_key,
    staging_dir,
)
from topics.engine.storage.segment_store import COLD_IO_KIND, delete_keys, read_small_file
from topics.engine.topic.log import TopicLog
from topics.engine.topic.merges import Committed
from topics.engine.upkeep.checkpoint import Checkpointer

QueuedCommand = tuple[object, mrg.MergeCommand]  # reply token, command


class MergeService:
    """Executes the commands about merges and pinned snapshots, and the background work that follows from them."""

    def __init__(
        self,
        disk: Disk,
        store: SegmentStore | None,
        shard: Shard,
        reader: Reader,
        checkpointer: Checkpointer,
        config: EngineConfig,
    ) -> None:
        self._disk = disk
        self._store = store
        self._shard = shard
        self._reader = reader
        self._checkpointer = checkpointer
        self._config = config
        self.manifests = Manifests(disk, store, shard, reader)
        self.retirement = Retirement(store, shard, reader, self.manifests, config.retire_grace_ms)
        self.retirement.is_planned = self._is_planned
        self._planner = Planner(disk, store, shard, reader)
        self._queue: deque[QueuedCommand] = deque()
        self._plans: dict[int, ActivePlan] = {}  # by topic
        self._ended_plans: dict[str, None] = {}  # plans whose staging has to be removed
        self._committer = MergeCommitter(
            disk, store, shard, reader, checkpointer, self._planner, self.manifests, self.retirement
        )
        self.is_loaded = False  # plans and pins were loaded from the store
        shard.state.events.failed.append(lambda reason: self.refuse(ShardReadOnly(reason, unknown=True)))
        self._stopped = False

    # -- requests ------------------------------------------------------------------------------------------

    def handle(self, token: object, command: mrg.MergeCommand) -> None:
        """Reply, or queue the command. An exception is the immediate reply."""
        if self._store is None:
            raise NoColdTier
        log = self._find(command.topic)
        if self._stopped:
            raise ColdStoreFailed("the server is stopping; try again shortly")
        if isinstance(command, mrg.GetMerges | mrg.RenewPlan | mrg.CommitPlan) and self.is_loaded:
            self._reply_directly(token, log, command)
            return
        if not isinstance(command, mrg.GetMerges) and self._shard.state.read_only is not None:
            raise ShardReadOnly(self._shard.state.read_only)
        if len(self._queue) >= limits.MERGE_REQUESTS_MAX:
            raise Throttled(
                "too many requests for merges and snapshots are waiting; try again later",
                limit="consolidation",
                max=limits.MERGE_REQUESTS_MAX,
            )
        self._queue.append((token, command))

    def _find(self, topic: str) -> TopicLog:
        log = self._shard.state.published.get(topic)
        if log is None:
            raise TopicNotFound(topic)
        return log

    def _reply_directly(
        self, token: object, log: TopicLog, command: mrg.GetMerges | mrg.RenewPlan | mrg.CommitPlan
    ) -> None:
        """Execute a command that does not need the store."""
        if isinstance(command, mrg.GetMerges):
            self._reply(token, mrg.MergeReply(self._status(log)))
            return
        done = log.merges.find(command.plan_id)
        if isinstance(command, mrg.CommitPlan) and done is not None:
            self._reply_committed(token, log, command, done)
            return
        plan = self._plan(log, command.plan_id)
        plan.check_lease(command.lease, self._mono_ms)
        if isinstance(command, mrg.RenewPlan):
            plan.take(plan.lease, plan.lease_ms, self._mono_ms)
            self._reply(token, mrg.MergeReply({"lease_ms": plan.lease_ms}))
            return
        if self._shard.state.read_only is not None:
            raise ShardReadOnly(self._shard.state.read_only)
        plan.begin_commit()
        plan.waiting.append((self._mono_ms + command.wait_ms, token))

    def _reply_committed(
        self, token: object, log: TopicLog, command: mrg.CommitPlan, done: Committed
    ) -> None:
        """Reply to the commit of a plan that is committed. While the log entry is not synced, the client waits."""
        plan = self._plans.get(log.id)
        if plan is None or plan.id != done.plan_id:
            self._reply(token, mrg.MergeReply(committed_body(done)))
        elif plan.committing:
            plan.waiting.append((self._mono_ms + command.wait_ms, token))
        else:  # its log entry was not written, or not synced: a restart may not find it
            self._reply(token, self._interrupted())

    def _plan(self, log: TopicLog, plan_id: str) -> ActivePlan:
        plan = self._plans.get(log.id)
        if plan is None or plan.id != plan_id:
            raise PlanNotFound(plan_id)
        return plan

    @property
    def _mono_ms(self) -> int:
        return self._shard.state.clock.mono_ms

    def _reply(self, token: object, answer: object) -> None:
        self._shard.state.ready.append((token, answer))

    def _status(self, log: TopicLog) -> dict[str, object]:
        plan, merges = self._plans.get(log.id), log.merges
        described: dict[str, object] | None = None
        if plan is not None:
            left_ms = plan.lease_left_ms(self._mono_ms)
            described = {
                "plan_id": plan.id,
                "groups": len(plan.groups),
                "bytes": plan.data_bytes,
                "leased_until_ms": self._shard.state.now_ms + left_ms if left_ms else None,
                "state": "committing" if plan.committing else "planned",
            }
        return {
            "plan": described,
            "retired_segments": merges.retired_segments,
            "retired_bytes": merges.retired_bytes,
            "snapshots": self.manifests.pins_of(log.id),
            "manifest": self.manifests.newest(log.id),
            "committed": [one.plan_id for one in merges.committed if plan is None or one.plan_id != plan.id],
        }

    # -- tasks ---------------------------------------------------------------------------------------------

    @property
    def is_awaited(self) -> bool:
        """Whether a client is waiting for a reply: then there is no pause after failures."""
        return bool(self._queue) or any(plan.waiting for plan in self._plans.values())

    @property
    def is_urgent(self) -> bool:
        return bool(self._queue or self._committing() is not None)

    @property
    def has_work(self) -> bool:
        if self.is_urgent or not self.is_loaded:
            return self.is_urgent
        return bool(self._ended_plans or self._committer.unpublished or self.manifests.due or self._is_due())

    def _committing(self) -> ActivePlan | None:
        return next((plan for plan in self._plans.values() if plan.committing), None)

    def _is_due(self) -> bool:
        due_ms = self.next_due_ms()
        return due_ms is not None and due_ms <= self._shard.state.now_ms

    def next_due_ms(self) -> int | None:
        """When the next pin, plan or retired segment expires, in engine time."""
        if not self.is_loaded:
            return None
        plans = [
            plan.used_ms + self._config.plan_ttl_ms for plan in self._plans.values() if not plan.committing
        ]
        times = [self.manifests.next_expiry_ms(), self.retirement.next_due_ms(), min(plans, default=None)]
        return min((at_ms for at_ms in times if at_ms is not None), default=None)

    @property
    def next_progress_ms(self) -> int | None:
        """When the next client has to be told that a commit is still running, by the monotonic clock."""
        return min(
            (at_ms for plan in self._plans.values() for at_ms, _ in plan.waiting),
            default=None,
        )

    def send_progress(self) -> None:
        """Reply with the progress of the commit to clients that have waited long enough."""
        for plan in self._plans.values():
            late = [token for at_ms, token in plan.waiting if at_ms <= self._mono_ms]
            plan.waiting = [entry for entry in plan.waiting if entry[0] > self._mono_ms]
            for token in late:
                body: dict[str, object] = {
                    "plan_id": plan.id,
                    "state": "committing",
                    "progress": round(plan.progress, 3),
                }
                self._reply(token, mrg.MergeReply(body, is_final=False))

    def next_task(self) -> Steps:
        if self._queue:
            return self._execute(*self._queue.popleft())
        plan = self._committing()
        if plan is not None:
            return self._commit(plan)
        if self._committer.unpublished:
            return self._committer.remove_unpublished()
        if self._ended_plans:
            return self._remove_staging(next(iter(self._ended_plans)))
        if self.manifests.due:
            return self._export(self.manifests.due.pop(next(iter(self.manifests.due))))
        return self._expire()

    # -- commands ------------------------------------------------------------------------------------------

    def _execute(self, token: object, command: mrg.MergeCommand) -> Steps:
        log: TopicLog | None = None
        try:
            log = self._find(command.topic)
            if isinstance(command, mrg.GetMerges | mrg.RenewPlan | mrg.CommitPlan):
                self._reply_directly(token, log, command)
                return
            body = yield from self._run(log, command)
            self._reply(token, mrg.MergeReply(body))
        except OSError as error:
            if log is not None and log.dropped:  # its files were removed; the cold tier is fine
                self._reply(token, TopicNotFound(log.name))
                return
            self._reply(token, _store_failed(error))
            raise
        except TopicsError as error:
            self._reply(token, error)
        except GeneratorExit:
            self._reply(token, self._interrupted())
            raise
        finally:
            self._checkpointer.cold_job_topic = None

    def _run(self, log: TopicLog, command: mrg.MergeCommand) -> Generator[Step, Any, dict[str, object]]:
        match command:
            case mrg.PlanMerge():
                return (yield from self._make_plan(log, command))
            case mrg.AbandonPlan():
                plan = self._plan(log, command.plan_id)
                plan.check_lease(command.lease, self._mono_ms)
                if plan.committing:
                    raise PlanLeased(plan.id, plan.lease_left_ms(self._mono_ms))
                self._abandon(plan, PlanNotFound(plan.id))
                yield from self._remove_staging(plan.id)
                return {"plan_id": plan.id, "state": "abandoned"}
            case mrg.PinSnapshot():
                self._checkpointer.cold_job_topic = log
                snapshot_id, expires_at_ms, manifest = yield from self.manifests.pin(log, command.ttl_ms)
                return {
                    "snapshot_id": snapshot_id,
                    "expires_at_ms": expires_at_ms,
                    "cold_dir": self._config.cold_dir,
                    "manifest": manifest.number,
                    "path": f"{self._reader.topic_dir(log.id)}/MANIFEST-{manifest.number}",
                    "topic": log.name,
                    "topic_id": manifest.topic_id,
                    "earliest_seq": manifest.earliest_seq,
                    "cold_next_seq": manifest.cold_next_seq,
                    "head_seq": manifest.head_seq,
                }
            case mrg.RenewSnapshot():
                ends = yield from self.manifests.renew(log, command.snapshot_id, command.ttl_ms)
                return {"snapshot_id": command.snapshot_id, "expires_at_ms": ends}
            case mrg.ReleaseSnapshot():
                yield from self.manifests.release(log, command.snapshot_id)
                self.retirement.recheck(log.id)
                return {"snapshot_id": command.snapshot_id, "released": True}
        raise AssertionError(f"no handler for {command}")

    def _make_plan(self, log: TopicLog, command: mrg.PlanMerge) -> Generator[Step, Any, dict[str, object]]:
        plan = self._plans.get(log.id)
        if plan is not None:
            left_ms = plan.lease_left_ms(self._mono_ms)
            mine = bool(command.lease) and command.lease == plan.lease
            if left_ms and not mine:
                raise PlanLeased(plan.id, left_ms)
            reusable = yield from self._reusable(log, plan, command)
            if reusable is not None:
                return self._grant_lease(plan, reusable, command)
            if plan.committing:
                raise PlanLeased(plan.id, max(left_ms, 1))
            self._abandon(plan, PlanNotFound(plan.id))
        if len(self._plans) >= limits.PLANS_MAX:
            raise Throttled(
                "too many topics of this shard have a plan; commit or abandon some",
                limit="plans",
                max=limits.PLANS_MAX,
            )
        self._checkpointer.cold_job_topic = log
        made = yield from self._planner.make(log, command.parameters)
        if made is None:
            return {"topic": log.name, "plan_id": None, "groups": []}
        plan = ActivePlan(log, made, self._shard.state.now_ms)
        if log.dropped or log.erasing:
            self._ended_plans[plan.id] = None
            raise InputsChanged("the topic changed while the plan was made; request a new plan")
        self._plans[log.id] = plan
        self._ended_plans.pop(plan.id, None)
        return self._grant_lease(plan, made, command)

    def _reusable(
        self, log: TopicLog, plan: ActivePlan, command: mrg.PlanMerge
    ) -> Generator[Step, Any, PlanFile | None]:
        """The existing plan's file, if the plan matches the request and any of its groups can still be merged."""
        if plan.parameters != command.parameters or log.erasing:
            return None
        while log.is_unloaded:
            self._shard.state.loader(log)
            yield WaitSynced(0)
        if not any(self._committer.is_current(log, group) for group in plan.groups):
            return None
        found: PlanFile | None = yield Blocking(COLD_IO_KIND, partial(self._planner.read, plan.id))
        return found

    def _grant_lease(self, plan: ActivePlan, made: PlanFile, command: mrg.PlanMerge) -> dict[str, object]:
        lease = command.lease if command.lease == plan.lease else ""
        plan.take(lease or f"{self._disk.random_u64():016x}", command.lease_ms, self._mono_ms)
        plan.used_ms = self._shard.state.now_ms + command.lease_ms
        return {
            "topic": made.topic,
            "topic_id": made.topic_id,
            "plan_id": made.plan_id,
            "lease": plan.lease,
            "lease_ms": plan.lease_ms,
            "delete_epoch": made.delete_epoch,
            "cold_dir": self._config.cold_dir,
            "staging": made.staging,
            "groups": made.groups,
        }

    # -- commit --------------------------------------------------------------------------------------------

    def _commit(self, plan: ActivePlan) -> Steps:
        """Run the next step of a commit: one group, or the publication."""
        try:
            is_done = yield from self._committer.advance(plan)
            if is_done:
                self._plans.pop(plan.log.id, None)
                self._ended_plans[plan.id] = None
                # The inputs of a failed group may have been replaced and kept only by the plan.
                self.retirement.recheck(plan.log.id)
                yield from self._finish_commit(plan)
        except OSError as error:
            if plan.log.dropped:
                self._abandon(plan, TopicNotFound(plan.log.name))
                return
            plan.end_commit(self._replying(_store_failed(error)))
            raise
        except CommitStopped:
            plan.end_commit(self._replying(InputsChanged("the plan was abandoned; request a new one")))
        except OutputInvalid as error:
            plan.end_commit(self._replying(error))
        except TopicsError as error:
            self._abandon(plan, error)
        except GeneratorExit:
            plan.end_commit(self._replying(self._interrupted()))
            raise
        finally:
            self._checkpointer.cold_job_topic = None

    def _finish_commit(self, plan: ActivePlan) -> Steps:
        """Write a manifest, then reply. The commit is done even if the manifest fails: then it is written later."""
        log = plan.log
        done = log.merges.find(plan.id)
        assert done is not None
        try:
            yield from self.manifests.export(log)
        finally:
            plan.end_commit(self._replying(mrg.MergeReply(committed_body(done))))

    def _replying(self, answer: object) -> Callable[[object], None]:
        return lambda token: self._reply(token, answer)

    # -- abandoned plans -----------------------------------------------------------------------------------

    def _abandon(self, plan: ActivePlan, reason: TopicsError) -> None:
        """Drop a plan and schedule the removal of its files."""
        if self._plans.get(plan.log.id) is plan:
            del self._plans[plan.log.id]
        plan.watch.stopped = True
        self._ended_plans[plan.id] = None
        self._committer.discard(plan)
        plan.end_commit(self._replying(reason))
        self.retirement.recheck(plan.log.id)

    def abandon_plan_of(self, log: TopicLog) -> None:
        """Abandon the topic's plan, because records are being erased."""
        plan = self._plans.get(log.id)
        if plan is not None:
            self._abandon(plan, InputsChanged("records of this topic were erased; request a new plan"))

    def erase_steps(self, log: TopicLog) -> Steps:
        """Remove all copies that plans have made. Unpublished outputs first: rewritten segments get the same names."""
        self.abandon_plan_of(log)
        yield from self._committer.remove_unpublished()
        for plan_id in list(self._ended_plans):
            yield from self._remove_staging(plan_id)

    def dropped(self, topic_id: int) -> None:
        plan = self._plans.get(topic_id)
        if plan is not None:
            self._abandon(plan, TopicNotFound(plan.log.name))
        self.manifests.forget(topic_id)
        self.retirement.forget(topic_id)

    def refuse(self, error: TopicsError) -> None:
        """Reply with this error to all waiting clients."""
        queue, self._queue = self._queue, deque()
        for token, _ in queue:
            self._reply(token, error)
        for plan in self._plans.values():
            if plan.committing:
                plan.end_commit(self._replying(error))

    def stop(self) -> None:
        self._stopped = True
        for plan in self._plans.values():
            plan.watch.stopped = True
        self.refuse(ColdStoreFailed("the server is stopping; try again shortly"))

    def _interrupted(self) -> TopicsError:
        if self._shard.state.read_only is not None:
            return ShardReadOnly(self._shard.state.read_only, unknown=True)
        return ColdStoreFailed("the server is stopping; try again shortly")

    # -- cleanup -------------------------------------------------------------------------------------------

    def _remove_staging(self, plan_id: str) -> Steps:
        """Remove the staging of a plan. Listed again after each round, because a job may still be writing."""
        store = self._store
        assert store is not None
        prefix = f"{staging_dir(plan_id)}/"
        for _ in range(8):
            keys = yield Blocking(COLD_IO_KIND, lambda: store.list(prefix))
            if not keys:
                break
            yield from delete_keys(store, keys)
        self._ended_plans.pop(plan_id, None)

    def _export(self, log: TopicLog) -> Steps:
        if log.dropped:
            return
        self._checkpointer.cold_job_topic = log
        try:
            yield from self.manifests.export(log)
        finally:
            self._checkpointer.cold_job_topic = None

    def _expire(self) -> Steps:
        """Remove expired pins, plans and retired segments."""
        yield from self.manifests.expire()
        self.retirement.recheck()
        old_ms = self._shard.state.now_ms - self._config.plan_ttl_ms
        for plan in list(self._plans.values()):
            if plan.used_ms <= old_ms and not plan.committing:
                self._abandon(plan, PlanNotFound(plan.id))
        yield from self.retirement.remove_due()

    # -- after a start -------------------------------------------------------------------------------------

    def load(self, by_topic: dict[int, list[tuple[str, str]]]) -> Steps:
        """Load manifests, pins and plans from the store."""
        for topic_id, files in by_topic.items():
            if topic_id in self._shard.state.by_id:
                yield from self.manifests.load(topic_id, [name for _, name in files])
        store = self._store
        assert store is not None
        found: dict[str, bool] = {}
        for key in (yield Blocking(COLD_IO_KIND, lambda: store.list(f"{STAGING}/"))):
            of = parse_staging_key(key)
            if of is not None:
                found[of[0]] = found.get(of[0], False) or of[1] == PLAN_NAME
        for plan_id, has_plan in found.items():
            yield from self._load_plan(plan_id, has_plan=has_plan)

    def _load_plan(self, plan_id: str, *, has_plan: bool) -> Steps:
        store = self._store
        assert store is not None
        if not has_plan:
            self._ended_plans[plan_id] = None  # a job wrote these files after the plan had ended
            return
        key = f"{staging_dir(plan_id)}/{PLAN_NAME}"
        try:
            raw = yield Blocking(COLD_IO_KIND, lambda: read_small_file(store, key, PLAN_BYTES_MAX))
            made = decode_plan(key, raw)
            topic_id = int(made.topic_id, 16)
        except FileNotFoundError:
            return  # removed in the meantime by the shard that owns it
        except (Corrupt, ValueError):
            self._ended_plans[plan_id] = None
            return
        if topic_id not in self._shard.state.owned_ids:
            return
        log = self._shard.state.by_id.get(topic_id)
        is_committed = log is not None and log.merges.find(plan_id) is not None
        if log is None or is_committed or made.plan_id != plan_id or log.id in self._plans:
            self._ended_plans[plan_id] = None
            return
        self._plans[log.id] = ActivePlan(log, made, self._shard.state.now_ms)

    def _is_planned(self, topic_id: int, name: tuple[int, int]) -> bool:
        plan = self._plans.get(topic_id)
        return plan is not None and name in plan.inputs


def _store_failed(error: OSError) -> ColdStoreFailed:
    return ColdStoreFailed(f"the cold tier failed: {error}; try again shortly")
