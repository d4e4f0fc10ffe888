"""Size and structure of JSON text, without decoding it."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

SHORT = 4096  # bytes; up to this size decoding is faster
# Bytes of each UTF-16 code unit in compact JSON; two surrogates are one character of four bytes.
_NEEDED = bytearray(
    b"\6" * 0x20 + b"\1" * 0x60 + b"\2" * 0x780 + b"\3" * 0xD000 + b"\2" * 0x800 + b"\3" * 0x2000
)
for _short in b'\b\t\n\f\r"\\':
    _NEEDED[_short] = 2
_HEX = np.zeros(256, np.uint16)
for _digit in b"0123456789abcdefABCDEF":
    _HEX[_digit] = int(chr(_digit), 16)


def compact_size(text: bytes, escaped: bool) -> int:
    """The length of this JSON without whitespace between tokens and without unnecessary escapes.

    `escaped`: it may contain escapes. Raises RecursionError if it is nested too deeply.
    """
    if b" " in text or b"\t" in text:
        text = msgspec.json.format(text, indent=-1)
    if escaped and b"\\" in text:
        if len(text) > SHORT:  # decoded values could be many times larger
            return len(text) - _escape_overhead(text)
        try:
            return len(msgspec.json.encode(msgspec.json.decode(text)))
        except (msgspec.MsgspecError, OverflowError, ValueError):
            pass  # numbers that Python cannot represent
    return len(text)


def _escape_overhead(text: bytes) -> int:
    """Bytes that escapes use beyond the characters they represent."""
    text = text.replace(b"\\\\", b"..")  # now each backslash starts an escape
    whole = np.frombuffer(text, np.uint8)
    found = np.flatnonzero((whole[:-1] == ord("\\")) & (whole[1:] == ord("u")))
    codes = np.zeros(len(found), np.uint16)
    for place in range(2, 6):
        codes = codes * np.uint16(16) + _HEX[whole[found + place]]
    needed = np.frombuffer(_NEEDED, np.uint8)[codes].sum(dtype=np.int64)
    return text.count(b"\\/") + 6 * len(found) - int(needed)


class Scan:
    """Scanner of JSON text in slices: which bytes are inside strings, and the nesting depth of the others.

    Invalid JSON is not detected here, but when the pieces are decoded.
    """

    def __init__(self, body: bytes | memoryview, slice_bytes: int) -> None:
        self._body = memoryview(body)
        self._slice_bytes = slice_bytes
        self._in_string = False
        self.at = 0  # start of the current slice
        self.end = 0
        self.text = b""  # the current slice, with escaped quotes and backslashes replaced
        self.depth = 0  # at its end
        self.outside: Any = None  # by byte: 0 inside a string, and for its opening quote
        self.depths: Any = None  # by byte: nesting depth after it

    def next(self) -> bool:
        """Scan the next slice. Returns False at the end."""
        self.at = self.end
        part = bytes(self._body[self.at : self.at + self._slice_bytes])
        if not part:
            return False
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # keep an escape in one slice
            part = bytes(self._body[self.at : self.at + len(part) + 1])
        self.end = self.at + len(part)
        self.text = part.replace(b"\\\\", b"..").replace(b'\\"', b"..") if b"\\" in part else part
        self.bytes: Bytes = np.frombuffer(self.text, np.uint8)
        quotes = np.cumsum((self.bytes == ord('"')).view(np.int8), dtype=np.int32)
        self.outside = ((quotes & 1) == self._in_string).view(np.int8)
        self._in_string = not self.outside[-1]
        folded = self.bytes | 0x20  # maps brackets to braces
        steps = (folded == ord("{")).view(np.int8) - (folded == ord("}")).view(np.int8)
        self.depths = np.cumsum(steps * self.outside, dtype=np.int32)
        self.depths += self.depth
        self.depth = int(self.depths[-1])
        return True

    def find(self, byte: int, depth: int) -> Any:
        """Offsets in the slice of this byte outside strings, at this depth."""
        return np.flatnonzero((self.bytes == byte) & (self.depths == depth) & self.outside)

    @property
    def compact_bytes_min(self) -> int:
        """Lower bound of the slice's size in compact form."""
        blanks = np.count_nonzero((self.bytes <= ord(" ")) & self.outside)
        return len(self.text) - int(blanks) - 5 * self.text.count(b"\\u") - self.text.count(b"\\/")
