"""Calls for topics, records and the server, shared by both clients."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import msgspec

from topics.client import flows
from topics.client.answers import (
    Deleted,
    DeletedRange,
    DeletedRanges,
    Health,
    LastRecords,
    Page,
    Readiness,
    Record,
    TagCount,
    TagList,
    Topic,
    TopicDeleted,
    TopicList,
    TopicOptions,
    TopicPut,
    TopicRow,
    Written,
    fill_in,
)
from topics.client.errors import UnknownSetting
from topics.client.flows import Core, Flow, Repeat, Request, json_request
from topics.client.patterns import matches, prefix_of
from topics.client.record_encoding import NewRecord, body_of, encode
from topics.client.sources import OnLost, Pages, RecordPages, Source
from topics.client.tracing import publish

Predicate = str | Sequence[str]
When = int | datetime.datetime | datetime.timedelta


def topic_path(topic: str, *suffix: str) -> str:
    return "/".join(["/v0/topics", flows.quoted(topic), *suffix])


def as_ms(core: Core, when: When) -> int:
    """Milliseconds since the epoch, from the same, a datetime (local time if naive), or a timedelta ago."""
    match when:
        case datetime.timedelta():
            return core.wall_ms() - round(when.total_seconds() * 1000)
        case datetime.datetime():
            return round(when.timestamp() * 1000)
        case _:
            return when


def check_names(given: Mapping[str, Any], options: Any) -> None:
    """Reject misspelt settings, with a list of the valid ones."""
    known: frozenset[str] = options.__optional_keys__
    if unknown := sorted(given.keys() - known):
        names = ", ".join(map(repr, unknown))
        raise UnknownSetting(f"no such setting: {names}; valid ones are {', '.join(sorted(known))}")


# -- topics ------------------------------------------------------------------------------------------------


def create_topic(core: Core, topic: str, **config: Unpack[TopicOptions]) -> Flow[TopicPut]:
    """Create a topic, or replace the configuration of an existing one: omitted settings get their defaults."""
    check_names(config, TopicOptions)
    return core.call(Request("PUT", topic_path(topic), msgspec.json.encode(config), flows.JSON), TopicPut)


def update_topic(core: Core, topic: str, **changes: Unpack[TopicOptions]) -> Flow[TopicPut]:
    """Change only these settings. Takes two requests; a concurrent change between them is overwritten."""
    check_names(changes, TopicOptions)
    # Decoded as a dict, to keep settings that this version of the client does not know.
    state = yield from core.call(flows.get(topic_path(topic), touch=False), dict[str, Any])
    config: dict[str, Any] = state["config"]
    if "durable" in changes and "durability" not in changes:
        del config["durability"]
    config |= changes
    request = Request("PUT", topic_path(topic), msgspec.json.encode(config), flows.JSON)
    return (yield from core.call(request, TopicPut))


def get_topic(core: Core, topic: str, *, touch: bool = True) -> Flow[Topic]:
    """Get the state and configuration of a topic. `touch=False`: does not count as a read of it."""
    return core.call(flows.get(topic_path(topic), touch=None if touch else False), Topic)


def topics(
    core: Core, prefix: str = "", *, pattern: str | None = None, page_size: int = 1000
) -> Source[TopicRow]:
    """List topics by name: all, those that start with `prefix`, or those that match `pattern` (`orders.>`)."""
    if pattern is not None:
        prefix = max(prefix, prefix_of(pattern), key=len)

    def fetch(cursor: str | None) -> Flow[tuple[list[TopicRow], str | None]]:
        request = flows.get("/v0/topics", prefix=prefix or None, page_size=page_size, cursor=cursor)
        page = yield from core.call(request, TopicList)
        rows = page.topics if pattern is None else [row for row in page.topics if matches(pattern, row.topic)]
        return rows, page.next_cursor

    return Pages(fetch)


def delete_topic(core: Core, topic: str, *, if_empty: bool = False) -> Flow[TopicDeleted]:
    """Delete a topic and all its records. `deleted` is False if it did not exist."""
    return core.call(flows.delete(topic_path(topic), if_empty=True if if_empty else None), TopicDeleted)


# -- writing -----------------------------------------------------------------------------------------------


def write(
    core: Core,
    topic: str,
    data: Any,
    *,
    tag: str | None = None,
    node: str | None = None,
    meta: Mapping[str, Any] | None = None,
    ttl_ms: int = 0,
    idempotency_key: str | None = None,
    idempotent: bool = True,
    create: bool | None = None,
    config: TopicOptions | None = None,
    if_last_seq: int | None = None,
    if_tag_last_seq: tuple[str, int] | None = None,
    disable_backpressure: bool = False,
    include_epoch: bool = False,
) -> Flow[Written]:
    """Write one record: any JSON value, or bytes. For the other arguments see `write_many`."""
    return write_many(
        core,
        topic,
        [NewRecord(data, tag=tag, node=node, meta=meta, ttl_ms=ttl_ms)],
        idempotency_key=idempotency_key,
        idempotent=idempotent,
        create=create,
        config=config,
        if_last_seq=if_last_seq,
        if_tag_last_seq=if_tag_last_seq,
        disable_backpressure=disable_backpressure,
        include_epoch=include_epoch,
    )


def write_many(
    core: Core,
    topic: str,
    records: Iterable[Any],
    *,
    node: str | None = None,
    idempotency_key: str | None = None,
    idempotent: bool = True,
    create: bool | None = None,
    config: TopicOptions | None = None,
    if_last_seq: int | None = None,
    if_tag_last_seq: tuple[str, int] | None = None,
    disable_backpressure: bool = False,
    return_seqs: bool = False,
    include_epoch: bool = False,
) -> Flow[Written]:
    """Write all of these records or none, at most 10 000: `NewRecord`s, or plain data.

    By default the client generates an idempotency key, so that it can safely retry when a response is lost. With
    `idempotent=False` it does not, and the `outcome` of the error is "unknown" in that case.
    """
    fields: dict[str, Any] = {}
    if node is not None:
        fields["node"] = node
    if create is not None:
        fields["create"] = create
    if config is not None:
        fields["config"] = config
    if if_last_seq is not None:
        fields["if_last_seq"] = if_last_seq
    if if_tag_last_seq is not None:
        fields["if_tag_last_seq"] = {"tag": if_tag_last_seq[0], "seq": if_tag_last_seq[1]}
    if disable_backpressure:
        fields["disable_backpressure"] = True
    key = idempotency_key or (core.new_key() if idempotent else None)
    headers = flows.JSON
    if key is not None:
        # A header keeps the body free of anything but records, but takes only these characters.
        if key.isascii() and key.isprintable() and key == key.strip():
            headers = {**headers, "Idempotency-Key": key}
        else:
            fields["idempotency_key"] = key
    query = {"return_seqs": None if return_seqs else False, "include_epoch": include_epoch or None}
    path = flows.with_query(topic_path(topic), query)
    parts = [encode(record) for record in records]
    repeat = Repeat.IF_UNDONE if key is None else Repeat.SAFE
    return publish(core, topic, len(parts), Request("POST", path, body_of(parts, fields), headers), repeat)


# -- reading -----------------------------------------------------------------------------------------------


def read(
    core: Core,
    topic: str,
    from_seq: int = 0,
    *,
    limit: int = 0,
    since: When | None = None,
    tag: Predicate | None = None,
    not_from: str | Sequence[str] | None = None,
    wait_ms: int = 0,
    max_batch_bytes: int = 0,
    include_tags: bool = True,
    include_meta: bool = True,
    include_data: bool = True,
    epoch: str | None = None,
) -> Flow[Page]:
    """Read one page of records after `from_seq`, oldest first; `wait_ms` waits for one. `not_from` excludes nodes.

    `epoch`: the epoch of the page that `from_seq` was taken from.
    """
    body = {
        "from_seq": from_seq,
        "limit": limit,
        "from_ts": None if since is None else max(0, as_ms(core, since)),
        "tag": tag,
        "node": not_from,
        "wait_ms": wait_ms,
        "max_batch_bytes": max_batch_bytes,
        "include_tags": include_tags,
        "include_meta": include_meta,
        "include_data": include_data,
        "epoch": epoch,
        "include_epoch": True,
    }
    request = json_request("POST", topic_path(topic, "diff"), body, wait_ms / 1000)
    page = yield from core.call(request, Page)
    fill_in(topic, page.records)
    if page.tombstone is not None:
        page.tombstone.topic = topic
        page.tombstone.epoch = page.epoch
    return page


def records(
    core: Core,
    topic: str,
    from_seq: int | None = None,
    *,
    since: When | None = None,
    tag: Predicate | None = None,
    not_from: str | Sequence[str] | None = None,
    page_size: int = 1000,
    include_tags: bool = True,
    include_meta: bool = True,
    include_data: bool = True,
    on_lost: OnLost | None = None,
    epoch: str | None = None,
) -> Source[Record]:
    """Iterate over records up to the current end, page by page: from the oldest one, or after `from_seq`.

    Lost records raise RecordsLost, or call `on_lost`; either way iteration continues after the gap.
    `epoch`: the epoch of `from_seq`, from `epochs` of an earlier iteration.
    """
    from_ms = None if since is None else as_ms(core, since)

    def fetch(after: int, epoch: str | None) -> Flow[Page]:
        return read(
            core,
            topic,
            after,
            limit=page_size,
            since=from_ms,
            tag=tag,
            not_from=not_from,
            include_tags=include_tags,
            include_meta=include_meta,
            include_data=include_data,
            epoch=epoch,
        )

    return RecordPages(topic, fetch, from_seq, on_lost, epoch)


def last(
    core: Core, topic: str, *, tag: str | None = None, subject: str | None = None
) -> Flow[Record | None]:
    """Get the newest record: of all, of a tag (`eu.tea`) or tag prefix (`eu.*`), or of a tag pattern (`eu.>`)."""
    if tag is None and subject is None:
        return (yield from _newest(core, topic))
    request = flows.get(topic_path(topic, "last"), tag=tag, subject=subject)
    found = yield from core.call(request, LastRecords)
    fill_in(topic, found.records)
    return found.records[0] if found.records else None


def _newest(core: Core, topic: str) -> Flow[Record | None]:
    """The newest records may be deleted: search backwards in growing steps."""
    head_seq = (yield from get_topic(core, topic)).head_seq
    back = 1
    while True:
        begin = at = max(0, head_seq - back)
        newest: Record | None = None
        at_end = False
        while not at_end:
            page = yield from read(core, topic, at, limit=1000)
            if page.records:
                newest = page.records[-1]
            at, at_end = page.next_from_seq, page.caught_up
        if newest is not None or begin == 0:
            return newest
        back *= 16


def last_by_tag(
    core: Core, topic: str, *, tag: str | None = None, subject: str | None = None, page_size: int = 1000
) -> Source[Record]:
    """Iterate over the newest record of each matching tag, by default of every tag."""
    if tag is None and subject is None:
        tag = "*"

    def fetch(cursor: str | None) -> Flow[tuple[list[Record], str | None]]:
        request = flows.get(
            topic_path(topic, "last"), tag=tag, subject=subject, each=True, page_size=page_size, cursor=cursor
        )
        page = yield from core.call(request, LastRecords)
        fill_in(topic, page.records)
        return page.records, page.next_cursor

    return Pages(fetch)


def tags(core: Core, topic: str, prefix: str = "", *, page_size: int = 1000) -> Source[TagCount]:
    """List the tags of a topic in order, each with its number of records."""

    def fetch(cursor: str | None) -> Flow[tuple[list[TagCount], str | None]]:
        request = flows.get(
            topic_path(topic, "tags"), prefix=prefix or None, page_size=page_size, cursor=cursor
        )
        page = yield from core.call(request, TagList)
        return page.tags, page.next_cursor

    return Pages(fetch)


# -- deleting ----------------------------------------------------------------------------------------------


def delete(
    core: Core,
    topic: str,
    *,
    seqs: Sequence[int] | None = None,
    before_seq: int | None = None,
    match: Predicate | None = None,
    subject: str | None = None,
    keep: int | None = None,
    erase: bool = False,
) -> Flow[Deleted]:
    """Delete the records that match all given conditions: these seqs, before a seq, a tag (`match="eu.tea"`), a tag
    pattern (`subject="eu.>"`), all but the newest `keep`.

    `erase` also overwrites their payloads on disk before the call returns.
    """
    for name, value in (("match", match), ("subject", subject)):
        if isinstance(value, bytes | bytearray):  # would be encoded as base64, which is a different tag
            raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    body = {
        "seqs": seqs,
        "before_seq": before_seq,
        "match": match,
        "subject": subject,
        "keep": keep,
        "erase": erase or None,
    }
    return core.call(json_request("POST", topic_path(topic, "delete"), body), Deleted)


def purge(core: Core, topic: str, *, keep: int = 0, erase: bool = False) -> Flow[Deleted]:
    """Delete all records, or all but the newest `keep`. The topic stays, and its seqs continue."""
    return delete(core, topic, keep=keep, erase=erase)


def deleted_ranges(
    core: Core, topic: str, from_seq: int = 0, *, page_size: int = 1000
) -> Source[DeletedRange]:
    """Iterate over the ranges of deleted seqs after `from_seq`. A long range may be split."""

    def fetch(cursor: str | None) -> Flow[tuple[list[DeletedRange], str | None]]:
        request = flows.get(topic_path(topic, "deleted"), from_seq=cursor or from_seq, limit=page_size)
        page = yield from core.call(request, DeletedRanges)
        return page.ranges, None if page.caught_up else str(page.next_from_seq)

    return Pages(fetch)


# -- the server --------------------------------------------------------------------------------------------


def health(core: Core) -> Flow[Health]:
    """Check that the server is running. One attempt."""
    return core.call(flows.get("/v0/health"), Health, Repeat.NEVER)


def ready(core: Core) -> Flow[Readiness]:
    """Check that all topics are available; raises NotReady if not. One attempt: see `wait_ready`."""
    return core.call(flows.get("/v0/ready"), Readiness, Repeat.NEVER)


def wait_ready(core: Core) -> Flow[Readiness]:
    """Wait until the server is ready, as long as `Retries` allow."""
    return core.call(flows.get("/v0/ready"), Readiness)


def metrics(core: Core) -> Flow[dict[str, Any]]:
    """Get the server's metrics by name."""
    request = Request("GET", "/v0/metrics", headers={"Accept": "application/json"})
    return core.call(request, dict[str, Any])


def metrics_text(core: Core) -> Flow[str]:
    """Get the metrics, including those of single topics, in Prometheus format."""
    response = yield from core.exchange(flows.get("/v0/metrics"))
    return response.body.decode()
