"""A history: the requests and answers of clients, and the events of the server. It is all that the checker needs.

It is recorded outside of the server, by the simulation and by the tests that kill real processes, in terms of the
HTTP contract. `tests.support.checker` reads it and nothing else.

Every moment is a number from one counter, so that "before" and "after" are exact: an answer with a smaller number
than a request was known before that request was sent.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Op:
    """One request of one client.

    `kind` is the endpoint: write, diff, delete, put, state, drop, list, last, tags, watch; claim, ack, nack, extend
    of a queue, or of the consumer that `request` names, which put_consumer makes and consumer reads; put_router,
    router, drop_router of the router named in `topic`, and routers for a list of them; begin, stage, commit and abort
    of a transaction, whose id is `txn` in the request. `request` is the JSON body, with values of the query and of
    headers under their names (if_empty, return_seqs, prefix, tag, subject, idempotency_key, …).
    """

    client: str
    kind: str
    topic: str
    request: dict[str, Any]
    sent_at: int
    answered_at: int | None = None
    status: int | None = None  # None: no answer came (the connection broke, or the front died)
    answer: Any = None
    # From this moment on the server can no longer execute it. The moment of the answer if there is one; otherwise the
    # first moment at which no message of it can be in flight any more. None: not before the end of the history.
    settled_at: int | None = None

    @property
    def ok(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    @property
    def refused(self) -> bool:
        """Answered with an error that promises that nothing was changed."""
        return (
            self.status is not None
            and not self.ok
            and self.outcome != "unknown"
            and "deleted" not in self.detail
        )

    @property
    def detail(self) -> dict[str, Any]:
        """The error's details. With `deleted` it is of an erase that was put off: so many records are deleted."""
        try:
            return self.answer["error"]["detail"] or {}
        except (KeyError, TypeError):
            return {}

    @property
    def outcome(self) -> str | None:
        """The outcome that an error reports: `unknown` when it may have been executed."""
        found = self.detail.get("outcome")
        return None if found is None else str(found)


@dataclass(slots=True)
class Event:
    """Something that happened to the server.

    | kind     | meaning |
    |---|---|
    | kill     | a shard's process died; what it had written is still there, synced or not |
    | power    | power cut: anything that was not synced may be gone |
    | stop     | a clean shutdown (followed by a start) |
    | front    | a front's process died |
    | full     | the disk filled up; `freed` ends it |
    | freed    | there is space again |
    | error    | a disk call failed with an I/O error; the shard may be read-only until it restarts |
    | rot      | stored bytes were changed by damage to the disk |
    | clock    | the wall clock was set |
    | over     | all leases given before this have ended, and no job is delayed |
    | calm     | all processes run, all disks work, and all messages have had time to arrive |
    | pieces   | no failure: batches of transactions with more records than `note` says are appended in parts here |
    | rest     | like `calm`, and no more writes or faults follow |

    `topics` are those that it can affect; None is all of them.
    """

    at: int
    kind: str
    topics: frozenset[str] | None = None
    note: str = ""
    until: int | None = None  # for an event that takes time, like a clean shutdown: its end


@dataclass(slots=True)
class Frame:
    """One event that a client read from a stream."""

    at: int
    event: str  # record, tombstone, caught-up, topic-deleted or error
    id: str | None
    data: Any


@dataclass(slots=True)
class Stream:
    """One connection to a session's stream: a GET of /v0/watch/:wid, and everything it returned."""

    client: str
    wid: str
    sent_at: int
    last_event_id: str | None  # None: without the header
    answered_at: int | None = None
    status: int | None = None
    frames: list[Frame] = field(default_factory=list)
    ended_at: int | None = None  # None: open until the end of the history
    end: str | None = None  # client, server or broken: who closed it

    @property
    def ok(self) -> bool:
        return self.status == 200


@dataclass(slots=True)
class History:
    ops: list[Op] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    _now: int = 0

    def now(self) -> int:
        """The next moment; each is unique."""
        self._now += 1
        return self._now

    # -- recording -----------------------------------------------------------------------------------------

    def sent(self, client: str, kind: str, topic: str, request: dict[str, Any]) -> Op:
        op = Op(client, kind, topic, request, self.now())
        self.ops.append(op)
        return op

    def answered(self, op: Op, status: int, answer: Any) -> None:
        assert op.answered_at is None and op.settled_at is None, f"a second answer to {op}"
        op.answered_at = op.settled_at = self.now()
        op.status, op.answer = status, answer

    def settled(self, op: Op) -> None:
        """No answer came, and no message of it is in flight any more."""
        if op.settled_at is None:
            op.settled_at = self.now()

    def opening(self, client: str, wid: str, last_event_id: str | None) -> Stream:
        stream = Stream(client, wid, self.now(), last_event_id)
        self.streams.append(stream)
        return stream

    def opened(self, stream: Stream, status: int) -> None:
        stream.answered_at, stream.status = self.now(), status

    def saw(self, stream: Stream, event: str, event_id: str | None, data: Any) -> Frame:
        frame = Frame(self.now(), event, event_id, data)
        stream.frames.append(frame)
        return frame

    def ended(self, stream: Stream, end: str) -> None:
        if stream.ended_at is None:
            stream.ended_at, stream.end = self.now(), end

    def happened(self, kind: str, topics: Iterable[str] | None = None, note: str = "") -> Event:
        event = Event(self.now(), kind, None if topics is None else frozenset(topics), note)
        self.events.append(event)
        return event

    # -- storing -------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """One JSON object per line, for use with ordinary tools."""
        lines: list[tuple[int, str]] = []
        for op in self.ops:
            lines.append((op.sent_at, json.dumps({"op": dataclasses.asdict(op)})))
        for event in self.events:
            row = dataclasses.asdict(event)
            row["topics"] = None if event.topics is None else sorted(event.topics)
            lines.append((event.at, json.dumps({"event": row})))
        for stream in self.streams:
            lines.append((stream.sent_at, json.dumps({"stream": dataclasses.asdict(stream)})))
        path.write_text("".join(line + "\n" for _, line in sorted(lines)))

    @classmethod
    def load(cls, path: Path) -> History:
        history = cls()
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if "op" in row:
                op = Op(**row["op"])
                history.ops.append(op)
                history._now = max(history._now, op.settled_at or op.sent_at)
            elif "stream" in row:
                fields = row["stream"]
                stream = Stream(**{**fields, "frames": [Frame(**frame) for frame in fields["frames"]]})
                history.streams.append(stream)
                last = max((frame.at for frame in stream.frames), default=stream.sent_at)
                history._now = max(history._now, stream.ended_at or last)
            else:
                fields = row["event"]
                topics = None if fields["topics"] is None else frozenset(fields["topics"])
                event = Event(fields["at"], fields["kind"], topics, fields["note"], fields.get("until"))
                history.events.append(event)
                history._now = max(history._now, event.until or event.at)
        return history
