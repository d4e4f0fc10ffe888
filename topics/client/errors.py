"""Exceptions of the client.

    ClientError
     ├─ Disconnected          no response; `outcome` says whether the request may have been carried out
     │   └─ TimedOut          no response in time
     ├─ BadAnswer             not the response of a topics server
     ├─ RecordsLost           a reader has lost records that were not deleted
     ├─ BufferFull            a producer's buffer is full
     ├─ ProducerFailed        flush or close: some records were not written
     └─ ApiError              the server refused the request; one subclass per `code`

`advice` says what to do; tracebacks show it as a note.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from topics.client.answers import Tombstone

Outcome: TypeAlias = Literal["none", "unknown"]


class ClientError(Exception):
    """Base class of the client's exceptions."""

    advice: str = ""
    outcome: Outcome = "none"  # "unknown": the request may have been carried out

    def _advise(self, advice: str) -> None:
        self.advice = advice
        if advice:
            self.add_note(f"what to do: {advice}")


class Disconnected(ClientError):
    """The server is unreachable, or the connection broke before the response arrived."""

    def __init__(self, url: str, reason: str, outcome: Outcome) -> None:
        problem = "cannot reach" if outcome == "none" else "no response from"
        super().__init__(f"{problem} {url}: {reason}")
        self.url, self.reason, self.outcome = url, reason, outcome
        if outcome == "none":
            self._advise(
                "start a server with `topics serve`, or give its address with Client(url) or TOPICS_URL"
            )
        else:
            self._advise(
                "check whether it was carried out before repeating it; a write can be repeated with the same idempotency key"
            )


class TimedOut(Disconnected):
    """No response in time."""


class BadAnswer(ClientError):
    """The response is not one of a topics server."""

    def __init__(self, url: str, problem: str, outcome: Outcome = "none", status: int = 200) -> None:
        super().__init__(f"{url} does not respond like a topics server: {problem}")
        self.url, self.outcome, self.status = url, outcome, status
        self._advise("check the address, and any proxy in between")


class RecordsLost(ClientError):
    """Records were lost that were not deleted. The iterator remains usable and continues after the gap."""

    def __init__(self, tombstone: Tombstone) -> None:
        super().__init__(tombstone.text)
        self.tombstone = tombstone
        self._advise("take the next record to continue after the gap, or handle gaps with on_lost=")


class ProducerFailed(ClientError):
    """Some records were not written, or may not have been. `failures` has the first errors."""

    def __init__(self, topic: str, records: int, failures: list[Exception]) -> None:
        super().__init__(f"{records} of the records sent to {topic!r} failed: {failures[0]}")
        self.topic, self.records, self.failures = topic, records, failures
        if any(isinstance(failure, ClientError) and failure.outcome == "unknown" for failure in failures):
            self.outcome = "unknown"
        self._advise("check the receipts of send() to see which ones")


class BufferFull(ClientError):
    """A producer's buffer stayed full, because records are sent faster than they are written. The record was not accepted."""

    def __init__(self, topic: str, max_bytes: int) -> None:
        super().__init__(f"{max_bytes} bytes are waiting to be written to {topic!r}")
        self.topic, self.max_bytes = topic, max_bytes
        self._advise("send less, or find out why the server is slow")


class ApiError(ClientError):
    """The server refused the request. `code` is stable, `message` is for humans, `detail` depends on the code."""

    code: str = ""
    hint: ClassVar[str] = ""  # advice beyond the server's message

    def __init__(self, status: int, code: str, message: str, detail: dict[str, Any]) -> None:
        super().__init__(f"{message} ({code})")
        self.status, self.code, self.message, self.detail = status, code, message, detail
        self.retry_after_s: float | None = None
        if detail.get("outcome") == "unknown":
            self.outcome = "unknown"
        self._advise(self.hint)


class InvalidRequest(ApiError):
    code = "invalid_request"


class BatchTooLarge(ApiError):
    code = "batch_too_large"
    hint = "split it into several writes"


class RecordTooLarge(ApiError):
    code = "record_too_large"
    hint = "store the data elsewhere and write a reference to it"


class Unauthorized(ApiError):
    code = "unauthorized"
    hint = "set Client(token=…) or TOPICS_TOKEN"


class Forbidden(ApiError):
    code = "forbidden"
    hint = "the key lacks the scope, or access to this name: see the server's TOPICS_API_KEYS"


class ForbiddenOrigin(Forbidden):
    code = "forbidden_origin"
    hint = "the server takes this for a request of another website: see its TOPICS_CORS_ORIGINS"


class MisdirectedRequest(ApiError):
    code = "misdirected_request"
    hint = "use the server's IP address, or add the name to its TOPICS_ALLOWED_HOSTS"


class NotFound(ApiError):
    """Base class of 404 errors."""

    code = "not_found"


class TopicNotFound(NotFound):
    code = "topic_not_found"


class ConsumerNotFound(NotFound):
    code = "consumer_not_found"
    hint = "create it with create_consumer()"


class RouterNotFound(NotFound):
    code = "router_not_found"


class Conflict(ApiError):
    """Base class of 409 errors."""


class TopicIncompatible(Conflict):
    code = "topic_exists_incompatible"


class RouterCycle(Conflict):
    code = "router_cycle"


class TopicNotEmpty(Conflict):
    code = "topic_not_empty"


class NotAQueue(Conflict):
    code = "not_a_queue"
    hint = 'create queues with create_topic(…, type="queue"), or use a consumer'


class ConsumerOverlap(Conflict):
    """The filter overlaps with the one of `detail["consumer"]`."""

    code = "consumer_overlap"
    hint = "in a work queue each record goes to one consumer: use a disjoint filter, or share the consumer"


class WrongEpoch(Conflict):
    """`detail["actual"]` is the topic's epoch."""

    code = "wrong_epoch"
    hint = "the topic was created again, or lost its newest records: the seq now belongs to another record"


class WrongLastSeq(Conflict):
    code = "wrong_last_seq"
    hint = "another client has written since: read the new records, decide again, and write with the new seq"


class TransactionNotFound(NotFound):
    code = "txn_not_found"
    hint = (
        "it was aborted, has expired, or was superseded by a later batch: begin it and stage everything again"
    )


class TransactionIncomplete(Conflict):
    """`detail["parts"]` lists what is missing."""

    code = "txn_incomplete"
    hint = "stage the missing chunks, and commit again"


class TransactionCommitted(Conflict):
    code = "txn_committed"
    hint = "the transaction is already committed: commit_transaction() returns its seqs"


class UnknownSetting(TypeError):
    """There is no setting of this name."""


class PayloadTooLarge(ApiError):
    code = "payload_too_large"
    hint = "split it into several writes"


class TopicFull(ApiError):
    code = "topic_full"
    hint = "delete records, or raise cap_records and cap_bytes with update_topic()"


class Throttled(ApiError):
    code = "throttled"
    hint = "`detail` names the limit: wait, send less at once, or raise the limit"


class ServerFault(ApiError):
    code = "internal"
    hint = "see the server's log"


class NotReady(ApiError):
    code = "not_ready"
    hint = "the topic's shard is not available; it was retried for as long as Retries allow"


class ShuttingDown(ApiError):
    code = "shutting_down"


def _classes(root: type[ApiError]) -> dict[str, type[ApiError]]:
    found = {root.code: root} if root.code else {}
    for child in root.__subclasses__():
        found |= _classes(child)
    return found


_BY_CODE = _classes(ApiError)
_BY_STATUS: dict[int, type[ApiError]] = {404: NotFound, 409: Conflict}  # for unknown codes


class _Error(msgspec.Struct):
    code: str
    message: str
    detail: dict[str, Any] = {}


class _ErrorBody(msgspec.Struct):
    error: _Error


_decode = msgspec.json.Decoder(_ErrorBody).decode


def error_of(url: str, status: int, body: bytes, retry_after: str = "") -> ClientError:
    """The exception for an error response."""
    try:
        parsed = _decode(body).error
    except msgspec.DecodeError:
        # From a proxy: the server behind it may have received the request.
        return BadAnswer(url, f"status {status}", "unknown" if status in (500, 502, 504) else "none", status)
    kind = _BY_CODE.get(parsed.code) or _BY_STATUS.get(status, ApiError)
    error = kind(status, parsed.code, parsed.message, parsed.detail)
    wait_ms = parsed.detail.get("retry_after_ms")
    if isinstance(wait_ms, int | float):
        error.retry_after_s = wait_ms / 1000
    elif retry_after.isascii() and retry_after.isdigit():
        error.retry_after_s = float(retry_after)
    return error
