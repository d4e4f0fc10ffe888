"""Builds histories for tests of the checker, with a small in-memory server.

The server behaves correctly. A test makes a history illegal by changing `live` and `head` directly, or an answer
after it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.checker import check
from tests.support.checker.shapes import match_of
from tests.support.checker.timeline import full_config
from tests.support.history import History, Op

Row = dict[str, Any]
Scenario = Callable[["ScriptedServer"], None]


class Cases:
    """Histories of a test module: legal ones, and illegal ones with the rule that they violate."""

    def __init__(self) -> None:
        self.legal: list[Scenario] = []
        self.broken: list[tuple[str, Scenario]] = []

    def is_legal(self, scenario: Scenario) -> Scenario:
        self.legal.append(scenario)
        return scenario

    def breaks(self, rule: str) -> Callable[[Scenario], Scenario]:
        def keep(scenario: Scenario) -> Scenario:
            self.broken.append((rule, scenario))
            return scenario

        return keep


@dataclass
class StoredTopic:
    """The stored state of one topic."""

    config: Row = field(default_factory=dict)
    head: int = 0
    live: dict[int, Row] = field(default_factory=dict)
    keys: dict[str, tuple[int, int]] = field(default_factory=dict)  # first_seq, count
    gaps: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def earliest(self) -> int:
        return min(self.live, default=self.head + 1)


class ScriptedServer:
    def __init__(self) -> None:
        self.history = History()
        self.held: dict[str, StoredTopic] = {}
        self.time = 1000
        self._serial = 0

    # -- checking ------------------------------------------------------------------------------------------

    def rules(self) -> set[str]:
        return {problem.rule for problem in check(self.history)}

    # -- requests that stay open ---------------------------------------------------------------------------

    def send(self, kind: str, topic: str = "t", client: str = "a", **request: Any) -> Op:
        return self.history.sent(client, kind, topic, request)

    def send_write(
        self,
        count: int = 1,
        topic: str = "t",
        client: str = "a",
        *,
        tag: str | None = None,
        node: str | None = None,
        ttl_ms: int | None = None,
        **request: Any,
    ) -> Op:
        self._serial += 1
        records: list[Row] = []
        for i in range(count):
            record: Row = {"data": {"w": f"{client}-{self._serial}", "i": i, "of": count}}
            for name, value in (("tag", tag), ("node", node), ("ttl_ms", ttl_ms)):
                if value is not None:
                    record[name] = value
            records.append(record)
        return self.history.sent(client, "write", topic, {"records": records, **request})

    def again(self, op: Op) -> Op:
        """Send the same request again."""
        return self.history.sent(op.client, op.kind, op.topic, op.request)

    def do(self, op: Op) -> tuple[int, Any]:
        """Execute the request without answering it yet."""
        return getattr(self, f"_{op.kind}")(op)  # type: ignore[no-any-return]

    def reply(self, op: Op, done: tuple[int, Any]) -> Op:
        self.history.answered(op, *done)
        return op

    def finish(self, op: Op) -> Op:
        return self.reply(op, self.do(op))

    def lose(self, op: Op, *, executed: bool = False) -> Op:
        """The answer is lost."""
        if executed:
            self.do(op)
        self.history.settled(op)
        return op

    def refuse(self, op: Op, status: int, code: str, **detail: Any) -> Op:
        self.history.answered(op, status, {"error": {"code": code, "message": "", "detail": detail}})
        return op

    def event(self, kind: str, *topics: str) -> None:
        self.history.happened(kind, topics or None)

    # -- requests that are answered at once ----------------------------------------------------------------

    def write(self, count: int = 1, topic: str = "t", client: str = "a", **request: Any) -> Op:
        return self.finish(self.send_write(count, topic, client, **request))

    def read(self, from_seq: int = 0, topic: str = "t", client: str = "r", **request: Any) -> Op:
        return self.finish(self.send("diff", topic, client, from_seq=from_seq, **request))

    def ask(self, kind: str, topic: str = "t", client: str = "a", **request: Any) -> Op:
        return self.finish(self.send(kind, topic, client, **request))

    # -- the server ----------------------------------------------------------------------------------------

    def _put(self, op: Op) -> tuple[int, Row]:
        created = op.topic not in self.held
        held = self.held.setdefault(op.topic, StoredTopic())
        held.config = dict(op.request)
        return (201 if created else 200), {
            "topic": op.topic,
            "created": created,
            "config": full_config(op.request),
        }

    def _write(self, op: Op) -> tuple[int, Row]:
        created = op.topic not in self.held
        held = self.held.setdefault(op.topic, StoredTopic(dict(op.request.get("config") or {})))
        key, count = op.request.get("idempotency_key"), len(op.request["records"])
        if key in held.keys:
            first, count = held.keys[key]
            return 200, self._written(op.topic, first, count, first + count - 1, deduped=True)
        first = held.head + 1
        self.time += 10
        for record in op.request["records"]:
            held.head += 1
            row: Row = {"$seq": held.head, "$ts": self.time, "data": record["data"]}
            if record.get("node"):
                row["$node"] = record["node"]
            if record.get("tag"):
                row["$tag"] = record["tag"]
            held.live[held.head] = row
        if key is not None:
            held.keys[key] = (first, count)
        return (201 if created else 200), self._written(op.topic, first, count, held.head, created=created)

    @staticmethod
    def _written(
        topic: str, first: int, count: int, head: int, *, created: bool = False, deduped: bool = False
    ) -> Row:
        return {
            "topic": topic,
            "first_seq": first,
            "last_seq": first + count - 1,
            "seqs": list(range(first, first + count)),
            "head_seq": head,
            "count": count,
            "created": created,
            "deduped": deduped,
        }

    def _missing(self, op: Op) -> tuple[int, Row]:
        return 404, {"error": {"code": "topic_not_found", "message": "", "detail": {"topic": op.topic}}}

    def _diff(self, op: Op) -> tuple[int, Row]:
        held = self.held.get(op.topic)
        if held is None:
            return self._missing(op)
        request = op.request
        cursor, tombstone = request.get("from_seq", 0), None
        if cursor > held.head:
            tombstone = {"gap_from": 1, "gap_to": held.head, "reason": "recreated"}
            cursor = held.earliest - 1
        for first, last, reason in held.gaps:
            if first <= cursor + 1 <= last:
                tombstone = {"gap_from": cursor + 1, "gap_to": last, "reason": reason}
                cursor = last
        end = min([first - 1 for first, _, _ in held.gaps if first > cursor], default=held.head)
        match, node = match_of(request.get("tag")), request.get("node")
        records = []
        for seq in sorted(held.live):
            row = held.live[seq]
            if not cursor < seq <= end or (match and not match(row.get("$tag"))):
                continue
            if node is not None and row.get("$node") == node:
                continue
            if len(records) == (request.get("limit") or 256):
                end = seq - 1
                break
            records.append({name: row[name] for name in row if name != "$tag" or request.get("include_tags")})
        return 200, {
            "topic": op.topic,
            "records": records,
            "next_from_seq": end,
            "head_seq": held.head,
            "earliest_seq": held.earliest,
            "caught_up": end == held.head,
            "tombstone": tombstone,
            "lag": held.head - end,
        }

    def _delete(self, op: Op) -> tuple[int, Row]:
        held = self.held.get(op.topic)
        if held is None:
            return self._missing(op)
        request, match = op.request, match_of(op.request.get("match"))
        chosen = [
            seq
            for seq in sorted(held.live)
            if seq < (request.get("before_seq") or held.head + 1)
            and seq in request.get("seqs", held.live)
            and (match is None or match(held.live[seq].get("$tag")))
        ]
        if request.get("keep"):
            chosen = chosen[: -request["keep"]]
        for seq in chosen:
            del held.live[seq]
        numbers = self._numbers(held)
        return 200, {"topic": op.topic, "deleted": len(chosen), **numbers}

    @staticmethod
    def _numbers(held: StoredTopic) -> Row:
        return {
            "head_seq": held.head,
            "earliest_seq": held.earliest,
            "count": len(held.live),
            "bytes": 9 * len(held.live),
        }

    def _state(self, op: Op) -> tuple[int, Row]:
        held = self.held.get(op.topic)
        if held is None:
            return self._missing(op)
        answer: Row = {"topic": op.topic, "type": "log", "config": full_config(held.config)}
        answer |= {
            "next_seq": held.head + 1,
            "effective_priority": 0,
            "last_write_ts": None,
            "last_read_ts": None,
        }
        return 200, answer | self._numbers(held)

    def _drop(self, op: Op) -> tuple[int, Row]:
        deleted = self.held.pop(op.topic, None) is not None
        return 200, {"topic": op.topic, "deleted": deleted, "routers_removed": []}

    def _list(self, op: Op) -> tuple[int, Row]:
        rows = [
            {
                "topic": name,
                "durable": False,
                "effective_priority": 0,
                "type": "log",
                "durability": "disk",
                **self._numbers(self.held[name]),
            }
            for name in sorted(self.held)
            if name.startswith(op.request.get("prefix", ""))
        ]
        return 200, {"topics": rows}

    def _last(self, op: Op) -> tuple[int, Row]:
        held = self.held.get(op.topic)
        if held is None:
            return self._missing(op)
        match = match_of(op.request["tag"])
        assert match is not None
        newest = {row["$tag"]: row for _, row in sorted(held.live.items()) if match(row.get("$tag"))}
        rows = sorted(newest.values(), key=lambda row: row["$seq"])
        records = [dict(row) for row in (rows if op.request.get("each") else rows[-1:])]
        return 200, {"topic": op.topic, "records": records, "head_seq": held.head}

    def _tags(self, op: Op) -> tuple[int, Row]:
        held = self.held.get(op.topic)
        if held is None:
            return self._missing(op)
        tags = sorted(row["$tag"] for row in held.live.values() if "$tag" in row)
        return 200, {
            "topic": op.topic,
            "tags": [{"tag": tag, "count": tags.count(tag)} for tag in dict.fromkeys(tags)],
        }
