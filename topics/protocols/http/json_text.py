"""JSON text, measured and cut without building its values."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

SHORT = 4096  # bytes of a text that is decoded sooner than looked at
# Bytes of each character in compact JSON, by its number; two surrogates are one character of four bytes.
_NEEDED = bytearray(
    b"\6" * 0x20 + b"\1" * 0x60 + b"\2" * 0x780 + b"\3" * 0xD000 + b"\2" * 0x800 + b"\3" * 0x2000
)
for _short in b'\b\t\n\f\r"\\':
    _NEEDED[_short] = 2
_HEX = np.zeros(256, np.uint16)
for _digit in b"0123456789abcdefABCDEF":
    _HEX[_digit] = int(chr(_digit), 16)


def compact_size(text: bytes, escaped: bool) -> int:
    """The length of this JSON without blanks between tokens and without needless escapes.

    `escaped`: it may have escapes. RecursionError: it is nested too deeply.
    """
    if b" " in text or b"\t" in text:
        text = msgspec.json.format(text, indent=-1)
    if escaped and b"\\" in text:
        if len(text) > SHORT:  # its values could take many times its size
            return len(text) - _needless_bytes(text)
        try:
            return len(msgspec.json.encode(msgspec.json.decode(text)))
        except (msgspec.MsgspecError, OverflowError, ValueError):
            pass  # numbers that only text can hold
    return len(text)


def _needless_bytes(text: bytes) -> int:
    """What escapes take beyond the characters that they stand for."""
    text = text.replace(b"\\\\", b"..")  # from here on each backslash begins an escape
    whole = np.frombuffer(text, np.uint8)
    found = np.flatnonzero((whole[:-1] == ord("\\")) & (whole[1:] == ord("u")))
    codes = np.zeros(len(found), np.uint16)
    for place in range(2, 6):
        codes = codes * np.uint16(16) + _HEX[whole[found + place]]
    needed = np.frombuffer(_NEEDED, np.uint8)[codes].sum(dtype=np.int64)
    return text.count(b"\\/") + 6 * len(found) - int(needed)


class Scan:
    """A text by slices: which bytes lie in strings, and how deep the others are nested.

    Text that is not valid JSON is scanned too; decoding the pieces reveals it.
    """

    def __init__(self, body: bytes | memoryview, slice_bytes: int) -> None:
        self._body = memoryview(body)
        self._slice_bytes = slice_bytes
        self._in_string = False
        self.at = 0  # of the slice that was scanned last
        self.end = 0
        self.text = b""  # that slice, with other bytes for escaped quotes and backslashes
        self.depth = 0  # at its end
        self.outside: Any = None  # by byte: 0 in a string, and for the quote that opens it
        self.depths: Any = None  # by byte: how deep it lies; a bracket that opens lies inside of itself, one that closes does not

    def next(self) -> bool:
        """Scan the next slice; False at the end."""
        self.at = self.end
        part = bytes(self._body[self.at : self.at + self._slice_bytes])
        if not part:
            return False
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # what is escaped is in the same slice
            part = bytes(self._body[self.at : self.at + len(part) + 1])
        self.end = self.at + len(part)
        self.text = part.replace(b"\\\\", b"..").replace(b'\\"', b"..") if b"\\" in part else part
        self.bytes: Bytes = np.frombuffer(self.text, np.uint8)
        quotes = np.cumsum((self.bytes == ord('"')).view(np.int8), dtype=np.int32)
        self.outside = ((quotes & 1) == self._in_string).view(np.int8)
        self._in_string = not self.outside[-1]
        folded = self.bytes | 0x20  # brackets and braces are alike
        steps = (folded == ord("{")).view(np.int8) - (folded == ord("}")).view(np.int8)
        self.depths = np.cumsum(steps * self.outside, dtype=np.int32)
        self.depths += self.depth
        self.depth = int(self.depths[-1])
        return True

    def places(self, byte: int, depth: int) -> Any:
        """Where this byte stands outside of strings at this depth; offsets in the slice."""
        return np.flatnonzero((self.bytes == byte) & (self.depths == depth) & self.outside)

    @property
    def least_bytes(self) -> int:
        """What the slice takes in compact form, at least."""
        blanks = np.count_nonzero((self.bytes <= ord(" ")) & self.outside)
        return len(self.text) - int(blanks) - 5 * self.text.count(b"\\u") - self.text.count(b"\\/")
