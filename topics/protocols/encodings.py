"""The encodings that a request may name. Another protocol adds its own here, and changes no worker."""

from __future__ import annotations

from collections.abc import Callable

from topics.link import wire
from topics.protocols.encoding import Encoding, Shard
from topics.protocols.frames import Frames
from topics.protocols.http.event_encoding import Events
from topics.protocols.json.encoding import Json, Lines, Raw

ENCODINGS: dict[int, Callable[[Shard], Encoding]] = {
    wire.JSON: Json,
    wire.FRAMES: Frames,
    wire.LINES: Lines,
    wire.RAW: Raw,
    wire.EVENTS: Events,
}
