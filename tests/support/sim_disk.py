"""A disk in memory that loses unsynced data at a crash and fails on request, at random from a seed.

A file keeps `live` (what reads see: the page cache) apart from `durable` (what a
power cut leaves), and in `pending` the ordered writes and truncations between
the two. A directory does the same with its entries and a journal of changes.

What a power cut (`crash`) does to unsynced work:

- each pending write of a file is kept, dropped, torn at 512-byte sectors or has
  one sector garbled, independently of the others, so later ones may survive
  earlier ones. A dropped extension may still leave its length, as zeros;
- each directory keeps a random prefix of its journal. A file whose entry did not
  survive is gone, synced or not; a removed file may be back;
- a rename between two directories is one record in both journals: whatever makes
  one half durable makes the other durable too, as a journalling file system does,
  so the file is never in both places or in neither.

Bytes and entries that were synced never change. Everything iterates dicts in
insertion order, so the seed and the calls alone decide the outcome.
"""

from __future__ import annotations

import builtins
import errno
import os
import pickle
import random
import zlib
from dataclasses import dataclass, field

SECTOR_BYTES = 512

# How likely each pending write of a file is kept whole, drawn once per file and crash. With one fixed chance, "all
# kept" and "all lost" would be very rare after many writes, and those are the most common outcomes on real machines.
_KEEP_CHANCES = (0.0, 0.2, 0.5, 0.8, 1.0)


class SimulatedCrash(BaseException):
    """The machine or the process stops here. Derived from BaseException, so that no handler in the engine catches it."""


@dataclass(slots=True, eq=False)
class _File:
    live: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    # In order, since the last sync: (offset, data) for a write, (length, None) for a truncation.
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    # After a failed sync `live` shows bytes that no later sync will make durable.
    diverged: bool = False


@dataclass(slots=True, eq=False)
class _Dir:
    live: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)
    journal: list[_Change] = field(default_factory=list)


_Node = _File | _Dir


@dataclass(slots=True, eq=False)
class _Change:
    """One journal record: `removed` disappears, then `added` appears and is `node`."""

    removed: str | None = None
    added: str | None = None
    node: _Node | None = None
    # For a move between directories, the other half and the directory with its record.
    twin: _Change | None = None
    twin_dir: _Dir | None = None


@dataclass(slots=True)
class _Plan:
    calls_left: int
    of: str | None
    error: int | None  # None for a crash
    midway: bool


class SimDisk:
    """A disk whose failures are drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.calls = 0
        self.full = False
        self.capacity_bytes: int | None = None
        self.spare_bytes = 1 << 50  # the result of `free_bytes` while there is no capacity
        self.trace: builtins.list[str] | None = None
        self._rng = random.Random(seed)
        # A generator of its own, so that drawing a salt does not change what the next crash does.
        self._salts = random.Random(seed ^ 0x5A17)
        self._root = _Dir()
        self._handles: dict[int, _File] = {}
        self._next_handle = 3
        self._boot_count = 1
        # What a crash has to look at, in the order in which it became dirty; dicts, because sets have no order.
        self._dirty_files: dict[_File, None] = {}
        self._dirty_dirs: dict[_Dir, None] = {}
        self._plans: builtins.list[_Plan] = []
        self._down = False
        # True when a call must check plans: one test on the hot path instead of several.
        self._armed = False

    def __deepcopy__(self, _memo: object) -> SimDisk:
        """Many tests begin with a copy of the same disk; this takes less than half the time of the default."""
        copied: SimDisk = pickle.loads(pickle.dumps(self, pickle.HIGHEST_PROTOCOL))
        return copied

    # ---- controls of the test; none of these count as calls

    def fail_at(self, call_number: int, error: int, *, of: str | None = None) -> None:
        """Make the Nth call from now (1 is the next) raise OSError(error), once.

        `of` counts only calls of that method, such as "sync". A failing write or
        allocate leaves a seeded prefix. A failing sync or sync_all loses its claim
        on the pending writes, as Linux does: each reached the platter or did not,
        and no later sync will write it again, though reads show it until a crash.
        A failing sync_dir leaves its changes pending.
        """
        self._plan(call_number, of, error, midway=False)

    def crash_at(self, call_number: int, *, of: str | None = None, midway: bool = False) -> None:
        """Raise SimulatedCrash just before the Nth call from now (1 is the next).

        With `midway`, a write or allocate first leaves a seeded prefix. The disk then
        answers every call with SimulatedCrash until `crash` or `kill` says what it was.
        """
        self._plan(call_number, of, None, midway=midway)

    def crash(self) -> None:
        """Power cut: only synced work is sure to be there afterwards. Clears all plans."""
        for directory in self._dirty_dirs:
            if directory.journal:
                _settle(directory, self._rng.randint(0, len(directory.journal)))
        # Only now, because settling a later directory may have settled more of an earlier one.
        for directory in self._dirty_dirs:
            directory.journal.clear()
            directory.live = dict(directory.durable)
        self._dirty_dirs.clear()
        for file in self._dirty_files:
            self._lose_cache(file)
        self._dirty_files.clear()
        self._boot_count += 1
        self._restart("crash")

    def kill(self) -> None:
        """Process crash: handles are lost, the page cache stays, unsynced data is still unsynced. Clears all plans."""
        self._restart("kill")

    def flip_bit(self, path: str, offset: int, bit: int = 0) -> None:
        """Flip one bit, in what reads see and in what a crash will leave."""
        file = self._find(path)
        if not isinstance(file, _File):
            raise _error(errno.ENOENT, path)
        if not 0 <= offset < len(file.live):
            raise ValueError(f"offset {offset} is outside {path!r} of {len(file.live)} bytes")
        mask = 1 << bit
        file.live[offset] ^= mask
        if offset < len(file.durable):
            file.durable[offset] ^= mask
        for i, (start, data) in enumerate(file.pending):
            if data is not None and start <= offset < start + len(data):
                at = offset - start
                file.pending[i] = (start, data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])

    def paths(self) -> builtins.list[str]:
        """All live files, sorted."""
        return sorted(path for path, _ in _walk(self._root, ""))

    # ---- the port: files

    def open(self, path: str, *, create: bool = False) -> int:
        self._enter("open", path, create)
        node = self._find(path)
        if isinstance(node, _Dir):
            raise _error(errno.EISDIR, path)
        if node is None:
            if not create:
                raise _error(errno.ENOENT, path)
            parent, name = self._parent(path)
            node = _File()
            self._change(parent, _Change(added=name, node=node))
        handle = self._next_handle
        self._next_handle += 1
        self._handles[handle] = node
        return handle

    def close(self, handle: int) -> None:
        self._enter("close", handle)
        if self._handles.pop(handle, None) is None:
            raise _error(errno.EBADF)

    def size(self, handle: int) -> int:
        self._enter("size", handle)
        return len(self._file(handle).live)

    def read(self, handle: int, offset: int, length: int) -> bytes:
        self.calls += 1
        if self._armed or self.trace is not None:
            self._raise_due("read", handle, offset, length)
        file = self._handles.get(handle)
        if file is None:
            raise _error(errno.EBADF)
        if offset < 0 or length < 0:
            raise _error(errno.EINVAL)
        return bytes(memoryview(file.live)[offset : offset + length])

    def write(self, handle: int, offset: int, data: bytes) -> None:
        self.calls += 1
        plan = None
        if self._armed or self.trace is not None:
            plan = self._due("write", handle, offset, len(data), zlib.crc32(data))
        file = self._handles.get(handle)
        if file is None:
            raise _error(errno.EBADF)
        if offset < 0:
            raise _error(errno.EINVAL)
        self._put(file, offset, bytes(data), plan)

    def truncate(self, handle: int, length: int) -> None:
        self._enter("truncate", handle, length)
        file = self._file(handle)
        if length < 0:
            raise _error(errno.EINVAL)
        if length != len(file.live):
            _resize(file.live, length)
            file.pending.append((length, None))
            self._dirty_files[file] = None

    def allocate(self, handle: int, length: int) -> None:
        self.calls += 1
        plan = self._due("allocate", handle, length)
        file = self._file(handle)
        size = len(file.live)
        self._put(file, size, bytes(max(0, length - size)), plan)

    def sync(self, handle: int) -> None:
        self.calls += 1
        plan = None
        if self._armed or self.trace is not None:
            plan = self._due("sync", handle)
        file = self._handles.get(handle)
        if file is None:
            raise _error(errno.EBADF)
        if plan is not None:
            if plan.error is not None:
                self._fail_sync(file)
            raise self._failure(plan)
        if file.pending:
            _make_durable(file)
            if not file.diverged:
                del self._dirty_files[file]

    # ---- the port: names

    def exists(self, path: str) -> bool:
        self._enter("exists", path)
        try:
            return self._find(path) is not None
        except NotADirectoryError:
            return False

    def list(self, path: str) -> builtins.list[str]:
        self._enter("list", path)
        node = self._find(path)
        if isinstance(node, _File):
            raise _error(errno.ENOTDIR, path)
        return [] if node is None else sorted(node.live)

    def make_dir(self, path: str) -> None:
        self._enter("make_dir", path)
        parts = _split(path)
        node: _Node = self._root
        for i, part in enumerate(parts):
            assert isinstance(node, _Dir)
            child = node.live.get(part)
            if child is None:
                child = _Dir()
                self._change(node, _Change(added=part, node=child))
            elif isinstance(child, _File):
                raise _error(errno.EEXIST if i == len(parts) - 1 else errno.ENOTDIR, path)
            node = child

    def rename(self, old: str, new: str) -> None:
        self._enter("rename", old, new)
        old_parts, new_parts = _split(old), _split(new)
        old_dir, old_name = self._parent(old)
        new_dir, new_name = self._parent(new)
        node = old_dir.live.get(old_name)
        if node is None:
            raise _error(errno.ENOENT, old)
        replaced = new_dir.live.get(new_name)
        if replaced is node:
            return
        if new_parts[: len(old_parts)] == old_parts:
            raise _error(errno.EINVAL, new)
        if old_parts[: len(new_parts)] == new_parts:
            raise _error(errno.ENOTEMPTY, new)
        if isinstance(replaced, _Dir):
            if isinstance(node, _File):
                raise _error(errno.EISDIR, new)
            if replaced.live:
                raise _error(errno.ENOTEMPTY, new)
        elif isinstance(replaced, _File) and isinstance(node, _Dir):
            raise _error(errno.ENOTDIR, new)
        if old_dir is new_dir:
            self._change(old_dir, _Change(removed=old_name, added=new_name, node=node))
            return
        leaving = _Change(removed=old_name, twin_dir=new_dir)
        arriving = _Change(added=new_name, node=node, twin=leaving, twin_dir=old_dir)
        leaving.twin = arriving
        self._change(old_dir, leaving)
        self._change(new_dir, arriving)

    def remove(self, path: str) -> None:
        self._enter("remove", path)
        node = self._find(path)
        if isinstance(node, _Dir):
            raise _error(errno.EISDIR, path)
        if node is not None:
            parent, name = self._parent(path)
            self._change(parent, _Change(removed=name))

    def remove_dir(self, path: str) -> None:
        self._enter("remove_dir", path)
        node = self._find(path)
        if isinstance(node, _File):
            raise _error(errno.ENOTDIR, path)
        if node is not None:
            if node.live:
                raise _error(errno.ENOTEMPTY, path)
            parent, name = self._parent(path)
            self._change(parent, _Change(removed=name))

    def sync_dir(self, path: str) -> None:
        self._enter("sync_dir", path)
        node = self._find(path)
        if node is None:
            raise _error(errno.ENOENT, path)
        if isinstance(node, _File):
            raise _error(errno.ENOTDIR, path)
        _settle(node, len(node.journal))
        self._dirty_dirs.pop(node, None)

    def sync_all(self) -> None:
        self.calls += 1
        plan = self._due("sync_all")
        if plan is not None:
            if plan.error is not None:
                for file in self._dirty_files:
                    self._fail_sync(file)
            raise self._failure(plan)
        for directory in self._dirty_dirs:
            _settle(directory, len(directory.journal))
        self._dirty_dirs.clear()
        for file in self._dirty_files:
            if file.pending:
                _make_durable(file)
        self._dirty_files = {file: None for file in self._dirty_files if file.diverged}

    # ---- the port: free space, boot id, random numbers

    def free_bytes(self) -> int:
        self._enter("free_bytes")
        if self.full:
            return 0
        if self.capacity_bytes is None:
            return self.spare_bytes
        used = sum(len(file.live) for _, file in _walk(self._root, "") if isinstance(file, _File))
        return max(0, self.capacity_bytes - used)

    def boot_id(self) -> str:
        self._enter("boot_id")
        return f"boot-{self._boot_count}"

    def random_u64(self) -> int:
        self._enter("random_u64")
        return self._salts.getrandbits(64)

    # ---- plans

    def _plan(self, call_number: int, of: str | None, error: int | None, *, midway: bool) -> None:
        if call_number < 1:
            raise ValueError(f"the next call is number 1, not {call_number}")
        if of is not None and not callable(getattr(type(self), of, None)):
            raise ValueError(f"no such call: {of!r}")
        self._plans.append(_Plan(call_number, of, error, midway))
        self._armed = True

    def _due(self, name: str, *args: object) -> _Plan | None:
        """Record this call in the trace, and return the plan that is due, if any. Plans of all calls count down."""
        if self._down:
            raise SimulatedCrash(f"{name} after the crash")
        if self.trace is not None:
            self.trace.append(" ".join([name, *map(str, args)]))
        if not self._armed:
            return None
        due: _Plan | None = None
        for plan in self._plans:
            if plan.of is None or plan.of == name:
                plan.calls_left -= 1
                if plan.calls_left == 0 and due is None:
                    due = plan
        self._plans = [plan for plan in self._plans if plan.calls_left > 0]
        self._armed = bool(self._plans)
        return due

    def _raise_due(self, name: str, *args: object) -> None:
        plan = self._due(name, *args)
        if plan is not None:
            raise self._failure(plan)

    def _enter(self, name: str, *args: object) -> None:
        self.calls += 1
        if self._armed or self.trace is not None:
            self._raise_due(name, *args)

    def _failure(self, plan: _Plan) -> BaseException:
        if plan.error is not None:
            return OSError(plan.error, f"simulated: {os.strerror(plan.error)}")
        self._down = self._armed = True
        return SimulatedCrash(f"at call {self.calls}")

    def _restart(self, how: str) -> None:
        self._handles.clear()
        self._plans.clear()
        self._down = self._armed = False
        if self.trace is not None:
            self.trace.append(how)

    # ---- file contents

    def _file(self, handle: int) -> _File:
        file = self._handles.get(handle)
        if file is None:
            raise _error(errno.EBADF)
        return file

    def _put(self, file: _File, offset: int, data: bytes, plan: _Plan | None) -> None:
        failure: BaseException | None = None
        if plan is not None:
            failure = self._failure(plan)
            partly = plan.midway or plan.error is not None
            data = data[: self._rng.randint(0, len(data))] if partly else b""
        live = file.live
        end = offset + len(data)
        if end > len(live) and (self.full or self.capacity_bytes is not None):
            end_max = len(live) + self._room_bytes()
            if end > end_max:
                # As in the kernel: what fits is written, then the call fails.
                data = data[: max(0, end_max - offset)]
                failure = failure or _error(errno.ENOSPC)
        if data:
            _splice(live, offset, data)
            if not file.pending:
                self._dirty_files[file] = None
            file.pending.append((offset, data))
        if failure is not None:
            raise failure

    def _room_bytes(self) -> int:
        if self.full or self.capacity_bytes is None:
            return 0
        # An unlinked file keeps its space until its last handle is closed.
        files = dict.fromkeys(file for _, file in _walk(self._root, ""))
        files.update(dict.fromkeys(self._handles.values()))
        return max(0, self.capacity_bytes - sum(len(file.live) for file in files))

    def _fail_sync(self, file: _File) -> None:
        if file.pending:
            self._gamble(file)
            file.pending.clear()
            file.diverged = True

    def _lose_cache(self, file: _File) -> None:
        """Decide what reached the platter, then make live equal to that."""
        self._gamble(file)
        live, durable = file.live, file.durable
        if file.diverged or any(data is None for _, data in file.pending):
            file.live = bytearray(durable)
        else:
            # Only the written ranges can differ. Copying only those keeps a crash cheap when a few records were
            # pending in a large preallocated file. Without truncations live is never shorter than durable.
            del live[len(durable) :]
            for offset, data in file.pending:
                assert data is not None
                end = min(offset + len(data), len(durable))
                if offset < end:
                    live[offset:end] = memoryview(durable)[offset:end]
        file.pending.clear()
        file.diverged = False

    def _gamble(self, file: _File) -> None:
        """Apply to `durable` what a crash leaves of the pending writes."""
        rng = self._rng
        durable = file.durable
        keep_chance = rng.choice(_KEEP_CHANCES)
        for offset, data in file.pending:
            if rng.random() < keep_chance:
                _apply(durable, offset, data)
                continue
            if data is None:
                continue
            fate = rng.randrange(4)
            if fate == 2:
                # Torn: a run of sectors is missing, most often all from some point on.
                first = self._sector_edge(offset, len(data))
                second = len(data) if rng.random() < 0.7 else self._sector_edge(offset, len(data))
                first, second = min(first, second), max(first, second)
                if first > 0:
                    _splice(durable, offset, data[:first])
                if second < len(data):
                    _splice(durable, offset + second, data[second:])
            elif fate == 3:
                # Only bytes of this write are garbled: others in the sector may have been synced.
                first = self._sector_edge(offset, len(data))
                second = min(len(data), first + SECTOR_BYTES - (offset + first) % SECTOR_BYTES)
                _splice(durable, offset, data[:first] + rng.randbytes(second - first) + data[second:])
            end = offset + len(data)
            if end > len(durable) and rng.random() < 0.25:
                # The length was journalled, the data was not.
                _resize(durable, end)

    def _sector_edge(self, offset: int, length: int) -> int:
        """Offset, relative to a write of `length` at `offset`, where a random one of its sectors begins."""
        first_sector = offset // SECTOR_BYTES
        sector = self._rng.randint(first_sector, (offset + length - 1) // SECTOR_BYTES)
        return max(0, sector * SECTOR_BYTES - offset)

    # ---- names

    def _find(self, path: str) -> _Node | None:
        node: _Node | None = self._root
        for part in _split(path):
            if node is None:
                return None
            if isinstance(node, _File):
                raise _error(errno.ENOTDIR, path)
            node = node.live.get(part)
        return node

    def _parent(self, path: str) -> tuple[_Dir, str]:
        parts = _split(path)
        if not parts:
            raise _error(errno.EBUSY, path)
        parent = self._find("/".join(parts[:-1]))
        if parent is None:
            raise _error(errno.ENOENT, path)
        if isinstance(parent, _File):
            raise _error(errno.ENOTDIR, path)
        return parent, parts[-1]

    def _change(self, directory: _Dir, change: _Change) -> None:
        _alter(directory.live, change)
        directory.journal.append(change)
        self._dirty_dirs[directory] = None


def _error(number: int, path: str | None = None) -> OSError:
    # OSError picks its own subclass (FileNotFoundError, ...) from the number.
    return (
        OSError(number, os.strerror(number)) if path is None else OSError(number, os.strerror(number), path)
    )


def _split(path: str) -> list[str]:
    return [part for part in path.split("/") if part and part != "."]


def _walk(directory: _Dir, prefix: str) -> list[tuple[str, _File]]:
    found: list[tuple[str, _File]] = []
    for name, node in directory.live.items():
        if isinstance(node, _File):
            found.append((prefix + name, node))
        else:
            found.extend(_walk(node, f"{prefix}{name}/"))
    return found


def _alter(entries: dict[str, _Node], change: _Change) -> None:
    if change.removed is not None:
        entries.pop(change.removed, None)
    if change.added is not None:
        assert change.node is not None
        entries[change.added] = change.node


def _settle(directory: _Dir, count: int) -> None:
    """Make the first `count` changes of this directory durable, and with them the other half of each move.

    The recursion ends: it only reaches changes older than the one that caused it,
    and in this directory all of those have been taken already.
    """
    settled = directory.journal[:count]
    del directory.journal[:count]
    for change in settled:
        _alter(directory.durable, change)
        if change.twin is not None:
            assert change.twin_dir is not None
            if change.twin in change.twin_dir.journal:
                _settle(change.twin_dir, change.twin_dir.journal.index(change.twin) + 1)


def _make_durable(file: _File) -> None:
    durable = file.durable
    for offset, data in file.pending:
        _apply(durable, offset, data)
    file.pending.clear()
    # Equal unless an earlier sync failed; the length is part of the inode, and this sync did write that.
    _resize(durable, len(file.live))


def _apply(content: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        _resize(content, offset)
    else:
        _splice(content, offset, data)


def _splice(content: bytearray, offset: int, data: bytes) -> None:
    if offset > len(content):
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def _resize(content: bytearray, length: int) -> None:
    if length < len(content):
        del content[length:]
    elif length > len(content):
        content.extend(bytes(length - len(content)))
