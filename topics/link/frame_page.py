"""The fields of a page of frames. Its body is the frames, as they are stored."""

from __future__ import annotations

import msgspec

from topics.engine.commands.page import Tombstone


class FramePageFields(msgspec.Struct, array_like=True):
    next_from_seq: int
    head_seq: int
    earliest_seq: int
    count: int
    epoch: str = ""
    tombstone: Tombstone | None = None
    catch_up_timed_out: bool = False
    ignored: list[str] = []  # fields of the request


encode_fields = msgspec.msgpack.Encoder().encode
decode_fields = msgspec.msgpack.Decoder(FramePageFields).decode
