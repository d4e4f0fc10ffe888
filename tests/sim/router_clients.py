"""Requests about routers in a simulated run: which routers exist, and what clients ask.

Source, dest and what a router preserves depend on its name; only what a `PUT` may change varies. So the checker knows
what a copy must look like, whichever `PUT` of that name was in force.
"""

from __future__ import annotations

from random import Random
from typing import Any
from urllib.parse import urlencode

from tests.sim.actors import json_request
from topics.protocols.http.exchange import Request

# Sources, all of them matched by a pattern, and dests. A topic begins with the first config.
FLOWING: dict[str, list[dict[str, Any]]] = {
    "in.fsync": [{"durability": "fsync"}, {"durability": "fsync", "dedupe_node": False}],
    "in.disk": [{}, {"dedupe_node": False}],
    "in.memory": [{"durability": "memory"}],
    "in.ephemeral": [{"durability": "ephemeral"}],
    "in.capped": [{"durability": "fsync", "cap_records": 4}, {"durability": "fsync", "cap_records": 7}],
    "in.capped-disk": [{"cap_records": 5}, {"cap_bytes": 300}],
    "in.ttl": [{"durability": "fsync", "ttl_ms": 300}],
    "to.fsync": [{"durability": "fsync"}],
    "to.disk": [{}],
    "to.disk-too": [{}],
    "to.memory": [{"durability": "memory"}],
    "to.ephemeral": [{"durability": "ephemeral"}],
    "to.capped": [{"durability": "fsync", "cap_records": 6}, {"durability": "fsync"}],
    "to.reject": [
        {"durability": "fsync", "discard": "reject", "cap_records": 9},
        {"durability": "fsync", "discard": "reject", "cap_records": 14},
    ],
    "to.reject-disk": [{"discard": "reject", "cap_bytes": 600}, {"discard": "reject", "cap_bytes": 1200}],
    "to.trimmed": [{"durability": "fsync"}],
    "to.trimmed-disk": [{}],
    "to.bare": [{"durability": "fsync"}],
    "to.epochs": [{"durability": "fsync"}],
    "to.epochs-disk": [{}],
    "to.exact": [{"durability": "fsync"}],
    "to.all": [{"durability": "fsync"}],
    "end.fsync": [{"durability": "fsync"}],
    "end.end": [{}],
    "end.last": [{}],
    "ring.a": [{"durability": "fsync"}],
    "ring.b": [{}],
}


def _way(source: str, dest: str, *changes: dict[str, Any], **fixed: Any) -> list[dict[str, Any]]:
    return [{"source": source, "dest": dest, **fixed, **change} for change in changes or ({},)]


_EXACTLY = {"guarantee": "exactly_once"}

# Everything that a `PUT` of a name may ask for.
ROUTERS: dict[str, list[dict[str, Any]]] = {
    "plain": _way("in.fsync", "to.fsync"),
    "twin": _way("in.fsync", "to.fsync", {"filter": "b*"}, {"filter": ["tag", "Eq", "a.1"]}),
    "weaker": _way("in.fsync", "to.disk", {}, {"filter": "a.*"}),
    "stronger": _way("in.disk", "to.exact", {}, _EXACTLY),
    "as-weak": _way("in.disk", "to.disk-too", {}, {"preserve_node": True}, _EXACTLY),
    "to-memory": _way("in.fsync", "to.memory"),
    "to-nothing": _way("in.disk", "to.ephemeral"),
    "capped": _way("in.fsync", "to.capped"),
    "full": _way("in.fsync", "to.reject", {}, {"filter": "*"}),
    "full-disk": _way("in.capped-disk", "to.reject-disk"),
    "trimmed": _way("in.capped", "to.trimmed"),
    "trimmed-disk": _way("in.capped-disk", "to.trimmed-disk", {}, {"filter": "a.*"}),
    "bare": _way("in.ttl", "to.bare", {"create_dest": False}, {}, preserve_tag=False, preserve_node=False),
    "epochs": _way("in.memory", "to.epochs", {}, _EXACTLY),
    "epochs-disk": _way("in.ephemeral", "to.epochs-disk"),
    "all": _way("in.*", "to.all", {}, {"filter": [["tag", "Subject", "a.*"], "b.>"]}, preserve_node=False),
    "chain": _way("to.fsync", "end.fsync", {}, _EXACTLY),
    "chain-disk": _way("to.disk", "end.end"),
    "chain-end": _way("end.fsync", "end.last", {}, {"filter": "a.*"}),
    "ring": _way("ring.a", "ring.b", allow_cycle=True),
    "ring-back": _way("ring.b", "ring.a", {}, {"allow_cycle": True}),
    # Routers that are refused when the others exist.
    "fan-in": _way("in.disk", "to.fsync"),
    "back": _way("end.fsync", "in.fsync"),
    "repointed": [*_way("in.fsync", "to.capped"), *_way("in.fsync", "to.disk")],
}
RINGS = ("ring", "ring-back")
FROM_MEMORY = ("epochs", "epochs-disk")  # after a crash their sources may restart below what was copied
KINDS = ("put_router", "router", "routers", "drop_router")


def choose(rng: Random) -> list[str]:
    """Some routers for a run, with those that depend on them."""
    names = [name for name in ROUTERS if name not in RINGS]
    chosen = rng.sample(names, rng.choice((2, 3, 5, 9)))
    if rng.random() < 0.15:
        chosen += RINGS
    if "chain-end" in chosen:
        chosen.append("chain")
    for name, needed in (("chain", "plain"), ("chain-disk", "weaker"), ("twin", "plain")):
        if name in chosen:
            chosen.append(needed)
    return list(dict.fromkeys(chosen))


def topics_of(names: list[str]) -> tuple[list[str], list[str]]:
    """Sources and dests of these routers."""
    ways = [way for name in names for way in ROUTERS[name]]
    sources = [way["source"] for way in ways if "*" not in way["source"]]
    if "all" in names:
        sources += [name for name in FLOWING if name.startswith("in.")]
    return list(dict.fromkeys(sources)), list(dict.fromkeys(way["dest"] for way in ways))


def dests_of(source: str, names: list[str]) -> list[str]:
    """The topics to which these routers may copy a topic."""
    return [
        way["dest"]
        for name in names
        for way in ROUTERS[name][:1]
        if way["source"] == source or (way["source"] == "in.*" and source.startswith("in."))
    ]


_METHODS = {"put_router": b"PUT", "router": b"GET", "routers": b"GET", "drop_router": b"DELETE"}


def make_router_call(kind: str, name: str, request: dict[str, Any]) -> Request:
    path = "/v0/routers" if kind == "routers" else f"/v0/routers/{name}"
    query = urlencode(request).encode() if kind == "routers" else b""
    return json_request(_METHODS[kind], path, request if kind == "put_router" else None, query)
