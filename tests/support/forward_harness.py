"""Two engines, of a source and of a dest; the test carries the copies between them."""

from __future__ import annotations

from typing import Any

from tests.support.engine_harness import SMALL, Harness
from topics.api.config import EngineConfig
from topics.api.errors import TopicsError
from topics.engine.commands import forwards as f
from topics.engine.commands import topics as c

SOURCE_CONFIG = EngineConfig(**{**{n: getattr(SMALL, n) for n in SMALL.__struct_fields__}, "shard": 1})


def rule(uid: int = 1, source: str = "src", dest: str = "dst", **fields: Any) -> f.Forward:
    return f.Forward(uid, fields.pop("name", f"r{uid}"), source, dest, **fields)


class Pair:
    """The shards of a source and of a dest; with `one` both are the same shard."""

    def __init__(self, *, one: bool = False, seed: int = 1) -> None:
        self.dest = Harness(seed=seed)
        self.source = self.dest if one else Harness(SOURCE_CONFIG, seed=seed + 1)

    def open(self, forward: f.Forward | None = None) -> f.Forward:
        """Create a rule as the catalog does: first at the dest, then at the source."""
        forward = forward or rule()
        self.dest.do(f.OpenInflow(forward.dest, forward.uid, forward.name))
        self.source.do(f.OpenOutflow(forward))
        return forward

    def close(self, forward: f.Forward) -> None:
        self.dest.do(f.CloseInflow(forward.dest, forward.uid))
        self.source.do(f.CloseOutflow(forward.uid, forward.source))

    def next(self, forward: f.Forward, after: int, topic: str = "src", count: int = 4) -> f.Copies | None:
        shard = self.source.engine.shard
        log = shard.state.published[topic]
        return shard.forwards.copies_after(
            log, shard.forwards.outflows[forward.uid].forward, after, count, 1 << 20
        )

    def mark(self, forward: f.Forward, topic: str = "src") -> int:
        """The position that the dest reports."""
        return self.ask(forward, topic).mark

    def ask(self, forward: f.Forward, topic: str = "src") -> f.CopiesTaken:
        shard = self.source.engine.shard
        copies = shard.forwards.empty_copies(shard.state.published[topic], forward, 0)
        taken = self.dest.do(f.TakeCopies(forward.dest, copies))
        assert isinstance(taken, f.CopiesTaken)
        return taken

    def take(self, copies: f.Copies) -> f.CopiesTaken:
        taken = self.dest.do(f.TakeCopies(copies.forward.dest, copies))
        assert isinstance(taken, f.CopiesTaken)
        return taken

    def carry(self, forward: f.Forward, topic: str = "src", count: int = 4) -> f.CopiesTaken:
        """Copy until nothing is left to copy, or the dest is full."""
        taken = self.ask(forward, topic)
        while not taken.full:
            copies = self.next(forward, taken.mark, topic, count)
            if copies is None:
                break
            before = taken.mark
            taken = self.take(copies)
            assert taken.mark > before or taken.full, "copying makes no progress"
        return taken

    def refused(self, copies: f.Copies, error: type[TopicsError]) -> None:
        self.dest.refused(f.TakeCopies(copies.forward.dest, copies), error)

    def payloads(self, topic: str = "dst") -> list[bytes]:
        return [payload for _, payload in self.dest.rows(topic)]

    def page(self, topic: str = "dst") -> c.Page:
        return self.dest.diff(topic, limit=1000)
