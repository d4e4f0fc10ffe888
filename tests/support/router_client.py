"""Client helpers for routers."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from tests.support.contract import Json, ok
from tests.support.server import Reply, Server

DEFAULTS: Json = {
    "preserve_node": True, "preserve_tag": True, "filter": None, "allow_cycle": False, "guarantee": "at_least_once",
}  # fmt: skip


def path_of(router: str) -> str:
    return f"/v0/routers/{quote(router, safe='')}"


def put(server: Server, router: str, source: str, dest: str, **fields: Any) -> Reply:
    return server.put(path_of(router), {"source": source, "dest": dest, **fields})


def make(server: Server, router: str, source: str, dest: str, **fields: Any) -> Json:
    return ok(put(server, router, source, dest, **fields), 201)


def look(server: Server, router: str) -> Json:
    return ok(server.get(path_of(router)))


def listed(server: Server, query: str = "") -> list[Json]:
    return list(ok(server.get(f"/v0/routers?{query}"))["routers"])


def names(server: Server, query: str = "") -> list[str]:
    return [row["router"] for row in listed(server, query)]


def topics_like(server: Server, prefix: str) -> list[str]:
    rows = ok(server.get(f"/v0/topics?prefix={prefix}"))["topics"]
    return [row["topic"] for row in rows]


def write_tagged(server: Server, topic: str, *tags: str | None) -> None:
    """Write one record per tag, with the tag as its data."""
    records = [{"data": tag, **({"tag": tag} if tag is not None else {})} for tag in tags]
    reply = server.post(f"/v0/topics/{topic}", {"records": records})
    assert reply.status in (200, 201), reply.body
