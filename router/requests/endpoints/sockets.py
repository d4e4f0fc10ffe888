"""GET /v0/ws: a WebSocket, if there is a place for one."""

from __future__ import annotations

from router.requests.call import Call
from router.requests.endpoints.watch import no_place
from router.requests.websocket import SocketWatcher
from router.watch.sinks import no_upgrade
from topics.protocols.http.exchange import Respond, Response


def open_socket(call: Call, respond: Respond) -> None:
    if not call.request.wants_websocket:
        respond(no_upgrade())
        return
    leave = call.services.desk.take_place(call.key)
    if leave is None:
        respond(no_place(call))
        return
    respond(Response(101, conversation=SocketWatcher(call, leave)))
