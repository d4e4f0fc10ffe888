"""Operations of the HTTP API: one table.

The routes and the scopes that they need, the OpenAPI document, the labels of metrics, and which messages to shards change
something all follow from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import msgspec

from topics.api import config, limits, requests
from topics.api.fields import U64_MAX
from topics.api.responses import consumers, forwards, merges, records, transactions

Json: TypeAlias = dict[str, Any]
Scope: TypeAlias = Literal["read", "write", "delete", "admin"]

JSON_TYPE, LINES_TYPE, ANY_TYPE = "application/json", "application/x-ndjson", "*/*"
EVENTS_TYPE, FRAMES_TYPE, TEXT_TYPE = "text/event-stream", "application/vnd.topics.frames", "text/plain"

# Statuses of errors. Those of any request are 400, 401, 403, 408, 421, 431 and 500; with a body also 413 and 415.
_SHARD = (429, 503)
WITH_TOPIC = (404, *_SHARD)

TEXT: Json = {"type": "string"}
BOOLEAN: Json = {"type": "boolean"}
NODE: Json = TEXT | {"maxLength": limits.NODE_BYTES_MAX}
# Tokens between dots; only the last may be a lone `>`.
SUBJECT_PATTERN = r"^(?:(?:[^.>]|[^.][^.]+)\.)*[^.]+$"


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    route: str  # method and path
    tag: str  # section of the document
    summary: str
    answers: dict[int, tuple[type[msgspec.Struct] | None, str]]  # by status: the body, and what it means
    description: str = ""
    scopes: tuple[Scope, ...] = ()  # all are required; empty: any key
    parameters: tuple[Json, ...] = ()  # of the query and the header, as in the document
    creates: bool = False  # creates what the last name in the path names, which must be valid
    body: type[msgspec.Struct] | None = None
    body_optional: bool = False
    takes: tuple[str, ...] = ()  # content types of the body; default: JSON if there is one
    gives: tuple[str, ...] = (JSON_TYPE,)  # content types of the answer
    errors: tuple[int, ...] = WITH_TOPIC  # statuses, besides those of any request
    commands: tuple[str, ...] = ()  # messages to shards, by their names in topics/link/wire.py
    label: str = ""  # of its latency in metrics
    changes: bool = False  # its outcome may be unknown when a worker dies
    is_large: bool = False  # the response may be large

    @property
    def method(self) -> str:
        return self.route.partition(" ")[0]

    @property
    def path(self) -> str:
        return self.route.partition(" ")[2]

    @property
    def accepts(self) -> tuple[str, ...]:
        return self.takes or ((JSON_TYPE,) if self.body is not None else ())

    @property
    def names_in_path(self) -> list[str]:
        return re.findall(r"\{(\w+)\}", self.path)


def _query(name: str, schema: Json, description: str) -> Json:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def _header(name: str, schema: Json, description: str) -> Json:
    return _query(name, schema, description) | {"in": "header"}


def _flag(name: str, default: bool, description: str) -> Json:
    return _query(name, BOOLEAN | {"default": default}, description)


def _page_of(rows: str) -> list[Json]:
    size: Json = {"type": "integer", "minimum": 1, "maximum": limits.LIST_PAGE_MAX, "default": 100}
    text = f"Maximum number of {rows} on the page; values outside the range are clamped."
    return [
        _query("page_size", size, text),
        _query("cursor", TEXT, "`next_cursor` of the previous page."),
    ]


_TOKEN = _query(
    "token", TEXT, "The API key, for clients that cannot set headers, such as a browser's EventSource."
)


def _job_stream(max_default: int) -> list[Json]:
    node: Json = TEXT | {"minLength": 1, "maxLength": limits.NODE_BYTES_MAX}
    most: Json = {"type": "integer", "minimum": 1, "maximum": 1000, "default": max_default}
    lease: Json = {"type": "integer", "minimum": config.LEASE_MS_MIN, "maximum": config.LEASE_MS_MAX}
    return [
        _query("node", node, "Name of the worker; the length is in bytes of UTF-8.") | {"required": True},
        _query(
            "max",
            most,
            "Maximum number of leases that the stream holds at a time; values outside the range are clamped.",
        ),
        _query(
            "lease_ms",
            lease,
            "Duration of the leases, instead of the configured one; values outside the range are clamped.",
        ),
        _TOKEN,
    ]


def _query_of(body: type[msgspec.Struct], *names: str) -> list[Json]:
    """Fields of a body as query parameters."""
    found = msgspec.json.schema(body)["$defs"][body.__name__]["properties"]
    return [
        _query(name, {k: v for k, v in found[name].items() if k != "description"}, found[name]["description"])
        for name in names
    ]


_WRITE_OPTIONS = (
    _flag("return_seqs", True, "false omits `seqs` from the answer."),
    _flag("include_epoch", False, "As `include_epoch` of WriteBody."),
    _header(
        "Idempotency-Key",
        TEXT | {"minLength": 1, "maxLength": limits.KEY_BYTES_MAX},
        "A write with a key that was used before returns the seqs of the first write. 1 to 256 bytes.",
    ),
)
_READ_OPTIONS = _query_of(
    requests.DiffBody,
    *("from_seq", "from_ts", "limit", "max_batch_bytes", "wait_ms"),
    *("include_tags", "include_meta", "include_data", "include_epoch"),
)
_FOR_JOBS = "For jobs that read and write the files of the cold tier; see docs/consolidation.md. "
_EVENTS: dict[int, tuple[type[msgspec.Struct] | None, str]] = {200: (None, "An endless stream of events.")}


def _settle(
    call: str,
    summary: str,
    body: type[msgspec.Struct],
    answer: type[msgspec.Struct],
    *,
    for_consumer: bool = False,
) -> Operation:
    return Operation(
        f"{call}_for_consumer" if for_consumer else call,
        f"POST /v0/topics/{{topic}}/{'consumers/{consumer}/' if for_consumer else ''}{call}",
        "consumers" if for_consumer else "queues",
        summary,
        scopes=("write",),
        description="Applies to seqs on which `node` holds an active lease and, if `lease_ids` are given, exactly that one. "
        "Others are returned in `skipped`, which is not an error.",
        body=body,
        answers={200: (answer, "The result, and the skipped seqs.")},
        errors=WITH_TOPIC if for_consumer else (409, *WITH_TOPIC),
        commands=(call.upper(),),
        label="settle",
        changes=True,
    )


_TABLE: tuple[Operation, ...] = (
    # -- topics ----------------------------------------------------------------------------------------------
    Operation(
        "list_topics",
        "GET /v0/topics",
        "topics",
        "List topics",
        scopes=("read",),
        description="Ordered by name. A key with prefixes sees only topics with one of them.",
        parameters=(
            _query("prefix", TEXT, "Only names that start with this."),
            *_page_of("topics"),
            _flag("touch", False, "Whether this counts as a read of each listed topic."),
        ),
        answers={200: (records.TopicList, "A page of topics.")},
        errors=_SHARD,
        commands=("LIST_TOPICS",),
        label="topic",
        is_large=True,
    ),
    Operation(
        "put_topic",
        "PUT /v0/topics/{topic}",
        "topics",
        "Create a topic or replace its configuration",
        scopes=("admin",),
        description="Omitted fields return to their defaults. An empty body means all defaults and needs no content type.",
        creates=True,
        body=config.ConfigBody,
        body_optional=True,
        answers={
            200: (records.TopicPut, "The topic existed; this is its new configuration."),
            201: (records.TopicPut, "Created."),
        },
        errors=(409, *_SHARD),
        commands=("PUT_TOPIC",),
        label="topic",
        changes=True,
    ),
    Operation(
        "get_topic",
        "GET /v0/topics/{topic}",
        "topics",
        "Get the state and configuration of a topic",
        scopes=("read",),
        parameters=(_flag("touch", True, "Whether this counts as a read."),),
        answers={200: (records.Topic, "The topic.")},
        commands=("GET_TOPIC",),
        label="topic",
    ),
    Operation(
        "delete_topic",
        "DELETE /v0/topics/{topic}",
        "topics",
        "Delete a topic with all its records",
        scopes=("delete",),
        description="If the topic does not exist, `deleted` is false.",
        parameters=(_flag("if_empty", False, "Fail with 409 if the topic has records."),),
        answers={200: (records.TopicDeleted, "Deleted.")},
        errors=(409, *_SHARD),
        commands=("DROP_TOPIC",),
        label="topic",
        changes=True,
    ),
    # -- records ---------------------------------------------------------------------------------------------
    Operation(
        "write",
        "POST /v0/topics/{topic}",
        "records",
        "Write records",
        scopes=("write",),
        description="All records are stored, or none. With `application/x-ndjson` each line is one record (RecordBody), and the other fields are query parameters.",
        parameters=(
            *_WRITE_OPTIONS,
            _query("node", NODE, "NDJSON only: as `node` of WriteBody."),
            _query("create", BOOLEAN, "NDJSON only: as `create` of WriteBody."),
        ),
        creates=True,
        body=requests.WriteBody,
        takes=(JSON_TYPE, LINES_TYPE),
        answers={
            200: (records.Written, "Written, now or before with the same idempotency key."),
            201: (records.Written, "Written; the topic was created."),
        },
        errors=(409, 422, *WITH_TOPIC),
        commands=("WRITE",),
        label="write",
        changes=True,
    ),
    Operation(
        "write_raw",
        "POST /v0/topics/{topic}/raw",
        "records",
        "Write the body as one record",
        scopes=("write",),
        description="Accepts any content type. A body of type `application/json` must be valid JSON. Otherwise a JSON object or array is stored as JSON, other UTF-8 text as a string, and anything else as bytes.",
        parameters=(
            *_WRITE_OPTIONS,
            _query("tag", TEXT | {"maxLength": 256}, "The record's `tag`."),
            _query("node", NODE, "The record's `node`."),
            _query("create", BOOLEAN, "As `create` of WriteBody."),
        ),
        creates=True,
        takes=(ANY_TYPE,),
        body_optional=True,
        answers={
            200: (records.Written, "Written, now or before with the same idempotency key."),
            201: (records.Written, "Written; the topic was created."),
        },
        errors=(422, *WITH_TOPIC),
        commands=("WRITE",),
        label="write",
        changes=True,
    ),
    Operation(
        "read_page",
        "GET /v0/topics/{topic}/records",
        "records",
        "Read records after a seq, with GET",
        scopes=("read",),
        description="Same as `POST /v0/topics/{topic}/diff`, with the fields of DiffBody in the query.",
        parameters=(
            *_READ_OPTIONS,
            _query("epoch", TEXT | {"maxLength": 64}, "As `epoch` of DiffBody."),
            _query("node", TEXT, "Exclude records of this node."),
            _query("tag", TEXT, "Only records with this tag or, with a final `*`, this tag prefix."),
            _query(
                "subject",
                TEXT | {"pattern": SUBJECT_PATTERN},
                "Only records whose tag matches this dotted pattern: `*` matches one token, a final `>` one or more. Takes precedence over `tag`.",
            ),
        ),
        gives=(JSON_TYPE, FRAMES_TYPE),
        answers={
            200: (
                records.Page,
                "A page of records: JSON or, with `Accept: application/vnd.topics.frames`, binary frames, which have no schema.",
            )
        },
        commands=("DIFF",),
        label="read",
        is_large=True,
    ),
    Operation(
        "read",
        "POST /v0/topics/{topic}/diff",
        "records",
        "Read records after a seq",
        scopes=("read",),
        description="An empty body means all defaults and needs no content type. With `Accept: application/vnd.topics.frames` the answer is binary frames; `limit` is then at most 1000000 and by default as many as fit, and `max_batch_bytes` is 8 MiB by default.",
        body=requests.DiffBody,
        body_optional=True,
        gives=(JSON_TYPE, FRAMES_TYPE),
        answers={
            200: (
                records.Page,
                "A page of records: JSON or, with `Accept: application/vnd.topics.frames`, binary frames, which have no schema.",
            )
        },
        commands=("DIFF",),
        label="read",
        is_large=True,
    ),
    Operation(
        "delete_records",
        "POST /v0/topics/{topic}/delete",
        "records",
        "Delete records",
        scopes=("delete",),
        description="Permanent. Readers get no tombstone. Records written later are not affected.",
        body=requests.DeleteBody,
        answers={200: (records.Deleted, "The number of deleted records, and what is left.")},
        commands=("DELETE",),
        label="delete",
        changes=True,
    ),
    Operation(
        "list_deleted",
        "GET /v0/topics/{topic}/deleted",
        "records",
        "List the deleted seqs of a topic",
        scopes=("read",),
        description="Seqs whose records were removed by deletes, acks, moves to a dead-letter topic, `cap_per_tag` or the record's own TTL. Seqs reported to readers in a tombstone are not included.",
        parameters=(
            _query(
                "from_seq",
                {"type": "integer", "minimum": 0, "maximum": U64_MAX, "default": 0},
                "Only seqs after this one.",
            ),
            _query(
                "limit",
                {"type": "integer", "minimum": 0, "default": 256},
                "Maximum number of ranges on the page. 0 means 256; at most 1000.",
            ),
        ),
        answers={
            200: (records.DeletedRanges, "A page of ranges; it may be short or empty before the last page.")
        },
        commands=("LIST_DELETED",),
        label="read",
        is_large=True,
    ),
    Operation(
        "list_tags",
        "GET /v0/topics/{topic}/tags",
        "records",
        "List the tags of a topic",
        scopes=("read",),
        parameters=(
            _query("prefix", TEXT, "Only tags that start with this."),
            *_page_of("tags"),
        ),
        answers={200: (records.TagList, "A page of tags.")},
        commands=("COUNT_BY_TAG",),
        label="read",
        is_large=True,
    ),
    Operation(
        "last_records",
        "GET /v0/topics/{topic}/last",
        "records",
        "Get the newest record by tag",
        scopes=("read",),
        description="Requires `tag` or `subject`; `subject` takes precedence. Records have `$tag`.",
        parameters=(
            _query("tag", TEXT, "A tag, or a prefix with a final `*`."),
            _query(
                "subject",
                TEXT | {"pattern": SUBJECT_PATTERN},
                "Dotted pattern: `*` matches one token, a final `>` one or more.",
            ),
            _flag(
                "each", False, "Return the newest record of each matching tag, instead of the newest of all."
            ),
            *_page_of("records"),
        ),
        answers={200: (records.LastRecords, "The newest records.")},
        commands=("LAST_BY_TAG",),
        label="read",
        is_large=True,
    ),
    # -- queues ----------------------------------------------------------------------------------------------
    Operation(
        "claim",
        "POST /v0/topics/{topic}/claim",
        "queues",
        "Claim jobs",
        scopes=("read", "write"),
        description="Returned jobs come first, then the oldest. Each is leased to `node`, and not delivered to others until it is settled or the lease expires. Getting fewer than `max`, or none, is normal.",
        body=requests.ClaimBody,
        answers={200: (consumers.Claimed, "The jobs.")},
        errors=(409, *WITH_TOPIC),
        commands=("CLAIM",),
        label="claim",
        changes=True,
        is_large=True,
    ),
    _settle("ack", "Acknowledge jobs, which deletes them", requests.AckBody, consumers.Acked),
    _settle("nack", "Return jobs", requests.NackBody, consumers.Nacked),
    _settle("extend", "Extend the leases of jobs", requests.ExtendBody, consumers.Extended),
    Operation(
        "work",
        "GET /v0/topics/{topic}/work",
        "queues",
        "Stream jobs as server-sent events",
        scopes=("read", "write"),
        description="Events: `job` (a claimed job and `topic`; its id is the seq), `error` (`code`, `error`, `message`, and `topic` if the error concerns the topic). Jobs that are not settled when the stream ends are ready again at once.",
        parameters=(*_job_stream(1),),
        gives=(EVENTS_TYPE,),
        answers=_EVENTS,
        errors=(406, 409, *WITH_TOPIC),
    ),
    # -- consumers -------------------------------------------------------------------------------------------
    Operation(
        "list_consumers",
        "GET /v0/topics/{topic}/consumers",
        "consumers",
        "List the consumers of a topic",
        scopes=("read",),
        parameters=(*_page_of("consumers"),),
        answers={200: (consumers.ConsumerList, "A page of consumers.")},
        commands=("LIST_CONSUMERS",),
        label="consumer",
        is_large=True,
    ),
    Operation(
        "put_consumer",
        "PUT /v0/topics/{topic}/consumers/{consumer}",
        "consumers",
        "Create a consumer or replace its configuration",
        scopes=("admin",),
        description="Omitted fields return to their defaults; the consumer keeps its position. An empty body means all defaults and needs no content type.",
        creates=True,
        body=config.ConsumerBody,
        body_optional=True,
        answers={
            200: (consumers.ConsumerPut, "The consumer existed; this is its new configuration."),
            201: (consumers.ConsumerPut, "Created."),
        },
        errors=(409, *WITH_TOPIC),
        commands=("PUT_CONSUMER",),
        label="consumer",
        changes=True,
    ),
    Operation(
        "get_consumer",
        "GET /v0/topics/{topic}/consumers/{consumer}",
        "consumers",
        "Get the configuration and state of a consumer",
        scopes=("read",),
        answers={200: (consumers.ConsumerState, "The consumer.")},
        commands=("GET_CONSUMER",),
        label="consumer",
    ),
    Operation(
        "delete_consumer",
        "DELETE /v0/topics/{topic}/consumers/{consumer}",
        "consumers",
        "Delete a consumer",
        scopes=("delete",),
        description="Its position is lost. If the consumer does not exist, `deleted` is false.",
        answers={200: (consumers.ConsumerDeleted, "Deleted.")},
        commands=("DROP_CONSUMER",),
        label="consumer",
        changes=True,
    ),
    Operation(
        "fetch",
        "POST /v0/topics/{topic}/consumers/{consumer}/fetch",
        "consumers",
        "Fetch records of a consumer",
        scopes=("read", "write"),
        description="Returned records come first, then the next ones. Each is leased to `node`, unless the consumer has `ack: none`. Getting fewer than `max`, or none, is normal.",
        body=requests.FetchBody,
        answers={200: (consumers.Fetched, "The records.")},
        commands=("CLAIM",),
        label="claim",
        changes=True,
        is_large=True,
    ),
    Operation(
        "stream_consumer",
        "GET /v0/topics/{topic}/consumers/{consumer}/stream",
        "consumers",
        "Stream records of a consumer as server-sent events",
        scopes=("read", "write"),
        description="Events: `record` (a fetched record, `topic` and `consumer`; its id is the seq), `tombstone` (`topic`, `consumer`, `reason`, `gap_from`, `gap_to`, `earliest_seq`, `head_seq`), `error` (`code`, `error`, `message`). The stream continues from the consumer's position. Records that are not settled when it ends are ready again at once.",
        parameters=(*_job_stream(1000),),
        gives=(EVENTS_TYPE,),
        answers=_EVENTS,
        errors=(406, *WITH_TOPIC),
    ),
    _settle("ack", "Acknowledge records", requests.AckBody, consumers.Acked, for_consumer=True),
    _settle("nack", "Return records", requests.NackBody, consumers.Nacked, for_consumer=True),
    _settle(
        "extend", "Extend the leases of records", requests.ExtendBody, consumers.Extended, for_consumer=True
    ),
    _settle("term", "Stop delivering records", requests.TermBody, consumers.Termed, for_consumer=True),
    Operation(
        "pause_consumer",
        "POST /v0/topics/{topic}/consumers/{consumer}/pause",
        "consumers",
        "Pause a consumer",
        scopes=("admin",),
        description="An empty body means until resumed, and needs no content type.",
        body=requests.PauseBody,
        body_optional=True,
        answers={200: (consumers.ConsumerState, "The consumer, paused.")},
        commands=("PAUSE_CONSUMER",),
        label="consumer",
        changes=True,
    ),
    Operation(
        "resume_consumer",
        "POST /v0/topics/{topic}/consumers/{consumer}/resume",
        "consumers",
        "Resume a paused consumer",
        scopes=("admin",),
        answers={200: (consumers.ConsumerState, "The consumer.")},
        commands=("PAUSE_CONSUMER",),
        label="consumer",
        changes=True,
    ),
    Operation(
        "reset_consumer",
        "POST /v0/topics/{topic}/consumers/{consumer}/reset",
        "consumers",
        "Reset a consumer to another position",
        scopes=("admin",),
        description="Leases and pending records are dropped. With `dry_run` nothing changes, and the answer shows what would.",
        body=requests.ResetBody,
        answers={200: (consumers.ConsumerReset, "The old and the new position.")},
        commands=("RESET_CONSUMER",),
        label="consumer",
        changes=True,
    ),
    # -- routers ---------------------------------------------------------------------------------------------
    Operation(
        "list_routers",
        "GET /v0/routers",
        "routers",
        "List routers",
        scopes=("read",),
        description="Ordered by name. A key with prefixes sees only routers whose name, source and dest all have one of its prefixes.",
        parameters=(
            _query("prefix", TEXT, "Only names that start with this."),
            _query("source", TEXT, "Only routers with exactly this source."),
            _query("dest", TEXT, "Only routers with exactly this dest."),
            *_page_of("routers"),
        ),
        answers={200: (forwards.RouterList, "A page of routers.")},
        errors=_SHARD,
        commands=("LIST_FORWARDS",),
        is_large=True,
    ),
    Operation(
        "put_router",
        "PUT /v0/routers/{router}",
        "routers",
        "Copy the records written to a topic into another topic",
        scopes=("admin",),
        description="Only records written from now on are copied. Omitted fields have their defaults. An existing router keeps its position and its total; its source and dest cannot change. Topics that do not exist are created.",
        creates=True,
        body=requests.ForwardBody,
        answers={
            200: (forwards.RouterPut, "The router existed; this is its new configuration."),
            201: (forwards.RouterPut, "Created."),
        },
        errors=(409, *WITH_TOPIC),
        commands=("PUT_FORWARD",),
        changes=True,
    ),
    Operation(
        "get_router",
        "GET /v0/routers/{router}",
        "routers",
        "Get a router and its number of copies",
        scopes=("read",),
        description="Records written to the source before this call are copied and counted first.",
        answers={200: (forwards.RouterState, "The router.")},
        commands=("GET_FORWARD",),
    ),
    Operation(
        "delete_router",
        "DELETE /v0/routers/{router}",
        "routers",
        "Delete a router",
        scopes=("delete",),
        description="Existing copies stay. If the router does not exist, `deleted` is false.",
        answers={200: (forwards.RouterDeleted, "Deleted.")},
        errors=_SHARD,
        commands=("DROP_FORWARD",),
        changes=True,
    ),
    # -- consolidation ---------------------------------------------------------------------------------------
    Operation(
        "plan_merge",
        "POST /v0/topics/{topic}/consolidation",
        "consolidation",
        "Plan a merge of cold segments",
        scopes=("admin",),
        description=_FOR_JOBS
        + "An existing plan is returned again, with a new lease if the old one has expired. An empty body means all defaults and needs no content type.",
        body=requests.PlanBody,
        body_optional=True,
        answers={200: (merges.MergePlan, "The plan, or none.")},
        errors=(409, *WITH_TOPIC),
        commands=("CONSOLIDATE",),
        label="consolidation",
    ),
    Operation(
        "merge_state",
        "GET /v0/topics/{topic}/consolidation",
        "consolidation",
        "Get the plan, replaced segments and manifest of a topic",
        scopes=("admin",),
        answers={200: (merges.MergeState, "The state of the topic's cold segments.")},
        errors=(409, *WITH_TOPIC),
        commands=("CONSOLIDATE",),
        label="consolidation",
    ),
    Operation(
        "renew_plan",
        "POST /v0/topics/{topic}/consolidation/{plan_id}/renew",
        "consolidation",
        "Renew the lease on a plan",
        scopes=("admin",),
        body=requests.LeaseBody,
        answers={200: (merges.LeaseRenewed, "Renewed, for the original duration.")},
        errors=(409, 410, *WITH_TOPIC),
        commands=("CONSOLIDATE",),
        label="consolidation",
    ),
    Operation(
        "commit_plan",
        "POST /v0/topics/{topic}/consolidation/{plan_id}/commit",
        "consolidation",
        "Publish the outputs of a job",
        scopes=("admin",),
        description="Every output is compared with its inputs first. Idempotent: repeated after the commit, the call returns the same result.",
        body=requests.CommitBody,
        answers={
            200: (merges.PlanCommitted, "All outputs are published."),
            202: (merges.PlanCommitting, "Still in progress; repeat the call."),
        },
        errors=(409, 410, 422, *WITH_TOPIC),
        commands=("CONSOLIDATE",),
        label="consolidation",
    ),
    Operation(
        "abandon_plan",
        "POST /v0/topics/{topic}/consolidation/{plan_id}/abandon",
        "consolidation",
        "Abandon a plan",
        scopes=("admin",),
        body=requests.LeaseBody,
        answers={200: (merges.PlanAbandoned, "Abandoned.")},
        errors=(409, 410, *WITH_TOPIC),
        commands=("CONSOLIDATE",),
        label="consolidation",
    ),
    Operation(
        "pin_snapshot",
        "POST /v0/topics/{topic}/snapshots",
        "consolidation",
        "Create a snapshot: a manifest whose files are kept",
        scopes=("admin",),
        description=_FOR_JOBS + "An empty body means all defaults and needs no content type.",
        body=requests.SnapshotBody,
        body_optional=True,
        answers={200: (merges.SnapshotPinned, "The manifest, and when the snapshot expires.")},
        errors=(409, *WITH_TOPIC),
        commands=("CONSOLIDATE",),
        label="consolidation",
    ),
    Operation(
        "renew_snapshot",
        "POST /v0/topics/{topic}/snapshots/{snapshot_id}/renew",
        "consolidation",
        "Keep the files of a snapshot longer",
        scopes=("admin",),
        body=requests.SnapshotBody,
        body_optional=True,
        answers={200: (merges.SnapshotRenewed, "When the snapshot expires now.")},
        errors=(409, *WITH_TOPIC),
        commands=("CONSOLIDATE",),
        label="consolidation",
    ),
    Operation(
        "release_snapshot",
        "DELETE /v0/topics/{topic}/snapshots/{snapshot_id}",
        "consolidation",
        "Release a snapshot",
        scopes=("admin",),
        answers={200: (merges.SnapshotReleased, "Released: its files may be removed.")},
        errors=(409, *WITH_TOPIC),
        commands=("CONSOLIDATE",),
        label="consolidation",
    ),
    # -- transactions ----------------------------------------------------------------------------------------
    Operation(
        "begin_transaction",
        "POST /v0/topics/{topic}/transactions",
        "transactions",
        "Open the transaction of a batch, or get its state",
        scopes=("write",),
        description="Idempotent. A batch up to the producer's last committed one is reported as `committed`. A topic that does not exist is created, as by a write.",
        creates=True,
        body=requests.BeginBody,
        answers={200: (transactions.Transaction, "The state of the transaction.")},
        commands=("TXN_BEGIN",),
        label="transaction",
        changes=True,
    ),
    Operation(
        "stage_chunk",
        "POST /v0/topics/{topic}/transactions/{txn}/stage",
        "transactions",
        "Stage a chunk of records in a transaction",
        scopes=("write",),
        description="The records are validated like those of a write, and become visible when the transaction is committed. A chunk that is already staged is not replaced.",
        body=requests.StageBody,
        answers={200: (transactions.ChunkStaged, "The chunk is staged.")},
        errors=(409, *WITH_TOPIC),
        commands=("TXN_STAGE",),
        label="transaction",
        changes=True,
    ),
    Operation(
        "commit_transaction",
        "POST /v0/topics/{topic}/transactions/{txn}/commit",
        "transactions",
        "Append the staged records",
        scopes=("write",),
        description="Once decided, the server completes the commit by itself, even after a crash, and the batch is appended exactly once, however often this call is repeated. A batch that fits into one log entry becomes visible at once, a larger one in steps.",
        body=requests.CommitPartsBody,
        answers={
            200: (transactions.Transaction, "Committed and synced, whatever the topic's durability."),
            202: (transactions.Transaction, "Not finished within `wait_ms`; repeat the call."),
        },
        errors=(409, 422, *WITH_TOPIC),
        commands=("TXN_COMMIT",),
        label="transaction",
        changes=True,
    ),
    Operation(
        "abort_transaction",
        "POST /v0/topics/{topic}/transactions/{txn}/abort",
        "transactions",
        "Abort a transaction",
        scopes=("write",),
        description="The staged records are discarded. A body is ignored.",
        answers={200: (transactions.TransactionAborted, "Aborted.")},
        errors=(409, *WITH_TOPIC),
        commands=("TXN_ABORT",),
        label="transaction",
        changes=True,
    ),
    # -- watch -----------------------------------------------------------------------------------------------
    Operation(
        "make_watch",
        "POST /v0/watch",
        "watch",
        "Create a watch",
        scopes=("read",),
        description="The answer has the path of its stream. The session keeps the cursors, also across restarts, and expires 300 s after its stream was closed, or after it was created if no stream is opened.",
        parameters=(_flag("lenient", False, "Skip topics that do not exist, instead of answering 404."),),
        body=requests.WatchBody,
        answers={200: (records.WatchMade, "The session, and the start of each topic.")},
    ),
    Operation(
        "stream_watch",
        "GET /v0/watch/{wid}",
        "watch",
        "Follow topics as server-sent events",
        description="Requires the key that created the watch, if any. Events: `record` (`topic`, `records`, `from_seq`, `to_seq`, `head_seq`), `tombstone` (`topic`, `reason`, `gap_from`, `gap_to`, `earliest_seq`, `head_seq`), `caught-up` (`topic`, `head_seq`), `topic-deleted` (`topic`, `head_seq`, `reason`), `error` (`code`, `error`, `message`). All but `error` have an id. A client that reconnects with the last id misses nothing; without it, it may miss events that were in transit. A second stream of the same watch ends the first.",
        parameters=(
            _TOKEN,
            _header(
                "Last-Event-ID",
                TEXT,
                "Id of the last event received; the stream continues after it, even if the session's cursors are further ahead.",
            ),
        ),
        gives=(EVENTS_TYPE,),
        answers=_EVENTS,
        errors=(406, *WITH_TOPIC),
    ),
    Operation(
        "websocket",
        "GET /v0/ws",
        "watch",
        "Follow and write over one WebSocket",
        description="JSON messages in both directions, with their type in `op`. To the server: `subscribe`, `unsubscribe`, `publish`, `ping`. From the server: `subscribed`, `unsubscribed`, `ack`, `pong`, `error`, and pushed `record`, `caught_up`, `tombstone`, `topic_deleted`. Any valid key may connect; each message is authorized separately. A request without a WebSocket upgrade gets 400.",
        answers={101: (None, "The connection is a WebSocket.")},
        errors=_SHARD,
    ),
    # -- server ----------------------------------------------------------------------------------------------
    Operation(
        "health",
        "GET /v0/health",
        "server",
        "Check whether the server is alive",
        description="Requires no key, unless the server is configured to require one for probes.",
        answers={200: (records.Health, "The front is alive.")},
        errors=(),
    ),
    Operation(
        "ready",
        "GET /v0/ready",
        "server",
        "Check whether all topics are served",
        description="Requires no key, unless the server is configured to require one for probes.",
        answers={200: (records.Readiness, "All topics are served.")},
        errors=(503,),
    ),
    Operation(
        "metrics",
        "GET /v0/metrics",
        "server",
        "Get metrics",
        scopes=("read",),
        gives=(JSON_TYPE, TEXT_TYPE),
        answers={200: (records.Metrics, "Metrics as Prometheus text, or as JSON if `Accept` asks for it.")},
        errors=(429,),
    ),
    Operation(
        "openapi",
        "GET /v0/openapi.json",
        "server",
        "This document",
        description="Requires any valid key, if the server has keys.",
        answers={200: (None, "OpenAPI 3.1.")},
        errors=_SHARD,
    ),
)


def _same(name: str, path: str, original: str) -> Operation:
    """Another path of an operation."""
    found = next(one for one in _TABLE if one.name == original)
    return replace(found, name=name, route=f"GET {path}", summary=f"Same as `{found.path}`")


OPERATIONS = (
    *_TABLE,
    _same("healthz", "/healthz", "health"),
    _same("readyz", "/readyz", "ready"),
    _same("metrics_alias", "/metrics", "metrics"),
)
