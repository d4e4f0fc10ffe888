"""Merging cold segments with the help of jobs outside: the server plans and publishes, a job reads and writes in between.

    plan       runs of neighbouring cold segments are chosen; plan.json and the marks of dead rows are put into staging; a lease is given
    (job)      makes one segment of each run, in staging
    commit     each output is compared with its inputs and copied into place; one log entry swaps all of them in; a manifest is written
    retire     the old files stay for a while, and as long as a pin or a plan needs them

Only the log entry counts: a crash before it leaves the old segments and some files that the next start removes, a crash after it
the new ones. The lease saves work and decides nothing. One plan a topic, one step at a time for the whole shard, off the loop; who asks waits.
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
from topics.engine.shard.state_machine import Shard
from topics.engine.storage.cold_files import MOVE_KIND, delete_keys, read_whole
from topics.engine.storage.merge_plan_file import (
    PLAN_NAME,
    STAGING,
    PlanFile,
    decode_plan,
    plan_of_key,
    staging_of,
)
from topics.engine.topic.log import TopicLog
from topics.engine.topic.merges import Committed
from topics.engine.upkeep.checkpoint import Checkpointer

Asked = tuple[object, mrg.MergeCommand]


class MergeService:
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
        self._asked: deque[Asked] = deque()
        self._plans: dict[int, ActivePlan] = {}  # by topic
        self._trash: dict[str, None] = {}  # plans whose staging is to be removed
        self._committer = MergeCommitter(
            disk, store, shard, reader, checkpointer, self._planner, self.manifests, self.retirement
        )
        self.is_known = False  # the store was looked at: what plans and pins there are is known
        self._stopped = ""

    # -- questions -----------------------------------------------------------------------------------------

    def handle(self, token: object, command: mrg.MergeCommand) -> None:
        """Answer, or remember who waits. Raises what is to be answered at once."""
        if self._store is None:
            raise NoColdTier
        log = self._find(command.topic)
        if self._stopped:
            raise ColdStoreFailed("the server stops; try again shortly")
        if isinstance(command, mrg.GetMerges | mrg.RenewPlan | mrg.CommitPlan) and self.is_known:
            self._answer_at_once(token, log, command)
            return
        if not isinstance(command, mrg.GetMerges) and self._shard.read_only is not None:
            raise ShardReadOnly(self._shard.read_only)
        if len(self._asked) >= limits.MERGE_REQUESTS_MAX:
            raise Throttled(
                "too many calls about merges and snapshots wait already; come back later",
                limit="consolidation",
                max=limits.MERGE_REQUESTS_MAX,
            )
        self._asked.append((token, command))

    def _find(self, topic: str) -> TopicLog:
        log = self._shard.published.get(topic)
        if log is None:
            raise TopicNotFound(topic)
        return log

    def _answer_at_once(
        self, token: object, log: TopicLog, command: mrg.GetMerges | mrg.RenewPlan | mrg.CommitPlan
    ) -> None:
        """Of these nothing is in the store."""
        if isinstance(command, mrg.GetMerges):
            self._reply(token, mrg.MergeReply(self._status(log)))
            return
        done = log.merges.find(command.plan_id)
        if isinstance(command, mrg.CommitPlan) and done is not None:
            self._answer_committed(token, log, command, done)
            return
        plan = self._plan(log, command.plan_id)
        plan.check_lease(command.lease, self._mono_ms)
        if isinstance(command, mrg.RenewPlan):
            plan.take(plan.lease, plan.lease_ms, self._mono_ms)
            self._reply(token, mrg.MergeReply({"lease_ms": plan.lease_ms}))
            return
        if self._shard.read_only is not None:
            raise ShardReadOnly(self._shard.read_only)
        plan.begin_commit()
        plan.waiting.append((self._mono_ms + command.wait_ms, token))

    def _answer_committed(
        self, token: object, log: TopicLog, command: mrg.CommitPlan, done: Committed
    ) -> None:
        """Also to whoever asks again; but not while its entry waits for a sync."""
        plan = self._plans.get(log.id)
        if plan is not None and plan.committing and plan.id == done.plan_id:
            plan.waiting.append((self._mono_ms + command.wait_ms, token))
        else:
            self._reply(token, mrg.MergeReply(committed_body(done)))

    def _plan(self, log: TopicLog, plan_id: str) -> ActivePlan:
        plan = self._plans.get(log.id)
        if plan is None or plan.id != plan_id:
            raise PlanNotFound(plan_id)
        return plan

    @property
    def _mono_ms(self) -> int:
        return self._shard.clock.mono_ms

    def _reply(self, token: object, answer: object) -> None:
        self._shard.ready.append((token, answer))

    def _status(self, log: TopicLog) -> dict[str, object]:
        plan, merges = self._plans.get(log.id), log.merges
        described: dict[str, object] | None = None
        if plan is not None:
            left_ms = plan.lease_left_ms(self._mono_ms)
            described = {
                "plan_id": plan.id,
                "groups": len(plan.groups),
                "bytes": plan.data_bytes,
                "leased_until_ms": self._shard.now_ms + left_ms if left_ms else None,
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

    # -- what there is to do -------------------------------------------------------------------------------

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for an answer: then it is tried at once, whatever has failed before."""
        return bool(self._asked) or any(plan.waiting for plan in self._plans.values())

    @property
    def is_urgent(self) -> bool:
        return bool(self._asked or self._committing() is not None)

    @property
    def has_work(self) -> bool:
        if self.is_urgent or not self.is_known:
            return self.is_urgent
        return bool(self._trash or self._committer.doubtful or self.manifests.due or self._is_due())

    def _committing(self) -> ActivePlan | None:
        return next((plan for plan in self._plans.values() if plan.committing), None)

    def _is_due(self) -> bool:
        due_ms = self.next_due_ms()
        return due_ms is not None and due_ms <= self._shard.now_ms

    def next_due_ms(self) -> int | None:
        """When time ends a pin, a plan or a retired segment, by the engine's time."""
        if not self.is_known:
            return None
        plans = [
            plan.used_ms + self._config.plan_ttl_ms for plan in self._plans.values() if not plan.committing
        ]
        times = [self.manifests.next_expiry_ms(), self.retirement.next_due_ms(), min(plans, default=None)]
        return min((at_ms for at_ms in times if at_ms is not None), default=None)

    @property
    def wait_until_ms(self) -> int | None:
        """When somebody has to hear that a commit goes on, by the monotonic clock."""
        return min(
            (at_ms for plan in self._plans.values() for at_ms, _ in plan.waiting),
            default=None,
        )

    def pass_time(self) -> None:
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
        if self._asked:
            return self._serve(*self._asked.popleft())
        plan = self._committing()
        if plan is not None:
            return self._commit(plan)
        if self._committer.doubtful:
            return self._committer.remove_doubtful()
        if self._trash:
            return self._empty(next(iter(self._trash)))
        if self.manifests.due:
            return self._export(self.manifests.due.pop(next(iter(self.manifests.due))))
        return self._expire()

    # -- serving -------------------------------------------------------------------------------------------

    def _serve(self, token: object, command: mrg.MergeCommand) -> Steps:
        log: TopicLog | None = None
        try:
            log = self._find(command.topic)
            if isinstance(command, mrg.GetMerges | mrg.RenewPlan | mrg.CommitPlan):
                self._answer_at_once(token, log, command)
                return
            body = yield from self._carry_out(log, command)
            self._reply(token, mrg.MergeReply(body))
        except OSError as error:
            if log is not None and log.dropped:  # its files went from under this, and the tier is well
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

    def _carry_out(self, log: TopicLog, command: mrg.MergeCommand) -> Generator[Step, Any, dict[str, object]]:
        match command:
            case mrg.PlanMerge():
                return (yield from self._make_plan(log, command))
            case mrg.AbandonPlan():
                plan = self._plan(log, command.plan_id)
                plan.check_lease(command.lease, self._mono_ms)
                if plan.committing:
                    raise PlanLeased(plan.id, plan.lease_left_ms(self._mono_ms))
                self._give_up(plan, PlanNotFound(plan.id))
                yield from self._empty(plan.id)
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
                self.retirement.reconsider(log.id)
                return {"snapshot_id": command.snapshot_id, "released": True}
        raise AssertionError(f"a command without a handler: {command}")

    def _make_plan(self, log: TopicLog, command: mrg.PlanMerge) -> Generator[Step, Any, dict[str, object]]:
        plan = self._plans.get(log.id)
        if plan is not None:
            left_ms = plan.lease_left_ms(self._mono_ms)
            mine = bool(command.lease) and command.lease == plan.lease
            if left_ms and not mine:
                raise PlanLeased(plan.id, left_ms)
            still = yield from self._still_good(log, plan, command)
            if still is not None:
                return self._leased(plan, still, command)
            if plan.committing:
                raise PlanLeased(plan.id, max(left_ms, 1))
            self._give_up(plan, PlanNotFound(plan.id))
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
        plan = ActivePlan(log, made, self._shard.now_ms)
        if log.dropped or log.erasing:
            self._trash[plan.id] = None
            raise InputsChanged("the topic has changed meanwhile; ask again")
        self._plans[log.id] = plan
        self._trash.pop(plan.id, None)
        return self._leased(plan, made, command)

    def _still_good(
        self, log: TopicLog, plan: ActivePlan, command: mrg.PlanMerge
    ) -> Generator[Step, Any, PlanFile | None]:
        """The plan as it was made, if it is what is asked for and some of it can still be done."""
        if plan.parameters != command.parameters or log.erasing:
            return None
        while log.is_unloaded:
            self._shard.loader(log)
            yield WaitSynced(0)
        if not any(self._committer.is_current(log, group) for group in plan.groups):
            return None
        found: PlanFile | None = yield Blocking(MOVE_KIND, partial(self._planner.read, plan.id))
        return found

    def _leased(self, plan: ActivePlan, made: PlanFile, command: mrg.PlanMerge) -> dict[str, object]:
        lease = command.lease if command.lease == plan.lease else ""
        plan.take(lease or f"{self._disk.random_u64():016x}", command.lease_ms, self._mono_ms)
        plan.used_ms = self._shard.now_ms + command.lease_ms
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
        """One step more of a commit: a group, or the end."""
        try:
            is_done = yield from self._committer.go_on(plan)
            if is_done:
                self._plans.pop(plan.log.id, None)
                self._trash[plan.id] = None
                self.retirement.reconsider(
                    plan.log.id
                )  # of a group that failed, inputs may be nobody's by now
                yield from self._tell(plan)
        except OSError as error:
            if plan.log.dropped:
                self._give_up(plan, TopicNotFound(plan.log.name))
                return
            plan.end_commit(self._replying(_store_failed(error)))
            raise
        except CommitStopped:
            plan.end_commit(self._replying(InputsChanged("the plan was given up")))
        except OutputInvalid as error:
            plan.end_commit(self._replying(error))
        except TopicsError as error:
            self._give_up(plan, error)
        except GeneratorExit:
            plan.end_commit(self._replying(self._interrupted()))
            raise
        finally:
            self._checkpointer.cold_job_topic = None

    def _tell(self, plan: ActivePlan) -> Steps:
        """It is done, whatever becomes of the rest: a manifest that cannot be written now is written later."""
        log = plan.log
        done = log.merges.find(plan.id)
        assert done is not None
        try:
            yield from self.manifests.export(log)
        finally:
            plan.end_commit(self._replying(mrg.MergeReply(committed_body(done))))

    def _replying(self, answer: object) -> Callable[[object], None]:
        return lambda token: self._reply(token, answer)

    # -- giving up -----------------------------------------------------------------------------------------

    def _give_up(self, plan: ActivePlan, reason: TopicsError) -> None:
        """Forget a plan, and remove what there is of it."""
        if self._plans.get(plan.log.id) is plan:
            del self._plans[plan.log.id]
        plan.watch.stopped = True
        self._trash[plan.id] = None
        self._committer.discard(plan)
        plan.end_commit(self._replying(reason))
        self.retirement.reconsider(plan.log.id)

    def stop_plan(self, log: TopicLog) -> None:
        """What is being made of this topic's segments must not be: an erase has come, or a drop."""
        plan = self._plans.get(log.id)
        if plan is not None:
            self._give_up(plan, InputsChanged("records of this topic are erased; ask for another plan"))

    def erase_steps(self, log: TopicLog) -> Steps:
        """No copy may be left where jobs work, or of what they have made. What was in place of the plan goes first: what is written
        again has the same name.
        """
        self.stop_plan(log)
        yield from self._committer.remove_doubtful()
        for plan_id in list(self._trash):
            yield from self._empty(plan_id)

    def dropped(self, topic_id: int) -> None:
        plan = self._plans.get(topic_id)
        if plan is not None:
            self._give_up(plan, TopicNotFound(plan.log.name))
        self.manifests.forget(topic_id)
        self.retirement.forget(topic_id)

    def refuse(self, error: TopicsError) -> None:
        """Nothing can be done for those who wait."""
        asked, self._asked = self._asked, deque()
        for token, _ in asked:
            self._reply(token, error)
        for plan in self._plans.values():
            if plan.committing:
                plan.end_commit(self._replying(error))

    def stop(self) -> None:
        self._stopped = "the server stops"
        for plan in self._plans.values():
            plan.watch.stopped = True
        self.refuse(ColdStoreFailed("the server stops; try again shortly"))

    def _interrupted(self) -> TopicsError:
        if self._shard.read_only is not None:
            return ShardReadOnly(self._shard.read_only, unknown=True)
        return ColdStoreFailed("the server stops; try again shortly")

    # -- tidying up ----------------------------------------------------------------------------------------

    def _empty(self, plan_id: str) -> Steps:
        """Remove the staging of a plan: until nothing is there, since a job may still write."""
        store = self._store
        assert store is not None
        prefix = f"{staging_of(plan_id)}/"
        for _ in range(8):
            keys = yield Blocking(MOVE_KIND, lambda: store.list(prefix))
            if not keys:
                break
            yield from delete_keys(store, keys)
        self._trash.pop(plan_id, None)

    def _export(self, log: TopicLog) -> Steps:
        if log.dropped:
            return
        self._checkpointer.cold_job_topic = log
        try:
            yield from self.manifests.export(log)
        finally:
            self._checkpointer.cold_job_topic = None

    def _expire(self) -> Steps:
        """What time has ended."""
        yield from self.manifests.expire()
        self.retirement.reconsider()
        old_ms = self._shard.now_ms - self._config.plan_ttl_ms
        for plan in list(self._plans.values()):
            if plan.used_ms <= old_ms and not plan.committing:
                self._give_up(plan, PlanNotFound(plan.id))
        yield from self.retirement.remove_due()

    # -- after a start -------------------------------------------------------------------------------------

    def learn(self, by_topic: dict[int, list[tuple[str, str]]]) -> Steps:
        """What the store has of manifests, pins and plans."""
        for topic_id, files in by_topic.items():
            if topic_id in self._shard.by_id:
                yield from self.manifests.learn(topic_id, [name for _, name in files])
        store = self._store
        assert store is not None
        found: dict[str, bool] = {}
        for key in (yield Blocking(MOVE_KIND, lambda: store.list(f"{STAGING}/"))):
            of = plan_of_key(key)
            if of is not None:
                found[of[0]] = found.get(of[0], False) or of[1] == PLAN_NAME
        for plan_id, has_plan in found.items():
            yield from self._learn_plan(plan_id, has_plan=has_plan)

    def _learn_plan(self, plan_id: str, *, has_plan: bool) -> Steps:
        store = self._store
        assert store is not None
        if not has_plan:
            self._trash[plan_id] = None  # what a job has written for a plan that was over
            return
        key = f"{staging_of(plan_id)}/{PLAN_NAME}"
        try:
            raw = yield Blocking(MOVE_KIND, lambda: read_whole(store, key, PLAN_BYTES_MAX))
            made = decode_plan(key, raw)
            topic_id = int(made.topic_id, 16)
        except FileNotFoundError:
            return  # its owner has removed it meanwhile
        except (Corrupt, ValueError):
            self._trash[plan_id] = None
            return
        if topic_id not in self._shard.owned_ids:
            return
        log = self._shard.by_id.get(topic_id)
        known = log is not None and log.merges.find(plan_id) is not None
        if log is None or known or made.plan_id != plan_id or log.id in self._plans:
            self._trash[plan_id] = None
            return
        self._plans[log.id] = ActivePlan(log, made, self._shard.now_ms)

    def _is_planned(self, topic_id: int, name: tuple[int, int]) -> bool:
        plan = self._plans.get(topic_id)
        return plan is not None and name in plan.inputs


def _store_failed(error: OSError) -> ColdStoreFailed:
    return ColdStoreFailed(f"the cold tier cannot be used: {error}; try again shortly")
