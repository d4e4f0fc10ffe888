"""A small server of event streams that returns scripted answers, one per request."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """`holds`: the connection stays open after the body, like that of an idle stream."""

    status: int = 200
    body: bytes = b""
    holds: bool = False


@dataclass
class Asked:
    method: str
    path: str
    body: Any
    last_event_id: str | None
    authorization: str | None


@dataclass
class EventServer:
    script: list[Answer]
    asked: list[Asked] = field(default_factory=list)
    url: str = ""
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def bodies(self) -> list[Any]:
        return [asked.body for asked in self.asked if asked.method == "POST"]

    @property
    def ids(self) -> list[str | None]:
        return [asked.last_event_id for asked in self.asked if asked.method == "GET"]


def made(wid: str = "wid_1", **cursors: int) -> Answer:
    """The answer to POST /v0/watch."""
    topics = {name: {"from_seq": seq, "head_seq": seq, "earliest_seq": 1} for name, seq in cursors.items()}
    body = {
        "wid": wid,
        "stream_url": f"/v0/watch/{wid}",
        "session_ttl_ms": 300000,
        "topics": topics,
        "performance": {"server_total_ms": 0.1},
    }
    return Answer(body=json.dumps(body).encode())


def refusal(status: int, code: str, message: str = "so it is") -> Answer:
    return Answer(status, json.dumps({"error": {"code": code, "message": message}}).encode())


def event(name: str, event_id: str | None = None, **data: Any) -> bytes:
    lines = [f"event: {name}"]
    if event_id is not None:
        lines.append(f"id: {event_id}")
    return "\n".join([*lines, f"data: {json.dumps(data)}", "", ""]).encode()


def records(topic: str, event_id: str, first: int, *data: Any) -> bytes:
    rows = [{"$seq": first + i, "$ts": 1_700_000_000_000, "data": value} for i, value in enumerate(data)]
    last = first + len(data) - 1
    return event(
        "record", event_id, topic=topic, records=rows, from_seq=first - 1, to_seq=last, head_seq=last
    )


@contextmanager
def serving(*script: Answer) -> Iterator[EventServer]:
    server = EventServer(list(script))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer("POST", body)

        def do_GET(self) -> None:
            self._answer("GET", None)

        def _answer(self, method: str, body: Any) -> None:
            headers = self.headers
            server.asked.append(
                Asked(method, self.path, body, headers.get("Last-Event-ID"), headers.get("Authorization"))
            )
            answer = server.script.pop(0) if server.script else Answer(holds=True)
            self.send_response(answer.status)
            self.end_headers()
            self.wfile.write(answer.body)
            self.wfile.flush()
            if answer.holds:
                server.over.wait(60)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_port}"
        try:
            yield server
        finally:
            server.over.set()
            http.shutdown()
            thread.join()
