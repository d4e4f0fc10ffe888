"""Request admission: origin checks, authentication, authorization, routing and body checks.

    check_head(request)        checks the head alone, so that the body of a refused request is not read
    handle(request, respond)   checks the whole request and calls the endpoint

Documented order of the checks: Host (421) and Origin (403) → key (401) → in-flight cap (429) → scope (403) → prefix of the
name in the path (403) → routing (404, 405) → media type (415) → size (413) → the endpoint. A known path with a wrong method
needs no scope.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from urllib.parse import unquote_to_bytes

from topics.api import operations
from topics.api.api_keys import ApiKey, find_key
from topics.api.errors import TopicsError
from topics.api.operations import OPERATIONS, Operation
from topics.api.origins import Origins
from topics.protocols.http.call import (
    ANY_TYPE,
    JSON_TYPE,
    LINES_TYPE,
    Call,
    Endpoint,
    Services,
    error_response,
    refusal,
)
from topics.protocols.http.endpoints import (
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
from topics.protocols.http.exchange import Body, Request, Respond, Response
from topics.protocols.http.ports import Offload
from topics.protocols.http.query import parse_query
from topics.protocols.json.count_bound import RECORD_LINES, RECORDS, too_many_records
from topics.system.in_flight import InFlight, alone

logger = logging.getLogger("topics.front")

GZIP_BYTES_MIN = 8 * 1024  # below it compression costs more than it saves
GUNZIP_BYTES = 16 * 1024  # input per call of zlib
GUNZIP_SLICE = 256 * 1024  # output per call of zlib, which is copied while holding the GIL
GUNZIP_LARGE = 1 << 20  # larger decompressed bodies have a separate queue
GUNZIP_MEMBERS_MAX = 4096  # per body; tools that write many members make them of 64 KiB
LARGE_RESPONSE = 64 * 1024
SLOW_READERS_BYTES_MAX = 256 << 20  # unread response bytes beyond which reads are refused


ANY_SIZE = 1 << 40


@dataclass(frozen=True, slots=True)
class Route:
    endpoint: Endpoint
    scopes: tuple[str, ...] = ()  # all are required; empty: any key
    takes: tuple[bytes, ...] = ()  # prefixes of accepted content types; empty: the body is ignored
    empty_ok: bool = False
    is_probe: bool = False  # always answered, without a key unless configured
    is_public: bool = False  # never needs a key
    is_read: bool = False  # the response may be large
    body_max: int = ANY_SIZE  # bytes; the server's own limit applies too
    own_key: bool = False  # the endpoint checks the key; it may be in the query
    key_in_query: bool = False  # the key may be in the query
    exceeds_count: Callable[[Request, Body], bool] | None = None  # checks the beginning of a large body


PARTS_BODY = 8 << 20  # a commit may list many parts
SMALL_BODY = 1 << 20  # enough for bodies without records; parsing more would block other requests


def _has_too_many_records(request: Request, beginning: Body) -> bool:
    is_lines = request.content_type.lower().startswith(LINES_TYPE)
    return (RECORD_LINES if is_lines else RECORDS).is_exceeded(beginning)


# The endpoint of each operation. What is not in the table of operations is how a front serves it.
_ENDPOINTS: dict[str, Endpoint] = {
    "list_topics": topics.list_all,
    "put_topic": topics.put,
    "get_topic": topics.get,
    "delete_topic": topics.drop,
    "write": records.write,
    "write_raw": records.write_raw,
    "read_page": records.read,
    "read": records.diff,
    "delete_records": records.delete,
    "list_deleted": records.deleted,
    "list_tags": records.tags,
    "last_records": records.last,
    "claim": queues.claim,
    "ack": queues.ack,
    "nack": queues.nack,
    "extend": queues.extend,
    "work": job_streams.work,
    "list_consumers": consumers.list_all,
    "put_consumer": consumers.put,
    "get_consumer": consumers.get,
    "delete_consumer": consumers.drop,
    "fetch": consumers.fetch,
    "stream_consumer": job_streams.stream,
    "ack_for_consumer": consumers.ack,
    "nack_for_consumer": consumers.nack,
    "extend_for_consumer": consumers.extend,
    "term_for_consumer": consumers.term,
    "pause_consumer": consumers.pause,
    "resume_consumer": consumers.resume,
    "reset_consumer": consumers.reset,
    "list_routers": forwards.list_all,
    "put_router": forwards.put,
    "get_router": forwards.get,
    "delete_router": forwards.drop,
    "plan_merge": merges.plan,
    "merge_state": merges.state,
    "renew_plan": merges.renew,
    "commit_plan": merges.commit,
    "abandon_plan": merges.abandon,
    "pin_snapshot": merges.pin,
    "renew_snapshot": merges.renew_pin,
    "release_snapshot": merges.release,
    "begin_transaction": transactions.begin,
    "stage_chunk": transactions.stage,
    "commit_transaction": transactions.commit,
    "abort_transaction": transactions.abort,
    "make_watch": watch.create,
    "stream_watch": watch.open_stream,
    "websocket": websocket.open_websocket,
    "health": health.health,
    "ready": health.ready,
    "healthz": health.health,
    "readyz": health.ready,
    "metrics": health.metrics,
    "metrics_alias": health.metrics,
    "openapi": health.open_api,
}
_SERVED: dict[str, dict[str, Any]] = {
    "write": {"exceeds_count": _has_too_many_records},
    "stage_chunk": {"exceeds_count": _has_too_many_records, "body_max": ANY_SIZE},
    "commit_transaction": {"body_max": PARTS_BODY},
    # The shard answers an empty claim with 400, with or without a content type.
    "claim": {"empty_ok": True},
    "fetch": {"empty_ok": True},
    "work": {"key_in_query": True},
    "stream_consumer": {"key_in_query": True},
    "stream_watch": {"own_key": True},
    "health": {"is_probe": True},
    "ready": {"is_probe": True},
    "healthz": {"is_probe": True},
    "readyz": {"is_probe": True},
}


def _route(one: Operation) -> Route:
    served: dict[str, Any] = {
        "scopes": one.scopes,
        "takes": tuple(ANY_TYPE if kind == operations.ANY_TYPE else kind.encode() for kind in one.accepts),
        "empty_ok": one.body is not None and one.body_optional,
        "is_read": one.is_large,
        "body_max": SMALL_BODY if one.accepts == (operations.JSON_TYPE,) else ANY_SIZE,
    }
    return Route(_ENDPOINTS[one.name], **served | _SERVED.get(one.name, {}))


Methods: TypeAlias = dict[bytes, Route]
_TOPICS = b"/v0/topics/"
_STREAMS = b"/v0/watch/"
_FORWARDS = b"/v0/routers/"
_FIXED: dict[bytes, Methods] = {}
_TOPIC: dict[bytes, Methods] = {}  # paths after a topic
_NESTED: dict[bytes, dict[bytes, Methods]] = {}  # paths after a named resource of a topic, such as a consumer
_STREAM: Methods = {}
_FORWARD: Methods = {}


def _methods_of(path: bytes) -> Methods:
    """Where the routes of a path of the table are kept."""
    if path.startswith(_STREAMS):
        return _STREAM
    if path.startswith(_FORWARDS):
        return _FORWARD
    if not path.startswith(_TOPICS):
        return _FIXED.setdefault(path, {})
    kind, slash, action = path[len(_TOPICS) :].partition(b"/")[2].partition(b"/")
    if not slash:
        return _TOPIC.setdefault(kind, {})
    return _NESTED.setdefault(kind, {}).setdefault(action.partition(b"/")[2], {})


for _one in OPERATIONS:
    _methods_of(_one.path.encode())[_one.method.encode()] = _route(_one)
# Only for GET requests that accept HTML; 404 for all others.
_FRONT_PAGE: Methods = {b"GET": Route(front_page.show, is_public=True)}
# Routes by method, name of the topic (or router, or session), name of the consumer (or plan, or snapshot), path after the topic.
PathMatch: TypeAlias = tuple[Methods | None, bytes, bytes, bytes | None]
PATHS_CACHED_MAX = 4096
CACHED_PATH_BYTES_MAX = 512
_CLAIMING = (job_streams.work, job_streams.stream)  # GETs that lease jobs
_OTHER_SITES = (b"cross-site", b"same-site")
_PREFLIGHT_HEAD = (
    b"Access-Control-Allow-Methods: GET, HEAD, POST, PUT, DELETE\r\n"
    b"Access-Control-Allow-Headers: Authorization, Content-Type, Content-Encoding, Idempotency-Key, Last-Event-ID, Topics-Strict, traceparent, tracestate\r\n"
    b"Access-Control-Max-Age: 600\r\n"
)
_ALWAYS = (health.health, health.ready, health.metrics)  # answered even while the server is stopping


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
        digests = [key.digest for key in keys]
        table = services.in_flight
        self._in_flight = alone(digests) if table is None else InFlight(*table, digests)
        self._matches: dict[bytes, PathMatch] = {}  # cache, by path
        self._compressing_bytes = 0
        self.open = 0  # unanswered requests

    def check_head(self, request: Request, declared_bytes: int | None) -> Response | None:
        """The error of a request that can be refused before its body is read."""
        refused = self._check_head(request, declared_bytes)
        return self.add_cors(request.origin, refused) if refused is not None else None

    def add_cors(self, origin: bytes, response: Response) -> Response:
        """Add the CORS headers that let pages of a listed origin read the response."""
        if self._origins.has_cors:
            return replace(response, head=response.head + self._origins.cors_head(origin))
        return response

    def _check_head(self, request: Request, declared_bytes: int | None) -> Response | None:
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
        respond = self._releasing(route, call, respond)
        if route.takes and (len(request.body) or not route.empty_ok):
            refused = self._check_media(request, route)
            if refused is None and request.content_encoding:
                self._decompress(route, call, respond)
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
            respond(refusal(error))
        except Exception:
            logger.exception("a request failed")
            respond(error_response("internal", "the request failed; see the server's log"))

    # -- authentication and routing ------------------------------------------------------------------------

    def _admit(self, request: Request) -> Response | tuple[Route, Call]:
        if request.origin or request.host not in self._known_hosts:
            refused = self._check_origin(request)
            if refused is not None:
                return refused
        path, method = request.path, request.method
        if method == b"HEAD":
            method = b"GET"
        match = self._matches.get(path)
        if match is None:
            match = self._match(path)
        methods, topic, consumer, sub = match
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
        if request.fetch_site and not self._keys and _is_blind_claim(request, route):
            return error_response("forbidden_origin", "pages of other sites may not lease jobs")
        services = self._services
        if services.draining and route.endpoint not in _ALWAYS:
            return error_response("shutting_down", "the server is stopping; retry after it has restarted")
        if route.is_read and self._is_full:
            return _too_many_buffered()
        return route, Call(request, topic, key, services, consumer)

    def _check_origin(self, request: Request) -> Response | None:
        """The error for a wrong Host or Origin, or the response to a CORS preflight request."""
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

    def _match(self, path: bytes) -> PathMatch:
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
            # A name is one segment, and `/v0/topics/x/` is not the same as `/v0/topics/x`.
            is_valid = topic and name and (action or not path.endswith(b"/"))
            methods = routes.get(action) if is_valid else None
        elif path.startswith(_STREAMS):
            topic = unquote_to_bytes(path[len(_STREAMS) :])  # here the id of a session
            methods = _STREAM if topic and b"/" not in topic else None
        elif path.startswith(_FORWARDS):
            name = path[len(_FORWARDS) :]
            topic = unquote_to_bytes(name)  # here the name of a router
            methods = _FORWARD if name and b"/" not in name else None
        else:
            methods = _FIXED.get(path)
        match = methods, topic, consumer, sub
        if len(self._matches) >= PATHS_CACHED_MAX:
            self._matches.clear()
        if len(path) <= CACHED_PATH_BYTES_MAX:
            self._matches[path] = match
        return match

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
            refused = error_response("unauthorized", "send the header Authorization: Bearer with a valid key")
            refused.head += b"WWW-Authenticate: Bearer\r\n"
            return refused
        limit = self._services.settings.max_inflight_per_key
        if limit and self._in_flight.total(key.digest) >= limit:
            return error_response(
                "throttled",
                "too many concurrent requests with this key",
                {"limit": "max_inflight_per_key", "max": limit},
            )
        scopes = route.scopes if route is not None else ("write",) if unknown_sub else ()
        for scope in scopes:
            if scope not in key.scopes:
                return error_response("forbidden", f"this key lacks the scope {scope}")
        if topic and (scopes or route is not None) and not key.covers(topic.decode("utf-8", "replace")):
            return error_response("forbidden", "this key may not access this name")
        return key

    def _find_key(self, authorization: bytes) -> ApiKey | None:
        if not authorization.startswith(b"Bearer "):
            return None
        return find_key(self._keys, authorization[7:].decode("utf-8", "replace").strip())

    def _key_in_query(self, query: bytes) -> ApiKey | None:
        """The key in the query, for EventSource in browsers, which cannot set headers."""
        return find_key(self._keys, parse_query(query).get("token", ""))

    # -- bodies --------------------------------------------------------------------------------------------

    @staticmethod
    def _check_media(request: Request, route: Route) -> Response | None:
        if request.content_type.lower().startswith(route.takes):
            return None
        wanted = " or ".join(kind.decode() for kind in route.takes)
        hint = "; or write the body as one record, to .../raw" if route.endpoint == records.write else ""
        return error_response("unsupported_media_type", f"set the header Content-Type: {wanted}{hint}")

    def _decompress(self, route: Route, call: Call, respond: Respond) -> None:
        request, bytes_max = call.request, self._body_max(route)
        encoding = request.content_encoding.strip().lower()
        if encoding not in (b"gzip", b"x-gzip", b"identity"):
            respond(error_response("unsupported_media_type", "the only supported Content-Encoding is gzip"))
            return

        compressed = request.body

        def decompress(maximum: int, done: Callable[[Body | None], None]) -> None:
            is_large = maximum > GUNZIP_LARGE
            if not self._offload(
                lambda: gunzip(compressed, maximum), done, len(compressed), is_large=is_large
            ):
                text = "too many bodies are waiting to be decompressed"
                respond(error_response("throttled", text, {"limit": "gzip"}))

        def begun(body: Body | None) -> None:
            if body is None or len(body) <= GUNZIP_LARGE or bytes_max <= GUNZIP_LARGE:
                decompressed(body)
            elif route.exceeds_count is not None and route.exceeds_count(request, body):
                respond(refusal(too_many_records()))
            else:
                decompress(bytes_max, decompressed)

        def decompressed(body: Body | None) -> None:
            if body is None:
                respond(error_response("invalid_request", "the body is not valid gzip"))
            elif len(body) > bytes_max:
                respond(self.too_large(route))
            else:
                request.body = body
                self._run(route, call, respond)

        if encoding == b"identity":
            decompressed(compressed)
        else:
            decompress(min(bytes_max, GUNZIP_LARGE), begun)

    def _body_max(self, route: Route) -> int:
        return min(route.body_max, self._services.settings.max_body_bytes)

    def too_large(self, route: Route | None = None) -> Response:
        limit = self._services.settings.max_body_bytes if route is None else self._body_max(route)
        return error_response(
            "payload_too_large",
            f"a body may have at most {limit} bytes; send smaller batches",
            {"max": limit},
        )

    # -- responses -----------------------------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        return self._buffered_bytes() + self._compressing_bytes > SLOW_READERS_BYTES_MAX

    def _releasing(self, route: Route, call: Call, respond: Respond) -> Respond:
        """Count the request as in flight until it is answered or its client disconnects."""
        key = call.key
        if key is not None:
            self._in_flight.begin(key.digest)
            call.request.release = self._in_flight_release(key)

        def answered(response: Response) -> None:
            self.open -= 1
            call.request.release()
            # Only for reads: a write is done, and a 429 would make the client repeat it.
            if route.is_read and len(response.body) >= LARGE_RESPONSE and self._is_full:
                response = _too_many_buffered()
            respond(response)

        return answered

    def _in_flight_release(self, key: ApiKey) -> Callable[[], None]:
        """A function that takes one request off the key's in-flight count, once."""
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self._in_flight.end(key.digest)

        return release

    def _gzipped(self, respond: Respond) -> Respond:
        def answer(response: Response) -> None:
            body = response.body
            size = len(body)
            if size < GZIP_BYTES_MIN or response.content_type != JSON_TYPE or self._is_full:
                respond(response)
                return

            def compressed(body: bytes | None) -> None:
                self._compressing_bytes -= size
                if body is not None:
                    response.body = body
                    response.head += b"Content-Encoding: gzip\r\nVary: Accept-Encoding\r\n"
                respond(response)

            self._compressing_bytes += size
            if not self._offload(lambda: zlib.compress(body, 1, 31), compressed):
                compressed(None)

        return answer


def _is_blind_claim(request: Request, route: Route) -> bool:
    """A page of another site requests jobs without an Origin, for example as an image: it could not read them, but would lease them."""
    return route.endpoint in _CLAIMING and request.fetch_site in _OTHER_SITES and not request.origin


def _too_many_buffered() -> Response:
    return error_response(
        "throttled", "too many responses are buffered for slow clients", {"limit": "buffered"}
    )


def _no_route(request: Request, methods: dict[bytes, Route] | None) -> Response:
    if methods is None:
        response = error_response(
            "not_found", "this path does not exist; GET /v0/openapi.json lists all paths"
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
    """Whether an Accept or Accept-Encoding header lists this name with a weight above 0."""
    accepted = accepted.lower()
    if name not in accepted:
        return False
    for part in accepted.split(b","):
        listed, *parameters = part.replace(b" ", b"").replace(b"\t", b"").split(b";")
        if listed == name:
            return not any(each.startswith(b"q=") and not each[2:].strip(b".0") for each in parameters)
    return False


def gunzip(body: Body, bytes_max: int) -> memoryview | None:
    """The decompressed body, at most one byte longer than `bytes_max`; None if it is not valid gzip, or truncated.

    It may have several members, like the output of `cat a.gz b.gz`; RFC 1952, 2.2.
    """
    decoded = bytearray()
    unzip, members, at, is_drained = zlib.decompressobj(31), 1, 0, True
    while at < len(body) or not is_drained:
        if unzip.eof:
            unzip, members = zlib.decompressobj(31), members + 1
        # In parts, because zlib copies the input after the end of a member.
        part = body[at : at + GUNZIP_BYTES]
        try:
            output = unzip.decompress(part, min(GUNZIP_SLICE, bytes_max + 1 - len(decoded)))
        except zlib.error:
            return None
        decoded += output
        if len(decoded) > bytes_max:
            break
        if members > GUNZIP_MEMBERS_MAX:
            return None
        at += len(part) - len(unzip.unused_data) - len(unzip.unconsumed_tail)
        is_drained = unzip.eof or len(output) < GUNZIP_SLICE  # otherwise zlib may have more output
    return memoryview(decoded) if unzip.eof or len(decoded) > bytes_max else None
