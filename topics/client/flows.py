"""Calls as generators without I/O, and the retries of a call.

A flow is a generator: it yields an effect (send a request, sleep …), is sent the result, and returns its own result.
So the logic is written once, knows neither sockets nor event loops, and is driven by two short drivers, `blocking` and
`asynchronous` (and by tests):

    flow ── Send(request) ──► driver ── Response, or Disconnected raised ──► flow ── returns

When a failed request is retried:

    SAFE       always: reads, and idempotent changes
    IF_UNDONE  only if it was certainly not carried out: writes without an idempotency key
    NEVER      health checks: an error response is the result
"""

from __future__ import annotations

import enum
import inspect
import logging
import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from topics.client.errors import ApiError, BadAnswer, ClientError, Disconnected, error_of

T = TypeVar("T")

log = logging.getLogger("topics.client")

# Limits that stay exceeded until a client acts: retrying would only hide the error.
LASTING_LIMITS = frozenset({"max_topics", "max_routers", "consumers", "tags"})
RETRIED_STATUSES = frozenset({408, 429, 502, 503, 504})


class Repeat(enum.Enum):
    SAFE = enum.auto()
    IF_UNDONE = enum.auto()
    NEVER = enum.auto()


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str  # including the query
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_s: float = 0.0  # how long the server may deliberately wait; added to the timeout


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes
    retry_after: str = ""


@dataclass(frozen=True, slots=True)
class Send:
    """→ Response"""

    request: Request


@dataclass(frozen=True, slots=True)
class Sleep:
    """→ None"""

    seconds: float


@dataclass(frozen=True, slots=True)
class Open:
    """→ a stream, or a Response with an error. Reads time out after `idle_s` without data."""

    request: Request
    idle_s: float


@dataclass(frozen=True, slots=True)
class Read:
    """→ the next bytes of a stream; b"" at its end"""

    stream: Any


@dataclass(frozen=True, slots=True)
class Close:
    """→ None"""

    stream: Any


Effect: TypeAlias = Send | Sleep | Open | Read | Close
Flow: TypeAlias = Generator[Effect, Any, T]


@dataclass(frozen=True, slots=True)
class Retries:
    """How long a call is retried. The delay doubles, with jitter, unless the server asks for a longer one."""

    for_s: float = 30.0  # 0: one attempt
    first_s: float = 0.1
    most_s: float = 5.0

    def pause_s(self, attempt: int, chance: random.Random, asked_s: float | None = None) -> float:
        """The delay after this attempt; the first is number 0."""
        # Capped, so that the power does not overflow.
        most = min(self.most_s, self.first_s * 2.0 ** min(attempt, 40))
        pause = chance.uniform(most / 2, most)
        if asked_s is None or asked_s < self.first_s:
            return pause
        # At least what the server asked for, with jitter.
        return asked_s + chance.uniform(0, min(most, asked_s / 4))


@dataclass(slots=True)
class Outage:
    """Whether an outage has been logged. Copies of a core share it, so that each outage is logged once."""

    is_logged: bool = False


@dataclass(slots=True)
class Core:
    """State and settings that all flows of a client share."""

    url: str
    node: str  # default name of the lease holder
    retries: Retries
    now: Callable[[], float]  # monotonic clock, in seconds
    wall_ms: Callable[[], int]
    chance: random.Random
    kinds: Mapping[Any, Any] = field(default_factory=dict)  # response types to replace by others
    traceparent: Callable[[], str] = str  # header value for the current span; see `tracing`
    outage: Outage = field(default_factory=Outage)

    def new_key(self) -> str:
        return f"{self.chance.getrandbits(128):032x}"

    def call(self, request: Request, kind: type[T], repeat: Repeat = Repeat.SAFE) -> Flow[T]:
        """Send a request, with retries; return the decoded response."""
        response = yield from self.exchange(request, repeat)
        return self.decoded(response.body, kind)

    def decoded(self, body: bytes, kind: type[T]) -> T:
        try:
            answer: T = _decoder(self.kinds.get(kind, kind)).decode(body)
        except msgspec.DecodeError as error:
            raise BadAnswer(self.url, str(error), "unknown") from None
        return answer

    def exchange(self, request: Request, repeat: Repeat = Repeat.SAFE) -> Flow[Response]:
        """Send a request, with retries; return the successful response."""
        give_up = self.now() + self.retries.for_s
        traceparent = self.traceparent()
        if traceparent and "traceparent" not in request.headers:
            request = replace(request, headers={**request.headers, "traceparent": traceparent})
        attempt = 0
        outcome_was_unknown = False
        while True:
            try:
                response: Response = yield Send(request)
            except Disconnected as error:
                failure: ClientError = error
            else:
                self.outage.is_logged = False
                if response.status < 300:
                    return response
                failure = error_of(self.url, response.status, response.body, response.retry_after)
            is_unreachable = isinstance(failure, Disconnected) and failure.outcome == "none"
            if outcome_was_unknown:
                # This attempt was refused, but an earlier one may have been carried out.
                failure.outcome = "unknown"
            outcome_was_unknown = failure.outcome == "unknown"
            if not may_repeat(failure, repeat):
                raise failure
            asked_s = failure.retry_after_s if isinstance(failure, ApiError) else None
            pause_s = self.retries.pause_s(attempt, self.chance, asked_s)
            if self.now() + pause_s > give_up:
                raise failure
            if is_unreachable:
                self.log_outage(failure, give_up)
            yield Sleep(pause_s)
            attempt += 1

    def log_outage(self, failure: ClientError, give_up: float) -> None:
        """Log that the server is unreachable, once per outage: the call itself is silent until it gives up."""
        if not self.outage.is_logged:
            self.outage.is_logged = True
            log.warning("%s; retrying for %.0f s", failure, give_up - self.now())


def may_repeat(failure: ClientError, repeat: Repeat) -> bool:
    if repeat is Repeat.NEVER or (repeat is Repeat.IF_UNDONE and failure.outcome == "unknown"):
        return False
    if isinstance(failure, Disconnected):
        return True
    if isinstance(failure, ApiError):
        return failure.status in RETRIED_STATUSES and failure.detail.get("limit") not in LASTING_LIMITS
    return isinstance(failure, BadAnswer) and failure.status in RETRIED_STATUSES


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    found = _decoders.get(kind)
    if found is None:
        found = _decoders[kind] = msgspec.json.Decoder(kind)
    return found


# -- requests ----------------------------------------------------------------------------------------------

JSON = {"Content-Type": "application/json"}
NO_HEADERS: Mapping[str, str] = {}


def quoted(name: str) -> str:
    if not name:
        raise ValueError("a name is empty")  # the path would address another resource
    return quote(name, safe="")


def with_query(path: str, query: Mapping[str, Any]) -> str:
    """Parameters that are None are omitted."""
    given = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in query.items()
        if value is not None
    }
    return f"{path}?{urlencode(given)}" if given else path


def get(path: str, **query: Any) -> Request:
    return Request("GET", with_query(path, query))


def delete(path: str, **query: Any) -> Request:
    return Request("DELETE", with_query(path, query))


def json_request(method: str, path: str, body: Mapping[str, Any], wait_s: float = 0.0) -> Request:
    """Fields that are None are omitted."""
    given = {name: value for name, value in body.items() if value is not None}
    return Request(method, path, msgspec.json.encode(given), JSON, wait_s)


# -- methods of the clients --------------------------------------------------------------------------------


def copy_signature(method: Any, build: Callable[..., Any], returns: str) -> None:
    """Give a method of a client the name, docstring and signature of the function that builds its flow."""
    signature = inspect.signature(build)
    core, *parameters = signature.parameters.values()
    method.__name__, method.__doc__, method.__module__ = build.__name__, build.__doc__, build.__module__
    method.__qualname__ = build.__qualname__
    # With `self` instead of the core, and the result instead of the flow.
    kind = str(signature.return_annotation)
    inner = kind[kind.index("[") + 1 : -1]
    method.__signature__ = signature.replace(
        parameters=[core.replace(name="self", annotation=inspect.Parameter.empty), *parameters],
        return_annotation=returns.format(inner),
    )
