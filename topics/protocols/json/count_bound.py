"""Limits on the number of objects in a body, checked before it is decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import numpy as np

from topics.api import limits
from topics.api.errors import BatchTooLarge
from topics.link import wire

_SLICE = 64 * 1024  # fits into the CPU cache

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


def _braces(part: Bytes) -> int:
    return int(np.count_nonzero(part == ord("{")))


def _braces_in_lists(part: Bytes) -> int:
    """Braces, without those that start the value of a field, which follow a colon and at most one space."""
    opened, colons = part == ord("{"), part == ord(":")
    values = opened[1:] & colons[:-1]
    values[1:] |= opened[2:] & (part[1:-1] == ord(" ")) & colons[:-2]
    return int(np.count_nonzero(opened) - np.count_nonzero(values))


def has_more_lines(body: wire.Buffer, maximum: int) -> bool:
    """Whether the body has more than `maximum` line ends."""
    return len(body) > maximum and _has_more(
        body, maximum, lambda part: int(np.count_nonzero(part == ord("\n")))
    )


def _has_more(body: wire.Buffer, maximum: int, count: Callable[[Bytes], int]) -> bool:
    whole, found = np.frombuffer(body, np.uint8), 0
    for at in range(0, len(whole), _SLICE):
        found += count(whole[at : at + _SLICE])
        if found > maximum:
            return True
    return False


class _TooMany(Exception):
    """Stops the decoder at the first object beyond the limit."""


class CountBound:
    """Limit on the number of objects in one list or dict of a body.

    msgspec checks a length after the whole list is decoded, which takes 25 times the memory of a body of `{}`. So a body with
    enough braces for too many objects is first decoded to empty objects, up to the first one beyond the limit.
    """

    def __init__(self, field: str | None, maximum: int, container: type = list) -> None:
        """`field`: the field with the objects; None: they are the lines of the body."""
        self.maximum = maximum
        self._left = 0
        self._counts = (_braces, _braces_in_lists) if container is list else (_braces,)
        one: Any = msgspec.defstruct("One", [], namespace={"__post_init__": lambda _: self._count()})
        if field is None:
            self._decode: Callable[[wire.Buffer], Any] = msgspec.json.Decoder(one).decode_lines
        else:
            inner = list[one] if container is list else dict[str, one]
            self._decode = msgspec.json.Decoder(msgspec.defstruct("Counted", [(field, inner)])).decode

    def is_exceeded(self, body: wire.Buffer) -> bool:
        """Whether the body has too many objects. It may be only the beginning of a body; other errors in it are ignored."""
        # Objects in a list are separated by commas, and the body itself is one more object.
        if len(body) <= 3 * self.maximum:
            return False
        if not all(_has_more(body, self.maximum + 1, count) for count in self._counts):
            return False
        self._left = self.maximum
        try:
            self._decode(body)
        except _TooMany:
            return True
        except (msgspec.DecodeError, RecursionError):
            pass
        return False

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _TooMany


RECORDS = CountBound("records", limits.BATCH_RECORDS_MAX)
RECORD_LINES = CountBound(None, limits.BATCH_RECORDS_MAX)


def too_many_records(counted: int = limits.BATCH_RECORDS_MAX + 1) -> BatchTooLarge:
    maximum = limits.BATCH_RECORDS_MAX
    return BatchTooLarge(
        f"more than {maximum} records in one write; send smaller batches", records=counted, max=maximum
    )
