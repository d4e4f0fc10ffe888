"""Routers in the OpenAPI document."""

from __future__ import annotations

from topics.protocols.http.openapi.operations import (
    JSON_TYPE,
    KEYED,
    TEXT,
    WITH_BODY,
    WITH_TOPIC,
    content_of,
    json_answer,
    operation,
    page_of,
    query,
)
from topics.protocols.http.openapi.schemas import ROUTER_PATTERN, Json


def forward_paths() -> Json:
    return {
        "/v0/routers": {"get": _list()},
        "/v0/routers/{router}": {"put": _put(), "get": _get(), "delete": _drop()},
    }


def _router_name(*, creates: bool = False) -> Json:
    schema: Json = TEXT | ({"pattern": ROUTER_PATTERN} if creates else {"minLength": 1})
    text = "Name of the router, often `<source>-><dest>`."
    return {"name": "router", "in": "path", "required": True, "schema": schema, "description": text}


def _list() -> Json:
    return operation(
        "list_routers",
        "routers",
        "List routers",
        scopes=["read"],
        description="Ordered by name. A key with prefixes sees only routers whose name, source and dest all have one of its prefixes.",
        parameters=[
            query("prefix", TEXT, "Only names that start with this."),
            query("source", TEXT, "Only routers with exactly this source."),
            query("dest", TEXT, "Only routers with exactly this dest."),
            *page_of("routers"),
        ],
        answers={"200": json_answer("RouterList", "A page of routers.")},
        errors=(*KEYED, 503),
    )


def _put() -> Json:
    return operation(
        "put_router",
        "routers",
        "Copy the records written to a topic into another topic",
        scopes=["admin"],
        description="Only records written from now on are copied. Omitted fields have their defaults. An existing router keeps its position and "
        "its total; its source and dest cannot change. Topics that do not exist are created.",
        parameters=[_router_name(creates=True)],
        body={"required": True, "content": {JSON_TYPE: content_of("ForwardBody")}},
        answers={
            "200": json_answer("RouterPut", "The router existed; this is its new configuration."),
            "201": json_answer("RouterPut", "Created."),
        },
        errors=(*WITH_TOPIC, *WITH_BODY, 409),
    )


def _get() -> Json:
    return operation(
        "get_router",
        "routers",
        "Get a router and its number of copies",
        scopes=["read"],
        description="Records written to the source before this call are copied and counted first.",
        parameters=[_router_name()],
        answers={"200": json_answer("RouterState", "The router.")},
        errors=WITH_TOPIC,
    )


def _drop() -> Json:
    return operation(
        "delete_router",
        "routers",
        "Delete a router",
        scopes=["delete"],
        description="Existing copies stay. If the router does not exist, `deleted` is false.",
        parameters=[_router_name()],
        answers={"200": json_answer("RouterDeleted", "Deleted.")},
        errors=(*KEYED, 503),
    )
