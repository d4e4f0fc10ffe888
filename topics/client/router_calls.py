"""Calls for routers, which copy new records of one topic to another."""

from __future__ import annotations

from typing import Literal

from topics.client import flows
from topics.client.answers import Router, RouterDeleted, RouterList, RouterRow
from topics.client.flows import Core, Flow, json_request
from topics.client.sources import Pages, Source


def router_path(router: str) -> str:
    return f"/v0/routers/{flows.quoted(router)}"


def create_router(
    core: Core,
    router: str,
    source: str,
    dest: str,
    *,
    filter: str | list[str | list[str]] | None = None,
    preserve_node: bool = True,
    preserve_tag: bool = True,
    create_dest: bool = True,
    allow_cycle: bool = False,
    guarantee: Literal["at_least_once", "exactly_once"] = "at_least_once",
) -> Flow[Router]:
    """Create or change a router, which copies new records of `source`, a topic or a pattern, to `dest`."""
    body = {
        "source": source,
        "dest": dest,
        "filter": filter,
        "preserve_node": preserve_node,
        "preserve_tag": preserve_tag,
        "create_dest": create_dest,
        "allow_cycle": allow_cycle,
        "guarantee": guarantee,
    }
    return core.call(json_request("PUT", router_path(router), body), Router)


def get_router(core: Core, router: str) -> Flow[Router]:
    """Get a router, and how many copies it has made, including those of everything written before this call."""
    return core.call(flows.get(router_path(router)), Router)


def routers(
    core: Core,
    prefix: str = "",
    *,
    source: str | None = None,
    dest: str | None = None,
    page_size: int = 1000,
) -> Source[RouterRow]:
    """List routers by name: all, those that start with `prefix`, or those with this source or dest."""

    def page(cursor: str | None) -> Flow[tuple[list[RouterRow], str | None]]:
        request = flows.get(
            "/v0/routers", prefix=prefix or None, source=source, dest=dest, page_size=page_size, cursor=cursor
        )
        answer = yield from core.call(request, RouterList)
        return answer.routers, answer.next_cursor

    return Pages(page)


def delete_router(core: Core, router: str) -> Flow[RouterDeleted]:
    """Delete a router. Records it has copied stay. `deleted` is False if it did not exist."""
    return core.call(flows.delete(router_path(router)), RouterDeleted)
