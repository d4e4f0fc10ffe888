"""The whole error tree.

TopicsError
├── CallerError           what the request asked for cannot be; nothing changed
│   ├── InvalidRequest · BatchTooLarge · RecordTooLarge
│   ├── TopicNotFound · TopicExistsIncompatible · SessionNotFound · NotAQueue · ConsumerNotFound · TransactionNotFound
│   ├── PlanNotFound · PlanLeased · LeaseLost · InputsChanged · OutputInvalid · SnapshotNotFound · NoColdTier
│   ├── Unauthorized · Forbidden
│   ├── Conflict          the topic is not in the state that the request needs
│   │   ├── TopicNotEmpty · TopicFull · WrongLastSeq · TransactionIncomplete · TransactionCommitted
│   │   └── ConsumerOverlap
│   └── Throttled         a bound is reached; try again later
│       └── OverGrant     this shard's share of a cap over all shards is used up
├── ErasePutOff           deleted, but not yet erased: the disk is full, or the cold tier out of reach
├── ColdStoreFailed       what was asked for is in the cold tier, which does not answer; nothing changed
├── Stopping              the server stops, and the command was not carried out to its end
├── ShardReadOnly         a write or sync failed, or the log is rotten; final until restart
├── Corrupt               bytes on disk are not what was written
├── UnsupportedFormat     a file of a version that this program does not know
└── LogGap                log files are missing between snapshot and log
"""

from __future__ import annotations

from typing import ClassVar


class TopicsError(Exception):
    """Base of all; `code` is stable and travels between processes together with `detail`."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, **detail: object) -> None:
        super().__init__(message)
        self.detail: dict[str, object] = detail


class CallerError(TopicsError):
    """The request is at fault or in conflict; nothing was changed by it."""

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
        super().__init__(f"topic {topic!r} is a log; make a queue with PUT and type queue", topic=topic)


class ConsumerNotFound(CallerError):
    code = "consumer_not_found"

    def __init__(self, topic: str, consumer: str) -> None:
        super().__init__(
            f"topic {topic!r} has no consumer {consumer!r}; make it with PUT", topic=topic, consumer=consumer
        )


class ForwardNotFound(CallerError):
    """No such rule; at a dest also: copies under this uid are not let in."""

    code = "router_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no router {name!r}; make it with PUT", router=name)


class ForwardCycle(CallerError):
    code = "router_cycle"

    def __init__(self, cycle: list[str]) -> None:
        way = " → ".join(cycle)
        super().__init__(f"records would go in a circle, {way}; allow_cycle permits that", cycle=cycle)


class ForwardConflict(CallerError):
    """Another rule stands in the way: a second source for one dest, or another way under this name."""

    code = "topic_exists_incompatible"


class Conflict(CallerError):
    """The topic is not in the state that the request needs. The answer tells of that state, so it waits until it is safe."""


class TopicNotEmpty(Conflict):
    code = "topic_not_empty"

    def __init__(self, topic: str, count: int) -> None:
        super().__init__(f"topic {topic!r} still holds {count} records", topic=topic, count=count)


class TopicFull(Conflict):
    code = "topic_full"


class ConsumerOverlap(Conflict):
    """Two consumers of a work queue would get the same records. `consumer` is there already; "" is a queue's own."""

    code = "consumer_overlap"

    def __init__(self, topic: str, consumer: str, other: str) -> None:
        first, second = (repr(name) if name else "the queue's own consumer" for name in (consumer, other))
        super().__init__(
            f"the filters of {first} and {second} overlap; with retention work_queue a record of {topic!r} is for "
            "one consumer only",
            topic=topic,
            consumer=consumer,
        )


class WrongLastSeq(Conflict):
    """A conditional append met another last seq than it named; nothing was appended."""

    code = "wrong_last_seq"

    def __init__(self, topic: str, expected: int, actual: int, tag: str | None = None) -> None:
        whose = repr(topic) if tag is None else f"tag {tag!r} in {topic!r}"
        detail: dict[str, object] = {"topic": topic, "expected": expected, "actual": actual}
        if tag is not None:
            detail["tag"] = tag
        super().__init__(f"the last seq of {whose} is {actual}, not {expected}", **detail)


class WrongEpoch(Conflict):
    """A seq is of an earlier topic of this name, or was given to another record since."""

    code = "wrong_epoch"

    def __init__(self, topic: str, expected: str, actual: str) -> None:
        super().__init__(
            f"the epoch of {topic!r} is {actual}, not {expected}: that seq belongs to another record now",
            topic=topic,
            expected=expected,
            actual=actual,
        )


class TransactionNotFound(CallerError):
    """There never was such a transaction, or it has expired, or was aborted, or a later batch has taken its place."""

    code = "txn_not_found"

    def __init__(self, topic: str, txn: int | str) -> None:
        name = txn if isinstance(txn, str) else f"{txn:016x}"
        super().__init__(
            f"topic {topic!r} has no open transaction {name}; begin it again and stage everything again",
            topic=topic,
            txn=name,
        )


class TransactionIncomplete(Conflict):
    """A commit names what was not staged; nothing was appended."""

    code = "txn_incomplete"


class TransactionCommitted(Conflict):
    """It is decided: nothing can be added to it any more, and nothing can undo it."""

    code = "txn_committed"

    def __init__(self, topic: str, txn: int) -> None:
        name = f"{txn:016x}"
        super().__init__(f"transaction {name} of topic {topic!r} is committed", topic=topic, txn=name)


class SessionNotFound(CallerError):
    """There never was such a watch session, or nobody has read it for too long."""

    code = "not_found"

    def __init__(self, wid: str) -> None:
        super().__init__("there is no such watch session; make one with POST /v0/watch", wid=wid)


class NoColdTier(CallerError):
    code = "no_cold_tier"

    def __init__(self) -> None:
        super().__init__("there is no cold tier to merge or to read segments in; set TOPICS_COLD_DIR")


class PlanNotFound(CallerError):
    """There never was such a plan, or it was abandoned, or an erase has ended it."""

    code = "plan_not_found"

    def __init__(self, plan_id: str) -> None:
        super().__init__(f"there is no plan {plan_id[:64]!r}; ask for one again", plan_id=plan_id[:64])


class PlanLeased(CallerError):
    code = "plan_leased"

    def __init__(self, plan_id: str, retry_after_ms: int) -> None:
        super().__init__(
            "somebody else is at work on this topic's plan; come back when the lease has ended",
            plan_id=plan_id,
            retry_after_ms=retry_after_ms,
        )


class LeaseLost(CallerError):
    code = "lease_lost"

    def __init__(self, plan_id: str) -> None:
        super().__init__(
            "the lease on this plan has ended; ask for the plan again to go on with it", plan_id=plan_id
        )


class InputsChanged(CallerError):
    """The segments of a plan are not the topic's any more. Nothing was published."""

    code = "inputs_changed"


class OutputInvalid(CallerError):
    """What a job has made of a group is not what the plan asked for. Nothing was published."""

    code = "output_invalid"

    def __init__(self, group: int, reason: str) -> None:
        super().__init__(
            f"the output of group {group} cannot be taken over: {reason}", group=group, reason=reason
        )


class SnapshotNotFound(CallerError):
    code = "snapshot_not_found"

    def __init__(self, snapshot_id: str) -> None:
        super().__init__(
            f"there is no snapshot {snapshot_id[:64]!r}, or it has ended; make another one",
            snapshot_id=snapshot_id[:64],
        )


class Unauthorized(CallerError):
    """Whoever asks has not shown the key that this needs."""

    code = "unauthorized"


class Forbidden(CallerError):
    """Whoever asks may not do this."""

    code = "forbidden"


class Throttled(CallerError):
    code = "throttled"


class OverGrant(Throttled):
    """The cap itself may have room: more can be asked of the catalog before a client hears of this."""

    def __init__(
        self, message: str, *, topics: int, size: int, need_topics: int, need_bytes: int, **detail: object
    ) -> None:
        super().__init__(message, **detail)
        self.topics, self.bytes = topics, size  # what the request takes in all
        self.need_topics, self.need_bytes = need_topics, need_bytes  # how much of it is not granted


class ErasePutOff(TopicsError):
    """The records are deleted; their bytes are overwritten as soon as there is space for the intent, and the cold tier
    can be written to."""

    code = "throttled"

    def __init__(self, deleted: int, *, cold: bool = False) -> None:
        if cold:
            message = (
                "the cold tier cannot be written to; the records are deleted, and will be erased once it can"
            )
        else:
            message = "the disk is full; the records are deleted, and will be erased once there is space"
        super().__init__(message, limit="cold_tier" if cold else "disk_full", deleted=deleted)


class ColdStoreFailed(TopicsError):
    """A read needs the cold tier, and that is missing, out of reach or damaged. Nothing was changed by it."""

    code = "not_ready"

    def __init__(self, message: str, **detail: object) -> None:
        super().__init__(message, tier="cold", **detail)


class Stopping(TopicsError):
    code = "shutting_down"


class ShardReadOnly(TopicsError):
    """The log can no longer be trusted to keep a promise. Reads go on; writes wait for a restart.

    A write that was in the log's reach when it failed may be back after a restart: `unknown`. Any other was not
    carried out and never will be.
    """

    code = "internal"

    def __init__(self, reason: str, *, unknown: bool = False) -> None:
        detail: dict[str, object] = {"read_only": True, "reason": reason}
        fate = "restart the server"
        if unknown:
            detail["outcome"] = "unknown"
            fate = "it may or may not have been carried out, which a restart of the server will show"
        super().__init__(f"the shard is read-only: {reason}; {fate}", **detail)
        self.reason = reason


class Corrupt(TopicsError):
    def __init__(self, path: str, offset: int, problem: str) -> None:
        super().__init__(f"{path} at byte {offset}: {problem}", path=path, offset=offset)
        self.path, self.offset, self.problem = path, offset, problem


class UnsupportedFormat(TopicsError):
    def __init__(self, path: str, version: int) -> None:
        super().__init__(
            f"{path} has format version {version}, which this version cannot read; upgrade topics",
            path=path,
            version=version,
        )
        self.path, self.version = path, version


class LogGap(TopicsError):
    def __init__(self, after_lsn: int, next_lsn: int) -> None:
        super().__init__(
            f"log entries {after_lsn + 1} to {next_lsn - 1} are missing; restore the log files or run a repair",
            after_lsn=after_lsn,
            next_lsn=next_lsn,
        )
