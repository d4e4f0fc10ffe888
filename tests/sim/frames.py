"""Frames of records as clients read them, in pages and in segment files."""

from __future__ import annotations

import json
import struct
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

from tests.support.history import Op
from topics.protocols.http.exchange import Response

_HEAD, _EXTENSION = struct.Struct("<IBBQQQHHI"), struct.Struct("<BH")


def read_frames(op: Op, response: Response) -> dict[str, Any]:
    """The JSON page with the same contents as a page of frames."""
    head = dict(line.split(": ", 1) for line in response.head.decode().splitlines())
    tombstone = head.get("Topics-Tombstone")
    return {
        "topic": op.topic,
        "records": list(frames(bytes(response.body))),
        "next_from_seq": int(head["Topics-Next-From-Seq"]),
        "head_seq": int(head["Topics-Head-Seq"]),
        "earliest_seq": int(head["Topics-Earliest-Seq"]),
        "caught_up": head["Topics-Caught-Up"] == "true",
        "tombstone": json.loads(tombstone) if tombstone else None,
        "performance": {"catch_up_timed_out": True} if "Topics-Catch-Up-Timed-Out" in head else {},
    }


def frames(body: bytes) -> Iterator[dict[str, Any]]:
    at = 0
    while at < len(body):
        length, _, flags, _, seq, ts, node, tag, size = _HEAD.unpack_from(body, at)
        start, at = at + _HEAD.size, at + 4 + length
        extensions: dict[int, int] = {}
        place = start + node + tag + size
        while place < at - 8:
            kind, count = _EXTENSION.unpack_from(body, place)
            extensions[kind] = int.from_bytes(body[place + 3 : place + 3 + count], "little")
            place += 3 + count
        payload = body[start + node + tag : start + node + tag + size]
        split = size - extensions.get(3, 0)
        record: dict[str, Any] = {"$seq": seq, "$ts": ts}
        if flags & 8:
            record |= {"data": b64encode(payload).decode(), "$encoding": "base64"}
        else:
            record["data"] = json.loads(payload[:split])
        if flags & 2:
            record["$node"] = body[start : start + node].decode()
        if flags & 1:
            record["$tag"] = body[start + node : start + node + tag].decode()
        if 3 in extensions:
            record["meta"] = json.loads(payload[split:])
        yield record
