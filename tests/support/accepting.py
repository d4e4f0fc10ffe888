"""A listening socket and the thread that accepts its connections, which ends before the socket's descriptor is free.

A thread that is stopped inside accept() or recv() (SIGSTOP, a debugger) asks again when it goes on, with the number of the
descriptor. `close` wakes no such thread, and the next socket gets the same number: the old thread would take what is
meant for the new one. So sockets are shut down first, and closed when no thread uses them any more.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Accepting:
    def __init__(self, accepted: Callable[[socket.socket], None]) -> None:
        """`accepted` gets each connection, one after the other."""
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
    """Whoever waits for it, here or at the other end, finds its end."""
    with contextlib.suppress(OSError):  # it has ended already
        sock.shutdown(socket.SHUT_RDWR)
