"""GET /v0/ws: a WebSocket, if there is a place for one."""

from __future__ import annotations

from router.call import Call
from router.endpoints.watch import no_place
from router.exchange import Respond, Response
from router.streams import no_upgrade
from router.websocket import SocketWatcher


def open_socket(call: Call, respond: Respond) -> None:
    if not call.request.wants_websocket:
        respond(no_upgrade())
        return
    leave = call.services.desk.take_place(call.key)
    if leave is None:
        respond(no_place(call))
        return
    respond(Response(101, conversation=SocketWatcher(call, leave)))
