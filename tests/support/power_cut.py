"""Power cuts for a real server: a SimDisk behind a real mount.

`Machine` mounts a file system whose files are in a SimDisk, in a process of its own that speaks the kernel's FUSE
protocol on /dev/fuse (no library is needed). The server uses real system calls and the real kernel. When `cut` is
called, unsynced data is lost, torn or kept at random.

The kernel writes through (the writeback cache is not requested), so SimDisk gets each write and each sync in order.
The kernel does not pass syncfs on to such file systems; the worker syncs `.sync_all` after it
(workers/shard/failpoints.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.server import ROOT, Server, until
from tests.support.sim_disk import SimDisk
from workers.shard.failpoints import VARIABLE

DEVICE = "/dev/fuse"
SYNC_ALL = ".sync_all"
MAX_WRITE = 1 << 20
MNT_DETACH = 2
CACHE_S = 3600  # no other program changes the files
INIT_FLAGS = 1 << 5 | 1 << 22  # big writes, max_pages
PROTOCOL = (7, 31)
SIZE_IS_SET = 1 << 3

IN_HEADER = struct.Struct("<IIQQIIII")
OUT_HEADER = struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<6Q10I")
ENTRY = struct.Struct("<4Q2I")
DIRECTORY_ENTRY = struct.Struct("<QQII")
TRANSFER = struct.Struct("<QQIIQII")  # of a read or a write

_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str | None:
    """Why power cuts cannot be simulated on this machine; None when they can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if not os.path.exists(DEVICE):
        return f"there is no {DEVICE}"
    try:
        os.close(os.open(DEVICE, os.O_RDWR))
    except OSError as error:
        return f"{DEVICE}: {error.strerror}"
    return None


# -- the file system, in its own process -----------------------------------------------------------------------


@dataclass(eq=False)
class _Node:
    """A node number of the kernel and its file. Files are held open: the name may be removed while the file is in
    use.
    """

    number: int
    parent: _Node | None
    name: str
    handle: int | None  # None for a directory
    lookups: int = 0
    children: dict[str, _Node] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return "" if self.parent is None else f"{self.parent.path}/{self.name}".lstrip("/")


class FileSystem:
    """Answers the kernel's requests from a SimDisk."""

    def __init__(self, disk: SimDisk) -> None:
        self.disk = disk
        self._root = _Node(1, None, "", None)
        self._nodes = {1: self._root}
        self._next_number = 2
        self._operations: dict[int, Callable[[_Node, bytes], bytes]] = {
            1: self._lookup,
            3: lambda node, body: self._attributes_reply(node),
            4: self._set_attributes,
            9: lambda node, body: self._make_dir(node, _names(body[8:])[0]),
            10: lambda node, body: self._remove(node, _names(body)[0], self.disk.remove),
            11: lambda node, body: self._remove(node, _names(body)[0], self.disk.remove_dir),
            12: lambda node, body: self._rename(node, body, 8),
            14: lambda node, body: bytes(16),  # open
            15: self._read,
            16: self._write,
            17: lambda node, body: struct.pack(
                "<5Q4I24x", 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 4096, 255, 4096, 0
            ),
            18: lambda node, body: b"",  # release
            20: self._sync,
            26: self._init,
            27: lambda node, body: bytes(16),  # opendir
            28: self._read_dir,
            29: lambda node, body: b"",  # releasedir
            30: self._sync_dir,
            35: lambda node, body: self._create(node, _names(body[16:])[0]),
            45: lambda node, body: self._rename(node, body, 16),
        }

    def answer(self, request: bytes) -> bytes | None:
        _, operation, unique, number, *_ = IN_HEADER.unpack_from(request)
        body = request[IN_HEADER.size :]
        if operation == 2:
            self._forget(number, *struct.unpack_from("<Q", body))
            return None
        if operation == 42:
            for gone, lookups in struct.iter_unpack("<QQ", body[8:]):
                self._forget(gone, lookups)
            return None
        if operation == 36:  # an interrupt; all requests are short
            return None
        try:
            act = self._operations.get(operation)
            if act is None:
                raise OSError(errno.ENOSYS, "")
            reply, error = act(self._nodes.get(number, self._root), body), 0
        except OSError as failure:
            reply, error = b"", failure.errno or errno.EIO
        return OUT_HEADER.pack(OUT_HEADER.size + len(reply), -error, unique) + reply

    def _init(self, node: _Node, body: bytes) -> bytes:
        readahead = struct.unpack_from("<I", body, 8)[0]
        pages = MAX_WRITE // 4096
        return struct.pack("<4I2H2I2H32x", *PROTOCOL, readahead, INIT_FLAGS, 16, 12, MAX_WRITE, 1, pages, 0)

    # names

    def _lookup(self, parent: _Node, body: bytes) -> bytes:
        name = _names(body)[0]
        node = parent.children.get(name) or self._open(parent, name)
        node.lookups += 1
        return self._entry(node)

    def _open(self, parent: _Node, name: str, *, create: bool = False) -> _Node:
        try:
            handle: int | None = self.disk.open(f"{parent.path}/{name}", create=create)
        except IsADirectoryError:
            handle = None
        node = _Node(self._next_number, parent, name, handle)
        self._next_number += 1
        self._nodes[node.number] = parent.children[name] = node
        return node

    def _create(self, parent: _Node, name: str) -> bytes:
        node = parent.children.get(name) or self._open(parent, name, create=True)
        node.lookups += 1
        return self._entry(node) + bytes(16)

    def _make_dir(self, parent: _Node, name: str) -> bytes:
        path = f"{parent.path}/{name}"
        if self.disk.exists(path):
            raise OSError(errno.EEXIST, path)
        self.disk.make_dir(path)
        node = self._open(parent, name)
        node.lookups += 1
        return self._entry(node)

    def _remove(self, parent: _Node, name: str, remove: Callable[[str], None]) -> bytes:
        path = f"{parent.path}/{name}"
        if not self.disk.exists(path):
            raise OSError(errno.ENOENT, path)
        remove(path)
        parent.children.pop(name, None)
        return b""

    def _rename(self, parent: _Node, body: bytes, names_at: int) -> bytes:
        (target_number,) = struct.unpack_from("<Q", body)
        target = self._nodes[target_number]
        old, new = _names(body[names_at:])
        self.disk.rename(f"{parent.path}/{old}", f"{target.path}/{new}")
        target.children.pop(new, None)
        node = parent.children.pop(old, None)
        if node is not None:
            node.parent, node.name = target, new
            target.children[new] = node
        return b""

    def _forget(self, number: int, lookups: int) -> None:
        node = self._nodes.get(number)
        if node is None or node is self._root:
            return
        node.lookups -= lookups
        if node.lookups > 0:
            return
        del self._nodes[number]
        if node.parent is not None and node.parent.children.get(node.name) is node:
            del node.parent.children[node.name]
        if node.handle is not None:
            self.disk.close(node.handle)

    def _read_dir(self, node: _Node, body: bytes) -> bytes:
        _, offset, size, *_ = TRANSFER.unpack_from(body)
        found = bytearray()
        for i, name in enumerate(self.disk.list(node.path)):
            raw = name.encode()
            length = DIRECTORY_ENTRY.size + len(raw)
            if i < offset:
                continue
            if len(found) + length + 8 > size:
                break
            found += DIRECTORY_ENTRY.pack(0xFFFFFFFF, i + 1, len(raw), 0) + raw + bytes(-length % 8)
        return bytes(found)

    # contents

    def _read(self, node: _Node, body: bytes) -> bytes:
        _, offset, size, *_ = TRANSFER.unpack_from(body)
        return self.disk.read(_handle(node), offset, size)

    def _write(self, node: _Node, body: bytes) -> bytes:
        _, offset, size, *_ = TRANSFER.unpack_from(body)
        self.disk.write(_handle(node), offset, body[TRANSFER.size : TRANSFER.size + size])
        return struct.pack("<II", size, 0)

    def _set_attributes(self, node: _Node, body: bytes) -> bytes:
        (valid,) = struct.unpack_from("<I", body)
        if valid & SIZE_IS_SET:
            self.disk.truncate(_handle(node), struct.unpack_from("<Q", body, 16)[0])
        return self._attributes_reply(node)

    def _sync(self, node: _Node, body: bytes) -> bytes:
        if node.name == SYNC_ALL and node.parent is self._root:
            self.disk.sync_all()
        else:
            self.disk.sync(_handle(node))
        return b""

    def _sync_dir(self, node: _Node, body: bytes) -> bytes:
        self.disk.sync_dir(node.path)
        return b""

    def _attributes_reply(self, node: _Node) -> bytes:
        return struct.pack("<QII", CACHE_S, 0, 0) + self._attributes(node)

    def _entry(self, node: _Node) -> bytes:
        return ENTRY.pack(node.number, 0, CACHE_S, CACHE_S, 0, 0) + self._attributes(node)

    def _attributes(self, node: _Node) -> bytes:
        size = 0 if node.handle is None else self.disk.size(node.handle)
        mode = stat.S_IFDIR | 0o755 if node.handle is None else stat.S_IFREG | 0o644
        times = (0,) * 6
        return ATTRIBUTES.pack(node.number, size, (size + 511) // 512, *times, mode, 1, 0, 0, 0, 4096, 0)


def _handle(node: _Node) -> int:
    if node.handle is None:
        raise OSError(errno.EISDIR, node.path)
    return node.handle


def _names(body: bytes) -> list[str]:
    return [name.decode() for name in body.split(b"\0")[:-1]]


def _mount(path: str) -> int:
    device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    if _libc.mount(b"topics-power-cut", path.encode(), b"fuse", 0, options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return device


def _unmount(path: str) -> None:
    _libc.umount2(path.encode(), MNT_DETACH)


def _serve(path: str, seed: int) -> None:
    """Run the file system. Commands come on standard input; each is answered with one line."""
    disk = SimDisk(seed)
    disk.close(disk.open(SYNC_ALL, create=True))
    disk.sync_dir("")
    system, device = FileSystem(disk), _mount(path)
    print("mounted", flush=True)
    try:
        while True:
            ready, _, _ = select.select([device, sys.stdin], [], [])
            if device in ready:
                with contextlib.suppress(FileNotFoundError):  # the caller was killed meanwhile
                    request = os.read(device, MAX_WRITE + 8192)
                    reply = system.answer(request)
                    if reply is not None:
                        os.write(device, reply)
                continue  # handle requests that were sent before the command first
            words = sys.stdin.readline().split()
            if not words:
                return
            match words:
                case ["cut"]:
                    _unmount(path)
                    os.close(device)
                    disk.crash()
                    system, device = FileSystem(disk), _mount(path)
                case ["full", flag]:
                    disk.full = flag == "1"
                case ["fail", call, number, nth]:
                    disk.fail_at(int(nth), int(number), of=call)
            print(disk.boot_id(), flush=True)
    finally:
        _unmount(path)


# -- the other side, in the test -------------------------------------------------------------------------------


@dataclass
class Machine:
    """The mount at `path`. `failpoints` is the folder that the server's workers get (workers/shard/failpoints.py)."""

    path: Path
    failpoints: Path
    process: subprocess.Popen[str]

    def environment(self) -> dict[str, str]:
        return {VARIABLE: str(self.failpoints)}

    def cut(self, server: Server) -> None:
        """Cut the power: kill all processes at once, and lose what the disk did not have."""
        server.kill()
        self.lose()

    def lose(self) -> None:
        """Unsynced data is lost, or not. No process may have a file open."""
        self._order("cut")

    def fill(self, full: bool) -> None:
        """From now on files cannot grow, or can again."""
        self._order(f"full {int(full)}")

    def fail(self, call: str, error: int, nth: int = 1) -> None:
        """The nth such call of SimDisk from now on fails, once."""
        self._order(f"fail {call} {error} {nth}")

    def _order(self, command: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        boot_id = self.process.stdout.readline()
        assert boot_id, "the file system has ended"
        (self.failpoints / "boot_id").write_text(boot_id)


@contextlib.contextmanager
def machine(folder: Path, seed: int) -> Iterator[Machine]:
    """A machine whose disk is mounted where `Server(folder)` has its data."""
    path, failpoints = folder / "data", folder / "failpoints"
    path.mkdir()
    failpoints.mkdir()
    (failpoints / "boot_id").write_text("boot-1\n")
    (failpoints / "sync_all").symlink_to(path / SYNC_ALL)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.power_cut", str(path), str(seed)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "mounted\n"
        yield Machine(path, failpoints, process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
        until(lambda: not os.path.ismount(path))


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
