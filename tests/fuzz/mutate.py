"""The seeded mutator: changed inputs from valid ones. The same seed and inputs give the same changes on any machine.

The changes are those that find bugs in parsers: a flipped bit, a boundary value where a length may
be, a token in the wrong place, a piece removed, doubled, moved, or taken from another input.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

INPUT_BYTES_MAX = 8192
CHANGES_MAX = 6

# Boundary values of length fields and counters; 2^60 must never be allocated.
_EDGES = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFF_FFFF,
    0x8000_0000,
    0xFFFF_FFFF,
    1 << 60,
    (1 << 64) - 1,
)


class Mutator:
    def __init__(self, seed: int, inputs: Sequence[bytes], tokens: Sequence[bytes] = ()) -> None:
        self._rng = random.Random(seed)
        self._inputs = list(inputs) or [b""]
        self._tokens = list(tokens)
        self._changes: list[Callable[[bytearray], None]] = [
            self._flip_bit,
            self._set_byte,
            self._set_number,
            self._nudge_number,
            self._cut_out,
            self._truncate,
            self._double,
            self._splice,
            self._insert_random,
        ]
        if self._tokens:
            self._changes += [self._insert_token, self._overwrite_token, self._insert_token]

    def __iter__(self) -> Iterator[bytes]:
        while True:
            yield self.next()

    def next(self) -> bytes:
        data = bytearray(self._rng.choice(self._inputs))
        for _ in range(self._rng.randint(1, CHANGES_MAX)):
            self._rng.choice(self._changes)(data)
        return bytes(data[:INPUT_BYTES_MAX])

    def _place(self, data: bytearray) -> int:
        return self._rng.randint(0, len(data))

    def _flip_bit(self, data: bytearray) -> None:
        if data:
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)

    def _set_byte(self, data: bytearray) -> None:
        if data:
            data[self._rng.randrange(len(data))] = self._rng.randrange(256)

    def _set_number(self, data: bytearray) -> None:
        """A boundary value, as a field of 2, 4 or 8 bytes in either byte order."""
        width = self._rng.choice((2, 4, 8))
        value = self._rng.choice(_EDGES) & ((1 << 8 * width) - 1)
        at = self._place(data)
        data[at : at + width] = value.to_bytes(width, self._rng.choice(("little", "big")))

    def _nudge_number(self, data: bytearray) -> None:
        width = self._rng.choice((1, 2, 4))
        if len(data) >= width:
            at = self._rng.randint(0, len(data) - width)
            value = int.from_bytes(data[at : at + width], "little") + self._rng.choice((-8, -1, 1, 8, 256))
            data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")

    def _span(self, data: bytearray) -> tuple[int, int]:
        at = self._place(data)
        return at, min(len(data), at + self._rng.choice((1, 2, 4, 8, 16, 64, 256)))

    def _cut_out(self, data: bytearray) -> None:
        first, stop = self._span(data)
        del data[first:stop]

    def _truncate(self, data: bytearray) -> None:
        del data[self._place(data) :]

    def _double(self, data: bytearray) -> None:
        first, stop = self._span(data)
        data[first:first] = data[first:stop] * self._rng.choice((1, 1, 2, 16))

    def _splice(self, data: bytearray) -> None:
        other = self._rng.choice(self._inputs)
        start = self._rng.randint(0, len(other))
        data[self._place(data) :] = other[start:]

    def _insert_random(self, data: bytearray) -> None:
        at = self._place(data)
        data[at:at] = self._rng.randbytes(self._rng.choice((1, 2, 8, 32)))

    def _insert_token(self, data: bytearray) -> None:
        at = self._place(data)
        data[at:at] = self._rng.choice(self._tokens)

    def _overwrite_token(self, data: bytearray) -> None:
        token = self._rng.choice(self._tokens)
        at = self._place(data)
        data[at : at + len(token)] = token


class Choices:
    """Decisions read from an input, so that its bytes steer a generator; at the end of the input every choice is the first."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_used_up(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        if self.is_used_up:
            return 0
        self._at += 1
        return self._data[self._at - 1]

    def number(self, stop: int) -> int:
        """One of 0 … stop - 1."""
        value = 0
        for _ in range((max(stop - 1, 1).bit_length() + 7) // 8):
            value = value << 8 | self.byte()
        return value % stop

    def bytes(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        self._at += len(found)
        return found

    def rest(self) -> bytes:
        return self.bytes(len(self._data))
