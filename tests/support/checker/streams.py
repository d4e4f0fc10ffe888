"""What watchers saw: every connection of a session continues exactly where it should, and every event is valid for a
client.

A client knows where each topic of its session is: an event's id says so, and the events say how it got there. What
lies between two such positions is passed to `pages` as a *pushed* page: the records that came, and all seqs that were
skipped without a frame, which need a reason as in any other page.
"""

from __future__ import annotations

import binascii
import json
from base64 import urlsafe_b64decode
from dataclasses import dataclass, field
from typing import Any

from tests.support.checker.dead_letters import targets_of
from tests.support.checker.problem import Problem
from tests.support.checker.shapes import SHOWN, subject_matches
from tests.support.history import Frame, History, Op, Stream

DATA = {
    "record": {"topic", "records", "from_seq", "to_seq", "head_seq"},
    "tombstone": {"topic", "reason", "gap_from", "gap_to", "earliest_seq", "head_seq"},
    "caught-up": {"topic", "head_seq"},
    "topic-deleted": {"topic", "head_seq", "reason"},
}
LAST_WORDS = ("server_shutting_down", "taken_over", "slow_consumer", "not_ready")
DEATHS = ("kill", "power", "stop", "front")
ID_TOPICS_MAX = 64  # beyond that an id may be opaque


@dataclass(slots=True)
class QuietPoint:
    """A moment at which every open stream has caught up, and the topics at that moment."""

    at: int
    heads: dict[str, int] = field(default_factory=dict)


class WatchSessions:
    """All sessions of a history. `pushed` are the pages that their streams showed, by topic."""

    def __init__(self, history: History, problems: list[Problem]) -> None:
        self.history, self.problems = history, problems
        self.pushed: dict[str, list[Op]] = {}
        self.rests = _rests(history)
        self.deaths = [event for event in history.events if event.kind in DEATHS]
        self.dropped = {op.topic for op in history.ops if op.kind == "drop" and not op.refused}
        # Topics whose head may go back with their worker: they look like topics that were created again.
        soft = {op.topic for op in history.ops if _durability(op) in ("ephemeral", "memory")}
        self.made_again = self.dropped | (soft if self.deaths else set())

    def follow(self) -> None:
        made = {op.answer["wid"]: op for op in self.history.ops if op.kind == "watch" and op.ok}
        groups: dict[str, list[Session]] = {}
        sessions = {wid: Session(self, op) for wid, op in made.items()}
        for stream in self.history.streams:
            if stream.wid not in sessions:
                self.blame("session", stream.wid, "a stream of an unknown session")
                continue
            sessions[stream.wid].connect(stream)
        for session in sessions.values():
            if session.group is not None:
                groups.setdefault(session.group, []).append(session)
        for members in groups.values():
            Group(self, members).check()

    def blame(self, rule: str, topic: str, text: str) -> None:
        self.problems.append(Problem(rule, topic, text))

    def died_between(self, start: int, end: int) -> bool:
        return any(start < (event.until or event.at) and event.at < end for event in self.deaths)

    def forgot_between(self, start: int, end: int) -> bool:
        """Whether a shard may have forgotten a group's position. A front that dies loses what it had for the group."""
        return any(
            start < (event.until or event.at) and event.at < end
            for event in self.deaths
            if event.kind != "front"
        )


def _rests(history: History) -> list[QuietPoint]:
    found: list[QuietPoint] = []
    targets = targets_of(history)  # records after their last delivery go there later as well
    for event in history.events:
        if event.kind == "rest":
            until = min((other.at for other in history.events if other.at > event.at), default=1 << 62)
            rest = QuietPoint(event.at)
            for op in history.ops:
                known = op.kind == "state" and op.ok and event.at < op.sent_at < until
                if known and op.topic not in targets:
                    rest.heads.setdefault(op.topic, op.answer["head_seq"])
            found.append(rest)
    return found


def read_id(text: str | None) -> dict[str, int] | None:
    """An event id contains the positions of all topics of the session."""
    try:
        cursors = json.loads(urlsafe_b64decode((text or "") + "=" * (-len(text or "") % 4)))
    except (binascii.Error, ValueError):
        return None
    if not isinstance(cursors, dict):
        return None
    return {name: number for name, number in cursors.items() if name == "#" or not name.startswith("#")}


def _durability(op: Op) -> str | None:
    """The class that a request gives to a topic, if it does."""
    config = op.request if op.kind == "put" else op.request.get("config")
    return config.get("durability") if isinstance(config, dict) else None


class Session:
    """One session, through all of its connections."""

    def __init__(self, watches: WatchSessions, op: Op) -> None:
        self.watches, self.op = watches, op
        self.group: str | None = op.request.get("group")
        self.starts: dict[str, int] = {t: row["from_seq"] for t, row in op.answer["topics"].items()}
        self.names = {name for name in op.request["topics"] if not _is_pattern(name)}
        self.patterns = [name.split(".") for name in op.request["topics"] if _is_pattern(name)]
        self.connections: list[Connection] = []
        for topic in self.starts:
            if not self.wants(topic):
                self.blame(topic, "this topic was not requested")

    def blame(self, topic: str, text: str) -> None:
        self.watches.blame("stream", topic, f"{text}: {self.op.client}'s {self.op.answer['wid']}")

    def wants(self, topic: str) -> bool:
        return topic in self.names or self.finds(topic)

    def finds(self, topic: str) -> bool:
        return any(subject_matches(pattern, topic.split(".")) for pattern in self.patterns)

    def connect(self, stream: Stream) -> None:
        if stream.status not in (None, 200, 503):
            self._refused(stream)
        before = self.connections[-1] if self.connections else None
        connection = Connection(self, stream, before)
        self.connections.append(connection)
        for frame in stream.frames:
            connection.take(frame)
        connection.check_rests()

    def _refused(self, stream: Stream) -> None:
        """A session exists for five minutes, unless it could not be stored."""
        moment = stream.answered_at or 0
        unstored = any(e.kind in ("error", "full") and e.at < moment for e in self.watches.history.events)
        if stream.status != 404 or not unstored:
            self.blame("", f"{stream.client} was refused with {stream.status} @{moment}")


class Connection:
    """One connection. `cursors` are the known positions of topics."""

    def __init__(self, session: Session, stream: Stream, before: Connection | None) -> None:
        self.session, self.stream = session, stream
        self.cursors: dict[str, int] = {}
        self.least: dict[str, int] = {}  # the lowest possible positions, until they are known
        self.is_exact = True  # whether a topic that is not in `cursors` begins at its beginning
        # Topics whose position in the session may be before the id that the connection begins with (an id only sets
        # back), and by how much at most. The stream continues from the session's position, until a frame shows it.
        self.doubtful: dict[str, int] = {}
        self.ended: set[str] = set()
        self.caught_up: set[str] = set()
        self.last_words: str | None = None
        self._begin(before)

    def blame(self, topic: str, text: str, frame: Frame | None = None) -> None:
        where = f"@{self.stream.sent_at}" if frame is None else f"@{frame.at} {frame.event} {_brief(frame)}"
        self.session.blame(topic, f"{text} {where}")

    # -- where it begins -------------------------------------------------------------------------------------

    def _begin(self, before: Connection | None) -> None:
        last_id = self.stream.last_event_id
        if self.session.group is not None:
            return  # its position is unknown to a member
        if last_id is not None:
            cursors = read_id(last_id)
            assert cursors is not None, "a client sends an id that it received"
            self.cursors = dict(cursors)
            self.least = {topic: 0 for topic in self.session.starts if topic not in cursors}
            self.doubtful = {topic: seq for topic in cursors if (seq := self._set_back(topic)) is not None}
        elif before is None:
            self.cursors = dict(self.session.starts)
        else:
            # The server's position: that may be before what this client has seen, or, after a death, before the
            # session was saved. A request that was aborted may even be served now, and set the session back to its
            # position.
            self.is_exact = False
            lost = any(connection.stream.status is None for connection in self.session.connections)
            until = self.stream.answered_at or self.stream.sent_at
            if not lost and not self.session.watches.died_between(before.stream.sent_at, until):
                made_again = self.session.watches.made_again
                known = before.least | before.cursors
                self.least = {topic: seq for topic, seq in known.items() if topic not in made_again}

    def _set_back(self, topic: str) -> int | None:
        """How far back, at most, the session may be before the last event that its client saw; None: not at all.

        The id of that event may be of a topic that does not exist any more. And a request that was aborted may have
        been served after those that were sent later: then the session is at its position.
        """
        if topic in self.session.watches.made_again:
            return 0
        floors: list[int] = []
        for connection in self.session.connections:
            stream = connection.stream
            wanted = read_id(stream.last_event_id) if stream.status is None and stream.last_event_id else None
            if wanted is None:
                continue
            if topic in wanted:
                floors.append(wanted[topic])
            elif topic not in self.session.starts or "#" in wanted:
                floors.append(0)  # that id is from before the topic was found, or does not name all of them
        return min(floors, default=None)

    def _cursor(self, topic: str, found: int, frame: Frame) -> int:
        """The position of the topic before this event, as far as it is known."""
        cursor = self.cursors.get(topic)
        if topic in self.doubtful and cursor is not None:
            cursor = self.cursors[topic] = min(cursor, max(found, self.doubtful.pop(topic)))
        if cursor is not None:
            return cursor
        if self.is_exact and topic not in self.least:
            return 0
        if found < self.least.get(topic, 0):
            self.blame(topic, f"it went back before {self.least[topic]}, to {found}", frame)
        return found

    # -- events ----------------------------------------------------------------------------------------------

    def take(self, frame: Frame) -> None:
        data = frame.data
        if self.last_words is not None:
            self.blame("", f"something came after {self.last_words}", frame)
        if frame.event == "error":
            self._error(frame)
            return
        if frame.event not in DATA or set(data) != DATA[frame.event]:
            self.blame("", f"not in the contract: {data}", frame)
            return
        topic = data["topic"]
        if not self.session.wants(topic):
            self.blame(topic, "this topic was not requested", frame)
        if topic in self.ended:
            if self.session.finds(topic):  # a new topic of that name is found like any other
                self.ended.discard(topic)
                self.caught_up.discard(topic)
                self.cursors[topic] = 0
            else:
                self.blame(topic, "something came after its end", frame)
        cursors = read_id(frame.id)
        if cursors is None or (topic not in cursors and len(cursors) < ID_TOPICS_MAX):
            self.blame(topic, f"{frame.id!r} is not a valid id: {cursors}", frame)
            return
        if self.session.group is not None:
            self._group_frame(frame, topic)
            return
        getattr(self, "_" + frame.event.replace("-", "_"))(frame, topic, cursors)
        self._check_id(frame, topic, cursors)

    def _error(self, frame: Frame) -> None:
        code = frame.data.get("code")
        if not {"code", "error", "message"}.issubset(frame.data) or code not in (*LAST_WORDS, 429):
            self.blame("", f"unknown error: {frame.data}", frame)
        if code != 429:
            self.last_words = code

    def _record(self, frame: Frame, topic: str, cursors: dict[str, int]) -> None:
        data = frame.data
        cursor = self._cursor(topic, data["from_seq"], frame)
        if data["from_seq"] < cursor:
            self.blame(topic, f"it goes on from {data['from_seq']}, but its position was {cursor}", frame)
        elif data["from_seq"] > cursor:
            # That was skipped without a frame at some earlier moment: conditions for these records may have been
            # different then.
            self._page(frame, topic, cursor, data["from_seq"], None, [])
            cursor = data["from_seq"]
        self._check_records(frame, topic)
        self._page(frame, topic, cursor, data["to_seq"], data["head_seq"], data["records"])
        self.caught_up.discard(topic)

    def _check_records(self, frame: Frame, topic: str) -> None:
        data = frame.data
        seqs = [record["$seq"] for record in data["records"]]
        if not seqs or not data["from_seq"] < seqs[0] or seqs[-1] > data["to_seq"]:
            self.blame(topic, f"{seqs} are not between from_seq and to_seq", frame)
        if any(not SHOWN.issuperset(record) for record in data["records"]):
            self.blame(topic, "a record with other fields", frame)

    def _tombstone(self, frame: Frame, topic: str, cursors: dict[str, int]) -> None:
        data = frame.data
        gone = {name: data[name] for name in ("gap_from", "gap_to", "reason", "earliest_seq", "head_seq")}
        if data["reason"] == "recreated":
            self._page(frame, topic, data["head_seq"] + 1, cursors[topic], data["head_seq"], [], gone)
        elif data["earliest_seq"] == data["gap_from"]:
            self._head_went_back(frame, topic)
        else:
            cursor = self._cursor(topic, data["gap_from"] - 1, frame)
            if data["gap_from"] <= cursor:
                self.blame(topic, f"a gap before {cursor}", frame)
            elif data["gap_from"] - 1 > cursor:
                self._page(frame, topic, cursor, data["gap_from"] - 1, data["head_seq"], [])
            self._page(frame, topic, data["gap_from"] - 1, data["gap_to"], data["head_seq"], [], gone)
        self.caught_up.discard(topic)

    def _head_went_back(self, frame: Frame, topic: str) -> None:
        """Seqs up to the cursor were used twice: reading continues at the first of them, with their current records."""
        first = frame.data["gap_from"]
        if topic not in self.session.watches.made_again:
            self.blame(topic, "its head went back, but no crash affects its class", frame)
        cursor = self._cursor(topic, first - 1, frame)
        if cursor < first - 1:
            self._page(frame, topic, cursor, first - 1, frame.data["head_seq"], [])
        self.cursors[topic] = first - 1

    def _caught_up(self, frame: Frame, topic: str, cursors: dict[str, int]) -> None:
        head = frame.data["head_seq"]
        cursor = self._cursor(topic, head, frame)
        if head < cursor:
            self.blame(topic, f"caught up with {head}, but its position was {cursor}", frame)
        self._page(frame, topic, cursor, head, head, [])
        if topic in self.caught_up:
            self.blame(topic, "caught up twice with nothing in between", frame)
        self.caught_up.add(topic)

    def _topic_deleted(self, frame: Frame, topic: str, cursors: dict[str, int]) -> None:
        self._deleted(frame, topic)
        if cursors.get(topic) == 0:  # a topic of that name that is created later is another one
            self.cursors[topic] = 0

    def _deleted(self, frame: Frame, topic: str) -> None:
        if frame.data["head_seq"] or frame.data["reason"] != "deleted":
            self.blame(topic, f"not an end of a topic: {frame.data}", frame)
        self.ended.add(topic)
        gone = Op(
            self.stream.client, "push", topic, {}, self.stream.sent_at, frame.at, 404, {"error": {}}, frame.at
        )
        self.session.watches.pushed.setdefault(topic, []).append(gone)

    def _check_id(self, frame: Frame, topic: str, cursors: dict[str, int]) -> None:
        if "#" in cursors:
            return
        for other, cursor in cursors.items():
            known = self._cursor(other, cursor, frame)
            if other == topic:
                if cursor != known:
                    self.blame(topic, f"the id says {cursor}, and it stands at {known}", frame)
            elif cursor < known:
                self.blame(other, f"the id says {cursor}, and it stood at {known}", frame)
            elif cursor > known and other not in self.ended:
                self._page(frame, other, known, cursor, None, [])
            self.cursors[other] = cursor
        missing = self.cursors.keys() - cursors.keys() - self.ended
        for other in missing & self.session.names & self.session.starts.keys():
            self.blame(other, "the id does not name it", frame)

    # -- groups ----------------------------------------------------------------------------------------------

    def _group_frame(self, frame: Frame, topic: str) -> None:
        """A member gets parts: each is complete, and they come in order."""
        data = frame.data
        if frame.event == "record":
            self._check_records(frame, topic)
            cursor = self.cursors.get(topic, 0)
            died = self.session.watches.died_between(self.stream.sent_at, frame.at)
            if data["from_seq"] < cursor and not died and topic not in self.session.watches.made_again:
                self.blame(topic, f"a member got records before {cursor}", frame)
            self._page(frame, topic, data["from_seq"], data["to_seq"], data["head_seq"], data["records"])
        elif frame.event == "topic-deleted":
            self._deleted(frame, topic)

    # -- pages -----------------------------------------------------------------------------------------------

    def _page(
        self,
        frame: Frame,
        topic: str,
        start: int,
        end: int,
        head: int | None,
        records: list[Any],
        tombstone: dict[str, Any] | None = None,
    ) -> None:
        if tombstone is None and end == start and not records:
            self.cursors[topic] = end
            return
        asked = self.session.op.request
        names = ("limit", "node", "include_tags", "include_meta", "include_data", "group")
        request = {name: asked[name] for name in names if name in asked}
        request |= {"from_seq": start, "strong": asked.get("consistency") == "strong"}
        answer = {
            "topic": topic,
            "records": records,
            "next_from_seq": end,
            "head_seq": end if head is None else head,
            "earliest_seq": 0 if tombstone is None else tombstone["earliest_seq"],
            "caught_up": head is None or head == end,
            "tombstone": tombstone,
        }
        sent = self.stream.sent_at
        op = Op(self.stream.client, "push", topic, request, sent, frame.at, 200, answer, frame.at)
        self.session.watches.pushed.setdefault(topic, []).append(op)
        self.cursors[topic] = end

    # -- rest ------------------------------------------------------------------------------------------------

    def check_rests(self) -> None:
        stream = self.stream
        for rest in self.session.watches.rests:
            open_then = stream.ok and stream.sent_at < rest.at < (stream.ended_at or 1 << 62)
            if open_then and self.session.group is None:
                self._check_rest(rest)

    def _check_rest(self, rest: QuietPoint) -> None:
        """Everything that exists has arrived, and the client knows that it has everything."""
        frame = Frame(rest.at, "rest", None, {})
        for topic, head in rest.heads.items():
            if not self.session.wants(topic) or (topic in self.ended and not self.session.finds(topic)):
                continue
            if topic not in self.session.starts and not self.session.finds(topic):
                continue  # it did not exist when the session was created
            if topic not in self.caught_up:
                self.blame(topic, f"never caught up with {head}", frame)
            cursor = self.cursors.get(topic)
            if cursor is None:
                self.blame(topic, "never heard of", frame)
            elif cursor < head:
                self._page(frame, topic, cursor, head, head, [])
            elif cursor > head:
                self.blame(topic, f"it stands at {cursor}, and the head is {head}", frame)
        for topic in self.session.names & self.session.starts.keys():
            if topic not in rest.heads and topic not in self.ended:
                self.blame(topic, "it is gone, but the stream does not say so", frame)


@dataclass(slots=True)
class Assignment:
    frame: Frame
    connection: Connection


class Group:
    """Members of a group share every topic."""

    def __init__(self, watches: WatchSessions, members: list[Session]) -> None:
        self.watches, self.members = watches, members

    def check(self) -> None:
        shown: dict[tuple[str, int], Assignment] = {}
        frames = [
            Assignment(frame, connection)
            for member in self.members
            for connection in member.connections
            for frame in connection.stream.frames
            if frame.event == "record"
        ]
        for dealt in sorted(frames, key=lambda dealt: dealt.frame.at):
            topic = dealt.frame.data["topic"]
            if topic in self.watches.made_again:
                continue
            for record in dealt.frame.data["records"]:
                first = shown.setdefault((topic, record["$seq"]), dealt)
                # Records that waited for their client may have been assigned long ago.
                since = min(first.connection.stream.sent_at, dealt.connection.stream.sent_at)
                if first is not dealt and not self.watches.forgot_between(since, dealt.frame.at):
                    dealt.connection.blame(
                        topic, f"seq {record['$seq']} had gone to {first.connection.stream.client} @{first.frame.at}",
                        dealt.frame,
                    )  # fmt: skip


def _is_pattern(name: str) -> bool:
    return "*" in name or ">" in name


def _brief(frame: Frame) -> str:
    data = {name: value for name, value in frame.data.items() if name != "records"}
    if "records" in frame.data:
        data["seqs"] = [record["$seq"] for record in frame.data["records"]]
    return str(data)
