"""Base class of simulated clients: one request at a time, as long as there is a front."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from tests.sim.world import MS, S
from tests.support.history import Op
from topics.protocols.http.exchange import Request

if TYPE_CHECKING:
    from tests.sim.clients import ClientPool

NO_FRONT_US = 5 * MS  # until the client looks for a front again
RETRY_AFTER_US = 1 * S  # the Retry-After of a server that stops
JSON_TYPE = b"application/json"

NextRequest = tuple[str, str, dict[str, Any]]  # the kind of a request, its topic, its arguments


class Actor(ABC):
    patience = 0.97  # how often it waits for its answer

    def __init__(self, pool: ClientPool, name: str, *, begins_within_us: int) -> None:
        self.pool, self.name = pool, name
        self.rng, self.world = pool.rng, pool.world
        self._again: NextRequest | None = None  # sent before anything else
        self.world.after(self.rng.randrange(begins_within_us), self.go)

    def go(self) -> None:
        """Send the next request."""
        pool = self.pool
        if pool.stopped:
            return
        if self.world.now_us < pool.paused_until_us:
            self.world.at(pool.paused_until_us + self.rng.randrange(3 * MS), self.go)
        elif self._is_busy():
            pass
        elif not pool.has_front:
            self.world.after(NO_FRONT_US, self.go)
        else:
            wish, self._again = self._again or self._next(), None
            self._send(wish)

    def _is_busy(self) -> bool:
        """Whether it is busy without a request, and continues by itself."""
        return False

    def _send(self, wish: NextRequest) -> None:
        self.pool.ask(self, *wish)

    @abstractmethod
    def _next(self) -> NextRequest:
        """The next request."""

    @abstractmethod
    def on_answer(self, op: Op) -> None:
        """Called with the answer, or when there will be none."""


def is_stopping(op: Op) -> bool:
    """Whether the server said that it shuts down. Without a pause most requests of a run would be refused."""
    return op.status == 503 and op.answer["error"]["code"] == "shutting_down"


def json_request(method: bytes, path: str, body: dict[str, Any] | None = None, query: bytes = b"") -> Request:
    made = Request(method, path.encode(), query, 0, content_type=JSON_TYPE)
    if body is not None:
        made.body = json.dumps(body).encode()
    return made
