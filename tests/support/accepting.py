"""A listening socket with a thread that accepts connections and ends before the socket's descriptor is closed.

A thread that was stopped inside accept() or recv() (SIGSTOP, a debugger) repeats the call with the same descriptor
number when it continues. `close` does not wake such a thread, and the next socket may get the same number: the old
thread would then take its connections. So sockets are shut down first, and closed only when no thread uses them any
more.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Accepting:
    def __init__(self, accepted: Callable[[socket.socket], None]) -> None:
        """`accepted` is called with each connection, one at a time."""
        self._accepted = accepted
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        shut(self._listener)
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._accepted(connection)


def shut(sock: socket.socket) -> None:
    """Shut the socket down: pending reads and writes at both ends return."""
    with contextlib.suppress(OSError):  # already closed by the peer
        sock.shutdown(socket.SHUT_RDWR)
