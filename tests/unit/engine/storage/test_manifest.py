"""Manifests, dead rows, pins and names: they are read back as written, and refused when one byte has changed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.api.errors import Corrupt, UnsupportedFormat
from topics.engine.storage.manifest import (
    Manifest,
    Pin,
    RetiredSegment,
    Segment,
    decode_current,
    decode_dead,
    decode_manifest,
    decode_pin,
    encode_current,
    encode_dead,
    encode_manifest,
    encode_pin,
    is_manifest_file,
    manifest_number,
    pin_id,
)
from topics.engine.storage.segments import segment_name


def segment(first_seq: int, rows: int, generation: int = 0) -> Segment:
    name = segment_name(first_seq, generation)
    return Segment(
        name, first_seq, generation, rows, rows - 1, 5000, 100, 16 + 32 * rows, 40, 2, 1, 7, 9, "0" * 16
    )


def manifest(*segments: Segment, **fields: object) -> Manifest:
    end = segments[-1].next_seq if segments else 1
    made = Manifest(
        number=7, topic="orders", topic_id=f"{1024:016x}", written_at_ms=5, delete_epoch=33, earliest_seq=1,
        cold_next_seq=end, head_seq=end + 5, ttl_ms=0, segments=list(segments), losses=[(2, 3, "corrupt")],
        retired=[RetiredSegment("seg-0000000000000001-0", 4, "ab" * 8)], plans=["ab" * 8],
    )  # fmt: skip
    return msgspec.structs.replace(made, **fields)


def test_a_manifest_is_one_line_of_json_and_its_digest() -> None:
    made = manifest(segment(1, 10), segment(11, 5, 3))
    raw = encode_manifest(made)
    line, digest, rest = raw.split(b"\n")
    assert (len(digest), rest) == (16, b"")
    assert msgspec.json.decode(line)["segments"][1]["name"] == "seg-000000000000000b-3"
    assert decode_manifest("m", raw) == made


def test_a_manifest_with_any_byte_changed_is_refused() -> None:
    raw = encode_manifest(manifest(segment(1, 10)))
    for at in range(len(raw) - 1):
        with pytest.raises((Corrupt, UnsupportedFormat)):
            decode_manifest("m", raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    for cut in range(len(raw) - 1):
        with pytest.raises(Corrupt):
            decode_manifest("m", raw[:cut])


def test_a_manifest_of_a_later_version_is_told_apart() -> None:
    with pytest.raises(UnsupportedFormat):
        decode_manifest("m", encode_manifest(manifest(version=2)))


@pytest.mark.parametrize(
    "wrong",
    [
        manifest(segment(1, 10), segment(10, 5)),
        manifest(segment(1, 10), cold_next_seq=10),
        manifest(msgspec.structs.replace(segment(1, 10), name="seg-0000000000000002-0")),
        manifest(msgspec.structs.replace(segment(1, 10), rows=0)),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(wrong: Manifest) -> None:
    with pytest.raises(Corrupt):
        decode_manifest("m", encode_manifest(wrong))


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=40), max_size=5))
def test_dead_rows(masks: list[list[bool]]) -> None:
    segments: list[Segment] = []
    dead = {}
    for rows in masks:
        first = segments[-1].next_seq if segments else 1
        segments.append(segment(first, len(rows)))
        dead[first] = np.array(rows, dtype=np.bool_)
    found = decode_dead("d", encode_dead(dead), segments)
    assert {first: mask.tolist() for first, mask in found.items()} == {
        first: mask.tolist() for first, mask in dead.items() if mask.any()
    }


def test_dead_rows_that_do_not_fit_are_refused() -> None:
    raw = encode_dead({1: np.array([True] * 9)})
    for segments in ([segment(1, 8)], [segment(2, 9)], []):
        with pytest.raises(Corrupt):
            decode_dead("d", raw, segments)
    for at in range(len(raw)):
        with pytest.raises((Corrupt, UnsupportedFormat)):
            decode_dead("d", raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :], [segment(1, 9)])


def test_current_and_pins() -> None:
    assert decode_current("c", encode_current(12)) == 12
    for wrong in (b"", b"MANIFEST-0", b"MANIFEST-x\n", b"DEAD-3\n", b"\xff"):
        with pytest.raises(Corrupt):
            decode_current("c", wrong)
    pin = Pin(3, 1_700_000_000_000)
    assert decode_pin("p", encode_pin(pin)) == pin
    for wrong in (b"", b"{}", b'{"manifest":"3","expires_at_ms":1}'):
        with pytest.raises(Corrupt):
            decode_pin("p", wrong)


def test_names() -> None:
    assert [manifest_number(name) for name in ("MANIFEST-1", "DEAD-22", "MANIFEST-01", "MANIFEST-", "x")] == [
        1, 22, None, None, None,
    ]  # fmt: skip
    assert pin_id("PIN-00000000000000ab") == "00000000000000ab"
    assert pin_id("PIN-1") is None
    assert [is_manifest_file(name) for name in ("CURRENT", "PIN-00000000000000ab", "seg-0000000000000001-0.sum")] == [
        True, True, False,
    ]  # fmt: skip
