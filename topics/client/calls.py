"""Topics, records and the server: what each call asks, and what its answer is. One function for both clients."""

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
    own,
)
from topics.client.errors import UnknownSetting
from topics.client.flows import Core, Flow, Repeat, Request, json_request
from topics.client.patterns import matches, prefix_of
from topics.client.sources import OnLost, Pages, Reading, Source
from topics.client.tracing import publish
from topics.client.writing import NewRecord, body_of, encode

Predicate = str | Sequence[str]
When = int | datetime.datetime | datetime.timedelta


def topic_path(topic: str, *below: str) -> str:
    return "/".join(["/v0/topics", flows.quoted(topic), *below])


def as_ms(core: Core, when: When) -> int:
    """A time: ms since the epoch, a moment (without a zone: local time), or how long ago."""
    match when:
        case datetime.timedelta():
            return core.wall_ms() - round(when.total_seconds() * 1000)
        case datetime.datetime():
            return round(when.timestamp() * 1000)
        case _:
            return when


def check_names(given: Mapping[str, Any], options: Any) -> None:
    """The server passes over settings that it does not know, and a misspelt `durability` would be none at all."""
    known: frozenset[str] = options.__optional_keys__
    if unknown := sorted(given.keys() - known):
        names = ", ".join(map(repr, unknown))
        raise UnknownSetting(f"no such setting: {names}; there are {', '.join(sorted(known))}")


# -- topics ------------------------------------------------------------------------------------------------


def create_topic(core: Core, topic: str, **config: Unpack[TopicOptions]) -> Flow[TopicPut]:
    """Create a topic, or replace the whole configuration of one: what is left out returns to its default."""
    check_names(config, TopicOptions)
    return core.call(Request("PUT", topic_path(topic), msgspec.json.encode(config), flows.JSON), TopicPut)


def update_topic(core: Core, topic: str, **changes: Unpack[TopicOptions]) -> Flow[TopicPut]:
    """Change these settings and leave the others. Two requests: who changes it in between is overruled."""
    check_names(changes, TopicOptions)
    # As it came, also with settings that this client does not know: they would be reset.
    state = yield from core.call(flows.get(topic_path(topic), touch=False), dict[str, Any])
    config: dict[str, Any] = state["config"]
    if "durable" in changes and "durability" not in changes:
        del config["durability"]
    config |= changes
    request = Request("PUT", topic_path(topic), msgspec.json.encode(config), flows.JSON)
    return (yield from core.call(request, TopicPut))


def get_topic(core: Core, topic: str, *, touch: bool = True) -> Flow[Topic]:
    """State and configuration of a topic. `touch=False`: this does not count as a read of it."""
    return core.call(flows.get(topic_path(topic), touch=None if touch else False), Topic)


def topics(
    core: Core, prefix: str = "", *, pattern: str | None = None, page_size: int = 1000
) -> Source[TopicRow]:
    """All topics in the order of their names; those that begin with `prefix`, or match `pattern` (`orders.>`)."""
    if pattern is not None:
        prefix = max(prefix, prefix_of(pattern), key=len)

    def fetch(cursor: str | None) -> Flow[tuple[list[TopicRow], str | None]]:
        request = flows.get("/v0/topics", prefix=prefix or None, page_size=page_size, cursor=cursor)
        page = yield from core.call(request, TopicList)
        rows = page.topics if pattern is None else [row for row in page.topics if matches(pattern, row.topic)]
        return rows, page.next_cursor

    return Pages(fetch)


def delete_topic(core: Core, topic: str, *, if_empty: bool = False) -> Flow[TopicDeleted]:
    """Delete a topic with everything in it. `deleted` is false when there was none."""
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
    """Write one record: any JSON value, or bytes. See `write_many` for the rest."""
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
    """Write all of these records or none, at most 10 000: `NewRecord`s, or their data alone.

    Without a key the client makes one, so that it can repeat the write when an answer is lost. With
    `idempotent=False` there is none, and such a write is not repeated: the error's `outcome` is "unknown".
    """
    said: dict[str, Any] = {}
    if node is not None:
        said["node"] = node
    if create is not None:
        said["create"] = create
    if config is not None:
        said["config"] = config
    if if_last_seq is not None:
        said["if_last_seq"] = if_last_seq
    if if_tag_last_seq is not None:
        said["if_tag_last_seq"] = {"tag": if_tag_last_seq[0], "seq": if_tag_last_seq[1]}
    if disable_backpressure:
        said["disable_backpressure"] = True
    key = idempotency_key or (core.new_key() if idempotent else None)
    headers = flows.JSON
    if key is not None:
        # In a header a key leaves the body to the records alone. It takes no other characters than these.
        if key.isascii() and key.isprintable() and key == key.strip():
            headers = {**headers, "Idempotency-Key": key}
        else:
            said["idempotency_key"] = key
    query = {"return_seqs": None if return_seqs else False, "include_epoch": include_epoch or None}
    path = flows.with_query(topic_path(topic), query)
    parts = [encode(record) for record in records]
    repeat = Repeat.IF_UNDONE if key is None else Repeat.SAFE
    return publish(core, topic, len(parts), Request("POST", path, body_of(parts, said), headers), repeat)


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
    """One page of the records after `from_seq`, oldest first; with `wait_ms` wait for one. `not_from`: leave these nodes' out.
    `epoch`: that of the page whose `next_from_seq` this is.
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
    own(topic, page.records)
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
    """All records up to the end, page by page, and then it stops. From the oldest one that is there, or after `from_seq`.

    Records that are gone although nobody deleted them raise RecordsLost, or are told to `on_lost`; either way the
    next record is the one behind the gap. `epoch`: of `from_seq`, if it was read earlier (`epochs` of what was iterated over then).
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

    return Reading(topic, fetch, from_seq, on_lost, epoch)


def last(
    core: Core, topic: str, *, tag: str | None = None, subject: str | None = None
) -> Flow[Record | None]:
    """The newest record: of all, of a tag (`eu.tea`, `eu.*`), or of a dotted pattern of tags (`eu.>`)."""
    if tag is None and subject is None:
        return (yield from _newest(core, topic))
    request = flows.get(topic_path(topic, "last"), tag=tag, subject=subject)
    found = yield from core.call(request, LastRecords)
    own(topic, found.records)
    return found.records[0] if found.records else None


def _newest(core: Core, topic: str) -> Flow[Record | None]:
    """Deletes may have taken the newest ones: look further and further back."""
    head_seq = (yield from get_topic(core, topic)).head_seq
    back = 1
    while True:
        begin = at = max(0, head_seq - back)
        newest: Record | None = None
        is_over = False
        while not is_over:
            page = yield from read(core, topic, at, limit=1000)
            if page.records:
                newest = page.records[-1]
            at, is_over = page.next_from_seq, page.caught_up
        if newest is not None or begin == 0:
            return newest
        back *= 16


def last_by_tag(
    core: Core, topic: str, *, tag: str | None = None, subject: str | None = None, page_size: int = 1000
) -> Source[Record]:
    """The newest record of each tag that matches: by default of every tag."""
    if tag is None and subject is None:
        tag = "*"

    def fetch(cursor: str | None) -> Flow[tuple[list[Record], str | None]]:
        request = flows.get(
            topic_path(topic, "last"), tag=tag, subject=subject, each=True, page_size=page_size, cursor=cursor
        )
        page = yield from core.call(request, LastRecords)
        own(topic, page.records)
        return page.records, page.next_cursor

    return Pages(fetch)


def tags(core: Core, topic: str, prefix: str = "", *, page_size: int = 1000) -> Source[TagCount]:
    """The tags of a topic in their order, each with the number of its records."""

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
    """Delete the records that all of these mean: with these seqs, before a seq, with matching tags (`match="eu.tea"`, or a dotted
    pattern, `subject="eu.>"`), all but the newest `keep`.

    `erase` also overwrites their payloads on disk before it answers.
    """
    for name, value in (("match", match), ("subject", subject)):
        if isinstance(value, bytes | bytearray):  # JSON would have them as base64, which is another tag
            raise TypeError(f"{name} is text, not {type(value).__name__}")
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
    """Delete all records, or all but the newest `keep`. The topic stays, and its seqs go on."""
    return delete(core, topic, keep=keep, erase=erase)


def deleted_ranges(
    core: Core, topic: str, from_seq: int = 0, *, page_size: int = 1000
) -> Source[DeletedRange]:
    """The deleted seqs after `from_seq`, ascending. A long range may come in parts."""

    def fetch(cursor: str | None) -> Flow[tuple[list[DeletedRange], str | None]]:
        request = flows.get(topic_path(topic, "deleted"), from_seq=cursor or from_seq, limit=page_size)
        page = yield from core.call(request, DeletedRanges)
        return page.ranges, None if page.caught_up else str(page.next_from_seq)

    return Pages(fetch)


# -- the server --------------------------------------------------------------------------------------------


def health(core: Core) -> Flow[Health]:
    """The server runs. One attempt."""
    return core.call(flows.get("/v0/health"), Health, Repeat.NEVER)


def ready(core: Core) -> Flow[Readiness]:
    """Every topic is served; NotReady says what is missing. One attempt: see `wait_ready`."""
    return core.call(flows.get("/v0/ready"), Readiness, Repeat.NEVER)


def wait_ready(core: Core) -> Flow[Readiness]:
    """Try for as long as `Retries` say."""
    return core.call(flows.get("/v0/ready"), Readiness)


def metrics(core: Core) -> Flow[dict[str, Any]]:
    """The server's figures by name."""
    request = Request("GET", "/v0/metrics", headers={"Accept": "application/json"})
    return core.call(request, dict[str, Any])


def metrics_text(core: Core) -> Flow[str]:
    """The same and those of single topics, as Prometheus reads them."""
    response = yield from core.exchange(flows.get("/v0/metrics"))
    return response.body.decode()
