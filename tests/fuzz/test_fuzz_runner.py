"""Goal: a failing target is noticed however it fails, and its input can be replayed.

Method: targets that fail by an exception, an endless loop or a huge allocation; and a mutator that must repeat
itself for a seed.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from itertools import islice
from pathlib import Path

import pytest

from tests.fuzz import runner
from tests.fuzz.front import read_answers
from tests.fuzz.images import images
from tests.fuzz.mutate import Choices, Mutator
from tests.fuzz.runner import (
    Failed,
    Hang,
    Target,
    bounded_memory,
    deadline,
    logged_errors,
    mutations,
    run_all,
    run_one,
)
from tests.fuzz.targets.directory import check_records
from tests.support.engine_harness import Harness


def _target(run: object) -> Target:
    return Target("made-up", run, lambda: [b"good input"], (b"word",))  # type: ignore[arg-type]


def test_an_exception_names_a_file_that_holds_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))

    def fails(data: bytes) -> None:
        raise KeyError(data)

    with pytest.raises(Failed, match="scripts/fuzz --target made-up --replay") as failed:
        run_one(_target(fails), b"bad input")
    (written,) = tmp_path.iterdir()
    assert written.read_bytes() == b"bad input"
    assert str(written) in str(failed.value)
    assert isinstance(failed.value.__cause__, KeyError)


def test_an_input_that_never_ends_is_stopped() -> None:
    def spin() -> None:
        while True:
            try:
                pass
            except Exception:
                continue

    with pytest.raises(Hang), deadline(0.05):
        spin()


def test_memory_that_a_length_field_asks_for_is_refused() -> None:
    with bounded_memory(), pytest.raises(MemoryError):
        bytearray(1 << 40)


def test_an_input_that_takes_much_memory_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    peaks = iter([1 << 30, (1 << 30) + runner.PEAK_BYTES_MAX + 1])
    monkeypatch.setattr(runner, "peak_bytes", lambda: next(peaks))
    with pytest.raises(Failed, match="MiB for an input of 3 bytes"):
        run_one(_target(lambda data: None), b"abc")


def test_logged_errors_are_caught() -> None:
    with logged_errors() as errors:
        logging.getLogger("topics.made-up").error("a request %s", "failed")
        logging.getLogger("topics.made-up").warning("not this one")
    assert errors == ["a request failed"]


def test_a_seed_repeats_itself_and_another_does_not() -> None:
    target = _target(lambda data: None)
    first, again = (list(mutations(target, 7, count=200)) for _ in range(2))
    assert first == again
    assert first != list(mutations(target, 8, count=200))
    assert len(set(first)) > 150
    assert any(b"word" in data for data in first), "tokens of the format are used"
    assert run_all(target, first) == 200


def test_no_inputs_to_start_from_are_enough() -> None:
    assert any(islice(Mutator(1, []), 50))


def test_choices_run_out_into_the_first_ones() -> None:
    choices = Choices(b"\x05\x01\x02ab")
    assert (choices.number(4), choices.number(1 << 16), choices.bytes(1)) == (1, 0x0102, b"a")
    assert choices.rest() == b"b"
    assert choices.is_used_up
    assert (choices.number(1000), choices.byte(), choices.bytes(3)) == (0, 0, b"")


# -- the targets' own checks notice errors -----------------------------------------------------------------


def test_the_check_of_directories_notices_a_record_that_differs() -> None:
    image = copy.deepcopy(images()[0])
    h = Harness(image.config, disk=image.disk({}))
    check_records(h, image, {})
    written = image.written["plain"]
    written[4] = written[4]._replace(payload=b"another")
    with pytest.raises(AssertionError, match="instead of"):
        check_records(h, image, {})
    del written[4]
    with pytest.raises(AssertionError, match="never written"):
        check_records(h, image, {})


def test_the_check_of_directories_notices_a_record_that_is_gone_and_one_that_is_back() -> None:
    image = copy.deepcopy(images()[0])
    h = Harness(image.config, disk=image.disk({}))
    image.live["plain"].add(2)  # which was deleted
    with pytest.raises(AssertionError, match="missing without a report"):
        check_records(h, image, {})
    image.live["plain"] -= {2, 4}
    with pytest.raises(AssertionError, match=r"deleted records .* are back"):
        check_records(h, image, {})
    image.written["more"] = {}
    image.live["plain"].add(4)
    with pytest.raises(AssertionError, match="more is missing without a report"):
        check_records(h, image, {})


@pytest.mark.parametrize(
    "out",
    [
        b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 299 What\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
        b'HTTP/1.1 400 Bad Request\r\nContent-Length: 14\r\n\r\n{"error":"no"}',
        b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
        b"nonsense",
    ],
)
def test_the_check_of_answers_notices_one_outside_the_contract(out: bytes) -> None:
    with pytest.raises((AssertionError, TypeError, KeyError)):
        read_answers(out, 0)
