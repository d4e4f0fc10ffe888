"""What the client raises.

    ClientError
     ├─ Disconnected          no answer came; `outcome` says whether the request may have been carried out
     │   └─ TimedOut          not in time
     ├─ BadAnswer             an answer that no topics server gives
     ├─ RecordsLost           a reader has to know: records are gone that nobody deleted
     ├─ BufferFull            a producer takes no more
     ├─ ProducerFailed        flush or close: something that was sent is not written
     └─ ApiError              the server refused; one class for each `code`

Each says what to do in `advice`, which a traceback shows as a note.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from topics.client.answers import Tombstone

Outcome: TypeAlias = Literal["none", "unknown"]


class ClientError(Exception):
    """Everything that the client raises by itself."""

    advice: str = ""
    outcome: Outcome = "none"  # "unknown": it may have been carried out all the same

    def _advise(self, advice: str) -> None:
        self.advice = advice
        if advice:
            self.add_note(f"what to do: {advice}")


class Disconnected(ClientError):
    """The server cannot be reached, or the connection broke before the answer was there."""

    def __init__(self, url: str, reason: str, outcome: Outcome) -> None:
        what = "cannot reach" if outcome == "none" else "no answer from"
        super().__init__(f"{what} {url}: {reason}")
        self.url, self.reason, self.outcome = url, reason, outcome
        if outcome == "none":
            self._advise(
                "start a server with `topics serve`, or say where it is with Client(url) or TOPICS_URL"
            )
        else:
            self._advise("look whether it was carried out before you repeat it; a write repeats with its key")


class TimedOut(Disconnected):
    """No answer in time."""


class BadAnswer(ClientError):
    """It does not answer like a topics server."""

    def __init__(self, url: str, what: str, outcome: Outcome = "none", status: int = 200) -> None:
        super().__init__(f"{url} does not answer like a topics server: {what}")
        self.url, self.outcome, self.status = url, outcome, status
        self._advise("check the address, and what stands between: a proxy has pages of its own")


class RecordsLost(ClientError):
    """Records are gone that nobody deleted. Reading can go on: ask the same iterator for the next record."""

    def __init__(self, tombstone: Tombstone) -> None:
        super().__init__(tombstone.text)
        self.tombstone = tombstone
        self._advise("take the next record to go on behind the gap, or handle gaps with on_lost=")


class ProducerFailed(ClientError):
    """Something that was sent is not written, or may not be. `failures` has the first of the reasons."""

    def __init__(self, topic: str, records: int, failures: list[Exception]) -> None:
        super().__init__(f"{records} of the records sent to {topic!r} failed: {failures[0]}")
        self.topic, self.records, self.failures = topic, records, failures
        if any(isinstance(failure, ClientError) and failure.outcome == "unknown" for failure in failures):
            self.outcome = "unknown"
        self._advise("the receipts of send() tell which ones")


class BufferFull(ClientError):
    """The buffer of a producer stays full: records come faster than they can be written. This one was not taken."""

    def __init__(self, topic: str, max_bytes: int) -> None:
        super().__init__(f"{max_bytes} bytes wait to be written to {topic!r}")
        self.topic, self.max_bytes = topic, max_bytes
        self._advise("send less, or see why the server is slow")


class ApiError(ClientError):
    """The server refused: `code` is stable, `message` is for people, `detail` is what the code's description says."""

    code: str = ""
    hint: ClassVar[str] = ""  # beyond what the server's message says

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
    hint = "send it in parts"


class RecordTooLarge(ApiError):
    code = "record_too_large"
    hint = "repeating cannot help: store it elsewhere and write where it is"


class Unauthorized(ApiError):
    code = "unauthorized"
    hint = "give a key with Client(token=…) or TOPICS_TOKEN"


class Forbidden(ApiError):
    code = "forbidden"
    hint = "this key lacks the scope or the name: see TOPICS_API_KEYS of the server"


class ForbiddenOrigin(Forbidden):
    code = "forbidden_origin"
    hint = "for the server this is a request of another web page: see TOPICS_CORS_ORIGINS of the server"


class MisdirectedRequest(ApiError):
    code = "misdirected_request"
    hint = "use its IP address, or list the name in TOPICS_ALLOWED_HOSTS of the server"


class NotFound(ApiError):
    """Base of all that is not there."""

    code = "not_found"


class TopicNotFound(NotFound):
    code = "topic_not_found"


class ConsumerNotFound(NotFound):
    code = "consumer_not_found"
    hint = "make it with create_consumer()"


class RouterNotFound(NotFound):
    code = "router_not_found"


class Conflict(ApiError):
    """Base of all that does not go with what is there."""


class TopicIncompatible(Conflict):
    code = "topic_exists_incompatible"


class RouterCycle(Conflict):
    code = "router_cycle"


class TopicNotEmpty(Conflict):
    code = "topic_not_empty"


class NotAQueue(Conflict):
    code = "not_a_queue"
    hint = 'make queues with create_topic(…, type="queue"), or use a consumer'


class ConsumerOverlap(Conflict):
    """`detail["consumer"]` gets some of the same records."""

    code = "consumer_overlap"
    hint = "in a work queue each record is for one consumer: give it another filter, or share the consumer"


class WrongEpoch(Conflict):
    """`detail["actual"]` is the topic's epoch."""

    code = "wrong_epoch"
    hint = "the topic was created again, or lost its newest records: that seq is another record now"


class WrongLastSeq(Conflict):
    code = "wrong_last_seq"
    hint = "somebody wrote in between: read what, decide again, and write with the new seq"


class TransactionNotFound(NotFound):
    code = "txn_not_found"
    hint = "it was aborted, has expired or was overtaken: begin it again, and stage everything again"


class TransactionIncomplete(Conflict):
    """`detail["parts"]` has what is missing."""

    code = "txn_incomplete"
    hint = "stage what is missing, and commit again"


class TransactionCommitted(Conflict):
    code = "txn_committed"
    hint = "it is decided: commit_transaction() again tells its seqs"


class UnknownSetting(TypeError):
    """A name that no topic or consumer has a setting of."""


class PayloadTooLarge(ApiError):
    code = "payload_too_large"
    hint = "send it in parts"


class TopicFull(ApiError):
    code = "topic_full"
    hint = "delete records, or raise cap_records and cap_bytes with update_topic()"


class Throttled(ApiError):
    code = "throttled"
    hint = "`detail` says which limit: wait, send less at once, or have it raised"


class ServerFault(ApiError):
    code = "internal"
    hint = "see the log of the server"


class NotReady(ApiError):
    code = "not_ready"
    hint = "the topic's worker does not serve; it was tried for as long as Retries say"


class ShuttingDown(ApiError):
    code = "shutting_down"


def _classes(root: type[ApiError]) -> dict[str, type[ApiError]]:
    found = {root.code: root} if root.code else {}
    for child in root.__subclasses__():
        found |= _classes(child)
    return found


_BY_CODE = _classes(ApiError)
_BY_STATUS: dict[int, type[ApiError]] = {404: NotFound, 409: Conflict}  # for codes that are not known here


class _Error(msgspec.Struct):
    code: str
    message: str
    detail: dict[str, Any] = {}


class _ErrorBody(msgspec.Struct):
    error: _Error


_decode = msgspec.json.Decoder(_ErrorBody).decode


def error_of(url: str, status: int, body: bytes, retry_after: str = "") -> ClientError:
    """The error that an answer other than a success means."""
    try:
        said = _decode(body).error
    except msgspec.DecodeError:
        # A proxy's answer: whether the server behind it got the request is not known.
        return BadAnswer(
            url, f"it answers {status}", "unknown" if status in (500, 502, 504) else "none", status
        )
    kind = _BY_CODE.get(said.code) or _BY_STATUS.get(status, ApiError)
    refused = kind(status, said.code, said.message, said.detail)
    wait_ms = said.detail.get("retry_after_ms")
    if isinstance(wait_ms, int | float):
        refused.retry_after_s = wait_ms / 1000
    elif retry_after.isascii() and retry_after.isdigit():
        refused.retry_after_s = float(retry_after)
    return refused
