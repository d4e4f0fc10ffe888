"""A child process that only speaks the control channel, for tests of the supervisor: `fake_child worker|front …`.

It writes what happens to it into the file FAKE_JOURNAL, one JSON object a line, in the order of
happening over all processes. FAKE_DEAF=<role> makes a role ignore drain, FAKE_FAILS=<role> makes it fail at start.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import sys

from topics.control_channel import (
    Channel,
    Drain,
    Listening,
    Message,
    Owes,
    Peers,
    Ping,
    Pong,
    Ready,
    Serving,
    Settle,
    inherited,
)
from topics.process import become, die_with_parent


class FakeChild:
    def __init__(self, role: str, arguments: argparse.Namespace) -> None:
        self.role = role
        self.arguments = arguments
        self.channel = Channel(inherited(arguments.control_fd))
        self.draining = False

    def note(self, event: str, **fields: object) -> None:
        index = self.arguments.shard if self.role == "worker" else self.arguments.front
        entry = {"event": event, "role": self.role, "index": index, "pid": os.getpid(), **fields}
        fd = os.open(os.environ["FAKE_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, json.dumps(entry).encode() + b"\n")
        os.close(fd)

    def run(self) -> int:
        self.note("started", argv=sys.argv[2:])
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
        if self.role == "front":
            listener = socket.socket(fileno=self.arguments.listen_fd)
            self.channel.send(Serving())
            return listener
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.arguments.socket)
        listener.listen()
        self.channel.send(Listening())
        self.channel.send(Ready())
        return listener

    def act_on(self, message: Message) -> None:
        match message:
            case Ping():
                self.channel.send(Pong())
            case Peers(workers):
                self.note("peers", workers=[[peer.shard, peer.incarnation, peer.path] for peer in workers])
            case Settle():
                self.note("settle")
                if os.environ.get("FAKE_OWES") != self.role:
                    self.channel.send(Owes(False))
            case Drain():
                self.note("drain")
                self.draining = os.environ.get("FAKE_DEAF") != self.role

    def greet(self, listener: socket.socket) -> None:
        """Tell a client who answered."""
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        connection.sendall(str(os.getpid()).encode())
        connection.close()


def main() -> int:
    role = sys.argv[1]
    parser = argparse.ArgumentParser()
    names = ["shard", "shards", "generation", "incarnation", "control-fd", "parent"]
    if role == "front":
        names = ["front", "fronts", "shards", "listen-fd", "control-fd", "parent", "started-us"]
    for name in names:
        parser.add_argument(f"--{name}", type=int, required=True)
    if role == "worker":
        parser.add_argument("--socket", required=True)
    arguments = parser.parse_args(sys.argv[2:])
    die_with_parent(arguments.parent)
    become(f"fake {role}")
    return FakeChild(role, arguments).run()


if __name__ == "__main__":
    sys.exit(main())
