"""Queues and consumers: what each call asks, and what its answer is. One function for both clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias, Unpack

import msgspec

from topics.client import flows
from topics.client.answers import (
    Claimed,
    Consumer,
    ConsumerDeleted,
    ConsumerList,
    ConsumerOptions,
    ConsumerReset,
    Job,
    Settled,
    SettledPart,
    own,
)
from topics.client.calls import When, as_ms, check_names, topic_path
from topics.client.flows import Core, Flow, Request, json_request
from topics.client.sources import Pages, Source
from topics.client.tracing import begun_ns, received

SEQS_MAX = 1000  # of one request

Jobs: TypeAlias = Job | Iterable[Job]


def consumer_path(topic: str, consumer: str, *below: str) -> str:
    return topic_path(topic, "consumers", flows.quoted(consumer), *below)


def leased(topic: str, *seqs: int, node: str, consumer: str | None = None) -> list[Job]:
    """Jobs of which only seq and holder are known, for `ack` and the others: whichever lease the node has is meant."""
    return [Job(topic=topic, seq=seq, ts=0, holder=node, consumer=consumer) for seq in seqs]


# -- handing out -------------------------------------------------------------------------------------------


def claim(
    core: Core,
    queue: str,
    max: int = 1,
    *,
    wait_ms: int = 0,
    lease_ms: int | None = None,
    node: str | None = None,
) -> Flow[Claimed]:
    """Take up to `max` jobs under leases; with `wait_ms` wait for one when there is none."""
    body = {"node": node or core.node, "max": max, "wait_ms": wait_ms, "lease_ms": lease_ms}
    return _hand_out(
        core, json_request("POST", topic_path(queue, "claim"), body, wait_ms / 1000), body["node"]
    )


def fetch(
    core: Core,
    topic: str,
    consumer: str,
    max: int = 1,
    *,
    wait_ms: int = 0,
    max_bytes: int = 0,
    lease_ms: int | None = None,
    node: str | None = None,
) -> Flow[Claimed]:
    """Take up to `max` records of a consumer; with `wait_ms` wait for one when there is none."""
    body = {
        "node": node or core.node,
        "max": max,
        "wait_ms": wait_ms,
        "max_bytes": max_bytes,
        "lease_ms": lease_ms,
    }
    path = consumer_path(topic, consumer, "fetch")
    return _hand_out(core, json_request("POST", path, body, wait_ms / 1000), body["node"])


def _hand_out(core: Core, request: Request, node: Any) -> Flow[Claimed]:
    since_ns = begun_ns()
    claimed = yield from core.call(request, Claimed)
    hold(claimed.topic, claimed.consumer, node, claimed.jobs)
    received(core, claimed.topic, claimed.jobs, since_ns)
    if claimed.tombstone is not None:
        claimed.tombstone.topic, claimed.tombstone.consumer = claimed.topic, claimed.consumer
    return claimed


def hold(topic: str, consumer: str | None, node: str, jobs: list[Job]) -> None:
    """Tell jobs whose they are."""
    own(topic, jobs)
    for job in jobs:
        job.consumer, job.holder = consumer, node


# -- settling ----------------------------------------------------------------------------------------------


def ack(core: Core, jobs: Jobs) -> Flow[Settled]:
    """These are done. Those in `skipped` were not under this lease any more, or an attempt whose answer was lost has acked them."""
    return _settle(core, "ack", jobs)


def nack(
    core: Core,
    jobs: Jobs,
    *,
    delay_ms: int = 0,
    kind: Literal["retry", "release", "dead"] = "retry",
    reason: str = "",
) -> Flow[Settled]:
    """These are not done: hand them out again, after a while, without counting this delivery (`release`), or never (`dead`)."""
    return _settle(core, "nack", jobs, delay_ms=delay_ms, kind=kind, reason=reason)


def extend(core: Core, jobs: Jobs, lease_ms: int) -> Flow[Settled]:
    """These take longer: their leases end so long from now. `deadlines` has when."""
    return _settle(core, "extend", jobs, lease_ms=lease_ms)


def term(core: Core, jobs: Jobs, *, reason: str = "") -> Flow[Settled]:
    """Records of a consumer that are never to be handed out again."""
    return _settle(core, "term", jobs, reason=reason)


def _settle(core: Core, action: str, jobs: Jobs, **said: Any) -> Flow[Settled]:
    total = Settled()
    for group in _groups([jobs] if isinstance(jobs, Job) else jobs):
        first = group[0]
        body = {
            "node": first.holder or core.node,
            "seqs": [job.seq for job in group],
            "lease_ids": [job.lease_id for job in group],
            **said,
        }
        path = (
            topic_path(first.topic, action)
            if first.consumer is None
            else consumer_path(first.topic, first.consumer, action)
        )
        part = yield from core.call(json_request("POST", path, body), SettledPart)
        total.done += part.acked + part.nacked + part.extended + part.termed
        total.skipped += part.skipped
        total.deadlines |= part.deadlines
        total.ready, total.in_flight = part.ready, part.in_flight
    return total


def _groups(jobs: Iterable[Job]) -> Iterator[list[Job]]:
    """Jobs by whom they are of and who holds them, as many as fit in a request."""
    found: dict[tuple[str, str | None, str], list[Job]] = {}
    for job in jobs:
        found.setdefault((job.topic, job.consumer, job.holder), []).append(job)
    for group in found.values():
        for i in range(0, len(group), SEQS_MAX):
            yield group[i : i + SEQS_MAX]


# -- consumers ---------------------------------------------------------------------------------------------


def create_consumer(
    core: Core, topic: str, consumer: str, **config: Unpack[ConsumerOptions]
) -> Flow[Consumer]:
    """Create a consumer, or replace its whole configuration: what is left out returns to its default. It keeps its place."""
    check_names(config, ConsumerOptions)
    request = Request("PUT", consumer_path(topic, consumer), msgspec.json.encode(config), flows.JSON)
    return core.call(request, Consumer)


def get_consumer(core: Core, topic: str, consumer: str) -> Flow[Consumer]:
    """Configuration and state."""
    return core.call(flows.get(consumer_path(topic, consumer)), Consumer)


def consumers(core: Core, topic: str, *, page_size: int = 1000) -> Source[Consumer]:
    """All consumers of a topic in the order of their names."""

    def page(cursor: str | None) -> Flow[tuple[list[Consumer], str | None]]:
        request = flows.get(topic_path(topic, "consumers"), page_size=page_size, cursor=cursor)
        answer = yield from core.call(request, ConsumerList)
        return answer.consumers, answer.next_cursor

    return Pages(page)


def delete_consumer(core: Core, topic: str, consumer: str) -> Flow[ConsumerDeleted]:
    """Remove a consumer with its place. `deleted` is false when there was none."""
    return core.call(flows.delete(consumer_path(topic, consumer)), ConsumerDeleted)


def pause_consumer(core: Core, topic: str, consumer: str, *, until: When | None = None) -> Flow[Consumer]:
    """Nothing is handed out until then, or until somebody resumes it."""
    body = {"until_ts": 0 if until is None else as_ms(core, until)}
    return core.call(json_request("POST", consumer_path(topic, consumer, "pause"), body), Consumer)


def resume_consumer(core: Core, topic: str, consumer: str) -> Flow[Consumer]:
    """End a pause."""
    return core.call(json_request("POST", consumer_path(topic, consumer, "resume"), {}), Consumer)


def reset_consumer(
    core: Core,
    topic: str,
    consumer: str,
    to: Literal["start", "end"] | None = None,
    *,
    seq: int | None = None,
    since: When | None = None,
    dry_run: bool = False,
    epoch: str | None = None,
) -> Flow[ConsumerReset]:
    """Begin again elsewhere: at the start, at the end, at a seq, or with what was written since a time. One of the three.
    `epoch`: of the seq; WrongEpoch when it is another record now.
    """
    if (to is not None) + (seq is not None) + (since is not None) != 1:
        raise ValueError("say one of to, seq and since")
    where: Any = to
    if seq is not None:
        where = {"seq": seq}
    elif since is not None:
        where = {"ts": max(0, as_ms(core, since))}
    body = {"to": where, "dry_run": dry_run, "epoch": epoch}
    return core.call(json_request("POST", consumer_path(topic, consumer, "reset"), body), ConsumerReset)
