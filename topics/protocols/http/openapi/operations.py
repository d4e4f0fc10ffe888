"""Helpers that build the operations of the OpenAPI document."""

from __future__ import annotations

from topics.api import limits
from topics.protocols.http.openapi.schemas import REF, TOPIC_PATTERN, Json

JSON_TYPE, LINES_TYPE = "application/json", "application/x-ndjson"
EVENTS_TYPE = "text/event-stream"


def header(schema: Json, description: str, *, required: bool = False) -> Json:
    return {"schema": schema, "description": description, "required": required}


ANY_ROUTE = (400, 401, 403, 408, 421, 431, 500)
KEYED = (*ANY_ROUTE, 429)
WITH_TOPIC = (*KEYED, 404, 503)
WITH_BODY = (413, 415)

BOOLEAN: Json = {"type": "boolean"}
TEXT: Json = {"type": "string"}
STRICT: Json = {
    "name": "Topics-Strict",
    "in": "header",
    "schema": TEXT,
    "description": "`1`: unknown fields in the body are an error (400 `invalid_request`) instead of being ignored.",
}


def operation(
    operation_id: str,
    tag: str,
    summary: str,
    *,
    answers: Json,
    errors: tuple[int, ...],
    scopes: list[str] | None = None,
    description: str = "",
    parameters: list[Json] | None = None,
    body: Json | None = None,
) -> Json:
    made: Json = {"operationId": operation_id, "tags": [tag], "summary": summary}
    if description:
        made["description"] = description
    if scopes:
        made["security"] = [{}, {"bearerAuth": scopes}]
    if body:
        made["requestBody"] = body
        if body["content"][JSON_TYPE][
            "schema"
        ]:  # otherwise any value is accepted, with fields of the client's choice
            parameters = [*(parameters or []), STRICT]
    if parameters:
        made["parameters"] = parameters
    refused = {
        str(status): {"$ref": f"#/components/responses/Error{status}"} for status in sorted(set(errors))
    }
    made["responses"] = answers | refused
    return made


def json_answer(name: str, description: str) -> Json:
    return {"description": description, "content": {JSON_TYPE: content_of(name)}}


def content_of(name: str) -> Json:
    return {"schema": {"$ref": REF.format(name=name)}}


def query(name: str, schema: Json, description: str) -> Json:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def flag(name: str, default: bool, description: str) -> Json:
    return query(name, BOOLEAN | {"default": default}, description)


def page_of(of: str) -> list[Json]:
    size: Json = {"type": "integer", "minimum": 1, "maximum": limits.LIST_PAGE_MAX, "default": 100}
    return [
        query(
            "page_size", size, f"Maximum number of {of} on the page; values outside the range are clamped."
        ),
        query("cursor", TEXT, "`next_cursor` of the previous page."),
    ]


def topic_name(*, creates: bool = False) -> Json:
    schema: Json = TEXT | ({"pattern": TOPIC_PATTERN} if creates else {"minLength": 1})
    text = "Name of the topic." if creates else "Name of the topic; an invalid name is not found (404)."
    return {"name": "topic", "in": "path", "required": True, "schema": schema, "description": text}
