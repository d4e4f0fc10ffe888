"""Which of several fronts holds a connection, and connections to a particular front."""

from __future__ import annotations

import os
import socket

from tests.support.server import Server, until
from tests.support.sse_client import connect


def front_of(server: Server, connection: socket.socket) -> str:
    """The name of the front that holds the other end, once it has accepted it."""
    name: str = until(lambda: _holder(server, connection.getsockname()[1]))
    return name


def connect_to(server: Server, front: str) -> socket.socket:
    """The kernel distributes connections freely, so connect until the wanted front has one."""
    others = []
    try:
        while True:
            connection = connect(server)
            if front_of(server, connection) == front:
                return connection
            others.append(connection)
            assert len(others) < 200, f"no connection to {front}"
    finally:
        for other in others:
            other.close()


def _holder(server: Server, client_port: int) -> str | None:
    for name, pid in server.children().items():
        if not name.startswith("front"):
            continue
        inode = _inode(pid, server.port, client_port)
        if inode is not None and inode in _sockets(pid):
            return name
    return None


def _inode(pid: int, port: int, client_port: int) -> str | None:
    with open(f"/proc/{pid}/net/tcp", encoding="ascii") as table:
        for line in table.readlines()[1:]:
            columns = line.split()
            ports = [int(columns[i].rpartition(":")[2], 16) for i in (1, 2)]
            if ports == [port, client_port]:
                return f"socket:[{columns[9]}]"
    return None


def _sockets(pid: int) -> set[str]:
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:
            continue
    return found
