"""A child process that only speaks the control channel, for tests of the supervisor.

It writes its events to the file FAKE_JOURNAL, one JSON object per line, in order over all processes. FAKE_DEAF=<role>
makes a role ignore drain, FAKE_FAILS=<role> makes it fail at start.
"""

from __future__ import annotations

import json
import os
import select
import socket
from dataclasses import fields

from topics.link.control_channel import (
    Channel,
    CopiesPending,
    Drain,
    FlushCopies,
    Listening,
    Message,
    Peers,
    Ping,
    Pong,
    Ready,
    Serving,
)
from topics.system.process import FrontSpec, WorkerSpec, set_title


class FakeChild:
    def __init__(self, spec: WorkerSpec | FrontSpec, control: socket.socket) -> None:
        self.role = "worker" if isinstance(spec, WorkerSpec) else "front"
        self.spec = spec
        self.channel = Channel(control)
        self.draining = False

    def note(self, event: str, **fields: object) -> None:
        index = self.spec.shard if isinstance(self.spec, WorkerSpec) else self.spec.front
        entry = {"event": event, "role": self.role, "index": index, "pid": os.getpid(), **fields}
        fd = os.open(os.environ["FAKE_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, json.dumps(entry).encode() + b"\n")
        os.close(fd)

    def run(self) -> int:
        told = {field.name: getattr(self.spec, field.name) for field in fields(self.spec)}
        for name in ("listener", "in_flight"):  # not for JSON
            told.pop(name, None)
        self.note("started", parent=os.getppid(), spec=told)
        if os.environ.get("FAKE_FAILS") == self.role:
            return 9
        listener = self.listen()
        while not self.draining:
            readable, _, _ = select.select([self.channel, listener], [], [])
            if self.channel in readable:
                for message in self.channel.receive():
                    self.act_on(message)
                if self.channel.closed:
                    return 1
            if listener in readable:
                self.greet(listener)
        self.note("stopped")
        return 0

    def listen(self) -> socket.socket:
        if isinstance(self.spec, FrontSpec):
            self.channel.send(Serving())
            return self.spec.listener
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.spec.path)
        listener.listen()
        self.channel.send(Listening())
        self.channel.send(Ready())
        return listener

    def act_on(self, message: Message) -> None:
        match message:
            case Ping():
                self.channel.send(Pong())
            case Peers(workers, outages):
                self.note(
                    "peers",
                    workers=[[peer.shard, peer.incarnation, peer.path] for peer in workers],
                    outages=[[one.name, one.shard, one.failures, one.reason] for one in outages],
                )
            case FlushCopies():
                self.note("flush_copies")
                if os.environ.get("FAKE_PENDING") != self.role:
                    self.channel.send(CopiesPending(False))
            case Drain():
                self.note("drain")
                self.draining = os.environ.get("FAKE_DEAF") != self.role

    def greet(self, listener: socket.socket) -> None:
        """Answer a client with the name of this process."""
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        connection.sendall(str(os.getpid()).encode())
        connection.close()


def main(spec: WorkerSpec | FrontSpec, control: socket.socket) -> int:
    child = FakeChild(spec, control)
    set_title(f"fake {child.role}")
    return child.run()
