"""Goal: what fuzzing found stays fixed, and well-known bad inputs are tested by name.

Method: single inputs for the targets of this folder, each marked with its fault, and the rules of the
product that a finding has led to.
"""

from __future__ import annotations

import struct

import msgspec
import pytest

from tests.fuzz.front import FrontWorld, read_answers
from tests.fuzz.runner import bounded_memory, run_one
from tests.fuzz.targets import TARGETS, http1
from tests.support.engine_harness import META_DIR, SMALL
from tests.support.faults import fault
from tests.support.shard_rig import WORKER, Rig
from tests.support.sim_disk import SimDisk
from topics.api.errors import Corrupt
from topics.engine.core.quotas import QuotaReport
from topics.engine.storage import wal
from topics.engine.storage.files import write_digest_file
from topics.engine.storage.intents import MAGIC, intent_path, pending_intents
from topics.engine.storage.segments import SegmentMeta
from topics.engine.upkeep.loading import index_of_records
from topics.link import wire

HUGE = 1 << 60


def _message(*, op: int = wire.WRITE, topic_len: int = 1, args_len: int = 0, body_len: int = 2) -> bytes:
    head = struct.pack("<QQIBBBHII", 1, 0, 30_000, op, 0, wire.JSON, topic_len, args_len, body_len)
    assert len(head) == wire.REQUEST_BYTES
    return head + b"t{}"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(
            _message(body_len=0xFFFF_FFFE),
            marks=fault(
                "link",
                "a message with an item longer than itself",
                "the message is dropped; the shard continues to serve",
            ),
        ),
        pytest.param(
            _message()[:-9],
            marks=fault(
                "link", "a message with a cut item", "the message is dropped; the shard continues to serve"
            ),
        ),
        pytest.param(
            _message(body_len=wire.SEPARATE),
            marks=fault(
                "link",
                "a message whose large body is missing",
                "the message is dropped; the shard continues to serve",
            ),
        ),
        pytest.param(
            _message(op=200),
            marks=fault("link", "an op code that does not exist", "answered; the shard continues to serve"),
        ),
        pytest.param(
            _message(op=0),
            marks=fault(
                "link", "an op code of zero", "answered as an internal error; the shard continues to serve"
            ),
        ),
        pytest.param(
            _message(args_len=1),
            marks=fault(
                "link",
                "arguments that are not MessagePack",
                "answered as an internal error; the shard continues to serve",
            ),
        ),
    ],
)
def test_a_bad_message_leaves_the_shard_serving(data: bytes) -> None:
    run_one(TARGETS["messages"], b"\x01" + data)


@fault(
    "link",
    "an invalid report at the worker that keeps the caps",
    "dropped with a line in the log; the shard continues to serve",
)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"nonsense",
        msgspec.msgpack.encode(QuotaReport(7, 1, 0, 0)),
        msgspec.msgpack.encode(QuotaReport(0, 1, 0, 0)),
    ],
)
def test_an_invalid_report_is_dropped(body: bytes) -> None:
    rig = Rig(msgspec.structs.replace(SMALL, max_topics=10), shards=3)
    with pytest.raises(wire.BadMessage):
        rig.caps.receive_report(WORKER + b"1", body)
    run_one(TARGETS["messages"], b"\x02" + body)


@fault(
    "link",
    "a report at a worker that does not keep the caps",
    "dropped with a line in the log; the shard continues to serve",
)
def test_a_report_at_the_wrong_shard_is_dropped() -> None:
    run_one(TARGETS["messages"], b"\x03" + msgspec.msgpack.encode(QuotaReport(1, 1, 0, 0)))


@fault(
    "link",
    "an invalid message of the catalog",
    "dropped with a line in the log; the shard continues to serve",
)
def test_an_invalid_message_of_the_catalog_is_refused() -> None:
    rig = Rig(msgspec.structs.replace(SMALL, shard=1, max_topics=10), shards=2)
    with pytest.raises(wire.BadMessage):
        rig.caps.receive(b"\x93\x01")
    assert rig.ask(wire.READY) is not None


@fault(
    "log file",
    "a log file cut inside the head of an envelope, after damage",
    "torn or corrupt, as with any other cut",
)
def test_the_magic_of_an_envelope_in_the_last_bytes_of_a_file() -> None:
    salt = 5
    data = wal.file_header(shard=0, number=1, salt=salt) + b"\xff" * 64 + wal.ENVELOPE_MAGIC + bytes(20)
    found = wal.scan("wal", 1, data)
    assert found is not None and not found.envelopes and found.bad_at == [wal.FILE_HEADER_BYTES]


@fault(
    "segment",
    "index and records damaged so that a frame's head is cut off",
    "the segment is announced as lost",
)
@pytest.mark.parametrize("length", [4, 40])
def test_records_whose_lengths_lead_to_the_head_of_no_frame(length: int) -> None:
    data = bytes(16) + struct.pack("<I", length) + bytes(length) + bytes(4)
    with pytest.raises(Corrupt):
        index_of_records("data", data, 16, SegmentMeta(1, rows=4), None, 1)


@fault("data directory", "an erase intent whose path is not UTF-8", "refused as corrupt")
def test_an_intent_with_a_path_that_is_not_utf8_is_corrupt() -> None:
    disk = SimDisk(1)
    for path in ("layout-1", "layout-1/shard-00", META_DIR):
        disk.make_dir(path)
    write_digest_file(disk, intent_path(META_DIR, 1), MAGIC, b"\x91\x93\xa2\xff\xff\x00\xc4\x01x")
    with pytest.raises(Corrupt):
        pending_intents(disk, META_DIR)


# -- huge lengths ------------------------------------------------------------------------------------------


@fault("client", "a Content-Length of 2^60", "refused before a byte of the body is waited for")
def test_a_content_length_of_2_to_the_60() -> None:
    head = b"POST /v0/topics/t HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n{"
    assert _statuses(head % HUGE) == [400]  # beyond any valid length
    assert _statuses(head % (1 << 49)) == [413]


@fault("client", "a chunk of 2^47 bytes", "413 once the limit is passed; nothing is allocated for it")
def test_a_huge_chunk() -> None:
    head = b"POST /v0/topics/t HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert _statuses(head + b"7fffffffffff\r\n" + b"x" * 8000) == [413]


def _statuses(data: bytes) -> list[int]:
    async def drive() -> bytes:
        world = FrontWorld()
        await world.feed([data])
        await world.end()
        return bytes(world.transport.out)

    with bounded_memory():
        return [answer.status for answer in read_answers(http1._LOOP.run_until_complete(drive()), 0)]


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        pytest.param(
            1,
            b"TPCSDIC\0\x01\0\0\0\0\0\0\0" + struct.pack("<B3xII", 1, 0xFFFF_FFFF, 8) + bytes(8),
            marks=fault(
                "index",
                "a dictionary that counts 2^32 names",
                "refused as corrupt; nothing is allocated for them",
            ),
        ),
        pytest.param(
            1,
            b"TPCSDIC\0\x01\0\0\0\0\0\0\0" + struct.pack("<B3xII", 3, 1, 0xFFFF_FFFF) + bytes(12),
            marks=fault(
                "index",
                "a dictionary with a block of 2^32 bytes",
                "refused as corrupt; nothing is allocated for it",
            ),
        ),
        pytest.param(
            3,
            b"TPCSSUM\0\x01\0\0\0\0\0\0\0\xdd\xff\xff\xff\xff",
            marks=fault(
                "segment", "a .sum with a list of 2^32 entries, its digest right", "refused as corrupt"
            ),
        ),
        pytest.param(
            4,
            b"TPCSSNP\0\x01\0\0\0\0\0\0\0\xff\xff\xff\xff\x01",
            marks=fault(
                "snapshot",
                "a row of 2^32 bytes, its digest right",
                "refused as corrupt; the snapshot before it serves",
            ),
        ),
        pytest.param(
            6,
            b"TPCSWAL\0\x01" + bytes(55) + b"ENV1\xff\xff\xff\xff" + bytes(100),
            marks=fault(
                "log file", "an envelope of 2^32 bytes", "torn or refused; nothing is allocated for it"
            ),
        ),
    ],
)
def test_a_huge_length_field(kind: int, content: bytes) -> None:
    with bounded_memory():
        for digest_agrees in (0, 1):
            run_one(TARGETS["files"], bytes([kind, 2 | digest_agrees]) + content + bytes(8))


# -- well-known bad bodies ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"[" * 50_000, marks=fault("request", "JSON nested 50,000 deep", "invalid_request")),
        pytest.param(
            b'{"records":[{"data":' + b"[" * 3000 + b"]" * 3000 + b"}]}",
            marks=fault(
                "request", "a record nested 3,000 deep", "invalid_request, or stored and read back as it is"
            ),
        ),
        pytest.param(
            b'{"records":[{"data":1,"tag":"\\ud800"}]}',
            marks=fault("request", "half of a surrogate pair in a tag", "invalid_request"),
        ),
        pytest.param(
            b'{"records":[{"data":NaN}]}', marks=fault("request", "NaN for a number", "invalid_request")
        ),
        pytest.param(
            b'{"records":[{"data":1,"data":2}],"records":[{"data":3}]}',
            marks=fault("request", "a repeated member", "one of the two counts, as JSON allows"),
        ),
        pytest.param(
            b'{"records":[{"data":1,"ttl_ms":18446744073709551616}]}',
            marks=fault("request", "a number beyond 64 bits", "invalid_request"),
        ),
        pytest.param(
            b'{"records":[{"data":' + b"9" * 5000 + b"}]}",
            marks=fault("request", "a number of 5,000 digits", "stored as it is, or invalid_request"),
        ),
    ],
)
def test_a_well_known_bad_body(body: bytes) -> None:
    for op in range(6):
        run_one(TARGETS["bodies"], bytes([op, 1]) + body)
