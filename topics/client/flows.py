"""What the client wants done by whoever has sockets, and how one call goes on over failures.

A flow is a generator: it yields what it wants done, is sent the result, and returns its own. So everything that
decides is written once, knows no socket and no loop, and is driven by two short shells (and by tests, without either):

    flow ── Send(request) ──► shell ── Response, or a Disconnected thrown ──► flow ── returns

Which requests are repeated:

    SAFE       whatever happened to the attempt before: reads, and changes that come to the same when done twice
    IF_UNDONE  only when it certainly was not carried out: a write without a key
    NEVER      probes: an answer that is no success is the answer
"""

from __future__ import annotations

import enum
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

# Caps that stay reached until a client acts: waiting for them only hides them.
LASTING_LIMITS = frozenset({"max_topics", "max_routers", "consumers", "tags"})
RETRIED_STATUSES = frozenset({408, 429, 502, 503, 504})


class Repeat(enum.Enum):
    SAFE = enum.auto()
    IF_UNDONE = enum.auto()
    NEVER = enum.auto()


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str  # with its query
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_s: float = 0.0  # how long the server may take on purpose, beside the usual timeout


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
    """→ a stream, or a Response when it is no success. Silence for `idle_s` breaks it."""

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
    """How long a call is tried, and how long it waits in between: a random part of a time that doubles, or what the server asks for."""

    for_s: float = 30.0  # 0: one attempt
    first_s: float = 0.1
    most_s: float = 5.0

    def pause_s(self, attempt: int, chance: random.Random, asked_s: float | None = None) -> float:
        """Before the attempt after this one; the first has number 0."""
        # From 40 on the power means nothing but a large number.
        most = min(self.most_s, self.first_s * 2.0 ** min(attempt, 40))
        pause = chance.uniform(most / 2, most)
        if asked_s is None or asked_s < self.first_s:
            return pause
        # Never sooner than asked; and not all clients at the same moment.
        return asked_s + chance.uniform(0, min(most, asked_s / 4))


@dataclass(slots=True)
class Outage:
    """Whether the server is known to be unreachable. Copies of a core share it, so that one outage is logged once."""

    is_logged: bool = False


@dataclass(slots=True)
class Core:
    """What all flows of a client share."""

    url: str
    node: str  # who this client is, where nothing else is said
    retries: Retries
    now: Callable[[], float]  # seconds of a clock that only runs forward
    wall_ms: Callable[[], int]
    chance: random.Random
    kinds: Mapping[Any, Any] = field(default_factory=dict)  # types that stand in for others
    traceparent: Callable[[], str] = (
        str  # of the span that is current, for the header of that name; see `tracing`
    )
    outage: Outage = field(default_factory=Outage)

    def new_key(self) -> str:
        return f"{self.chance.getrandbits(128):032x}"

    def call(self, request: Request, kind: type[T], repeat: Repeat = Repeat.SAFE) -> Flow[T]:
        """One call: the answer as this type."""
        response = yield from self.exchange(request, repeat)
        return self.decoded(response.body, kind)

    def decoded(self, body: bytes, kind: type[T]) -> T:
        try:
            answer: T = _decoder(self.kinds.get(kind, kind)).decode(body)
        except msgspec.DecodeError as error:
            raise BadAnswer(self.url, str(error), "unknown") from None
        return answer

    def exchange(self, request: Request, repeat: Repeat = Repeat.SAFE) -> Flow[Response]:
        """The answer, if it is a success; attempts go on for as long as they may and make sense."""
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
                # This attempt was refused, an earlier one perhaps not.
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
        """Warn that a call keeps trying although there is no server: it would be silent until it gives up."""
        if not self.outage.is_logged:
            self.outage.is_logged = True
            log.warning("%s; trying again for %.0f s", failure, give_up - self.now())


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
        raise ValueError("a name is empty")  # the path would be another one's
    return quote(name, safe="")


def with_query(path: str, query: Mapping[str, Any]) -> str:
    """What is None is left out."""
    said = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in query.items()
        if value is not None
    }
    return f"{path}?{urlencode(said)}" if said else path


def get(path: str, **query: Any) -> Request:
    return Request("GET", with_query(path, query))


def delete(path: str, **query: Any) -> Request:
    return Request("DELETE", with_query(path, query))


def json_request(method: str, path: str, body: Mapping[str, Any], wait_s: float = 0.0) -> Request:
    """Fields that are None are left out."""
    said = {name: value for name, value in body.items() if value is not None}
    return Request(method, path, msgspec.json.encode(said), JSON, wait_s)
