"""The fields of requests and answers, as docs/http/ names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.checker.problem import Problem, name_of
from tests.support.history import History, Op


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# `lines` and `frames`: the form of a write, and of a requested page.
REQUESTS: dict[str, frozenset[str]] = {
    "write": _names(
        "records node idempotency_key create config disable_backpressure if_last_seq if_tag_last_seq return_seqs lines"
    ),
    "diff": _names(
        "from_seq from_ts limit max_batch_bytes node tag include_tags include_meta include_data wait_ms frames"
    ),
    "delete": _names("before_seq match seqs keep erase"),
    "put": _names(
        "type ttl_ms cap_records cap_bytes discard durability durable priority auto_priority auto_create idempotency_window_ms "
        "dedupe_node cap_per_tag max_record_bytes retention lease_ms claim_jitter_ms max_deliveries dead_letter leases_durable"
    ),
    "state": frozenset(["touch"]),
    "drop": frozenset(["if_empty"]),
    "list": _names("prefix page_size cursor touch"),
    "last": _names("tag subject each page_size cursor"),
    "tags": _names("prefix page_size cursor"),
    # Of a queue, or, with `consumer`, of a named consumer.
    "claim": _names("consumer node max max_bytes lease_ms wait_ms"),
    "ack": _names("consumer node seqs lease_ids"),
    "nack": _names("consumer node seqs lease_ids delay_ms kind reason"),
    "extend": _names("consumer node seqs lease_ids lease_ms"),
    "put_consumer": _names("consumer ack ack_wait_ms filter deliver max_ack_pending max_deliver dead_letter"),
    "consumer": frozenset(["consumer"]),
    "put_router": _names("source dest preserve_node preserve_tag create_dest filter allow_cycle guarantee"),
    "router": frozenset(),
    "routers": _names("prefix source dest page_size cursor"),
    "drop_router": frozenset(),
    "begin": _names("producer batch ttl_ms create"),
    "stage": _names("txn part chunk records node"),
    "commit": _names("txn parts wait_ms"),
    "abort": frozenset(["txn"]),
    # Of jobs: `publish` is the commit of a plan, `scan` what a job has read of a pinned snapshot.
    "plan": _names("target_bytes min_garbage min_segments max_groups lease_ms lease"),
    "merges": frozenset(),
    "renew": _names("plan_id lease"),
    "publish": _names("plan_id lease wait_ms"),
    "abandon": _names("plan_id lease"),
    "pin": frozenset(["ttl_ms"]),
    "renew_pin": _names("snapshot_id ttl_ms"),
    "release": frozenset(["snapshot_id"]),
    "scan": frozenset(),
    "watch": _names(
        "topics node limit max_batch_bytes heartbeat_ms include_meta include_tags include_data consistency group lenient"
    ),
}
CONSUMER = (
    "topic consumer config created_ts next_seq ack_floor delivered redelivered acked ack_pending in_flight dead_lettered "
    "given_up waiting lag_records lag_ms last_activity_ts paused paused_until_ts stalled tombstone"
)
ROUTER = "router source dest preserve_node preserve_tag filter allow_cycle guarantee"
RECORD = _names("data tag node meta ttl_ms data_base64")

# Required fields, then optional ones. `performance` is in every answer of the server.
ANSWERS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    kind: (frozenset(needed.split()), frozenset(["performance", *other.split()]))
    for kind, needed, other in [
        ("write", "topic first_seq last_seq head_seq count created deduped", "seqs epoch"),
        ("diff", "topic records next_from_seq head_seq earliest_seq caught_up tombstone", "lag epoch"),
        ("delete", "topic deleted earliest_seq head_seq count bytes", ""),
        ("put", "topic created config", ""),
        (
            "state",
            "topic type config head_seq earliest_seq next_seq count bytes effective_priority last_write_ts last_read_ts",
            "queue epoch",
        ),
        ("drop", "topic deleted routers_removed", ""),
        ("list", "topics", "next_cursor"),
        ("last", "topic records head_seq", "next_cursor"),
        ("tags", "topic tags", "next_cursor"),
        ("claim", "topic claimed count ready", "consumer tombstone"),
        ("ack", "topic acked skipped ready in_flight", "consumer"),
        ("nack", "topic nacked skipped ready in_flight", "consumer"),
        ("extend", "topic extended skipped deadlines", "consumer"),
        ("put_consumer", f"{CONSUMER} created", ""),
        ("consumer", CONSUMER, ""),
        ("put_router", f"{ROUTER} created", ""),
        ("router", f"{ROUTER} forwarded_total", ""),
        ("routers", "routers", "next_cursor"),
        ("drop_router", "router deleted", ""),
        ("begin", "topic txn state first_seq last_seq count", "progress"),
        ("stage", "topic part chunk records repeated", ""),
        ("commit", "topic txn state first_seq last_seq count", "progress"),
        ("abort", "topic txn state", ""),
        ("plan", "plan_id groups", "topic topic_id lease lease_ms delete_epoch cold_dir staging"),
        ("merges", "plan retired_segments retired_bytes snapshots manifest committed", ""),
        ("renew", "lease_ms", ""),
        ("publish", "plan_id state", "manifest groups failed progress"),
        ("abandon", "plan_id state", ""),
        (
            "pin",
            "snapshot_id expires_at_ms cold_dir manifest path topic topic_id earliest_seq cold_next_seq head_seq",
            "",
        ),
        ("renew_pin", "snapshot_id expires_at_ms", ""),
        ("release", "snapshot_id released", ""),
        ("scan", "topic records first_seq next_seq", ""),
        ("watch", "wid stream_url session_ttl_ms topics", ""),
    ]
}
SHOWN = _names("$seq $ts $node $tag meta data $encoding headers")
TOMBSTONE = _names("gap_from gap_to reason missed_estimate earliest_seq head_seq")
LISTED = _names("topic head_seq earliest_seq count bytes durable effective_priority type durability")
CONFIG = REQUESTS["put"]
ROUTER_ROW = _names("router source dest guarantee forwarded_total")
EVENTS = _names("kill power stop front full freed error rot clock rest over calm pieces")
JOB = SHOWN - {"$node"} | _names("lease_id deadline deliveries")


_WITHOUT_TOPIC = _names("list watch routers merges renew publish abandon renew_pin release")


class Unknown(ValueError):
    """The history has something that the checker does not know, so its result would be worthless."""


def check_shapes(history: History) -> list[Problem]:
    problems: list[Problem] = []
    for event in history.events:
        if event.kind not in EVENTS:
            raise Unknown(f"event {event.kind!r}")
    for op in history.ops:
        _known_request(op)
        if op.status is None:
            continue
        if not op.ok:
            if not (isinstance(op.answer, dict) and isinstance(op.answer.get("error"), dict)):
                problems.append(
                    Problem("shape", op.topic, f"an error without its body: {name_of(op)}: {op.answer}")
                )
            continue
        text = _answer_fault(op)
        if text:
            problems.append(Problem("shape", op.topic, f"{text}: {name_of(op)}"))
    return problems


def _known_request(op: Op) -> None:
    fields = REQUESTS.get(op.kind)
    if fields is None:
        raise Unknown(f"kind {op.kind!r}")
    if not fields.issuperset(op.request):
        raise Unknown(f"field {sorted(set(op.request) - fields)} of {op.kind}")
    if op.kind in ("write", "stage"):
        for record in op.request["records"]:
            if not RECORD.issuperset(record):
                raise Unknown(f"field {sorted(set(record) - RECORD)} of a record")
        config = op.request.get("config")
        if config and not CONFIG.issuperset(config):
            raise Unknown(f"field {sorted(set(config) - CONFIG)} of a config")


def _answer_fault(op: Op) -> str | None:
    answer = op.answer
    if not isinstance(answer, dict):
        return f"no object: {answer!r}"
    needed, other = ANSWERS[op.kind]
    if not needed.issubset(answer):
        return f"without {sorted(needed - set(answer))}"
    if len(answer) > len(needed) and not other.issuperset(answer.keys() - needed):
        raise Unknown(f"field {sorted(answer.keys() - needed - other)} in the answer to a {op.kind}")
    if op.kind in ("put_router", "router", "drop_router"):
        if answer["router"] != op.topic:
            return f"about the router {answer['router']!r}"
    elif op.kind not in _WITHOUT_TOPIC and answer["topic"] != op.topic:
        return f"about the topic {answer['topic']!r}"
    rows = _ROWS.get(op.kind)
    return rows(answer) if rows else None


def _page_fault(answer: dict[str, Any]) -> str | None:
    for record in answer["records"]:
        if "$seq" not in record or "$ts" not in record:
            return f"a record without $seq or $ts: {record}"
        if not SHOWN.issuperset(record):
            raise Unknown(f"field {sorted(set(record) - SHOWN)} of a shown record")
    tombstone = answer.get("tombstone")
    if tombstone is not None:
        if not TOMBSTONE.issuperset(tombstone):
            raise Unknown(f"field {sorted(set(tombstone) - TOMBSTONE)} of a tombstone")
        if not {"gap_from", "gap_to", "reason"}.issubset(tombstone):
            return f"an incomplete tombstone: {tombstone}"
    return None


def _claim_fault(answer: dict[str, Any]) -> str | None:
    for job in answer["claimed"]:
        if not {"$seq", "$ts", "lease_id", "deadline", "deliveries"}.issubset(job):
            return f"an incomplete job: {job}"
        if not JOB.issuperset(job):
            raise Unknown(f"field {sorted(set(job) - JOB)} of a job")
    return None


def _list_fault(answer: dict[str, Any]) -> str | None:
    for row in answer["topics"]:
        if set(row) != (LISTED | {"ready"} if row.get("type") == "queue" else LISTED):
            return f"a row with the fields {sorted(row)}"
    names = [row["topic"] for row in answer["topics"]]
    return None if names == sorted(set(names)) else "names out of order"


def _tags_fault(answer: dict[str, Any]) -> str | None:
    for row in answer["tags"]:
        if set(row) != {"tag", "count"}:
            return f"a row with the fields {sorted(row)}"
    names = [row["tag"].encode() for row in answer["tags"]]
    return None if names == sorted(set(names)) else "tags out of order"


def _routers_fault(answer: dict[str, Any]) -> str | None:
    for row in answer["routers"]:
        if set(row) != ROUTER_ROW:
            return f"a row with the fields {sorted(row)}"
    names = [row["router"] for row in answer["routers"]]
    return None if names == sorted(set(names)) else "names out of order"


def _config_fault(answer: dict[str, Any]) -> str | None:
    if not CONFIG.issuperset(answer["config"]):
        raise Unknown(f"field {sorted(set(answer['config']) - CONFIG)} of a config")
    return None


_ROWS: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "diff": _page_fault,
    "last": _page_fault,
    "scan": _page_fault,
    "claim": _claim_fault,
    "list": _list_fault,
    "tags": _tags_fault,
    "put": _config_fault,
    "state": _config_fault,
    "routers": _routers_fault,
}


# -- predicates ----------------------------------------------------------------------------------------------

Match = Callable[[str | None], bool]


def match_of(predicate: Any) -> Match | None:
    """Which tags a predicate of a read or of a delete matches."""
    if predicate is None:
        return None
    if isinstance(predicate, str):
        predicate = ["tag", "Glob" if predicate.endswith("*") else "Eq", predicate]
    field, how, text = predicate
    if field != "tag" or how not in ("Eq", "Glob", "Subject"):
        raise Unknown(f"predicate {predicate}")
    if how == "Eq":
        return lambda tag: tag == text
    if how == "Glob":
        prefix = text[:-1]
        return lambda tag: tag is not None and tag.startswith(prefix)
    return lambda tag: tag is not None and subject_matches(text.split("."), tag.split("."))


def subject_matches(pattern: list[str], tokens: list[str]) -> bool:
    if pattern[-1] == ">":
        if len(tokens) < len(pattern):
            return False
        pattern = pattern[:-1]
    elif len(tokens) != len(pattern):
        return False
    return all(part in ("*", token) for part, token in zip(pattern, tokens, strict=False))
