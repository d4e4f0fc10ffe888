"""A violation, described so that it can be found in the history."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.history import Op


@dataclass(frozen=True, slots=True)
class Problem:
    rule: str
    topic: str
    text: str

    def __str__(self) -> str:
        return f"[{self.rule}] {self.topic}: {self.text}"


def name_of(op: Op) -> str:
    """A request in a few words: client, kind, time."""
    asked = {name: value for name, value in op.request.items() if name != "records"}
    if op.kind == "write":
        asked["records"] = len(op.request["records"])
    until = op.settled_at if op.answered_at is None else op.answered_at
    return f"{op.client}'s {op.kind} {asked} @{op.sent_at}..{until} -> {op.status}"
