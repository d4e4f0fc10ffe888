"""A data directory with changed bytes: a start serves the records that were written, or reports what is missing.

An input is a list of edits to the files of an image. Whatever they are, the engine opens, or refuses with a documented
error; every record that it serves must have been written, and every one that it does not serve must be
announced as lost, or the shard must report that it is damaged.
"""

from __future__ import annotations

from tests.fuzz.images import Image, Row, images, read_all
from tests.fuzz.mutate import Choices
from tests.fuzz.runner import Target
from tests.support.engine_harness import Harness
from topics.api.errors import Corrupt, LogGap, ShardReadOnly, TopicsError, UnsupportedFormat

EDITS_MAX = 4
_REFUSALS = (Corrupt, UnsupportedFormat, LogGap)


def run(data: bytes) -> None:
    choices = Choices(data)
    made = images()
    image = made[choices.number(len(made))]
    changed: dict[str, bytes | None] = {}
    for _ in range(EDITS_MAX):
        _edit(image, changed, choices)
        if choices.is_used_up:
            break
    try:
        h = Harness(image.config, disk=image.disk(changed))
    except _REFUSALS:
        return
    check_records(h, image, changed)


def _edit(image: Image, changed: dict[str, bytes | None], choices: Choices) -> None:
    path = image.paths[choices.number(len(image.paths))]
    data = bytearray(changed.get(path, image.files[path]) or b"")
    kind = choices.number(8)
    at = choices.number(len(data) + 1)
    if kind == 0:
        data[at : at + 1] = bytes([choices.byte()])
    elif kind == 1:
        data[at : at + 1] = bytes(byte ^ 1 << choices.number(8) for byte in data[at : at + 1])
    elif kind == 2:
        data[at : at + 8] = choices.bytes(8)
    elif kind == 3:
        del data[at:]
    elif kind == 4:
        size = choices.byte()
        data[at : at + size] = bytes(len(data[at : at + size]))
    elif kind == 5:
        data += choices.bytes(choices.byte())
    elif kind == 6:
        other = image.files[image.paths[choices.number(len(image.paths))]]
        data[at : at + 64] = other[at : at + 64]
    else:
        changed[path] = None
        return
    changed[path] = bytes(data)


class StartReport:
    """What the start reported, and so what may be missing."""

    def __init__(self, h: Harness, changed: dict[str, bytes | None]) -> None:
        self.read_only = h.engine.shard.state.read_only is not None
        # Damage in the newest entries looks like a write that a power cut tore: docs/fuzzing.md.
        self.cut = any(path.endswith(".log") for path in changed)
        self.aside = h.disk.exists("lost+found")


def check_records(h: Harness, image: Image, changed: dict[str, bytes | None]) -> None:
    """Compare a damaged directory's records with the original ones; gaps must be announced."""
    report = StartReport(h, changed)
    for topic, written in image.written.items():
        log = h.engine.shard.state.published.get(topic)
        if log is None:
            assert report.read_only or report.cut or report.aside, f"{topic} is missing without a report"
            continue
        try:
            rows, gaps = read_all(h, topic)
        except TopicsError as error:
            # A shard that may have lost its newest records does not know which.
            assert isinstance(error, _REFUSALS) or (report.read_only and isinstance(error, ShardReadOnly)), (
                f"{topic}: {error!r}"
            )
            continue
        found = {row.seq for row in rows}
        assert len(found) == len(rows), f"{topic}: a record is there twice"
        for row in rows:
            _check_row(topic, row, written, image.erased[topic])
        missing = {
            seq for seq in image.live[topic] - found if not any(low <= seq <= high for low, high in gaps)
        }
        if missing and not report.read_only:
            assert report.cut and min(missing) > max(found, default=0), (
                f"{topic}: {sorted(missing)} are missing without a report"
            )
        risen = found - image.live[topic]
        assert not risen or report.read_only or report.cut, (
            f"{topic}: deleted records {sorted(risen)} are back"
        )


def _check_row(topic: str, row: Row, written: dict[int, Row], erased: set[int]) -> None:
    assert row.seq in written, f"{topic}: a record that was never written: {row}"
    wanted = written[row.seq]
    assert row.seq not in erased, f"{topic}: erased record {row.seq} is back"
    assert row == wanted, f"{topic}: {row} instead of {wanted}"


def seeds() -> list[bytes]:
    """One edit to each file of each image; the kinds of edits take turns."""
    made = []
    for i, image in enumerate(images()):
        for number, path in enumerate(image.paths):
            kind = (number + i) % 8
            at = (len(image.files[path]) * (kind + 1) // 9).to_bytes(2, "big")
            made.append(bytes([i, number, kind]) + at + b"\x01\xff\xff\xff\xff")
    return made


TARGET = Target("directory", run, seeds, rounds=250)
