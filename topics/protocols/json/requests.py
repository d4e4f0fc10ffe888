"""Decoding and validation of requests: bytes to engine commands.

Checks have the order of the HTTP contract: JSON, then the scope needed to create a topic with a config, then counts, then
each record. Checks that depend on the topic's state are left to the engine.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable

import msgspec

from topics.api import limits
from topics.api.config import CONFIG_U64, ConfigBody, TopicConfig
from topics.api.errors import BatchTooLarge, Forbidden, InvalidRequest, RecordTooLarge
from topics.api.fields import U64_MAX
from topics.api.requests import (
    DELETE_SEQS_MAX,
    TAG_CHARACTERS_MAX,
    DeleteBody,
    DiffBody,
    PlainWrite,
    Predicate,
    PublishBody,
    RecordBody,
    WriteBody,
)
from topics.api.traces import META_KEY
from topics.engine.commands import topics as cmd
from topics.engine.core.subjects import TagMatch
from topics.link import wire
from topics.link.watch import WatchRead
from topics.protocols.json.bodies import (
    TOO_DEEP,
    BodyType,
    check_u64,
    decode,
    node_names,
    read_body,
    utf8_bytes,
)
from topics.protocols.json.count_bound import RECORD_LINES, RECORDS, has_more_lines, too_many_records
from topics.protocols.json.json_text import compact_size

TAG_BYTES_MAX = TAG_CHARACTERS_MAX
META_BYTES_MAX = 16 * limits.KIB
META_KEYS_BYTES = 5 * limits.META_KEYS_MAX  # an object with more keys is longer: at least `"":0,` each
TTL_MS_MAX = 1 << 53  # of one record; later is never
MIXED = "either all records of a write have data_base64, without data and meta, or none has"

_write = BodyType(WriteBody)
_publish = BodyType(PublishBody)
_plain = msgspec.json.Decoder(PlainWrite)
_lines = BodyType(RecordBody, lines=True)
_value = msgspec.json.Decoder(msgspec.Raw)
_diff = BodyType(DiffBody)
_delete = BodyType(DeleteBody)
_config = BodyType(ConfigBody)
_watch_read = msgspec.msgpack.Decoder(WatchRead).decode
_meta = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NO_META = (b"", b"null")
_JSON_BLANKS = b" \t\n\r"
_SPACE, _TAB, _LF, _CR = _JSON_BLANKS  # `32 in text` takes an eighth of the time of `b" " in text`
_BACKSLASH = ord("\\")


# -- writes ------------------------------------------------------------------------------------------------


def read_write(
    topic: str, request: wire.Request, args: wire.Args, is_known: Callable[[str], bool]
) -> cmd.Append:
    text = bound_records(request)
    is_publish = request.flags & wire.PUBLISH
    plain = None if is_publish else _read_plain(topic, text, args)
    if plain is not None:
        if request.flags & wire.WITH_EPOCH:
            plain.include_epoch = True
        return plain
    body: WriteBody = read_body(_publish if is_publish else _write, request)
    if (
        body.config is not None
        and request.flags & wire.NO_ADMIN
        and _may_create(body)
        and not is_known(topic)
    ):
        raise Forbidden("creating a topic with a config requires the admin scope")
    config = None
    if body.config is not None:
        config = topic_config(body.config)
        check_dead_letter(config, args)
    key = body.idempotency_key if body.idempotency_key is not None else args.idempotency_key
    check_count(len(body.records))
    encoded = _checked_key(key) if key is not None else None
    command = cmd.Append(topic, _NO_RECORDS, encoded, body.create, config)
    # Checked above for the order of errors; the engine checks again, as the topic may be dropped in between.
    command.may_configure = not request.flags & wire.NO_ADMIN
    command.include_epoch = body.include_epoch or bool(request.flags & wire.WITH_EPOCH)
    if body.if_last_seq is not None or body.if_tag_last_seq is not None:
        _set_conditions(command, body)
    command.records = read_records(body.records, request.body, body.node, args.traceparent)
    return command


def _may_create(body: WriteBody) -> bool:
    if body.create is not None:
        return body.create
    return body.config is None or body.config.auto_create


_NO_RECORDS = cmd.Records([])


def _read_plain(topic: str, text: bytes, args: wire.Args) -> cmd.Append | None:
    """A write of records with data and perhaps tags; None: the body has more than that, or is invalid."""
    try:
        rows = _plain.decode(text).records
    except (msgspec.DecodeError, RecursionError):
        return None
    check_count(len(rows))
    payloads = [bytes(row.data) for row in rows]
    tags = [row.tag for row in rows]
    key = args.idempotency_key
    if tags.count(msgspec.UNSET) == len(rows):
        records = _json_records(payloads, [], text, args.traceparent)
        return cmd.Append(topic, records, _checked_key(key) if key is not None else None)
    encoded = _checked_key(key) if key is not None else None
    records = _json_records(payloads, [], text, args.traceparent)
    _set_tags(records, [None if tag is msgspec.UNSET else tag for tag in tags])
    return cmd.Append(topic, records, encoded)


def read_lines(topic: str, request: wire.Request, args: wire.Args) -> cmd.Append:
    """One record per line. All other parameters are in the query and headers."""
    body = request.body
    # Too many even if half of the lines are blank.
    if RECORD_LINES.is_exceeded(body) or has_more_lines(body, 2 * limits.BATCH_RECORDS_MAX):
        raise too_many_records()
    rows: list[RecordBody] = read_body(_lines, request)
    check_count(len(rows))
    key = _checked_key(args.idempotency_key) if args.idempotency_key is not None else None
    records = read_records(rows, request.body, args.node, args.traceparent)
    command = cmd.Append(topic, records, key, args.create)
    command.include_epoch = bool(request.flags & wire.WITH_EPOCH)
    return command


def read_raw(topic: str, request: wire.Request, args: wire.Args) -> cmd.Append:
    """One record, whose data is the whole body. All other parameters are in the query and headers."""
    body = bytes(request.body)
    data = _body_as_json(body, must_parse=bool(request.flags & wire.MUST_PARSE))
    key = _checked_key(args.idempotency_key) if args.idempotency_key is not None else None
    if data is None:
        records = _bytes_records([body])
    else:
        records = _json_records([data], [], data, args.traceparent)
    if args.tag is not None:
        records.tags = [args.tag.encode()]
        _check_lengths("tag", records.tags, TAG_BYTES_MAX)
    if args.node is not None:
        records.nodes = [args.node.encode()]
        _check_lengths("node", records.nodes, limits.NODE_BYTES_MAX)
    command = cmd.Append(topic, records, key, args.create)
    command.include_epoch = bool(request.flags & wire.WITH_EPOCH)
    return command


def _body_as_json(body: bytes, *, must_parse: bool) -> bytes | None:
    """A body as JSON text: unchanged if it is a JSON object or array, else as a string; None if it is not text.

    With `must_parse` it may be any JSON value, and must be valid.
    """
    if must_parse:
        return bytes(decode(_value.decode, body))
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    if body.lstrip(_JSON_BLANKS)[:1] in (b"{", b"["):
        try:
            return bytes(_value.decode(body))
        except (msgspec.DecodeError, RecursionError):
            pass  # not JSON after all
    return msgspec.json.encode(text)


def check_count(count: int) -> None:
    if not count:
        raise InvalidRequest("a write needs at least one record in records")
    if count > limits.BATCH_RECORDS_MAX:
        raise too_many_records(count)


def bound_records(request: wire.Request) -> bytes:
    """Refuse a body with too many records before it is copied or decoded; returns it as UTF-8."""
    if RECORDS.is_exceeded(request.body):
        raise too_many_records()
    request.body = text = utf8_bytes(request.body)
    return text


def _checked_key(key: str) -> bytes:
    encoded = key.encode()
    if not 0 < len(encoded) <= limits.KEY_BYTES_MAX:
        raise InvalidRequest(f"an idempotency key must have 1 to {limits.KEY_BYTES_MAX} bytes")
    return encoded


def _set_conditions(command: cmd.Append, body: WriteBody) -> None:
    wanted = body.if_tag_last_seq
    check_u64(if_last_seq=body.if_last_seq, if_tag_last_seq=wanted.seq if wanted is not None else None)
    command.if_last_seq = body.if_last_seq
    if wanted is not None:
        command.if_tag_last_seq = (wanted.tag.encode(), wanted.seq)


def read_records(
    rows: list[RecordBody], body: wire.Buffer, node: str | None, traceparent: str = ""
) -> cmd.Records:
    """Records as columns. A column without values stays None, which keeps the common case fast."""
    count = len(rows)
    if [row.data_base64 for row in rows].count(None) < count:
        records = _base64_records(rows)
    else:
        payloads = [bytes(row.data) for row in rows]
        if not all(payloads):
            raise InvalidRequest(f"record {payloads.index(b'')} has no data")
        metas = [bytes(row.meta) for row in rows]
        records = _json_records(payloads, metas if any(metas) else [], utf8_bytes(body), traceparent)
    _set_tags(records, [row.tag for row in rows])
    nodes = [row.node for row in rows]
    if node is not None or nodes.count(None) < count:
        nodes = [name if name is not None else node for name in nodes]
        records.nodes = [name.encode() if name is not None else None for name in nodes]
        _check_lengths("node", records.nodes, limits.NODE_BYTES_MAX)
    ttls_ms = [row.ttl_ms for row in rows]
    if any(ttls_ms):
        if max(ttls_ms) > U64_MAX:
            raise InvalidRequest("ttl_ms does not fit into 64 bits")
        records.ttls_ms = [min(ttl_ms, TTL_MS_MAX) for ttl_ms in ttls_ms]
    return records


def _set_tags(records: cmd.Records, tags: list[str | None]) -> None:
    if tags.count(None) < len(tags):
        records.tags = [tag.encode() if tag is not None else None for tag in tags]
        _check_lengths("tag", records.tags, TAG_BYTES_MAX)


def _json_records(payloads: list[bytes], metas: list[bytes], text: bytes, traceparent: str) -> cmd.Records:
    records = cmd.Records(payloads)
    _normalize(records, text)
    if metas or traceparent:
        _add_meta(records, metas or [b""] * len(payloads), traceparent)
    _check_sizes(records)
    return records


def _check_sizes(records: cmd.Records) -> None:
    sizes = records.sizes if records.sizes is not None else map(len, records.payloads)
    largest = max(sizes)
    if largest > limits.RECORD_BYTES_MAX:
        sizes = records.sizes or [len(payload) for payload in records.payloads]
        raise RecordTooLarge(
            f"record {sizes.index(largest)} has {largest} bytes; at most {limits.RECORD_BYTES_MAX} are allowed"
        )


def _check_lengths(field: str, names: list[bytes | None], bytes_max: int) -> None:
    for i, name in enumerate(names):
        if name is not None and len(name) > bytes_max:
            raise InvalidRequest(f"the {field} of record {i} is longer than {bytes_max} bytes")


def _normalize(records: cmd.Records, text: bytes) -> None:
    """Put every payload on one line, and set `sizes` to the sizes of their compact forms.

    Most bodies are compact already, which a scan of the whole body shows.
    """
    escaped = _BACKSLASH in text
    if not escaped and (_SPACE not in text and _LF not in text and _TAB not in text and _CR not in text):
        return
    payloads = records.payloads
    if _LF in text or _CR in text:
        # JSON strings contain no raw line breaks, so these are between tokens.
        payloads = records.payloads = [
            payload.replace(b"\n", b" ").replace(b"\r", b" ") for payload in payloads
        ]
    sizes = [_compact_size(payload, escaped) for payload in payloads]
    if any(size != len(payload) for size, payload in zip(sizes, payloads)):
        records.sizes = sizes


def _compact_size(text: bytes, escaped: bool) -> int:
    try:
        return compact_size(text, escaped)
    except RecursionError:
        raise InvalidRequest(TOO_DEEP) from None


def _add_meta(records: cmd.Records, metas: list[bytes], traceparent: str) -> None:
    metas = [b"" if meta == b"null" else meta for meta in metas]
    sizes = list(records.sizes) if records.sizes is not None else list(map(len, records.payloads))
    plain = _check_metas(metas, sizes) and records.sizes is None
    if traceparent:
        _add_trace(metas, sizes, traceparent)
    records.payloads = [data + meta for data, meta in zip(records.payloads, metas)]
    records.meta_lens = [len(meta) for meta in metas]
    records.sizes = None if plain else sizes


def _check_metas(metas: list[bytes], sizes: list[int]) -> bool:
    """Check and normalize metas, and add their sizes; returns whether all of them are compact."""
    plain = True
    for i, meta in enumerate(metas):
        if not meta:
            continue
        if b"\n" in meta or b"\r" in meta:
            meta = metas[i] = meta.replace(b"\n", b" ").replace(b"\r", b" ")
        size = _compact_size(meta, True)
        if size > META_BYTES_MAX:
            raise InvalidRequest(
                f"the meta of record {i} has {size} bytes; at most {META_BYTES_MAX} are allowed"
            )
        if (
            len(meta) > META_KEYS_BYTES
            and meta.lstrip()[:1] == b"{"
            and len(decode(_meta.decode, meta)) > limits.META_KEYS_MAX
        ):
            raise InvalidRequest(f"the meta of record {i} has more than {limits.META_KEYS_MAX} keys")
        sizes[i] += size
        plain = plain and size == len(meta)
    return plain


def _add_trace(metas: list[bytes], sizes: list[int], traceparent: str) -> None:
    """Add the trace to each meta, unless it has one, is not an object or has no room: a trace never fails a write."""
    member = b'"%b":"%b"' % (META_KEY.encode(), traceparent.encode())
    alone = b"{%b}" % member
    for i, meta in enumerate(metas):
        if sizes[i] + len(alone) > limits.RECORD_BYTES_MAX:
            continue
        if not meta:
            metas[i] = alone
            sizes[i] += len(alone)
            continue
        known = _members(meta)
        if known is None or META_KEY in known or len(known) >= limits.META_KEYS_MAX:
            continue
        added = b"," + member if known else member
        text = meta.rstrip()[:-1] + added + b"}"
        if len(text) <= META_BYTES_MAX:
            metas[i] = text
            sizes[i] += len(added)


def _members(meta: bytes) -> dict[str, msgspec.Raw] | None:
    return decode(_meta.decode, meta) if meta.lstrip()[:1] == b"{" else None


def _base64_records(rows: list[RecordBody]) -> cmd.Records:
    payloads: list[bytes] = []
    for i, row in enumerate(rows):
        if row.data_base64 is None or bytes(row.data) or bytes(row.meta) not in _NO_META:
            raise InvalidRequest(MIXED)
        try:
            payloads.append(binascii.a2b_base64(row.data_base64, strict_mode=True))
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest(f"data_base64 of record {i} is not base64: {error}") from None
    return _bytes_records(payloads)


def _bytes_records(payloads: list[bytes]) -> cmd.Records:
    records = cmd.Records(payloads, raw=True)
    _check_sizes(records)
    return records


# -- reads and deletes -------------------------------------------------------------------------------------


def read_diff(topic: str, request: wire.Request, *, frames: bool = False) -> tuple[cmd.Diff, DiffBody]:
    body: DiffBody = read_body(_diff, request) if len(request.body) else DiffBody()
    check_u64(from_seq=body.from_seq, max_batch_bytes=body.max_batch_bytes, from_ts=body.from_ts)
    names = node_names(body.node)
    command = cmd.Diff(
        topic,
        body.from_seq,
        body.limit,
        tuple(name.encode() for name in names),
        min(body.max_batch_bytes, limits.DIFF_BYTES_MAX),
        min(body.wait_ms, limits.DIFF_WAIT_MS_MAX),
    )
    if body.tag is not None:
        command.match = tag_match(body.tag, subjects=True)
    command.from_ts = body.from_ts
    command.frames = frames
    command.epoch = body.epoch
    command.include_epoch = body.include_epoch or body.epoch is not None
    return command, body


def read_watch(request: wire.Request) -> WatchRead:
    try:
        return _watch_read(request.body)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"a watcher's read cannot be decoded: {error}") from None


def watch_command(topic: str, read: WatchRead) -> cmd.Diff:
    options = read.options
    nodes = tuple(node.encode() for node in options.nodes)
    command = cmd.Diff(topic, read.from_seq, options.limit, nodes, options.max_bytes, synced=options.strong)
    command.epoch, command.include_epoch = read.epoch, True
    return command


def read_delete(topic: str, request: wire.Request) -> cmd.Delete:
    body: DeleteBody = read_body(_delete, request)
    check_u64(before_seq=body.before_seq, keep=body.keep)
    if body.seqs is not None and len(body.seqs) > DELETE_SEQS_MAX:
        raise BatchTooLarge(
            f"{len(body.seqs)} seqs in one delete; send at most {DELETE_SEQS_MAX}",
            seqs=len(body.seqs),
            max=DELETE_SEQS_MAX,
        )
    if body.seqs and max(body.seqs) > U64_MAX:
        raise InvalidRequest("seqs does not fit into 64 bits")
    match = tag_match(body.match, subjects=False) if body.match is not None else None
    subject = make_match("Subject", body.subject) if body.subject is not None else None
    return cmd.Delete(topic, body.before_seq, match, body.seqs, body.keep, body.erase, subject)


def tag_match(predicate: Predicate, *, subjects: bool) -> TagMatch:
    """A predicate: a string, or `["tag", op, value]`."""
    if isinstance(predicate, str):
        return TagMatch("Glob" if predicate.endswith("*") else "Eq", predicate.encode())
    ops = ("Eq", "Glob", "Subject") if subjects else ("Eq", "Glob")
    if len(predicate) != 3 or predicate[0] != "tag" or predicate[1] not in ops:
        raise InvalidRequest(f'a predicate is a string or ["tag", op, value] with op one of {", ".join(ops)}')
    return make_match(predicate[1], predicate[2])


def make_match(op: str, value: str) -> TagMatch:
    try:
        return TagMatch(op, value.encode())  # type: ignore[arg-type]
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


# -- topics ------------------------------------------------------------------------------------------------


def read_config(request: wire.Request, args: wire.Args) -> TopicConfig:
    body: ConfigBody = read_body(_config, request) if len(request.body) else ConfigBody()
    config = topic_config(body)
    check_dead_letter(config, args)
    return config


def topic_config(body: ConfigBody) -> TopicConfig:
    check_u64(**{name: getattr(body, name) for name in CONFIG_U64})
    return body.config()


def check_dead_letter(config: TopicConfig, args: wire.Args) -> None:
    """The dead letter topic must be within the prefixes of the API key."""
    target, prefixes = config.dead_letter, args.prefixes
    if target is not None and prefixes is not None and not target.startswith(tuple(prefixes)):
        raise Forbidden(f"this key may not use the topic {target!r}", topic=target)
