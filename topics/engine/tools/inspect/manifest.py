"""`topics inspect` for manifests, dead rows, pins and merge plans."""

from __future__ import annotations

import msgspec
import numpy as np

from topics.api.errors import Corrupt, TopicsError
from topics.engine.storage.files import HEADER_BYTES, without_digest
from topics.engine.storage.manifest import (
    DEAD_MAGIC,
    decode_current,
    decode_manifest,
    decode_pin,
    manifest_name,
    manifest_number,
)
from topics.engine.storage.merge_plan_file import decode_plan
from topics.engine.tools.inspect.report import Digest, Inspection, text_of


def inspect_manifest(found: Inspection, data: bytes) -> None:
    path = found.path
    if found.kind != "dead-rows":
        found.version = None
    match found.kind:
        case "manifest":
            _manifest(found, data)
        case "dead-rows":
            _dead_rows(found, data)
        case "current":
            found.facts["manifest"] = manifest_name(decode_current(path, data))
        case "pin":
            pin = decode_pin(path, data)
            found.facts |= {"manifest": manifest_name(pin.manifest), "expires_at_ms": pin.expires_at_ms}
        case _:
            plan = decode_plan(path, data)
            inputs = [one for group in plan.groups for one in group.inputs]
            found.facts |= {
                "topic": text_of(plan.topic.encode("utf-8", "backslashreplace")),
                "topic_id": plan.topic_id,
                "plan_id": plan.plan_id,
                "created_at_ms": plan.created_at_ms,
                "groups": len(plan.groups),
                "segments": len(inputs),
                "data_bytes": sum(one.data_bytes for one in inputs),
            }


def _manifest(found: Inspection, data: bytes) -> None:
    try:
        manifest = decode_manifest(found.path, data)
    except TopicsError:
        found.digests.append(Digest("the file", False))
        raise
    found.digests.append(Digest("the file", True))
    found.version = manifest.version
    segments = manifest.segments
    found.facts |= {
        "topic": text_of(manifest.topic.encode("utf-8", "backslashreplace")),
        "topic_id": manifest.topic_id,
        "number": manifest.number,
        "written_at_ms": manifest.written_at_ms,
        "earliest_seq": manifest.earliest_seq,
        "cold_next_seq": manifest.cold_next_seq,
        "head_seq": manifest.head_seq,
        "segments": len(segments),
        "rows": sum(one.rows for one in segments),
        "live": sum(one.live for one in segments),
        "data_bytes": sum(one.data_bytes for one in segments),
        "dead_bytes": sum(one.dead_bytes for one in segments),
        "retired": len(manifest.retired),
        "plans": len(manifest.plans),
    }
    if manifest.number != manifest_number(found.path.rpartition("/")[2]):
        found.add_problem(found.path, 0, f"contains the number {manifest.number}")


def _dead_rows(found: Inspection, data: bytes) -> None:
    try:
        payload = without_digest(found.path, data, DEAD_MAGIC)
    except TopicsError:
        found.digests.append(Digest("the file", False))
        raise
    found.digests.append(Digest("the file", True))
    try:
        packed = msgspec.msgpack.decode(payload, type=dict[int, bytes])
    except msgspec.DecodeError as error:
        raise Corrupt(found.path, HEADER_BYTES, f"cannot be decoded: {error}") from error
    bits = sum(int(np.unpackbits(np.frombuffer(one, np.uint8)).sum()) for one in packed.values())
    found.facts |= {"segments": len(packed), "dead_rows": bits}
