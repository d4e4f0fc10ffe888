"""What clients sent, what they were told, and what happened to the server meanwhile: all that a judge needs.

Recorded outside of the server, by the simulation and by the tests that kill real processes, in terms of the HTTP
contract alone. `tests.support.checker` reads it and knows nothing else.

Every moment is a number from one counter, so that "before" and "after" are exact: an answer that has a smaller number
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

    `kind` is the endpoint: write, diff, delete, put, state, drop, list, last, tags, watch; claim, ack, nack, extend of a queue,
    or of the consumer that `request` names, which put_consumer makes and consumer looks at; put_router, router, drop_router
    of the router that stands in `topic`, and routers for a list of them; begin, stage, commit and abort of a transaction,
    whose id is `txn` in the request. `request` is the JSON body; what
    goes into the query or a header stands in it too, under its name there (if_empty, return_seqs, prefix, tag, subject,
    idempotency_key, …).
    """

    client: str
    kind: str
    topic: str
    request: dict[str, Any]
    sent_at: int
    answered_at: int | None = None
    status: int | None = None  # None: no answer came (the connection broke, or the front died)
    answer: Any = None
    # From here on the server can no longer execute it. The answer's moment when there is one; without an answer, the
    # first moment at which nothing of it can be on its way any more. None: not before the end of the history.
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
        """What an error says beside its text. With `deleted` it is of an erase that was put off: that much is gone."""
        try:
            return self.answer["error"]["detail"] or {}
        except (KeyError, TypeError):
            return {}

    @property
    def outcome(self) -> str | None:
        """What an error says of its outcome: `unknown` when it may have been executed."""
        found = self.detail.get("outcome")
        return None if found is None else str(found)


@dataclass(slots=True)
class Event:
    """Something that happened to the server.

    | kind     | meaning |
    |---|---|
    | kill     | a shard's process died; what it had written is still there, synced or not |
    | power    | the machine lost its power: anything that was not synced may be gone |
    | stop     | a clean shutdown (followed by a start) |
    | front    | a front's process died |
    | full     | the disk filled up; `freed` ends it |
    | freed    | there is space again |
    | error    | a disk call failed with an I/O error; the shard may be read-only until it restarts |
    | rot      | stored bytes were changed behind the server's back |
    | clock    | somebody set the wall clock |
    | over     | no lease that was given before this holds any more, and nothing is delayed |
    | calm     | every process runs, every disk is well, and what was on its way has had time to arrive |
    | pieces   | no failure: batches of transactions with more records than `note` says appear bit by bit here |
    | rest     | nobody writes any more, nothing breaks any more, and what was on its way has had time to arrive |

    `topics` are those that it can touch; None is all of them.
    """

    at: int
    kind: str
    topics: frozenset[str] | None = None
    note: str = ""
    until: int | None = None  # for what takes its time, like a clean shutdown: when it was over


@dataclass(slots=True)
class Frame:
    """What a client read from a stream, one event of it."""

    at: int
    event: str  # record, tombstone, caught-up, topic-deleted or error
    id: str | None
    data: Any


@dataclass(slots=True)
class Stream:
    """One connection that follows a session: a GET of /v0/watch/:wid, and what came of it."""

    client: str
    wid: str
    sent_at: int
    last_event_id: str | None  # None: without the header
    answered_at: int | None = None
    status: int | None = None
    frames: list[Frame] = field(default_factory=list)
    ended_at: int | None = None  # None: it is open to the end of the history
    end: str | None = None  # client, server or broken: who ended it

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
        """The next moment; no two are the same."""
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
        """No answer came, and nothing of it is on its way any more."""
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

    # -- keeping -------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """One line of JSON each, to be looked at with ordinary tools."""
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
