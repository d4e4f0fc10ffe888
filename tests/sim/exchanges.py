"""Requests and answers as values: what a client of a simulated server sends, and how it reads the response."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from tests.sim import merge_jobs, queue_workers, sinks
from tests.sim import router_clients as routers
from tests.sim.actors import json_request
from tests.sim.frames import read_frames
from tests.support.history import Op
from topics.protocols.http.exchange import Request, Response

LINES_TYPE = b"application/x-ndjson"
FRAMES_TYPE = b"application/vnd.topics.frames"

Call = Callable[[str, str, dict[str, Any]], Request]
_CALLS: dict[str, Call] = {
    **dict.fromkeys(queue_workers.KINDS, queue_workers.make_call),
    **dict.fromkeys(routers.KINDS, routers.make_router_call),
    **dict.fromkeys(sinks.KINDS, sinks.make_call),
    **dict.fromkeys(merge_jobs.KINDS, merge_jobs.make_call),
}
_PATHS = {"diff": "/diff", "delete": "/delete", "last": "/last", "tags": "/tags"}
_METHODS = {"put": b"PUT", "state": b"GET", "list": b"GET", "drop": b"DELETE", "last": b"GET", "tags": b"GET"}
_IN_QUERY = ("state", "list", "drop", "last", "tags")


def make_request(kind: str, topic: str, request: dict[str, Any]) -> Request:
    if kind in _CALLS:
        return _CALLS[kind](kind, topic, request)
    path = f"/v0/topics/{topic}{_PATHS.get(kind, '')}" if kind != "list" else "/v0/topics"
    if kind in _IN_QUERY:
        pairs = {
            name: str(value).lower() if value in (True, False) else value for name, value in request.items()
        }
        return Request(_METHODS[kind], path.encode(), urlencode(pairs).encode(), 0)
    method = _METHODS.get(kind, b"POST")
    if request.get("lines"):
        made = Request(method, path.encode(), b"", 0, content_type=LINES_TYPE)
        made.idempotency_key = str(request.get("idempotency_key", "")).encode()
        made.body = b"".join(json.dumps(record).encode() + b"\n" for record in request["records"])
        return made
    body = {name: value for name, value in request.items() if name not in ("lines", "frames")}
    made = json_request(method, path, body)
    if request.get("frames"):
        made.accept = FRAMES_TYPE
    return made


def read_answer(op: Op, response: Response) -> Any:
    if response.content_type == FRAMES_TYPE and response.status == 200:
        return read_frames(op, response)
    return json.loads(bytes(response.body)) if response.body else None
