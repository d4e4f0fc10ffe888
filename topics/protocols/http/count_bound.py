"""How many objects a body may have in a list, looked at before they are decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import numpy as np

from topics.api import limits
from topics.api.errors import BatchTooLarge
from topics.link import wire

_SLICE = 64 * 1024  # stays in a core's cache

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


def _braces(part: Bytes) -> int:
    return int(np.count_nonzero(part == ord("{")))


def _braces_in_lists(part: Bytes) -> int:
    """Less those that begin the value of a field, as in most data: they come after a colon, with or without a space."""
    opened, colons = part == ord("{"), part == ord(":")
    values = opened[1:] & colons[:-1]
    values[1:] |= opened[2:] & (part[1:-1] == ord(" ")) & colons[:-2]
    return int(np.count_nonzero(opened) - np.count_nonzero(values))


def has_lines(body: wire.Buffer, most: int) -> bool:
    """Whether it has more line ends."""
    return len(body) > most and _has_more(body, most, lambda part: int(np.count_nonzero(part == ord("\n"))))


def _has_more(body: wire.Buffer, most: int, count: Callable[[Bytes], int]) -> bool:
    whole, found = np.frombuffer(body, np.uint8), 0
    for at in range(0, len(whole), _SLICE):
        found += count(whole[at : at + _SLICE])
        if found > most:
            return True
    return False


class _Enough(Exception):
    """More objects than there may be."""


class CountBound:
    """The most objects in one list or dict of a body.

    msgspec looks at a length when all of a list is decoded, which takes 25 times the memory of a body of `{}`. So a body with
    enough braces for too many objects is decoded first to nothing, up to the first object beyond the bound.
    """

    def __init__(self, field: str | None, most: int, many: type = list) -> None:
        """`field`: the one with the objects; None: they are the lines of the body."""
        self.most = most
        self._left = 0
        self._counts = (_braces, _braces_in_lists) if many is list else (_braces,)
        one: Any = msgspec.defstruct("One", [], namespace={"__post_init__": lambda _: self._count()})
        if field is None:
            self._decode: Callable[[wire.Buffer], Any] = msgspec.json.Decoder(one).decode_lines
        else:
            inner = list[one] if many is list else dict[str, one]
            self._decode = msgspec.json.Decoder(msgspec.defstruct("Counted", [(field, inner)])).decode

    def is_passed(self, body: wire.Buffer) -> bool:
        """Whether there are more, also if it is only the beginning of a body. What else may be wrong is not looked at."""
        # A list has a comma between two objects; the body itself is one more.
        if len(body) <= 3 * self.most or not all(_has_more(body, self.most + 1, c) for c in self._counts):
            return False
        self._left = self.most
        try:
            self._decode(body)
        except _Enough:
            return True
        except (msgspec.DecodeError, RecursionError):
            pass
        return False

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _Enough


RECORDS = CountBound("records", limits.BATCH_RECORDS_MAX)
RECORD_LINES = CountBound(None, limits.BATCH_RECORDS_MAX)


def too_many_records(counted: int = limits.BATCH_RECORDS_MAX + 1) -> BatchTooLarge:
    most = limits.BATCH_RECORDS_MAX
    return BatchTooLarge(
        f"more than {most} records in one write; send smaller batches", records=counted, max=most
    )
