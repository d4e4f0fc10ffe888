"""The one way in: who asks, may they, what do they ask, and is the body what that takes.

    screen(request)            from the head alone, so that a refused body is never read
    handle(request, respond)   with the body

Order, as the contract has it: Host (421) and Origin (403) → key (401) → in-flight cap (429) → scope (403) → prefix of the name in the path (403) → routing (404,
405) → media type (415) → size (413) → the endpoint. A known path with a wrong method needs no scope.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias
from urllib.parse import unquote_to_bytes

from router.requests.call import ANY_TYPE, JSON_TYPE, LINES_TYPE, Call, Endpoint, Services, error_response
from router.requests.endpoints import (
    consumers,
    forwards,
    front_page,
    health,
    job_streams,
    merges,
    queues,
    records,
    topics,
    transactions,
    watch,
    websocket,
)
from topics.api.api_keys import ApiKey, find_key
from topics.api.errors import TopicsError
from topics.api.http_errors import error_head, error_parts
from topics.api.origins import Origins
from topics.protocols.http.count_bound import RECORD_LINES, RECORDS, too_many_records
from topics.protocols.http.exchange import Body, Request, Respond, Response
from topics.protocols.http.query import parse_query

logger = logging.getLogger("topics.front")

GZIP_FROM = 8 * 1024  # bytes; below it compressing costs more than it saves
GUNZIP_BYTES = 16 * 1024  # that go into zlib at once
GUNZIP_SLICE = 256 * 1024  # that come out of it at once: it is copied while no other thread runs
GUNZIP_LARGE = 1 << 20  # a body that unpacks to more waits in a line of its own
GUNZIP_MEMBERS_MAX = 4096  # of a body; tools that make many make one of 64 KiB
LARGE_ANSWER = 64 * 1024
SLOW_READERS_BYTES_MAX = 256 << 20  # of answers that clients have not taken yet; then reads are refused


class Offload(Protocol):
    """Runs work on another thread and hands its result back on the loop, None if it failed: packing blocks for long."""

    def __call__(
        self, work: Callable[[], Any], done: Callable[[Any], None], size: int = 0, *, is_large: bool = False
    ) -> bool:
        """`size`: bytes of a request that are held meanwhile. False: it was not taken, because too much waits."""


@dataclass(frozen=True, slots=True)
class Route:
    endpoint: Endpoint
    scopes: tuple[str, ...] = ()  # all of them; none: any key will do
    takes: tuple[bytes, ...] = ()  # what its content type begins with; none: the body is ignored
    empty_ok: bool = False
    is_probe: bool = False  # answered always, and without a key
    is_public: bool = False  # needs no key, whatever the settings say
    is_read: bool = False  # its answer may be large
    body_max: int = 1 << 40  # bytes; the server's own limit is lower where this one is not
    own_key: bool = False  # the endpoint looks at the key; it may come in the query
    key_in_query: bool = False  # as there, but it is looked at here
    bound: Callable[[Request, Body], bool] | None = (
        None  # whether the beginning of a body has too much already
    )


PARTS_BODY = 8 << 20  # a commit may name many parts
SMALL_BODY = 1 << 20  # what a body without records can need; parsing more would only keep others waiting

READ, WRITE, DELETE, ADMIN = ("read",), ("write",), ("delete",), ("admin",)
READ_WRITE = ("read", "write")


def _has_too_many_records(request: Request, beginning: Body) -> bool:
    is_lines = request.content_type.lower().startswith(LINES_TYPE)
    return (RECORD_LINES if is_lines else RECORDS).is_exceeded(beginning)


def _json(
    endpoint: Endpoint, scopes: tuple[str, ...], *, empty_ok: bool = False, is_read: bool = False
) -> Route:
    """A route whose body is a small JSON object."""
    return Route(endpoint, scopes, (JSON_TYPE,), empty_ok=empty_ok, is_read=is_read, body_max=SMALL_BODY)


_FIXED: dict[bytes, dict[bytes, Route]] = {
    b"/v0/topics": {b"GET": Route(topics.list_all, READ, is_read=True)},
    b"/v0/routers": {b"GET": Route(forwards.list_all, READ, is_read=True)},
    b"/v0/watch": {b"POST": _json(watch.create, READ)},
    b"/v0/ws": {b"GET": Route(websocket.open_websocket)},
    b"/v0/metrics": {b"GET": Route(health.metrics, READ)},
    b"/metrics": {b"GET": Route(health.metrics, READ)},
    b"/v0/openapi.json": {b"GET": Route(health.open_api)},
    b"/v0/health": {b"GET": Route(health.health, is_probe=True)},
    b"/healthz": {b"GET": Route(health.health, is_probe=True)},
    b"/v0/ready": {b"GET": Route(health.ready, is_probe=True)},
    b"/readyz": {b"GET": Route(health.ready, is_probe=True)},
}
_TOPIC: dict[bytes, dict[bytes, Route]] = {
    b"": {
        b"PUT": _json(topics.put, ADMIN, empty_ok=True),
        b"GET": Route(topics.get, READ),
        b"DELETE": Route(topics.drop, DELETE),
        b"POST": Route(records.write, WRITE, (JSON_TYPE, LINES_TYPE), bound=_has_too_many_records),
    },
    b"raw": {b"POST": Route(records.write_raw, WRITE, (ANY_TYPE,))},
    b"records": {b"GET": Route(records.read, READ, is_read=True)},
    b"diff": {b"POST": _json(records.diff, READ, empty_ok=True, is_read=True)},
    b"delete": {b"POST": _json(records.delete, DELETE)},
    b"deleted": {b"GET": Route(records.deleted, READ, is_read=True)},
    b"tags": {b"GET": Route(records.tags, READ, is_read=True)},
    b"last": {b"GET": Route(records.last, READ, is_read=True)},
    # An empty claim is a 400 of the shard, with or without a content type.
    b"claim": {b"POST": _json(queues.claim, READ_WRITE, empty_ok=True, is_read=True)},
    b"ack": {b"POST": _json(queues.ack, WRITE)},
    b"nack": {b"POST": _json(queues.nack, WRITE)},
    b"extend": {b"POST": _json(queues.extend, WRITE)},
    b"work": {b"GET": Route(job_streams.work, READ_WRITE, key_in_query=True)},
    b"consumers": {b"GET": Route(consumers.list_all, READ, is_read=True)},
    b"consolidation": {
        b"POST": _json(merges.plan, ADMIN, empty_ok=True),
        b"GET": Route(merges.state, ADMIN),
    },
    b"snapshots": {b"POST": _json(merges.pin, ADMIN, empty_ok=True)},
    b"transactions": {b"POST": _json(transactions.begin, WRITE)},
}
# What comes after a transaction's id.
_TRANSACTION: dict[bytes, dict[bytes, Route]] = {
    b"stage": {b"POST": Route(transactions.stage, WRITE, (JSON_TYPE,), bound=_has_too_many_records)},
    b"commit": {b"POST": Route(transactions.commit, WRITE, (JSON_TYPE,), body_max=PARTS_BODY)},
    b"abort": {b"POST": Route(transactions.abort, WRITE)},
}
# What comes after a consumer's name.
_CONSUMER: dict[bytes, dict[bytes, Route]] = {
    b"": {
        b"PUT": _json(consumers.put, ADMIN, empty_ok=True),
        b"GET": Route(consumers.get, READ),
        b"DELETE": Route(consumers.drop, DELETE),
    },
    b"fetch": {b"POST": _json(consumers.fetch, READ_WRITE, empty_ok=True, is_read=True)},
    b"ack": {b"POST": _json(consumers.ack, WRITE)},
    b"nack": {b"POST": _json(consumers.nack, WRITE)},
    b"extend": {b"POST": _json(consumers.extend, WRITE)},
    b"term": {b"POST": _json(consumers.term, WRITE)},
    b"pause": {b"POST": _json(consumers.pause, ADMIN, empty_ok=True)},
    b"resume": {b"POST": Route(consumers.resume, ADMIN)},
    b"reset": {b"POST": _json(consumers.reset, ADMIN)},
    b"stream": {b"GET": Route(job_streams.stream, READ_WRITE, key_in_query=True)},
}
# What comes after a plan's id, and after a snapshot's.
_PLAN: dict[bytes, dict[bytes, Route]] = {
    b"renew": {b"POST": _json(merges.renew, ADMIN)},
    b"commit": {b"POST": _json(merges.commit, ADMIN)},
    b"abandon": {b"POST": _json(merges.abandon, ADMIN)},
}
_SNAPSHOT: dict[bytes, dict[bytes, Route]] = {
    b"": {b"DELETE": Route(merges.release, ADMIN)},
    b"renew": {b"POST": _json(merges.renew_pin, ADMIN, empty_ok=True)},
}
# What a topic has that has names of its own.
_NESTED: dict[bytes, dict[bytes, dict[bytes, Route]]] = {
    b"consumers": _CONSUMER,
    b"consolidation": _PLAN,
    b"snapshots": _SNAPSHOT,
    b"transactions": _TRANSACTION,
}
_FORWARD: dict[bytes, Route] = {
    b"PUT": _json(forwards.put, ADMIN),
    b"GET": Route(forwards.get, READ),
    b"DELETE": Route(forwards.drop, DELETE),
}
# A path for those who ask for HTML with GET, unknown to all others.
_FRONT_PAGE: dict[bytes, Route] = {b"GET": Route(front_page.show, is_public=True)}
_STREAM: dict[bytes, Route] = {b"GET": Route(watch.open_stream, own_key=True)}
_TOPICS = b"/v0/topics/"
_STREAMS = b"/v0/watch/"
_FORWARDS = b"/v0/routers/"
# What may be done at a path, the topic (or router, or session) and the consumer (or plan, or snapshot) that it names, and what comes
# after the topic.
Place: TypeAlias = tuple[dict[bytes, Route] | None, bytes, bytes, bytes | None]
PLACES_MAX = 4096
PLACE_BYTES_MAX = 512
_CLAIMING = (job_streams.work, job_streams.stream)  # a GET that leases jobs
_OTHER_SITES = (b"cross-site", b"same-site")
_PREFLIGHT_HEAD = (
    b"Access-Control-Allow-Methods: GET, HEAD, POST, PUT, DELETE\r\n"
    b"Access-Control-Allow-Headers: Authorization, Content-Type, Content-Encoding, Idempotency-Key, Last-Event-ID, Topics-Strict, traceparent, tracestate\r\n"
    b"Access-Control-Max-Age: 600\r\n"
)
_ALWAYS = (health.health, health.ready, health.metrics)  # also while the server stops


class Admission:
    def __init__(
        self, services: Services, keys: list[ApiKey], buffered_bytes: Callable[[], int], offload: Offload
    ) -> None:
        self._services = services
        self._keys = keys
        self._buffered_bytes = buffered_bytes
        self._offload = offload
        settings = services.settings
        self._origins = Origins(
            allowed_hosts=settings.allowed_hosts,
            cors_origins=settings.cors_origins,
            bound_host=settings.host,
            has_keys=bool(keys),
        )
        self._known_hosts = self._origins.known_hosts
        self._in_flight: dict[bytes, int] = {}  # requests by key
        self._places: dict[bytes, Place] = {}  # paths that were seen before
        self._packing_bytes = 0  # of answers that are being compressed
        self.open = 0  # requests that wait for their answer

    def screen(self, request: Request, declared_bytes: int | None) -> Response | None:
        """What can be refused before the body is read."""
        refused = self._screen(request, declared_bytes)
        return self.let_read(request.origin, refused) if refused is not None else None

    def let_read(self, origin: bytes, response: Response) -> Response:
        """An answer that a page of this origin may read, if it is listed."""
        if self._origins.has_cors:
            return replace(response, head=response.head + self._origins.cors_head(origin))
        return response

    def _screen(self, request: Request, declared_bytes: int | None) -> Response | None:
        found = self._admit(request)
        if isinstance(found, Response):
            return found
        route, _ = found
        if route.takes and not (declared_bytes == 0 and route.empty_ok):
            refused = self._check_media(request, route)
            if refused is not None and not (declared_bytes is None and route.empty_ok):
                return refused
        if declared_bytes is not None and declared_bytes > self._body_max(route):
            return self.too_large(route)
        return None

    def handle(self, request: Request, respond: Respond) -> None:
        if self._origins.has_cors:
            respond = self._with_cors(request, respond)
        found = self._admit(request)
        if isinstance(found, Response):
            respond(found)
            return
        route, call = found
        self.open += 1
        respond = self._closing(route, call, respond)
        if route.takes and (len(request.body) or not route.empty_ok):
            refused = self._check_media(request, route)
            if refused is None and request.content_encoding:
                self._unpack(route, call, respond)
                return
            if refused is None and len(request.body) > self._body_max(route):
                refused = self.too_large(route)
            if refused is not None:
                respond(refused)
                return
        self._run(route, call, respond)

    def _run(self, route: Route, call: Call, respond: Respond) -> None:
        accepted = call.request.accept_encoding
        if accepted and lists(accepted, b"gzip"):
            respond = self._gzipped(respond)
        try:
            route.endpoint(call, respond)
        except TopicsError as error:
            respond(_refusal(error))
        except Exception:
            logger.exception("a request failed")
            respond(error_response("internal", "the request failed; the server's log says why"))

    # -- who and where -------------------------------------------------------------------------------------

    def _admit(self, request: Request) -> Response | tuple[Route, Call]:
        if request.origin or request.host not in self._known_hosts:
            refused = self._check_origin(request)
            if refused is not None:
                return refused
        path, method = request.path, request.method
        if method == b"HEAD":
            method = b"GET"
        place = self._places.get(path)
        if place is None:
            place = self._find_place(path)
        methods, topic, consumer, sub = place
        if methods is None and path == b"/" and method == b"GET" and lists(request.accept, b"text/html"):
            methods = _FRONT_PAGE
        route = methods.get(method) if methods is not None else None
        key: ApiKey | None = None
        if self._keys and route is not None and route.own_key:
            key = self._find_key(request.authorization) or self._key_in_query(request.query)
        elif self._keys:
            checked = self._check_key(request, route, topic, sub if methods is None else None)
            if isinstance(checked, Response):
                return checked
            key = checked
        if route is None:
            return _no_route(request, methods)
        if request.fetch_site and not self._keys and _leases_unseen(request, route):
            return error_response("forbidden_origin", "a page of another site may not lease jobs")
        services = self._services
        if services.draining and route.endpoint not in _ALWAYS:
            return error_response("shutting_down", "the server is stopping; try again after it is back")
        if route.is_read and self._is_full:
            return _too_many_answers()
        return route, Call(request, topic, key, services, consumer)

    def _check_origin(self, request: Request) -> Response | None:
        """A refusal by Host or Origin, or the answer to what a browser asks before a page's request."""
        refusal = self._origins.refusal(request.host, request.origin, is_websocket=request.wants_websocket)
        if refusal is not None:
            return error_response(*refusal)
        if request.method == b"OPTIONS" and request.origin and self._origins.lists(request.origin):
            return Response(204, b"", b"", _PREFLIGHT_HEAD)
        return None

    def _with_cors(self, request: Request, respond: Respond) -> Respond:
        def answer(response: Response) -> None:
            response.head += self._origins.cors_head(request.origin)
            respond(response)

        return answer

    def _find_place(self, path: bytes) -> Place:
        sub, topic, consumer = None, b"", b""
        if path.startswith(_TOPICS):
            name, _, sub = path[len(_TOPICS) :].partition(b"/")
            topic = unquote_to_bytes(name)
            routes, action = _TOPIC, sub
            kind, slash, rest = sub.partition(b"/")
            if slash and kind in _NESTED:
                routes = _NESTED[kind]
                name, _, action = rest.partition(b"/")
                consumer = unquote_to_bytes(name)
            # A name is one segment, and `/v0/topics/x/` is no other spelling of `/v0/topics/x`.
            known = topic and name and (action or not path.endswith(b"/"))
            methods = routes.get(action) if known else None
        elif path.startswith(_STREAMS):
            topic = unquote_to_bytes(path[len(_STREAMS) :])  # the name of a session, in this case
            methods = _STREAM if topic and b"/" not in topic else None
        elif path.startswith(_FORWARDS):
            name = path[len(_FORWARDS) :]
            topic = unquote_to_bytes(name)  # the name of a router, in this case
            methods = _FORWARD if name and b"/" not in name else None
        else:
            methods = _FIXED.get(path)
        place = methods, topic, consumer, sub
        if len(self._places) >= PLACES_MAX:
            self._places.clear()
        if len(path) <= PLACE_BYTES_MAX:
            self._places[path] = place
        return place

    def _check_key(
        self, request: Request, route: Route | None, topic: bytes, unknown_sub: bytes | None
    ) -> Response | ApiKey | None:
        if route is not None and (
            route.is_public or (route.is_probe and not self._services.settings.probe_auth)
        ):
            return None
        key = self._find_key(request.authorization)
        if key is None and route is not None and route.key_in_query:
            key = self._key_in_query(request.query)
        if key is None:
            refused = error_response("unauthorized", "send Authorization: Bearer with a key of this server")
            refused.head += b"WWW-Authenticate: Bearer\r\n"
            return refused
        limit = self._services.settings.max_inflight_per_key
        if limit and self._in_flight.get(key.digest, 0) >= limit:
            return error_response(
                "throttled",
                "too many requests of this key at once",
                {"limit": "max_inflight_per_key", "max": limit},
            )
        scopes = route.scopes if route is not None else WRITE if unknown_sub else ()
        for scope in scopes:
            if scope not in key.scopes:
                return error_response("forbidden", f"this key lacks the scope {scope}")
        if topic and (scopes or route is not None) and not key.covers(topic.decode("utf-8", "replace")):
            return error_response("forbidden", "this key may not use that name")
        return key

    def _find_key(self, authorization: bytes) -> ApiKey | None:
        if not authorization.startswith(b"Bearer "):
            return None
        return find_key(self._keys, authorization[7:].decode("utf-8", "replace").strip())

    def _key_in_query(self, query: bytes) -> ApiKey | None:
        """For browsers, whose EventSource sends no headers of ours."""
        return find_key(self._keys, parse_query(query).get("token", ""))

    # -- bodies --------------------------------------------------------------------------------------------

    @staticmethod
    def _check_media(request: Request, route: Route) -> Response | None:
        if request.content_type.lower().startswith(route.takes):
            return None
        wanted = " or ".join(kind.decode() for kind in route.takes)
        hint = "; or write the body as it is, to .../raw" if route.endpoint == records.write else ""
        return error_response("unsupported_media_type", f"set the header Content-Type: {wanted}{hint}")

    def _unpack(self, route: Route, call: Call, respond: Respond) -> None:
        request, bytes_max = call.request, self._body_max(route)
        encoding = request.content_encoding.strip().lower()
        if encoding not in (b"gzip", b"x-gzip", b"identity"):
            respond(error_response("unsupported_media_type", "the only Content-Encoding taken is gzip"))
            return

        packed = request.body

        def unpack(most: int, done: Callable[[Body | None], None]) -> None:
            is_large = most > GUNZIP_LARGE
            if not self._offload(lambda: gunzip(packed, most), done, len(packed), is_large=is_large):
                respond(error_response("throttled", "too many bodies wait to be unpacked", {"limit": "gzip"}))

        def begun(body: Body | None) -> None:
            if body is None or len(body) <= GUNZIP_LARGE or bytes_max <= GUNZIP_LARGE:
                unpacked(body)
            elif route.bound is not None and route.bound(request, body):
                respond(_refusal(too_many_records()))
            else:
                unpack(bytes_max, unpacked)

        def unpacked(body: Body | None) -> None:
            if body is None:
                respond(error_response("invalid_request", "the body is not what gzip makes"))
            elif len(body) > bytes_max:
                respond(self.too_large(route))
            else:
                request.body = body
                self._run(route, call, respond)

        if encoding == b"identity":
            unpacked(packed)
        else:
            unpack(min(bytes_max, GUNZIP_LARGE), begun)

    def _body_max(self, route: Route) -> int:
        return min(route.body_max, self._services.settings.max_body_bytes)

    def too_large(self, route: Route | None = None) -> Response:
        limit = self._services.settings.max_body_bytes if route is None else self._body_max(route)
        return error_response(
            "payload_too_large", f"a body has at most {limit} bytes; send smaller batches", {"max": limit}
        )

    # -- answers -------------------------------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        return self._buffered_bytes() + self._packing_bytes > SLOW_READERS_BYTES_MAX

    def _closing(self, route: Route, call: Call, respond: Respond) -> Respond:
        """Give the places back that a request takes, when it is answered or its client has gone."""
        key = call.key
        if key is not None:
            self._in_flight[key.digest] = self._in_flight.get(key.digest, 0) + 1
            call.request.release = self._place(key)

        def closed(response: Response) -> None:
            self.open -= 1
            call.request.release()
            # Only of reads: what a write has done is done, and a 429 would have it done again.
            if route.is_read and len(response.body) >= LARGE_ANSWER and self._is_full:
                response = _too_many_answers()
            respond(response)

        return closed

    def _place(self, key: ApiKey) -> Callable[[], None]:
        """One of the key's places; what is returned gives it back, once."""
        held = True

        def leave() -> None:
            nonlocal held
            if held:
                held = False
                left = self._in_flight[key.digest] - 1
                if left:
                    self._in_flight[key.digest] = left
                else:
                    del self._in_flight[key.digest]

        return leave

    def _gzipped(self, respond: Respond) -> Respond:
        def answer(response: Response) -> None:
            body = response.body
            size = len(body)
            if size < GZIP_FROM or response.content_type != JSON_TYPE or self._is_full:
                respond(response)
                return

            def packed(body: bytes | None) -> None:
                self._packing_bytes -= size
                if body is not None:
                    response.body = body
                    response.head += b"Content-Encoding: gzip\r\nVary: Accept-Encoding\r\n"
                respond(response)

            self._packing_bytes += size
            if not self._offload(lambda: zlib.compress(body, 1, 31), packed):
                packed(None)

        return answer


def _leases_unseen(request: Request, route: Route) -> bool:
    """A page of another site asks for jobs without an Origin, as by an image: it could not read them, but would hold them."""
    return route.endpoint in _CLAIMING and request.fetch_site in _OTHER_SITES and not request.origin


def _refusal(error: TopicsError) -> Response:
    status, body = error_parts(error)
    return Response(status, body, JSON_TYPE, error_head(status))


def _too_many_answers() -> Response:
    return error_response("throttled", "too many answers wait for slow readers", {"limit": "buffered"})


def _no_route(request: Request, methods: dict[bytes, Route] | None) -> Response:
    if methods is None:
        response = error_response(
            "not_found", "there is nothing at this path; GET /v0/openapi.json lists all"
        )
        if request.path == b"/":
            response.head += front_page.VARY
        return response
    allowed = [*methods, *([b"HEAD"] if b"GET" in methods else []), b"OPTIONS"]
    allow = b"Allow: %b\r\n" % b", ".join(allowed)
    if request.method == b"OPTIONS":
        return Response(204, b"", b"", allow)
    known = ", ".join(method.decode() for method in allowed)
    response = error_response("method_not_allowed", f"this path supports the methods {known}")
    response.head += allow
    return response


def lists(accepted: bytes, name: bytes) -> bool:
    """Whether a header of the Accept family lists this name, and not with the weight of 0 that means "anything but this"."""
    accepted = accepted.lower()
    if name not in accepted:
        return False
    for part in accepted.split(b","):
        listed, *parameters = part.replace(b" ", b"").replace(b"\t", b"").split(b";")
        if listed == name:
            return not any(each.startswith(b"q=") and not each[2:].strip(b".0") for each in parameters)
    return False


def gunzip(body: Body, bytes_max: int) -> memoryview | None:
    """The decoded body, one byte longer than allowed at most; None when it is not gzip, or not all of it.

    It may have several members, as what `cat a.gz b.gz` makes; RFC 1952, 2.2.
    """
    decoded = bytearray()
    unzip, members, at, is_whole = zlib.decompressobj(31), 1, 0, True
    while at < len(body) or not is_whole:
        if unzip.eof:
            unzip, members = zlib.decompressobj(31), members + 1
        # In parts, because what comes after a member is copied.
        part = body[at : at + GUNZIP_BYTES]
        try:
            unpacked = unzip.decompress(part, min(GUNZIP_SLICE, bytes_max + 1 - len(decoded)))
        except zlib.error:
            return None
        decoded += unpacked
        if len(decoded) > bytes_max:
            break
        if members > GUNZIP_MEMBERS_MAX:
            return None
        at += len(part) - len(unzip.unused_data) - len(unzip.unconsumed_tail)
        is_whole = unzip.eof or len(unpacked) < GUNZIP_SLICE  # else zlib may hold more without further input
    return memoryview(decoded) if unzip.eof or len(decoded) > bytes_max else None
