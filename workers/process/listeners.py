"""Listening sockets. The supervisor binds them, so the port stays open while a front restarts."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path
from typing import Any

from topics.system.settings import join_host
from workers.process.data_directory import write_atomically
from workers.process.exit_codes import BadConfiguration, CannotBind

BACKLOG = 4096
BIND_PATIENCE_S = 1.5


def bind(host: str, port: int, count: int) -> list[socket.socket]:
    """`count` sockets on one address; the kernel distributes connections over them.

    Retries for a moment: the fronts of a server that was just killed may still hold the port.
    """
    give_up = time.monotonic() + BIND_PATIENCE_S
    while True:
        try:
            return _bind(host, port, count)
        except CannotBind as refusal:
            in_use = isinstance(refusal.__cause__, OSError) and refusal.__cause__.errno == errno.EADDRINUSE
            if not in_use or time.monotonic() > give_up:
                raise
        time.sleep(0.05)


def _bind(host: str, port: int, count: int) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    try:
        family, address = _resolve(host, port)
        if count > 1 and port:
            # With SO_REUSEPORT alone, another server that sets it too would silently share the port.
            _bound(family, address, shared=False).close()
        while len(listeners) < count:
            listeners.append(_bound(family, address, shared=count > 1))
            # With port 0, the other sockets must use the port that the first one got.
            address = listeners[0].getsockname()
        for listener in listeners:
            listener.listen(BACKLOG)
    except OSError as error:
        for listener in listeners:
            listener.close()
        where = join_host(host, port)
        raise CannotBind(
            f"cannot listen on {where}: {error.strerror or error}; choose another address with TOPICS_HOST and TOPICS_PORT, or --host and --port"
        ) from error
    return listeners


def address_of(listener: socket.socket) -> str:
    """Its actual `host:port`."""
    host, port = listener.getsockname()[:2]
    return join_host(host, port)


def write_port_file(path: str, address: str) -> None:
    try:
        if _holds(path, address.encode()):
            return  # unchanged: the server can start even if the disk is full
        write_atomically(Path(path).absolute(), address.encode(), public=True)
    except OSError as error:
        raise BadConfiguration(
            f"cannot write TOPICS_PORT_FILE={path}: {os.strerror(error.errno or 0)}"
        ) from error


def _holds(path: str, content: bytes) -> bool:
    """Whether the file exists with exactly this content."""
    try:
        with open(path, "rb") as file:
            return file.read(len(content) + 1) == content
    except OSError:
        return False


def _resolve(host: str, port: int) -> tuple[int, Any]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # `localhost` often resolves to both families. Prefer IPv4: every client supports it.
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, address


def _bound(family: int, address: Any, shared: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            # Let `::` accept IPv4 connections as well.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
