"""Frames: pages of records as they are stored; everything else as JSON."""

from __future__ import annotations

from typing import Any

from topics.engine.commands import topics as cmd
from topics.link import wire
from topics.link.frame_page import FramePageFields, encode_fields
from topics.protocols.encoding import Shard
from topics.protocols.json.encoding import Json
from topics.protocols.json.requests import read_diff


class Frames(Json):
    def __init__(self, shard: Shard) -> None:
        super().__init__(shard)
        self.read[wire.DIFF] = lambda t, r, a: read_diff(t, r, frames=True)

    def render(
        self, request: wire.Request, result: object, options: Any, total_ms: float, sync_ms: float
    ) -> wire.Result:
        if isinstance(result, cmd.FramePage):
            return _page(request, result)
        return super().render(request, result, options, total_ms, sync_ms)


def _page(request: wire.Request, result: cmd.FramePage) -> wire.Result:
    fields = FramePageFields(
        result.next_from_seq,
        result.head_seq,
        result.earliest_seq,
        result.count,
        result.epoch,
        result.tombstone,
        bool(request.flags & wire.LATE),
        request.ignored if request.flags & wire.IGNORED else [],
    )
    chunks = result.chunks
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    return wire.OK, wire.FRAMES, encode_fields(fields), body
