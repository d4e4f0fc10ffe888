"""What the clients of a simulated server have in common: one request at a time, as long as there is a front to talk to."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from tests.sim.world import MS, S
from tests.support.history import Op
from topics.protocols.http.exchange import Request

if TYPE_CHECKING:
    from tests.sim.clients import Crowd

NO_FRONT_US = 5 * MS  # until somebody looks for one again
RETRY_AFTER_US = 1 * S  # what a server that stops asks for
JSON_TYPE = b"application/json"

Wish = tuple[str, str, dict[str, Any]]  # the kind of a request, its topic, what it says


class Actor(ABC):
    patience = 0.97  # how often it waits for its answer

    def __init__(self, crowd: Crowd, name: str, *, begins_within_us: int) -> None:
        self.crowd, self.name = crowd, name
        self.rng, self.world = crowd.rng, crowd.world
        self._again: Wish | None = None  # to be sent before anything else
        self.world.after(self.rng.randrange(begins_within_us), self.go)

    def go(self) -> None:
        """Send the next request."""
        crowd = self.crowd
        if crowd.stopped:
            return
        if self.world.now_us < crowd.paused_until_us:
            self.world.at(crowd.paused_until_us + self.rng.randrange(3 * MS), self.go)
        elif self._is_busy():
            pass
        elif not crowd.has_front:
            self.world.after(NO_FRONT_US, self.go)
        else:
            wish, self._again = self._again or self._next(), None
            self._send(wish)

    def _is_busy(self) -> bool:
        """Whether it does something else than sending a request, and will be back."""
        return False

    def _send(self, wish: Wish) -> None:
        self.crowd.ask(self, *wish)

    @abstractmethod
    def _next(self) -> Wish:
        """What to do next."""

    @abstractmethod
    def told(self, op: Op) -> None:
        """An answer, or the news that there will be none."""


def is_stopping(op: Op) -> bool:
    """Whether the server said that it shuts down. Who came back sooner than asked would make refusals most of the story."""
    return op.status == 503 and op.answer["error"]["code"] == "shutting_down"


def json_request(method: bytes, path: str, body: dict[str, Any] | None = None, query: bytes = b"") -> Request:
    made = Request(method, path.encode(), query, 0, content_type=JSON_TYPE)
    if body is not None:
        made.body = json.dumps(body).encode()
    return made
