"""Merging the cold segments of a topic: get a plan from the server, merge its groups, renew the lease, commit.

    plan     the server chooses and pins the inputs, and grants a lease; a rerun gets the same plan and resumes it
    merge    one task per group, in staging; finished groups are not repeated
    renew    three times per lease; if another job holds the lease, this one ends
    commit   the server compares every byte with the inputs and publishes; until then nothing has changed

Crashes and repetitions are harmless: only the server's response to the commit counts.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from spark_pipeline.jobs.engines import Engine, last_line
from spark_pipeline.jobs.progress import Progress
from spark_pipeline.tasks.merge import MergeResult, MergeTask, merge_group
from spark_pipeline.tasks.server import Refused, Server, Unreachable
from topics.cli.formatting import format_size
from topics.engine.storage.merge_plan_file import PlanGroup

POLL_S = 0.2
LEASE_MS = 60_000
LEASE_MS_LEAST = 1000
RELEASE_S = 2.0  # timeout for returning the lease on a stop
COMMIT_WAIT_MS = 10_000
PLANS_MAX = 1000  # per run and topic; never reached, because each plan reduces the number of segments
LEASE_TRIES = 3


class Parameters(msgspec.Struct, frozen=True):
    """What to merge; None: the server's default."""

    target_bytes: int | None = None
    min_garbage: float | None = None
    min_segments: int | None = None
    max_groups: int | None = None

    def body(self) -> dict[str, Any]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class Plan(msgspec.Struct):
    """A plan of the server, as far as a job needs it."""

    plan_id: str | None
    groups: list[PlanGroup]
    topic: str = ""
    topic_id: str = ""
    lease: str = ""
    lease_ms: int = LEASE_MS
    cold_dir: str = ""
    staging: str = ""

    @property
    def bytes(self) -> int:
        return sum(group.data_bytes for group in self.groups)

    @property
    def segments(self) -> int:
        return sum(len(group.inputs) for group in self.groups)


@dataclass(slots=True)
class Outcome:
    """The result for one topic."""

    topic: str
    state: str = "nothing_to_do"  # committed · nothing_to_do · leased · lost · changed · failed · gone
    plans: int = 0
    groups: int = 0
    resumed: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    failed: list[dict[str, Any]] = field(default_factory=list)
    message: str = ""


class JobFailed(Exception):
    """A task failed for a reason other than damaged records."""


class LeaseLost(Exception):
    """Another job holds the plan now, or it no longer exists."""


def request_plan(
    server: Server, topic: str, parameters: Parameters, lease: str = "", lease_ms: int = LEASE_MS
) -> Plan:
    body = parameters.body() | {"lease_ms": lease_ms} | ({"lease": lease} if lease else {})
    return msgspec.convert(server.post(server.topic(topic, "/consolidation"), body), Plan, strict=False)


def preview_plan(server: Server, topic: str, parameters: Parameters) -> Plan:
    """Get the plan that a job would get. A plan created for the preview is abandoned again; an existing one stays."""
    path = server.topic(topic, "/consolidation")
    existing = server.get(path)["plan"]
    # A short lease on an existing plan, since a job may need it soon.
    plan = request_plan(server, topic, parameters, lease_ms=LEASE_MS if existing is None else 1000)
    if plan.plan_id is not None and (existing is None or existing["plan_id"] != plan.plan_id):
        abandon(server, topic, plan)
    return plan


def abandon(server: Server, topic: str, plan: Plan) -> None:
    """Tell the server that the plan will not be carried out."""
    try:
        server.post(server.topic(topic, f"/consolidation/{plan.plan_id}/abandon"), {"lease": plan.lease})
    except Refused as error:
        if error.code not in {"lease_lost", "plan_not_found"}:
            raise  # otherwise it no longer exists, or another job holds it


class Consolidation:
    """A merge job for one topic. `cold_dir`: where the cold tier is mounted here, if different from the server."""

    def __init__(
        self,
        server: Server,
        topic: str,
        engine: Engine,
        progress: Progress,
        parameters: Parameters,
        *,
        cold_dir: str = "",
        lease_ms: int = LEASE_MS,
    ) -> None:
        self._server = server
        self._topic = topic
        self._engine = engine
        self._progress = progress
        self._parameters = parameters
        self._cold_dir = cold_dir
        self._lease_ms = lease_ms
        self._outcome = Outcome(topic)

    def run(self) -> Outcome:
        """Carry out plans until there is nothing left to do, or one has changed nothing.

        While a topic is being written, there is always something left: segments that have become cold, and segments
        just merged. These are for the next run: a plan must start after the end of the previous one, and within the
        records that existed when this run began.
        """
        head_seq = int(self._server.get(self._server.topic(self._topic, "?touch=false"))["head_seq"])
        done_seq = 0
        for _ in range(PLANS_MAX):
            try:
                plan = request_plan(self._server, self._topic, self._parameters, lease_ms=self._lease_ms)
            except Refused as error:
                if error.code != "plan_leased":
                    raise
                return self._end("leased", str(error))
            if plan.plan_id is None:
                break
            if not done_seq <= min(group.first_seq for group in plan.groups) <= head_seq:
                abandon(self._server, self._topic, plan)
                break
            done_seq = max(group.next_seq for group in plan.groups)
            try:
                if not self._carry_out(plan):
                    break
            except KeyboardInterrupt:
                self._release_lease(plan)
                raise
            except LeaseLost as error:
                return self._end("lost", str(error))
            except Refused as error:
                state = {"inputs_changed": "changed", "output_invalid": "failed"}.get(error.code)
                if state is None:
                    raise
                return self._end(state, str(error))
        return self._outcome

    def _end(self, state: str, message: str) -> Outcome:
        self._outcome.state, self._outcome.message = state, message
        self._progress.step(state, f"{self._topic}: {message}", topic=self._topic, message=message)
        return self._outcome

    def _carry_out(self, plan: Plan) -> bool:
        """Merge and commit; return whether anything was published."""
        self._progress.step(
            "plan",
            f"{self._topic}: plan {plan.plan_id}, merging {plan.segments} segments ({format_size(plan.bytes)}) into {len(plan.groups)}",
            topic=self._topic,
            plan_id=plan.plan_id,
            groups=len(plan.groups),
            segments=plan.segments,
            bytes=plan.bytes,
        )
        results = self._merge(plan)
        for result in results:
            self._report(result)
        answer = self._commit(plan)
        outcome = self._outcome
        outcome.plans += 1
        outcome.resumed += sum(result.resumed for result in results)
        outcome.groups += len(answer["groups"])
        outcome.bytes_in += sum(group["bytes_in"] for group in answer["groups"])
        outcome.bytes_out += sum(group["bytes_out"] for group in answer["groups"])
        outcome.failed += answer["failed"]
        outcome.state = "failed" if outcome.failed else "committed"
        self._progress.step(
            "commit",
            f"{self._topic}: published {len(answer['groups'])} segments in manifest {answer['manifest']}",
            topic=self._topic,
            plan_id=plan.plan_id,
            manifest=answer["manifest"],
            groups=len(answer["groups"]),
            failed=answer["failed"],
        )
        for failed in answer["failed"]:
            self._progress.step(
                "failed",
                f"{self._topic}: group {failed['group']} is left unchanged: {failed['segment']} {failed['reason']}",
                topic=self._topic,
                **failed,
            )
        return bool(answer["groups"])

    # -- merging -------------------------------------------------------------------------------------------

    def _merge(self, plan: Plan) -> list[MergeResult]:
        cold_dir = self._cold_dir or plan.cold_dir
        tasks = [MergeTask(cold_dir, plan.staging, plan.topic_id, group) for group in plan.groups]
        running = self._engine.start(merge_group, tasks)
        renewed_s = time.monotonic()
        try:
            while not running.wait(POLL_S):
                if time.monotonic() - renewed_s >= plan.lease_ms / 3000:
                    self._renew(plan)
                    renewed_s = time.monotonic()
                self._progress.bar(f"{self._topic}: merging", running.done(), len(tasks))
            return running.results()
        except (LeaseLost, Refused):
            running.cancel()
            raise
        except KeyboardInterrupt:
            running.cancel()
            raise
        except Exception as error:
            running.cancel()
            # The staging directory is deleted with the plan, even under running tasks. Renewing raises if that is the cause.
            self._renew(plan)
            self._release_lease(plan)
            raise JobFailed(f"{self._topic}: {last_line(error)}; run it again to resume") from error

    def _renew(self, plan: Plan) -> None:
        """Renew the lease. After a restart the server has no leases and grants a new one for the same plan."""
        try:
            self._call(plan, "renew", {"lease": plan.lease})
        except Refused as error:
            if error.code == "plan_not_found":
                raise LeaseLost(str(error)) from error
            if error.code != "lease_lost":
                raise
            self._lease_again(plan, error)

    def _release_lease(self, plan: Plan) -> None:
        """Keep the plan and the finished groups, and shorten the lease so that the next job can start soon."""
        server = Server(self._server.url, self._server.token_env, patience_s=0, answer_s=RELEASE_S)
        with suppress(Refused, Unreachable):
            request_plan(server, self._topic, self._parameters, plan.lease, LEASE_MS_LEAST)
        server.close()

    def _report(self, result: MergeResult) -> None:
        if result.failed:
            text = f"cannot be merged: {result.failed}"
        else:
            text = f"{format_size(result.bytes_in)} → {format_size(result.bytes_out)}, {result.live} of {result.rows} records"
            text += ", already done" if result.resumed else ""
        self._progress.step(
            "group",
            f"{self._topic}: group {result.group} {text}",
            topic=self._topic,
            group=result.group,
            rows=result.rows,
            live=result.live,
            bytes_in=result.bytes_in,
            bytes_out=result.bytes_out,
            resumed=result.resumed,
            failed=result.failed,
            segment=result.segment,
            **result.at,
        )

    # -- committing ----------------------------------------------------------------------------------------

    def _commit(self, plan: Plan) -> dict[str, Any]:
        """Wait until the commit is done. If the server has restarted, lease the same plan again."""
        tries = LEASE_TRIES
        while True:
            try:
                answer = self._call(plan, "commit", {"lease": plan.lease, "wait_ms": COMMIT_WAIT_MS})
            except Refused as error:
                if error.code != "lease_lost" or not tries:
                    raise
                tries -= 1
                self._lease_again(plan, error)
                continue
            if answer["state"] == "committed":
                return dict(answer)
            share = round(100 * float(answer.get("progress", 0)))
            self._progress.bar(f"{self._topic}: committing", share, 100)

    def _lease_again(self, plan: Plan, lost: Refused) -> None:
        try:
            again = request_plan(self._server, self._topic, self._parameters, lease_ms=self._lease_ms)
        except Refused as error:
            raise LeaseLost(str(lost)) from error
        if again.plan_id != plan.plan_id:
            raise LeaseLost(f"{lost}; the server has a new plan, run this again") from lost
        plan.lease, plan.lease_ms = again.lease, again.lease_ms

    def _call(self, plan: Plan, action: str, body: dict[str, Any]) -> Any:
        path = self._server.topic(self._topic, f"/consolidation/{plan.plan_id}/{action}")
        return self._server.post(path, body)
