"""What the supervisor tells a process about its place in the server when it starts it."""

from __future__ import annotations

import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerPlace:
    shard: int
    shards: int
    generation: int  # of the layout
    incarnation: int  # a greater one with each process of a shard
    path: str  # of the socket at which it answers


@dataclass(frozen=True)
class FrontPlace:
    front: int
    shards: int
    started_us: int  # when the server was; a front of its own may come later
    listener: socket.socket
