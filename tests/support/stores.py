"""A SegmentStore with the semantics of an object store: whole objects, no rename, no append, no change in place.
Fails on request.
"""

from __future__ import annotations

import builtins
import errno
from collections.abc import Callable, Generator, Iterable

from tests.support.sim_disk import SimulatedCrash


class ObjectStore:
    """What `put` has returned for is durable; an interrupted put leaves nothing. Each call is recorded and may fail."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls: builtins.list[tuple[str, str]] = []
        self.is_down = False  # every call fails until it is up again
        self.on_call: Callable[[str, str], None] = lambda name, key: None
        self._fails: dict[int, int | None] = {}

    # ---- controls of the test

    def fail_at(self, number: int, error: int) -> None:
        """The Nth call from now (1 is the next) raises OSError, once, and does nothing."""
        self._fails[len(self.calls) + number] = error

    def crash_at(self, number: int) -> None:
        """The process stops right before the Nth call from now."""
        self._fails[len(self.calls) + number] = None

    def calm(self) -> None:
        self._fails.clear()

    def rot(self, key: str, offset: int) -> None:
        data = bytearray(self.objects[key])
        data[offset] ^= 1
        self.objects[key] = bytes(data)

    def count(self, name: str) -> int:
        return sum(call == name for call, _ in self.calls)

    # ---- the port

    def put(self, key: str, pieces: Iterable[bytes]) -> None:
        for _ in self.put_steps(key, pieces):
            pass

    def put_steps(self, key: str, pieces: Iterable[bytes]) -> Generator[None, None, None]:
        self._enter("put", key)
        parts: builtins.list[bytes] = []
        for piece in pieces:
            if parts:
                yield
            parts.append(piece)
        self.objects[key] = b"".join(parts)

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        self._enter("read_range", key)
        if offset < 0 or length < 0:
            raise OSError(errno.EINVAL, "invalid range")
        return self._find(key)[offset : offset + length]

    def delete(self, key: str) -> None:
        self._enter("delete", key)
        self.objects.pop(key, None)

    def list(self, prefix: str) -> builtins.list[str]:
        self._enter("list", prefix)
        return sorted(key for key in self.objects if key.startswith(prefix))

    def exists(self, key: str) -> bool:
        self._enter("exists", key)
        return key in self.objects

    def length(self, key: str) -> int:
        self._enter("length", key)
        return len(self._find(key))

    def _find(self, key: str) -> bytes:
        if key not in self.objects:
            raise FileNotFoundError(errno.ENOENT, "no such object", key)
        return self.objects[key]

    def _enter(self, name: str, key: str) -> None:
        self.calls.append((name, key))
        self.on_call(name, key)
        number = len(self.calls)
        if number in self._fails:
            error = self._fails.pop(number)
            if error is None:
                raise SimulatedCrash(f"{name} {key}")
            raise OSError(error, "as planned", key)
        if self.is_down:
            raise OSError(errno.EHOSTUNREACH, "the store is down", key)
