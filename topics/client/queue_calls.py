"""Calls for queues and consumers, shared by both clients."""

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
    fill_in,
)
from topics.client.calls import When, as_ms, check_names, topic_path
from topics.client.flows import Core, Flow, Request, json_request
from topics.client.sources import Pages, Source
from topics.client.tracing import span_start_ns, trace_receive

SEQS_MAX = 1000  # per request

Jobs: TypeAlias = Job | Iterable[Job]


def consumer_path(topic: str, consumer: str, *suffix: str) -> str:
    return topic_path(topic, "consumers", flows.quoted(consumer), *suffix)


def leased(topic: str, *seqs: int, node: str, consumer: str | None = None) -> list[Job]:
    """Jobs for `ack`, `nack` … when only seqs and holder are known: matches any lease that the node holds."""
    return [Job(topic=topic, seq=seq, ts=0, holder=node, consumer=consumer) for seq in seqs]


# -- claiming ----------------------------------------------------------------------------------------------


def claim(
    core: Core,
    queue: str,
    max: int = 1,
    *,
    wait_ms: int = 0,
    lease_ms: int | None = None,
    node: str | None = None,
) -> Flow[Claimed]:
    """Lease up to `max` jobs; `wait_ms` waits for one if there is none."""
    body = {"node": node or core.node, "max": max, "wait_ms": wait_ms, "lease_ms": lease_ms}
    return _claim(core, json_request("POST", topic_path(queue, "claim"), body, wait_ms / 1000), body["node"])


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
    """Lease up to `max` records of a consumer; `wait_ms` waits for one if there is none."""
    body = {
        "node": node or core.node,
        "max": max,
        "wait_ms": wait_ms,
        "max_bytes": max_bytes,
        "lease_ms": lease_ms,
    }
    path = consumer_path(topic, consumer, "fetch")
    return _claim(core, json_request("POST", path, body, wait_ms / 1000), body["node"])


def _claim(core: Core, request: Request, node: Any) -> Flow[Claimed]:
    since_ns = span_start_ns()
    claimed = yield from core.call(request, Claimed)
    fill_in_holder(claimed.topic, claimed.consumer, node, claimed.jobs)
    trace_receive(core, claimed.topic, claimed.jobs, since_ns)
    if claimed.tombstone is not None:
        claimed.tombstone.topic, claimed.tombstone.consumer = claimed.topic, claimed.consumer
    return claimed


def fill_in_holder(topic: str, consumer: str | None, node: str, jobs: list[Job]) -> None:
    """Fill in topic, consumer and holder of decoded jobs."""
    fill_in(topic, jobs)
    for job in jobs:
        job.consumer, job.holder = consumer, node


# -- settling ----------------------------------------------------------------------------------------------


def ack(core: Core, jobs: Jobs) -> Flow[Settled]:
    """Acknowledge jobs as done. `skipped`: their leases were lost, or an earlier attempt, whose response was lost, acked them."""
    return _settle(core, "ack", jobs)


def nack(
    core: Core,
    jobs: Jobs,
    *,
    delay_ms: int = 0,
    kind: Literal["retry", "release", "dead"] = "retry",
    reason: str = "",
) -> Flow[Settled]:
    """Return jobs: for redelivery after `delay_ms`, without counting this delivery (`release`), or as dead letters (`dead`)."""
    return _settle(core, "nack", jobs, delay_ms=delay_ms, kind=kind, reason=reason)


def extend(core: Core, jobs: Jobs, lease_ms: int) -> Flow[Settled]:
    """Extend leases to `lease_ms` from now. `deadlines` has the new ends."""
    return _settle(core, "extend", jobs, lease_ms=lease_ms)


def term(core: Core, jobs: Jobs, *, reason: str = "") -> Flow[Settled]:
    """Never deliver these records of a consumer again."""
    return _settle(core, "term", jobs, reason=reason)


def _settle(core: Core, action: str, jobs: Jobs, **fields: Any) -> Flow[Settled]:
    total = Settled()
    for group in _groups([jobs] if isinstance(jobs, Job) else jobs):
        first = group[0]
        body = {
            "node": first.holder or core.node,
            "seqs": [job.seq for job in group],
            "lease_ids": [job.lease_id for job in group],
            **fields,
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
    """Jobs grouped by topic, consumer and holder, in chunks that fit into a request."""
    groups: dict[tuple[str, str | None, str], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.topic, job.consumer, job.holder), []).append(job)
    for group in groups.values():
        for i in range(0, len(group), SEQS_MAX):
            yield group[i : i + SEQS_MAX]


# -- consumers ---------------------------------------------------------------------------------------------


def create_consumer(
    core: Core, topic: str, consumer: str, **config: Unpack[ConsumerOptions]
) -> Flow[Consumer]:
    """Create a consumer, or replace the configuration of an existing one: omitted settings get their defaults. It keeps its position."""
    check_names(config, ConsumerOptions)
    request = Request("PUT", consumer_path(topic, consumer), msgspec.json.encode(config), flows.JSON)
    return core.call(request, Consumer)


def get_consumer(core: Core, topic: str, consumer: str) -> Flow[Consumer]:
    """Get the configuration and state of a consumer."""
    return core.call(flows.get(consumer_path(topic, consumer)), Consumer)


def consumers(core: Core, topic: str, *, page_size: int = 1000) -> Source[Consumer]:
    """List the consumers of a topic by name."""

    def page(cursor: str | None) -> Flow[tuple[list[Consumer], str | None]]:
        request = flows.get(topic_path(topic, "consumers"), page_size=page_size, cursor=cursor)
        answer = yield from core.call(request, ConsumerList)
        return answer.consumers, answer.next_cursor

    return Pages(page)


def delete_consumer(core: Core, topic: str, consumer: str) -> Flow[ConsumerDeleted]:
    """Delete a consumer and its position. `deleted` is False if it did not exist."""
    return core.call(flows.delete(consumer_path(topic, consumer)), ConsumerDeleted)


def pause_consumer(core: Core, topic: str, consumer: str, *, until: When | None = None) -> Flow[Consumer]:
    """Stop deliveries until this time, or until it is resumed."""
    body = {"until_ts": 0 if until is None else as_ms(core, until)}
    return core.call(json_request("POST", consumer_path(topic, consumer, "pause"), body), Consumer)


def resume_consumer(core: Core, topic: str, consumer: str) -> Flow[Consumer]:
    """Resume a paused consumer."""
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
    """Move a consumer: to the start or end of the topic, to a seq, or to a time. Give exactly one of them.

    `epoch`: the epoch of the seq; raises WrongEpoch if the seq now belongs to another record.
    """
    if (to is not None) + (seq is not None) + (since is not None) != 1:
        raise ValueError("give exactly one of to, seq and since")
    target: Any = to
    if seq is not None:
        target = {"seq": seq}
    elif since is not None:
        target = {"ts": max(0, as_ms(core, since))}
    body = {"to": target, "dry_run": dry_run, "epoch": epoch}
    return core.call(json_request("POST", consumer_path(topic, consumer, "reset"), body), ConsumerReset)
