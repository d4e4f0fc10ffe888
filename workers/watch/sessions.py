"""Watch sessions: parameters, cursors and owning stream of each session. Pure: no file, no clock.

    create                         a session without a stream
    open  → OpenedSession          the stream owns the session from here on, and may save its cursors
          → StreamOwner            another stream owns it: end that one, open again after its last save, or with `force`
    save                           cursors of the owning stream; those of other streams are ignored
    front_gone, sweep, load
    take, rows, changes            for the file: changes since the last `take`, and the whole state

At open, cursors are set back to the last event id seen by the client, and stored that way: an event id that names only
changed cursors refers to a numbered save, and the saves of the new stream must start from where it began.

Stored cursors are *maybe stale* if a stream may have got further than its last save: its front died, its session was taken
over by force, or this worker died. Only then may the client's event id also move cursors forward.

To find the cursors of an earlier save, later saves are undone. A topic found by a pattern since then is removed, and begins
with its first record. Saves can be lost with this worker, and their numbers must not be reused: an open that moves cursors
back, or follows a possible loss, begins an *era* with new numbers. They are derived from the time, since an era can be
lost, too. Within an era cursors only grow, so using the last known save before a lost one repeats some records and skips
none. If an era has no known save, the oldest known save is used.

A cursor belongs to an *epoch* of its topic (docs/http/read.md#epochs). Event ids do not contain epochs, so the session
stores them. When a stream reaches another epoch, it sends an event about it, which the client may miss; then it reconnects
with a cursor of the previous epoch. The session keeps the range of such cursors until an event id shows that the client has
got the event, explicitly or by another cursor. With a cursor in that range, the stream continues in the previous epoch, and
sends the event again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import msgspec

from topics.api.errors import InvalidRequest, SessionNotFound, Throttled, Unauthorized
from topics.engine.core.subjects import parse_pattern
from topics.link import event_ids
from topics.link.watch import (
    SESSION_TTL_MS,
    STREAM_TOPICS_MAX,
    CreateSession,
    EpochChange,
    OpenedSession,
    OpenSession,
    SaveSession,
    SessionSpec,
)

# Undo history of a session: maximum number of cursors, and the number of saves that are kept in any case.
UNDO_CURSORS_MAX = 4096
UNDO_SAVES_MIN = 4
# The part of it that is written to the file: enough for events in flight to a client when the server stopped.
STORED_CURSORS_MAX = 256
STORED_SAVES_MIN = 2
CURSORS_MAX = 1_000_000  # over all sessions: about 400 MiB
BYTES_MAX = 64 << 20  # of all stored sessions; changes since may take as much again
KEY_BYTES_MAX = BYTES_MAX // 4  # of the sessions of one API key
STORED_CHANGES_MAX = 16  # per session since its row, approximately: rows are rewritten in turn
ROWS_BYTES_MAX = 1 << 20  # of rows encoded by one `take`: about a millisecond on the event loop
PENDING_MIN = 64  # cursors of unwritten saves that a session may have, even if it has fewer topics
ERA = 1 << 26  # save numbers per era: one per second for two years
ERA_MS = 16  # shortest time between two eras: a worker does not restart faster

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode


class CursorUndo(msgspec.Struct, frozen=True, array_like=True):
    """Undoes one save: the cursors as they were at the previous one."""

    number: int
    previous: int
    before: dict[str, int | None]  # None: the session did not have the topic

    @property
    def size(self) -> int:
        return 1 + len(self.before)


class SessionRow(msgspec.Struct, frozen=True, array_like=True):
    """A session in the file."""

    wid: str
    key: bytes
    spec: SessionSpec
    cursors: dict[str, int]
    save: int
    stream: int  # the owning stream; 0: none
    maybe_stale: bool
    learned: list[str]
    undo: list[CursorUndo]
    epochs: dict[str, str] = {}
    changes: dict[str, EpochChange] = {}


class SessionChange(msgspec.Struct, frozen=True, array_like=True):
    """Changes of a session since its last row or change in the file."""

    wid: str
    stream: int
    maybe_stale: bool
    saves: list[tuple[int, dict[str, int | None]]] = []  # arguments of `_Session.apply`
    epochs: dict[str, tuple[str | None, EpochChange | None]] = {}  # current values


@dataclass(frozen=True, slots=True)
class SessionChanges:
    """Changes for the file; rows and changes are encoded."""

    ended: list[str]
    rows: list[bytes]
    changes: list[bytes]


@dataclass(frozen=True, slots=True)
class StreamOwner:
    """The stream that owns a session: its front, and that front's number for it."""

    peer: bytes
    stream: int


@dataclass(slots=True)
class _Session:
    key: bytes
    spec: SessionSpec
    cursors: dict[str, int]
    save: int = 0
    peer: bytes = b""
    stream: int = 0  # 0: no owner
    maybe_stale: bool = False
    is_restored: bool = False  # from the file, and not opened since
    orphan: int = 0  # the owner when the worker died; it may still exist
    learned: set[str] = field(default_factory=set)  # topics added after the session was created
    undo: deque[CursorUndo] = field(default_factory=deque)
    undo_size: int = 0
    epochs: dict[str, str] = field(default_factory=dict)  # of topics whose epoch is known
    changes: dict[str, EpochChange] = field(default_factory=dict)  # which the client may have missed
    # Saves that are not in the file; None: so many that a new row is shorter.
    saves: list[tuple[int, dict[str, int | None]]] | None = field(default_factory=list)
    saves_size: int = 0
    new_epochs: set[str] = field(default_factory=set)
    # In the file: a row, and changes since.
    stored: bytes = b""
    stored_changes: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, row: SessionRow) -> _Session:
        return cls(
            key=row.key,
            spec=row.spec,
            cursors=row.cursors,
            save=row.save,
            maybe_stale=row.maybe_stale,
            is_restored=True,
            orphan=row.stream,
            learned=set(row.learned),
            undo=deque(row.undo),
            undo_size=sum(undo.size for undo in row.undo),
            epochs=row.epochs,
            changes=row.changes,
        )

    # -- saves ---------------------------------------------------------------------------------------------

    def apply(self, number: int, changed: dict[str, int | None]) -> None:
        """Set cursors, as the save with this number; None removes a topic."""
        cursors = self.cursors
        before: dict[str, int | None] = {}
        for topic, cursor in changed.items():
            old = cursors.get(topic)
            if cursor is None:
                cursors.pop(topic, None)
                self.learned.discard(topic)
                self.epochs.pop(topic, None)
                self.changes.pop(topic, None)
            elif old is not None:
                cursors[topic] = cursor
            elif len(cursors) < STREAM_TOPICS_MAX:
                cursors[topic] = cursor
                self.learned.add(topic)
            else:
                continue
            before[topic] = old
        self._remember(CursorUndo(number, self.save, before))
        self.save = number
        if self.saves is not None:
            self.saves.append((number, changed))
            self.saves_size += 1 + len(changed)
            if self.saves_size > max(PENDING_MIN, len(cursors)):
                self.saves = None

    def set_epochs(self, changed: dict[str, EpochChange]) -> None:
        for topic, change in changed.items():
            if topic in self.cursors:
                change = change.following(self.changes.get(topic))
                self.new_epochs.add(topic)
                self.epochs[topic] = change.epoch
                if change.before:
                    self.changes[topic] = change

    def _remember(self, undo: CursorUndo) -> None:
        if undo.number <= undo.previous:  # never happens; the meaning of older numbers would be unknown
            self.undo.clear()
            self.undo_size = 0
        elif self.spec.patterns or not event_ids.lists_all(self.cursors):
            self.undo.append(undo)
            self.undo_size += undo.size
            while self.undo_size > UNDO_CURSORS_MAX and len(self.undo) > UNDO_SAVES_MIN:
                self.undo_size -= self.undo.popleft().size

    def cursors_at(self, save: int) -> dict[str, int]:
        """The cursors at that save, or at an earlier one if it is unknown."""
        cursors, at = dict(self.cursors), self.save
        for undo in reversed(self.undo):
            if at <= save and at // ERA == save // ERA:
                break
            for topic, cursor in undo.before.items():
                if cursor is None:
                    cursors.pop(topic, None)
                else:
                    cursors[topic] = cursor
            at = undo.previous
        return cursors

    def begin_era(self, moved: dict[str, int | None], now_ms: int) -> None:
        self.apply(max(now_ms // ERA_MS, self.save // ERA + 1) * ERA, moved)
        self.maybe_stale = self.is_restored = False

    # -- event ids -----------------------------------------------------------------------------------------

    def cursors_moved_by(self, last_event_id: str) -> dict[str, int | None]:
        """The cursors to change for a client that has seen this event id."""
        decoded = event_ids.decode(last_event_id)
        if decoded is None:
            return {}
        save, seen = decoded
        if save is not None:
            seen = self.cursors_at(save) | seen
        moved: dict[str, int | None] = self._set_back(seen, last_event_id)
        for topic, cursor in self.cursors.items():
            wanted = seen.get(topic)
            if wanted is None:
                # The id is older than the topic's addition.
                if topic in self.learned:
                    moved[topic] = None
            elif topic not in moved and (wanted < cursor or (self.maybe_stale and wanted > cursor)):
                moved[topic] = wanted
        if self.maybe_stale:
            # Topics found by patterns after the stored save.
            for topic, cursor in seen.items():
                if topic not in self.cursors and self._matches(topic):
                    moved[topic] = cursor
        return moved

    def _set_back(self, seen: dict[str, int], last_event_id: str) -> dict[str, int | None]:
        """Return to the previous epoch of topics whose cursors may belong to it."""
        moved: dict[str, int | None] = {}
        for topic, change in list(self.changes.items()):
            wanted = seen.get(topic)
            if wanted is None:
                continue
            self.new_epochs.add(topic)
            if change.low <= wanted <= change.high and not event_ids.knows_epoch(
                last_event_id, topic, change.epoch
            ):
                moved[topic] = wanted
                self.epochs[topic] = change.before
            else:
                del self.changes[topic]
        return moved

    def _matches(self, topic: str) -> bool:
        name = topic.encode()
        return any(parse_pattern(text.encode()).matches(name) for text in self.spec.patterns)

    # -- the file ------------------------------------------------------------------------------------------

    def row(self, wid: str) -> SessionRow:
        return SessionRow(
            wid,
            self.key,
            self.spec,
            self.cursors,
            self.save,
            self.stream or self.orphan,
            self.maybe_stale,
            sorted(self.learned),
            self._stored_undo() if self.undo else [],
            self.epochs,
            self.changes,
        )

    @property
    def has_many_changes(self) -> bool:
        """Whether the row should be rewritten."""
        changes = self.stored_changes
        return len(changes) > STORED_CHANGES_MAX or sum(map(len, changes)) > len(self.stored)

    def take_change(self, wid: str) -> SessionChange:
        assert self.saves is not None
        epochs = {
            topic: (self.epochs.get(topic), self.changes.get(topic)) for topic in sorted(self.new_epochs)
        }
        change = SessionChange(wid, self.stream or self.orphan, self.maybe_stale, self.saves, epochs)
        self.forget_change()
        return change

    def forget_change(self) -> None:
        self.saves, self.saves_size = [], 0
        self.new_epochs.clear()

    def replay(self, change: SessionChange) -> None:
        for number, changed in change.saves:
            self.apply(number, changed)
        for topic, (epoch, told) in change.epochs.items():
            _set(self.epochs, topic, epoch)
            _set(self.changes, topic, told)
        self.orphan, self.maybe_stale = change.stream, change.maybe_stale

    def _stored_undo(self) -> list[CursorUndo]:
        newest: list[CursorUndo] = []
        size = 0
        for undo in reversed(self.undo):
            size += undo.size
            if size > STORED_CURSORS_MAX and len(newest) >= STORED_SAVES_MIN:
                break
            newest.append(undo)
        return newest[::-1]


def _set(table: dict[str, T], topic: str, value: T | None) -> None:
    if value is None:
        table.pop(topic, None)
    else:
        table[topic] = value


class StoredSessions:
    """Sessions rebuilt from the entries of the file."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}

    def put(self, row: SessionRow) -> None:
        self._sessions[row.wid] = session = _Session.of(row)
        session.saves = None  # the file has them

    def change(self, change: SessionChange) -> None:
        self._sessions[change.wid].replay(change)

    def end(self, wid: str) -> None:
        self._sessions.pop(wid, None)

    def rows(self) -> list[SessionRow]:
        return [session.row(wid) for wid, session in self._sessions.items()]


class Sessions:
    """All sessions of a shard. `max_sessions` 0: as many as there are; so `max_per_key`, without which keys have no bound on bytes
    either. `now_ms` does not run back, over restarts either.
    """

    def __init__(self, max_sessions: int, max_per_key: int = 0) -> None:
        self._max = max_sessions
        self._max_per_key = max_per_key
        self._sessions: dict[str, _Session] = {}
        self._bytes = 0  # of all stored rows
        self._key_bytes: dict[bytes, int] = {}
        self._key_sessions: dict[bytes, int] = {}
        self._cursors = 0  # of all sessions, approximately: cursors removed by an event id still count
        # Sessions without an owner and since when; the longest idle first.
        self._idle: dict[str, int] = {}
        # Not in the file yet: between two saves, few of many sessions change.
        self._new: dict[str, None] = {}
        self._changed: dict[str, None] = {}
        self._ended: dict[str, None] = {}

    @property
    def count(self) -> int:
        return len(self._sessions)

    @property
    def is_dirty(self) -> bool:
        """Whether there are changes for the file."""
        return bool(self._new or self._changed or self._ended)

    # -- requests of fronts --------------------------------------------------------------------------------

    def create(self, request: CreateSession, now_ms: int) -> None:
        self.sweep(now_ms)
        if len(request.cursors) > STREAM_TOPICS_MAX:
            raise InvalidRequest(
                f"a stream follows at most {STREAM_TOPICS_MAX} topics, not {len(request.cursors)}",
                max=STREAM_TOPICS_MAX,
            )
        if self._max and request.wid not in self._sessions and len(self._sessions) >= self._max:
            raise Throttled(
                f"there are {self._max} watch sessions, which is the limit; an unused session expires after "
                f"{SESSION_TTL_MS // 1000} s",
                limit="max_watch_sessions",
                max=self._max,
            )
        if self._cursors + len(request.cursors) > CURSORS_MAX:
            raise Throttled(
                f"watch sessions follow {CURSORS_MAX} topics together, which is the limit; narrow the patterns",
                limit="watch_cursors",
                max=CURSORS_MAX,
            )
        if request.wid in self._sessions:
            self._remove(request.wid)
        session = _Session(request.key, request.spec, dict(request.cursors), epochs=dict(request.epochs))
        row = _encode(session.row(request.wid))
        self._check_room(request.key, len(row))
        self._add(request.wid, session, row)
        self._idle[request.wid] = now_ms
        self._new[request.wid] = None

    def _check_room(self, key: bytes, size: int) -> None:
        """Limit the sessions of one API key, so that it cannot use up the server's limit."""
        if key and self._max_per_key:
            if self._key_sessions.get(key, 0) >= self._max_per_key:
                raise Throttled(
                    f"this key has {self._max_per_key} watch sessions, which is the limit; an unused session expires after "
                    f"{SESSION_TTL_MS // 1000} s",
                    limit="max_watch_sessions_per_key",
                    max=self._max_per_key,
                )
            if self._key_bytes.get(key, 0) + size > KEY_BYTES_MAX:
                raise _too_many_bytes("watch sessions of this key", KEY_BYTES_MAX)
        if self._bytes + size > BYTES_MAX:
            raise _too_many_bytes("watch sessions", BYTES_MAX)

    def _add(self, wid: str, session: _Session, row: bytes) -> None:
        self._sessions[wid] = session
        self._cursors += len(session.cursors)
        self._key_sessions[session.key] = self._key_sessions.get(session.key, 0) + 1
        self._store(session, row)

    def _store(self, session: _Session, row: bytes) -> None:
        """Set the stored row of a session; empty: it is removed."""
        grown = len(row) - len(session.stored)
        session.stored = row
        session.stored_changes = []
        self._bytes += grown
        self._key_bytes[session.key] = self._key_bytes.get(session.key, 0) + grown

    def open(
        self, peer: bytes, request: OpenSession, now_ms: int, *, force: bool = False
    ) -> OpenedSession | StreamOwner:
        """Make a stream the owner of a session. `force`: even if the current owner has not released it."""
        self.sweep(now_ms)
        session = self._find(request)
        if request.stream == 0:
            return _opened(session)
        if session.stream and (session.peer, session.stream) != (peer, request.stream):
            if not force:
                return StreamOwner(session.peer, session.stream)
            session.maybe_stale = True
        moved = session.cursors_moved_by(request.last_event_id)
        if moved or session.maybe_stale or session.is_restored:
            session.begin_era(moved, now_ms)
        self._assign(request.wid, session, peer, request.stream)
        return _opened(session)

    def _find(self, request: OpenSession) -> _Session:
        session = self._sessions.get(request.wid)
        if session is None:
            raise SessionNotFound(request.wid)
        if session.key and session.key != request.key:
            raise Unauthorized("this watch session belongs to another key; send the key that created it")
        return session

    def save(self, peer: bytes, request: SaveSession, now_ms: int) -> bool:
        """Save cursors of a stream. False: it is not the owner, or the session is gone; nothing was changed."""
        session = self._sessions.get(request.wid)
        if session is None:
            return False
        unclaimed = session.is_restored and not session.stream and not session.orphan
        if session.orphan == request.stream != 0 or unclaimed:
            # The stream has outlived the previous worker and still owns the session; it may have been opened after the last
            # write of the file.
            self._assign(request.wid, session, peer, request.stream)
        if (session.peer, session.stream) != (peer, request.stream):
            return False
        if request.number != session.save + 1:
            session.maybe_stale = True  # the saves in between are lost
        if any(cursor < session.cursors.get(topic, 0) for topic, cursor in request.cursors.items()):
            # The topic was recreated. A client that does not know yet comes with a cursor that is ahead, and must be told.
            session.maybe_stale = True
        self._apply(session, request)
        self._note_change(request.wid)
        if request.closes:
            self._set_idle(request.wid, now_ms)
        return True

    def _apply(self, session: _Session, request: SaveSession) -> None:
        cursors: dict[str, int | None] = dict(request.cursors)
        # At a limit, no topics are added: an unknown topic begins again at its first record.
        if self._cursors >= CURSORS_MAX or self._bytes >= BYTES_MAX:
            cursors = {topic: cursor for topic, cursor in cursors.items() if topic in session.cursors}
        before = len(session.cursors)
        session.apply(request.number, cursors)
        session.set_epochs(request.epochs)
        self._cursors += len(session.cursors) - before

    def front_gone(self, peer: bytes, now_ms: int) -> None:
        """The streams of a front have ended, and may have got further than their last saves."""
        for wid, session in self._sessions.items():
            if session.stream and session.peer == peer:
                session.maybe_stale = True
                self._set_idle(wid, now_ms)

    # -- time ----------------------------------------------------------------------------------------------

    def sweep(self, now_ms: int) -> None:
        """Remove sessions that have had no owner for SESSION_TTL_MS."""
        gone: list[str] = []
        for wid, since_ms in self._idle.items():
            if now_ms - since_ms < SESSION_TTL_MS:
                break
            gone.append(wid)
        for wid in gone:
            self._remove(wid)

    def _remove(self, wid: str) -> None:
        session = self._sessions.pop(wid)
        self._cursors -= len(session.cursors)
        self._store(session, b"")
        self._idle.pop(wid, None)
        self._new.pop(wid, None)
        self._changed.pop(wid, None)
        self._ended[wid] = None
        left = self._key_sessions[session.key] - 1
        if left:
            self._key_sessions[session.key] = left
        else:
            del self._key_sessions[session.key], self._key_bytes[session.key]

    def _assign(self, wid: str, session: _Session, peer: bytes, stream: int) -> None:
        session.peer, session.stream, session.orphan = peer, stream, 0
        self._idle.pop(wid, None)
        self._note_change(wid)

    def _set_idle(self, wid: str, now_ms: int) -> None:
        session = self._sessions[wid]
        session.peer, session.stream = b"", 0
        self._idle.pop(wid, None)  # move it to the end
        self._idle[wid] = now_ms
        self._note_change(wid)

    def _note_change(self, wid: str) -> None:
        self._changed[wid] = None

    # -- the file ------------------------------------------------------------------------------------------

    def take(self, limit: int) -> SessionChanges:
        """Changes for the file, of up to `limit` changed sessions; fewer if many rows must be rewritten."""
        encoded_bytes = 0
        taken = SessionChanges(list(self._ended), [], [])
        rows = self._new
        self._new, self._ended = {}, {}
        for wid in list(islice(self._changed, limit)):
            session = self._sessions[wid]
            if session.saves is None and encoded_bytes >= ROWS_BYTES_MAX:
                break
            del self._changed[wid]
            if session.saves is None:
                encoded_bytes += self._rewrite_row(wid, session)
                rows[wid] = None
                continue
            change = _encode(session.take_change(wid))
            taken.changes.append(change)
            session.stored_changes.append(change)
            if encoded_bytes < ROWS_BYTES_MAX and wid not in rows and session.has_many_changes:
                encoded_bytes += self._rewrite_row(wid, session)
        taken.rows.extend(self._sessions[wid].stored for wid in rows)
        return taken

    def _rewrite_row(self, wid: str, session: _Session) -> int:
        """Encode a new row; returns its length."""
        session.forget_change()
        self._store(session, _encode(session.row(wid)))
        return len(session.stored)

    def rows(self) -> list[bytes]:
        """Rows of all sessions; with `changes`, the state as of the last `take`."""
        return [session.stored for session in self._sessions.values()]

    def changes(self) -> list[bytes]:
        return [change for session in self._sessions.values() for change in session.stored_changes]

    def load(self, rows: Iterable[SessionRow], now_ms: int) -> None:
        """Load the sessions of the file. None has an owner, and all are idle from now on."""
        for row in rows:
            session = _Session.of(row)
            session.maybe_stale = True  # it may have been opened and read after the last write of the file
            self._add(row.wid, session, _encode(row))
            self._idle[row.wid] = now_ms


def _too_many_bytes(whose: str, most: int) -> Throttled:
    return Throttled(
        f"{whose} take {most} bytes together, which is the limit; name fewer or shorter topics and patterns",
        limit="watch_session_bytes",
        max=most,
    )


def _opened(session: _Session) -> OpenedSession:
    told = {
        topic: change
        for topic, change in session.changes.items()
        if session.epochs.get(topic) == change.epoch
    }
    return OpenedSession(session.spec, dict(session.cursors), session.save, dict(session.epochs), told)
