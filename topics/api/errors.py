"""All error classes.

TopicsError
├── CallerError           the request cannot be carried out; nothing changed
│   ├── InvalidRequest · BatchTooLarge · RecordTooLarge
│   ├── TopicNotFound · TopicExistsIncompatible · SessionNotFound · NotAQueue · ConsumerNotFound · TransactionNotFound
│   ├── PlanNotFound · PlanLeased · LeaseLost · InputsChanged · OutputInvalid · SnapshotNotFound · NoColdTier
│   ├── Unauthorized · Forbidden
│   ├── Conflict          the topic is not in the state that the request requires
│   │   ├── TopicNotEmpty · TopicFull · WrongLastSeq · TransactionIncomplete · TransactionCommitted
│   │   └── ConsumerOverlap
│   └── Throttled         a limit is reached; try again later
│       └── OverGrant     this shard has used up its share of a server-wide cap
├── EraseDeferred         deleted, but not erased yet: the disk is full, or the cold tier is unreachable
├── ColdStoreFailed       the records are in the cold tier, which does not answer; nothing changed
├── Stopping              the server is stopping, and the command was not finished
├── ShardReadOnly         a write or sync failed, or the log is damaged; final until a restart
├── Corrupt               bytes on disk differ from what was written
├── UnsupportedFormat     a file format version that this program does not support
│   ├── UnknownFrame      a kind of log frame that this program does not know
│   └── FeatureAbsent     stored state of a feature that this program runs without
└── LogGap                log files are missing between snapshot and log
"""

from __future__ import annotations

from typing import ClassVar

# All codes that clients may get. Each protocol says what they are in its terms: `topics/protocols/http/errors.py`.
CODES = (
    "batch_too_large",
    "consumer_not_found",
    "consumer_overlap",
    "forbidden",
    "forbidden_origin",
    "header_fields_too_large",
    "inputs_changed",
    "internal",
    "invalid_request",
    "lease_lost",
    "method_not_allowed",
    "misdirected_request",
    "no_cold_tier",
    "not_a_queue",
    "not_acceptable",
    "not_found",
    "not_ready",
    "output_invalid",
    "payload_too_large",
    "plan_leased",
    "plan_not_found",
    "record_too_large",
    "request_timeout",
    "router_cycle",
    "router_not_found",
    "shutting_down",
    "snapshot_not_found",
    "throttled",
    "topic_exists_incompatible",
    "topic_full",
    "topic_not_empty",
    "topic_not_found",
    "txn_committed",
    "txn_incomplete",
    "txn_not_found",
    "unauthorized",
    "unsupported_media_type",
    "wrong_epoch",
    "wrong_last_seq",
)


class TopicsError(Exception):
    """Base class. `code` is stable, and is sent between processes together with `detail`."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, **detail: object) -> None:
        super().__init__(message)
        self.detail: dict[str, object] = detail


class CallerError(TopicsError):
    """The request is invalid or conflicts with the state; it changed nothing."""

    code = "invalid_request"


class InvalidRequest(CallerError):
    code = "invalid_request"


class BatchTooLarge(CallerError):
    code = "batch_too_large"


class RecordTooLarge(CallerError):
    code = "record_too_large"


class TopicNotFound(CallerError):
    code = "topic_not_found"

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic!r} does not exist; write to it or PUT it first", topic=topic)


class TopicExistsIncompatible(CallerError):
    code = "topic_exists_incompatible"

    def __init__(self, topic: str, existing_type: str, requested_type: str) -> None:
        super().__init__(
            f"topic {topic!r} is a {existing_type} and cannot become a {requested_type}",
            topic=topic,
            existing_type=existing_type,
            requested_type=requested_type,
        )


class NotAQueue(CallerError):
    code = "not_a_queue"

    def __init__(self, topic: str) -> None:
        super().__init__(
            f"topic {topic!r} is a log, not a queue; create a queue with PUT and type queue", topic=topic
        )


class ConsumerNotFound(CallerError):
    code = "consumer_not_found"

    def __init__(self, topic: str, consumer: str) -> None:
        super().__init__(
            f"topic {topic!r} has no consumer {consumer!r}; create it with PUT",
            topic=topic,
            consumer=consumer,
        )


class ForwardNotFound(CallerError):
    """No such rule. At a destination also: copies with this uid are rejected."""

    code = "router_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no router {name!r}; create it with PUT", router=name)


class ForwardCycle(CallerError):
    code = "router_cycle"

    def __init__(self, cycle: list[str]) -> None:
        path = " → ".join(cycle)
        super().__init__(f"records would go in a cycle, {path}; set allow_cycle to permit it", cycle=cycle)


class ForwardConflict(CallerError):
    """Conflict with another rule: a second source for one destination, or another source or destination under this name."""

    code = "topic_exists_incompatible"


class Conflict(CallerError):
    """The topic is not in the state that the request requires. The reply reveals that state, so it waits until it is durable."""


class TopicNotEmpty(Conflict):
    code = "topic_not_empty"

    def __init__(self, topic: str, count: int) -> None:
        super().__init__(f"topic {topic!r} still holds {count} records", topic=topic, count=count)


class TopicFull(Conflict):
    code = "topic_full"


class ConsumerOverlap(Conflict):
    """Two consumers of a work queue would get the same records. `consumer` is the existing one; "" is the queue's own."""

    code = "consumer_overlap"

    def __init__(self, topic: str, consumer: str, other: str) -> None:
        first, second = (repr(name) if name else "the queue's own consumer" for name in (consumer, other))
        super().__init__(
            f"the filters of {first} and {second} overlap; with retention work_queue each record of {topic!r} may "
            "match only one consumer",
            topic=topic,
            consumer=consumer,
        )


class WrongLastSeq(Conflict):
    """The last seq is not the one that a conditional append expected; nothing was appended."""

    code = "wrong_last_seq"

    def __init__(self, topic: str, expected: int, actual: int, tag: str | None = None) -> None:
        whose = repr(topic) if tag is None else f"tag {tag!r} in {topic!r}"
        detail: dict[str, object] = {"topic": topic, "expected": expected, "actual": actual}
        if tag is not None:
            detail["tag"] = tag
        super().__init__(f"the last seq of {whose} is {actual}, not {expected}", **detail)


class WrongEpoch(Conflict):
    """The seq belongs to an earlier topic of this name, or has been reused for another record."""

    code = "wrong_epoch"

    def __init__(self, topic: str, expected: str, actual: str) -> None:
        super().__init__(
            f"the epoch of {topic!r} is {actual}, not {expected}: that seq belongs to another record now",
            topic=topic,
            expected=expected,
            actual=actual,
        )


class TransactionNotFound(CallerError):
    """The transaction never existed, has expired, was aborted, or was replaced by a later batch."""

    code = "txn_not_found"

    def __init__(self, topic: str, txn: int | str) -> None:
        name = txn if isinstance(txn, str) else f"{txn:016x}"
        super().__init__(
            f"topic {topic!r} has no open transaction {name}; begin it and stage everything again",
            topic=topic,
            txn=name,
        )


class TransactionIncomplete(Conflict):
    """A commit names parts that were not staged; nothing was appended."""

    code = "txn_incomplete"


class TransactionCommitted(Conflict):
    """The commit is decided: nothing can be added, and it cannot be undone."""

    code = "txn_committed"

    def __init__(self, topic: str, txn: int) -> None:
        name = f"{txn:016x}"
        super().__init__(f"transaction {name} of topic {topic!r} is committed", topic=topic, txn=name)


class SessionNotFound(CallerError):
    """The watch session never existed, or it expired because no stream was open."""

    code = "not_found"

    def __init__(self, wid: str) -> None:
        super().__init__("there is no such watch session; create one with POST /v0/watch", wid=wid)


class NoColdTier(CallerError):
    code = "no_cold_tier"

    def __init__(self) -> None:
        super().__init__("the server has no cold tier; set TOPICS_COLD_DIR")


class PlanNotFound(CallerError):
    """The plan never existed, was abandoned, or was cancelled by an erase."""

    code = "plan_not_found"

    def __init__(self, plan_id: str) -> None:
        super().__init__(f"there is no plan {plan_id[:64]!r}; request a new one", plan_id=plan_id[:64])


class PlanLeased(CallerError):
    code = "plan_leased"

    def __init__(self, plan_id: str, retry_after_ms: int) -> None:
        super().__init__(
            "another client holds the lease on this topic's plan; try again when the lease has expired",
            plan_id=plan_id,
            retry_after_ms=retry_after_ms,
        )


class LeaseLost(CallerError):
    code = "lease_lost"

    def __init__(self, plan_id: str) -> None:
        super().__init__(
            "the lease on this plan has expired; request the plan again to continue", plan_id=plan_id
        )


class InputsChanged(CallerError):
    """The segments of a plan no longer belong to the topic. Nothing was published."""

    code = "inputs_changed"


class OutputInvalid(CallerError):
    """The output of a job does not match its group in the plan. Nothing was published."""

    code = "output_invalid"

    def __init__(self, group: int, reason: str) -> None:
        super().__init__(
            f"the output of group {group} cannot be accepted: {reason}", group=group, reason=reason
        )


class SnapshotNotFound(CallerError):
    code = "snapshot_not_found"

    def __init__(self, snapshot_id: str) -> None:
        super().__init__(
            f"there is no snapshot {snapshot_id[:64]!r}, or it has expired; create another one",
            snapshot_id=snapshot_id[:64],
        )


class Unauthorized(CallerError):
    """The request has no valid key."""

    code = "unauthorized"


class Forbidden(CallerError):
    """The key does not permit the request."""

    code = "forbidden"


class Throttled(CallerError):
    code = "throttled"


class OverGrant(Throttled):
    """The server-wide cap may still have room: the shard asks the catalog for more before it refuses the client."""

    def __init__(
        self, message: str, *, topics: int, size: int, need_topics: int, need_bytes: int, **detail: object
    ) -> None:
        super().__init__(message, **detail)
        self.topics, self.bytes = topics, size  # total needed by the request
        self.need_topics, self.need_bytes = need_topics, need_bytes  # the part that is not granted


class EraseDeferred(TopicsError):
    """The records are deleted; their bytes are overwritten once there is space for the intent and the cold tier is writable."""

    code = "throttled"

    def __init__(self, deleted: int, *, cold: bool = False) -> None:
        if cold:
            message = "the cold tier is not writable; the records are deleted, and will be erased when it is"
        else:
            message = "the disk is full; the records are deleted, and will be erased when there is space"
        super().__init__(message, limit="cold_tier" if cold else "disk_full", deleted=deleted)


class ColdStoreFailed(TopicsError):
    """A read needs the cold tier, which is missing, unreachable or damaged. Nothing changed."""

    code = "not_ready"

    def __init__(self, message: str, **detail: object) -> None:
        super().__init__(message, tier="cold", **detail)


class Stopping(TopicsError):
    code = "shutting_down"


class ShardReadOnly(TopicsError):
    """The log can no longer guarantee durability. Reads continue; writes are refused until a restart.

    A write that may have reached the log before it failed may reappear after a restart: `unknown`. Any other was not
    carried out and never will be.
    """

    code = "internal"

    def __init__(self, reason: str, *, unknown: bool = False) -> None:
        detail: dict[str, object] = {"read_only": True, "reason": reason}
        advice = "restart the server"
        if unknown:
            detail["outcome"] = "unknown"
            advice = "the change may or may not have been carried out; restart the server and check"
        super().__init__(f"the shard is read-only: {reason}; {advice}", **detail)
        self.reason = reason


class Corrupt(TopicsError):
    def __init__(self, path: str, offset: int, problem: str) -> None:
        super().__init__(f"{path} at byte {offset}: {problem}", path=path, offset=offset)
        self.path, self.offset, self.problem = path, offset, problem


class UnsupportedFormat(TopicsError):
    def __init__(self, path: str, version: int) -> None:
        super().__init__(
            f"{path} has format version {version}, which this release cannot read; upgrade topics",
            path=path,
            version=version,
        )
        self.path, self.version = path, version


class UnknownFrame(UnsupportedFormat):
    def __init__(self, path: str, offset: int, kind: int) -> None:
        TopicsError.__init__(
            self,
            f"{path} at byte {offset}: a log frame of kind {kind}, which this release cannot read; upgrade topics",
            path=path,
            offset=offset,
            kind=kind,
        )
        self.path, self.offset = path, offset


class FeatureAbsent(UnsupportedFormat):
    def __init__(self, path: str, what: str) -> None:
        TopicsError.__init__(
            self,
            f"{path} has {what}, of a feature that this shard runs without; start it with that feature",
            path=path,
        )
        self.path = path


class LogGap(TopicsError):
    def __init__(self, after_lsn: int, next_lsn: int) -> None:
        super().__init__(
            f"log entries {after_lsn + 1} to {next_lsn - 1} are missing; restore the log files or run topics verify --repair",
            after_lsn=after_lsn,
            next_lsn=next_lsn,
        )
