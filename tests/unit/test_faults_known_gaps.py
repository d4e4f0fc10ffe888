"""Goal: write down which damage is not noticed today, so that whoever closes a gap is told by a test that starts to pass.

Method: as in test_faults_bytes.py. Each test says what should be; all are expected to fail, strictly.
"""

from __future__ import annotations

import pytest

from tests.support.damage import DELETED, LAST, SERVED, Shelf
from tests.support.engine_harness import file_bytes

no_digest_of_marks = pytest.mark.xfail(reason="a .del has no digest", raises=AssertionError)
no_digest_of_open_index = pytest.mark.xfail(reason="an open index has no digest", raises=AssertionError)
no_length_of_a_log_file = pytest.mark.xfail(
    reason="a log file does not say how long it was made", raises=AssertionError
)


@no_digest_of_marks
@pytest.mark.parametrize("seq", [1, 4])
def test_live_record_that_is_marked_as_deleted(seq: int) -> None:
    shelf = Shelf()
    shelf.change(shelf.segment(1, "del"), 16 + seq - 1, b"\x01")
    shelf.outcome()  # fails: lost in silence


@no_digest_of_marks
@pytest.mark.parametrize("mark", [0, 3, 255])
def test_deleted_record_whose_mark_rots(mark: int) -> None:
    shelf = Shelf()
    shelf.change(shelf.segment(1, "del"), 16 + DELETED - 1, bytes([mark]))
    shelf.outcome()  # fails: it is back


@no_digest_of_open_index
def test_tag_in_an_open_index() -> None:
    shelf = Shelf()
    shelf.change(shelf.segment(9, "idx"), 16 + 20, b"\x02")  # the other record's
    h = shelf.open()
    assert h.diff("t", 8, limit=2).tags == [b"odd", b"even"]


@no_digest_of_open_index
def test_name_in_an_open_dictionary() -> None:
    shelf = Shelf()
    path = shelf.segment(9, "dict")
    shelf.change(path, file_bytes(shelf.disk, path).index(b"odd"), b"o0d")
    h = shelf.open()
    assert h.diff("t", 8, limit=2).tags == [b"odd", b"even"]


@no_length_of_a_log_file
@pytest.mark.parametrize("seq", [12, LAST])
def test_log_file_that_ends_exactly_between_two_entries(seq: int) -> None:
    shelf = Shelf()
    path, start, _ = shelf.envelope_of(seq)
    shelf.cut(path, start)
    assert shelf.outcome() != SERVED  # fails: lost in silence
